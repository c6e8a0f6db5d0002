/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's attention against the formulas in double: odd lengths, documents, groups of heads, every
 * width of head, subsets of heads, strides and alignments, older keys, windows, padding behind the
 * last document, large scores.
 *
 * How far results may be off. u = 2^-24 rounds an fp32, w = 2^-8 a bf16. A tensor core multiplies
 * exactly and adds with truncation at the largest addend's last bit (Fasi et al. 2021, "Numerical
 * behavior of NVIDIA tensor cores"): nine addends, each off by 2 u of the sum of magnitudes, for
 * every 8 terms, so a sum of n terms is off by at most (n / 8) 9 (2 u) < 3 n u of the sum of its
 * terms' magnitudes: SUM(n).
 *   s_ij = q_i . k_j scale: off by SUM(d) |q_i| . |k_j| scale, and 8 u |s_ij| for the scale,
 *     log2(e), the product with them and the difference in the exponent. e_i: the largest of a row.
 *   p_ij = exp(s_ij - most) / sum: relatively by 2 e_i, 8 u for exp and the division, n u for the
 *     sum. Where p_ij is below 2^-126 it may be 0: 2^-120 on top of all.
 *   o_i = sum p_ij v_j: w for p, its error above, SUM(n), all of sum p_ij |v_j|; and w |o| to write
 *     it.
 *   lse_i = most + log(sum): e_i + (8 + n + 2 |lse|) u.
 * Backward takes o and lse as they are, so p_ij = exp(s_ij - lse_i) is off by e_i + (8 + 4 |lse|) u
 * =: r_i.
 *   dv_j = sum p_ij do_i: (w + r_i + SUM(n)) of sum p_ij |do_i|, and w |dv|.
 *   ds_ij = p_ij (do_i . v_j - delta_i): relatively by w + r_i + 4 u; and by SUM(d) p_ij |do_i| .
 *     |v_j| + 12 u p_ij |do_i| . |o_i| (delta: fp32 sums of eight).
 *   dq_i = sum ds_ij k_j scale, dk_j = sum ds_ij q_i scale: those times |k_j|, |q_i|; SUM(n) of the
 *     sum of magnitudes; w of the result.
 * n: keys or, for dk and dv, queries of all heads of the group. */
#include "gpu_test.h"

#include "ops/attention.h"

enum { DOCUMENTS_MAX = 40 };

/* Tokens before `n_padding` of them belong to documents, of the lengths given (-1: none more);
 * many: of 0 to 6 tokens. A call gets the key heads [first_kv, first_kv + n_kv) of n_all_kv, with
 * their `group` query heads. Rows are `gap` elements longer than their heads, buffers begin `shift`
 * elements past an aligned address. */
typedef struct attention_shape {
    const char *name;
    int64_t group, first_kv, n_kv, n_all_kv, d, position_offset, lengths[8];
    int64_t n_padding, gap;
    int shift, is_many, is_large;
    int64_t window; /* 0: none */
} attention_shape;

