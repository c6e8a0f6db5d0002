/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA with PEFT's modules_to_save, and with LoRA terms of the embedding and the head: checkpoints
 * and resumption; the adapter read by an evaluation, a generator, a merge and another training;
 * dropout; rejected keys. test_train_golden compares with PEFT. */
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trained/peft.h"
#include "trained/terms.h"
#include "base/files.h"
#include "base/pool.h"
#include "base/sizes.h"
#include "config/config.h"
#include "convert/merge.h"
#include "model/generate.h"
#include "ops/gemm.h"
#include "store/peft.h"

#define TERMS "q_proj,down_proj,embed_tokens,lm_head"

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
    if (modules)
        golden_args_add(args, "modules_to_save", "%s", modules);
    else
        golden_args_add(args, "lora_target_modules", TERMS);
    golden_args_add(args, "validation_file", GOLDEN_VALIDATION);
    golden_args_add(args, "eval_strategy", "steps");
    golden_args_add(args, "eval_steps", "12");
}

/* modules NULL: LoRA terms of the embedding and the head. */
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
    static const char *const modules[] = {"lm_head,norm", NULL};

    (void)state;
    for (int i = 0; i < 4; i++) {
        int n_ranks = 1 + i % 2;
        char whole[32], rest[64];
        snprintf(whole, sizeof whole, "whole-%d", i);
        snprintf(rest, sizeof rest, "rest-%d", i);
        assert_int_equal(train("tiny-gqa", modules[i / 2], n_ranks, runs_path("%s", whole), NULL),
                         BL_OK);
        resume(runs_path("%s/checkpoints/step-8", whole), n_ranks, runs_path("%s", rest),
               modules[i / 2]);
        assert_same_adapter(whole, rest);
        snprintf(rest, sizeof rest, "%s/checkpoints/step-12", whole); /* made from shards */
        assert_same_adapter(whole, rest);
    }
}

/* Only rank 0's file has the modules. */
static void another_number_of_ranks_resumes(void **state)
{
    static const int orders[][2] = {{4, 1}, {1, 2}, {4, 1}, {1, 2}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(orders); i++) {
        const char *modules = i < 2 ? "embed_tokens,norm" : NULL;
        const char *whole = runs_path("from-%zu", i), *rest = runs_path("on-%zu", i);
        assert_int_equal(train("tiny-gqa", modules, orders[i][0], whole, NULL), BL_OK);
        resume(runs_path("from-%zu/checkpoints/step-8", i), orders[i][1], rest, modules);
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
                                           {"tiny-mha-tied", "embed_tokens,model.norm"},
                                           {"tiny-gqa", NULL},
                                           {"tiny-mha-tied", NULL}};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(bl_tree_remove(runs_path("read")), BL_OK);
        assert_int_equal(train(cases[i][0], cases[i][1], 2, runs_path("read"), NULL), BL_OK);
        char path[GOLDEN_PATH_BYTES];
        snprintf(path, sizeof path, GOLDEN_DIR "/models/%s", cases[i][0]);
        double trained = golden_last_eval_loss(runs_path("read")),
               read = golden_evaluate(path, "cpu", runs_path("read")),
               base = golden_evaluate(path, "cpu", NULL);
        printf("%s %s: %.9g as trained, %.9g read back, base %.9g\n", cases[i][0],
               cases[i][1] ? cases[i][1] : TERMS, trained, read, base);
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

/* ---- LoRA terms of the embedding and the head ---- */

typedef struct generation {
    bl_model *model;
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    bl_model_weights *weights;
    bl_base *base;
    bl_lora_layout lora;
    bl_tensor lora_weights;
    bl_adapter_terms *terms;
    bl_staging *staging;
    bl_generator *generator;
} generation;

static void ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

/* adapter NULL: none. */
static void open_generation(const char *model, const char *adapter, generation *g)
{
    enum { CAPACITY = 16 };

    ok(bl_model_open(model, BL_BASE_STORED, CAPACITY, &g->model));
    ok(bl_comm_create_local(1, 0.0, &g->comm));
    ok(bl_device_create_cpu(1, &g->device));
    ok(bl_stream_create(g->device, "compute", &g->stream));
    ok(bl_model_weights_load(g->model, g->device, g->comm, g->stream, NULL, &g->weights));
    ok(bl_base_create_resident(&g->weights->layout, g->weights->shards, &g->base));
    bl_lora_layout_init(&g->model->config, NULL, &g->lora);
    if (adapter)
        ok(bl_lora_read_all(adapter, &g->model->config, g->device, &g->lora, &g->lora_weights));
    ok(bl_generator_create(g->device, g->stream, g->weights, g->base, &g->lora, g->lora_weights,
                           CAPACITY, &g->generator));
    if (!adapter) return;
    ok(bl_staging_create(g->device, BL_STAGING_BYTES, "test", &g->staging));
    ok(bl_adapter_terms_create(g->device, &g->lora, &g->terms));
    ok(bl_adapter_terms_read(g->terms, &g->model->config, adapter, g->staging, g->stream));
    ok(bl_generator_use_terms(g->generator, bl_adapter_terms_list(g->terms)));
}

static void close_generation(generation *g)
{
    bl_generator_destroy(g->generator);
    bl_staging_destroy(g->staging);
    bl_adapter_terms_destroy(g->terms);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->lora_weights.data);
    bl_base_destroy(g->base);
    bl_model_weights_free(g->weights);
    bl_stream_destroy(g->stream);
    bl_comm_destroy(g->comm);
    bl_device_destroy(g->device);
    bl_model_close(g->model);
}

