/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/matmul_plan.h"

#include "base/sizes.h"
#include "ops/cuda/ops_cuda.h"

enum { ALIGNMENT_BYTES = 256, FP8_MULTIPLE = 16, BLOCK_TOKENS_MULTIPLE = 4 };

static bool segments_follow_each_other(const bl_weight *w)
{
    const char *end = w->segment[0].codes;
    for (int s = 0; s < w->n_segments; s++) {
        if (w->segment[s].codes != end || w->segment[s].format != w->segment[0].format)
            return false;
        end += (size_t)w->segment[s].rows * (size_t)w->cols *
               bl_format_code_bytes(w->segment[s].format);
    }
    return w->n_segments > 0;
}

bool ops_matmul_plan_is_dense(const bl_weight *weight)
{
    return segments_follow_each_other(weight) && weight->segment[0].format == BL_FORMAT_BF16;
}

ops_gemm_kind ops_matmul_plan_kind(const bl_matmul_weight_args *args)
{
    const bl_weight *w = &args->weight;

    if (args->mode != BL_MATMUL_FP8 || !segments_follow_each_other(w)) return OPS_GEMM_BF16;
    if (w->rows % FP8_MULTIPLE != 0 || w->cols % FP8_MULTIPLE != 0) return OPS_GEMM_BF16;
    if (w->segment[0].format == BL_FORMAT_FP8_ROW) return OPS_GEMM_FP8_ROW;
    if (w->segment[0].format != BL_FORMAT_FP8_BLOCK || args->T % BLOCK_TOKENS_MULTIPLE != 0)
        return OPS_GEMM_BF16;
    for (int s = 0; s + 1 < w->n_segments; s++)
        if (w->segment[s].rows % BL_FP8_BLOCK != 0) return OPS_GEMM_BF16;
    return OPS_GEMM_FP8_BLOCK;
}

/* Returns where `bytes` begin and moves *end behind them. */
static size_t take(size_t *end, int64_t bytes)
{
    size_t at = *end;
    *end += (size_t)bl_round_up(bytes, ALIGNMENT_BYTES);
    return at;
}

ops_matmul_layout ops_matmul_plan_layout(const bl_matmul_weight_args *args, ops_gemm_kind kind)
{
    const bl_weight *w = &args->weight;
    int64_t N = w->rows, K = w->cols, T = args->T, inner = args->forward ? K : N,
            outer = args->forward ? N : K;
    const int64_t scale_bytes = sizeof(float);
    bool is_row = kind == OPS_GEMM_FP8_ROW, is_fp8 = kind != OPS_GEMM_BF16;
    ops_matmul_layout at = {.bytes = 0};

    at.workspace = take(&at.bytes, BL_MATMUL_SCRATCH_BYTES);
    at.dense = take(&at.bytes, is_fp8 || ops_matmul_plan_is_dense(w) ? 0 : N * K * 2);
    at.codes = take(&at.bytes, is_fp8 ? T * inner : 0);
    at.scales =
        take(&at.bytes, is_fp8 ? T * (is_row ? 1 : ops_matmul_blocks(inner)) * scale_bytes : 0);
    at.turned = take(&at.bytes, is_fp8 && !args->forward ? N * K : 0);
    at.weight_scales = take(&at.bytes, !is_fp8  ? 0
                                       : is_row ? N * scale_bytes
                                                : ops_matmul_blocks(outer) *
                                                      ops_matmul_grid_stride(inner) * scale_bytes);
    at.ones = take(&at.bytes, is_row && !args->forward ? K * scale_bytes : 0);
    return at;
}

/* Also of the way that is taken when cuBLASLt refuses, and of fewer tokens, whose number may suit blocks. */
size_t ops_cuda_matmul_weight_scratch_bytes(const bl_matmul_weight_args *args)
{
    bl_matmul_weight_args up = *args;
    up.T = bl_round_up(args->T, BLOCK_TOKENS_MULTIPLE);
    size_t bf16 = ops_matmul_plan_layout(args, OPS_GEMM_BF16).bytes;
    size_t wanted = ops_matmul_plan_layout(&up, ops_matmul_plan_kind(&up)).bytes;
    return bf16 > wanted ? bf16 : wanted;
}
