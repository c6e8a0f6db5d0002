/* SPDX-License-Identifier: Apache-2.0 */
/* Mixtures of experts with LoRA on attention and on all experts, against float64 of PyTorch,
 * transformers and PEFT: models-moe/ of BALLAST_TEST_DATA. And bits: nothing that places, shards,
 * visits or keeps weights and activations otherwise changes the adapter.
 *
 * Limits: first loss 2e-6; all losses and gradient norms 2e-4, since the learning rate is 0.01; the
 * final adapter 1e-2 of the way that training moved it, which AdamW's division by sqrt(v) turns
 * gradients' errors of 4e-5 into at such a rate. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "convert/dequantize.h"
#include "convert/merge.h"
#include "convert/quantize.h"
#include "golden.h"
#include "skip.h"
#include "store/safetensors.h"

static const double FIRST_LOSS = 2e-6, STEPS = 2e-4, ADAPTER = 1e-2;

static const char *const models[] = {"qwen3_moe", "mixtral"}; /* which are stored in two ways */

/* A variant of train.json, and the adapter that it starts from. */
typedef struct variant {
    const char *model, *name, *init;
    bool has_ranks; /* two */
} variant;

static const variant variants[] = {
    {"qwen3_moe", "a-attention", "adapter_init", false},
    {"mixtral", "a-attention", "adapter_init", false},
    {"gpt_oss", "a-attention", "adapter_init", false},
    {"qwen3_moe", "b-experts", "adapter_init", false},
    {"mixtral", "b-experts", "adapter_init", false},
    {"qwen3_moe", "b-experts", "adapter_init_peft018", false},
    {"mixtral", "b-experts", "adapter_init_peft018", false},
    {"qwen3_moe", "b-experts", "adapter_init_perexpert", false},
    {"mixtral", "b-experts", "adapter_init_perexpert", false},
    {"qwen3_moe", "d-list", "adapter_init", false},
    {"mixtral", "d-list", "adapter_init", false},
    {"glm4_moe", "a-attention", "adapter_init", false},
    {"glm4_moe", "b-experts", "adapter_init", false},
    {"glm4_moe", "b-experts", "adapter_init_peft018", false},
    {"glm4_moe", "c-all", "adapter_init", false},
    {"glm4_moe", "d-list", "adapter_init", true},
    {"qwen3_moe/fused", "d-list", "adapter_init", true},
    {"mixtral/fused", "b-experts", "adapter_init_perexpert", true},
};

/* Paths of a case: those of the data, and of the run's outputs. */
typedef struct mixture {
    const char *base_format; /* of comparisons of bits */
    const char *variant;
    char init[GOLDEN_PATH_BYTES + 64];
    char golden[GOLDEN_PATH_BYTES];
    char model[GOLDEN_PATH_BYTES], train[GOLDEN_PATH_BYTES + 32], output[GOLDEN_PATH_BYTES],
        pages[GOLDEN_PATH_BYTES + 8];
} mixture;

static void name_paths(const char *data, const variant *v, mixture *m)
{
    m->base_format = "fp8_row";
    m->variant = v->name;
    snprintf(m->model, sizeof m->model, "%s/models-moe/%s", data, v->model);
    snprintf(m->golden, sizeof m->golden, "%s/models-moe/%.*s", data, (int)strcspn(v->model, "/"),
             v->model);
    snprintf(m->train, sizeof m->train, "%s/train/%s", m->golden, v->name);
    snprintf(m->init, sizeof m->init, "%s/%s", m->train, v->init);
    snprintf(m->output, sizeof m->output, "/tmp/ballast-test-mixtures-%d", (int)getpid());
    snprintf(m->pages, sizeof m->pages, "%s.pages", m->output);
}

static void remove_outputs(const mixture *m)
{
    assert_int_equal(bl_tree_remove(m->output), BL_OK);
    assert_int_equal(bl_tree_remove(m->pages), BL_OK);
}

