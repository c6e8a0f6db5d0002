/* SPDX-License-Identifier: Apache-2.0 */
/* bl_model_dequantize writes code * scale, rounded once, for every kind of FP8 checkpoint, and
 * neither scales nor a quantization_config; it resumes; and it rejects what it cannot convert. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "arch/config.h"
#include "base/files.h"
#include "base/sizes.h"
#include "convert/dequantize.h"
#include "store/hf_model.h"

#define MODELS "tests/golden/train/models/"

static char folder[] = "/tmp/ballast-test-dequantize.XXXXXX";
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

static void check(bl_status st)
{
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

static void path_in(const char *name, char path[512])
{
    snprintf(path, 512, "%s/%s", folder, name);
}

static bl_status dequantize(const char *source, const char *name, bl_format format,
                            bl_quantize_result *result)
{
    char target[512];
    bl_quantize_result unused;

    path_in(name, target);
    return bl_model_dequantize(
        &(bl_quantize_options){.source = source, .target = target, .format = format, .pool = pool},
        result ? result : &unused);
}

static void refused(bl_status expected, const char *text, const char *source, bl_format format)
{
    bl_status st = dequantize(source, "refused", format, NULL);
    if (st != expected || !strstr(bl_error_text(), text))
        fail_msg("status %d, \"%s\"; expected %d, \"%s\"", (int)st, bl_error_text(), (int)expected,
                 text);
}

/* ---- the values, by the definition of E4M3 ---- */

static double e4m3(uint8_t code)
{
    int exponent = code >> 3 & 15, fraction = code & 7;
    double value = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    return code & 0x80 ? -value : value;
}

/* Rounded to nearest, ties to even, by the definition: `digits` significant bits. */
static double rounded(double value, int digits)
{
    int exponent;

    if (value == 0) return 0;
    (void)frexp(value, &exponent);
    return ldexp(nearbyint(ldexp(value, digits - exponent)), exponent - digits);
}

/* The scales of a weight: one, one per row, or a grid of blocks of 128 x 128. */
static float *read_scales(const bl_hf_model *model, const char *name,
                          const bl_stored_tensor **scales)
{
    char text[BL_TENSOR_NAME_BYTES + 16];

    snprintf(text, sizeof text, "%s_scale", name);
    if (!(*scales = bl_hf_find(model, text))) {
        snprintf(text, sizeof text, "%s_scale_inv", name);
        *scales = bl_hf_find(model, text);
    }
    assert_non_null(*scales);
    float *values = malloc((size_t)(*scales)->n_bytes * sizeof *values);
    assert_non_null(values);
    check(bl_stored_tensor_read_f32(*scales, values));
    return values;
}

static double scale_of(const bl_stored_tensor *scales, const float *values, int64_t rows,
                       int64_t row, int64_t col)
{
    int64_t n = 1;
    for (int i = 0; i < scales->n_dims; i++) n *= scales->shape[i];
    if (n == 1) return (double)values[0];
    if (n == rows && scales->shape[0] == rows) return (double)values[row];
    return (double)values[row / 128 * scales->shape[1] + col / 128];
}

/* A weight of the source and the target's: F32 has 24 bits, BF16 8; F16 has 11, down to 2^-14. */
static void check_weight(const bl_hf_model *source, const bl_stored_tensor *codes,
                         const bl_stored_tensor *made, bl_dtype dtype)
{
    int64_t rows = codes->shape[0], cols = codes->shape[1];
    const bl_stored_tensor *scales;
    float *scale = read_scales(source, codes->name, &scales);
    uint8_t *code = malloc((size_t)(rows * cols));
    float *value = malloc((size_t)(rows * cols) * sizeof *value);

    assert_int_equal(made->dtype, dtype);
    assert_true(code && value);
    check(bl_stored_tensor_read(codes, 0, (size_t)(rows * cols), code));
    check(bl_stored_tensor_read_f32(made, value));
    for (int64_t i = 0; i < rows * cols; i++) {
        double exact =
            rounded(e4m3(code[i]) * scale_of(scales, scale, rows, i / cols, i % cols), 24);
        int digits = dtype == BL_F32 ? 24 : dtype == BL_BF16 ? 8 : 11;
        double expected = dtype == BL_F16 && fabs(exact) < 0x1p-14
                              ? ldexp(nearbyint(ldexp(exact, 24)), -24)
                              : rounded(exact, digits);
        if ((double)value[i] != expected)
            fail_msg("%s: element %lld is %a, expected %a", codes->name, (long long)i,
                     (double)value[i], expected);
    }
    free(scale);
    free(code);
    free(value);
}

