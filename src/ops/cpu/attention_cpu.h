/* SPDX-License-Identifier: Apache-2.0 */
/* attention_cpu.h -- what the two directions of attention share on the CPU. Internal to ops/. */
#ifndef BALLAST_OPS_CPU_ATTENTION_CPU_H
#define BALLAST_OPS_CPU_ATTENTION_CPU_H

#include <limits.h>

#include "ops/cpu/blas.h"
#include "ops/cpu/ops_cpu.h"

static inline bl_status attention_check(int64_t n_heads, int64_t n_kv_heads, int64_t d,
                                        int64_t q_stride, int64_t kv_stride, int64_t o_stride)
{
    if (n_kv_heads < 1 || n_heads % n_kv_heads != 0 || d < 1 || d > 256)
        return BL_FAIL(BL_EINTERNAL,
                       "attention: %lld query heads on %lld key heads of dimension %lld",
                       (long long)n_heads, (long long)n_kv_heads, (long long)d);
    if (q_stride < d || q_stride > INT_MAX || kv_stride < d || kv_stride > INT_MAX ||
        o_stride < d || o_stride > INT_MAX)
        return BL_FAIL(BL_EINTERNAL, "attention: strides %lld, %lld, %lld", (long long)q_stride,
                       (long long)kv_stride, (long long)o_stride);
    return BL_OK;
}

#endif
