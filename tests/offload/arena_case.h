/* SPDX-License-Identifier: Apache-2.0 */
/* arena_case.h -- a device for each test, and children for tests that change their process. */
#ifndef BALLAST_TESTS_OFFLOAD_ARENA_CASE_H
#define BALLAST_TESTS_OFFLOAD_ARENA_CASE_H

#include <stdio.h>

#include "offload/arena.h"

enum { MIB = 1 << 20, TEXT_BYTES = 4096 };

/* Of a program's tests: *state is a CPU device. */
int set_up(void **state);
int tear_down(void **state);

void assert_ok(bl_status st);
bl_arena_info get_info(const bl_arena *arena);
int count(const char *text, const char *part); /* how often it is in the text */

/* Runs fn in a child, which must exit with 0; text receives its stderr. The child creates a device:
 * threads do not survive a fork. */
void assert_child_succeeds(int (*fn)(bl_device *device), char text[TEXT_BYTES]);

/* Ends the child with the number of the line that does not hold. */
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, bl_error_text());          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

#endif
