/* SPDX-License-Identifier: Apache-2.0 */
/* train_step.c -- a whole training step of Ballast in one file of plain loops. Read it first: src/
 * computes the same, in blocks and vectors, on several ranks, with the weights stored elsewhere.
 *
 *     train_step ADAPTER
 *
 * fine-tunes demo/base for three steps and writes the LoRA weights to the file ADAPTER. Per step it
 * prints the loss and the norm of the gradients. tests/reference/test_train_step compares them with
 * those of `ballast train`.
 *
 * A step, and the parts of this file in their order:
 *     1. rows of token ids                                          read_rows
 *     2. x = embedding of the ids                                   row_forward_backward
 *     3. for each layer:                                            layer_forward
 *            q, k, v = rope(rmsnorm(x) W_qkv^T)
 *            x = x + attention(q, k, v) W_o^T
 *            g, u = rmsnorm(x) W_gate_up^T
 *            x = x + (silu(g) u) W_down^T
 *     4. loss = mean of -log softmax(rmsnorm(x) W_head^T)[next id]  loss_head
 *     5. the gradients of all that, backward                        layer_backward
 *     6. gradients clipped to a norm; AdamW                         clip_gradients, adamw
 * Each frozen W of a projection is stored in FP8 and has a trained update: W + s B A (LoRA).
 *
 * All arithmetic is in double. Matrices are row-major; (T,H) has T rows. An f' in an equation is
 * the gradient of the loss by f; functions named _backward add to the gradients of their inputs.
 * The papers of the equations are in src/README.md. Not here: LoRA's dropout, which is 0. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ballast reads the files; the arithmetic does not use it. */
#include "base/status.h"
#include "data/dataset.h"
#include "fp8/codec.h"
#include "linear/lora_linear.h"
#include "store/safetensors.h"
#include "tokenizer/tokenizer.h"

/* demo/base/config.json */
enum {
    LAYERS = 4,
    H = 128,      /* hidden size */
    I = 320,      /* intermediate size of the MLP */
    HEADS = 8,    /* of queries */
    KV_HEADS = 4, /* of keys and values: one per HEADS / KV_HEADS query heads */
    D = 16,       /* head dimension */
    QD = HEADS * D,
    KVD = KV_HEADS * D,
    V = 1024 /* vocabulary */
};
static const double RMS_EPS = 1e-5, ROPE_THETA = 10000;
static const double ROPE_FACTOR = 8, ROPE_LOW = 1, ROPE_HIGH = 4, ROPE_LENGTH = 256;

/* The run; test_train_step gives `ballast train` the same values. */
enum { STEPS = 3, ROWS = 2 /* per step */, T_MAX = 192, R = 8 /* LoRA rank */, SEED = 42 };
static const double LORA_SCALE = 16.0 / R; /* s = alpha / r */
static const double LEARNING_RATE = 4e-3, WEIGHT_DECAY = 0.1, BETA1 = 0.9, BETA2 = 0.999;
static const double ADAM_EPS = 1e-3, MAX_GRAD_NORM = 0.5;

/* A projection: W (N,K) is frozen, A (R,K) and B (N,R) are trained. */
typedef struct linear {
    const char *name; /* in the checkpoint */
    int N, K;
    double *W, *A, *B, *dA, *dB;
} linear;

enum { Q_PROJ, K_PROJ, V_PROJ, O_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ, PROJECTIONS };

static const linear PROJECTION[PROJECTIONS] = {
    {.name = "self_attn.q_proj", .N = QD, .K = H},  {.name = "self_attn.k_proj", .N = KVD, .K = H},
    {.name = "self_attn.v_proj", .N = KVD, .K = H}, {.name = "self_attn.o_proj", .N = H, .K = QD},
    {.name = "mlp.gate_proj", .N = I, .K = H},      {.name = "mlp.up_proj", .N = I, .K = H},
    {.name = "mlp.down_proj", .N = H, .K = I}};

typedef struct model {
    double embedding[V * H]; /* also the head: the weights are tied */
    double final_norm[H];
    struct layer {
        double norm1[H], norm2[H];
        linear projection[PROJECTIONS];
    } layer[LAYERS];
} model;

/* All W in one vector, and all A and B in another, projection after projection, layer after layer;
 * of these the gradients and AdamW's moments. */
