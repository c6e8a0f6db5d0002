/* SPDX-License-Identifier: Apache-2.0 */
/* Attention against the formula in double: forward, log-sum-exp, gradients (the analytic ones,
 * themselves checked by central differences), grouped heads, documents, strides, windows, sinks,
 * generation; on fp32 and on bf16; the keys that a query sees against transformers' masks. */
#include "half_test.h"

#include "attention_masks.h"
#include "ops/attention.h"

typedef struct shape {
    int64_t n_heads, n_kv_heads, d, n_documents;
    int32_t cu_seqlens[6];
    int64_t window;
    double sinks; /* their largest size; 0: none */
} shape;

static const shape SHAPES[] = {
    {1, 1, 8, 0, {0}, 0, 0},
    {1, 1, 8, 1, {0, 1}, 0, 0},
    {2, 1, 64, 1, {0, 7}, 0, 0},
    {4, 4, 96, 5, {0, 1, 2, 2, 70, 129}, 0, 0},
    {4, 1, 128, 3, {0, 60, 61, 129}, 20, 0},
    {8, 1, 8, 2, {0, 128, 257}, 0, 0},
    {6, 3, 20, 2, {0, 256, 513}, 0, 0},
    {1, 1, 256, 1, {0, 129}, 0, 0},
    {2, 2, 16, 3, {0, 530, 1170, 1171}, 0, 0}, /* past every block size */
    {2, 1, 16, 2, {0, 300, 301}, 1, 0},        /* a query sees itself alone */
    {1, 1, 8, 1, {0, 400}, 127, 0},            /* around the backward pass's block of 128 */
    {1, 1, 8, 1, {0, 400}, 128, 0},
    {1, 1, 8, 1, {0, 400}, 129, 0},
    {4, 2, 20, 3, {0, 3, 530, 1171}, 200, 0},
    {1, 1, 8, 1, {0, 1300}, 640, 0}, /* past the forward pass's block of 512 */
    {2, 1, 8, 2, {0, 60, 129}, 129, 0},
    {2, 1, 8, 1, {0, 129}, INT64_MAX, 0},
    {4, 2, 16, 3, {0, 1, 70, 129}, 0, 4}, /* sinks above and below the scores */
    {2, 1, 8, 2, {0, 600, 601}, 128, 4},
    {2, 2, 64, 1, {0, 9}, 0, 30}, /* all weight on the sink, or none */
};

/* The first key that a query of a document sees, which begins at `begin`. */
static int64_t first_key(const shape *s, int64_t begin, int64_t query)
{
    return s->window > 0 && query - begin >= s->window ? query + 1 - s->window : begin;
}

/* Inputs, fp32 results and the double reference of one shape. q, k, v are in one fused buffer with
 * a gap at the end of its rows. */
typedef struct problem {
    shape s;
    int64_t T, fused, o_stride;
    bl_dtype dtype; /* of qkv, o and their gradients when the ops see them */
    float *qkv, *o, *lse, *d_o, *d_qkv, *delta, *sinks;
    double *want_o, *want_lse, *want_d_qkv;
} problem;

static problem problem_create(const shape *s, bl_dtype dtype, uint64_t seed)
{
    problem p = {.s = *s, .T = s->cu_seqlens[s->n_documents], .dtype = dtype};
    p.fused = (s->n_heads + 2 * s->n_kv_heads) * s->d + 3;
    p.o_stride = s->n_heads * s->d + 2;
    p.qkv = test_random_floats(p.T * p.fused, seed);
    p.d_o = test_random_floats(p.T * p.o_stride, seed + 1);
    if (dtype == BL_BF16) {
        test_round_floats(p.qkv, p.T * p.fused);
        test_round_floats(p.d_o, p.T * p.o_stride);
    }
    if (s->sinks > 0) p.sinks = test_random_floats(s->n_heads, seed + 2);
    for (int64_t i = 0; p.sinks && i < s->n_heads; i++) p.sinks[i] *= (float)s->sinks;
    p.o = test_floats(p.T * p.o_stride);
    p.lse = test_floats(p.T * s->n_heads);
    p.delta = test_floats(p.T * s->n_heads);
    p.d_qkv = test_floats(p.T * p.fused);
    p.want_o = test_doubles(p.T * p.o_stride);
    p.want_lse = test_doubles(p.T * s->n_heads);
    p.want_d_qkv = test_doubles(p.T * p.fused);
    return p;
}

