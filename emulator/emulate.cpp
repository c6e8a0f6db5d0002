/* SPDX-License-Identifier: Apache-2.0 */
/* A grid, block by block, and a block warp by warp: threads are coroutines, resumed in a random
 * order until each waits or has ended. The last thread at a barrier, or at a warp operation,
 * releases the others. A warp runs on until its block's other warps are needed, so that its stacks
 * stay in the cache; a thread that ends leaves its stack to the next one that begins, so that
 * kernels without barriers run on one. */
#include <cxxabi.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <map>
#include <memory>
#include <vector>

#include "coroutine.h"
#include "counts.h"
#include "grid.h"
#include "lock.h"
#include "ptx/launch.h"
#include "queue.h"

/* What a thread of a block waits for; nothing: it can run. */
enum class waits_for : uint8_t { begin, nothing, block, warp, cluster, end };

enum {
    STACK_BYTES = 128 << 10,
    STACK_GUARD_BYTES = 64 << 10, /* whole pages on every machine */
    STACK_STEP = STACK_GUARD_BYTES + STACK_BYTES,
    STACKS_MAX = EMULATED_CLUSTER_MAX * EMULATED_THREADS_MAX,
    SHARED_PLAIN_MAX = 48 << 10,
    BLOCKS_YZ_MAX = 65535,
    WARPS_MAX = EMULATED_THREADS_MAX / EMULATED_WARP
};

struct emulated_thread {
    coroutine_state here;
    emulated_index index;
};

/* An operation that waits for the rest of its warp, with the operands of the lanes that are there.
 */
struct warp_operation {
    emulated_together *together;
    unsigned n_waiting;
    void *lanes[EMULATED_WARP];
};

#define INDEX __attribute__((section("emulated_indices"))) emulated_index
INDEX threadIdx, blockIdx, blockDim, gridDim;
emulated_state emulated_now;
char *emulated_stacks, *emulated_stacks_end;

static emulated_state &now = emulated_now;
static std::function<void()> body;
/* Of a cluster, block by block. */
static std::vector<emulated_thread> threads;
static waits_for states[STACKS_MAX];
/* Those of the block that runs. */
static emulated_thread *block_threads;
static waits_for *block_states;
/* Stacks that have memory; those of them that no thread is on. */
static size_t n_stacks;
static std::vector<unsigned> free_stacks;
/* How many threads of each block wait. */
static unsigned n_at_barrier[EMULATED_CLUSTER_MAX], n_ended[EMULATED_CLUSTER_MAX];
static warp_operation operations[EMULATED_CLUSTER_MAX][WARPS_MAX];
/* Of the warp that runs: the threads of this round, of which n_resumed have begun to run. */
static unsigned ready[EMULATED_WARP];
static unsigned n_ready, n_resumed;
static coroutine_state scheduler;
static uint64_t random_state;

/* ---- errors ---- */

static void print_kernel()
{
    Dl_info info;
    char *name = nullptr;
    int status;
    if (dladdr(now.grid.kernel, &info) && info.dli_sname)
        name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    fprintf(stderr, "emulated kernel %s (%p), block (%u, %u, %u) of (%u, %u, %u)",
            name ? name : "?", now.grid.kernel, blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x,
            gridDim.y, gridDim.z);
    if (now.in_thread) fprintf(stderr, ", thread %u", now.thread);
    fprintf(stderr, ": ");
}

void emulated_give_up(const char *format, ...)
{
    va_list arguments;
    print_kernel();
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    abort();
}

/* ---- the order of threads and blocks ---- */

static uint64_t random_bits()
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static unsigned random_below(unsigned n)
{
    return (unsigned)((random_bits() >> 32) * n >> 32);
}

/* Of each launch anew; one in four has threads in order, one in reverse. */
enum { FORWARDS, BACKWARDS, SHUFFLED };

static int choose_order()
{
    static bool has_begun;
    if (!has_begun) {
        random_state = emulated_seed();
        has_begun = true;
    }
    unsigned choice = random_below(4);
    return choice < SHUFFLED ? (int)choice : SHUFFLED;
}

