/* SPDX-License-Identifier: Apache-2.0 */
/* kernels.c -- chooses the fastest set of inner loops that this processor has, once. */
#include "fp8/cpu/kernels.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>

static pthread_once_t f16c_once = PTHREAD_ONCE_INIT;
static bool f16c;

static void read_f16c(void)
{
    unsigned int eax, ebx, ecx, edx;
    f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

/* clang 14 does not know __builtin_cpu_supports("f16c"). That the system saves the registers
 * follows from AVX2. Read once: a virtual machine's monitor takes 10 us for a CPUID, and each tile
 * of a product asks. */
static bool has_f16c(void)
{
    pthread_once(&f16c_once, read_f16c);
    return f16c;
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

const bl_fp8_kernels *bl_fp8_kernels_variant(bl_fp8_variant variant)
{
    switch (variant) {
    case BL_FP8_SCALAR:
        return &bl_fp8_kernels_scalar;
    case BL_FP8_AVX2:
        return __builtin_cpu_supports("avx2") && has_f16c() ? &bl_fp8_kernels_avx2 : NULL;
    case BL_FP8_AVX512:
        return has_avx512() ? &bl_fp8_kernels_avx512 : NULL;
    case BL_FP8_AVX512_VBMI:
        return has_avx512() && __builtin_cpu_supports("avx512vbmi") ? &bl_fp8_kernels_avx512_vbmi
                                                                    : NULL;
    default:
        return NULL;
    }
}
#else
const bl_fp8_kernels *bl_fp8_kernels_variant(bl_fp8_variant variant)
{
    return variant == BL_FP8_SCALAR ? &bl_fp8_kernels_scalar : NULL;
}
#endif

const bl_fp8_kernels *bl_fp8_kernels_best(void)
{
    for (int variant = BL_FP8_VARIANT_COUNT - 1;; variant--) {
        const bl_fp8_kernels *kernels = bl_fp8_kernels_variant((bl_fp8_variant)variant);
        if (kernels) return kernels;
    }
}
