/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks in several processes. A collective first meets: every rank announces its call to every
 * other, so that all know which ranks are missing and whether they agree, and no rank sends data to
 * one that is not ready. Then the bytes move directly from each rank to each other.
 *
 * Reductions are made chunk by chunk with a scratch of some megabytes: an all-to-all and a sum
 * within each block of ranks, turn by turn, then the same between blocks
 * (comm/blocks_internal.h). */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/backend.h"
#include "comm/sum_internal.h"
#include "comm/wire.h"

enum { SCRATCH_BYTES = 4 << 20, MIN_CHUNK_BYTES = 64 << 10 };

/* What a rank says to every other when it arrives. */
typedef struct arrival {
    bl_comm_call call;
    int color, group; /* split: the color, and the number that the new group might get */
} arrival;

/* Where ranks meet: one for collectives, which run on streams, and one for splits, which run on the
 * rank's own thread. */
typedef struct crossing {
    bl_wire_channel *channel;
    arrival *arrivals;      /* [size] */
    bl_transfer *transfers; /* [2 size] */
    int n_transfers;
} crossing;

typedef struct wire_comm {
    bl_comm base;
    bl_wire *wire;
    bool owns_wire;
    int *job_ranks; /* [size] */
    crossing collectives, splits;
    comm_blocks blocks;
    size_t chunk_bytes;
    /* Parts of chunk_bytes: received from each member of the block (with a single block the rank's
     * own part holds the sum), the block's sum of each turn, received from each block. */
    unsigned char *scratch;
    const void **values; /* [size]: the terms of a sum */
} wire_comm;

static wire_comm *comm_of(const bl_comm_task *t)
{
    return (wire_comm *)t->comm;
}

/* ---- the steps that collectives are made of ---- */

static void give(crossing *x, int peer, const void *bytes, size_t n_bytes)
{
    if (n_bytes > 0)
        x->transfers[x->n_transfers++] = (bl_transfer){
            .peer = peer, .is_send = true, .bytes = (void *)bytes, .n_bytes = n_bytes};
}

static void take(crossing *x, int peer, void *bytes, size_t n_bytes)
{
    if (n_bytes > 0)
        x->transfers[x->n_transfers++] =
            (bl_transfer){.peer = peer, .bytes = bytes, .n_bytes = n_bytes};
}

static bl_status exchange(crossing *x, const bl_comm_call *call, bool is_meeting)
{
    int n = x->n_transfers;
    x->n_transfers = 0;
    return bl_wire_channel_exchange(x->channel, call, is_meeting, x->transfers, n);
}

/* Sends `own` to the others, receives theirs and compares. All ranks find a difference, and abort
 * the job. */
static bl_status meet(wire_comm *c, crossing *x, const arrival *own)
{
    int rank = c->base.rank, size = c->base.size;

    x->arrivals[rank] = *own;
    for (int i = 1; i < size; i++) {
        give(x, (rank + i) % size, &x->arrivals[rank], sizeof *own);
        take(x, (rank + size - i) % size, &x->arrivals[(rank + size - i) % size], sizeof *own);
    }
    BL_TRY(exchange(x, &own->call, true));
    for (int i = 1; i < size; i++) {
        bl_status st = bl_comm_verify_calls(c->job_ranks[0], &x->arrivals[0].call, c->job_ranks[i],
                                            &x->arrivals[i].call);
        if (st == BL_OK) continue;
        bl_error error;
        bl_error_save(&error, st);
        bl_wire_abort(c->wire, &error);
        return bl_error_restore(&error);
    }
    return BL_OK;
}

static bl_status meet_for(const bl_comm_task *t)
{
    arrival own = {.call = t->call};
    return meet(comm_of(t), &comm_of(t)->collectives, &own);
}

/* ---- parts of the scratch ---- */

static unsigned char *scratch_at(const wire_comm *c, int idx)
{
    return c->scratch + (size_t)idx * c->chunk_bytes;
}

