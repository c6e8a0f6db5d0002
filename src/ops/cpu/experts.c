/* SPDX-License-Identifier: Apache-2.0 */
/* experts.c -- a mixture's layer on the CPU: tokens and rows are items of the pool, and an expert's
 * product is the one of any frozen matrix. A token's results depend on its row of x alone. */
#include "ops/experts.h"

#include <math.h>

#include "ops/cpu/ops_cpu.h"
#include "ops/gemm.h"

enum { ROUTE_TOKENS = 16 }; /* of an item: the router's rows are read once for so many */

/* ---- the router ---- */

/* sum a_i b_i in 16 lanes. */
BL_CLONES static float dot_row(int64_t n, const float *a, const float *b)
{
    vf16 lanes = {0};
    float rest = 0, lane[16];
    int64_t i = 0;

    for (; i + 16 <= n; i += 16) lanes += *(const vf16 *)(a + i) * *(const vf16 *)(b + i);
    for (; i < n; i++) rest += a[i] * b[i];
    for (int k = 0; k < 16; k++) lane[k] = lanes[k];
    for (int half = 8; half > 0; half /= 2)
        for (int k = 0; k < half; k++) lane[k] += lane[k + half];
    return lane[0] + rest;
}

/* Logits of one token, by blocks of columns: those of bf16 are widened. */
static void add_logits(const bl_route_args *a, int64_t t, int64_t at, int64_t n, float *copy)
{
    const float *x = ops_read(a->x, t * a->H + at, n, copy);
    float *score = a->routing.score + t * a->routing.n_experts;

    for (int64_t e = 0; e < a->routing.n_experts; e++)
        score[e] += dot_row(n, x, a->router + e * a->H + at);
}

/* Whether expert e goes before `other`: of equal scores the lower index. */
static bool goes_before(const float *score, int32_t e, int32_t other)
{
    return score[e] > score[other] || (score[e] == score[other] && e < other);
}

/* chosen = the indices of the k largest of n scores, the largest first; -INFINITY is never chosen
 * before another. */
static void find_largest(int64_t n_scores, const float *score, int64_t k, int32_t *chosen)
{
    int64_t n = 0;

    for (int32_t e = 0; e < n_scores; e++) {
        int64_t at = n;
        while (at > 0 && goes_before(score, e, chosen[at - 1])) at--;
        if (at == k) continue;
        n = bl_min_i64(n + 1, k);
        for (int64_t i = n - 1; i > at; i--) chosen[i] = chosen[i - 1];
        chosen[at] = e;
    }
}

/* choice of experts outside the best groups = -INFINITY. groups: of n_groups scores. */
static void keep_groups(const bl_route_args *a, float *choice, float *groups, int32_t *best)
{
    int64_t size = a->routing.n_experts / a->n_groups;
    int32_t two[2];

    for (int64_t g = 0; g < a->n_groups; g++) {
        const float *own = choice + g * size;
        find_largest(size, own, bl_min_i64(2, size), two);
        groups[g] = own[two[0]] + (size > 1 ? own[two[1]] : 0);
    }
    find_largest(a->n_groups, groups, a->top_groups, best);
    for (int64_t g = 0; g < a->n_groups; g++) {
        bool is_kept = false;
        for (int64_t i = 0; i < a->top_groups; i++) is_kept |= best[i] == g;
        for (int64_t e = g * size; e < (g + 1) * size && !is_kept; e++) choice[e] = -INFINITY;
    }
}

/* chosen = the top_k experts, ascending. choice: of n_experts, then of n_groups numbers; the places
 * of the groups follow. */
static void choose(const bl_route_args *a, const float *score, float *choice, int32_t *chosen)
{
    const bl_routing *r = &a->routing;
    int64_t n = r->top_k, n_experts = r->n_experts;
    bool has_groups = a->n_groups > 1;

    if (a->correction || has_groups) {
        for (int64_t e = 0; e < n_experts; e++)
            choice[e] = score[e] + (a->correction ? a->correction[e] : 0);
        if (has_groups)
            keep_groups(a, choice, choice + n_experts,
                        (int32_t *)(void *)(choice + n_experts + a->n_groups));
        score = choice;
    }
    find_largest(n_experts, score, n, chosen);
    for (int64_t i = 1; i < n; i++)
        for (int64_t k = i; k > 0 && chosen[k] < chosen[k - 1]; k--) {
            int32_t swapped = chosen[k];
            chosen[k] = chosen[k - 1];
            chosen[k - 1] = swapped;
        }
}

