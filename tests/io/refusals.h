/* SPDX-License-Identifier: Apache-2.0 */
/* refusals.h -- makes the system refuse requests of the calling process, permanently: for children
 * of tests. */
#ifndef BALLAST_TESTS_REFUSALS_H
#define BALLAST_TESTS_REFUSALS_H

#include <stdbool.h>
#include <stddef.h>

/* From now on the system call (SYS_...) fails with errno `error`; also in programs that this
 * process executes. */
bool refuse_system_call(int system_call, int error);

/* Lowers RLIMIT_MEMLOCK and drops the capability that bypasses it; also for programs that this
 * process executes. */
bool refuse_locked_memory(size_t limit_bytes);

#endif
