/* SPDX-License-Identifier: Apache-2.0 */
/* Does ThreadSanitizer see a missing event? Two ranks gather on one stream and read the result on another.
 *   planted_race race   forgets the event between the two
 *   planted_race late   forgets it too, but the read is given when the gather is long over and the values are
 * right planted_race wait   has it The first two must be reported: whether a missing event is found must not
 * depend on who happens to be faster. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    bl_stream *gather = NULL;
    bl_event *gathered = NULL;
    int *values = NULL, sum = 0;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gather", &gather));
    BL_TRY_GOTO(st, done, bl_event_create(self->device, &gathered));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(self->device, BL_SPACE_DEVICE,
                                (size_t)self->n_ranks * N_VALUES * sizeof *values, "values",
                                (void **)&values));
    int *own = values + self->rank * N_VALUES;
    for (int i = 0; i < N_VALUES; i++) own[i] = self->rank + 1;
    BL_TRY_GOTO(st, done, bl_comm_all_gather(self->comm, gather, own, values, N_VALUES * sizeof *values));
    BL_TRY_GOTO(st, done, bl_event_record(gathered, gather));
    if (v->is_late) usleep(LATE_US);
    if (v->has_wait) BL_TRY_GOTO(st, done, bl_stream_wait(self->stream, gathered));
    read_args args = {.values = values, .n_values = self->n_ranks * N_VALUES, .sum = &sum};
    BL_TRY_GOTO(st, done, bl_stream_call(self->stream, read_values, &args, sizeof args));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    if (v->has_wait) TEST_CHECK_GOTO(st, done, sum == 3 * N_VALUES);
    st = bl_stream_synchronize(gather);
done:
    bl_stream_synchronize(self->stream);
    bl_stream_destroy(gather);
    bl_event_destroy(gathered);
    bl_device_free(self->device, BL_SPACE_DEVICE, values);
    return st;
}

int main(int argc, char **argv)
{
    const char *name = argc == 2 ? argv[1] : "";
    variant v = {.is_late = strcmp(name, "late") == 0, .has_wait = strcmp(name, "wait") == 0};

    if (!v.is_late && !v.has_wait && strcmp(name, "race") != 0) {
        fprintf(stderr, "usage: planted_race race|late|wait\n");
        return 2;
    }
    if (test_ranks_run(2, 1, 60, gather_and_read, &v, NULL) == BL_OK) return 0;
    fprintf(stderr, "planted_race: %s\n", bl_error_text());
    return 1;
}
