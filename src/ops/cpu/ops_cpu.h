/* SPDX-License-Identifier: Apache-2.0 */
/* ops_cpu.h -- the ops on the CPU, and what their kernels have in common: splitting rows into
 * items, vector loops. Internal to ops/.
 *
 * Bits. No kernel here contracts or reorders by the CPU's vector width: element-wise loops have one
 * order anyway, and sums run in a fixed number of lanes (vf16, vd8) that wide machines hold in one
 * register and narrow ones in several. So a clone for AVX-512 and the baseline give the same bits;
 * only fp32 products without fused multiply-adds and AMX differ from CPU to CPU. */
#ifndef BALLAST_OPS_CPU_OPS_CPU_H
#define BALLAST_OPS_CPU_OPS_CPU_H

#include <stdint.h>
#include <string.h>

#include "base/clones.h"
#include "base/sizes.h"
#include "ops/element_internal.h"
#include "ops/ops_internal.h"

/* Before a loop whose arrays are either disjoint or the very same: no iteration reads what another
 * one writes. */
#if defined(__clang__)
#define OPS_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define OPS_IVDEP _Pragma("GCC ivdep")
#endif

/* Unaligned vectors; may_alias because they are laid over float arrays. */
typedef float vf16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef float vf8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double vd8 __attribute__((vector_size(64), aligned(8), may_alias));

enum { OPS_ITEM_ELEMENTS = 1 << 14 }; /* of an item of a light loop: some microseconds of work */

/* ops_cpu_<op>: the op's work, on the stream's thread and the device's pool; a task that table.c
 * queues. */
#define OPS_CPU_DECLARE(op, ...)                                                                   \
    bl_status ops_cpu_##op(bl_stream *stream, const bl_##op##_args *args);
BL_OPS_LIST(OPS_CPU_DECLARE)
#undef OPS_CPU_DECLARE

size_t ops_cpu_loss_head_scratch_bytes(int64_t T, int64_t H, int64_t V);
size_t ops_cpu_matmul_weight_scratch_bytes(const bl_matmul_weight_args *args);
bl_status ops_cpu_matmul_weight_is_refused(bl_stream *stream, const bl_matmul_weight_args *args,
                                           bool *out);
bl_status ops_cpu_matmul_end_warm_up(bl_device *device);
bl_status ops_cpu_matmul_spare_multiprocessors(bl_device *device, int n);
bl_status ops_cpu_matmul_count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT]);

/* A matrix of a product: sizes >= 0, rows at least n_cols apart, both within 32 bits. */
bl_status ops_gemm_check_matrix(const char *name, int64_t n_rows, int64_t n_cols, int64_t ld);
bl_status ops_gemm_check_weight(const bl_weight *w);

/* Products of bf16 take channels in pairs. */
static inline bl_status ops_cpu_check_head(int64_t d, bl_dtype dtype)
{
    if (dtype == BL_F32 || d % 2 == 0) return BL_OK;
    return BL_FAIL(BL_ELIMIT, "attention in bf16: head dimension %lld is odd", (long long)d);
}

/* dq, dk and dv of the documents' rows, on bf16. */
void ops_cpu_attention_backward_bf16(bl_pool *pool, const bl_attention_backward_args *args);

static inline bl_pool *ops_pool(bl_stream *stream)
{
    return bl_device_pool(bl_stream_device(stream));
}

/* The elements of a tensor that is fp32. */
static inline float *ops_f32(bl_tensor t)
{
    return t.data;
}

/* The elements of a tensor that is bf16. */
static inline uint16_t *ops_bf16(bl_tensor t)
{
    return t.data;
}

/* Kernels compute on rows of fp32. Elements [at, at + n) of a tensor as such a row: itself where
 * the tensor is fp32, else `copy` (n), in which it is widened. */
const float *ops_read(bl_tensor t, int64_t at, int64_t n, float *copy);

/* Where a kernel stores elements from `at` on: in the tensor, or in `copy`, from which ops_write
 * rounds them to the tensor (and in fp32 does nothing). */
static inline float *ops_place(bl_tensor t, int64_t at, float *copy)
{
    return t.dtype == BL_F32 ? ops_f32(t) + at : copy;
}
void ops_write(bl_tensor t, int64_t at, int64_t n, const float *values);

/* y_i = x_i for i < n, exact; rounded to nearest even, NaN stays NaN (bl_f32_to_bf16). */
void ops_widen(int64_t n, const uint16_t *x, float *y);
void ops_round(int64_t n, const float *x, uint16_t *y);

/* y_i = bf16(factor x_i) for i < n; y may begin where x does. */
void ops_scale_round(int64_t n, float factor, const float *x, uint16_t *y);

/* bl_f32_to_bf16 of 16 elements, inside an BL_CLONES function. By address: a vector as an argument
 * is passed in another way where AVX-512 is not enabled. */
__attribute__((always_inline)) static inline void ops_round_16(const float *x, uint16_t *y)
{
    vu16 bits = *(const vu16 *)x, high = bits >> 16,
         is_nan = (vu16)((bits & 0x7fffffffu) > 0x7f800000u),
         rounded = (bits + 0x7fffu + (high & 1u)) >> 16;
    *(vh16 *)y = __builtin_convertvector((rounded & ~is_nan) | ((high | 0x40u) & is_nan), vh16);
}

enum {
    OPS_BLOCK = 512, /* columns at a time of a loop over a wide row: copies stay in the L1 cache */
    OPS_ROW_MAX =
        BL_POOL_SCRATCH_BYTES / (int)sizeof(float) / 4 /* of kernels that need whole rows */
};

/* Rows of an item when a row has n_columns elements: from shapes alone, so that items never depend
 * on the threads. */
static inline int64_t ops_rows_per_item(int64_t n_columns)
{
    return bl_max_i64(1, OPS_ITEM_ELEMENTS / bl_max_i64(1, n_columns));
}

/* T, or what the range has. */
static inline int64_t ops_row_count(int64_t T, bl_row_range range)
{
    return range.begin ? *range.end - *range.begin : T;
}

/* row_i = exp(row_i - shift) for i < n; returns the sum, in float over 16 lanes and 256 elements,
 * in double above. */
double ops_exp_sum(float *row, int64_t n, float shift);

/* The largest of row (n); NaN entries are passed over. -infinity for n = 0. */
float ops_max(const float *row, int64_t n);

/* row_i *= factor for i < n. */
void ops_scale(int64_t n, float factor, float *row);

/* sum_i a_i b_i, products and sum in double. */
double ops_dot(const float *a, const float *b, int64_t n);

#endif
