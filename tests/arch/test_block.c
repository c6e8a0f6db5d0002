/* SPDX-License-Identifier: Apache-2.0 */
/* A decoder layer against the formulas of block.h written out naively in double, forward by value
 * and backward by central differences of the double version.
 *
 * Tolerance. An output is computed by a chain of products and sums; in fp32 each of its n
 * operations is off by at most u of the values at hand, and norms keep those near one. So an
 * element is allowed n u of the largest element of its tensor, n being all sums on the way of the
 * layer added up: norms and projections (hidden, q_width, inter), scores (head_dim), attention (T);
 * forward and, for gradients, back again. */
#include "block_toy.h"

/* ---- the reference ---- */

static double keep(const toy *m, int matrix, int64_t t, int64_t c)
{
    uint32_t words[4];
    float p = m->c->dropout;
    if (p == 0 || m->c->r == 0) return 1;
    bl_dropout_words(bl_dropout_key(11, 5, LAYER, matrix), m->sample[t], m->position[t],
                     (uint32_t)(c / 4), words);
    return words[c % 4] >= (uint32_t)floor((double)p * 4294967296.0) ? 1.0 / (1.0 - (double)p)
                                                                     : 0.0;
}

/* y (T,N) of one projection; x (T,K). */

static void reference_linear(const toy *m, const double *lora, int p, const double *x, double *y)
{
    const bl_projection *info = &m->arch.projections[p];
    int segment = 0;
    int64_t N, K, r = m->c->r;
    bl_weight w;

    bl_projection_shape(&m->config, p, &N, &K);
    assert_int_equal(bl_base_acquire(m->base, LAYER, (int)info->matrix, m->d.stream, &w), BL_OK);
    while (bl_arch_segment(&m->arch, BL_LAYER_DENSE, (int)info->matrix, segment) != info) segment++;
    const float *W = w.segment[segment].codes, *bias = NULL;
    int64_t bias_offset = bl_arch_bias_offset(&m->config, BL_LAYER_DENSE, info->matrix);
    if (bias_offset >= 0) bias = m->norms + bias_offset + bl_projection_row(&m->config, p);
    for (int64_t t = 0; t < T_ALL; t++)
        for (int64_t n = 0; n < N; n++) {
            y[t * N + n] = bias ? (double)bias[n] : 0;
            for (int64_t k = 0; k < K; k++) y[t * N + n] += x[t * K + k] * (double)W[n * K + k];
        }
    if (m->lora.a_offset[p] < 0) return;
    const double *A = lora + m->lora.a_offset[p], *B = lora + m->lora.b_offset[p];
    for (int64_t t = 0; t < T_ALL; t++)
        for (int64_t q = 0; q < r; q++) {
            double u = 0;
            for (int64_t k = 0; k < K; k++)
                u += keep(m, (int)info->matrix, t, k) * x[t * K + k] * A[q * K + k];
            for (int64_t n = 0; n < N; n++)
                y[t * N + n] += 2.0 * u * B[n * r + q]; /* alpha / r = 2 */
        }
}

static void reference_rows(int64_t n_rows, int64_t H, const float *w, const double *x, double *y)
{
    for (int64_t t = 0; t < n_rows; t++) {
        double squares = 0;
        for (int64_t h = 0; h < H; h++) squares += x[t * H + h] * x[t * H + h];
        for (int64_t h = 0; h < H; h++)
            y[t * H + h] = x[t * H + h] / sqrt(squares / (double)H + 1e-5) * (double)w[h];
    }
}

/* torch.nn.LayerNorm, its bias behind w. */
static void reference_layer_norm(int64_t H, const float *w, const double *x, double *y)
{
    for (int64_t t = 0; t < T_ALL; t++) {
        double mean = 0, variance = 0;
        for (int64_t h = 0; h < H; h++) mean += x[t * H + h] / (double)H;
        for (int64_t h = 0; h < H; h++) variance += pow(x[t * H + h] - mean, 2) / (double)H;
        for (int64_t h = 0; h < H; h++)
            y[t * H + h] =
                (x[t * H + h] - mean) / sqrt(variance + 1e-5) * (double)w[h] + (double)w[H + h];
    }
}