static unsigned char *from_member(const wire_comm *c, int place)
{
    return scratch_at(c, place);
}

static unsigned char *sum_of_turn(const wire_comm *c, int turn)
{
    if (c->blocks.n == 1) return from_member(c, c->base.rank);
    return scratch_at(c, c->blocks.per_block + turn);
}

static unsigned char *from_block(const wire_comm *c, int block)
{
    int own = comm_block_of(&c->blocks, c->base.rank);
    return scratch_at(c, c->blocks.per_block + comm_block_turns(&c->blocks, own) + block);
}

/* ---- the tasks ---- */

/* Every rank receives its block's values for its owner of this turn, and sums them. */
static bl_status sum_within_block(const bl_comm_task *t, const comm_parts *s, int turn)
{
    wire_comm *c = comm_of(t);
    crossing *x = &c->collectives;
    int rank = c->base.rank, block = comm_block_of(&c->blocks, rank),
        first = comm_block_first(&c->blocks, block), n = comm_block_length(&c->blocks, block);
    int owner = comm_block_owner(&c->blocks, rank, turn);
    comm_blocks members = comm_blocks_of(n, n);

    for (int i = 1; i < n; i++) {
        int to = first + (rank - first + i) % n, from = first + (rank - first + n - i) % n;
        int of_to = comm_block_owner(&c->blocks, to, turn);
        if (of_to >= 0) give(x, to, comm_part_of(s, of_to), comm_part_bytes(s, of_to));
        if (owner >= 0) take(x, from, from_member(c, from - first), comm_part_bytes(s, owner));
    }
    BL_TRY(exchange(x, &t->call, false));
    if (owner < 0) return BL_OK;
    for (int i = 0; i < n; i++)
        c->values[i] = first + i == rank ? comm_part_of(s, owner) : from_member(c, i);
    comm_sum_blocks((bl_comm_element)t->call.detail, &members, c->values, 0, sum_of_turn(c, turn),
                    comm_part_length(s, owner));
    return BL_OK;
}

/* Every rank receives the other blocks' sums of its part, and adds them. */
static bl_status sum_between_blocks(const bl_comm_task *t, const comm_parts *s)
{
    wire_comm *c = comm_of(t);
    const comm_blocks *blocks = &c->blocks;
    crossing *x = &c->collectives;
    int rank = c->base.rank, own = comm_block_of(blocks, rank);
    comm_blocks terms = comm_blocks_of(blocks->n, blocks->n);

    for (int turn = 0; turn < comm_block_turns(blocks, own); turn++) {
        int owner = comm_block_owner(blocks, rank, turn);
        if (owner >= 0 && owner != rank)
            give(x, owner, sum_of_turn(c, turn), comm_part_bytes(s, owner));
    }
    for (int block = 0; block < blocks->n; block++) {
        c->values[block] =
            block == own ? sum_of_turn(c, comm_block_own_turn(blocks, rank)) : from_block(c, block);
        if (block != own)
            take(x, comm_block_helper(blocks, block, rank), from_block(c, block),
                 comm_part_bytes(s, rank));
    }
    BL_TRY(exchange(x, &t->call, false));
    comm_sum_blocks((bl_comm_element)t->call.detail, &terms, c->values, 0,
                    comm_part_target(t, s, rank), comm_part_length(s, rank));
    return BL_OK;
}

/* Of the last block, which has the most: all ranks make the same number of exchanges. */
static int most_turns(const wire_comm *c)
{
    return comm_block_turns(&c->blocks, c->blocks.n - 1);
}

static bl_status reduce_parts(const bl_comm_task *t, const comm_parts *s)
{
    wire_comm *c = comm_of(t);
    int rank = c->base.rank;

    for (int turn = 0; turn < most_turns(c); turn++) BL_TRY(sum_within_block(t, s, turn));
    if (c->blocks.n > 1) return sum_between_blocks(t, s);
    if (comm_part_bytes(s, rank) > 0)
        memcpy(comm_part_target(t, s, rank), sum_of_turn(c, 0), comm_part_bytes(s, rank));
    return BL_OK;
}