static void set_keys(const mixture *m, golden_args *args)
{
    static const char *const keys[][2] = {{"device", "cpu"},
                                          {"learning_rate", "0.01"},
                                          {"lr_scheduler_type", "constant"},
                                          {"weight_decay", "0"},
                                          {"max_grad_norm", "0"},
                                          {"shuffle", "false"},
                                          {"warmup_ratio", "0"},
                                          {"max_seq_length", "128"},
                                          {"save_steps", "0"},
                                          {"per_device_train_batch_size", "2"},
                                          {"gradient_accumulation_steps", "1"}};

    for (size_t i = 0; i < BL_COUNT(keys); i++) golden_args_add(args, keys[i][0], "%s", keys[i][1]);
    golden_args_add(args, "model_name_or_path", "%s", m->model);
    golden_args_add(args, "train_file", "%s/rows.jsonl", m->train);
    golden_args_add(args, "output_dir", "%s", m->output);
    golden_args_add(args, "max_steps", "10");
}

static void train(const mixture *m, const char *const *extra)
{
    golden_args args = {0};

    remove_outputs(m);
    set_keys(m, &args);
    golden_args_add(&args, "base_format", "stored");
    golden_args_add(&args, "init_adapter", "%s", m->init);
    for (int i = 0; extra && extra[i]; i += 2) golden_args_add(&args, extra[i], "%s", extra[i + 1]);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
}

/* ---- against the reference ---- */

static double number(const json_t *row, const char *key)
{
    return json_number_value(json_object_get(row, key));
}

static void compare_steps(const mixture *m)
{
    char path[GOLDEN_PATH_BYTES + 32];
    double worst_loss = 0, worst_norm = 0;

    snprintf(path, sizeof path, "%s/train.json", m->golden);
    json_t *root = json_load_file(path, 0, NULL), *metrics = golden_metrics(m->output), *step;
    const json_t *steps =
        json_object_get(json_object_get(json_object_get(root, "variants"), m->variant), "steps");
    size_t i;
    assert_int_equal(json_array_size(steps), 10);
    json_array_foreach(steps, i, step)
    {
        const json_t *row = json_array_get(metrics, i);
        double loss = fabs(number(row, "loss") / number(step, "loss") - 1),
               norm = fabs(number(row, "grad_norm") / number(step, "grad_norm") - 1);
        if (i == 0) assert_true(loss <= FIRST_LOSS);
        worst_loss = fmax(worst_loss, loss);
        worst_norm = fmax(worst_norm, norm);
    }
    print_message("%s: losses off by %.2g, gradient norms by %.2g\n", m->init, worst_loss,
                  worst_norm);
    assert_true(worst_loss <= STEPS && worst_norm <= STEPS);
    json_decref(metrics);
    json_decref(root);
}

static float *read_tensor(const bl_safetensors *file, const char *name, int64_t *n)
{
    const bl_stored_tensor *t = bl_safetensors_find(file, name);

    assert_non_null(t);
    *n = t->n_bytes / (int64_t)sizeof(float);
    float *values = malloc((size_t)t->n_bytes);
    assert_non_null(values);
    assert_int_equal(bl_stored_tensor_read_f32(t, values), BL_OK);
    return values;
}

static bl_safetensors *open_adapter(const char *dir, const char *sub)
{
    char path[2 * GOLDEN_PATH_BYTES];
    bl_safetensors *file;

    snprintf(path, sizeof path, "%s%s/adapter_model.safetensors", dir, sub);
    assert_int_equal(bl_safetensors_open(path, &file), BL_OK);
    return file;
}

/* PEFT's names, and values near PEFT's. */
static void compare_adapter(const mixture *m)
{
    bl_safetensors *got = open_adapter(m->output, ""),
                   *init = open_adapter(m->train, "/adapter_init"),
                   *want = open_adapter(m->train, "/adapter_final");
    double moved = 0, error = 0;

    assert_int_equal(bl_safetensors_count(got), bl_safetensors_count(want));
    for (size_t i = 0; i < bl_safetensors_count(want); i++) {
        const char *name = bl_safetensors_at(want, i)->name;
        int64_t n, n_want;
        float *a = read_tensor(got, name, &n), *b = read_tensor(want, name, &n_want),
              *c = read_tensor(init, name, &n);
        assert_int_equal(n, n_want);
        for (int64_t k = 0; k < n; k++) {
            error += pow((double)a[k] - (double)b[k], 2);
            moved += pow((double)b[k] - (double)c[k], 2);
        }
        free(a), free(b), free(c);
    }
    print_message("%s: adapter off by %.2g of its way\n", m->model, sqrt(error / moved));
    assert_true(sqrt(error / moved) <= ADAPTER);
    bl_safetensors_close(got);
    bl_safetensors_close(init);
    bl_safetensors_close(want);
}

