/* SPDX-License-Identifier: Apache-2.0 */
/* comm_cases.c -- collectives compared with serial sums bit by bit, for any communicator, and the
 * failures of ranks. */
#include "comm_cases.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"

static const int64_t lengths[] = {
    0, 1, 2, 7, 33, 4097, 70001}; /* the last is more than one chunk of an all_reduce */

static void *alloc_bytes(size_t n_bytes)
{
    void *memory = calloc(1, n_bytes ? n_bytes : 1);
    if (!memory) abort();
    return memory;
}

static unsigned char pattern(int rank, size_t index)
{
    return (unsigned char)(rank * 37 + (int)(index % 251) + 1);
}

/* ---- values ---- */

static bl_status check_all_gather(test_rank *self, bl_comm *comm, size_t bytes, bool in_place)
{
    int rank = bl_comm_rank(comm), size = bl_comm_size(comm);
    unsigned char *recv = alloc_bytes(bytes * (size_t)size), *own = alloc_bytes(bytes);
    unsigned char *send = in_place ? recv + (size_t)rank * bytes : own;
    bl_status st;

    for (size_t i = 0; i < bytes; i++) send[i] = pattern(rank, i);
    BL_TRY_GOTO(st, done, bl_comm_all_gather(comm, self->stream, send, recv, bytes));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < bytes; i++)
            TEST_CHECK_GOTO(st, done, recv[(size_t)r * bytes + i] == pattern(r, i));
done:
    bl_stream_synchronize(self->stream);
    free(own);
    free(recv);
    return st;
}

static bl_status check_reduce_scatter(test_rank *self, bl_comm *comm, int block, int64_t n)
{
    int rank = bl_comm_rank(comm), size = bl_comm_size(comm);
    float *send = alloc_bytes((size_t)(n * size) * sizeof *send),
          *recv = alloc_bytes((size_t)n * sizeof *recv);
    bl_status st;

    for (int64_t i = 0; i < n * size; i++) send[i] = test_value(rank, i, 5);
    for (int64_t i = 0; i < n; i++) recv[i] = 1e9f; /* overwritten, not added to */
    BL_TRY_GOTO(st, done, bl_comm_reduce_scatter_f32(comm, self->stream, send, recv, n));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    for (int64_t i = 0; i < n; i++) {
        float expected = test_sum(size, block, rank * n + i, 5);
        TEST_CHECK_GOTO(st, done, memcmp(&recv[i], &expected, sizeof expected) == 0);
    }
    for (int64_t i = 0; i < n * size; i++)
        TEST_CHECK_GOTO(st, done, send[i] == test_value(rank, i, 5));
done:
    bl_stream_synchronize(self->stream);
    free(recv);
    free(send);
    return st;
}

static bl_status check_all_reduce(test_rank *self, bl_comm *comm, int block, int64_t n)
{
    int rank = bl_comm_rank(comm), size = bl_comm_size(comm);
    float *f = alloc_bytes((size_t)n * sizeof *f);
    double *d = alloc_bytes((size_t)n * sizeof *d);
    int64_t *k = alloc_bytes((size_t)n * sizeof *k);
    bl_status st;

    for (int64_t i = 0; i < n; i++) {
        f[i] = test_value(rank, i, 6);
        d[i] = 1e-3 * (double)test_value(rank, i, 7);
        k[i] = i * 1000 + rank - (INT64_C(1) << 60);
    }
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_f32(comm, self->stream, f, n));
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_f64(comm, self->stream, d, n));
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_i64(comm, self->stream, k, n));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    for (int64_t i = 0; i < n; i++) {
        float expected_f = test_sum(size, block, i, 6);
        double expected_d = 0, of_block = 0;
        uint64_t expected_k = 0;
        for (int r = 0; r < size; r++) {
            of_block += 1e-3 * (double)test_value(r, i, 7);
            expected_k += (uint64_t)(i * 1000 + r - (INT64_C(1) << 60));
            if ((r + 1) % block > 0 && r + 1 < size) continue;
            expected_d += of_block;
            of_block = 0;
        }
        TEST_CHECK_GOTO(st, done, memcmp(&f[i], &expected_f, sizeof expected_f) == 0);
        TEST_CHECK_GOTO(st, done, memcmp(&d[i], &expected_d, sizeof expected_d) == 0);
        TEST_CHECK_GOTO(st, done, (uint64_t)k[i] == expected_k);
    }
