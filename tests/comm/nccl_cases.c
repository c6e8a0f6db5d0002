/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_cases.c -- collectives over GPU memory: edge counts, negative zeros, splits, and rings of
 * layers. */
#include "nccl_cases.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "offload/gather_ring.h"

/* Bytes or elements: nothing, a few, about BL_NCCL_SMALL_BYTES of floats, and more.
 * LARGE floats are several pieces of a scratch that was not made for them. */
static const int64_t lengths[] = {0, 1, 7, 1000, 16384, 16385, 70001};
enum { LARGE = 5000003 };

/* ---- buffers ---- */

typedef struct buffer {
    bl_device *device;
    size_t bytes;
    void *host, *memory;
} buffer;

static bl_status buffer_open(nccl_self *self, size_t bytes, buffer *b)
{
    *b = (buffer){.device = self->device, .bytes = bytes};
    BL_TRY(bl_device_alloc(self->device, BL_SPACE_HOST, bytes, "host", &b->host));
    return bl_device_alloc(self->device, BL_SPACE_DEVICE, bytes, "device", &b->memory);
}

static void buffer_close(buffer *b)
{
    if (!b->device) return;
    bl_device_free(b->device, BL_SPACE_HOST, b->host);
    bl_device_free(b->device, BL_SPACE_DEVICE, b->memory);
}

static bl_status up(nccl_self *self, const buffer *b)
{
    return bl_stream_copy(self->stream, b->memory, b->host, b->bytes);
}

/* All of it, and waits. */
static bl_status down(nccl_self *self, const buffer *b)
{
    BL_TRY(bl_stream_copy(self->stream, b->host, b->memory, b->bytes));
    return bl_stream_synchronize(self->stream);
}

/* ---- values ---- */

static bl_status check_all_gather(nccl_self *self, bl_comm *comm, int64_t n, bool in_place)
{
    int rank = bl_comm_rank(comm), size = bl_comm_size(comm);
    buffer all = {0}, own = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)(n * size), &all));
    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)n, &own));
    unsigned char *bytes = all.host, *send = in_place ? bytes + rank * n : own.host;
    memset(bytes, 0xEE, all.bytes);
    for (int64_t i = 0; i < n; i++) send[i] = (unsigned char)(rank * 37 + i % 251);
    BL_TRY_GOTO(st, done, up(self, &all));
    BL_TRY_GOTO(st, done, up(self, &own));
    const char *from = in_place ? (char *)all.memory + rank * n : own.memory;
    BL_TRY_GOTO(st, done, bl_comm_all_gather(comm, self->stream, from, all.memory, (size_t)n));
    BL_TRY_GOTO(st, done, down(self, &all));
    for (int r = 0; r < size; r++)
        for (int64_t i = 0; i < n; i++)
            TEST_CHECK_GOTO(st, done, bytes[r * n + i] == (unsigned char)(r * 37 + i % 251));
done:
    buffer_close(&own);
    buffer_close(&all);
    return st;
}

/* Ranks per block of a sum, in all communicators of this rank. */
static int sum_block = BL_COMM_SUM_BLOCK;

static bl_status check_reduce_scatter(nccl_self *self, bl_comm *comm, int64_t n)
{
    int rank = bl_comm_rank(comm), size = bl_comm_size(comm);
    buffer send = {0}, recv = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)(n * size) * sizeof(float), &send));
    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)n * sizeof(float), &recv));
    float *x = send.host, *y = recv.host;
    for (int64_t i = 0; i < n * size; i++) x[i] = test_value(rank, i, 5);
    for (int64_t i = 0; i < n; i++) y[i] = 1e9f; /* overwritten, not added to */
    BL_TRY_GOTO(st, done, up(self, &send));
    BL_TRY_GOTO(st, done, up(self, &recv));
    BL_TRY_GOTO(st, done,
                bl_comm_reduce_scatter_f32(comm, self->stream, send.memory, recv.memory, n));
    BL_TRY_GOTO(st, done, down(self, &recv));
    BL_TRY_GOTO(st, done, down(self, &send));
    for (int64_t i = 0; i < n; i++) {
        float expected = test_sum(size, sum_block, rank * n + i, 5);
        TEST_CHECK_GOTO(st, done, memcmp(&y[i], &expected, sizeof expected) == 0);
    }
    for (int64_t i = 0; i < n * size; i++)
        TEST_CHECK_GOTO(st, done, x[i] == test_value(rank, i, 5));
