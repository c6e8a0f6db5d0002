/* SPDX-License-Identifier: Apache-2.0 */
/* offload_compute_copy on a GPU, real or emulated: the bf16 copy of trained weights in host memory
 * and on disk. The bits are the same as with the copy in GPU memory, also with processes and NCCL,
 * after a kill and a resumption. GPU memory equals the prediction. Keys that are rejected. */
#include "full_cuda_runs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "skip.h"

enum { STEPS = FULL_CUDA_STEPS };

#define COPY_ON_HOST FULL_CUDA_ON_HOST " offload_compute_copy true"
#define COPY_ON_DISK FULL_CUDA_ON_DISK " offload_compute_copy true"

/* Variants: all in one tier; parts in two tiers; weights without the state; a ring of one. Models:
 * a tied head, norms of heads, a LayerNorm, partly trained matrices, a frozen table. */
static void places_change_no_bit(void **state)
{
    static const char *const variants[] = {
        COPY_ON_HOST " visit_tokens 1 ring_depth 1",
        COPY_ON_DISK " visit_tokens 1 ring_depth 3",
        ("optimizer_tier host optimizer_ratio 0.5 offload_tier disk offload_ratio 0.6 "
         "offload_host_part 0.5 offload_dir %s/pages offload_compute_copy true"),
        "optimizer_tier device offload_tier host offload_ratio 0.5 offload_compute_copy true",
    };
    static const char *const names[] = {
        FULL_CUDA_CASE("tiny-gqa"), FULL_CUDA_CASE("qwen3-tied"), FULL_CUDA_CASE("falcon-one-norm"),
        FULL_CUDA_CASE("frozen-all-but-q-v"), FULL_CUDA_CASE("frozen-tied-table")};

    (void)state;
    for (size_t c = 0; c < BL_COUNT(names); c++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            const char *moments = (c + (size_t)n_ranks) % 2 ? "fp32" : "bf16";
            char keys[512];
            if (cuda_runs_are_slow() && c != (size_t)n_ranks) continue;
            snprintf(keys, sizeof keys, "optimizer_state_dtype %s", moments);
            full_cuda_runs_train(names[c], n_ranks, "plain", keys);
            for (size_t v = 0; v < BL_COUNT(variants); v++) {
                if (strstr(names[c], "q-v") && strstr(variants[v], "disk")) continue;
                snprintf(keys, sizeof keys, "optimizer_state_dtype %s %s", moments, variants[v]);
                full_cuda_runs_train(names[c], n_ranks, "varied", keys);
                full_runs_assert_same(STEPS, "plain", "varied", n_ranks, keys);
            }
        }
}

/* Two processes with NCCL are killed after the first checkpoint, in the middle of a step. Two
 * others resume the run with the copy in another tier. */
static void kills_and_processes_change_no_bit(void **state)
{
    char *manifest = strdup(runs_path("killed/checkpoints/step-1/manifest.json"));
    golden_args args = {0};
    runs_child child = {0};
    int code = 0;

    (void)state;
    cuda_runs_take_gpus(2);
    full_cuda_runs_train(full_runs_cases[0], 2, "whole", "save_steps 1 model_dtype f32");
    while (code == 0) { /* the run may end before the kill */
        assert_int_equal(bl_tree_remove(runs_path("killed")), BL_OK);
        full_cuda_runs_fill(full_runs_cases[0], 2, "killed",
                            "save_steps 1 model_dtype f32 rank_processes true " COPY_ON_DISK,
                            &args);
        runs_start(&child, "train", &args);
        golden_args_free(&args);
        args = (golden_args){0};
        while (!bl_file_exists(manifest) && runs_is_alive(&child)) runs_sleep_s(0.01);
        kill(child.pid, SIGKILL);
        code = runs_wait(&child, 600);
    }
    assert_int_equal(code, -SIGKILL);
    full_cuda_runs_fill(full_runs_cases[0], 2, "killed",
                        "save_steps 1 model_dtype f32 rank_processes true "
                        "resume_from_checkpoint true " COPY_ON_HOST,
                        &args);
    child = (runs_child){0};
    runs_start(&child, "train", &args);
    code = runs_wait(&child, 600);
    if (code != 0) fail_msg("exit code %d\n%s", code, runs_read(child.log, NULL));
    cuda_runs_give_back_gpus();
    golden_args_free(&args);
    full_runs_assert_same(STEPS, "whole", "killed", 2, "processes, after a kill");
    full_runs_assert_same_file(runs_path("whole/model/model.safetensors"),
                               runs_path("killed/model/model.safetensors"));
    free(manifest);
}

static void memory_is_as_predicted(void **state)
{
    static const char *const places[] = {
        COPY_ON_HOST, COPY_ON_DISK,
        "optimizer_tier host offload_tier host offload_ratio 0.5 offload_compute_copy true"};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (int i = 0; i < 2 * (int)BL_COUNT(places); i++)
        full_cuda_runs_check_memory(FULL_CUDA_CASE("tiny-gqa"), 1 + i % 2, places[i / 2]);
}

static void unsuitable_keys_are_refused(void **state)
{
    static const struct {
        const char *keys, *text;
    } cases[] = {
        {"offload_ratio 0 offload_compute_copy true",
         "offload_compute_copy: no weights are outside of device "
         "memory; set offload_ratio"},
        {"device cpu offload_ratio 1 offload_compute_copy true",
         "offload_compute_copy: products in fp32 take the weights themselves"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(full_cuda_runs_try(FULL_CUDA_CASE("tiny-gqa"), 1, "no", cases[i].keys),
                         BL_EUSAGE);
        if (!strstr(bl_error_text(), cases[i].text)) fail_msg("%s", bl_error_text());
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places_change_no_bit), cmocka_unit_test(kills_and_processes_change_no_bit),
        cmocka_unit_test(memory_is_as_predicted), cmocka_unit_test(unsuitable_keys_are_refused)};
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    if (!cuda_runs_have_gpu()) return CUDA_SKIPPED;
    return cmocka_run_group_tests_name("full cuda copy", tests, runs_set_up, runs_tear_down);
}