static void problem_destroy(problem *p)
{
    free(p->qkv);
    free(p->d_o);
    free(p->sinks);
    free(p->o);
    free(p->lse);
    free(p->delta);
    free(p->d_qkv);
    free(p->want_o);
    free(p->want_lse);
    free(p->want_d_qkv);
}

static double dot(const double *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * (double)b[i];
    return sum;
}

/* One query of one head: o and lse, and with `gradient` its terms of dq, dk, dv. q is given
 * separately (in double, for differences); k and v are rows [begin, end) of the fused buffer. */
static double reference_query(const problem *p, int64_t head, const double *q, int64_t token,
                              int64_t begin, int64_t end, double *o, double *gradient)
{
    const shape *s = &p->s;
    int64_t d = s->d, kv = head / (s->n_heads / s->n_kv_heads), at_k = (s->n_heads + kv) * d,
            at_v = at_k + s->n_kv_heads * d;
    double *weight = test_doubles(end - begin), most = -INFINITY, sum = 0, root = sqrt((double)d);
    for (int64_t j = begin; j < end; j++) {
        weight[j - begin] = dot(q, p->qkv + j * p->fused + at_k, d) / root;
        most = fmax(most, weight[j - begin]);
    }
    if (p->sinks) most = fmax(most, (double)p->sinks[head]);
    for (int64_t j = 0; j < end - begin; j++) sum += weight[j] = exp(weight[j] - most);
    if (p->sinks) sum += exp((double)p->sinks[head] - most);
    for (int64_t i = 0; i < d; i++) {
        o[i] = 0;
        for (int64_t j = begin; j < end; j++)
            o[i] += weight[j - begin] / sum * (double)p->qkv[j * p->fused + at_v + i];
    }
    for (int64_t j = begin; gradient && j < end; j++) {
        const float *d_o = p->d_o + token * p->o_stride + head * d,
                    *k = p->qkv + j * p->fused + at_k, *v = k + s->n_kv_heads * d;
        double probability = weight[j - begin] / sum, along = 0;
        for (int64_t i = 0; i < d; i++) along += (double)d_o[i] * ((double)v[i] - o[i]);
        for (int64_t i = 0; i < d; i++) {
            gradient[j * p->fused + at_v + i] += probability * (double)d_o[i];
            gradient[j * p->fused + at_k + i] += probability * along * q[i] / root;
            gradient[token * p->fused + head * d + i] += probability * along * (double)k[i] / root;
        }
    }
    free(weight);
    return most + log(sum);
}

static void problem_reference(problem *p)
{
    const shape *s = &p->s;
    double q[256];
    for (int64_t document = 0; document < s->n_documents; document++) {
        for (int64_t t = s->cu_seqlens[document]; t < s->cu_seqlens[document + 1]; t++) {
            for (int64_t head = 0; head < s->n_heads; head++) {
                for (int64_t i = 0; i < s->d; i++)
                    q[i] = (double)p->qkv[t * p->fused + head * s->d + i];
                p->want_lse[t * s->n_heads + head] =
                    reference_query(p, head, q, t, first_key(s, s->cu_seqlens[document], t), t + 1,
                                    p->want_o + t * p->o_stride + head * s->d, p->want_d_qkv);
            }
        }
    }
}

/* n numbers of the problem as the ops take them, and back. */
static bl_tensor give(const problem *p, const float *x, int64_t n)
{
    return p->dtype == BL_F32 ? bl_tensor_f32(x) : bl_tensor_of(test_rounded(x, n), BL_BF16);
}

static void take(const problem *p, bl_tensor t, float *x, int64_t n)
{
    if (p->dtype == BL_F32) return;
    test_widen(t.data, x, n);
    free(t.data);
}

