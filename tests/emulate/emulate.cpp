/* SPDX-License-Identifier: Apache-2.0 */
/* A grid, block by block: its threads are coroutines, resumed in a random order until each waits or has ended.
 * Who comes last to a barrier, or to what a warp does together, releases the others. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <map>
#include <memory>
#include <vector>

#include "coroutine.h"
#include "grid.h"
#include "lock.h"
#include "queue.h"

enum class waits_for { nothing, block, warp, cluster, end };

enum {
    STACK_BYTES = 128 << 10,
    GUARD_BYTES = 1024, /* on both sides of dynamic shared memory, which is so aligned */
    SHARED_PLAIN_MAX = 48 << 10,
    THREADS_MAX = 1024,
    BLOCKS_YZ_MAX = 65535,
    CLUSTER_MAX = 8,
    POISON = 0xa5
};

struct asynchronous_copy {
    char *dst;
    const char *src;
    size_t bytes, n_valid;
    unsigned group;
};

struct emulated_thread {
    coroutine_state here;
    waits_for state;
    emulated_together *together; /* while it waits for its warp, with its operand */
    void *mine;
    std::vector<asynchronous_copy> copies; /* on their way */
    unsigned n_committed;
};

emulated_index threadIdx, blockIdx, blockDim, gridDim;

extern char __start_emulated_shared[], __stop_emulated_shared[];
__shared__ char emulated_section_exists[1]; /* so that it does, whatever is linked */

static emulated_grid grid;
static std::function<void()> body;
static unsigned n_threads;                   /* of a block */
static unsigned n_at_barrier[CLUSTER_MAX], n_ended[CLUSTER_MAX]; /* threads of each block of a cluster */
static std::vector<emulated_thread> threads; /* of a cluster, block by block */
static std::vector<char *> stacks;
static std::vector<std::vector<char>> images; /* static shared memory of each block of a cluster */
static std::vector<char *> arenas;            /* dynamic shared memory with its guards, also of each */
static emulated_thread *current;              /* NULL: the scheduler */
static coroutine_state scheduler;
static unsigned current_rank, n_ranks = 1;
static uint64_t random_state;

/* ---- errors ---- */

static void print_kernel()
{
    Dl_info info;
    if (dladdr(grid.kernel, &info) && info.dli_sname)
        fprintf(stderr, "emulated kernel %s", info.dli_sname);
    else
        fprintf(stderr, "emulated kernel at %p", grid.kernel);
    fprintf(stderr, ", block (%u, %u, %u) of (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z,
            gridDim.x, gridDim.y, gridDim.z);
    if (current) fprintf(stderr, ", thread %u", emulated_current_thread());
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
        const char *seed = getenv("BALLAST_EMULATED_SEED");
        random_state = seed ? strtoull(seed, nullptr, 10) : 0;
        has_begun = true;
    }
    unsigned choice = random_below(4);
    return choice < SHUFFLED ? (int)choice : SHUFFLED;
}

