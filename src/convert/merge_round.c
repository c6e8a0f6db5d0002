/* SPDX-License-Identifier: Apache-2.0 */
/* merge_round.c -- some rows of a matrix: W + d, rounded once to the format of the target, and how
 * much of d is left. Each strip of rows is one item of the pool and has its own sums, so that
 * neither bits nor figures depend on threads. */
#include <math.h>
#include <string.h>

#include "base/sizes.h"
#include "convert/merge_internal.h"
#include "fp8/packed.h"

/* Rows of a strip; elements that are rounded at a time. */
enum { STRIP_ROWS = 16, RUN = 4096, LANES = 8 };

static int64_t strip_rows(bl_format format)
{
    return bl_max_i64(STRIP_ROWS, bl_format_describe(format)->group_rows);
}

int64_t bl_merge_strips(bl_format format, int64_t rows)
{
    return bl_ceil_div(rows, strip_rows(format));
}

/* ---- sums ---- */

void bl_merge_sums_of(const float *base, const float *delta, const float *merged, int64_t n,
                      bl_merge_sums *sums)
{
    double dot[LANES] = {0}, norm[LANES] = {0}, error[LANES] = {0}, weight[LANES] = {0};

    for (int64_t i = 0; i < n; i += LANES) {
        int64_t lanes = bl_min_i64(LANES, n - i);
        for (int64_t l = 0; l < lanes; l++) {
            double w = base[i + l], d = delta ? delta[i + l] : 0,
                   change = (double)merged[i + l] - w;
            dot[l] += change * d;
            norm[l] += d * d;
            error[l] += (change - d) * (change - d);
            weight[l] += w * w;
        }
    }
    for (int l = 0; l < LANES; l++) {
        sums->dot += dot[l];
        sums->delta += norm[l];
        sums->error += error[l];
        sums->base += weight[l];
    }
}

void bl_merge_sums_add(bl_merge_sums *sums, const bl_merge_sums *more)
{
    sums->dot += more->dot;
    sums->delta += more->delta;
    sums->error += more->error;
    sums->base += more->base;
}

/* ---- FP8 ---- */

/* q to the code below or above it: the 20 bits that E4M3 drops, plus 20 random ones, carry with the
 * right probability. Below the smallest normal code the gap is 2^-9. */
static uint8_t round_stochastic(float q, uint32_t random)
{
    uint32_t bits = bl_f32_bits(q), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu, code;
    if (magnitude < 0x3c800000u) /* 2^-6 */
        code = ((uint32_t)(fabsf(q) * 0x1p29f) + (random >> 12)) >> 20;
    else
        code = ((magnitude + (random >> 12)) >> 20) - (120u << 3);
    return (uint8_t)(sign | (code > 0x7eu ? 0x7eu : code));
}

/* Random numbers of columns [col, col + n) of a row. */
static void draw(const bl_merge_piece *p, int64_t row, int64_t col, int64_t n, uint32_t *random)
{
    uint32_t words[4];
    int64_t group = -1, at = p->row_begin + row;

    for (int64_t i = 0; i < n; i++) {
        if ((col + i) / 4 != group) {
            group = (col + i) / 4;
            words[0] = (uint32_t)group;
            words[1] = (uint32_t)at;
            words[2] = (uint32_t)p->tensor_hash;
            words[3] = (uint32_t)(p->tensor_hash >> 32);
            bl_philox_4x32_10(words, p->key);
        }
        random[i] = words[(col + i) % 4];
    }
}

/* Columns [col, col + n) of a row; values: W + d. */
static void encode(const bl_merge_piece *p, int64_t row, int64_t col, int64_t n, float scale,
                   const float *values, uint32_t *random, uint8_t *codes)
{
    if (!p->is_stochastic) {
        for (int64_t i = 0; i < n; i++) codes[i] = bl_f32_to_e4m3(values[i] / scale);
        return;
    }
    draw(p, row, col, n, random);
    for (int64_t i = 0; i < n; i++) codes[i] = round_stochastic(values[i] / scale, random[i]);
}

static float absmax_of(const bl_merge_piece *p, int64_t row_begin, int64_t row_end,
                       int64_t col_begin, int64_t col_end)
{
    bool adds = p->delta && !p->keeps_scales;
    float absmax = 0;

    for (int64_t row = row_begin; row < row_end; row++) {
        const float *base = p->base + row * p->cols;
        const float *delta = p->delta + (adds ? row * p->cols : 0);
        for (int64_t col = col_begin; col < col_end; col++) {
            float value = fabsf(adds ? base[col] + delta[col] : base[col]);
            absmax = value > absmax ? value : absmax;
        }
    }
    return absmax;
}