static const attention_shape attention_shapes[] = {
    {"one token", 1, 0, 1, 1, 128, 0, {1, -1}, 0, 0, 0, 0, 0, 0},
    {"stories260K", 2, 0, 2, 2, 8, 0, {40, 65, -1}, 23, 0, 0, 0, 0, 0},
    {"127, grouped by 8", 8, 0, 1, 1, 32, 0, {127, -1}, 1, 0, 0, 0, 0, 0},
    {"128", 1, 0, 1, 1, 64, 0, {128, -1}, 0, 8, 8, 0, 0, 0},
    {"129", 2, 0, 1, 1, 96, 0, {129, -1}, 3, 0, 0, 0, 0, 0},
    {"130, d 128", 1, 0, 1, 1, 128, 0, {130, -1}, 0, 0, 0, 0, 0, 0},
    {"257", 2, 0, 1, 1, 16, 0, {257, -1}, 0, 0, 0, 0, 0, 0},
    {"empty documents", 2, 0, 2, 2, 48, 0, {0, 1, 0, 68, 0, 60, 0, -1}, 2, 0, 0, 0, 0, 0},
    {"only padding", 1, 0, 1, 1, 16, 0, {0, -1}, 70, 0, 0, 0, 0, 0},
    {"no document", 1, 0, 1, 1, 16, 0, {-1}, 3, 0, 0, 0, 0, 0},
    {"many short documents", 4, 0, 1, 1, 16, 0, {-1}, 40, 0, 0, 1, 0, 0},
    {"many short documents, d 128", 1, 0, 1, 1, 128, 0, {-1}, 7, 0, 0, 1, 0, 0},
    {"a subset of heads", 2, 1, 2, 4, 80, 0, {70, 30, -1}, 28, 0, 0, 0, 0, 0},
    {"rows not aligned", 2, 0, 1, 1, 64, 0, {75, -1}, 5, 3, 0, 0, 0, 0},
    {"buffers not aligned", 2, 1, 1, 2, 32, 0, {75, -1}, 5, 0, 1, 0, 0, 0},
    {"d 20", 2, 0, 2, 2, 20, 0, {33, 40, -1}, 0, 0, 0, 0, 0, 0},
    {"d 1", 1, 0, 2, 2, 1, 0, {9, -1}, 1, 0, 0, 0, 0, 0},
    {"d 256", 1, 0, 1, 1, 256, 0, {70, 30, -1}, 0, 0, 0, 0, 0, 0},
    {"d 203", 1, 0, 1, 1, 203, 0, {66, -1}, 1, 2, 3, 0, 0, 0},
    {"large scores", 2, 0, 1, 1, 64, 0, {150, 20, -1}, 2, 0, 0, 0, 1, 0},
    {"the next token", 4, 0, 2, 2, 64, 130, {1, -1}, 0, 0, 0, 0, 0, 0},
    {"five more tokens", 2, 1, 1, 2, 128, 63, {5, -1}, 3, 0, 0, 0, 0, 0},
    {"a prompt's second half", 2, 0, 1, 1, 16, 94, {140, -1}, 0, 0, 0, 0, 0, 0},
    {"window 1", 2, 0, 1, 1, 32, 0, {70, 3, -1}, 2, 0, 0, 0, 0, 1},
    {"window 63", 2, 0, 1, 1, 64, 0, {140, 75, -1}, 3, 0, 0, 0, 0, 63},
    {"window 64", 1, 0, 1, 1, 128, 0, {200, -1}, 0, 0, 0, 0, 0, 64},
    {"window 65, rows not aligned", 2, 0, 1, 1, 20, 0, {9, 190, -1}, 0, 3, 0, 0, 0, 65},
    {"window 17, d 256", 1, 0, 1, 1, 256, 0, {70, 30, -1}, 1, 0, 0, 0, 0, 17},
    {"window 3, short documents", 4, 0, 1, 1, 16, 0, {-1}, 40, 0, 0, 1, 0, 3},
    {"a window of the whole document", 1, 0, 1, 1, 16, 0, {100, -1}, 0, 0, 0, 0, 0, 100},
    {"a window of all", 1, 0, 1, 1, 16, 0, {100, -1}, 0, 0, 0, 0, 0, INT64_MAX},
    {"the next token, window 50", 4, 0, 2, 2, 64, 130, {1, -1}, 0, 0, 0, 0, 0, 50},
    {"five more tokens, window 64", 2, 1, 1, 2, 128, 163, {5, -1}, 3, 0, 0, 0, 0, 64},
    {"a prompt's second half, window 90", 2, 0, 1, 1, 16, 94, {140, -1}, 0, 0, 0, 0, 0, 90},
#ifndef BALLAST_CUDA_EMULATED
    {"long", 4, 0, 2, 2, 128, 0, {1100, 17, 531, -1}, 128, 0, 0, 0, 0, 0},
    {"long, d 64", 2, 0, 2, 2, 64, 0, {1537, -1}, 0, 0, 0, 0, 0, 0},
    {"long, window 512", 4, 0, 2, 2, 128, 0, {1100, 17, 531, -1}, 128, 0, 0, 0, 0, 512},
#endif
};

static bl_status launch_forward(bl_stream *stream, const void *args)
{
    return bl_attention_forward(stream, args);
}

static bl_status launch_backward(bl_stream *stream, const void *args)
{
    return bl_attention_backward(stream, args);
}

typedef struct problem {
    const attention_shape *s;
    int32_t cu[DOCUMENTS_MAX + 1];
    int64_t n_documents, T, n_tokens, n_heads,
        n_all_heads;                                 /* T: with the padding; n_heads of the call */
    int64_t fused, o_stride, at_q, at_k, at_v, at_o; /* of the call's first heads */
    buffer qkv, o, lse, d_o, d_qkv, delta, cu_seqlens;
    float *in, *in_do; /* as the GPU has them; padding is NaN */
} problem;

