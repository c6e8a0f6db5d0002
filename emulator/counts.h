/* SPDX-License-Identifier: Apache-2.0 */
/* counts.h -- counts a program's queued operations; for this directory only. */
#ifndef BALLAST_TESTS_EMULATE_COUNTS_H
#define BALLAST_TESTS_EMULATE_COUNTS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One more of `what`, a name without blanks, with so many bytes. From any thread. */
void emulated_count(const char *what, size_t bytes);
void emulated_count_kernel(const void *kernel);

#ifdef __cplusplus
}
#endif

#endif
