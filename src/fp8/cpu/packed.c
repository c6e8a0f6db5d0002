/* SPDX-License-Identifier: Apache-2.0 */
/* packed.c -- quantizing to 4-bit formats. A group is widened to fp32, its scales are tried, and
 * the codes of the best one are packed. Sums of squares are in double, in lanes that are added in
 * one order: their bits do not depend on the compiler's vectors. */
#include "fp8/packed.h"

#include <float.h>
#include <stdatomic.h>
#include <string.h>

#include "base/clones.h"
#include "base/sizes.h"

/* The bf16 number before 2^125. */
enum { INT4_SCALE_MAX = 0x7dff };

enum {
    GROUP_MAX = 128,
    SUM_LANES = 8,
    ITEM_WEIGHTS = 64 << 10,
    E8M0_BIAS = 127,
    E8M0_MAX = 252 /* 6 * 2^(252 - E8M0_BIAS) is finite */
};

_Static_assert(GROUP_MAX % SUM_LANES == 0, "whole lanes in a group");

/* ---- scales ---- */

void bl_packed_scales(bl_format format, const void *row_scales, int64_t cols, int64_t group,
                      int64_t n, float *scales)
{
    const bl_format_descriptor *f = bl_format_describe(format);
    const unsigned char *first = row_scales;
    const unsigned char *at = first + group * (int64_t)bl_dtype_bytes(f->scale_dtype);

    if (f->scale_dtype == BL_F8_E4M3)
        for (int64_t i = 0; i < n; i++) scales[i] = bl_e4m3_to_f32(at[i]);
    else
        bl_dtype_to_f32(f->scale_dtype, at, scales, (size_t)n);
    if (!f->has_divisor) return;
    bl_format_bytes bytes;
    float divisor;
    bl_format_measure(f, 1, cols, &bytes);
    memcpy(&divisor, first + bytes.scale_row - (int64_t)sizeof divisor, sizeof divisor);
    for (int64_t i = 0; i < n; i++) scales[i] /= divisor;
}

bool bl_packed_fits(bl_format format, int64_t cols)
{
    return !bl_format_is_packed(format) || cols % bl_format_describe(format)->group_cols == 0;
}

/* ---- one group ---- */

/* A group's weights, and the codes of a scale that was tried. */
typedef struct group {
    bl_format format;
    int n;
    float weight[GROUP_MAX];
    uint8_t code[GROUP_MAX];
} group;

static void encode_group(group *g, float scale)
{
    if (g->format == BL_FORMAT_MXFP4)
        for (int i = 0; i < g->n; i++) g->code[i] = (uint8_t)bl_e2m1_from_f32(g->weight[i] / scale);
    else
        for (int i = 0; i < g->n; i++) g->code[i] = (uint8_t)bl_int4_from_f32(g->weight[i] / scale);
}

/* bitsandbytes' arithmetic: a product with the reciprocal, and the first one of the values next to
 * it. */
static void encode_nf4(group *g, float absmax)
{
    const float *values = bl_format_describe(BL_FORMAT_NF4)->values;
    float reciprocal = 1.0f / absmax;
    bool divides = !(reciprocal <= FLT_MAX);

    for (int i = 0; i < g->n; i++) {
        float x = divides ? g->weight[i] / absmax : g->weight[i] * reciprocal, least = INFINITY;
        x = fmaxf(-1.0f, fminf(1.0f, x));
        for (int code = 0; code < 16; code++) {
            float distance = fabsf(x - values[code]);
            if (distance < least) least = distance, g->code[i] = (uint8_t)code;
        }
    }
}

/* value[i] = the value of the code of weight[i] / scale: without codes and a table, in vectors. */
static inline void round_group(const group *g, float scale, float value[GROUP_MAX])
{
    const float magic = 0x1.8p23f;

    if (g->format == BL_FORMAT_MXFP4)
        for (int i = 0; i < g->n; i++) {
            float m = fabsf(g->weight[i] / scale);
            int halves = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) +
                         2 * ((m > 2.5f) + (m >= 3.5f)) + 4 * (m > 5.0f);
            value[i] = copysignf(0.5f * (float)halves, g->weight[i]);
        }
    else
        for (int i = 0; i < g->n; i++) {
            float x = g->weight[i] / scale, low = x < -8.0f ? -8.0f : x;
            value[i] = (low > 7.0f ? 7.0f : low) + magic - magic;
        }
}

