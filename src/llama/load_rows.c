/* SPDX-License-Identifier: Apache-2.0 */
/* load_rows.c -- some rows of a stored weight, in the format they will be kept in. Rows are read through a bounded bounce
 * buffer and quantised as they arrive; what is stored as it is goes straight to its place. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "llama/weights_internal.h"

enum { BOUNCE_BYTES = 16 << 20 };

static bl_status reserve(bl_bounce *bounce, size_t bytes)
{
    if (bytes <= bounce->bytes) return BL_OK;
    free(bounce->memory);
    *bounce = (bl_bounce){malloc(bytes), bytes};
    if (bounce->memory) return BL_OK;
    bounce->bytes = 0;
    return BL_FAIL(BL_ENOMEM, "%zu bytes to read weights through", bytes);
}

static int64_t row_bytes(const bl_hf_weight *w)
{
    return w->cols * (int64_t)bl_dtype_bytes(w->codes->dtype);
}

static bl_status read_rows(const bl_hf_weight *w, int64_t begin, int64_t end, void *dst)
{
    return bl_tensor_read(w->codes, begin * row_bytes(w), (size_t)((end - begin) * row_bytes(w)), dst);
}

static bool is_finite(bl_dtype dtype, const unsigned char *at)
{
    uint32_t word;
    switch (dtype) {
    case BL_F32: memcpy(&word, at, 4); return (word & 0x7f800000u) != 0x7f800000u;
    case BL_BF16: return (at[1] & 0x7fu) != 0x7fu || !(at[0] & 0x80u);
    case BL_F16: return (at[1] & 0x7cu) != 0x7cu;
    default: return (at[0] & 0x7fu) != 0x7fu; /* E4M3's NaN */
    }
}

bl_status bl_llama_check_finite(const bl_tensor *t, int64_t begin, int64_t end, const void *bytes)
{
    int64_t cols = t->shape[t->n_dims - 1], width = (int64_t)bl_dtype_bytes(t->dtype);
    const unsigned char *at = bytes;

    for (int64_t row = begin; row < end; row++)
        for (int64_t col = 0; col < cols; col++, at += width)
            if (!is_finite(t->dtype, at))
                return BL_FAIL(BL_EINPUT, "%s: tensor %s: row %lld, column %lld is not finite", bl_safetensors_path(t->file), t->name,
                               (long long)row, (long long)col);
    return BL_OK;
}

/* Weights kept as stored: their bytes, after a look at each. */
static bl_status load_stored(const bl_hf_weight *w, int64_t begin, int64_t end, void *codes)
{
    BL_TRY(read_rows(w, begin, end, codes));
    return bl_llama_check_finite(w->codes, begin, end, codes);
}

static bl_status load_fp8(const bl_hf_weight *w, bl_format format, int64_t begin, int64_t end, void *codes, float *scales)
{
    BL_TRY(load_stored(w, begin, end, codes));
    if (begin == end) return BL_OK;
    float *stored = malloc((size_t)(w->scale_rows * w->scale_cols) * sizeof *stored);
    if (!stored) return BL_FAIL(BL_ENOMEM, "scales of %s", w->codes->name);
    bl_status st = bl_hf_read_scales(w, stored);
    if (st == BL_OK && format == BL_FORMAT_FP8_ROW) {
        for (int64_t r = begin; r < end; r++) scales[r] = stored[w->scale_kind == BL_SCALE_ROW ? r : 0];
    } else if (st == BL_OK) {
        int64_t first = bl_ceil_div(begin, BL_FP8_BLOCK), last = bl_ceil_div(end, BL_FP8_BLOCK);
        memcpy(scales + first * w->scale_cols, stored + first * w->scale_cols,
               (size_t)((last - first) * w->scale_cols) * sizeof *scales);
    }
    free(stored);
    return st;
}

static bl_status name_tensor(const bl_hf_weight *w, bl_status st)
{
    return st == BL_OK ? st : bl_error_prefix(st, "%s: tensor %s", bl_safetensors_path(w->codes->file), w->codes->name);
}

static bl_status quantise_rows(bl_pool *pool, bl_bounce *bounce, const bl_hf_weight *w, int64_t begin, int64_t end, uint8_t *codes,
                               float *scales)
{
    int64_t chunk = bl_max_i64(1, BOUNCE_BYTES / row_bytes(w));
    BL_TRY(reserve(bounce, (size_t)(bl_min_i64(chunk, end - begin) * row_bytes(w))));
    for (int64_t row = begin; row < end; row += chunk) {
        int64_t stop = bl_min_i64(row + chunk, end);
        BL_TRY(read_rows(w, row, stop, bounce->memory));
        BL_TRY(name_tensor(w, bl_fp8_row_quantise(pool, w->codes->dtype, bounce->memory, row, stop, w->cols,
                                                  codes + (row - begin) * w->cols, scales + row)));
    }
    return BL_OK;
}

/* One row of blocks at a time: all its rows are read for the absmax, those of [begin, end) are encoded. */
static bl_status quantise_blocks(bl_pool *pool, bl_bounce *bounce, const bl_hf_weight *w, int64_t begin, int64_t end,
                                 uint8_t *codes, float *scales)
{
    int64_t grid_cols = bl_ceil_div(w->cols, BL_FP8_BLOCK);
    float *local = malloc((size_t)grid_cols * sizeof *local);
    bl_status st = local ? reserve(bounce, (size_t)(BL_FP8_BLOCK * row_bytes(w))) : BL_FAIL(BL_ENOMEM, "block scales");

    for (int64_t block = begin / BL_FP8_BLOCK; st == BL_OK && block * BL_FP8_BLOCK < end; block++) {
        int64_t first = block * BL_FP8_BLOCK, last = bl_min_i64(first + BL_FP8_BLOCK, w->rows);
        int64_t own_first = bl_max_i64(first, begin), own_last = bl_min_i64(last, end);
        for (int64_t c = 0; c < grid_cols; c++) local[c] = 0.0f;
        BL_TRY_GOTO(st, done, read_rows(w, first, last, bounce->memory));
        BL_TRY_GOTO(st, done,
                    name_tensor(w, bl_fp8_block_absmax(pool, w->codes->dtype, bounce->memory, first, last, w->cols, local)));
        for (int64_t c = 0; c < grid_cols; c++) local[c] = bl_fp8_scale(local[c]);
        const char *own = (const char *)bounce->memory + (own_first - first) * row_bytes(w);
        BL_TRY_GOTO(st, done,
                    name_tensor(w, bl_fp8_block_encode(pool, w->codes->dtype, own, own_first, own_last, w->cols, local,
                                                       codes + (own_first - begin) * w->cols)));
        if (first >= begin) memcpy(scales + block * grid_cols, local, (size_t)grid_cols * sizeof *local);
    }
done:
    free(local);
    return st;
}

bl_status bl_llama_load_rows(bl_pool *pool, bl_bounce *bounce, const bl_hf_weight *weight, bl_format format, int64_t begin,
                             int64_t end, void *codes, float *scales)
{
    if (begin >= end) return BL_OK;
    if (weight->scale_kind != BL_SCALE_NONE) return load_fp8(weight, format, begin, end, codes, scales);
    if (format == BL_FORMAT_FP8_ROW) return quantise_rows(pool, bounce, weight, begin, end, codes, scales);
    if (format == BL_FORMAT_FP8_BLOCK) return quantise_blocks(pool, bounce, weight, begin, end, codes, scales);
    return load_stored(weight, begin, end, codes);
}
