/* SPDX-License-Identifier: Apache-2.0 */
/* The local communicator between ranks that each have a CUDA device: on a GPU, or on the emulated
 * one (emulator/). Results are those of the CPU bit for bit: copies are copies, and sums have the
 * same order. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "offload/gather_ring.h"
#include "test_ranks.h"

enum { N_RANKS = 3, N = 300001, N_SMALL = 7 }; /* a sum's piece is 262,144 floats: N takes two */

/* A rank's device, and a communicator of all ranks that is gone before it. */
typedef struct place {
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    float *host, *send, *recv; /* N_RANKS * N floats each */
} place;

static const size_t PLACE_BYTES = (size_t)N_RANKS * N * sizeof(float);

static void close_place(place *p)
{
    bl_comm_destroy(p->comm);
    bl_stream_destroy(p->stream);
    if (p->device) {
        bl_device_free(p->device, BL_SPACE_HOST, p->host);
        bl_device_free(p->device, BL_SPACE_DEVICE, p->send);
        bl_device_free(p->device, BL_SPACE_DEVICE, p->recv);
    }
    bl_device_destroy(p->device);
}

static bl_status open_place(test_rank *self, place *p)
{
    *p = (place){.comm = NULL};
    BL_TRY(bl_comm_split(self->comm, 0, &p->comm));
    BL_TRY(bl_device_create_cuda(0, &p->device));
    BL_TRY(bl_stream_create(p->device, "rank", &p->stream));
    BL_TRY(bl_device_alloc(p->device, BL_SPACE_HOST, PLACE_BYTES, "host", (void **)&p->host));
    BL_TRY(bl_device_alloc(p->device, BL_SPACE_DEVICE, PLACE_BYTES, "send", (void **)&p->send));
    return bl_device_alloc(p->device, BL_SPACE_DEVICE, PLACE_BYTES, "recv", (void **)&p->recv);
}

static bl_status put(place *p, void *device, const void *values, size_t bytes)
{
    memcpy(p->host, values, bytes);
    BL_TRY(bl_stream_copy(p->stream, device, p->host, bytes));
    return bl_stream_synchronize(p->stream);
}

static bl_status get(place *p, const void *device, size_t bytes)
{
    BL_TRY(bl_stream_copy(p->stream, p->host, device, bytes));
    return bl_stream_synchronize(p->stream);
}

static bl_status take_a_while(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    usleep(1000);
    return BL_OK;
}

static bl_status gathers_and_broadcasts(test_rank *self, place *p)
{
    float mine[1000];
    for (int round = 0; round < 20;
         round++) { /* a later round must not overtake an earlier one's readers */
        for (int i = 0; i < 1000; i++) mine[i] = test_value(self->rank, i, (uint64_t)round);
        memcpy(p->host + N, mine, sizeof mine); /* only the streams' events show its arrival */
        BL_TRY(bl_stream_call(p->stream, take_a_while, NULL, 0));
        BL_TRY(bl_stream_copy(p->stream, p->send, p->host + N, sizeof mine));
        BL_TRY(bl_comm_all_gather(p->comm, p->stream, p->send, p->recv, sizeof mine));
        /* As soon as the contract allows. */
        BL_TRY(bl_stream_zero(p->stream, p->send, sizeof mine));
        BL_TRY(get(p, p->recv, N_RANKS * sizeof mine));
        for (int r = 0; r < N_RANKS; r++)
            for (int i = 0; i < 1000; i++)
                TEST_CHECK(p->host[r * 1000 + i] == test_value(r, i, (uint64_t)round));

        int root = round % N_RANKS;
        BL_TRY(put(p, p->recv, mine, sizeof mine));
        BL_TRY(bl_comm_broadcast(p->comm, p->stream, p->recv, sizeof mine, root));
        BL_TRY(get(p, p->recv, sizeof mine));
        for (int i = 0; i < 1000; i++)
            TEST_CHECK(p->host[i] == test_value(root, i, (uint64_t)round));
        BL_TRY(bl_comm_barrier(p->comm, p->stream));
    }
    /* In place, as the gather ring does. */
    for (int i = 0; i < 1000; i++) mine[i] = test_value(self->rank, i, 99);
    BL_TRY(put(p, p->recv + self->rank * 1000, mine, sizeof mine));
    BL_TRY(
        bl_comm_all_gather(p->comm, p->stream, p->recv + self->rank * 1000, p->recv, sizeof mine));
    BL_TRY(get(p, p->recv, N_RANKS * sizeof mine));
    for (int i = 0; i < N_RANKS * 1000; i++)
        TEST_CHECK(p->host[i] == test_value(i / 1000, i % 1000, 99));
    return BL_OK;
}

