/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan_full.c -- plans of runs that train every weight: bytes per weight, FLOPs, and the bytes
 * that gradients travel, against counts of parameters. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "trained/full.h"
#include "base/sizes.h"
#include "plan/case.h"
#include "plan/report.h"

enum { TOKENS = 512 };

static void open_case(const char *model, const char *ranks, bl_plan_case *out)
{
    char *argv[] = {"--model",
                    (char *)(uintptr_t)model,
                    "--finetuning_type",
                    "full",
                    "--ranks",
                    (char *)(uintptr_t)ranks,
                    "--learning_rate",
                    "1e-5",
                    "--threads",
                    "1",
                    "--activation_checkpointing",
                    "full",
                    "--per_device_train_batch_size",
                    "1",
                    "--gradient_accumulation_steps",
                    "1"};
    if (bl_plan_case_open("cpu", TOKENS, BL_COUNT(argv), argv, out) != BL_OK)
        fail_msg("%s", bl_error_text());
}

static void choose(const bl_plan_case *c, bl_plan *plan, bl_time_estimate *time)
{
    if (bl_plan_choose(&c->input, plan) != BL_OK) fail_msg("%s", bl_error_text());
    if (bl_plan_estimate(&c->input, plan, time) != BL_OK) fail_msg("%s", bl_error_text());
}

static void assert_near(double value, double expected, double part)
{
    if (!(fabs(value / expected - 1) <= part))
        fail_msg("%.6g, expected %.6g within %g", value, expected, part);
}

static double item(const bl_plan *plan, bl_memory_item which)
{
    return (double)plan->memory.item[which].device;
}

/* fp32 weights, two moments, gradients: 4, 8 and 4 bytes per weight and rank; a tied embedding has
 * two gradients. Alignment and rounded-up rows are less than a thousandth; vectors, which every
 * rank has whole, less than another. */
static void bytes_per_weight(void **state)
{
    static const struct {
        const char *model, *ranks;
        int n_ranks;
    } cases[] = {{"llama-3.2-1b", "1", 1}, {"llama-3.2-1b", "2", 2}, {"llama-3.1-8b", "4", 4}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_plan_case c;
        bl_plan plan;
        bl_time_estimate time;
        open_case(cases[i].model, cases[i].ranks, &c);
        choose(&c, &plan, &time);
        const bl_model_config *m = &c.model.config;
        double n = cases[i].n_ranks, P = (double)bl_model_config_n_params(m),
               table = (double)(m->vocab_size * m->hidden_size),
               layer = (double)bl_arch_layer_weights(m, BL_LAYER_DENSE);
        assert_near(item(&plan, BL_MEMORY_BASE), 4 * P / n, 2e-3);
        assert_near(item(&plan, BL_MEMORY_ADAM), 8 * P / n, 2e-3);
        double gradients = 4 * P / n + (m->tie_word_embeddings ? 4 * table / n : 0);
        if (n > 1) gradients += 4 * fmax(2 * layer, table); /* a unit's, whole */
        /* and the largest part of a sum */
        double sum =
            n > 1 ? 4 * fmax(table, 2.0 * (double)(m->hidden_size * m->intermediate_size)) / n : 0;
        assert_near(item(&plan, BL_MEMORY_GRADIENTS), gradients + sum, 3e-3);
        assert_int_equal(plan.memory.embedding, 0);
        assert_int_equal(plan.memory.item[BL_MEMORY_LORA].device, 0);
        bl_plan_case_close(&c);
    }
}

/* y, dx and dW: 2 FLOPs each per weight and token; the embedding is looked up; and attention. */
static void flops(void **state)
{
    bl_plan_case c;
    bl_plan plan;
    bl_time_estimate time;

    (void)state;
    open_case("llama-3.1-8b", "2", &c);
    choose(&c, &plan, &time);
    const bl_model_config *m = &c.model.config;
    double weights = (double)(m->n_layers * bl_arch_layer_weights(m, BL_LAYER_DENSE) +
                              m->vocab_size * m->hidden_size),
           attention = 12.0 * (double)(m->n_heads * m->head_dim * m->n_layers) * TOKENS / 2;
    assert_near(time.model_flops, 2.0 * TOKENS * (6 * weights + attention), 1e-6);
    bl_plan_case_close(&c);
}

