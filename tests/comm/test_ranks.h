/* SPDX-License-Identifier: Apache-2.0 */
/* test_ranks.h -- runs a function as N ranks: a thread each, with a communicator, a device and a
 * stream. */
#ifndef BALLAST_TESTS_COMM_TEST_RANKS_H
#define BALLAST_TESTS_COMM_TEST_RANKS_H

#include "comm/comm.h"
#include "device/device.h"

typedef struct test_rank {
    int rank, n_ranks;
    bl_comm *comm; /* all ranks */
    bl_device *device;
    bl_stream *stream;
    void *arg;      /* shared by all ranks */
    bl_error error; /* the function's result */
} test_rank;

/* Runs on the rank's thread. cmocka's assertions work on the main thread only: use TEST_CHECK. */
typedef bl_status (*test_rank_fn)(test_rank *self);

/* As in a real run, a rank that fails aborts the job, so that no other hangs. Returns the status
 * and sets the text of the job's first error, or BL_OK. `errors` (n_ranks of them, or NULL)
 * receives each rank's result. */
bl_status test_ranks_run(int n_ranks, int n_threads, double deadline_s, test_rank_fn fn, void *arg,
                         bl_error *errors);

/* Whether the job ends with BL_ERANK and this text, not before the deadline. On a loaded machine a
 * thread may stall for as long, so that an innocent rank is named as well: a wrong end is printed,
 * and the case tried twice again. A defect fails each time. */
bool test_ranks_miss(int n_ranks, double deadline_s, test_rank_fn fn, void *arg, const char *text,
                     bl_error *errors);

/* The same on every machine and in every run: a number in [-1, 1) that depends on all three. */
float test_value(int rank, int64_t index, uint64_t seed);

/* The sum of test_value over the ranks, in the order of comm.h with blocks of `block` ranks. */
float test_sum(int n_ranks, int block, int64_t index, uint64_t seed);

#define TEST_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return BL_FAIL(BL_EINTERNAL, "%s:%d: %s", __FILE__, __LINE__, #condition);             \
    } while (0)

#define TEST_CHECK_GOTO(st, label, condition)                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (st) = BL_FAIL(BL_EINTERNAL, "%s:%d: %s", __FILE__, __LINE__, #condition);             \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

#endif
