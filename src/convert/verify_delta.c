/* SPDX-License-Identifier: Apache-2.0 */
/* verify_delta.c -- the values of one matrix: base, delta and merged, block by block. Each run of
 * elements is one item of the pool with its own sums, so that figures do not depend on threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "convert/verify_internal.h"
#include "fp8/packed.h"
#include "ops/gemm.h"

enum { PIECE_ELEMENTS = 4 << 20, RUN = 4096 };

struct bl_delta {
    bl_pool *pool;
    /* [capacity]; unit: the scale of codes; merged and bytes: of 8 bytes each */
    float *base, *merged, *delta, *unit;
    void *bytes;
    bl_delta_sums *runs;
    int64_t capacity;
    float *left, *right, *values; /* of the factors */
    size_t n_left, n_right, n_values;
    struct {
        const bl_stored_tensor *tensor;
        float *values;
    } kept[2]; /* B of stacked experts, read once for all of them */
    int n_read;
};

static bl_status grow(float **values, size_t *n_values, int64_t rows, int64_t cols)
{
    size_t n;

    if (bl_mul_overflows((size_t)rows, (size_t)cols, &n)) return BL_FAIL(BL_ENOMEM, "a factor");
    if (n <= *n_values && *values) return BL_OK;
    free(*values);
    *values = malloc((n + 1) * sizeof **values);
    *n_values = *values ? n : 0;
    return *values ? BL_OK : BL_FAIL(BL_ENOMEM, "a factor of %zu values", n);
}

bl_status bl_delta_create(bl_pool *pool, bl_delta **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out) return BL_FAIL(BL_ENOMEM, "a comparison");
    (*out)->pool = pool;
    return BL_OK;
}

static void free_pieces(bl_delta *d)
{
    free(d->base);
    free(d->merged);
    free(d->delta);
    free(d->unit);
    free(d->bytes);
    free(d->runs);
}

void bl_delta_destroy(bl_delta *d)
{
    if (!d) return;
    free_pieces(d);
    free(d->left);
    free(d->right);
    free(d->values);
    for (size_t i = 0; i < BL_COUNT(d->kept); i++) free(d->kept[i].values);
    free(d);
}

static int64_t rows_of_piece(const bl_slice *slice)
{
    return bl_max_i64(1, bl_min_i64(slice->rows, PIECE_ELEMENTS / bl_max_i64(1, slice->cols)));
}

static bl_status allocate(bl_delta *d, const bl_slice *slice)
{
    int64_t n = rows_of_piece(slice) * slice->cols;

    if (n <= d->capacity) return BL_OK;
    free_pieces(d);
    size_t size = (size_t)n + 1;
    d->base = malloc(size * sizeof(float));
    d->merged = malloc(size * sizeof(double));
    d->delta = malloc(size * sizeof(float));
    d->unit = malloc(size * sizeof(float));
    d->bytes = malloc(size * sizeof(double));
    d->runs = malloc((size_t)(n / RUN + 1) * sizeof *d->runs);
    d->capacity = d->base && d->merged && d->delta && d->unit && d->bytes && d->runs ? n : 0;
    return d->capacity ? BL_OK : BL_FAIL(BL_ENOMEM, "blocks of %zu elements", size);
}

/* ---- stored values ---- */

/* A matrix whose rows are read; scales of FP8 and 4-bit codes, followed by zero points. */
typedef struct source {
    bl_slice slice;
    bl_hf_weight weight;
    float *scales, *zero_points; /* NULL: none */
} source;

static bl_status open_source(const bl_hf_model *model, const bl_slice *slice, source *out)
{
    const bl_stored_tensor *t = slice->tensor;

    *out = (source){.slice = *slice};
    if (t->dtype != BL_F8_E4M3 && !bl_verify_is_packed(model, t)) return BL_OK;
    BL_TRY(bl_hf_get_weight(model, t->name, &out->weight));
    int64_t n = out->weight.scale_rows * out->weight.scale_cols;
    out->scales = malloc((size_t)(2 * n + 1) * sizeof *out->scales);
    if (!out->scales) return BL_FAIL(BL_ENOMEM, "the scales of %s", t->name);
    bl_status st = bl_hf_read_scales(&out->weight, out->scales);
    if (st == BL_OK && out->weight.packed && out->weight.zero_point) {
        out->zero_points = out->scales + n;
        st = bl_hf_read_zero_points(&out->weight, out->zero_points);
    }
    if (st == BL_OK) return BL_OK;
    free(out->scales);
    out->scales = NULL;
    return st;
}

