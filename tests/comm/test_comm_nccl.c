/* SPDX-License-Identifier: Apache-2.0 */
/* The communicator of GPUs between processes: on the emulated GPU with the fake NCCL (emulator/),
 * whose faults these tests ask for. Values are compared with serial sums in rank order bit for bit,
 * as those of every other communicator are. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/sizes.h"
#include "base/clock.h"
#include "nccl_cases.h"
#include "skip.h"

#define SETTINGS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void run_fine(const char *name, int n_ranks, const char *const *settings)
{
    nccl_job job;
    nccl_start(&job, name, n_ranks, settings);
    nccl_wait(&job);
    nccl_assert_fine(&job);
}

/* Whether the job fails as it should. */
typedef bool (*attempt_fn)(const void *arg);

/* A rank that the machine holds up for some seconds may end a job in another way, and rightly: it
 * is tried again, visibly. What is wrong with the communicator is wrong each time. */
static void try_again(const char *name, attempt_fn attempt, const void *arg)
{
    enum { MAX_TRIES = 3 };

    for (int i = 0; i < MAX_TRIES; i++) {
        if (i > 0) print_message("again: %s\n", name);
        if (attempt(arg)) return;
    }
    fail_msg("%s failed otherwise than it should, %d times", name, MAX_TRIES);
}

typedef struct failing {
    const char *name;
    int n_ranks, code;
    const char *const *settings;
    const char *text;
} failing;

static bool fails(const void *arg)
{
    const failing *f = arg;
    nccl_job job;

    nccl_start(&job, f->name, f->n_ranks, f->settings);
    nccl_wait(&job);
    assert_int_equal(atomic_load(&job.board->marks[2]), 0); /* nothing that was lost ended well */
    return nccl_has_failed(&job, f->code, f->text);
}

static void run_failing(const char *name, int n_ranks, const char *const *settings, int code,
                        const char *text)
{
    try_again(name, fails, &(failing){name, n_ranks, code, settings, text});
}

/* A log of the fake NCCL, "FILE.RANK". */
typedef struct nccl_log {
    char file[32], setting[64];
} nccl_log;

static void log_open(nccl_log *log)
{
    strcpy(log->file, "/tmp/nccl_log.XXXXXX");
    int fd = mkstemp(log->file);
    assert_true(fd >= 0);
    close(fd);
    snprintf(log->setting, sizeof log->setting, "BALLAST_EMULATED_NCCL_LOG=%s", log->file);
}

/* Returns a static text. */
static const char *log_read(const nccl_log *log, int rank)
{
    static char text[4096];
    char path[64];
    snprintf(path, sizeof path, "%s.%d", log->file, rank);
    FILE *file = fopen(path, "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = '\0';
    if (file) fclose(file);
    return text;
}

static void log_await(const nccl_log *log, int rank, const char *line)
{
    double end_s = bl_now_s() + 60;
    while (!strstr(log_read(log, rank), line)) {
        if (bl_now_s() > end_s) fail_msg("rank %d's NCCL did not say: %s", rank, line);
        usleep(1000);
    }
}

static void log_close(const nccl_log *log, int n_ranks)
{
    char path[64];
    unlink(log->file);
    for (int rank = 0; rank < n_ranks; rank++) {
        snprintf(path, sizeof path, "%s.%d", log->file, rank);
        unlink(path);
    }
}

/* ---- values ---- */

static void test_values(void **state)
{
    static const int counts[] = {1, 2, 3, 4, 8};
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) run_fine("values", counts[i], NULL);
    run_fine("values_in_windows", 3, NULL);
}

static void test_values_strictly(void **state)
{
    (void)state;
    run_fine("values", 3, SETTINGS("BALLAST_EMULATED=strict"));
    run_fine("layers", 2, SETTINGS("BALLAST_EMULATED=strict"));
}

static void test_sums_of_several_pieces(void **state)
{
    (void)state;
    run_fine("large", 2, NULL);
    run_fine("large", 3, NULL);
}

static void test_negative_zero(void **state)
{
    (void)state;
    run_fine("negative_zero", 1, NULL);
    run_fine("negative_zero", 3, NULL);
}

static void test_groups(void **state)
{
    (void)state;
    run_fine("split", 2, NULL);
    run_fine("split", 4, NULL);
    run_fine("split", 8, NULL);
}