/* 0 .. n - 1 */
static void put_in_order(unsigned n, int order, unsigned *out)
{
    for (unsigned i = 0; i < n; i++) out[i] = order == BACKWARDS ? n - 1 - i : i;
    if (order == SHUFFLED)
        for (unsigned i = n; i > 1; i--) std::swap(out[i - 1], out[random_below(i)]);
}

/* Which lane is the i-th: (i * factor + offset) % 32, with an odd factor. */
struct lane_order {
    unsigned factor, offset;
};

static lane_order lanes_in_order(int order)
{
    if (order == FORWARDS) return {1, 0};
    if (order == BACKWARDS) return {EMULATED_WARP - 1, EMULATED_WARP - 1};
    uint64_t bits = random_bits();
    return {(unsigned)(bits >> 32) | 1, (unsigned)bits};
}

/* i -> (i * factor + offset) % n visits every block once. */
struct permutation {
    uint64_t n, factor, offset;
};

static permutation permutation_of(uint64_t n)
{
    permutation p = {n, 1, random_bits() % n};
    for (int i = 0; i < 16; i++) {
        uint64_t factor = (random_bits() % n) | 1, a = factor, b = n;
        while (b != 0) {
            uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1 && n > 1) {
            p.factor = factor % n;
            break;
        }
    }
    return p;
}

static uint64_t permuted(permutation p, uint64_t i)
{
    return (uint64_t)(((unsigned __int128)i * p.factor + p.offset) % p.n);
}

/* ---- waiting ---- */

static bool all_wait_for(waits_for state, const waits_for *first, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (first[i] != state) return false;
    return true;
}

static void release(waits_for *first, unsigned n, waits_for state)
{
    for (unsigned i = 0; i < n; i++) first[i] = first[i] == state ? waits_for::nothing : first[i];
}

/* Below each stack is an inaccessible guard page: an overflow stops the program. */
static unsigned take_stack()
{
    if (!free_stacks.empty()) {
        unsigned stack = free_stacks.back();
        free_stacks.pop_back();
        return stack;
    }
    if (n_stacks == STACKS_MAX ||
        mprotect(emulated_stacks + n_stacks * STACK_STEP + STACK_GUARD_BYTES, STACK_BYTES,
                 PROT_READ | PROT_WRITE) != 0)
        emulated_give_up("no memory for a stack");
    return (unsigned)n_stacks++;
}

/* That the caller is on. */
static unsigned own_stack()
{
    return (unsigned)(((char *)__builtin_frame_address(0) - emulated_stacks) / STACK_STEP);
}

static void run_threads();

static void begin_thread(emulated_thread *thread)
{
    unsigned stack = take_stack();
    size_t color =
        stack % 61 * 64; /* the same place of each stack would be the same lines of the cache */
    coroutine_begin(&thread->here, emulated_stacks + stack * STACK_STEP + STACK_GUARD_BYTES,
                    STACK_BYTES - color, run_threads);
}

/* The round's next thread becomes the one that runs; it has begun, or does now. */
static inline emulated_thread *enter_next()
{
    unsigned t = ready[n_resumed++];
    emulated_thread *thread = &block_threads[t];
    threadIdx = thread->index;
    now.thread = t;
    return thread;
}

/* Its place. */
static const coroutine_state *next_thread()
{
    emulated_thread *thread = enter_next();
    if (block_states[now.thread] == waits_for::begin) {
        block_states[now.thread] = waits_for::nothing;
        begin_thread(thread);
    }
    return &thread->here;
}

/* To the round's next thread, or after the last one to the scheduler. */
static void suspend()
{
    coroutine_state *here = &block_threads[now.thread].here;
    emulated_switch(here, n_resumed < n_ready ? next_thread() : &scheduler);
}

/* Threads that have ended are not waited for. */
static void release_block_if_all_wait()
{
    unsigned *n_waiting = &n_at_barrier[now.rank];
    if (*n_waiting == 0 || *n_waiting + n_ended[now.rank] < now.n_threads) return;
    release(block_states, now.n_threads, waits_for::block);
    *n_waiting = 0;
    emulated_banks_count();
    emulated_races_synchronized(emulated_scope::block);
}

