/* SPDX-License-Identifier: Apache-2.0 */
/* A plan simulates the operations of a training: the spans of plan/time.h, in order, with their
 * layers, items and bytes, are those of the trace of a run. Times are not compared. */
#include "runs.h"

#include <stdlib.h>
#include <string.h>

#include "bench/command/model.h"
#include "skip.h"
#include "spans.h"
#include "arch/llama.h"
#include "base/sizes.h"
#include "plan/time.h"

enum { ROW_TOKENS = 24, LAYERS = 5, HIDDEN = 64, STEPS = 2 };

typedef struct job {
    bool is_untied; /* another model: two layers and a separate head */
    bool is_cuda, places_copy;
    bool is_full;                                 /* every weight is trained */
    const char *trainable;                        /* or those of this pattern */
    const char *optimizer_tier, *optimizer_ratio; /* NULL: none is outside of device memory */
    bool has_bf16_moments;
    const char *modules; /* modules_to_save; NULL: none */
    bool has_terms;      /* LoRA terms of the embedding and the head beside all projections */
    int ranks, depth, n_micro;
    const char *ratio, *tier, *host_part, *checkpointing; /* host_part NULL: none */
    unsigned save;
    bool offloads_activations;
} job;

/* ---- the run ---- */

static void set_full(golden_args *args)
{
    static const char *const of_lora[] = {"lora_r", "lora_alpha", "lora_dropout",
                                          "lora_target_modules", "use_rslora"};

    runs_set(args, "finetuning_type", "full");
    for (size_t i = 0; i < BL_COUNT(of_lora); i++) runs_unset(args, of_lora[i]);
}

static void train(const job *j, spans *out)
{
    golden_args args = {0};

    runs_standard(&args, runs_path("run"), j->ranks);
    if (!j->is_untied) {
        runs_set(&args, "model_name_or_path", "%s", runs_path("model"));
        runs_set(&args, "train_file", "%s", runs_path("train.jsonl"));
    }
    if (j->is_cuda) {
        runs_set(&args, "device", "cuda");
        runs_set(&args, "compute_dtype", "bf16");
    }
    runs_unset(&args, "validation_file");
    runs_unset(&args, "eval_strategy");
    runs_unset(&args, "eval_steps");
    runs_set(&args, "overwrite_output_dir", "true");
    if (!j->is_full) runs_set(&args, "base_format", "fp8_row");
    runs_set(&args, "max_steps", "%d", STEPS);
    runs_set(&args, "save_steps", "0");
    runs_set(&args, "gradient_accumulation_steps", "%d", j->n_micro);
    runs_set(&args, "visit_tokens", "1000000");
    runs_set(&args, "ring_depth", "%d", j->depth);
    if (j->is_full) set_full(&args);
    if (j->has_bf16_moments) runs_set(&args, "optimizer_state_dtype", "bf16");
    if (j->optimizer_tier) {
        runs_set(&args, "optimizer_tier", "%s", j->optimizer_tier);
        runs_set(&args, "optimizer_ratio", "%s", j->optimizer_ratio);
        runs_set(&args, "offload_dir", "%s", runs_path("pages"));
    }
    if (j->trainable) runs_set(&args, "trainable_modules", "%s", j->trainable);
    if (j->modules) runs_set(&args, "modules_to_save", "%s", j->modules);
    if (j->has_terms)
        runs_set(&args, "lora_target_modules",
                 "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,"
                 "down_proj,embed_tokens,lm_head");
    runs_set(&args, "offload_ratio", "%s", j->ratio);
    runs_set(&args, "offload_tier", "%s", j->tier);
    if (j->places_copy) runs_set(&args, "offload_compute_copy", "true");
    if (j->host_part) runs_set(&args, "offload_host_part", "%s", j->host_part);
    if (strcmp(j->tier, "disk") == 0) runs_set(&args, "offload_dir", "%s", runs_path("pages"));
    runs_set(&args, "activation_checkpointing", "%s", j->checkpointing);
    runs_set(&args, "activation_offload", "%s", j->offloads_activations ? "true" : "false");
    runs_set(&args, "trace", "%s", runs_path("trace.json"));
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    spans_read_trace(runs_path("trace.json"), out);
}

/* ---- the plan ---- */