/* The paths of a sum in reverse: every owner sends its part to its helper in each other block. The
 * ranks of the block then receive the part from the helper. */
static bl_status gather_between_blocks(const bl_comm_task *t, const comm_parts *s)
{
    wire_comm *c = comm_of(t);
    const comm_blocks *blocks = &c->blocks;
    crossing *x = &c->collectives;
    int rank = c->base.rank, own = comm_block_of(blocks, rank);

    for (int i = 1; i < blocks->n; i++)
        give(x, comm_block_helper(blocks, (own + i) % blocks->n, rank), comm_part_of(s, rank),
             comm_part_bytes(s, rank));
    for (int turn = 0; turn < comm_block_turns(blocks, own); turn++) {
        int owner = comm_block_owner(blocks, rank, turn);
        if (owner >= 0 && owner != rank)
            take(x, owner, comm_part_of(s, owner), comm_part_bytes(s, owner));
    }
    return exchange(x, &t->call, false);
}

/* Each rank sends to the members of its block in a different order, so that not all send to the
 * same one. */
static bl_status gather_within_block(const bl_comm_task *t, const comm_parts *s, int turn)
{
    wire_comm *c = comm_of(t);
    crossing *x = &c->collectives;
    int rank = c->base.rank, block = comm_block_of(&c->blocks, rank),
        first = comm_block_first(&c->blocks, block), n = comm_block_length(&c->blocks, block);
    int owner = comm_block_owner(&c->blocks, rank, turn);

    for (int i = 1; i < n; i++) {
        int to = first + (rank - first + i) % n, from = first + (rank - first + n - i) % n;
        int theirs = comm_block_owner(&c->blocks, from, turn);
        if (owner >= 0) give(x, to, comm_part_of(s, owner), comm_part_bytes(s, owner));
        if (theirs >= 0) take(x, from, comm_part_of(s, theirs), comm_part_bytes(s, theirs));
    }
    return exchange(x, &t->call, false);
}

/* Every rank receives all parts. */
static bl_status gather_parts(const bl_comm_task *t, const comm_parts *s)
{
    wire_comm *c = comm_of(t);

    if (c->blocks.n > 1) BL_TRY(gather_between_blocks(t, s));
    for (int turn = 0; turn < most_turns(c); turn++) BL_TRY(gather_within_block(t, s, turn));
    return BL_OK;
}

static bl_status all_gather_task(bl_stream *stream, const void *args)
{
    const bl_comm_task *t = args;
    int64_t bytes = (int64_t)t->call.bytes;
    comm_parts s = {.values = t->recv,
                    .stride = bytes,
                    .n_part = bytes,
                    .end = bytes * t->comm->size,
                    .unit_bytes = 1};

    (void)stream;
    BL_TRY(meet_for(t));
    if (bytes > 0 && comm_part_of(&s, t->comm->rank) != t->send)
        memcpy(comm_part_of(&s, t->comm->rank), t->send, t->call.bytes);
    return gather_parts(t, &s);
}

/* An all-reduce is in place: a part is overwritten by its sum after all its old values have been
 * sent. */
static bl_status reduce_task(bl_stream *stream, const void *args)
{
    const bl_comm_task *t = args;
    comm_parts s;

    (void)stream;
    BL_TRY(meet_for(t));
    for (int64_t first = 0; comm_parts_next(t, comm_of(t)->chunk_bytes, &first, &s);) {
        BL_TRY(reduce_parts(t, &s));
        if (t->call.kind == BL_COMM_ALL_REDUCE) BL_TRY(gather_parts(t, &s));
    }
    return BL_OK;
}

static bl_status broadcast_task(bl_stream *stream, const void *args)
{
    const bl_comm_task *t = args;
    crossing *x = &comm_of(t)->collectives;
    int rank = t->comm->rank, size = t->comm->size, root = t->call.detail;

    (void)stream;
    BL_TRY(meet_for(t));
    if (rank != root) take(x, root, t->recv, t->call.bytes);
    for (int i = 1; rank == root && i < size; i++)
        give(x, (rank + i) % size, t->send, t->call.bytes);
    return exchange(x, &t->call, false);
}

