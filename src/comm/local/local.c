/* SPDX-License-Identifier: Apache-2.0 */
/* local.c -- collectives of the ranks of one process: each rank runs them on its own stream and
 * reads its peers' buffers directly. How ranks meet, and why no rank returns while its buffers are
 * being read, is in group.h. Canceling is prompt where a rank waits for others; a collective whose
 * ranks have all arrived is finished. Ranks on CUDA have their collectives in device.c. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/local/device.h"
#include "comm/local/group.h"
#include "comm/sum_internal.h"

typedef struct local_comm {
    bl_comm base;
    comm_local_group *group;
    comm_local_seat seat; /* of ranks on CUDA */
    const void **sends;   /* [size]: values of the ranks, in a sum */
} local_comm;

/* Sums elements [first, first + n) of the ranks' values. */
static void sum_ranks(local_comm *comm, bl_comm_element element, int64_t first, int64_t n,
                      void *sum)
{
    comm_local_meeting *meeting = comm_local_collectives(comm->group);
    comm_blocks blocks = comm_blocks_of(comm->base.size, comm->base.sum_block);

    for (int r = 0; r < comm->base.size; r++) comm->sends[r] = comm_local_call_of(meeting, r)->send;
    comm_sum_blocks(element, &blocks, comm->sends, (size_t)first * comm_sum_element_bytes(element),
                    sum, n);
}

/* ---- the tasks ---- */

static comm_local_meeting *meeting_of(const bl_comm_task *t)
{
    return comm_local_collectives(((local_comm *)t->comm)->group);
}

static bl_status meet(const bl_comm_task *t)
{
    comm_local_call call = {.what = t->call, .send = t->send};
    return comm_local_meet(meeting_of(t), t->comm->rank, &call);
}

static void part(const bl_comm_task *t)
{
    comm_local_part(meeting_of(t), t->comm->rank);
}

static bl_status all_gather_task(bl_stream *stream, const void *args)
{
    const bl_comm_task *t = args;
    int rank = t->comm->rank, size = t->comm->size;
    size_t bytes = t->call.bytes;

    (void)stream;
    BL_TRY(meet(t));
    /* Its own first, so that ranks read from different peers. */
    for (int i = 0; i < size && bytes > 0; i++) {
        int peer = (rank + i) % size;
        unsigned char *to = (unsigned char *)t->recv + (size_t)peer * bytes;
        const void *from = comm_local_call_of(meeting_of(t), peer)->send;
        if (to != from) memcpy(to, from, bytes);
    }
    part(t);
    return BL_OK;
}

static bl_status reduce_scatter_task(bl_stream *stream, const void *args)
{
    const bl_comm_task *t = args;

    (void)stream;
    BL_TRY(meet(t));
    sum_ranks((local_comm *)t->comm, BL_COMM_F32, t->comm->rank * t->n, t->n, t->recv);
    part(t);
    return BL_OK;
}

/* Chunk by chunk: each rank sums its part of the chunk into the shared scratch, they part, and each
 * copies the whole chunk out. Two halves take turns, so that one parting a chunk is enough: a rank
 * that writes a half again has parted since it was read. */
static bl_status all_reduce_task(bl_stream *stream, const void *args)
{
    const bl_comm_task *t = args;
    local_comm *c = (local_comm *)t->comm;
    bl_comm_element element = (bl_comm_element)t->call.detail;
    size_t unit_bytes = comm_sum_element_bytes(element);
    int64_t max_chunk = (int64_t)(COMM_LOCAL_SCRATCH_BYTES / unit_bytes), first = 0;
    int half = 0;

    (void)stream;
    BL_TRY(meet(t));
    do { /* at least once: the ranks must part */
        int64_t n_chunk = bl_min_i64(max_chunk, t->n - first);
        int64_t n_part = bl_ceil_div(n_chunk, c->base.size);
        int64_t begin = bl_min_i64(c->base.rank * n_part, n_chunk),
                end = bl_min_i64(begin + n_part, n_chunk);
        unsigned char *chunk = comm_local_group_scratch(c->group, half);
        sum_ranks(c, element, first + begin, end - begin, chunk + (size_t)begin * unit_bytes);
        part(t);
        if (n_chunk > 0)
            memcpy((unsigned char *)t->recv + (size_t)first * unit_bytes, chunk,
                   (size_t)n_chunk * unit_bytes);
        first += n_chunk;
        half = !half;
    } while (first < t->n);
    return BL_OK;
}

static bl_status broadcast_task(bl_stream *stream, const void *args)
{
    const bl_comm_task *t = args;
    int root = t->call.detail;

    (void)stream;
    BL_TRY(meet(t));
    if (t->comm->rank != root && t->call.bytes > 0)
        memcpy(t->recv, comm_local_call_of(meeting_of(t), root)->send, t->call.bytes);
    part(t);
    return BL_OK;
}

static bl_status barrier_task(bl_stream *stream, const void *args)
{
    (void)stream;
    BL_TRY(meet(args));
    part(args);
    return BL_OK;
}

/* ---- the backend ---- */