static void check_config(const char *dir, const char *dtype)
{
    char path[600], text[64];
    void *bytes;
    size_t n;
    bl_model_config config;

    check(bl_model_config_load(dir, &config));
    snprintf(path, sizeof path, "%s/config.json", dir);
    check(bl_file_read_all(path, 1 << 20, &bytes, &n));
    assert_null(memmem(bytes, n, "quantization_config", 19));
    snprintf(text, sizeof text, "dtype\": \"%s\"", dtype);
    assert_non_null(memmem(bytes, n, text, strlen(text)));
    free(bytes);
}

static void test_values(void **state)
{
    (void)state;
    static const char *const sources[] = {"tiny-fp8-autofp8",    "tiny-fp8-ct-block",
                                          "tiny-fp8-ct-tensor",  "tiny-fp8-deepseek",
                                          "tiny-fp8-ct-channel", "tiny-fp8-fbgemm"};
    static const struct {
        bl_format format;
        bl_dtype dtype;
        const char *name;
    } kinds[] = {{BL_FORMAT_BF16, BL_BF16, "bfloat16"},
                 {BL_FORMAT_F16, BL_F16, "float16"},
                 {BL_FORMAT_F32, BL_F32, "float32"}};
    char source_dir[512], target[512], name[64];

    for (size_t i = 0; i < BL_COUNT(sources) * BL_COUNT(kinds); i++) {
        bl_hf_model *source, *made;
        size_t k = i % BL_COUNT(kinds), n_codes = 0;
        snprintf(source_dir, sizeof source_dir, MODELS "%s", sources[i / BL_COUNT(kinds)]);
        snprintf(name, sizeof name, "%zu", i);
        check(dequantize(source_dir, name, kinds[k].format, NULL));
        path_in(name, target);
        check_config(target, kinds[k].name);
        check(bl_hf_open(source_dir, &source));
        check(bl_hf_open(target, &made));
        for (size_t t = 0; t < bl_hf_count(made); t++)
            assert_null(strstr(bl_hf_at(made, t)->name, "scale"));
        for (size_t t = 0; t < bl_hf_count(source); t++) {
            const bl_stored_tensor *tensor = bl_hf_at(source, t);
            if (tensor->dtype != BL_F8_E4M3) continue;
            check_weight(source, tensor, bl_hf_find(made, tensor->name), kinds[k].dtype);
            n_codes++;
        }
        assert_true(n_codes > 0);
        bl_hf_close(source);
        bl_hf_close(made);
    }
}

/* Again: the finished file is kept; in another format: rejected. */
static void test_resumed(void **state)
{
    (void)state;
    bl_quantize_result result;

    check(dequantize(MODELS "tiny-fp8-ct-block", "twice", BL_FORMAT_BF16, &result));
    assert_int_equal(result.n_kept, 0);
    check(dequantize(MODELS "tiny-fp8-ct-block", "twice", BL_FORMAT_BF16, &result));
    assert_int_equal(result.n_kept, 1);
    assert_int_equal(dequantize(MODELS "tiny-fp8-ct-block", "twice", BL_FORMAT_F32, NULL),
                     BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "was begun with base_format bf16"));
}

/* ---- changed sources ---- */

/* A copy of a model of one file, with F32 scales of weights multiplied, and a tensor more of four
 * bytes. */
