/* SPDX-License-Identifier: Apache-2.0 */
/* norm.c -- RMSNorm and LayerNorm on the CPU: a row is summed in double in eight lanes of fixed
 * order. */
#include "ops/norm.h"

#include <math.h>

#include "ops/cpu/ops_cpu.h"

/* The copies of a row, in a worker's scratch of H floats each. */
enum { COPY_X, COPY_DY, COPY_OUT, N_COPIES };
_Static_assert((size_t)N_COPIES *OPS_ROW_MAX * sizeof(float) <= BL_POOL_SCRATCH_BYTES,
               "a row's copies fit a worker's scratch");

static float *copy_of(void *scratch, int which)
{
    return (float *)scratch + which * OPS_ROW_MAX;
}

static bl_status check_row(const char *op, int64_t H, bl_dtype dtype)
{
    if (dtype == BL_F32 || H <= OPS_ROW_MAX) return BL_OK;
    return BL_FAIL(BL_ELIMIT, "%s in bf16: %lld channels, %d at most", op, (long long)H,
                   OPS_ROW_MAX);
}

BL_CLONES static void normalize_row(int64_t H, float rstd, const float *x, const float *w, float *y)
{
    OPS_IVDEP
    for (int64_t h = 0; h < H; h++) y[h] = bl_rmsnorm_element(x[h], rstd, w[h]);
}

static int64_t count_rows(int64_t T, int64_t n_heads)
{
    return T * bl_max_i64(1, n_heads);
}

static void forward_item(void *arg, int64_t index, void *scratch)
{
    const bl_rmsnorm_forward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->H),
            end = bl_min_i64(count_rows(a->T, a->n_heads), (index + 1) * rows);
    for (int64_t r = index * rows; r < end; r++) {
        int64_t at = bl_norm_row(r, a->H, a->n_heads, a->row_stride);
        const float *x = ops_read(a->x, at, a->H, copy_of(scratch, COPY_X));
        float *y = ops_place(a->y, at, copy_of(scratch, COPY_OUT));
        float rstd = (float)(1.0 / sqrt(ops_dot(x, x, a->H) / (double)a->H + a->eps));
        normalize_row(a->H, rstd, x, a->w, y);
        ops_write(a->y, at, a->H, y);
        if (a->rstd) a->rstd[r] = rstd;
    }
}

bl_status ops_cpu_rmsnorm_forward(bl_stream *stream, const bl_rmsnorm_forward_args *args)
{
    bl_rmsnorm_forward_args a = *args;
    BL_TRY(check_row("rmsnorm forward", a.H, a.x.dtype));
    int64_t n_rows = count_rows(a.T, a.n_heads);
    bl_pool_run(ops_pool(stream), bl_ceil_div(n_rows, ops_rows_per_item(a.H)), forward_item, &a);
    return BL_OK;
}

/* By address: a vector as an argument is passed in another way where AVX-512 is not enabled. */
static double sum_lanes(const vd8 *lanes)
{
    double sum = 0;
    for (int k = 0; k < 8; k++) sum += (*lanes)[k];
    return sum;
}

/* sum_h dy_h w_h x_h in double. */
BL_CLONES static double triple_sum(int64_t H, const float *dy, const float *w, const float *x)
{
    vd8 lanes = {0};
    int64_t h = 0;
    for (; h + 8 <= H; h += 8)
        lanes += __builtin_convertvector(*(const vf8 *)(dy + h), vd8) *
                 __builtin_convertvector(*(const vf8 *)(w + h), vd8) *
                 __builtin_convertvector(*(const vf8 *)(x + h), vd8);
    double sum = sum_lanes(&lanes);
    for (; h < H; h++) sum += (double)dy[h] * (double)w[h] * (double)x[h];
    return sum;
}

BL_CLONES static void gradient_row(int64_t H, float rstd, float along, const float *dy,
                                   const float *w, const float *x, float *dx)
{
    OPS_IVDEP
    for (int64_t h = 0; h < H; h++)
        dx[h] = bl_rmsnorm_gradient_element(x[h], rstd, w[h], dy[h], along);
}