enum {
    FROZEN = LAYERS * (2 * H * QD + 2 * H * KVD + 3 * H * I),
    TRAINED = LAYERS * R * (2 * (H + QD) + 2 * (H + KVD) + 3 * (H + I))
};
static double frozen[FROZEN];
static double trained[TRAINED], gradient[TRAINED], moment1[TRAINED], moment2[TRAINED];

/* A row: ids, and of each the label (the id, or -100: no loss) and the document that it is of. */
struct row {
    int T;
    int id[T_MAX], label[T_MAX], document[T_MAX];
};

/* The activations that a layer's forward pass saves for the backward pass. */
typedef struct activations {
    double x[T_MAX * H], normed1[T_MAX * H];
    double q[T_MAX * QD], k[T_MAX * KVD], v[T_MAX * KVD];
    double p[HEADS * T_MAX * T_MAX], attended[T_MAX * QD];
    double mid[T_MAX * H], normed2[T_MAX * H];
    double g[T_MAX * I], u[T_MAX * I], h[T_MAX * I];
} activations;

/* ---- a linear layer with LoRA ---- */

/* y = y + s x W^T    x (T,K), W (N,K), y (T,N) */
static void add_product(int T, int N, int K, double s, const double *x, const double *W, double *y)
{
    for (int t = 0; t < T; t++)
        for (int n = 0; n < N; n++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += x[t * K + k] * W[n * K + k];
            y[t * N + n] += s * sum;
        }
}

/* x' = x' + s y' W */
static void add_input_gradient(int T, int N, int K, double s, const double *dy, const double *W,
                               double *dx)
{
    for (int t = 0; t < T; t++)
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) dx[t * K + k] += s * dy[t * N + n] * W[n * K + k];
}

/* W' = W' + s y'^T x */
static void add_weight_gradient(int T, int N, int K, double s, const double *dy, const double *x,
                                double *dW)
{
    for (int t = 0; t < T; t++)
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) dW[n * K + k] += s * dy[t * N + n] * x[t * K + k];
}

/* y = x W^T + s a B^T with a = x A^T */
static void linear_forward(const linear *l, int T, const double *x, double *y)
{
    double a[T_MAX * R] = {0};

    memset(y, 0, (size_t)(T * l->N) * sizeof *y);
    add_product(T, l->N, l->K, 1, x, l->W, y);
    add_product(T, R, l->K, 1, x, l->A, a);
    add_product(T, l->N, R, LORA_SCALE, a, l->B, y);
}

/* x' = y' W + a' A with a' = s y' B    A' = a'^T x    B' = s y'^T a    W is frozen: no gradient */
static void linear_backward(const linear *l, int T, const double *x, const double *dy, double *dx)
{
    double a[T_MAX * R] = {0}, da[T_MAX * R] = {0};

    add_product(T, R, l->K, 1, x, l->A, a); /* computed again, not kept */
    add_input_gradient(T, l->N, R, LORA_SCALE, dy, l->B, da);
    add_input_gradient(T, l->N, l->K, 1, dy, l->W, dx);
    add_input_gradient(T, R, l->K, 1, da, l->A, dx);
    add_weight_gradient(T, R, l->K, 1, da, x, l->dA);
    add_weight_gradient(T, l->N, R, LORA_SCALE, dy, a, l->dB);
}

/* ---- RMSNorm ---- */

/* y = x w rho with rho = 1 / sqrt(mean(x^2) + eps), per token */
static double inverse_rms(const double *x)
{
    double sum = 0;
    for (int i = 0; i < H; i++) sum += x[i] * x[i];
    return 1 / sqrt(sum / H + RMS_EPS);
}

static void rmsnorm_forward(const double *w, int T, const double *x, double *y)
{
    for (int t = 0; t < T; t++) {
        double rho = inverse_rms(x + t * H);
        for (int i = 0; i < H; i++) y[t * H + i] = x[t * H + i] * w[i] * rho;
    }
}

/* x' = rho (y' w - x rho^2 mean(y' w x)) */
static void rmsnorm_backward(const double *w, int T, const double *x, const double *dy, double *dx)
{
    for (int t = 0; t < T; t++) {
        const double *xt = x + t * H, *dyt = dy + t * H;
        double rho = inverse_rms(xt), mean = 0;
        for (int i = 0; i < H; i++) mean += dyt[i] * w[i] * xt[i] / H;
        for (int i = 0; i < H; i++)
            dx[t * H + i] += rho * (dyt[i] * w[i] - xt[i] * rho * rho * mean);
    }
}

