/* SPDX-License-Identifier: Apache-2.0 */
/* Pinned host memory of full fine-tuning on a GPU: the bytes of weights, moments, gradients and
 * pieces of updates, counted by the emulated GPU, equal those of `ballast plan`; with
 * modules_to_save those of embeddings. A model larger than the GPU's memory trains with its bf16
 * copy in host memory. */
#include "full_cuda_runs.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/sizes.h"
#include "bench/command/model.h"
#include "emulator/emulated.h"
#include "plan/case.h"
#include "plan/plan.h"

/* Planned host memory of a rank, on a machine with a GPU per rank. Nothing is on disk here, because
 * buffers of readers are not pinned. */
static int64_t plan_host_bytes(const golden_args *args, int n_ranks)
{
    char hardware[16];
    bl_plan_case c;
    bl_plan plan;
    int64_t n_bytes = 0;

    snprintf(hardware, sizeof hardware, "%dxh100", n_ranks);
    if (bl_plan_case_open(hardware, 0, args->n, args->text, &c) != BL_OK ||
        bl_plan_choose(&c.input, &plan) != BL_OK)
        fail_msg("%s", bl_error_text());
    for (int i = 0; i < BL_MEMORY_ITEMS; i++) n_bytes += plan.memory.item[i].host;
    bl_plan_case_close(&c);
    return n_bytes;
}

/* Pinned bytes of a run, and the plan's host memory for its ranks. */
static void measure(const char *name, int n_ranks, const char *keys, int64_t *measured,
                    int64_t *planned)
{
    golden_args args = {0};

    (void)emulated_cuda_registered_peak();
    full_cuda_runs_train(name, n_ranks, "pinned", keys);
    *measured = (int64_t)emulated_cuda_registered_peak();
    full_cuda_runs_fill(name, n_ranks, "pinned", keys, &args);
    *planned = n_ranks * plan_host_bytes(&args, n_ranks);
    golden_args_free(&args);
}

/* Compares the increase over a run with everything in GPU memory, which has the same tokens,
 * staging and communicators. The plan lacks the clipping scale, which takes a page per rank. */
static void pinned_memory_is_as_planned(void **state)
{
    static const struct {
        const char *name, *keys;
    } cases[] = {
        {FULL_CUDA_CASE("tiny-gqa"), "optimizer_tier host offload_ratio 0"},
        {FULL_CUDA_CASE("tiny-gqa"), FULL_CUDA_ON_HOST " optimizer_state_dtype bf16"},
        {FULL_CUDA_CASE("tiny-mha-tied"), FULL_CUDA_ON_HOST},
        {FULL_CUDA_CASE("tiny-mha-tied"),
         "optimizer_tier host optimizer_ratio 0.5 offload_ratio 0"},
        {FULL_CUDA_CASE("qwen3-tied"), FULL_CUDA_ON_HOST " offload_compute_copy true"},
        {FULL_CUDA_CASE("frozen-all-but-q-v"), FULL_CUDA_ON_HOST},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            int64_t without, with, planned_without, planned_with;
            measure(cases[i].name, n_ranks, "optimizer_tier device offload_ratio 0", &without,
                    &planned_without);
            measure(cases[i].name, n_ranks, cases[i].keys, &with, &planned_with);
            int64_t more = (with - without) - (planned_with - planned_without);
            printf("%s, %d ranks, %s: %lld bytes more are pinned, planned %lld\n", cases[i].name,
                   n_ranks, cases[i].keys, (long long)(with - without),
                   (long long)(planned_with - planned_without));
            assert_true(more >= 0 && more <= 4096 * n_ranks);
        }
}

/* A trained head leaves the group's embeddings in pinned memory; a trained embedding is gathered on
 * the GPU. The rows have up to 48 tokens. */
static void a_trained_embedding_pins_no_rows(void **state)
{
    (void)state;
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        static const char keys[] = "max_steps 1 max_seq_length 48 visit_tokens 1000";
        int64_t with, without, planned_with, planned_without;
        measure("../../modules/cases/head-and-norms", n_ranks, keys, &with, &planned_with);
        measure("../../modules/cases/tables", n_ranks, keys, &without, &planned_without);
        printf("%d ranks: a trained embedding pins %lld bytes fewer, planned %lld\n", n_ranks,
               (long long)(with - without), (long long)(planned_with - planned_without));
        assert_true(planned_with > planned_without);
        assert_int_equal(with - without, planned_with - planned_without);
    }
}

/* ---- a model larger than the GPU's memory ---- */

static bool have_small_gpu(const int *mib)
{
    char text[16];
    snprintf(text, sizeof text, "%d", *mib);
    return setenv("BALLAST_EMULATED_MEMORY_MIB", text, 1) == 0;
}

static int train_large(const char *places_copy, runs_child *child)
{
    static const int mib = 94;
    golden_args args = {0};

    full_cuda_runs_fill(FULL_CUDA_CASE("tiny-mha-tied"), 1, "large", FULL_CUDA_ON_HOST, &args);
    runs_set(&args, "model_name_or_path", "%s", runs_path("large_model/model"));
    runs_set(&args, "train_file", "%s", runs_path("large_model/train.jsonl"));
    runs_set(&args, "offload_compute_copy", "%s", places_copy);
    runs_set(&args, "gradient_accumulation_steps", "1");
    runs_set(&args, "max_steps", "2");
    runs_set(&args, "activation_checkpointing", "full");
    *child = (runs_child){.prepare = have_small_gpu, .arg = &mib};
    runs_start(child, "train", &args);
    golden_args_free(&args);
    return runs_wait(child, 600);
}

/* 50 M weights: 99.8 MB in bf16, on a GPU of 98.6 MB. */
static void a_model_may_be_larger_than_the_gpu(void **state)
{
    const bl_bench_model model = {
        .layers = 26, .hidden = 384, .inter = 3 * 384, .vocab = 256, .rows = 8, .row_tokens = 24};
    runs_child child;

    (void)state;
    assert_int_equal(bl_dir_create(runs_path("large_model")), BL_OK);
    assert_int_equal(bl_bench_model_write(&model, runs_path("large_model")), BL_OK);
    assert_int_equal(train_large("false", &child), bl_status_exit_code(BL_ENOMEM));
    runs_assert_error(&child, "or with offload_compute_copy true");
    int code = train_large("true", &child);
    char *log = runs_read(child.log, NULL);
    if (code != 0) fail_msg("exit code %d\n%s", code, log);
    printf("%s", strstr(log, "GPU memory measured"));
    free(log);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(pinned_memory_is_as_planned),
                                       cmocka_unit_test(a_trained_embedding_pins_no_rows),
                                       cmocka_unit_test(a_model_may_be_larger_than_the_gpu)};
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("full cuda pinned", tests, runs_set_up, runs_tear_down);
}
