/* SPDX-License-Identifier: Apache-2.0 */
/* Two processes, on CPUs or on GPUs with NCCL. Writing a file of one rank takes several times
 * step_deadline_s: its part of a checkpoint, the checkpoint's commit, the result of the run. The
 * other rank does not report it as missing, and the run ends with the bits of a run on a fast disk.
 * A rank whose write hangs, and one that is stopped while it writes, are errors after the
 * deadline. */
#include "full_cuda_runs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"

enum { STEPS = 6, DEADLINE_S = 4, MANY = 300 };

#define STATE "/state-00001-of-"

static bool is_gpu;
/* Of the next child; NULL: its disk is fast. */
static const char *slow_files, *slow_writes;

static bool set_up_child(const int *unused)
{
    (void)unused;
    if (is_gpu && setenv("BALLAST_EMULATED_DEVICES", "2", 1) != 0) return false;
    if (!slow_files) return true;
    return setenv("LD_PRELOAD", SLOW_WRITES_LIBRARY, 1) == 0 &&
           setenv("BALLAST_TEST_SLOW_FILES", slow_files, 1) == 0 &&
           setenv("BALLAST_TEST_SLOW_WRITES", slow_writes, 1) == 0;
}

static void start_with(golden_args *args, const char *files, const char *writes, runs_child *child)
{
    runs_set(args, "rank_processes", "true");
    runs_set(args, "step_deadline_s", "%d", DEADLINE_S);
    slow_files = files;
    slow_writes = writes;
    *child = (runs_child){.prepare = set_up_child};
    runs_start(child, "train", args);
    golden_args_free(args);
}

static void start(const char *output, const char *tier, const char *files, const char *writes,
                  runs_child *child)
{
    golden_args args = {0};

    assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
    if (is_gpu)
        full_cuda_runs_fill(full_runs_cases[0], 2, output, "model_dtype f32", &args);
    else
        full_runs_kill_args(2, output, &args);
    runs_set(&args, "max_steps", "%d", STEPS);
    runs_set(&args, "save_steps", "4");
    runs_set(&args, "optimizer_tier", "%s", tier);
    runs_set(&args, "offload_dir", "%s", runs_path("pages"));
    start_with(&args, files, writes, child);
}

static void wait_for_end(runs_child *child, const char *what)
{
    int code = runs_wait(child, MANY);
    if (code == 0) return;
    char *log = runs_read(child->log, NULL);
    fail_msg("%s: exit code %d\n%s", what, code, log);
}

/* Some 30 writes per file, 0.3 s each, in the middle of the run and at its end. */
static void a_slow_rank_is_not_missing(void **state)
{
    static const char *const tiers[] = {"device", "disk"};
    runs_child child;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(tiers); i++) {
        start("fast", tiers[i], NULL, NULL, &child);
        wait_for_end(&child, tiers[i]);
        double started = bl_now_s();
        start("slow", tiers[i], STATE, "0.3", &child);
        wait_for_end(&child, tiers[i]);
        printf("%s: %.1f s\n", tiers[i], bl_now_s() - started);
        assert_true(bl_now_s() - started > 2 * DEADLINE_S);
        full_runs_assert_same(STEPS, "fast", "slow", 2, tiers[i]);
    }
}

/* The third write never ends. */
static void a_write_that_hangs_is_an_error(void **state)
{
    runs_child child;

    (void)state;
    start("hangs", "device", STATE, "1000:3", &child);
    assert_int_equal(runs_wait(&child, MANY), bl_status_exit_code(BL_EIO));
    runs_assert_error(&child, "rank 1 has written nothing for");
}

/* The process is stopped at its third write. */
static void a_rank_that_is_stopped_is_missing(void **state)
{
    runs_child child;

    (void)state;
    start("stopped", "device", STATE, "-1:3", &child);
    assert_int_equal(runs_wait(&child, MANY), bl_status_exit_code(BL_ERANK));
    runs_assert_error(&child, "rank 1");
}

/* ---- rank 0's commit and result ---- */

static void wait_for_slow_end(runs_child *child, const char *what, double started)
{
    wait_for_end(child, what);
    double seconds = bl_now_s() - started;
    printf("%s: %.1f s\n", what, seconds);
    assert_true(seconds > DEADLINE_S);
}

static void a_slow_commit_is_not_missing(void **state)
{
    runs_child child;

    (void)state;
    double started = bl_now_s();
    start("commit", "device", "/manifest.json", "3", &child); /* a write and an fsync of each */
    wait_for_slow_end(&child, "commit", started);
    full_runs_assert_same(STEPS, "fast", "commit", 2, "commit");
}

static void a_slow_model_is_not_missing(void **state)
{
    runs_child child;

    (void)state;
    double started = bl_now_s();
    start("slow-model", "device", "/model/", "0.5", &child);
    wait_for_slow_end(&child, "model", started);
    full_runs_assert_same(STEPS, "fast", "slow-model", 2, "model");
    full_runs_assert_same_file(runs_path("fast/model/model.safetensors"),
                               runs_path("slow-model/model/model.safetensors"));
}

static void a_model_that_hangs_is_an_error(void **state)
{
    runs_child child;

    (void)state;
    start("model-hangs", "device", "/model/", "1000:3", &child);
    assert_int_equal(runs_wait(&child, MANY), bl_status_exit_code(BL_EIO));
    runs_assert_error(&child, "rank 0 has read and written nothing for");
}

static void a_rank_that_is_stopped_in_its_model_is_missing(void **state)
{
    runs_child child;

    (void)state;
    start("model-stopped", "device", "/model/", "-1:3", &child);
    assert_int_equal(runs_wait(&child, MANY), bl_status_exit_code(BL_ERANK));
    runs_assert_error(&child, "rank 0");
}

/* ---- LoRA ---- */

static void start_lora(const char *output, const char *files, const char *writes, runs_child *child)
{
    golden_args args = {0};

    runs_standard(&args, runs_path("%s", output), 2);
    runs_set(&args, "max_steps", "2");
    runs_set(&args, "save_steps", "2");
    start_with(&args, files, writes, child);
}

/* Its part of the checkpoint; the checkpoint's adapter and the result. */
static void a_slow_adapter_is_not_missing(void **state)
{
    static const struct {
        const char *files, *writes;
    } cases[] = {{STATE, "1.5"}, {"/adapter_model.safetensors", "0.2"}};
    runs_child child;

    (void)state;
    start_lora("lora-fast", NULL, NULL, &child);
    wait_for_end(&child, "lora");
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *output = i == 0 ? "lora-0" : "lora-1";
        double started = bl_now_s();
        start_lora(output, cases[i].files, cases[i].writes, &child);
        wait_for_slow_end(&child, cases[i].files, started);
        assert_true(runs_are_same(runs_path("lora-fast"), runs_path("%s", output)));
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slow_rank_is_not_missing),
        cmocka_unit_test(a_write_that_hangs_is_an_error),
        cmocka_unit_test(a_rank_that_is_stopped_is_missing),
        cmocka_unit_test(a_slow_commit_is_not_missing),
        cmocka_unit_test(a_slow_model_is_not_missing),
        cmocka_unit_test(a_model_that_hangs_is_an_error),
        cmocka_unit_test(a_rank_that_is_stopped_in_its_model_is_missing),
        cmocka_unit_test(a_slow_adapter_is_not_missing)};

    is_gpu = argc > 1 && strcmp(argv[1], "gpus") == 0;
    return cmocka_run_group_tests_name("full slow disk", tests, runs_set_up, runs_tear_down);
}
