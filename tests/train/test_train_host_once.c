/* SPDX-License-Identifier: Apache-2.0 */
/* Data that the processes of a host share: the bytes that a job reads do not grow with its
 * processes, nor does the memory of embedding and data; the predicted memory is the memory taken;
 * errors of the data are one line; and the adapter is that of rank-threads. */
#include "runs.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "bench/command/model.h"
#include "skip.h"

enum { MAX_RANKS = 4, MIB = 1 << 20, WIRE_MIB = 16, LIMIT_S = 600 };

/* An embedding of 32 MiB, layers of 23 MiB in bf16, data of 4 MiB. */
static const bl_bench_model shape = {
    .layers = 4, .hidden = 512, .inter = 1536, .vocab = 32768, .rows = 1500, .row_tokens = 512};

static int make_model(void **state)
{
    if (runs_set_up(state) != 0) return -1;
    return bl_bench_model_write(&shape, runs_path("%s", "")) == BL_OK ? 0 : -1;
}

/* A training whose ranks are threads, or processes. */
static void set_keys(golden_args *args, const char *output, int ranks, bool processes, int steps)
{
    *args = (golden_args){.n = 0};
    runs_set(args, "model_name_or_path", "%s", runs_path("model"));
    runs_set(args, "train_file", "%s", runs_path("train.jsonl"));
    runs_set(args, "data_format", "tokens");
    runs_set(args, "device", "cpu"); /* whatever this machine has */
    runs_set(args, "output_dir", "%s", output);
    runs_set(args, "overwrite_output_dir", "true");
    runs_set(args, "max_seq_length", "32");
    runs_set(args, "per_device_train_batch_size", "1");
    runs_set(args, "lora_r", "4");
    runs_set(args, "io_engine", "pread"); /* whose reads the system counts as a process's */
    runs_set(args, "ranks", "%d", ranks);
    runs_set(args, "rank_processes", processes ? "true" : "false");
    runs_set(args, "threads", "1");
    runs_set(args, "max_steps", "%d", steps);
}

/* ---- bytes ---- */

/* Read by this process and all its children that have ended, and theirs. */
static int64_t bytes_read(void)
{
    long long value = -1;
    FILE *file = fopen("/proc/self/io", "r");

    if (!file || fscanf(file, "rchar: %lld", &value) != 1) value = -1;
    if (file) fclose(file);
    return value;
}

static int64_t bytes_of_run(const char *output, int ranks, bool processes)
{
    golden_args args;
    runs_child child = {0};

    set_keys(&args, output, ranks, processes, 1);
    runs_set(&args, "packing", "pack");
    int64_t before = bytes_read();
    runs_start(&child, "train", &args);
    int code = runs_wait(&child, LIMIT_S);
    int64_t n_bytes = bytes_read() - before;
    if (code != 0) fail_msg("exit code %d: %s", code, runs_read(child.log, NULL));
    golden_args_free(&args);
    return n_bytes;
}

/* A process reads its program's libraries, configuration and what /proc says; nothing of the data's
 * 4 MiB, and of the model, which is read whole for a job's ranks together, its part. */
static void test_bytes_read(void **state)
{
    enum { PROCESS_BYTES = 2 * MIB };

    (void)state;
    if (bytes_read() < 0) TEST_SKIP("/proc/self/io does not tell what was read");
    for (int n = 2; n <= MAX_RANKS; n += 2) {
        int64_t threads = bytes_of_run(runs_path("threads-%d", n), n, false),
                processes = bytes_of_run(runs_path("processes-%d", n), n, true);
        print_message("%d ranks read %.1f MiB as threads, %.1f MiB as processes\n", n,
                      (double)threads / MIB, (double)processes / MIB);
        assert_true(threads > (32 + 23 + 4) * MIB);
        assert_in_range(processes, threads / 2, threads + n * PROCESS_BYTES);
        assert_true(runs_are_same(runs_path("threads-%d", n), runs_path("processes-%d", n)));
    }
}

/* ---- memory ---- */

/* Of /proc/PID/FILE, the number behind `key`, in KiB there. */
static int64_t number_of(int pid, const char *name, const char *key)
{
    char path[64], line[256];
    long long value = -1;

    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    FILE *file = fopen(path, "r");
    if (!file) fail_msg("%s", path);
    while (value < 0 && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0) sscanf(line + strlen(key), "%lld", &value);
    fclose(file);
    if (value < 0) fail_msg("%s has no %s", path, key);
    return value * 1024;
}

static int children_of(int pid, int children[MAX_RANKS])
{
    char path[64];
    int n = 0;

    snprintf(path, sizeof path, "/proc/%d/task/%d/children", pid, pid);
    FILE *file = fopen(path, "r");
    if (!file) fail_msg("%s", path);
    while (n < MAX_RANKS && fscanf(file, "%d", &children[n]) == 1) n++;
    fclose(file);
    return n;
}