done:
    bl_stream_synchronize(self->stream);
    free(k);
    free(d);
    free(f);
    return st;
}

static bl_status check_broadcast(test_rank *self, bl_comm *comm, size_t bytes)
{
    unsigned char *buffer = alloc_bytes(bytes);
    bl_status st = BL_OK;

    for (int root = 0; root < bl_comm_size(comm); root++) {
        for (size_t i = 0; i < bytes; i++) buffer[i] = pattern(bl_comm_rank(comm), i);
        BL_TRY_GOTO(st, done, bl_comm_broadcast(comm, self->stream, buffer, bytes, root));
        BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
        for (size_t i = 0; i < bytes; i++) TEST_CHECK_GOTO(st, done, buffer[i] == pattern(root, i));
    }
done:
    bl_stream_synchronize(self->stream);
    free(buffer);
    return st;
}

static bl_status check_collectives(test_rank *self, bl_comm *comm)
{
    for (size_t i = 0; i < BL_COUNT(lengths); i++) {
        BL_TRY(check_all_gather(self, comm, (size_t)lengths[i], false));
        BL_TRY(check_all_gather(self, comm, (size_t)lengths[i], true));
        BL_TRY(check_reduce_scatter(self, comm, BL_COMM_SUM_BLOCK, lengths[i]));
        BL_TRY(check_all_reduce(self, comm, BL_COMM_SUM_BLOCK, lengths[i]));
        BL_TRY(check_broadcast(self, comm, (size_t)lengths[i]));
    }
    return bl_comm_barrier(comm, self->stream);
}

bl_status comm_case_world_values(test_rank *self)
{
    TEST_CHECK(bl_comm_rank(self->comm) == self->rank && bl_comm_size(self->comm) == self->n_ranks);
    return check_collectives(self, self->comm);
}

/* Sums, and gathers, which take the same paths. */
static bl_status check_sums(test_rank *self, bl_comm *comm, int block)
{
    for (size_t i = 0; i < BL_COUNT(lengths); i++) {
        BL_TRY(check_all_gather(self, comm, (size_t)lengths[i], i % 2 == 0));
        BL_TRY(check_reduce_scatter(self, comm, block, lengths[i]));
        BL_TRY(check_all_reduce(self, comm, block, lengths[i]));
    }
    return BL_OK;
}

/* In a communicator and in one split from it, with the ranks in the same order. */
static bl_status check_block(test_rank *self, int block)
{
    bl_comm *comm = NULL, *part = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_comm_split(self->comm, 0, &comm));
    BL_TRY_GOTO(st, done, bl_comm_set_sum_block(comm, block));
    BL_TRY_GOTO(st, done, bl_comm_split(comm, 0, &part));
    BL_TRY_GOTO(st, done, check_sums(self, comm, block));
    BL_TRY_GOTO(st, done, check_sums(self, part, block));
    st = bl_stream_synchronize(self->stream);
done:
    bl_comm_destroy(part);
    bl_comm_destroy(comm);
    return st;
}

bl_status comm_case_sums_in_blocks(test_rank *self)
{
    for (int block = 1; block <= 5; block++) BL_TRY(check_block(self, block));
    TEST_CHECK(bl_comm_set_sum_block(self->comm, 0) == BL_EUSAGE);
    return BL_OK;
}

/* 0 + -0 is +0: the sum starts from zero, also with one rank. */
bl_status comm_case_negative_zero(test_rank *self)
{
    float *send = alloc_bytes((size_t)self->n_ranks * sizeof *send), recv = 1.0f, value = -0.0f;
    for (int i = 0; i < self->n_ranks; i++) send[i] = -0.0f;
    bl_comm_reduce_scatter_f32(self->comm, self->stream, send, &recv, 1);
    bl_comm_all_reduce_f32(self->comm, self->stream, &value, 1);
    bl_status st = bl_stream_synchronize(self->stream);
    free(send);
    BL_TRY(st);
    TEST_CHECK(!__builtin_signbit(recv) && !__builtin_signbit(value));
    return BL_OK;
}