static bl_status read_packed(bl_delta *d, const source *s, int64_t begin, int64_t rows,
                             float *values, float *unit)
{
    const bl_hf_weight *w = &s->weight;
    const bl_hf_packed *p = w->packed;
    int64_t cols = w->cols, row_bytes = w->codes->n_bytes / w->rows;
    bl_code_layout layout = p->is_high_first ? BL_CODES_HIGH_FIRST : BL_CODES_LOW_FIRST;

    BL_TRY(
        bl_stored_tensor_read(w->codes, begin * row_bytes, (size_t)(rows * row_bytes), d->bytes));
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t row = begin + i / cols, col = i % cols,
                at = p->is_flat ? (row * cols + col) / w->block_cols
                                : row / w->block_rows * w->scale_cols + col / w->block_cols;
        const uint8_t *codes = (const uint8_t *)d->bytes + i / cols * row_bytes;
        float zero = s->zero_points ? s->zero_points[at] : 0;
        values[i] = (p->book[bl_packed_code(codes, layout, col)] - zero) * s->scales[at];
        if (unit) unit[i] = s->scales[at];
    }
    return BL_OK;
}

/* Rows [begin, begin + rows), and the scale of each code (else 1). */
static bl_status read_rows(bl_delta *d, const source *s, int64_t begin, int64_t rows, float *values,
                           float *unit)
{
    const bl_stored_tensor *t = s->slice.tensor;
    int64_t cols = s->slice.cols, width = (int64_t)bl_dtype_bytes(t->dtype), n = rows * cols;
    const uint8_t *codes = d->bytes;

    if (s->weight.packed) return read_packed(d, s, begin, rows, values, unit);
    BL_TRY(bl_stored_tensor_read(t, (s->slice.first_row + begin) * cols * width,
                                 (size_t)(n * width), d->bytes));
    if (!s->scales) {
        for (int64_t i = 0; unit && i < n; i++) unit[i] = 1;
        return bl_dtype_to_f32(t->dtype, d->bytes, values, (size_t)n)
                   ? BL_OK
                   : BL_FAIL(BL_EINPUT, "tensor %s: values of %s are not compared", t->name,
                             bl_dtype_name(t->dtype));
    }
    for (int64_t row = 0; row < rows; row++) {
        const float *scales =
            s->scales + (begin + row) / s->weight.block_rows * s->weight.scale_cols;
        for (int64_t col = 0; col < cols; col++) {
            int64_t i = row * cols + col;
            float scale = scales[col / s->weight.block_cols];
            values[i] = bl_e4m3_to_f32(codes[i]) * scale;
            if (unit) unit[i] = scale;
        }
    }
    return BL_OK;
}

/* ---- factors ---- */

/* B as float, whole; of stacked experts it is used for each. */
static bl_status read_b(bl_delta *d, const bl_stored_tensor *b, const float **out)
{
    for (size_t i = 0; i < BL_COUNT(d->kept); i++)
        if (d->kept[i].tensor == b) {
            *out = d->kept[i].values;
            return BL_OK;
        }
    int slot = d->n_read++ % (int)BL_COUNT(d->kept);
    free(d->kept[slot].values);
    d->kept[slot].tensor = NULL;
    d->kept[slot].values = malloc((size_t)(b->shape[0] * b->shape[1] + 1) * sizeof(float));
    if (!d->kept[slot].values) return BL_FAIL(BL_ENOMEM, "the factor %s", b->name);
    BL_TRY(bl_stored_tensor_read_f32(b, d->kept[slot].values));
    d->kept[slot].tensor = b;
    *out = d->kept[slot].values;
    return BL_OK;
}

/* left (rows, r) and right (r, cols), with delta = left right: s B_e and A_e; where A's columns are
 * the base's rows, s A_e^T and B_e^T. */