/* The log has GB. */
static double logged_mib(const char *log, const char *format_start, const char *format)
{
    double value = 0;
    const char *line = strstr(log, format_start);
    if (!line || sscanf(line, format, &value) != 1) fail_msg("no %s in %s", format_start, log);
    return value * 1e9 / MIB;
}

/* Whether the kernel tells all of this: both are options of its build. */
static bool kernel_tells(void)
{
    char path[64], line[256];
    bool tells = false;

    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file)) tells |= strncmp(line, "Pss_Shmem:", 10) == 0;
    if (file) fclose(file);
    return tells && bl_file_exists(path);
}

/* While it trains: each rank's private memory, and the shared memory, which the kernel divides
 * among the processes that map it. */
static void look_at_ranks(int pid, int n_ranks, double own_mib, double shared_mib)
{
    int children[MAX_RANKS];
    int64_t shared = 0;

    assert_int_equal(children_of(pid, children), n_ranks);
    for (int i = 0; i < n_ranks; i++) {
        double own = (double)number_of(children[i], "status", "RssAnon:") / MIB,
               touched = (double)number_of(children[i], "status", "RssShmem:") / MIB;
        print_message("rank %d of %d: %.1f MiB of its own, predicted %.1f; touches %.1f MiB of "
                      "what is shared\n",
                      i, n_ranks, own, own_mib, touched);
        assert_true(own < own_mib * 1.05);
        shared += number_of(children[i], "smaps_rollup", "Pss_Shmem:");
    }
    print_message("shared: %.1f MiB are mapped, predicted %.1f\n", (double)shared / MIB,
                  shared_mib);
    /* Besides embedding and data, the buffers of the wire between the ranks. */
    assert_true((double)shared / MIB < shared_mib + WIRE_MIB);
}

static void test_memory(void **state)
{
    bool tells = kernel_tells();

    (void)state;
    for (int n = 2; n <= MAX_RANKS; n += 2) {
        golden_args args;
        runs_child child = {0};
        char *log;
        const char *output = runs_path("memory-%d", n);
        set_keys(&args, output, n, true, 100000);
        runs_set(&args, "max_seq_length", "512"); /* fills the buffer of logits */
        runs_set(&args, "save_strategy", "no");
        runs_start(&child, "train", &args);
        while (runs_is_alive(&child) && runs_logged_steps(output) < 3) runs_sleep_s(0.01);
        log = runs_read(child.log, NULL);
        double predicted = logged_mib(log, "memory predicted: ", "memory predicted: %lf GB");
        free(log);
        double shared = 32 + (double)(shape.rows * 24) / MIB, own = predicted - shared / n;
        if (tells && runs_is_alive(&child)) look_at_ranks(child.pid, n, own, shared);
        kill(child.pid, SIGTERM);
        assert_int_equal(runs_wait(&child, LIMIT_S), 75);
        log = runs_read(child.log, NULL);
        static const char anonymous[] = "memory measured: peak ",
                          once[] = "memory measured, shared by the ";
        double peak = logged_mib(log, anonymous, "memory measured: peak %lf GB anonymous"),
               peak_predicted = logged_mib(
                   log, anonymous, "memory measured: peak %*f GB anonymous, predicted %lf GB"),
               once_measured = logged_mib(log, once,
                                          "memory measured, shared by the %*d processes of this "
                                          "host: %lf GB"),
               once_predicted =
                   logged_mib(log, once,
                              "memory measured, shared by the %*d processes of this host: %*f GB, "
                              "predicted %lf GB");
        print_message("%d processes: %.1f MiB anonymous, predicted %.1f; %.1f MiB shared, "
                      "predicted %.1f\n",
                      n, peak, peak_predicted, once_measured, once_predicted);
        assert_true(peak < 1.05 * peak_predicted && peak > 0.85 * peak_predicted);
        assert_true(once_measured >= once_predicted - 0.05 && once_measured < once_predicted + 0.2);
        assert_true(fabs(once_predicted - shared) < 0.1);
        free(log);
        golden_args_free(&args);
    }
    if (!tells)
        TEST_SKIP("the kernel does not tell a process's children or Pss_Shmem: what the ranks say "
                  "of their memory is right, what they have was not looked at");
}

/* ---- errors ---- */

/* The reader's error: one line, the code and the text of a process alone. */
static void test_errors_of_data(void **state)
{
    static const char text[] = "bad.jsonl:3:";
    golden_args args;
    runs_child child = {0};

    (void)state;
    runs_write(runs_path("bad.jsonl"),
               "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [4, 5]}\n{\"input_ids\": [1, -7]}\n");
    for (int n = 1; n <= MAX_RANKS; n++) {
        set_keys(&args, runs_path("bad-out"), n, n > 1, 1);
        runs_set(&args, "train_file", "%s", runs_path("bad.jsonl"));
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, LIMIT_S), 3);
        runs_assert_error(&child, text);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_read),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_errors_of_data),
    };
    return cmocka_run_group_tests(tests, make_model, runs_tear_down);
}
