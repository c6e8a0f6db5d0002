/* SPDX-License-Identifier: Apache-2.0 */
/* Frozen weights to bf16, and codes and scales transposed. */
#include "fp8/cuda/fp8_cuda.h"
#include "fp8/cuda/vector.cuh"

/* ---- decoding ---- */

enum {
    /* of a thread's access; 16 bytes of bf16, so that a warp's stores leave no gaps. One scale's,
     * as 128 is a multiple */
    CODES = 8,
    ACCESSES = 4, /* a thread's, all under way before the first is used */
    ROW_STEP = BL_BLOCK_THREADS * CODES
};

__device__ static inline uint4 decode_codes(uint2 raw, float scale)
{
    float2 a = bl_e4m3_pair_to_f32(raw.x & 0xffffu), b = bl_e4m3_pair_to_f32(raw.x >> 16),
           c = bl_e4m3_pair_to_f32(raw.y & 0xffffu), d = bl_e4m3_pair_to_f32(raw.y >> 16);
    return make_uint4(
        bl_bf16_pair(a.x * scale, a.y * scale), bl_bf16_pair(b.x * scale, b.y * scale),
        bl_bf16_pair(c.x * scale, c.y * scale), bl_bf16_pair(d.x * scale, d.y * scale));
}

/* scales: of the row's first column; one for the whole row, or one for 128 columns. */
__device__ static inline float scale_at(const float *scales, bool is_row, int64_t col)
{
    return is_row ? scales[0] : scales[col / BL_FP8_BLOCK];
}

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    dequantize_codes_kernel(const uint8_t *codes, const float *scales, bool is_row, int64_t cols,
                            bool aligned, unsigned blocks_per_row, bl_bf16 *dst)
{
    int64_t row = blockIdx.x / blocks_per_row, first = row * cols;
    int64_t begin =
        (int64_t)(blockIdx.x % blocks_per_row) * ACCESSES * ROW_STEP + (int64_t)threadIdx.x * CODES;
    scales += is_row ? row : row / BL_FP8_BLOCK * ((cols + BL_FP8_BLOCK - 1) / BL_FP8_BLOCK);

    if (!aligned) {
        for (int k = 0; k < ACCESSES; k++)
            for (int64_t col = begin + k * ROW_STEP; col < min(begin + k * ROW_STEP + CODES, cols);
                 col++)
                dst[first + col] =
                    bl_e4m3_decode_bf16(codes[first + col], scale_at(scales, is_row, col));
        return;
    }
    uint2 raw[ACCESSES];
    float scale[ACCESSES];
#pragma unroll
    for (int k = 0; k < ACCESSES; k++) {
        int64_t col = begin + k * ROW_STEP;
        if (col >= cols) break;
        raw[k] = __ldcs((const uint2 *)(codes + first + col));
        scale[k] = scale_at(scales, is_row, col);
    }
#pragma unroll
    for (int k = 0; k < ACCESSES; k++) {
        int64_t col = begin + k * ROW_STEP;
        if (col >= cols) break;
        __stwb((uint4 *)(dst + first + col), decode_codes(raw[k], scale[k]));
    }
}

/* n elements of F32 or F16 rounded to bf16. */
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    narrow_kernel(const void *src, bool is_f32, int64_t n, bool aligned, bl_bf16 *dst)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * BL_GROUP;
    uint4 raw;
    if (is_f32) {
        float values[BL_GROUP];
        bl_load((const float *)src + i, n - i, aligned, values);
        raw = bl_pack(values);
    } else {
        raw = bl_halves_to_bf16(bl_load_raw((const uint16_t *)src + i, n - i, aligned));
    }
    bl_store_raw(dst + i, n - i, aligned, raw);
}

static bl_status dequantize_codes(bl_stream *stream, bool is_row, const void *codes,
                                  const float *scales, int64_t rows, int64_t cols, void *dst)
{
    int64_t blocks_per_row = bl_blocks_for(cols, ACCESSES * ROW_STEP);
    bool aligned = bl_is_aligned(codes) && bl_is_aligned(dst) && cols % CODES == 0;
    return bl_launch("dequantize", stream, {rows * blocks_per_row, BL_BLOCK_THREADS, 1},
                     dequantize_codes_kernel, (const uint8_t *)codes, scales, is_row, cols, aligned,
                     (unsigned)blocks_per_row, (bl_bf16 *)dst);
}

extern "C" bl_status fp8_cuda_dequantize(bl_stream *stream, bl_format format, const void *codes,
                                         const void *scales, int64_t rows, int64_t cols, void *dst)
{
    int64_t n = rows * cols;
    if (rows < 0 || cols < 0)
        return BL_FAIL(BL_EINTERNAL, "dequantize: %lld x %lld", (long long)rows, (long long)cols);
    if (bl_format_is_packed(format))
        return BL_FAIL(BL_EUSAGE, "base_format %s: GPUs have no products of it; use fp8_row",
                       bl_format_name(format));
    if (n == 0) return BL_OK;
    if (bl_format_has_scales(format))
        return dequantize_codes(stream, format == BL_FORMAT_FP8_ROW, codes, (const float *)scales,
                                rows, cols, dst);
    if (format == BL_FORMAT_BF16)
        return bl_copy("dequantize", stream, dst, codes, (size_t)n * sizeof(bl_bf16));
    return bl_launch("dequantize", stream,
                     {bl_blocks_for(n, BL_BLOCK_ELEMENTS), BL_BLOCK_THREADS, 1}, narrow_kernel,
                     codes, format == BL_FORMAT_F32, n, bl_is_aligned(codes) && bl_is_aligned(dst),
                     (bl_bf16 *)dst);
}

/* ---- turning codes over ---- */