static bl_status run_as_task(bl_stream *stream, const bl_comm_task *task)
{
    static const bl_stream_fn tasks[] = {[BL_COMM_ALL_GATHER] = all_gather_task,
                                         [BL_COMM_REDUCE_SCATTER] = reduce_scatter_task,
                                         [BL_COMM_ALL_REDUCE] = all_reduce_task,
                                         [BL_COMM_BROADCAST] = broadcast_task,
                                         [BL_COMM_BARRIER] = barrier_task};
    return bl_stream_call(stream, tasks[task->call.kind], task, sizeof *task);
}

static bl_status run_between_devices(bl_stream *stream, const bl_comm_task *task)
{
    local_comm *self = (local_comm *)task->comm;
    self->seat.sum_block = self->base.sum_block;
    return comm_local_device_run(&self->seat, stream, task);
}

/* The place that tells the kinds of device apart. */
static bl_status local_run(bl_stream *stream, const bl_comm_task *task)
{
    static bl_status (*const by_kind[])(bl_stream * stream, const bl_comm_task *task) = {
        [BL_DEVICE_CPU] = run_as_task, [BL_DEVICE_CUDA] = run_between_devices};
    return by_kind[bl_device_get_kind(bl_stream_device(stream))](stream, task);
}

static void local_abort(bl_comm *comm, const bl_error *error)
{
    comm_local_abort(((local_comm *)comm)->group, error);
}

static void local_first_error(bl_comm *comm, bl_error *out)
{
    comm_local_first_error(((local_comm *)comm)->group, out);
}

static bl_status comm_create(comm_local_group *group, int rank, int size, int sum_block,
                             bl_comm **out);

/* The first rank of each color makes the group and shows it to the others. `ranks` (of the old
 * group) has room for all. */
static bl_status split_group(local_comm *self, int color, int *ranks, bl_comm **out)
{
    comm_local_meeting *meeting = comm_local_splits(self->group);
    comm_local_call call = {.what = {.kind = BL_COMM_SPLIT}, .color = color};
    int n_ranks = 0, new_rank = 0, rank = self->base.rank;

    BL_TRY(comm_local_meet(meeting, rank, &call));
    for (int i = 0; i < self->base.size; i++) {
        if (comm_local_call_of(meeting, i)->color != color) continue;
        if (i == rank) new_rank = n_ranks;
        ranks[n_ranks++] = i;
    }
    comm_local_group *group = NULL;
    if (new_rank == 0) comm_local_group_create(self->group, n_ranks, ranks, &group);
    if (new_rank == 0) comm_local_call_of(meeting, rank)->group = group;
    comm_local_part(meeting, rank);
    group = comm_local_call_of(meeting, ranks[0])->group;
    comm_local_part(meeting, rank);
    if (!group) return BL_FAIL(BL_ENOMEM, "a communicator of %d ranks", n_ranks);

    bl_status st = comm_create(group, new_rank, n_ranks, self->base.sum_block, out);
    if (st != BL_OK) comm_local_group_release(group);
    return st;
}

static bl_status local_split(bl_comm *comm, int color, bl_comm **out)
{
    int *ranks = calloc((size_t)comm->size, sizeof *ranks);
    if (!ranks) return BL_FAIL(BL_ENOMEM, "a split of %d ranks", comm->size);
    bl_status st = split_group((local_comm *)comm, color, ranks, out);
    free(ranks);
    return st;
}

static void local_destroy(bl_comm *comm)
{
    local_comm *self = (local_comm *)comm;
    comm_local_device_destroy(self->seat.device);
    comm_local_group_release(self->group);
    free(self->sends);
    free(self);
}

static const bl_comm_backend local_backend = {
    .run = local_run,
    .abort = local_abort,
    .first_error = local_first_error,
    .split = local_split,
    .destroy = local_destroy,
};

static bl_status comm_create(comm_local_group *group, int rank, int size, int sum_block,
                             bl_comm **out)
{
    local_comm *self = calloc(1, sizeof *self);
    const void **sends = calloc((size_t)size, sizeof *sends);
    if (!self || !sends) {
        free(self);
        free(sends);
        return BL_FAIL(BL_ENOMEM, "rank %d of a communicator", rank);
    }
    self->base =
        (bl_comm){.backend = &local_backend, .rank = rank, .size = size, .sum_block = sum_block};
    self->sends = sends;
    self->group = group;
    self->seat = (comm_local_seat){
        .meeting = comm_local_collectives(group), .rank = rank, .size = size, .pieces = sends};
    *out = &self->base;
    return BL_OK;
}

bl_status bl_comm_create_local(int n_ranks, double deadline_s, bl_comm **out)
{
    comm_local_group *group;

    if (n_ranks < 1) return BL_FAIL(BL_EUSAGE, "a group needs at least one rank, not %d", n_ranks);
    memset(out, 0, (size_t)n_ranks * sizeof *out);
    BL_TRY(comm_local_group_create_job(n_ranks, deadline_s, &group));
    for (int i = 0; i < n_ranks; i++) {
        bl_status st = comm_create(group, i, n_ranks, BL_COMM_SUM_BLOCK, &out[i]);
        if (st == BL_OK) continue;
        for (int j = i; j < n_ranks; j++) comm_local_group_release(group);
        for (int j = 0; j < i; j++) {
            bl_comm_destroy(out[j]);
            out[j] = NULL;
        }
        return st;
    }
    return BL_OK;
}
