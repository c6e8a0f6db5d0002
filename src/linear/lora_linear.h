/* SPDX-License-Identifier: Apache-2.0 */
/* lora_linear.h -- a frozen, possibly quantized weight with trainable low-rank updates.
 *
 *   y  = x W^T + s (D x A^T) B^T        Hu et al. 2021, arXiv:2106.09685, eq. 3; D is the dropout
 *                                       mask of the LoRA path's input
 *   dx = dy W  + D (s (dy B) A)         W gets no gradient
 *   dA = (s dy B)^T (D x)   dB = s dy^T (D x A^T)
 *
 * and where there is a residual z (T,N), y = z + the above.
 *
 * Row-major: x, dx (T,K)  y, dy (T,N)  W (N,K)  A (r,K)  B (n,r). A fused matrix (q|k|v, gate|up)
 * has up to BL_LORA_PARTS LoRA terms, each on separate rows [row_begin, row_begin + n) of W, all
 * reading the same D x.
 *
 * A call borrows everything: the frozen matrix (bl_base_acquire), the LoRA weights, the gradients'
 * place, the workspace, the stream. So one frozen matrix can serve several adapters, or none
 * (n_parts 0: the plain base). The stream's device decides where it runs; all pointers are memory
 * of that device.
 *
 * Types: x, y, dy, dx, A and B are of one dtype, fp32 or bf16 on the CPU and bf16 on CUDA (in bf16
 * A and B are compute copies made by bl_cast); dA and dB are fp32 everywhere. */
#ifndef BALLAST_LINEAR_LORA_LINEAR_H
#define BALLAST_LINEAR_LORA_LINEAR_H

#include "device/device.h"
#include "device/tensor.h"
#include "ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most LoRA terms of a matrix: q, k and v. */
enum { BL_LORA_PARTS = 3 };

typedef struct bl_lora_part {
    int64_t r, row_begin, rows;
    /* s: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (Kalajdzievski 2023,
     * arXiv:2312.03732). */
    float scale;
    bl_tensor A, B;  /* (r,K), (rows,r) */
    float *dA, *dB;  /* overwritten by backward, */
    bool accumulate; /* or added to; of stacked parts the first one's is for the dA of all */
} bl_lora_part;

/* The mask's key; see bl_dropout in ops/elementwise.h. p = 0: no dropout, the other members are not
 * read. */
typedef struct bl_lora_dropout {
    float p;
    uint64_t seed, step;
    int32_t layer, matrix;
    const int64_t *sample;   /* (T) */
    const int32_t *position; /* (T) */
} bl_lora_dropout;

typedef struct bl_lora_linear {
    bl_weight weight;
    int n_parts;
    bl_lora_part part[BL_LORA_PARTS];
    /* The parts' A's are contiguous, and so are their dA's: in bf16 x and dx are then read once
     * for all parts instead of once for each. Ignored in fp32. */
    bool is_stacked;
    bl_lora_dropout dropout;
    /* z of a forward call: of y's dtype, not in y's memory. None: y is the product alone. On CUDA
     * it is the addend of the first product, so that it costs a read; elsewhere it is added
     * last. */
    bl_tensor residual;
    /* For a forward call: x is also in E4M3, at bl_lora_linear_operand's place. */
    bool is_quantized;
    bl_matmul_mode mode; /* how the frozen product is made on CUDA */
    bl_matmul_sums sums; /* of it, in FP8 */
    /* of the weight (ops/matmul.h), borrowed; NULL: made in the workspace by every call */
    bl_matmul_prepared *prepared;
    void *workspace;        /* bl_lora_linear_workspace_bytes(...), 256-byte aligned on CUDA */
    size_t workspace_bytes; /* ignored on the CPU */
} bl_lora_linear;

/* out[i] = element begin + i of A's first values, i < count, A (r,K) row-major: uniform in
 * [-1/sqrt(K), 1/sqrt(K)) (PEFT's kaiming_uniform with a = sqrt 5), a function of (seed, layer,
 * projection, element) alone. Host memory. */
BL_API void bl_lora_initialize(uint64_t seed, int64_t layer, int projection, int64_t K,
                               int64_t begin, int64_t count, float *out);

/* The same from the normal distribution N(0, 1): Box & Muller 1958, doi:10.1214/aoms/1177706645. */
void bl_lora_initialize_normal(uint64_t seed, int64_t layer, int projection, int64_t begin,
                               int64_t count, float *out);

/* Bytes of the workspace on such a device for x of dtype `act`; 0 is possible. Of `linear`, the
 * weight's shape and formats, the parts' r, is_stacked, dropout.p, mode and prepared->memory_bytes
 * are read; on the CPU the weight's columns alone. */
BL_API size_t bl_lora_linear_workspace_bytes(bl_device_kind kind, bl_dtype act,
                                             const bl_lora_linear *linear, int64_t T);

/* The place in the workspace from which the forward call for T tokens of dtype `act` reads x in
 * E4M3 (bl_matmul_weight_operand). None on a CPU, and if the frozen product does not quantize whole
 * rows. Nothing else may use the workspace between writing x and the call. The weight's codes are
 * not read. */
bl_quantized bl_lora_linear_operand(bl_device_kind kind, bl_dtype act, const bl_lora_linear *linear,
                                    int64_t T);

/* y (T,N) is overwritten. x and y do not overlap. */
BL_API bl_status bl_lora_linear_forward(bl_stream *stream, const bl_lora_linear *linear, int64_t T,
                                        bl_tensor x, bl_tensor y);

/* dx (T,K) and the parts' dA, dB are overwritten, or with `accumulate` dA and dB are added to; none
 * for dx skips it. x is the forward's input. dx overlaps neither x nor dy. T = 0 sets dA and dB to
 * zero, or leaves them. */
BL_API bl_status bl_lora_linear_backward(bl_stream *stream, const bl_lora_linear *linear, int64_t T,
                                         bl_tensor x, bl_tensor dy, bl_tensor dx);

#ifdef __cplusplus
}
#endif

#endif