BL_CLONES static void accumulate_gradient_row(int64_t H, float rstd, float along, const float *dy,
                                              const float *w, const float *x, float *dx)
{
    OPS_IVDEP
    for (int64_t h = 0; h < H; h++)
        dx[h] += bl_rmsnorm_gradient_element(x[h], rstd, w[h], dy[h], along);
}

/* Where dx is computed, with what it is added to. */
static float *place_gradient(bl_tensor dx, int64_t at, int64_t H, int accumulate, void *scratch)
{
    float *copy = copy_of(scratch, COPY_OUT);
    return accumulate ? (float *)ops_read(dx, at, H, copy) : ops_place(dx, at, copy);
}

static void backward_item(void *arg, int64_t index, void *scratch)
{
    const bl_rmsnorm_backward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->H),
            end = bl_min_i64(count_rows(a->T, a->n_heads), (index + 1) * rows);
    for (int64_t r = index * rows; r < end; r++) {
        int64_t at = bl_norm_row(r, a->H, a->n_heads, a->row_stride);
        const float *x = ops_read(a->x, at, a->H, copy_of(scratch, COPY_X)),
                    *dy = ops_read(a->dy, at, a->H, copy_of(scratch, COPY_DY));
        float rstd = a->rstd[r], *dx = place_gradient(a->dx, at, a->H, a->accumulate, scratch);
        float along =
            (float)((double)rstd * (double)rstd * triple_sum(a->H, dy, a->w, x) / (double)a->H);
        if (a->accumulate)
            accumulate_gradient_row(a->H, rstd, along, dy, a->w, x, dx);
        else
            gradient_row(a->H, rstd, along, dy, a->w, x, dx);
        ops_write(a->dx, at, a->H, dx);
    }
}

bl_status ops_cpu_rmsnorm_backward(bl_stream *stream, const bl_rmsnorm_backward_args *args)
{
    bl_rmsnorm_backward_args a = *args;
    BL_TRY(check_row("rmsnorm backward", a.H, a.x.dtype));
    int64_t n_rows = count_rows(a.T, a.n_heads);
    bl_pool_run(ops_pool(stream), bl_ceil_div(n_rows, ops_rows_per_item(a.H)), backward_item, &a);
    return BL_OK;
}

/* ---- LayerNorm ---- */

/* sum_h x_h in double. */
BL_CLONES static double plain_sum(int64_t H, const float *x)
{
    vd8 lanes = {0};
    int64_t h = 0;
    for (; h + 8 <= H; h += 8) lanes += __builtin_convertvector(*(const vf8 *)(x + h), vd8);
    double sum = sum_lanes(&lanes);
    for (; h < H; h++) sum += (double)x[h];
    return sum;
}

/* sum_h (x_h - mean)^2 in double. */
BL_CLONES static double centered_squares(int64_t H, double mean, const float *x)
{
    vd8 lanes = {0};
    int64_t h = 0;
    for (; h + 8 <= H; h += 8) {
        vd8 off = __builtin_convertvector(*(const vf8 *)(x + h), vd8) - mean;
        lanes += off * off;
    }
    double sum = sum_lanes(&lanes);
    for (; h < H; h++) sum += ((double)x[h] - mean) * ((double)x[h] - mean);
    return sum;
}

/* sum_h dy_h w_h (x_h - mean) in double. */
BL_CLONES static double centered_triple_sum(int64_t H, double mean, const float *dy, const float *w,
                                            const float *x)
{
    vd8 lanes = {0};
    int64_t h = 0;
    for (; h + 8 <= H; h += 8)
        lanes += __builtin_convertvector(*(const vf8 *)(dy + h), vd8) *
                 __builtin_convertvector(*(const vf8 *)(w + h), vd8) *
                 (__builtin_convertvector(*(const vf8 *)(x + h), vd8) - mean);
    double sum = sum_lanes(&lanes);
    for (; h < H; h++) sum += (double)dy[h] * (double)w[h] * ((double)x[h] - mean);
    return sum;
}

