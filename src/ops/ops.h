/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h -- what the ops have in common.
 *
 * An op is a function bl_<op>(bl_stream *, const bl_<op>_args *): it copies its arguments, queues itself on
 * the stream and returns. Arguments that make no sense are refused at the call; a failure while running
 * surfaces as the stream's sticky error. All pointers are device memory of the stream's device and stay valid
 * until the op has run. Matrices are row-major and dense unless a leading dimension is named. Sums that decide
 * results are taken in a fixed order that depends on shapes alone. T is the number of tokens of a micro-batch;
 * T = 0 is legal everywhere and does nothing.
 *
 * Activations and their gradients are `void *` and of the type that the arguments' `act` says: fp32 on the CPU,
 * bf16 on CUDA. Everything declared `float *` is fp32 everywhere. Other combinations are BL_EINTERNAL, except
 * where an op says that it takes both types on CUDA.
 *
 * A micro-batch is a flat stream of tokens; cu_seqlens[n_documents + 1] holds the first token of each
 * document and T at its end. Documents do not see each other, and positions start at 0 in each. */
#ifndef BALLAST_OPS_OPS_H
#define BALLAST_OPS_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Zero, and so what arguments without this member initialised mean, is fp32. */
typedef enum bl_act_type { BL_ACT_F32, BL_ACT_BF16 } bl_act_type;

static inline size_t bl_act_bytes(bl_act_type type)
{
    return type == BL_ACT_BF16 ? 2 : 4;
}

#ifdef __cplusplus
}
#endif

#endif