static bl_status barrier_task(bl_stream *stream, const void *args)
{
    (void)stream;
    return meet_for(args);
}

/* ---- the backend ---- */

static bl_status wire_run(bl_stream *stream, const bl_comm_task *task)
{
    static const bl_stream_fn tasks[] = {[BL_COMM_ALL_GATHER] = all_gather_task,
                                         [BL_COMM_REDUCE_SCATTER] = reduce_task,
                                         [BL_COMM_ALL_REDUCE] = reduce_task,
                                         [BL_COMM_BROADCAST] = broadcast_task,
                                         [BL_COMM_BARRIER] = barrier_task};
    bl_comm_task numbered = *task;

    numbered.call.number = bl_wire_next_call(comm_of(task)->wire);
    return bl_stream_call(stream, tasks[task->call.kind], &numbered, sizeof numbered);
}

static void wire_abort(bl_comm *comm, const bl_error *error)
{
    bl_wire_abort(((wire_comm *)comm)->wire, error);
}

static void wire_first_error(bl_comm *comm, bl_error *out)
{
    bl_wire_first_error(((wire_comm *)comm)->wire, out);
}

static bl_status comm_create(bl_wire *wire, int group, const bl_comm *base, const int *job_ranks,
                             bl_comm **out);

/* The new group's number is the largest that any rank of the old one proposes: no member of it has
 * used that number, and the groups of other colors, which get the same, have no member in common
 * with it. */
static bl_status wire_split(bl_comm *comm, int color, bl_comm **out)
{
    wire_comm *c = (wire_comm *)comm;
    arrival own = {.call = {.kind = BL_COMM_SPLIT, .number = bl_wire_next_call(c->wire)},
                   .color = color,
                   .group = bl_wire_propose_group(c->wire)};
    int n_members = 0, rank = 0, group = 0;

    BL_TRY(meet(c, &c->splits, &own));
    int *members = calloc((size_t)comm->size, sizeof *members);
    if (!members) return BL_FAIL(BL_ENOMEM, "a split of %d ranks", comm->size);
    for (int i = 0; i < comm->size; i++) {
        if (c->splits.arrivals[i].group > group) group = c->splits.arrivals[i].group;
        if (c->splits.arrivals[i].color != color) continue;
        if (i == comm->rank) rank = n_members;
        members[n_members++] = c->job_ranks[i];
    }
    bl_wire_take_group(c->wire, group);
    bl_comm base = {.rank = rank, .size = n_members, .sum_block = comm->sum_block};
    bl_status st = comm_create(c->wire, group, &base, members, out);
    free(members);
    return st;
}

static void crossing_close(crossing *x)
{
    bl_wire_channel_destroy(x->channel);
    free(x->arrivals);
    free(x->transfers);
}

static void wire_destroy(bl_comm *comm)
{
    wire_comm *c = (wire_comm *)comm;
    bl_wire *owned = c->owns_wire ? c->wire : NULL;
    crossing_close(&c->collectives);
    crossing_close(&c->splits);
    free(c->scratch);
    free(c->values);
    free(c->job_ranks);
    free(c);
    if (owned) (void)bl_wire_close(owned);
}

/* Called again after sum_block changes. */
static bl_status wire_take_scratch(bl_comm *comm)
{
    wire_comm *c = (wire_comm *)comm;
    c->blocks = comm_blocks_of(comm->size, comm->sum_block);
    size_t n_parts = (size_t)comm_blocks_parts_by_turn(&c->blocks);

    free(c->scratch);
    c->chunk_bytes = (SCRATCH_BYTES / n_parts) & ~(size_t)63;
    if (c->chunk_bytes < MIN_CHUNK_BYTES) c->chunk_bytes = MIN_CHUNK_BYTES;
    c->scratch = aligned_alloc(64, c->chunk_bytes * n_parts);
    return c->scratch ? BL_OK : BL_FAIL(BL_ENOMEM, "a communicator of %d ranks", comm->size);
}

