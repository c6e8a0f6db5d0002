/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of every weight on a GPU, real or emulated: losses beside the float64 reference; the
 * same bits for any visits, recomputation, ring, tiers and form of the ranks, after a resumption
 * and a kill; memory as predicted; the model that is written. With BALLAST_EMULATED=strict the
 * losses are left out. */
#include "cuda_runs.h"
#include "full_runs.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "skip.h"

/* ---- losses ---- */

/* As bf16 on the CPU (test_train_full_bf16.c): 1e-2 in each step. Clipping, accumulation and a head
 * apart; a tied one on two ranks that share the GPU; norms of heads; LayerNorm and a parallel
 * layer. */
static const struct {
    const char *name;
    int n_ranks, accumulation;
    const char *moments;
} loss_cases[] = {{"tiny-gqa", 1, 4, "fp32"},
                  {"tiny-mha-tied", 2, 2, "bf16"},
                  {"qwen3-tied", 1, 2, "fp32"},
                  {"falcon-one-norm", 2, 1, "fp32"},
                  {"llama-bias", 1, 1, "bf16"}};

static void check_losses(const char *name, int n_ranks, int accumulation, const char *moments)
{
    char path[GOLDEN_PATH_BYTES], model[GOLDEN_PATH_BYTES];
    golden_args args = {0};

    snprintf(path, sizeof path, "../../full/cases/%s", name);
    json_t *golden = golden_load_case(path),
           *first = json_array_get(json_object_get(golden, "topologies"), 0);
    int64_t batch = json_integer_value(json_object_get(first, "gradient_accumulation_steps"));
    json_t *topology =
        json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size",
                  (int)batch / n_ranks / accumulation, "gradient_accumulation_steps", accumulation);
    assert_true(golden_model(golden, model));
    assert_int_equal(bl_tree_remove(runs_path("losses")), BL_OK);
    full_runs_fill(golden, topology, model, runs_path("losses"), &args);
    golden_args_add(&args, "device", "cuda");
    golden_args_add(&args, "optimizer_state_dtype", "%s", moments);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    json_t *metrics = golden_metrics(runs_path("losses")),
           *steps = json_object_get(json_object_get(golden, "expect"), "steps");
    double worst = golden_compare_losses(metrics, steps, FULL_RUNS_STEPS, 1e-2);
    printf("%s, %d ranks, moments in %s: losses off by %.1e at most\n", name, n_ranks, moments,
           worst);
    assert_true(worst > 1e-6 && worst <= 1e-2);
    json_decref(metrics);
    json_decref(topology);
    json_decref(golden);
}

static void losses_follow_float64(void **state)
{
    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (size_t i = 0; i < BL_COUNT(loss_cases); i++)
        check_losses(loss_cases[i].name, loss_cases[i].n_ranks, loss_cases[i].accumulation,
                     loss_cases[i].moments);
}

/* ---- bits ---- */

enum { STEPS = 3 };

static void make_args(const char *name, int n_ranks, const char *output, const char *keys,
                      golden_args *args)
{
    json_t *golden = golden_load_case(name);
    json_t *topology = json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size",
                                 1, "gradient_accumulation_steps", 2);
    char model[GOLDEN_PATH_BYTES];

    assert_true(golden_model(golden, model));
    full_runs_fill(golden, topology, model, runs_path("%s", output), args);
    runs_set(args, "device", "cuda");
    runs_set(args, "max_steps", "%d", STEPS);
    cuda_runs_set_all(args, keys);
    json_decref(topology);
    json_decref(golden);
}

static void train(const char *name, int n_ranks, const char *output, const char *keys)
{
    golden_args args = {0};

    assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
    make_args(name, n_ranks, output, keys, &args);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
}

static void nothing_else_changes_a_bit(void **state)
{
    static const char *const variants[] = {
        "visit_tokens 1 activation_checkpointing none",
        "activation_checkpointing full activation_offload true threads 3",
    };
    static const char *const rings[] = {"1", "4"};

    (void)state;
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        const char *name = full_runs_cases[n_ranks - 1];
        train(name, n_ranks, "plain", "");
        for (size_t v = 0; v < BL_COUNT(variants); v++) {
            char keys[256];
            snprintf(keys, sizeof keys, "%s ring_depth %s", variants[v], rings[v]);
            train(name, n_ranks, "varied", keys);
            full_runs_assert_same(STEPS, "plain", "varied", n_ranks, keys);
        }
    }
}

/* Of weights, moments and gradients; %s is the scratch directory. */
#define ON_HOST "optimizer_tier host offload_tier host offload_ratio 1"
#define ON_DISK "optimizer_tier disk offload_tier disk offload_ratio 1 offload_dir %s/pages"

/* Of a tied head on one rank and an untied one on two: all in a tier; parts of each; moments and
 * weights in different tiers; gradients that come back for a second visit. With two ranks moments
 * are in bf16. */
