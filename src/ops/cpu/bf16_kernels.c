/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_kernels.c -- chooses the set of inner loops for bf16 products, once. */
#include "ops/cpu/bf16_kernels.h"

#include <pthread.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const ops_bf16_kernels *best;

static void choose(void)
{
    best = &ops_bf16_kernels_emulated;
}

const ops_bf16_kernels *ops_bf16_kernels_best(void)
{
    pthread_once(&once, choose);
    return best;
}
