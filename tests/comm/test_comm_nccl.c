/* SPDX-License-Identifier: Apache-2.0 */
/* The communicator of GPUs between processes: on the emulated GPU with the fake NCCL (emulator/),
 * whose faults these tests ask for. Values are compared bit for bit with serial sums in the order
 * of comm.h, like those of every other communicator. Ranks that are missing, die or hang:
 * test_comm_nccl_failures.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "emulator/emulated.h"
#include "nccl_jobs.h"
#include "skip.h"

/* ---- values ---- */

static void test_values(void **state)
{
    static const int counts[] = {1, 2, 3, 4, 8};
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        nccl_run_fine("values", counts[i], NULL);
    nccl_run_fine("values_in_windows", 3, NULL);
}

static void test_values_strictly(void **state)
{
    (void)state;
    nccl_run_fine("values", 3, SETTINGS("BALLAST_EMULATED=strict"));
    nccl_run_fine("layers", 2, SETTINGS("BALLAST_EMULATED=strict"));
}

static void test_sums_of_several_pieces(void **state)
{
    (void)state;
    nccl_run_fine("large", 2, NULL);
    nccl_run_fine("large", 3, NULL);
}

static void test_blocks(void **state)
{
#ifdef __SANITIZE_THREAD__ /* 7 and 8 take minutes, with the same calls */
    static const int counts[] = {2, 4};
#else
    static const int counts[] = {1, 2, 4, 7, 8};
#endif
    (void)state;
    for (size_t i = 0; i < BL_COUNT(counts); i++) nccl_run_fine("blocks", counts[i], NULL);
    nccl_run_fine("blocks", 3, SETTINGS("BALLAST_EMULATED=strict"));
}

static void test_negative_zero(void **state)
{
    (void)state;
    nccl_run_fine("negative_zero", 1, NULL);
    nccl_run_fine("negative_zero", 3, NULL);
}

static void test_groups(void **state)
{
    (void)state;
    nccl_run_fine("split", 2, NULL);
    nccl_run_fine("split", 4, NULL);
    nccl_run_fine("split", 8, NULL);
}

static void test_gathers_beside_sums(void **state)
{
    (void)state;
    nccl_run_fine("layers", 3, SETTINGS("BALLAST_EMULATED_SEED=5"));
    nccl_run_fine("layers", 4, NULL);
    nccl_run_fine("layers_compared", 3, SETTINGS("BALLAST_EMULATED_SEED=6"));
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
    nccl_run_fine("memory", 1, NULL); /* for which there is no window */
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
    nccl_run_failing("memory", 2, SETTINGS("BALLAST_EMULATED_NCCL_WINDOWS=fail"), 1,
                     "ncclCommWindowRegister of test: ");
    nccl_run_fine("memory_lack", 3, SETTINGS("BALLAST_EMULATED_MEMORY_MIB=64"));
}

/* Only the ring's gathers use windows. */
static void test_the_ring_uses_copy_engines(void **state)
{
    char file[] = "/tmp/nccl_counts.XXXXXX", setting[64], text[4096];
    int fd = mkstemp(file);
    (void)state;
    assert_true(fd >= 0);
    snprintf(setting, sizeof setting, "BALLAST_EMULATED_COUNTS=%s", file);
    nccl_run_fine("layers", 1 + 1, SETTINGS(setting));
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
        nccl_log_open(&log);
        nccl_run_fine("memory", 2, SETTINGS(log.setting, cases[i].driver));
        for (int rank = 0; rank < 2; rank++) {
            assert_non_null(strstr(nccl_log_read(&log, rank), cases[i].init));
            assert_non_null(strstr(nccl_log_read(&log, rank), "window "));
        }
        nccl_log_close(&log, 2);
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

        nccl_log_open(&log);
        nccl_run_fine(cases[i].name, 3, SETTINGS(log.setting));
        for (const char *at = nccl_log_read(&log, 0); (at = strstr(at, " pairs ")); at++) n++;
        assert_int_equal(n, cases[i].exchanges);
        nccl_log_close(&log, 3);
    }
}

