/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of CUDA in a build without it. Its only device is the CPU, so that nobody gets here. */
#include "ops/ops_internal.h"

#define REFUSE(op)                                                                                 \
    static bl_status refuse_##op(bl_stream *stream, const bl_##op##_args *args)                    \
    {                                                                                              \
        (void)stream, (void)args;                                                                  \
        return BL_FAIL(BL_ELIMIT, #op ": this build has no CUDA");                                 \
    }
OPS_LIST(REFUSE)

static size_t no_loss_head_scratch(int64_t T, int64_t H, int64_t V)
{
    (void)T, (void)H, (void)V;
    return 0;
}

static size_t no_matmul_weight_scratch(const bl_matmul_weight_args *args)
{
    (void)args;
    return 0;
}

#define ENTRY(op) .op = refuse_##op,
const ops_table ops_cuda_table = {.act = BL_BF16,
                                  .loss_head_scratch_bytes = no_loss_head_scratch,
                                  .matmul_weight_scratch_bytes = no_matmul_weight_scratch,
                                  OPS_LIST(ENTRY)};
