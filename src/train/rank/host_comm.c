/* SPDX-License-Identifier: Apache-2.0 */
/* host_comm.c -- collectives over small host buffers, on the given stream or a CPU device's. */
#include "train/host_comm.h"

bl_status bl_host_comm_open(bl_comm *comm, bl_stream *stream, bl_host_comm *out)
{
    *out = (bl_host_comm){.comm = comm, .stream = stream};
    if (stream) return BL_OK;
    BL_TRY(bl_device_create_cpu(1, &out->device));
    bl_status st = bl_stream_create(out->device, "host_comm", &out->stream);
    if (st != BL_OK) bl_host_comm_close(out);
    return st;
}

void bl_host_comm_close(bl_host_comm *host_comm)
{
    if (host_comm->device) bl_stream_destroy(host_comm->stream);
    bl_device_destroy(host_comm->device);
    *host_comm = (bl_host_comm){0};
}

bl_status bl_host_comm_gather(const bl_host_comm *host_comm, void *all, size_t n_bytes)
{
    const char *own = (const char *)all + (size_t)bl_comm_rank(host_comm->comm) * n_bytes;
    BL_TRY(bl_comm_all_gather(host_comm->comm, host_comm->stream, own, all, n_bytes));
    return bl_stream_synchronize(host_comm->stream);
}

bl_status bl_host_comm_broadcast(const bl_host_comm *host_comm, void *bytes, size_t n_bytes)
{
    BL_TRY(bl_comm_broadcast(host_comm->comm, host_comm->stream, bytes, n_bytes, 0));
    return bl_stream_synchronize(host_comm->stream);
}

bl_status bl_host_comm_sum(const bl_host_comm *host_comm, int64_t *values, int64_t n)
{
    BL_TRY(bl_comm_all_reduce_i64(host_comm->comm, host_comm->stream, values, n));
    return bl_stream_synchronize(host_comm->stream);
}

bl_status bl_host_comm_sum_real(const bl_host_comm *host_comm, double *values, int64_t n)
{
    BL_TRY(bl_comm_all_reduce_f64(host_comm->comm, host_comm->stream, values, n));
    return bl_stream_synchronize(host_comm->stream);
}

bl_status bl_host_comm_wait(const bl_host_comm *host_comm, bl_host_comm_is_busy_fn look, void *user)
{
    for (int64_t n_busy = 1; n_busy > 0;) {
        bool is_busy = false;
        BL_TRY(look(user, &is_busy));
        n_busy = is_busy;
        BL_TRY(bl_host_comm_sum(host_comm, &n_busy, 1));
    }
    return BL_OK;
}

bl_status bl_host_comm_barrier(const bl_host_comm *host_comm)
{
    BL_TRY(bl_comm_barrier(host_comm->comm, host_comm->stream));
    return bl_stream_synchronize(host_comm->stream);
}