/* A rank receives its rows of the other ranks' gradients, once per micro-batch. */
static void gradients_travel(void **state)
{
    bl_plan_case c;
    bl_plan plan;
    bl_time_estimate time;

    (void)state;
    open_case("llama-3.1-8b", "4", &c);
    choose(&c, &plan, &time);
    double P = (double)bl_model_config_n_params(&c.model.config);
    assert_near(time.bytes[BL_LANE_LORA], 4 * P / 4 * 3, 2e-3);
    bl_plan_case_close(&c);
}

static bl_time_estimate predict(const char *type, double *compute_s)
{
    char *argv[] = {"--model",
                    "llama-3.1-8b",
                    "--finetuning_type",
                    (char *)(uintptr_t)type,
                    "--learning_rate",
                    "1e-5",
                    "--ranks",
                    "1",
                    "--per_device_train_batch_size",
                    "1",
                    "--gradient_accumulation_steps",
                    "1",
                    "--activation_checkpointing",
                    "none",
                    "--compute_dtype",
                    "fp32"};
    bl_plan_case c;
    bl_plan plan;
    bl_time_estimate time;

    if (bl_plan_case_open("cpu", TOKENS, BL_COUNT(argv), argv, &c) != BL_OK)
        fail_msg("%s", bl_error_text());
    choose(&c, &plan, &time);
    bl_plan_case_close(&c);
    *compute_s = time.part[BL_TIME_BACKWARD].seconds + time.part[BL_TIME_HEAD].seconds;
    return time;
}

/* Next to LoRA's step: gradients of all matrices, and AdamW over all weights. */
static void more_than_lora(void **state)
{
    double full_s, lora_s;
    bl_time_estimate full = predict("full", &full_s), lora = predict("lora", &lora_s);

    (void)state;
    assert_true(full_s > 1.3 * lora_s && full_s < 2.1 * lora_s);
    assert_true(full.part[BL_TIME_OPTIMIZER].seconds > 20 * lora.part[BL_TIME_OPTIMIZER].seconds);
    assert_near(full.part[BL_TIME_FORWARD].seconds, lora.part[BL_TIME_FORWARD].seconds, 0.2);
}

/* The printed keys are valid arguments of `ballast train`. */
static void the_report_has_no_adapter(void **state)
{
    bl_plan_case c;
    bl_plan plan;
    bl_time_estimate time;
    char text[8192] = "";
    json_t *document;

    (void)state;
    open_case("llama-3.2-1b", "2", &c);
    choose(&c, &plan, &time);
    bl_plan_report report = {
        .c = &c, .config = c.config, .plan = &plan, .time = &time, .total_tokens = 1e6};
    FILE *out = fmemopen(text, sizeof text, "w");
    assert_int_equal(bl_plan_report_print(&report, true, out), BL_OK);
    fclose(out);
    static const char *const wanted[] = {"Trained  every weight: 1236 M parameters",
                                         "--finetuning_type full",
                                         "  weights ",
                                         "  gradients ",
                                         "weight gradients",
                                         "each checkpoint 14.8 GB"};
    for (size_t i = 0; i < BL_COUNT(wanted); i++)
        if (!strstr(text, wanted[i])) fail_msg("no \"%s\" in:\n%s", wanted[i], text);
    assert_null(strstr(text, "LoRA"));
    assert_non_null(strstr(text, "--optimizer_tier device --offload_ratio 0.00"));
    assert_int_equal(bl_plan_report_describe(&report, &document), BL_OK);
    json_t *model = json_object_get(document, "model");
    assert_int_equal(json_integer_value(json_object_get(model, "lora_parameters")), 0);
    assert_int_equal(json_integer_value(json_object_get(model, "trained_parameters")),
                     bl_model_config_n_params(&c.model.config));
    json_decref(document);
    bl_plan_case_close(&c);
}