static void problem_run(problem *p, int threads)
{
    const shape *s = &p->s;
    int64_t at_k = s->n_heads * s->d, at_v = at_k + s->n_kv_heads * s->d;
    for (int64_t i = 0; i < p->T * p->fused; i++)
        p->d_qkv[i] = i % p->fused < p->fused - 3 ? NAN : 0.0f; /* must be overwritten */
    for (int64_t i = 0; i < p->T * p->o_stride; i++)
        p->o[i] = i % p->o_stride < p->o_stride - 2 ? NAN : 0.0f;
    test_device d = test_device_create(threads);
    bl_tensor qkv = give(p, p->qkv, p->T * p->fused), o = give(p, p->o, p->T * p->o_stride),
              d_o = give(p, p->d_o, p->T * p->o_stride), d_qkv = give(p, p->d_qkv, p->T * p->fused);
    bl_attention_forward_args forward = {.T = p->T,
                                         .n_heads = s->n_heads,
                                         .n_kv_heads = s->n_kv_heads,
                                         .d = s->d,
                                         .n_documents = s->n_documents,
                                         .window = s->window,
                                         .q_stride = p->fused,
                                         .kv_stride = p->fused,
                                         .o_stride = p->o_stride,
                                         .cu_seqlens = s->cu_seqlens,
                                         .q = qkv,
                                         .k = bl_tensor_at(qkv, at_k),
                                         .v = bl_tensor_at(qkv, at_v),
                                         .o = o,
                                         .lse = p->lse,
                                         .sinks = p->sinks};
    bl_attention_backward_args backward = {.T = p->T,
                                           .n_heads = s->n_heads,
                                           .n_kv_heads = s->n_kv_heads,
                                           .d = s->d,
                                           .n_documents = s->n_documents,
                                           .window = s->window,
                                           .q_stride = p->fused,
                                           .kv_stride = p->fused,
                                           .o_stride = p->o_stride,
                                           .cu_seqlens = s->cu_seqlens,
                                           .q = qkv,
                                           .k = bl_tensor_at(qkv, at_k),
                                           .v = bl_tensor_at(qkv, at_v),
                                           .o = o,
                                           .lse = p->lse,
                                           .do_ = d_o,
                                           .dq = d_qkv,
                                           .dk = bl_tensor_at(d_qkv, at_k),
                                           .dv = bl_tensor_at(d_qkv, at_v),
                                           .delta = p->delta};
    assert_int_equal(bl_attention_forward(d.stream, &forward), BL_OK);
    assert_int_equal(bl_attention_backward(d.stream, &backward), BL_OK);
    test_finish(d);
    take(p, qkv, p->qkv, p->T * p->fused);
    take(p, o, p->o, p->T * p->o_stride);
    take(p, d_o, p->d_o, p->T * p->o_stride);
    take(p, d_qkv, p->d_qkv, p->T * p->fused);
    test_device_destroy(d);
}

/* Entries are below 1, so a score is below sqrt(d) <= 16; it is a sum of d products with mean
 * square 1/9, whose rounding errors add up like a random walk: below 4 u sqrt(d) here (four
 * standard deviations), and as much relatively in each weight. o is a convex combination of entries
 * below 1, so twice that; two u more for exp and one for each of the at most ten block sums. */
static double forward_tolerance_f32(int64_t d)
{
    return (8 * sqrt((double)d) + 16) * U;
}

/* In bf16 the weights, which sum to 1, are rounded, and so is o, which is below 1. */
static double forward_tolerance(const problem *p)
{
    return forward_tolerance_f32(p->s.d) + (p->dtype == BL_BF16 ? 2 * U_BF16 : 0);
}

/* A gradient element is a sum over the queries (heads) or keys that reach it of terms P dS q, |dS|
 *   <= 2 d P,
 * / sqrt(d). P sums to one over the keys; over the queries it sums to at most 1 + ln T, times the
 * heads of the group. Each term has the relative error of P, twice, and that of the dot product of
 * length d behind dS.
 *
 * In bf16: dP - delta is a sum of d products of mean square 1/9, four standard deviations of which
 * are 4/3 sqrt(d), so dS q / sqrt(d) <= 4/3 P, which rounding dS moves by u 4/3 P. The errors of o,
 * 2 u each, move delta by four standard deviations of 8/3 u sqrt(d). P in dv moves by u P. The
 * result is rounded once: u of at most 4/3 times the reach. Together below 8 u of the reach. */
static double backward_tolerance(const problem *p)
{
    double reach = (1 + log((double)p->T + 1)) * (double)(p->s.n_heads / p->s.n_kv_heads);
    return (3 * forward_tolerance_f32(p->s.d) + (p->dtype == BL_BF16 ? 8 * U_BF16 : 0)) * reach;
}

