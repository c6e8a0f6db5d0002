/* SPDX-License-Identifier: Apache-2.0 */
/* echo.c -- a communicator with one real rank: collectives copy the rank's own data, and a stream
 * on a thread of the host paces them to the link's rate.
 *
 * On a link, other ranks' data arrives without this device's copies, so copies that stand for it
 * must not take the device's time in every gather: they are made when the memory was not last
 * filled by the same gather, and later gathers copy the own data alone. */
#include "bench/command/echo.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "comm/backend.h"

enum { N_FILLED = 64 }; /* a ring has fewer slots for matrices */

/* Memory that holds a gather's result. */
typedef struct filled {
    const char *begin;
    size_t bytes; /* 0: none */
} filled;

typedef struct echo {
    bl_comm comm;
    double bytes_per_s;
    /* with a rate, from the first collective on */
    bl_stream *host;
    bl_event *begun, *arrived;
    filled filled[N_FILLED];
    int next;             /* the entry that is replaced next */
    pthread_mutex_t lock; /* guards error */
    bl_error error;
} echo;

/* ---- pacing: the stream waits until the bytes would have arrived ---- */

static bl_status sleep_task(bl_stream *stream, const void *args)
{
    double seconds = *(const double *)args;
    struct timespec left = {(time_t)seconds, (long)(fmod(seconds, 1.0) * 1e9)};
    (void)stream;
    while (nanosleep(&left, &left) != 0) continue;
    return BL_OK;
}

static bl_status open_host(echo *self, bl_device *device)
{
    if (self->host) return BL_OK;
    BL_TRY(bl_event_create(device, &self->begun));
    BL_TRY(bl_event_create(device, &self->arrived));
    return bl_stream_create_host(device, "link", &self->host);
}

/* From here on the bytes arrive; `arrived` fires when they have. */
static bl_status send(echo *self, bl_stream *stream, double n_bytes)
{
    double seconds = n_bytes / self->bytes_per_s;

    BL_TRY(open_host(self, bl_stream_device(stream)));
    BL_TRY(bl_event_record(self->begun, stream));
    BL_TRY(bl_stream_wait(self->host, self->begun));
    BL_TRY(bl_stream_call(self->host, sleep_task, &seconds, sizeof seconds));
    return bl_event_record(self->arrived, self->host);
}

/* ---- collectives ---- */

/* Whether the memory still holds what the last gather into it left there; from now on it does. */
static bool was_filled(echo *self, const char *begin, size_t bytes)
{
    filled *same = NULL;

    for (int i = 0; i < N_FILLED; i++) {
        filled *f = &self->filled[i];
        if (f->begin == begin && f->bytes == bytes)
            same = f;
        else if (begin < f->begin + f->bytes && f->begin < begin + bytes)
            f->bytes = 0;
    }
    if (same) return true;
    self->filled[self->next] = (filled){begin, bytes};
    self->next = (self->next + 1) % N_FILLED;
    return false;
}

/* Every part is this rank's own: of a reduction the one that it gets. */
static bl_status copy(bl_stream *stream, const bl_comm_task *t)
{
    bool is_gather = t->call.kind == BL_COMM_ALL_GATHER;
    int rank = t->comm->rank, n = is_gather ? t->comm->size : 1;
    echo *self = (echo *)t->comm;
    const char *own = (const char *)t->send + (is_gather ? 0 : rank * (int64_t)t->call.bytes);
    bool is_filled =
        is_gather && self->bytes_per_s > 0 && was_filled(self, t->recv, (size_t)n * t->call.bytes);

    for (int r = 0; r < n; r++) {
        char *to = (char *)t->recv + (size_t)r * t->call.bytes;
        if (to != own && (!is_filled || r == rank))
            BL_TRY(bl_stream_copy(stream, to, own, t->call.bytes));
    }
    return BL_OK;
}

static bl_status echo_run(bl_stream *stream, const bl_comm_task *t)
{
    echo *self = (echo *)t->comm;
    bool is_paced = self->bytes_per_s > 0;

    if (t->call.kind != BL_COMM_ALL_GATHER && t->call.kind != BL_COMM_REDUCE_SCATTER) return BL_OK;
    if (is_paced) BL_TRY(send(self, stream, (double)t->call.bytes * (t->comm->size - 1)));
    BL_TRY(copy(stream, t));
    return is_paced ? bl_stream_wait(stream, self->arrived) : BL_OK;
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
    bl_stream_destroy(self->host);
    bl_event_destroy(self->begun);
    bl_event_destroy(self->arrived);
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
    *self = (echo){.comm = {.backend = &backend,
                            .rank = rank,
                            .size = n_ranks,
                            .sum_block = BL_COMM_SUM_BLOCK},
                   .bytes_per_s = bytes_per_s};
    pthread_mutex_init(&self->lock, NULL);
    *out = &self->comm;
    return BL_OK;
}
