/* SPDX-License-Identifier: Apache-2.0 */
/* A queue with little memory, in this process, which sets the available memory: jobs wait for each
 * other, are withdrawn or left in the queue while they wait, and are rejected if they are too large
 * alone. */
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/sizes.h"
#include "queue_runs.h"
#include "train/train.h"

static _Atomic int64_t planted_bytes;

int64_t __real_bl_memory_available_bytes(void);
int64_t __wrap_bl_memory_available_bytes(void);

int64_t __wrap_bl_memory_available_bytes(void)
{
    int64_t planted = atomic_load(&planted_bytes);
    return planted ? planted : __real_bl_memory_available_bytes();
}

static void *serve(void *user)
{
    return (void *)(intptr_t)bl_train_run_queue(user, NULL, NULL);
}

/* Both jobs, the first one with another number of steps than queue_put's. Their adapters are large,
 * because what a process has allocated varies by a megabyte. */
static void put_both(queue *q, const char *first_steps)
{
    assert_int_equal(mkdir(q->dir, 0700), 0);
    for (int job = 0; job < 2; job++) {
        golden_args args = {0};
        queue_job_keys(&args, q->name, "queued", job, q->ranks);
        runs_set(&args, "lora_r", "512");
        if (job == 0) runs_set(&args, "max_steps", "%s", first_steps);
        queue_write_keys(&args, queue_path(q, "job%s.yaml", job ? "1" : "0"), QUEUE_JOB_KEYS);
        golden_args_free(&args);
    }
}

/* Runs a queue in this process with this much memory to its end. If first_steps is given, two jobs
 * are there from the start, however busy the machine is; beside runs while the queue does, in this
 * thread. Returns the log, which the caller frees. */
static char *serve_here(queue *q, int64_t available_bytes, const char *first_steps,
                        void (*beside)(queue *q))
{
    golden_args keys = {0}, args = {0};
    bl_train_config *config;
    const char *base = runs_path("%s-base.yaml", q->name), *path = runs_path("%s-log", q->name);
    char log[GOLDEN_PATH_BYTES]; /* runs_path reuses its buffers */
    pthread_t thread;
    void *status;

    snprintf(q->dir, sizeof q->dir, "%s", runs_path("%s-queue", q->name));
    runs_standard(&keys, runs_path("unused"), q->ranks);
    queue_write_keys(&keys, base, QUEUE_BASE_KEYS);
    args.text[args.n++] = strdup(base);
    runs_set(&args, "queue", "%s", q->dir);
    runs_set(&args, "per_device_train_batch_size", "1"); /* a base that is smaller than the jobs */
    runs_set(&args, "per_device_eval_batch_size", "1");
    runs_set(&args, "lora_r", "1");
    runs_set(&args, "activation_checkpointing", "full"); /* auto would save less with both jobs */
    snprintf(log, sizeof log, "%s", path);
    fflush(stderr);
    int saved = dup(STDERR_FILENO), file = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(saved >= 0 && file >= 0 && dup2(file, STDERR_FILENO) >= 0);
    atomic_store(&planted_bytes, available_bytes);
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, NULL, args.n, args.text, &config),
                     BL_OK);
    if (first_steps) put_both(q, first_steps);
    assert_int_equal(pthread_create(&thread, NULL, serve, config), 0);
    while (!queue_has(q, "%s", "rejected")) runs_sleep_s(0.001);
    beside(q);
    runs_write(queue_path(q, "%s", "stop"), "");
    assert_int_equal(pthread_join(thread, &status), 0);
    fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    close(file);
    atomic_store(&planted_bytes, 0);
    char *text = runs_read(log, NULL);
    if ((intptr_t)status != BL_OK) printf("%s", text);
    assert_int_equal((intptr_t)status, BL_OK);
    bl_train_config_free(config);
    golden_args_free(&keys);
    golden_args_free(&args);
    return text;
}

