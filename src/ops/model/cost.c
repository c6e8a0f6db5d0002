/* SPDX-License-Identifier: Apache-2.0 */
/* cost.c -- FLOPs and bytes of each op. Elementwise ops count the elements that they read and
 * write; products count their operands. Small operands (norm weights, rstd, scales, tables) are
 * left out. */
#include <math.h>

#include "ops/cost.h"
#include "ops/element_internal.h"
#include "ops/cuda/matmul_plan.h"

static void add(bl_cost *cost, bl_cost_rate rate, double flops, double bytes)
{
    cost->kernel[cost->n++] = (bl_cost_kernel){rate, flops, bytes};
}

static double element_bytes(bl_tensor t)
{
    return (double)bl_dtype_bytes(t.dtype);
}

/* One kernel that reads and writes n elements of t's dtype, all in all. */
static bl_cost elementwise(double n, bl_tensor t)
{
    bl_cost cost = {.n = 0};
    add(&cost, BL_COST_MEMORY, 0, n * element_bytes(t));
    return cost;
}

/* The same kernel, which writes its result's codes, too. */
static bl_cost quantized(bl_cost cost, bl_quantized to, int64_t T, int64_t C)
{
    if (to.codes) cost.kernel[0].bytes += (double)T * (double)C;
    return cost;
}

/* ---- norms, RoPE, elementwise ---- */

static double norm_rows(int64_t T, int64_t n_heads)
{
    return (double)T * (n_heads > 0 ? (double)n_heads : 1.0);
}

bl_cost bl_cost_rmsnorm_forward(const bl_cost_setting *s, const bl_rmsnorm_forward_args *a)
{
    (void)s;
    return quantized(elementwise(norm_rows(a->T, a->n_heads) * 2 * (double)a->H, a->x),
                     a->quantized, a->T, a->H);
}

/* x, dy, dx; dx once more where it is added to. An overwritten one counts the same. */
bl_cost bl_cost_rmsnorm_backward(const bl_cost_setting *s, const bl_rmsnorm_backward_args *a)
{
    (void)s;
    return elementwise(norm_rows(a->T, a->n_heads) * 4 * (double)a->H, a->x);
}

bl_cost bl_cost_layernorm_forward(const bl_cost_setting *s, const bl_layernorm_forward_args *a)
{
    (void)s;
    return elementwise((double)a->T * 2 * (double)a->H, a->x);
}

bl_cost bl_cost_layernorm_backward(const bl_cost_setting *s, const bl_layernorm_backward_args *a)
{
    (void)s;
    return elementwise((double)a->T * 4 * (double)a->H, a->x);
}

bl_cost bl_cost_rope(const bl_cost_setting *s, const bl_rope_args *a)
{
    (void)s;
    return elementwise((double)a->T * 2 * (double)(a->n_heads * bl_rope_width(a->d, a->d_rotated)),
                       a->x);
}

bl_cost bl_cost_swiglu_forward(const bl_cost_setting *s, const bl_swiglu_forward_args *a)
{
    (void)s;
    return quantized(elementwise((double)a->T * 3 * (double)a->I, a->h), a->quantized, a->T, a->I);
}

bl_cost bl_cost_swiglu_backward(const bl_cost_setting *s, const bl_swiglu_backward_args *a)
{
    (void)s;
    return elementwise((double)a->T * 5 * (double)a->I, a->dh);
}

bl_cost bl_cost_gelu_forward(const bl_cost_setting *s, const bl_gelu_forward_args *a)
{
    (void)s;
    return elementwise(2 * (double)a->n, a->h);
}

bl_cost bl_cost_gelu_backward(const bl_cost_setting *s, const bl_gelu_backward_args *a)
{
    (void)s;
    return elementwise(3 * (double)a->n, a->dh);
}

bl_cost bl_cost_add(const bl_cost_setting *s, const bl_add_args *a)
{
    (void)s;
    return elementwise(3 * (double)a->n, a->y);
}

