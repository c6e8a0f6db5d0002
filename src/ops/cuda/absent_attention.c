/* SPDX-License-Identifier: Apache-2.0 */
/* Attention has no kernels for GPUs yet: it is refused at the call. */
#include "ops/cuda/ops_cuda.h"

bl_status ops_cuda_attention_forward(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_ELIMIT, "attention: not yet on CUDA");
}

bl_status ops_cuda_attention_backward(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_ELIMIT, "attention: not yet on CUDA");
}