/* A block of one scale. */
static void round_block(const bl_merge_piece *p, int64_t row_begin, int64_t row_end,
                        int64_t col_begin, int64_t col_end, float scale, float *scratch,
                        bl_merge_sums *sums)
{
    for (int64_t row = row_begin; row < row_end; row++) {
        for (int64_t col = col_begin, n; col < col_end; col += n) {
            n = bl_min_i64(RUN, col_end - col);
            int64_t at = row * p->cols + col;
            const float *base = p->base + at;
            uint8_t *codes = (uint8_t *)p->out + at;
            for (int64_t i = 0; i < n; i++)
                scratch[i] = p->delta ? base[i] + p->delta[at + i] : base[i];
            encode(p, row, col, n, scale, scratch, (uint32_t *)(scratch + RUN), codes);
            for (int64_t i = 0; i < n; i++) scratch[i] = bl_e4m3_to_f32(codes[i]) * scale;
            bl_merge_sums_of(base, p->delta ? p->delta + at : NULL, scratch, n, sums);
        }
    }
}

static void round_fp8(const bl_merge_piece *p, int64_t row_begin, int64_t row_end, float *scratch,
                      bl_merge_sums *sums)
{
    const bl_format_descriptor *f = bl_format_describe(p->format);
    int64_t height = f->group_rows, width = f->group_cols ? f->group_cols : p->cols,
            n_across = bl_ceil_div(p->cols, bl_max_i64(width, 1));
    const float *scales = p->scales;
    float *out_scales = p->out_scales;

    for (int64_t row = row_begin; row < row_end; row += height) {
        int64_t stop = bl_min_i64(row + height, row_end);
        for (int64_t j = 0; j < n_across; j++) {
            int64_t col = j * width, end = bl_min_i64(col + width, p->cols);
            int64_t at = row / height * n_across + j;
            out_scales[at] = p->keeps_scales && p->stored == p->format
                                 ? scales[at]
                                 : bl_fp8_scale(absmax_of(p, row, stop, col, end));
            round_block(p, row, stop, col, end, out_scales[at], scratch, sums);
        }
    }
}

/* ---- 4 bits ---- */

/* The code below or above q, the one above with the probability of the distance to the lower one in
 * their gap. order: of the codes by value. */
static uint8_t round_between(const float *values, const uint8_t order[16], float q, uint32_t random)
{
    int i = 15;

    while (i > 0 && !(values[order[i]] <= q)) i--;
    if (i == 15 || q <= values[order[i]]) return order[i];
    float gap = values[order[i + 1]] - values[order[i]];
    return order[i + (0x1p-24f * (float)(random >> 8) < (q - values[order[i]]) / gap)];
}

static void sort_codes(const float *values, uint8_t order[16])
{
    for (int code = 0; code < 16; code++) {
        int at = code;
        for (; at > 0 && values[order[at - 1]] > values[code]; at--) order[at] = order[at - 1];
        order[at] = (uint8_t)code;
    }
}

/* Codes of columns [col, col + n) of a row, whole groups, for the scales that they have. */
static void encode_packed(const bl_merge_piece *p, int64_t row, int64_t col, int64_t n,
                          const float *values, const void *scales, uint32_t *random, uint8_t *codes)
{
    const bl_format_descriptor *f = bl_format_describe(p->format);
    uint8_t one[RUN], order[16];
    float scale;

    sort_codes(f->values, order);
    if (p->is_stochastic) draw(p, row, col, n, random);
    for (int64_t at = 0; at < n; at += f->group_cols) {
        bl_packed_scales(p->format, scales, n, at / f->group_cols, 1, &scale);
        if (!p->is_stochastic)
            bl_packed_encode(p->format, scale, values + at, (int)f->group_cols, one + at);
        for (int64_t i = at; p->is_stochastic && i < at + f->group_cols; i++)
            one[i] = round_between(f->values, order, values[i] / scale, random[i]);
    }
    bl_packed_put(f->layout, one, n, codes);
}