/* ---- rotary position embedding ---- */

/* The angle per position of pair i: theta^(-2i/D), slowed for long wavelengths as Llama 3.1's
 * config.json says:
 *     wavelength > LENGTH / LOW: divided by FACTOR
 *     wavelength < LENGTH / HIGH: unchanged
 *     between: a mixture of both, s from 0 to 1 */
static double rope_frequency(int i)
{
    double frequency = pow(ROPE_THETA, -2.0 * i / D);
    double wavelength = 2 * acos(-1) / frequency;
    double s = (ROPE_LENGTH / wavelength - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW);
    s = fmin(fmax(s, 0), 1);
    return (1 - s) * frequency / ROPE_FACTOR + s * frequency;
}

/* Rotates the pairs (x_i, x_{i+D/2}) of every head of token t by direction * t * frequency_i. In
 * place. The products q . k depend on differences of t only, so that it makes no difference where a
 * document begins. Rotations are orthogonal: the backward pass is the rotation in the other
 * direction. */
static void rope(int T, int n_heads, int direction, double *x)
{
    for (int i = 0; i < D / 2; i++) {
        double frequency = rope_frequency(i);
        for (int t = 0; t < T; t++) {
            double c = cos(t * frequency), s = direction * sin(t * frequency);
            for (int h = 0; h < n_heads; h++) {
                double *a = x + (t * n_heads + h) * D + i, *b = a + D / 2;
                double a0 = *a, b0 = *b;
                *a = a0 * c - b0 * s;
                *b = a0 * s + b0 * c;
            }
        }
    }
}

/* ---- attention ---- */

/* Token t sees token j: not a later one (causal), and of its document only. */
static int sees(const struct row *row, int t, int j)
{
    return j <= t && row->document[j] == row->document[t];
}

static double dot(const double *a, const double *b)
{
    double sum = 0;
    for (int i = 0; i < D; i++) sum += a[i] * b[i];
    return sum;
}

/* p_tj = softmax over the j that t sees of (q_t . k_j / sqrt(D))    o_t = sum_j p_tj v_j
 * per query head h; its keys and values are those of head h / (HEADS / KV_HEADS). */
static void attention_forward(const struct row *row, activations *a)
{
    int T = row->T;
    for (int h = 0; h < HEADS; h++)
        for (int t = 0; t < T; t++) {
            int kv = h / (HEADS / KV_HEADS) * D;
            double *p = a->p + (h * T + t) * T, *o = a->attended + t * QD + h * D;
            double max = -INFINITY, sum = 0;
            for (int j = 0; j < T; j++) {
                p[j] = sees(row, t, j) ? dot(a->q + t * QD + h * D, a->k + j * KVD + kv) / sqrt(D)
                                       : -INFINITY;
                max = fmax(max, p[j]);
            }
            for (int j = 0; j < T; j++) sum += p[j] = exp(p[j] - max);
            memset(o, 0, D * sizeof *o);
            for (int j = 0; j < T; j++) {
                p[j] /= sum;
                for (int i = 0; i < D; i++) o[i] += p[j] * a->v[j * KVD + kv + i];
            }
        }
}

/* v_j' = sum_t p_tj o_t'    s_tj' = p_tj (o_t' . v_j - o_t' . o_t)
 * q_t' = sum_j s_tj' k_j / sqrt(D)    k_j' = sum_t s_tj' q_t / sqrt(D) */
static void attention_backward(const struct row *row, const activations *a, const double *d_o,
                               double *dq, double *dk, double *dv)
{
    int T = row->T;
    for (int h = 0; h < HEADS; h++)
        for (int t = 0; t < T; t++) {
            int kv = h / (HEADS / KV_HEADS) * D, at = t * QD + h * D;
            const double *p = a->p + (h * T + t) * T;
            double delta = dot(d_o + at, a->attended + at);
            for (int j = 0; j <= t; j++) {
                int from = j * KVD + kv;
                double ds = p[j] * (dot(d_o + at, a->v + from) - delta) / sqrt(D);
                for (int i = 0; i < D; i++) {
                    dv[from + i] += p[j] * d_o[at + i];
                    dq[at + i] += ds * a->k[from + i];
                    dk[from + i] += ds * a->q[at + i];
                }
            }
        }
}

