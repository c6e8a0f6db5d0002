/* SPDX-License-Identifier: Apache-2.0 */
/* transposed.c -- matrices that are stored with their columns as rows. */
#include "base/sizes.h"
#include "model/rows.h"

enum { BLOCK = 64 }; /* rows of an item, and columns at a time, to fit a cache */

typedef struct transposition {
    int64_t n_rows, n_cols, stride;
    size_t width;
    const void *from;
    void *to;
} transposition;

#define COPY(type)                                                                                 \
    for (int64_t c = at; c < bl_min_i64(t->n_cols, at + BLOCK); c++)                               \
        for (int64_t r = begin; r < end; r++)                                                      \
    ((type *)t->to)[r * t->n_cols + c] = ((const type *)t->from)[c * t->stride + r]

static void transpose_item(void *arg, int64_t index, void *scratch)
{
    const transposition *t = arg;
    int64_t begin = index * BLOCK, end = bl_min_i64(t->n_rows, begin + BLOCK);

    (void)scratch;
    for (int64_t at = 0; at < t->n_cols; at += BLOCK)
        if (t->width == 2)
            COPY(uint16_t);
        else
            COPY(uint32_t);
}

void bl_rows_transpose(bl_pool *pool, size_t width, int64_t n_rows, int64_t n_cols, int64_t stride,
                       const void *from, void *to)
{
    transposition t = {n_rows, n_cols, stride, width, from, to};

    bl_pool_run(pool, bl_ceil_div(n_rows, BLOCK), transpose_item, &t);
}