done:
    buffer_close(&recv);
    buffer_close(&send);
    return st;
}

static bl_status check_all_reduce_f32(nccl_self *self, bl_comm *comm, int64_t n)
{
    int rank = bl_comm_rank(comm), size = bl_comm_size(comm);
    buffer b = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)n * sizeof(float), &b));
    float *x = b.host;
    for (int64_t i = 0; i < n; i++) x[i] = test_value(rank, i, 6);
    BL_TRY_GOTO(st, done, up(self, &b));
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_f32(comm, self->stream, b.memory, n));
    BL_TRY_GOTO(st, done, down(self, &b));
    for (int64_t i = 0; i < n; i++) {
        float expected = test_sum(size, sum_block, i, 6);
        TEST_CHECK_GOTO(st, done, memcmp(&x[i], &expected, sizeof expected) == 0);
    }
done:
    buffer_close(&b);
    return st;
}

static bl_status check_all_reduce_wide(nccl_self *self, bl_comm *comm, int64_t n)
{
    int rank = bl_comm_rank(comm), size = bl_comm_size(comm);
    buffer d = {0}, k = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)n * sizeof(double), &d));
    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)n * sizeof(int64_t), &k));
    double *x = d.host;
    int64_t *y = k.host;
    for (int64_t i = 0; i < n; i++) {
        x[i] = 1e-3 * (double)test_value(rank, i, 7);
        y[i] = i * 1000 + rank - (INT64_C(1) << 60);
    }
    BL_TRY_GOTO(st, done, up(self, &d));
    BL_TRY_GOTO(st, done, up(self, &k));
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_f64(comm, self->stream, d.memory, n));
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_i64(comm, self->stream, k.memory, n));
    BL_TRY_GOTO(st, done, down(self, &d));
    BL_TRY_GOTO(st, done, down(self, &k));
    for (int64_t i = 0; i < n; i++) {
        double expected = 0, of_block = 0;
        uint64_t sum = 0;
        for (int r = 0; r < size; r++) {
            of_block += 1e-3 * (double)test_value(r, i, 7);
            sum += (uint64_t)(i * 1000 + r - (INT64_C(1) << 60));
            if ((r + 1) % sum_block > 0 && r + 1 < size) continue;
            expected += of_block;
            of_block = 0;
        }
        TEST_CHECK_GOTO(st, done, memcmp(&x[i], &expected, sizeof expected) == 0);
        TEST_CHECK_GOTO(st, done, (uint64_t)y[i] == sum);
    }
done:
    buffer_close(&k);
    buffer_close(&d);
    return st;
}

static bl_status check_broadcast(nccl_self *self, bl_comm *comm, int64_t n)
{
    buffer b = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, buffer_open(self, (size_t)n, &b));
    unsigned char *bytes = b.host;
    for (int root = 0; root < bl_comm_size(comm); root++) {
        for (int64_t i = 0; i < n; i++) bytes[i] = (unsigned char)(bl_comm_rank(comm) * 37 + i);
        BL_TRY_GOTO(st, done, up(self, &b));
        BL_TRY_GOTO(st, done, bl_comm_broadcast(comm, self->stream, b.memory, (size_t)n, root));
        BL_TRY_GOTO(st, done, down(self, &b));
        for (int64_t i = 0; i < n; i++)
            TEST_CHECK_GOTO(st, done, bytes[i] == (unsigned char)(root * 37 + i));
    }
done:
    buffer_close(&b);
    return st;
}

