/* SPDX-License-Identifier: Apache-2.0 */
/* hf_weight.c -- the formats of FP8 checkpoints (compressed-tensors, DeepSeek, Mistral, Meta, Model
 * Optimizer, Quark): which scale belongs to a weight, and the blocks that share one. */
#include "store/hf_model.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/hf_internal.h"

/* ---- config.json ---- */

/* Weights that are not E4M3: 4 bits, integers, code books. */
static bl_status refuse(const char *file, const char *key, const char *name)
{
    return BL_FAIL(BL_EINPUT,
                   "%s: key %s: weights in \"%s\" are not supported, only FP8 (E4M3); use the "
                   "unquantized checkpoint, or an FP8 one",
                   file, key, name);
}

/* [rows, cols] of a block, both positive. */
static bl_status read_block_size(const char *file, const char *key, const json_t *size,
                                 bl_scale_blocks *declared)
{
    int64_t rows = json_integer_value(json_array_get(size, 0)),
            cols = json_integer_value(json_array_get(size, 1));

    if (json_array_size(size) != 2 || rows <= 0 || cols <= 0 || rows > INT32_MAX ||
        cols > INT32_MAX)
        return bl_json_fail(file, key, "two positive integers, as [128, 128]", size);
    *declared = (bl_scale_blocks){rows, cols};
    return BL_OK;
}

/* DeepSeek writes weight_block_size; Mistral has null, AutoFP8 nothing. */
static bl_status parse_fp8(const char *file, const json_t *quantization, bl_scale_blocks *declared)
{
    const json_t *block = NULL;
    const char *fmt = "e4m3";

    BL_TRY(bl_json_get_string(file, quantization, "fmt", BL_JSON_OPTIONAL, &fmt));
    if (strncmp(fmt, "e4m3", 4) != 0) return refuse(file, "fmt", fmt);
    BL_TRY(bl_json_get_array(file, quantization, "weight_block_size", BL_JSON_OPTIONAL, &block));
    return block ? read_block_size(file, "weight_block_size", block, declared) : BL_OK;
}

/* The weights of one group of compressed-tensors' config_groups. */
static bl_status parse_group(const char *file, const json_t *group, bl_scale_blocks *declared)
{
    const json_t *weights = NULL, *block = NULL;
    const char *type = "float", *strategy = "tensor";
    int64_t bits = 8, group_size = 0;

    BL_TRY(bl_json_check_object(file, group));
    BL_TRY(bl_json_get_object(file, group, "weights", BL_JSON_REQUIRED, &weights));
    BL_TRY(bl_json_get_string(file, weights, "type", BL_JSON_OPTIONAL, &type));
    if (strcmp(type, "float") != 0)
        return bl_json_fail(file, "type", "\"float\"", json_object_get(weights, "type"));
    BL_TRY(bl_json_get_int(file, weights, "num_bits", BL_JSON_OPTIONAL, 8, 8, &bits));
    BL_TRY(bl_json_get_string(file, weights, "strategy", BL_JSON_OPTIONAL, &strategy));
    if (!strcmp(strategy, "tensor") || !strcmp(strategy, "channel")) return BL_OK;
    if (!strcmp(strategy, "block")) {
        BL_TRY(bl_json_get_array(file, weights, "block_structure", BL_JSON_OPTIONAL, &block));
        return read_block_size(file, "block_structure", block, declared);
    }
    if (!strcmp(strategy, "group")) {
        BL_TRY(bl_json_get_int(file, weights, "group_size", BL_JSON_REQUIRED, 1, INT32_MAX,
                               &group_size));
        *declared = (bl_scale_blocks){1, group_size};
        return BL_OK;
    }
    return bl_json_fail(file, "strategy", "\"tensor\", \"channel\", \"block\" or \"group\"",
                        json_object_get(weights, "strategy"));
}

static bl_status parse_compressed_tensors(const char *file, const json_t *quantization,
                                          bl_scale_blocks *declared)
{
    static const char *const formats[] = {"float-quantized", "naive-quantized", "mxfp8-quantized",
                                          "mixed-precision"};
    const char *format = formats[0], *name;
    const json_t *groups = NULL;
    json_t *group;
    bool is_known = false;

    BL_TRY(bl_json_get_string(file, quantization, "format", BL_JSON_OPTIONAL, &format));
    for (size_t i = 0; i < BL_COUNT(formats); i++)
        is_known = is_known || strcmp(format, formats[i]) == 0;
    if (!is_known) return refuse(file, "format", format);
    BL_TRY(bl_json_get_object(file, quantization, "config_groups", BL_JSON_OPTIONAL, &groups));
    json_object_foreach((json_t *)groups, name, group)
    {
        bl_scale_blocks blocks = {0, 0};
        BL_TRY(parse_group(file, group, &blocks));
        *declared = blocks;
    }
    /* Of several groups, only the names of their modules say which one a tensor is in. */
    if (json_object_size(groups) > 1) *declared = (bl_scale_blocks){0, 0};
    return BL_OK;
}