static const bl_comm_backend wire_backend = {
    .run = wire_run,
    .abort = wire_abort,
    .first_error = wire_first_error,
    .split = wire_split,
    .destroy = wire_destroy,
    .resize = wire_take_scratch,
};

static bl_status crossing_open(crossing *x, bl_wire *wire, int group, int channel_idx,
                               const wire_comm *c)
{
    size_t size = (size_t)c->base.size;
    x->arrivals = calloc(size, sizeof *x->arrivals);
    x->transfers = calloc(2 * size, sizeof *x->transfers);
    if (!x->arrivals || !x->transfers)
        return BL_FAIL(BL_ENOMEM, "a communicator of %zu ranks", size);
    return bl_wire_channel_create(wire, group, channel_idx, c->base.size, c->job_ranks,
                                  &x->channel);
}

/* Reads rank, size and sum_block of `base`. */
static bl_status comm_create(bl_wire *wire, int group, const bl_comm *base, const int *job_ranks,
                             bl_comm **out)
{
    bl_status st = BL_OK;
    wire_comm *c = calloc(1, sizeof *c);
    size_t size = (size_t)base->size;

    *out = NULL;
    if (!c) return BL_FAIL(BL_ENOMEM, "a communicator of %d ranks", base->size);
    c->base = *base;
    c->base.backend = &wire_backend;
    c->wire = wire;
    c->values = calloc(size, sizeof *c->values);
    c->job_ranks = calloc(size, sizeof *c->job_ranks);
    if (!c->values || !c->job_ranks) {
        st = BL_FAIL(BL_ENOMEM, "a communicator of %d ranks", base->size);
        goto done;
    }
    memcpy(c->job_ranks, job_ranks, size * sizeof *job_ranks);
    BL_TRY_GOTO(st, done, wire_take_scratch(&c->base));
    BL_TRY_GOTO(st, done, crossing_open(&c->collectives, wire, group, 0, c));
    BL_TRY_GOTO(st, done, crossing_open(&c->splits, wire, group, 1, c));
    *out = &c->base;
    c = NULL;
done:
    if (c) wire_destroy(&c->base);
    return st;
}

void bl_wire_comm_own(bl_comm *comm)
{
    ((wire_comm *)comm)->owns_wire = true;
}

bool bl_wire_comm_is(const bl_comm *comm)
{
    return comm->backend == &wire_backend;
}

bl_status bl_wire_comm_tell(bl_comm *comm, const bl_comm_call *call, int n_peers, const int *peers,
                            const void *own, void *theirs, size_t n_bytes)
{
    wire_comm *c = (wire_comm *)comm;
    crossing *x = &c->splits;
    bl_comm_call own_call = *call; /* in use until the exchange returns, however it ends */

    own_call.number = bl_wire_next_call(c->wire);
    for (int i = 0; i < n_peers; i++) {
        give(x, peers[i], own, n_bytes);
        take(x, peers[i], (unsigned char *)theirs + (size_t)i * n_bytes, n_bytes);
    }
    return exchange(x, &own_call, true);
}

bl_status bl_comm_create_wire(bl_wire *wire, bl_comm **out)
{
    int size = bl_wire_size(wire), *ranks = calloc((size_t)size, sizeof *ranks);

    *out = NULL;
    if (!ranks) return BL_FAIL(BL_ENOMEM, "a communicator of %d ranks", size);
    for (int i = 0; i < size; i++) ranks[i] = i;
    int group = bl_wire_propose_group(wire);
    bl_wire_take_group(wire, group);
    bl_comm base = {.rank = bl_wire_rank(wire), .size = size, .sum_block = BL_COMM_SUM_BLOCK};
    bl_status st = comm_create(wire, group, &base, ranks, out);
    free(ranks);
    return st;
}
