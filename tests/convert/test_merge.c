/* SPDX-License-Identifier: Apache-2.0 */
/* bl_model_merge writes the sum of base and adapters, rounded once; without a delta it writes what
 * bl_model_quantize writes; stochastic rounding keeps a delta that nearest rounding loses, with the
 * same bytes for any number of threads; and invalid requests are rejected. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "trained/peft.h"
#include "arch/config.h"
#include "base/files.h"
#include "base/sizes.h"
#include "convert/dequantize.h"
#include "convert/merge.h"
#include "convert/quantize.h"
#include "store/hf_model.h"

#define MODELS   "tests/golden/train/models/"
#define ADAPTERS "tests/golden/train/adapters/"

static char folder[] = "/tmp/ballast-test-merge.XXXXXX";
static bl_pool *pool;

static int set_up(void **state)
{
    (void)state;
    return !mkdtemp(folder) || bl_pool_create(2, &pool) != BL_OK;
}

static int tear_down(void **state)
{
    (void)state;
    bl_pool_destroy(pool);
    return bl_tree_remove(folder) != BL_OK;
}

static void path_in(const char *name, char path[512])
{
    snprintf(path, 512, "%s/%s", folder, name);
}

/* Into the folder `name` of the test's; `options` has the rest. */
static bl_status merge(const char *name, const char *source, const bl_merge_adapter *adapters,
                       size_t n_adapters, bl_merge_options options, bl_merge_result *result)
{
    char target[512];
    bl_merge_result unused;

    path_in(name, target);
    options.source = source;
    options.target = target;
    options.adapters = adapters;
    options.n_adapters = n_adapters;
    if (!options.pool) options.pool = pool;
    return bl_model_merge(&options, result ? result : &unused);
}

