/* SPDX-License-Identifier: Apache-2.0 */
/* sum.c -- the additions of all reductions, by element type. */
#include "comm/sum_internal.h"

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

size_t bl_sum_element_bytes(bl_comm_element element)
{
    return elements[element].bytes;
}

void bl_sum_add(bl_comm_element element, void *sum, const void *values, int64_t n)
{
    elements[element].add(sum, values, n);
}