static void test_gathers_beside_sums(void **state)
{
    (void)state;
    run_fine("layers", 3, SETTINGS("BALLAST_EMULATED_SEED=5"));
    run_fine("layers", 4, NULL);
    run_fine("layers_compared", 3, SETTINGS("BALLAST_EMULATED_SEED=6"));
}

/* ---- memory and paths ---- */

/* Whether rank 0's log has the text. */
static void check_memory(const char *name, const char *const *settings, const char *text)
{
    nccl_job job;
    nccl_start(&job, name, 2, settings);
    nccl_wait(&job);
    nccl_assert_fine(&job);
    if (!strstr(job.text[0], text)) fail_msg("no \"%s\" in: %s", text, job.text[0]);
    if (job.text[1][0]) fail_msg("rank 1 says: %s", job.text[1]);
}

static void test_memory_and_paths(void **state)
{
    (void)state;
    check_memory("memory", NULL,
                 "asked to gather by copy engines; this version does not tell whether it does");
    check_memory("memory", SETTINGS("BALLAST_EMULATED_NCCL_VERSION=22900"),
                 "asked to gather by copy engines, in symmetric windows");
    check_memory("memory", NULL, "NCCL 2.28.9 between 2 GPUs");
    check_memory("memory", SETTINGS("BALLAST_EMULATED_NCCL_WINDOWS=no"),
                 "does not tell whether it does");
    check_memory(
        "memory",
        SETTINGS("BALLAST_EMULATED_NCCL_WINDOWS=no", "BALLAST_EMULATED_NCCL_VERSION=22900"),
        "by kernels: this machine has no symmetric windows");
    check_memory("memory", SETTINGS("BALLAST_EMULATED_NCCL_VERSION=22703"),
                 "by kernels, in symmetric windows: this version has no gathers by copy engines");
    check_memory("memory", SETTINGS("BALLAST_EMULATED_NCCL_VERSION=21903"),
                 "by kernels: this version has no symmetric windows");
    check_memory("memory", SETTINGS("BALLAST_EMULATED_DRIVER=13010"),
                 "by kernels, in symmetric windows: with a driver of CUDA 13.1 or later");
    check_memory("memory",
                 SETTINGS("BALLAST_EMULATED_DRIVER=13010", "BALLAST_EMULATED_NCCL_VERSION=22902"),
                 "asked to gather by copy engines, in symmetric windows");
    check_memory("memory_plain", NULL, "by kernels: copy engines are not asked for");
    run_failing("memory", 2, SETTINGS("BALLAST_EMULATED_NCCL_WINDOWS=fail"), 1,
                "ncclCommWindowRegister of test: ");
    run_fine("memory_lack", 3, SETTINGS("BALLAST_EMULATED_MEMORY_MIB=64"));
}

/* Only the ring's gathers use windows. */
static void test_the_ring_uses_copy_engines(void **state)
{
    char file[] = "/tmp/nccl_counts.XXXXXX", setting[64], text[4096];
    int fd = mkstemp(file);
    (void)state;
    assert_true(fd >= 0);
    snprintf(setting, sizeof setting, "BALLAST_EMULATED_COUNTS=%s", file);
    run_fine("layers", 1 + 1, SETTINGS(setting));
    FILE *counts = fopen(file, "r");
    assert_non_null(counts);
    size_t n = fread(text, 1, sizeof text - 1, counts);
    text[n] = '\0';
    fclose(counts);
    close(fd);
    unlink(file);
    if (!strstr(text, "nccl:all_gather:copy_engine") || strstr(text, "nccl:all_gather:kernel"))
        fail_msg("counted: %s", text);
}

/* Kernels of NCCL leave the multiprocessors to the products; copy engines are asked for only where
 * they work, windows in any case. */
static void test_what_nccl_is_asked_for(void **state)
{
    static const struct {
        const char *driver, *init;
    } cases[] = {{"BALLAST_EMULATED_DRIVER=13000", "max_ctas=8 policy=2"},
                 {"BALLAST_EMULATED_DRIVER=13010", "max_ctas=8 policy=-2147483648"}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        nccl_log log;
        log_open(&log);
        run_fine("memory", 2, SETTINGS(log.setting, cases[i].driver));
        for (int rank = 0; rank < 2; rank++) {
            assert_non_null(strstr(log_read(&log, rank), cases[i].init));
            assert_non_null(strstr(log_read(&log, rank), "window "));
        }
        log_close(&log, 2);
    }
}

