/* SPDX-License-Identifier: Apache-2.0 */
/* Does ThreadSanitizer see a reader of a ring slot that did not acquire it on its own stream? Two ranks
 * gather a unit; the slot is read on another stream. planted_race_ring race   skips the acquire's wait
 *   planted_race_ring late   skips it too, but the read is given when the gather is long over and the values
 * are right planted_race_ring wait   acquires The first two must be reported: whether a missing wait is found
 * must not depend on who happens to be faster. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm/gather_ring.h"
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

static bl_status gather_and_read(test_rank *self)
{
    const variant *v = self->arg;
    bl_gather_ring *ring = NULL;
    bl_stream *gathers = NULL;
    int *shard = NULL, sum = 0;
    const void *slot;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gathers", &gathers));
    BL_TRY_GOTO(
        st, done,
        bl_device_alloc(self->device, BL_SPACE_DEVICE, N_VALUES * sizeof *shard, "shard", (void **)&shard));
    for (int i = 0; i < N_VALUES; i++) shard[i] = self->rank + 1;
    bl_gather_unit unit = {.n_items = 1, .item = {{.shard = shard, .shard_bytes = N_VALUES * sizeof *shard}}};
    bl_gather_ring_options options = {
        .device = self->device, .comm = self->comm, .stream = gathers, .depth = 1};
    BL_TRY_GOTO(st, done, bl_gather_ring_create(&options, 1, &unit, &ring));
    /* Acquired on the stream of the gathers, nothing but that stream waits. */
    BL_TRY_GOTO(st, done, bl_gather_ring_acquire(ring, 0, 0, v->has_wait ? self->stream : gathers, &slot));
    if (v->is_late) usleep(LATE_US);
    read_args args = {.values = slot, .n_values = self->n_ranks * N_VALUES, .sum = &sum};
    BL_TRY_GOTO(st, done, bl_stream_call(self->stream, read_values, &args, sizeof args));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    if (v->has_wait) TEST_CHECK_GOTO(st, done, sum == 3 * N_VALUES);
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
    const char *name = argc == 2 ? argv[1] : "";
    variant v = {.is_late = strcmp(name, "late") == 0, .has_wait = strcmp(name, "wait") == 0};

    if (!v.is_late && !v.has_wait && strcmp(name, "race") != 0) {
        fprintf(stderr, "usage: planted_race_ring race|late|wait\n");
        return 2;
    }
    if (test_ranks_run(2, 1, 60, gather_and_read, &v, NULL) == BL_OK) return 0;
    fprintf(stderr, "planted_race_ring: %s\n", bl_error_text());
    return 1;
}