/* Bytes that a rank sent to ranks of its host, and to other hosts. */
static void count_sent(const nccl_log *log, int rank, int n_on_host, long sent[2])
{
    int peer;
    long bytes;

    sent[0] = sent[1] = 0;
    for (const char *at = nccl_log_read(log, rank); (at = strstr(at, " send:")); at++)
        if (sscanf(at, " send:%d:%ld", &peer, &bytes) == 2)
            sent[peer / n_on_host != rank / n_on_host] += bytes;
}

/* Two hosts of two ranks, blocks of two. Each rank sends two parts to the other rank of its block:
 * the values for that rank and for the rank with the same place in the other block. It sends one
 * sum to the other host, in place of two parts. */
static void test_one_sum_crosses_the_network(void **state)
{
    enum { PART = NCCL_ONE_SUM_FLOATS * sizeof(float) };
    nccl_log log;
    long sent[2];

    (void)state;
    nccl_log_open(&log);
    nccl_run_fine("one_sum", 4, SETTINGS(log.setting));
    for (int rank = 0; rank < 4; rank++) {
        count_sent(&log, rank, 2, sent);
        assert_int_equal(sent[0], 2 * PART);
        assert_int_equal(sent[1], PART);
    }
    nccl_log_close(&log, 4);
}

/* ---- the library ---- */

static void test_libraries_that_will_not_do(void **state)
{
    (void)state;
    nccl_run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_VERSION=0"), 4,
                     "several GPUs need NCCL: libnccl.so.2");
    nccl_run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_VERSION=21805"), 4,
                     "NCCL 2.18 is too old: Ballast needs 2.19");
    nccl_run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_HIDE=ncclSend,ncclRecv"), 4,
                     "libnccl.so.2 has no ncclSend, ncclRecv");
    nccl_run_failing("values", 1, SETTINGS("BALLAST_EMULATED_NCCL_HIDE=ncclGetVersion"), 4,
                     "ncclGetVersion");
    nccl_run_failing("values", 3, SETTINGS("NCCL_COMM_BLOCKING=0"), 2,
                     "ncclCommInitRankConfig of test did not block: unset NCCL_COMM_BLOCKING");
}

static void test_two_ranks_with_one_gpu(void **state)
{
    char text[160], host[64] = "";
    (void)state;
    (void)gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text,
             "ranks 2 and 3 have the same GPU, FFFF:02:00.0 on %s; each needs one", host);
    nccl_run_failing("values", 4, SETTINGS("BALLAST_TEST_GPUS=3"), 4, text);
}

/* Three simulated hosts with the same name and different boot ids (nccl_ranks.c). */
enum { OTHER_HOSTS = 2 };
static char boot_ids[] = "/tmp/boot_id.XXXXXX", boot_ids_setting[64];

static void hosts_open(void)
{
    if (system("unshare --mount true 2>/dev/null") != 0) TEST_SKIP("no mount namespaces");
    strcpy(boot_ids, "/tmp/boot_id.XXXXXX");
    int fd = mkstemp(boot_ids);
    assert_true(fd >= 0);
    close(fd);
    snprintf(boot_ids_setting, sizeof boot_ids_setting, "BALLAST_TEST_BOOT_ID=%s", boot_ids);
    for (int i = 1; i <= OTHER_HOSTS; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.%d", boot_ids, i);
        FILE *file = fopen(name, "w");
        assert_non_null(file);
        assert_true(fprintf(file, "another %d\n", i) > 0 && fclose(file) == 0);
    }
}

static void hosts_close(void)
{
    for (int i = 1; i <= OTHER_HOSTS; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.%d", boot_ids, i);
        unlink(name);
    }
    unlink(boot_ids);
}

/* Machines that were installed alike: one name, and their GPUs have the same places. NCCL is asked
 * for no window, which would go over their network. */
