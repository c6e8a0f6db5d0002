/* SPDX-License-Identifier: Apache-2.0 */
/* program.h -- another program of the machine, to compare with this one. */
#ifndef BALLAST_BENCH_COMMAND_PROGRAM_H
#define BALLAST_BENCH_COMMAND_PROGRAM_H

/* Its output on stdout, at most 1 MiB, to its end; the caller frees. arguments: NULL-terminated,
 * the first is looked for in PATH. NULL: it cannot be run, or fails. Its stderr is discarded. */
char *bl_bench_run_program(char *const *arguments);

#endif