BL_CLONES static void center_row(int64_t H, float mean, float rstd, const float *x, const float *w,
                                 const float *b, float *y)
{
    OPS_IVDEP
    for (int64_t h = 0; h < H; h++)
        y[h] = bl_layernorm_element(x[h], mean, rstd, w[h], b ? b[h] : 0.0f);
}

static void layer_forward_item(void *arg, int64_t index, void *scratch)
{
    const bl_layernorm_forward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->H), end = bl_min_i64(a->T, (index + 1) * rows);
    for (int64_t t = index * rows; t < end; t++) {
        int64_t at = t * a->H;
        const float *x = ops_read(a->x, at, a->H, copy_of(scratch, COPY_X));
        float *y = ops_place(a->y, at, copy_of(scratch, COPY_OUT));
        float mean = (float)(plain_sum(a->H, x) / (double)a->H);
        double variance = centered_squares(a->H, (double)mean, x) / (double)a->H;
        float rstd = (float)(1.0 / sqrt(variance + a->eps));
        center_row(a->H, mean, rstd, x, a->w, a->b, y);
        ops_write(a->y, at, a->H, y);
        if (a->mean) a->mean[t] = mean;
        if (a->rstd) a->rstd[t] = rstd;
    }
}

bl_status ops_cpu_layernorm_forward(bl_stream *stream, const bl_layernorm_forward_args *args)
{
    bl_layernorm_forward_args a = *args;
    BL_TRY(check_row("layernorm forward", a.H, a.x.dtype));
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.H)), layer_forward_item, &a);
    return BL_OK;
}

BL_CLONES static void layer_gradient_row(int64_t H, bl_layernorm_row row, const float *dy,
                                         const float *w, const float *x, float *dx)
{
    OPS_IVDEP
    for (int64_t h = 0; h < H; h++) dx[h] = bl_layernorm_gradient_element(row, x[h], w[h], dy[h]);
}

BL_CLONES static void accumulate_layer_gradient_row(int64_t H, bl_layernorm_row row,
                                                    const float *dy, const float *w, const float *x,
                                                    float *dx)
{
    OPS_IVDEP
    for (int64_t h = 0; h < H; h++) dx[h] += bl_layernorm_gradient_element(row, x[h], w[h], dy[h]);
}

static void layer_backward_item(void *arg, int64_t index, void *scratch)
{
    const bl_layernorm_backward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->H), end = bl_min_i64(a->T, (index + 1) * rows);
    for (int64_t t = index * rows; t < end; t++) {
        int64_t at = t * a->H;
        const float *x = ops_read(a->x, at, a->H, copy_of(scratch, COPY_X)),
                    *dy = ops_read(a->dy, at, a->H, copy_of(scratch, COPY_DY));
        float *dx = place_gradient(a->dx, at, a->H, a->accumulate, scratch);
        double n = (double)a->H, rstd = (double)a->rstd[t], mean = (double)a->mean[t];
        bl_layernorm_row row = {
            a->mean[t], a->rstd[t], (float)(ops_dot(dy, a->w, a->H) / n),
            (float)(rstd * rstd * centered_triple_sum(a->H, mean, dy, a->w, x) / n)};
        if (a->accumulate)
            accumulate_layer_gradient_row(a->H, row, dy, a->w, x, dx);
        else
            layer_gradient_row(a->H, row, dy, a->w, x, dx);
        ops_write(a->dx, at, a->H, dx);
    }
}

bl_status ops_cpu_layernorm_backward(bl_stream *stream, const bl_layernorm_backward_args *args)
{
    bl_layernorm_backward_args a = *args;
    BL_TRY(check_row("layernorm backward", a.H, a.x.dtype));
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.H)), layer_backward_item,
                &a);
    return BL_OK;
}