/* ---- SwiGLU ---- */

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* h = silu(g) u with silu(g) = g sigmoid(g) */
static void swiglu_forward(int n, const double *g, const double *u, double *h)
{
    for (int i = 0; i < n; i++) h[i] = g[i] * sigmoid(g[i]) * u[i];
}

/* g' = h' u sigmoid(g) (1 + g (1 - sigmoid(g)))    u' = h' silu(g) */
static void swiglu_backward(int n, const double *g, const double *u, const double *dh, double *dg,
                            double *du)
{
    for (int i = 0; i < n; i++) {
        double sigma = sigmoid(g[i]);
        dg[i] += dh[i] * u[i] * sigma * (1 + g[i] * (1 - sigma));
        du[i] += dh[i] * g[i] * sigma;
    }
}

/* ---- a decoder layer ---- */

/* a->x is the input; the output goes to y (T,H). */
static void layer_forward(const struct layer *layer, const struct row *row, activations *a,
                          double *y)
{
    const linear *l = layer->projection;
    int T = row->T;

    rmsnorm_forward(layer->norm1, T, a->x, a->normed1);
    linear_forward(&l[Q_PROJ], T, a->normed1, a->q);
    linear_forward(&l[K_PROJ], T, a->normed1, a->k);
    linear_forward(&l[V_PROJ], T, a->normed1, a->v);
    rope(T, HEADS, 1, a->q);
    rope(T, KV_HEADS, 1, a->k);
    attention_forward(row, a);
    linear_forward(&l[O_PROJ], T, a->attended, a->mid);
    for (int i = 0; i < T * H; i++) a->mid[i] += a->x[i];

    rmsnorm_forward(layer->norm2, T, a->mid, a->normed2);
    linear_forward(&l[GATE_PROJ], T, a->normed2, a->g);
    linear_forward(&l[UP_PROJ], T, a->normed2, a->u);
    swiglu_forward(T * I, a->g, a->u, a->h);
    linear_forward(&l[DOWN_PROJ], T, a->h, y);
    for (int i = 0; i < T * H; i++) y[i] += a->mid[i];
}

/* The same from the last line to the first: dx holds the gradient of the layer's output, and then
 * that of its input. A residual hands the gradient on to both of its terms. */
static void layer_backward(const struct layer *layer, const struct row *row, const activations *a,
                           double *dx)
{
    static activations d; /* gradients, under the names of the activations */
    const linear *l = layer->projection;
    int T = row->T;

    memset(&d, 0, sizeof d);
    linear_backward(&l[DOWN_PROJ], T, a->h, dx, d.h);
    swiglu_backward(T * I, a->g, a->u, d.h, d.g, d.u);
    linear_backward(&l[GATE_PROJ], T, a->normed2, d.g, d.normed2);
    linear_backward(&l[UP_PROJ], T, a->normed2, d.u, d.normed2);
    rmsnorm_backward(layer->norm2, T, a->mid, d.normed2, dx); /* dx: now of mid */

    linear_backward(&l[O_PROJ], T, a->attended, dx, d.attended);
    attention_backward(row, a, d.attended, d.q, d.k, d.v);
    rope(T, HEADS, -1, d.q);
    rope(T, KV_HEADS, -1, d.k);
    linear_backward(&l[Q_PROJ], T, a->normed1, d.q, d.normed1);
    linear_backward(&l[K_PROJ], T, a->normed1, d.k, d.normed1);
    linear_backward(&l[V_PROJ], T, a->normed1, d.v, d.normed1);
    rmsnorm_backward(layer->norm1, T, a->x, d.normed1, dx);
}

/* ---- the loss ---- */

/* Token t predicts the label of token t + 1; the last one predicts nothing. -100: not counted. */
static int target_of(const struct row *row, int t)
{
    return t + 1 < row->T ? row->label[t + 1] : -100;
}

static int count_labels(const struct row *row)
{
    int n = 0;
    for (int t = 0; t < row->T; t++) n += target_of(row, t) >= 0;
    return n;
}

/* logits_t = x_t E^T    loss = - sum_t log softmax(logits_t)[target_t] / n
 * x_t' = (softmax(logits_t) - onehot(target_t)) E / n
 * n: the labels of the whole step, so that its rows' losses and gradients add up to means. */
