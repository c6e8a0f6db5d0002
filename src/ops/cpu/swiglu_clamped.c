/* SPDX-License-Identifier: Apache-2.0 */
/* swiglu_clamped.c -- gpt-oss' gate on the CPU: rows are items of the pool. */
#include "ops/cpu/ops_cpu.h"
#include "ops/experts.h"

enum { PAIRS = OPS_BLOCK / 2 }; /* of gate and up, at a time */

typedef struct pair_copies {
    float pairs[OPS_BLOCK], h[PAIRS], out[OPS_BLOCK];
} pair_copies;

BL_CLONES static void forward_row(int64_t n, const bl_swiglu_clamped_forward_args *a,
                                  const float *pairs, float *h)
{
    float alpha = a->alpha, limit = a->limit;
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++)
        h[i] = bl_swiglu_clamped(pairs[2 * i], pairs[2 * i + 1], alpha, limit);
}

static void forward_item(void *arg, int64_t index, void *scratch)
{
    const bl_swiglu_clamped_forward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->I), end = bl_min_i64(a->T, (index + 1) * rows);
    pair_copies *c = scratch;

    for (int64_t t = index * rows; t < end; t++)
        for (int64_t i = 0; i < a->I; i += PAIRS) {
            int64_t n = bl_min_i64(PAIRS, a->I - i), at = t * a->I + i;
            float *h = ops_place(a->h, at, c->h);
            forward_row(n, a, ops_read(a->gate_up, 2 * at, 2 * n, c->pairs), h);
            ops_write(a->h, at, n, h);
        }
}

bl_status ops_cpu_swiglu_clamped_forward(bl_stream *stream,
                                         const bl_swiglu_clamped_forward_args *args)
{
    bl_swiglu_clamped_forward_args a = *args;
    a.T = ops_row_count(a.T, a.range);
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.I)), forward_item, &a);
    return BL_OK;
}

BL_CLONES static void backward_row(int64_t n, const bl_swiglu_clamped_backward_args *a,
                                   const float *pairs, const float *dh, float *d)
{
    float alpha = a->alpha, limit = a->limit;
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) {
        bl_swiglu_gradient one =
            bl_swiglu_clamped_gradient_of(pairs[2 * i], pairs[2 * i + 1], alpha, limit, dh[i]);
        d[2 * i] = one.dg;
        d[2 * i + 1] = one.du;
    }
}

static void backward_item(void *arg, int64_t index, void *scratch)
{
    const bl_swiglu_clamped_backward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->I), end = bl_min_i64(a->T, (index + 1) * rows);
    pair_copies *c = scratch;

    for (int64_t t = index * rows; t < end; t++)
        for (int64_t i = 0; i < a->I; i += PAIRS) {
            int64_t n = bl_min_i64(PAIRS, a->I - i), at = t * a->I + i;
            float *d = ops_place(a->d_gate_up, 2 * at, c->out);
            backward_row(n, a, ops_read(a->gate_up, 2 * at, 2 * n, c->pairs),
                         ops_read(a->dh, at, n, c->h), d);
            ops_write(a->d_gate_up, 2 * at, 2 * n, d);
        }
}

bl_status ops_cpu_swiglu_clamped_backward(bl_stream *stream,
                                          const bl_swiglu_clamped_backward_args *args)
{
    bl_swiglu_clamped_backward_args a = *args;
    a.T = ops_row_count(a.T, a.range);
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.I)), backward_item, &a);
    return BL_OK;
}
