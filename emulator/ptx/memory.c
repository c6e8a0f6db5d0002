/* SPDX-License-Identifier: Apache-2.0 */
/* Accesses to memory: bounds and alignment of all; of shared memory also races, loads of what
 * nothing has written, and asynchronous copies that have not arrived.
 *
 * Two accesses to a byte race when one is a store, the threads differ, and neither a barrier of
 * their block or cluster nor, within a warp, a bar.warp.sync is between them: shuffles and products
 * order nothing. The search does not depend on the order in which threads happened to run. */
#include <stdlib.h>
#include <string.h>

#include "../runtime.h"
#include "ptx.h"

/* Generic addresses of shared memory: no user's address on x86-64 and aarch64. */
#define SHARED_WINDOW (1ull << 62)
enum { RANK_SHIFT = 24 };

uint64_t ptx_generic_shared(unsigned rank, uint64_t offset)
{
    return SHARED_WINDOW | (uint64_t)rank << RANK_SHIFT | offset;
}

uint64_t ptx_map_shared(const ptx_cluster *c, const ptx_thread *t, uint64_t address, uint64_t rank,
                        int line)
{
    if (!(address & SHARED_WINDOW) || (uint32_t)rank >= c->n_ranks)
        ptx_fault(c, t, line, "mapa of %#llx to block %u of the cluster",
                  (unsigned long long)address, (unsigned)rank);
    return ptx_generic_shared((unsigned)rank, address & ((1u << RANK_SHIFT) - 1));
}

/* ---- races ---- */

/* How far two threads are apart: 0 the same, 1 a warp's, 2 a block's, 3 a cluster's. */
static int distance(const ptx_cluster *c, unsigned a, unsigned b)
{
    unsigned n = c->grid->n_threads;
    if (a == b) return 0;
    if (a / n != b / n) return 3;
    return a / PTX_WARP == b / PTX_WARP ? 1 : 2;
}

/* Whether an access so far away, at `stamp`, may be at the same time as thread t's now. */
static bool is_unordered(const ptx_cluster *c, const ptx_thread *t, int apart, uint32_t stamp)
{
    return apart > 0 && stamp >= c->cluster_synced &&
           (apart > 2 || stamp >= c->block_synced[t->id / c->grid->n_threads]) &&
           (apart > 1 || stamp >= c->warp_synced[t->id / PTX_WARP]);
}

_Noreturn static void tell_race(const ptx_cluster *c, const ptx_thread *t, int line,
                                const char *what, uint64_t offset, unsigned other, int other_line)
{
    ptx_fault(c, t, line, "race: %s shared byte %llu, which thread %u of block %u %s in line %d",
              what, (unsigned long long)offset, other % c->grid->n_threads,
              other / c->grid->n_threads, "accesses, with no barrier between them,", other_line);
}

static void note_load(ptx_cluster *c, ptx_thread *t, ptx_shadow *s, uint64_t offset, int line)
{
    int apart = distance(c, s->writer, t->id);
    if (s->is_in_flight)
        ptx_fault(c, t, line, "loads shared byte %llu before its cp.async (line %d) was waited for",
                  (unsigned long long)offset, s->write_line);
    if (s->written_at == 0)
        ptx_fault(c, t, line, "loads shared byte %llu, which nothing has written",
                  (unsigned long long)offset);
    if (is_unordered(c, t, apart, s->written_at))
        tell_race(c, t, line, "loads", offset, s->writer, s->write_line);
    int from_reader = s->read_at ? distance(c, s->reader, t->id) : 0;
    if (from_reader > s->readers || !is_unordered(c, t, s->readers, s->read_at))
        s->readers = is_unordered(c, t, from_reader, s->read_at) ? (uint8_t)from_reader : 0;
    s->reader = (uint16_t)t->id;
    s->read_at = c->clock;
    s->read_line = line;
}

static void note_store(ptx_cluster *c, ptx_thread *t, ptx_shadow *s, uint64_t offset, int line)
{
    int from_reader = distance(c, s->reader, t->id);
    if (s->is_in_flight)
        ptx_fault(c, t, line, "stores to shared byte %llu while a cp.async (line %d) is in flight",
                  (unsigned long long)offset, s->write_line);
    if (s->written_at && is_unordered(c, t, distance(c, s->writer, t->id), s->written_at))
        tell_race(c, t, line, "stores to", offset, s->writer, s->write_line);
    if (s->read_at && (is_unordered(c, t, from_reader, s->read_at) ||
                       (from_reader <= s->readers && is_unordered(c, t, s->readers, s->read_at))))
        tell_race(c, t, line, "stores to", offset, s->reader, s->read_line);
    s->writer = (uint16_t)t->id;
    s->written_at = c->clock;
    s->write_line = line;
}

/* ---- accesses ---- */

