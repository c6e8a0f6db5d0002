/* SPDX-License-Identifier: Apache-2.0 */
/* rope.c -- RoPE on the CPU from tables of sines and cosines that are made in double. */
#include "ops/rope.h"

#include <math.h>

#include "ops/cpu/ops_cpu.h"

BL_CLONES static void rotate_head(int64_t half, float direction, const float *cosines,
                                  const float *sines, float *a)
{
    float *b = a + half;
    OPS_IVDEP
    for (int64_t i = 0; i < half; i++) {
        bl_rope_pair turned = bl_rope_rotate(a[i], b[i], cosines[i], direction * sines[i]);
        a[i] = turned.a;
        b[i] = turned.b;
    }
}

static void rope_item(void *arg, int64_t index, void *scratch)
{
    const bl_rope_args *a = arg;
    int64_t rows = ops_rows_per_item(a->n_heads * a->d), end = bl_min_i64(a->T, (index + 1) * rows),
            half = bl_rope_width(a->d, a->d_rotated) / 2;
    int64_t document = bl_document_of(a->cu_seqlens, a->n_documents, index * rows);
    float *copy = scratch;
    for (int64_t t = index * rows; t < end; t++) {
        while (document + 1 < a->n_documents && a->cu_seqlens[document + 1] <= t) document++;
        int64_t begin = a->cu_seqlens[document], n = a->cu_seqlens[document + 1] - begin;
        int64_t at = (t - begin + a->position_offset) * half +
                     bl_rope_table_offset(n + a->position_offset, a->long_after, a->long_offset);
        for (int64_t head = 0; head < a->n_heads; head++) {
            int64_t first = t * a->row_stride + head * a->d;
            /* in place: a copy is both read and written */
            float *x = (float *)ops_read(a->x, first, 2 * half, copy);
            rotate_head(half, (float)a->direction, a->cos_table + at, a->sin_table + at, x);
            ops_write(a->x, first, 2 * half, x);
        }
    }
}

bl_status ops_cpu_rope(bl_stream *stream, const bl_rope_args *args)
{
    bl_rope_args a = *args;
    bl_pool_run(ops_pool(stream), bl_ceil_div(a.T, ops_rows_per_item(a.n_heads * a.d)), rope_item,
                &a);
    return BL_OK;
}

void bl_rope_fill_tables(int64_t first_position, int64_t n_positions, int64_t half,
                         const double *inv_freq, double scale, float *cos_table, float *sin_table)
{
    for (int64_t p = 0; p < n_positions; p++) {
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)(first_position + p) * inv_freq[i];
            cos_table[p * half + i] = (float)(scale * cos(angle));
            sin_table[p * half + i] = (float)(scale * sin(angle));
        }
    }
}
