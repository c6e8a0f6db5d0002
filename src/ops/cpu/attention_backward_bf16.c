/* SPDX-License-Identifier: Apache-2.0 */
/* The backward of attention on bf16, whose sums are fp32: dq of a row adds up over all keys, and
 * dk, dv of a row over all queries, so each is gathered by the items of a separate pass, and
 * rounded once. An item of the first pass is a block of keys of one document and key/value head,
 * one of the second a block of queries of one document and head. P and dS are computed in both,
 * transposed in the first, so that they are the left operand of the products that follow;
 * equations: attention_backward.c. */
#include <math.h>

#include "ops/attention.h"
#include "ops/cpu/bf16_tile.h"
#include "ops/cpu/ops_cpu.h"

enum { BLOCK = 128, HEAD_MAX = 256 };

typedef struct backward_scratch {
    uint32_t first_t[HEAD_MAX / 2 * BLOCK], second_t[HEAD_MAX / 2 * BLOCK]; /* packed transposed */
    uint32_t first[BLOCK / 2 * HEAD_MAX], second[BLOCK / 2 * HEAD_MAX];
    float p[BLOCK * BLOCK], ds[BLOCK * BLOCK];
    uint16_t p_bf16[BLOCK * BLOCK], ds_bf16[BLOCK * BLOCK];
    float sum[2][BLOCK * HEAD_MAX];
    float lse[BLOCK], delta[BLOCK];
} backward_scratch;
_Static_assert(sizeof(backward_scratch) <= BL_POOL_SCRATCH_BYTES,
               "the tiles must fit a worker's scratch");

/* A block of rows of a document. Blocks have numbers that grow with the document and need no table:
 * document D's are [first_slot(D), first_slot(D + 1)), of which the last may be empty. */
typedef struct row_block {
    int64_t begin, end; /* of the document, tokens */
    int64_t first, n;   /* rows of the block, the first as a token; n <= 0: empty */
    int64_t window;
} row_block;

static int64_t first_slot(const bl_attention_backward_args *a, int64_t document)
{
    return a->cu_seqlens[document] / BLOCK + document;
}

static row_block block_of_slot(const bl_attention_backward_args *a, int64_t slot)
{
    int64_t low = 0, high = a->n_documents - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (first_slot(a, middle) <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    row_block b = {.begin = a->cu_seqlens[low], .end = a->cu_seqlens[low + 1]};
    b.first = b.begin + (slot - first_slot(a, low)) * BLOCK;
    b.n = bl_min_i64(BLOCK, b.end - b.first);
    b.window = a->window > 0 ? bl_min_i64(a->window, b.end - b.begin) : b.end - b.begin;
    return b;
}

static float scale_of(const bl_attention_backward_args *a)
{
    return (float)(1.0 / sqrt((double)a->d));
}

/* p_i = exp(s_i - lse_i), ds_i = p_i (dp_i - delta_i); s and dp are where p and ds go. */
OPS_CLONES static void tile_gradient_row(int64_t n, const float *lse, const float *delta, float *p,
                                         float *ds)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) {
        p[i] = ops_expf(p[i] - lse[i]);
        ds[i] = p[i] * (ds[i] - delta[i]);
    }
}

OPS_CLONES static void tile_gradient_of_query(int64_t n, float lse, float delta, float *p,
                                              float *ds)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) {
        p[i] = ops_expf(p[i] - lse);
        ds[i] = p[i] * (ds[i] - delta);
    }
}

/* Columns [begin, end) of a row of n values are rounded, the others 0; n is padded to a pair. */
static void round_part(int64_t begin, int64_t end, int64_t n, const float *values, uint16_t *out)
{
    memset(out, 0, (size_t)bl_round_up(n, 2) * sizeof *out);
    ops_round(end - begin, values + begin, out + begin);
}

static void store_rows(bl_tensor out, int64_t at, int64_t stride, int64_t n_rows, int64_t d,
                       float scale, float *sum, int64_t ld)
{
    for (int64_t r = 0; r < n_rows; r++) {
        ops_scale(d, scale, sum + r * ld);
        ops_round(d, sum + r * ld, ops_bf16(out) + at + r * stride);
    }
}

