/* SPDX-License-Identifier: Apache-2.0 */
/* hf_weight.c -- the formats of FP8 checkpoints (compressed-tensors, AutoFP8, DeepSeek): which
 * scale belongs to a weight, and its granularity. */
#include "store/hf_model.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/hf_internal.h"

static const char *const scale_kind_names[] = {"no", "one", "a row-wise", "a 128 x 128 block-wise"};

/* ---- config.json ---- */

static bl_status check_block_size(const char *file, const char *key, const json_t *size)
{
    if (json_array_size(size) == 2 &&
        json_integer_value(json_array_get(size, 0)) == BL_SCALE_BLOCK_SIZE &&
        json_integer_value(json_array_get(size, 1)) == BL_SCALE_BLOCK_SIZE)
        return BL_OK;
    return bl_json_fail(file, key, "[128, 128]", size);
}

/* DeepSeek writes weight_block_size, AutoFP8 does not. */
static bl_status parse_fp8(const char *file, const json_t *quantization, bl_scale_kind *promised)
{
    const json_t *block = NULL;

    BL_TRY(bl_json_get_array(file, quantization, "weight_block_size", BL_JSON_OPTIONAL, &block));
    *promised = block ? BL_SCALE_BLOCK : BL_SCALE_TENSOR;
    return block ? check_block_size(file, "weight_block_size", block) : BL_OK;
}

/* The weights of one group of compressed-tensors' config_groups. */
static bl_status parse_group(const char *file, const json_t *group, bl_scale_kind *kind)
{
    static const struct {
        const char *strategy;
        bl_scale_kind kind;
    } strategies[] = {
        {"tensor", BL_SCALE_TENSOR}, {"channel", BL_SCALE_ROW}, {"block", BL_SCALE_BLOCK}};
    const json_t *weights = NULL, *block = NULL;
    const char *type = "float", *strategy = "tensor";
    int64_t bits = 8;

    BL_TRY(bl_json_check_object(file, group));
    BL_TRY(bl_json_get_object(file, group, "weights", BL_JSON_REQUIRED, &weights));
    BL_TRY(bl_json_get_string(file, weights, "type", BL_JSON_OPTIONAL, &type));
    if (strcmp(type, "float") != 0)
        return bl_json_fail(file, "type", "\"float\"", json_object_get(weights, "type"));
    BL_TRY(bl_json_get_int(file, weights, "num_bits", BL_JSON_OPTIONAL, 8, 8, &bits));
    BL_TRY(bl_json_get_string(file, weights, "strategy", BL_JSON_OPTIONAL, &strategy));
    BL_TRY(bl_json_get_array(file, weights, "block_structure", BL_JSON_OPTIONAL, &block));
    for (size_t i = 0; i < BL_COUNT(strategies); i++) {
        if (strcmp(strategy, strategies[i].strategy) != 0) continue;
        *kind = strategies[i].kind;
        return *kind == BL_SCALE_BLOCK ? check_block_size(file, "block_structure", block) : BL_OK;
    }
    return bl_json_fail(file, "strategy", "\"tensor\", \"channel\" or \"block\"",
                        json_object_get(weights, "strategy"));
}

static bl_status parse_compressed_tensors(const char *file, const json_t *quantization,
                                          bl_scale_kind *promised)
{
    const char *format = "float-quantized", *name;
    const json_t *groups = NULL;
    json_t *group;
    bool is_first = true;

    BL_TRY(bl_json_get_string(file, quantization, "format", BL_JSON_OPTIONAL, &format));
    if (strcmp(format, "float-quantized") != 0 && strcmp(format, "naive-quantized") != 0)
        return bl_json_fail(file, "format", "\"float-quantized\" or \"naive-quantized\"",
                            json_object_get(quantization, "format"));
    BL_TRY(bl_json_get_object(file, quantization, "config_groups", BL_JSON_OPTIONAL, &groups));
    json_object_foreach((json_t *)groups, name, group)
    {
        bl_scale_kind kind = BL_SCALE_NONE;
        BL_TRY(parse_group(file, group, &kind));
        /* Groups that differ promise nothing for a tensor of which only the name is known. */
        *promised = is_first || kind == *promised ? kind : BL_SCALE_NONE;
        if (*promised == BL_SCALE_NONE) break;
        is_first = false;
    }
    return BL_OK;
}