static bl_tier tier_of(const char *name)
{
    return strcmp(name, "disk") == 0 ? BL_TIER_DISK : BL_TIER_HOST;
}

static void foresee(const job *j, spans *out)
{
    bl_model_config model;
    bl_lora_options options = {.r = 8, .alpha = 16, .table = {j->has_terms, j->has_terms}};
    bl_lora_layout lora;
    bl_time_run run = {.save = j->save, .n_layers = 1}, runs[LAYERS];
    bl_trained_patterns patterns = {&j->trainable, j->trainable ? 1 : 0, NULL, 0};
    bl_trained_set set, modules = {0};

    assert_int_equal(bl_model_config_load(
                         j->is_untied ? GOLDEN_DIR "/models/tiny-gqa" : runs_path("model"), &model),
                     BL_OK);
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        options.target[p] = true;
        run.format[p] = !j->is_full  ? BL_FORMAT_FP8_ROW
                        : j->is_cuda ? BL_FORMAT_BF16
                                     : BL_FORMAT_F32;
    }
    bl_lora_layout_init(&model, j->is_full ? NULL : &options, &lora);
    assert_int_equal(bl_trained_choose(&model, &patterns, &set), BL_OK);
    if (j->modules)
        assert_int_equal(
            bl_trained_choose_modules(&model, &j->modules, 1, BL_EUSAGE, "test", &modules), BL_OK);
    for (int64_t l = 0; l < model.n_layers; l++) {
        runs[l] = run;
        runs[l].trained = &set.unit[l];
        if (l < set.first) runs[l].save = BL_SAVE_S0;
        runs[l].is_last = j->is_full && l == set.first && !bl_trained_has_embedding(&set);
    }
    bl_time_input input = {
        .model = &model,
        .lora = &lora,
        .is_trained = j->is_full,
        .places_copy = j->places_copy,
        .trained = j->is_full ? &set : NULL,
        .modules = j->modules ? &modules : NULL,
        .runs = runs,
        .n_runs = (int)model.n_layers,
        .head_dtype = j->is_full && !j->is_cuda ? BL_F32 : BL_BF16,
        .moments = j->has_bf16_moments ? BL_BF16 : BL_F32,
        .optimizer_ratio = j->optimizer_ratio ? strtod(j->optimizer_ratio, NULL) : 0,
        .optimizer_tier = j->optimizer_tier ? tier_of(j->optimizer_tier) : BL_TIER_DEVICE,
        .kind = j->is_cuda ? BL_DEVICE_CUDA : BL_DEVICE_CPU,
        .act = j->is_cuda ? BL_BF16 : BL_F32,
        .rates = {.gemm_flops_per_s = 1e10,
                  .attention_forward_flops_per_s = 1e10,
                  .attention_backward_flops_per_s = 1e10,
                  .memory_bytes_per_s = 1e10,
                  .decode_weights_per_s = 1e10,
                  .gather_bytes_per_s = 1e9,
                  .copy_in_bytes_per_s = 1e9,
                  .copy_out_bytes_per_s = 1e9,
                  .host_memory_bytes_per_s = 1e10,
                  .disk_bytes_per_s = 1e8},
        .n_ranks = j->ranks,
        .n_hosts = 1,
        .n_shards = j->ranks,
        .ring_depth = j->depth,
        .micro_tokens = ROW_TOKENS,
        .document_tokens = ROW_TOKENS,
        .label_part = 1,
        .useful_part = 1,
        .n_micro = j->n_micro,
        .group = j->n_micro,
        .offload_ratio = strtod(j->ratio, NULL),
        .tier = tier_of(j->tier),
        .host_part = j->host_part ? strtod(j->host_part, NULL) : 0,
        .offload_activations = j->offloads_activations,
        .writes_device = !j->is_cuda};
    for (int step = 0; step < STEPS; step++)
        if (bl_time_trace(&input, BL_TIME_ROUND,
                          step == 0 ? BL_TIME_AFTER_NOTHING : BL_TIME_AFTER_STEP,
                          spans_add_foreseen, out) != BL_OK)
            fail_msg("%s", bl_error_text());
    bl_trained_free(&set);
    bl_trained_free(&modules);
}

/* ---- both ---- */