/* n rows of `stride`: random, of bf16's numbers; NaN from row `end` on. */
static float *rows_input(gpu_test *t, int64_t n, int64_t end, int64_t stride, int shift,
                         uint64_t seed, buffer *b)
{
    float *values = bf16_inputs(t, n * stride, shift, seed, 1.0f, b);
    memset(b->initial + end * stride * 2, POISON, (size_t)((n - end) * stride * 2));
    return values;
}

/* Scores around 7e4 / 8 and -7e4 / 8 that differ by less than 2 among themselves: q is 1 in two
 * columns; k is +-71,680 in one and a multiple of 1/4 below 8 in the other, so that fp32 holds each
 * sum as it is, truncated or not. */
static void make_large(problem *p)
{
    for (int64_t i = 0; i < p->n_tokens * p->fused; i++) {
        int64_t column = i % p->fused, of_head = column % p->s->d;
        if (column >= p->at_v) continue;
        if (column < p->at_k)
            p->in[i] = of_head == 3 || of_head == 4 ? 1.0f : 0.0f;
        else if (of_head == 3)
            p->in[i] = i / p->fused % 3 == 0 ? 71680.0f : -71680.0f;
        else if (of_head == 4)
            p->in[i] = roundf(p->in[i] * 32.0f) / 4.0f;
        uint16_t bits = bl_f32_to_bf16(p->in[i]);
        assert_true(bl_bf16_to_f32(bits) == p->in[i]);
        memcpy(p->qkv.initial + 2 * i, &bits, 2);
    }
}

static problem problem_create(gpu_test *t, const attention_shape *s, uint64_t seed)
{
    problem p = {.s = s, .n_heads = s->group * s->n_kv, .n_all_heads = s->group * s->n_all_kv};
    if (s->is_many)
        for (; p.n_documents < DOCUMENTS_MAX; p.n_documents++)
            p.cu[p.n_documents + 1] = p.cu[p.n_documents] + (int32_t)(p.n_documents * 5 % 7);
    else
        for (; s->lengths[p.n_documents] >= 0; p.n_documents++)
            p.cu[p.n_documents + 1] = p.cu[p.n_documents] + (int32_t)s->lengths[p.n_documents];
    p.n_tokens = p.cu[p.n_documents];
    p.T = p.n_tokens + s->n_padding;
    p.fused = (p.n_all_heads + 2 * s->n_all_kv) * s->d + s->gap;
    p.o_stride = p.n_all_heads * s->d + s->gap;
    p.at_q = p.at_o = s->first_kv * s->group * s->d;
    p.at_k = (p.n_all_heads + s->first_kv) * s->d;
    p.at_v = p.at_k + s->n_all_kv * s->d;
    p.in = rows_input(t, s->position_offset + p.T, s->position_offset + p.n_tokens, p.fused,
                      s->shift, seed, &p.qkv);
    p.in_do = rows_input(t, p.T, p.n_tokens, p.o_stride, s->shift, seed + 1, &p.d_o);
    size_t shift_bytes = (size_t)s->shift * 2;
    p.o = buffer_create(t, (size_t)(p.T * p.o_stride) * 2, shift_bytes);
    p.d_qkv = buffer_create(t, (size_t)(p.T * p.fused) * 2, shift_bytes);
    p.lse = buffer_create(t, (size_t)(p.T * p.n_heads) * 4, 0);
    p.delta = buffer_create(t, (size_t)(p.T * p.n_heads) * 4, 0);
    p.cu_seqlens = bytes_input(t, p.cu, (size_t)(p.n_documents + 1) * 4);
    if (s->is_large) make_large(&p);
    return p;
}

static void problem_destroy(gpu_test *t, problem *p)
{
    buffer *all[] = {&p->qkv, &p->o, &p->lse, &p->d_o, &p->d_qkv, &p->delta, &p->cu_seqlens};
    for (size_t i = 0; i < BL_COUNT(all); i++) buffer_free(t, all[i]);
    free(p->in), free(p->in_do);
}