/* Layers compute with a copy in bf16, which ranks gather; gradients stay fp32. */
static void bf16_halves_what_is_gathered(void **state)
{
    static const char *const dtypes[] = {"fp32", "bf16"};
    double gathered[2], reduced[2], weights[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        char *argv[] = {"--model",
                        "llama-3.1-8b",
                        "--finetuning_type",
                        "full",
                        "--ranks",
                        "2",
                        "--learning_rate",
                        "1e-5",
                        "--activation_checkpointing",
                        "full",
                        "--compute_dtype",
                        (char *)(uintptr_t)dtypes[i]};
        bl_plan_case c;
        bl_plan plan;
        bl_time_estimate time;
        if (bl_plan_case_open("cpu", TOKENS, BL_COUNT(argv), argv, &c) != BL_OK)
            fail_msg("%s", bl_error_text());
        choose(&c, &plan, &time);
        gathered[i] = time.bytes[BL_LANE_GATHER];
        reduced[i] = time.bytes[BL_LANE_LORA];
        weights[i] = item(&plan, BL_MEMORY_BASE);
        bl_plan_case_close(&c);
    }
    assert_near(gathered[1], gathered[0] / 2, 1e-3);
    assert_near(reduced[1], reduced[0], 1e-3);
    assert_near(weights[1], 1.5 * weights[0], 1e-3);
}

/* Moments in bf16: 4 bytes per weight less in memory, on disk and in a checkpoint; and AdamW moves
 * 20 bytes per weight in place of 28, of an update of 36. */
static void bf16_moments_take_half(void **state)
{
    static const char *const dtypes[] = {"fp32", "bf16"}, *const tiers[] = {"device", "disk"};
    double moments[2], disk[2], update_s[2];
    int64_t checkpoint[2];

    (void)state;
    for (int i = 0; i < 2; i++)
        for (int on_disk = 0; on_disk < 2; on_disk++) {
            char *argv[] = {"--model",
                            "llama-3.2-1b",
                            "--finetuning_type",
                            "full",
                            "--learning_rate",
                            "1e-5",
                            "--offload_dir",
                            "/tmp",
                            "--optimizer_tier",
                            (char *)(uintptr_t)tiers[on_disk],
                            "--optimizer_state_dtype",
                            (char *)(uintptr_t)dtypes[i]};
            bl_plan_case c;
            bl_plan plan;
            bl_time_estimate time;
            if (bl_plan_case_open("cpu", TOKENS, BL_COUNT(argv), argv, &c) != BL_OK)
                fail_msg("%s", bl_error_text());
            choose(&c, &plan, &time);
            if (on_disk) {
                disk[i] = (double)plan.memory.disk;
            } else {
                moments[i] = item(&plan, BL_MEMORY_ADAM);
                update_s[i] = time.part[BL_TIME_OPTIMIZER].seconds;
            }
            assert_int_equal(bl_trained_full_checkpoint_bytes(&c.model.config, &c.trained, 1,
                                                              bl_train_config_moments(c.config),
                                                              &checkpoint[i]),
                             BL_OK);
            bl_plan_case_close(&c);
        }
    assert_near(moments[1], moments[0] / 2, 1e-3);
    double rows = moments[0] / 8; /* and vectors, a ten-thousandth */
    assert_near(disk[0] - disk[1], 4 * rows, 1e-3);
    assert_near((double)(checkpoint[0] - checkpoint[1]), 4 * rows, 1e-3);
    assert_true(update_s[1] < 0.85 * update_s[0] && update_s[1] > 0.7 * update_s[0]);
}

/* Of a GPU: fp32 weights and their bf16 copy, moments, gradients; the keys of placement stay. */
static void gpus_hold_it_all(void **state)
{
    char *argv[] = {"--model", "llama-3.1-8b",    "--finetuning_type",
                    "full",    "--learning_rate", "1e-5"};
    bl_plan_case c;
    bl_plan_choice choice;

    (void)state;
    if (bl_plan_case_open("8xh100", 2048, BL_COUNT(argv), argv, &c) != BL_OK)
        fail_msg("%s", bl_error_text());
    double P = (double)bl_model_config_n_params(&c.model.config);
    assert_int_equal(
        bl_plan_search(&c.input, bl_plan_keys_left_open(c.config), BL_PLAN_BY_SPEED, &choice),
        BL_OK);
    assert_true(choice.n_fit > 0);
    assert_near(item(&choice.best.plan, BL_MEMORY_BASE), 6 * P / 8, 2e-3);
    assert_near(item(&choice.best.plan, BL_MEMORY_ADAM), P, 2e-3);
    assert_true(choice.best.config.offload_ratio == 0 && choice.best.config.shard_size == 8);
    assert_true(choice.best.time.mfu > 0.3 && choice.best.time.mfu < 0.75);
    bl_plan_case_close(&c);
}

/* On one GPU: the bf16 copy and a visit's gradients; in host memory weights, moments and gradients,
 * and pieces of an update. */