static void put_in_order(std::vector<unsigned> *ready, int order)
{
    if (order == BACKWARDS) std::reverse(ready->begin(), ready->end());
    if (order == SHUFFLED)
        for (unsigned i = (unsigned)ready->size(); i > 1; i--)
            std::swap((*ready)[i - 1], (*ready)[random_below(i)]);
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

static emulated_thread *block_threads()
{
    return &threads[(size_t)current_rank * n_threads];
}

unsigned emulated_current_thread()
{
    return (unsigned)(current - block_threads());
}

static bool all_wait_for(waits_for state, const emulated_thread *first, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (first[i].state != state) return false;
    return true;
}

static void release(emulated_thread *first, unsigned n, waits_for state)
{
    for (unsigned i = 0; i < n; i++)
        if (first[i].state == state) first[i].state = waits_for::nothing;
}

static void suspend()
{
    emulated_thread *me = current;
    emulated_switch(&me->here, &scheduler);
}

/* Threads that have ended are not waited for. */
static void release_block_if_all_wait()
{
    unsigned *n_waiting = &n_at_barrier[current_rank];
    if (*n_waiting == 0 || *n_waiting + n_ended[current_rank] < n_threads) return;
    release(block_threads(), n_threads, waits_for::block);
    *n_waiting = 0;
}

void __syncthreads()
{
    current->state = waits_for::block;
    n_at_barrier[current_rank]++;
    release_block_if_all_wait();
    if (current->state != waits_for::nothing) suspend();
}

void emulated_warp_together(emulated_together *together, void *mine)
{
    unsigned t = emulated_current_thread(), first = t - t % EMULATED_WARP,
             n = std::min<unsigned>(EMULATED_WARP, n_threads - first);
    emulated_thread *warp = block_threads() + first;
    current->state = waits_for::warp;
    current->together = together;
    current->mine = mine;
    if (!all_wait_for(waits_for::warp, warp, n)) {
        suspend();
        return;
    }
    void *lanes[EMULATED_WARP] = {};
    for (unsigned i = 0; i < n; i++) {
        if (warp[i].together != together)
            emulated_give_up("threads %u and %u of a warp do different things together", t,
                             first + i);
        lanes[i] = warp[i].mine;
    }
    emulated_thread *me = current;
    current = nullptr;
    together(lanes);
    current = me;
    release(warp, n, waits_for::warp);
}

static void nothing_together(void *const *)
{
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
    for (int to = 0; to < EMULATED_WARP; to++)
        for (int from = 0; from < EMULATED_WARP; from++) {
            if (!lanes[to] || !lanes[from]) continue;
            const exchange *source = (const exchange *)lanes[from];
            memcpy(((exchange *)lanes[to])->all + from * source->bytes, source->mine, source->bytes);
        }
}

void emulated_warp_exchange(const void *mine, size_t bytes, void *all)
{
    exchange e = {mine, bytes, (char *)all};
    emulated_warp_together(exchange_together, &e);
}

/* ---- shared memory ---- */

static size_t section_bytes()
{
    return (size_t)(__stop_emulated_shared - __start_emulated_shared);
}

static char *dynamic_of(unsigned rank)
{
    return arenas[rank] + GUARD_BYTES;
}

void *emulated_dynamic_shared()
{
    return dynamic_of(current_rank);
}

void emulated_sync_cluster()
{
    current->state = waits_for::cluster;
    suspend();
}

unsigned emulated_cluster_blocks()
{
    return n_ranks;
}

unsigned emulated_cluster_rank()
{
    return current_rank;
}

static bool is_static_shared(const char *p)
{
    return p >= __start_emulated_shared && p < __stop_emulated_shared;
}

static bool is_dynamic_shared(const char *p, size_t bytes)
{
    const char *first = dynamic_of(current_rank);
    return p >= first && p + bytes <= first + grid.shared_bytes;
}

void *emulated_map_shared(void *mine, unsigned rank)
{
    char *p = (char *)mine;
    if (rank >= n_ranks) emulated_give_up("block %u of a cluster of %u", rank, n_ranks);
    if (rank == current_rank) return p;
    if (is_static_shared(p)) return images[rank].data() + (p - __start_emulated_shared);
    if (!is_dynamic_shared(p, 1)) emulated_give_up("%p is not shared memory", mine);
    return dynamic_of(rank) + (p - dynamic_of(current_rank));
}

static void poison_shared()
{
    for (unsigned rank = 0; rank < n_ranks; rank++) {
        if (n_ranks > 1) images[rank].assign(section_bytes(), (char)POISON);
        memset(arenas[rank], POISON, grid.shared_bytes + 2 * GUARD_BYTES);
    }
    if (n_ranks == 1) memset(__start_emulated_shared, POISON, section_bytes());
}

static void check_guards(unsigned rank)
{
    const unsigned char *before = (unsigned char *)arenas[rank],
                        *behind = before + GUARD_BYTES + grid.shared_bytes;
    for (int i = 0; i < GUARD_BYTES; i++) {
        if (before[i] != POISON)
            emulated_give_up("writes %d bytes before its dynamic shared memory", GUARD_BYTES - i);
        if (behind[i] != POISON)
            emulated_give_up("writes byte %zu of %zu bytes of dynamic shared memory",
                             grid.shared_bytes + (size_t)i, grid.shared_bytes);
    }
}

/* ---- asynchronous copies ---- */

void emulated_copy_async(void *dst, const void *src, size_t bytes, size_t n_valid)
{
    if (bytes != 4 && bytes != 8 && bytes != 16)
        emulated_give_up("an asynchronous copy of %zu bytes", bytes);
    if (n_valid > bytes) emulated_give_up("%zu of %zu bytes of a copy", n_valid, bytes);
    if ((uintptr_t)dst % bytes != 0 || (uintptr_t)src % bytes != 0)
        emulated_give_up("an asynchronous copy of %zu bytes from %p to %p is not aligned", bytes, src,
                         dst);
    if (!is_static_shared((char *)dst) && !is_dynamic_shared((char *)dst, bytes))
        emulated_give_up("an asynchronous copy to %p, which is not shared memory", dst);
    memset(dst, POISON, bytes);
    current->copies.push_back(
        {(char *)dst, (const char *)src, bytes, n_valid, current->n_committed});
}

void emulated_copy_async_commit()
{
    current->n_committed++;
}

/* Those of groups below `n_groups` arrive. */
static void land_copies(unsigned n_groups)
{
    size_t n_left = 0;
    for (const asynchronous_copy &copy : current->copies) {
        if (copy.group >= n_groups) {
            current->copies[n_left++] = copy;
            continue;
        }
        memcpy(copy.dst, copy.src, copy.n_valid);
        memset(copy.dst + copy.n_valid, 0, copy.bytes - copy.n_valid);
    }
    current->copies.resize(n_left);
}

void emulated_copy_async_wait(unsigned n_left)
{
    if (current->n_committed > n_left) land_copies(current->n_committed - n_left);
}

void emulated_copy_async_wait_all()
{
    current->n_committed++;
    land_copies(current->n_committed);
}

/* ---- blocks ---- */

static void run_body()
{
    body();
    if (!current->copies.empty())
        emulated_give_up("ends before its asynchronous copies have arrived");
    current->state = waits_for::end;
    n_ended[current_rank]++;
    release_block_if_all_wait();
    suspend();
}

static void resume(unsigned t)
{
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    current = block_threads() + t;
    emulated_switch(&scheduler, &current->here);
    current = nullptr;
}

[[noreturn]] static void report_deadlock(unsigned waiting)
{
    const emulated_thread *first = block_threads();
    unsigned begin = 0, end = n_threads;
    if (first[waiting].state == waits_for::warp) {
        begin = waiting - waiting % EMULATED_WARP;
        end = std::min(begin + EMULATED_WARP, n_threads);
    }
    unsigned other = begin;
    while (other + 1 < end && first[other].state == first[waiting].state) other++;
    emulated_give_up("thread %u waits at a %s that not all threads reach: thread %u %s", waiting,
                     first[waiting].state == waits_for::warp ? "shuffle" : "barrier", other,
                     first[other].state == waits_for::end ? "has ended" : "waits elsewhere");
}

/* Until all threads have ended or wait for their cluster. */
static void run_block(int order)
{
    static std::vector<unsigned> ready;
    for (;;) {
        ready.clear();
        for (unsigned t = 0; t < n_threads; t++)
            if (block_threads()[t].state == waits_for::nothing) ready.push_back(t);
        if (ready.empty()) break;
        put_in_order(&ready, order);
        for (unsigned t : ready) resume(t);
    }
    for (unsigned t = 0; t < n_threads; t++) {
        waits_for state = block_threads()[t].state;
        if (state == waits_for::block || state == waits_for::warp) report_deadlock(t);
    }
}

static void begin_cluster()
{
    for (size_t i = 0; i < threads.size(); i++) {
        size_t color = i % 61 * 64; /* the same place of each stack would fall on the same lines of the cache */
        coroutine_begin(&threads[i].here, stacks[i], STACK_BYTES - color, run_body);
        threads[i].state = waits_for::nothing;
        threads[i].n_committed = 0;
    }
    std::fill_n(n_at_barrier, CLUSTER_MAX, 0u);
    std::fill_n(n_ended, CLUSTER_MAX, 0u);
    poison_shared();
}

static void run_cluster(uint64_t cluster, int order)
{
    uint64_t per_row = gridDim.x / n_ranks, row = cluster / per_row;
    unsigned first = (unsigned)(cluster % per_row) * n_ranks;
    for (;;) {
        permutation ranks = permutation_of(n_ranks);
        for (unsigned i = 0; i < n_ranks; i++) {
            current_rank = (unsigned)permuted(ranks, i);
            blockIdx = {first + current_rank, (unsigned)(row % gridDim.y),
                        (unsigned)(row / gridDim.y)};
            auto &image = images[current_rank];
            if (n_ranks > 1) memcpy(__start_emulated_shared, image.data(), image.size());
            run_block(order);
            emulated_count_sectors();
            check_guards(current_rank);
            if (n_ranks > 1) memcpy(image.data(), __start_emulated_shared, image.size());
        }
        unsigned n_all = (unsigned)threads.size();
        if (all_wait_for(waits_for::end, threads.data(), n_all)) return;
        if (!all_wait_for(waits_for::cluster, threads.data(), n_all))
            emulated_give_up("a cluster's barrier that not all threads reach");
        release(threads.data(), n_all, waits_for::cluster);
    }
}

/* ---- launches ---- */

/* An error stops the program instead: below a stack lies memory that cannot be touched. */
static char *stack_create()
{
    size_t guard = 4096 * 16; /* whole pages on every machine */
    char *memory = (char *)mmap(nullptr, STACK_BYTES + guard, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
        perror("emulated kernel: a stack");
        abort();
    }
    return memory + guard;
}

static std::map<const void *, int> most_shared;
static unseen_lock most_shared_lock;

int emulated_capability()
{
    const char *arch = getenv("BALLAST_EMULATED_ARCH");
    return arch ? atoi(arch) : 90;
}

static int shared_limit()
{
    return (emulated_capability() >= 90 ? 227 : 163) << 10; /* Programming Guide, table of compute capabilities */
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
    if (per_block == 0 || per_block > THREADS_MAX || g.threads.z > 64)
        return cudaErrorInvalidConfiguration;
    if (g.blocks.x == 0 || g.blocks.x > INT32_MAX || g.blocks.y == 0 || g.blocks.z == 0 ||
        g.blocks.y > BLOCKS_YZ_MAX || g.blocks.z > BLOCKS_YZ_MAX)
        return cudaErrorInvalidConfiguration;
    if (g.n_clustered > 1 && (emulated_capability() < 90 || g.n_clustered > CLUSTER_MAX ||
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
    grid = g;
    gridDim = {g.blocks.x, g.blocks.y, g.blocks.z};
    blockDim = {g.threads.x, g.threads.y, g.threads.z};
    n_threads = blockDim.x * blockDim.y * blockDim.z;
    n_ranks = std::max(1u, g.n_clustered);
    threads.resize((size_t)n_threads * n_ranks);
    while (stacks.size() < threads.size()) stacks.push_back(stack_create());
    images.resize(n_ranks);
    while (arenas.size() < n_ranks)
        arenas.push_back((char *)aligned_alloc(GUARD_BYTES, (size_t)(227 << 10) + 2 * GUARD_BYTES));
    int order = choose_order();
    uint64_t n_clusters = (uint64_t)gridDim.x / n_ranks * gridDim.y * gridDim.z;
    permutation clusters = permutation_of(n_clusters);
    for (uint64_t i = 0; i < n_clusters; i++) {
        begin_cluster();
        run_cluster(permuted(clusters, i), order);
    }
}

struct launch {
    emulated_grid grid;
    std::function<void()> thread;
};

static unseen_lock one_grid; /* all of the above is one grid's */

static void run_launch(void *argument)
{
    std::unique_ptr<launch> l((launch *)argument);
    unseen_guard guard(&one_grid);
    body = std::move(l->thread);
    run_grid(l->grid);
    body = nullptr;
}

cudaError_t emulated_launch(cudaStream_t stream, const emulated_grid &g, std::function<void()> thread)
{
    cudaError_t error = check_launch(g);
    if (error != cudaSuccess) return error;
    auto *l = new launch{g, std::move(thread)};
    error = emulated_queue(stream, run_launch, l);
    if (error != cudaSuccess) delete l;
    return error;
}