static void check(bl_status st)
{
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

static float *read_tensor(const bl_hf_model *model, const char *name)
{
    const bl_stored_tensor *tensor = bl_hf_find(model, name);
    assert_non_null(tensor);
    float *values = malloc((size_t)tensor->n_bytes * sizeof *values + 1);
    assert_non_null(values);
    check(bl_stored_tensor_read_f32(tensor, values));
    return values;
}

/* W + sum of weight * scale * B A in double, against the merged matrix; F32 is rounded once, and
 * its sum has the error of r + 1 additions. */
static void check_matrix(const bl_hf_model *source, const bl_hf_model *merged, const char *name,
                         const bl_merge_adapter *adapters, bl_peft_adapter *const *opened,
                         size_t n_adapters, int64_t layer, int module)
{
    const bl_stored_tensor *tensor = bl_hf_find(source, name);
    int64_t rows = tensor->shape[0], cols = tensor->shape[1];
    float *w = read_tensor(source, name), *m = read_tensor(merged, name);
    double *sum = calloc((size_t)(rows * cols), sizeof *sum);
    double *size = calloc((size_t)(rows * cols), sizeof *size);

    for (int64_t i = 0; i < rows * cols; i++) {
        sum[i] = w[i];
        size[i] = fabs((double)w[i]);
    }
    for (size_t k = 0; k < n_adapters; k++) {
        const bl_peft_config *c = bl_peft_get_config(opened[k]);
        if (!(c->targets >> module & 1)) continue;
        double scale =
            adapters[k].weight * c->alpha / (c->use_rslora ? sqrt((double)c->r) : (double)c->r);
        float *a = malloc((size_t)(c->r * cols) * sizeof *a),
              *b = malloc((size_t)(c->r * rows) * sizeof *b);
        check(bl_peft_read(opened[k], layer, module, BL_PEFT_A, a));
        check(bl_peft_read(opened[k], layer, module, BL_PEFT_B, b));
        for (int64_t i = 0; i < rows * cols; i++)
            for (int64_t r = 0; r < c->r; r++) {
                double term = scale * b[i / cols * c->r + r] * a[r * cols + i % cols];
                sum[i] += term;
                size[i] += fabs(term);
            }
        free(a);
        free(b);
    }
    double ulp = tensor->dtype == BL_BF16 ? 0x1p-8 : 0x1p-24;
    for (int64_t i = 0; i < rows * cols; i++)
        if (fabs(m[i] - sum[i]) > fabs(sum[i]) * ulp + 20 * 0x1p-24 * size[i])
            fail_msg("%s: element %lld is %g, expected %g", name, (long long)i, (double)m[i],
                     sum[i]);
    free(w);
    free(m);
    free(sum);
    free(size);
}

static void test_sum(void **state)
{
    (void)state;
    const char *source_dir = MODELS "tiny-gqa";
    const bl_merge_adapter adapters[] = {{ADAPTERS "tiny-gqa-rslora", 0.75},
                                         {ADAPTERS "tiny-gqa-mlp", -2.0}};
    char target[512], name[BL_TENSOR_NAME_BYTES];
    bl_peft_adapter *opened[2];
    bl_model_config config;
    bl_hf_model *source, *merged;

    path_in("sum", target);
    check(merge("sum", source_dir, adapters, 2, (bl_merge_options){0}, NULL));
    check(bl_model_config_load(target, &config));
    check(bl_hf_open(source_dir, &source));
    check(bl_hf_open(target, &merged));
    assert_int_equal(bl_hf_count(source), bl_hf_count(merged));
    bl_peft_base base = bl_lora_peft_base(&config);
    for (int k = 0; k < 2; k++) check(bl_peft_open(adapters[k].dir, &base, &opened[k]));
    for (int64_t layer = 0; layer < config.n_layers; layer++)
        for (int p = 0; p < config.arch->n_projections; p++) {
            bl_arch_projection_tensor(config.arch, layer, &config.arch->projections[p], name);
            check_matrix(source, merged, name, adapters, opened, 2, layer, p);
        }
    for (size_t i = 0; i < bl_hf_count(source); i++) {
        const bl_stored_tensor *a = bl_hf_at(source, i), *b = bl_hf_at(merged, i);
        int64_t layer;
        assert_string_equal(a->name, b->name);
        assert_int_equal(a->dtype, b->dtype);
        if (bl_arch_find_projection(config.arch, a->name, &layer) >= 0) continue;
        float *x = read_tensor(source, a->name), *y = read_tensor(merged, a->name);
        assert_memory_equal(x, y, (size_t)(a->n_bytes / (int64_t)bl_dtype_bytes(a->dtype)) * 4);
        free(x);
        free(y);
    }
    for (int k = 0; k < 2; k++) bl_peft_close(opened[k]);
    bl_hf_close(source);
    bl_hf_close(merged);
}

static void assert_same_weights(const char *a, const char *b, bool same)
{
    char path[512];
    void *x, *y;
    size_t n_x, n_y;

    snprintf(path, sizeof path, "%s/%s/model.safetensors", folder, a);
    check(bl_file_read_all(path, 1 << 28, &x, &n_x));
    snprintf(path, sizeof path, "%s/%s/model.safetensors", folder, b);
    check(bl_file_read_all(path, 1 << 28, &y, &n_y));
    bool equal = n_x == n_y && memcmp(x, y, n_x) == 0;
    free(x);
    free(y);
    if (equal != same) fail_msg("%s and %s are %s", a, b, same ? "different" : "the same");
}

/* With weight 0: the codes and scales of bl_model_quantize, whichever scales are asked for. */
static void test_no_delta(void **state)
{
    (void)state;
    static const bl_merge_format formats[] = {BL_MERGE_FP8_ROW, BL_MERGE_FP8_BLOCK};
    const bl_merge_adapter zero = {ADAPTERS "tiny-gqa-mlp", 0.0};
    char target[512];

    for (size_t f = 0; f < 2; f++) {
        path_in("quantized", target);
        const bl_quantize_options options = {
            .source = MODELS "tiny-gqa", .target = target, .format = (bl_format)f, .pool = pool};
        bl_quantize_result result;
        bl_merge_result merged;
        check(bl_model_quantize(&options, &result));
        check(merge("new", MODELS "tiny-gqa", &zero, 1,
                    (bl_merge_options){.format = formats[f], .rounding = BL_MERGE_NEAREST},
                    &merged));
        assert_true(isnan(merged.kept));
        check(merge("base", MODELS "tiny-gqa", &zero, 1,
                    (bl_merge_options){.format = formats[f],
                                       .rounding = BL_MERGE_NEAREST,
                                       .scales = BL_MERGE_SCALES_BASE},
                    NULL));
        assert_same_weights("quantized", "new", true);
        assert_same_weights("quantized", "base", true);
        assert_int_equal(bl_tree_remove(target), BL_OK);
        path_in("new", target);
        assert_int_equal(bl_tree_remove(target), BL_OK);
        path_in("base", target);
        assert_int_equal(bl_tree_remove(target), BL_OK);
    }
}

/* A small adapter on an FP8 checkpoint's own grid. 65,536 and more weights: the share's standard
 * error is the error relative to the delta by the root of their number. */
static void test_stochastic(void **state)
{
    (void)state;
    const char *source = MODELS "tiny-fp8-ct-channel";
    const bl_merge_adapter adapter = {ADAPTERS "tiny-gqa-rslora", 0.02};
    bl_merge_options options = {
        .format = BL_MERGE_FP8_ROW, .scales = BL_MERGE_SCALES_BASE, .seed = 1};
    bl_merge_result near, some, other;
    bl_pool *alone;

    check(bl_pool_create(1, &alone));
    options.rounding = BL_MERGE_NEAREST;
    check(merge("near", source, &adapter, 1, options, &near));
    options.rounding = BL_MERGE_ROUNDING_AUTO; /* stochastic on an FP8 checkpoint's own grid */
    check(merge("some", source, &adapter, 1, options, &some));
    options.pool = alone;
    check(merge("alone", source, &adapter, 1, options, &other));
    assert_same_weights("some", "alone", true);
    options.seed = 2;
    check(merge("seed", source, &adapter, 1, options, &other));
    assert_same_weights("some", "seed", false);
    print_message("nearest keeps %.3f, stochastic %.3f and %.3f (error %.1f)\n", near.kept,
                  some.kept, other.kept, some.error);
    assert_true(near.kept < 0.7);
    assert_true(some.kept > 0.8 && some.kept < 1.2);
    assert_true(other.kept > 0.8 && other.kept < 1.2);
    bl_pool_destroy(alone);
}

/* ---- 4 bits ---- */

#define BITS4 "tests/golden/bits4/"

/* The model of 128 columns, quantized to `format` in the folder `name`. */
static const char *quantized_model(bl_format format, const char *name, char path[512])
{
    char plain[512];
    bl_quantize_options options = {.source = BITS4 "models/int4-g128-zero",
                                   .target = plain,
                                   .format = BL_FORMAT_BF16,
                                   .pool = pool};
    bl_quantize_result unused;

    path_in("plain", plain);
    path_in(name, path);
    check(bl_model_dequantize(&options, &unused)); /* once: a finished one is kept */
    options.source = plain;
    options.target = path;
    options.format = format;
    check(bl_tree_remove(path));
    check(bl_model_quantize(&options, &unused));
    return path;
}

/* Without a delta: in another format what bl_model_quantize writes, in its own the checkpoint's
 * codes and scales. A small delta on its own grid: nearest rounding returns most weights to where
 * they were, stochastic rounding keeps it, whichever scales are used, for any number of threads.
 * Of 64 Ki weights the share's standard error is about error / 256. */
static void check_packed(bl_merge_format target, bl_format format, bl_pool *alone)
{
    bl_merge_adapter adapter = {BITS4 "adapters/int4-g128-zero", 0.0};
    bl_merge_options options = {.format = target, .rounding = BL_MERGE_NEAREST, .seed = 1};
    static const char *const made[] = {"p-new",  "p-base",  "p-near",
                                       "p-some", "p-alone", "p-redone"};
    char source[512], plain[512], path[512];
    bl_merge_result near, some, redone;

    quantized_model(format, "p-source", source);
    path_in("plain", plain);
    check(merge("p-new", plain, &adapter, 1, options, NULL));
    assert_same_weights("p-source", "p-new", true);
    options.scales = BL_MERGE_SCALES_BASE;
    check(merge("p-base", source, &adapter, 1, options, NULL));
    assert_same_weights("p-source", "p-base", true);
    adapter.weight = 0.1;
    check(merge("p-near", source, &adapter, 1, options, &near));
    options.rounding = BL_MERGE_ROUNDING_AUTO; /* stochastic on the checkpoint's own grid */
    check(merge("p-some", source, &adapter, 1, options, &some));
    options.pool = alone;
    check(merge("p-alone", source, &adapter, 1, options, NULL));
    assert_same_weights("p-some", "p-alone", true);
    options.scales = BL_MERGE_SCALES_NEW;
    check(merge("p-redone", source, &adapter, 1, options, &redone));
    print_message("%s: delta %.4f, nearest keeps %.3f, stochastic %.3f (error %.2f), with new "
                  "scales %.3f (error %.2f)\n",
                  bl_format_name(format), some.delta, near.kept, some.kept, some.error, redone.kept,
                  redone.error);
    assert_true(near.kept < 0.8);
    assert_true(fabs(some.kept - 1) < 0.02 + 4 * some.error / 256);
    assert_true(fabs(redone.kept - 1) < 0.02 + 4 * redone.error / 256);
    for (size_t i = 0; i < BL_COUNT(made); i++) {
        path_in(made[i], path);
        check(bl_tree_remove(path));
    }
}

static void test_packed(void **state)
{
    bl_pool *alone;

    (void)state;
    check(bl_pool_create(1, &alone));
    check_packed(BL_MERGE_MXFP4, BL_FORMAT_MXFP4, alone);
    check_packed(BL_MERGE_INT4_G32, BL_FORMAT_INT4_G32, alone);
    check_packed(BL_MERGE_INT4_G128, BL_FORMAT_INT4_G128, alone);
    check_packed(BL_MERGE_NF4, BL_FORMAT_NF4, alone);
    bl_pool_destroy(alone);
}

/* An FP8 checkpoint becomes one without codes, scales and quantization_config. */
static void test_from_fp8(void **state)
{
    (void)state;
    static const char *const sources[] = {"tiny-fp8-autofp8",    "tiny-fp8-ct-block",
                                          "tiny-fp8-ct-tensor",  "tiny-fp8-deepseek",
                                          "tiny-fp8-ct-channel", "tiny-fp8-fbgemm"};
    bl_merge_adapter adapter = {ADAPTERS "tiny-gqa-rslora", 1.0};
    char source[1024], target[512];
    bl_model_config config;
    bl_hf_model *merged;

    for (size_t i = 0; i < BL_COUNT(sources); i++) {
        snprintf(source, sizeof source, MODELS "%s", sources[i]);
        if (strstr(source, "fbgemm")) adapter.dir = ADAPTERS "tiny-fbgemm-all-linear";
        check(merge(sources[i], source, &adapter, 1, (bl_merge_options){0}, NULL));
        path_in(sources[i], target);
        check(bl_model_config_load(target, &config));
        check(bl_hf_open(target, &merged));
        for (size_t t = 0; t < bl_hf_count(merged); t++) {
            assert_int_not_equal(bl_hf_at(merged, t)->dtype, BL_F8_E4M3);
            assert_null(strstr(bl_hf_at(merged, t)->name, "scale"));
        }
        bl_hf_close(merged);
        snprintf(source, sizeof source, "%s/config.json", target);
        void *text;
        size_t n_bytes;
        check(bl_file_read_all(source, 1 << 20, &text, &n_bytes));
        assert_null(memmem(text, n_bytes, "quantization_config", 19));
        free(text);
    }
}

static void refused(bl_status expected, const char *text, const char *name, const char *source,
                    const bl_merge_adapter *adapter, bl_merge_options options)
{
    bl_status st = merge(name, source, adapter, 1, options, NULL);
    if (st != expected || !strstr(bl_error_text(), text))
        fail_msg("status %d, \"%s\"; expected %d, \"%s\"", (int)st, bl_error_text(), (int)expected,
                 text);
}

static void test_rejected(void **state)
{
    (void)state;
    const bl_merge_adapter adapter = {ADAPTERS "tiny-gqa-mlp", 1.0},
                           foreign = {ADAPTERS "stories-all-linear", 1.0},
                           huge = {ADAPTERS "tiny-gqa-mlp", 1e300}, absent = {ADAPTERS "none", 1.0};
    const char *source = MODELS "tiny-gqa";
    bl_merge_options fp8 = {.format = BL_MERGE_FP8_ROW, .rounding = BL_MERGE_STOCHASTIC, .seed = 1};

    refused(BL_EINPUT, "the adapter of another model", "foreign", source, &foreign, fp8);
    refused(BL_EINPUT, "none", "absent", source, &absent, fp8);
    refused(BL_ENUMERIC, "not finite", "huge", source, &huge, (bl_merge_options){0});
    check(merge("begun", source, &adapter, 1, fp8, NULL));
    fp8.seed = 2;
    refused(BL_EUSAGE, "was begun with seed 1", "begun", source, &adapter, fp8);
    fp8.format = BL_MERGE_FP8_BLOCK;
    refused(BL_EUSAGE, "was begun with base_format fp8_row", "begun", source, &adapter, fp8);
    fp8.format = BL_MERGE_FP8_ROW;
    fp8.seed = 1;
    refused(BL_EUSAGE, "was begun with adapters", "begun", source, &huge, fp8);
    check(merge("begun", source, &adapter, 1, fp8, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sum),        cmocka_unit_test(test_no_delta),
        cmocka_unit_test(test_stochastic), cmocka_unit_test(test_from_fp8),
        cmocka_unit_test(test_rejected),   cmocka_unit_test(test_packed),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