static void a_host_holds_the_state(void **state)
{
    char *argv[] = {"--model",
                    "llama-3.1-8b",
                    "--finetuning_type",
                    "full",
                    "--ranks",
                    "1",
                    "--learning_rate",
                    "1e-5",
                    "--offload_tier",
                    "host",
                    "--offload_ratio",
                    "1",
                    "--threads",
                    "16",
                    "--optimizer_tier",
                    "host",
                    "--activation_checkpointing",
                    "full"};
    const double layer = 218112000, table = 525336576;
    bl_plan_case c;
    bl_plan plan;
    bl_time_estimate time;

    (void)state;
    if (bl_plan_case_open("1xh200", 2048, BL_COUNT(argv), argv, &c) != BL_OK)
        fail_msg("%s", bl_error_text());
    choose(&c, &plan, &time);
    const bl_memory_amount *items = plan.memory.item;
    double P = (double)bl_model_config_n_params(&c.model.config);
    assert_near((double)items[BL_MEMORY_BASE].device, 2 * P, 1e-3);
    assert_near((double)items[BL_MEMORY_BASE].host, 4 * P, 1e-3);
    assert_near((double)items[BL_MEMORY_ADAM].host, 8 * P, 1e-3);
    assert_near((double)items[BL_MEMORY_GRADIENTS].host, 4 * P, 1e-3);
    assert_near((double)items[BL_MEMORY_GRADIENTS].device, 4 * (2 * layer + table), 1e-3);
    assert_near((double)items[BL_MEMORY_STAGING].host, 74 << 20, 1e-3);
    assert_near(time.bytes[BL_LANE_COPY], 6 * P, 1e-3);
    bl_plan_case_close(&c);
}

static void plan_of_lora(const char *hardware, const char *compute_dtype, const char *targets,
                         const char *modules, bl_plan *plan, bl_time_estimate *time)
{
    char *argv[] = {"--model",
                    "llama-3.1-8b",
                    "--ranks",
                    "2",
                    "--activation_checkpointing",
                    "full",
                    "--compute_dtype",
                    (char *)(uintptr_t)compute_dtype,
                    "--lora_target_modules",
                    (char *)(uintptr_t)targets,
                    "--modules_to_save",
                    (char *)(uintptr_t)modules};
    bl_plan_case c;

    if (bl_plan_case_open(hardware, TOKENS, BL_COUNT(argv) - (modules ? 0 : 2), argv, &c) != BL_OK)
        fail_msg("%s", bl_error_text());
    choose(&c, plan, time);
    bl_plan_case_close(&c);
}

/* Beside LoRA, weights, moments and gradients of a table take 4, 8 and 4 bytes per weight on every
 * rank. A norm takes moments and gradients. The gradient of the head is a third product. */
static void modules_are_whole(void **state)
{
    enum { VOCABULARY = 128256, HIDDEN = 4096, LAYERS = 32 };
    const double table = (double)VOCABULARY * HIDDEN, norms = (2 * LAYERS + 1) * HIDDEN;
    bl_plan none, some;
    bl_time_estimate before, after;

    (void)state;
    plan_of_lora("cpu", "fp32", "all-linear", NULL, &none, &before);
    plan_of_lora("cpu", "fp32", "all-linear", "lm_head,norm", &some, &after);
    assert_near(item(&some, BL_MEMORY_LORA) - item(&none, BL_MEMORY_LORA), 4 * table, 1e-9);
    assert_near(item(&some, BL_MEMORY_ADAM) - item(&none, BL_MEMORY_ADAM), 8 * (table + norms),
                1e-9);
    assert_near(item(&some, BL_MEMORY_GRADIENTS) - item(&none, BL_MEMORY_GRADIENTS),
                4 * (table + norms), 1e-9);
    assert_near(after.part[BL_TIME_HEAD].seconds, 1.5 * before.part[BL_TIME_HEAD].seconds, 0.1);
    assert_true(after.part[BL_TIME_OPTIMIZER].seconds >
                10 * before.part[BL_TIME_OPTIMIZER].seconds);
}

/* A GPU also has a bf16 copy of the head for products and renews it after the update, which moves
 * 36 bytes per weight. It gathers a trained embedding from its memory: no rows of it pass through
 * the host's. */
