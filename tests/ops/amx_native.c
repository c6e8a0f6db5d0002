/* SPDX-License-Identifier: Apache-2.0 */
/* The AMX kernels as the library has them, for processors with AMX. */
#include "amx_emulated.h"

#include <stddef.h>

#include "ops/cpu/bf16_kernels.h"

bool amx_emulated_break(amx_fault fault)
{
    (void)fault;
    return false;
}

const char *amx_obstacle(void)
{
    return ops_bf16_kernels_best() == &ops_bf16_kernels_amx
               ? NULL
               : "this processor has no AMX, or the system does not permit it";
}
