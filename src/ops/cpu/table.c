/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's ops: each entry queues the op's work as a task of the stream. */
#include "ops/cpu/ops_cpu.h"

#define QUEUE(op, ...)                                                                             \
    _Static_assert(sizeof(bl_##op##_args) <= BL_STREAM_ARGS_BYTES,                                 \
                   "the arguments of " #op " fit into a stream's ring");                           \
    static bl_status op##_task(bl_stream *stream, const void *args)                                \
    {                                                                                              \
        return ops_cpu_##op(stream, args);                                                         \
    }                                                                                              \
    static bl_status queue_##op(bl_stream *stream, const bl_##op##_args *args)                     \
    {                                                                                              \
        return bl_stream_call(stream, op##_task, args, sizeof *args);                              \
    }
BL_OPS_LIST(QUEUE)

#define ENTRY(op, ...) .op = queue_##op,
const ops_table ops_cpu_table = {.acts = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_BF16),
                                 .loss_head_scratch_bytes = ops_cpu_loss_head_scratch_bytes,
                                 .matmul_weight_scratch_bytes = ops_cpu_matmul_weight_scratch_bytes,
                                 .matmul_prepared_bytes = ops_cpu_matmul_weight_scratch_bytes,
                                 .matmul_weight_is_refused = ops_cpu_matmul_weight_is_refused,
                                 .matmul_end_warm_up = ops_cpu_matmul_end_warm_up,
                                 .matmul_spare_multiprocessors =
                                     ops_cpu_matmul_spare_multiprocessors,
                                 .matmul_count_fallbacks = ops_cpu_matmul_count_fallbacks,
                                 BL_OPS_LIST(ENTRY)};
