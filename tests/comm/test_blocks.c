/* SPDX-License-Identifier: Apache-2.0 */
/* The blocks of a sum: helpers and traffic by counting; the bytes between hosts, counted at the
 * wire of ranks that are processes; the rank that errors name when one stops; the error of a sum
 * against double. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "comm/blocks_internal.h"
#include "comm/model.h"
#include "comm/wire/internal.h"
#include "host_ranks.h"

/* ---- arithmetic ---- */

/* Every owner has one helper in each block, in one turn. */
static void check_helpers(const comm_blocks *b)
{
    int *helps = calloc((size_t)b->n * (size_t)b->size, sizeof *helps);

    assert_non_null(helps);
    for (int rank = 0; rank < b->size; rank++) {
        int block = comm_block_of(b, rank);
        for (int turn = 0; turn < comm_block_turns(b, block); turn++) {
            int owner = comm_block_owner(b, rank, turn);
            if (owner < 0) continue;
            assert_true(owner < b->size);
            assert_int_equal(comm_block_helper(b, block, owner), rank);
            helps[block * b->size + owner]++;
        }
        assert_int_equal(comm_block_owner(b, rank, comm_block_own_turn(b, rank)), rank);
    }
    for (int i = 0; i < b->n * b->size; i++) assert_int_equal(helps[i], 1);
    free(helps);
}

static void take_most(comm_blocks_traffic *t, int n_hosts, const int64_t *within,
                      const int64_t *between)
{
    for (int host = 0; host < n_hosts; host++) {
        t->into_host_within = bl_max_i64(t->into_host_within, within[host]);
        t->into_host_between = bl_max_i64(t->into_host_between, between[host]);
    }
}

/* Counts every part that a sum moves, one by one. */
static comm_blocks_traffic count_all(const comm_blocks *b, int n_on_host, int64_t *received)
{
    int n_hosts = (int)bl_ceil_div(b->size, n_on_host);
    int64_t within[64] = {0}, between[64] = {0};
    comm_blocks_traffic t = {0};

    memset(received, 0, (size_t)b->size * sizeof *received);
    for (int owner = 0; owner < b->size; owner++)
        for (int block = 0; block < b->n; block++) {
            int helper = comm_block_helper(b, block, owner), host = helper / n_on_host;
            for (int i = 0; i < comm_block_length(b, block); i++) {
                int rank = comm_block_first(b, block) + i;
                if (rank == helper) continue;
                received[helper]++;
                if (helper == 0) t.received_within++;
                if (rank / n_on_host != host) within[host]++;
            }
            if (block == comm_block_of(b, owner)) continue;
            received[owner]++;
            if (owner == 0) t.received_between++;
            if (host != owner / n_on_host) between[owner / n_on_host]++;
        }
    take_most(&t, n_hosts, within, between);
    return t;
}

/* Counts every part that a gather moves: from every owner to its helpers, and from helpers to the
 * ranks of the block. */
static comm_blocks_traffic count_gather(const comm_blocks *b, int n_on_host)
{
    int n_hosts = (int)bl_ceil_div(b->size, n_on_host);
    int64_t within[64] = {0}, between[64] = {0};
    comm_blocks_traffic t = {0};

    for (int owner = 0; owner < b->size; owner++)
        for (int block = 0; block < b->n; block++) {
            int helper = comm_block_helper(b, block, owner);
            if (block != comm_block_of(b, owner)) {
                t.received_between += helper == 0;
                between[helper / n_on_host] += helper / n_on_host != owner / n_on_host;
            }
            for (int i = 0; i < comm_block_length(b, block); i++) {
                int rank = comm_block_first(b, block) + i;
                if (rank == helper) continue;
                t.received_within += rank == 0;
                within[rank / n_on_host] += rank / n_on_host != helper / n_on_host;
            }
        }
    take_most(&t, n_hosts, within, between);
    return t;
}

static void check_gather(const comm_blocks *b, int n_on_host)
{
    comm_blocks_traffic t = comm_blocks_count_gather(b, n_on_host),
                        all = count_gather(b, n_on_host);

    assert_int_equal(t.received_within, all.received_within);
    assert_int_equal(t.received_between, all.received_between);
    assert_int_equal(t.received_within + t.received_between, b->size - 1);
    assert_int_equal(t.into_host_within, all.into_host_within);
    assert_int_equal(t.into_host_between, all.into_host_between);
}

static void check_traffic(const comm_blocks *b, int n_on_host)
{
    int64_t received[64];
    comm_blocks_traffic t = comm_blocks_count(b, n_on_host),
                        all = count_all(b, n_on_host, received);

    assert_int_equal(t.received_within, all.received_within);
    assert_int_equal(t.received_between, all.received_between);
    assert_int_equal(t.into_host_within, all.into_host_within);
    assert_int_equal(t.into_host_between, all.into_host_between);
    for (int rank = 0; rank < b->size; rank++)
        assert_int_equal(comm_blocks_received(b, rank), received[rank]);
}

