/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives of GPUs in processes. Sums: every rank sends every other its part of a piece, the
 * parts of all ranks arrive side by side in the scratch, and a kernel adds them up in rank order. A
 * piece's parts fit into the scratch; the stream orders pieces and calls, so the scratch is free
 * again when its turn comes. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "comm/nccl/internal.h"
#include "comm/nccl/sum_cuda.h"
#include "comm/sum_internal.h"
#include "device/cuda/stream.h"

#define CHECK(c, call)                                                                             \
    comm_nccl_check(&(c)->job->library, (int)(c)->job->library.call, #call, (c)->name)

/* Between all ranks at once: each sends every other `to`'s bytes and receives `from`'s. */
typedef struct exchange {
    const comm_parts *p;
    unsigned char
        *scratch; /* parts of the own piece arrive here; NULL: the others' parts in their places */
    size_t part_bytes;
} exchange;

static bl_status queue_peer(comm_nccl *c, const exchange *x, int i, void *stream)
{
    int rank = c->base.rank, size = c->base.size;
    int to = (rank + i) % size, from = (rank + size - i) % size;
    int sent = x->scratch ? to : rank, received = x->scratch ? rank : from;
    unsigned char *at =
        x->scratch ? x->scratch + (size_t)from * x->part_bytes : comm_part_of(x->p, from);

    if (comm_part_bytes(x->p, sent) > 0)
        BL_TRY(CHECK(c, ncclSend(comm_part_of(x->p, sent), comm_part_bytes(x->p, sent), ncclUint8,
                                 to, c->nccl, stream)));
    if (comm_part_bytes(x->p, received) > 0)
        BL_TRY(CHECK(
            c, ncclRecv(at, comm_part_bytes(x->p, received), ncclUint8, from, c->nccl, stream)));
    return BL_OK;
}

/* A group is closed also after a failure: it is the thread's. */
static bl_status queue_exchange(comm_nccl *c, const exchange *x, bl_stream *stream)
{
    void *handle = bl_cuda_stream_handle(stream);
    bl_status st = BL_OK;
    bl_error error;

    BL_TRY(CHECK(c, ncclGroupStart()));
    for (int i = 1; i < c->base.size && st == BL_OK; i++) st = queue_peer(c, x, i, handle);
    bl_error_save(&error, st);
    bl_status end = CHECK(c, ncclGroupEnd());
    return st == BL_OK ? end : bl_error_restore(&error);
}

/* The own part of a piece, summed over all ranks; of an all-reduce then the others' sums. */
static bl_status reduce_piece(comm_nccl *c, bl_stream *stream, const bl_comm_task *t,
                              const comm_parts *p)
{
    int rank = c->base.rank;
    exchange to_owners = {.p = p, .scratch = c->scratch, .part_bytes = c->part_bytes};
    comm_sum_args sum = {.element = (bl_comm_element)t->call.detail,
                         .rank = rank,
                         .n_ranks = c->base.size,
                         .own = comm_part_of(p, rank),
                         .parts = c->scratch,
                         .stride_bytes = c->part_bytes,
                         .to = comm_part_target(t, p, rank),
                         .n = comm_part_length(p, rank)};

    BL_TRY(queue_exchange(c, &to_owners, stream));
    BL_TRY(comm_cuda_sum(stream, &sum));
    if (t->call.kind != BL_COMM_ALL_REDUCE) return BL_OK;
    return queue_exchange(c, &(exchange){.p = p}, stream);
}

static bl_status reduce(comm_nccl *c, bl_stream *stream, const bl_comm_task *t)
{
    comm_parts p;

    for (int64_t first = 0; comm_parts_next(t, c->part_bytes, &first, &p);)
        BL_TRY(reduce_piece(c, stream, t, &p));
    return BL_OK;
}

static bl_status all_gather(comm_nccl *c, bl_stream *stream, const bl_comm_task *t)
{
    return CHECK(c, ncclAllGather(t->send, t->recv, t->call.bytes, ncclUint8, c->nccl,
                                  bl_cuda_stream_handle(stream)));
}

static bl_status broadcast(comm_nccl *c, bl_stream *stream, const bl_comm_task *t)
{
    return CHECK(c, ncclBroadcast(t->send, t->recv, t->call.bytes, ncclUint8, t->call.detail,
                                  c->nccl, bl_cuda_stream_handle(stream)));
}

/* ---- small transfers go over the host ---- */

static bl_status copy_small(comm_nccl *c, bl_stream *stream, const bl_comm_task *t, bool is_back)
{
    if (t->call.kind == BL_COMM_BARRIER) return BL_OK;
    return bl_stream_copy(stream, is_back ? t->recv : c->staging, is_back ? c->staging : t->send,
                          t->call.bytes);
}

/* The host's stream waits for `stream`, which then waits for it. The staging memory is free:
 * `stream` has waited for its last use. */
static bl_status run_on_host(comm_nccl *c, bl_stream *stream, const bl_comm_task *t)
{
    bl_stream *host_stream = c->job->host_stream;
    bl_comm_task on_host = *t;

    on_host.comm = c->host;
    on_host.send = on_host.recv = c->staging;
    BL_TRY(copy_small(c, stream, t, false));
    BL_TRY(bl_event_record(c->down, stream));
    BL_TRY(bl_stream_wait(host_stream, c->down));
    BL_TRY(c->host->backend->run(host_stream, &on_host));
    BL_TRY(bl_event_record(c->up, host_stream));
    BL_TRY(bl_stream_wait(stream, c->up));
    return copy_small(c, stream, t, true);
}

/* ---- */

/* A group of one. A sum is 0 + x_0, which differs from a copy where x_0 is -0. */
static bl_status run_alone(bl_stream *stream, const bl_comm_task *t)
{
    comm_sum_args sum = {.element = (bl_comm_element)t->call.detail,
                         .n_ranks = 1,
                         .own = t->send,
                         .to = t->recv,
                         .n = t->n};

    switch (t->call.kind) {
    case BL_COMM_ALL_GATHER:
        return t->send == t->recv ? BL_OK : bl_stream_copy(stream, t->recv, t->send, t->call.bytes);
    case BL_COMM_REDUCE_SCATTER:
    case BL_COMM_ALL_REDUCE:
        return comm_cuda_sum(stream, &sum);
    default:
        return BL_OK;
    }
}

bl_status comm_nccl_run(bl_stream *stream, const bl_comm_task *t)
{
    static const struct {
        const char *name;
        bl_status (*launch)(comm_nccl *c, bl_stream *stream, const bl_comm_task *t);
    } kinds[] = {
        [BL_COMM_ALL_GATHER] = {"all_gather", all_gather},
        [BL_COMM_REDUCE_SCATTER] = {"reduce_scatter", reduce},
        [BL_COMM_ALL_REDUCE] = {"all_reduce", reduce},
        [BL_COMM_BROADCAST] = {"broadcast", broadcast},
    };
    comm_nccl *c = (comm_nccl *)t->comm;
    bl_comm_kind kind = t->call.kind;

    if (c->base.size == 1) return run_alone(stream, t);
    BL_TRY(comm_nccl_compare(c, &t->call));
    if (kind == BL_COMM_BARRIER ||
        (kind == BL_COMM_ALL_REDUCE && t->call.bytes <= BL_NCCL_SMALL_BYTES))
        return run_on_host(c, stream, t);
    if (t->call.bytes == 0 || !comm_nccl_begin(c, kinds[kind].name)) return BL_OK;
    BL_TRY(comm_nccl_end(c, kinds[kind].launch(c, stream, t)));
    return comm_nccl_watch_launch(c, stream, &t->call);
}