/* NVIDIA's Model Optimizer. */
static bl_status parse_modelopt(const char *file, const json_t *quantization)
{
    static const char *const algorithms[] = {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO",
                                             "FP8_PB_REAL", "MXFP8"};
    const char *algorithm;

    BL_TRY(bl_json_get_string(file, quantization, "quant_algo", BL_JSON_REQUIRED, &algorithm));
    for (size_t i = 0; i < BL_COUNT(algorithms); i++)
        if (strcmp(algorithm, algorithms[i]) == 0) return BL_OK;
    return refuse(file, "quant_algo", algorithm);
}

/* AMD's Quark. */
static bl_status parse_quark(const char *file, const json_t *quantization)
{
    const json_t *global = NULL, *weight = NULL;
    const char *dtype;

    BL_TRY(
        bl_json_get_object(file, quantization, "global_quant_config", BL_JSON_REQUIRED, &global));
    BL_TRY(bl_json_get_object(file, global, "weight", BL_JSON_REQUIRED, &weight));
    BL_TRY(bl_json_get_string(file, weight, "dtype", BL_JSON_REQUIRED, &dtype));
    return strcmp(dtype, "fp8_e4m3") == 0 ? BL_OK : refuse(file, "dtype", dtype);
}

bl_status bl_hf_parse_quantization(const char *file, const json_t *config,
                                   bl_scale_blocks *declared)
{
    const json_t *quantization = NULL;
    const char *method;

    *declared = (bl_scale_blocks){0, 0};
    BL_TRY(
        bl_json_get_object(file, config, "quantization_config", BL_JSON_OPTIONAL, &quantization));
    if (!quantization) return BL_OK;
    BL_TRY(bl_json_get_string(file, quantization, "quant_method", BL_JSON_REQUIRED, &method));
    if (!strcmp(method, "fp8")) return parse_fp8(file, quantization, declared);
    if (!strcmp(method, "compressed-tensors"))
        return parse_compressed_tensors(file, quantization, declared);
    if (!strcmp(method, "modelopt")) return parse_modelopt(file, quantization);
    if (!strcmp(method, "quark")) return parse_quark(file, quantization);
    if (!strcmp(method, "fbgemm_fp8") || !strcmp(method, "mxfp8")) return BL_OK;
    return refuse(file, "quant_method", method);
}

/* ---- one weight ---- */

enum {
    SCALE_DTYPES = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_BF16) | BL_DTYPE_BIT(BL_F16) |
                   BL_DTYPE_BIT(BL_F8_E8M0) | BL_DTYPE_BIT(BL_U8)
};

/* The scale beside "X.weight": X.weight_scale or X.weight_scale_inv. */
static bl_status find_scale(const bl_hf_model *model, const bl_stored_tensor *codes,
                            const bl_stored_tensor **scale)
{
    char *name = NULL;

    BL_TRY(bl_text_format(&name, "%s_scale_inv", codes->name));
    const bl_stored_tensor *inverse = bl_hf_find(model, name);
    name[strlen(name) - strlen("_inv")] = '\0';
    const bl_stored_tensor *plain = bl_hf_find(model, name);
    free(name);
    if (plain && inverse)
        return BL_FAIL(BL_EINPUT, "tensor %s has both weight_scale and weight_scale_inv",
                       codes->name);
    if (!plain && !inverse)
        return BL_FAIL(BL_EINPUT, "tensor %s is F8_E4M3 and has no scale", codes->name);
    *scale = plain ? plain : inverse;
    return BL_OK;
}

/* The scale as a grid [rows][cols] over the weight. */
static bool read_grid(const bl_stored_tensor *scale, int64_t weight_rows, int64_t *rows,
                      int64_t *cols)
{
    const int64_t *shape = scale->shape;

    *rows = *cols = 1;
    switch (scale->n_dims) {
    case 0:
        return true;
    case 1: /* one, or one per row */
        *rows = shape[0];
        return shape[0] == 1 || shape[0] == weight_rows;
    case 2:
        *rows = shape[0];
        *cols = shape[1];
        return true;
    case 4: /* Model Optimizer's blocks */
        *rows = shape[0];
        *cols = shape[2];
        return shape[1] == 1 && shape[3] == 1;
    default:
        return false;
    }
}

/* The size of blocks of which n_blocks cover n rows or columns; 0: none. `declared`: config.json's,
 * 0 for none. At most one power of two fits several blocks. */
static int64_t block_size(int64_t n, int64_t n_blocks, int64_t declared)
{
    if (n_blocks < 1 || n_blocks > n) return 0;
    if (n_blocks == 1) return n;
    if (declared > 0 && bl_ceil_div(n, declared) == n_blocks) return declared;
    for (int64_t size = 1; size < n; size *= 2)
        if (bl_ceil_div(n, size) == n_blocks) return size;
    return n % n_blocks == 0 ? n / n_blocks : 0;
}