static bl_status check_collectives(nccl_self *self, bl_comm *comm)
{
    for (size_t i = 0; i < BL_COUNT(lengths); i++) {
        BL_TRY(check_all_gather(self, comm, lengths[i], false));
        BL_TRY(check_all_gather(self, comm, lengths[i], true));
        BL_TRY(check_reduce_scatter(self, comm, lengths[i]));
        BL_TRY(check_all_reduce_f32(self, comm, lengths[i]));
        BL_TRY(check_all_reduce_wide(self, comm, lengths[i]));
        BL_TRY(check_broadcast(self, comm, lengths[i]));
    }
    return bl_comm_barrier(comm, self->stream);
}

static bl_status values(nccl_self *self)
{
    TEST_CHECK(bl_comm_rank(self->comm) == self->rank && bl_comm_size(self->comm) == self->n_ranks);
    return check_collectives(self, self->comm);
}

static bl_status large(nccl_self *self)
{
    BL_TRY(check_all_reduce_f32(self, self->comm, LARGE));
    BL_TRY(check_reduce_scatter(self, self->comm, LARGE / self->n_ranks));
    return check_all_gather(self, self->comm, LARGE, true);
}

static bl_status gather(nccl_self *self)
{
    BL_TRY(bl_comm_trust_order(self->comm));
    return check_all_gather(self, self->comm, NCCL_GATHERED_BYTES, true);
}

static bl_status sum(nccl_self *self)
{
    return check_reduce_scatter(self, self->comm, LARGE / self->n_ranks);
}

static bl_status check_sums(nccl_self *self, bl_comm *comm)
{
    for (size_t i = 0; i < BL_COUNT(lengths); i++) {
        BL_TRY(check_reduce_scatter(self, comm, lengths[i]));
        BL_TRY(check_all_reduce_f32(self, comm, lengths[i]));
        BL_TRY(check_all_reduce_wide(self, comm, lengths[i]));
    }
    return BL_OK;
}

/* The block is set for the first communicator; its split inherits the value. */
static bl_status sums_in_blocks(nccl_self *self)
{
    bl_comm *part = NULL;
    bl_status st = BL_OK;

    for (int block = 1; block <= 5 && st == BL_OK; block += block < 3 ? 1 : 2) {
        sum_block = block;
        BL_TRY(bl_comm_set_sum_block(self->comm, block));
        st = bl_comm_split(self->comm, 0, &part);
        if (st == BL_OK) st = check_sums(self, self->comm);
        if (st == BL_OK) st = check_sums(self, part);
        bl_comm_destroy(part);
        part = NULL;
    }
    if (st == BL_OK) st = check_reduce_scatter(self, self->comm, LARGE / self->n_ranks);
    return st;
}

/* One sum over two blocks. */
static bl_status one_sum(nccl_self *self)
{
    sum_block = 2;
    BL_TRY(bl_comm_set_sum_block(self->comm, sum_block));
    return check_reduce_scatter(self, self->comm, NCCL_ONE_SUM_FLOATS);
}

/* 0 + -0 is +0: the sum starts from zero, on every path and with one rank. */
static bl_status negative_zero(nccl_self *self)
{
    enum { SMALL = 4, MANY = 40000 };
    buffer b = {0}, r = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, buffer_open(self, MANY * sizeof(float) * (size_t)self->n_ranks, &b));
    BL_TRY_GOTO(st, done, buffer_open(self, MANY * sizeof(float), &r));
    float *x = b.host, *y = r.host;
    for (int pass = 0; pass < 3; pass++) {
        for (int64_t i = 0; i < (int64_t)MANY * self->n_ranks; i++) x[i] = -0.0f;
        BL_TRY_GOTO(st, done, up(self, &b));
        if (pass == 2)
            st = bl_comm_reduce_scatter_f32(self->comm, self->stream, b.memory, r.memory, MANY);
        else
            st = bl_comm_all_reduce_f32(self->comm, self->stream, b.memory, pass ? MANY : SMALL);
        if (st == BL_OK) st = down(self, pass == 2 ? &r : &b);
        if (st != BL_OK) goto done;
        for (int i = 0; i < (pass ? MANY : SMALL); i++)
            TEST_CHECK_GOTO(st, done, !__builtin_signbit((pass == 2 ? y : x)[i]));
    }
done:
    buffer_close(&r);
    buffer_close(&b);
    return st;
}

/* ---- groups ---- */

