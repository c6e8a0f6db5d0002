/* SPDX-License-Identifier: Apache-2.0 */
/* table.c -- CUDA's table of ops: the launchers of ops_cuda.h, and the sizes of scratch. */
#include "ops/cuda/ops_cuda.h"

#define ENTRY(op, ...) .op = ops_cuda_##op,
const ops_table ops_cuda_table = {
    .acts = BL_DTYPE_BIT(BL_BF16),
    .loss_head_scratch_bytes = ops_cuda_loss_head_scratch_bytes,
    .matmul_weight_scratch_bytes = ops_cuda_matmul_weight_scratch_bytes,
    .matmul_prepared_bytes = ops_cuda_matmul_prepared_bytes,
    .matmul_weight_operand = ops_cuda_matmul_weight_operand,
    .matmul_weight_is_refused = ops_cuda_matmul_weight_is_refused,
    .matmul_end_warm_up = ops_cuda_matmul_end_warm_up,
    .matmul_spare_multiprocessors = ops_cuda_matmul_spare_multiprocessors,
    .matmul_count_fallbacks = ops_cuda_matmul_count_fallbacks,
    BL_OPS_LIST(ENTRY)};
