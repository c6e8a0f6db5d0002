/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of every weight on a GPU, real or emulated: losses beside the float64 reference; the
 * same bits for any visits, recomputation, ring, tiers and form of the ranks, after a resumption
 * and a kill; memory as predicted; the model that is written. With BALLAST_EMULATED=strict the
 * losses are left out. */
#include "full_cuda_runs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "skip.h"

/* ---- losses ---- */

/* Clipping, accumulation and an untied head; a tied head on two ranks that share the GPU; norms of
 * heads; LayerNorm and a parallel layer. */
static const struct {
    const char *name;
    int n_ranks, accumulation;
    const char *keys;
} loss_cases[] = {{FULL_CUDA_CASE("tiny-gqa"), 1, 4, "optimizer_state_dtype fp32"},
                  {FULL_CUDA_CASE("tiny-mha-tied"), 2, 2, "optimizer_state_dtype bf16"},
                  {FULL_CUDA_CASE("qwen3-tied"), 1, 2, "optimizer_state_dtype fp32"},
                  {FULL_CUDA_CASE("falcon-one-norm"), 2, 1, "optimizer_state_dtype fp32"},
                  {FULL_CUDA_CASE("llama-bias"), 1, 1, "optimizer_state_dtype bf16"}};

static void losses_follow_float64(void **state)
{
    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (size_t i = 0; i < BL_COUNT(loss_cases); i++)
        full_cuda_runs_check_losses(loss_cases[i].name, loss_cases[i].n_ranks,
                                    loss_cases[i].accumulation, loss_cases[i].keys);
}

/* ---- bits ---- */

enum { STEPS = FULL_CUDA_STEPS };

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
        full_cuda_runs_train(name, n_ranks, "plain", "");
        for (size_t v = 0; v < BL_COUNT(variants); v++) {
            char keys[256];
            snprintf(keys, sizeof keys, "%s ring_depth %s", variants[v], rings[v]);
            full_cuda_runs_train(name, n_ranks, "varied", keys);
            full_runs_assert_same(STEPS, "plain", "varied", n_ranks, keys);
        }
    }
}

/* Of a tied head on one rank and an untied one on two: all in a tier; parts of each; moments and
 * weights in different tiers; gradients that come back for a second visit. With two ranks moments
 * are in bf16. */
static void tiers_change_no_bit(void **state)
{
    static const char *const variants[] = {
        "optimizer_tier host offload_ratio 0",
        FULL_CUDA_ON_HOST " visit_tokens 1",
        FULL_CUDA_ON_DISK " visit_tokens 1 ring_depth 3",
        ("optimizer_tier host optimizer_ratio 0.5 offload_tier disk offload_ratio 0.6 "
         "offload_host_part 0.5 offload_compute_copy false offload_dir %s/pages"),
        "optimizer_tier device offload_tier host offload_ratio 1 offload_compute_copy false",
    };
    static const char *const names[] = {FULL_CUDA_CASE("tiny-mha-tied"),
                                        FULL_CUDA_CASE("tiny-gqa")};

    (void)state;
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        const char *moments = n_ranks == 1 ? "fp32" : "bf16";
        char keys[512];
        snprintf(keys, sizeof keys, "optimizer_state_dtype %s", moments);
        full_cuda_runs_train(names[n_ranks - 1], n_ranks, "plain", keys);
        for (size_t v = 0; v < BL_COUNT(variants); v++) {
            if (cuda_runs_are_slow() && v != 1 && v != 3) continue;
            snprintf(keys, sizeof keys, "optimizer_state_dtype %s %s", moments, variants[v]);
            full_cuda_runs_train(names[n_ranks - 1], n_ranks, "varied", keys);
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
    full_cuda_runs_train(full_runs_cases[0], 1, "whole", "save_steps 1");
    while (code == 0) { /* it may end first */
        assert_int_equal(bl_tree_remove(runs_path("killed")), BL_OK);
        full_cuda_runs_fill(full_runs_cases[0], 1, "killed", "save_steps 1 " FULL_CUDA_ON_DISK,
                            &args);
        runs_start(&child, "train", &args);
        golden_args_free(&args);
        while (!bl_file_exists(manifest) && runs_is_alive(&child)) runs_sleep_s(0.01);
        kill(child.pid, SIGKILL);
        code = runs_wait(&child, 600);
    }
    assert_int_equal(code, -SIGKILL);
    full_cuda_runs_fill(full_runs_cases[0], 1, "killed",
                        "save_steps 1 resume_from_checkpoint true " FULL_CUDA_ON_HOST, &args);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    full_runs_assert_same(STEPS, "whole", "killed", 1, "a kill");
    free(manifest);
}

/* Two GPUs with NCCL between them; after a step, the rest in another run. Moments are in bf16. */
static void processes_and_a_resumption_change_no_bit(void **state)
{
    static const char keys[] = "model_dtype f32 optimizer_state_dtype bf16";

    (void)state;
    cuda_runs_take_gpus(2);
    full_cuda_runs_train(full_runs_cases[0], 2, "whole", keys);
    full_cuda_runs_train_in_parts(full_runs_cases[0], "parts", keys);
    cuda_runs_give_back_gpus();
    full_runs_assert_same(STEPS, "whole", "parts", 2, "processes, resumed");
    full_runs_assert_same_file(runs_path("whole/model/model.safetensors"),
                               runs_path("parts/model/model.safetensors"));
}

/* ---- memory ---- */

/* On two ranks the moments are bf16. */
static void memory_is_as_predicted(void **state)
{
    static const char *const places[] = {"", " " FULL_CUDA_ON_HOST, " " FULL_CUDA_ON_DISK};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (int i = 0; i < 2 * (int)BL_COUNT(places); i++) {
        char keys[512];
        snprintf(keys, sizeof keys, "optimizer_state_dtype %s%s", i % 2 ? "bf16" : "fp32",
                 places[i / 2]);
        full_cuda_runs_check_memory(FULL_CUDA_CASE("tiny-gqa"), 1 + i % 2, keys);
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
