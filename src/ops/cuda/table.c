/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of CUDA. Attention has no kernels yet: it is refused at the call. */
#include "ops/cuda/ops_cuda.h"

bl_status ops_cuda_attention_forward(bl_stream *stream, const bl_attention_forward_args *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_ELIMIT, "attention: not yet on CUDA");
}

bl_status ops_cuda_attention_backward(bl_stream *stream, const bl_attention_backward_args *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_ELIMIT, "attention: not yet on CUDA");
}

#define ENTRY(op) .op = ops_cuda_##op,
const ops_table ops_cuda_table = {.act = BL_BF16,
                                  .loss_head_scratch_bytes = ops_cuda_loss_head_scratch_bytes,
                                  .matmul_weight_scratch_bytes =
                                      ops_cuda_matmul_weight_scratch_bytes,
                                  .matmul_prepared_bytes = ops_cuda_matmul_prepared_bytes,
                                  .matmul_weight_is_refused = ops_cuda_matmul_weight_is_refused,
                                  .matmul_count_fallbacks = ops_cuda_matmul_count_fallbacks,
                                  OPS_LIST(ENTRY)};
