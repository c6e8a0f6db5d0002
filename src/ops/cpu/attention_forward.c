/* SPDX-License-Identifier: Apache-2.0 */
/* attention_forward.c -- attention on the CPU.
 *
 * An item is one block of queries of one document and one head. It passes over the keys in blocks,
 * with the running maximum and denominator of each row (algorithm 1 of arXiv:2307.08691). In fp32
 * it gathers P V straight in o; in bf16 in fp32 sums that are rounded to o at the end, with P
 * rounded to bf16 for the product. In bf16 a block of keys is taken by strips of queries, whose
 * scores stay in the first-level cache, without the keys that none of them sees. */
#include "ops/attention.h"

#include <math.h>

#include "ops/cpu/bf16_kernels.h"
#include "ops/cpu/f32_kernels.h"
#include "ops/cpu/ops_cpu.h"

enum { QUERY_BLOCK = 128, KEY_BLOCK = 512, KEY_BLOCK_BF16 = 256, STRIP = 16, HEAD_MAX = 256 };

typedef struct softmax_state {
    float highest[QUERY_BLOCK];
    double denominator[QUERY_BLOCK];
} softmax_state;

/* Of consecutive rows. */
typedef struct softmax_rows {
    float *highest;
    double *denominator;
} softmax_rows;

static softmax_rows rows_from(softmax_state *state, int64_t row)
{
    return (softmax_rows){state->highest + row, state->denominator + row};
}

typedef struct forward_scratch {
    softmax_state state;
    float scores[QUERY_BLOCK * KEY_BLOCK];
    ops_f32_scratch product;
} forward_scratch;

typedef struct forward_scratch_bf16 {
    softmax_state state;
    float scores[STRIP * KEY_BLOCK_BF16], o[QUERY_BLOCK * HEAD_MAX];
    uint16_t p[STRIP * KEY_BLOCK_BF16];
    uint16_t k[HEAD_MAX * KEY_BLOCK_BF16], v[KEY_BLOCK_BF16 * HEAD_MAX]; /* packed */
} forward_scratch_bf16;

