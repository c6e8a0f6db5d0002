/* SPDX-License-Identifier: Apache-2.0 */
/* Workspace: u (T,r) | du (T,r) | with dropout: D x (T,K). u is made again in backward instead of kept: its
 * r K T multiplications are N / r times fewer than the layer's own. */
#include "linear/lora_linear.h"

#include "base/sizes.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

typedef struct workspace {
    float *u, *du, *masked;
} workspace;

int64_t bl_lora_linear_workspace_floats(int64_t T, int64_t K, int64_t r_max, bool dropout)
{
    return 2 * T * r_max + (dropout ? T * K : 0);
}

static workspace divide_workspace(const bl_lora_linear *linear, int64_t T)
{
    int64_t r_max = 0;
    for (int p = 0; p < linear->n_parts; p++) r_max = bl_max_i64(r_max, linear->part[p].r);
    return (workspace){linear->workspace, linear->workspace + T * r_max, linear->workspace + 2 * T * r_max};
}

/* dst = D src; K channels a token. */
static bl_status apply_dropout(bl_stream *stream, const bl_lora_linear *linear, int64_t T, const float *src, float *dst)
{
    const bl_lora_dropout *d = &linear->dropout;
    return bl_dropout(stream, &(bl_dropout_args){.T = T, .C = linear->weight.cols, .p = d->p, .seed = d->seed, .step = d->step,
                                                 .layer = d->layer, .matrix = d->matrix, .sample = d->sample,
                                                 .position = d->position, .x = src, .y = dst});
}

/* u (T,r) = input A^T */
static bl_status project_down(bl_stream *stream, const bl_lora_part *part, int64_t T, int64_t K, const float *input, float *u)
{
    return bl_matmul(stream, &(bl_matmul_args){.transpose_b = true, .M = T, .N = part->r, .K = K, .lda = K, .ldb = K, .ldc = part->r,
                                               .alpha = 1.0f, .a = input, .b = part->A, .c = u});
}

bl_status bl_lora_linear_forward(bl_stream *stream, const bl_lora_linear *linear, int64_t T, const float *x, float *y)
{
    int64_t N = linear->weight.rows, K = linear->weight.cols;
    workspace ws = divide_workspace(linear, T);

    if (T == 0) return BL_OK;
    BL_TRY(bl_matmul_weight(stream, &(bl_matmul_weight_args){.forward = true, .T = T, .in = x, .out = y, .weight = linear->weight}));
    if (linear->n_parts > 0 && linear->dropout.p > 0) {
        BL_TRY(apply_dropout(stream, linear, T, x, ws.masked));
        x = ws.masked;
    }
    for (int p = 0; p < linear->n_parts; p++) {
        const bl_lora_part *part = &linear->part[p];
        BL_TRY(project_down(stream, part, T, K, x, ws.u));
        BL_TRY(bl_matmul(stream, &(bl_matmul_args){.transpose_b = true, .M = T, .N = part->rows, .K = part->r, .lda = part->r,
                                                   .ldb = part->r, .ldc = N, .alpha = part->scale, .beta = 1.0f, .a = ws.u,
                                                   .b = part->B, .c = y + part->row_begin}));
    }
    return BL_OK;
}

static bl_status zero_gradients(bl_stream *stream, const bl_lora_part *part, int64_t K)
{
    BL_TRY(bl_stream_zero(stream, part->dA, (size_t)(part->r * K) * sizeof(float)));
    return bl_stream_zero(stream, part->dB, (size_t)(part->rows * part->r) * sizeof(float));
}

/* dA, dB, and du = s dy B (T,r). input = D x. */
static bl_status part_gradients(bl_stream *stream, const bl_lora_part *part, const bl_weight *w, int64_t T, const float *input,
                                const float *dy, const workspace *ws)
{
    const float *dy_part = dy + part->row_begin;
    int64_t N = w->rows, K = w->cols, r = part->r;

    BL_TRY(project_down(stream, part, T, K, input, ws->u));
    BL_TRY(bl_matmul(stream, &(bl_matmul_args){.transpose_a = true, .M = part->rows, .N = r, .K = T, .lda = N, .ldb = r, .ldc = r,
                                               .alpha = part->scale, .a = dy_part, .b = ws->u, .c = part->dB}));
    BL_TRY(bl_matmul(stream, &(bl_matmul_args){.M = T, .N = r, .K = part->rows, .lda = N, .ldb = r, .ldc = r, .alpha = part->scale,
                                               .a = dy_part, .b = part->B, .c = ws->du}));
    return bl_matmul(stream, &(bl_matmul_args){.transpose_a = true, .M = r, .N = K, .K = T, .lda = r, .ldb = K, .ldc = K,
                                               .alpha = 1.0f, .a = ws->du, .b = input, .c = part->dA});
}

/* out (T,K) = du A + beta out */
static bl_status project_back(bl_stream *stream, const bl_lora_part *part, int64_t T, int64_t K, const float *du, float beta,
                              float *out)
{
    return bl_matmul(stream, &(bl_matmul_args){.M = T, .N = K, .K = part->r, .lda = part->r, .ldb = K, .ldc = K, .alpha = 1.0f,
                                               .beta = beta, .a = du, .b = part->A, .c = out});
}

bl_status bl_lora_linear_backward(bl_stream *stream, const bl_lora_linear *linear, int64_t T, const float *x, const float *dy,
                                  float *dx)
{
    int64_t K = linear->weight.cols;
    bool dropout = linear->n_parts > 0 && linear->dropout.p > 0;
    workspace ws = divide_workspace(linear, T);

    if (T == 0) {
        for (int p = 0; p < linear->n_parts; p++) BL_TRY(zero_gradients(stream, &linear->part[p], K));
        return BL_OK;
    }
    /* With dropout the LoRA path's input gradient is summed, masked and then joined by the base's; without, it is added to the base's. */
    if (dx && !dropout)
        BL_TRY(bl_matmul_weight(stream, &(bl_matmul_weight_args){.T = T, .in = dy, .out = dx, .weight = linear->weight}));
    if (dropout) {
        BL_TRY(apply_dropout(stream, linear, T, x, ws.masked));
        x = ws.masked;
    }
    for (int p = 0; p < linear->n_parts; p++) {
        BL_TRY(part_gradients(stream, &linear->part[p], &linear->weight, T, x, dy, &ws));
        if (dx) BL_TRY(project_back(stream, &linear->part[p], T, K, ws.du, dropout && p == 0 ? 0.0f : 1.0f, dx));
    }
    if (dx && dropout) {
        BL_TRY(apply_dropout(stream, linear, T, dx, dx));
        BL_TRY(bl_matmul_weight(stream,
                                &(bl_matmul_weight_args){.T = T, .beta = 1.0f, .in = dy, .out = dx, .weight = linear->weight}));
    }
    return BL_OK;
}