static void reference_norm(const toy *m, bl_layer_vector norm, const double *x, double *y)
{
    const float *w = m->norms + bl_arch_vector_offset(&m->config, BL_LAYER_DENSE, norm);

    if (m->c->n_layer_norms > 0) return reference_layer_norm(m->c->hidden, w, x, y);
    reference_rows(T_ALL, m->c->hidden, w, x, y);
}

static void reference_head_norms(const toy *m, double *q, double *k)
{
    const float *q_norm = m->norms + bl_arch_vector_offset(&m->config, BL_LAYER_DENSE, BL_Q_NORM),
                *k_norm = m->norms + bl_arch_vector_offset(&m->config, BL_LAYER_DENSE, BL_K_NORM);
    int64_t d = m->c->head_dim;
    if (m->c->is_olmo) {
        reference_rows(T_ALL, m->dims.q_width, q_norm, q, q);
        reference_rows(T_ALL, m->dims.kv_width, k_norm, k, k);
    }
    if (!m->c->has_head_norms) return;
    reference_rows(T_ALL * m->c->n_heads, d, q_norm, q, q);
    reference_rows(T_ALL * m->c->n_kv_heads, d, k_norm, k, k);
}

static int64_t document_start(int64_t t)
{
    int64_t start = 0;
    for (int i = 0; i < DOCUMENTS; i++)
        if (document_starts[i] <= t) start = document_starts[i];
    return start;
}

static void reference_rope(const toy *m, int64_t n_heads, double *x)
{
    int64_t d = m->c->head_dim, n = m->c->rotary_dim > 0 ? m->c->rotary_dim : d;
    for (int64_t t = 0; t < T_ALL; t++)
        for (int64_t h = 0; h < n_heads; h++)
            for (int64_t i = 0; i < n / 2; i++) {
                double *a = &x[(t * n_heads + h) * d + i], *b = a + n / 2, old = *a;
                double angle =
                    (double)(t - document_start(t)) * pow(100.0, -2.0 * (double)i / (double)n);
                *a = old * cos(angle) - *b * sin(angle);
                *b = *b * cos(angle) + old * sin(angle);
            }
}

static void reference_attention(const toy *m, const double *q, const double *k, const double *v,
                                double *o)
{
    int64_t d = m->c->head_dim, heads = m->c->n_heads, kv_heads = m->c->n_kv_heads;
    for (int64_t i = 0; i < T_ALL; i++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t g = h / (heads / kv_heads);
            double p[T_ALL], sum = 0;
            int64_t start = document_start(i);
            if (m->c->window) start = bl_max_i64(start, i - m->c->window + 1);
            double scale = m->c->attention > 0 ? m->c->attention : 1 / sqrt((double)d);
            scale *= 1 + m->c->query_beta * log(1 + floor((double)(i - document_start(i)) / 2));
            for (int64_t j = start; j <= i; j++) {
                double s = 0;
                for (int64_t c = 0; c < d; c++)
                    s += q[(i * heads + h) * d + c] * k[(j * kv_heads + g) * d + c];
                p[j] = exp(s * scale);
                sum += p[j];
            }
            for (int64_t c = 0; c < d; c++) {
                double value = 0;
                for (int64_t j = start; j <= i; j++)
                    value += p[j] / sum * v[(j * kv_heads + g) * d + c];
                o[(i * heads + h) * d + c] = value;
            }
        }
}

/* q, k and v of Llama's three projections, or of Falcon's one: for each key head its queries, the
 * key, the value. */
static void reference_qkv(const toy *m, const double *lora, const double *x, double *q, double *k,
                          double *v)
{
    int64_t d = m->c->head_dim, n_kv = m->c->n_kv_heads, n_q = m->c->n_heads / n_kv;
    double *out[3] = {q, k, v}, *fused;

    if (m->c->n_layer_norms == 0) {
        for (int p = BL_Q; p <= BL_V; p++) reference_linear(m, lora, p, x, out[p]);
        return;
    }
    fused = test_doubles(T_ALL * m->dims.qkv_width);
    reference_linear(m, lora, 0, x, fused);
    const double *from = fused;
    for (int64_t t = 0; t < T_ALL; t++)
        for (int64_t g = 0; g < n_kv; g++)
            for (int64_t c = 0; c < (n_q + 2) * d; c++, from++) {
                if (c < n_q * d)
                    q[(t * n_kv + g) * n_q * d + c] = *from;
                else
                    (c < (n_q + 1) * d ? k : v)[(t * n_kv + g) * d + c % d] = *from;
            }
    free(fused);
}