bl_status bl_hf_parse_quantization(const char *file, const json_t *config, bl_scale_kind *promised)
{
    const json_t *quantization = NULL;
    const char *method;

    *promised = BL_SCALE_NONE;
    BL_TRY(
        bl_json_get_object(file, config, "quantization_config", BL_JSON_OPTIONAL, &quantization));
    if (!quantization) return BL_OK;
    BL_TRY(bl_json_get_string(file, quantization, "quant_method", BL_JSON_REQUIRED, &method));
    if (!strcmp(method, "fp8")) return parse_fp8(file, quantization, promised);
    if (!strcmp(method, "compressed-tensors"))
        return parse_compressed_tensors(file, quantization, promised);
    if (!strcmp(method, "fbgemm_fp8")) {
        *promised = BL_SCALE_ROW;
        return BL_OK;
    }
    return bl_json_fail(file, "quant_method", "\"fbgemm_fp8\", \"compressed-tensors\" or \"fp8\"",
                        json_object_get(quantization, "quant_method"));
}

/* ---- one weight ---- */

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

static bool scale_fits(const bl_stored_tensor *scale, bl_scale_kind kind, int64_t rows,
                       int64_t cols)
{
    if (kind == BL_SCALE_TENSOR)
        return scale->n_dims == 0 || (scale->n_dims == 1 && scale->shape[0] == 1) ||
               (scale->n_dims == 2 && scale->shape[0] == 1 && scale->shape[1] == 1);
    if (scale->n_dims != 2) return false;
    if (kind == BL_SCALE_ROW) return scale->shape[0] == rows && scale->shape[1] == 1;
    return scale->shape[0] == bl_ceil_div(rows, BL_SCALE_BLOCK_SIZE) &&
           scale->shape[1] == bl_ceil_div(cols, BL_SCALE_BLOCK_SIZE);
}

/* Fills in the granularity. A shape that fits several kinds means the same under each; the config's
 * word is then taken. */
static bl_status classify_scale(const bl_hf_model *model, bl_hf_weight *weight)
{
    const bl_stored_tensor *scale = weight->scale;
    bl_scale_kind kind = BL_SCALE_NONE;
    char has[BL_SHAPE_TEXT_BYTES], of[BL_SHAPE_TEXT_BYTES];

    for (bl_scale_kind k = BL_SCALE_TENSOR; k <= BL_SCALE_BLOCK && kind == BL_SCALE_NONE; k++)
        if (scale_fits(scale, k, weight->rows, weight->cols)) kind = k;
    if (model->promised_scale != BL_SCALE_NONE &&
        scale_fits(scale, model->promised_scale, weight->rows, weight->cols))
        kind = model->promised_scale;
    if (kind == BL_SCALE_NONE)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has shape %s, which is no scale for a weight of shape %s",
                       scale->name, bl_shape_text(scale->n_dims, scale->shape, has),
                       bl_shape_text(weight->codes->n_dims, weight->codes->shape, of));
    if (model->promised_scale != BL_SCALE_NONE && kind != model->promised_scale)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s of shape %s is %s scale, but config.json's quantization_config "
                       "says %s scale",
                       scale->name, bl_shape_text(scale->n_dims, scale->shape, has),
                       scale_kind_names[kind], scale_kind_names[model->promised_scale]);
    weight->scale_kind = kind;
    weight->scale_rows = kind == BL_SCALE_TENSOR ? 1 : scale->shape[0];
    weight->scale_cols = kind == BL_SCALE_BLOCK ? scale->shape[1] : 1;
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
    if (out->scale->dtype != BL_F32 && out->scale->dtype != BL_BF16 && out->scale->dtype != BL_F16)
        return BL_FAIL(BL_EINPUT, "tensor %s has dtype %s, expected F32, BF16 or F16",
                       out->scale->name, bl_dtype_name(out->scale->dtype));
    return classify_scale(model, out);
}

bl_status bl_hf_read_scales(const bl_hf_weight *weight, float *dst)
{
    BL_TRY(bl_stored_tensor_read_f32(weight->scale, dst));
    for (int64_t i = 0; i < weight->scale_rows * weight->scale_cols; i++)
        if (!isfinite(dst[i]))
            return BL_FAIL(BL_EINPUT, "tensor %s: element %" PRId64 " is not finite",
                           weight->scale->name, i);
    return BL_OK;
}