static bl_status read_factors(bl_delta *d, const bl_factors *f, int64_t rows, int64_t cols)
{
    int64_t r = f->a->r, n_experts = f->b->n_experts, in = f->a->a->shape[1];
    bool is_transposed = f->a->is_transposed != f->is_flipped;
    const float *b = NULL;

    BL_TRY(grow(&d->left, &d->n_left, rows, r));
    BL_TRY(grow(&d->right, &d->n_right, r, cols));
    BL_TRY(grow(&d->values, &d->n_values, r, in));
    BL_TRY(bl_stored_tensor_read_floats(f->a->a, f->expert_a * r * in, r * in, d->values));
    BL_TRY(read_b(d, f->b->b, &b));
    b += f->is_expert_slow ? f->expert_b * r : f->expert_b;
    int64_t stride = f->is_expert_slow ? 1 : n_experts, n_b = n_experts * r;
    for (int64_t k = 0; k < r; k++) {
        for (int64_t row = 0; row < rows; row++)
            d->left[row * r + k] =
                (float)(f->a->scale * (is_transposed ? d->values[k * in + f->row + row]
                                                     : b[(f->row + row) * n_b + k * stride]));
        for (int64_t col = 0; col < cols; col++)
            d->right[k * cols + col] =
                is_transposed ? b[col * n_b + k * stride] : d->values[k * in + col];
    }
    return BL_OK;
}

/* ---- sums ---- */

/* The value of the book next to q, and half the larger distance to its neighbors there. */
static float nearest_value(const float book[16], float q, float *half)
{
    float nearest = book[0], below = -INFINITY, above = INFINITY;

    for (int i = 1; i < 16; i++)
        if (fabsf(book[i] - q) < fabsf(nearest - q)) nearest = book[i];
    for (int i = 0; i < 16; i++) {
        if (book[i] < nearest) below = fmaxf(below, book[i]);
        if (book[i] > nearest) above = fminf(above, book[i]);
    }
    *half =
        0.5f * fmaxf(isfinite(below) ? nearest - below : 0, isfinite(above) ? above - nearest : 0);
    return nearest;
}

/* Half the distance of the neighbors of x in the dtype, or in the book of 4-bit codes; unit: the
 * scale of codes. Beyond the largest code also what is cut off. */
static float half_gap(bl_dtype dtype, const float *book, float x, float unit)
{
    float size = fabsf(x), q = size / unit, half;
    int exponent;

    if (book) {
        float cut = fabsf(x / unit - nearest_value(book, x / unit, &half));
        return fabsf(unit) * fmaxf(half, cut);
    }
    switch (dtype) {
    case BL_BF16:
        return size * 0x1p-8f;
    case BL_F16:
        return size * 0x1p-11f + 0x1p-25f;
    case BL_F8_E4M3:
        (void)frexpf(q, &exponent); /* q < 2^exponent */
        return unit * (ldexpf(1, (exponent < -5 ? -5 : exponent) - 5) + (q > 448 ? q - 448 : 0));
    default:
        return size * 0x1p-22f; /* the order of the sum over r */
    }
}

static float round_to(bl_dtype dtype, const float *book, float x, float unit)
{
    float half;

    if (book) return nearest_value(book, x / unit, &half) * unit;
    switch (dtype) {
    case BL_BF16:
        return bl_bf16_to_f32(bl_f32_to_bf16(x));
    case BL_F16:
        return bl_f16_to_f32(bl_f32_to_f16(x));
    case BL_F8_E4M3:
        return bl_e4m3_to_f32(bl_f32_to_e4m3(x / unit)) * unit;
    default:
        return x;
    }
}

typedef struct run_argument {
    bl_delta *d;
    bl_dtype dtype;    /* of merged */
    const float *book; /* of its 4-bit codes; NULL: whole bytes */
    bool has_delta;
    int64_t n;
} run_argument;

static void add_run(void *argument, int64_t index, void *scratch)
{
    const run_argument *a = argument;
    const bl_delta *p = a->d;
    int64_t begin = index * RUN, end = bl_min_i64(begin + RUN, a->n);
    bl_delta_sums s = {0};

    (void)scratch;
    if (a->has_delta)
        bl_merge_sums_of(p->base + begin, p->delta + begin, p->merged + begin, end - begin,
                         &s.direct);
    for (int64_t i = begin; i < end; i++) {
        float w = p->base[i], m = p->merged[i], unit = p->unit[i];
        double d = a->has_delta ? p->delta[i] : 0;
        float sum = a->has_delta ? w + p->delta[i] : w;
        double nearest = round_to(a->dtype, a->book, sum, unit),
               without = round_to(a->dtype, a->book, w, unit);
        double gap = half_gap(a->dtype, a->book, fabsf(m) > fabsf(sum) ? m : sum, unit);
        double off = (double)m - nearest, change = (double)m - without, error = (double)m - w - d;
        s.n_bad_base += !isfinite(w);
        s.n_bad_merged += !isfinite(m);
        s.n_differ += m != (float)nearest;
        /* of a tie half a gap, and what fp32 rounds of code * scale */
        s.n_outside += fabs(error) > (a->has_delta ? 2 : 1 + 0x1p-12) * gap + fabs(d) * 0x1p-7;
        s.effect += (nearest - without) * (nearest - without);
        s.off += off * off;
        s.off_along += off * d;
        s.off_noise += off * off * d * d;
        s.change += change * change;
        s.change_along += change * d;
        s.direct_noise += error * error * d * d;
        s.gaps += gap * gap;
    }
    s.n = end - begin;
    p->runs[index] = s;
}

