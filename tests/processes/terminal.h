/* SPDX-License-Identifier: Apache-2.0 */
/* terminal.h -- a terminal for a job (tests/train/runs.h): its keys, and what it shows. Errors end
 * the test. */
#ifndef BALLAST_TESTS_TERMINAL_H
#define BALLAST_TESTS_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>

/* The side of it that writes keys and reads what is shown; the caller's to close. One at a time. */
int terminal_open(void);

/* runs_child.prepare: a session of its own, whose terminal is standard input and error. */
bool terminal_take(const int *unused);

/* Adds what the terminal shows to text (the newer half, when it is full), until that holds
 * `wanted`: within limit_s. */
void terminal_read(int fd, char *text, size_t text_bytes, const char *wanted, double limit_s);

#endif
