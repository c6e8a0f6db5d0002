/* SPDX-License-Identifier: Apache-2.0 */
/* attention_backward.c -- gradients of attention on the CPU in fp32 (algorithm 2 of
 * arXiv:2307.08691). With P_ij = exp(s_ij - lse_i), delta_i = do_i . o_i, also where lse has a
 * sink, which has no value:
 *
 *   dv_j = sum_i P_ij do_i            dS_ij = P_ij (do_i . v_j - delta_i)
 *   dq_i = sum_j dS_ij k_j / sqrt(d)  dk_j = sum_i dS_ij q_i / sqrt(d)
 *
 * An item is one document and one key/value head with its query heads: all that dk, dv of this head
 * and dq of these heads get comes from it, in a fixed order, and P is computed once. */
#include "ops/attention.h"

#include <math.h>

#include "ops/cpu/f32_kernels.h"
#include "ops/cpu/ops_cpu.h"

enum { QUERY_BLOCK = 128, KEY_BLOCK = 128 };

typedef struct backward_scratch {
    float p[QUERY_BLOCK * KEY_BLOCK];
    float ds[QUERY_BLOCK * KEY_BLOCK];
    ops_f32_scratch product;
} backward_scratch;
_Static_assert(sizeof(backward_scratch) <= BL_POOL_SCRATCH_BYTES,
               "the tiles must fit a worker's scratch");

/* A rectangle of queries and keys of one head; all pointers at its first row. */
typedef struct backward_tile {
    int64_t n_rows, n_keys;
    int64_t n_visible, window; /* row r sees the last `window` of the keys before n_visible + r */
    const float *q, *do_, *k, *v, *lse, *delta;
    float *dq, *dk, *dv;
    int first_keys, first_rows; /* nothing yet in dq; nothing yet in dk, dv */
} backward_tile;

BL_CLONES static void probabilities_row(int64_t n, float lse, float *p)
{
    for (int64_t j = 0; j < n; j++) p[j] = ops_expf(p[j] - lse);
}

BL_CLONES static void score_gradient_row(int64_t n, float delta, const float *p, float *ds)
{
    OPS_IVDEP
    for (int64_t j = 0; j < n; j++) ds[j] = p[j] * (ds[j] - delta);
}

static void backward_one_tile(const bl_attention_backward_args *a, const backward_tile *t,
                              backward_scratch *s)
{
    float scale = (float)(1.0 / sqrt((double)a->d));
    ops_f32_gemm(false, true, t->n_rows, t->n_keys, a->d, scale, t->q, a->q_stride, t->k,
                 a->kv_stride, 0.0f, s->p, t->n_keys, &s->product);
    ops_f32_gemm(false, true, t->n_rows, t->n_keys, a->d, 1.0f, t->do_, a->o_stride, t->v,
                 a->kv_stride, 0.0f, s->ds, t->n_keys, &s->product);
    for (int64_t r = 0; r < t->n_rows; r++) {
        float *p = s->p + r * t->n_keys, *ds = s->ds + r * t->n_keys;
        int64_t end = bl_min_i64(t->n_visible + r, t->n_keys),
                begin = bl_min_i64(end, bl_max_i64(0, t->n_visible + r - t->window));
        probabilities_row(end - begin, t->lse[r * a->n_heads], p + begin);
        score_gradient_row(end - begin, t->delta[r * a->n_heads], p + begin, ds + begin);
        memset(p, 0, (size_t)begin * sizeof *p);
        memset(ds, 0, (size_t)begin * sizeof *ds);
        memset(p + end, 0, (size_t)(t->n_keys - end) * sizeof *p);
        memset(ds + end, 0, (size_t)(t->n_keys - end) * sizeof *ds);
    }
    float keep_rows = t->first_keys ? 0.0f : 1.0f, keep_keys = t->first_rows ? 0.0f : 1.0f;
    ops_f32_gemm(true, false, t->n_keys, a->d, t->n_rows, 1.0f, s->p, t->n_keys, t->do_,
                 a->o_stride, keep_keys, t->dv, a->kv_stride, &s->product);
    ops_f32_gemm(true, false, t->n_keys, a->d, t->n_rows, scale, s->ds, t->n_keys, t->q,
                 a->q_stride, keep_keys, t->dk, a->kv_stride, &s->product);
    ops_f32_gemm(false, false, t->n_rows, a->d, t->n_keys, scale, s->ds, t->n_keys, t->k,
                 a->kv_stride, keep_rows, t->dq, a->q_stride, &s->product);
}

