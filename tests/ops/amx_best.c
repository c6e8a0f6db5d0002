/* SPDX-License-Identifier: Apache-2.0 */
/* In a program with this object, which is linked before the library, all bf16 products are by the
 * AMX kernels of amx_emulated.c. Where they cannot run it skips. */
#include <stdio.h>
#include <unistd.h>

#include "amx_emulated.h"
#include "ops/cpu/bf16_kernels.h"

__attribute__((constructor)) static void skip_without_amx(void)
{
    if (!amx_obstacle()) return;
    printf("skipped: %s\n", amx_obstacle());
    fflush(stdout);
    _exit(77);
}

const ops_bf16_kernels *ops_bf16_kernels_best(void)
{
    return &ops_bf16_kernels_amx;
}
