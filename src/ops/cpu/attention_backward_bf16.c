/* SPDX-License-Identifier: Apache-2.0 */
/* The backward of attention on bf16, whose sums are fp32: dq of a row adds up over all keys, and
 * dk, dv of a row over all queries, so each is gathered by the items of a separate pass, and
 * rounded once. An item of the first pass is a block of keys of one document and key/value head,
 * one of the second a block of queries of one document and head. P and dS are computed in both,
 * transposed in the first, so that they are the left operand of the products that follow;
 * equations: attention_backward.c.
 *
 * A block is taken in strips of rows whose S, dP, P and dS stay in the first-level cache. A strip
 * leaves out the columns that none of its rows sees: zeros would be added for them. */
#include <math.h>

#include "ops/attention.h"
#include "ops/cpu/bf16_kernels.h"
#include "ops/cpu/ops_cpu.h"

enum { BLOCK = 128, STRIP = 16, HEAD_MAX = 256 };

typedef struct backward_scratch {
    /* packed: as columns, and as rows */
    uint16_t first_t[HEAD_MAX * BLOCK], second_t[HEAD_MAX * BLOCK];
    uint16_t first[BLOCK * HEAD_MAX], second[BLOCK * HEAD_MAX];
    float p[STRIP * BLOCK], ds[STRIP * BLOCK]; /* at first S and dP */
    uint16_t p_bf16[STRIP * BLOCK], ds_bf16[STRIP * BLOCK];
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

/* p_i = exp(s_i - lse_i), ds_i = p_i (dp_i - delta_i), rounded; s and dp are where p and ds go. */
BL_CLONES static void gradient_of_key(int64_t n, const float *lse, const float *delta, float *p,
                                      float *ds, uint16_t *p_bf16, uint16_t *ds_bf16)
{
    int64_t i = 0;
    OPS_IVDEP
    for (int64_t k = 0; k < n; k++) {
        p[k] = ops_expf(p[k] - lse[k]);
        ds[k] = p[k] * (ds[k] - delta[k]);
    }
    for (; i + 16 <= n; i += 16) {
        ops_round_16(p + i, p_bf16 + i);
        ops_round_16(ds + i, ds_bf16 + i);
    }
    for (; i < n; i++) {
        p_bf16[i] = bl_f32_to_bf16(p[i]);
        ds_bf16[i] = bl_f32_to_bf16(ds[i]);
    }
}

/* The same of a query, without P. */
BL_CLONES static void gradient_of_query(int64_t n, float lse, float delta, float *p, float *ds,
                                        uint16_t *ds_bf16)
{
    int64_t i = 0;
    OPS_IVDEP
    for (int64_t k = 0; k < n; k++) {
        p[k] = ops_expf(p[k] - lse);
        ds[k] = p[k] * (ds[k] - delta);
    }
    for (; i + 16 <= n; i += 16) ops_round_16(ds + i, ds_bf16 + i);
    for (; i < n; i++) ds_bf16[i] = bl_f32_to_bf16(ds[i]);
}

/* Columns [begin, end) of a block that a row sees. */
typedef struct range {
    int64_t begin, end;
} range;

/* What a strip sees, from its first and its last row's: whole vectors from the left. */
static range join(range first, range last)
{
    return (range){first.begin / OPS_BF16_NARROW * OPS_BF16_NARROW, last.end};
}

/* Zeros around the columns of `r` in n columns, padded to a pair. */
static void clear_around(range r, int64_t n, uint16_t *row)
{
    memset(row, 0, (size_t)r.begin * sizeof *row);
    memset(row + r.end, 0, (size_t)(bl_round_up(n, 2) - r.end) * sizeof *row);
}

static void store_rows(bl_tensor out, int64_t at, int64_t stride, int64_t n_rows, int64_t d,
                       float scale, const float *sum, int64_t ld)
{
    for (int64_t r = 0; r < n_rows; r++)
        ops_scale_round(d, scale, sum + r * ld, ops_bf16(out) + at + r * stride);
}

/* The two left operands of a strip's scores: rows of n x d. */
typedef struct strip_rows {
    const uint16_t *of_s, *of_dp;
    int64_t ld_s, ld_dp;
} strip_rows;

/* S and dP of a strip of n rows against the columns `seen` of first_t and second_t. */
static void make_scores(const ops_bf16_kernels *kernels, const bl_attention_backward_args *a,
                        const strip_rows *rows, int64_t n, range seen, int64_t ld_t,
                        backward_scratch *s)
{
    ops_bf16_tile t = {.M = n,
                       .N = seen.end - seen.begin,
                       .n_pairs = a->d / 2,
                       .A = rows->of_s,
                       .lda = rows->ld_s,
                       .B = s->first_t + 2 * seen.begin,
                       .ldb = ld_t,
                       .C = s->p,
                       .ldc = BLOCK,
                       .alpha = scale_of(a)};

    kernels->multiply_tile(&t);
    t.A = rows->of_dp, t.lda = rows->ld_dp, t.B = s->second_t + 2 * seen.begin;
    t.C = s->ds, t.alpha = 1;
    kernels->multiply_tile(&t);
}

/* sum (n, d) = left (n, columns `seen`) times the rows `seen` of `packed`, or +=. */
static void add_product(const ops_bf16_kernels *kernels, int64_t d, int64_t n, range seen,
                        const uint16_t *left, const uint16_t *packed, bool is_first, float *sum)
{
    int64_t ld = bl_round_up(d, OPS_BF16_NARROW);
    ops_bf16_tile t = {.M = n,
                       .N = d,
                       .n_pairs = bl_ceil_div(seen.end - seen.begin, 2),
                       .A = left,
                       .lda = BLOCK,
                       .B = packed + seen.begin * ld,
                       .ldb = ld,
                       .C = sum,
                       .ldc = ld,
                       .alpha = 1,
                       .accumulate = !is_first};
    kernels->multiply_tile(&t);
}

/* ---- dk, dv ---- */

/* Queries [row, row + n_rows) of a head, and a block of keys. */
typedef struct key_step {
    const bl_attention_backward_args *a;
    const ops_bf16_kernels *kernels;
    const row_block *keys;
    int64_t kv_head, head, row, n_rows;
    bool is_first;
    backward_scratch *s;
} key_step;

/* The queries of the step that see a key of the block. */
static range queries_of(const key_step *x, int64_t key_index)
{
    int64_t key = x->keys->first + key_index - x->row,
            begin = bl_min_i64(x->n_rows, bl_max_i64(0, key));
    return (range){begin, bl_max_i64(begin, bl_min_i64(x->n_rows, key + x->keys->window))};
}

/* The part of dk and dv of the block's keys [at, at + n) that the step's queries give. */
static void add_to_keys(const key_step *x, int64_t at, int64_t n)
{
    const bl_attention_backward_args *a = x->a;
    backward_scratch *s = x->s;
    int64_t ld = bl_round_up(a->d, OPS_BF16_NARROW),
            at_kv = (x->keys->first + at) * a->kv_stride + x->kv_head * a->d;
    range seen = join(queries_of(x, at), queries_of(x, at + n - 1));
    strip_rows rows = {ops_bf16(a->k) + at_kv, ops_bf16(a->v) + at_kv, a->kv_stride, a->kv_stride};

    make_scores(x->kernels, a, &rows, n, seen, bl_round_up(x->n_rows, OPS_BF16_NARROW), s);
    for (int64_t j = 0; j < n; j++) {
        range q = queries_of(x, at + j);
        const float *lse = s->lse + q.begin, *delta = s->delta + q.begin;
        q = (range){q.begin - seen.begin, q.end - seen.begin};
        int64_t first = j * BLOCK + q.begin;
        gradient_of_key(q.end - q.begin, lse, delta, s->p + first, s->ds + first, s->p_bf16 + first,
                        s->ds_bf16 + first);
        clear_around(q, seen.end - seen.begin, s->p_bf16 + j * BLOCK);
        clear_around(q, seen.end - seen.begin, s->ds_bf16 + j * BLOCK);
    }
    add_product(x->kernels, a->d, n, seen, s->ds_bf16, s->first, x->is_first, s->sum[0] + at * ld);
    add_product(x->kernels, a->d, n, seen, s->p_bf16, s->second, x->is_first, s->sum[1] + at * ld);
}

static void add_queries(const key_step *x)
{
    const bl_attention_backward_args *a = x->a;
    const ops_bf16_kernels *kernels = x->kernels;
    backward_scratch *s = x->s;
    const uint16_t *q = ops_bf16(a->q) + x->row * a->q_stride + x->head * a->d,
                   *do_ = ops_bf16(a->do_) + x->row * a->o_stride + x->head * a->d;
    int64_t n = x->n_rows, ld = bl_round_up(a->d, OPS_BF16_NARROW),
            ld_t = bl_round_up(n, OPS_BF16_NARROW);

    for (int64_t i = 0; i < n; i++) {
        s->lse[i] = a->lse[(x->row + i) * a->n_heads + x->head];
        s->delta[i] = a->delta[(x->row + i) * a->n_heads + x->head];
    }
    kernels->pack_columns(q, a->q_stride, a->d, n, ld_t, s->first_t);
    kernels->pack_columns(do_, a->o_stride, a->d, n, ld_t, s->second_t);
    kernels->pack_rows(q, a->q_stride, n, a->d, ld, s->first);
    kernels->pack_rows(do_, a->o_stride, n, a->d, ld, s->second);
    for (int64_t at = 0; at < x->keys->n; at += STRIP)
        add_to_keys(x, at, bl_min_i64(STRIP, x->keys->n - at));
}

static void keys_item(void *arg, int64_t index, void *scratch)
{
    const bl_attention_backward_args *a = arg;
    int64_t kv_head = index % a->n_kv_heads, group = a->n_heads / a->n_kv_heads;
    row_block keys = block_of_slot(a, index / a->n_kv_heads);
    backward_scratch *s = scratch;
    int64_t end_row = bl_min_i64(keys.end, keys.first + keys.n - 1 + keys.window),
            ld = bl_round_up(a->d, OPS_BF16_NARROW),
            at = keys.first * a->kv_stride + kv_head * a->d;
    key_step x = {.a = a,
                  .kernels = ops_bf16_kernels_best(),
                  .keys = &keys,
                  .kv_head = kv_head,
                  .is_first = true,
                  .s = s};

    if (keys.n <= 0) return;
    ops_bf16_begin(x.kernels);
    for (x.head = kv_head * group; x.head < (kv_head + 1) * group; x.head++)
        for (x.row = keys.first; x.row < end_row; x.row += BLOCK) {
            x.n_rows = bl_min_i64(BLOCK, end_row - x.row);
            add_queries(&x);
            x.is_first = false;
        }
    ops_bf16_end(x.kernels);
    store_rows(a->dk, at, a->kv_stride, keys.n, a->d, scale_of(a), s->sum[0], ld);
    store_rows(a->dv, at, a->kv_stride, keys.n, a->d, 1.0f, s->sum[1], ld);
}

/* ---- dq ---- */

/* Keys [key, key + n_keys) of the document, and a block of queries of a head. */
typedef struct query_step {
    const bl_attention_backward_args *a;
    const ops_bf16_kernels *kernels;
    const row_block *rows;
    int64_t head, key, n_keys;
    bool is_first;
    backward_scratch *s;
} query_step;

/* The keys of the step that a query of the block sees. */
static range keys_of(const query_step *x, int64_t row_index)
{
    int64_t end = x->rows->first + row_index + 1 - x->key,
            begin = bl_max_i64(0, end - x->rows->window);
    end = bl_max_i64(0, bl_min_i64(x->n_keys, end));
    return (range){bl_min_i64(begin, end), end};
}

/* The part of dq of the block's queries [at, at + n) that the step's keys give. */
static void add_to_queries(const query_step *x, int64_t at, int64_t n)
{
    const bl_attention_backward_args *a = x->a;
    backward_scratch *s = x->s;
    int64_t ld = bl_round_up(a->d, OPS_BF16_NARROW), row = x->rows->first + at;
    range seen = join(keys_of(x, at), keys_of(x, at + n - 1));
    strip_rows rows = {ops_bf16(a->q) + row * a->q_stride + x->head * a->d,
                       ops_bf16(a->do_) + row * a->o_stride + x->head * a->d, a->q_stride,
                       a->o_stride};

    make_scores(x->kernels, a, &rows, n, seen, bl_round_up(x->n_keys, OPS_BF16_NARROW), s);
    for (int64_t r = 0; r < n; r++) {
        int64_t of_row = (row + r) * a->n_heads + x->head;
        range k = keys_of(x, at + r);
        k = (range){k.begin - seen.begin, k.end - seen.begin};
        int64_t first = r * BLOCK + k.begin;
        gradient_of_query(k.end - k.begin, a->lse[of_row], a->delta[of_row], s->p + first,
                          s->ds + first, s->ds_bf16 + first);
        clear_around(k, seen.end - seen.begin, s->ds_bf16 + r * BLOCK);
    }
    add_product(x->kernels, a->d, n, seen, s->ds_bf16, s->first, x->is_first, s->sum[0] + at * ld);
}

static void add_keys(const query_step *x)
{
    const bl_attention_backward_args *a = x->a;
    int64_t n = x->n_keys, ld_t = bl_round_up(n, OPS_BF16_NARROW),
            at_kv = x->key * a->kv_stride + x->head / (a->n_heads / a->n_kv_heads) * a->d;
    const uint16_t *k = ops_bf16(a->k) + at_kv, *v = ops_bf16(a->v) + at_kv;

    x->kernels->pack_columns(k, a->kv_stride, a->d, n, ld_t, x->s->first_t);
    x->kernels->pack_columns(v, a->kv_stride, a->d, n, ld_t, x->s->second_t);
    x->kernels->pack_rows(k, a->kv_stride, n, a->d, bl_round_up(a->d, OPS_BF16_NARROW),
                          x->s->first);
    for (int64_t at = 0; at < x->rows->n; at += STRIP)
        add_to_queries(x, at, bl_min_i64(STRIP, x->rows->n - at));
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
    query_step x = {.a = a,
                    .kernels = ops_bf16_kernels_best(),
                    .rows = &rows,
                    .head = head,
                    .is_first = true,
                    .s = s};
    ops_bf16_begin(x.kernels);
    for (x.key = first_key; x.key < end_key; x.key += BLOCK) {
        x.n_keys = bl_min_i64(BLOCK, end_key - x.key);
        add_keys(&x);
        x.is_first = false;
    }
    ops_bf16_end(x.kernels);
    store_rows(a->dq, rows.first * a->q_stride + head * a->d, a->q_stride, rows.n, a->d,
               scale_of(a), s->sum[0], bl_round_up(a->d, OPS_BF16_NARROW));
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