bl_cost bl_cost_add_bias(const bl_cost_setting *s, const bl_add_bias_args *a)
{
    (void)s;
    return elementwise(2 * (double)a->T * (double)a->N, a->y);
}

bl_cost bl_cost_scale(const bl_cost_setting *s, const bl_scale_args *a)
{
    (void)s;
    return elementwise(2 * (double)a->n, a->y);
}

bl_cost bl_cost_cast(const bl_cost_setting *s, const bl_cast_args *a)
{
    bl_cost cost = {.n = 0};
    (void)s;
    add(&cost, BL_COST_MEMORY, 0, (double)a->n * (element_bytes(a->x) + element_bytes(a->y)));
    return cost;
}

bl_cost bl_cost_dropout(const bl_cost_setting *s, const bl_dropout_args *a)
{
    (void)s;
    return elementwise((double)a->T * 2 * (double)a->C, a->y);
}

bl_cost bl_cost_embedding(const bl_cost_setting *s, const bl_embedding_args *a)
{
    (void)s;
    return elementwise((double)a->T * 2 * (double)a->H, a->y);
}

/* ---- gradients of trained weights ---- */

bl_cost bl_cost_norm_gradients(const bl_cost_setting *s, const bl_norm_gradients_args *a)
{
    (void)s;
    return elementwise(norm_rows(a->T, a->n_heads) * (a->dw ? 2 : 1) * (double)a->H, a->dy);
}

/* dy; rows of the gradient are read and written. */
bl_cost bl_cost_embedding_backward(const bl_cost_setting *s, const bl_embedding_backward_args *a)
{
    (void)s;
    return elementwise((double)a->T * 3 * (double)a->H, a->dy);
}

/* ---- attention: the causal half, or the window's part of it ---- */

/* Those of the data, or of micro-batches of T tokens where they have others. */
static bl_token_statistics statistics_of(const bl_cost_setting *s, int64_t T)
{
    for (int i = 0; i < s->n_data; i++)
        if (s->data[i].T == T) return s->data[i];
    return (bl_token_statistics){T, s->document_tokens, s->label_part};
}

/* The keys that a query sees, on average over a document of document_tokens: half of them, or the
 * window less the half window that its first tokens lack. Documents of different lengths see at
 * most this. */
static double visible_keys(const bl_cost_setting *s, int64_t T, int64_t window)
{
    double all = statistics_of(s, T).document_tokens, w = (double)window;
    return window == 0 || w >= all ? all / 2 : w - w * w / (2 * all);
}

bl_cost bl_cost_attention_forward(const bl_cost_setting *s, const bl_attention_forward_args *a)
{
    double T = (double)a->T, q = (double)(a->n_heads * a->d),
           qkv = q + (double)(2 * a->n_kv_heads * a->d);
    bl_cost cost = {.n = 0};

    add(&cost, BL_COST_ATTENTION_FORWARD, 4 * T * visible_keys(s, a->T, a->window) * q,
        T * (q + qkv) * element_bytes(a->q));
    return cost;
}

bl_cost bl_cost_attention_backward(const bl_cost_setting *s, const bl_attention_backward_args *a)
{
    double T = (double)a->T, q = (double)(a->n_heads * a->d),
           qkv = q + (double)(2 * a->n_kv_heads * a->d);
    bl_cost cost = {.n = 0};

    add(&cost, BL_COST_ATTENTION_BACKWARD, 10 * T * visible_keys(s, a->T, a->window) * q,
        T * (2 * q + 2 * qkv) * element_bytes(a->q));
    return cost;
}

/* ---- products ---- */

/* With LoRA's factors; C counts once, also where it is added to, and an addend apart from it. */
bl_cost bl_cost_matmul(const bl_cost_setting *s, const bl_matmul_args *a)
{
    double M = (double)a->M, N = (double)a->N, K = (double)a->K;
    bl_cost cost = {.n = 0};

    (void)s;
    int n_results = bl_tensor_is_there(a->addend) && a->beta != 0 ? 2 : 1;
    double result_bytes = element_bytes(bl_tensor_is_there(a->c) ? a->c : a->a);
    add(&cost, BL_COST_LORA, 2 * M * N * K,
        (M * K + K * N) * element_bytes(a->a) + n_results * M * N * result_bytes);
    return cost;
}