static bl_status split_values(nccl_self *self)
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
    BL_TRY_GOTO(st, done, bl_comm_trust_order(self->comm));
    BL_TRY_GOTO(st, done, check_collectives(self, parity));
    st = bl_stream_synchronize(self->stream);
done:
    bl_comm_destroy(alone);
    bl_comm_destroy(parity);
    return st;
}

/* ---- the gather ring beside reductions, as a layer's visit has them ---- */

enum { N_UNITS = 12, SHARD_FLOATS = 2048, N_SUMS = 20000 };

typedef struct visit {
    bl_comm *gathers;
    bl_stream *gather, *reduce;
    bl_event *made;
    bl_gather_ring *ring;
    buffer shards, all, sums;
} visit;

static bl_status pause_task(bl_stream *stream, const void *args)
{
    (void)stream;
    usleep(*(const unsigned *)args);
    return BL_OK;
}

/* Now and then up to 3 ms, at another place on each rank. */
static bl_status pause_at_random(bl_stream *stream, int rank, int64_t at, uint64_t seed)
{
    float x = test_value(rank, at, 1000 + seed);
    unsigned us = x > 0.4f ? (unsigned)((x - 0.4f) * 5000) : 0;
    return bl_stream_call(stream, pause_task, &us, sizeof us);
}

static bl_status visit_open(nccl_self *self, visit *v)
{
    bl_gather_unit units[N_UNITS] = {{.n_items = 0}};

    BL_TRY(bl_comm_split(self->comm, 0, &v->gathers));
    BL_TRY(bl_stream_create(self->device, "gather", &v->gather));
    BL_TRY(bl_stream_create(self->device, "reduce", &v->reduce));
    BL_TRY(bl_event_create(self->device, &v->made));
    BL_TRY(buffer_open(self, N_UNITS * SHARD_FLOATS * sizeof(float), &v->shards));
    BL_TRY(buffer_open(self, v->shards.bytes * (size_t)self->n_ranks, &v->all));
    BL_TRY(buffer_open(self, N_SUMS * sizeof(float), &v->sums));
    for (int i = 0; i < N_UNITS * SHARD_FLOATS; i++)
        ((float *)v->shards.host)[i] = test_value(self->rank, i, 11);
    for (int i = 0; i < N_SUMS; i++) ((float *)v->sums.host)[i] = test_value(self->rank, i, 12);
    BL_TRY(up(self, &v->shards));
    BL_TRY(up(self, &v->sums));
    BL_TRY(bl_stream_synchronize(self->stream));
    for (int u = 0; u < N_UNITS; u++) {
        units[u].n_items = 1;
        units[u].item[0].shard = (float *)v->shards.memory + u * SHARD_FLOATS;
        units[u].item[0].shard_bytes = SHARD_FLOATS * sizeof(float);
    }
    return bl_gather_ring_create(
        &(bl_gather_ring_options){
            .device = self->device, .comm = v->gathers, .stream = v->gather, .depth = 2},
        N_UNITS, units, &v->ring);
}

static bl_status visit_close(nccl_self *self, visit *v, bl_status st)
{
    bl_error error;

    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(self->comm, &error);
    (void)bl_stream_synchronize(self->stream);
    bl_stream_destroy(v->reduce);
    bl_stream_destroy(v->gather);
    bl_gather_ring_destroy(v->ring);
    bl_event_destroy(v->made);
    buffer_close(&v->sums);
    buffer_close(&v->all);
    buffer_close(&v->shards);
    bl_comm_destroy(v->gathers);
    return bl_error_restore(&error);
}