static void test_two_hosts_with_one_name(void **state)
{
    nccl_log log;
    (void)state;
    hosts_open();
    nccl_run_fine("values", 2,
                  SETTINGS("BALLAST_TEST_GPUS=1", "BALLAST_TEST_ON_HOST=1", boot_ids_setting));
    nccl_log_open(&log);
    check_memory("memory", SETTINGS(log.setting, "BALLAST_TEST_ON_HOST=1", boot_ids_setting),
                 "by kernels: copy engines work inside one host, and the group spans several");
    for (int rank = 0; rank < 2; rank++) assert_null(strstr(nccl_log_read(&log, rank), "window "));
    nccl_log_close(&log, 2);
    hosts_close();
}

/* ---- gathers by hosts ---- */

/* Bytes that the rank's log records as sent to ranks of other hosts. */
static int64_t sent_to_hosts(const nccl_log *log, int rank, int n_on_host)
{
    int64_t n_bytes = 0;
    for (const char *at = nccl_log_read(log, rank); (at = strstr(at, " send:")); at++) {
        int peer;
        long long bytes;
        assert_int_equal(sscanf(at, " send:%d:%lld", &peer, &bytes), 2);
        if (peer / n_on_host != rank / n_on_host) n_bytes += bytes;
    }
    return n_bytes;
}

/* Every rank receives the bytes of every part: with several lengths, in groups split from all
 * ranks, and together with sums. Each part is sent once to each other host, in several pieces, and
 * ncclAllGather is not called. */
static void test_gathers_by_hosts(void **state)
{
    static const struct {
        int n_ranks;
        const char *on_host; /* the last host may have fewer */
    } layouts[] = {{4, "2"}, {5, "3"}, {8, "4"}, {7, "3"}, {3, "2"}};
    nccl_log log;

    (void)state;
    hosts_open();
    for (size_t i = 0; i < BL_COUNT(layouts); i++) {
        char on_host[40];
        int n = layouts[i].n_ranks, per_host = atoi(layouts[i].on_host);
        int n_hosts = (n + per_host - 1) / per_host;
        snprintf(on_host, sizeof on_host, "BALLAST_TEST_ON_HOST=%s", layouts[i].on_host);
        const char *settings[] = {on_host, boot_ids_setting, "BALLAST_TEST_BY_HOSTS=1", NULL, NULL};
        nccl_run_fine("values", n, settings);
        nccl_run_fine("split", n, settings);
        nccl_log_open(&log);
        settings[3] = log.setting;
        nccl_run_fine("gather", n, settings);
        for (int rank = 0; rank < n; rank++) {
            const char *text = nccl_log_read(&log, rank);
            assert_null(strstr(text, "all_gather"));
            assert_int_equal(sent_to_hosts(&log, rank, per_host),
                             (n_hosts - 1) * NCCL_GATHERED_BYTES);
        }
        nccl_log_close(&log, n);
    }
    nccl_run_fine("layers", 4,
                  SETTINGS("BALLAST_TEST_ON_HOST=2", boot_ids_setting, "BALLAST_TEST_BY_HOSTS=1"));
    nccl_run_fine("values", 3,
                  SETTINGS("BALLAST_TEST_ON_HOST=2", boot_ids_setting, "BALLAST_TEST_BY_HOSTS=1",
                           "BALLAST_EMULATED=strict"));
    hosts_close();
}

/* NCCL gathers with one host, with one rank per host, if ranks are not numbered host by host, and
 * without the option. */
