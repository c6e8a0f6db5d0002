/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_kernels.c -- chooses the set of inner loops for bf16 products, once. */
#include "ops/cpu/bf16_kernels.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* NULL: this processor has no instructions for it. */
static const ops_bf16_kernels *find_native(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return &ops_bf16_kernels_avx512;
#endif
    return NULL;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const ops_bf16_kernels *best;

static void choose(void)
{
    const char *wish = getenv("BALLAST_CPU_BF16");
    if (!wish || strcmp(wish, "emulated") != 0) best = find_native();
    if (!best) best = &ops_bf16_kernels_emulated;
}

const ops_bf16_kernels *ops_bf16_kernels_best(void)
{
    pthread_once(&once, choose);
    return best;
}
