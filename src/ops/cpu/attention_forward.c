/* SPDX-License-Identifier: Apache-2.0 */
/* An item is one block of queries of one document and one head. It passes over the keys in blocks,
 * with the running maximum and denominator of each row (algorithm 1 of arXiv:2307.08691), and
 * gathers P V straight in o. */
#include "ops/attention.h"

#include <math.h>

#include "ops/cpu/blas.h"
#include "ops/cpu/ops_cpu.h"

enum { QUERY_BLOCK = 128, KEY_BLOCK = 512 };

typedef struct forward_scratch {
    float scores[QUERY_BLOCK * KEY_BLOCK];
    float highest[QUERY_BLOCK];
    double denominator[QUERY_BLOCK];
} forward_scratch;
_Static_assert(sizeof(forward_scratch) <= BL_POOL_SCRATCH_BYTES,
               "the tile must fit a worker's scratch");

/* Numbers for the query blocks of all documents that grow with the document and need no table:
 * document D's are [first_slot(D), first_slot(D + 1)), of which the last may be empty. */
static int64_t first_slot(const int32_t *cu_seqlens, int64_t document)
{
    return cu_seqlens[document] / QUERY_BLOCK + document;
}

static int64_t document_of_slot(const bl_attention_forward_args *a, int64_t slot)
{
    int64_t low = 0, high = a->n_documents - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (first_slot(a->cu_seqlens, middle) <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Row r sees the last `window` of the scores before n_visible + r, of which there are n_keys. They
 * become exp(s - highest), the others 0; the sums that o holds from earlier blocks are rescaled to
 * the new maximum. */
static void online_softmax(forward_scratch *s, int64_t n_rows, int64_t n_keys, int64_t n_visible,
                           int64_t window, float *o, int64_t o_stride, int64_t d)
{
    for (int64_t r = 0; r < n_rows; r++) {
        float *row = s->scores + r * n_keys;
        int64_t end = bl_max_i64(0, bl_min_i64(n_visible + r, n_keys)),
                begin = bl_min_i64(end, bl_max_i64(0, n_visible + r - window)), n = end - begin;
        memset(row, 0, (size_t)begin * sizeof *row);
        memset(row + end, 0, (size_t)(n_keys - end) * sizeof *row);
        if (n == 0) continue;
        row += begin;
        float before = s->highest[r], block = ops_max(row, n),
              highest = block > before ? block : before;
        double sum = ops_exp_sum(row, n, highest);
        if (highest != before) {
            float factor = ops_expf(before - highest);
            s->denominator[r] *= (double)factor;
            if (before != -INFINITY) ops_scale(d, factor, o + r * o_stride);
            s->highest[r] = highest;
        }
        s->denominator[r] += sum;
    }
}

static void forward_item(void *arg, int64_t index, void *scratch)
{
    const bl_attention_forward_args *a = arg;
    forward_scratch *s = scratch;
    /* From the last block back: the long rows of a document first, the short ones even the ends
     * out. */
    int64_t n_slots = a->T / QUERY_BLOCK + a->n_documents, slot = n_slots - 1 - index / a->n_heads,
            head = index % a->n_heads;
    int64_t document = document_of_slot(a, slot), begin = a->cu_seqlens[document];
    int64_t first = (slot - first_slot(a->cu_seqlens, document)) *
                    QUERY_BLOCK; /* query, counted in the document */
    int64_t n_rows = bl_min_i64(QUERY_BLOCK, a->cu_seqlens[document + 1] - begin - first);
    if (n_rows <= 0) return;

    const float *q = ops_f32(a->q) + (begin + first) * a->q_stride + head * a->d;
    int64_t at_kv = begin * a->kv_stride + head / (a->n_heads / a->n_kv_heads) * a->d;
    const float *k = ops_f32(a->k) + at_kv, *v = ops_f32(a->v) + at_kv;
    float *o = ops_f32(a->o) + (begin + first) * a->o_stride + head * a->d;
    float scale = (float)(1.0 / sqrt((double)a->d));
    int64_t n_all_keys = first + n_rows + a->position_offset,
            window = a->window > 0 ? bl_min_i64(a->window, n_all_keys) : n_all_keys,
            first_key = bl_max_i64(0, first + a->position_offset + 1 - window);
    for (int64_t r = 0; r < n_rows; r++) {
        s->highest[r] = -INFINITY;
        s->denominator[r] = 0;
    }
    for (int64_t key = first_key; key < n_all_keys; key += KEY_BLOCK) {
        int64_t n_keys = bl_min_i64(KEY_BLOCK, n_all_keys - key);
        ops_blas_sgemm(false, true, n_rows, n_keys, a->d, scale, q, a->q_stride,
                       k + key * a->kv_stride, a->kv_stride, 0.0f, s->scores, n_keys);
        online_softmax(s, n_rows, n_keys, first + a->position_offset + 1 - key, window, o,
                       a->o_stride, a->d);
        ops_blas_sgemm(false, false, n_rows, a->d, n_keys, 1.0f, s->scores, n_keys,
                       v + key * a->kv_stride, a->kv_stride, key == first_key ? 0.0f : 1.0f, o,
                       a->o_stride);
    }
    for (int64_t r = 0; r < n_rows; r++) {
        ops_scale(a->d, (float)(1.0 / s->denominator[r]), o + r * a->o_stride);
        if (a->lse)
            a->lse[(begin + first + r) * a->n_heads + head] =
                (float)((double)s->highest[r] + log(s->denominator[r]));
    }
}

/* o and lse of a row that belongs to no document. */
static void padding_item(void *arg, int64_t index, void *scratch)
{
    (void)scratch;
    const bl_attention_forward_args *a = arg;
    int64_t token = a->cu_seqlens[a->n_documents] + index;
    memset(ops_f32(a->o) + token * a->o_stride, 0, (size_t)(a->n_heads * a->d) * sizeof(float));
    if (a->lse) memset(a->lse + token * a->n_heads, 0, (size_t)a->n_heads * sizeof *a->lse);
}

bl_status ops_cpu_attention_forward(bl_stream *stream, const bl_attention_forward_args *args)
{
    bl_attention_forward_args a = *args;
    if (a.T == 0) return BL_OK;
    if (a.n_documents > 0)
        bl_pool_run(ops_pool(stream), (a.T / QUERY_BLOCK + a.n_documents) * a.n_heads, forward_item,
                    &a);
    bl_pool_run(ops_pool(stream), a.T - a.cu_seqlens[a.n_documents], padding_item, &a);
    return BL_OK;
}
