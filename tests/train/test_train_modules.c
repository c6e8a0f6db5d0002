/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA with PEFT's modules_to_save: checkpoints and resumption; the adapter read by an evaluation,
 * a merge and another training; rejected keys. test_train_golden compares with PEFT. */
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/pool.h"
#include "base/sizes.h"
#include "config/config.h"
#include "convert/merge.h"
#include "ops/gemm.h"
#include "store/peft.h"

static void fill(const char *model, const char *modules, int n_ranks, const char *output,
                 golden_args *args)
{
    golden_args_add(args, "device", "cpu");
    golden_args_add(args, "model_name_or_path", GOLDEN_DIR "/models/%s", model);
    golden_args_add(args, "base_format", "stored");
    golden_args_add(args, "train_file", GOLDEN_DIR "/tokens/tiny-more.jsonl");
    golden_args_add(args, "data_format", "tokens");
    golden_args_add(args, "max_seq_length", "64");
    golden_args_add(args, "output_dir", "%s", output);
    golden_args_add(args, "ranks", "%d", n_ranks);
    golden_args_add(args, "threads", "1");
    golden_args_add(args, "gradient_accumulation_steps", "%d", 4 / n_ranks);
    golden_args_add(args, "learning_rate", "0.01");
    golden_args_add(args, "weight_decay", "0.1");
    golden_args_add(args, "max_steps", "12");
    golden_args_add(args, "save_steps", "4");
    golden_args_add(args, "modules_to_save", "%s", modules);
    golden_args_add(args, "validation_file", GOLDEN_VALIDATION);
    golden_args_add(args, "eval_strategy", "steps");
    golden_args_add(args, "eval_steps", "12");
}

static bl_status train(const char *model, const char *modules, int n_ranks, const char *output,
                       const char *const *more)
{
    golden_args args = {0};

    fill(model, modules, n_ranks, output, &args);
    for (int i = 0; more && more[i]; i += 2) runs_set(&args, more[i], "%s", more[i + 1]);
    bl_status st = golden_train(&args);
    golden_args_free(&args);
    return st;
}

static const char *adapter_path(const char *output)
{
    return runs_path("%s/adapter_model.safetensors", output);
}

static void assert_same_adapter(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *of_a = runs_read(adapter_path(a), &n_a), *of_b = runs_read(adapter_path(b), &n_b);

    assert_int_equal(n_a, n_b);
    assert_memory_equal(of_a, of_b, n_a);
    free(of_a), free(of_b);
}

/* ---- checkpoints ---- */

/* Resumes from a checkpoint of step 8. */
static void resume(const char *from, int n_ranks, const char *output, const char *modules)
{
    const char *keys[] = {"resume_from_checkpoint", from, "allow_resume_mismatch", "true", NULL};

    if (train("tiny-gqa", modules, n_ranks, output, keys) != BL_OK) fail_msg("%s", bl_error_text());
}

static void a_resumed_run_has_the_same_bits(void **state)
{
    (void)state;
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        char whole[32], rest[32];
        snprintf(whole, sizeof whole, "whole-%d", n_ranks);
        snprintf(rest, sizeof rest, "rest-%d", n_ranks);
        assert_int_equal(train("tiny-gqa", "lm_head,norm", n_ranks, runs_path("%s", whole), NULL),
                         BL_OK);
        resume(runs_path("%s/checkpoints/step-8", whole), n_ranks, runs_path("%s", rest),
               "lm_head,norm");
        assert_same_adapter(whole, rest);
    }
}

/* Only rank 0's file has the modules. */
static void another_number_of_ranks_resumes(void **state)
{
    static const int orders[][2] = {{4, 1}, {1, 2}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(orders); i++) {
        const char *whole = runs_path("from-%d", orders[i][0]);
        const char *rest = runs_path("on-%d", orders[i][1]);
        assert_int_equal(train("tiny-gqa", "embed_tokens,norm", orders[i][0], whole, NULL), BL_OK);
        resume(runs_path("from-%d/checkpoints/step-8", orders[i][0]), orders[i][1], rest,
               "embed_tokens,norm");
        double one = golden_last_eval_loss(whole), other = golden_last_eval_loss(rest);
        printf("eval loss %.9g on %d ranks, %.9g after 8 steps on them, then %d\n", one,
               orders[i][0], other, orders[i][1]);
        assert_true(fabs(other / one - 1) < 1e-5);
    }
}

/* ---- the adapter ---- */