static void await_both(queue *q)
{
    while (!queue_has(q, "%s", "done/job0.yaml") || !queue_has(q, "%s", "done/job1.yaml"))
        runs_sleep_s(0.001);
}

/* Waits until the log says that a job waits for memory. */
static void await_wait(queue *q)
{
    bool waits = false;

    while (!waits) {
        char *log = runs_read(runs_path("%s-log", q->name), NULL);
        waits = strstr(log, " waits until ") != NULL;
        free(log);
        runs_sleep_s(0.001);
    }
}

/* The second job is withdrawn while it waits for memory. */
static void withdraw(queue *q)
{
    await_wait(q);
    assert_int_equal(unlink(queue_path(q, "%s", "job1.yaml")), 0);
    while (!queue_has(q, "%s", "done/job0.yaml")) runs_sleep_s(0.001);
}

/* Submits a job that is larger than the base allows. */
static void put_large(queue *q)
{
    golden_args args = {0};
    queue_job_keys(&args, q->name, "queued", 0, q->ranks);
    runs_set(&args, "per_device_train_batch_size", "512");
    queue_write_keys(&args, queue_path(q, "%s", "job0.yaml"), QUEUE_JOB_KEYS);
    golden_args_free(&args);
    while (!queue_has(q, "%s", "rejected/job0.yaml")) runs_sleep_s(0.001);
}

static double predicted_gb(const char *log, int plan)
{
    static const char label[] = "memory predicted: ";
    const char *whole = log;
    for (int i = 0; log && i <= plan; i++) {
        log = strstr(log, label);
        if (log) log += strlen(label);
    }
    if (!log) printf("%s", whole);
    assert_non_null(log);
    return strtod(log, NULL);
}

/* Predictions in the log: for the base, with one job, with both. */
enum { OF_BASE, OF_ONE, OF_BOTH };

/* With memory for one job the other one waits, which is logged once. A job that is too large alone
 * is rejected. */
static void test_memory(void **state)
{
    queue ample = {.name = "ample", .ranks = 1}, little = {.name = "little", .ranks = 1},
          withdrawn = {.name = "withdrawn", .ranks = 1}, stopped = {.name = "stopped", .ranks = 1},
          none = {.name = "none", .ranks = 1};

    (void)state;
    char *log = serve_here(&ample, (int64_t)1 << 40, "40", await_both);
    double base = predicted_gb(log, OF_BASE), one = predicted_gb(log, OF_ONE),
           both = predicted_gb(log, OF_BOTH);
    assert_null(strstr(log, " waits until "));
    free(log);
    assert_true(base < both && one < both);

    int64_t for_one = (int64_t)((fmax(base, one) + both) / 2 * 1e9);
    log = serve_here(&little, for_one, "40", await_both);
    const char *said = strstr(log, "job job1.yaml waits until a run has ended: ");
    assert_non_null(said);
    assert_null(strstr(strchr(said, '\n'), " waits until "));
    free(log);
    for (int job = 0; job < 2; job++)
        assert_true(
            runs_are_same(runs_path("ample-queued-%d", job), runs_path("little-queued-%d", job)));

    log = serve_here(&withdrawn, for_one, "300", withdraw);
    assert_non_null(strstr(log, "job job1.yaml was withdrawn"));
    free(log);
    assert_int_equal(access(runs_path("withdrawn-queued-1/metrics.jsonl"), F_OK), -1);

    free(serve_here(&stopped, for_one, "100", await_wait));
    assert_true(queue_has(&stopped, "%s", "done/job0.yaml"));
    assert_true(queue_has(&stopped, "%s", "job1.yaml"));
    assert_int_equal(access(runs_path("stopped-queued-1/metrics.jsonl"), F_OK), -1);

    log = serve_here(&none, (int64_t)(both * 1e9), NULL, put_large);
    free(log);
    queue_assert_line(&none, "rejected/job0.yaml.error", "this run needs about ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory)};
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
