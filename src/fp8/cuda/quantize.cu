/* SPDX-License-Identifier: Apache-2.0 */
/* Activations to E4M3. A row is read once: its groups stay in registers between the search for
 * absmax and encoding. A row that is too long for one block's registers is shared by a cluster of
 * up to eight, which exchange their absmax through distributed shared memory; what still does not
 * fit (and on devices before Hopper, whatever does not fit one block) is read a second time. The
 * codes are the same all three ways.
 *
 * Factors of columns are four bytes for two of x. Were they fetched anew for every row, that would
 * be more than the L2 gives; so a block takes its columns of several rows, one after the other, and
 * finds them in its own cache. */
#include "fp8/cuda/fp8_cuda.h"
#include "fp8/cuda/quantize.cuh"

enum {
    KEPT = BL_QUANTIZE_KEPT,
    ROWS_MIN = 2, /* of a block, where there are factors */
    ROWS_MAX = 8,
    BLOCKS_WANTED = 8 /* of a multiprocessor, where two are at a time: the last ones are then few */
};

typedef struct rows_task {
    const bl_bf16 *x;
    int64_t ld, T, cols, n_rows,
        piece; /* a block's rows, and its columns, a multiple of BL_GROUP */
    const float *column_factor;
    uint8_t *codes;
    float *scales;
    bool aligned;
} rows_task;

/* Group at column `col`, multiplied with the factors of its columns where there are any. */
__device__ static inline void scaled_group(const rows_task &task, uint4 raw, int64_t col,
                                           int64_t n_valid, float out[BL_GROUP])
{
    bl_unpack(raw, out);
    if (!task.column_factor) return;
    float factor[BL_GROUP];
    bl_load(task.column_factor + col, n_valid, task.aligned, factor);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) out[i] *= factor[i];
}

__device__ static inline void quantize_piece(const rows_task &task, int64_t row, int64_t begin)
{
    int64_t end = min(begin + task.piece, task.cols);
    const bl_bf16 *x = task.x + row * task.ld;
    uint8_t *codes = task.codes + row * task.cols;
    int64_t first = begin + (int64_t)threadIdx.x * BL_GROUP,
            stride = (int64_t)blockDim.x * BL_GROUP;

    uint4 kept[KEPT];
    float values[BL_GROUP];
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        kept[k] =
            col < end ? bl_load_raw(x + col, end - col, task.aligned) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col >= end) break;
        scaled_group(task, kept[k], col, end - col, values);
        largest = bl_group_absmax(values, largest);
    }
    for (int64_t col = first + KEPT * stride; col < end; col += stride) {
        scaled_group(task, bl_load_raw(x + col, end - col, task.aligned), col, end - col, values);
        largest = bl_group_absmax(values, largest);
    }

    float scale = bl_e4m3_scale(bl_f32_from_bits(bl_row_max(largest, row % 2 != 0)));
    bl_e4m3_divisor divisor = bl_e4m3_divisor_of(scale);
    if (begin == 0 && threadIdx.x == 0) task.scales[row] = scale;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col >= end) break;
        scaled_group(task, kept[k], col, end - col, values);
        bl_encode_group(divisor, values, codes + col, end - col, task.aligned);
    }
    for (int64_t col = first + KEPT * stride; col < end; col += stride) {
        scaled_group(task, bl_load_raw(x + col, end - col, task.aligned), col, end - col, values);
        bl_encode_group(divisor, values, codes + col, end - col, task.aligned);
    }
}

/* The pieces of a row are neighbors in the grid, and one cluster. */
__global__ void __launch_bounds__(BL_QUANTIZE_THREADS, 2)
    quantize_rows_kernel(rows_task task, unsigned n_pieces)
{
    int64_t first = blockIdx.x / n_pieces * task.n_rows;
    for (int64_t row = first; row < min(first + task.n_rows, task.T); row++)
        quantize_piece(task, row, (int64_t)(blockIdx.x % n_pieces) * task.piece);
    bl_row_max_end(n_pieces);
}

