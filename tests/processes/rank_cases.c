/* SPDX-License-Identifier: Apache-2.0 */
/* rank_cases.c -- cases for one process of a job: failures at the end, two at once, a stopped rank,
 * a busy one. */
#include "rank_cases.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/sizes.h"
#include "comm_cases.h"

/* Rank 1 fails, the others leave in good order. */
static bl_status fail_at_the_end(test_rank *self)
{
    if (self->rank == 1) return BL_FAIL(BL_ECHECKPOINT, "checkpoint 7 is damaged");
    return BL_OK;
}

/* Ranks 1 and 2 fail at once, each by itself: if neither has heard of the other, the lowest rank's
 * error is the job's. */
static bl_status two_fail(test_rank *self)
{
    if (self->rank == 2) return BL_FAIL(BL_ENUMERIC, "a loss of nan");
    if (self->rank == 1) return BL_FAIL(BL_EINPUT, "train.jsonl:3: no JSON");
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    return bl_stream_synchronize(self->stream);
}

static bl_status rank_is_stopped(test_rank *self)
{
    if (self->rank == 1) raise(SIGSTOP);
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    return bl_stream_synchronize(self->stream);
}

/* Rank 0 is stopped; rank 1 says when the others have given it up. */
static bl_status rank_is_given_up(test_rank *self)
{
    bl_error failure = {.status = BL_OK};

    if (self->rank == 0) raise(SIGSTOP);
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    while (self->rank == 1 && failure.status == BL_OK) {
        usleep(1000);
        bl_comm_first_error(self->comm, &failure);
    }
    if (self->rank == 1) fputs("has given up\n", stderr);
    return bl_stream_synchronize(self->stream);
}

/* Rank 1 never ends and receives nothing; the others wait for it. */
static bl_status wait_for_ever(test_rank *self)
{
    fputs("has started\n", stderr);
    while (self->rank == 1) pause();
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    return bl_stream_synchronize(self->stream);
}

static bl_status stop_together(test_rank *self)
{
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    BL_TRY(bl_stream_synchronize(self->stream));
    return BL_FAIL(BL_ESTOPPED, "stopped after step 3");
}

/* Collectives of all kinds without end, small and large, on two communicators at once. Rank 0
 * prints a line every ROUNDS rounds. */
static bl_status be_busy(test_rank *self)
{
    enum { N = 1 << 18, ROUNDS = 20 };
    size_t n_floats = (size_t)self->n_ranks * N;
    float *values = calloc(2 * n_floats + N, sizeof *values);
    bl_comm *other = NULL;
    bl_stream *stream = NULL;
    bl_status st = values ? BL_OK : BL_FAIL(BL_ENOMEM, "buffers of a test");

    if (st == BL_OK) st = bl_comm_split(self->comm, 0, &other);
    if (st == BL_OK) st = bl_stream_create(self->device, "gather", &stream);
    for (int64_t i = 0; st == BL_OK; i++) {
        int64_t sum = self->rank + i, expected = self->n_ranks * (self->n_ranks - 1) / 2;
        float *sums = values + 2 * n_floats;
        values[self->rank * N] = (float)(self->rank + i);
        BL_TRY_GOTO(
            st, done,
            bl_comm_all_gather(other, stream, values + self->rank * N, values, N * sizeof *values));
        BL_TRY_GOTO(
            st, done,
            bl_comm_reduce_scatter_f32(self->comm, self->stream, values + n_floats, sums, N));
        BL_TRY_GOTO(st, done, bl_comm_all_reduce_i64(self->comm, self->stream, &sum, 1));
        BL_TRY_GOTO(st, done, bl_comm_broadcast(self->comm, self->stream, sums, 5000, 0));
        BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
        BL_TRY_GOTO(st, done, bl_stream_synchronize(stream));
        TEST_CHECK_GOTO(st, done, sum == expected + self->n_ranks * i);
        for (int r = 0; r < self->n_ranks; r++)
            TEST_CHECK_GOTO(st, done,
                            values[r * N] == (float)(r + i) && values[(r + 1) * N - 1] == 0);
        if (self->rank == 0 && i % ROUNDS == 0) fputs("is busy\n", stderr);
    }
done:
    if (st != BL_OK) { /* before the streams are waited for */
        bl_error_save(&self->error, st);
        bl_comm_abort(self->comm, &self->error);
    }
    bl_stream_destroy(stream);
    (void)bl_stream_synchronize(self->stream);
    bl_comm_destroy(other);
    free(values);
    return bl_error_restore(&self->error);
}

