/* SPDX-License-Identifier: Apache-2.0 */
/* test_published_memory.c -- memory of Llama 3.1 405B on eight GPUs as another system's authors
 * have published it, next to the same items of Ballast's ledger. bench/results/predictions.md has
 * the choices of theirs on which a figure depends. Each figure is within half of the last digit of
 * the published one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/case.h"
#include "plan/plan.h"

enum { GPUS = 8, RANK = 64, TOKENS = 1024 };
static const double GB = 1e9, GIB = 1024.0 * 1024 * 1024;

static void assert_rounds_to(const char *what, double value, double published, double step)
{
    print_message("%s: %.3f, published %g\n", what, value, published);
    if (fabs(value - published) > step / 2)
        fail_msg("%s: %.4f, published %g", what, value, published);
}

/* The job: r 64 on all projections, 1,024 tokens per GPU, recomputation, nothing offloaded. */
static bl_memory_ledger ledger_of(const char *model, const char *base_format, bl_plan_case *c)
{
    char *argv[] = {"--model",
                    (char *)model,
                    "--base_format",
                    (char *)base_format,
                    "--max_seq_length",
                    "1024",
                    "--per_device_train_batch_size",
                    "1",
                    "--lora_r",
                    "64",
                    "--activation_checkpointing",
                    "full",
                    "--offload_ratio",
                    "0",
                    "--lora_target_modules",
                    "all-linear"};
    const bl_placement placement = {.tier = BL_TIER_HOST, .n = GPUS};
    bl_memory_ledger m;

    if (bl_plan_case_open("8xh100", 0, (int)BL_COUNT(argv), argv, c) != BL_OK)
        fail_msg("%s", bl_error_text());
    bl_pass_options pass = bl_plan_pass_options(&c->input, BL_SAVE_S0);
    assert_int_equal(bl_plan_predict_memory(&c->input, &placement, NULL, &pass, &m), BL_OK);
    return m;
}

/* 417 GB, and 60 GB on each of eight. Theirs: one byte a parameter, four for 512 of them; embedding
 * and head, which are among the parameters, once more in two bytes, and on every GPU. Counted once,
 * they are 413 and 59 GB. */
static void test_fp8_base(void **state)
{
    bl_plan_case c;

    (void)state;
    bl_memory_ledger m = ledger_of("llama-3.1-405b", "auto", &c);
    double n_params = (double)bl_model_config_n_params(&c.model.config);
    double tables = 2.0 * (double)(c.model.config.vocab_size * c.model.config.hidden_size) * 2;
    double coded = n_params * (1 + 4.0 / 512);
    assert_rounds_to("FP8, GB", (coded + tables) / GB, 417, 1);
    assert_rounds_to("sharded by 8, GB", (coded / GPUS + tables) / GB, 60, 1);
    double once = (n_params - tables / 2) * (1 + 4.0 / 512);
    assert_rounds_to("FP8, tables once, GB", (once + tables) / GB, 413, 1);

    /* Ballast: scales are a float a row, the head is sharded, the embedding is the host's. */
    double ours = (double)bl_memory_sum(&m, BL_MEMORY_BASE, BL_MEMORY_NORMS) / GB;
    assert_rounds_to("Ballast's, a GPU, GB", ours, 50.8, 0.1);
    bl_plan_case_close(&c);
}

/* Meta's own FP8 checkpoint has attention and two layers in bf16: 59.8 GB on each of eight, without
 * the head. base_format auto makes FP8 of the rest, too. */
static void test_published_fp8_checkpoint(void **state)
{
    bl_plan_case c;

    (void)state;
    bl_memory_ledger m = ledger_of("llama-3.1-405b-fp8", "stored", &c);
    double head = (double)(c.model.config.vocab_size * c.model.config.hidden_size) * 2 / GPUS;
    assert_rounds_to("published FP8, a GPU, GB",
                     ((double)m.item[BL_MEMORY_BASE].device - head) / GB, 59.8, 0.1);
    bl_plan_case_close(&c);
    m = ledger_of("llama-3.1-405b-fp8", "auto", &c);
    assert_rounds_to("the same as auto holds it, GB",
                     ((double)m.item[BL_MEMORY_BASE].device - head) / GB, 50.2, 0.1);
    bl_plan_case_close(&c);
}

/* "About 74 GB": the base, LoRA's 4.1, checkpoints 4, and the larger of a layer's 3 and the head's
 * 5.5: they are not there at the same time. */
static void test_a_gpus_peak(void **state)
{
    bl_plan_case c;

    (void)state;
    bl_memory_ledger m = ledger_of("llama-3.1-405b", "auto", &c);
    const bl_model_config *model = &c.model.config;
    double inputs = (double)m.item[BL_MEMORY_LAYER_INPUTS].device / GB;
    double layer = (double)m.item[BL_MEMORY_RING].device / (double)c.config->ring_depth / GB;
    assert_rounds_to("checkpoints, GB", inputs, 4, 1);
    assert_rounds_to("a gathered layer, GB", layer, 3, 1);
    /* The head in bf16, and logits in bf16, in fp32, and their gradient in fp32. */
    double head = (double)model->vocab_size *
                  ((double)model->hidden_size * 2 + (double)TOKENS * (2 + 4 + 4)) / GB;
    assert_rounds_to("head, GB", head, 5.5, 0.1);
    /* Of each parameter its gradient, fp32 weight and two moments, divided by eight; in GiB. The
     * bf16 weights, 5.0 GB on every GPU, are not in it. */
    double n_lora = (double)(c.lora.n_floats * model->n_layers);
    assert_rounds_to("LoRA, GiB", n_lora * 14 / GPUS / GIB, 4.1, 0.1);
    assert_rounds_to("sum, GB", 60 + 4.1 + inputs + fmax(layer, head), 74, 1);
    /* Ballast's LoRA: fp32 weights, gradients and moments, and the bf16 copy, all divided by eight,
     * and two layers' gradients and weights whole. */
    double ours = (double)bl_memory_sum(&m, BL_MEMORY_LORA, BL_MEMORY_LORA_RING) / GB;
    assert_true(ours > n_lora * 18 / GPUS / GB && ours < n_lora * 18 / GPUS / GB * 1.06);
    bl_plan_case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp8_base),
        cmocka_unit_test(test_published_fp8_checkpoint),
        cmocka_unit_test(test_a_gpus_peak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