static void test_helpers_and_traffic(void **state)
{
    (void)state;
    for (int size = 1; size <= 33; size++)
        for (int per_block = 1; per_block <= 12; per_block++) {
            comm_blocks b = comm_blocks_of(size, per_block);
            check_helpers(&b);
            for (int n_on_host = 1; n_on_host <= size; n_on_host++) {
                check_traffic(&b, n_on_host);
                check_gather(&b, n_on_host);
            }
        }
}

/* With two hosts of eight ranks and a block per host, each host receives an eighth of the parts
 * that it receives with a single block. This is the minimum: one sum of the other host for each
 * rank. */
static void test_an_eighth_between_hosts(void **state)
{
    comm_blocks one = comm_blocks_of(16, 16), two = comm_blocks_of(16, 8);
    comm_blocks_traffic t = comm_blocks_count(&one, 8);

    (void)state;
    assert_int_equal(t.into_host_within + t.into_host_between, 64);
    assert_int_equal(t.summed, 17);
    t = comm_blocks_count(&two, 8);
    assert_int_equal(t.into_host_within, 0);
    assert_int_equal(t.into_host_between, 8);
    assert_int_equal(t.summed, 2 * 9 + 3);
    t = comm_blocks_count_gather(&two, 8); /* a ring brings 15 */
    assert_int_equal(t.into_host_within, 0);
    assert_int_equal(t.into_host_between, 8);
}

/* ---- bytes, as processes send them ---- */

static int n_on_host_counted;
static int64_t sent_to_other_hosts, received_from_other_hosts;
static int own_rank;
static int last_step; /* of the collective under way: how the wire orders waits */
static int stops_at;  /* the exchange before which this rank stops until the job fails; 0: none */
static bl_comm *own_comm;

static void stop_until_failure(void)
{
    bl_error error = {.status = BL_OK};

    for (; error.status == BL_OK; bl_comm_first_error(own_comm, &error)) usleep(1000);
}

bl_status __real_bl_wire_channel_exchange(bl_wire_channel *channel, const bl_comm_call *call,
                                          bool is_meeting, const bl_transfer *transfers, int n);
bl_status __wrap_bl_wire_channel_exchange(bl_wire_channel *channel, const bl_comm_call *call,
                                          bool is_meeting, const bl_transfer *transfers, int n);

bl_status __wrap_bl_wire_channel_exchange(bl_wire_channel *channel, const bl_comm_call *call,
                                          bool is_meeting, const bl_transfer *transfers, int n)
{
    if (!is_meeting && stops_at > 0 && --stops_at == 0) stop_until_failure();
    for (int i = 0; i < n && !is_meeting && n_on_host_counted > 0; i++)
        if (transfers[i].peer / n_on_host_counted != own_rank / n_on_host_counted)
            *(transfers[i].is_send ? &sent_to_other_hosts : &received_from_other_hosts) +=
                (int64_t)transfers[i].n_bytes;
    bl_status st = __real_bl_wire_channel_exchange(channel, call, is_meeting, transfers, n);
    last_step = channel->step;
    return st;
}

enum { FLOATS = 70001 }; /* several pieces */

typedef struct layout {
    int n_ranks, n_on_host, block;
    int64_t parts_sent; /* by each rank, to other hosts */
} layout;

static bl_status gather_once(test_rank *self, float *all)
{
    float *own = all + (size_t)self->rank * FLOATS;

    for (int64_t i = 0; i < FLOATS; i++) own[i] = test_value(self->rank, i, 10);
    BL_TRY(bl_comm_all_gather(self->comm, self->stream, own, all, FLOATS * sizeof *all));
    BL_TRY(bl_stream_synchronize(self->stream));
    for (int r = 0; r < self->n_ranks; r++)
        for (int64_t i = 0; i < FLOATS; i++)
            TEST_CHECK(all[r * (int64_t)FLOATS + i] == test_value(r, i, 10));
    return BL_OK;
}

/* On every rank: checks the bits of a sum, and reports the bytes sent to other hosts; then the same
 * for a gather. */