/* More than one piece. Whole only in a build whose pieces are small, or with the memory for it. */
static bl_status large(test_rank *self)
{
    enum { MIB = 1 << 20 };
    size_t n = (size_t)1100 * MIB, step = 4099;
    unsigned char *bytes = malloc(n);
    if (!bytes) return BL_FAIL(BL_ENOMEM, "%zu bytes", n);
    for (size_t i = 0; self->rank == 0 && i < n; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 24);
    bl_status st = bl_comm_broadcast(self->comm, self->stream, bytes, n, 0);
    if (st == BL_OK) st = bl_stream_synchronize(self->stream);
    for (size_t i = n - 1; st == BL_OK && i >= step; i -= step)
        if (bytes[i] != (unsigned char)(i * 2654435761u >> 24))
            st = BL_FAIL(BL_EINTERNAL, "byte %zu differs", i);
    free(bytes);
    return st;
}

static const rank_case cases[] = {
    {"values", comm_case_world_values, 60},
    {"negative_zero", comm_case_negative_zero, 60},
    {"split", comm_case_split_values, 60},
    {"blocks", comm_case_sums_in_blocks, 60},
    {"pipeline", comm_case_run_pipeline, 60},
    {"gather_is_held", comm_case_gather_is_held, 60},
    {"abort", comm_case_one_rank_fails, 0},
    {"deadline", comm_case_two_ranks_stay_away, COMM_CASE_DEADLINE_S},
    {"deadline_of_group", comm_case_split_rank_stays_away, COMM_CASE_DEADLINE_S},
    {"label", comm_case_labeled_rank_stays_away, COMM_CASE_DEADLINE_S},
    {"labels_disagree", comm_case_labels_disagree, 60},
    {"other_label", comm_case_other_label, 0},
    {"other_size", comm_case_other_size, 0},
    {"other_kind", comm_case_other_kind, 0},
    {"other_root", comm_case_other_root, 0},
    {"other_element", comm_case_other_element, 0},
    {"fail_at_the_end", fail_at_the_end, 0},
    {"two_fail", two_fail, 0},
    {"stopped", rank_is_stopped, COMM_CASE_DEADLINE_S},
    {"given_up", rank_is_given_up, COMM_CASE_DEADLINE_S},
    {"for_ever", wait_for_ever, 0},
    {"busy", be_busy, 300},
    {"busy_deadline", be_busy, 2 * COMM_CASE_DEADLINE_S},
    {"stop_together", stop_together, 0},
    {"large", large, 60},
};

const rank_case *rank_case_find(const char *name)
{
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        if (strcmp(cases[i].name, name) == 0) return &cases[i];
    return NULL;
}

bl_status rank_case_run(const rank_case *which, bl_wire *wire)
{
    static const double MEET_S = 60;
    test_rank self = {.rank = bl_wire_rank(wire), .n_ranks = bl_wire_size(wire)};
    bl_status st;

    bl_wire_set_deadline(wire, MEET_S);
    BL_TRY(bl_comm_create_wire(wire, &self.comm));
    BL_TRY_GOTO(st, done, bl_device_create_cpu(1, &self.device));
    BL_TRY_GOTO(st, done, bl_stream_create(self.device, "test", &self.stream));
    BL_TRY_GOTO(st, done, bl_comm_barrier(self.comm, self.stream));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self.stream));
    bl_wire_set_deadline(wire, which->deadline_s);
    BL_TRY_GOTO(st, done, which->fn(&self));
    st = bl_stream_synchronize(self.stream);
done:
    bl_error_save(&self.error, st);
    if (st != BL_OK && st != BL_ESTOPPED) bl_comm_abort(self.comm, &self.error);
    bl_stream_destroy(self.stream);
    bl_device_destroy(self.device);
    bl_comm_destroy(self.comm);
    return bl_error_restore(&self.error);
}
