/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- gathers, broadcasts and sums of ranks of one process whose buffers are on GPUs.
 * Between meet and the last part every rank enters the same number of barriers, even after a
 * failure: the others wait for it. */
#include "comm/local/device.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/sum_internal.h"

enum { PIECE_BYTES = 1 << 20 };

struct comm_local_device {
    bl_device *device;
    bl_event *ready, *done; /* this rank's memory may be read; this rank has read the others' */
    unsigned char *piece;   /* of what this rank adds to a sum, then of the sum */
    unsigned char *sum;
};

void comm_local_device_destroy(comm_local_device *device)
{
    if (!device) return;
    bl_event_destroy(device->ready);
    bl_event_destroy(device->done);
    bl_device_free(device->device, BL_SPACE_HOST, device->piece);
    bl_device_free(device->device, BL_SPACE_HOST, device->sum);
    free(device);
}

static bl_status sit_down(comm_local_seat *seat, bl_stream *stream)
{
    if (seat->device) return BL_OK;
    comm_local_device *self = calloc(1, sizeof *self);
    if (!self) return BL_FAIL(BL_ENOMEM, "rank %d of a communicator", seat->rank);
    self->device = bl_stream_device(stream);
    bl_status st = bl_event_create(self->device, &self->ready);
    if (st == BL_OK) st = bl_event_create(self->device, &self->done);
    if (st == BL_OK)
        st = bl_device_alloc(self->device, BL_SPACE_HOST, PIECE_BYTES, "a communicator's sums",
                             (void **)&self->piece);
    if (st == BL_OK)
        st = bl_device_alloc(self->device, BL_SPACE_HOST, PIECE_BYTES, "a communicator's sums",
                             (void **)&self->sum);
    if (st == BL_OK)
        seat->device = self;
    else
        comm_local_device_destroy(self);
    return st;
}

static bl_status meet(comm_local_seat *seat, bl_stream *stream, const bl_comm_task *t)
{
    BL_TRY(sit_down(seat, stream));
    comm_local_call call = {.what = t->call,
                            .send = t->send,
                            .ready = seat->device->ready,
                            .done = seat->device->done,
                            .piece = seat->device->piece};
    BL_TRY(bl_event_record(call.ready, stream));
    return comm_local_meet(seat->meeting, seat->rank, &call);
}

/* Orders later writes after the peers' reads. */
static bl_status leave(comm_local_seat *seat, bl_stream *stream, bl_status st)
{
    if (st == BL_OK) st = bl_event_record(seat->device->done, stream);
    comm_local_part(seat->meeting, seat->rank);
    for (int i = 0; i < seat->size && st == BL_OK; i++)
        if (i != seat->rank)
            st = bl_stream_wait(stream, comm_local_call_of(seat->meeting, i)->done);
    comm_local_part(seat->meeting, seat->rank);
    return st;
}

static bl_status copy_from(comm_local_seat *seat, bl_stream *stream, int peer, void *to,
                           size_t bytes)
{
    const comm_local_call *theirs = comm_local_call_of(seat->meeting, peer);
    if (peer != seat->rank) BL_TRY(bl_stream_wait(stream, theirs->ready));
    return bytes > 0 && to != theirs->send ? bl_stream_copy(stream, to, theirs->send, bytes)
                                           : BL_OK;
}

static bl_status all_gather(comm_local_seat *seat, bl_stream *stream, const bl_comm_task *t)
{
    bl_status st = BL_OK;

    BL_TRY(meet(seat, stream, t));
    for (int i = 0; i < seat->size && st == BL_OK;
         i++) { /* its own first, so that ranks read from different peers */
        int peer = (seat->rank + i) % seat->size;
        void *to = t->call.bytes > 0 ? (char *)t->recv + (size_t)peer * t->call.bytes : NULL;
        st = copy_from(seat, stream, peer, to, t->call.bytes);
    }
    return leave(seat, stream, st);
}