/* A tile of 128 x 128 codes. A thread reads 16 columns of 4 rows, transposes them in registers, and
 * writes one word, 4 rows of a column, at a time into the tile; then it copies 16 rows of a column
 * to dst. The tile has a line of 32 words for each column; within it, quads of words (16 bytes) are
 * permuted by an xor with the column's sixteenth. So the 32 words a warp writes at once, of 8
 * sixteenths and 4 neighboring words, are in 32 banks, and so are the 8 quads, a whole line, that a
 * quarter of a warp reads at once. */
enum { TILE = 128, TILE_WORDS = TILE / 4 };

/* Four words of four rows become four of four columns. */
__device__ static inline void transpose_4x4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                            uint32_t out[4])
{
    uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab_low, cd_low, 0x5410);
    out[1] = __byte_perm(ab_low, cd_low, 0x7632);
    out[2] = __byte_perm(ab_high, cd_high, 0x5410);
    out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

__device__ static inline void transpose_whole_tile(const uint8_t *src, int64_t rows, int64_t cols,
                                                   int64_t row, int64_t col, uint8_t *dst,
                                                   uint32_t tile[TILE][TILE_WORDS])
{
    int sixteenth = (int)threadIdx.x % 8, quad_of_rows = (int)threadIdx.x / 8; /* 0..7, 0..31 */
    uint4 raw[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        raw[i] = *(const uint4 *)(src + (row + 4 * quad_of_rows + i) * cols + col + 16 * sixteenth);
    const uint32_t a[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w},
                   b[4] = {raw[1].x, raw[1].y, raw[1].z, raw[1].w},
                   c[4] = {raw[2].x, raw[2].y, raw[2].z, raw[2].w},
                   d[4] = {raw[3].x, raw[3].y, raw[3].z, raw[3].w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
        uint32_t out[4];
        transpose_4x4(a[w], b[w], c[w], d[w], out);
#pragma unroll
        for (int k = 0; k < 4; k++)
            tile[16 * sixteenth + 4 * w + k][quad_of_rows ^ 4 * sixteenth] = out[k];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int column = (int)threadIdx.x / 8 + 32 * i, quad = (int)threadIdx.x % 8;
        const uint4 *line = (const uint4 *)tile[column];
        __stwb((uint4 *)(dst + (col + column) * rows + row + 16 * quad), line[quad ^ column / 16]);
    }
}

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    transpose_kernel(const uint8_t *src, int64_t rows, int64_t cols, bool aligned,
                     unsigned tiles_per_row, uint8_t *dst)
{
    __shared__ uint4 memory[TILE * TILE / 16];
    int64_t row = (int64_t)(blockIdx.x / tiles_per_row) * TILE,
            col = (int64_t)(blockIdx.x % tiles_per_row) * TILE;
    if (aligned && row + TILE <= rows && col + TILE <= cols) {
        transpose_whole_tile(src, rows, cols, row, col, dst, (uint32_t(*)[TILE_WORDS])memory);
        return;
    }
    uint8_t *tile = (uint8_t *)memory;
    for (int i = (int)threadIdx.x; i < TILE * TILE; i += BL_BLOCK_THREADS) {
        int64_t r = row + i / TILE, c = col + i % TILE;
        if (r < rows && c < cols) tile[i] = src[r * cols + c];
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < TILE * TILE; i += BL_BLOCK_THREADS) {
        int64_t r = row + i % TILE, c = col + i / TILE;
        if (r < rows && c < cols) dst[c * rows + r] = tile[i % TILE * TILE + i / TILE];
    }
}

extern "C" bl_status fp8_cuda_transpose(bl_stream *stream, const uint8_t *src, int64_t rows,
                                        int64_t cols, uint8_t *dst)
{
    int64_t tiles_per_row = bl_blocks_for(cols, TILE);
    if (rows < 0 || cols < 0)
        return BL_FAIL(BL_EINTERNAL, "transpose: %lld x %lld", (long long)rows, (long long)cols);
    bool aligned = bl_is_aligned(src) && bl_is_aligned(dst) && rows % 16 == 0 && cols % 16 == 0;
    return bl_launch("transpose", stream,
                     {bl_blocks_for(rows, TILE) * tiles_per_row, BL_BLOCK_THREADS, 1},
                     transpose_kernel, src, rows, cols, aligned, (unsigned)tiles_per_row, dst);
}

/* ---- scales: small ---- */

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    transpose_scales_kernel(const float *src, int64_t rows, int64_t cols, float *dst,
                            int64_t dst_ld)
{
    int64_t i = (int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x;
    int64_t col = i / rows, row = i % rows;
    if (col < cols) dst[col * dst_ld + row] = src[row * cols + col];
}

__global__ void __launch_bounds__(BL_BLOCK_THREADS) fill_kernel(float *dst, int64_t n, float value)
{
    int64_t i = (int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x;
    if (i < n) dst[i] = value;
}

extern "C" bl_status fp8_cuda_transpose_scales(bl_stream *stream, const float *src, int64_t rows,
                                               int64_t cols, float *dst, int64_t dst_ld)
{
    if (rows < 0 || cols < 0 || dst_ld < rows)
        return BL_FAIL(BL_EINTERNAL, "transpose_scales: %lld x %lld", (long long)rows,
                       (long long)cols);
    return bl_launch("transpose_scales", stream,
                     {bl_blocks_for(rows * cols, BL_BLOCK_THREADS), BL_BLOCK_THREADS, 1},
                     transpose_scales_kernel, src, rows, cols, dst, dst_ld);
}

extern "C" bl_status fp8_cuda_fill(bl_stream *stream, float *dst, int64_t n, float value)
{
    return bl_launch("fill", stream, {bl_blocks_for(n, BL_BLOCK_THREADS), BL_BLOCK_THREADS, 1},
                     fill_kernel, dst, n, value);
}
