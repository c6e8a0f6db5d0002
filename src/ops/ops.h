/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h -- conventions of all ops.
 *
 * An op is a function bl_<op>(bl_stream *, const bl_<op>_args *): it copies its arguments, queues
 * itself on the stream and returns. Arguments that make no sense are refused at the call; a failure
 * while running surfaces as the stream's sticky error. All pointers are device memory of the
 * stream's device and stay valid until the op has run. Matrices are row-major and dense unless a
 * leading dimension is named. Sums that decide results are taken in a fixed order that depends on
 * shapes alone. T is the number of tokens of a micro-batch; T = 0 is legal everywhere and does
 * nothing.
 *
 * Activations and their gradients are tensors of one dtype per call: fp32 or bf16 on the CPU, bf16
 * on CUDA. An op on bf16 computes in fp32 and rounds what it stores to nearest even. Everything
 * declared `float *` is fp32 everywhere. Another dtype is BL_EINTERNAL, except where an op says
 * that it takes both on CUDA. Sizes of scratch depend on the kind of device and on dtypes alone, so
 * that memory can be planned before there is a device.
 *
 * A micro-batch is a flat stream of tokens; cu_seqlens[n_documents + 1] holds the first token of
 * each document and T at its end. Documents do not see each other, and positions start at 0 in
 * each. */
#ifndef BALLAST_OPS_OPS_H
#define BALLAST_OPS_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"
#include "device/tensor.h"

/* A matrix (T,C) in E4M3, a scale per row as fp8/fp8.h has them: what an FP8 product reads of an
 * activation. Device memory, codes 16-byte aligned, borrowed. codes NULL: none. */
typedef struct bl_quantized {
    uint8_t *codes; /* (T,C) */
    float *scales;  /* (T) */
} bl_quantized;

/* Rows [*begin, *end), numbers in device memory, known when the op runs; begin NULL: none. */
typedef struct bl_row_range {
    const int32_t *begin, *end;
} bl_row_range;

#endif
