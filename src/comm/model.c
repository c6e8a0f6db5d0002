/* SPDX-License-Identifier: Apache-2.0 */
/* model.c -- collectives as work of a model device. A reduction is an all-to-all, and a sum of what
 * has come. */
#include "comm/model.h"

#include <math.h>
#include <stdlib.h>

#include "comm/backend.h"

typedef struct model_comm {
    bl_comm comm;
    int n_on_host, split_size;
    bl_error error;
} model_comm;

bl_work bl_exchange_work(const bl_exchange *e, bl_device_kind kind, const bl_rates *r)
{
    double here = fmin(e->size, e->n_on_host), received = (e->size - 1) * e->bytes, seconds = 0;
    bl_work work = {.seconds = 0};

    if (e->size > 1) seconds = r->gather_latency_s + received / r->gather_bytes_per_s;
    if (e->size > here) {
        double into_host = e->is_all_to_all ? (e->size - here) * here * e->bytes : received;
        seconds = fmax(seconds, r->network_latency_s + into_host / r->network_bytes_per_s);
    }
    work.seconds = seconds;
    if (kind != BL_DEVICE_CUDA) work.use[BL_RESOURCE_CORES] = r->copy_cores;
    if (seconds > 0) work.use[BL_RESOURCE_DEVICE_MEMORY] = 2 * received / seconds;
    return work;
}

/* Then a sum that reads and writes sum_bytes. */
static bl_status exchange(bl_comm *comm, bl_stream *stream, double bytes, bool is_all_to_all,
                          double sum_bytes)
{
    const bl_model_device_options *o = bl_device_model(bl_stream_device(stream));
    bl_exchange e = {comm->size, ((const model_comm *)comm)->n_on_host, bytes, is_all_to_all};

    if (!o) return BL_FAIL(BL_EINTERNAL, "a communicator made of rates on a device that computes");
    bl_work work = bl_exchange_work(&e, o->kind, &o->rates);
    BL_TRY(bl_model_stream_work(stream, &work));
    work = bl_model_memory_work(bl_stream_device(stream), sum_bytes);
    return bl_model_stream_work(stream, &work);
}

static bl_status model_run(bl_stream *stream, const bl_comm_task *t)
{
    double bytes = (double)t->call.bytes, size = t->comm->size, part = bytes / size;

    switch (t->call.kind) {
    case BL_COMM_ALL_GATHER:
        return exchange(t->comm, stream, bytes, false, 0);
    case BL_COMM_REDUCE_SCATTER:
        return exchange(t->comm, stream, bytes, true, (size + 1) * bytes);
    case BL_COMM_ALL_REDUCE:
        BL_TRY(exchange(t->comm, stream, part, true, (size + 1) * part));
        return exchange(t->comm, stream, part, false, 0);
    default: /* a broadcast, a barrier: each rank receives all */
        return exchange(t->comm, stream, part, false, 0);
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
    return bl_comm_create_model(comm->rank % size, size, self->n_on_host, size, out);
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
    *self = (model_comm){.comm = {.backend = &backend, .rank = rank, .size = n_ranks},
                         .n_on_host = n_on_host,
                         .split_size = split_size};
    *out = &self->comm;
    return BL_OK;
}