/* ---- groups ---- */

bl_status comm_case_split_values(test_rank *self)
{
    bl_comm *parity = NULL, *alone = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_comm_split(self->comm, self->rank % 2, &parity));
    BL_TRY_GOTO(st, done, bl_comm_split(parity, bl_comm_rank(parity), &alone));
    TEST_CHECK_GOTO(st, done, bl_comm_rank(parity) == self->rank / 2);
    TEST_CHECK_GOTO(st, done, bl_comm_size(parity) == (self->n_ranks + 1 - self->rank % 2) / 2);
    TEST_CHECK_GOTO(st, done, bl_comm_size(alone) == 1 && bl_comm_rank(alone) == 0);
    BL_TRY_GOTO(st, done, check_collectives(self, parity));
    BL_TRY_GOTO(st, done, check_collectives(self, alone));
    st = bl_stream_synchronize(self->stream);
done:
    bl_comm_destroy(alone);
    bl_comm_destroy(parity);
    return st;
}

enum { N_ROUNDS = 400, N_SLOTS = 3, ROUND_FLOATS = 65 };

typedef struct round_args {
    float *gathered, *sums;
    int rank, size, round;
} round_args;

/* Now and then up to 0.3 ms, at another time on each rank and stream. */
static void pause_at_random(const round_args *a, uint64_t stream)
{
    float x = test_value(a->rank, a->round, 1000 + stream);
    if (x > 0.7f) usleep((unsigned)((x - 0.7f) * 1000));
}

/* Consumes round r's gather: checks it, then leaves the input of the reduction. */
static bl_status consume_round(bl_stream *stream, const void *args)
{
    const round_args *a = args;
    (void)stream;
    pause_at_random(a, 0);
    for (int r = 0; r < a->size; r++)
        for (int64_t i = 0; i < ROUND_FLOATS; i++)
            TEST_CHECK(a->gathered[r * ROUND_FLOATS + i] == test_value(r, i, (uint64_t)a->round));
    for (int64_t i = 0; i < ROUND_FLOATS; i++)
        a->sums[i] = test_value(a->rank, i, (uint64_t)a->round + 77);
    return BL_OK;
}

static bl_status check_round(bl_stream *stream, const void *args)
{
    const round_args *a = args;
    (void)stream;
    pause_at_random(a, 1);
    for (int64_t i = 0; i < ROUND_FLOATS; i++)
        TEST_CHECK(a->sums[i] == test_sum(a->size, BL_COMM_SUM_BLOCK, i, (uint64_t)a->round + 77));
    return BL_OK;
}

static bl_status produce_round(bl_stream *stream, const void *args)
{
    const round_args *a = args;
    (void)stream;
    pause_at_random(a, 2);
    for (int64_t i = 0; i < ROUND_FLOATS; i++)
        a->gathered[a->rank * ROUND_FLOATS + i] = test_value(a->rank, i, (uint64_t)a->round);
    return BL_OK;
}

typedef struct pipeline {
    bl_comm *gather_comm, *reduce_comm;
    bl_stream *gather, *reduce, *compute;
    bl_event *gathered[N_SLOTS], *consumed[N_SLOTS], *reduced[N_SLOTS];
    float *slots, *sums;
} pipeline;