/* ---- dk, dv ---- */

/* The part of dk and dv of `keys` that queries [row, row + n_rows) of a head give. */
static void add_queries(const bl_attention_backward_args *a, const row_block *keys, int64_t kv_head,
                        int64_t head, int64_t row, int64_t n_rows, bool is_first,
                        backward_scratch *s)
{
    const uint16_t *q = ops_bf16(a->q) + row * a->q_stride + head * a->d,
                   *do_ = ops_bf16(a->do_) + row * a->o_stride + head * a->d,
                   *k = ops_bf16(a->k) + keys->first * a->kv_stride + kv_head * a->d,
                   *v = ops_bf16(a->v) + keys->first * a->kv_stride + kv_head * a->d;
    int64_t ld = bl_round_up(a->d, OPS_TILE_COLUMNS), pairs = bl_ceil_div(n_rows, 2);

    for (int64_t i = 0; i < n_rows; i++) {
        s->lse[i] = a->lse[(row + i) * a->n_heads + head];
        s->delta[i] = a->delta[(row + i) * a->n_heads + head];
    }
    ops_bf16_pack_transposed(n_rows, a->d, q, a->q_stride, s->first_t, BLOCK);
    ops_bf16_pack_transposed(n_rows, a->d, do_, a->o_stride, s->second_t, BLOCK);
    ops_bf16_pack(n_rows, a->d, q, a->q_stride, s->first, ld);
    ops_bf16_pack(n_rows, a->d, do_, a->o_stride, s->second, ld);
    ops_bf16_tile(keys->n, n_rows, a->d / 2, scale_of(a), k, a->kv_stride, s->first_t, BLOCK, false,
                  s->p, BLOCK);
    ops_bf16_tile(keys->n, n_rows, a->d / 2, 1.0f, v, a->kv_stride, s->second_t, BLOCK, false,
                  s->ds, BLOCK);
    for (int64_t j = 0; j < keys->n; j++) {
        int64_t at = j * BLOCK, key = keys->first + j,
                begin = bl_min_i64(n_rows, bl_max_i64(0, key - row)),
                end = bl_max_i64(begin, bl_min_i64(n_rows, key + keys->window - row));
        tile_gradient_row(end - begin, s->lse + begin, s->delta + begin, s->p + at + begin,
                          s->ds + at + begin);
        round_part(begin, end, n_rows, s->p + at, s->p_bf16 + at);
        round_part(begin, end, n_rows, s->ds + at, s->ds_bf16 + at);
    }
    ops_bf16_tile(keys->n, a->d, pairs, 1.0f, s->ds_bf16, BLOCK, s->first, ld, !is_first, s->sum[0],
                  ld);
    ops_bf16_tile(keys->n, a->d, pairs, 1.0f, s->p_bf16, BLOCK, s->second, ld, !is_first, s->sum[1],
                  ld);
}

static void keys_item(void *arg, int64_t index, void *scratch)
{
    const bl_attention_backward_args *a = arg;
    int64_t kv_head = index % a->n_kv_heads, group = a->n_heads / a->n_kv_heads;
    row_block keys = block_of_slot(a, index / a->n_kv_heads);
    backward_scratch *s = scratch;
    int64_t end_row = bl_min_i64(keys.end, keys.first + keys.n - 1 + keys.window),
            ld = bl_round_up(a->d, OPS_TILE_COLUMNS),
            at = keys.first * a->kv_stride + kv_head * a->d;
    bool is_first = true;

    if (keys.n <= 0) return;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t row = keys.first; row < end_row; row += BLOCK) {
            add_queries(a, &keys, kv_head, head, row, bl_min_i64(BLOCK, end_row - row), is_first,
                        s);
            is_first = false;
        }
    store_rows(a->dk, at, a->kv_stride, keys.n, a->d, scale_of(a), s->sum[0], ld);
    store_rows(a->dv, at, a->kv_stride, keys.n, a->d, 1.0f, s->sum[1], ld);
}

/* ---- dq ---- */

