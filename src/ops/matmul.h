/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.h -- matrix products on a stream. */
#ifndef BALLAST_OPS_MATMUL_H
#define BALLAST_OPS_MATMUL_H

#include <stdbool.h>

#include "ops/ops.h"
#include "ops/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* C = alpha op(A) op(B) + beta Z, row-major: op(A) (M,K), op(B) (K,N), C (M,N); op transposes when
 * asked. Z is C, or `addend` where that is there: (M,N) of C's dtype and leading dimension, C
 * itself or apart from it. Leading dimensions are the strides between stored rows. With beta 0 C is
 * overwritten, whatever it held, and no addend read. C overlaps neither A nor B. A and B are bf16
 * and C is bf16 or fp32, sums are fp32, rounded once; or, on the CPU, all are fp32. scratch:
 * BL_MATMUL_SCRATCH_BYTES or nothing (slower for some shapes); ignored on the CPU. 256-byte
 * aligned. */
enum { BL_MATMUL_SCRATCH_BYTES = 32 << 20 };
typedef struct bl_matmul_args {
    bool transpose_a, transpose_b;
    int64_t M, N, K, lda, ldb, ldc;
    float alpha, beta;
    bl_tensor a, b, c;
    bl_tensor addend; /* may be none */
    void *scratch;
    size_t scratch_bytes;
} bl_matmul_args;
BL_API bl_status bl_matmul(bl_stream *stream, const bl_matmul_args *args);

/* How a product with a frozen matrix is made on CUDA; the CPU's is made in the dtype of `in`.
 * BF16: the matrix is dequantized to bf16. The reference. FP8: the codes are multiplied as they
 * are with `in` quantized to E4M3 on the fly, a scale per token for fp8_row and a scale per token
 * and 128 channels for fp8_block. Where that cannot be, BF16 all the same: see
 * bl_matmul_fallback. */
typedef enum bl_matmul_mode { BL_MATMUL_BF16, BL_MATMUL_FP8 } bl_matmul_mode;

/* Sums of FP8 products with scales per row. FULL: fp32. FAST: Hopper's accumulator over the whole
 * sum, which keeps about 14 bits of a mantissa (DeepSeek-V3, arXiv:2412.19437, 3.3.2); in
 * FAST_FORWARD only for y = x W^T. Products with scales per block have full sums in any case: they
 * leave the accumulator every 128 terms. */
typedef enum bl_matmul_sums { BL_SUMS_FULL, BL_SUMS_FAST_FORWARD, BL_SUMS_FAST } bl_matmul_sums;

/* Why a product that was to be in FP8 is in bf16. */
typedef enum bl_matmul_fallback {
    BL_FALLBACK_FORMAT, /* segments that are not FP8, differ in format or have gaps between them */
    BL_FALLBACK_SHAPE,  /* rows or cols that are not multiples of 16; fp8_block: segments that end
                               inside a block, or T that is not a multiple of 4 */
    BL_FALLBACK_CAPABILITY, /* a GPU of a capability other than 9.0 */
    BL_FALLBACK_REFUSED,    /* cuBLASLt has no such product */
    BL_FALLBACK_COUNT
} bl_matmul_fallback;

/* The reason in words: "it is not stored in one FP8 format". */
const char *bl_matmul_fallback_text(bl_matmul_fallback reason);

/* Whether a GPU of this compute capability (10 x major + minor) has the FP8 products: scales per
 * row and per block are Hopper's. The one owner of this decision: products, the configuration and
 * plans ask here. */
bool bl_matmul_has_fp8(int capability);

/* counts[reason] = how many products the device's streams were given so far that fell back, queued
 * or run. The first of each reason is logged. Zeros on the CPU. From any thread. */
bl_status bl_matmul_count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT]);

/* n of the device's multiprocessors are for kernels that run beside the products, such as those of
 * collectives: cuBLASLt chooses for the others. Before the device's first product; 0: none, as at
 * the start. May change which algorithm a product gets, and so its bits. Ignored on the CPU. */
bl_status bl_matmul_spare_multiprocessors(bl_device *device, int n);

/* From now on the first product of a shape that the device has not had is a warning, once: CUDA may
 * load its kernel, and wait meanwhile for kernels of collectives that wait for other ranks. */
bl_status bl_matmul_end_warm_up(bl_device *device);