static bl_status give_rounds(pipeline *p)
{
    int rank = bl_comm_rank(p->gather_comm), size = bl_comm_size(p->gather_comm);
    for (int round = 0; round < N_ROUNDS; round++) {
        int s = round % N_SLOTS;
        round_args a = {.gathered = p->slots + s * size * ROUND_FLOATS,
                        .sums = p->sums + s * ROUND_FLOATS,
                        .rank = rank,
                        .size = size,
                        .round = round};
        BL_TRY(bl_stream_wait(p->gather, p->consumed[s])); /* of N_SLOTS rounds ago */
        BL_TRY(bl_stream_call(p->gather, produce_round, &a, sizeof a));
        BL_TRY(bl_comm_all_gather(p->gather_comm, p->gather, a.gathered + rank * ROUND_FLOATS,
                                  a.gathered, ROUND_FLOATS * sizeof(float)));
        BL_TRY(bl_event_record(p->gathered[s], p->gather));
        BL_TRY(bl_stream_wait(p->compute, p->gathered[s]));
        BL_TRY(bl_stream_wait(p->compute, p->reduced[s]));
        BL_TRY(bl_stream_call(p->compute, consume_round, &a, sizeof a));
        BL_TRY(bl_event_record(p->consumed[s], p->compute));
        BL_TRY(bl_stream_wait(p->reduce, p->consumed[s]));
        BL_TRY(bl_comm_all_reduce_f32(p->reduce_comm, p->reduce, a.sums, ROUND_FLOATS));
        BL_TRY(bl_stream_call(p->reduce, check_round, &a, sizeof a));
        BL_TRY(bl_event_record(p->reduced[s], p->reduce));
    }
    BL_TRY(bl_stream_synchronize(p->gather));
    BL_TRY(bl_stream_synchronize(p->compute));
    return bl_stream_synchronize(p->reduce);
}

bl_status comm_case_run_pipeline(test_rank *self)
{
    pipeline p = {.gather_comm = self->comm, .compute = self->stream};
    size_t size = (size_t)self->n_ranks;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_comm_split(self->comm, 0, &p.reduce_comm));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gather", &p.gather));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "reduce", &p.reduce));
    for (int i = 0; i < N_SLOTS; i++) {
        BL_TRY_GOTO(st, done, bl_event_create(self->device, &p.gathered[i]));
        BL_TRY_GOTO(st, done, bl_event_create(self->device, &p.consumed[i]));
        BL_TRY_GOTO(st, done, bl_event_create(self->device, &p.reduced[i]));
    }
    BL_TRY_GOTO(st, done,
                bl_device_alloc(self->device, BL_SPACE_DEVICE,
                                size * N_SLOTS * ROUND_FLOATS * sizeof(float), "slots",
                                (void **)&p.slots));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(self->device, BL_SPACE_DEVICE,
                                N_SLOTS * ROUND_FLOATS * sizeof(float), "sums", (void **)&p.sums));
    st = give_rounds(&p);
done:
    if (st != BL_OK) {
        bl_error error;
        bl_error_save(&error, st);
        bl_comm_abort(self->comm, &error);
        bl_error_restore(&error);
    }
    bl_stream_destroy(p.gather);
    bl_stream_destroy(p.reduce);
    bl_stream_synchronize(self->stream);
    for (int i = 0; i < N_SLOTS; i++) {
        bl_event_destroy(p.gathered[i]);
        bl_event_destroy(p.consumed[i]);
        bl_event_destroy(p.reduced[i]);
    }
    bl_device_free(self->device, BL_SPACE_DEVICE, p.slots);
    bl_device_free(self->device, BL_SPACE_DEVICE, p.sums);
    bl_comm_destroy(p.reduce_comm);
    return st;
}

typedef struct gate {
    atomic_bool is_open;
} gate;

static bl_status open_gate(bl_stream *stream, const void *args)
{
    gate *const *g = args;
    (void)stream;
    atomic_store(&(*g)->is_open, true);
    return BL_OK;
}

static bl_status pass_gate(bl_stream *stream, const void *args)
{
    enum { PAUSE_US = 1000, TRIES = 20 * 1000 };
    gate *const *g = args;
    (void)stream;
    for (int i = 0; i < TRIES && !atomic_load(&(*g)->is_open); i++) usleep(PAUSE_US);
    TEST_CHECK(atomic_load(&(*g)->is_open));
    return BL_OK;
}

