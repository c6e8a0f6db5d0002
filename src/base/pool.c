/* SPDX-License-Identifier: Apache-2.0 */
/* Items are handed out by one atomic counter. Idle workers first spin for a little while (the next loop of a step usually
 * follows within microseconds), then sleep on a condition variable. */
#include "base/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/sizes.h"

enum { SPIN_ROUNDS = 2000 };

typedef struct worker {
    bl_pool *pool;
    pthread_t thread;
    void *scratch;
} worker;

struct bl_pool {
    int n_threads;
    worker *workers; /* [0] stands for the caller */
    pthread_mutex_t turn; /* held by the thread whose loop runs */
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake, idle;
    bl_pool_fn fn;
    void *arg;
    int64_t n_items;
    atomic_llong next;
    atomic_ulong generation; /* counts loops; changed under `lock`, peeked at by spinning workers */
    int n_busy;
    bool quit;
};

static void run_items(bl_pool *pool, void *scratch)
{
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (index >= pool->n_items) return;
        pool->fn(pool->arg, index, scratch);
    }
}

static void *worker_main(void *argument)
{
    worker *self = argument;
    bl_pool *pool = self->pool;
    unsigned long seen = 0;

    for (;;) {
        for (int i = 0; i < SPIN_ROUNDS && atomic_load_explicit(&pool->generation, memory_order_relaxed) == seen; i++)
            __builtin_ia32_pause();
        pthread_mutex_lock(&pool->lock);
        while (!pool->quit && atomic_load_explicit(&pool->generation, memory_order_relaxed) == seen)
            pthread_cond_wait(&pool->wake, &pool->lock);
        if (pool->quit) break;
        seen = atomic_load_explicit(&pool->generation, memory_order_relaxed);
        pthread_mutex_unlock(&pool->lock);

        run_items(pool, self->scratch);

        pthread_mutex_lock(&pool->lock);
        if (--pool->n_busy == 0) pthread_cond_signal(&pool->idle);
        pthread_mutex_unlock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

bl_status bl_pool_create(int n_threads, bl_pool **out)
{
    *out = NULL;
    if (n_threads < 1) return BL_FAIL(BL_EUSAGE, "a worker pool needs at least one thread, not %d", n_threads);
    bl_pool *pool = calloc(1, sizeof *pool);
    if (pool) pool->workers = calloc((size_t)n_threads, sizeof *pool->workers);
    if (!pool || !pool->workers) {
        free(pool);
        return BL_FAIL(BL_ENOMEM, "a worker pool of %d threads", n_threads);
    }
    pthread_mutex_init(&pool->turn, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->idle, NULL);
    for (int i = 0; i < n_threads; i++) {
        worker *w = &pool->workers[i];
        w->pool = pool;
        w->scratch = aligned_alloc(64, BL_POOL_SCRATCH_BYTES);
        if (!w->scratch || (i > 0 && pthread_create(&w->thread, NULL, worker_main, w) != 0)) {
            free(w->scratch);
            bl_pool_destroy(pool);
            return BL_FAIL(BL_ENOMEM, "worker thread %d of %d", i, n_threads);
        }
        pool->n_threads = i + 1;
    }
    *out = pool;
    return BL_OK;
}

void bl_pool_destroy(bl_pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    pool->quit = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_threads; i++) {
        if (i > 0) pthread_join(pool->workers[i].thread, NULL);
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

void bl_pool_run(bl_pool *pool, int64_t n_items, bl_pool_fn fn, void *arg)
{
    if (n_items <= 0) return;
    pthread_mutex_lock(&pool->turn);
    if (n_items == 1 || pool->n_threads == 1) {
        for (int64_t i = 0; i < n_items; i++) fn(arg, i, pool->workers[0].scratch);
        pthread_mutex_unlock(&pool->turn);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->arg = arg;
    pool->n_items = n_items;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->n_busy = pool->n_threads - 1;
    atomic_fetch_add_explicit(&pool->generation, 1, memory_order_relaxed);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);

    run_items(pool, pool->workers[0].scratch);

    pthread_mutex_lock(&pool->lock);
    while (pool->n_busy > 0) pthread_cond_wait(&pool->idle, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->turn);
}
