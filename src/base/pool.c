/* SPDX-License-Identifier: Apache-2.0 */
/* pool.c -- worker threads, and the parallel loops that they share with their caller.
 *
 * Items are handed out by one atomic counter. A worker joins a loop only while the loop is open,
 * and the caller closes it as soon as no item is left: a worker that wakes up late, because other
 * ranks hold the cores, is not waited for.
 *
 * Idle workers look around for LOOK_S before they sleep: the next loop of a step usually follows
 * within that time, and waking a thread costs the loop's caller a system call of 9 us and the
 * worker as long again, or more where an idle core of a virtual machine has been given back. They
 * offer their core to others between looks, and sleep as soon as one takes it.
 *
 * Over a runtime of the caller's, n_joined counts the threads that the runtime has sent into the
 * loop, each of which takes another worker's scratch. */
#include "base/pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/pause.h"
#include "base/sizes.h"
#include "base/thread.h"

typedef struct worker {
    bl_pool *pool;
    pthread_t thread;
    void *scratch;
} worker;

struct bl_pool {
    int n_threads;
    worker *workers;         /* [0]: the calling thread */
    bl_parallel_fn parallel; /* the runtime whose threads run loops; NULL: the pool's own do */
    pthread_mutex_t turn;    /* held by the thread whose loop runs */
    /* Guards the fields below; the atomics are changed under it and peeked at without. */
    pthread_mutex_t lock;
    pthread_cond_t wake, idle;
    bl_pool_fn fn;
    void *arg;
    int64_t n_items;
    atomic_ulong n_loops; /* started so far */
    atomic_int n_joined;  /* workers inside the loop */
    int n_asleep;
    bool is_open, quit;
    atomic_llong next; /* item; not guarded */
};

static void run_items(bl_pool *pool, void *scratch)
{
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (index >= pool->n_items) return;
        pool->fn(pool->arg, index, scratch);
    }
}

static unsigned long count_loops(bl_pool *pool)
{
    return atomic_load_explicit(&pool->n_loops, memory_order_relaxed);
}

static int count_joined(bl_pool *pool)
{
    return atomic_load_explicit(&pool->n_joined, memory_order_relaxed);
}

#define LOOK_S  100e-6
#define TAKEN_S 10e-6 /* a yield that took longer: another thread ran */

/* Until is_there(pool, seen), or it is time to sleep. */
static void look_around(bl_pool *pool, bool (*is_there)(bl_pool *pool, unsigned long seen),
                        unsigned long seen)
{
    for (int i = 0; i < BL_SPIN_ROUNDS; i++) {
        if (is_there(pool, seen)) return;
        bl_cpu_pause();
    }
    double begin = bl_now_s(), last = begin;
    while (last - begin < LOOK_S) {
        sched_yield();
        double now = bl_now_s();
        if (is_there(pool, seen) || now - last > TAKEN_S) return;
        last = now;
    }
}

static bool has_new_loop(bl_pool *pool, unsigned long seen)
{
    return count_loops(pool) != seen;
}

static bool is_left(bl_pool *pool, unsigned long seen)
{
    (void)seen;
    return count_joined(pool) == 0;
}

