/* SPDX-License-Identifier: Apache-2.0 */
/* block_weights.c -- a layer's matrices with their adapters, and gradients of these matrices, where
 * they are trained: of one
 * y = x W^T + b with the output's gradient dy
 *
 *   dW += dy^T x      one product per span of trained rows and micro-batch, summed in fp32, of fp32
 *                     or bf16
 *   db += sum_t dy_t
 *
 * and of the norms. */
#include "arch/block_internal.h"
#include "base/sizes.h"
#include "ops/matmul.h"
#include "ops/norm.h"

bl_linear_use arch_use_matrix(const bl_block *block, const bl_micro_batch *batch,
                              const bl_block_workspace *ws, bl_layer_matrix matrix,
                              float *gradients)
{
    bl_linear_use use = {
        .base = block->base,
        .unit = block->layer,
        .matrix = (int)matrix,
        .prepared = block->prepared,
        .lora = {.mode = block->bf16_matrices >> matrix & 1u ? BL_MATMUL_BF16 : block->dims->mode,
                 .sums = block->dims->sums,
                 .workspace = ws->lora,
                 .workspace_bytes = ws->lora_bytes,
                 .dropout = block->dropout}};
    use.lora.dropout.sample = batch->sample;
    use.lora.dropout.position = batch->position;
    if (block->lora)
        bl_lora_layout_bind(block->lora, block->dims->layer_kind, matrix, block->lora_weights,
                            gradients, &use.lora);
    return use;
}

/* dW (span->n, cols) */
static bl_status add_rows(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                          const bl_trained_span *span, int64_t T, bl_tensor x, bl_tensor dy,
                          const bl_block_workspace *ws, float *dW)
{
    int64_t rows = block->dims->matrix[matrix].rows, cols = block->dims->matrix[matrix].cols;
    return bl_matmul(stream,
                     &(bl_matmul_args){.transpose_a = true,
                                       .M = span->n,
                                       .N = cols,
                                       .K = T,
                                       .lda = rows,
                                       .ldb = cols,
                                       .ldc = cols,
                                       .alpha = 1.0f,
                                       .beta = 1.0f,
                                       .a = bl_tensor_at(dy, span->begin),
                                       .b = x,
                                       .c = bl_tensor_f32(dW),
                                       .scratch = ws->lora,
                                       .scratch_bytes = bl_min_i64((int64_t)ws->lora_bytes,
                                                                   BL_MATMUL_SCRATCH_BYTES)});
}

/* Elements of a bias: columns of dy. */
static bl_status add_elements(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                              const bl_trained_span *span, int64_t T, bl_tensor dy)
{
    float *bias = block->trained->vectors + block->dims->bias_offset[matrix];
    return bl_norm_gradients(
        stream, &(bl_norm_gradients_args){.T = T,
                                          .H = span->n,
                                          .dy = bl_tensor_at(dy, span->begin),
                                          .db = bias + span->begin,
                                          .n_heads = 1,
                                          .row_stride = block->dims->matrix[matrix].rows});
}

bl_status arch_add_matrix_gradient(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                   int64_t T, bl_tensor x, bl_tensor dy,
                                   const bl_block_workspace *ws)
{
    if (!block->trained || T == 0) return BL_OK;
    const bl_trained_spans *rows = &block->trained->trained->matrix[matrix],
                           *bias = &block->trained->trained->bias[matrix];
    for (int i = 0; i < rows->n; i++)
        BL_TRY(add_rows(stream, block, matrix, &rows->at[i], T, x, dy, ws,
                        block->trained->matrix[matrix][i]));
    for (int i = 0; i < bias->n; i++)
        BL_TRY(add_elements(stream, block, matrix, &bias->at[i], T, dy));
    return BL_OK;
}

bl_status arch_add_norm_gradient(bl_stream *stream, const bl_block *block, bl_layer_vector which,
                                 const bl_block_norm *norm, bl_tensor dy)
{
    if (!block->trained) return BL_OK;
    return bl_block_norm_gradients(stream, block->dims, norm, dy, block->trained->trained->vectors,
                                   which,
                                   block->trained->vectors + block->dims->vector_offset[which]);
}

bool arch_ends_at_qkv(const bl_block *block)
{
    unsigned norm = 1u << BL_ATTENTION_NORM | 1u << BL_ATTENTION_NORM_BIAS;
    bool trains_norm = block->trained && (block->trained->trained->vectors & norm);
    return block->is_last && (block->dims->has_post_norms || !trains_norm);
}

static bool has_attention_term(const bl_lora_layout *lora)
{
    for (int p = 0; lora && p < lora->arch->n_projections; p++) {
        bl_layer_matrix matrix = lora->arch->projections[p].matrix;
        if (lora->a_offset[p] >= 0 && (matrix == BL_QKV || matrix == BL_OUT)) return true;
    }
    return false;
}

/* In a parallel layer the MLP's part of backward is not the first. */
bool arch_ends_at_mlp(const bl_block *block)
{
    bool trains_attention = block->trained && bl_trained_has_attention(block->trained->trained);
    return block->is_last && !block->dims->is_parallel && !trains_attention &&
           !has_attention_term(block->lora);
}