static bl_status visit_units(nccl_self *self, visit *v)
{
    size_t unit_bytes = (size_t)self->n_ranks * SHARD_FLOATS * sizeof(float);
    const void *at;

    for (int u = 0; u < N_UNITS; u++) {
        BL_TRY(pause_at_random(v->gather, self->rank, u, 0));
        if (u + 1 < N_UNITS) BL_TRY(bl_gather_ring_prefetch(v->ring, u + 1));
        BL_TRY(bl_gather_ring_acquire(v->ring, u, 0, self->stream, &at));
        BL_TRY(pause_at_random(self->stream, self->rank, u, 1));
        BL_TRY(bl_stream_copy(self->stream, (char *)v->all.memory + (size_t)u * unit_bytes, at,
                              unit_bytes));
        BL_TRY(bl_gather_ring_release(v->ring, u, self->stream));
        BL_TRY(bl_event_record(v->made, self->stream));
        BL_TRY(bl_stream_wait(v->reduce, v->made));
        if (u == 0) BL_TRY(bl_comm_all_reduce_f32(self->comm, v->reduce, v->sums.memory, N_SUMS));
        BL_TRY(bl_comm_all_reduce_f32(self->comm, v->reduce, v->sums.memory, 0));
    }
    BL_TRY(bl_stream_synchronize(v->reduce));
    BL_TRY(down(self, &v->sums));
    return down(self, &v->all);
}

static bl_status visit_layers(nccl_self *self)
{
    visit v = {.gathers = NULL};
    const float *all, *sums;

    bl_status st = visit_open(self, &v);
    if (st == BL_OK) st = visit_units(self, &v);
    if (st != BL_OK) return visit_close(self, &v, st);
    all = v.all.host;
    sums = v.sums.host;
    for (int64_t i = 0; st == BL_OK && i < (int64_t)N_UNITS * self->n_ranks * SHARD_FLOATS; i++) {
        int64_t unit = i / (self->n_ranks * SHARD_FLOATS), rank = i / SHARD_FLOATS % self->n_ranks;
        if (all[i] != test_value((int)rank, unit * SHARD_FLOATS + i % SHARD_FLOATS, 11))
            st = BL_FAIL(BL_EINTERNAL, "gathered float %lld differs", (long long)i);
    }
    for (int i = 0; st == BL_OK && i < N_SUMS; i++)
        if (sums[i] != test_sum(self->n_ranks, sum_block, i, 12))
            st = BL_FAIL(BL_EINTERNAL, "sum %d differs", i);
    return visit_close(self, &v, st);
}

/* ---- memory ---- */

static bl_status memory(nccl_self *self)
{
    enum { BYTES = 100000 };
    size_t before = bl_device_bytes(self->device);
    buffer own = {0};
    void *block, *zeros = NULL;

    BL_TRY(bl_comm_alloc(self->comm, self->device, BYTES, "slots", &block));
    TEST_CHECK(bl_device_bytes(self->device) == before + BYTES);
    bl_status st = buffer_open(self, BYTES, &own);
    if (st == BL_OK) st = bl_stream_copy(self->stream, own.host, block, BYTES);
    if (st == BL_OK) st = bl_stream_synchronize(self->stream);
    if (st == BL_OK && !(zeros = calloc(1, BYTES))) st = BL_FAIL(BL_ENOMEM, "zeros");
    if (st == BL_OK && memcmp(own.host, zeros, BYTES) != 0)
        st = BL_FAIL(BL_EINTERNAL, "new memory is not zero");
    free(zeros);
    size_t part = BYTES / NCCL_RANKS_MAX;
    if (st == BL_OK)
        st = bl_comm_all_gather(self->comm, self->stream, (char *)block + (size_t)self->rank * part,
                                block, part);
    if (st == BL_OK) st = bl_stream_synchronize(self->stream);
    buffer_close(&own);
    bl_comm_free(self->comm, self->device, block);
    BL_TRY(st);
    TEST_CHECK(bl_device_bytes(self->device) == before);
    return BL_OK;
}

static bl_status expect_lack(bl_status st, const char *text)
{
    bl_error error;

    bl_error_save(&error, st);
    if (st == BL_ENOMEM && strstr(error.text, text)) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "status %d, \"%.200s\", not the lack of \"%s\"", (int)st,
                   error.text, text);
}

/* Rank 1 fails before it comes to the common memory, then lacks memory for it, which the others
 * have: all ranks hear of it at once, and the communicator serves. */