static void round_packed(const bl_merge_piece *p, int64_t row_begin, int64_t row_end,
                         float *scratch, bl_merge_sums *sums)
{
    const bl_format_descriptor *f = bl_format_describe(p->format);
    bool keeps = p->keeps_scales && p->stored == p->format;
    float *merged = scratch + RUN;
    bl_format_bytes bytes, before;

    (void)bl_format_measure(f, 1, p->cols, &bytes);
    for (int64_t k = 0, n; k < (row_end - row_begin) * p->cols; k += n) {
        int64_t row = row_begin + k / p->cols, col = k % p->cols, at = row * p->cols + col;
        n = bl_min_i64(RUN, p->cols - col);
        (void)bl_format_measure(f, 1, col, &before);
        int64_t code_at = row * bytes.row + before.row,
                scale_at = row * bytes.scale_row + before.scale_row;
        uint8_t *codes = (uint8_t *)p->out + code_at;
        char *scales = (char *)p->out_scales + scale_at;
        const float *delta = p->delta ? p->delta + at : NULL;
        for (int64_t i = 0; i < n; i++) scratch[i] = p->base[at + i] + (delta ? delta[i] : 0.0f);
        (void)bl_format_measure(f, 1, n, &before);
        if (keeps) memcpy(scales, (const char *)p->scales + scale_at, (size_t)before.scale_row);
        if (keeps && !delta)
            memcpy(codes, (const uint8_t *)p->codes + code_at, (size_t)before.row);
        else if (!keeps &&
                 !bl_packed_quantize_run(p->format, !p->largest_scales, scratch, n, codes, scales))
            sums->error = INFINITY;
        if (delta && (keeps || p->is_stochastic))
            encode_packed(p, row, col, n, scratch, scales, (uint32_t *)merged, codes);
        bl_fp8_dequantize_tile(p->format, codes, scales, n, 0, 1, 0, n, merged, n);
        bl_merge_sums_of(p->base + at, delta, merged, n, sums);
    }
}

/* ---- the other formats ---- */

static void round_run(bl_format format, const float *values, int64_t n, void *out, float *rounded)
{
    uint16_t *halves = out;

    switch (format) {
    case BL_FORMAT_BF16:
        for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values[i]);
        for (int64_t i = 0; i < n; i++) rounded[i] = bl_bf16_to_f32(halves[i]);
        break;
    case BL_FORMAT_F16:
        for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_f16(values[i]);
        for (int64_t i = 0; i < n; i++) rounded[i] = bl_f16_to_f32(halves[i]);
        break;
    default:
        memcpy(out, values, (size_t)n * sizeof *values);
        memcpy(rounded, values, (size_t)n * sizeof *values);
    }
}

static void round_rows(const bl_merge_piece *p, int64_t row_begin, int64_t row_end, float *scratch,
                       bl_merge_sums *sums)
{
    int64_t width = (int64_t)bl_dtype_bytes(bl_format_describe(p->format)->dtype);
    float *rounded = scratch + RUN;

    for (int64_t at = row_begin * p->cols, n; at < row_end * p->cols; at += n) {
        n = bl_min_i64(RUN, row_end * p->cols - at);
        for (int64_t i = 0; i < n; i++)
            scratch[i] = p->delta ? p->base[at + i] + p->delta[at + i] : p->base[at + i];
        round_run(p->format, scratch, n, (char *)p->out + at * width, rounded);
        bl_merge_sums_of(p->base + at, p->delta ? p->delta + at : NULL, rounded, n, sums);
    }
}

static void round_strip(void *arg, int64_t index, void *scratch)
{
    const bl_merge_piece *p = arg;
    int64_t begin = index * strip_rows(p->format),
            end = bl_min_i64(begin + strip_rows(p->format), p->rows);
    bl_merge_sums *sums = &p->sums[index];

    _Static_assert(2 * RUN * sizeof(float) <= BL_POOL_SCRATCH_BYTES, "two runs fit");
    *sums = (bl_merge_sums){0};
    bl_fp8_dequantize_tile(p->stored, p->codes, p->scales, p->cols, begin, end, 0, p->cols,
                           p->base + begin * p->cols, p->cols);
    if (bl_format_is_packed(p->format))
        round_packed(p, begin, end, scratch, sums);
    else if (bl_format_has_scales(p->format))
        round_fp8(p, begin, end, scratch, sums);
    else
        round_rows(p, begin, end, scratch, sums);
}

void bl_merge_round(bl_pool *pool, const bl_merge_piece *piece, bl_merge_sums *sums)
{
    int64_t n_strips = bl_merge_strips(piece->format, piece->rows);

    bl_pool_run(pool, n_strips, round_strip, (void *)piece);
    for (int64_t i = 0; i < n_strips; i++) bl_merge_sums_add(sums, &piece->sums[i]);
}
