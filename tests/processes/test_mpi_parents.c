/* SPDX-License-Identifier: Apache-2.0 */
/* Two tasks of mpirun that are parents of two ranks each, as on two hosts: they end with one line,
 * the job's, and its exit code, whichever of them is done first. Both are on this host, but each is
 * configured as if alone on its host. */
#include "mpi_job.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "strike.h"

static const double LIMIT_S = 600;

/* The frame after a rank's first meeting with all others: they have begun, and still compare what
 * they have. */
enum { ENDLESS_STEPS = 1000000, FRAME_IN_START = 2 };

/* The first parent waits for a rank when the second one has none left; the other way round; neither
 * does. */
static const char *const slow_to_go[] = {"1:end:1:pause=3", "3:end:1:pause=3", "-1:end:1:pause=0"};

/* Two parents with ranks 0 and 1, 2 and 3; strike.h has the fault of one of them. */
static void start(runs_child *child, const golden_args *args, const char *strike)
{
    char *words[GOLDEN_MAX_ARGS + 2] = {(char *)"train"}, text[1024];
    const char *program = runs_path("parent.sh");

    for (int i = 0; i < args->n; i++) words[1 + i] = args->text[i];
    snprintf(text, sizeof text,
             "#!/bin/sh\n"
             "export OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 "
             "BALLAST_INTERFACE=lo\n"
             "export LD_PRELOAD=%s %s=%s\n"
             "exec '%s' \"$@\"\n",
             STRIKE_LIBRARY, STRIKE_VARIABLE, strike, BALLAST_PROGRAM);
    runs_write(program, text);
    assert_int_equal(chmod(program, 0755), 0);
    mpi_start(child, 2, program, words);
}

static void make_args(golden_args *args, const char *output)
{
    *args = (golden_args){0};
    runs_standard(args, output, 4);
    runs_set(args, "rank_processes", "true");
}

/* All four ranks leave with the exit code; one of them says why, and only to the first parent. */
static void test_failures(void **state)
{
    const struct {
        const char *key, *value;
        int code;
        const char *text;
    } cases[] = {
        {"train_file", "/absent.jsonl", 3, "/absent.jsonl: No such file"},
        {"output_dir", "/proc/ballast", 4, "/proc/ballast"},
        {"model_name_or_path", runs_overflowing_model(), 6, "not finite"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases) * BL_COUNT(slow_to_go); i++) {
        size_t which = i / BL_COUNT(slow_to_go);
        runs_child child = {0};
        golden_args args;
        make_args(&args, runs_path("fails-%zu", i));
        runs_set(&args, cases[which].key, "%s", cases[which].value);
        start(&child, &args, slow_to_go[i % BL_COUNT(slow_to_go)]);
        int code = runs_wait(&child, LIMIT_S);
        mpi_assert_error(&child, cases[which].text);
        if (code != cases[which].code)
            fail_msg("case %zu: exit %d, not %d", i, code, cases[which].code);
        golden_args_free(&args);
    }
}

/* A training that does not end, and the processes of its two parents. */
static void start_endless(runs_child *child, const char *output, const char *strike,
                          runs_child *parents, const char *grace)
{
    golden_args args;

    make_args(&args, output);
    runs_set(&args, "grace_s", "%s", grace);
    runs_set(&args, "max_steps", "%d", ENDLESS_STEPS);
    runs_set(&args, "save_steps", "0"); /* no save that a grace may not end */
    start(child, &args, strike);
    for (int i = 0; i < 2; i++) parents[i] = (runs_child){.pid = mpi_process_of(child, i)};
    golden_args_free(&args);
}

static void wait_for_steps(const runs_child *child, const char *output)
{
    while (runs_logged_steps(output) < 5) {
        if (!runs_is_alive(child)) fail_msg("the job ended: %s", runs_read(child->log, NULL));
        runs_sleep_s(0.005);
    }
}

/* Its parent knows of what, but has another rank to wait for; the other parent has none left, and
 * heard that it has died. */