/* An evaluation of the adapter has the loss that the training reported, unlike the base alone. */
static void the_adapter_is_read_back(void **state)
{
    static const char *const cases[][2] = {{"tiny-gqa", "embed_tokens,lm_head,norm"},
                                           {"tiny-mha-tied", "lm_head"},
                                           {"tiny-mha-tied", "embed_tokens,model.norm"}};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(bl_tree_remove(runs_path("read")), BL_OK);
        assert_int_equal(train(cases[i][0], cases[i][1], 2, runs_path("read"), NULL), BL_OK);
        char path[GOLDEN_PATH_BYTES];
        snprintf(path, sizeof path, GOLDEN_DIR "/models/%s", cases[i][0]);
        double trained = golden_last_eval_loss(runs_path("read")),
               read = golden_evaluate(path, "cpu", runs_path("read")),
               base = golden_evaluate(path, "cpu", NULL);
        printf("%s %s: %.9g as trained, %.9g read back, base %.9g\n", cases[i][0], cases[i][1],
               trained, read, base);
        assert_true(fabs(read / trained - 1) < 1e-6);
        assert_true(fabs(base / trained - 1) > 1e-2);
    }
}

/* In fp32: the model's tensors are F32, and keep their dtype. */
static void a_merge_has_the_modules(void **state)
{
    bl_merge_adapter adapter = {.dir = runs_path("merged-from"), .weight = 1};
    bl_merge_options options = {.source = GOLDEN_DIR "/models/tiny-mha-tied",
                                .target = runs_path("merged"),
                                .adapters = &adapter,
                                .n_adapters = 1,
                                .format = BL_MERGE_F32};
    bl_merge_result result;

    (void)state;
    assert_int_equal(train("tiny-mha-tied", "norm", 1, runs_path("merged-from"), NULL), BL_OK);
    assert_int_equal(bl_pool_create(1, &options.pool), BL_OK);
    if (bl_model_merge(&options, &result) != BL_OK) fail_msg("%s", bl_error_text());
    double trained = golden_last_eval_loss(runs_path("merged-from")),
           merged = golden_evaluate(runs_path("merged"), "cpu", NULL);
    printf("%.9g as trained, %.9g merged\n", trained, merged);
    assert_true(fabs(merged / trained - 1) < 1e-5);
    options.target = runs_path("weighted");
    adapter.weight = 0.5;
    assert_int_equal(bl_model_merge(&options, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "with weight 1"));
    assert_int_equal(train("tiny-mha-tied", "lm_head", 1, runs_path("untied"), NULL), BL_OK);
    adapter = (bl_merge_adapter){.dir = runs_path("untied"), .weight = 1};
    assert_int_equal(bl_model_merge(&options, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "tie_word_embeddings"));
    bl_pool_destroy(options.pool);
}

static void a_run_goes_on_from_the_adapter(void **state)
{
    const char *more[] = {"init_adapter", runs_path("first"), "modules_to_save", "lm_head", NULL},
               *other[] = {"init_adapter", runs_path("first"), "modules_to_save", "norm", NULL};

    (void)state;
    assert_int_equal(train("tiny-gqa", "lm_head", 1, runs_path("first"), NULL), BL_OK);
    assert_int_equal(train("tiny-gqa", "lm_head", 1, runs_path("second"), more), BL_OK);
    double first = golden_last_eval_loss(runs_path("first")),
           second = golden_last_eval_loss(runs_path("second"));
    assert_true(second != first && second < first + 1);
    assert_int_equal(train("tiny-gqa", "lm_head", 1, runs_path("third"), other), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "modules_to_save: differs from that of init_adapter"));
}

/* Activations are bf16; trained tables and their products are fp32. */
static void in_bf16(void **state)
{
    const char *keys[] = {"compute_dtype", "bf16", NULL};

    (void)state;
    if (!bl_cpu_gemm_has_bf16()) setenv("BALLAST_CPU_BF16", "emulated", 1); /* config/device.c */
    assert_int_equal(train("tiny-gqa", "embed_tokens,lm_head,norm", 2, runs_path("fp32"), NULL),
                     BL_OK);
    if (train("tiny-gqa", "embed_tokens,lm_head,norm", 2, runs_path("bf16"), keys) != BL_OK)
        fail_msg("%s", bl_error_text());
    unsetenv("BALLAST_CPU_BF16");
    double fp32 = golden_last_eval_loss(runs_path("fp32")),
           bf16 = golden_last_eval_loss(runs_path("bf16"));
    printf("%.6g in fp32, %.6g in bf16\n", fp32, bf16);
    assert_true(bf16 != fp32 && fabs(bf16 / fp32 - 1) < 5e-3);
}