static void check_shapes(bl_dtype dtype)
{
    for (size_t k = 0; k < BL_COUNT(SHAPES); k++) {
        problem p = problem_create(&SHAPES[k], dtype, 11 + k);
        int64_t n_o = p.T * p.o_stride, n_qkv = p.T * p.fused, n_lse = p.T * p.s.n_heads;
        problem_reference(&p);
        float *o = test_floats(n_o), *d_qkv = test_floats(n_qkv), *lse = test_floats(n_lse);
        for (int threads = 1; threads <= 3; threads++) {
            problem_run(&p, threads);
            if (threads == 1) {
                memcpy(o, p.o, (size_t)n_o * sizeof *o);
                memcpy(lse, p.lse, (size_t)n_lse * sizeof *o);
                memcpy(d_qkv, p.d_qkv, (size_t)n_qkv * sizeof *o);
            }
            test_same_bits("o", o, p.o, n_o);
            test_same_bits("lse", lse, p.lse, n_lse);
            test_same_bits("d qkv", d_qkv, p.d_qkv, n_qkv);
        }
        double worst = 0, worst_gradient = 0;
        for (int64_t i = 0; i < n_o; i++) worst = fmax(worst, fabs((double)o[i] - p.want_o[i]));
        for (int64_t i = 0; i < n_qkv; i++)
            worst_gradient = fmax(worst_gradient, fabs((double)d_qkv[i] - p.want_d_qkv[i]));
        print_message("shape %zu: o off by %.2g of %.2g, gradients by %.2g of %.2g\n", k, worst,
                      forward_tolerance(&p), worst_gradient, backward_tolerance(&p));
        test_close("o", o, p.want_o, n_o, forward_tolerance(&p), 0);
        test_close("lse", lse, p.want_lse, n_lse, forward_tolerance_f32(p.s.d), U);
        test_close("d qkv", d_qkv, p.want_d_qkv, n_qkv, backward_tolerance(&p), 0);
        free(o);
        free(d_qkv);
        free(lse);
        problem_destroy(&p);
    }
}

static void attention_matches_the_formula(void **state)
{
    (void)state;
    check_shapes(BL_F32);
}

static void attention_on_bf16_matches_the_formula(void **state)
{
    (void)state;
    check_shapes(BL_BF16);
}

/* sum do . o of the document that holds `token`, in double, with one input moved by `by`. */
static double document_loss(problem *p, int64_t begin, int64_t end, int64_t index, double by)
{
    const shape *s = &p->s;
    double loss = 0, q[256], o[256];
    float keep = p->qkv[index];
    p->qkv[index] = (float)((double)keep + by); /* the caller's steps are exact in fp32 */
    for (int64_t t = begin; t < end; t++) {
        for (int64_t head = 0; head < s->n_heads; head++) {
            for (int64_t i = 0; i < s->d; i++)
                q[i] = (double)p->qkv[t * p->fused + head * s->d + i];
            reference_query(p, head, q, t, first_key(s, begin, t), t + 1, o, NULL);
            loss += dot(o, p->d_o + t * p->o_stride + head * s->d, s->d);
        }
    }
    p->qkv[index] = keep;
    return loss;
}

static void gradients_match_central_differences(void **state)
{
    (void)state;
    for (size_t k = 2; k < BL_COUNT(SHAPES); k++) {
        bool has_sinks = SHAPES[k].sinks > 0 && SHAPES[k].n_documents == 3;
        if (k > 4 && !has_sinks) continue;
        problem p = problem_create(&SHAPES[k], BL_F32, 31 + k);
        for (int64_t i = 0; i < p.T * p.fused; i++) p.qkv[i] = roundf(p.qkv[i] * 4096) / 4096;
        problem_run(&p, 2);
        uint64_t random = 99 + k;
        for (int round = 0; round < 24; round++) {
            int64_t token = (int64_t)((test_random(&random) + 1) / 2 * (double)p.T), document = 0;
            int64_t index =
                token * p.fused + (int64_t)((test_random(&random) + 1) / 2 * (double)(p.fused - 3));
            while (p.s.cu_seqlens[document + 1] <= token) document++;
            int64_t begin = p.s.cu_seqlens[document], end = p.s.cu_seqlens[document + 1];
            /* step^2 / 6 of a third derivative below 10: 1e-7; rounding 1e-16 |loss| / step */
            const double step = 1.0 / 4096;
            double want = (document_loss(&p, begin, end, index, step) -
                           document_loss(&p, begin, end, index, -step)) /
                          (2 * step);
            test_close("gradient", p.d_qkv + index, &want, 1, backward_tolerance(&p) + 1e-6, 0);
        }
        problem_destroy(&p);
    }
}

/* Equal scores, and values that are 1 in the key's own column: o has 1 / n for the n keys that a
 * query sees, 0 for the others. */
