/* SPDX-License-Identifier: Apache-2.0 */
/* rank_cases.h -- one process's part of a job in a test: the cases of tests/comm/comm_cases.h,
 * and those that need processes. A program runs one of them, over any transport, and ends as
 * Ballast does: with the job's status as exit code, and one line of error from one of the
 * processes. */
#ifndef BALLAST_TESTS_RANK_CASES_H
#define BALLAST_TESTS_RANK_CASES_H

#include "comm/wire.h"
#include "comm_cases.h"

typedef struct rank_case {
    const char *name;
    test_rank_fn fn;
    double deadline_s;
} rank_case;

const rank_case *rank_case_find(const char *name); /* NULL: none of that name */

/* Among all processes of the wire, which has no communicator yet. The case's deadline applies only
 * after all have met: a process that was started late is not reported. A failure has been sent to
 * the other processes. */
bl_status rank_case_run(const rank_case *which, bl_wire *wire);

#endif