static void run_forward(gpu_test *t, problem *p)
{
    bl_tensor qkv = gpu_bf16(&p->qkv);
    bl_attention_forward_args args = {
        .T = p->T,
        .n_heads = p->n_heads,
        .n_kv_heads = p->s->n_kv,
        .d = p->s->d,
        .n_documents = p->n_documents,
        .position_offset = p->s->position_offset,
        .window = p->s->window,
        .q_stride = p->fused,
        .kv_stride = p->fused,
        .o_stride = p->o_stride,
        .cu_seqlens = (int32_t *)p->cu_seqlens.gpu,
        .q = bl_tensor_at(qkv, p->s->position_offset * p->fused + p->at_q),
        .k = bl_tensor_at(qkv, p->at_k),
        .v = bl_tensor_at(qkv, p->at_v),
        .o = bl_tensor_at(gpu_bf16(&p->o), p->at_o),
        .lse = (float *)p->lse.gpu};
    run_twice(t, launch_forward, &args, (buffer *[]){&p->qkv, &p->o, &p->lse, &p->cu_seqlens}, 4);
}

/* With the o and lse that forward made. */
static void run_backward(gpu_test *t, problem *p)
{
    bl_tensor qkv = gpu_bf16(&p->qkv), d_qkv = gpu_bf16(&p->d_qkv);
    memcpy(p->o.initial, p->o.result, p->o.bytes);
    memcpy(p->lse.initial, p->lse.result, p->lse.bytes);
    bl_attention_backward_args args = {.T = p->T,
                                       .n_heads = p->n_heads,
                                       .n_kv_heads = p->s->n_kv,
                                       .d = p->s->d,
                                       .n_documents = p->n_documents,
                                       .window = p->s->window,
                                       .q_stride = p->fused,
                                       .kv_stride = p->fused,
                                       .o_stride = p->o_stride,
                                       .cu_seqlens = (int32_t *)p->cu_seqlens.gpu,
                                       .q = bl_tensor_at(qkv, p->at_q),
                                       .k = bl_tensor_at(qkv, p->at_k),
                                       .v = bl_tensor_at(qkv, p->at_v),
                                       .o = bl_tensor_at(gpu_bf16(&p->o), p->at_o),
                                       .do_ = bl_tensor_at(gpu_bf16(&p->d_o), p->at_o),
                                       .dq = bl_tensor_at(d_qkv, p->at_q),
                                       .dk = bl_tensor_at(d_qkv, p->at_k),
                                       .dv = bl_tensor_at(d_qkv, p->at_v),
                                       .lse = (float *)p->lse.gpu,
                                       .delta = (float *)p->delta.gpu};
    run_twice(t, launch_backward, &args,
              (buffer *[]){&p->qkv, &p->o, &p->lse, &p->d_o, &p->d_qkv, &p->delta, &p->cu_seqlens},
              7);
}

/* ---- the reference: values and how far they may be off, laid out as the results ---- */

typedef struct expected {
    double *o, *o_slack, *lse, *lse_slack, *d_qkv, *d_slack,
        *d_terms; /* d_terms: sums of magnitudes */
} expected;

static double sum_error(int64_t n)
{
    return 3 * (double)n * U;
}

/* One query of one head, keys [begin, end) of the fused buffer; s and p of the keys, and the row's
 * e_i. */
typedef struct query_row {
    int64_t token, head, begin, end; /* head of the call */
    const float *q, *k, *v;          /* the first key's */
    double *s, *p, most_error;
} query_row;

static query_row row_scores(const problem *p, int64_t token, int64_t head, double *s,
                            double *weights)
{
    const attention_shape *call = p->s;
    int64_t d = call->d, document = 0, at_kv = head / call->group * d,
            offset = call->position_offset;
    while (p->cu[document + 1] <= token) document++;
    query_row row = {.token = token,
                     .head = head,
                     .begin = p->cu[document],
                     .end = token + offset + 1,
                     .q = p->in + (offset + token) * p->fused + p->at_q + head * d,
                     .s = s,
                     .p = weights};
    if (call->window > 0 && row.end - row.begin > call->window) row.begin = row.end - call->window;
    row.k = p->in + row.begin * p->fused + p->at_k + at_kv;
    row.v = p->in + row.begin * p->fused + p->at_v + at_kv;
    for (int64_t j = 0; j < row.end - row.begin; j++) {
        const float *k = row.k + j * p->fused;
        double sum = 0, terms = 0;
        for (int64_t c = 0; c < d; c++) {
            double term = (double)row.q[c] * (double)k[c];
            sum += term;
            terms += fabs(term);
        }
        s[j] = sum / sqrt((double)d);
        if (call->is_large) terms = 0; /* exact */
        row.most_error =
            fmax(row.most_error, sum_error(d) * terms / sqrt((double)d) + 8 * U * fabs(s[j]));
    }
    return row;
}

