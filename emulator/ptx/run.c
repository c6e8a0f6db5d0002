/* SPDX-License-Identifier: Apache-2.0 */
/* A grid, cluster by cluster, and a block warp by warp: a thread runs until an instruction of its
 * warp, a barrier, or its end; the last one to arrive releases the others. Shared memory is 0xff
 * until it is written. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../runtime.h"
#include "ptx.h"

void ptx_fault(const ptx_cluster *c, const ptx_thread *t, int line, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ptx_fail(c->kernel->path, line, "%s: block %u, thread %u: %s", c->kernel->name,
             c->index * c->n_ranks + t->id / c->grid->n_threads, t->id % c->grid->n_threads, text);
}

static int line_of(const ptx_cluster *c, const ptx_thread *t)
{
    int at = t->state == PTX_AT_WARP ? t->at : t->at - 1;
    return c->kernel->instructions[at].line;
}

static void *allocate(size_t n, size_t bytes)
{
    void *memory = calloc(n, bytes);
    if (!memory) emulated_fatal("PTX: out of memory");
    return memory;
}

/* Until the warp's threads wait for others, or have ended. */
static void run_warp(ptx_cluster *c, ptx_thread *warp)
{
    for (;;) {
        int n_met = 0, n_at_warp = 0;
        for (int lane = 0; lane < PTX_WARP; lane++)
            if (warp[lane].state == PTX_RUNS) ptx_advance(c, &warp[lane]);
        for (int lane = 0; lane < PTX_WARP; lane++) {
            n_at_warp += warp[lane].state == PTX_AT_WARP;
            n_met += warp[lane].state == warp->state && warp[lane].at == warp->at;
        }
        if (n_at_warp == 0) return;
        for (int lane = 0; n_met < PTX_WARP && lane < PTX_WARP; lane++)
            if (warp[lane].state != warp->state || warp[lane].at != warp->at)
                ptx_fault(c, warp, line_of(c, warp),
                          "its warp does not meet: lane %d %s in line %d", lane,
                          warp[lane].state == PTX_ENDED ? "ended" : "waits",
                          line_of(c, &warp[lane]));
        ptx_together(c, warp, &c->kernel->instructions[warp->at]);
        for (int lane = 0; lane < PTX_WARP; lane++) {
            warp[lane].at++;
            warp[lane].state = PTX_RUNS;
        }
    }
}

/* Whether all of the n threads that have not ended wait there, and some do; they are released. */
static bool release(ptx_thread *threads, unsigned n, ptx_state where)
{
    unsigned n_waiting = 0, n_ended = 0;
    for (unsigned i = 0; i < n; i++) {
        n_waiting += threads[i].state == where;
        n_ended += threads[i].state == PTX_ENDED;
    }
    if (n_waiting == 0 || n_waiting + n_ended < n) return false;
    for (unsigned i = 0; i < n; i++) {
        if (threads[i].state != where) continue;
        threads[i].state = PTX_RUNS;
        if (where == PTX_AT_CLUSTER) threads[i].has_arrived = false;
    }
    return true;
}

static void run_block(ptx_cluster *c, unsigned rank)
{
    ptx_thread *threads = c->threads + rank * c->grid->n_threads;
    do {
        for (unsigned w = 0; w < c->n_warps; w++) run_warp(c, threads + w * PTX_WARP);
        c->block_synced[rank] = ++c->clock; /* holds only where the loop continues */
    } while (release(threads, c->grid->n_threads, PTX_AT_BLOCK));
}

static void forget_shared(ptx_cluster *c, unsigned rank, size_t at, size_t bytes)
{
    memset(c->shared + rank * c->shared_bytes + at, 0xff, bytes);
    memset(c->shadow + rank * c->shared_bytes + at, 0, bytes * sizeof *c->shadow);
}

static void begin_cluster(ptx_cluster *c)
{
    const ptx_grid *g = c->grid;
    for (unsigned rank = 0; rank < c->n_ranks; rank++) {
        forget_shared(c, rank, 0, (size_t)c->kernel->static_bytes);
        forget_shared(c, rank, PTX_DYNAMIC_AT, g->shared_bytes);
    }
    for (unsigned i = 0; i < c->n_ranks * g->n_threads; i++) {
        ptx_thread *t = &c->threads[i];
        unsigned rank = i / g->n_threads;
        t->id = i;
        t->at = t->group = t->n_copies = 0;
        t->state = PTX_RUNS;
        t->has_arrived = false;
        t->registers[PTX_TID] = i % g->n_threads;
        t->registers[PTX_NTID] = g->n_threads;
        t->registers[PTX_CTAID] = c->index * c->n_ranks + rank;
        t->registers[PTX_NCTAID] = g->n_blocks;
        t->registers[PTX_CLUSTER_RANK] = rank;
        t->registers[PTX_CLUSTER_BLOCKS] = c->n_ranks;
    }
}

static void run_cluster(ptx_cluster *c)
{
    unsigned n_all = c->n_ranks * c->grid->n_threads;
    begin_cluster(c);
    do {
        for (unsigned rank = 0; rank < c->n_ranks; rank++) run_block(c, rank);
        c->cluster_synced = ++c->clock;
    } while (release(c->threads, n_all, PTX_AT_CLUSTER));
    for (unsigned i = 0; i < n_all; i++)
        if (c->threads[i].state != PTX_ENDED)
            ptx_fault(c, &c->threads[i], line_of(c, &c->threads[i]),
                      "waits at a barrier that not all threads reach");
}

void ptx_run(const ptx_kernel *kernel, const ptx_grid *grid)
{
    ptx_cluster c = {.kernel = kernel, .grid = grid, .n_ranks = grid->n_clustered, .clock = 1};
    size_t n_threads = (size_t)c.n_ranks * grid->n_threads;
    if (grid->n_threads % PTX_WARP != 0 || c.n_ranks > PTX_CLUSTER_MAX)
        ptx_fail(kernel->path, 0, "%s: %u threads, clusters of %u", kernel->name, grid->n_threads,
                 c.n_ranks);
    c.n_warps = grid->n_threads / PTX_WARP;
    c.shared_bytes = PTX_DYNAMIC_AT + grid->shared_bytes;
    c.shared = allocate(c.n_ranks, c.shared_bytes);
    c.shadow = allocate(c.n_ranks * c.shared_bytes, sizeof *c.shadow);
    c.threads = allocate(n_threads, sizeof *c.threads);
    c.warp_synced = allocate(n_threads / PTX_WARP, sizeof *c.warp_synced);
    uint64_t *registers = allocate(n_threads * (size_t)kernel->n_registers, sizeof *registers);
    for (size_t i = 0; i < n_threads; i++)
        c.threads[i].registers = registers + i * (size_t)kernel->n_registers;
    for (; c.index < grid->n_blocks / c.n_ranks; c.index++) run_cluster(&c);
    for (size_t i = 0; i < n_threads; i++) free(c.threads[i].copies);
    free(registers), free(c.warp_synced), free(c.threads), free(c.shadow), free(c.shared);
}