static double loss_head(const double *E, const struct row *row, int n_labels, const double *x,
                        double *dx)
{
    double loss = 0;

    for (int t = 0; t < row->T; t++) {
        double logits[V] = {0}, max = -INFINITY, sum = 0;
        int target = target_of(row, t);
        if (target < 0) continue;
        add_product(1, V, H, 1, x + t * H, E, logits);
        for (int v = 0; v < V; v++) max = fmax(max, logits[v]);
        for (int v = 0; v < V; v++) sum += exp(logits[v] - max);
        loss -= (logits[target] - max - log(sum)) / n_labels;
        for (int v = 0; v < V; v++) /* their gradients in place */
            logits[v] = (exp(logits[v] - max) / sum - (v == target)) / n_labels;
        add_input_gradient(1, V, H, 1, logits, E, dx + t * H);
    }
    return loss;
}

/* ---- the step ---- */

/* Adds a row's gradients to `gradient`; returns its part of the step's loss. */
static double row_forward_backward(const model *m, const struct row *row, int n_labels)
{
    static activations a[LAYERS];
    static double x[T_MAX * H], normed[T_MAX * H], d_normed[T_MAX * H], dx[T_MAX * H];
    int T = row->T;

    for (int t = 0; t < T; t++)
        memcpy(a[0].x + t * H, m->embedding + row->id[t] * H, H * sizeof *x);
    for (int l = 0; l < LAYERS; l++)
        layer_forward(&m->layer[l], row, &a[l], l + 1 < LAYERS ? a[l + 1].x : x);
    rmsnorm_forward(m->final_norm, T, x, normed);

    memset(d_normed, 0, sizeof d_normed);
    memset(dx, 0, sizeof dx);
    double loss = loss_head(m->embedding, row, n_labels, normed, d_normed);
    rmsnorm_backward(m->final_norm, T, x, d_normed, dx);
    for (int l = LAYERS - 1; l >= 0; l--) layer_backward(&m->layer[l], row, &a[l], dx);
    return loss;
}

/* g = g min(1, MAX_GRAD_NORM / (|g| + 1e-6)), the norm over all gradients. Returns |g|. */
static double clip_gradients(void)
{
    double squares = 0;
    for (int i = 0; i < TRAINED; i++) squares += gradient[i] * gradient[i];
    double norm = sqrt(squares), scale = fmin(1, MAX_GRAD_NORM / (norm + 1e-6));
    for (int i = 0; i < TRAINED; i++) gradient[i] *= scale;
    return norm;
}

/* w = w - lr decay w    m = b1 m + (1 - b1) g    v = b2 v + (1 - b2) g^2
 * w = w - lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)    step from 1 on */
static void adamw(int step)
{
    double bias1 = 1 - pow(BETA1, step), bias2 = 1 - pow(BETA2, step);
    for (int i = 0; i < TRAINED; i++) {
        double g = gradient[i];
        moment1[i] = BETA1 * moment1[i] + (1 - BETA1) * g;
        moment2[i] = BETA2 * moment2[i] + (1 - BETA2) * g * g;
        trained[i] -= LEARNING_RATE * WEIGHT_DECAY * trained[i];
        trained[i] -= LEARNING_RATE * (moment1[i] / bias1) / (sqrt(moment2[i] / bias2) + ADAM_EPS);
    }
}

/* ---- reading ---- */

static void check(bl_status status)
{
    if (status == BL_OK) return;
    fprintf(stderr, "train_step: %s\n", bl_error_text());
    exit(1);
}

static void read_tensor(const bl_safetensors *file, const char *name, int n, double *out)
{
    static float values[V * H]; /* the largest tensor's */
    const bl_stored_tensor *tensor = bl_safetensors_find(file, name);
    if (!tensor || tensor->n_bytes != n * (int64_t)bl_dtype_bytes(tensor->dtype))
        check(BL_FAIL(BL_EINPUT, "demo/base has no tensor %s of %d elements", name, n));
    check(bl_stored_tensor_read_f32(tensor, values));
    for (int i = 0; i < n; i++) out[i] = values[i];
}

/* W as fp8_row stores it: per row scale = max |w| / 448 (E4M3's largest number), and of each
 * element the E4M3 number nearest to w / scale. In fp32, by definition. */