/* A block of the grid is whole rows, whole blocks of 128 x 128, or neither. */
static bl_scale_kind classify_blocks(const bl_hf_weight *w)
{
    bool has_e8m0 = w->scale->dtype == BL_F8_E8M0 || w->scale->dtype == BL_U8;
    bool in_rows = w->scale_rows == 1 || w->block_rows % BL_SCALE_BLOCK_SIZE == 0,
         in_cols = w->scale_cols == 1 || w->block_cols % BL_SCALE_BLOCK_SIZE == 0;

    if (w->scale_rows == 1 && w->scale_cols == 1) return BL_SCALE_TENSOR;
    if (in_rows && in_cols) return BL_SCALE_BLOCK;
    if (w->scale_cols == 1) return BL_SCALE_ROW;
    return has_e8m0 ? BL_SCALE_MX : BL_SCALE_GRID;
}

/* Fills in the granularity, by the scale's shape: one checkpoint may mix one scale per matrix, one
 * per row, and blocks. Blocks must have the size that config.json declares. */
static bl_status classify_scale(const bl_hf_model *model, bl_hf_weight *w)
{
    const bl_stored_tensor *scale = w->scale;
    bl_scale_blocks declared = model->declared_blocks;
    int64_t rows, cols;
    char has[BL_SHAPE_TEXT_BYTES], of[BL_SHAPE_TEXT_BYTES];
    bool fits = read_grid(scale, w->rows, &rows, &cols);

    w->scale_rows = rows;
    w->scale_cols = cols;
    w->block_rows = fits ? block_size(w->rows, rows, declared.rows) : 0;
    w->block_cols = fits ? block_size(w->cols, cols, declared.cols) : 0;
    if (w->block_rows == 0 || w->block_cols == 0)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has shape %s, which is no scale for a weight of shape %s",
                       scale->name, bl_shape_text(scale->n_dims, scale->shape, has),
                       bl_shape_text(w->codes->n_dims, w->codes->shape, of));
    bool is_declared = declared.rows > 0 && bl_ceil_div(w->rows, declared.rows) == rows &&
                       bl_ceil_div(w->cols, declared.cols) == cols;
    bool is_simple = cols == 1 && (rows == 1 || rows == w->rows);
    if (declared.rows > 0 && !is_declared && !is_simple)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has shape %s, but blocks of %" PRId64 " x %" PRId64
                       ", as config.json's quantization_config says, need [%" PRId64 ", %" PRId64
                       "] for a weight of shape %s",
                       scale->name, bl_shape_text(scale->n_dims, scale->shape, has), declared.rows,
                       declared.cols, bl_ceil_div(w->rows, declared.rows),
                       bl_ceil_div(w->cols, declared.cols),
                       bl_shape_text(w->codes->n_dims, w->codes->shape, of));
    w->scale_kind = classify_blocks(w);
    /* A small matrix has one block: it is kept as its larger neighbors are. */
    if (is_declared && declared.rows % BL_SCALE_BLOCK_SIZE == 0 &&
        declared.cols % BL_SCALE_BLOCK_SIZE == 0)
        w->scale_kind = BL_SCALE_BLOCK;
    return BL_OK;
}

bl_status bl_hf_get_weight(const bl_hf_model *model, const char *name, bl_hf_weight *out)
{
    char shape[BL_SHAPE_TEXT_BYTES];
    const bl_stored_tensor *codes = bl_hf_find(model, name);

    if (!codes) return BL_FAIL(BL_EINPUT, "%s: missing %s", model->dir, name);
    if (codes->n_dims != 2)
        return BL_FAIL(BL_EINPUT, "tensor %s has shape %s, expected a matrix", name,
                       bl_shape_text(codes->n_dims, codes->shape, shape));
    *out = (bl_hf_weight){.codes = codes, .rows = codes->shape[0], .cols = codes->shape[1]};
    switch (codes->dtype) {
    case BL_F32:
    case BL_F16:
    case BL_BF16:
        return BL_OK;
    case BL_F8_E4M3:
        break;
    default:
        return BL_FAIL(BL_EINPUT, "tensor %s has dtype %s, expected F32, F16, BF16 or F8_E4M3",
                       name, bl_dtype_name(codes->dtype));
    }
    BL_TRY(find_scale(model, codes, &out->scale));
    if (!(SCALE_DTYPES & BL_DTYPE_BIT(out->scale->dtype)))
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has dtype %s, expected F32, BF16, F16, F8_E8M0 or U8 (E8M0)",
                       out->scale->name, bl_dtype_name(out->scale->dtype));
    return classify_scale(model, out);
}

bl_status bl_hf_read_scales(const bl_hf_weight *weight, float *dst)
{
    bl_stored_tensor scale = *weight->scale;

    if (scale.dtype == BL_U8) scale.dtype = BL_F8_E8M0; /* compressed-tensors' and SGLang's */
    BL_TRY(bl_stored_tensor_read_f32(&scale, dst));
    for (int64_t i = 0; i < weight->scale_rows * weight->scale_cols; i++) {
        if (!isfinite(dst[i]))
            return BL_FAIL(BL_EINPUT, "tensor %s: element %" PRId64 " is not finite", scale.name,
                           i);
        if (dst[i] <= 0)
            return BL_FAIL(BL_EINPUT, "tensor %s: element %" PRId64 " is %g; scales are positive",
                           scale.name, i, (double)dst[i]);
    }
    return BL_OK;
}