/* An expression may match a module that is trained whole: as in PEFT, it is not a target. */
static void saved_modules_are_no_targets(void **state)
{
    static const char *const by_name[] = {"lora_target_modules", "q_proj", NULL},
                             *const by_pattern[] = {"lora_target_modules", ".*(q_proj|lm_head)",
                                                    NULL};

    (void)state;
    assert_int_equal(train("tiny-gqa", "lm_head", 1, runs_path("by-name"), by_name), BL_OK);
    if (train("tiny-gqa", "lm_head", 1, runs_path("by-pattern"), by_pattern) != BL_OK)
        fail_msg("%s", bl_error_text());
    assert_same_adapter("by-name", "by-pattern");
}

/* ---- rejected keys ---- */

static void unsuitable_modules_are_refused(void **state)
{
    static const struct {
        const char *modules, *key, *value, *text;
    } cases[] = {
        {"score", NULL, NULL, "no norm, embedding or head ends in \"score\""},
        {"q_proj", NULL, NULL, "\"q_proj\" is a projection"},
        {"proj", NULL, NULL, "\"proj\" is a projection"},
        {"norm", "lora_target_modules", ".*(q_proj|lm_head)",
         "selects lm_head: LoRA terms of the embedding and the head are not supported"},
        {"embed_tokens", "lora_target_modules", ".*(q_proj|embed_tokens|lm_head)",
         "selects lm_head: LoRA terms"},
        {"lm_head", "finetuning_type", "full", "modules_to_save is not supported: it is LoRA's"},
        {"lm_head", "loss_type", "sigmoid", "modules_to_save: loss_type sigmoid compares"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *more[] = {cases[i].key, cases[i].value, NULL};
        bl_status st = train("tiny-gqa", cases[i].modules, 1, runs_path("refused"), more);
        if (st != BL_EUSAGE || !strstr(bl_error_text(), cases[i].text))
            fail_msg("%s: %s", cases[i].modules, bl_error_text());
    }
}

/* The reference is the frozen model, in training and in an evaluation. */
static void references_are_refused(void **state)
{
    static const char pairs[] = "tests/golden/preference/tokens/pairs.jsonl";
    const char *more[] = {"init_adapter", runs_path("chosen"), "loss_type", "sigmoid", "train_file",
                          pairs,          "validation_file",   pairs,       NULL};
    char *line[] = {"--model",           GOLDEN_DIR "/models/tiny-gqa",
                    "--device",          "cpu",
                    "--max_seq_length",  "64",
                    "--loss_type",       "sigmoid",
                    "--validation_file", (char *)(uintptr_t)pairs,
                    "--adapter",         (char *)(uintptr_t)runs_path("chosen")};
    bl_train_config *config;
    bl_eval_result result;
    golden_args args = {0};

    (void)state;
    assert_int_equal(train("tiny-gqa", "norm", 1, runs_path("chosen"), NULL), BL_OK);
    fill("tiny-gqa", "norm", 1, runs_path("preferred"), &args);
    for (int i = 0; more[i]; i += 2) runs_set(&args, more[i], "%s", more[i + 1]);
    runs_unset(&args, "modules_to_save");
    runs_unset(&args, "data_format");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    golden_args_free(&args);
    assert_non_null(strstr(bl_error_text(), "of which its modules_to_save replace a part"));
    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, NULL, (int)BL_COUNT(line), line, &config),
                     BL_OK);
    assert_int_equal(bl_eval_run(config, NULL, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "of which its modules_to_save replace a part"));
    bl_train_config_free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_resumed_run_has_the_same_bits),
                                       cmocka_unit_test(another_number_of_ranks_resumes),
                                       cmocka_unit_test(the_adapter_is_read_back),
                                       cmocka_unit_test(a_merge_has_the_modules),
                                       cmocka_unit_test(a_run_goes_on_from_the_adapter),
                                       cmocka_unit_test(in_bf16),
                                       cmocka_unit_test(saved_modules_are_no_targets),
                                       cmocka_unit_test(unsuitable_modules_are_refused),
                                       cmocka_unit_test(references_are_refused)};
    return cmocka_run_group_tests_name("modules", tests, runs_set_up, runs_tear_down);
}
