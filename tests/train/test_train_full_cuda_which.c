/* SPDX-License-Identifier: Apache-2.0 */
/* Full fine-tuning of some tensors (trainable_modules, freeze) and with embedding_learning_rate on
 * a GPU, real or emulated, with weights and state in tiers: losses compared with float64, bits,
 * memory compared with the prediction. */
#include "full_cuda_runs.h"

#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "skip.h"

#define HOST_HALVES                                                                                \
    "optimizer_tier host optimizer_ratio 0.5 offload_tier host offload_ratio 0.5 "                 \
    "offload_compute_copy false visit_tokens 1"
#define STATE_ON_DISK "optimizer_tier disk offload_ratio 0 offload_dir %s/pages visit_tokens 1"

/* Trained: rows of fused matrices, which cannot be on disk; the last layer, where backward ends
 * early; no matrix; tables; all but a tied table, and a tied table alone; all but tables and a
 * projection. The moments of every other case are bf16. */
static const struct {
    const char *name;
    bool has_partial_rows;
} cases[] = {{FULL_CUDA_CASE("frozen-all-but-q-v"), true},
             {FULL_CUDA_CASE("frozen-all-but-last-layer"), false},
             {FULL_CUDA_CASE("frozen-all-but-norms"), false},
             {FULL_CUDA_CASE("frozen-all-but-embedding"), false},
             {FULL_CUDA_CASE("frozen-tied-table"), false},
             {FULL_CUDA_CASE("frozen-all-but-tied-table"), false},
             {FULL_CUDA_CASE("frozen-all-but-biases"), false},
             {FULL_CUDA_CASE("frozen-tables-and-down"), false},
             {FULL_CUDA_CASE("frozen-all-but-layernorms"), false},
             {FULL_CUDA_CASE("tiny-gqa-embedding-rate"), false},
             {FULL_CUDA_CASE("tiny-mha-tied-embedding-rate"), false}};

static const char *moments_of(size_t i)
{
    return i % 2 ? "bf16" : "fp32";
}

/* Each case in each variant, on 1 rank or on 2. */
static void tiers_change_no_bit(void **state)
{
    static const char *const variants[] = {FULL_CUDA_ON_HOST " visit_tokens 1", FULL_CUDA_ON_DISK,
                                           HOST_HALVES, STATE_ON_DISK};

    (void)state;
    for (size_t c = 0; c < BL_COUNT(cases); c++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            char keys[512];
            if (cuda_runs_are_slow() && (c + (size_t)n_ranks) % 2) continue;
            snprintf(keys, sizeof keys, "optimizer_state_dtype %s", moments_of(c));
            full_cuda_runs_train(cases[c].name, n_ranks, "plain", keys);
            for (size_t v = 0; v < BL_COUNT(variants); v++) {
                bool is_refused =
                    cases[c].has_partial_rows && strcmp(variants[v], FULL_CUDA_ON_DISK) == 0;
                if ((c + v + (size_t)n_ranks) % 2 && !is_refused) continue;
                snprintf(keys, sizeof keys, "optimizer_state_dtype %s %s", moments_of(c),
                         variants[v]);
                bl_status st = full_cuda_runs_try(cases[c].name, n_ranks, "varied", keys);
                if (st != (is_refused ? BL_EUSAGE : BL_OK))
                    fail_msg("%s, %d ranks, %s: %s", cases[c].name, n_ranks, keys, bl_error_text());
                if (!is_refused)
                    full_runs_assert_same(FULL_CUDA_STEPS, "plain", "varied", n_ranks, keys);
            }
        }
}

/* All steps of a case, in a tier. */
static void losses_follow_float64(void **state)
{
    static const char *const places[] = {FULL_CUDA_ON_HOST, STATE_ON_DISK};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (size_t c = 0; c < BL_COUNT(cases); c++) {
        char keys[512];
        snprintf(keys, sizeof keys, "optimizer_state_dtype %s %s", moments_of(c), places[c % 2]);
        full_cuda_runs_check_losses(cases[c].name, 1 + (int)(c / 2 % 2), 1, keys);
    }
}

static void memory_is_as_predicted(void **state)
{
    static const char *const places[] = {"", FULL_CUDA_ON_HOST, HOST_HALVES, STATE_ON_DISK};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (size_t c = 0; c < BL_COUNT(cases); c++) {
        char keys[512];
        snprintf(keys, sizeof keys, "optimizer_state_dtype %s %s", moments_of(c),
                 places[c % BL_COUNT(places)]);
        full_cuda_runs_check_memory(cases[c].name, 1 + (int)(c / 2 % 2), keys);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tiers_change_no_bit),
                                       cmocka_unit_test(losses_follow_float64),
                                       cmocka_unit_test(memory_is_as_predicted)};
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    if (!cuda_runs_have_gpu()) return CUDA_SKIPPED;
    return cmocka_run_group_tests_name("full cuda which", tests, runs_set_up, runs_tear_down);
}