/* In place: logits become p. */
static void activate_scores(const bl_route_args *a, float *score)
{
    int64_t n = a->routing.n_experts;

    if (!a->is_sigmoid) ops_scale(n, (float)(1 / ops_exp_sum(score, n, ops_max(score, n))), score);
    for (int64_t e = 0; a->is_sigmoid && e < n; e++)
        score[e] = (float)(1 / (1 + exp(-(double)score[e])));
}

static void route_token(const bl_route_args *a, int64_t t, float *scratch)
{
    const bl_routing *r = &a->routing;
    float *score = r->score + t * r->n_experts, *weight = r->weight + t * r->top_k, sum = 0;
    int32_t *chosen = r->expert + t * r->top_k;

    activate_scores(a, score);
    choose(a, score, scratch, chosen);
    for (int64_t j = 0; j < r->top_k; j++) sum += weight[j] = score[chosen[j]];
    for (int64_t j = 0; j < r->top_k && a->is_normed; j++) weight[j] /= sum;
    for (int64_t j = 0; j < r->top_k && a->scale != 0; j++) weight[j] *= a->scale;
}

/* What the products are added to. */
static void begin_scores(const bl_route_args *a, int64_t t)
{
    size_t n_bytes = (size_t)a->routing.n_experts * sizeof(float);
    float *score = a->routing.score + t * a->routing.n_experts;

    if (a->bias)
        memcpy(score, a->bias, n_bytes);
    else
        memset(score, 0, n_bytes);
}

static void route_item(void *arg, int64_t index, void *scratch)
{
    const bl_route_args *a = arg;
    int64_t begin = index * ROUTE_TOKENS, end = bl_min_i64(a->routing.T, begin + ROUTE_TOKENS);

    for (int64_t t = begin; t < end; t++) begin_scores(a, t);
    for (int64_t at = 0; at < a->H; at += OPS_BLOCK)
        for (int64_t t = begin; t < end; t++)
            add_logits(a, t, at, bl_min_i64(OPS_BLOCK, a->H - at), scratch);
    for (int64_t t = begin; t < end; t++) route_token(a, t, scratch);
}

/* The rows, sorted by expert and then by token. */
static void sort_rows(const bl_routing *r)
{
    int64_t n_rows = r->T * r->top_k;

    for (int64_t e = 0; e <= r->n_experts; e++) r->first[e] = 0;
    for (int64_t i = 0; i < n_rows; i++) r->first[r->expert[i] + 1]++;
    for (int64_t e = 0; e < r->n_experts; e++) r->first[e + 1] += r->first[e];
    for (int64_t i = 0; i < n_rows; i++) {
        int32_t row = r->first[r->expert[i]]++;
        r->row[i] = row;
        r->token[row] = (int32_t)(i / r->top_k);
    }
    for (int64_t e = r->n_experts; e > 0; e--) r->first[e] = r->first[e - 1];
    r->first[0] = 0;
}

bl_status ops_cpu_route(bl_stream *stream, const bl_route_args *args)
{
    bl_route_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.routing.T, ROUTE_TOKENS), route_item, &a);
    sort_rows(&a.routing);
    return BL_OK;
}

BL_CLONES static void add_scaled_row(int64_t n, float factor, const float *x, float *y)
{
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++) y[i] += factor * x[i];
}

/* Of a logit with score p; w: its weight without `scale`; sum: of all weights times their
 * gradients. Where w depends on the chosen logits alone those of the others are zero. */
static float logit_gradient(const bl_route_backward_args *a, float p, bool is_chosen, float w,
                            float dw, float sum)
{
    if (!is_chosen) return a->is_normed || a->is_sigmoid ? 0 : -p * sum;
    float d = a->is_normed || !a->is_sigmoid ? dw - sum : dw; /* w (dw - sum) = p dp */
    return w * d * (a->is_sigmoid ? 1 - p : 1);
}