static bl_status sum_once(test_rank *self)
{
    const layout *l = self->arg;
    size_t n = (size_t)FLOATS * (size_t)self->n_ranks;
    float *send = malloc(n * sizeof *send), *recv = malloc(FLOATS * sizeof *recv);
    bl_status st = send && recv ? BL_OK : BL_FAIL(BL_ENOMEM, "a test's values");

    own_rank = self->rank;
    n_on_host_counted = l->n_on_host;
    for (size_t i = 0; i < n && st == BL_OK; i++) send[i] = test_value(self->rank, (int64_t)i, 9);
    BL_TRY_GOTO(st, done, st);
    BL_TRY_GOTO(st, done, bl_comm_set_sum_block(self->comm, l->block));
    BL_TRY_GOTO(st, done, bl_comm_reduce_scatter_f32(self->comm, self->stream, send, recv, FLOATS));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    for (int64_t i = 0; i < FLOATS; i++) {
        int64_t index = self->rank * (int64_t)FLOATS + i;
        float expected = test_sum(self->n_ranks, l->block, index, 9);
        TEST_CHECK_GOTO(st, done, memcmp(&recv[i], &expected, sizeof expected) == 0);
    }
    host_rank_say(self, 0, sent_to_other_hosts);
    sent_to_other_hosts = 0;
    BL_TRY_GOTO(st, done, gather_once(self, send));
    host_rank_say(self, 1, sent_to_other_hosts);
done:
    (void)bl_stream_synchronize(self->stream);
    free(recv);
    free(send);
    return st;
}

static bl_status gather_by_blocks(test_rank *self)
{
    const layout *l = self->arg;
    float *all = malloc((size_t)FLOATS * (size_t)self->n_ranks * sizeof *all);
    bl_status st = all ? BL_OK : BL_FAIL(BL_ENOMEM, "a test's values");

    own_rank = self->rank;
    n_on_host_counted = l->n_on_host;
    BL_TRY_GOTO(st, done, st);
    BL_TRY_GOTO(st, done, bl_comm_set_sum_block(self->comm, l->block));
    received_from_other_hosts = 0;
    BL_TRY_GOTO(st, done, gather_once(self, all));
    host_rank_say(self, 0, received_from_other_hosts);
done:
    (void)bl_stream_synchronize(self->stream);
    free(all);
    return st;
}

/* Compares the bytes of the model of a gather (comm/model.h), with rates at which they are its
 * time, with the bytes that the wire sends to the host that receives most. */
static void test_model_of_a_gather(void **state)
{
    static const bl_rates rates = {.network_bytes_per_s = 1};
    layout layouts[] = {{4, 2, 2, 0}, {4, 2, 8, 0}, {8, 4, 4, 0}, {8, 4, 8, 0},
                        {8, 4, 3, 0}, {7, 4, 4, 0}, {8, 2, 4, 0}, {6, 3, 2, 0}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(layouts); i++) {
        const layout *l = &layouts[i];
        host_rank_end ends[HOST_RANKS_MAX];
        int64_t into[HOST_RANKS_MAX] = {0}, most = 0;
        bl_exchange gather = {.size = l->n_ranks,
                              .n_on_host = l->n_on_host,
                              .bytes = FLOATS * sizeof(float),
                              .kind = bl_exchange_gather_kind(BL_DEVICE_CPU),
                              .block = l->block};

        host_ranks_run(l->n_ranks, 60, gather_by_blocks, &layouts[i], ends);
        for (int r = 0; r < l->n_ranks; r++) {
            if (ends[r].error.status != BL_OK) fail_msg("rank %d: %s", r, ends[r].error.text);
            into[r / l->n_on_host] += ends[r].values[0];
            most = bl_max_i64(most, into[r / l->n_on_host]);
        }
        bl_work work = bl_exchange_work(&gather, BL_DEVICE_CPU, &rates);
        assert_float_equal(work.seconds, (double)most, 0.5);
    }
}

/* The hosts of ranks change traffic, and no bit: layouts with equal blocks are compared with the
 * same serial sum. With a single block a rank sends one part to each rank of the other hosts. A
 * gather takes the paths of a sum in reverse. */
static void test_bytes_between_hosts(void **state)
{
    layout layouts[] = {{4, 2, 2, 1}, {4, 1, 1, 3}, {4, 2, 8, 2}, {8, 4, 4, 1},
                        {8, 4, 8, 4}, {8, 2, 2, 3}, {8, 8, 2, 0}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(layouts); i++) {
        const layout *l = &layouts[i];
        host_rank_end ends[HOST_RANKS_MAX];
        host_ranks_run(l->n_ranks, 60, sum_once, &layouts[i], ends);
        for (int r = 0; r < l->n_ranks; r++) {
            if (ends[r].error.status != BL_OK) fail_msg("rank %d: %s", r, ends[r].error.text);
            for (int v = 0; v < 2; v++)
                assert_int_equal(ends[r].values[v],
                                 l->parts_sent * FLOATS * (int64_t)sizeof(float));
        }
    }
}

/* ---- a rank that stops ---- */

typedef struct blocks {
    int n_ranks, block;
} blocks;

