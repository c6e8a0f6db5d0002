/* SPDX-License-Identifier: Apache-2.0 */
/* The communicator of GPUs between processes when a rank is missing, dies, fails, is stopped or
 * hangs: every other rank ends within the deadline, and one reports the cause. On the emulated GPU
 * with the fake NCCL (emulator/), whose faults these tests request. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/sizes.h"
#include "emulator/emulated.h"
#include "nccl_jobs.h"

/* ---- calls that hang ---- */

/* Calls are not compared: the deadline ends the job. */
static void test_an_order_that_hangs(void **state)
{
    (void)state;
    nccl_run_failing("hang", 2, NULL, 7,
                     "waited for " NCCL_DEADLINE_S_TEXT " in all_gather, 4096 bytes, on test");
}

/* ---- ranks that are missing, die or fail ---- */

/* "rank 1 on HOST did not come within 5.0 s to WHAT" */
static const char *name_rank(int rank, const char *what)
{
    static char text[256];
    char host[64] = "";
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank %d on %s did not come within " NCCL_DEADLINE_S_TEXT " to %s",
             rank, host, what);
    return text;
}

static void test_a_missing_rank(void **state)
{
    (void)state;
    nccl_run_failing("away", 3, NULL, 7,
                     name_rank(1, "all_gather of layer 7, 4096 bytes, on test, number 1"));
    nccl_run_failing("away_first", 3, NULL, 7, "within " NCCL_DEADLINE_S_TEXT " to all_gather");
    nccl_run_failing("away_compared", 3, NULL, 7,
                     "rank 1 did not reach all_gather of layer 7 within " NCCL_DEADLINE_S_TEXT);
}

/* The earlier of two waits is reported: other ranks wait for rank 2, which waits for rank 3. */
static void test_a_missing_rank_of_a_pair(void **state)
{
    (void)state;
    nccl_run_failing("away_in_pair", 4, NULL, 7,
                     "rank 3 did not reach all_gather of layer 7 within " NCCL_DEADLINE_S_TEXT);
}

/* With many launches in flight the last one is watched, and a launch is not reported while those
 * before it run. */
static void test_a_crowd_of_launches(void **state)
{
    char what[128];
    (void)state;
    nccl_run_fine("crowd_slow", 3, NULL);
    snprintf(what, sizeof what,
             "waited for " NCCL_DEADLINE_S_TEXT
             " in all_gather of layer %d, 4096 bytes, on test, number %d:",
             NCCL_CROWD_FIRST, NCCL_CROWD_FIRST + 1);
    nccl_run_failing("crowd_first", 3, NULL, 7, what);
    snprintf(what, sizeof what,
             "all_gather of layer %d, 4096 bytes, on test, number %d (it had come to %d)",
             NCCL_CROWD - 1, NCCL_CROWD, NCCL_CROWD - 1);
    nccl_run_failing("crowd_last", 3, NULL, 7, name_rank(1, what));
}

static void test_an_error_of_a_rank_is_the_jobs(void **state)
{
    (void)state;
    nccl_run_failing("own_failure", 3, NULL, 6, "rank 1: a loss of nan");
}

static void test_a_rank_dies(void **state)
{
    (void)state;
    nccl_run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:1:kill"), 7,
                     "rank 1 has died");
    nccl_run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=2:20:kill"), 7,
                     "rank 2 has died");
    nccl_run_failing("rounds_of_two", 3, SETTINGS("BALLAST_EMULATED_FAULT=0:40:kill"), 7,
                     "rank 0 has died");
    nccl_run_failing(
        "rounds", 3,
        SETTINGS("BALLAST_EMULATED_FAULT=1:5:kill", "BALLAST_EMULATED_NCCL_ERRORS=report"), 7,
        "rank "); /* has died, or on another rank: "NCCL lost a rank" */
    nccl_run_failing("rounds", 2, SETTINGS("BALLAST_EMULATED_FAULT=1:init:kill"), 7,
                     "rank 1 has died");
}