void __syncthreads()
{
    waits_for *mine = &block_states[now.thread];
    *mine = waits_for::block;
    n_at_barrier[now.rank]++;
    release_block_if_all_wait();
    if (*mine != waits_for::nothing) suspend();
}

static void nothing_together(void *const *) {}

void emulated_warp_together(emulated_together *together, void *mine)
{
    unsigned t = now.thread, lane = t % EMULATED_WARP, first = t - lane,
             n = std::min<unsigned>(EMULATED_WARP, now.n_threads - first);
    warp_operation *operation = &operations[now.rank][t / EMULATED_WARP];
    if (operation->n_waiting == 0)
        operation->together = together;
    else if (operation->together != together)
        emulated_give_up("the threads of a warp do different things together");
    operation->lanes[lane] = mine;
    if (++operation->n_waiting < n) {
        block_states[t] = waits_for::warp;
        suspend();
        return;
    }
    operation->n_waiting = 0;
    now.in_thread = false;
    together(operation->lanes);
    now.in_thread = true;
    {
        unseen_work unseen;
        std::fill_n(block_states + first, n, waits_for::nothing); /* all of them are here */
    }
    if (together == nothing_together) emulated_races_synchronized(emulated_scope::warp);
}

void emulated_sync_warp()
{
    emulated_warp_together(nothing_together, nullptr);
}

void emulated_demand_whole_warp(unsigned mask)
{
    if (mask != 0xffffffffu) emulated_give_up("mask %08x: only whole warps are emulated", mask);
}

struct exchange {
    const void *mine;
    size_t bytes;
    char *all;
};

static void exchange_together(void *const lanes[EMULATED_WARP])
{
    unseen_work unseen; /* between the threads' stacks */
    for (int to = 0; to < EMULATED_WARP; to++)
        for (int from = 0; from < EMULATED_WARP; from++) {
            if (!lanes[to] || !lanes[from]) continue;
            const exchange *source = (const exchange *)lanes[from];
            if (source->bytes != ((const exchange *)lanes[to])->bytes)
                emulated_give_up("lanes %d and %d exchange different sizes", from, to);
            memcpy(((exchange *)lanes[to])->all + from * source->bytes, source->mine,
                   source->bytes);
        }
}

void emulated_warp_exchange(const void *mine, size_t bytes, void *all)
{
    exchange e = {mine, bytes, (char *)all};
    emulated_warp_together(exchange_together, &e);
}

/* ---- clusters ---- */

void emulated_sync_cluster()
{
    block_states[now.thread] = waits_for::cluster;
    suspend();
}

unsigned emulated_cluster_blocks()
{
    return now.n_ranks;
}

unsigned emulated_cluster_rank()
{
    return now.rank;
}

/* ---- blocks ---- */

/* From a thread's beginning to its end, and on this stack all that begin right after it. */
static void run_threads()
{
    for (;;) {
        body();
        emulated_shared_check_copies_end();
        block_states[now.thread] = waits_for::end;
        n_ended[now.rank]++;
        release_block_if_all_wait();
        if (n_resumed == n_ready || block_states[ready[n_resumed]] != waits_for::begin) break;
        enter_next();
        block_states[now.thread] = waits_for::nothing;
    }
    free_stacks.push_back(own_stack()); /* no thread begins before this one has left it */
    suspend();
}

/* Every thread of the round, until it waits or has ended. */
static void run_round()
{
    n_resumed = 0;
    const coroutine_state *first = next_thread();
    now.in_thread = true;
    unseen_end();
    emulated_switch(&scheduler, first);
    unseen_begin();
    now.in_thread = false;
}

[[noreturn]] static void report_deadlock(unsigned waiting)
{
    const waits_for *first = block_states;
    unsigned begin = 0, end = now.n_threads;
    if (first[waiting] == waits_for::warp) {
        begin = waiting - waiting % EMULATED_WARP;
        end = std::min(begin + EMULATED_WARP, now.n_threads);
    }
    unsigned other = begin;
    while (other + 1 < end && first[other] == first[waiting]) other++;
    emulated_give_up("thread %u waits at a %s that not all threads reach: thread %u %s", waiting,
                     first[waiting] == waits_for::warp ? "shuffle" : "barrier", other,
                     first[other] == waits_for::end ? "has ended" : "waits elsewhere");
}