BL_CLONES static double packed_squared_error(const group *g, float scale)
{
    float value[GROUP_MAX];
    double sum[SUM_LANES] = {0};

    round_group(g, scale, value);

    for (int i = 0; i < g->n; i += SUM_LANES)
        for (int lane = 0; lane < SUM_LANES; lane++) {
            double d = (double)g->weight[i + lane] - (double)(value[i + lane] * scale);
            sum[lane] += d * d;
        }
    for (int n = SUM_LANES / 2; n > 0; n /= 2)
        for (int lane = 0; lane < n; lane++) sum[lane] += sum[lane + n];
    return sum[0];
}

static int clamp_exponent(int exponent)
{
    return exponent < 0 ? 0 : exponent > E8M0_MAX ? E8M0_MAX : exponent;
}

/* Candidate k's bits, the rule's own at k = 0; *scale: its value. False: there are no more. */
static bool candidate(bl_format format, float absmax, int k, uint16_t *bits, float *scale)
{
    static const int steps[] = {0, 1, -1};

    if (format == BL_FORMAT_MXFP4) {
        if (k >= (int)BL_COUNT(steps)) return false;
        uint8_t s = (uint8_t)clamp_exponent(ilogbf(absmax) - 2 + steps[k] + E8M0_BIAS);
        bl_dtype_to_f32(BL_F8_E8M0, &s, scale, 1);
        *bits = s;
        return true;
    }
    if (k > 16) return false;
    *bits = bl_f32_to_bf16(absmax / (k == 0 ? 7.5f : 7.0f + 0.25f * (float)(k - 1)));
    if (*bits == 0) *bits = 1;                          /* the least bf16 number */
    if (*bits > INT4_SCALE_MAX) *bits = INT4_SCALE_MAX; /* -8 times it is finite */
    *scale = bl_bf16_to_f32(*bits);
    return true;
}

/* The codes of the best scale; returns the scale's bits. absmax > 0. */
static uint16_t choose_scale(group *g, float absmax, bool least_squares)
{
    uint16_t bits, best_bits = 0;
    float scale, best = 1;
    double least = INFINITY;

    for (int k = 0; candidate(g->format, absmax, k, &bits, &scale); k++) {
        double error = least_squares ? packed_squared_error(g, scale) : 0;
        if (k == 0 || error < least) least = error, best = scale, best_bits = bits;
        if (!least_squares) break;
    }
    encode_group(g, best);
    return best_bits;
}

/* Codes and scale of a group into its place: `codes` of the group, scale `index` of its row. */
static void quantize_group(group *g, float absmax, bool least_squares, uint8_t *codes,
                           unsigned char *row_scales, int64_t index)
{
    const bl_format_descriptor *f = bl_format_describe(g->format);
    uint16_t bits;

    if (g->format == BL_FORMAT_NF4) {
        float scale = absmax > 0 ? absmax : 1;
        encode_nf4(g, scale);
        memcpy(row_scales + index * (int64_t)sizeof scale, &scale, sizeof scale);
    } else {
        if (absmax > 0) {
            bits = choose_scale(g, absmax, least_squares);
        } else {
            encode_group(g, 1);
            bits = f->scale_dtype == BL_BF16 ? bl_f32_to_bf16(1) : E8M0_BIAS;
        }
        if (f->scale_dtype == BL_BF16)
            memcpy(row_scales + index * (int64_t)sizeof bits, &bits, sizeof bits);
        else
            row_scales[index] = (unsigned char)bits;
    }
    bl_packed_put(f->layout, g->code, g->n, codes);
}

/* ---- rows ---- */

typedef struct packed_task {
    bl_format format;
    bool least_squares;
    bl_dtype dtype;
    const unsigned char *src;
    int64_t n_rows, cols, rows_per_item;
    bl_format_bytes bytes; /* of a row */
    uint8_t *codes;
    unsigned char *scales;
    atomic_llong first_bad_row;
} packed_task;

/* False: a weight is not finite. */
static bool quantize_row(packed_task *t, int64_t row)
{
    int64_t width = (int64_t)bl_dtype_bytes(t->dtype);
    group g = {.format = t->format, .n = (int)bl_format_describe(t->format)->group_cols};

    for (int64_t col = 0; col < t->cols; col += g.n) {
        float absmax = 0;
        bl_dtype_to_f32(t->dtype, t->src + (row * t->cols + col) * width, g.weight, (size_t)g.n);
        for (int i = 0; i < g.n; i++) {
            if (!(fabsf(g.weight[i]) <= FLT_MAX)) return false;
            absmax = fmaxf(absmax, fabsf(g.weight[i]));
        }
        quantize_group(&g, absmax, t->least_squares, t->codes + row * t->bytes.row + col / 2,
                       t->scales + row * t->bytes.scale_row, col / g.n);
    }
    return true;
}