static void tiers_change_no_bit(void **state)
{
    static const char *const variants[] = {
        "optimizer_tier host",
        ON_HOST " visit_tokens 1",
        ON_DISK " visit_tokens 1 ring_depth 3",
        "optimizer_tier host optimizer_ratio 0.5 offload_tier disk offload_ratio 0.6 "
        "offload_host_part 0.5 offload_dir %s/pages",
        "offload_tier host offload_ratio 1",
    };
    static const char *const names[] = {"../../full/cases/tiny-mha-tied",
                                        "../../full/cases/tiny-gqa"};

    (void)state;
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        const char *moments = n_ranks == 1 ? "fp32" : "bf16";
        char keys[512];
        snprintf(keys, sizeof keys, "optimizer_state_dtype %s", moments);
        train(names[n_ranks - 1], n_ranks, "plain", keys);
        for (size_t v = 0; v < BL_COUNT(variants); v++) {
            if (cuda_runs_are_slow() && v != 1 && v != 3) continue;
            snprintf(keys, sizeof keys, "optimizer_state_dtype %s %s", moments, variants[v]);
            train(names[n_ranks - 1], n_ranks, "varied", keys);
            full_runs_assert_same(STEPS, "plain", "varied", n_ranks, variants[v]);
        }
    }
}

/* After its first checkpoint; resumed with its state in another tier. */
static void a_kill_changes_no_bit(void **state)
{
    char *manifest = strdup(runs_path("killed/checkpoints/step-1/manifest.json"));
    golden_args args = {0};
    runs_child child = {0};
    int code = 0;

    (void)state;
    train(full_runs_cases[0], 1, "whole", "save_steps 1");
    while (code == 0) { /* it may end first */
        assert_int_equal(bl_tree_remove(runs_path("killed")), BL_OK);
        make_args(full_runs_cases[0], 1, "killed", "save_steps 1 " ON_DISK, &args);
        runs_start(&child, "train", &args);
        golden_args_free(&args);
        while (!bl_file_exists(manifest) && runs_is_alive(&child)) runs_sleep_s(0.01);
        kill(child.pid, SIGKILL);
        code = runs_wait(&child, 600);
    }
    assert_int_equal(code, -SIGKILL);
    make_args(full_runs_cases[0], 1, "killed", "save_steps 1 resume_from_checkpoint true " ON_HOST,
              &args);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    full_runs_assert_same(STEPS, "whole", "killed", 1, "a kill");
    free(manifest);
}

/* Two GPUs with NCCL between them, a process each; after a step, the rest in another run. Moments
 * are in bf16. */
static void processes_and_a_resumption_change_no_bit(void **state)
{
    golden_args args = {0};

    (void)state;
    train(full_runs_cases[0], 2, "whole", "model_dtype f32 optimizer_state_dtype bf16");
    assert_int_equal(bl_tree_remove(runs_path("parts")), BL_OK);
    setenv("BALLAST_EMULATED_DEVICES", "2", 1);
    for (int part = 0; part < 2; part++) {
        runs_child child = {0};
        make_args(full_runs_cases[0], 2, "parts",
                  "rank_processes true model_dtype f32 optimizer_state_dtype bf16", &args);
        runs_set(&args, "max_steps", "%d", part == 0 ? 1 : STEPS);
        if (part == 1) runs_set(&args, "resume_from_checkpoint", "true");
        if (part == 1) runs_set(&args, "allow_resume_mismatch", "true");
        runs_start(&child, "train", &args);
        int code = runs_wait(&child, 600); /* strict: minutes */
        char *log = runs_read(child.log, NULL);
        if (code != 0) fail_msg("exit code %d\n%s", code, log);
        assert_null(strstr(log, "is new after the warm-up"));
        free(log);
        golden_args_free(&args);
        args = (golden_args){0};
    }
    unsetenv("BALLAST_EMULATED_DEVICES");
    full_runs_assert_same(STEPS, "whole", "parts", 2, "processes, resumed");
    full_runs_assert_same_file(runs_path("whole/model/model.safetensors"),
                               runs_path("parts/model/model.safetensors"));
}

/* ---- memory ---- */

/* Except counters and sums: less than 16 KiB per rank. Two ranks have bf16 moments. */
static void memory_is_as_predicted(void **state)
{
    static const char *const places[] = {"", ON_HOST, ON_DISK};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (int i = 0; i < 2 * (int)BL_COUNT(places); i++) {
        int n_ranks = 1 + i % 2;
        golden_args args = {0};
        runs_child child = {0};
        double measured, predicted;
        make_args("../../full/cases/tiny-gqa", n_ranks, "memory",
                  "max_steps 1 overwrite_output_dir true", &args);
        if (n_ranks == 2) runs_set(&args, "optimizer_state_dtype", "bf16");
        cuda_runs_set_all(&args, places[i / 2]);
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, 300), 0);
        char *log = runs_read(child.log, NULL), *line = strstr(log, "GPU memory measured: ");
        assert_non_null(line);
        assert_int_equal(sscanf(line, "GPU memory measured: peak %lf GB, predicted %lf GB",
                                &measured, &predicted),
                         2);
        double more_kib = (measured - predicted) * (1e9 / 1024.0);
        if (more_kib < -1.0 || more_kib > 16.0 * n_ranks)
            fail_msg("%d ranks: measured %.6f GB, predicted %.6f", n_ranks, measured, predicted);
        free(log);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(losses_follow_float64),
                                       cmocka_unit_test(nothing_else_changes_a_bit),
                                       cmocka_unit_test(tiers_change_no_bit),
                                       cmocka_unit_test(a_kill_changes_no_bit),
                                       cmocka_unit_test(processes_and_a_resumption_change_no_bit),
                                       cmocka_unit_test(memory_is_as_predicted)};
    if (!cuda_runs_have_gpu()) return CUDA_SKIPPED;
    return cmocka_run_group_tests_name("full cuda", tests, runs_set_up, runs_tear_down);
}
