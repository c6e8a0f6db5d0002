/* SPDX-License-Identifier: Apache-2.0 */
/* loss_head_plan.c -- where logits, packed inputs and partial sums are in the scratch of CUDA's
 * loss head. */
#include "ops/cuda/loss_head_plan.h"

#include "base/sizes.h"
#include "ops/matmul.h"

enum { ALIGNMENT_BYTES = 256, ROW_FLOATS = 8 /* of a wide access */ };

static size_t take(size_t *total, int64_t n_bytes)
{
    size_t at = *total;
    *total += (size_t)bl_round_up(n_bytes, ALIGNMENT_BYTES);
    return at;
}

ops_loss_head_layout ops_loss_head_plan(int64_t T, int64_t H, int64_t V)
{
    ops_loss_head_layout l = {
        .chunk = bl_max_i64(1, bl_min_i64(T, OPS_LOSS_HEAD_TOKENS)),
        .ld = bl_round_up(V, ROW_FLOATS),
    };

    take(&l.total, l.chunk * l.ld * (int64_t)sizeof(float));
    l.dx = take(&l.total, l.chunk * H * (int64_t)sizeof(float));
    l.logp = take(&l.total, l.chunk * (int64_t)sizeof(double));
    l.decoded = take(&l.total, bl_min_i64(V, OPS_LOSS_HEAD_ROWS) * H * 2);
    l.gemm = take(&l.total, BL_MATMUL_SCRATCH_BYTES);
    return l;
}

size_t ops_cuda_loss_head_scratch_bytes(int64_t T, int64_t H, int64_t V)
{
    return ops_loss_head_plan(T, H, V).total;
}
