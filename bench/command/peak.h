/* SPDX-License-Identifier: Apache-2.0 */
/* peak.h -- how many multiply-adds the cores can do: a loop of the instruction, on registers. */
#ifndef BALLAST_BENCH_COMMAND_PEAK_H
#define BALLAST_BENCH_COMMAND_PEAK_H

#include <stdbool.h>

#include "base/pool.h"

typedef enum bl_peak_kind {
    BL_PEAK_F32, /* the widest fused multiply-add of fp32 */
    BL_PEAK_BF16 /* the instruction of bf16 products: tdpbf16ps, or vdpbf16ps */
} bl_peak_kind;

/* "vfmadd231ps zmm"; NULL: this processor has no such instruction. */
const char *bl_peak_name(bl_peak_kind kind);

/* Floating-point operations per second of all threads of the pool, two per multiply-add, over some
 * milliseconds. The kind has a name. */
double bl_peak_measure(bl_pool *pool, bl_peak_kind kind);

#endif