static void round_to_fp8(int N, int K, double *W)
{
    for (int n = 0; n < N; n++) {
        float max = 0;
        for (int k = 0; k < K; k++) max = fmaxf(max, fabsf((float)W[n * K + k]));
        float scale = max > 0 ? max / 448 : 1;
        for (int k = 0; k < K; k++)
            W[n * K + k] = bl_e4m3_to_f32(bl_f32_to_e4m3((float)W[n * K + k] / scale)) * scale;
    }
}

/* The frozen weights; A uniform in +-1/sqrt(K) from the seed, B zero. */
static void read_model(model *m)
{
    bl_safetensors *file;
    int n_frozen = 0, n_trained = 0;
    check(bl_safetensors_open("demo/base/model.safetensors", &file));
    read_tensor(file, "model.embed_tokens.weight", V * H, m->embedding);
    read_tensor(file, "model.norm.weight", H, m->final_norm);
    for (int i = 0; i < LAYERS; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", i);
        read_tensor(file, name, H, m->layer[i].norm1);
        snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", i);
        read_tensor(file, name, H, m->layer[i].norm2);
        for (int j = 0; j < PROJECTIONS; j++) {
            linear *l = &m->layer[i].projection[j];
            float A[R * (I > QD ? I : QD)];
            *l = PROJECTION[j];
            l->W = frozen + n_frozen, n_frozen += l->N * l->K;
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", i, l->name);
            read_tensor(file, name, l->N * l->K, l->W);
            round_to_fp8(l->N, l->K, l->W);
            l->A = trained + n_trained, l->dA = gradient + n_trained, n_trained += R * l->K;
            l->B = trained + n_trained, l->dB = gradient + n_trained, n_trained += R * l->N;
            bl_lora_initialize(SEED, i, j, l->K, 0, R * l->K, A);
            for (int n = 0; n < R * l->K; n++) l->A[n] = A[n];
        }
    }
    bl_safetensors_close(file);
}

/* The first rows of demo/train.jsonl, several samples (documents) per row. */
static void read_rows(int n, struct row *rows)
{
    bl_dataset_options options = bl_dataset_default_options("demo/train.jsonl");
    bl_tokenizer *tokenizer;
    bl_dataset *samples, *packed;

    options.max_seq_length = T_MAX;
    check(bl_tokenizer_load("demo/base", &tokenizer));
    check(bl_dataset_open(&options, tokenizer, &samples));
    check(bl_dataset_pack(samples, BL_PACKING_PACK, T_MAX, 0, bl_dataset_count(samples), &packed));
    for (int i = 0; i < n; i++) {
        bl_sample sample;
        check(bl_dataset_get(packed, i, &sample));
        rows[i].T = (int)sample.n_tokens;
        for (int t = 0; t < rows[i].T; t++) {
            rows[i].id[t] = sample.ids[t];
            rows[i].label[t] = sample.labels[t];
            rows[i].document[t] = sample.document_ids[t];
        }
        bl_sample_free(&sample);
    }
    bl_dataset_close(packed);
    bl_dataset_close(samples);
    bl_tokenizer_destroy(tokenizer);
}

int main(int argc, char **argv)
{
    static model m;
    static struct row rows[STEPS * ROWS];
    if (argc != 2) check(BL_FAIL(BL_EUSAGE, "usage: train_step ADAPTER"));

    read_model(&m);
    read_rows(STEPS * ROWS, rows);
    for (int step = 1; step <= STEPS; step++) {
        const struct row *batch = rows + (step - 1) * ROWS;
        double loss = 0;
        int n_labels = 0;
        for (int i = 0; i < ROWS; i++) n_labels += count_labels(&batch[i]);
        memset(gradient, 0, sizeof gradient);
        for (int i = 0; i < ROWS; i++) loss += row_forward_backward(&m, &batch[i], n_labels);
        double norm = clip_gradients();
        adamw(step);
        printf("%d %.12g %.12g\n", step, loss, norm);
    }

    FILE *out = fopen(argv[1], "wb");
    if (!out || fwrite(trained, sizeof trained, 1, out) != 1 || fclose(out) != 0)
        check(bl_fail_errno(BL_EIO, "write %s", argv[1]));
    return 0;
}
