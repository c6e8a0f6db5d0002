/* SPDX-License-Identifier: Apache-2.0 */
/* model.c -- collectives as work of a model device. A reduction is exchanges, and then the sums of
 * the received parts. */
#include "comm/model.h"

#include <math.h>
#include <stdlib.h>

#include "comm/backend.h"
#include "comm/blocks_internal.h"

typedef struct model_comm {
    bl_comm comm;
    int n_on_host, split_size;
    bool gathers_by_hosts;
    bl_error error;
} model_comm;

/* ---- the bytes of an exchange, and its time ---- */

/* One step: bytes that a rank receives, and that its host receives over the network. */
typedef struct step {
    double received, into_host;
} step;

static double network_s_of(const step *s, const bl_rates *r)
{
    return s->into_host > 0 ? s->into_host / r->network_bytes_per_s : 0;
}

/* parts: the part of the step's bytes that is moved at once. */
static double seconds_of(const step *s, const bl_rates *r, double parts)
{
    double seconds = 0, network_s = network_s_of(s, r) / parts;

    if (s->received > 0 && r->gather_bytes_per_s > 0)
        seconds = r->gather_latency_s + s->received / parts / r->gather_bytes_per_s;
    return network_s > 0 ? fmax(seconds, r->network_latency_s + network_s) : seconds;
}

static comm_blocks_traffic traffic_of(const bl_exchange *e)
{
    comm_blocks blocks = comm_blocks_of((int)e->size, e->block);
    int n_on_host = (int)fmin(e->size, ceil(e->n_on_host));
    return e->kind == BL_EXCHANGE_SUM ? comm_blocks_count(&blocks, n_on_host)
                                      : comm_blocks_count_gather(&blocks, n_on_host);
}

/* Returns the number of steps. */
static int steps_of(const bl_exchange *e, step out[2])
{
    double received = (e->size - 1) * e->bytes;

    if (e->kind == BL_EXCHANGE_RING) {
        out[0] = (step){received, e->size > e->n_on_host ? received : 0};
        return 1;
    }
    comm_blocks_traffic t = traffic_of(e);
    out[0] = (step){(double)t.received_within * e->bytes, (double)t.into_host_within * e->bytes};
    out[1] = (step){(double)t.received_between * e->bytes, (double)t.into_host_between * e->bytes};
    return 2;
}

/* Bytes that rank 0 receives. */
static double received_of(const bl_exchange *e)
{
    step steps[2];
    double received = 0;
    for (int i = steps_of(e, steps) - 1; i >= 0; i--) received += steps[i].received;
    return received;
}

/* Bytes that the additions of rank 0 read and write. */
static double summed_of(const bl_exchange *e)
{
    return e->kind == BL_EXCHANGE_SUM ? (double)traffic_of(e).summed * e->bytes : 0;
}

bl_exchange_kind bl_exchange_gather_kind(bl_device_kind kind)
{
    return kind == BL_DEVICE_CUDA ? BL_EXCHANGE_RING : BL_EXCHANGE_BLOCKS;
}

bl_work bl_exchange_work(const bl_exchange *e, bl_device_kind kind, const bl_rates *r)
{
    step steps[2];
    bl_work work = {.seconds = 0};
    int n = steps_of(e, steps);
    bool is_pipelined = e->kind == BL_EXCHANGE_BLOCKS && kind == BL_DEVICE_CUDA && n == 2;
    int n_pieces = is_pipelined ? comm_gather_pieces((int64_t)e->bytes) : 1;
    double longest_s = 0;
    bl_rates rates = *r;

    if (e->n_on_host <= 1 && e->size > 1) rates.gather_bytes_per_s = 0; /* the network alone */
    for (int i = 0; i < n; i++) {
        double piece_s = seconds_of(&steps[i], &rates, n_pieces);
        work.seconds += piece_s;
        longest_s = fmax(longest_s, piece_s);
        work.use[BL_RESOURCE_NETWORK] += network_s_of(&steps[i], r);
    }
    work.seconds += (n_pieces - 1) * longest_s;
    if (kind != BL_DEVICE_CUDA) work.use[BL_RESOURCE_CORES] = r->copy_cores;
    if (work.seconds > 0) {
        work.use[BL_RESOURCE_NETWORK] /= work.seconds;
        work.use[BL_RESOURCE_DEVICE_MEMORY] = 2 * received_of(e) / work.seconds;
    }
    return work;
}