static bl_status broadcast(comm_local_seat *seat, bl_stream *stream, const bl_comm_task *t)
{
    bl_status st = BL_OK;

    BL_TRY(meet(seat, stream, t));
    if (seat->rank != t->call.detail)
        st = copy_from(seat, stream, t->call.detail, t->recv, t->call.bytes);
    return leave(seat, stream, st);
}

/* Sums `bytes` over the ranks, from each rank's `from` into self->sum on every rank. Calls
 * comm_local_part twice. */
static bl_status sum_piece(comm_local_seat *seat, bl_stream *stream, bl_comm_element element,
                           const void *from, size_t bytes, bl_status st)
{
    comm_local_device *self = seat->device;
    comm_blocks blocks = comm_blocks_of(seat->size, seat->sum_block);

    if (st == BL_OK) st = bl_stream_copy(stream, self->piece, from, bytes);
    if (st == BL_OK) st = bl_stream_synchronize(stream);
    comm_local_part(seat->meeting, seat->rank);
    for (int i = 0; i < seat->size; i++)
        seat->pieces[i] = comm_local_call_of(seat->meeting, i)->piece;
    comm_sum_blocks(element, &blocks, seat->pieces, 0, self->sum,
                    (int64_t)(bytes / comm_sum_element_bytes(element)));
    comm_local_part(seat->meeting, seat->rank);
    return st;
}

static bl_status reduce_scatter(comm_local_seat *seat, bl_stream *stream, const bl_comm_task *t)
{
    int64_t n = t->n;
    float *recv = t->recv;
    const int64_t most = PIECE_BYTES / (int64_t)sizeof(float);
    bl_status st = BL_OK;

    BL_TRY(meet(seat, stream, t));
    if (seat->size == 1 && n > 0) /* nothing to add: the host need not wait for it */
        st = bl_stream_copy(stream, recv, t->send, (size_t)n * sizeof(float));
    for (int owner = 0; seat->size > 1 && owner < seat->size; owner++)
        for (int64_t first = 0; first < n; first += most) {
            size_t bytes = (size_t)bl_min_i64(most, n - first) * sizeof(float);
            st = sum_piece(seat, stream, BL_COMM_F32, (const float *)t->send + owner * n + first,
                           bytes, st);
            if (st != BL_OK || owner != seat->rank) continue;
            st = bl_stream_copy(stream, recv + first, seat->device->sum, bytes);
            if (st == BL_OK)
                st =
                    bl_stream_synchronize(stream); /* the next piece's sum goes to the same place */
        }
    return leave(seat, stream, st);
}

static bl_status all_reduce(comm_local_seat *seat, bl_stream *stream, const bl_comm_task *t)
{
    bl_comm_element element = (bl_comm_element)t->call.detail;
    size_t total = t->call.bytes;
    char *values = t->recv;
    bl_status st = BL_OK;

    BL_TRY(meet(seat, stream, t));
    for (size_t first = 0; seat->size > 1 && first < total; first += PIECE_BYTES) {
        size_t bytes = total - first < PIECE_BYTES ? total - first : PIECE_BYTES;
        st = sum_piece(seat, stream, element, values + first, bytes, st);
        if (st == BL_OK) st = bl_stream_copy(stream, values + first, seat->device->sum, bytes);
        if (st == BL_OK) st = bl_stream_synchronize(stream);
    }
    return leave(seat, stream, st);
}

bl_status comm_local_device_run(comm_local_seat *seat, bl_stream *stream, const bl_comm_task *task)
{
    static bl_status (*const by_kind[])(comm_local_seat * seat, bl_stream * stream,
                                        const bl_comm_task *t) = {
        [BL_COMM_ALL_GATHER] = all_gather, [BL_COMM_BARRIER] = all_gather, /* of no bytes */
        [BL_COMM_BROADCAST] = broadcast,   [BL_COMM_REDUCE_SCATTER] = reduce_scatter,
        [BL_COMM_ALL_REDUCE] = all_reduce,
    };
    return by_kind[task->call.kind](seat, stream, task);
}
