/* SPDX-License-Identifier: Apache-2.0 */
/* echo.c -- a communicator with one real rank: collectives copy the rank's own data, and a host
 * task paces them to the link's rate. */
#include "bench/command/echo.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "comm/backend.h"

typedef struct echo {
    bl_comm comm;
    double bytes_per_s;
    double began_s;       /* of the collective under way; its stream's tasks alone use it */
    pthread_mutex_t lock; /* guards error */
    bl_error error;
} echo;

/* ---- pacing: the stream stalls until the bytes would have arrived ---- */

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

/* Every part is this rank's own: of a reduction the one that it gets. */
static bl_status copy(bl_stream *stream, const bl_comm_task *t)
{
    bool is_gather = t->call.kind == BL_COMM_ALL_GATHER;
    const char *own =
        (const char *)t->send + (is_gather ? 0 : t->comm->rank * (int64_t)t->call.bytes);

    for (int r = 0; r < (is_gather ? t->comm->size : 1); r++) {
        char *to = (char *)t->recv + (size_t)r * t->call.bytes;
        if (to != own) BL_TRY(bl_stream_copy(stream, to, own, t->call.bytes));
    }
    return BL_OK;
}

static bl_status echo_run(bl_stream *stream, const bl_comm_task *t)
{
    double n_received = (double)t->call.bytes * (t->comm->size - 1);

    if (t->call.kind != BL_COMM_ALL_GATHER && t->call.kind != BL_COMM_REDUCE_SCATTER) return BL_OK;
    BL_TRY(pace((echo *)t->comm, stream, false, n_received));
    BL_TRY(copy(stream, t));
    return pace((echo *)t->comm, stream, true, n_received);
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
    static const bl_comm_backend backend = {.run = echo_run,
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