static void a_gpu_copies_a_trained_head(void **state)
{
    const double table = (double)128256 * 4096;
    bl_plan none, head, embedding;
    bl_time_estimate before, of_head, of_embedding;

    (void)state;
    plan_of_lora("2xh100", "bf16", "all-linear", NULL, &none, &before);
    plan_of_lora("2xh100", "bf16", "all-linear", "lm_head", &head, &of_head);
    plan_of_lora("2xh100", "bf16", "all-linear", "embed_tokens", &embedding, &of_embedding);
    assert_near(item(&head, BL_MEMORY_LORA) - item(&none, BL_MEMORY_LORA), 6 * table, 1e-9);
    assert_near(item(&embedding, BL_MEMORY_LORA) - item(&none, BL_MEMORY_LORA), 4 * table, 1e-9);
    assert_true(of_head.part[BL_TIME_HEAD].seconds > 1.2 * before.part[BL_TIME_HEAD].seconds);
    assert_true(of_head.part[BL_TIME_OPTIMIZER].seconds >
                of_embedding.part[BL_TIME_OPTIMIZER].seconds);
    const int tokens = BL_MEMORY_TOKENS; /* of all items: another part of the base is offloaded */
    assert_true(head.memory.item[tokens].host == none.memory.item[tokens].host);
    assert_true(embedding.memory.item[tokens].host < none.memory.item[tokens].host);
}

/* Weights, moments and gradients of the terms of the tables take 4, 8 and 4 bytes per weight on
 * every rank: r (vocabulary + hidden) weights of each table. */
static void terms_of_tables_are_whole(void **state)
{
    enum { VOCABULARY = 128256, HIDDEN = 4096, R = 8 };
    const double terms = 2.0 * R * (VOCABULARY + HIDDEN);
    bl_plan none, both;
    bl_time_estimate before, after;
    char *argv[] = {"--model", "llama-3.1-8b", "--lora_target_modules", "q_proj,embed_tokens"};
    bl_plan_case c;

    (void)state;
    plan_of_lora("cpu", "fp32", "q_proj", NULL, &none, &before);
    plan_of_lora("cpu", "fp32", "q_proj,embed_tokens,lm_head", NULL, &both, &after);
    assert_near(item(&both, BL_MEMORY_LORA) - item(&none, BL_MEMORY_LORA), 4 * terms, 1e-9);
    assert_near(item(&both, BL_MEMORY_ADAM) - item(&none, BL_MEMORY_ADAM), 8 * terms, 1e-9);
    assert_near(item(&both, BL_MEMORY_GRADIENTS) - item(&none, BL_MEMORY_GRADIENTS), 4 * terms,
                1e-9);
    assert_true(item(&both, BL_MEMORY_WORKSPACE) > item(&none, BL_MEMORY_WORKSPACE));
    assert_true(after.part[BL_TIME_HEAD].seconds > before.part[BL_TIME_HEAD].seconds);
    assert_true(after.part[BL_TIME_OPTIMIZER].seconds > before.part[BL_TIME_OPTIMIZER].seconds);
    assert_int_equal(bl_plan_case_open("1xh100", TOKENS, BL_COUNT(argv), argv, &c), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "device cuda is not supported with LoRA terms"));
    bl_plan_case_close(&c);
}

/* An FP8 checkpoint cannot be trained so. */
static void fp8_checkpoints_are_refused(void **state)
{
    char *argv[] = {"--model", "llama-3.1-405b-fp8", "--finetuning_type",
                    "full",    "--learning_rate",    "1e-5"};
    bl_plan_case c;

    (void)state;
    assert_int_equal(bl_plan_case_open("cpu", TOKENS, BL_COUNT(argv), argv, &c), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "is stored in FP8"));
    bl_plan_case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(bytes_per_weight),
                                       cmocka_unit_test(flops),
                                       cmocka_unit_test(gradients_travel),
                                       cmocka_unit_test(more_than_lora),
                                       cmocka_unit_test(the_report_has_no_adapter),
                                       cmocka_unit_test(bf16_halves_what_is_gathered),
                                       cmocka_unit_test(bf16_moments_take_half),
                                       cmocka_unit_test(gpus_hold_it_all),
                                       cmocka_unit_test(a_host_holds_the_state),
                                       cmocka_unit_test(modules_are_whole),
                                       cmocka_unit_test(terms_of_tables_are_whole),
                                       cmocka_unit_test(a_gpu_copies_a_trained_head),
                                       cmocka_unit_test(fp8_checkpoints_are_refused)};
    return cmocka_run_group_tests_name("plan_full", tests, NULL, NULL);
}
