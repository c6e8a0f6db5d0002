/* SPDX-License-Identifier: Apache-2.0 */
/* grid.h -- what the parts of the kernel emulator know of the grid that runs. */
#ifndef BALLAST_TESTS_EMULATE_GRID_H
#define BALLAST_TESTS_EMULATE_GRID_H

#include "emulate.h"

/* 80 or 90: BALLAST_EMULATED_ARCH. */
extern "C" int emulated_capability();

/* Ends the program with a line that names kernel, block and thread. */
[[noreturn]] void emulated_give_up(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Within its block, x first. Only while a thread runs. */
unsigned emulated_current_thread();

/* The block's threads wait or have ended: what they noted is counted. */
void emulated_count_sectors();

#endif
