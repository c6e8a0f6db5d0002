/* SPDX-License-Identifier: Apache-2.0 */
/* experts.c -- mixtures have no kernels: model/weights.c rejects them before any op is called. */
#include "ops/cuda/ops_cuda.h"

#define REJECT(op)                                                                                 \
    bl_status ops_cuda_##op(bl_stream *stream, const bl_##op##_args *args)                         \
    {                                                                                              \
        (void)stream, (void)args;                                                                  \
        return BL_FAIL(BL_ELIMIT, #op ": there is no CUDA kernel for it");                         \
    }
REJECT(route)
REJECT(route_backward)
REJECT(permute)
REJECT(combine)
REJECT(add_expert_bias)
REJECT(weigh_backward)
REJECT(swiglu_clamped_forward)
REJECT(swiglu_clamped_backward)
REJECT(grouped_matmul)
REJECT(weigh_rows)
REJECT(grouped_gradient)
REJECT(move_rows)