static double stored_bytes(const bl_weight *w)
{
    double bytes = 0;
    for (int i = 0; i < w->n_segments; i++)
        bytes +=
            (double)w->segment[i].rows * (double)bl_format_row_bytes(w->segment[i].format, w->cols);
    return bytes;
}

/* The copy that the product makes of the matrix first, unless it is in `prepared` already: the
 * matrix in bf16; for dx in FP8 its codes transposed. */
static void prepare(const bl_matmul_weight_args *a, ops_gemm_kind kind, bl_cost *cost)
{
    double weights = (double)a->weight.rows * (double)a->weight.cols;
    bool is_bf16 = kind == OPS_GEMM_BF16, is_own = ops_matmul_plan_layout(a, kind).has_own;
    unsigned piece = is_bf16 ? OPS_MADE_DENSE : OPS_MADE_TURNED, unused = 0;
    unsigned *made = is_own ? &unused : &a->prepared->made;

    if (is_bf16 ? ops_matmul_plan_is_dense(&a->weight) : a->forward) return;
    if (*made & piece) return;
    *made |= piece;
    add(cost, BL_COST_PREPARE, 0, stored_bytes(&a->weight) + (is_bf16 ? 2 * weights : weights));
}

/* y = x W^T or dx = dy W. `out` counts twice where it is added to. */
bl_cost bl_cost_matmul_weight(const bl_cost_setting *s, const bl_matmul_weight_args *a)
{
    const bl_weight *w = &a->weight;
    double T = (double)a->T, rows = (double)w->rows, cols = (double)w->cols, weights = rows * cols,
           inner = a->forward ? cols : rows, outer = a->forward ? rows : cols,
           element = element_bytes(a->in), outputs = T * outer * element * (a->beta != 0 ? 2 : 1);
    bool is_cuda = s->kind == BL_DEVICE_CUDA;
    ops_gemm_kind kind = is_cuda ? ops_matmul_plan_kind(a, NULL) : OPS_GEMM_BF16;
    bool is_fp8 = kind != OPS_GEMM_BF16;
    double weight_bytes = is_fp8 ? weights : is_cuda ? 2 * weights : stored_bytes(w);
    bl_cost cost = {.n = 0};

    if (is_cuda) prepare(a, kind, &cost);
    if (is_fp8 && !a->is_quantized)
        add(&cost, BL_COST_MEMORY, 0, T * inner * (element + 1)); /* `in` is quantized */
    bl_cost_rate rate = ops_matmul_plan_has_fast_sums(a, kind) ? BL_COST_FP8_FAST_GEMM
                        : is_fp8                               ? BL_COST_FP8_GEMM
                                                               : BL_COST_GEMM;
    add(&cost, rate, 2 * T * weights, weight_bytes + T * inner * (is_fp8 ? 1 : element) + outputs);
    return cost;
}

/* Logits, and with dx its product; fp32 logits are read for the maximum, the sum and the gradient,
 * which is written. */
bl_cost bl_cost_loss_head(const bl_cost_setting *s, const bl_loss_head_args *a)
{
    double tokens = (double)a->T * statistics_of(s, a->T).label_part, V = (double)a->V,
           H = (double)a->H, element = element_bytes(a->x);
    int n_products = bl_tensor_is_there(a->dx) ? 2 : 1;
    bl_cost cost = {.n = 0};

    for (int i = 0; i < n_products; i++)
        add(&cost, BL_COST_HEAD, 2 * tokens * V * H,
            stored_bytes(&a->head) + tokens * (V + H) * element);
    if (a->d_head)
        add(&cost, BL_COST_HEAD, 2 * tokens * V * H, (2 * V * H + tokens * (V + H)) * element);
    if (a->term) { /* logits += s u B^T, and with dx dB and du: as one kernel */
        double r = (double)a->term->r;
        int n = 2 * n_products - 1;
        add(&cost, BL_COST_HEAD, n * 2 * tokens * V * r, n * (r + tokens) * V * element);
    }
    add(&cost, BL_COST_MEMORY, 0, tokens * V * (3 * 4 + element));
    return cost;
}