/* A merge adds the terms to the tables: the same loss, and the same logits of a generator. Two
 * adapters are added with their weights. The tables are bf16 and stay so: their weights have an
 * error of at most 2^-9. */
static void a_merge_has_the_terms(void **state)
{
    const int32_t prompt[] = {1, 17, 42, 5, 33};
    bl_merge_adapter adapters[] = {{.dir = runs_path("terms"), .weight = 0.25},
                                   {.dir = runs_path("terms"), .weight = 0.75}};
    bl_merge_options options = {.source = GOLDEN_DIR "/models/tiny-gqa",
                                .target = runs_path("merged-terms"),
                                .adapters = adapters,
                                .n_adapters = 2,
                                .format = BL_MERGE_F32};
    bl_merge_result result;
    generation of_adapter = {0}, of_merged = {0}, of_base = {0};
    const float *ours, *merged, *base;
    double error = 0, change = 0;

    (void)state;
    ok(train("tiny-gqa", NULL, 2, runs_path("terms"), NULL));
    ok(bl_pool_create(1, &options.pool));
    ok(bl_model_merge(&options, &result));
    double trained = golden_last_eval_loss(runs_path("terms")),
           loss = golden_evaluate(runs_path("merged-terms"), "cpu", NULL);
    printf("%.9g as trained, %.9g merged\n", trained, loss);
    assert_true(fabs(loss / trained - 1) < 0x1p-9);
    open_generation(options.source, runs_path("terms"), &of_adapter);
    open_generation(runs_path("merged-terms"), NULL, &of_merged);
    ok(bl_generator_extend(of_adapter.generator, prompt, BL_COUNT(prompt), &ours));
    ok(bl_generator_extend(of_merged.generator, prompt, BL_COUNT(prompt), &merged));
    open_generation(options.source, NULL, &of_base);
    ok(bl_generator_extend(of_base.generator, prompt, BL_COUNT(prompt), &base));
    for (int64_t i = 0; i < of_adapter.model->config.vocab_size; i++) {
        error = fmax(error, fabs((double)ours[i] - (double)merged[i]));
        change = fmax(change, fabs((double)ours[i] - (double)base[i]));
    }
    printf("logits: merged within %.2g, base %.2g\n", error, change);
    assert_true(error < change / 50);
    close_generation(&of_adapter), close_generation(&of_merged), close_generation(&of_base);
    /* The frozen tables in PEFT's file differ from the merged ones. */
    const char *more[] = {"model_name_or_path",
                          options.target,
                          "lora_target_modules",
                          "q_proj,v_proj,down_proj,embed_tokens,lm_head",
                          "init_adapter",
                          "tests/golden/modules/adapters/terms",
                          NULL};
    assert_int_equal(train("tiny-gqa", NULL, 1, runs_path("other-base"), more), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "differs from the model's (element "));
    options.source = GOLDEN_DIR "/models/tiny-mha-tied";
    options.target = runs_path("merged-tied");
    options.n_adapters = 1;
    ok(train("tiny-mha-tied", NULL, 1, runs_path("tied-terms"), NULL));
    adapters[0].dir = runs_path("tied-terms");
    assert_int_equal(bl_model_merge(&options, &result), BL_EUSAGE);
    assert_non_null(
        strstr(bl_error_text(), "a LoRA term of the embedding or the head cannot be merged"));
    bl_pool_destroy(options.pool);
}