/* The last step's updates, which the checkpoint at the end waits for. */
static void drop_last_updates(spans *s)
{
    while (s->n > 0 && strstr(s->text[s->n - 1], "update")) s->n--;
}

static void compare(const job *j)
{
    static spans done, foreseen;

    done.n = foreseen.n = 0;
    train(j, &done);
    foresee(j, &foreseen);
    if (j->is_full) drop_last_updates(&done);
    /* One rank that trains weights has neither gathers nor gradients to reduce. */
    spans_assert_same(&done, &foreseen, j->trainable ? 5 : j->is_full ? 10 : j->modules ? 30 : 60);
}

static void a_resident_base(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks += 2)
        compare(&(job){.ranks = ranks,
                       .depth = 2,
                       .n_micro = 1,
                       .ratio = "0",
                       .tier = "host",
                       .checkpointing = "full"});
}

static void an_offloaded_base(void **state)
{
    static const char *const tiers[] = {"host", "disk"}, *const ratios[] = {"0.4", "1"};
    (void)state;
    for (int i = 0; i < 2 * 2 * 3; i++)
        compare(&(job){.ranks = 1 + i % 2,
                       .depth = 1 + i / 4,
                       .n_micro = 1 + i % 3,
                       .ratio = ratios[i % 2],
                       .tier = tiers[i / 2 % 2],
                       .checkpointing = "full"});
}

/* Device, host and disk at once. */
static void three_tiers(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++)
        compare(&(job){.ranks = ranks,
                       .depth = 2,
                       .n_micro = 2,
                       .ratio = "0.8",
                       .tier = "disk",
                       .host_part = "0.4",
                       .checkpointing = "full"});
}

static void spilled_activations(void **state)
{
    (void)state;
    for (int n_micro = 1; n_micro <= 2; n_micro++) {
        job j = {.ranks = 2,
                 .depth = 3,
                 .n_micro = n_micro,
                 .ratio = "1",
                 .tier = "host",
                 .checkpointing = "full",
                 .offloads_activations = true};
        compare(&j);
        j.checkpointing = "none";
        j.save = BL_SAVE_S4;
        compare(&j);
    }
}

static void a_head_of_its_own(void **state)
{
    (void)state;
    for (int depth = 1; depth <= 4; depth++)
        compare(&(job){.is_untied = true,
                       .ranks = 2,
                       .depth = depth,
                       .n_micro = 2,
                       .ratio = depth % 2 ? "1" : "0",
                       .tier = "host",
                       .checkpointing = "full"});
}

/* Tied and separate heads; on several ranks gradients are reduced, of tables, too. */
static void every_weight(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * 2 * 3; i++)
        compare(&(job){.is_full = true,
                       .is_untied = i % 2,
                       .ranks = 1 + i / 2 % 2,
                       .depth = 1 + i / 4,
                       .n_micro = 1 + i % 3,
                       .ratio = "0",
                       .tier = "host",
                       .checkpointing = i < 6 ? "full" : "none",
                       .save = i < 6 ? BL_SAVE_S0 : BL_SAVE_S4,
                       .offloads_activations = i >= 8 && i % 2 == 0});
}

/* Weights, moments and gradients on disk, wholly or in part; those of a GPU also in host memory. */
static void every_weight_in_tiers(void **state)
{
    static const struct {
        const char *optimizer_tier, *optimizer_ratio, *tier, *ratio, *host_part;
    } places[] = {{"disk", "1", "disk", "1", NULL}, {"disk", "0.5", "disk", "0.6", "0.5"},
                  {"host", "1", "host", "1", NULL}, {"host", "1", "disk", "0.7", NULL},
                  {"disk", "1", "host", "0", NULL}, {"disk", "0", "host", "1", NULL}};
    bl_gpu_info info;
    bool has_gpu = bl_device_find_cuda(0, &info) == BL_OK;

    (void)state;
    for (size_t i = 0; i < 4 * BL_COUNT(places); i++) {
        size_t p = i / 4;
        bool has_weights = strtod(places[p].ratio, NULL) > 0;
        compare(&(job){.is_full = true,
                       .is_cuda = has_gpu,
                       .places_copy = has_gpu && has_weights && i / 2 % 2,
                       .is_untied = i % 2,
                       .has_bf16_moments = i % 3 == 1,
                       .ranks = has_gpu ? 1 : 1 + (int)(i / 2) % 2,
                       .depth = 1 + (int)i % 3,
                       .n_micro = 1 + (int)i % 2,
                       .optimizer_tier = places[p].optimizer_tier,
                       .optimizer_ratio = places[p].optimizer_ratio,
                       .tier = places[p].tier,
                       .ratio = places[p].ratio,
                       .host_part = places[p].host_part,
                       .checkpointing = "full"});
    }
}