/* h of SwiGLU or GELU; x (T,H), `up` is scratch of h's size. */
static void reference_activation(const toy *m, const double *lora, const double *x, double *h,
                                 double *up)
{
    int64_t n = T_ALL * m->c->inter;

    if (m->c->n_layer_norms == 0) {
        reference_linear(m, lora, BL_GATE, x, h);
        reference_linear(m, lora, BL_UP, x, up);
        for (int64_t i = 0; i < n; i++) h[i] = h[i] / (1.0 + exp(-h[i])) * up[i];
        return;
    }
    reference_linear(m, lora, 2, x, up);
    for (int64_t i = 0; i < n; i++)
        h[i] =
            m->c->activation == BL_GELU
                ? up[i] * (1 + erf(up[i] / sqrt(2))) / 2
                : up[i] * (1 + tanh(0.79788456080286536 * (up[i] + 0.044715 * pow(up[i], 3)))) / 2;
}

static void reference_block(const toy *m, const double *lora, const double *x, double *out)
{
    int64_t H = m->c->hidden, I = m->c->inter, q_width = m->dims.q_width,
            kv_width = m->dims.kv_width;
    double *norm = test_doubles(T_ALL * H), *q = test_doubles(T_ALL * q_width),
           *k = test_doubles(T_ALL * kv_width);
    double *v = test_doubles(T_ALL * kv_width), *o = test_doubles(T_ALL * q_width),
           *mid = test_doubles(T_ALL * H);
    double *gate = test_doubles(T_ALL * I), *up = test_doubles(T_ALL * I);

    int n_projections = m->arch.n_projections; /* the last one of a layer is down, also Falcon's */
    bool is_olmo = m->c->is_olmo;
    reference_norm(m, BL_ATTENTION_NORM, x, norm);
    reference_qkv(m, lora, is_olmo ? x : norm, q, k, v);
    reference_head_norms(m, q, k);
    reference_rope(m, m->c->n_heads, q);
    reference_rope(m, m->c->n_kv_heads, k);
    reference_attention(m, q, k, v, o);
    reference_linear(m, lora, m->c->n_layer_norms > 0 ? 1 : BL_O, o, mid);
    double residual = m->c->residual > 0 ? m->c->residual : 1;
    if (is_olmo) reference_norm(m, BL_ATTENTION_NORM, mid, mid);
    for (int64_t i = 0; i < T_ALL * H; i++) mid[i] = mid[i] * residual + x[i];
    if (m->c->n_layer_norms != 1)
        reference_norm(m, BL_MLP_NORM, m->arch.is_parallel ? x : mid, norm);
    reference_activation(m, lora, is_olmo ? mid : norm, gate, up);
    reference_linear(m, lora, n_projections - 1, gate, out);
    if (is_olmo) reference_norm(m, BL_MLP_NORM, out, out);
    for (int64_t i = 0; i < T_ALL * H; i++) out[i] = out[i] * residual + mid[i];
    free(norm), free(q), free(k), free(v), free(o), free(mid), free(gate), free(up);
}

static double reference_loss(const toy *m, const double *lora, const double *x, double *out)
{
    double sum = 0;
    reference_block(m, lora, x, out);
    for (int64_t i = 0; i < T_ALL * m->c->hidden; i++) sum += (double)m->d_out[i] * out[i];
    return sum;
}

static double *to_doubles(const float *x, int64_t n)
{
    double *y = test_doubles(n);
    for (int64_t i = 0; i < n; i++) y[i] = x[i];
    return y;
}

/* The gradient with respect to `values`, which are the reference's own x or lora. STEP^2 times a
 * third derivative and 1e-16 / STEP of the loss are both below 1e-8. */
