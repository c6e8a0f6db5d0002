/* SPDX-License-Identifier: Apache-2.0 */
/* sizes.h -- arithmetic on sizes that come from files or shapes; every product of such numbers goes
 * through here. */
#ifndef BALLAST_BASE_SIZES_H
#define BALLAST_BASE_SIZES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *out = a * b, or a + b; true: it does not fit. */
static inline bool bl_mul_overflows(size_t a, size_t b, size_t *out)
{
    return __builtin_mul_overflow(a, b, out);
}
static inline bool bl_add_overflows(size_t a, size_t b, size_t *out)
{
    return __builtin_add_overflow(a, b, out);
}
static inline bool bl_mul_i64_overflows(int64_t a, int64_t b, int64_t *out)
{
    return __builtin_mul_overflow(a, b, out);
}

/* Decimal gigabytes, to print: "%.4g GB". */
static inline double bl_gb(int64_t n_bytes)
{
    return 1e-9 * (double)n_bytes;
}

/* n / divisor, rounded up; n >= 0, divisor > 0. */
static inline int64_t bl_ceil_div(int64_t n, int64_t divisor)
{
    return (n + divisor - 1) / divisor;
}
/* The smallest multiple of `multiple` that is at least n. */
static inline int64_t bl_round_up(int64_t n, int64_t multiple)
{
    return bl_ceil_div(n, multiple) * multiple;
}
/* The smaller and the larger of two. */
static inline int64_t bl_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t bl_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Elements of an array; not of a pointer. */
#define BL_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#ifdef __cplusplus
}
#endif

#endif
