/* SPDX-License-Identifier: Apache-2.0 */
/* sum.c -- the additions of all reductions, by element type. */
#include "comm/sum_internal.h"

#include <string.h>

#include "base/sizes.h"

typedef void (*add_fn)(void *sum, const void *values, int64_t n);

static void add_f32(void *sum, const void *values, int64_t n)
{
    float *restrict s = sum;
    const float *restrict v = values;
    for (int64_t i = 0; i < n; i++) s[i] += v[i];
}

static void add_f64(void *sum, const void *values, int64_t n)
{
    double *restrict s = sum;
    const double *restrict v = values;
    for (int64_t i = 0; i < n; i++) s[i] += v[i];
}

static void add_i64(void *sum, const void *values, int64_t n)
{
    uint64_t *restrict s = sum; /* unsigned: wraps */
    const uint64_t *restrict v = values;
    for (int64_t i = 0; i < n; i++) s[i] += v[i];
}

static const struct {
    add_fn add;
    size_t bytes;
} elements[] = {
    [BL_COMM_F32] = {add_f32, sizeof(float)},
    [BL_COMM_F64] = {add_f64, sizeof(double)},
    [BL_COMM_I64] = {add_i64, sizeof(int64_t)},
};

size_t comm_sum_element_bytes(bl_comm_element element)
{
    return elements[element].bytes;
}

/* sum[0, n) = ((0 + x) + y) + ... over the ranks of a block. The zero matters: 0 + -0 is +0. */
static void sum_block(bl_comm_element element, const comm_blocks *blocks, int block,
                      const void *const *values, size_t at_bytes, void *sum, int64_t n)
{
    int first = comm_block_first(blocks, block);

    memset(sum, 0, (size_t)n * elements[element].bytes);
    for (int i = 0; i < comm_block_length(blocks, block); i++)
        elements[element].add(sum, (const unsigned char *)values[first + i] + at_bytes, n);
}

void comm_sum_blocks(bl_comm_element element, const comm_blocks *blocks, const void *const *values,
                     size_t offset_bytes, void *to, int64_t n)
{
    _Alignas(double) unsigned char one_block[COMM_SUM_BLOCK * sizeof(double)];
    size_t unit_bytes = elements[element].bytes;

    for (int64_t first = 0; first < n; first += COMM_SUM_BLOCK) {
        int64_t n_now = bl_min_i64(COMM_SUM_BLOCK, n - first);
        size_t at_bytes = (size_t)first * unit_bytes;
        unsigned char *sum = (unsigned char *)to + at_bytes;
        sum_block(element, blocks, 0, values, offset_bytes + at_bytes, sum, n_now);
        for (int block = 1; block < blocks->n; block++) {
            sum_block(element, blocks, block, values, offset_bytes + at_bytes, one_block, n_now);
            elements[element].add(sum, one_block, n_now);
        }
    }
}

/* ---- parts of a piece ---- */

bool comm_parts_next(const bl_comm_task *t, size_t most_bytes, int64_t *first, comm_parts *out)
{
    bool is_scatter = t->call.kind == BL_COMM_REDUCE_SCATTER;
    int size = t->comm->size;

    if (*first >= t->n) return false;
    *out = (comm_parts){.values = (unsigned char *)t->send,
                        .first = *first,
                        .unit_bytes = comm_sum_element_bytes((bl_comm_element)t->call.detail)};
    int64_t most = (int64_t)(most_bytes / out->unit_bytes) * (is_scatter ? 1 : size);
    int64_t n = bl_min_i64(most, t->n - *first);
    out->n_part = is_scatter ? n : bl_ceil_div(n, size);
    out->stride = is_scatter ? t->n : out->n_part;
    out->end = is_scatter ? t->n * size : *first + n;
    *first += n;
    return true;
}

static int64_t part_begin(const comm_parts *s, int p)
{
    return bl_min_i64(s->first + p * s->stride, s->end);
}

int64_t comm_part_length(const comm_parts *s, int p)
{
    return bl_min_i64(s->n_part, s->end - part_begin(s, p));
}

size_t comm_part_bytes(const comm_parts *s, int p)
{
    return (size_t)comm_part_length(s, p) * s->unit_bytes;
}

unsigned char *comm_part_of(const comm_parts *s, int p)
{
    return s->values + (size_t)part_begin(s, p) * s->unit_bytes;
}

void *comm_part_target(const bl_comm_task *t, const comm_parts *s, int p)
{
    if (t->call.kind == BL_COMM_ALL_REDUCE) return comm_part_of(s, p);
    return (unsigned char *)t->recv + (size_t)s->first * s->unit_bytes;
}