static double *differences(const toy *m, const double *lora, const double *x, double *values,
                           int64_t n)
{
    static const double STEP = 1e-5;
    double *gradient = test_doubles(n), *out = test_doubles(T_ALL * m->c->hidden);
    for (int64_t i = 0; i < n; i++) {
        double kept = values[i];
        values[i] = kept + STEP;
        double above = reference_loss(m, lora, x, out);
        values[i] = kept - STEP;
        gradient[i] = (above - reference_loss(m, lora, x, out)) / (2 * STEP);
        values[i] = kept;
    }
    free(out);
    return gradient;
}

static double chain_error(const toy *m)
{
    return (double)(4 * m->c->hidden + 2 * m->dims.q_width + 2 * m->c->inter + m->c->head_dim +
                    T_ALL) *
           U;
}

static void check_close(const toy *m, const char *what, const float *got, const double *want,
                        int64_t n, double error)
{
    double largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= error * largest + 1e-8)) {
            print_error("%s: %s[%lld]: %.9g, not %.9g, allowed %.3g\n", m->c->name, what,
                        (long long)i, (double)got[i], want[i], error * largest);
            fail();
        }
}

/* ---- running it ---- */

typedef struct result {
    float *out, *d, *gradients;
} result;

static void free_result(result *r)
{
    free(r->out), free(r->d), free(r->gradients);
}

static int64_t floats_of(int64_t n_bytes)
{
    return n_bytes / (int64_t)sizeof(float);
}

/* Forward and backward of the tokens [begin, end) of x and d_out. Between the two nothing is left
 * but what `save` keeps. */
static result run(toy *m, const bl_micro_batch *batch, unsigned save, int64_t begin)
{
    int64_t T = batch->T, H = m->c->hidden,
            saved_floats = floats_of(bl_block_saved_bytes(&m->dims, save)) * bl_round_up(T, 64);
    int64_t floats =
        floats_of(bl_block_workspace_bytes(&m->dims, T, m->c->r, m->c->dropout > 0, true));
    result r = {test_floats(T * H), test_floats(T * H), test_floats(m->lora.n_floats)};
    float *memory = test_floats(floats), *saved = test_floats(saved_floats);
    bl_block_tensors kept = {0};
    bl_block_workspace workspace;

    if (save) bl_block_place_saved(&m->dims, save, T, saved, &kept);
    kept.x = bl_tensor_f32(m->x + begin * H);
    bl_block_place_workspace(&m->dims, T, m->c->r, m->c->dropout > 0, true, memory, &workspace);
    for (int64_t i = 0; i < floats; i++) memory[i] = NAN;
    for (int64_t i = 0; i < m->lora.n_floats; i++) r.gradients[i] = NAN;
    memcpy(r.d, m->d_out + begin * H, (size_t)(T * H) * sizeof *r.d);
    assert_int_equal(
        bl_block_forward(m->d.stream, &m->block, batch, &kept, &workspace, bl_tensor_f32(r.out)),
        BL_OK);
    test_finish(m->d);
    for (int64_t i = 0; i < floats; i++) memory[i] = NAN;
    assert_int_equal(bl_block_backward(m->d.stream, &m->block, batch, &kept, &workspace,
                                       bl_tensor_f32(r.d), r.gradients),
                     BL_OK);
    test_finish(m->d);
    free(memory);
    free(saved);
    return r;
}

static void test_against_reference(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        toy m;
        create_toy(&cases[i], &m);
        int64_t n = T_ALL * m.c->hidden;
        double *x = to_doubles(m.x, n), *lora = to_doubles(m.lora_weights, m.lora.n_floats),
               *out = test_doubles(n);
        reference_block(&m, lora, x, out);
        double *dx = differences(&m, lora, x, x, n),
               *d_lora = differences(&m, lora, x, lora, m.lora.n_floats);
        result r = run(&m, &m.batch, BL_SAVE_S0, 0);
        check_close(&m, "out", r.out, out, n, chain_error(&m));
        check_close(&m, "dx", r.d, dx, n,
                    3 * chain_error(&m)); /* forward, recomputed values, and back */
        check_close(&m, "LoRA gradient", r.gradients, d_lora, m.lora.n_floats, 3 * chain_error(&m));
        free_result(&r);
        free(x), free(lora), free(out), free(dx), free(d_lora);
        free_toy(&m);
    }
}

