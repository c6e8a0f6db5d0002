/* SPDX-License-Identifier: Apache-2.0 */
/* Coroutines by makecontext; from then on they are switched by setjmp and longjmp, which leave the signal
 * mask alone. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "queue.h"

enum class waits_for { nothing, block, warp, cluster, end };

enum { STACK_BYTES = 64 << 10, WARP = 32 };

struct coroutine {
    ucontext_t start;
    jmp_buf here;
    bool has_begun;
    waits_for state;
};

emulated_index threadIdx, blockIdx, blockDim, gridDim;
unsigned char emulated_lane_values[1024][8];

extern char __start_emulated_shared[], __stop_emulated_shared[];

static std::vector<coroutine> coroutines; /* of a cluster, block by block */
static std::vector<char *> stacks;
static std::vector<std::vector<char>> images; /* shared memory of each block of the cluster */
static std::function<void()> body;
static coroutine *current;
static jmp_buf scheduler;
static unsigned current_rank, n_ranks;

static void wait_for(waits_for state)
{
    current->state = state;
    if (_setjmp(current->here) == 0) _longjmp(scheduler, 1);
}

void __syncthreads()
{
    wait_for(waits_for::block);
}

void emulated_sync_warp()
{
    wait_for(waits_for::warp);
}

void emulated_sync_cluster()
{
    wait_for(waits_for::cluster);
}

unsigned emulated_cluster_blocks()
{
    return n_ranks;
}

void *emulated_map_shared(void *mine, unsigned rank)
{
    return rank == current_rank ? mine : images[rank].data() + ((char *)mine - __start_emulated_shared);
}

/* ---- how accesses fill sectors: a thread's n-th load or store goes with those of its warp ---- */

enum { SECTOR_BYTES = 32 };

static std::vector<std::vector<const char *>> accesses[2]; /* of loads and stores, of each thread of the block */
static std::vector<unsigned> access_bytes[2];              /* of the n-th */
static double bytes_accessed, bytes_of_sectors;

void emulated_note_access(const void *p, unsigned bytes, bool is_store)
{
    auto &mine = accesses[is_store][threadIdx.x];
    auto &sizes = access_bytes[is_store];
    if (sizes.size() <= mine.size()) sizes.push_back(bytes);
    mine.push_back((const char *)p);
}

extern "C" void emulated_forget_accesses(void)
{
    bytes_accessed = bytes_of_sectors = 0;
}

extern "C" double emulated_share_of_sectors(void)
{
    return bytes_of_sectors > 0 ? bytes_accessed / bytes_of_sectors : 1;
}

static void count_sectors(bool is_store)
{
    auto &threads = accesses[is_store];
    for (size_t first = 0; first < threads.size(); first += WARP)
        for (size_t n = 0; n < access_bytes[is_store].size(); n++) {
            std::set<uintptr_t> sectors;
            for (size_t t = first; t < first + WARP && t < threads.size(); t++) {
                if (threads[t].size() <= n) continue;
                bytes_accessed += access_bytes[is_store][n];
                sectors.insert((uintptr_t)threads[t][n] / SECTOR_BYTES);
            }
            bytes_of_sectors += (double)(sectors.size() * SECTOR_BYTES);
        }
    for (auto &thread : threads) thread.clear();
    access_bytes[is_store].clear();
}

static void run_body()
{
    body();
    wait_for(waits_for::end);
}

static void resume(coroutine *c)
{
    current = c;
    if (_setjmp(scheduler) != 0) return;
    if (c->has_begun) _longjmp(c->here, 1);
    c->has_begun = true;
    setcontext(&c->start);
}

[[noreturn]] static void give_up(const char *what)
{
    fprintf(stderr, "emulated kernel, block %u: %s that not all threads reach\n", blockIdx.x, what);
    abort();
}

static unsigned count(const coroutine *threads, unsigned n, waits_for state)
{
    unsigned found = 0;
    for (unsigned i = 0; i < n; i++) found += threads[i].state == state;
    return found;
}

static void release(coroutine *threads, unsigned n, waits_for state)
{
    for (unsigned i = 0; i < n; i++)
        if (threads[i].state == state) threads[i].state = waits_for::nothing;
}