/* A block of columns of a token's dx. */
static void route_backward_block(const bl_route_backward_args *a, int64_t t, int64_t at, int64_t n,
                                 float *copies)
{
    const bl_routing *r = &a->routing;
    const int32_t *chosen = r->expert + t * r->top_k;
    const float *w = r->weight + t * r->top_k, *dw = r->d_weight + t * r->top_k,
                *score = r->score + t * r->n_experts;
    float sum = 0, factor = a->scale != 0 ? a->scale : 1,
          *dx = ops_place(a->dx, t * a->H + at, copies);
    const float *before = ops_read(a->dx, t * a->H + at, n, copies);

    if (dx != before) memmove(dx, before, (size_t)n * sizeof *dx);
    for (int64_t j = 0; j < r->top_k; j++) sum += w[j] / factor * dw[j];
    for (int64_t e = 0, j = 0; e < r->n_experts; e++) {
        bool is_chosen = j < r->top_k && chosen[j] == e;
        float dz = factor * logit_gradient(a, score[e], is_chosen, is_chosen ? w[j] / factor : 0,
                                           is_chosen ? dw[j] : 0, sum);
        if (is_chosen) j++;
        if (dz != 0) add_scaled_row(n, dz, a->router + e * a->H + at, dx);
    }
    ops_write(a->dx, t * a->H + at, n, dx);
}

static void route_backward_item(void *arg, int64_t index, void *scratch)
{
    const bl_route_backward_args *a = arg;
    int64_t begin = index * ROUTE_TOKENS, end = bl_min_i64(a->routing.T, begin + ROUTE_TOKENS);

    for (int64_t at = 0; at < a->H; at += OPS_BLOCK)
        for (int64_t t = begin; t < end; t++)
            route_backward_block(a, t, at, bl_min_i64(OPS_BLOCK, a->H - at), scratch);
}

bl_status ops_cpu_route_backward(bl_stream *stream, const bl_route_backward_args *args)
{
    bl_route_backward_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.routing.T, ROUTE_TOKENS), route_backward_item, &a);
    return BL_OK;
}

/* ---- rows: of the call's experts ---- */

static int64_t n_rows(const bl_routing *r)
{
    return r->first[r->n_experts] - r->first[0];
}

/* The row of place i of (T, top_k); -1: its expert is of another group. */
static int64_t row_at(const bl_routing *r, int64_t i)
{
    int64_t e = r->expert[i] - r->first_expert;
    return e >= 0 && e < r->n_experts ? r->row[i] - r->first[0] : -1;
}

static void permute_item(void *arg, int64_t index, void *scratch)
{
    const bl_permute_args *a = arg;
    int64_t n = ops_rows_per_item(a->C), end = bl_min_i64(n_rows(&a->routing), (index + 1) * n);
    const int32_t *token = a->routing.token + a->routing.first[0];

    (void)scratch;
    for (int64_t row = index * n; row < end; row++)
        memcpy(bl_tensor_at(a->rows, row * a->C).data, bl_tensor_at(a->x, token[row] * a->C).data,
               bl_tensor_bytes(a->x, a->C));
}

bl_status ops_cpu_permute(bl_stream *stream, const bl_permute_args *args)
{
    bl_permute_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(n_rows(&a.routing), ops_rows_per_item(a.C)),
                permute_item, &a);
    return BL_OK;
}

static void move_item(void *arg, int64_t index, void *scratch)
{
    const bl_move_rows_args *a = arg;
    int64_t n = ops_rows_per_item(a->C), begin = index * n,
            end = bl_min_i64(n_rows(&a->routing), begin + n);
    bl_tensor rows = bl_tensor_at(a->rows, begin * a->C),
              all = bl_tensor_at(a->all, (a->routing.first[0] + begin) * a->C);

    (void)scratch;
    memcpy(a->to_all ? all.data : rows.data, a->to_all ? rows.data : all.data,
           bl_tensor_bytes(rows, (end - begin) * a->C));
}

bl_status ops_cpu_move_rows(bl_stream *stream, const bl_move_rows_args *args)
{
    bl_move_rows_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(n_rows(&a.routing), ops_rows_per_item(a.C)),
                move_item, &a);
    return BL_OK;
}

typedef struct combine_copies {
    float sum[OPS_BLOCK], row[OPS_BLOCK], z[OPS_BLOCK];
} combine_copies;

static void combine_block(const bl_combine_args *a, int64_t t, int64_t at, int64_t n,
                          combine_copies *c)
{
    const bl_routing *r = &a->routing;
    int64_t first = t * r->top_k, end = first + r->top_k, i = first;
    float *kept = a->sum ? a->sum + t * a->C + at : NULL;

    while (i < end && row_at(r, i) < 0) i++;
    if (i == end) return;
    if (i == first)
        memset(c->sum, 0, sizeof c->sum);
    else
        memcpy(c->sum, kept, (size_t)n * sizeof *kept);
    for (int64_t row; i < end && (row = row_at(r, i)) >= 0; i++)
        add_scaled_row(n, a->is_weighted ? r->weight[i] : 1,
                       ops_read(a->rows, row * a->C + at, n, c->row), c->sum);
    if (i < end) {
        memcpy(kept, c->sum, (size_t)n * sizeof *kept);
        return;
    }
    if (bl_tensor_is_there(a->z))
        add_scaled_row(n, 1, ops_read(a->z, t * a->C + at, n, c->z), c->sum);
    float *y = ops_place(a->y, t * a->C + at, c->sum);
    if (y != c->sum) memcpy(y, c->sum, (size_t)n * sizeof *y);
    ops_write(a->y, t * a->C + at, n, y);
}