static void test_what_is_saved_changes_no_bit(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        toy m;
        create_toy(&cases[i], &m);
        result all = run(&m, &m.batch, BL_SAVE_S4, 0);
        for (unsigned save = 0; save < 7; save++) { /* S0, S2, S3 and what has no name */
            result r = run(&m, &m.batch, save, 0);
            test_same_bits("out", r.out, all.out, T_ALL * m.c->hidden);
            test_same_bits("dx", r.d, all.d, T_ALL * m.c->hidden);
            test_same_bits("LoRA gradient", r.gradients, all.gradients, m.lora.n_floats);
            free_result(&r);
        }
        free_result(&all);
        free_toy(&m);
    }
}

static void test_documents_packed_and_apart(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        toy m;
        create_toy(&cases[i], &m);
        int64_t H = m.c->hidden;
        result packed = run(&m, &m.batch, BL_SAVE_S2, 0);
        double *out = to_doubles(packed.out, T_ALL * H), *dx = to_doubles(packed.d, T_ALL * H);
        double *sum = test_doubles(m.lora.n_floats);
        for (int doc = 0; doc < DOCUMENTS; doc++) {
            int64_t begin = document_starts[doc], T = document_starts[doc + 1] - begin;
            int32_t cu_seqlens[2] = {0, (int32_t)T};
            bl_micro_batch batch = {.T = T,
                                    .n_documents = 1,
                                    .position = m.position + begin,
                                    .sample = m.sample + begin,
                                    .cu_seqlens = cu_seqlens};
            result r = run(&m, &batch, BL_SAVE_S2, begin);
            check_close(&m, "out", r.out, out + begin * H, T * H, chain_error(&m));
            check_close(&m, "dx", r.d, dx + begin * H, T * H, 3 * chain_error(&m));
            for (int64_t k = 0; k < m.lora.n_floats; k++) sum[k] += (double)r.gradients[k];
            free_result(&r);
        }
        check_close(&m, "LoRA gradient", packed.gradients, sum, m.lora.n_floats,
                    3 * chain_error(&m));
        free(out), free(dx), free(sum);
        free_result(&packed);
        free_toy(&m);
    }
}

static void test_no_tokens(void **state)
{
    toy m;
    (void)state;
    create_toy(&cases[1], &m);
    int32_t cu_seqlens[1] = {0};
    bl_micro_batch none = {.cu_seqlens = cu_seqlens};
    result r = run(&m, &none, BL_SAVE_S3, 0);
    for (int64_t i = 0; i < m.lora.n_floats; i++) assert_true(r.gradients[i] == 0);
    free_result(&r);
    free_toy(&m);
}

/* The LoRA layers' scratch is as large as the widest of their inputs asks for, in the order of the
 * workspace's pieces. */
static void test_scratch_of_the_widest_input(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const block_case *c = &cases[i];
        if (!c->r) continue;
        toy m;
        create_toy(c, &m);
        int64_t widest = bl_max_i64(bl_max_i64(c->hidden, c->inter), m.dims.q_width);
        float *memory =
            test_floats(floats_of(bl_block_workspace_bytes(&m.dims, T_ALL, c->r, true, true)));
        bl_block_workspace workspace;
        bl_block_place_workspace(&m.dims, T_ALL, c->r, true, true, memory, &workspace);
        assert_true((char *)workspace.dh.data - (char *)workspace.lora >=
                    (int64_t)sizeof(float) * (2 * T_ALL * c->r + T_ALL * widest));
        free(memory);
        free_toy(&m);
    }
}

/* On a GPU activations have two bytes; log-sum-exps and norms stay fp32. Places begin at 256 bytes,
 * and rows of micro-batches that follow each other do, too. */