static void add_sums(bl_delta_sums *s, const bl_delta_sums *more)
{
    bl_merge_sums_add(&s->direct, &more->direct);
    s->effect += more->effect;
    s->off += more->off;
    s->off_along += more->off_along;
    s->off_noise += more->off_noise;
    s->change += more->change;
    s->change_along += more->change_along;
    s->direct_noise += more->direct_noise;
    s->gaps += more->gaps;
    s->n += more->n;
    s->n_differ += more->n_differ;
    s->n_outside += more->n_outside;
    s->n_bad_base += more->n_bad_base;
    s->n_bad_merged += more->n_bad_merged;
}

static bl_status compare_piece(bl_delta *d, const source *base, const source *merged, int64_t begin,
                               int64_t rows, const bl_factors *f, bl_delta_sums *out)
{
    int64_t cols = base->slice.cols, n = rows * cols;
    const bl_hf_packed *packed = merged->weight.packed;
    run_argument a = {d, merged->slice.tensor->dtype, packed ? packed->book : NULL, f != NULL, n};

    if (merged->zero_points)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s: a merged model with zero points is not compared; use the output "
                       "of ballast dequantize",
                       merged->slice.tensor->name);

    BL_TRY(read_rows(d, base, begin, rows, d->base, NULL));
    BL_TRY(read_rows(d, merged, begin, rows, d->merged, d->unit));
    if (f)
        BL_TRY(bl_cpu_gemm_f32(d->pool, false, false, rows, cols, f->a->r, 1.0f,
                               d->left + begin * f->a->r, f->a->r, d->right, cols, 0.0f, d->delta,
                               cols));
    int64_t n_runs = bl_ceil_div(n, RUN);
    bl_pool_run(d->pool, n_runs, add_run, &a);
    for (int64_t i = 0; i < n_runs; i++) add_sums(out, &d->runs[i]);
    return BL_OK;
}

bl_status bl_delta_compare(bl_delta *d, const bl_delta_sides *sides, const bl_factors *factors,
                           int64_t max_rows, bl_delta_sums *out)
{
    source base = {.scales = NULL}, merged = {.scales = NULL};
    const bl_slice *slice = &sides->base;
    int64_t n_rows = bl_min_i64(max_rows, slice->rows);
    bl_status st;

    *out = (bl_delta_sums){0};
    BL_TRY(allocate(d, slice));
    if (factors) BL_TRY(read_factors(d, factors, n_rows, slice->cols));
    BL_TRY_GOTO(st, done, open_source(sides->base_model, slice, &base));
    BL_TRY_GOTO(st, done, open_source(sides->merged_model, &sides->merged, &merged));
    for (int64_t begin = 0, rows; begin < n_rows && st == BL_OK; begin += rows) {
        rows = bl_min_i64(rows_of_piece(slice), n_rows - begin);
        st = compare_piece(d, &base, &merged, begin, rows, factors, out);
    }
done:
    free(base.scales);
    free(merged.scales);
    return st;
}

bl_status bl_delta_same_bytes(bl_delta *d, const bl_slice *a, const bl_slice *b, bool *out)
{
    int64_t width = (int64_t)bl_dtype_bytes(a->tensor->dtype), cols = a->cols;

    *out = true;
    BL_TRY(allocate(d, a));
    for (int64_t begin = 0, rows; begin < a->rows && *out; begin += rows) {
        rows = bl_min_i64(rows_of_piece(a), a->rows - begin);
        size_t n = (size_t)(rows * cols * width);
        BL_TRY(
            bl_stored_tensor_read(a->tensor, (a->first_row + begin) * cols * width, n, d->bytes));
        BL_TRY(
            bl_stored_tensor_read(b->tensor, (b->first_row + begin) * cols * width, n, d->merged));
        *out = memcmp(d->bytes, d->merged, n) == 0;
    }
    return BL_OK;
}