/* The part of dq of `rows` that keys [key, key + n_keys) give. */
static void add_keys(const bl_attention_backward_args *a, const row_block *rows, int64_t head,
                     int64_t key, int64_t n_keys, bool is_first, backward_scratch *s)
{
    int64_t at_kv = key * a->kv_stride + head / (a->n_heads / a->n_kv_heads) * a->d,
            ld = bl_round_up(a->d, OPS_TILE_COLUMNS);
    const uint16_t *q = ops_bf16(a->q) + rows->first * a->q_stride + head * a->d,
                   *do_ = ops_bf16(a->do_) + rows->first * a->o_stride + head * a->d,
                   *k = ops_bf16(a->k) + at_kv, *v = ops_bf16(a->v) + at_kv;

    ops_bf16_pack_transposed(n_keys, a->d, k, a->kv_stride, s->first_t, BLOCK);
    ops_bf16_pack_transposed(n_keys, a->d, v, a->kv_stride, s->second_t, BLOCK);
    ops_bf16_pack(n_keys, a->d, k, a->kv_stride, s->first, ld);
    ops_bf16_tile(rows->n, n_keys, a->d / 2, scale_of(a), q, a->q_stride, s->first_t, BLOCK, false,
                  s->p, BLOCK);
    ops_bf16_tile(rows->n, n_keys, a->d / 2, 1.0f, do_, a->o_stride, s->second_t, BLOCK, false,
                  s->ds, BLOCK);
    for (int64_t r = 0; r < rows->n; r++) {
        int64_t at = r * BLOCK, row = rows->first + r,
                end = bl_max_i64(0, bl_min_i64(n_keys, row + 1 - key)),
                begin = bl_min_i64(end, bl_max_i64(0, row + 1 - rows->window - key));
        int64_t of_row = row * a->n_heads + head;
        tile_gradient_of_query(end - begin, a->lse[of_row], a->delta[of_row], s->p + at + begin,
                               s->ds + at + begin);
        round_part(begin, end, n_keys, s->ds + at, s->ds_bf16 + at);
    }
    ops_bf16_tile(rows->n, a->d, bl_ceil_div(n_keys, 2), 1.0f, s->ds_bf16, BLOCK, s->first, ld,
                  !is_first, s->sum[0], ld);
}

static void queries_item(void *arg, int64_t index, void *scratch)
{
    const bl_attention_backward_args *a = arg;
    int64_t head = index % a->n_heads, n_slots = a->T / BLOCK + a->n_documents;
    row_block rows = block_of_slot(a, n_slots - 1 - index / a->n_heads); /* long rows first */
    backward_scratch *s = scratch;
    int64_t end_key = rows.first + rows.n,
            first_key = bl_max_i64(rows.begin, rows.first + 1 - rows.window);

    if (rows.n <= 0) return;
    for (int64_t key = first_key; key < end_key; key += BLOCK)
        add_keys(a, &rows, head, key, bl_min_i64(BLOCK, end_key - key), key == first_key, s);
    store_rows(a->dq, rows.first * a->q_stride + head * a->d, a->q_stride, rows.n, a->d,
               scale_of(a), s->sum[0], bl_round_up(a->d, OPS_TILE_COLUMNS));
}

static void delta_item(void *arg, int64_t index, void *scratch)
{
    const bl_attention_backward_args *a = arg;
    float *do_ = scratch, *o = do_ + HEAD_MAX;

    for (int64_t head = 0; head < a->n_heads; head++) {
        int64_t at = index * a->o_stride + head * a->d;
        a->delta[index * a->n_heads + head] =
            (float)ops_dot(ops_read(a->do_, at, a->d, do_), ops_read(a->o, at, a->d, o), a->d);
    }
}

void ops_cpu_attention_backward_bf16(bl_pool *pool, const bl_attention_backward_args *args)
{
    bl_attention_backward_args a = *args;
    int64_t n_slots = a.n_documents > 0 ? a.T / BLOCK + a.n_documents : 0;

    bl_pool_run(pool, a.cu_seqlens[a.n_documents], delta_item, &a);
    bl_pool_run(pool, n_slots * a.n_kv_heads, keys_item, &a);
    bl_pool_run(pool, n_slots * a.n_heads, queries_item, &a);
}