static void test_a_call_of_nccl_fails(void **state)
{
    (void)state;
    nccl_run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:7:fail"), 4,
                     "rank 1: ncclAllGather(");
    nccl_run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:init:fail"), 4,
                     "rank 1: ncclCommInitRankConfig of test");
}

/* The error names the rank whose NCCL failed, and no other rank. */
static void test_nccl_reports_an_error(void **state)
{
    char text[160], host[64] = "";
    (void)state;
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank 1 on %s: NCCL failed in no collective on test: ", host);
    nccl_run_failing("idle", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:ask:fail"), 7, text);
}

static void test_a_slow_rank_is_waited_for(void **state)
{
    (void)state;
    nccl_run_fine("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:9:slow=0.7"));
    nccl_run_fine("rounds_first", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:9:slow=6"));
}

static void test_an_abort_that_hangs(void **state)
{
    (void)state;
    nccl_run_failing("away", 3, SETTINGS("BALLAST_EMULATED_NCCL_ABORT=hang"), 7, "did not come");
}

/* NCCL's abort frees memory that a thread inside a call still uses. If a rank hangs in a call, its
 * communicator is not aborted: the process ends. */
static bool is_not_aborted(const void *arg)
{
    nccl_job job;
    nccl_log log;
    (void)arg;
    nccl_log_open(&log);
    nccl_start(&job, "rounds", 3, SETTINGS(log.setting, "BALLAST_EMULATED_FAULT=1:window:stop"));
    nccl_wait_but(&job, 1);
    nccl_kill(&job, 1);
    nccl_wait(&job);
    for (int rank = 0; rank < 3; rank++) {
        const char *text = nccl_log_read(&log, rank);
        assert_non_null(strstr(text, "init "));
        if (strstr(text, "abort")) fail_msg("rank %d's NCCL: %s", rank, text);
    }
    nccl_log_close(&log, 3);
    return nccl_has_failed(&job, 7, "rank 1 on ");
}

static void test_a_call_that_hangs_is_not_aborted(void **state)
{
    (void)state;
    nccl_try_again("a window that hangs", is_not_aborted, NULL);
}

typedef struct hanging {
    const char *name;
    int rank, code;
    const char *text;
} hanging;

/* The watch of `rank` hangs in its first query of NCCL; then mark 1 is set. */
static bool fails_with_hanging_watch(const void *arg)
{
    const hanging *h = arg;
    char fault[64];
    nccl_job job;
    nccl_log log;

    nccl_log_open(&log);
    snprintf(fault, sizeof fault, "BALLAST_EMULATED_FAULT=%d:ask:hang", h->rank);
    nccl_start(&job, h->name, 3, SETTINGS(log.setting, fault));
    nccl_log_await(&log, h->rank, "fault hang");
    atomic_store(&job.board->marks[1], 1);
    nccl_wait(&job);
    nccl_log_close(&log, 3);
    return nccl_has_failed(&job, h->code, h->text);
}

static void run_with_hanging_watch(const char *name, int rank, int code, const char *text)
{
    nccl_try_again(name, fails_with_hanging_watch, &(hanging){name, rank, code, text});
}

/* Only the guard detects it: the rank itself may be fine. */
static void test_a_watch_that_hangs(void **state)
{
    char text[160], host[64] = "";
    (void)state;
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank 1 on %s hangs in CUDA or NCCL: the watch of test", host);
    run_with_hanging_watch("idle", 1, 7, text);
    snprintf(text, sizeof text, "rank 1 on %s", host); /* or of a rank that waits for it */
    run_with_hanging_watch("rounds_late", 1, 7, text);
    run_with_hanging_watch("own_failure_idle", 2, 6, "rank 1: a loss of nan");
}

/* Each query of NCCL takes longer than a pause that restarts deadlines. The deadline still ends the
 * job. */
static void test_a_watch_that_is_slow(void **state)
{
    (void)state;
    nccl_run_failing(
        "away", 3, SETTINGS("BALLAST_EMULATED_FAULT=0:ask:slow=2.2,1:ask:slow=2.2,2:ask:slow=2.2"),
        7, name_rank(1, "all_gather of layer 7, 4096 bytes, on test"));
}

/* The launcher kills a rank that stays stopped: here the test does. */
static bool is_found_stopped(const void *arg)
{
    const char *fault = arg;
    bool ends = strstr(fault, ":6:"); /* else a gather may block rank 0 until its guard ends it */
    nccl_job job;

    nccl_start(&job, "rounds", 3, SETTINGS(fault, ends ? "BALLAST_EMULATED_NCCL_ABORT=all" : NULL));
    if (ends) nccl_await_failure(&job, 0);
    nccl_wait_but(&job, 1);
    nccl_kill(&job, 1);
    nccl_wait(&job);
    return nccl_has_failed(&job, 7, "rank 1 on ");
}

static void test_a_stopped_rank_is_found(void **state)
{
    static const char *const faults[] = {
        "BALLAST_EMULATED_FAULT=1:6:stop", "BALLAST_EMULATED_FAULT=1:7:stop",
        "BALLAST_EMULATED_FAULT=1:init:stop", "BALLAST_EMULATED_FAULT=1:destroy:stop"};
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        nccl_try_again(faults[i], is_found_stopped, faults[i]);
}

/* Ctrl-Z and fg: no rank is reported. */
static void test_a_pause_of_all_blames_nobody(void **state)
{
    static const struct timespec PAUSE = {NCCL_DEADLINE_S + 2, 0};
    nccl_job job;

    (void)state;
    nccl_start(&job, "pause", 3, NULL);
    nccl_await(&job, 0, 2);
    for (int i = 0; i < 3; i++) kill(job.pids[i], SIGSTOP);
    nanosleep(&PAUSE, NULL);
    for (int i = 0; i < 3; i++) kill(job.pids[i], SIGCONT);
    atomic_store(&job.board->marks[1], 1);
    nccl_wait(&job);
    nccl_assert_fine(&job);
}

/* The processes mostly wait for deadlines of seconds: ctest runs the groups in parallel. */
int main(int argc, char **argv)
{
    nccl_become(argc, argv, nccl_cases);
    if (!emulated_cuda_have_devices(8)) return 77;
    const char *group = argc > 1 ? argv[1] : "";
    const struct CMUnitTest late[] = {
        cmocka_unit_test(test_an_order_that_hangs),
        cmocka_unit_test(test_a_missing_rank),
        cmocka_unit_test(test_a_missing_rank_of_a_pair),
        cmocka_unit_test(test_a_slow_rank_is_waited_for),
    };
    const struct CMUnitTest dead[] = {
        cmocka_unit_test(test_an_error_of_a_rank_is_the_jobs),
        cmocka_unit_test(test_a_rank_dies),
        cmocka_unit_test(test_a_call_of_nccl_fails),
        cmocka_unit_test(test_nccl_reports_an_error),
        cmocka_unit_test(test_an_abort_that_hangs),
        cmocka_unit_test(test_a_call_that_hangs_is_not_aborted),
    };
    const struct CMUnitTest watched[] = {
        cmocka_unit_test(test_a_crowd_of_launches),
        cmocka_unit_test(test_a_watch_that_hangs),
        cmocka_unit_test(test_a_watch_that_is_slow),
    };
    const struct CMUnitTest stopped[] = {
        cmocka_unit_test(test_a_stopped_rank_is_found),
        cmocka_unit_test(test_a_pause_of_all_blames_nobody),
    };
    if (!strcmp(group, "late")) return cmocka_run_group_tests(late, NULL, NULL);
    if (!strcmp(group, "dead")) return cmocka_run_group_tests(dead, NULL, NULL);
    if (!strcmp(group, "watched")) return cmocka_run_group_tests(watched, NULL, NULL);
    if (!strcmp(group, "stopped")) return cmocka_run_group_tests(stopped, NULL, NULL);
    fprintf(stderr, "usage: test_comm_nccl_failures late | dead | watched | stopped\n");
    return 2;
}
