/* SPDX-License-Identifier: Apache-2.0 */
/* hf_weight.c -- quantized weights: which scale belongs to a weight of FP8, the blocks that share
 * one, and the scales of all kinds. */
#include "store/hf_model.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/hf_internal.h"

/* ---- one weight ---- */

enum {
    SCALE_DTYPES = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_BF16) | BL_DTYPE_BIT(BL_F16) |
                   BL_DTYPE_BIT(BL_F8_E8M0) | BL_DTYPE_BIT(BL_U8)
};

/* The scale of "X.weight": X.weight_scale or X.weight_scale_inv. */
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

/* NULL: there is none. */
static bl_status find_zero_point(const bl_hf_model *model, const bl_stored_tensor *codes,
                                 const bl_stored_tensor **zero_point)
{
    char *name = NULL;

    BL_TRY(bl_text_format(&name, "%s_zero_point", codes->name));
    *zero_point = bl_hf_find(model, name);
    free(name);
    return BL_OK;
}

/* FP8 codes are signed: symmetric formats write a zero point of 0. */
static bl_status check_zero_point(const bl_stored_tensor *zero_point)
{
    char bytes[4096];

    for (int64_t at = 0; at < zero_point->n_bytes; at += (int64_t)sizeof bytes) {
        size_t n = (size_t)bl_min_i64((int64_t)sizeof bytes, zero_point->n_bytes - at);
        BL_TRY(bl_stored_tensor_read(zero_point, at, n, bytes));
        for (size_t i = 0; i < n; i++)
            if (bytes[i])
                return BL_FAIL(BL_EINPUT,
                               "tensor %s: byte %" PRId64 " is not 0: zero points are not "
                               "supported; use a checkpoint with symmetric FP8, or in bf16",
                               zero_point->name, at + (int64_t)i);
    }
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

/* Blocks that cover n rows or columns in n_blocks, as in block_size: one is all of them. */
static int64_t declared_size(int64_t n, int64_t n_blocks, int64_t declared)
{
    if (bl_ceil_div(n, declared) != n_blocks) return 0;
    return n_blocks == 1 ? n : declared;
}

/* The one declared size whose grid is the scale's, as it divides this weight; {0, 0}: none. Of
 * several sizes, which differ by config_groups, the scale's shape says which one it is. */
static bl_status choose_declared(const bl_hf_model *model, const bl_hf_weight *w,
                                 bl_scale_blocks *out)
{
    bl_scale_blocks found = {0, 0};

    *out = (bl_scale_blocks){0, 0};
    for (int i = 0; i < model->declared.n; i++) {
        bl_scale_blocks d = model->declared.size[i],
                        here = {declared_size(w->rows, w->scale_rows, d.rows),
                                declared_size(w->cols, w->scale_cols, d.cols)};
        if (here.rows == 0 || here.cols == 0) continue;
        if (out->rows > 0 && (here.rows != found.rows || here.cols != found.cols))
            return BL_FAIL(BL_EINPUT,
                           "tensor %s: config.json's quantization_config has several groups, and "
                           "its scale fits blocks of %" PRId64 " x %" PRId64 " and of %" PRId64
                           " x %" PRId64 "; which group has it is not read",
                           w->codes->name, out->rows, out->cols, d.rows, d.cols);
        if (out->rows == 0) *out = d;
        found = here;
    }
    return BL_OK;
}

/* Fills in the granularity, by the scale's shape: one checkpoint may mix one scale per matrix, one
 * per row, and blocks. Blocks must have a size that config.json declares, where it does. */
static bl_status classify_scale(const bl_hf_model *model, bl_hf_weight *w)
{
    const bl_stored_tensor *scale = w->scale;
    bl_scale_blocks declared = {0, 0};
    char has[BL_SHAPE_TEXT_BYTES], of[BL_SHAPE_TEXT_BYTES];
    bool fits = read_grid(scale, w->rows, &w->scale_rows, &w->scale_cols);

    if (fits) BL_TRY(choose_declared(model, w, &declared));
    w->block_rows = fits ? block_size(w->rows, w->scale_rows, declared.rows) : 0;
    w->block_cols = fits ? block_size(w->cols, w->scale_cols, declared.cols) : 0;
    if (w->block_rows == 0 || w->block_cols == 0)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has shape %s, which is no scale for a weight of shape %s",
                       scale->name, bl_shape_text(scale->n_dims, scale->shape, has),
                       bl_shape_text(w->codes->n_dims, w->codes->shape, of));
    bool is_simple = w->scale_cols == 1 && (w->scale_rows == 1 || w->scale_rows == w->rows);
    if (model->declared.n > 0 && declared.rows == 0 && !is_simple) {
        bl_scale_blocks first = model->declared.size[0];
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has shape %s, but blocks of %" PRId64 " x %" PRId64
                       ", as config.json's quantization_config says, need [%" PRId64 ", %" PRId64
                       "] for a weight of shape %s%s",
                       scale->name, bl_shape_text(scale->n_dims, scale->shape, has), first.rows,
                       first.cols, bl_ceil_div(w->rows, first.rows),
                       bl_ceil_div(w->cols, first.cols),
                       bl_shape_text(w->codes->n_dims, w->codes->shape, of),
                       model->declared.n > 1 ? "; its other groups do not fit either" : "");
    }
    bool is_row = w->rows > 1 && w->scale_rows == w->rows;
    if (is_simple && w->rows > 1 &&
        model->declared.strategies == (is_row ? BL_STRATEGY_TENSOR : BL_STRATEGY_CHANNEL))
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has shape %s, but strategy \"%s\" of config.json's "
                       "quantization_config has one scale per %s",
                       scale->name, bl_shape_text(scale->n_dims, scale->shape, has),
                       is_row ? "tensor" : "channel", is_row ? "tensor" : "row");
    w->scale_kind = classify_blocks(w);
    /* A small matrix has one block: it is kept as its larger neighbors are. */
    if (declared.rows > 0 && declared.rows % BL_SCALE_BLOCK_SIZE == 0 &&
        declared.cols % BL_SCALE_BLOCK_SIZE == 0)
        w->scale_kind = BL_SCALE_BLOCK;
    return BL_OK;
}