/* Where the bytes are; of shared memory also *shadow, and *offset in its block; else NULL. */
static unsigned char *find_bytes(ptx_cluster *c, ptx_thread *t, ptx_space space, uint64_t address,
                                 int bytes, int line, ptx_shadow **shadow, uint64_t *offset)
{
    unsigned rank = t->id / c->grid->n_threads;
    *shadow = NULL;
    if (address % (unsigned)bytes != 0)
        ptx_fault(c, t, line, "%d bytes at %#llx are not aligned", bytes,
                  (unsigned long long)address);
    if (space == PTX_GENERIC && address & SHARED_WINDOW) {
        rank = (unsigned)(address >> RANK_SHIFT) % PTX_CLUSTER_MAX;
        address &= (1u << RANK_SHIFT) - 1;
        space = PTX_SHARED;
        if (c->threads[rank * c->grid->n_threads].state == PTX_ENDED)
            ptx_fault(c, t, line, "accesses shared memory of a block that may have ended");
    }
    if (space == PTX_SHARED) {
        address = (uint32_t)address;
        if (address + (uint64_t)bytes > c->shared_bytes ||
            (address < PTX_DYNAMIC_AT &&
             address + (uint64_t)bytes > (uint64_t)c->kernel->static_bytes))
            ptx_fault(c, t, line, "shared byte %llu is past the end", (unsigned long long)address);
        *offset = address;
        *shadow = c->shadow + rank * c->shared_bytes + address;
        return c->shared + rank * c->shared_bytes + address;
    }
    for (int r = 0; r < c->grid->n_regions; r++)
        if (address >= c->grid->regions[r].begin &&
            address + (uint64_t)bytes <= c->grid->regions[r].end)
            return (unsigned char *)(uintptr_t)address;
    ptx_fault(c, t, line, "%d bytes at %#llx are in no buffer of the kernel's", bytes,
              (unsigned long long)address);
}

void ptx_load(ptx_cluster *c, ptx_thread *t, ptx_space space, uint64_t address, int bytes, int line,
              void *out)
{
    ptx_shadow *shadow;
    uint64_t offset;
    memcpy(out, find_bytes(c, t, space, address, bytes, line, &shadow, &offset), (size_t)bytes);
    for (int k = 0; shadow && k < bytes; k++)
        note_load(c, t, shadow + k, offset + (uint64_t)k, line);
}

void ptx_store(ptx_cluster *c, ptx_thread *t, ptx_space space, uint64_t address, int bytes,
               int line, const void *in)
{
    ptx_shadow *shadow;
    uint64_t offset;
    memcpy(find_bytes(c, t, space, address, bytes, line, &shadow, &offset), in, (size_t)bytes);
    for (int k = 0; shadow && k < bytes; k++)
        note_store(c, t, shadow + k, offset + (uint64_t)k, line);
}

/* ---- asynchronous copies ---- */

void ptx_copy_begin(ptx_cluster *c, ptx_thread *t, const ptx_instruction *i)
{
    ptx_shadow *shadow;
    uint64_t offset, n_valid = (uint32_t)ptx_get(c, t, i->operands[3]);
    ptx_copy copy = {.bytes = (int)ptx_get(c, t, i->operands[2]), .group = t->group};
    copy.line = i->line;
    (void)find_bytes(c, t, PTX_SHARED, ptx_get(c, t, i->operands[0]), copy.bytes, i->line, &shadow,
                     &offset);
    if (n_valid > (uint64_t)copy.bytes)
        ptx_fault(c, t, i->line, "cp.async of %llu bytes of %d", (unsigned long long)n_valid,
                  copy.bytes);
    if (n_valid > 0) {
        ptx_shadow *none;
        uint64_t at;
        const unsigned char *source = find_bytes(c, t, PTX_GLOBAL, ptx_get(c, t, i->operands[1]),
                                                 copy.bytes, i->line, &none, &at);
        memcpy(copy.data, source, (size_t)n_valid);
    }
    copy.at = (uint32_t)offset;
    for (int k = 0; k < copy.bytes; k++) {
        note_store(c, t, shadow + k, offset + (uint64_t)k, i->line);
        shadow[k].is_in_flight = true;
    }
    if (t->n_copies == t->copies_room) {
        t->copies_room = 2 * t->copies_room + 16;
        t->copies = realloc(t->copies, (size_t)t->copies_room * sizeof copy);
        if (!t->copies) emulated_fatal("PTX: out of memory");
    }
    t->copies[t->n_copies++] = copy;
}

void ptx_copy_wait(ptx_cluster *c, ptx_thread *t, int n_left)
{
    size_t of_block = t->id / c->grid->n_threads * c->shared_bytes;
    int n_kept = 0;
    for (int n = 0; n < t->n_copies; n++) {
        const ptx_copy *copy = &t->copies[n];
        if (copy->group >= t->group - n_left) {
            t->copies[n_kept++] = *copy;
            continue;
        }
        memcpy(c->shared + of_block + copy->at, copy->data, (size_t)copy->bytes);
        for (int k = 0; k < copy->bytes; k++) {
            ptx_shadow *s = c->shadow + of_block + copy->at + (size_t)k;
            s->is_in_flight = false;
            note_store(c, t, s, copy->at + (uint64_t)k, copy->line);
        }
    }
    t->n_copies = n_kept;
}