/* The lanes of the warp that may run. False: none. */
static bool collect_ready(unsigned warp, int order)
{
    unsigned first = warp * EMULATED_WARP,
             n = std::min<unsigned>(EMULATED_WARP, now.n_threads - first);
    lane_order lanes = lanes_in_order(order);
    n_ready = 0;
    for (unsigned i = 0; i < EMULATED_WARP; i++) {
        unsigned lane = (i * lanes.factor + lanes.offset) % EMULATED_WARP;
        if (lane < n && block_states[first + lane] <= waits_for::nothing)
            ready[n_ready++] = first + lane;
    }
    return n_ready > 0;
}

/* Until all threads have ended or wait for their cluster. */
static void run_block(int order)
{
    unsigned warps[WARPS_MAX], n_warps = (now.n_threads + EMULATED_WARP - 1) / EMULATED_WARP;
    for (bool has_run = true; has_run;) {
        has_run = false;
        put_in_order(n_warps, order, warps);
        for (unsigned w = 0; w < n_warps; w++)
            for (; collect_ready(warps[w], order); has_run = true) run_round();
    }
    for (unsigned t = 0; t < now.n_threads; t++)
        if (block_states[t] == waits_for::block || block_states[t] == waits_for::warp)
            report_deadlock(t);
}

static void begin_cluster()
{
    std::fill_n(states, threads.size(), waits_for::begin);
    std::fill_n(n_at_barrier, now.n_ranks, 0u);
    std::fill_n(n_ended, now.n_ranks, 0u);
    emulated_shared_begin();
    emulated_races_begin_cluster();
}

static void run_cluster(int order)
{
    unsigned per_row = gridDim.x / now.n_ranks, row = now.cluster / per_row,
             first = now.cluster % per_row * now.n_ranks;
    begin_cluster();
    for (;;) {
        permutation ranks = permutation_of(now.n_ranks);
        for (unsigned i = 0; i < now.n_ranks; i++) {
            now.rank = (unsigned)permuted(ranks, i);
            block_threads = &threads[(size_t)now.rank * now.n_threads];
            block_states = &states[(size_t)now.rank * now.n_threads];
            blockIdx = {first + now.rank, row % gridDim.y, row / gridDim.y};
            emulated_shared_enter();
            run_block(order);
            emulated_count_sectors();
            emulated_banks_count();
            emulated_shared_leave();
        }
        unsigned n_all = (unsigned)threads.size();
        if (all_wait_for(waits_for::end, states, n_all)) return;
        if (!all_wait_for(waits_for::cluster, states, n_all))
            emulated_give_up("a cluster's barrier that not all threads reach");
        release(states, n_all, waits_for::cluster);
        emulated_races_synchronized(emulated_scope::cluster);
    }
}

/* ---- launches ---- */

static void reserve_stacks()
{
    const size_t all_bytes = (size_t)STACKS_MAX * STACK_STEP;
    if (emulated_stacks) return;
    void *memory =
        mmap(nullptr, all_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) emulated_give_up("no memory for stacks");
    emulated_stacks = (char *)memory;
    emulated_stacks_end = emulated_stacks + all_bytes;
}

static std::map<const void *, int> most_shared;
static unseen_lock most_shared_lock;

static int shared_limit()
{
    return (emulated_capability() >= 90 ? 227 : 163)
           << 10; /* Programming Guide, table of compute capabilities */
}

cudaError_t emulated_set_most_shared(const void *kernel, int bytes)
{
    if (bytes < 0 || bytes > shared_limit()) return cudaErrorInvalidValue;
    unseen_guard guard(&most_shared_lock);
    most_shared[kernel] = bytes;
    return cudaSuccess;
}

