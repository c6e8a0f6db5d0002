/* SPDX-License-Identifier: Apache-2.0 */
/* SwiGLU that also quantizes its result, for an FP8 product. h is rounded to bf16 and stored, and
 * the rounded values are quantized, so the codes equal those of a separate pass over h. A block
 * computes a row or a piece of a row. Groups past the first BL_QUANTIZE_KEPT of a thread are read
 * back by the thread that wrote them. */
#include "fp8/cuda/quantize.cuh"
#include "ops/cuda/ops_cuda.h"
#include "ops/element_internal.h"

typedef struct swiglu_task {
    const bl_bf16 *gate_up;
    bl_bf16 *h;
    uint8_t *codes;
    float *scales;
    int64_t I, piece; /* a block's columns */
    bool aligned;
} swiglu_task;

/* Stores the group of h from column `col` on, of which n_valid columns exist; returns its bf16
 * bits. */
__device__ static inline uint4 swiglu_group(const swiglu_task &task, int64_t row, int64_t col,
                                            int64_t n_valid)
{
    const bl_bf16 *gate = task.gate_up + row * 2 * task.I + col;
    float g[BL_GROUP], u[BL_GROUP];
    bl_load(gate, n_valid, task.aligned, g);
    bl_load(gate + task.I, n_valid, task.aligned, u);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) g[i] = bl_swiglu(g[i], u[i]);
    uint4 raw = bl_pack(g);
    bl_store_raw(task.h + row * task.I + col, n_valid, task.aligned, raw);
    return raw;
}

__global__ void __launch_bounds__(BL_QUANTIZE_THREADS, 2)
    swiglu_quantized_kernel(swiglu_task task, unsigned n_pieces)
{
    int64_t row = blockIdx.x / n_pieces, begin = blockIdx.x % n_pieces * task.piece,
            end = min(begin + task.piece, task.I), first = begin + (int64_t)threadIdx.x * BL_GROUP,
            stride = (int64_t)blockDim.x * BL_GROUP;
    const bl_bf16 *h = task.h + row * task.I;
    uint8_t *codes = task.codes + row * task.I;
    uint4 kept[BL_QUANTIZE_KEPT];
    uint32_t largest = 0;

#pragma unroll
    for (int k = 0; k < BL_QUANTIZE_KEPT; k++) {
        int64_t col = first + k * stride;
        if (col >= end) break;
        kept[k] = swiglu_group(task, row, col, end - col);
        largest = bl_raw_absmax(kept[k], largest);
    }
    for (int64_t col = first + BL_QUANTIZE_KEPT * stride; col < end; col += stride)
        largest = bl_raw_absmax(swiglu_group(task, row, col, end - col), largest);

    float scale = bl_e4m3_scale(bl_f32_from_bits(bl_row_max(largest, false)));
    bl_e4m3_divisor divisor = bl_e4m3_divisor_of(scale);
    if (begin == 0 && threadIdx.x == 0) task.scales[row] = scale;
#pragma unroll
    for (int k = 0; k < BL_QUANTIZE_KEPT; k++) {
        int64_t col = first + k * stride;
        if (col >= end) break;
        bl_encode_raw(divisor, kept[k], codes + col, end - col, task.aligned);
    }
    for (int64_t col = first + BL_QUANTIZE_KEPT * stride; col < end; col += stride)
        bl_encode_raw(divisor, bl_load_raw(h + col, end - col, task.aligned), codes + col,
                      end - col, task.aligned);
    bl_row_max_end(n_pieces);
}

extern "C" bl_status ops_cuda_swiglu_forward_quantized(bl_stream *stream,
                                                       const bl_swiglu_forward_args *a)
{
    swiglu_task task = {};
    if (a->T < 0 || a->I < 0)
        return BL_FAIL(BL_EINTERNAL, "swiglu_forward: %lld rows of %lld columns", (long long)a->T,
                       (long long)a->I);
    if (a->I == 0) return BL_OK;
    int64_t n_pieces = bl_quantize_pieces(
        bl_cuda_device_properties(bl_stream_device(stream))->capability, a->I, &task.piece);
    task.gate_up = (const bl_bf16 *)a->gate_up.data;
    task.h = (bl_bf16 *)a->h.data;
    task.codes = a->quantized.codes;
    task.scales = a->quantized.scales;
    task.I = a->I;
    task.aligned = bl_is_aligned(task.gate_up) && bl_is_aligned(task.h) &&
                   bl_is_aligned(task.codes) && a->I % BL_GROUP == 0;
    return bl_launch(
        "swiglu_forward", stream,
        {a->T * n_pieces, bl_row_threads(task.piece, BL_QUANTIZE_THREADS), (unsigned)n_pieces},
        swiglu_quantized_kernel, task, (unsigned)n_pieces);
}
