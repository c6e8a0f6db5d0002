/* SPDX-License-Identifier: Apache-2.0 */
/* Races of a grid's threads. Kernels that were compiled with -fsanitize=thread call a hook before
 * each access (instrument.h); the hooks are here.
 *
 * Two accesses to a byte, one of them a store, by two threads, race unless both threads synchronize
 * between them: __syncwarp of their warp (shuffles and votes order no memory),
 * __syncthreads of their block, a barrier of their cluster. Blocks of a grid have none. As each
 * synchronization is of all threads of a warp, block or cluster, one clock is enough: it advances
 * at each, an access is stamped with it, and is ordered before now if its stamp is below the last
 * synchronization that both threads took part in. A byte keeps its last store and two of its loads
 * since, the latest and, of the others, the one whose thread is farthest from that one's; a store
 * that races with any of its loads races with one of these.
 *
 * Under ThreadSanitizer accesses to global memory are also reported to it, as the stream's. */
#include <dlfcn.h>
#include <stdio.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "grid.h"

enum { GRANULE = 4, PAGE_BYTES = 4096, LOADS = 2, CACHED_PAGES = 256, WARPS_MAX = 32 };

struct access {
    uint32_t who, stamp, pc; /* pc: from `emulated_accessed`; stamp 0: none */
};

struct history {
    access store, load[LOADS];
};

/* Of four bytes: one history until an access is of less. */
struct granule {
    history whole;
    history *bytes;
};

struct page {
    granule granules[PAGE_BYTES / GRANULE];
};

static const emulated_state &now = emulated_now;
static uint32_t clock_now, grid_begin, cluster_begin, cluster_synchronized;
static uint32_t block_synchronized[EMULATED_CLUSTER_MAX],
    warp_synchronized[EMULATED_CLUSTER_MAX][WARPS_MAX];
static unsigned rank_bits;

static std::vector<granule> shared[EMULATED_CLUSTER_MAX][2]; /* static, dynamic */
static std::unordered_map<uintptr_t, page *> pages;          /* of global memory, this grid's */
static std::vector<std::unique_ptr<page>> all_pages;         /* used again by the next one */
static size_t n_pages;
static struct {
    uintptr_t number;
    page *of;
} cached[CACHED_PAGES];

/* ---- the order of threads ---- */

static uint32_t whoami()
{
    return ((now.cluster << rank_bits | now.rank) << 10) | now.thread;
}

/* Not before the thread that runs, by any synchronization. `begin`: older stamps are of memory that
 * was another's. */
static bool is_concurrent(const access &a, uint32_t me, uint32_t begin)
{
    uint32_t apart = a.who ^ me;
    if (a.stamp < begin || apart == 0) return false;
    uint32_t since = begin;
    if (apart >> (10 + rank_bits) == 0) since = std::max(since, cluster_synchronized);
    if (apart >> 10 == 0) since = std::max(since, block_synchronized[now.rank]);
    if (apart >> 5 == 0)
        since = std::max(since, warp_synchronized[now.rank][now.thread / EMULATED_WARP]);
    return a.stamp >= since;
}

/* 0: the same thread; then the same warp, block, cluster, grid. */
static int distance(uint32_t a, uint32_t b)
{
    uint32_t apart = a ^ b;
    return apart == 0                       ? 0
           : apart >> 5 == 0                ? 1
           : apart >> 10 == 0               ? 2
           : apart >> (10 + rank_bits) == 0 ? 3
                                            : 4;
}

void emulated_races_synchronized(emulated_scope scope)
{
    uint32_t at = ++clock_now;
    if (scope == emulated_scope::warp)
        warp_synchronized[now.rank][now.thread / EMULATED_WARP] = at;
    else if (scope == emulated_scope::block)
        block_synchronized[now.rank] = at;
    else
        cluster_synchronized = at;
}

void emulated_races_begin_grid()
{
    rank_bits = 0;
    while (1u << rank_bits < now.n_ranks) rank_bits++;
    if (clock_now >= UINT32_MAX / 2) emulated_give_up("too many synchronizations in one program");
    grid_begin = ++clock_now;
}

void emulated_races_end_grid()
{
    if (n_pages == 0) return;
    pages.clear();
    n_pages = 0;
    for (auto &entry : cached) entry = {};
}

void emulated_races_begin_cluster()
{
    cluster_begin = ++clock_now;
}

/* ---- reports ---- */

static char program[1];

/* The command that shows the two lines of source. */
static void print_lines(const access &before, const access &after)
{
    Dl_info info;
    if (!dladdr(program + (int32_t)after.pc, &info) || !info.dli_fname) return;
    const char *base = (const char *)info.dli_fbase + 1; /* calls return behind them */
    fprintf(stderr, "emulated race: addr2line -ie %s %#lx %#lx\n", info.dli_fname,
            (unsigned long)(program + (int32_t)before.pc - base),
            (unsigned long)(program + (int32_t)after.pc - base));
}