/* Until all threads have ended or wait for their cluster. */
static void run_block(coroutine *threads, bool *forwards)
{
    unsigned n = blockDim.x;
    for (;;) {
        *forwards = !*forwards;
        for (unsigned i = 0; i < n; i++) {
            unsigned t = *forwards ? i : n - 1 - i;
            threadIdx = {t, 0, 0};
            if (threads[t].state == waits_for::nothing) resume(&threads[t]);
        }
        bool goes_on = false;
        for (unsigned first = 0; first < n; first += WARP) {
            unsigned n_waiting = count(threads + first, WARP, waits_for::warp);
            if (n_waiting != 0 && n_waiting != WARP) give_up("a shuffle");
            if (n_waiting != 0) goes_on = true;
            release(threads + first, WARP, waits_for::warp);
        }
        if (goes_on) continue;
        unsigned n_waiting = count(threads, n, waits_for::block);
        if (n_waiting == 0) return;
        if (n_waiting + count(threads, n, waits_for::end) != n) give_up("a barrier");
        release(threads, n, waits_for::block);
    }
}

static void begin_cluster(unsigned n_threads)
{
    for (size_t i = 0; i < coroutines.size(); i++) {
        coroutine *c = &coroutines[i];
        getcontext(&c->start);
        c->start.uc_stack.ss_sp = stacks[i];
        c->start.uc_stack.ss_size = STACK_BYTES;
        c->start.uc_link = nullptr;
        makecontext(&c->start, run_body, 0);
        c->has_begun = false;
        c->state = waits_for::nothing;
    }
    size_t shared_bytes = (size_t)(__stop_emulated_shared - __start_emulated_shared);
    for (auto &image : images) image.assign(shared_bytes, (char)0xa5);
    blockDim = {n_threads, 1, 1};
}

static void run_cluster(unsigned first_block, bool *forwards)
{
    unsigned n = blockDim.x;
    for (;;) {
        for (unsigned rank = 0; rank < n_ranks; rank++) {
            memcpy(__start_emulated_shared, images[rank].data(), images[rank].size());
            current_rank = rank;
            blockIdx = {first_block + rank, 0, 0};
            for (auto &of_threads : accesses) of_threads.resize(n);
            run_block(&coroutines[(size_t)rank * n], forwards);
            count_sectors(false);
            count_sectors(true);
            memcpy(images[rank].data(), __start_emulated_shared, images[rank].size());
        }
        unsigned n_all = (unsigned)coroutines.size(),
                 n_ended = count(coroutines.data(), n_all, waits_for::end);
        if (n_ended == n_all) return;
        if (n_ended != 0) give_up("a cluster's barrier");
        release(coroutines.data(), n_all, waits_for::cluster);
    }
}

static void run_kernel(unsigned n_blocks, unsigned n_threads, unsigned n_clustered)
{
    if (n_threads > 1024 || (n_threads > 1 && n_threads % WARP != 0) || n_blocks % n_clustered != 0 ||
        n_clustered > 8) {
        fprintf(stderr, "emulated kernel: %u blocks of %u threads, clusters of %u\n", n_blocks, n_threads,
                n_clustered);
        abort();
    }
    bool forwards = false;
    while (stacks.size() < (size_t)n_threads * n_clustered) stacks.push_back((char *)malloc(STACK_BYTES));
    n_ranks = n_clustered;
    gridDim = {n_blocks, 1, 1};
    coroutines.resize((size_t)n_threads * n_clustered);
    images.resize(n_clustered);
    for (unsigned block = 0; block < n_blocks; block += n_clustered) {
        begin_cluster(n_threads);
        run_cluster(block, &forwards);
    }
}

struct launch {
    unsigned n_blocks, n_threads, n_clustered;
    std::function<void()> thread;
};

static std::mutex one_kernel; /* all of the above is one kernel's */

static void run_launch(void *argument)
{
    std::unique_ptr<launch> l((launch *)argument);
    std::lock_guard<std::mutex> lock(one_kernel);
    body = std::move(l->thread);
    run_kernel(l->n_blocks, l->n_threads, l->n_clustered);
    body = nullptr;
}

int emulated_launch(void *stream, unsigned n_blocks, unsigned n_threads, unsigned n_clustered,
                    std::function<void()> thread)
{
    auto *l = new launch{n_blocks, n_threads, n_clustered, std::move(thread)};
    int error = emulated_queue(stream, run_launch, l);
    if (error != 0) delete l;
    return error;
}