static void test_sizes_in_bf16(void **state)
{
    enum { ALIGNMENT = 256 };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        toy m;
        create_toy(&cases[i], &m);
        bl_block_dims d = bl_block_dims_of(&m.config, BL_LAYER_DENSE, BL_DEVICE_CUDA, BL_BF16);
        int64_t mid = d.is_parallel ? 0 : d.hidden, gates = d.matrix[BL_GATE_UP].rows;
        int64_t halves = mid + d.q_width + d.qkv_width + gates,
                saved_bytes = bl_block_saved_bytes(&d, BL_SAVE_S4);
        assert_int_equal(d.act, BL_BF16);
        assert_int_equal(saved_bytes, 2 * halves + 4 * d.n_heads);
        assert_int_equal(bl_block_saved_bytes(&m.dims, BL_SAVE_S4), 4 * (halves + d.n_heads));
        for (int64_t T = 1; T < 300; T += 41) {
            int64_t rows = bl_block_rows(&d, T);
            char *memory = aligned_alloc(ALIGNMENT, (size_t)(rows * saved_bytes));
            bl_block_tensors t;
            bl_block_place_saved(&d, BL_SAVE_S4, T, memory, &t);
            const bl_tensor all[] = {d.is_parallel ? t.qkv : t.mid, t.attention, t.qkv, t.gate_up,
                                     bl_tensor_of(t.lse, BL_BF16)};
            for (size_t k = 0; k < BL_COUNT(all); k++) {
                assert_int_equal(all[k].dtype, BL_BF16);
                assert_int_equal((uintptr_t)all[k].data % ALIGNMENT, 0);
            }
            assert_int_equal((char *)t.gate_up.data + rows * 2 * gates - memory,
                             rows * saved_bytes);
            assert_true(rows >= T && rows * 2 % ALIGNMENT == 0);
            free(memory);
        }
        bl_block_workspace ws; /* of activations alone; products have scratch on a GPU */
        bl_block_place_workspace(&d, T_ALL, 0, false, true, NULL, &ws);
        assert_true(ws.lora_bytes > BL_MATMUL_SCRATCH_BYTES);
        assert_true(bl_block_workspace_bytes(&d, T_ALL, 0, false, true) - (int64_t)ws.lora_bytes <
                    bl_block_workspace_bytes(&m.dims, T_ALL, 0, false, true));
        free_toy(&m);
    }
}

/* One document in pieces of any size, through a key/value cache, and in one go. */
static void check_extend(const block_case *c)
{
    static const int64_t pieces[] = {5, 1, 4, 2};
    toy m;

    create_toy(c, &m);
    int64_t H = m.c->hidden, kv = m.dims.kv_width;
    int32_t whole[2] = {0, T_ALL};
    bl_micro_batch batch = {.T = T_ALL,
                            .n_documents = 1,
                            .position = m.position,
                            .sample = m.sample,
                            .cu_seqlens = whole};
    result r = run(&m, &batch, BL_SAVE_S0, 0);
    double *want = to_doubles(r.out, T_ALL * H);
    float *k_cache = test_floats(T_ALL * kv), *v_cache = test_floats(T_ALL * kv);
    float *memory =
        test_floats(floats_of(bl_block_workspace_bytes(&m.dims, 5, m.c->r, false, false)));
    bl_block_workspace workspace;
    bl_block_place_workspace(&m.dims, 5, m.c->r, false, false, memory, &workspace);
    for (int64_t past = 0, i = 0; past < T_ALL; past += pieces[i++]) {
        int32_t piece[2] = {0, (int32_t)pieces[i]};
        bl_micro_batch part = {.T = pieces[i], .n_documents = 1, .cu_seqlens = piece};
        assert_int_equal(bl_block_extend(m.d.stream, &m.block, &part, past, bl_tensor_f32(k_cache),
                                         bl_tensor_f32(v_cache), &workspace,
                                         bl_tensor_f32(m.x + past * H)),
                         BL_OK);
        test_finish(m.d);
    }
    check_close(&m, "extended", m.x, want, T_ALL * H, chain_error(&m));
    free(want), free(k_cache), free(v_cache), free(memory);
    free_result(&r);
    free_toy(&m);
}

static void test_extend(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        if (cases[i].dropout == 0) check_extend(&cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_reference),
        cmocka_unit_test(test_what_is_saved_changes_no_bit),
        cmocka_unit_test(test_documents_packed_and_apart),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_scratch_of_the_widest_input),
        cmocka_unit_test(test_sizes_in_bf16),
        cmocka_unit_test(test_extend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
