/* SPDX-License-Identifier: Apache-2.0 */
/* terminal.h -- a terminal for a job (tests/train/runs.h): types keys, reads the output. Errors end
 * the test. */
#ifndef BALLAST_TESTS_TERMINAL_H
#define BALLAST_TESTS_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>

/* The terminal's other side, which writes keys and reads the output; the caller closes it. One at a
 * time. */
int terminal_open(void);

/* runs_child.prepare: a new session, whose terminal is standard input and error. */
bool terminal_take(const int *unused);

/* Appends the terminal's output to text (keeps the newer half, when it is full), until that holds
 * `wanted`: within limit_s. */
void terminal_read(int fd, char *text, size_t text_bytes, const char *wanted, double limit_s);

#endif
