/* SPDX-License-Identifier: Apache-2.0 */
/* echo.c -- a communicator with one real rank: collectives copy the rank's own data, and a host
 * task paces them to the link's rate. */
#include "bench/command/echo.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "comm/comm_internal.h"

typedef struct echo {
    bl_comm comm;
    double bytes_per_s;
    double began_s;       /* of the collective under way; its stream's tasks alone use it */
    pthread_mutex_t lock; /* guards error */
    bl_error error;
} echo;

/* ---- pacing: the stream stands still until the bytes would have come ---- */

typedef struct pace_args {
    echo *self;
    double seconds; /* of the collective */
} pace_args;

static bl_status note_begin(bl_stream *stream, const void *args)
{
    const pace_args *a = args;
    (void)stream;
    a->self->began_s = bl_now_s();
    return BL_OK;
}

static bl_status wait_for_end(bl_stream *stream, const void *args)
{
    const pace_args *a = args;
    double left_s = a->self->began_s + a->seconds - bl_now_s();
    (void)stream;
    if (left_s <= 0) return BL_OK;
    struct timespec left = {(time_t)left_s, (long)(fmod(left_s, 1.0) * 1e9)};
    while (nanosleep(&left, &left) != 0) continue;
    return BL_OK;
}

static bl_status pace(echo *self, bl_stream *stream, bool is_end, double n_bytes)
{
    if (self->bytes_per_s <= 0) return BL_OK;
    pace_args args = {self, n_bytes / self->bytes_per_s};
    return bl_stream_call(stream, is_end ? wait_for_end : note_begin, &args, sizeof args);
}

/* ---- collectives ---- */

static bl_status echo_all_gather(bl_comm *comm, bl_stream *stream, const void *send, void *recv,
                                 size_t bytes)
{
    double n_received = (double)bytes * (comm->size - 1);

    BL_TRY(pace((echo *)comm, stream, false, n_received));
    for (int r = 0; r < comm->size; r++) {
        char *to = (char *)recv + (size_t)r * bytes;
        if (to != send) BL_TRY(bl_stream_copy(stream, to, send, bytes));
    }
    return pace((echo *)comm, stream, true, n_received);
}

static bl_status echo_reduce_scatter(bl_comm *comm, bl_stream *stream, const float *send,
                                     float *recv, int64_t n)
{
    size_t bytes = (size_t)n * sizeof *send;
    double n_received = (double)bytes * (comm->size - 1);

    BL_TRY(pace((echo *)comm, stream, false, n_received));
    BL_TRY(bl_stream_copy(stream, recv, send + comm->rank * n, bytes));
    return pace((echo *)comm, stream, true, n_received);
}

static bl_status echo_all_reduce(bl_comm *comm, bl_stream *stream, void *values, int64_t n,
                                 bl_comm_element element)
{
    (void)comm, (void)stream, (void)values, (void)n, (void)element;
    return BL_OK;
}

static bl_status echo_broadcast(bl_comm *comm, bl_stream *stream, void *buffer, size_t bytes,
                                int root)
{
    (void)comm, (void)stream, (void)buffer, (void)bytes, (void)root;
    return BL_OK;
}

static bl_status echo_barrier(bl_comm *comm, bl_stream *stream)
{
    (void)comm, (void)stream;
    return BL_OK;
}

static void echo_abort(bl_comm *comm, const bl_error *error)
{
    echo *self = (echo *)comm;
    pthread_mutex_lock(&self->lock);
    if (self->error.status == BL_OK) self->error = *error;
    pthread_mutex_unlock(&self->lock);
}

static void echo_first_error(bl_comm *comm, bl_error *out)
{
    echo *self = (echo *)comm;
    pthread_mutex_lock(&self->lock);
    *out = self->error;
    pthread_mutex_unlock(&self->lock);
}

static bl_status echo_split(bl_comm *comm, int color, bl_comm **out)
{
    (void)color;
    return bl_echo_create(comm->rank, comm->size, ((const echo *)comm)->bytes_per_s, out);
}

static void echo_destroy(bl_comm *comm)
{
    echo *self = (echo *)comm;
    pthread_mutex_destroy(&self->lock);
    free(self);
}

bl_status bl_echo_create(int rank, int n_ranks, double bytes_per_s, bl_comm **out)
{
    static const bl_comm_backend backend = {.all_gather = echo_all_gather,
                                            .reduce_scatter_f32 = echo_reduce_scatter,
                                            .all_reduce = echo_all_reduce,
                                            .broadcast = echo_broadcast,
                                            .barrier = echo_barrier,
                                            .abort = echo_abort,
                                            .first_error = echo_first_error,
                                            .split = echo_split,
                                            .destroy = echo_destroy};
    echo *self = calloc(1, sizeof *self);

    *out = NULL;
    if (!self) return BL_FAIL(BL_ENOMEM, "a communicator");
    *self = (echo){.comm = {.backend = &backend, .rank = rank, .size = n_ranks},
                   .bytes_per_s = bytes_per_s};
    pthread_mutex_init(&self->lock, NULL);
    *out = &self->comm;
    return BL_OK;
}