/* A sum for which the scratch was made is one exchange, and so one wait for multiprocessors. */
static void test_a_layers_sum_is_one_exchange(void **state)
{
    static const struct {
        const char *name;
        int exchanges; /* of 20 MB */
    } cases[] = {{"sum", 5}, {"sum_at_once", 1}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        nccl_log log;
        int n = 0;

        log_open(&log);
        run_fine(cases[i].name, 3, SETTINGS(log.setting));
        for (const char *at = log_read(&log, 0); (at = strstr(at, " pairs ")); at++) n++;
        assert_int_equal(n, cases[i].exchanges);
        log_close(&log, 3);
    }
}

/* ---- the library ---- */

static void test_libraries_that_will_not_do(void **state)
{
    (void)state;
    run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_VERSION=0"), 4,
                "several GPUs need NCCL: libnccl.so.2");
    run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_VERSION=21805"), 4,
                "NCCL 2.18 is too old: Ballast needs 2.19");
    run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_HIDE=ncclSend,ncclRecv"), 4,
                "libnccl.so.2 has no ncclSend, ncclRecv");
    run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_HIDE=ncclGetVersion"), 4,
                "ncclGetVersion");
    run_failing("values", 3, SETTINGS("NCCL_COMM_BLOCKING=0"), 2,
                "ncclCommInitRankConfig of test did not block: unset NCCL_COMM_BLOCKING");
}

static void test_two_ranks_with_one_gpu(void **state)
{
    char text[160], host[64] = "";
    (void)state;
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text,
             "ranks 2 and 3 have the same GPU, FFFF:02:00.0 on %s; each needs one", host);
    run_failing("values", 4, SETTINGS("BALLAST_TEST_GPUS=3"), 4, text);
}

/* Machines that were installed alike: one name, and their GPUs have the same places. NCCL is asked
 * for no window, which would go over their network. */
static void test_two_hosts_with_one_name(void **state)
{
    char file[] = "/tmp/boot_id.XXXXXX", setting[64];
    nccl_log log;
    (void)state;
    if (system("unshare --mount true 2>/dev/null") != 0) TEST_SKIP("no mount namespaces");
    int fd = mkstemp(file);
    assert_true(fd >= 0 && write(fd, "another\n", 8) == 8);
    close(fd);
    snprintf(setting, sizeof setting, "BALLAST_TEST_BOOT_ID=%s", file);
    run_fine("values", 2, SETTINGS("BALLAST_TEST_GPUS=1", setting));
    log_open(&log);
    check_memory("memory", SETTINGS(log.setting, setting),
                 "by kernels: copy engines work inside one host, and the group spans several");
    for (int rank = 0; rank < 2; rank++) assert_null(strstr(log_read(&log, rank), "window "));
    log_close(&log, 2);
    unlink(file);
}

/* ---- the order of calls ---- */

static void test_other_calls_are_found(void **state)
{
    (void)state;
    run_failing("other_kind", 3, NULL, 1, "launch different collectives: ");
    run_failing("other_kind", 2, NULL, 1,
                "ranks 0 and 1 launch different collectives: all_gather, 4096 bytes, on test, and "
                "broadcast from rank 1, 4096 bytes, on test");
    run_failing("other_size", 2, NULL, 1, "all_gather, 4095 bytes, on test");
    run_failing(
        "other_label", 2, NULL, 1,
        "all_gather of layer 0, 4096 bytes, on test, and all_gather of layer 1, 4096 bytes");
    run_failing("other_comm", 2, NULL, 1,
                "all_gather, 4096 bytes, on test, and all_gather, 4096 bytes, on test#2");
    run_failing("other_trust", 2, NULL, 1, "trust_order");
}

