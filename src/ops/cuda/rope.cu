/* SPDX-License-Identifier: Apache-2.0 */
/* rope.cu -- RoPE on CUDA. A block takes a token, so that all of its heads share the position; a
 * thread takes eight pairs of a head. */
#include "fp8/cuda/vector.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/ops_cuda.h"

typedef struct rope_tables {
    const int32_t *cu_seqlens;
    int64_t n_documents, position_offset, long_after, long_offset;
    const float *cosines, *sines;
    float direction;
} rope_tables;

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    rope_kernel(unsigned n_heads, unsigned d, unsigned half, int64_t row_stride, bool aligned,
                rope_tables tables, bl_bf16 *x)
{
    int64_t t = blockIdx.x, document = bl_document_of(tables.cu_seqlens, tables.n_documents, t);
    int64_t begin = tables.cu_seqlens[document], n = tables.cu_seqlens[document + 1] - begin;
    int64_t at =
        (t - begin + tables.position_offset) * half +
        bl_rope_table_offset(n + tables.position_offset, tables.long_after, tables.long_offset);
    const float *cosines = tables.cosines + at, *sines = tables.sines + at;
    unsigned groups_per_head = (half + BL_GROUP - 1) / BL_GROUP;
    x += t * row_stride;
    for (unsigned group = threadIdx.x; group < n_heads * groups_per_head;
         group += BL_BLOCK_THREADS) {
        unsigned head = group / groups_per_head, pair = group % groups_per_head * BL_GROUP;
        int64_t n_valid = (int64_t)half - pair;
        bl_bf16 *first = x + (int64_t)head * d + pair;
        float a[BL_GROUP], b[BL_GROUP], c[BL_GROUP], s[BL_GROUP];
        bl_load(first, n_valid, aligned, a);
        bl_load(first + half, n_valid, aligned, b);
        bl_load(cosines + pair, n_valid, aligned, c);
        bl_load(sines + pair, n_valid, aligned, s);
#pragma unroll
        for (int i = 0; i < BL_GROUP; i++) {
            bl_rope_pair turned = bl_rope_rotate(a[i], b[i], c[i], tables.direction * s[i]);
            a[i] = turned.a;
            b[i] = turned.b;
        }
        bl_store(first, n_valid, aligned, a);
        bl_store(first + half, n_valid, aligned, b);
    }
}

extern "C" bl_status ops_cuda_rope(bl_stream *stream, const bl_rope_args *a)
{
    int64_t half = bl_rope_width(a->d, a->d_rotated) / 2;
    if (a->T < 0 || a->n_heads < 0 || a->d < 0 || a->row_stride < a->n_heads * a->d ||
        a->n_heads * (half + 1) > INT32_MAX)
        return BL_FAIL(BL_EINTERNAL, "rope: %lld tokens, %lld heads of %lld, rows %lld apart",
                       (long long)a->T, (long long)a->n_heads, (long long)a->d,
                       (long long)a->row_stride);
    if (a->n_heads == 0 || half == 0) return BL_OK;
    rope_tables tables = {a->cu_seqlens,  a->n_documents, a->position_offset, a->long_after,
                          a->long_offset, a->cos_table,   a->sin_table,       (float)a->direction};
    bool aligned = bl_is_aligned(a->x.data) && bl_is_aligned(a->cos_table) &&
                   bl_is_aligned(a->sin_table) && half % BL_GROUP == 0 && a->d % BL_GROUP == 0 &&
                   a->long_offset % BL_GROUP == 0 && a->row_stride % BL_GROUP == 0;
    return bl_launch("rope", stream, {a->T, BL_BLOCK_THREADS, 1}, rope_kernel, (unsigned)a->n_heads,
                     (unsigned)a->d, (unsigned)half, a->row_stride, aligned, tables,
                     (bl_bf16 *)a->x.data);
}