/* Backward ends at the first layer with one of them; gradients of frozen matrices are not
 * reduced. */
static void some_weights(void **state)
{
    static const char *const trainable[] = {"layers.1",     "mlp.down_proj", "lm_head",
                                            "embed_tokens", ".*norm",        "q_proj"};
    (void)state;
    for (int i = 0; i < 4 * (int)BL_COUNT(trainable); i++)
        compare(&(job){.is_full = true,
                       .trainable = trainable[i / 4],
                       .is_untied = i / 2 % 2,
                       .ranks = 1 + i % 2,
                       .depth = 1 + i % 3,
                       .n_micro = 1 + i % 2,
                       .optimizer_tier = i % 3 == 2 ? "disk" : NULL,
                       .optimizer_ratio = "1",
                       .ratio = "0",
                       .tier = "host",
                       .checkpointing = i % 2 ? "full" : "none",
                       .save = i % 2 ? BL_SAVE_S0 : BL_SAVE_S4,
                       .offloads_activations = i % 4 < 2});
}

/* modules_to_save: a trained head is not gathered; the embedding's gradient ends the pass. */
static void saved_modules(void **state)
{
    static const char *const modules[] = {"lm_head", "embed_tokens", "norm"};

    (void)state;
    for (int i = 0; i < 4 * (int)BL_COUNT(modules); i++)
        compare(&(job){.modules = modules[i / 4],
                       .is_untied = i / 2 % 2,
                       .ranks = 1 + i % 2,
                       .depth = 1 + i % 3,
                       .n_micro = 1 + i % 2,
                       .ratio = i % 3 == 0 ? "1" : "0",
                       .tier = "host",
                       .checkpointing = "full"});
}

/* The gradient of the embedding's term ends the pass. */
static void terms_of_tables(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++)
        compare(&(job){.has_terms = true,
                       .is_untied = i / 2 % 2,
                       .ranks = 1 + i % 2,
                       .depth = 1 + i % 3,
                       .n_micro = 1 + i % 2,
                       .ratio = "1",
                       .tier = "host",
                       .checkpointing = "full"});
}

/* The same schedule feeds a GPU, which has a tied head gathered and micro-batches in tiles. */
static void a_gpu(void **state)
{
    static const char *const tiers[] = {"host", "disk"};
    bl_gpu_info info;
    (void)state;
    if (bl_device_find_cuda(0, &info) != BL_OK) TEST_SKIP("no GPU");
    for (int i = 0; i < 4; i++)
        compare(&(job){.is_cuda = true,
                       .ranks = 1,
                       .depth = 2 + i / 2,
                       .n_micro = 1 + i % 2,
                       .ratio = "0.5",
                       .tier = tiers[i % 2],
                       .checkpointing = "full",
                       .offloads_activations = i == 3});
}

static int set_up(void **state)
{
    const bl_bench_model model = {.layers = LAYERS,
                                  .hidden = HIDDEN,
                                  .inter = 3 * HIDDEN,
                                  .vocab = 256,
                                  .rows = 64,
                                  .row_tokens = ROW_TOKENS};
    int failed = runs_set_up(state);
    if (failed) return failed;
    return bl_bench_model_write(&model, runs_path(".")) == BL_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_resident_base),
        cmocka_unit_test(an_offloaded_base),
        cmocka_unit_test(three_tiers),
        cmocka_unit_test(spilled_activations),
        cmocka_unit_test(a_head_of_its_own),
        cmocka_unit_test(every_weight),
        cmocka_unit_test(every_weight_in_tiers),
        cmocka_unit_test(some_weights),
        cmocka_unit_test(saved_modules),
        cmocka_unit_test(terms_of_tables),
        cmocka_unit_test(a_gpu),
    };
    return cmocka_run_group_tests_name("foreseen", tests, set_up, runs_tear_down);
}
