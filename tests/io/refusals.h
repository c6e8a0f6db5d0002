/* SPDX-License-Identifier: Apache-2.0 */
/* refusals.h -- makes the system refuse things to the calling process, for good: for children of
 * tests. */
#ifndef BALLAST_TESTS_REFUSALS_H
#define BALLAST_TESTS_REFUSALS_H

#include <stdbool.h>
#include <stddef.h>

/* From now on the system call (SYS_...) fails with errno `error`; also in what this process
 * executes. */
bool refuse_system_call(int system_call, int error);

/* Lowers RLIMIT_MEMLOCK and gives up the capability that hides it; also for what this process
 * executes. */
bool refuse_locked_memory(size_t limit_bytes);

#endif