/* The copy of a frozen matrix that products make before they multiply: the matrix in bf16, or its
 * codes transposed and its scales stacked. Two products that are given the same object make each of
 * these once, and compute the bits that they would have computed without. The object belongs to one
 * weight at a time: a caller that gives it to another weight, or changes the weight, clears it
 * first (made = 0). Products on different streams that share one are ordered by the caller. Ignored
 * on the CPU. */
typedef struct bl_matmul_prepared {
    void *memory; /* device memory, 256-byte aligned, borrowed */
    /* From bl_matmul_prepared_bytes(...) on; with less, the object is as if it were not there. */
    size_t memory_bytes;
    unsigned made; /* what there is: the products' own; 0: nothing yet */
} bl_matmul_prepared;

/* forward:  y (T,N) = x (T,K) W^T + beta y;   otherwise the input gradient:  dx (T,K) = dy (T,N) W
 *                                                                            + beta dx.
 * An `addend` that is there takes the place of y or dx on the right: dense rows of their shape and
 * dtype, `out` itself or apart from it. With beta 0 `out` is overwritten, whatever it held; it
 * overlaps neither `in` nor the weight. All are dense rows; W = weight (N,K), in any format,
 * dequantized on the fly: no fp32 copy of it is made. scratch: bl_matmul_weight_scratch_bytes of
 * the same arguments, or of ones with a larger T; 256-byte aligned. None on the CPU. */
typedef struct bl_matmul_weight_args {
    bool forward;
    bl_matmul_mode mode;
    bl_matmul_sums sums;
    float beta;
    int64_t T;
    bl_tensor in, out;
    bl_tensor addend; /* may be none */
    bl_weight weight;
    void *scratch;
    size_t scratch_bytes;
    bl_matmul_prepared *prepared; /* NULL: made in scratch, for this product alone */
    /* `in` is in E4M3 already, where bl_matmul_weight_operand said. `in` is read all the same where
     * the product is in bf16. */
    bool is_quantized;
    /* NULL: what cuBLASLt has no FP8 product for is computed in bf16. Else that is not computed at
     * all: nothing is queued and *is_refused = true. Not written otherwise. */
    bool *is_refused;
} bl_matmul_weight_args;
BL_API bl_status bl_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *args);

/* Where in the scratch the product reads `in` in E4M3 with a scale per row: the op that makes `in`
 * can write that, too, and set is_quantized; until the product, the scratch's first
 * BL_MATMUL_SCRATCH_BYTES are free for others. None: on the CPU, and where the product is not in
 * FP8 with scales per row, or in several pieces. forward, mode, T, the weight's shape and formats,
 * scratch and prepared->memory_bytes are read; codes NULL: segments without gaps. */
bl_quantized bl_matmul_weight_operand(bl_device_kind kind, const bl_matmul_weight_args *args);

/* The mode of that product on a CUDA device that has FP8 products, as far as the matrix and T
 * decide it: no GPU is asked, and cuBLASLt may still refuse. mode, T, the weight's shape and
 * formats are read; codes NULL: segments without gaps. *reason (may be NULL): why FP8 became BF16;
 * else not written. */
bl_matmul_mode bl_matmul_weight_mode(const bl_matmul_weight_args *args, bl_matmul_fallback *reason);

/* *out: whether the product is known to come out as *is_refused = true. On the CPU, and where bf16
 * is asked for: false. */
bl_status bl_matmul_weight_is_refused(bl_stream *stream, const bl_matmul_weight_args *args,
                                      bool *out);

/* forward, mode, T, the weight's shape and formats and prepared->memory_bytes are read, other
 * pointers are not. Does not shrink as T grows. */
BL_API size_t bl_matmul_weight_scratch_bytes(bl_device_kind kind,
                                             const bl_matmul_weight_args *args);

/* Bytes of prepared memory for both directions; mode and the weight's shape and formats are read. 0
 * where nothing needs to be made: on the CPU, and of a matrix that is stored in bf16. In the FP8
 * mode of any weight: what falls back to bf16 is dequantized there where it is large enough (as
 * that of BF16 would be), else in scratch. */
size_t bl_matmul_prepared_bytes(bl_device_kind kind, const bl_matmul_weight_args *args);

#ifdef __cplusplus
}
#endif

#endif