static cudaError_t check_launch(const emulated_grid &g)
{
    uint64_t per_block = (uint64_t)g.threads.x * g.threads.y * g.threads.z;
    if (per_block == 0 || per_block > EMULATED_THREADS_MAX || g.threads.z > 64)
        return cudaErrorInvalidConfiguration;
    if (g.blocks.x == 0 || g.blocks.x > INT32_MAX || g.blocks.y == 0 || g.blocks.z == 0 ||
        g.blocks.y > BLOCKS_YZ_MAX || g.blocks.z > BLOCKS_YZ_MAX)
        return cudaErrorInvalidConfiguration;
    if ((uint64_t)g.blocks.x * g.blocks.y * g.blocks.z > UINT32_MAX)
        return cudaErrorInvalidConfiguration; /* the emulator's limit */
    if (g.n_clustered > 1 && (emulated_capability() < 90 || g.n_clustered > EMULATED_CLUSTER_MAX ||
                              g.blocks.x % g.n_clustered != 0))
        return cudaErrorInvalidConfiguration;
    unseen_guard guard(&most_shared_lock);
    auto most = most_shared.find(g.kernel);
    size_t allowed = SHARED_PLAIN_MAX;
    if (most != most_shared.end() && (size_t)most->second > allowed) allowed = (size_t)most->second;
    return g.shared_bytes <= allowed ? cudaSuccess : cudaErrorInvalidValue;
}

static void run_grid(const emulated_grid &g)
{
    now = {};
    now.grid = g;
    gridDim = {g.blocks.x, g.blocks.y, g.blocks.z};
    blockDim = {g.threads.x, g.threads.y, g.threads.z};
    now.n_threads = blockDim.x * blockDim.y * blockDim.z;
    now.n_ranks = std::max(1u, g.n_clustered);
    threads.resize((size_t)now.n_threads * now.n_ranks);
    for (unsigned i = 0; i < threads.size(); i++) {
        unsigned t = i % now.n_threads;
        threads[i].index = {t % blockDim.x, t / blockDim.x % blockDim.y,
                            t / blockDim.x / blockDim.y};
    }
    for (unsigned rank = 0; rank < now.n_ranks; rank++)
        std::fill_n(operations[rank], (now.n_threads + EMULATED_WARP - 1) / EMULATED_WARP,
                    warp_operation{});
    reserve_stacks();
    int order = choose_order();
    uint64_t n_clusters = (uint64_t)gridDim.x / now.n_ranks * gridDim.y * gridDim.z;
    permutation clusters = permutation_of(n_clusters);
    emulated_races_begin_grid();
    for (; now.n_finished < n_clusters; now.n_finished++) {
        now.cluster = (unsigned)permuted(clusters, now.n_finished);
        run_cluster(order);
    }
    emulated_races_end_grid();
}

struct launch {
    emulated_grid grid;
    std::function<void()> thread;
    ptx_launch *ptx; /* the same kernel as PTX; NULL: none */
};

static unseen_lock one_grid; /* all of the above is one grid's */

static void run_launch(void *argument)
{
    std::unique_ptr<launch> l((launch *)argument);
    unseen_guard guard(&one_grid);
    unseen_work unseen; /* but what threads do */
    if (l->ptx) ptx_launch_run(l->ptx);
    body = std::move(l->thread);
    run_grid(l->grid);
    body = nullptr;
    if (l->ptx) ptx_launch_compare(l->ptx);
}

static ptx_launch *launch_ptx(const emulated_grid &g, const emulated_parameters &p)
{
    ptx_shape shape = {g.blocks.x, g.threads.x, std::max(1u, g.n_clustered), g.shared_bytes,
                       g.blocks.y * g.blocks.z * g.threads.y * g.threads.z == 1};
    return ptx_launch_create(g.kernel, &shape, p.at + 1, p.bytes + 1, p.n);
}

cudaError_t emulated_launch(cudaStream_t stream, const emulated_grid &g,
                            const emulated_parameters &parameters, std::function<void()> thread)
{
    cudaError_t error = check_launch(g);
    if (error != cudaSuccess) return error;
    emulated_count_kernel(g.kernel);
    auto *l = new launch{g, std::move(thread), launch_ptx(g, parameters)};
    error = emulated_queue(stream, run_launch, l);
    if (error != cudaSuccess) delete l;
    return error;
}