static void combine_item(void *arg, int64_t index, void *scratch)
{
    const bl_combine_args *a = arg;
    int64_t tokens = ops_rows_per_item(a->C), end = bl_min_i64(a->routing.T, (index + 1) * tokens);

    for (int64_t t = index * tokens; t < end; t++)
        for (int64_t at = 0; at < a->C; at += OPS_BLOCK)
            combine_block(a, t, at, bl_min_i64(OPS_BLOCK, a->C - at), scratch);
}

bl_status ops_cpu_combine(bl_stream *stream, const bl_combine_args *args)
{
    bl_combine_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.routing.T, ops_rows_per_item(a.C)), combine_item,
                &a);
    return BL_OK;
}

static void bias_item(void *arg, int64_t index, void *scratch)
{
    const bl_add_expert_bias_args *a = arg;
    const int32_t *first = a->routing.first;
    int64_t rows = ops_rows_per_item(a->N), e = 0,
            end = bl_min_i64(n_rows(&a->routing), (index + 1) * rows);

    for (int64_t row = index * rows; row < end; row++) {
        while (row >= first[e + 1] - first[0]) e++;
        for (int64_t at = 0; at < a->N; at += OPS_BLOCK) {
            int64_t n = bl_min_i64(OPS_BLOCK, a->N - at), here = row * a->N + at;
            float *y = ops_place(a->rows, here, scratch);
            (void)ops_read(a->rows, here, n, y);
            add_scaled_row(n, 1, a->bias + e * a->N + at, y);
            ops_write(a->rows, here, n, y);
        }
    }
}

bl_status ops_cpu_add_expert_bias(bl_stream *stream, const bl_add_expert_bias_args *args)
{
    bl_add_expert_bias_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(n_rows(&a.routing), ops_rows_per_item(a.N)),
                bias_item, &a);
    return BL_OK;
}

/* dy . b of place i of (T, top_k). */
static double along_bias(const bl_weigh_backward_args *a, int64_t i, float *copy)
{
    int64_t first = row_at(&a->routing, i) * a->N;
    const float *bias = a->bias + (a->routing.expert[i] - a->routing.first_expert) * a->N;
    double sum = 0;

    for (int64_t at = 0; at < a->N; at += OPS_BLOCK) {
        int64_t n = bl_min_i64(OPS_BLOCK, a->N - at);
        sum += ops_dot(ops_read(a->dy, first + at, n, copy), bias + at, n);
    }
    return sum;
}

/* The row of place i of (T, top_k). */
static void weigh_row(const bl_weigh_backward_args *a, int64_t i, combine_copies *c)
{
    int64_t first = row_at(&a->routing, i) * a->C;
    double sum = 0;

    if (first < 0) return;
    if (a->bias) sum = along_bias(a, i, c->row);
    for (int64_t at = 0; at < a->C; at += OPS_BLOCK) {
        int64_t n = bl_min_i64(OPS_BLOCK, a->C - at);
        const float *d = ops_read(a->d, first + at, n, c->row);
        float *to = ops_place(a->d, first + at, c->sum);
        sum += ops_dot(ops_read(a->h, first + at, n, c->z), d, n);
        if (to != d) memcpy(to, d, (size_t)n * sizeof *to);
        ops_scale(n, a->routing.weight[i], to);
        ops_write(a->d, first + at, n, to);
    }
    a->routing.d_weight[i] = (float)sum;
}

static void weigh_item(void *arg, int64_t index, void *scratch)
{
    const bl_weigh_backward_args *a = arg;
    int64_t n = ops_rows_per_item(a->C),
            end = bl_min_i64(a->routing.T * a->routing.top_k, (index + 1) * n);

    for (int64_t i = index * n; i < end; i++) weigh_row(a, i, scratch);
}

