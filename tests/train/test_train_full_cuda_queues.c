/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of every weight on an emulated GPU whose streams share one hardware queue, with state
 * outside of device memory and a checkpoint in every step: they end, with the bits of a GPU whose
 * streams have a queue each. And the program asks CUDA for enough queues. */
#include "full_cuda_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"

enum { STEPS = FULL_CUDA_STEPS, HANG_S = 300 };

static bool share_queues(const int *n_queues)
{
    char text[16];
    snprintf(text, sizeof text, "%d", *n_queues);
    return setenv("BALLAST_EMULATED_QUEUES", text, 1) == 0;
}

static void train(const char *output, int n_ranks, const char *keys, int n_queues)
{
    golden_args args = {0};
    runs_child child = {.prepare = share_queues, .arg = &n_queues};

    assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
    full_cuda_runs_fill(full_runs_cases[n_ranks - 1], n_ranks, output, keys, &args);
    runs_start(&child, "train", &args);
    golden_args_free(&args);
    int code = runs_wait(&child, HANG_S);
    if (code != 0)
        fail_msg("%d queues, %s: exit code %d\n%s", n_queues, keys, code,
                 runs_read(child.log, NULL));
}

/* Two ranks are threads: 32 streams and more, for one GPU. */
static void one_queue_serves(void **state)
{
    static const char *const places[] = {
        "save_steps 1 " FULL_CUDA_ON_HOST,
        "save_steps 1 " FULL_CUDA_ON_DISK,
        "save_steps 1 optimizer_tier device offload_tier host offload_ratio 0.5",
        "save_steps 1 optimizer_tier host offload_ratio 0",
        "save_steps 1",
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(places); i++) {
        int n_ranks = 1 + (int)(i % 2);
        train("own", n_ranks, places[i], 0);
        train("shared", n_ranks, places[i], 1);
        full_runs_assert_same(STEPS, "own", "shared", n_ranks, places[i]);
    }
}

/* ---- what CUDA reads ---- */

static bool export_one(const int *unused)
{
    (void)unused;
    unsetenv("BALLAST_EMULATED_QUEUES");
    return setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1) == 0 &&
           setenv("BALLAST_EMULATED_COUNTS", runs_path("counts"), 1) == 0;
}

static bool export_more(const int *unused)
{
    return export_one(unused) && setenv("CUDA_DEVICE_MAX_CONNECTIONS", "40", 1) == 0;
}

/* How often the child warns, and that its GPU has 32 queues. */
static int count_warnings(bool (*prepare)(const int *unused))
{
    golden_args args = {0};
    runs_child child = {.prepare = prepare};
    int n = 0;

    full_cuda_runs_fill(full_runs_cases[0], 1, "environment",
                        "max_steps 1 overwrite_output_dir true", &args);
    runs_start(&child, "train", &args);
    golden_args_free(&args);
    assert_int_equal(runs_wait(&child, HANG_S), 0);
    char *log = runs_read(child.log, NULL), *counts = runs_read(runs_path("counts"), NULL);
    for (const char *at = log; (at = strstr(at, "CUDA_DEVICE_MAX_CONNECTIONS=")); at++) n++;
    if (n > 0) assert_non_null(strstr(log, "warning: CUDA_DEVICE_MAX_CONNECTIONS=1 is replaced"));
    if (!strstr(counts, "connections:32 1 ")) fail_msg("%s", counts);
    free(log), free(counts);
    return n;
}

static void too_few_queues_are_replaced(void **state)
{
    (void)state;
    assert_int_equal(count_warnings(export_one), 1);
    assert_int_equal(count_warnings(export_more), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_queue_serves),
                                       cmocka_unit_test(too_few_queues_are_replaced)};
    if (!cuda_runs_have_gpu()) return CUDA_SKIPPED;
    return cmocka_run_group_tests_name("full cuda queues", tests, runs_set_up, runs_tear_down);
}