/* A shift of an adapter: its factors, with `step` times the gradients of a file added to those of
 * the tables. */
typedef struct shift {
    bl_peft_adapter *from;
    const bl_peft_modules *modules;
    bl_safetensors *gradients;
    double step, squares; /* of these gradients */
} shift;

static bl_status shifted_factor(void *user, int64_t layer, int module, bl_peft_factor factor,
                                float *dst)
{
    shift *s = user;
    char name[BL_PEFT_NAME_BYTES];

    ok(bl_peft_read(s->from, layer, module, factor, dst));
    if (module < BL_PEFT_EMBEDDING) return BL_OK;
    bl_peft_tensor_name(s->modules, layer, module, factor, name);
    const bl_stored_tensor *t = bl_safetensors_find(s->gradients, name);
    int64_t n = t->shape[0] * t->shape[1];
    float *gradient = malloc((size_t)n * sizeof *gradient);
    ok(bl_stored_tensor_read_f32(t, gradient));
    for (int64_t i = 0; i < n; i++) {
        dst[i] += (float)s->step * gradient[i];
        s->squares += (double)gradient[i] * (double)gradient[i];
    }
    free(gradient);
    return BL_OK;
}

static double loss_of_first_step(const char *output)
{
    json_t *metrics = golden_metrics(output);
    const json_t *loss = NULL;

    for (size_t i = 0; i < json_array_size(metrics) && !loss; i++)
        loss = json_object_get(json_array_get(metrics, i), "loss");
    double value = json_number_value(loss);
    json_decref(metrics);
    return value;
}

/* The loss of the first step from the adapter, with its dropout. */
static double first_loss(const char *adapter, const char *dropout, const char *gradients)
{
    const char *more[] = {"init_adapter",
                          adapter,
                          "lora_dropout",
                          dropout,
                          "max_steps",
                          "1",
                          "save_steps",
                          "0",
                          "eval_strategy",
                          "no",
                          "learning_rate",
                          "0",
                          gradients ? "dump_gradients" : NULL,
                          gradients,
                          NULL};
    const char *output = runs_path("one-step");

    assert_int_equal(bl_tree_remove(output), BL_OK);
    ok(train("tiny-gqa", NULL, 2, output, more));
    return loss_of_first_step(output);
}

/* PEFT draws other dropout masks, so gradients with dropout are compared with finite differences:
 * the change of the loss along the gradient of the terms. The loss is 4 with a relative error of
 * 1e-7 in fp32, and the difference is 4e-3. */
static void gradients_with_dropout(void **state)
{
    static const double STEP = 1e-3;
    bl_model_config config;
    shift s = {0};
    double loss[2];

    (void)state;
    ok(bl_model_config_load(GOLDEN_DIR "/models/tiny-gqa", &config));
    ok(train("tiny-gqa", NULL, 1, runs_path("dropped"), NULL));
    double plain = first_loss(runs_path("dropped"), "0", NULL),
           dropped = first_loss(runs_path("dropped"), "0.4", runs_path("gradients"));
    assert_true(fabs(dropped - plain) > 1e-4);
    bl_peft_base base = bl_lora_peft_base(&config);
    s.modules = &base.modules;
    ok(bl_peft_open(runs_path("dropped"), &base, &s.from));
    ok(bl_safetensors_open(runs_path("gradients"), &s.gradients));
    for (int i = 0; i < 2; i++) {
        s.step = i == 0 ? STEP : -STEP;
        s.squares = 0;
        ok(bl_dir_create(runs_path("shifted")));
        ok(bl_peft_write(runs_path("shifted"), bl_peft_get_config(s.from), &base, "base", BL_F32,
                         shifted_factor, NULL, &s));
        loss[i] = first_loss(runs_path("shifted"), "0.4", NULL);
    }
    double slope = (loss[0] - loss[1]) / (2 * STEP);
    printf("loss %.6f, with dropout %.6f; slope %.6f, gradient %.6f\n", plain, dropped, slope,
           s.squares);
    assert_true(fabs(slope / s.squares - 1) < 1e-2);
    bl_safetensors_close(s.gradients);
    bl_peft_close(s.from);
}