/* ---- the communicator ---- */

static bl_status exchange(bl_comm *comm, bl_stream *stream, double bytes, bool is_sum)
{
    const bl_model_device_options *o = bl_device_model(bl_stream_device(stream));
    const model_comm *self = (const model_comm *)comm;
    bl_exchange e = {
        .size = comm->size, .n_on_host = self->n_on_host, .bytes = bytes, .block = comm->sum_block};

    if (!o) return BL_FAIL(BL_EINTERNAL, "a communicator made of rates on a device that computes");
    e.kind = is_sum ? BL_EXCHANGE_SUM : bl_exchange_gather_kind(o->kind);
    if (!is_sum && self->gathers_by_hosts && comm->size > self->n_on_host && self->n_on_host > 1) {
        e.kind = BL_EXCHANGE_BLOCKS;
        e.block = self->n_on_host;
    }
    bl_work work = bl_exchange_work(&e, o->kind, &o->rates);
    BL_TRY(bl_model_stream_work(stream, &work));
    work = bl_model_memory_work(bl_stream_device(stream), summed_of(&e));
    return bl_model_stream_work(stream, &work);
}

static bl_status model_run(bl_stream *stream, const bl_comm_task *t)
{
    double bytes = (double)t->call.bytes, size = t->comm->size, part = bytes / size;

    switch (t->call.kind) {
    case BL_COMM_ALL_GATHER:
        return exchange(t->comm, stream, bytes, false);
    case BL_COMM_REDUCE_SCATTER:
        return exchange(t->comm, stream, bytes, true);
    case BL_COMM_ALL_REDUCE:
        BL_TRY(exchange(t->comm, stream, part, true));
        return exchange(t->comm, stream, part, false);
    default: /* a broadcast, a barrier: each rank receives all */
        return exchange(t->comm, stream, part, false);
    }
}

static void model_abort(bl_comm *comm, const bl_error *error)
{
    model_comm *self = (model_comm *)comm;
    if (self->error.status == BL_OK) self->error = *error;
}

static void model_first_error(bl_comm *comm, bl_error *out)
{
    *out = ((const model_comm *)comm)->error;
}

static bl_status model_split(bl_comm *comm, int color, bl_comm **out)
{
    const model_comm *self = (const model_comm *)comm;
    int size = self->split_size;

    (void)color;
    BL_TRY(bl_comm_create_model(comm->rank % size, size, self->n_on_host, size, out));
    (*out)->sum_block = comm->sum_block;
    ((model_comm *)*out)->gathers_by_hosts = self->gathers_by_hosts;
    return BL_OK;
}

void bl_comm_model_gather_by_hosts(bl_comm *comm)
{
    ((model_comm *)comm)->gathers_by_hosts = true;
}

static void model_destroy(bl_comm *comm)
{
    free(comm);
}

bl_status bl_comm_create_model(int rank, int n_ranks, int n_on_host, int split_size, bl_comm **out)
{
    static const bl_comm_backend backend = {.run = model_run,
                                            .abort = model_abort,
                                            .first_error = model_first_error,
                                            .split = model_split,
                                            .destroy = model_destroy};
    model_comm *self = calloc(1, sizeof *self);

    *out = NULL;
    if (!self) return BL_FAIL(BL_ENOMEM, "a communicator");
    *self = (model_comm){.comm = {.backend = &backend,
                                  .rank = rank,
                                  .size = n_ranks,
                                  .sum_block = BL_COMM_SUM_BLOCK},
                         .n_on_host = n_on_host,
                         .split_size = split_size};
    *out = &self->comm;
    return BL_OK;
}