/* The comparison of calls is off: the deadline ends it. */
static void test_an_order_that_hangs(void **state)
{
    (void)state;
    run_failing("hang", 2, NULL, 7,
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
    run_failing("away", 3, NULL, 7,
                name_rank(1, "all_gather of layer 7, 4096 bytes, on test, number 1"));
    run_failing("away_first", 3, NULL, 7, "within " NCCL_DEADLINE_S_TEXT " to all_gather");
    run_failing("away_compared", 3, NULL, 7,
                "rank 1 did not reach all_gather of layer 7 within " NCCL_DEADLINE_S_TEXT);
}

/* Of two waits the earlier call is reported: ranks wait for rank 2 because it waits for rank 3. */
static void test_a_missing_rank_of_a_pair(void **state)
{
    (void)state;
    run_failing("away_in_pair", 4, NULL, 7,
                "rank 3 did not reach all_gather of layer 7 within " NCCL_DEADLINE_S_TEXT);
}

/* However many launches are under way, the last one is watched, and none has to answer for those
 * before it. */
static void test_a_crowd_of_launches(void **state)
{
    char what[128];
    (void)state;
    run_fine("crowd_slow", 3, NULL);
    snprintf(what, sizeof what,
             "waited for " NCCL_DEADLINE_S_TEXT
             " in all_gather of layer %d, 4096 bytes, on test, number %d:",
             NCCL_CROWD_FIRST, NCCL_CROWD_FIRST + 1);
    run_failing("crowd_first", 3, NULL, 7, what);
    snprintf(what, sizeof what,
             "all_gather of layer %d, 4096 bytes, on test, number %d (it had come to %d)",
             NCCL_CROWD - 1, NCCL_CROWD, NCCL_CROWD - 1);
    run_failing("crowd_last", 3, NULL, 7, name_rank(1, what));
}

static void test_an_error_of_a_rank_is_the_jobs(void **state)
{
    (void)state;
    run_failing("own_failure", 3, NULL, 6, "rank 1: a loss of nan");
}

static void test_a_rank_dies(void **state)
{
    (void)state;
    run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:1:kill"), 7, "rank 1 has died");
    run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=2:20:kill"), 7, "rank 2 has died");
    run_failing("rounds_of_two", 3, SETTINGS("BALLAST_EMULATED_FAULT=0:40:kill"), 7,
                "rank 0 has died");
    run_failing("rounds", 3,
                SETTINGS("BALLAST_EMULATED_FAULT=1:5:kill", "BALLAST_EMULATED_NCCL_ERRORS=report"),
                7, "rank "); /* has died, or, of another, "NCCL lost a rank" */
    run_failing("rounds", 2, SETTINGS("BALLAST_EMULATED_FAULT=1:init:kill"), 7, "rank 1 has died");
}

static void test_a_call_of_nccl_fails(void **state)
{
    (void)state;
    run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:7:fail"), 4,
                "rank 1: ncclAllGather(");
    run_failing("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:init:fail"), 4,
                "rank 1: ncclCommInitRankConfig of test");
}