/* The step that the rank was in at the end of each collective. */
static bl_status note_steps(test_rank *self)
{
    const blocks *b = self->arg;
    size_t n = (size_t)FLOATS * (size_t)self->n_ranks;
    float *values = calloc(n, sizeof *values), *recv = calloc(FLOATS, sizeof *recv);
    double one = 1;
    bl_status st = values && recv ? BL_OK : BL_FAIL(BL_ENOMEM, "a test's values");

    BL_TRY_GOTO(st, done, st);
    BL_TRY_GOTO(st, done, bl_comm_set_sum_block(self->comm, b->block));
    BL_TRY_GOTO(st, done,
                bl_comm_reduce_scatter_f32(self->comm, self->stream, values, recv, FLOATS));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    host_rank_say(self, 0, last_step);
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_f64(self->comm, self->stream, &one, 1));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    host_rank_say(self, 1, last_step);
    BL_TRY_GOTO(st, done, bl_comm_all_gather(self->comm, self->stream, recv, values, FLOATS));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    host_rank_say(self, 2, last_step);
done:
    (void)bl_stream_synchronize(self->stream);
    free(recv);
    free(values);
    return st;
}

/* A block with fewer ranks has more turns, and a rank may have nothing to send or to receive. */
static void test_steps_are_alike(void **state)
{
    blocks all[] = {{4, 2}, {8, 6}, {7, 3}, {5, 4}, {3, 1}, {4, 8}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(all); i++) {
        host_rank_end ends[HOST_RANKS_MAX];
        host_ranks_run(all[i].n_ranks, 60, note_steps, &all[i], ends);
        for (int r = 0; r < all[i].n_ranks; r++) {
            if (ends[r].error.status != BL_OK) fail_msg("rank %d: %s", r, ends[r].error.text);
            for (int v = 0; v < 3; v++) assert_int_equal(ends[r].values[v], ends[0].values[v]);
        }
    }
}

enum { WIDE = 6, NARROW = 2, STOPPED = WIDE + 1, TURN = 4 }; /* ranks of two blocks; turns from 1 */
static const double DEADLINE_S = 2;

static bl_status stop_once(test_rank *self)
{
    float *values = calloc((size_t)FLOATS * (size_t)self->n_ranks, sizeof *values), sum[FLOATS];
    bl_status st = values ? BL_OK : BL_FAIL(BL_ENOMEM, "a test's values");

    own_comm = self->comm;
    if (self->rank == STOPPED) stops_at = TURN;
    if (st == BL_OK) st = bl_comm_set_sum_block(self->comm, WIDE);
    if (st == BL_OK) st = bl_comm_reduce_scatter_f32(self->comm, self->stream, values, sum, FLOATS);
    bl_status ended = bl_stream_synchronize(self->stream);
    free(values);
    return st == BL_OK ? ended : st;
}

/* The other rank of its block waits for it, and the wide block's ranks wait for both. On a loaded
 * machine another rank may stall for as long. */
static void test_who_is_to_blame(void **state)
{
    char expected[64];
    host_rank_end ends[HOST_RANKS_MAX];

    (void)state;
    snprintf(expected, sizeof expected, "rank %d moved no byte", STOPPED);
    for (int attempt = 0; attempt < 3; attempt++) {
        host_ranks_run(WIDE + NARROW, DEADLINE_S, stop_once, NULL, ends);
        for (int r = 0; r < WIDE + NARROW; r++) {
            const bl_error *reported = &ends[r].reported;
            if (reported->status == BL_OK) continue;
            if (strncmp(reported->text, expected, strlen(expected)) == 0) return;
            print_message("rank %d: %s\n", r, reported->text);
        }
    }
    fail_msg("expected: %s", expected);
}

/* ---- against double ---- */

/* n - 1 additions of n values, in any order, each rounded: |error| <= (n - 1) u sum |x|, to first
 * order (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). u is FLT_EPSILON / 2; twice
 * the bound allows for the second order. */
static void test_error_of_a_sum(void **state)
{
    enum { RANKS = 16, N = 2000 };

    (void)state;
    for (int block = 1; block <= RANKS; block++)
        for (int64_t i = 0; i < N; i++) {
            double exact = 0, magnitude = 0;
            for (int r = 0; r < RANKS; r++) {
                exact += (double)test_value(r, i, 3);
                magnitude += fabs((double)test_value(r, i, 3));
            }
            double error = fabs((double)test_sum(RANKS, block, i, 3) - exact);
            assert_true(error <= (RANKS - 1) * (double)FLT_EPSILON * magnitude);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_helpers_and_traffic), cmocka_unit_test(test_an_eighth_between_hosts),
        cmocka_unit_test(test_bytes_between_hosts), cmocka_unit_test(test_model_of_a_gather),
        cmocka_unit_test(test_steps_are_alike),     cmocka_unit_test(test_who_is_to_blame),
        cmocka_unit_test(test_error_of_a_sum),
    };
    return cmocka_run_group_tests_name("blocks", tests, NULL, NULL);
}
