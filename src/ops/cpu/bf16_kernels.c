/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_kernels.c -- the set of inner loops for bf16 products of this process, chosen once. */
#include "ops/cpu/bf16_kernels.h"

#include <pthread.h>
#include <stdlib.h>

#include "ops/cpu/amx.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const ops_bf16_kernels *best;

static void choose(void)
{
    ops_bf16_host host = {.wish = getenv("BALLAST_CPU_BF16")};
#if defined(__x86_64__)
    host.has_avx512 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
    host.has_amx = ops_amx_is_there();
    host.request_amx = ops_amx_request;
    host.amx = &ops_bf16_kernels_amx;
    host.avx512 = &ops_bf16_kernels_avx512;
#endif
    best = ops_bf16_kernels_choose(&host);
}

const ops_bf16_kernels *ops_bf16_kernels_best(void)
{
    pthread_once(&once, choose);
    return best;
}
