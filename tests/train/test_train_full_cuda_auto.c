/* SPDX-License-Identifier: Apache-2.0 */
/* Full fine-tuning on emulated GPUs of several sizes, without keys of placement: a training keeps
 * in GPU memory what fits, and offloads state, weights and then the bf16 copy. It chooses the keys
 * that `ballast plan` prints for the same GPU, uses the planned GPU memory, and ends with the same
 * bits on every size. */
#include "full_cuda_runs.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "bench/command/model.h"

enum { STEPS = 2 };

/* A GPU's size, and the placement that is expected on it. */
typedef struct gpu {
    int mib;
    const char *tier, *copy;
    double least_ratio, most_ratio;
} gpu;

/* Where the standard output of the next child goes; NULL: nowhere. */
static const char *child_output;

static bool set_up_child(const int *mib)
{
    char text[16];

    snprintf(text, sizeof text, "%d", *mib);
    if (setenv("BALLAST_EMULATED_MEMORY_MIB", text, 1) != 0) return false;
    if (!child_output) return true;
    int fd = open(child_output, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    return fd >= 0 && dup2(fd, STDOUT_FILENO) == STDOUT_FILENO;
}

/* Runs the command on a GPU of this size and returns its log, which the caller frees. */
static char *run(const char *command, int mib, const golden_args *args)
{
    runs_child child = {.prepare = set_up_child, .arg = &mib};

    runs_start(&child, command, args);
    int code = runs_wait(&child, 600);
    char *log = runs_read(child.log, NULL);
    if (code != 0) fail_msg("%s, %d MiB: exit code %d\n%s", command, mib, code, log);
    return log;
}

/* Keys that are not about placement are given: `ballast plan` chooses all keys that are not given.
 * */
static void fill(const char *output, golden_args *args)
{
    full_cuda_runs_fill(FULL_CUDA_CASE("tiny-mha-tied"), 1, output,
                        "gradient_accumulation_steps 1 activation_checkpointing full "
                        "activation_offload false visit_tokens 24 ring_depth 2 save_steps 2",
                        args);
    runs_set(args, "max_steps", "%d", STEPS);
    runs_set(args, "model_name_or_path", "%s", runs_path("large_model/model"));
    runs_set(args, "train_file", "%s", runs_path("large_model/train.jsonl"));
}

/* The word after `key` in the text. */
static void find_value(const char *text, const char *key, char value[16])
{
    const char *at = strstr(text, key);

    if (!at || sscanf(at + strlen(key), " %15[^ ,\n]", value) != 1)
        fail_msg("no \"%s\" in:\n%s", key, text);
}

static void assert_same_value(const char *log, const char *of_log, const char *keys,
                              const char *of_keys)
{
    char chosen[16], planned[16];

    find_value(log, of_log, chosen);
    find_value(keys, of_keys, planned);
    if (strcmp(chosen, planned) != 0)
        fail_msg("%s %s in the training, %s %s planned\n%s\n%s", of_log, chosen, of_keys, planned,
                 log, keys);
}

static void assert_plan_is_training(const char *log, const char *keys, bool is_offloaded)
{
    assert_same_value(log, "offload_ratio auto:", keys, "--offload_ratio");
    assert_same_value(log, "optimizer_tier auto:", keys, "--optimizer_tier");
    if (!is_offloaded) return;
    assert_same_value(log, "optimizer_ratio", keys, "--optimizer_ratio");
    assert_same_value(log, "offload_compute_copy auto:", keys, "--offload_compute_copy");
}

/* The measured memory includes counters and sums: less than 16 KiB. */
static void assert_memory_is_planned(const char *log, const gpu *g)
{
    double measured, predicted;
    const char *line = strstr(log, "GPU memory measured: ");

    assert_non_null(line);
    assert_int_equal(
        sscanf(line, "GPU memory measured: peak %lf GB, predicted %lf GB", &measured, &predicted),
        2);
    double more_kib = (measured - predicted) * (1e9 / 1024.0);
    if (more_kib < -1.0 || more_kib > 16.0 || measured > g->mib * 1048576e-9)
        fail_msg("%d MiB: measured %.6f GB, predicted %.6f", g->mib, measured, predicted);
}

static void check(const gpu *g)
{
    char output[32], chosen[16], *plan = strdup(runs_path("plan-%d", g->mib));
    golden_args args = {0};

    snprintf(output, sizeof output, "gpu-%d", g->mib);
    fill(output, &args);
    char *log = run("train", g->mib, &args);
    find_value(log, "optimizer_tier auto:", chosen);
    assert_string_equal(chosen, g->tier);
    find_value(log, "offload_compute_copy auto:", chosen);
    assert_string_equal(chosen, g->copy);
    find_value(log, "offload_ratio auto:", chosen);
    assert_true(strtod(chosen, NULL) >= g->least_ratio && strtod(chosen, NULL) <= g->most_ratio);
    assert_memory_is_planned(log, g);

    child_output = plan;
    free(run("plan", g->mib, &args));
    child_output = NULL;
    char *keys = runs_read(plan, NULL);
    assert_plan_is_training(log, keys, g->most_ratio > 0);
    printf("%d MiB: optimizer_tier %s, offload_ratio %s, offload_compute_copy %s\n", g->mib,
           g->tier, chosen, g->copy);
    golden_args_free(&args);
    free(keys);
    free(log);
    free(plan);
}

/* 50 M weights: 0.9 GB with state and copy; the copy takes 99.8 MB. */
static void what_fits_stays_in_gpu_memory(void **state)
{
    static const gpu gpus[] = {{2048, "device", "false", 0, 0},
                               {500, "host", "false", 0.05, 1},
                               {105, "host", "true", 0.9, 1}};
    const bl_bench_model model = {
        .layers = 26, .hidden = 384, .inter = 3 * 384, .vocab = 256, .rows = 8, .row_tokens = 24};

    (void)state;
    assert_int_equal(bl_dir_create(runs_path("large_model")), BL_OK);
    assert_int_equal(bl_bench_model_write(&model, runs_path("large_model")), BL_OK);
    for (size_t i = 0; i < BL_COUNT(gpus); i++) check(&gpus[i]);
    full_runs_assert_same(STEPS, "gpu-2048", "gpu-500", 1, "500 MiB");
    full_runs_assert_same(STEPS, "gpu-2048", "gpu-105", 1, "105 MiB");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_fits_stays_in_gpu_memory)};
    return cmocka_run_group_tests_name("full cuda auto", tests, runs_set_up, runs_tear_down);
}
