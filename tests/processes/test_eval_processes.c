/* SPDX-License-Identifier: Apache-2.0 */
/* `ballast eval` with several ranks: as processes, which the program itself or mpirun starts, they
 * print the same bytes as threads of one process; a rank that is killed, stopped or fails is named
 * in one line, with the exit code of `ballast train`, and nothing else is printed or left behind.
 * The argument is the device: "cpus", or "gpus", emulated ones, of which processes have one each
 * and threads share one. The loss is printed with 12 digits: one bit of one row's loss, in fp32,
 * shows in the 9th. */
#include "cuda_runs.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/sizes.h"
#include "mpi_job.h"
#include "skip.h"
#include "strike.h"

enum { LIMIT_S = 600, KEY_BYTES = 512 };

/* Ranks of PINNED_THREADS see as many GPUs as there are ranks; a key makes them threads. */
typedef enum form { THREADS, PINNED_THREADS, CHILDREN, TASKS } form;

static const char *const form_names[] = {[THREADS] = "threads",
                                         [PINNED_THREADS] = "threads beside several GPUs",
                                         [CHILDREN] = "children",
                                         [TASKS] = "tasks"};

static bool has_gpus;

/* ---- one evaluation ---- */

static bool takes_stdout(const int *unused)
{
    (void)unused;
    int fd = open(runs_path("stdout"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    return fd >= 0 && dup2(fd, 1) == 1 && close(fd) == 0;
}

static bool has_full_stdout(const int *unused)
{
    (void)unused;
    int fd = open("/dev/full", O_WRONLY);
    return fd >= 0 && dup2(fd, 1) == 1 && close(fd) == 0;
}

static void make_args(golden_args *args, form f, int n_ranks, const char *keys)
{
    *args = (golden_args){0};
    golden_args_add(args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
    golden_args_add(args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
    golden_args_add(args, "data_format", "tokens");
    golden_args_add(args, "max_seq_length", "64");
    golden_args_add(args, "threads", "1");
    golden_args_add(args, "device", has_gpus ? "cuda" : "cpu");
    golden_args_add(args, "ranks", "%d", n_ranks);
    /* On GPUs the children are the default. */
    if (f == PINNED_THREADS) golden_args_add(args, "rank_processes", "false");
    if (f == CHILDREN && !has_gpus) golden_args_add(args, "rank_processes", "true");
    cuda_runs_set_all(args, keys);
}

static void start(runs_child *child, form f, int n_ranks, const golden_args *args)
{
    char n_gpus[16];

    snprintf(n_gpus, sizeof n_gpus, "%d", f == THREADS ? 1 : n_ranks);
    setenv("BALLAST_EMULATED_DEVICES", n_gpus, 1);
    if (f == TASKS)
        mpi_start_ballast(child, n_ranks, NULL, "eval", args);
    else
        runs_start(child, "eval", args);
}

/* What it printed; the caller's. mpirun hands it on to where the errors are. */
static char *printed_by(const runs_child *child, form f)
{
    char *text = runs_read(f == TASKS ? child->log : runs_path("stdout"), NULL),
         *line = strstr(text, "{\"eval_loss\":"), *end = line ? strchr(line, '\n') : NULL;

    if (!end || strstr(end, "{\"eval_loss\":")) fail_msg("not one result: %s", text);
    if (f != TASKS && (line != text || end[1] != '\0')) fail_msg("not the result alone: %s", text);
    end[1] = '\0';
    memmove(text, line, strlen(line) + 1);
    return text;
}

static char *evaluate(form f, int n_ranks, const char *keys)
{
    golden_args args;
    runs_child child = {.prepare = takes_stdout};

    make_args(&args, f, n_ranks, keys);
    start(&child, f, n_ranks, &args);
    int code = runs_wait(&child, LIMIT_S);
    char *log = runs_read(child.log, NULL);
    if (code != 0) fail_msg("%d %s, %s: exit code %d\n%s", n_ranks, form_names[f], keys, code, log);
    bool has_nccl = strstr(log, "NCCL 2.") != NULL;
    if (has_nccl != (has_gpus && f >= CHILDREN)) fail_msg("%s: NCCL or not\n%s", keys, log);
    free(log);
    golden_args_free(&args);
    return printed_by(&child, f);
}

/* ---- the same result ---- */

#define ADAPTER "init_adapter " GOLDEN_DIR "/adapters/tiny-gqa-all-linear "
#define FP8     "model_name_or_path demo/base compute_dtype fp8 base_format fp8_row"

/* Threads with `plain`; then each form with `plain` and `more`. There are four rows. */
static const struct {
    int n_ranks;
    const char *plain, *more;
    bool is_of_gpus;
} cases[] = {
    {2, "", "offload_ratio 0", false},
    {2, ADAPTER, "offload_ratio 1", false},
    {3, "", "offload_ratio 1 visit_tokens 1", false},
    {3, ADAPTER "per_device_eval_batch_size 1", "offload_ratio 0", false},
    {5, ADAPTER, "offload_ratio 0.5", false},
    {4, ADAPTER, "shard_size 2 offload_ratio 1", false},
    {2, ADAPTER, "offload_ratio 1 offload_tier disk offload_dir %s/pages", false},
    {2, FP8, "offload_ratio 1", true},
};

static void test_same_result(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char keys[KEY_BYTES];
        if (cases[i].is_of_gpus && !has_gpus) continue;
        snprintf(keys, sizeof keys, "%s %s", cases[i].plain, cases[i].more);
        char *wanted = evaluate(THREADS, cases[i].n_ranks, cases[i].plain);
        for (form f = PINNED_THREADS; f <= CHILDREN; f++) {
            char *text = evaluate(f, cases[i].n_ranks, keys);
            if (strcmp(text, wanted) != 0)
                fail_msg("%d %s, %s: %s, not %s", cases[i].n_ranks, form_names[f], keys, text,
                         wanted);
            free(text);
        }
        free(wanted);
    }
}

static void test_adapter_counts(void **state)
{
    (void)state;
    char *base = evaluate(CHILDREN, 2, ""), *adapted = evaluate(CHILDREN, 2, ADAPTER);
    assert_string_not_equal(base, adapted);
    free(base);
    free(adapted);
}

static void test_under_mpirun(void **state)
{
    (void)state;
#ifdef TEST_HAS_MPI
    if (!mpi_is_here()) TEST_SKIP("no mpirun");
    char *wanted = evaluate(THREADS, 3, ADAPTER),
         *text = evaluate(TASKS, 3, ADAPTER "offload_ratio 1");
    assert_string_equal(text, wanted);
    free(text);
    free(wanted);
#else
    TEST_SKIP("this build has no MPI");
#endif
}

/* ---- failures ---- */

static void test_errors(void **state)
{
    static const struct {
        const char *keys;
        int code;
        const char *text;
        bool is_of_gpus;
    } errors[] = {
        {"shard_size 2", 2, "shard_size 2 does not divide ranks 3", false},
        {"validation_file /absent.jsonl", 3, "/absent.jsonl: No such file", false},
        {"init_adapter /absent", 3, "/absent", false},
        {"ranks 4", 2, "ranks: 4 on this host, but it has 3 GPUs", true},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(errors); i++) {
        golden_args args;
        runs_child child = {.prepare = takes_stdout};
        size_t n_bytes;
        if (errors[i].is_of_gpus && !has_gpus) continue;
        make_args(&args, CHILDREN, 3, errors[i].keys);
        start(&child, CHILDREN, 3, &args);
        int code = runs_wait(&child, LIMIT_S);
        if (code != errors[i].code) fail_msg("%s: exit code %d", errors[i].keys, code);
        runs_assert_error(&child, errors[i].text);
        free(runs_read(runs_path("stdout"), &n_bytes));
        assert_int_equal(n_bytes, 0);
        mpi_assert_nobody_left(errors[i].keys);
        golden_args_free(&args);
    }
}

static void test_full_stdout(void **state)
{
    golden_args args;
    runs_child child = {.prepare = has_full_stdout};

    (void)state;
    make_args(&args, CHILDREN, 2, "");
    start(&child, CHILDREN, 2, &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 4);
    runs_assert_error(&child, "writing to the standard output");
    golden_args_free(&args);
}

/* A rank's fault: at a launch of NCCL, or by strike.h. */
static const struct fault {
    const char *gpus, *cpus;
    int code;
    const char *text;
} faults[] = {
    {"1:init:kill", "1:begin:1:kill", 7, "rank 1 (process "},
    {"2:3:kill", "2:wire:3:kill", 7, "rank 2 (process "},
    {"0:12:kill", "0:wire:17:kill", 7, "rank 0 (process "},
    {"1:20:kill", "1:wire:40:kill", 7, "rank 1 (process "},
    {"2:destroy:kill", "2:wire:30:torn", 7, "rank 2 (process "},
    {"2:9:fail", NULL, 4, "rank 2: nccl"},
    {"1:15:stop", "1:wire:33:stop", 7, "rank 1 "}, /* after the deadline */
};

static void start_struck(runs_child *child, golden_args *args, const char *fault,
                         const char *deadline)
{
    char keys[KEY_BYTES];

    snprintf(keys, sizeof keys, ADAPTER "offload_ratio 1 step_deadline_s %s", deadline);
    make_args(args, CHILDREN, 3, keys);
#ifdef STRIKE_LIBRARY
    if (!has_gpus) setenv("LD_PRELOAD", STRIKE_LIBRARY, 1);
#endif
    setenv(has_gpus ? "BALLAST_EMULATED_FAULT" : STRIKE_VARIABLE, fault, 1);
    start(child, CHILDREN, 3, args);
    unsetenv("LD_PRELOAD");
    unsetenv("BALLAST_EMULATED_FAULT");
    unsetenv(STRIKE_VARIABLE);
}

static void test_a_rank_is_struck(void **state)
{
    (void)state;
#ifndef STRIKE_LIBRARY
    TEST_SKIP("sanitizers want to be the first library of a process");
#endif
    for (size_t i = 0; i < BL_COUNT(faults); i++) {
        const char *fault = has_gpus ? faults[i].gpus : faults[i].cpus;
        golden_args args;
        runs_child child = {.prepare = takes_stdout};
        size_t n_bytes;
        if (!fault) continue;
        start_struck(&child, &args, fault, "20");
        int code = runs_wait(&child, LIMIT_S);
        if (code != faults[i].code)
            fail_msg("%s: exit code %d\n%s", fault, code, runs_read(child.log, NULL));
        mpi_assert_error(&child, faults[i].text);
        free(runs_read(runs_path("stdout"), &n_bytes));
        if (n_bytes > 0) fail_msg("%s: a result in spite of it", fault);
        mpi_assert_nobody_left(fault);
        golden_args_free(&args);
    }
}

/* There is nothing to finish or to save: SIGTERM ends the parent, and SIGKILL, and the kernel the
 * ranks, which cannot go on without one of them. */
static void test_the_parent_is_ended(void **state)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGKILL};

    (void)state;
#ifndef STRIKE_LIBRARY
    TEST_SKIP("sanitizers want to be the first library of a process");
#endif
    for (size_t i = 0; i < BL_COUNT(signals); i++) {
        golden_args args;
        runs_child child = {.prepare = takes_stdout};
        start_struck(&child, &args, has_gpus ? "1:15:stop" : "1:wire:33:stop", "0");
        mpi_wait_for_text(&child, has_gpus ? "NCCL 2." : "memory predicted", 1);
        kill(child.pid, signals[i]);
        assert_int_equal(runs_wait(&child, LIMIT_S), -signals[i]);
        mpi_assert_error(&child, NULL);
        mpi_assert_nobody_left("a signal to the parent");
        golden_args_free(&args);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_result),         cmocka_unit_test(test_adapter_counts),
        cmocka_unit_test(test_under_mpirun),        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_full_stdout),         cmocka_unit_test(test_a_rank_is_struck),
        cmocka_unit_test(test_the_parent_is_ended),
    };
    if (argc != 2) return 2;
    has_gpus = strcmp(argv[1], "gpus") == 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    return cmocka_run_group_tests_name(argv[1], tests, runs_set_up, runs_tear_down);
}