static void copy_model(const char *from, const char *to, float factor, const char *added,
                       bl_dtype dtype)
{
    enum { MAX_TENSORS = 200 };
    bl_stored_tensor_spec specs[MAX_TENSORS];
    bl_hf_model *model;
    bl_safetensors_writer *writer;
    char path[700];
    void *bytes;
    size_t n, n_tensors;

    check(bl_dir_create(to));
    snprintf(path, sizeof path, "%s/config.json", from);
    check(bl_file_read_all(path, 1 << 20, &bytes, &n));
    snprintf(path, sizeof path, "%s/config.json", to);
    check(bl_file_write_atomic(path, bytes, n));
    free(bytes);
    check(bl_hf_open(from, &model));
    n_tensors = bl_hf_count(model);
    assert_true(n_tensors < MAX_TENSORS);
    for (size_t i = 0; i < n_tensors; i++) {
        const bl_stored_tensor *tensor = bl_hf_at(model, i);
        specs[i] = (bl_stored_tensor_spec){
            .name = tensor->name, .dtype = tensor->dtype, .n_dims = tensor->n_dims};
        memcpy(specs[i].shape, tensor->shape, sizeof specs[i].shape);
    }
    specs[n_tensors] = (bl_stored_tensor_spec){
        .name = added, .dtype = dtype, .n_dims = 1, .shape = {4 / (int64_t)bl_dtype_bytes(dtype)}};
    snprintf(path, sizeof path, "%s/model.safetensors", to);
    check(bl_safetensors_create(path, specs, n_tensors + 1, NULL, 0, &writer));
    for (size_t i = 0; i < n_tensors; i++) {
        const bl_stored_tensor *tensor = bl_hf_at(model, i);
        float *values = malloc((size_t)tensor->n_bytes + sizeof *values);
        assert_non_null(values);
        check(bl_stored_tensor_read(tensor, 0, (size_t)tensor->n_bytes, values));
        if (tensor->dtype == BL_F32 && strstr(tensor->name, "weight_scale"))
            for (int64_t k = 0; k < tensor->n_bytes / 4; k++) values[k] *= factor;
        check(bl_safetensors_writer_put(writer, i, 0, values, (size_t)tensor->n_bytes));
        free(values);
    }
    check(bl_safetensors_writer_put(writer, n_tensors, 0, "\0\0\x80\x3f", 4));
    check(bl_safetensors_writer_commit(writer));
    bl_hf_close(model);
}

static void put_text(const char *dir, const char *name, const char *text)
{
    char path[700];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    check(bl_file_write_atomic(path, text, strlen(text)));
}

static bool has_file(const char *dir, const char *name)
{
    char path[700];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return bl_file_exists(path);
}

/* Chat templates are copied, from their directory, too; descriptions of the codes are not. */
static void test_copied(void **state)
{
    (void)state;
    char source[512], target[512], templates[600];
    bl_hf_model *made;

    path_in("described", source);
    copy_model(MODELS "tiny-fp8-fbgemm", source, 1, "model.layers.0.self_attn.k_scale", BL_F32);
    snprintf(templates, sizeof templates, "%s/additional_chat_templates", source);
    check(bl_dir_create(templates));
    put_text(templates, "rag.jinja", "{{ 1 }}");
    put_text(source, "chat_template.jinja", "{{ 2 }}");
    put_text(source, "hf_quant_config.json", "{\"quantization\": {\"quant_algo\": null}}");
    check(dequantize(source, "copied", BL_FORMAT_BF16, NULL));
    check(dequantize(source, "copied", BL_FORMAT_BF16, NULL));
    path_in("copied", target);
    assert_true(has_file(target, "chat_template.jinja"));
    assert_true(has_file(target, "additional_chat_templates/rag.jinja"));
    assert_false(has_file(target, "hf_quant_config.json"));
    check(bl_hf_open(target, &made));
    assert_null(bl_hf_find(made, "model.layers.0.self_attn.k_scale"));
    bl_hf_close(made);
}

static void test_rejected(void **state)
{
    (void)state;
    char changed[512];

    refused(BL_EINPUT, "no projection is FP8", MODELS "tiny-gqa", BL_FORMAT_BF16);
    path_in("large", changed);
    copy_model(MODELS "tiny-fp8-fbgemm", changed, 1e6f, "model.layers.0.self_attn.k_scale", BL_F32);
    refused(BL_ENUMERIC, "code * scale is not finite in f16", changed, BL_FORMAT_F16);
    path_in("tower", changed);
    copy_model("tests/golden/families/models/mistral3", changed, 1, "vision_tower.added.weight",
               BL_F8_E4M3);
    refused(BL_EINPUT, "vision_tower.added.weight is FP8", changed, BL_FORMAT_BF16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_resumed),
        cmocka_unit_test(test_copied),
        cmocka_unit_test(test_rejected),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
