/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of CUDA in a build without it. Its only device is the CPU, so that nobody gets here. */
#include "ops/gemm.h"
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

static bl_status refuse_is_refused(bl_stream *stream, const bl_matmul_weight_args *args, bool *out)
{
    *out = true;
    return refuse_matmul_weight(stream, args);
}

static bl_status refuse_count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT])
{
    (void)device, (void)counts;
    return BL_FAIL(BL_ELIMIT, "this build has no CUDA");
}

#define ENTRY(op) .op = refuse_##op,
const ops_table ops_cuda_table = {.act = BL_BF16,
                                  .loss_head_scratch_bytes = no_loss_head_scratch,
                                  .matmul_weight_scratch_bytes = no_matmul_weight_scratch,
                                  .matmul_prepared_bytes = no_matmul_weight_scratch,
                                  .matmul_weight_is_refused = refuse_is_refused,
                                  .matmul_count_fallbacks = refuse_count_fallbacks,
                                  OPS_LIST(ENTRY)};

bl_status bl_cuda_gemm_describe(char text[BL_CUDA_GEMM_TEXT_BYTES])
{
    text[0] = '\0';
    return BL_FAIL(BL_ELIMIT, "this build has no CUDA");
}