static void test_gathers_not_by_hosts(void **state)
{
#define HOSTS(n) "BALLAST_TEST_ON_HOST=" #n, boot_ids_setting
    const struct {
        const char *const *settings, *text;
    } cases[] = {
        {SETTINGS("BALLAST_TEST_BY_HOSTS=1"), NULL},
        {SETTINGS("BALLAST_TEST_BY_HOSTS=1", HOSTS(1)), NULL},
        {SETTINGS(HOSTS(2)), NULL},
        {SETTINGS("BALLAST_TEST_BY_HOSTS=1", HOSTS(2), "BALLAST_TEST_ROUND=1"),
         "gather_by_hosts has no effect: ranks are not numbered host by host"},
    };
#undef HOSTS

    (void)state;
    hosts_open();
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *settings[8];
        nccl_log log;
        nccl_job job;
        int n = 0;
        nccl_log_open(&log);
        for (; cases[i].settings[n]; n++) settings[n] = cases[i].settings[n];
        settings[n] = log.setting;
        settings[n + 1] = NULL;
        nccl_start(&job, "gather", 3, settings);
        nccl_wait(&job);
        nccl_assert_fine(&job);
        if (cases[i].text) assert_non_null(strstr(job.text[0], cases[i].text));
        assert_null(strstr(job.text[0], "each part goes once"));
        assert_non_null(strstr(nccl_log_read(&log, 0), "all_gather"));
        assert_null(strstr(nccl_log_read(&log, 0), "send:"));
        nccl_log_close(&log, 3);
    }
    hosts_close();
}

/* A rank of the other host that calls something else, does not come, fails or dies in a gather. The
 * fifth launch is the second one of a gather. */
static void test_gathers_by_hosts_that_fail(void **state)
{
    (void)state;
    hosts_open();
#define BY_HOSTS "BALLAST_TEST_ON_HOST=2", boot_ids_setting, "BALLAST_TEST_BY_HOSTS=1"
    nccl_run_failing("other_size", 4, SETTINGS(BY_HOSTS), 1, "all_gather, 4095 bytes, on test");
    nccl_run_failing("hang", 4, SETTINGS(BY_HOSTS), 7,
                     "waited for " NCCL_DEADLINE_S_TEXT " in all_gather, 4096 bytes, on test");
    nccl_run_failing("rounds", 4, SETTINGS(BY_HOSTS, "BALLAST_EMULATED_FAULT=3:5:fail"), 4,
                     "rank 3: ncclGroupEnd");
    nccl_run_failing("rounds", 4, SETTINGS(BY_HOSTS, "BALLAST_EMULATED_FAULT=3:5:kill"), 7,
                     "rank 3 has died");
#undef BY_HOSTS
    hosts_close();
}

/* ---- the order of calls ---- */

static void test_other_calls_are_found(void **state)
{
    (void)state;
    nccl_run_failing("other_kind", 3, NULL, 1, "launch different collectives: ");
    nccl_run_failing(
        "other_kind", 2, NULL, 1,
        "ranks 0 and 1 launch different collectives: all_gather, 4096 bytes, on test, and "
        "broadcast from rank 1, 4096 bytes, on test");
    nccl_run_failing("other_size", 2, NULL, 1, "all_gather, 4095 bytes, on test");
    nccl_run_failing(
        "other_label", 2, NULL, 1,
        "all_gather of layer 0, 4096 bytes, on test, and all_gather of layer 1, 4096 bytes");
    nccl_run_failing("other_comm", 2, NULL, 1,
                     "all_gather, 4096 bytes, on test, and all_gather, 4096 bytes, on test#2");
    nccl_run_failing("other_trust", 2, NULL, 1, "trust_order");
}

int main(int argc, char **argv)
{
    nccl_become(argc, argv, nccl_cases);
    if (!emulated_cuda_have_devices(8)) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_values_strictly),
        cmocka_unit_test(test_sums_of_several_pieces),
        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_negative_zero),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_gathers_beside_sums),
        cmocka_unit_test(test_memory_and_paths),
        cmocka_unit_test(test_the_ring_uses_copy_engines),
        cmocka_unit_test(test_what_nccl_is_asked_for),
        cmocka_unit_test(test_a_layers_sum_is_one_exchange),
        cmocka_unit_test(test_one_sum_crosses_the_network),
        cmocka_unit_test(test_libraries_that_will_not_do),
        cmocka_unit_test(test_two_ranks_with_one_gpu),
        cmocka_unit_test(test_two_hosts_with_one_name),
        cmocka_unit_test(test_gathers_by_hosts),
        cmocka_unit_test(test_gathers_not_by_hosts),
        cmocka_unit_test(test_gathers_by_hosts_that_fail),
        cmocka_unit_test(test_other_calls_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