static float sum_at(int64_t index)
{
    float sum = 0;
    for (int r = 0; r < N_RANKS; r++) sum += test_value(r, index, 5);
    return sum;
}

static bl_status sums(test_rank *self, place *p)
{
    for (int64_t i = 0; i < N_RANKS * N; i++) p->host[i] = test_value(self->rank, i, 5);
    BL_TRY(bl_stream_copy(p->stream, p->send, p->host, PLACE_BYTES));
    BL_TRY(bl_comm_reduce_scatter_f32(p->comm, p->stream, p->send, p->recv, N));
    BL_TRY(bl_comm_all_reduce_f32(p->comm, p->stream, p->send, N));
    BL_TRY(get(p, p->recv, N * sizeof(float)));
    for (int64_t i = 0; i < N; i++) TEST_CHECK(p->host[i] == sum_at(self->rank * (int64_t)N + i));
    BL_TRY(get(p, p->send, N * sizeof(float)));
    for (int64_t i = 0; i < N; i++) TEST_CHECK(p->host[i] == sum_at(i));

    int64_t counts[N_SMALL];
    for (int i = 0; i < N_SMALL; i++) counts[i] = (int64_t)i << (10 * self->rank);
    BL_TRY(put(p, p->send, counts, sizeof counts));
    BL_TRY(bl_comm_all_reduce_i64(p->comm, p->stream, (int64_t *)(void *)p->send, N_SMALL));
    BL_TRY(get(p, p->send, sizeof counts));
    memcpy(counts, p->host, sizeof counts);
    for (int i = 0; i < N_SMALL; i++) TEST_CHECK(counts[i] == i * (int64_t)(1 + 1024 + 1048576));
    return BL_OK;
}

typedef struct gate {
    atomic_bool is_open, was_late;
} gate;

static bl_status wait_for_gate(bl_stream *stream, const void *args)
{
    enum { PATIENCE = 10000 }; /* ms */
    gate *g = *(gate *const *)args;
    int ms = 0;

    (void)stream;
    while (!atomic_load(&g->is_open) && ms++ < PATIENCE) usleep(1000);
    atomic_store(&g->was_late, ms >= PATIENCE);
    return BL_OK;
}

/* A group of one: its values, and the host does not wait for the stream. */
static bl_status sums_alone(test_rank *self, place *p)
{
    static gate gates[N_RANKS];
    gate *g = &gates[self->rank];
    const char *mode = getenv("BALLAST_EMULATED");
    bl_comm *alone;

    /* There a thread that queues a task waits for it in any case. */
    if (mode && strcmp(mode, "strict") == 0) atomic_store(&g->is_open, true);
    BL_TRY(bl_comm_split(p->comm, self->rank, &alone));
    for (int64_t i = 0; i < N; i++) p->host[i] = test_value(self->rank, i, 7);
    bl_status st = bl_stream_call(p->stream, wait_for_gate, &g, sizeof g);
    if (st == BL_OK) st = bl_stream_copy(p->stream, p->send, p->host, N * sizeof(float));
    if (st == BL_OK) st = bl_comm_reduce_scatter_f32(alone, p->stream, p->send, p->recv, N);
    if (st == BL_OK) st = bl_comm_all_reduce_f32(alone, p->stream, p->send, N);
    atomic_store(&g->is_open, true);
    bl_status ran = bl_stream_synchronize(p->stream);
    bl_comm_destroy(alone);
    BL_TRY(st);
    BL_TRY(ran);
    TEST_CHECK(!atomic_load(&g->was_late));
    float *const results[] = {p->recv, p->send};
    for (int k = 0; k < 2; k++) {
        memset(p->host, 0, N * sizeof(float));
        BL_TRY(get(p, results[k], N * sizeof(float)));
        for (int64_t i = 0; i < N; i++) TEST_CHECK(p->host[i] == test_value(self->rank, i, 7));
    }
    return BL_OK;
}