/* Dropout's masks do not depend on the order of the work. */
static void terms_have_the_same_bits(void **state)
{
    static const char *const variants[][4] = {{"visit_tokens", "1"},
                                              {"visit_tokens", "1000000"},
                                              {"activation_checkpointing", "none"},
                                              {"activation_checkpointing", "full"},
                                              {"threads", "3"},
                                              {"activation_offload", "true"}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(variants); i++) {
        const char *more[] = {"lora_dropout", "0.2", variants[i][0], variants[i][1], NULL};
        char name[32];
        snprintf(name, sizeof name, "variant-%zu", i);
        ok(train("tiny-gqa", NULL, 2, runs_path("%s", name), more));
        assert_same_adapter("variant-0", name);
    }
}

/* At the first step from an adapter the policy is the reference: the loss is ln 2. */
static void a_reference_has_the_terms(void **state)
{
    static const char pairs[] = "tests/golden/preference/tokens/pairs.jsonl";
    const char *more[] = {"init_adapter", runs_path("policy"), "loss_type", "sigmoid", "train_file",
                          pairs,          "validation_file",   pairs,       NULL};
    golden_args args = {0};

    (void)state;
    ok(train("tiny-gqa", NULL, 1, runs_path("policy"), NULL));
    fill("tiny-gqa", NULL, 1, runs_path("preferred"), &args);
    for (int i = 0; more[i]; i += 2) runs_set(&args, more[i], "%s", more[i + 1]);
    runs_unset(&args, "data_format");
    ok(golden_train(&args));
    golden_args_free(&args);
    double loss = loss_of_first_step(runs_path("preferred"));
    printf("loss of the first step %.9g\n", loss);
    assert_true(fabs(loss - log(2)) < 1e-6);
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

/* Activations are bf16; trained tables and their products are fp32, those of terms bf16. */
static void in_bf16(void **state)
{
    const char *keys[] = {"compute_dtype", "bf16", NULL};

    (void)state;
    if (!bl_cpu_gemm_has_bf16()) setenv("BALLAST_CPU_BF16", "emulated", 1); /* config/device.c */
    for (int i = 0; i < 2; i++) {
        const char *modules = i == 0 ? "embed_tokens,lm_head,norm" : NULL;
        ok(train("tiny-gqa", modules, 2, runs_path("fp32-%d", i), NULL));
        ok(train("tiny-gqa", modules, 2, runs_path("bf16-%d", i), keys));
        double fp32 = golden_last_eval_loss(runs_path("fp32-%d", i)),
               bf16 = golden_last_eval_loss(runs_path("bf16-%d", i));
        printf("%.6g in fp32, %.6g in bf16\n", fp32, bf16);
        assert_true(bf16 != fp32 && fabs(bf16 / fp32 - 1) < (i == 0 ? 5e-3 : 1e-2));
    }
    unsetenv("BALLAST_CPU_BF16");
}

/* A name or an expression may match a module that is trained whole: as in PEFT, it is not a
 * target. */
static void saved_modules_are_no_targets(void **state)
{
    static const char *const by_name[] = {"lora_target_modules", "q_proj", NULL},
                             *const by_two_names[] = {"lora_target_modules", "q_proj,lm_head",
                                                      NULL},
                             *const by_pattern[] = {"lora_target_modules", ".*(q_proj|lm_head)",
                                                    NULL};

    (void)state;
    assert_int_equal(train("tiny-gqa", "lm_head", 1, runs_path("by-name"), by_name), BL_OK);
    if (train("tiny-gqa", "lm_head", 1, runs_path("by-pattern"), by_pattern) != BL_OK)
        fail_msg("%s", bl_error_text());
    assert_same_adapter("by-name", "by-pattern");
    ok(train("tiny-gqa", "lm_head", 1, runs_path("by-two-names"), by_two_names));
    assert_same_adapter("by-name", "by-two-names");
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
        {"norm", "lora_target_modules", "lm_head,embed_tokens", "select no projection; LoRA terms"},
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
                                       cmocka_unit_test(a_merge_has_the_terms),
                                       cmocka_unit_test(gradients_with_dropout),
                                       cmocka_unit_test(terms_have_the_same_bits),
                                       cmocka_unit_test(a_reference_has_the_terms),
                                       cmocka_unit_test(a_run_goes_on_from_the_adapter),
                                       cmocka_unit_test(in_bf16),
                                       cmocka_unit_test(saved_modules_are_no_targets),
                                       cmocka_unit_test(unsuitable_modules_are_refused),
                                       cmocka_unit_test(references_are_refused)};
    return cmocka_run_group_tests_name("modules", tests, runs_set_up, runs_tear_down);
}
