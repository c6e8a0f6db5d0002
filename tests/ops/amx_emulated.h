/* SPDX-License-Identifier: Apache-2.0 */
/* amx_emulated.h -- the tile instructions that src/ops/cpu/bf16_amx.c uses, in C: what Intel's
 * Software Developer's Manual, volume 2, says of LDTILECFG, TILELOADD, TILEZERO, TDPBF16PS,
 * TILESTORED and TILERELEASE. Faults of a processor (#UD, #GP) end the program; so do
 * tiles that a thread still has when the program ends. amx_native.c replaces it in a program that
 * runs on the processor's tiles. */
#ifndef BALLAST_TESTS_OPS_AMX_EMULATED_H
#define BALLAST_TESTS_OPS_AMX_EMULATED_H

#include <stdbool.h>

/* NULL: ops_bf16_kernels_amx can run here. Otherwise why it cannot. */
const char *amx_obstacle(void);

/* Faults of a processor. */
typedef enum amx_fault {
    AMX_SOUND,
    AMX_LAST_ROW,  /* the last row of sums is not added to */
    AMX_LAST_PAIR, /* nor the last pair of the depth */
    AMX_ODD,       /* nor the odd elements */
    AMX_FAULTS
} amx_fault;

/* False: the processor's tiles cannot be broken. */
bool amx_emulated_break(amx_fault fault);

#endif