static bl_status memory_lack(nccl_self *self)
{
    enum { PIECE = 4 << 20, MOST = 64 };
    void *piece[MOST], *block = NULL;
    int n = 0;

    bl_status own = self->rank == 1 ? BL_FAIL(BL_ENOMEM, "planted on rank 1") : BL_OK;
    BL_TRY(expect_lack(bl_comm_begin_alloc(self->comm, own), "planted on rank 1"));
    TEST_CHECK(bl_comm_begin_alloc(self->comm, BL_OK) == BL_OK);
    while (self->rank == 1 && n < MOST &&
           bl_device_alloc(self->device, BL_SPACE_DEVICE, PIECE, "a piece", &piece[n]) == BL_OK)
        n++;
    TEST_CHECK(n < MOST);
    bl_status st = expect_lack(
        bl_comm_alloc(self->comm, self->device, 2 * (size_t)PIECE, "slots", &block), "slots");
    for (int i = 0; i < n; i++) bl_device_free(self->device, BL_SPACE_DEVICE, piece[i]);
    BL_TRY(st);
    return memory(self);
}

const nccl_case nccl_cases[] = {
    {"values", values, 60, false, false, 0, 0},
    {"values_in_windows", values, 60, true, true, 0, 0},
    {"large", large, 120, true, false, 0, 0},
    {"gather", gather, 60, true, false, 0, 0},
    {"sum", sum, 60, true, false, 0, 0},
    {"sum_at_once", sum, 60, true, false, LARGE * sizeof(float), 0},
    {"blocks", sums_in_blocks, 60, true, false, 0, 0},
    {"one_sum", one_sum, 60, true, false, 0, 0},
    {"negative_zero", negative_zero, 60, true, false, 0, 0},
    {"split", split_values, 60, false, false, 0, 0},
    {"layers", visit_layers, 60, true, true, 0, 0},
    {"layers_compared", visit_layers, 60, false, false, 0, 0},
    {"memory", memory, 60, true, true, 0, 0},
    {"memory_plain", memory, 60, true, false, 0, 0},
    {"memory_lack", memory_lack, NCCL_DEADLINE_S, true, true, 0, 0},
    {"other_kind", nccl_fail_other_kind, 60, false, false, 0, 0},
    {"other_size", nccl_fail_other_size, 60, false, false, 0, 0},
    {"other_label", nccl_fail_other_label, 60, false, false, 0, 0},
    {"other_comm", nccl_fail_other_comm, 60, false, false, 0, 0},
    {"other_trust", nccl_fail_other_trust, 60, false, false, 0, 0},
    {"hang", nccl_fail_other_comm, NCCL_DEADLINE_S, true, false, 0, 0},
    {"away", nccl_fail_away, NCCL_DEADLINE_S, true, false, 0, 0},
    {"away_compared", nccl_fail_away, NCCL_DEADLINE_S, false, false, 0, 0},
    {"away_in_pair", nccl_fail_away_in_pair, NCCL_DEADLINE_S, false, false, 0, 0},
    {"own_failure", nccl_fail_own, 0, true, false, 0, 0}, /* no deadline would end it */
    {"own_failure_idle", nccl_fail_own_idle, 0, true, false, 0, 0},
    {"idle", nccl_fail_idle, NCCL_DEADLINE_S, true, false, 0, 0},
    {"rounds", nccl_rounds, NCCL_DEADLINE_S, true, true, 0, 0},
    {"rounds_late", nccl_rounds_late, NCCL_DEADLINE_S, true, true, 0, 0},
    {"rounds_of_two", nccl_rounds_of_two, NCCL_DEADLINE_S, true, true, 0, 0},
    {"away_first", nccl_fail_away, 600, false, false, 0, NCCL_DEADLINE_S},
    {"rounds_first", nccl_rounds, 60, true, true, 0, NCCL_DEADLINE_S},
    {"pause", nccl_pause, NCCL_DEADLINE_S, true, false, 0, 0},
    {"crowd_slow", nccl_crowd_slow, NCCL_DEADLINE_S, true, false, 0, 0},
    {"crowd_first", nccl_fail_crowd_first, NCCL_DEADLINE_S, true, false, 0, 0},
    {"crowd_last", nccl_fail_crowd_last, NCCL_DEADLINE_S, true, false, 0, 0},
    {NULL, NULL, 0, false, false, 0, 0},
};
