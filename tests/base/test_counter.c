/* SPDX-License-Identifier: Apache-2.0 */
/* test_counter.c -- a counter's waiters are woken at their values, by many threads, and waiting
 * costs no processor time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "base/counter.h"

enum { N_STEPS = 20000, N_WAITERS = 4 };

typedef struct relay {
    bl_counter there, back;
    int ball; /* plain: the counters alone order it */
} relay;

static void *play_back(void *argument)
{
    relay *r = argument;
    for (int i = 1; i <= N_STEPS; i++) {
        bl_counter_wait(&r->there, (uint64_t)i);
        r->ball++;
        bl_counter_advance(&r->back, (uint64_t)i);
    }
    return NULL;
}

static void test_ping_pong(void **state)
{
    (void)state;
    relay r = {.ball = 0};
    pthread_t thread;
    bl_counter_init(&r.there);
    bl_counter_init(&r.back);
    assert_int_equal(pthread_create(&thread, NULL, play_back, &r), 0);
    for (int i = 1; i <= N_STEPS; i++) {
        r.ball++;
        bl_counter_advance(&r.there, (uint64_t)i);
        bl_counter_wait(&r.back, (uint64_t)i);
        assert_int_equal(r.ball, 2 * i);
    }
    pthread_join(thread, NULL);
}

typedef struct waiter {
    bl_counter *counter;
    int stride;
    const int *written; /* [i] is written before the counter passes i */
    int n_wrong;
} waiter;

/* Different strides: at any time the sleepers wait for different values. */
static void *wait_in_strides(void *argument)
{
    waiter *w = argument;
    for (int i = w->stride; i <= N_STEPS; i += w->stride) {
        bl_counter_wait(w->counter, (uint64_t)i);
        if (w->written[i - 1] != i) w->n_wrong++;
    }
    return NULL;
}

static void test_many_waiters(void **state)
{
    (void)state;
    static int written[N_STEPS];
    bl_counter counter;
    waiter waiters[N_WAITERS];
    pthread_t threads[N_WAITERS];

    bl_counter_init(&counter);
    for (int i = 0; i < N_WAITERS; i++) {
        waiters[i] = (waiter){.counter = &counter, .stride = 1 + 3 * i, .written = written};
        assert_int_equal(pthread_create(&threads[i], NULL, wait_in_strides, &waiters[i]), 0);
    }
    for (int i = 1; i <= N_STEPS; i++) {
        written[i - 1] = i;
        bl_counter_advance(&counter, (uint64_t)i);
        if (i % 1000 == 0) usleep(100); /* lets the waiters catch up and sleep */
    }
    for (int i = 0; i < N_WAITERS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(waiters[i].n_wrong, 0);
    }
}

static void *wait_for_one(void *argument)
{
    bl_counter_wait(argument, 1);
    return NULL;
}

static double thread_cpu_s(pthread_t thread)
{
    clockid_t clock;
    struct timespec t;
    assert_int_equal(pthread_getcpuclockid(thread, &clock), 0);
    assert_int_equal(clock_gettime(clock, &t), 0);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The CPU time of a thread that waits for 0.2 s. */
static double wait_cpu_s(void)
{
    bl_counter counter;
    pthread_t thread;
    bl_counter_init(&counter);
    assert_int_equal(pthread_create(&thread, NULL, wait_for_one, &counter), 0);
    usleep(200 * 1000);
    double cpu_s = thread_cpu_s(thread);
    bl_counter_advance(&counter, 1);
    pthread_join(thread, NULL);
    return cpu_s;
}

/* A long wait sleeps: it uses less than a tenth of its time. To begin and to fall asleep takes
 * longer with sanitizers and on a loaded machine, though seldom each time. */
static void test_waiting_is_cheap(void **state)
{
    (void)state;
    double least_s = wait_cpu_s();
    for (int n = 1; n < 5 && least_s >= 0.02; n++) {
        double cpu_s = wait_cpu_s();
        if (cpu_s < least_s) least_s = cpu_s;
    }
    assert_true(least_s < 0.02);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ping_pong),
        cmocka_unit_test(test_many_waiters),
        cmocka_unit_test(test_waiting_is_cheap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
