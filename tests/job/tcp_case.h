/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_case.h -- shared by the tests of connections. */
#ifndef BALLAST_TESTS_TCP_CASE_H
#define BALLAST_TESTS_TCP_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sys/types.h>

#include "job/tcp/hello.h"

extern const job_address tcp_here; /* 127.0.0.1 */

double tcp_soon(void); /* for what must come: a slow machine has time */

job_listener tcp_listen_here(void); /* at a free port */
int tcp_accept(const job_listener *listener);
int tcp_connect(uint16_t port);

/* Starts a child, which ends with this process. */
pid_t tcp_start(int (*run)(const void *), const void *argument);
int tcp_wait_for(pid_t pid); /* its exit code, or 128 and its signal */

#endif
