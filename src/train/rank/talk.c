/* SPDX-License-Identifier: Apache-2.0 */
/* talk.c -- collectives over small host buffers, on the given stream or that of a CPU device. */
#include "train/talk.h"

bl_status bl_talk_open(bl_comm *comm, bl_stream *stream, bl_talk *out)
{
    *out = (bl_talk){.comm = comm, .stream = stream};
    if (stream) return BL_OK;
    BL_TRY(bl_device_create_cpu(1, &out->device));
    bl_status st = bl_stream_create(out->device, "talk", &out->stream);
    if (st != BL_OK) bl_talk_close(out);
    return st;
}

void bl_talk_close(bl_talk *talk)
{
    if (talk->device) bl_stream_destroy(talk->stream);
    bl_device_destroy(talk->device);
    *talk = (bl_talk){0};
}

bl_status bl_talk_gather(const bl_talk *talk, void *all, size_t n_bytes)
{
    const char *own = (const char *)all + (size_t)bl_comm_rank(talk->comm) * n_bytes;
    BL_TRY(bl_comm_all_gather(talk->comm, talk->stream, own, all, n_bytes));
    return bl_stream_synchronize(talk->stream);
}

bl_status bl_talk_broadcast(const bl_talk *talk, void *bytes, size_t n_bytes)
{
    BL_TRY(bl_comm_broadcast(talk->comm, talk->stream, bytes, n_bytes, 0));
    return bl_stream_synchronize(talk->stream);
}

bl_status bl_talk_sum(const bl_talk *talk, int64_t *values, int64_t n)
{
    BL_TRY(bl_comm_all_reduce_i64(talk->comm, talk->stream, values, n));
    return bl_stream_synchronize(talk->stream);
}

bl_status bl_talk_sum_real(const bl_talk *talk, double *values, int64_t n)
{
    BL_TRY(bl_comm_all_reduce_f64(talk->comm, talk->stream, values, n));
    return bl_stream_synchronize(talk->stream);
}

bl_status bl_talk_wait(const bl_talk *talk, bl_talk_look_fn look, void *user)
{
    for (int64_t n_busy = 1; n_busy > 0;) {
        bool is_busy = false;
        BL_TRY(look(user, &is_busy));
        n_busy = is_busy;
        BL_TRY(bl_talk_sum(talk, &n_busy, 1));
    }
    return BL_OK;
}

bl_status bl_talk_meet(const bl_talk *talk)
{
    BL_TRY(bl_comm_barrier(talk->comm, talk->stream));
    return bl_stream_synchronize(talk->stream);
}
