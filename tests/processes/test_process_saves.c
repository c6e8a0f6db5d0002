/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints and page files of a parent and its two ranks, disturbed while they are written. */
#include "mpi_job.h"

#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "skip.h"

static const double LIMIT_S = 600;

static void endless_run(golden_args *args, const char *output)
{
    *args = (golden_args){0};
    runs_standard(args, output, 2);
    runs_set(args, "rank_processes", "true");
    runs_set(args, "max_steps", "1000000");
    runs_set(args, "eval_strategy", "no");
}

static bool can_trace(void)
{
    return system("strace -f --seccomp-bpf -qq -e trace=fsync -o /dev/null true 2>/dev/null") == 0;
}

/* "--trace=CALL", and "--inject=CALL:delay_enter=MICROSECONDS" */
static void start_delayed(runs_child *child, const char *trace, const char *inject,
                          const golden_args *args)
{
    const char *argv[GOLDEN_MAX_ARGS + 16] = {"strace",
                                              "-D",
                                              "-f",
                                              "--seccomp-bpf",
                                              "-qq",
                                              "-o",
                                              "/dev/null",
                                              trace,
                                              inject,
                                              "env",
                                              "ASAN_OPTIONS=detect_leaks=0", /* not when traced */
                                              BALLAST_PROGRAM,
                                              "train"};
    int n = 0;

    while (argv[n]) n++;
    for (int i = 0; i < args->n; i++) argv[n++] = args->text[i];
    mpi_start_program(child, argv);
}

/* Each fsync takes 2 s, so a save several times as long as grace_s, which the steps are well
 * within: the checkpoint is kept all the same. */
static void test_grace_runs_out_in_a_save(void **state)
{
    const char *output = runs_path("slow-save");
    runs_child child = {0};
    golden_args args;

    (void)state;
    if (!can_trace()) TEST_SKIP("there is no strace, or it may not trace");
    endless_run(&args, output);
    runs_set(&args, "save_steps", "0");
    runs_set(&args, "grace_s", "5");
    start_delayed(&child, "--trace=fsync", "--inject=fsync:delay_enter=2000000", &args);
    mpi_wait_for_steps(&child, output, 3);
    double asked_s = bl_now_s();
    kill(child.pid, SIGTERM);
    assert_int_equal(runs_wait(&child, LIMIT_S), 75);
    assert_true(bl_now_s() - asked_s > 6.0);
    runs_assert_stopped(&child, "stopped on request after step");
    golden_args_free(&args);
}

static size_t count_files(const char *dir, const char *pattern)
{
    char path[2 * GOLDEN_PATH_BYTES];
    glob_t found;

    snprintf(path, sizeof path, "%s/%s", dir, pattern);
    size_t n = glob(path, GLOB_NOSORT, NULL, &found) == 0 ? found.gl_pathc : 0;
    globfree(&found);
    return n;
}

static bool has_shard_of_rank_1(const char *output)
{
    return count_files(output, "checkpoints/*.tmp/state-00001-*") > 0;
}

/* fallocate comes behind the making of a page file and before the first byte of the base. Whatever
 * grace_s is, the job ends when it has returned, and removes its files. */
static void test_stopped_while_loading(void **state)
{
    const char *pages = runs_path("pages");
    runs_child child = {0};
    golden_args args;
    pid_t ranks[2];

    (void)state;
    if (!can_trace()) TEST_SKIP("there is no strace, or it may not trace");
    endless_run(&args, runs_path("slow-load"));
    runs_set(&args, "offload_ratio", "1");
    runs_set(&args, "offload_tier", "disk");
    runs_set(&args, "offload_dir", "%s", pages);
    start_delayed(&child, "--trace=fallocate", "--inject=fallocate:delay_enter=1000000", &args);
    while (count_files(pages, "base-*.tmp-*") < 2) {
        assert_true(runs_is_alive(&child));
        runs_sleep_s(0.001);
    }
    for (int i = 0; i < 2; i++) ranks[i] = mpi_process_of(&child, i);
    double asked_s = bl_now_s();
    kill(child.pid, SIGTERM);
    assert_int_equal(runs_wait(&child, LIMIT_S), 75);
    assert_true(bl_now_s() - asked_s < 10.0);
    runs_assert_stopped(&child, "stopped on request before this run's first step: nothing is lost");
    mpi_assert_gone(ranks, 2);
    assert_int_equal(count_files(pages, "*"), 0);
    golden_args_free(&args);
}

/* While rank 1 writes its part of a checkpoint: it has no lock, speaks first, and says the same. */
static void test_output_dir_is_removed_in_a_save(void **state)
{
    enum { N_TRIES = 6 };

    (void)state;
    for (int i = 0; i < N_TRIES; i++) {
        const char *output = runs_path("in-save-%d", i);
        golden_args args;
        runs_child child = {0};
        pid_t ranks[2];

        endless_run(&args, output);
        runs_set(&args, "save_steps", "5");
        runs_start(&child, "train", &args);
        for (int k = 0; k < 2; k++) ranks[k] = mpi_process_of(&child, k);
        mpi_wait_for_steps(&child, output, 5);
        while (!has_shard_of_rank_1(output)) assert_true(runs_is_alive(&child));
        kill(ranks[1], SIGSTOP);
        kill(ranks[0], SIGSTOP);
        mpi_wait_for_stop(ranks[1]);
        mpi_wait_for_stop(ranks[0]);
        assert_int_equal(rename(output, runs_path("in-save-%d-gone", i)), 0);
        kill(ranks[1], SIGCONT);
        runs_sleep_s(0.2);
        kill(ranks[0], SIGCONT);
        assert_int_equal(runs_wait(&child, LIMIT_S), 4);
        runs_assert_error(&child, "was removed while this process used it");
        mpi_assert_gone(ranks, 2);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grace_runs_out_in_a_save),
        cmocka_unit_test(test_output_dir_is_removed_in_a_save),
        cmocka_unit_test(test_stopped_while_loading),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
