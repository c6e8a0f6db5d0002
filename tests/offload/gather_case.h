/* SPDX-License-Identifier: Apache-2.0 */
/* gather_case.h -- shared by the tests of the gather ring: shards of known values on every rank,
 * and checks of the gathered values. */
#ifndef BALLAST_TESTS_GATHER_CASE_H
#define BALLAST_TESTS_GATHER_CASE_H

#include "ops_test.h"
#include "test_ranks.h"

#include "offload/gather_ring.h"

enum { FLOATS = 256, SHARD_BYTES = FLOATS * 4, PAUSE_US = 20000 };

typedef struct gather_case {
    test_rank *self;
    bl_stream *gathers, *copies;
    bl_gather_ring *ring; /* the test's to create, the case's to destroy */
    float *shards;        /* [n_shards][FLOATS]; float i is test_value(rank, i, 5) */
} gather_case;

bl_status gather_case_open(test_rank *self, int n_shards, gather_case *c);
/* Once the streams have ended, or failed. Also after a failed open. */
void gather_case_close(gather_case *c);

/* Acquires an item and queues a look at it, pause_us later: every rank's shard number `shard`, plus
 * offset. Validates the ring. */
bl_status gather_case_use(gather_case *c, int64_t unit, int item, int64_t shard, float offset,
                          unsigned pause_us);
bl_status gather_case_release(gather_case *c, int64_t unit);

bl_status gather_case_pause(bl_stream *stream, unsigned pause_us);

#define RUN(fn, n_ranks)                                                                           \
    do {                                                                                           \
        bl_status run_status = test_ranks_run(n_ranks, 1, 60, fn, NULL, NULL);                     \
        if (run_status != BL_OK) print_error("%s\n", bl_error_text());                             \
        assert_int_equal(run_status, BL_OK);                                                       \
    } while (0)

#endif
