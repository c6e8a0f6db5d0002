/* SPDX-License-Identifier: Apache-2.0 */
/* block_weights.c -- gradients of a layer's own weights, where they are trained: of a matrix
 * y = x W^T + b with the output's gradient dy
 *
 *   dW += dy^T x      one product per matrix and micro-batch, summed in fp32, of fp32 or bf16
 *   db += sum_t dy_t
 *
 * and of the norms. */
#include "arch/block_internal.h"
#include "base/sizes.h"
#include "ops/matmul.h"
#include "ops/norm.h"

bl_status arch_add_matrix_gradient(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                   int64_t T, bl_tensor x, bl_tensor dy,
                                   const bl_block_workspace *ws)
{
    const bl_block_dims *dims = block->dims;
    int64_t rows = dims->matrix[matrix].rows, cols = dims->matrix[matrix].cols;
    bl_matmul_args product = {.transpose_a = true,
                              .M = rows,
                              .N = cols,
                              .K = T,
                              .lda = rows,
                              .ldb = cols,
                              .ldc = cols,
                              .alpha = 1.0f,
                              .beta = 1.0f,
                              .a = dy,
                              .b = x,
                              .scratch = ws->lora,
                              .scratch_bytes =
                                  bl_min_i64((int64_t)ws->lora_bytes, BL_MATMUL_SCRATCH_BYTES)};

    if (!block->trained || T == 0) return BL_OK;
    product.c = bl_tensor_f32(block->trained->matrix[matrix]);
    BL_TRY(bl_matmul(stream, &product));
    if (dims->bias_offset[matrix] < 0) return BL_OK;
    return bl_norm_gradients(stream, &(bl_norm_gradients_args){.T = T,
                                                               .H = rows,
                                                               .dy = dy,
                                                               .db = block->trained->vectors +
                                                                     dims->bias_offset[matrix]});
}

bl_status arch_add_norm_gradient(bl_stream *stream, const bl_block *block, bl_layer_vector which,
                                 const bl_block_norm *norm, bl_tensor dy)
{
    if (!block->trained) return BL_OK;
    return bl_block_norm_gradients(stream, block->dims, norm, dy,
                                   block->trained->vectors + block->dims->vector_offset[which]);
}