/* 128 columns are 16 neighboring threads' groups: half a warp finds the scale of each. */
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    quantize_groups_kernel(const bl_bf16 *x, int64_t ld, int64_t T, int64_t cols, bool aligned,
                           unsigned blocks_per_row, uint8_t *codes, float *scales)
{
    int64_t row = blockIdx.x / blocks_per_row;
    int64_t col = (int64_t)(blockIdx.x % blocks_per_row) * BL_BLOCK_ELEMENTS +
                  (int64_t)threadIdx.x * BL_GROUP;
    float values[BL_GROUP];
    bl_load(x + row * ld + col, cols - col, aligned, values); /* beyond the row: zeros */
    uint32_t largest = bl_group_absmax(values, 0);
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    if (col >= cols) return;
    float scale = bl_e4m3_scale(bl_f32_from_bits(largest));
    if (col % BL_FP8_BLOCK == 0) scales[col / BL_FP8_BLOCK * T + row] = scale;
    bl_encode_group(bl_e4m3_divisor_of(scale), values, codes + row * cols + col, cols - col,
                    aligned);
}

static bl_status check_rows(const char *what, int64_t ld, int64_t T, int64_t cols)
{
    if (T < 0 || cols < 0 || ld < cols)
        return BL_FAIL(BL_EINTERNAL, "%s: %lld rows of %lld columns, %lld apart", what,
                       (long long)T, (long long)cols, (long long)ld);
    return BL_OK;
}

extern "C" bl_status fp8_cuda_quantize_rows(bl_stream *stream, const void *x, int64_t ld,
                                            const float *column_factor, int64_t T, int64_t cols,
                                            uint8_t *codes, float *scales)
{
    BL_TRY(check_rows("quantize_rows", ld, T, cols));
    if (cols == 0) return BL_OK;
    const bl_cuda_properties *gpu = bl_cuda_device_properties(bl_stream_device(stream));
    rows_task task;
    int64_t n_pieces = bl_quantize_pieces(gpu->capability, cols, &task.piece);
    task.x = (const bl_bf16 *)x;
    task.ld = ld;
    task.T = T;
    int64_t n_rows = T * n_pieces / ((int64_t)gpu->n_multiprocessors * BLOCKS_WANTED);
    if (n_rows < ROWS_MIN) n_rows = ROWS_MIN;
    if (n_rows > ROWS_MAX) n_rows = ROWS_MAX;
    task.n_rows = column_factor ? n_rows : 1;
    task.cols = cols;
    task.column_factor = column_factor;
    task.codes = codes;
    task.scales = scales;
    task.aligned = bl_is_aligned(x) && bl_is_aligned(codes) &&
                   (!column_factor || bl_is_aligned(column_factor)) && ld % BL_GROUP == 0 &&
                   cols % BL_GROUP == 0;
    return bl_launch("quantize_rows", stream,
                     {bl_blocks_for(T, task.n_rows) * n_pieces,
                      bl_row_threads(task.piece, BL_QUANTIZE_THREADS), (unsigned)n_pieces},
                     quantize_rows_kernel, task, (unsigned)n_pieces);
}

extern "C" bl_status fp8_cuda_quantize_groups(bl_stream *stream, const void *x, int64_t ld,
                                              int64_t T, int64_t cols, uint8_t *codes,
                                              float *scales)
{
    int64_t blocks_per_row = bl_blocks_for(cols, BL_BLOCK_ELEMENTS);
    BL_TRY(check_rows("quantize_groups", ld, T, cols));
    bool aligned =
        bl_is_aligned(x) && bl_is_aligned(codes) && ld % BL_GROUP == 0 && cols % BL_GROUP == 0;
    return bl_launch("quantize_groups", stream, {T * blocks_per_row, BL_BLOCK_THREADS, 1},
                     quantize_groups_kernel, (const bl_bf16 *)x, ld, T, cols, aligned,
                     (unsigned)blocks_per_row, codes, scales);
}
