/* SPDX-License-Identifier: Apache-2.0 */
/* test_pool.c -- every item of a loop runs once, each worker has separate scratch, and callers take
 * turns; the same over a parallel region of the caller's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <cmocka.h>

#include <dirent.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/pool.h"
#include "base/sizes.h"

static const int thread_counts[] = {1, 2, 3, 8};

static bl_pool *make_pool(int n_threads)
{
    bl_pool *pool = NULL;
    assert_int_equal(bl_pool_create(n_threads, &pool), BL_OK);
    assert_int_equal(bl_pool_threads(pool), n_threads);
    return pool;
}

/* Plain, not atomic: the caller must see the workers' stores, and no item may run twice. */
static void count_visit(void *arg, int64_t index, void *scratch)
{
    int *visits = arg;
    (void)scratch;
    visits[index]++;
}

static void test_each_item_once(void **state)
{
    static const int64_t n_items[] = {0, 1, 2, 3, 7, 64, 5000};
    (void)state;
    for (size_t t = 0; t < BL_COUNT(thread_counts); t++) {
        bl_pool *pool = make_pool(thread_counts[t]);
        for (size_t k = 0; k < BL_COUNT(n_items); k++) {
            int *visits = calloc((size_t)n_items[k] + 1, sizeof *visits);
            assert_non_null(visits);
            bl_pool_run(pool, n_items[k], count_visit, visits);
            for (int64_t i = 0; i < n_items[k]; i++) assert_int_equal(visits[i], 1);
            assert_int_equal(visits[n_items[k]], 0);
            free(visits);
        }
        bl_pool_destroy(pool);
    }
}

/* Back to back, as the ops of a step are; a worker that is late for one loop must not harm the
 * next. */
static void test_many_short_loops(void **state)
{
    enum { N_LOOPS = 20000 };
    (void)state;
    bl_pool *pool = make_pool(4);
    int visits[5] = {0};
    int64_t expected[5] = {0};
    for (int loop = 0; loop < N_LOOPS; loop++) {
        int64_t n = loop % 6;
        bl_pool_run(pool, n, count_visit, visits);
        for (int64_t i = 0; i < n; i++) expected[i]++;
    }
    for (int i = 0; i < 5; i++) assert_int_equal(visits[i], expected[i]);
    bl_pool_destroy(pool);
}

typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int n_inside;
    void *scratches[3];
} meeting;

/* Items that wait for each other: they end only if three threads run them, each with another
 * scratch. */
static void meet_others(void *arg, int64_t index, void *scratch)
{
    meeting *m = arg;
    memset(scratch, (int)index + 1, BL_POOL_SCRATCH_BYTES);
    pthread_mutex_lock(&m->lock);
    m->scratches[index] = scratch;
    m->n_inside++;
    pthread_cond_broadcast(&m->changed);
    while (m->n_inside < 3) pthread_cond_wait(&m->changed, &m->lock);
    pthread_mutex_unlock(&m->lock);
}

static void test_threads_and_scratch(void **state)
{
    (void)state;
    bl_pool *pool = make_pool(3);
    meeting m = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    bl_pool_run(pool, 3, meet_others, &m);
    for (int i = 0; i < 3; i++) {
        const unsigned char *scratch = m.scratches[i];
        assert_int_equal((uintptr_t)scratch % 64, 0);
        for (int k = 0; k < BL_POOL_SCRATCH_BYTES; k++) assert_int_equal(scratch[k], i + 1);
    }
    bl_pool_destroy(pool);
}

typedef struct slow_worker {
    pthread_t caller;
    atomic_bool has_started;
    int n_finished; /* by the worker */
} slow_worker;

static void be_slow(void *arg, int64_t index, void *scratch)
{
    slow_worker *s = arg;
    (void)index, (void)scratch;
    if (pthread_equal(pthread_self(), s->caller)) {
        while (!atomic_load(&s->has_started)) usleep(100);
    } else {
        atomic_store(&s->has_started, true);
        usleep(20 * 1000);
        s->n_finished++;
    }
}

/* The caller has nothing left to do while the worker is still at it. */
static void test_waits_for_workers(void **state)
{
    (void)state;
    slow_worker s = {.caller = pthread_self()};
    bl_pool *pool = make_pool(2);
    bl_pool_run(pool, 2, be_slow, &s);
    assert_int_equal(s.n_finished, 1);
    bl_pool_destroy(pool);
}

typedef struct turn {
    bl_pool *pool;
    int *total; /* shared by the callers: their loops take turns */
} turn;

