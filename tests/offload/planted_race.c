/* SPDX-License-Identifier: Apache-2.0 */
/* Does ThreadSanitizer see what was forgotten? Two ranks gather on one stream and read the result
 * on another:
 *   planted_race stream ...   by themselves; what orders the two is an event
 *   planted_race ring ...     through a ring; what orders them is the acquire on the reader's own
 *                             stream
 * and
 *   ... race   forgets it
 *   ... late   forgets it too, but the read is given when the gather is long over and the values
 *              are right
 *   ... wait   has it
 * The first two must be reported: whether a missing wait is found must not depend on who happens to
 * be faster. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "offload/gather_ring.h"
#include "test_ranks.h"

enum { N_VALUES = 64, LATE_US = 50000 };

typedef struct variant {
    bool is_late, has_wait;
} variant;

typedef struct read_args {
    const int *values;
    int n_values;
    int *sum;
} read_args;

static bl_status read_values(bl_stream *stream, const void *args)
{
    const read_args *a = args;
    (void)stream;
    int sum = 0;
    for (int i = 0; i < a->n_values; i++) sum += a->values[i];
    *a->sum = sum;
    return BL_OK;
}

/* Reads what has been gathered on the rank's own stream. */
static bl_status read_gathered(test_rank *self, const int *values)
{
    const variant *v = self->arg;
    int sum = 0;
    read_args args = {.values = values, .n_values = self->n_ranks * N_VALUES, .sum = &sum};

    if (v->is_late) usleep(LATE_US);
    BL_TRY(bl_stream_call(self->stream, read_values, &args, sizeof args));
    BL_TRY(bl_stream_synchronize(self->stream));
    if (v->has_wait) TEST_CHECK(sum == 3 * N_VALUES);
    return BL_OK;
}

static bl_status gather_on_a_stream(test_rank *self)
{
    const variant *v = self->arg;
    bl_stream *gather = NULL;
    bl_event *gathered = NULL;
    int *values = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gather", &gather));
    BL_TRY_GOTO(st, done, bl_event_create(self->device, &gathered));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(self->device, BL_SPACE_DEVICE,
                                (size_t)self->n_ranks * N_VALUES * sizeof *values, "values",
                                (void **)&values));
    int *own = values + self->rank * N_VALUES;
    for (int i = 0; i < N_VALUES; i++) own[i] = self->rank + 1;
    BL_TRY_GOTO(st, done,
                bl_comm_all_gather(self->comm, gather, own, values, N_VALUES * sizeof *values));
    BL_TRY_GOTO(st, done, bl_event_record(gathered, gather));
    if (v->has_wait) BL_TRY_GOTO(st, done, bl_stream_wait(self->stream, gathered));
    BL_TRY_GOTO(st, done, read_gathered(self, values));
    st = bl_stream_synchronize(gather);
done:
    bl_stream_synchronize(self->stream);
    bl_stream_destroy(gather);
    bl_event_destroy(gathered);
    bl_device_free(self->device, BL_SPACE_DEVICE, values);
    return st;
}

static bl_status gather_in_a_ring(test_rank *self)
{
    const variant *v = self->arg;
    bl_gather_ring *ring = NULL;
    bl_stream *gathers = NULL;
    int *shard = NULL;
    const void *slot;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gathers", &gathers));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(self->device, BL_SPACE_DEVICE, N_VALUES * sizeof *shard, "shard",
                                (void **)&shard));
    for (int i = 0; i < N_VALUES; i++) shard[i] = self->rank + 1;
    bl_gather_unit unit = {.n_items = 1,
                           .item = {{.shard = shard, .shard_bytes = N_VALUES * sizeof *shard}}};
    bl_gather_ring_options options = {
        .device = self->device, .comm = self->comm, .stream = gathers, .depth = 1};
    BL_TRY_GOTO(st, done, bl_gather_ring_create(&options, 1, &unit, &ring));
    /* Acquired on the stream of the gathers, nothing but that stream waits. */
    BL_TRY_GOTO(st, done,
                bl_gather_ring_acquire(ring, 0, 0, v->has_wait ? self->stream : gathers, &slot));
    BL_TRY_GOTO(st, done, read_gathered(self, slot));
    st = bl_stream_synchronize(gathers);
done:
    bl_stream_synchronize(self->stream);
    bl_stream_destroy(gathers);
    bl_gather_ring_destroy(ring);
    bl_device_free(self->device, BL_SPACE_DEVICE, shard);
    return st;
}

int main(int argc, char **argv)
{
    const char *how = argc == 3 ? argv[1] : "", *name = argc == 3 ? argv[2] : "";
    variant v = {.is_late = strcmp(name, "late") == 0, .has_wait = strcmp(name, "wait") == 0};

    test_rank_fn gather = strcmp(how, "stream") == 0 ? gather_on_a_stream
                          : strcmp(how, "ring") == 0 ? gather_in_a_ring
                                                     : NULL;
    if (!gather || (!v.is_late && !v.has_wait && strcmp(name, "race") != 0)) {
        fprintf(stderr, "usage: planted_race stream|ring race|late|wait\n");
        return 2;
    }
    if (test_ranks_run(2, 1, 60, gather, &v, NULL) == BL_OK) return 0;
    fprintf(stderr, "planted_race: %s\n", bl_error_text());
    return 1;
}