static void expect_forward(const problem *p, query_row row, const expected *x)
{
    int64_t n = row.end - row.begin, d = p->s->d,
            at = row.token * p->o_stride + p->at_o + row.head * d,
            at_lse = row.token * p->n_heads + row.head;
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) most = fmax(most, row.s[j]);
    for (int64_t j = 0; j < n; j++) sum += row.p[j] = exp(row.s[j] - most);
    double relative = BF16 + 2 * row.most_error + (8 + (double)n) * U + sum_error(n);
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < d; c++) {
            double term = row.p[j] / sum * (double)row.v[j * p->fused + c];
            x->o[at + c] += term;
            x->o_slack[at + c] += fabs(term);
        }
    for (int64_t c = 0; c < d; c++)
        x->o_slack[at + c] = relative * x->o_slack[at + c] * (1 + BF16) + BF16 * fabs(x->o[at + c]);
    x->lse[at_lse] = most + log(sum);
    x->lse_slack[at_lse] = row.most_error + (8 + (double)n + 2 * fabs(x->lse[at_lse])) * U;
}

/* Adds a term to a gradient: its value, and the bound of its error. */
static void add_term(const expected *x, int64_t at, double term, double error)
{
    x->d_qkv[at] += term;
    x->d_terms[at] += fabs(term);
    x->d_slack[at] += error;
}

static void expect_backward(const problem *p, query_row row, const expected *x)
{
    int64_t n = row.end - row.begin, d = p->s->d,
            at_o = row.token * p->o_stride + p->at_o + row.head * d,
            at_kv = row.begin * p->fused + row.head / p->s->group * d;
    const float *d_o = p->in_do + at_o;
    float lse;
    memcpy(&lse, p->lse.result + 4 * (row.token * p->n_heads + row.head), 4);
    double delta = 0, delta_terms = 0, scale = 1 / sqrt((double)d),
           relative = row.most_error + (8 + 4 * fabs((double)lse)) * U;
    for (int64_t c = 0; c < d; c++) {
        double term = (double)d_o[c] * (double)bl_bf16_to_f32(bf16_result(&p->o, at_o + c));
        delta += term;
        delta_terms += fabs(term);
    }
    for (int64_t j = 0; j < n; j++) {
        const float *k = row.k + j * p->fused, *v = row.v + j * p->fused;
        double weight = exp(row.s[j] - (double)lse), dp = 0, dp_terms = 0;
        for (int64_t c = 0; c < d; c++) {
            dp += (double)d_o[c] * (double)v[c];
            dp_terms += fabs((double)d_o[c] * (double)v[c]);
        }
        double ds = weight * (dp - delta) * scale,
               error =
                   fabs(ds) * (BF16 + relative + 4 * U) +
                   weight * scale * (1 + BF16) * (sum_error(d) * dp_terms + 12 * U * delta_terms);
        for (int64_t c = 0; c < d; c++) {
            int64_t at_key = at_kv + j * p->fused + c;
            add_term(x, row.token * p->fused + p->at_q + row.head * d + c, ds * (double)k[c],
                     error * fabs((double)k[c]));
            add_term(x, at_key + p->at_k, ds * (double)row.q[c], error * fabs((double)row.q[c]));
            add_term(x, at_key + p->at_v, weight * (double)d_o[c],
                     weight * (BF16 + relative) * fabs((double)d_o[c]));
        }
    }
}

/* ---- comparing ---- */

/* Rows of `stride` columns, of which the call wrote [at, at + width): those are `want` within
 * `slack`, 0 in the padding; the others are as they were. */
static void rows_are(const char *what, const problem *p, const buffer *b, int64_t stride,
                     int64_t at, int64_t width, const double *want, const double *slack)
{
    double worst = 0;
    for (int64_t i = 0; i < p->T * stride; i++) {
        int64_t column = i % stride;
        if (column < at || column >= at + width) continue;
        double value = (double)bl_bf16_to_f32(bf16_result(b, i)), error = fabs(value - want[i]);
        if (i < p->n_tokens * stride && slack[i] > 0x1p-100) worst = fmax(worst, error / slack[i]);
        if (i < p->n_tokens * stride ? error <= slack[i] + 0x1p-120 : value == 0) continue;
        print_error("%s, %s: row %lld, column %lld: %.9g, not %.9g; allowed %.3g\n", p->s->name,
                    what, (long long)(i / stride), (long long)(column - at), value, want[i],
                    slack[i]);
        fail();
    }
    print_message("  %-3s off by at most %.2f of the bound\n", what, worst);
}