static void add_one(void *arg, int64_t index, void *scratch)
{
    int *total = arg;
    (void)scratch;
    if (index == 0) ++*total;
}

static void *call_often(void *argument)
{
    turn *t = argument;
    for (int i = 0; i < 2000; i++) bl_pool_run(t->pool, 1 + i % 3, add_one, t->total);
    return NULL;
}

static void test_callers_take_turns(void **state)
{
    (void)state;
    int total = 0;
    turn t = {.pool = make_pool(2), .total = &total};
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, call_often, &t), 0);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    assert_int_equal(total, 3 * 2000);
    bl_pool_destroy(t.pool);
}

/* ---- over a runtime of the caller's ---- */

typedef struct region {
    void (*fn)(void *data);
    void *data;
} region;

static atomic_int n_regions;

static void *enter(void *argument)
{
    const region *r = argument;
    r->fn(r->data);
    return NULL;
}

/* A parallel region, as an OpenMP runtime makes one. */
static void run_region(void (*fn)(void *data), void *data, unsigned n_threads, unsigned flags)
{
    region r = {fn, data};
    pthread_t threads[8];

    assert_int_equal(flags, 0);
    assert_true(n_threads >= 1 && n_threads <= BL_COUNT(threads));
    atomic_fetch_add(&n_regions, 1);
    for (unsigned i = 1; i < n_threads; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, enter, &r), 0);
    fn(data);
    for (unsigned i = 1; i < n_threads; i++) pthread_join(threads[i], NULL);
}

/* A nested region has the caller alone. */
static void run_serial_region(void (*fn)(void *data), void *data, unsigned n_threads,
                              unsigned flags)
{
    (void)n_threads, (void)flags;
    fn(data);
}

static void count_threads(void *arg, int64_t index, void *scratch)
{
    (void)index, (void)scratch;
    atomic_int *n = arg;
    DIR *tasks = opendir("/proc/self/task");
    int found = 0;
    for (struct dirent *entry; tasks && (entry = readdir(tasks));) found += entry->d_name[0] != '.';
    if (tasks) closedir(tasks);
    if (found > atomic_load(n)) atomic_store(n, found);
}

static void test_over_a_runtime(void **state)
{
    bl_parallel_fn ways[] = {run_region, run_serial_region};
    bl_pool *pool;
    (void)state;

    for (size_t way = 0; way < BL_COUNT(ways); way++)
        for (size_t t = 0; t < BL_COUNT(thread_counts); t++) {
            int visits[64] = {0};
            assert_int_equal(bl_pool_create_over(thread_counts[t], ways[way], &pool), BL_OK);
            assert_int_equal(bl_pool_threads(pool), thread_counts[t]);
            for (int loop = 0; loop < 20; loop++) bl_pool_run(pool, 64 - loop, count_visit, visits);
            for (int i = 0; i < 64; i++) assert_int_equal(visits[i], i < 45 ? 20 : 64 - i);
            bl_pool_destroy(pool);
        }
    /* Every thread has separate scratch, and the pool starts none. */
    meeting m = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    atomic_int n_threads = 0, n_threads_before = 0;
    count_threads(&n_threads_before, 0, NULL); /* ThreadSanitizer has one, too */
    assert_int_equal(bl_pool_create_over(3, run_region, &pool), BL_OK);
    count_threads(&n_threads, 0, NULL);
    assert_int_equal(n_threads, n_threads_before);
    int before = n_regions;
    bl_pool_run(pool, 3, meet_others, &m);
    assert_int_equal(n_regions, before + 1);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < BL_POOL_SCRATCH_BYTES; k++)
            assert_int_equal(((unsigned char *)m.scratches[i])[k], i + 1);
    bl_pool_run(pool, 1, count_threads, &n_threads); /* one item: no region */
    assert_int_equal(n_regions, before + 1);
    bl_pool_destroy(pool);
    assert_int_equal(bl_pool_create_over(2, NULL, &pool), BL_EUSAGE);
    assert_int_equal(bl_pool_create_over(0, run_region, &pool), BL_EUSAGE);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    bl_pool *pool = NULL;
    assert_int_equal(bl_pool_create(0, &pool), BL_EUSAGE);
    assert_null(pool);
    bl_pool_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_item_once),      cmocka_unit_test(test_many_short_loops),
        cmocka_unit_test(test_threads_and_scratch), cmocka_unit_test(test_callers_take_turns),
        cmocka_unit_test(test_waits_for_workers),   cmocka_unit_test(test_over_a_runtime),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
