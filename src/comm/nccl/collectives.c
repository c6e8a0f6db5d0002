/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives of GPUs in processes. Sums (comm/blocks_internal.h): the ranks of a block send
 * each other the values for their owners. A kernel adds the received values in the scratch in rank
 * order. Then the same between blocks. The parts of a piece fit into the scratch. The stream orders
 * pieces and calls, so each piece may overwrite the scratch of the piece before it. Gathers by
 * hosts take the paths of a sum in reverse, with the ranks of a host as a block. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "comm/nccl/internal.h"
#include "comm/nccl/sum_cuda.h"
#include "comm/sum_internal.h"
#include "device/cuda/stream.h"

#define CHECK(c, call)                                                                             \
    comm_nccl_check(&(c)->job->library, (int)(c)->job->library.call, #call, (c)->name)

/* ---- the scratch: [member of the block][turn], with the block's sums in the row of the rank
 * itself, and [block] ---- */

static int own_block(const comm_nccl *c)
{
    return comm_block_of(&c->sum_blocks, c->base.rank);
}

static unsigned char *scratch_of(const comm_nccl *c, int member, int turn)
{
    int n_turns = comm_block_turns(&c->sum_blocks, own_block(c));
    int place = member - comm_block_first(&c->sum_blocks, own_block(c));
    return c->scratch + (size_t)(place * n_turns + turn) * c->part_bytes;
}

static unsigned char *scratch_of_block(const comm_nccl *c, int block)
{
    int n_rows = comm_block_length(&c->sum_blocks, own_block(c));
    return scratch_of(c, comm_block_first(&c->sum_blocks, own_block(c)) + n_rows, block);
}

/* ---- exchanges: sends and receives of this rank ---- */

static bl_status queue_send(comm_nccl *c, const void *from, size_t n_bytes, int peer, void *stream)
{
    return n_bytes > 0 ? CHECK(c, ncclSend(from, n_bytes, ncclUint8, peer, c->nccl, stream))
                       : BL_OK;
}

static bl_status queue_receive(comm_nccl *c, void *to, size_t n_bytes, int peer, void *stream)
{
    return n_bytes > 0 ? CHECK(c, ncclRecv(to, n_bytes, ncclUint8, peer, c->nccl, stream)) : BL_OK;
}

/* Between the members of a block: to the i-th member after this rank, from the i-th before it. */
static bl_status queue_members(comm_nccl *c, const comm_parts *p, int i, void *stream)
{
    const comm_blocks *b = &c->sum_blocks;
    int rank = c->base.rank, first = comm_block_first(b, own_block(c)),
        n = comm_block_length(b, own_block(c));
    int to = first + (rank - first + i) % n, from = first + (rank - first + n - i) % n;

    for (int turn = 0; turn < comm_block_turns(b, own_block(c)); turn++) {
        int given = comm_block_owner(b, to, turn), own = comm_block_owner(b, rank, turn);
        if (given >= 0)
            BL_TRY(queue_send(c, comm_part_of(p, given), comm_part_bytes(p, given), to, stream));
        if (own >= 0)
            BL_TRY(
                queue_receive(c, scratch_of(c, from, turn), comm_part_bytes(p, own), from, stream));
    }
    return BL_OK;
}

static bl_status queue_within_block(comm_nccl *c, const comm_parts *p, void *stream)
{
    for (int i = 1; i < comm_block_length(&c->sum_blocks, own_block(c)); i++)
        BL_TRY(queue_members(c, p, i, stream));
    return BL_OK;
}

static bl_status queue_between_blocks(comm_nccl *c, const comm_parts *p, void *stream)
{
    const comm_blocks *b = &c->sum_blocks;
    int rank = c->base.rank;

    for (int turn = 0; turn < comm_block_turns(b, own_block(c)); turn++) {
        int owner = comm_block_owner(b, rank, turn);
        if (owner >= 0 && owner != rank)
            BL_TRY(
                queue_send(c, scratch_of(c, rank, turn), comm_part_bytes(p, owner), owner, stream));
    }
    for (int block = 0; block < b->n; block++)
        if (block != own_block(c))
            BL_TRY(queue_receive(c, scratch_of_block(c, block), comm_part_bytes(p, rank),
                                 comm_block_helper(b, block, rank), stream));
    return BL_OK;
}

/* ---- parts to all ranks: from every owner to its helpers, and within their blocks ---- */

static bl_status queue_back_between(comm_nccl *c, const comm_blocks *b, const comm_parts *p,
                                    void *stream)
{
    int rank = c->base.rank, own = comm_block_of(b, rank);

    for (int i = 1; i < b->n; i++)
        BL_TRY(queue_send(c, comm_part_of(p, rank), comm_part_bytes(p, rank),
                          comm_block_helper(b, (own + i) % b->n, rank), stream));
    for (int turn = 0; turn < comm_block_turns(b, own); turn++) {
        int owner = comm_block_owner(b, rank, turn);
        if (owner >= 0 && owner != rank)
            BL_TRY(
                queue_receive(c, comm_part_of(p, owner), comm_part_bytes(p, owner), owner, stream));
    }
    return BL_OK;
}

static bl_status queue_back_members(comm_nccl *c, const comm_blocks *b, const comm_parts *p, int i,
                                    void *stream)
{
    int rank = c->base.rank, block = comm_block_of(b, rank), first = comm_block_first(b, block),
        n = comm_block_length(b, block);
    int to = first + (rank - first + i) % n, from = first + (rank - first + n - i) % n;

    for (int turn = 0; turn < comm_block_turns(b, block); turn++) {
        int own = comm_block_owner(b, rank, turn), theirs = comm_block_owner(b, from, turn);
        if (own >= 0)
            BL_TRY(queue_send(c, comm_part_of(p, own), comm_part_bytes(p, own), to, stream));
        if (theirs >= 0)
            BL_TRY(queue_receive(c, comm_part_of(p, theirs), comm_part_bytes(p, theirs), from,
                                 stream));
    }
    return BL_OK;
}

static bl_status queue_back_within(comm_nccl *c, const comm_blocks *b, const comm_parts *p,
                                   void *stream)
{
    int n = comm_block_length(b, comm_block_of(b, c->base.rank));

    for (int i = 1; i < n; i++) BL_TRY(queue_back_members(c, b, p, i, stream));
    return BL_OK;
}

/* ---- a group of sends and receives, which run at once ---- */

typedef bl_status (*queue_fn)(comm_nccl *c, const comm_parts *p, void *stream);

static bl_status queue_sums_between(comm_nccl *c, const comm_parts *p, void *stream)
{
    return queue_back_between(c, &c->sum_blocks, p, stream);
}

static bl_status queue_sums_within(comm_nccl *c, const comm_parts *p, void *stream)
{
    return queue_back_within(c, &c->sum_blocks, p, stream);
}

/* Sends piece p[1] between hosts and the previous piece, p[0], within them. A piece without
 * elements is skipped. */
static bl_status queue_pieces(comm_nccl *c, const comm_parts *p, void *stream)
{
    if (p[1].n_part > 0) BL_TRY(queue_back_between(c, &c->hosts, &p[1], stream));
    return p[0].n_part > 0 ? queue_back_within(c, &c->hosts, &p[0], stream) : BL_OK;
}

/* A group is closed also after a failure: it is the thread's. */
static bl_status exchange(comm_nccl *c, queue_fn queue, const comm_parts *p, bl_stream *stream)
{
    bl_error error;

    BL_TRY(CHECK(c, ncclGroupStart()));
    bl_status st = queue(c, p, bl_cuda_stream_handle(stream));
    bl_error_save(&error, st);
    bl_status end = CHECK(c, ncclGroupEnd());
    return st == BL_OK ? end : bl_error_restore(&error);
}

/* ---- sums ---- */

/* Into the rank's row of the scratch; with a single block into the result. */
static bl_status sum_within_block(comm_nccl *c, bl_stream *stream, const bl_comm_task *t,
                                  const comm_parts *p)
{
    const comm_blocks *b = &c->sum_blocks;
    int rank = c->base.rank, first = comm_block_first(b, own_block(c)),
        n_turns = comm_block_turns(b, own_block(c));

    for (int turn = 0; turn < n_turns; turn++) {
        int owner = comm_block_owner(b, rank, turn);
        if (owner < 0) continue;
        comm_sum_args sum = {.element = (bl_comm_element)t->call.detail,
                             .rank = rank - first,
                             .n_ranks = comm_block_length(b, own_block(c)),
                             .own = comm_part_of(p, owner),
                             .parts = scratch_of(c, first, turn),
                             .stride_bytes = (size_t)n_turns * c->part_bytes,
                             .to = b->n == 1 ? comm_part_target(t, p, rank)
                                             : scratch_of(c, rank, turn),
                             .n = comm_part_length(p, owner)};
        BL_TRY(comm_cuda_sum(stream, &sum));
    }
    return BL_OK;
}

static bl_status sum_between_blocks(comm_nccl *c, bl_stream *stream, const bl_comm_task *t,
                                    const comm_parts *p)
{
    int rank = c->base.rank;
    comm_sum_args sum = {.element = (bl_comm_element)t->call.detail,
                         .rank = own_block(c),
                         .n_ranks = c->sum_blocks.n,
                         .own = scratch_of(c, rank, comm_block_own_turn(&c->sum_blocks, rank)),
                         .parts = scratch_of_block(c, 0),
                         .stride_bytes = c->part_bytes,
                         .to = comm_part_target(t, p, rank),
                         .n = comm_part_length(p, rank)};
    return comm_cuda_sum(stream, &sum);
}

/* Sums the rank's part of a piece over all ranks; in an all-reduce also distributes the sums. */
static bl_status reduce_piece(comm_nccl *c, bl_stream *stream, const bl_comm_task *t,
                              const comm_parts *p)
{
    if (c->sum_blocks.per_block > 1) BL_TRY(exchange(c, queue_within_block, p, stream));
    BL_TRY(sum_within_block(c, stream, t, p));
    if (c->sum_blocks.n > 1) {
        BL_TRY(exchange(c, queue_between_blocks, p, stream));
        BL_TRY(sum_between_blocks(c, stream, t, p));
    }
    if (t->call.kind != BL_COMM_ALL_REDUCE) return BL_OK;
    if (c->sum_blocks.n > 1) BL_TRY(exchange(c, queue_sums_between, p, stream));
    return c->sum_blocks.per_block > 1 ? exchange(c, queue_sums_within, p, stream) : BL_OK;
}

static bl_status reduce(comm_nccl *c, bl_stream *stream, const bl_comm_task *t)
{
    comm_parts p;

    for (int64_t first = 0; comm_parts_next(t, c->part_bytes, &first, &p);)
        BL_TRY(reduce_piece(c, stream, t, &p));
    return BL_OK;
}

/* Piece k of each rank's part; no elements if k is outside of 0..n - 1. */
static comm_parts gather_piece(const bl_comm_task *t, int k, int n)
{
    int64_t bytes = (int64_t)t->call.bytes, begin = bytes * k / n, end = bytes * (k + 1) / n;

    return (comm_parts){.values = t->recv,
                        .first = begin,
                        .stride = bytes,
                        .n_part = k < 0 || k >= n ? 0 : end - begin,
                        .end = bytes * t->comm->size,
                        .unit_bytes = 1};
}

/* Each part enters each other host once. */
static bl_status all_gather_by_hosts(comm_nccl *c, bl_stream *stream, const bl_comm_task *t)
{
    int n = comm_gather_pieces((int64_t)t->call.bytes);
    unsigned char *own = (unsigned char *)t->recv + (size_t)c->base.rank * t->call.bytes;

    if (t->send != own) BL_TRY(bl_stream_copy(stream, own, t->send, t->call.bytes));
    for (int k = 0; k <= n; k++) {
        comm_parts pieces[] = {gather_piece(t, k - 1, n), gather_piece(t, k, n)};
        BL_TRY(exchange(c, queue_pieces, pieces, stream));
    }
    return BL_OK;
}

static bl_status all_gather(comm_nccl *c, bl_stream *stream, const bl_comm_task *t)
{
    if (c->hosts.n > 1) return all_gather_by_hosts(c, stream, t);
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