/* ---- experts ---- */

/* Of a group, on average. */
static double rows_of(const bl_routing *r)
{
    double rows = (double)r->T * (double)r->top_k;
    return r->n_all > 0 ? rows * (double)r->n_experts / (double)r->n_all : rows;
}

/* Logits; x is read, the router once. */
bl_cost bl_cost_route(const bl_cost_setting *s, const bl_route_args *a)
{
    double T = (double)a->routing.T, E = (double)a->routing.n_experts, H = (double)a->H;
    bl_cost cost = {.n = 0};

    (void)s;
    add(&cost, BL_COST_LORA, 2 * T * E * H, E * H * 4 + T * H * element_bytes(a->x) + T * E * 4);
    return cost;
}

bl_cost bl_cost_route_backward(const bl_cost_setting *s, const bl_route_backward_args *a)
{
    double T = (double)a->routing.T, E = (double)a->routing.n_experts, H = (double)a->H,
           used = a->is_normed || a->is_sigmoid ? (double)a->routing.top_k : E;
    bl_cost cost = {.n = 0};

    (void)s;
    add(&cost, BL_COST_LORA, 2 * T * used * H, E * H * 4 + 2 * T * H * element_bytes(a->dx));
    return cost;
}

bl_cost bl_cost_permute(const bl_cost_setting *s, const bl_permute_args *a)
{
    (void)s;
    return elementwise(2 * rows_of(&a->routing) * (double)a->C, a->x);
}

/* A token's y is written in one of the calls; sums in between are read and written, in fp32, with
 * each row. */
bl_cost bl_cost_combine(const bl_cost_setting *s, const bl_combine_args *a)
{
    double rows = rows_of(&a->routing), C = (double)a->C, tokens = rows / (double)a->routing.top_k;

    (void)s;
    bl_cost cost = elementwise((rows + (bl_tensor_is_there(a->z) ? 2 : 1) * tokens) * C, a->rows);
    if (a->sum) cost.kernel[0].bytes += 2 * rows * C * (double)sizeof *a->sum;
    return cost;
}

bl_cost bl_cost_move_rows(const bl_cost_setting *s, const bl_move_rows_args *a)
{
    (void)s;
    return elementwise(2 * rows_of(&a->routing) * (double)a->C, a->rows);
}

bl_cost bl_cost_add_expert_bias(const bl_cost_setting *s, const bl_add_expert_bias_args *a)
{
    (void)s;
    return elementwise(2 * rows_of(&a->routing) * (double)a->N, a->rows);
}

/* h and d read, d written; dy read */
bl_cost bl_cost_weigh_backward(const bl_cost_setting *s, const bl_weigh_backward_args *a)
{
    (void)s;
    return elementwise(rows_of(&a->routing) * (3 * (double)a->C + (a->bias ? (double)a->N : 0)),
                       a->h);
}

bl_cost bl_cost_swiglu_clamped_forward(const bl_cost_setting *s,
                                       const bl_swiglu_clamped_forward_args *a)
{
    (void)s;
    return elementwise((double)a->T * 3 * (double)a->I, a->h);
}

bl_cost bl_cost_swiglu_clamped_backward(const bl_cost_setting *s,
                                        const bl_swiglu_clamped_backward_args *a)
{
    (void)s;
    return elementwise((double)a->T * 5 * (double)a->I, a->dh);
}

