/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers of a build without CUDA. Its only device is the CPU, so that nobody gets here. */
#include "ops/cuda/ops_cuda.h"

#define REFUSE(op)                                                                                 \
    bl_status ops_cuda_##op(bl_stream *stream, const void *args)                                   \
    {                                                                                              \
        (void)stream, (void)args;                                                                  \
        return BL_FAIL(BL_ELIMIT, #op ": this build has no CUDA");                                 \
    }
OPS_CUDA_LAUNCHERS(REFUSE)

size_t ops_cuda_loss_head_scratch_bytes(int64_t T, int64_t H, int64_t V)
{
    (void)T, (void)H, (void)V;
    return 0;
}

size_t ops_cuda_matmul_weight_scratch_bytes(const bl_matmul_weight_args *args)
{
    (void)args;
    return 0;
}
