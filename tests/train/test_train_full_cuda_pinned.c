/* SPDX-License-Identifier: Apache-2.0 */
/* Pinned host memory of full fine-tuning on a GPU: what weights, moments, gradients and pieces of
 * updates take there, as the emulated GPU counts it, is what `ballast plan` says. */
#include "full_cuda_runs.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "emulator/emulated.h"
#include "plan/case.h"
#include "plan/plan.h"

/* Host memory of a rank, on a machine with a GPU for each. Buffers of readers are not pinned:
 * nothing here is on disk. */
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

/* Pinned bytes of a run, and those planned for its ranks. */
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

/* Above a run with everything in GPU memory: tokens, staging and communicators are the same. Except
 * the clipping scale, which takes a page per rank. */
static void pinned_memory_is_as_planned(void **state)
{
    static const struct {
        const char *name, *keys;
    } cases[] = {
        {FULL_CUDA_CASE("tiny-gqa"), "optimizer_tier host"},
        {FULL_CUDA_CASE("tiny-gqa"), FULL_CUDA_ON_HOST " optimizer_state_dtype bf16"},
        {FULL_CUDA_CASE("tiny-mha-tied"), FULL_CUDA_ON_HOST},
        {FULL_CUDA_CASE("tiny-mha-tied"), "optimizer_tier host optimizer_ratio 0.5"},
        {FULL_CUDA_CASE("frozen-all-but-q-v"), FULL_CUDA_ON_HOST},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            int64_t without, with, planned_without, planned_with;
            measure(cases[i].name, n_ranks, "", &without, &planned_without);
            measure(cases[i].name, n_ranks, cases[i].keys, &with, &planned_with);
            int64_t more = (with - without) - (planned_with - planned_without);
            printf("%s, %d ranks, %s: %lld bytes more are pinned, planned %lld\n", cases[i].name,
                   n_ranks, cases[i].keys, (long long)(with - without),
                   (long long)(planned_with - planned_without));
            assert_true(more >= 0 && more <= 4096 * n_ranks);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(pinned_memory_is_as_planned)};
    return cmocka_run_group_tests_name("full cuda pinned", tests, runs_set_up, runs_tear_down);
}