/* Units of a base, sharded: each rank loads its third. */
static bl_status rings(test_rank *self, place *p)
{
    enum { N_UNITS = 6, SHARD_FLOATS = 2048 };
    bl_gather_unit units[N_UNITS] = {{.n_items = 0}};
    bl_gather_ring *ring;
    bl_stream *gathers;
    const void *at;

    for (int64_t i = 0; i < N_UNITS * SHARD_FLOATS; i++) p->host[i] = test_value(self->rank, i, 11);
    BL_TRY(bl_stream_copy(p->stream, p->send, p->host, N_UNITS * SHARD_FLOATS * sizeof(float)));
    BL_TRY(bl_stream_synchronize(p->stream));
    for (int u = 0; u < N_UNITS; u++) {
        units[u].n_items = 1;
        units[u].item[0].shard = p->send + u * SHARD_FLOATS;
        units[u].item[0].shard_bytes = SHARD_FLOATS * sizeof(float);
    }
    BL_TRY(bl_stream_create(p->device, "gathers", &gathers));
    bl_status st = bl_gather_ring_create(
        &(bl_gather_ring_options){
            .device = p->device, .comm = p->comm, .stream = gathers, .depth = 2},
        N_UNITS, units, &ring);
    for (int u = 0; u < N_UNITS && st == BL_OK; u++) {
        if (u + 1 < N_UNITS) st = bl_gather_ring_prefetch(ring, u + 1);
        if (st == BL_OK) st = bl_gather_ring_acquire(ring, u, 0, p->stream, &at);
        if (st == BL_OK)
            st = bl_stream_copy(p->stream, p->recv + u * N_RANKS * SHARD_FLOATS, at,
                                N_RANKS * SHARD_FLOATS * sizeof(float));
        if (st == BL_OK) st = bl_gather_ring_release(ring, u, p->stream);
    }
    if (st == BL_OK) st = get(p, p->recv, N_UNITS * N_RANKS * SHARD_FLOATS * sizeof(float));
    bl_gather_ring_destroy(ring);
    bl_stream_destroy(gathers);
    BL_TRY(st);
    for (int64_t i = 0; i < N_UNITS * N_RANKS * SHARD_FLOATS; i++) {
        int64_t unit = i / (N_RANKS * SHARD_FLOATS), rank = i / SHARD_FLOATS % N_RANKS;
        TEST_CHECK(p->host[i] == test_value((int)rank, unit * SHARD_FLOATS + i % SHARD_FLOATS, 11));
    }
    return BL_OK;
}

typedef bl_status (*place_fn)(test_rank *self, place *p);

static bl_status at_place(test_rank *self)
{
    place p;
    bl_status st = open_place(self, &p);
    if (st == BL_OK) st = (*(place_fn *)self->arg)(self, &p);
    close_place(&p);
    return st;
}

static void run(place_fn fn)
{
    bl_status st = test_ranks_run(N_RANKS, 1, 20, at_place, &fn, NULL);
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static void test_gathers_and_broadcasts(void **state)
{
    (void)state;
    run(gathers_and_broadcasts);
}

static void test_sums(void **state)
{
    (void)state;
    run(sums);
}

static void test_sums_alone(void **state)
{
    (void)state;
    run(sums_alone);
}

static void test_gather_rings(void **state)
{
    (void)state;
    run(rings);
}

int main(void)
{
    bl_device *device;
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return 77;
    }
    bl_device_destroy(device);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gathers_and_broadcasts),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_sums_alone),
        cmocka_unit_test(test_gather_rings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