static void test_ten_steps(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    for (size_t i = 0; i < BL_COUNT(variants); i++) {
        const char *const ranks[] = {"ranks", "2", "per_device_train_batch_size", "1", NULL};
        mixture m;
        name_paths(data, &variants[i], &m);
        train(&m, variants[i].has_ranks ? ranks : NULL);
        compare_steps(&m);
        compare_adapter(&m);
        remove_outputs(&m);
    }
}

/* ---- bits ---- */

/* Trains with four ranks of two micro-batches, and `extra`. */
static void train_on_ranks(const mixture *m, const char *act, const char *const *extra)
{
    const char *args[32] = {"ranks",
                            "4",
                            "per_device_train_batch_size",
                            "1",
                            "gradient_accumulation_steps",
                            "2",
                            "base_format",
                            m->base_format,
                            "compute_dtype",
                            act,
                            "max_steps",
                            "3"};

    for (int i = 0; extra && extra[i]; i++) args[12 + i] = extra[i];
    train(m, args);
}

static void check_bits(const mixture *m, const char *act)
{
    const struct {
        const char *args[9];
    } runs[] = {
        {{NULL}},
        {{"visit_tokens", "1", NULL}},
        {{"visit_tokens", "100000", NULL}},
        {{"activation_checkpointing", "none", NULL}},
        {{"activation_checkpointing", "selective", NULL}},
        {{"activation_checkpointing", "full", NULL}},
        {{"threads", "3", NULL}},
        {{"ring_depth", "1", NULL}},
        {{"shard_size", "1", NULL}},
        {{"shard_size", "2", NULL}},
        {{"offload_ratio", "0.5", "offload_tier", "host", NULL}},
        {{"offload_ratio", "1", "offload_tier", "disk", "offload_dir", m->pages, NULL}},
        {{"expert_group", "1", "activation_checkpointing", "none", NULL}},
        {{"expert_group", "1", "activation_checkpointing", "full", "ring_depth", "3", NULL}},
        {{"expert_group", "3", "shard_size", "1", "visit_tokens", "100000", NULL}},
        {{"expert_group", "3", "offload_ratio", "1", "offload_tier", "host", NULL}},
        {{"expert_group", "99", "ring_depth", "1", NULL}},
        {{"expert_group", "2", "offload_ratio", "1", "offload_tier", "disk", "offload_dir",
          m->pages}}};
    char path[GOLDEN_PATH_BYTES + 32];
    void *expected = NULL, *bytes;
    size_t n_expected = 0, n_bytes;

    snprintf(path, sizeof path, "%s/adapter_model.safetensors", m->output);
    for (size_t v = 0; v < BL_COUNT(runs); v++) {
        train_on_ranks(m, act, runs[v].args);
        assert_int_equal(bl_file_read_all(path, 1 << 26, &bytes, &n_bytes), BL_OK);
        if (!expected) {
            expected = bytes;
            n_expected = n_bytes;
            continue;
        }
        if (n_bytes != n_expected || memcmp(bytes, expected, n_bytes) != 0)
            fail_msg("%s %s: other bits: %s %s", m->model, act, runs[v].args[0], runs[v].args[1]);
        free(bytes);
    }
    free(expected);
}

static void test_same_bits(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    mixture m;
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    name_paths(data, &(variant){"qwen3_moe", "d-list", "adapter_init", false}, &m);
    check_bits(&m, "fp32");
    check_bits(&m, "bf16");
    name_paths(data, &(variant){"mixtral/fused", "b-experts", "adapter_init", false}, &m);
    check_bits(&m, "fp32");
    name_paths(data, &(variant){"gpt_oss", "a-attention", "adapter_init", false}, &m);
    check_bits(&m, "fp32");
    check_bits(&m, "bf16");
    remove_outputs(&m);
}

/* ---- conversions ---- */

