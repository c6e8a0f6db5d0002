/* SPDX-License-Identifier: Apache-2.0 */
/* amx.h -- whether a process may use AMX's tiles. Internal to ops/. */
#ifndef BALLAST_OPS_CPU_AMX_H
#define BALLAST_OPS_CPU_AMX_H

#include <stdbool.h>

/* Whether the processor has amx-tile and amx-bf16, tiles of the size that the kernels use, and the
 * system saves them (Intel, Software Developer's Manual, volume 1, chapter "Programming with Intel
 * Advanced Matrix Extensions"; CPUID leaves 7 and 1DH). */
bool ops_amx_is_there(void);

/* Asks Linux (5.16 and later) for the tiles, for all threads of the process and its children: 0, or
 * the errno of the refusal. They are 8 KiB of a thread's state, so a process has them on request
 * alone (Linux, Documentation/arch/x86/xstate.rst). */
int ops_amx_request(void);

#endif