/* Columns outside of the ranges [at[i], at[i] + width[i]) have kept their poison. */
static void others_are_untouched(const problem *p, const buffer *b, int64_t stride,
                                 const int64_t *at, const int64_t *width, int n_ranges)
{
    for (int64_t i = 0; i < p->T * stride; i++) {
        bool is_ours = false;
        for (int r = 0; r < n_ranges; r++)
            is_ours = is_ours || (i % stride >= at[r] && i % stride < at[r] + width[r]);
        if (!is_ours) assert_int_equal(bf16_result(b, i), 0xffff);
    }
}

static void check_forward(const problem *p, const expected *x)
{
    int64_t width = p->n_heads * p->s->d;
    rows_are("o", p, &p->o, p->o_stride, p->at_o, width, x->o, x->o_slack);
    others_are_untouched(p, &p->o, p->o_stride, &p->at_o, &width, 1);
    for (int64_t i = 0; i < p->T * p->n_heads; i++) {
        float lse;
        memcpy(&lse, p->lse.result + 4 * i, 4);
        if (i >= p->n_tokens * p->n_heads) assert_true(lse == 0.0f);
        if (fabs((double)lse - x->lse[i]) <= x->lse_slack[i]) continue;
        print_error("%s: lse of row %lld: %.9g, not %.9g\n", p->s->name,
                    (long long)(i / p->n_heads), (double)lse, x->lse[i]);
        fail();
    }
}

static void check_backward(const problem *p, const expected *x)
{
    int64_t d = p->s->d, at[] = {p->at_q, p->at_k, p->at_v},
            width[] = {p->n_heads * d, p->s->n_kv * d, p->s->n_kv * d};
    for (int64_t i = 0; i < p->T * p->fused; i++)
        x->d_slack[i] += sum_error(p->T * p->s->group) * x->d_terms[i] +
                         BF16 * (fabs(x->d_qkv[i]) + x->d_slack[i]);
    for (int i = 0; i < 3; i++)
        rows_are((const char *[]){"dq", "dk", "dv"}[i], p, &p->d_qkv, p->fused, at[i], width[i],
                 x->d_qkv, x->d_slack);
    others_are_untouched(p, &p->d_qkv, p->fused, at, width, 3);
}

static void check_shape(gpu_test *t, const attention_shape *s, uint64_t seed)
{
    problem p = problem_create(t, s, seed);
    int64_t n_o = p.T * p.o_stride, n_lse = p.T * p.n_heads, n_d = p.T * p.fused;
    expected x = {test_doubles(n_o), test_doubles(n_o), test_doubles(n_lse), test_doubles(n_lse),
                  test_doubles(n_d), test_doubles(n_d), test_doubles(n_d)};
    double *scores = test_doubles(s->position_offset + p.T),
           *weights = test_doubles(s->position_offset + p.T);
    print_message("%s\n", s->name);
    forget_accesses();
    run_forward(t, &p);
    if (s->position_offset == 0) run_backward(t, &p);
    /* Stores of 80 columns meet in a bank now and then; nothing else does. */
    meets_banks_at_most(1.02);
    for (int64_t token = 0; token < p.n_tokens; token++)
        for (int64_t head = 0; head < p.n_heads; head++) {
            query_row row = row_scores(&p, token, head, scores, weights);
            expect_forward(&p, row, &x);
            if (s->position_offset == 0) expect_backward(&p, row, &x);
        }
    check_forward(&p, &x);
    if (s->position_offset == 0) check_backward(&p, &x);
    free(x.o), free(x.o_slack), free(x.lse), free(x.lse_slack), free(x.d_qkv), free(x.d_slack),
        free(x.d_terms);
    free(scores), free(weights);
    problem_destroy(t, &p);
}

static void attention_matches_the_formulas(void **state)
{
    for (size_t i = 0; i < BL_COUNT(attention_shapes); i++)
        check_shape(*state, &attention_shapes[i], 100 + 2 * i);
}

int main(void)
{
    gpu_test t;
    if (!gpu_test_create(&t)) return SKIPPED;
    const struct CMUnitTest tests[] = {
        {"attention_matches_the_formulas", attention_matches_the_formulas, NULL, NULL, &t}};
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_test_destroy(&t);
    return n_failed;
}