/* A packed weight's blocks: NF4's are known, others are its scale's. */
static bl_status describe_packed(const bl_hf_model *model, const bl_hf_packed *p, bl_hf_weight *w)
{
    char shape[BL_SHAPE_TEXT_BYTES];

    *w = (bl_hf_weight){.codes = &p->codes,
                        .packed = p,
                        .scale = p->scale,
                        .zero_point = p->zero_point,
                        .scale_kind = p->kind,
                        .rows = p->codes.shape[0],
                        .cols = p->codes.shape[p->codes.n_dims - 1]};
    if (p->codes.n_dims == 3) { /* whose scales have been compared with it */
        w->rows *= p->codes.shape[1];
        w->block_rows = 1;
        w->block_cols = p->group;
        w->scale_rows = w->rows;
        w->scale_cols = w->cols / p->group;
        return BL_OK;
    }
    if (p->kind == BL_SCALE_NF4) {
        w->block_cols = p->group;
        w->block_rows = p->is_flat ? w->rows : 1;
        w->scale_rows = p->is_flat ? 1 : w->rows;
        w->scale_cols = bl_ceil_div(p->is_flat ? w->rows * w->cols : w->cols, p->group);
        return BL_OK;
    }
    BL_TRY(classify_scale(model, w));
    w->scale_kind = p->kind;
    if (p->group == 0 ||
        (w->scale_rows == w->rows && w->scale_cols == bl_ceil_div(w->cols, p->group)))
        return BL_OK;
    return BL_FAIL(BL_EINPUT,
                   "tensor %s has shape %s, expected [%" PRId64 ", %" PRId64
                   "]: one scale per %" PRId64 " weights of a row",
                   p->scale->name, bl_shape_text(p->scale->n_dims, p->scale->shape, shape), w->rows,
                   bl_ceil_div(w->cols, p->group), p->group);
}

bl_status bl_hf_get_weight(const bl_hf_model *model, const char *name, bl_hf_weight *out)
{
    const bl_hf_packed *packed = bl_hf_packed_weight(model, name);
    char shape[BL_SHAPE_TEXT_BYTES];
    const bl_stored_tensor *codes = bl_hf_find(model, name);

    if (packed) return describe_packed(model, packed, out);
    if (!codes) return BL_FAIL(BL_EINPUT, "%s: missing %s", model->dir, name);
    bool is_stack = codes->n_dims == 3 && codes->dtype != BL_F8_E4M3;
    if (codes->n_dims != 2 && !is_stack)
        return BL_FAIL(BL_EINPUT, "tensor %s has shape %s, expected a matrix", name,
                       bl_shape_text(codes->n_dims, codes->shape, shape));
    *out = (bl_hf_weight){.codes = codes,
                          .rows = codes->shape[0] * (is_stack ? codes->shape[1] : 1),
                          .cols = codes->shape[codes->n_dims - 1]};
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
    BL_TRY(find_zero_point(model, codes, &out->zero_point));
    if (!(SCALE_DTYPES & BL_DTYPE_BIT(out->scale->dtype)))
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has dtype %s, expected F32, BF16, F16, F8_E8M0 or U8 (E8M0)",
                       out->scale->name, bl_dtype_name(out->scale->dtype));
    return classify_scale(model, out);
}