/* The matrices of all experts are read, or of as many as there are rows. */
bl_cost bl_cost_grouped_matmul(const bl_cost_setting *s, const bl_grouped_matmul_args *a)
{
    double n = rows_of(&a->routing), E = (double)a->routing.n_experts,
           rows = (double)a->weight.rows / E, cols = (double)a->weight.cols;
    bl_cost cost = {.n = 0};

    (void)s;
    add(&cost, BL_COST_GEMM, 2 * n * rows * cols,
        stored_bytes(&a->weight) * fmin(1, n / E) + n * (rows + cols) * element_bytes(a->in));
    return cost;
}

/* read and written */
bl_cost bl_cost_weigh_rows(const bl_cost_setting *s, const bl_weigh_rows_args *a)
{
    (void)s;
    return elementwise(2 * rows_of(&a->routing) * (double)a->C, a->x);
}

bl_cost bl_cost_grouped_gradient(const bl_cost_setting *s, const bl_grouped_gradient_args *a)
{
    double n = rows_of(&a->routing), M = (double)a->M, N = (double)a->N;
    bl_cost cost = {.n = 0};

    (void)s;
    add(&cost, BL_COST_LORA, 2 * n * M * N,
        n * (M + N) * element_bytes(a->left) + (double)a->routing.n_experts * M * N * 4);
    return cost;
}

/* ---- optimizer ---- */

/* w, m, v read and written, g read */
bl_cost bl_cost_adamw(const bl_cost_setting *s, const bl_adamw_args *a)
{
    bl_cost cost = {.n = 0};
    (void)s;
    add(&cost, BL_COST_OPTIMIZER, 0,
        (double)(3 * sizeof(float) + 4 * bl_dtype_bytes(a->m.dtype)) * (double)a->n);
    return cost;
}

bl_cost bl_cost_sum_squares(const bl_cost_setting *s, const bl_sum_squares_args *a)
{
    bl_cost cost = {.n = 0};
    (void)s;
    add(&cost, BL_COST_OPTIMIZER, 0, (double)sizeof(float) * (double)a->n);
    return cost;
}

bl_cost bl_cost_add_sums(const bl_cost_setting *s, const bl_add_sums_args *a)
{
    bl_cost cost = {.n = 0};
    (void)s;
    add(&cost, BL_COST_OPTIMIZER, 0, (double)sizeof(double) * (double)a->n);
    return cost;
}

/* One thread's work: a launch. */
bl_cost bl_cost_clip_scale(const bl_cost_setting *s, const bl_clip_scale_args *a)
{
    (void)s, (void)a;
    return (bl_cost){.n = 1};
}

/* ---- seconds ---- */

static double or_else(double rate, double otherwise)
{
    return rate > 0 ? rate : otherwise;
}

static double flops_per_s(bl_cost_rate rate, const bl_rates *r)
{
    switch (rate) {
    case BL_COST_FP8_GEMM:
        return r->fp8_gemm_flops_per_s;
    case BL_COST_FP8_FAST_GEMM:
        return or_else(r->fp8_fast_gemm_flops_per_s, r->fp8_gemm_flops_per_s);
    case BL_COST_LORA:
        return or_else(r->lora_flops_per_s, r->gemm_flops_per_s);
    case BL_COST_HEAD:
        return or_else(r->head_flops_per_s, r->gemm_flops_per_s);
    case BL_COST_ATTENTION_FORWARD:
        return r->attention_forward_flops_per_s;
    case BL_COST_ATTENTION_BACKWARD:
        return r->attention_backward_flops_per_s;
    default:
        return r->gemm_flops_per_s;
    }
}

double bl_cost_seconds(const bl_cost_kernel *k, const bl_rates *r)
{
    double memory = k->rate == BL_COST_OPTIMIZER
                        ? or_else(r->optimizer_bytes_per_s, r->memory_bytes_per_s)
                        : r->memory_bytes_per_s;
    double seconds = r->launch_s;

    if (k->rate == BL_COST_PREPARE) return k->bytes / 3 / r->decode_weights_per_s;
    if (k->flops > 0) seconds = fmax(seconds, k->flops / flops_per_s(k->rate, r));
    if (memory > 0) seconds = fmax(seconds, k->bytes / memory);
    return seconds;
}
