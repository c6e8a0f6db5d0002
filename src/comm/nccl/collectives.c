/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives of GPUs in processes. Sums: every rank sends every other its part of a piece, the parts of all ranks arrive side by
 * side in the scratch, and a kernel adds them up in rank order. A piece's parts fit into the scratch; the stream orders pieces and calls,
 * so the scratch is free again when its turn comes. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "comm/nccl/internal.h"
#include "comm/nccl/sum_cuda.h"
#include "comm/sum.h"
#include "device/cuda/stream.h"

#define CHECK(c, call)                                                                             \
    comm_nccl_check(&(c)->job->library, (int)(c)->job->library.call, #call, (c)->name)

/* One rank's view of a piece: rank p's part is n_of(p) elements at begin_of(p) of `send`. */
typedef struct piece {
    const unsigned char *send;
    int64_t first, stride, n_part, end; /* in elements; all parts end before `end` */
    size_t unit_bytes;
} piece;

static size_t bytes_of(const piece *p, int rank)
{
    int64_t begin = p->first + rank * p->stride;
    return (size_t)bl_max_i64(0, bl_min_i64(p->n_part, p->end - begin)) * p->unit_bytes;
}

static unsigned char *begin_of(const piece *p, int rank)
{
    int64_t begin = bl_min_i64(p->first + rank * p->stride, p->end);
    return (unsigned char *)p->send + (size_t)begin * p->unit_bytes;
}

/* Between all ranks at once: each sends every other `to`'s bytes and receives `from`'s. */
typedef struct exchange {
    const piece *p;
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
        x->scratch ? x->scratch + (size_t)from * x->part_bytes : begin_of(x->p, from);

    if (bytes_of(x->p, sent) > 0)
        BL_TRY(CHECK(c, ncclSend(begin_of(x->p, sent), bytes_of(x->p, sent), ncclUint8, to, c->nccl,
                                 stream)));
    if (bytes_of(x->p, received) > 0)
        BL_TRY(CHECK(c, ncclRecv(at, bytes_of(x->p, received), ncclUint8, from, c->nccl, stream)));
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

/* The own part of a piece, summed over all ranks, to `to`, which may be that part itself. */
static bl_status sum_piece(comm_nccl *c, bl_stream *stream, const piece *p, bl_comm_element element,
                           void *to)
{
    exchange x = {.p = p, .scratch = c->scratch, .part_bytes = c->part_bytes};
    comm_sum_args sum = {.element = element,
                         .rank = c->base.rank,
                         .n_ranks = c->base.size,
                         .own = begin_of(p, c->base.rank),
                         .parts = c->scratch,
                         .stride_bytes = c->part_bytes,
                         .to = to,
                         .n = (int64_t)(bytes_of(p, c->base.rank) / p->unit_bytes)};

    BL_TRY(queue_exchange(c, &x, stream));
    return comm_cuda_sum(stream, &sum);
}

/* Between comm_nccl_begin and the end of a collective. */
static bl_status end(comm_nccl *c, bl_stream *stream, const bl_comm_call *call, bl_status st)
{
    BL_TRY(comm_nccl_end(c, st));
    return comm_nccl_watch_launch(c, stream, call);
}

/* A group of one: 0 + x_0, which is no copy where x_0 is -0. */
static bl_status sum_alone(bl_stream *stream, bl_comm_element element, const void *from, void *to,
                           int64_t n)
{
    comm_sum_args sum = {.element = element, .n_ranks = 1, .own = from, .to = to, .n = n};
    return comm_cuda_sum(stream, &sum);
}

static bl_status scatter_pieces(comm_nccl *c, bl_stream *stream, const float *send, float *recv,
                                int64_t n)
{
    int64_t most = (int64_t)(c->part_bytes / sizeof *send);

    for (int64_t first = 0; first < n; first += most) {
        piece p = {.send = (const unsigned char *)send,
                   .first = first,
                   .stride = n,
                   .n_part = bl_min_i64(most, n - first),
                   .end = n * c->base.size,
                   .unit_bytes = sizeof *send};
        BL_TRY(sum_piece(c, stream, &p, BL_COMM_F32, recv + first));
    }
    return BL_OK;
}

bl_status comm_nccl_reduce_scatter_f32(bl_comm *comm, bl_stream *stream, const float *send,
                                       float *recv, int64_t n)
{
    comm_nccl *c = (comm_nccl *)comm;
    bl_comm_call call = {
        .kind = BL_COMM_REDUCE_SCATTER, .label = comm->label, .bytes = (size_t)n * sizeof *send};

    if (comm->size == 1) return sum_alone(stream, BL_COMM_F32, send, recv, n);
    BL_TRY(comm_nccl_compare(c, &call));
    if (n == 0 || !comm_nccl_begin(c, "reduce_scatter")) return BL_OK;
    return end(c, stream, &call, scatter_pieces(c, stream, send, recv, n));
}

static bl_status reduce_pieces(comm_nccl *c, bl_stream *stream, void *values, int64_t n,
                               bl_comm_element element)
{
    size_t unit_bytes = bl_sum_element_bytes(element);
    int64_t most = (int64_t)(c->part_bytes / unit_bytes) * c->base.size;

    for (int64_t first = 0; first < n; first += most) {
        int64_t n_piece = bl_min_i64(most, n - first);
        int64_t n_part = bl_ceil_div(n_piece, c->base.size);
        piece p = {.send = values,
                   .first = first,
                   .stride = n_part,
                   .n_part = n_part,
                   .end = first + n_piece,
                   .unit_bytes = unit_bytes};
        BL_TRY(sum_piece(c, stream, &p, element, begin_of(&p, c->base.rank)));
        BL_TRY(queue_exchange(c, &(exchange){.p = &p}, stream));
    }
    return BL_OK;
}

/* ---- what is small goes over the host ---- */

/* What comes behind on the host's stream runs when `stream` has come here. */
static bl_status go_down(comm_nccl *c, bl_stream *stream)
{
    c->host->label = c->base.label;
    BL_TRY(bl_event_record(c->down, stream));
    return bl_stream_wait(c->job->host_stream, c->down);
}

static bl_status come_up(comm_nccl *c, bl_stream *stream)
{
    BL_TRY(bl_event_record(c->up, c->job->host_stream));
    return bl_stream_wait(stream, c->up);
}

static bl_status reduce_on_host(comm_nccl *c, bl_comm_element element, int64_t n)
{
    switch (element) {
    case BL_COMM_F32:
        return bl_comm_all_reduce_f32(c->host, c->job->host_stream, c->staging, n);
    case BL_COMM_F64:
        return bl_comm_all_reduce_f64(c->host, c->job->host_stream, c->staging, n);
    default:
        return bl_comm_all_reduce_i64(c->host, c->job->host_stream, c->staging, n);
    }
}

/* The staging memory is free: `stream` has come up from its last use before it comes here. */
static bl_status reduce_small(comm_nccl *c, bl_stream *stream, void *values, int64_t n,
                              bl_comm_element element)
{
    size_t bytes = (size_t)n * bl_sum_element_bytes(element);

    BL_TRY(bl_stream_copy(stream, c->staging, values, bytes));
    BL_TRY(go_down(c, stream));
    BL_TRY(reduce_on_host(c, element, n));
    BL_TRY(come_up(c, stream));
    return bl_stream_copy(stream, values, c->staging, bytes);
}

bl_status comm_nccl_all_reduce(bl_comm *comm, bl_stream *stream, void *values, int64_t n,
                               bl_comm_element element)
{
    comm_nccl *c = (comm_nccl *)comm;
    bl_comm_call call = {.kind = BL_COMM_ALL_REDUCE,
                         .label = comm->label,
                         .detail = (int)element,
                         .bytes = (size_t)n * bl_sum_element_bytes(element)};

    if (comm->size == 1) return sum_alone(stream, element, values, values, n);
    BL_TRY(comm_nccl_compare(c, &call));
    if (call.bytes <= BL_NCCL_SMALL_BYTES) return reduce_small(c, stream, values, n, element);
    if (!comm_nccl_begin(c, "all_reduce")) return BL_OK;
    return end(c, stream, &call, reduce_pieces(c, stream, values, n, element));
}

bl_status comm_nccl_barrier(bl_comm *comm, bl_stream *stream)
{
    comm_nccl *c = (comm_nccl *)comm;
    bl_comm_call call = {.kind = BL_COMM_BARRIER, .label = comm->label};

    if (comm->size == 1) return BL_OK;
    BL_TRY(comm_nccl_compare(c, &call));
    BL_TRY(go_down(c, stream));
    BL_TRY(bl_comm_barrier(c->host, c->job->host_stream));
    return come_up(c, stream);
}

/* ---- what moves bytes ---- */

bl_status comm_nccl_all_gather(bl_comm *comm, bl_stream *stream, const void *send, void *recv,
                               size_t bytes)
{
    comm_nccl *c = (comm_nccl *)comm;
    bl_comm_call call = {.kind = BL_COMM_ALL_GATHER, .label = comm->label, .bytes = bytes};
    void *handle = bl_cuda_stream_handle(stream);

    if (comm->size == 1) return send == recv ? BL_OK : bl_stream_copy(stream, recv, send, bytes);
    BL_TRY(comm_nccl_compare(c, &call));
    if (bytes == 0 || !comm_nccl_begin(c, "all_gather")) return BL_OK;
    return end(c, stream, &call,
               CHECK(c, ncclAllGather(send, recv, bytes, ncclUint8, c->nccl, handle)));
}

bl_status comm_nccl_broadcast(bl_comm *comm, bl_stream *stream, void *buffer, size_t bytes,
                              int root)
{
    comm_nccl *c = (comm_nccl *)comm;
    bl_comm_call call = {
        .kind = BL_COMM_BROADCAST, .label = comm->label, .detail = root, .bytes = bytes};
    void *handle = bl_cuda_stream_handle(stream);

    if (comm->size == 1) return BL_OK;
    BL_TRY(comm_nccl_compare(c, &call));
    if (bytes == 0 || !comm_nccl_begin(c, "broadcast")) return BL_OK;
    return end(c, stream, &call,
               CHECK(c, ncclBroadcast(buffer, buffer, bytes, ncclUint8, root, c->nccl, handle)));
}