_Static_assert(sizeof(forward_scratch) <= BL_POOL_SCRATCH_BYTES &&
                   sizeof(forward_scratch_bf16) <= BL_POOL_SCRATCH_BYTES,
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

/* What an item computes: queries [first, first + n_rows) of the document that begins at token
 * `begin`, against the keys [first_key, n_keys) of it and of what came before. */
typedef struct forward_block {
    int64_t begin, first, n_rows, head;
    int64_t first_key, n_keys, window;
    int64_t at_q, at_kv, at_o; /* elements of q, of k and v at key 0, of o */
    float scale;
} forward_block;

/* Row r sees the last `window` of the scores (n_rows, n_keys; rows ld apart) before n_visible + r.
 * They become exp(s - highest), the others 0; the sums that o holds from earlier blocks are
 * rescaled to the new maximum. */
static void online_softmax(softmax_rows s, float *scores, int64_t ld, int64_t n_rows,
                           int64_t n_keys, int64_t n_visible, int64_t window, float *o,
                           int64_t o_stride, int64_t d)
{
    for (int64_t r = 0; r < n_rows; r++) {
        float *row = scores + r * ld;
        int64_t end = bl_max_i64(0, bl_min_i64(n_visible + r, n_keys)),
                begin = bl_min_i64(end, bl_max_i64(0, n_visible + r - window)), n = end - begin;
        memset(row, 0, (size_t)begin * sizeof *row);
        memset(row + end, 0, (size_t)(n_keys - end) * sizeof *row);
        if (n == 0) continue;
        row += begin;
        float before = s.highest[r], block = ops_max(row, n),
              highest = block > before ? block : before;
        double sum = ops_exp_sum(row, n, highest);
        if (highest != before) {
            float factor = ops_expf(before - highest);
            s.denominator[r] *= (double)factor;
            if (before != -INFINITY) ops_scale(d, factor, o + r * o_stride);
            s.highest[r] = highest;
        }
        s.denominator[r] += sum;
    }
}

/* Where row 0 of the block begins to be blind: the keys from here on are later ones. */
static int64_t visible_from(const bl_attention_forward_args *a, const forward_block *b, int64_t key)
{
    return b->first + a->position_offset + 1 - key;
}

/* The head's sink joins the denominators, once all keys have. */
static void add_sink(const bl_attention_forward_args *a, const forward_block *b, softmax_state *s)
{
    for (int64_t r = 0; a->sinks && r < b->n_rows; r++)
        s->denominator[r] += exp((double)a->sinks[b->head] - (double)s->highest[r]);
}

static void gather_f32(const bl_attention_forward_args *a, const forward_block *b,
                       forward_scratch *s)
{
    const float *q = ops_f32(a->q) + b->at_q, *k = ops_f32(a->k) + b->at_kv,
                *v = ops_f32(a->v) + b->at_kv;
    float *o = ops_f32(a->o) + b->at_o;

    for (int64_t key = b->first_key; key < b->n_keys; key += KEY_BLOCK) {
        int64_t n_keys = bl_min_i64(KEY_BLOCK, b->n_keys - key);
        ops_f32_gemm(false, true, b->n_rows, n_keys, a->d, b->scale, q, a->q_stride,
                     k + key * a->kv_stride, a->kv_stride, 0.0f, s->scores, n_keys, &s->product);
        online_softmax(rows_from(&s->state, 0), s->scores, n_keys, b->n_rows, n_keys,
                       visible_from(a, b, key), b->window, o, a->o_stride, a->d);
        ops_f32_gemm(false, false, b->n_rows, a->d, n_keys, 1.0f, s->scores, n_keys,
                     v + key * a->kv_stride, a->kv_stride, key == b->first_key ? 0.0f : 1.0f, o,
                     a->o_stride, &s->product);
    }
    add_sink(a, b, &s->state);
    for (int64_t r = 0; r < b->n_rows; r++)
        ops_scale(a->d, (float)(1.0 / s->state.denominator[r]), o + r * a->o_stride);
}

/* The pairs of an odd number of keys end with a probability 0. */
static void round_probabilities(forward_scratch_bf16 *s, int64_t n_rows, int64_t n_keys)
{
    for (int64_t r = 0; r < n_rows; r++) {
        uint16_t *p = s->p + r * KEY_BLOCK_BF16;
        ops_round(n_keys, s->scores + r * KEY_BLOCK_BF16, p);
        if (n_keys % 2) p[n_keys] = 0;
    }
}

/* Rows [row, row + n_rows) of the block against keys [key, key + n_keys), which are packed. */
static void gather_strip(const bl_attention_forward_args *a, const forward_block *b, int64_t key,
                         int64_t n_keys, int64_t row, int64_t n_rows, forward_scratch_bf16 *s)
{
    const ops_bf16_kernels *kernels = ops_bf16_kernels_best();
    int64_t n_visible = visible_from(a, b, key) + row, ld_o = bl_round_up(a->d, OPS_BF16_NARROW),
            end = bl_max_i64(0, bl_min_i64(n_visible + n_rows - 1, n_keys)),
            begin = bl_min_i64(end, bl_max_i64(0, n_visible - b->window)) / OPS_BF16_NARROW *
                    OPS_BF16_NARROW,
            n_seen = end - begin;
    float *o = s->o + row * ld_o;
    ops_bf16_tile t = {.M = n_rows,
                       .N = n_seen,
                       .n_pairs = a->d / 2,
                       .A = ops_bf16(a->q) + b->at_q + row * a->q_stride,
                       .lda = a->q_stride,
                       .B = s->k + 2 * begin,
                       .ldb = bl_round_up(n_keys, OPS_BF16_NARROW),
                       .C = s->scores,
                       .ldc = KEY_BLOCK_BF16,
                       .alpha = b->scale};

    kernels->multiply_tile(&t);
    online_softmax(rows_from(&s->state, row), s->scores, KEY_BLOCK_BF16, n_rows, n_seen,
                   n_visible - begin, b->window, o, ld_o, a->d);
    round_probabilities(s, n_rows, n_seen);
    t = (ops_bf16_tile){.M = n_rows,
                        .N = a->d,
                        .n_pairs = bl_ceil_div(n_seen, 2),
                        .A = s->p,
                        .lda = KEY_BLOCK_BF16,
                        .B = s->v + begin * ld_o,
                        .ldb = ld_o,
                        .C = o,
                        .ldc = ld_o,
                        .alpha = 1,
                        .accumulate = key != b->first_key};
    kernels->multiply_tile(&t);
}

static void gather_bf16(const bl_attention_forward_args *a, const forward_block *b,
                        forward_scratch_bf16 *s)
{
    const ops_bf16_kernels *kernels = ops_bf16_kernels_best();
    const uint16_t *k = ops_bf16(a->k) + b->at_kv, *v = ops_bf16(a->v) + b->at_kv;
    int64_t ld_o = bl_round_up(a->d, OPS_BF16_NARROW);

    ops_bf16_begin(kernels);
    for (int64_t key = b->first_key; key < b->n_keys; key += KEY_BLOCK_BF16) {
        int64_t n_keys = bl_min_i64(KEY_BLOCK_BF16, b->n_keys - key), at = key * a->kv_stride;
        kernels->pack_columns(k + at, a->kv_stride, a->d, n_keys,
                              bl_round_up(n_keys, OPS_BF16_NARROW), s->k);
        kernels->pack_rows(v + at, a->kv_stride, n_keys, a->d, ld_o, s->v);
        for (int64_t row = 0; row < b->n_rows; row += STRIP)
            gather_strip(a, b, key, n_keys, row, bl_min_i64(STRIP, b->n_rows - row), s);
    }
    ops_bf16_end(kernels);
    add_sink(a, b, &s->state);
    for (int64_t r = 0; r < b->n_rows; r++)
        ops_scale_round(a->d, (float)(1.0 / s->state.denominator[r]), s->o + r * ld_o,
                        ops_bf16(a->o) + b->at_o + r * a->o_stride);
}

/* False: the slot is empty. */
static bool find_block(const bl_attention_forward_args *a, int64_t index, forward_block *b)
{
    /* From the last block back: the long rows of a document first, the short ones even the ends
     * out. */
    int64_t n_slots = a->T / QUERY_BLOCK + a->n_documents, slot = n_slots - 1 - index / a->n_heads,
            document = document_of_slot(a, slot);

    b->head = index % a->n_heads;
    b->begin = a->cu_seqlens[document];
    b->first = (slot - first_slot(a->cu_seqlens, document)) * QUERY_BLOCK;
    b->n_rows = bl_min_i64(QUERY_BLOCK, a->cu_seqlens[document + 1] - b->begin - b->first);
    b->n_keys = b->first + b->n_rows + a->position_offset;
    b->window = a->window > 0 ? bl_min_i64(a->window, b->n_keys) : b->n_keys;
    b->first_key = bl_max_i64(0, b->first + a->position_offset + 1 - b->window);
    b->at_q = (b->begin + b->first) * a->q_stride + b->head * a->d;
    b->at_kv = b->begin * a->kv_stride + b->head / (a->n_heads / a->n_kv_heads) * a->d;
    b->at_o = (b->begin + b->first) * a->o_stride + b->head * a->d;
    b->scale = (float)(1.0 / sqrt((double)a->d));
    return b->n_rows > 0;
}

static void forward_item(void *arg, int64_t index, void *scratch)
{
    const bl_attention_forward_args *a = arg;
    softmax_state *s = scratch; /* both scratches begin with it */
    forward_block b;

    if (!find_block(a, index, &b)) return;
    for (int64_t r = 0; r < b.n_rows; r++) {
        s->highest[r] = -INFINITY;
        s->denominator[r] = 0;
    }
    if (a->q.dtype == BL_F32)
        gather_f32(a, &b, scratch);
    else
        gather_bf16(a, &b, scratch);
    for (int64_t r = 0; a->lse && r < b.n_rows; r++)
        a->lse[(b.begin + b.first + r) * a->n_heads + b.head] =
            (float)((double)s->highest[r] + log(s->denominator[r]));
}

/* o and lse of a row that belongs to no document. */
static void padding_item(void *arg, int64_t index, void *scratch)
{
    (void)scratch;
    const bl_attention_forward_args *a = arg;
    int64_t token = a->cu_seqlens[a->n_documents] + index;
    memset(bl_tensor_at(a->o, token * a->o_stride).data, 0,
           bl_tensor_bytes(a->o, a->n_heads * a->d));
    if (a->lse) memset(a->lse + token * a->n_heads, 0, (size_t)a->n_heads * sizeof *a->lse);
}

bl_status ops_cpu_attention_forward(bl_stream *stream, const bl_attention_forward_args *args)
{
    bl_attention_forward_args a = *args;
    if (a.T == 0) return BL_OK;
    BL_TRY(ops_cpu_check_head(a.d, a.q.dtype));
    if (a.n_documents > 0)
        bl_pool_run(ops_pool(stream), (a.T / QUERY_BLOCK + a.n_documents) * a.n_heads, forward_item,
                    &a);
    bl_pool_run(ops_pool(stream), a.T - a.cu_seqlens[a.n_documents], padding_item, &a);
    return BL_OK;
}
