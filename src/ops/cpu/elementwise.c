/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise.c -- SwiGLU, GELU, sums, casts and the embedding on the CPU: rows are items of the
 * pool. */
#include "ops/elementwise.h"

#include "ops/cpu/ops_cpu.h"

BL_CLONES static void swiglu_row(int64_t I, const float *g, const float *u, float *h)
{
    OPS_IVDEP
    for (int64_t i = 0; i < I; i++) h[i] = bl_swiglu(g[i], u[i]);
}

/* The copies of one block of columns, in a worker's scratch. */
typedef struct block_copies {
    float in[3][OPS_BLOCK], out[2][OPS_BLOCK];
} block_copies;

static void swiglu_forward_item(void *arg, int64_t index, void *scratch)
{
    const bl_swiglu_forward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->I), end = bl_min_i64(a->T, (index + 1) * rows);
    block_copies *c = scratch;
    for (int64_t t = index * rows; t < end; t++)
        for (int64_t i = 0; i < a->I; i += OPS_BLOCK) {
            int64_t n = bl_min_i64(OPS_BLOCK, a->I - i), at = t * a->I + i, gate = at + t * a->I;
            float *h = ops_place(a->h, at, c->out[0]);
            swiglu_row(n, ops_read(a->gate_up, gate, n, c->in[0]),
                       ops_read(a->gate_up, gate + a->I, n, c->in[1]), h);
            ops_write(a->h, at, n, h);
        }
}

bl_status ops_cpu_swiglu_forward(bl_stream *stream, const bl_swiglu_forward_args *args)
{
    bl_swiglu_forward_args a = *args;
    a.T = ops_row_count(a.T, a.range);
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.I)), swiglu_forward_item,
                &a);
    return BL_OK;
}

BL_CLONES static void swiglu_gradient_row(int64_t I, const float *g, const float *u,
                                          const float *dh, float *dg, float *du)
{
    OPS_IVDEP
    for (int64_t i = 0; i < I; i++) {
        bl_swiglu_gradient d = bl_swiglu_gradient_of(g[i], u[i], dh[i]);
        dg[i] = d.dg;
        du[i] = d.du;
    }
}

static void swiglu_backward_item(void *arg, int64_t index, void *scratch)
{
    const bl_swiglu_backward_args *a = arg;
    int64_t rows = ops_rows_per_item(a->I), end = bl_min_i64(a->T, (index + 1) * rows);
    block_copies *c = scratch;
    for (int64_t t = index * rows; t < end; t++)
        for (int64_t i = 0; i < a->I; i += OPS_BLOCK) {
            int64_t n = bl_min_i64(OPS_BLOCK, a->I - i), at = t * a->I + i, gate = at + t * a->I;
            float *dg = ops_place(a->d_gate_up, gate, c->out[0]),
                  *du = ops_place(a->d_gate_up, gate + a->I, c->out[1]);
            swiglu_gradient_row(n, ops_read(a->gate_up, gate, n, c->in[0]),
                                ops_read(a->gate_up, gate + a->I, n, c->in[1]),
                                ops_read(a->dh, at, n, c->in[2]), dg, du);
            ops_write(a->d_gate_up, gate, n, dg);
            ops_write(a->d_gate_up, gate + a->I, n, du);
        }
}

bl_status ops_cpu_swiglu_backward(bl_stream *stream, const bl_swiglu_backward_args *args)
{
    bl_swiglu_backward_args a = *args;
    a.T = ops_row_count(a.T, a.range);
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.I)), swiglu_backward_item,
                &a);
    return BL_OK;
}

BL_CLONES static void gelu_erf_block(int64_t n, const float *u, float *h)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) h[i] = bl_gelu_erf(u[i]);
}

BL_CLONES static void gelu_tanh_block(int64_t n, const float *u, float *h)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) h[i] = bl_gelu_tanh(u[i]);
}

static void gelu_forward_item(void *arg, int64_t index, void *scratch)
{
    const bl_gelu_forward_args *a = arg;
    int64_t begin = index * OPS_ITEM_ELEMENTS, end = bl_min_i64(a->n, begin + OPS_ITEM_ELEMENTS);
    block_copies *c = scratch;
    for (int64_t at = begin; at < end; at += OPS_BLOCK) {
        int64_t n = bl_min_i64(OPS_BLOCK, end - at);
        const float *u = ops_read(a->u, at, n, c->in[0]);
        float *h = ops_place(a->h, at, c->out[0]);
        if (a->form == BL_GELU_ERF)
            gelu_erf_block(n, u, h);
        else
            gelu_tanh_block(n, u, h);
        ops_write(a->h, at, n, h);
    }
}

bl_status ops_cpu_gelu_forward(bl_stream *stream, const bl_gelu_forward_args *args)
{
    bl_gelu_forward_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.n, OPS_ITEM_ELEMENTS), gelu_forward_item, &a);
    return BL_OK;
}

BL_CLONES static void gelu_erf_gradient_block(int64_t n, const float *u, const float *dh, float *du)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) du[i] = bl_gelu_erf_gradient(u[i], dh[i]);
}

BL_CLONES static void gelu_tanh_gradient_block(int64_t n, const float *u, const float *dh,
                                               float *du)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) du[i] = bl_gelu_tanh_gradient(u[i], dh[i]);
}