/* What bl_eval_run gives for a case of golden.json. */
static double evaluate(const mixture *m, const char *model, size_t idx_case)
{
    char path[GOLDEN_PATH_BYTES + 16];
    golden_args args = {0};
    bl_train_config *config = NULL;
    bl_eval_result result;

    snprintf(path, sizeof path, "%s/golden.json", m->golden);
    json_t *root = json_load_file(path, 0, NULL),
           *ids = json_object_get(json_array_get(json_object_get(root, "cases"), idx_case), "ids"),
           *row = json_pack("{s:O}", "input_ids", ids);
    char *line = json_dumps(row, 0);
    snprintf(path, sizeof path, "%s.jsonl", m->output);
    assert_int_equal(bl_file_write_atomic(path, line, strlen(line)), BL_OK);
    golden_args_add(&args, "model", "%s", model);
    golden_args_add(&args, "base_format", "stored");
    golden_args_add(&args, "device", "cpu");
    golden_args_add(&args, "max_seq_length", "128");
    golden_args_add(&args, "validation_file", "%s", path);
    bl_status st = bl_train_config_load(BL_CONFIG_EVAL, NULL, args.n, args.text, &config);
    if (st == BL_OK) st = bl_eval_run(config, NULL, &result);
    if (st != BL_OK) fail_msg("%s", bl_error_text());
    bl_train_config_free(config);
    golden_args_free(&args);
    assert_int_equal(unlink(path), 0);
    free(line);
    json_decref(row);
    json_decref(root);
    return result.loss;
}

static void check_merge(const mixture *m, bl_pool *pool)
{
    char adapter[GOLDEN_PATH_BYTES + 64], path[GOLDEN_PATH_BYTES + 16];
    bl_merge_adapter list[] = {{adapter, 1}};
    bl_merge_options options = {
        .source = m->model, .target = m->output, .adapters = list, .n_adapters = 1, .pool = pool};
    bl_merge_result result;

    remove_outputs(m);
    snprintf(adapter, sizeof adapter, "%s/adapter_final", m->train);
    assert_int_equal(bl_model_merge(&options, &result), BL_OK);
    snprintf(path, sizeof path, "%s/train.json", m->golden);
    json_t *root = json_load_file(path, 0, NULL);
    const json_t *want = json_object_get(
        json_object_get(json_object_get(root, "variants"), m->variant), "merged_nll_final");
    for (size_t i = 0; i < 3; i++) {
        double loss = evaluate(m, m->output, i);
        assert_true(fabs(loss / json_number_value(json_array_get(want, i)) - 1) <= 1e-6);
    }
    json_decref(root);
}

/* Merged models have the losses that PEFT's have: published names and stacked ones. */
static void test_merge(void **state)
{
    static const char *const names[] = {"a-attention", "b-experts", "d-list"};
    const char *data = getenv("BALLAST_TEST_DATA");
    bl_pool *pool;
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    assert_int_equal(bl_pool_create(2, &pool), BL_OK);
    for (size_t i = 0; i < BL_COUNT(models) * BL_COUNT(names); i++) {
        const char *model = models[i / BL_COUNT(names)];
        char fused[32];
        mixture m;
        snprintf(fused, sizeof fused, "%s/fused", model);
        name_paths(data, &(variant){model, names[i % BL_COUNT(names)], "", false}, &m);
        check_merge(&m, pool);
        name_paths(data, &(variant){fused, names[i % BL_COUNT(names)], "", false}, &m);
        check_merge(&m, pool);
        remove_outputs(&m);
    }
    bl_pool_destroy(pool);
}

/* A quantized model has the losses of the one that is quantized when it is loaded. */
static void test_conversions(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    bl_pool *pool;
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    assert_int_equal(bl_pool_create(2, &pool), BL_OK);
    for (size_t i = 0; i < BL_COUNT(models); i++) {
        mixture m;
        char fused[GOLDEN_PATH_BYTES + 8];
        bl_quantize_options options = {.format = BL_FORMAT_FP8_ROW, .pool = pool};
        bl_quantize_result result;
        name_paths(data, &(variant){models[i], "a-attention", "adapter_init", false}, &m);
        snprintf(fused, sizeof fused, "%s/fused", m.model);
        remove_outputs(&m);
        options.source = fused;
        options.target = m.output;
        assert_int_equal(bl_model_quantize(&options, &result), BL_EINPUT);
        assert_non_null(strstr(bl_error_text(), "has the stacked experts of a layer"));
        remove_outputs(&m);
        options.source = m.model;
        assert_int_equal(bl_model_quantize(&options, &result), BL_OK);
        snprintf(fused, sizeof fused, "%s.f32", m.output);
        options = (bl_quantize_options){
            .source = m.output, .target = fused, .format = BL_FORMAT_F32, .pool = pool};
        assert_int_equal(bl_model_dequantize(&options, &result), BL_OK);
        double quantized = evaluate(&m, m.output, 2), back = evaluate(&m, fused, 2);
        assert_true(fabs(quantized / back - 1) <= 1e-6);
        assert_true(fabs(quantized / evaluate(&m, m.model, 2) - 1) > 1e-5);
        assert_int_equal(bl_tree_remove(fused), BL_OK);
        remove_outputs(&m);
    }
    bl_pool_destroy(pool);
}