static void queries_see_what_transformers_lets_them_see(void **state)
{
    enum { D = 256 };
    (void)state;
    for (size_t k = 0; k < BL_COUNT(MASKS); k++) {
        const struct mask_case *c = &MASKS[k];
        int64_t T = c->cu_seqlens[c->n_documents], n_keys = c->older + T;
        float *q = test_floats(T * D), *key_rows = test_floats(n_keys * D),
              *v = test_floats(n_keys * D), *o = test_floats(T * D);
        for (int64_t j = 0; j < n_keys; j++) v[j * D + j] = 1.0f;
        test_device d = test_device_create(1);
        bl_attention_forward_args args = {.T = T,
                                          .n_heads = 1,
                                          .n_kv_heads = 1,
                                          .d = D,
                                          .n_documents = c->n_documents,
                                          .position_offset = c->older,
                                          .window = c->window,
                                          .q_stride = D,
                                          .kv_stride = D,
                                          .o_stride = D,
                                          .cu_seqlens = c->cu_seqlens,
                                          .q = bl_tensor_f32(q),
                                          .k = bl_tensor_f32(key_rows),
                                          .v = bl_tensor_f32(v),
                                          .o = bl_tensor_f32(o)};
        assert_int_equal(bl_attention_forward(d.stream, &args), BL_OK);
        test_finish(d);
        for (int64_t i = 0; i < T; i++)
            for (int64_t j = 0; j < D; j++) {
                bool is_seen = j >= c->first_key[i] && j <= c->older + i;
                double want = is_seen ? 1.0 / (double)(c->older + i + 1 - c->first_key[i]) : 0;
                assert_true(fabs((double)o[i * D + j] - want) <= 2 * U * want);
            }
        test_device_destroy(d);
        free(q), free(key_rows), free(v), free(o);
    }
}

/* The last rows of a sequence, computed with the earlier keys in place, equal those of the whole
 * sequence. Keys that no row sees are not read. */
static void generation_of(int64_t window, double sinks, bl_dtype dtype)
{
    const shape whole = {4, 2, 64, 1, {0, 700}, window, sinks};
    const int64_t new_tokens[] = {700, 130, 3, 1}; /* NaN grows from the front */
    problem p = problem_create(&whole, dtype, 5);
    problem_reference(&p);
    for (size_t k = 0; k < BL_COUNT(new_tokens); k++) {
        int64_t T = new_tokens[k], older = p.T - T, at_k = whole.n_heads * whole.d,
                at_v = at_k + whole.n_kv_heads * whole.d;
        const int32_t cu_seqlens[2] = {0, (int32_t)T};
        for (int64_t key = 0; key < first_key(&whole, 0, older); key++)
            for (int64_t i = at_k; i < at_v + 2 * 64; i++) p.qkv[key * p.fused + i] = NAN;
        memset(p.o, 0, (size_t)(p.T * p.o_stride) * sizeof *p.o);
        test_device d = test_device_create(2);
        bl_tensor qkv = give(&p, p.qkv, p.T * p.fused), o = give(&p, p.o, p.T * p.o_stride);
        bl_attention_forward_args args = {.T = T,
                                          .n_heads = 4,
                                          .n_kv_heads = 2,
                                          .d = 64,
                                          .n_documents = 1,
                                          .position_offset = older,
                                          .window = window,
                                          .q_stride = p.fused,
                                          .kv_stride = p.fused,
                                          .o_stride = p.o_stride,
                                          .cu_seqlens = cu_seqlens,
                                          .q = bl_tensor_at(qkv, older * p.fused),
                                          .k = bl_tensor_at(qkv, at_k),
                                          .v = bl_tensor_at(qkv, at_v),
                                          .o = o,
                                          .sinks = p.sinks};
        assert_int_equal(bl_attention_forward(d.stream, &args), BL_OK);
        test_finish(d);
        take(&p, o, p.o, p.T * p.o_stride);
        test_close("o", p.o, p.want_o + older * p.o_stride, T * p.o_stride, forward_tolerance(&p),
                   0);
        args.position_offset = 1;
        args.n_documents = 2;
        assert_int_equal(bl_attention_forward(d.stream, &args), BL_EINTERNAL);
        args.n_documents = 1;
        args.window = -1;
        assert_int_equal(bl_attention_forward(d.stream, &args), BL_EINTERNAL);
        args.window = 0;
        args.n_kv_heads = 3;
        assert_int_equal(bl_attention_forward(d.stream, &args), BL_EINTERNAL);
        take(&p, qkv, p.qkv, p.T * p.fused);
        test_device_destroy(d);
    }
    problem_destroy(&p);
}