/* Rank 0 does not come to the gather before its reductions, which are called after it, are over. */
static bl_status hold_gather(test_rank *self, bl_comm *gathers, bl_stream *stream, gate *g,
                             float *gathered)
{
    enum { N_SUMS = 20 };
    int64_t sum[N_SUMS];
    gate *own = g;

    if (self->rank == 0) BL_TRY(bl_stream_call(stream, pass_gate, &own, sizeof own));
    BL_TRY(bl_comm_all_gather(gathers, stream, gathered + self->rank, gathered, sizeof *gathered));
    for (int i = 0; i < N_SUMS; i++) {
        sum[i] = self->rank + i;
        BL_TRY(bl_comm_all_reduce_i64(self->comm, self->stream, &sum[i], 1));
    }
    BL_TRY(bl_stream_call(self->stream, open_gate, &own, sizeof own));
    BL_TRY(bl_stream_synchronize(self->stream));
    BL_TRY(bl_stream_synchronize(stream));
    for (int64_t i = 0; i < N_SUMS; i++)
        TEST_CHECK(sum[i] == self->n_ranks * (self->n_ranks - 1) / 2 + i * self->n_ranks);
    for (int r = 0; r < self->n_ranks; r++) TEST_CHECK(gathered[r] == test_value(r, 0, 3));
    return BL_OK;
}

bl_status comm_case_gather_is_held(test_rank *self)
{
    float *gathered = alloc_bytes((size_t)self->n_ranks * sizeof *gathered);
    bl_comm *gathers = NULL;
    bl_stream *stream = NULL;
    gate g = {false};
    bl_status st;

    gathered[self->rank] = test_value(self->rank, 0, 3);
    BL_TRY_GOTO(st, done, bl_comm_split(self->comm, 0, &gathers));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gather", &stream));
    st = hold_gather(self, gathers, stream, &g, gathered);
done:
    if (st != BL_OK) { /* before the streams are waited for */
        bl_error error;
        bl_error_save(&error, st);
        bl_comm_abort(self->comm, &error);
        bl_error_restore(&error);
    }
    bl_stream_destroy(stream);
    (void)bl_stream_synchronize(self->stream);
    bl_comm_destroy(gathers);
    free(gathered);
    return st;
}

/* ---- failures ---- */

static bl_status fail_task(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_EIO, "shard.bin: a short read");
}

/* Rank 1's task fails after ten rounds; the others are in, or on their way to, an all_gather that
 * rank 1 skips. */
bl_status comm_case_one_rank_fails(test_rank *self)
{
    unsigned char *recv = alloc_bytes((size_t)self->n_ranks * 100);
    bl_comm *half = NULL;
    bl_stream *other = NULL;
    bool all_canceled = false;
    bl_status st;

    /* Rank 1 is not in the others' group. */
    BL_TRY_GOTO(st, done, bl_comm_split(self->comm, self->rank == 1, &half));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "other", &other));
    for (int i = 0; i < 20; i++) {
        if (self->rank == 1 && i == 10)
            BL_TRY_GOTO(st, done, bl_stream_call(self->stream, fail_task, NULL, 0));
        BL_TRY_GOTO(
            st, done,
            bl_comm_all_gather(self->comm, self->stream, recv + self->rank * 100, recv, 100));
    }
    st = bl_stream_synchronize(self->stream);
    if (self->rank == 1) goto done;
    TEST_CHECK_GOTO(st, done, st == BL_ECANCELED);
    TEST_CHECK_GOTO(st, done, strstr(bl_error_text(), "shard.bin: a short read"));
    TEST_CHECK_GOTO(st, done,
                    bl_comm_barrier(half, other) ==
                        BL_OK); /* queued; the split group is canceled too */
    st = bl_stream_synchronize(other);
    TEST_CHECK_GOTO(st, done, st == BL_ECANCELED);
    bl_comm *never;
    TEST_CHECK_GOTO(st, done, bl_comm_split(half, 0, &never) == BL_ECANCELED && never == NULL);
    all_canceled = true;
done:
    if (self->rank == 1 && st != BL_OK) {
        bl_error error;
        bl_error_save(&error, st);
        bl_comm_abort(self->comm, &error);
        bl_error_restore(&error);
    }
    bl_stream_destroy(other);
    bl_stream_synchronize(self->stream);
    bl_comm_destroy(half);
    free(recv);
    return all_canceled ? BL_FAIL(BL_ECANCELED, "all canceled") : st;
}