/* ---- experts in 4 bits ---- */

static void *read_file(const char *path, size_t *n_bytes)
{
    void *bytes;

    assert_int_equal(bl_file_read_all(path, 1 << 26, &bytes, n_bytes), BL_OK);
    return bytes;
}

/* The tensors of experts in `dir` are those of the source, byte by byte, and so is what config.json
 * says of them. */
static void check_same_experts(const mixture *m, const char *dir)
{
    char path[2][2 * GOLDEN_PATH_BYTES];
    const char *const dirs[] = {m->model, dir};
    bl_safetensors *file[2];
    json_t *root[2], *config[2];
    int n_compared = 0;

    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s/model.safetensors", dirs[i]);
        assert_int_equal(bl_safetensors_open(path[i], &file[i]), BL_OK);
        snprintf(path[i], sizeof path[i], "%s/config.json", dirs[i]);
        root[i] = json_load_file(path[i], 0, NULL);
        config[i] = json_object_get(root[i], "quantization_config");
    }
    assert_true(config[0] && json_equal(config[0], config[1]));
    for (size_t k = 0; k < bl_safetensors_count(file[0]); k++) {
        const bl_stored_tensor *a = bl_safetensors_at(file[0], k),
                               *b = bl_safetensors_find(file[1], a->name);
        assert_non_null(b);
        if (!strstr(a->name, ".experts.")) continue;
        char *both = malloc(2 * (size_t)a->n_bytes);
        assert_non_null(both);
        assert_true(a->dtype == b->dtype && a->n_bytes == b->n_bytes);
        assert_int_equal(bl_stored_tensor_read(a, 0, (size_t)a->n_bytes, both), BL_OK);
        assert_int_equal(bl_stored_tensor_read(b, 0, (size_t)a->n_bytes, both + a->n_bytes), BL_OK);
        assert_memory_equal(both, both + a->n_bytes, (size_t)a->n_bytes);
        free(both);
        n_compared++;
    }
    assert_int_equal(n_compared, 2 * 6); /* blocks, scales and biases of two matrices */
    for (int i = 0; i < 2; i++) bl_safetensors_close(file[i]), json_decref(root[i]);
}

/* A merge into attention leaves the experts as they are; or in bf16, with the same values. */
static void merge_beside_experts(const mixture *m, bl_pool *pool)
{
    char adapter[GOLDEN_PATH_BYTES + 64];
    bl_merge_adapter list[] = {{adapter, 1}};
    bl_merge_options options = {
        .source = m->model, .target = m->output, .adapters = list, .n_adapters = 1, .pool = pool};
    bl_merge_result result;

    remove_outputs(m);
    snprintf(adapter, sizeof adapter, "%s/adapter_final", m->train);
    assert_int_equal(bl_model_merge(&options, &result), BL_OK);
    assert_int_equal(result.n_matrices, 2 * 4);
    check_same_experts(m, m->output);
    options.target = m->pages;
    options.format = BL_MERGE_BF16;
    assert_int_equal(bl_model_merge(&options, &result), BL_OK);
    for (size_t i = 0; i < 3; i++) {
        double kept = evaluate(m, m->output, i);
        assert_true(fabs(kept - evaluate(m, m->model, i)) > 1e-3);
        assert_true(kept == evaluate(m, m->pages, i));
    }
}

