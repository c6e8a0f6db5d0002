/* SPDX-License-Identifier: Apache-2.0 */
/* full_cuda_runs.c -- full fine-tuning on a GPU, on cases of tests/golden/full. */
#include "full_cuda_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"

void full_cuda_runs_fill(const char *name, int n_ranks, const char *output, const char *keys,
                         golden_args *args)
{
    json_t *golden = golden_load_case(name);
    json_t *topology = json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size",
                                 1, "gradient_accumulation_steps", 2);
    char model[GOLDEN_PATH_BYTES];

    assert_true(golden_model(golden, model));
    full_runs_fill(golden, topology, model, runs_path("%s", output), args);
    runs_set(args, "device", "cuda");
    runs_set(args, "max_steps", "%d", FULL_CUDA_STEPS);
    cuda_runs_set_all(args, keys);
    json_decref(topology);
    json_decref(golden);
}

bl_status full_cuda_runs_try(const char *name, int n_ranks, const char *output, const char *keys)
{
    golden_args args = {0};

    assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
    full_cuda_runs_fill(name, n_ranks, output, keys, &args);
    bl_status st = golden_train(&args);
    golden_args_free(&args);
    return st;
}

void full_cuda_runs_train(const char *name, int n_ranks, const char *output, const char *keys)
{
    if (full_cuda_runs_try(name, n_ranks, output, keys) != BL_OK)
        fail_msg("%s, %d ranks, %s: %s", name, n_ranks, keys, bl_error_text());
}

void full_cuda_runs_train_in_parts(const char *name, const char *output, const char *keys)
{
    assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
    for (int part = 0; part < 2; part++) {
        golden_args args = {0};
        runs_child child = {0};
        full_cuda_runs_fill(name, 2, output, keys, &args);
        runs_set(&args, "rank_processes", "true");
        runs_set(&args, "max_steps", "%d", part == 0 ? 1 : FULL_CUDA_STEPS);
        if (part == 1) runs_set(&args, "resume_from_checkpoint", "true");
        if (part == 1) runs_set(&args, "allow_resume_mismatch", "true");
        runs_start(&child, "train", &args);
        int code = runs_wait(&child, 600); /* strict: minutes */
        char *log = runs_read(child.log, NULL);
        if (code != 0) fail_msg("exit code %d\n%s", code, log);
        assert_null(strstr(log, "is new after the warm-up"));
        free(log);
        golden_args_free(&args);
    }
}

void full_cuda_runs_check_losses(const char *name, int n_ranks, int accumulation, const char *keys)
{
    char model[GOLDEN_PATH_BYTES];
    golden_args args = {0};
    json_t *golden = golden_load_case(name),
           *first = json_array_get(json_object_get(golden, "topologies"), 0);
    int64_t batch = json_integer_value(json_object_get(first, "gradient_accumulation_steps"));
    json_t *topology =
        json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size",
                  (int)batch / n_ranks / accumulation, "gradient_accumulation_steps", accumulation);

    assert_true(golden_model(golden, model));
    assert_int_equal(bl_tree_remove(runs_path("losses")), BL_OK);
    full_runs_fill(golden, topology, model, runs_path("losses"), &args);
    runs_set(&args, "device", "cuda");
    cuda_runs_set_all(&args, keys);
    if (golden_train(&args) != BL_OK) fail_msg("%s, %s: %s", name, keys, bl_error_text());
    golden_args_free(&args);
    json_t *metrics = golden_metrics(runs_path("losses")),
           *steps = json_object_get(json_object_get(golden, "expect"), "steps");
    double worst = golden_compare_losses(metrics, steps, FULL_RUNS_STEPS, 1e-2);
    printf("%s, %d ranks, %s: losses off by %.1e at most\n", name, n_ranks, keys, worst);
    assert_true(worst > 1e-6 && worst <= 1e-2);
    json_decref(metrics);
    json_decref(topology);
    json_decref(golden);
}

void full_cuda_runs_check_memory(const char *name, int n_ranks, const char *keys)
{
    golden_args args = {0};
    runs_child child = {0};
    double measured, predicted;

    full_cuda_runs_fill(name, n_ranks, "memory", keys, &args);
    runs_set(&args, "max_steps", "1");
    runs_set(&args, "overwrite_output_dir", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 300), 0);
    char *log = runs_read(child.log, NULL), *line = strstr(log, "GPU memory measured: ");
    assert_non_null(line);
    assert_int_equal(
        sscanf(line, "GPU memory measured: peak %lf GB, predicted %lf GB", &measured, &predicted),
        2);
    double more_kib = (measured - predicted) * (1e9 / 1024.0);
    if (more_kib < -1.0 || more_kib > 16.0 * n_ranks)
        fail_msg("%s, %d ranks, %s: measured %.6f GB, predicted %.6f", name, n_ranks, keys,
                 measured, predicted);
    free(log);
    golden_args_free(&args);
}
