/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of CUDA in a build without it. Its only device is the CPU, so these are never called.
 * Sizes are those of a build with it: plans are made for GPUs that are elsewhere. */
#include "ops/cuda/ops_cuda.h"
#include "ops/gemm.h"

#define REFUSE(op, ...)                                                                            \
    static bl_status refuse_##op(bl_stream *stream, const bl_##op##_args *args)                    \
    {                                                                                              \
        (void)stream, (void)args;                                                                  \
        return BL_FAIL(BL_ELIMIT, #op ": this build has no CUDA");                                 \
    }
BL_OPS_LIST(REFUSE)

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

static bl_status refuse_end_warm_up(bl_device *device)
{
    (void)device;
    return BL_FAIL(BL_ELIMIT, "this build has no CUDA");
}

static bl_status refuse_spare_multiprocessors(bl_device *device, int n)
{
    (void)n;
    return refuse_end_warm_up(device);
}

#define ENTRY(op, ...) .op = refuse_##op,
const ops_table ops_cuda_table = {.acts = BL_DTYPE_BIT(BL_BF16),
                                  .loss_head_scratch_bytes = ops_cuda_loss_head_scratch_bytes,
                                  .matmul_weight_scratch_bytes =
                                      ops_cuda_matmul_weight_scratch_bytes,
                                  .matmul_prepared_bytes = ops_cuda_matmul_prepared_bytes,
                                  .matmul_weight_operand = ops_cuda_matmul_weight_operand,
                                  .matmul_weight_is_refused = refuse_is_refused,
                                  .matmul_end_warm_up = refuse_end_warm_up,
                                  .matmul_spare_multiprocessors = refuse_spare_multiprocessors,
                                  .matmul_count_fallbacks = refuse_count_fallbacks,
                                  BL_OPS_LIST(ENTRY)};

bl_status bl_cuda_gemm_describe(int gpu, char text[BL_CUDA_GEMM_TEXT_BYTES])
{
    (void)gpu;
    text[0] = '\0';
    return BL_FAIL(BL_ELIMIT, "this build has no CUDA");
}