void bl_hf_transpose(bl_hf_weight *weight)
{
    const int64_t *shape = weight->codes->shape;

    if (weight->packed || weight->codes->n_dims != 3) return;
    weight->n_transposed = shape[0];
    weight->rows = shape[0] * shape[2];
    weight->cols = shape[1];
}

/* dst[n], absmax of NF4: map[scale] * second[i / nested_group] + offset, each rounded to fp32. */
static bl_status read_nested(const bl_hf_packed *p, int64_t n, float *dst)
{
    bl_status st;
    float map[256], *second = malloc((size_t)p->second->n_bytes + 1);
    uint8_t *codes = malloc((size_t)n + 1);

    if (!second || !codes) {
        st = BL_FAIL(BL_ENOMEM, "out of memory: scales of %s", p->codes.name);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_stored_tensor_read_f32(p->nested_map, map));
    BL_TRY_GOTO(st, done, bl_stored_tensor_read_f32(p->second, second));
    BL_TRY_GOTO(st, done, bl_stored_tensor_read(p->scale, 0, (size_t)n, codes));
    for (int64_t i = 0; i < n; i++) {
        dst[i] = map[codes[i]] * second[i / p->nested_group];
        dst[i] += p->nested_offset;
    }
done:
    free(codes);
    free(second);
    return st;
}

/* Scales in E4M3 with one above them. */
static bl_status read_e4m3(const bl_hf_packed *p, int64_t n, float *dst)
{
    uint8_t *codes = (uint8_t *)(dst + n) - n; /* the end of dst: overwritten behind the reader */
    float second;

    BL_TRY(bl_stored_tensor_read_f32(p->second, &second));
    BL_TRY(bl_stored_tensor_read(p->scale, 0, (size_t)n, codes));
    for (int64_t i = 0; i < n; i++) {
        /* E4M3 is F16's form with 7 fraction bits less and a bias of 7, not 15; NaN has all bits */
        uint16_t code = codes[i], half = (uint16_t)((code & 0x80u) << 8 | (code & 0x7fu) << 7);
        float scale = (code & 0x7fu) == 0x7fu ? NAN : bl_f16_to_f32(half) * 256;
        dst[i] = p->divides ? scale / second : scale * second;
    }
    return BL_OK;
}

bl_status bl_hf_read_scales(const bl_hf_weight *weight, float *dst)
{
    const bl_hf_packed *packed = weight->packed;
    bl_stored_tensor scale = *weight->scale;
    const char *file = bl_safetensors_path(scale.file);
    int64_t n = weight->scale_rows * weight->scale_cols;

    if (weight->zero_point && !packed) BL_TRY(check_zero_point(weight->zero_point));
    if (scale.dtype == BL_U8) scale.dtype = BL_F8_E8M0; /* compressed-tensors' and SGLang's */
    BL_TRY(packed && packed->nested_map ? read_nested(packed, n, dst)
           : packed && packed->second   ? read_e4m3(packed, n, dst)
                                        : bl_stored_tensor_read_f32(&scale, dst));
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(dst[i]))
            return BL_FAIL(BL_EINPUT, "%s: tensor %s: element %" PRId64 " is not finite", file,
                           scale.name, i);
        if (packed && !isfinite(dst[i] * 8)) /* codes' values are 8 at most */
            return BL_FAIL(BL_EINPUT, "%s: tensor %s: element %" PRId64 " is %g: weights overflow",
                           file, scale.name, i, (double)dst[i]);
        if (weight->scale_kind == BL_SCALE_NF4 || dst[i] > 0 || (packed && dst[i] == 0)) continue;
        return BL_FAIL(BL_EINPUT, "%s: tensor %s: element %" PRId64 " is %g; scales are positive",
                       file, scale.name, i, (double)dst[i]);
    }
    return BL_OK;
}

bl_status bl_hf_read_zero_points(const bl_hf_weight *weight, float *dst)
{
    const bl_stored_tensor *zero = weight->zero_point;
    int64_t cols = weight->scale_cols;
    uint32_t *words = malloc((size_t)zero->n_bytes + 1);
    bl_status st = words ? bl_stored_tensor_read(zero, 0, (size_t)zero->n_bytes, words)
                         : BL_FAIL(BL_ENOMEM, "out of memory: zero points of %s", zero->name);

    for (int64_t r = 0; st == BL_OK && r < weight->scale_rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            uint32_t word = words[r / 8 * cols + c]; /* 8 rows, the first in the lowest bits */
            dst[r * cols + c] = (float)(int)(word >> 4 * (r % 8) & 15u) - 8;
        }
    free(words);
    return st;
}