/* The adapter has the bytes of one that is trained over the experts' values in fp32. */
static void train_beside_experts(mixture *m, bl_pool *pool)
{
    static const char *const steps[] = {"max_steps", "3", NULL};
    bl_quantize_options options = {
        .source = m->model, .target = m->pages, .format = BL_FORMAT_F32, .pool = pool};
    bl_quantize_result unused;
    char path[GOLDEN_PATH_BYTES + 32];
    size_t n[2];

    snprintf(path, sizeof path, "%s/adapter_model.safetensors", m->output);
    train(m, steps);
    void *packed = read_file(path, &n[0]);
    assert_int_equal(bl_model_dequantize(&options, &unused), BL_OK);
    mixture values = *m;
    snprintf(values.model, sizeof values.model, "/tmp/ballast-test-mixtures-%d.f32", (int)getpid());
    assert_int_equal(rename(m->pages, values.model), 0);
    train(&values, steps);
    void *wide = read_file(path, &n[1]);
    assert_true(n[0] == n[1] && memcmp(packed, wide, n[0]) == 0);
    free(packed), free(wide);
    assert_int_equal(bl_tree_remove(values.model), BL_OK);
}

/* gpt-oss as published: losses of float64 over the library's values, bits, conversions. */
static void test_mxfp4(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    char path[GOLDEN_PATH_BYTES + 16];
    bl_pool *pool;
    mixture m;
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    name_paths(data, &(variant){"gpt_oss", "a-attention", "adapter_init", false}, &m);
    snprintf(m.model, sizeof m.model, "%s/models-4bit/gpt_oss-mxfp4", data);
    memcpy(m.golden, m.model, sizeof m.golden);
    snprintf(path, sizeof path, "%s/golden.json", m.model);
    json_t *root = json_load_file(path, 0, NULL);
    for (size_t i = 0; i < 3; i++) {
        double want = json_number_value(
            json_object_get(json_array_get(json_object_get(root, "cases"), i), "mean_nll"));
        assert_true(fabs(evaluate(&m, m.model, i) / want - 1) <= 1e-6);
    }
    json_decref(root);
    assert_int_equal(bl_pool_create(2, &pool), BL_OK);
    train_beside_experts(&m, pool);
    merge_beside_experts(&m, pool);
    bl_pool_destroy(pool);
    m.base_format = "auto"; /* the experts stay in 4 bits */
    check_bits(&m, "fp32");
    check_bits(&m, "bf16");
    remove_outputs(&m);
}

/* ---- what is rejected ---- */

static void check_rejected(const mixture *m, const char *key, const char *value, const char *text)
{
    golden_args args = {0};

    set_keys(m, &args);
    golden_args_add(&args, key, "%s", value);
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    if (!strstr(bl_error_text(), text)) fail_msg("%s lacks: %s", bl_error_text(), text);
    golden_args_free(&args);
    remove_outputs(m);
}

/* Experts that share blocks, as `quantize` writes them: fp8_row is no remedy. */
static void check_shared_blocks(const mixture *m)
{
    mixture quantized = *m;
    bl_quantize_options options = {
        .source = m->model, .target = m->pages, .format = BL_FORMAT_FP8_BLOCK};
    bl_quantize_result result;

    assert_true(strlen(m->pages) < sizeof quantized.model);
    memcpy(quantized.model, m->pages, strlen(m->pages) + 1);
    remove_outputs(m);
    assert_int_equal(bl_pool_create(2, &options.pool), BL_OK);
    assert_int_equal(bl_model_quantize(&options, &result), BL_OK);
    bl_pool_destroy(options.pool);
    check_rejected(&quantized, "base_format", "stored", "convert it with ballast dequantize first");
}

static void test_rejected(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    mixture m;
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    name_paths(data, &(variant){"qwen3_moe", "d-list", "adapter_init", false}, &m);
    check_rejected(&m, "lora_target_modules", "q_proj,gate_proj",
                   "\"gate_proj\" without \"up_proj\"");
    check_rejected(&m, "finetuning_type", "full", "its experts are frozen");
    check_rejected(&m, "modules_to_save", "gate", "is a router");
    check_rejected(&m, "base_format", "fp8_block", "use fp8_row");
    check_shared_blocks(&m);
    snprintf(m.model, sizeof m.model, "%s/models-moe/qwen3_moe/fused", data);
    check_rejected(&m, "base_format", "fp8_block", "experts.gate_up_proj has 48 rows, which");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ten_steps), cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_merge),     cmocka_unit_test(test_conversions),
        cmocka_unit_test(test_mxfp4),     cmocka_unit_test(test_rejected)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