static void gelu_backward_item(void *arg, int64_t index, void *scratch)
{
    const bl_gelu_backward_args *a = arg;
    int64_t begin = index * OPS_ITEM_ELEMENTS, end = bl_min_i64(a->n, begin + OPS_ITEM_ELEMENTS);
    block_copies *c = scratch;
    for (int64_t at = begin; at < end; at += OPS_BLOCK) {
        int64_t n = bl_min_i64(OPS_BLOCK, end - at);
        const float *u = ops_read(a->u, at, n, c->in[0]), *dh = ops_read(a->dh, at, n, c->in[1]);
        float *du = ops_place(a->du, at, c->out[0]);
        if (a->form == BL_GELU_ERF)
            gelu_erf_gradient_block(n, u, dh, du);
        else
            gelu_tanh_gradient_block(n, u, dh, du);
        ops_write(a->du, at, n, du);
    }
}

bl_status ops_cpu_gelu_backward(bl_stream *stream, const bl_gelu_backward_args *args)
{
    bl_gelu_backward_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.n, OPS_ITEM_ELEMENTS), gelu_backward_item, &a);
    return BL_OK;
}

BL_CLONES static void add_block(int64_t n, const float *a, const float *b, float *y)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

static void add_item(void *arg, int64_t index, void *scratch)
{
    const bl_add_args *a = arg;
    int64_t begin = index * OPS_ITEM_ELEMENTS, end = bl_min_i64(a->n, begin + OPS_ITEM_ELEMENTS);
    block_copies *c = scratch;
    for (int64_t at = begin; at < end; at += OPS_BLOCK) {
        int64_t n = bl_min_i64(OPS_BLOCK, end - at);
        float *y = ops_place(a->y, at, c->out[0]);
        add_block(n, ops_read(a->a, at, n, c->in[0]), ops_read(a->b, at, n, c->in[1]), y);
        ops_write(a->y, at, n, y);
    }
}

bl_status ops_cpu_add(bl_stream *stream, const bl_add_args *args)
{
    bl_add_args a = *args;
    int64_t n_items = bl_ceil_div(a.n, OPS_ITEM_ELEMENTS);
    block_copies copies;
    for (int64_t i = 0; a.without_workers && i < n_items; i++) add_item(&a, i, &copies);
    if (!a.without_workers) bl_pool_run(ops_pool(stream), n_items, add_item, &a);
    return BL_OK;
}

static void add_bias_item(void *arg, int64_t index, void *scratch)
{
    const bl_add_bias_args *a = arg;
    int64_t rows = ops_rows_per_item(a->N), end = bl_min_i64(a->T, (index + 1) * rows);
    block_copies *c = scratch;
    for (int64_t t = index * rows; t < end; t++)
        for (int64_t i = 0; i < a->N; i += OPS_BLOCK) {
            int64_t n = bl_min_i64(OPS_BLOCK, a->N - i), at = t * a->N + i;
            float *y = ops_place(a->y, at, c->out[0]);
            add_block(n, ops_read(a->y, at, n, c->in[0]), a->bias + i, y);
            ops_write(a->y, at, n, y);
        }
}

bl_status ops_cpu_add_bias(bl_stream *stream, const bl_add_bias_args *args)
{
    bl_add_bias_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.N)), add_bias_item, &a);
    return BL_OK;
}

BL_CLONES static void scale_block(int64_t n, float scale, const float *x, float *y)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) y[i] = scale * x[i];
}

static void scale_item(void *arg, int64_t index, void *scratch)
{
    const bl_scale_args *a = arg;
    int64_t begin = index * OPS_ITEM_ELEMENTS, end = bl_min_i64(a->n, begin + OPS_ITEM_ELEMENTS);
    block_copies *c = scratch;
    for (int64_t at = begin; at < end; at += OPS_BLOCK) {
        int64_t n = bl_min_i64(OPS_BLOCK, end - at);
        float *y = ops_place(a->y, at, c->out[0]);
        scale_block(n, a->scale, ops_read(a->x, at, n, c->in[0]), y);
        ops_write(a->y, at, n, y);
    }
}

bl_status ops_cpu_scale(bl_stream *stream, const bl_scale_args *args)
{
    bl_scale_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.n, OPS_ITEM_ELEMENTS), scale_item, &a);
    return BL_OK;
}

static void cast_item(void *arg, int64_t index, void *scratch)
{
    const bl_cast_args *a = arg;
    int64_t begin = index * OPS_ITEM_ELEMENTS, n = bl_min_i64(OPS_ITEM_ELEMENTS, a->n - begin);
    bl_tensor from = bl_tensor_at(a->x, begin), to = bl_tensor_at(a->y, begin);
    (void)scratch;
    if (from.dtype == to.dtype)
        memcpy(to.data, from.data, bl_tensor_bytes(to, n));
    else if (to.dtype == BL_F32)
        ops_widen(n, from.data, to.data);
    else
        ops_round(n, from.data, to.data);
}

bl_status ops_cpu_cast(bl_stream *stream, const bl_cast_args *args)
{
    bl_cast_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.n, OPS_ITEM_ELEMENTS), cast_item, &a);
    return BL_OK;
}

static void embedding_item(void *arg, int64_t index, void *scratch)
{
    const bl_embedding_args *a = arg;
    int64_t rows = ops_rows_per_item(a->H), end = bl_min_i64(a->T, (index + 1) * rows);
    block_copies *c = scratch;
    for (int64_t t = index * rows; t < end; t++)
        for (int64_t i = 0; i < a->H; i += OPS_BLOCK) {
            int64_t n = bl_min_i64(OPS_BLOCK, a->H - i), at = t * a->H + i;
            float *y = ops_place(a->y, at, c->out[0]);
            bl_dtype_to_f32(a->table.dtype, bl_tensor_at(a->table, a->ids[t] * a->H + i).data, y,
                            (size_t)n);
            ops_write(a->y, at, n, y);
        }
}

bl_status ops_cpu_embedding(bl_stream *stream, const bl_embedding_args *args)
{
    bl_embedding_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.H)), embedding_item, &a);
    return BL_OK;
}