/* Nothing that it says of another rank. */
static void test_nccl_reports_an_error(void **state)
{
    char text[160], host[64] = "";
    (void)state;
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank 1 on %s: NCCL failed in no collective on test: ", host);
    run_failing("idle", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:ask:fail"), 7, text);
}

static void test_a_slow_rank_is_waited_for(void **state)
{
    (void)state;
    run_fine("rounds", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:9:slow=0.7"));
    run_fine("rounds_first", 3, SETTINGS("BALLAST_EMULATED_FAULT=1:9:slow=6"));
}

static void test_an_abort_that_hangs(void **state)
{
    (void)state;
    run_failing("away", 3, SETTINGS("BALLAST_EMULATED_NCCL_ABORT=hang"), 7, "did not come");
}

/* NCCL's abort frees memory that a thread in a call still uses: a communicator whose rank hangs in
 * a call is not aborted, the process ends. */
static bool is_not_aborted(const void *arg)
{
    nccl_job job;
    nccl_log log;
    (void)arg;
    log_open(&log);
    nccl_start(&job, "rounds", 3, SETTINGS(log.setting, "BALLAST_EMULATED_FAULT=1:window:stop"));
    nccl_wait_but(&job, 1);
    nccl_kill(&job, 1);
    nccl_wait(&job);
    for (int rank = 0; rank < 3; rank++) {
        const char *text = log_read(&log, rank);
        assert_non_null(strstr(text, "init "));
        if (strstr(text, "abort")) fail_msg("rank %d's NCCL: %s", rank, text);
    }
    log_close(&log, 3);
    return nccl_has_failed(&job, 7, "rank 1 on ");
}

static void test_a_call_that_hangs_is_not_aborted(void **state)
{
    (void)state;
    try_again("a window that hangs", is_not_aborted, NULL);
}

typedef struct hanging {
    const char *name;
    int rank, code;
    const char *text;
} hanging;

/* The watch of `rank` hangs in its first question; then mark 1 is made. */
static bool fails_with_hanging_watch(const void *arg)
{
    const hanging *h = arg;
    char fault[64];
    nccl_job job;
    nccl_log log;

    log_open(&log);
    snprintf(fault, sizeof fault, "BALLAST_EMULATED_FAULT=%d:ask:hang", h->rank);
    nccl_start(&job, h->name, 3, SETTINGS(log.setting, fault));
    log_await(&log, h->rank, "fault hang");
    atomic_store(&job.board->marks[1], 1);
    nccl_wait(&job);
    log_close(&log, 3);
    return nccl_has_failed(&job, h->code, h->text);
}

static void run_with_hanging_watch(const char *name, int rank, int code, const char *text)
{
    try_again(name, fails_with_hanging_watch, &(hanging){name, rank, code, text});
}

/* The guard checks the watch: nothing else does, and the rank itself may be well. */
static void test_a_watch_that_hangs(void **state)
{
    char text[160], host[64] = "";
    (void)state;
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank 1 on %s hangs in CUDA or NCCL: the watch of test", host);
    run_with_hanging_watch("idle", 1, 7, text);
    snprintf(text, sizeof text, "rank 1 on %s", host); /* or another's, which waits for it */
    run_with_hanging_watch("rounds_late", 1, 7, text);
    run_with_hanging_watch("own_failure_idle", 2, 6, "rank 1: a loss of nan");
}

/* Each question to NCCL takes longer than a pause that is pardoned: the deadline comes all the
 * same. */
static void test_a_watch_that_is_slow(void **state)
{
    (void)state;
    run_failing("away", 3,
                SETTINGS("BALLAST_EMULATED_FAULT=0:ask:slow=2.2,1:ask:slow=2.2,2:ask:slow=2.2"), 7,
                name_rank(1, "all_gather of layer 7, 4096 bytes, on test"));
}

/* The launcher kills a rank that stays stopped: here the test does. */
static bool is_found_stopped(const void *arg)
{
    const char *fault = arg;
    bool ends = strstr(fault, ":6:"); /* else a gather may hold rank 0 until its guard leaves */
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
        try_again(faults[i], is_found_stopped, faults[i]);
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

int main(int argc, char **argv)
{
    nccl_become(argc, argv, nccl_cases);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_values_strictly),
        cmocka_unit_test(test_sums_of_several_pieces),
        cmocka_unit_test(test_negative_zero),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_gathers_beside_sums),
        cmocka_unit_test(test_memory_and_paths),
        cmocka_unit_test(test_the_ring_uses_copy_engines),
        cmocka_unit_test(test_what_nccl_is_asked_for),
        cmocka_unit_test(test_a_layers_sum_is_one_exchange),
        cmocka_unit_test(test_libraries_that_will_not_do),
        cmocka_unit_test(test_two_ranks_with_one_gpu),
        cmocka_unit_test(test_two_hosts_with_one_name),
        cmocka_unit_test(test_other_calls_are_found),
        cmocka_unit_test(test_an_order_that_hangs),
        cmocka_unit_test(test_a_missing_rank),
        cmocka_unit_test(test_a_missing_rank_of_a_pair),
        cmocka_unit_test(test_a_crowd_of_launches),
        cmocka_unit_test(test_an_error_of_a_rank_is_the_jobs),
        cmocka_unit_test(test_a_rank_dies),
        cmocka_unit_test(test_a_call_of_nccl_fails),
        cmocka_unit_test(test_nccl_reports_an_error),
        cmocka_unit_test(test_a_slow_rank_is_waited_for),
        cmocka_unit_test(test_an_abort_that_hangs),
        cmocka_unit_test(test_a_call_that_hangs_is_not_aborted),
        cmocka_unit_test(test_a_watch_that_hangs),
        cmocka_unit_test(test_a_watch_that_is_slow),
        cmocka_unit_test(test_a_stopped_rank_is_found),
        cmocka_unit_test(test_a_pause_of_all_blames_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