[[noreturn]] static void report(const access &before, bool was_store, const access &after,
                                bool is_store, const char *where, const void *p, size_t offset)
{
    uint32_t block = before.who >> 10;
    print_lines(before, after);
    char at[64];
    if (*where)
        snprintf(at, sizeof at, "byte %zu of its %s shared memory", offset, where);
    else
        snprintf(at, sizeof at, "global memory at %p", p);
    emulated_give_up("a race: it %s %s, which thread %u of %s %s before, without a barrier between",
                     is_store ? "writes" : "reads", at, before.who & 1023u,
                     block == after.who >> 10 ? "its block" : "another block",
                     was_store ? "wrote" : "read");
}

/* ---- histories ---- */

struct looked_at {
    const char *where; /* which shared memory; "": global */
    const char *p;
    size_t offset;
    uint32_t begin;
};

static void see(history *h, const access &a, bool is_store, const looked_at &at)
{
    if (!is_store && *at.where && h->store.stamp < at.begin)
        emulated_give_up("reads byte %zu of its %s shared memory, which nothing has written",
                         at.offset, at.where);
    if (is_concurrent(h->store, a.who, at.begin))
        report(h->store, true, a, is_store, at.where, at.p, at.offset);
    if (is_store) {
        for (const access &load : h->load)
            if (is_concurrent(load, a.who, at.begin))
                report(load, false, a, true, at.where, at.p, at.offset);
        *h = {a, {}};
        return;
    }
    access other = {};
    for (const access &load : h->load)
        if (is_concurrent(load, a.who, at.begin) &&
            (other.stamp == 0 || distance(load.who, a.who) > distance(other.who, a.who)))
            other = load;
    h->load[0] = a;
    h->load[1] = other;
}

static void see_granule(granule *g, size_t first, size_t end, const access &a, bool is_store,
                        looked_at at)
{
    if (!g->bytes && first == 0 && end == GRANULE) {
        see(&g->whole, a, is_store, at);
        return;
    }
    if (!g->bytes) {
        g->bytes = new history[GRANULE];
        std::fill_n(g->bytes, (int)GRANULE, g->whole);
    }
    for (size_t i = first; i < end; i++) {
        see(&g->bytes[i], a, is_store, at);
        at.p++;
        at.offset++;
    }
}

static page *find_page(uintptr_t number)
{
    auto *entry = &cached[number % CACHED_PAGES];
    if (entry->number == number && entry->of) return entry->of;
    page *&found = pages[number];
    if (!found) {
        if (n_pages == all_pages.size()) all_pages.emplace_back(new page());
        found = all_pages[n_pages++].get();
        for (granule &g : found->granules) { /* of another page, and of another grid */
            delete[] g.bytes;
            g = {};
        }
    }
    *entry = {number, found};
    return found;
}

static void see_global(const char *p, size_t bytes, const access &a, bool is_store)
{
    looked_at at = {"", p, 0, grid_begin};
    while (bytes > 0) {
        uintptr_t address = (uintptr_t)at.p;
        size_t first = address % GRANULE, n = std::min(GRANULE - first, bytes);
        granule *g = &find_page(address / PAGE_BYTES)->granules[address % PAGE_BYTES / GRANULE];
        see_granule(g, first, first + n, a, is_store, at);
        at.p += n;
        bytes -= n;
    }
}

static void see_shared(const emulated_place &place, const char *p, size_t bytes, const access &a,
                       bool is_store)
{
    if (place.is_dynamic && place.offset + bytes > now.grid.shared_bytes)
        emulated_give_up("%s byte %td of %zu bytes of dynamic shared memory",
                         is_store ? "writes" : "reads", (ptrdiff_t)(place.offset + bytes - 1),
                         now.grid.shared_bytes);
    if (emulated_is_pending(place, bytes))
        emulated_give_up("%s byte %zu of its %s shared memory, on its way by an asynchronous copy",
                         is_store ? "writes" : "reads", place.offset,
                         place.is_dynamic ? "dynamic" : "static");
    emulated_banks_note(place.offset, bytes, a.pc);
    auto &granules = shared[place.rank][place.is_dynamic];
    if (granules.empty())
        granules.resize(
            (place.is_dynamic ? (size_t)EMULATED_SHARED_MAX : emulated_section_bytes()) / GRANULE +
            2);
    looked_at at = {place.is_dynamic ? "dynamic" : "static", p, place.offset, cluster_begin};
    while (bytes > 0) {
        size_t first = at.offset % GRANULE, n = std::min(GRANULE - first, bytes);
        see_granule(&granules[at.offset / GRANULE], first, first + n, a, is_store, at);
        at.offset += n;
        at.p += n;
        bytes -= n;
    }
}

void emulated_accessed(const void *p, size_t bytes, bool is_store, const void *pc)
{
    access a = {whoami(), clock_now, (uint32_t)((const char *)pc - program)};
    emulated_place place = emulated_find_place((const char *)p);
    if (place.is_shared)
        see_shared(place, (const char *)p, bytes, a, is_store);
    else
        see_global((const char *)p, bytes, a, is_store);
}