bl_status ops_cpu_weigh_backward(bl_stream *stream, const bl_weigh_backward_args *args)
{
    bl_weigh_backward_args a = *args;
    bl_pool_run(ops_pool(stream),
                bl_ceil_div(a.routing.T * a.routing.top_k, ops_rows_per_item(a.C)), weigh_item, &a);
    return BL_OK;
}

static void scale_row(const bl_weigh_rows_args *a, int64_t i, float *copy)
{
    int64_t first = row_at(&a->routing, i) * a->C;
    float factor = a->is_weighted ? a->scale * a->routing.weight[i] : a->scale;

    if (first < 0) return;

    for (int64_t at = 0; at < a->C; at += OPS_BLOCK) {
        int64_t n = bl_min_i64(OPS_BLOCK, a->C - at);
        const float *x = ops_read(a->x, first + at, n, copy);
        float *to = ops_place(a->x, first + at, copy);
        if (to != x) memcpy(to, x, (size_t)n * sizeof *to);
        ops_scale(n, factor, to);
        ops_write(a->x, first + at, n, to);
    }
}

static void scale_item(void *arg, int64_t index, void *scratch)
{
    const bl_weigh_rows_args *a = arg;
    int64_t n = ops_rows_per_item(a->C),
            end = bl_min_i64(a->routing.T * a->routing.top_k, (index + 1) * n);

    for (int64_t i = index * n; i < end; i++) scale_row(a, i, scratch);
}

bl_status ops_cpu_weigh_rows(bl_stream *stream, const bl_weigh_rows_args *args)
{
    bl_weigh_rows_args a = *args;
    bl_pool_run(ops_pool(stream),
                bl_ceil_div(a.routing.T * a.routing.top_k, ops_rows_per_item(a.C)), scale_item, &a);
    return BL_OK;
}

/* ---- products: in bf16 a row's bits never depend on the number of rows ---- */

/* The matrix of expert e. */
static bl_weight matrix_of(const bl_grouped_matmul_args *a, int64_t e)
{
    const bl_weight_segment *all = &a->weight.segment[0];
    int64_t rows = a->weight.rows / a->routing.n_experts, cols = a->weight.cols,
            row_bytes = bl_format_row_bytes(all->format, cols);
    bl_format_bytes before;
    bl_weight_segment own = {.format = all->format,
                             .codes = (const char *)all->codes + e * rows * row_bytes,
                             .rows = rows};

    (void)bl_format_measure(bl_format_describe(all->format), e * rows, cols, &before);
    if (all->scales) own.scales = (const char *)all->scales + before.scales;
    return (bl_weight){.rows = rows, .cols = cols, .n_segments = 1, .segment = {own}};
}

bl_status ops_cpu_grouped_matmul(bl_stream *stream, const bl_grouped_matmul_args *a)
{
    const int32_t *first = a->routing.first;

    if (a->in.dtype == BL_F32)
        return bl_cpu_gemm_grouped(ops_pool(stream), a->forward, a->is_added, a->routing.n_experts,
                                   first, ops_f32(a->in), &a->weight, ops_f32(a->out));
    for (int64_t e = 0; e < a->routing.n_experts; e++) {
        bl_weight w = matrix_of(a, e);
        bl_matmul_weight_args product = {
            .forward = a->forward,
            .beta = a->is_added,
            .T = first[e + 1] - first[e],
            .in = bl_tensor_at(a->in, (first[e] - first[0]) * (a->forward ? w.cols : w.rows)),
            .out = bl_tensor_at(a->out, (first[e] - first[0]) * (a->forward ? w.rows : w.cols)),
            .weight = w};
        if (product.T > 0) BL_TRY(ops_cpu_matmul_weight(stream, &product));
    }
    return BL_OK;
}

bl_status ops_cpu_grouped_gradient(bl_stream *stream, const bl_grouped_gradient_args *a)
{
    for (int64_t e = 0; e < a->routing.n_experts; e++) {
        const int32_t *range = a->routing.first + e;
        int64_t first = range[0] - a->routing.first[0], n = range[1] - range[0];
        bl_matmul_args product = {.transpose_a = true,
                                  .M = a->M,
                                  .N = a->N,
                                  .K = n,
                                  .lda = a->M,
                                  .ldb = a->N,
                                  .ldc = a->N,
                                  .alpha = 1,
                                  .a = bl_tensor_at(a->left, first * a->M),
                                  .b = bl_tensor_at(a->right, first * a->N),
                                  .c = bl_tensor_f32(a->gradient + e * a->M * a->N)};
        BL_TRY(ops_cpu_matmul(stream, &product));
    }
    return BL_OK;
}