static void test_a_rank_is_killed(void **state)
{
    runs_child child = {0}, parents[2];
    char text[64];

    (void)state;
    start_endless(&child, runs_path("killed"), "2:end:1:pause=3", parents, "20");
    wait_for_steps(&child, runs_path("killed"));
    pid_t victim = mpi_process_of(&parents[1], 3);
    kill(victim, SIGKILL);
    assert_int_equal(runs_wait(&child, LIMIT_S), 7);
    snprintf(text, sizeof text, "rank 3 (process %d on host ", (int)victim);
    mpi_assert_error(&child, text);
    mpi_assert_error(&child, "was killed by signal 9");
}

/* To one parent: all ranks stop, which the other one's parent hears from its own; after the step
 * or, without grace, inside it. */
static void test_request(void **state)
{
    static const char *const grace[] = {"20", "0"};
    static const char *const texts[] = {"stopped on request after step", "stopped inside a step"};

    (void)state;
    for (size_t i = 0; i < 2 * BL_COUNT(grace); i++) {
        const char *output = runs_path("asked-%zu", i);
        runs_child child = {0}, parents[2];
        start_endless(&child, output, slow_to_go[1 - i % 2], parents, grace[i / 2]);
        wait_for_steps(&child, output);
        kill(parents[i % 2].pid, SIGTERM);
        int code = runs_wait(&child, LIMIT_S);
        mpi_assert_error(&child, texts[i / 2]);
        assert_int_equal(code, 75);
    }
}

/* To one parent, while the step cannot end: the other one's ranks see some that are killed. */
static void test_second_request(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++) {
        const char *output = runs_path("twice-%d", which);
        runs_child child = {0}, parents[2];
        start_endless(&child, output, slow_to_go[2], parents, "20");
        wait_for_steps(&child, output);
        kill(mpi_process_of(&parents[1 - which], which == 0 ? 3 : 1), SIGSTOP);
        double end_s = bl_now_s() + 120;
        while (runs_is_alive(&child) && mpi_is_running(parents[which].pid)) {
            if (bl_now_s() > end_s) fail_msg("no request stops the parent");
            kill(parents[which].pid, SIGUSR1);
            runs_sleep_s(1.5);
        }
        int code = runs_wait(&child, LIMIT_S);
        mpi_assert_error(&child, "stopped at once on request");
        assert_int_equal(code, 75);
    }
}

/* Of one parent, before its ranks have begun: they go by the signal. */
static void test_early_request(void **state)
{
    runs_child child = {0}, parents[2];

    (void)state;
    start_endless(&child, runs_path("early"), "0:begin:1:pause=60", parents, "20");
    (void)mpi_process_of(&parents[0], 1); /* it comes after rank 0 */
    kill(parents[0].pid, SIGUSR1);
    int code = runs_wait(&child, LIMIT_S);
    mpi_assert_error(&child, "stopped at once on request");
    assert_int_equal(code, 75);
}

/* Of one parent, in the start of its ranks, which have begun and do not yet take requests: all of
 * them leave without a word. */
static void test_request_in_the_start(void **state)
{
    static const double MOST_S = 10.0; /* less than a parent waits for the others' word in vain */

    (void)state;
    for (int which = 0; which < 2; which++) {
        const char *struck = runs_path("struck-%d", which);
        runs_child child = {0}, parents[2];
        char strike[64];
        snprintf(strike, sizeof strike, "%d:wire:%d:pause=60", 2 * which, FRAME_IN_START);
        setenv(STRIKE_LOG_VARIABLE, struck, 1);
        start_endless(&child, runs_path("start-%d", which), strike, parents, "20");
        while (!bl_file_exists(struck)) {
            if (!runs_is_alive(&child)) fail_msg("the job ended: %s", runs_read(child.log, NULL));
            runs_sleep_s(0.005);
        }
        kill(parents[which].pid, SIGTERM);
        double asked_s = bl_now_s();
        int code = runs_wait(&child, LIMIT_S);
        double took_s = bl_now_s() - asked_s;
        unsetenv(STRIKE_LOG_VARIABLE);
        mpi_assert_error(&child, "stopped at once on request");
        assert_int_equal(code, 75);
        if (took_s > MOST_S) fail_msg("the job ended %.1f s after the request", took_s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_failures),      cmocka_unit_test(test_a_rank_is_killed),
        cmocka_unit_test(test_request),       cmocka_unit_test(test_second_request),
        cmocka_unit_test(test_early_request), cmocka_unit_test(test_request_in_the_start),
    };
    if (!mpi_is_here()) return 77;
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