bl_status comm_case_two_ranks_stay_away(test_rank *self)
{
    bl_error failure = {.status = BL_OK};
    float value = 1;

    while (self->rank % 2 == 1 && failure.status == BL_OK) {
        usleep(1000);
        bl_comm_first_error(self->comm, &failure);
    }
    BL_TRY(bl_comm_all_reduce_f32(self->comm, self->stream, &value, 1));
    return bl_stream_synchronize(self->stream);
}

/* Rank 1 of a split group is rank 2 of the job, and called so. */
bl_status comm_case_split_rank_stays_away(test_rank *self)
{
    bl_comm *even = NULL;
    BL_TRY(bl_comm_split(self->comm, self->rank % 2, &even));
    bl_status st = BL_OK;
    if (self->rank == 0) st = bl_comm_barrier(even, self->stream);
    if (st == BL_OK) st = bl_stream_synchronize(self->stream);
    bl_comm_destroy(even);
    return st;
}

/* The label is that of the call, not of the moment at which it fails. */
bl_status comm_case_labeled_rank_stays_away(test_rank *self)
{
    unsigned char bytes[64] = {0};
    bl_error failure = {.status = BL_OK};
    float value = 1;

    bl_comm_set_label(self->comm, "layer", 16);
    BL_TRY(bl_comm_all_reduce_f32(self->comm, self->stream, &value, 1));
    bl_comm_set_label(self->comm, "layer", 17);
    while (self->rank == 1 && failure.status == BL_OK) {
        usleep(1000);
        bl_comm_first_error(self->comm, &failure);
    }
    BL_TRY(bl_comm_all_gather(self->comm, self->stream, bytes + self->rank, bytes, 1));
    bl_comm_set_label(self->comm, NULL, 0);
    return bl_stream_synchronize(self->stream);
}

/* Rank 1 is a layer ahead, with another collective. */
bl_status comm_case_labels_disagree(test_rank *self)
{
    float values[64] = {0};

    if (self->rank == 1) {
        bl_comm_set_label(self->comm, "the head", -1);
        BL_TRY(bl_comm_all_reduce_f32(self->comm, self->stream, values, 2));
    } else {
        bl_comm_set_label(self->comm, "layer", 3);
        BL_TRY(bl_comm_broadcast(self->comm, self->stream, values, 8, 0));
    }
    return bl_stream_synchronize(self->stream);
}

bl_status comm_case_other_label(test_rank *self)
{
    unsigned char *recv = alloc_bytes((size_t)self->n_ranks * 100);
    bl_comm_set_label(self->comm, "layer", self->rank == 1 ? 5 : 4);
    bl_comm_all_gather(self->comm, self->stream, recv, recv, 100);
    bl_status st = bl_stream_synchronize(self->stream);
    free(recv);
    return st;
}

bl_status comm_case_other_size(test_rank *self)
{
    unsigned char *recv = alloc_bytes((size_t)self->n_ranks * 100);
    bl_comm_all_gather(self->comm, self->stream, recv, recv, self->rank == 2 ? 99 : 100);
    bl_status st = bl_stream_synchronize(self->stream);
    free(recv);
    return st;
}

bl_status comm_case_other_kind(test_rank *self)
{
    double values[4] = {0};
    if (self->rank == 1)
        bl_comm_broadcast(self->comm, self->stream, values, sizeof values, 0);
    else
        bl_comm_all_reduce_f64(self->comm, self->stream, values, 4);
    return bl_stream_synchronize(self->stream);
}

bl_status comm_case_other_root(test_rank *self)
{
    double value = 0;
    bl_comm_broadcast(self->comm, self->stream, &value, sizeof value, self->rank == 1);
    return bl_stream_synchronize(self->stream);
}

bl_status comm_case_other_element(test_rank *self)
{
    int64_t k[2] = {0};
    double d[2] = {0};
    if (self->rank == 1)
        bl_comm_all_reduce_i64(self->comm, self->stream, k, 2);
    else
        bl_comm_all_reduce_f64(self->comm, self->stream, d, 2);
    return bl_stream_synchronize(self->stream);
}