static void generation_sees_the_older_keys(void **state)
{
    const int64_t windows[] = {0, 1, 2, 90, 600, 700};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(windows); i++) {
        generation_of(windows[i], 0, BL_F32);
        generation_of(windows[i], 0, BL_BF16);
        generation_of(windows[i], 4, BL_F32);
        generation_of(windows[i], 4, BL_BF16);
    }
}

/* Rows behind the last document give zeros, whatever they hold, and change nothing before them. */
static void check_padding(bl_dtype dtype)
{
    const shape unpadded[] = {{2, 1, 8, 2, {0, 60, 150}, 50, 4}, {2, 2, 8, 0, {0}, 0, 0}},
                padded[] = {{2, 1, 8, 3, {0, 60, 150, 190}, 50, 4}, {2, 2, 8, 1, {0, 150}, 0, 0}};
    for (size_t k = 0; k < BL_COUNT(padded); k++) {
        problem want = problem_create(&unpadded[k], dtype, 77),
                got = problem_create(&padded[k], dtype, 77);
        got.s.n_documents--;
        for (int64_t i = want.T * got.fused; i < got.T * got.fused; i++) got.qkv[i] = NAN;
        for (int64_t i = want.T * got.o_stride; i < got.T * got.o_stride; i++) got.d_o[i] = NAN;
        if (want.T > 0) problem_run(&want, 1);
        problem_run(&got, 2);
        const float *const both[][2] = {
            {want.o, got.o}, {want.lse, got.lse}, {want.d_qkv, got.d_qkv}};
        const int64_t width[] = {got.o_stride, got.s.n_heads, got.fused};
        for (int i = 0; i < 3; i++) {
            test_same_bits("padded", both[i][0], both[i][1], want.T * width[i]);
            for (int64_t j = want.T * width[i]; j < got.T * width[i]; j++)
                assert_true(both[i][1][j] == 0.0f);
        }
        problem_destroy(&want);
        problem_destroy(&got);
    }
}

static void padding_gives_zeros(void **state)
{
    (void)state;
    check_padding(BL_F32);
    check_padding(BL_BF16);
}

/* Scores of +-1000: exp must be taken after the maximum is off, and the running maximum must move
 * the earlier blocks. */
static void large_scores_stay_finite(void **state)
{
    (void)state;
    enum { T = 1200, D = 8 };
    const int32_t cu_seqlens[2] = {0, T};
    float *qkv = test_floats(T * 3 * D), *o = test_floats(T * D), *lse = test_floats(T);
    for (int t = 0; t < T; t++) {
        qkv[t * 3 * D] = 1.0f;
        qkv[t * 3 * D + D] =
            (float)t * 2.0f * sqrtf(8.0f); /* score 2 t: each row's weight is on its last keys */
        qkv[t * 3 * D + 2 * D] = (float)t;
    }
    test_device d = test_device_create(2);
    bl_attention_forward_args args = {.T = T,
                                      .n_heads = 1,
                                      .n_kv_heads = 1,
                                      .d = D,
                                      .n_documents = 1,
                                      .q_stride = 3 * D,
                                      .kv_stride = 3 * D,
                                      .o_stride = D,
                                      .cu_seqlens = cu_seqlens,
                                      .q = bl_tensor_f32(qkv),
                                      .k = bl_tensor_f32(qkv + D),
                                      .v = bl_tensor_f32(qkv + 2 * D),
                                      .o = bl_tensor_f32(o),
                                      .lse = lse};
    bl_attention_forward(d.stream, &args);
    test_finish(d);
    for (int t = 0; t < T; t++) {
        /* weights e^-2n / sum: sum_n n e^-2n / sum_n e^-2n behind the last key; scores up to 2400
         * carry u 2400 each */
        double sum = 0, mean = 0;
        for (int n = 0; n <= t && n < 40; n++) {
            sum += exp(-2.0 * n);
            mean += n * exp(-2.0 * n);
        }
        assert_true(fabs((double)o[t * D] - (t - mean / sum)) < 4 * U * 2400 + 2 * U * t);
        assert_true(fabs((double)lse[t] - (2.0 * t + log(sum))) < 4 * U * 2400);
    }
    test_device_destroy(d);
    free(qkv);
    free(o);
    free(lse);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_matches_the_formula),
        cmocka_unit_test(attention_on_bf16_matches_the_formula),
        cmocka_unit_test(gradients_match_central_differences),
        cmocka_unit_test(queries_see_what_transformers_lets_them_see),
        cmocka_unit_test(generation_sees_the_older_keys),
        cmocka_unit_test(padding_gives_zeros),
        cmocka_unit_test(large_scores_stay_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