static void fill_delta(const bl_attention_backward_args *a, int64_t begin, int64_t end,
                       int64_t first_head, int64_t n_heads)
{
    for (int64_t token = begin; token < end; token++) {
        for (int64_t head = first_head; head < first_head + n_heads; head++) {
            int64_t at = token * a->o_stride + head * a->d;
            a->delta[token * a->n_heads + head] =
                (float)ops_dot(ops_f32(a->do_) + at, ops_f32(a->o) + at, a->d);
        }
    }
}

static void backward_item(void *arg, int64_t index, void *scratch)
{
    const bl_attention_backward_args *a = arg;
    int64_t document = index / a->n_kv_heads, kv_head = index % a->n_kv_heads,
            group = a->n_heads / a->n_kv_heads;
    int64_t begin = a->cu_seqlens[document], end = a->cu_seqlens[document + 1],
            window = a->window > 0 ? bl_min_i64(a->window, end - begin) : end - begin;

    fill_delta(a, begin, end, kv_head * group, group);
    for (int64_t key = begin; key < end; key += KEY_BLOCK) {
        int64_t at_key = key * a->kv_stride + kv_head * a->d,
                n_keys = bl_min_i64(KEY_BLOCK, end - key),
                end_row = bl_min_i64(end, key + n_keys - 1 + window); /* of those that see a key */
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            for (int64_t row = key; row < end_row; row += QUERY_BLOCK) {
                int64_t at_q = row * a->q_stride + head * a->d, at_row = row * a->n_heads + head;
                backward_tile tile = {
                    .n_rows = bl_min_i64(QUERY_BLOCK, end - row),
                    .n_keys = n_keys,
                    .n_visible = row - key + 1,
                    .window = window,
                    .q = ops_f32(a->q) + at_q,
                    .do_ = ops_f32(a->do_) + row * a->o_stride + head * a->d,
                    .k = ops_f32(a->k) + at_key,
                    .v = ops_f32(a->v) + at_key,
                    .lse = a->lse + at_row,
                    .delta = a->delta + at_row,
                    .dq = ops_f32(a->dq) + at_q,
                    .dk = ops_f32(a->dk) + at_key,
                    .dv = ops_f32(a->dv) + at_key,
                    /* or no row of these sees the key before */
                    .first_keys = key == begin || row >= key - 1 + window,
                    .first_rows = row == key && head == kv_head * group,
                };
                backward_one_tile(a, &tile, scratch);
            }
        }
    }
}

/* dq, dk and dv of a row that belongs to no document. */
static void padding_item(void *arg, int64_t index, void *scratch)
{
    (void)scratch;
    const bl_attention_backward_args *a = arg;
    int64_t token = a->cu_seqlens[a->n_documents] + index;
    size_t kv_bytes = bl_tensor_bytes(a->dk, a->n_kv_heads * a->d);
    memset(bl_tensor_at(a->dq, token * a->q_stride).data, 0,
           bl_tensor_bytes(a->dq, a->n_heads * a->d));
    memset(bl_tensor_at(a->dk, token * a->kv_stride).data, 0, kv_bytes);
    memset(bl_tensor_at(a->dv, token * a->kv_stride).data, 0, kv_bytes);
}

bl_status ops_cpu_attention_backward(bl_stream *stream, const bl_attention_backward_args *args)
{
    bl_attention_backward_args a = *args;
    if (a.T == 0) return BL_OK;
    BL_TRY(ops_cpu_check_head(a.d, a.q.dtype));
    if (a.q.dtype == BL_F32)
        bl_pool_run(ops_pool(stream), a.n_documents * a.n_kv_heads, backward_item, &a);
    else
        ops_cpu_attention_backward_bf16(ops_pool(stream), &a);
    bl_pool_run(ops_pool(stream), a.T - a.cu_seqlens[a.n_documents], padding_item, &a);
    return BL_OK;
}