bool bl_packed_quantize_run(bl_format format, bool least_squares, const float *src, int64_t n,
                            uint8_t *codes, void *scales)
{
    packed_task t = {.format = format,
                     .least_squares = least_squares,
                     .dtype = BL_F32,
                     .src = (const unsigned char *)src,
                     .cols = n,
                     .codes = codes,
                     .scales = scales};

    return quantize_row(&t, 0);
}

void bl_packed_encode(bl_format format, float scale, const float *src, int n, uint8_t *one)
{
    group g = {.format = format, .n = n};

    memcpy(g.weight, src, (size_t)n * sizeof *src);
    if (format == BL_FORMAT_NF4)
        encode_nf4(&g, scale);
    else
        encode_group(&g, scale);
    memcpy(one, g.code, (size_t)n);
}

static void quantize_item(void *arg, int64_t index, void *scratch)
{
    packed_task *t = arg;
    int64_t begin = index * t->rows_per_item, end = bl_min_i64(begin + t->rows_per_item, t->n_rows);

    (void)scratch;
    for (int64_t row = begin; row < end; row++) {
        if (t->bytes.scale_row > 0)
            memset(t->scales + row * t->bytes.scale_row, 0, (size_t)t->bytes.scale_row);
        if (quantize_row(t, row)) continue;
        long long seen = atomic_load(&t->first_bad_row);
        while (row < seen && !atomic_compare_exchange_weak(&t->first_bad_row, &seen, row)) continue;
        return;
    }
}

static bl_status report_bad_row(const packed_task *t, int64_t row, int64_t row_begin)
{
    int64_t width = (int64_t)bl_dtype_bytes(t->dtype);
    float value = 0;

    for (int64_t col = 0; col < t->cols; col++) {
        bl_dtype_to_f32(t->dtype, t->src + (row * t->cols + col) * width, &value, 1);
        if (!isfinite(value))
            return BL_FAIL(BL_EINPUT, "row %lld, column %lld: the weight is %s",
                           (long long)(row_begin + row), (long long)col,
                           isnan(value) ? "NaN" : "infinite");
    }
    return BL_FAIL(BL_EINTERNAL, "row %lld: absmax is not finite, but the weights are",
                   (long long)(row_begin + row));
}

bl_status bl_packed_quantize(bl_pool *pool, bl_format format, bool least_squares, bl_dtype dtype,
                             const void *src, int64_t row_begin, int64_t row_end, int64_t cols,
                             uint8_t *codes, void *scales)
{
    packed_task t = {.format = format,
                     .least_squares = least_squares,
                     .dtype = dtype,
                     .src = src,
                     .n_rows = row_end - row_begin,
                     .cols = cols,
                     .rows_per_item = bl_max_i64(ITEM_WEIGHTS / bl_max_i64(cols, 1), 1),
                     .codes = codes,
                     .scales = scales,
                     .first_bad_row = row_end - row_begin};

    if (dtype != BL_F32 && dtype != BL_BF16 && dtype != BL_F16)
        return BL_FAIL(BL_EINPUT, "weights of type %s cannot be quantized", bl_dtype_name(dtype));
    if (!bl_format_is_packed(format) || format == BL_FORMAT_NVFP4)
        return BL_FAIL(BL_EUSAGE, "weights cannot be quantized to %s; use mxfp4",
                       bl_format_name(format));
    if (!bl_packed_fits(format, cols))
        return BL_FAIL(BL_EINPUT, "rows of %lld weights are not whole groups of %lld, as %s needs",
                       (long long)cols, (long long)bl_format_describe(format)->group_cols,
                       bl_format_name(format));
    if (!bl_format_measure(bl_format_describe(format), 1, cols, &t.bytes))
        return BL_FAIL(BL_EINPUT, "rows of %lld weights are too long", (long long)cols);
    bl_pool_run(pool, bl_ceil_div(t.n_rows, t.rows_per_item), quantize_item, &t);
    int64_t bad = atomic_load(&t.first_bad_row);
    return bad < t.n_rows ? report_bad_row(&t, bad, row_begin) : BL_OK;
}