static void *worker_main(void *argument)
{
    worker *self = argument;
    bl_pool *pool = self->pool;
    unsigned long seen = 0;

    pthread_mutex_lock(&pool->lock);
    for (;;) {
        pthread_mutex_unlock(&pool->lock);
        look_around(pool, has_new_loop, seen);
        pthread_mutex_lock(&pool->lock);
        pool->n_asleep++;
        while (!pool->quit && count_loops(pool) == seen)
            pthread_cond_wait(&pool->wake, &pool->lock);
        pool->n_asleep--;
        if (pool->quit) break;
        seen = count_loops(pool);
        if (!pool->is_open) continue;
        atomic_fetch_add_explicit(&pool->n_joined, 1, memory_order_relaxed);
        pthread_mutex_unlock(&pool->lock);

        run_items(pool, self->scratch);

        pthread_mutex_lock(&pool->lock);
        if (atomic_fetch_sub_explicit(&pool->n_joined, 1, memory_order_relaxed) == 1)
            pthread_cond_signal(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static bl_status create(int n_threads, bl_parallel_fn parallel, bl_pool **out)
{
    *out = NULL;
    if (n_threads < 1)
        return BL_FAIL(BL_EUSAGE, "a worker pool needs at least one thread, not %d", n_threads);
    bl_pool *pool = calloc(1, sizeof *pool);
    if (pool) pool->workers = calloc((size_t)n_threads, sizeof *pool->workers);
    if (!pool || !pool->workers) {
        free(pool);
        return BL_FAIL(BL_ENOMEM, "a worker pool of %d threads", n_threads);
    }
    pool->parallel = parallel;
    pthread_mutex_init(&pool->turn, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->idle, NULL);
    for (int i = 0; i < n_threads; i++) {
        worker *w = &pool->workers[i];
        w->pool = pool;
        w->scratch = aligned_alloc(64, BL_POOL_SCRATCH_BYTES);
        int refused = !w->scratch          ? ENOMEM
                      : i > 0 && !parallel ? bl_thread_create(&w->thread, worker_main, w)
                                           : 0;
        if (refused) {
            free(w->scratch);
            bl_pool_destroy(pool);
            errno = refused;
            return bl_fail_errno(BL_ENOMEM, "worker thread %d of %d", i, n_threads);
        }
        pool->n_threads = i + 1;
    }
    *out = pool;
    return BL_OK;
}

bl_status bl_pool_create(int n_threads, bl_pool **out)
{
    return create(n_threads, NULL, out);
}

bl_status bl_pool_create_over(int n_threads, bl_parallel_fn parallel, bl_pool **out)
{
    *out = NULL;
    if (!parallel) return BL_FAIL(BL_EUSAGE, "a worker pool over a runtime: parallel is NULL");
    return create(n_threads, parallel, out);
}

void bl_pool_destroy(bl_pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    pool->quit = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_threads; i++) {
        if (i > 0 && !pool->parallel) pthread_join(pool->workers[i].thread, NULL);
        free(pool->workers[i].scratch);
    }
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->turn);
    free(pool->workers);
    free(pool);
}

int bl_pool_threads(const bl_pool *pool)
{
    return pool->n_threads;
}

static void run_as_member(void *argument)
{
    bl_pool *pool = argument;
    int place = atomic_fetch_add_explicit(&pool->n_joined, 1, memory_order_relaxed);

    if (place < pool->n_threads) run_items(pool, pool->workers[place].scratch);
}

/* Under `turn`. */
static void run_over_runtime(bl_pool *pool, int64_t n_items, bl_pool_fn fn, void *arg)
{
    pool->fn = fn;
    pool->arg = arg;
    pool->n_items = n_items;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->n_joined, 0, memory_order_relaxed);
    /* Always of one size: a runtime ends and starts threads where regions differ. */
    pool->parallel(run_as_member, pool, (unsigned)pool->n_threads, 0);
}

void bl_pool_run(bl_pool *pool, int64_t n_items, bl_pool_fn fn, void *arg)
{
    if (n_items <= 0) return;
    pthread_mutex_lock(&pool->turn);
    if (n_items == 1 || pool->n_threads == 1) {
        for (int64_t i = 0; i < n_items; i++) fn(arg, i, pool->workers[0].scratch);
        pthread_mutex_unlock(&pool->turn);
        return;
    }
    if (pool->parallel) {
        run_over_runtime(pool, n_items, fn, arg);
        pthread_mutex_unlock(&pool->turn);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->arg = arg;
    pool->n_items = n_items;
    pool->is_open = true;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->n_loops, 1, memory_order_relaxed);
    int64_t n_wanted = bl_min_i64(n_items - 1, pool->n_asleep);
    pthread_mutex_unlock(&pool->lock);
    for (int64_t i = 0; i < n_wanted; i++) pthread_cond_signal(&pool->wake);

    run_items(pool, pool->workers[0].scratch);

    look_around(pool, is_left, 0);
    pthread_mutex_lock(&pool->lock);
    pool->is_open = false;
    while (count_joined(pool) > 0) pthread_cond_wait(&pool->idle, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->turn);
}
