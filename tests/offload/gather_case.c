/* SPDX-License-Identifier: Apache-2.0 */
/* gather_case.c -- shards with known values, and the comparison of gathered slots. */
#include "gather_case.h"

#include <unistd.h>

bl_status gather_case_open(test_rank *self, int n_shards, gather_case *c)
{
    *c = (gather_case){.self = self};
    BL_TRY(bl_stream_create(self->device, "gathers", &c->gathers));
    BL_TRY(bl_stream_create(self->device, "copies", &c->copies));
    BL_TRY(bl_device_alloc(self->device, BL_SPACE_DEVICE, (size_t)n_shards * SHARD_BYTES, "shards",
                           (void **)&c->shards));
    for (int i = 0; i < n_shards * FLOATS; i++) c->shards[i] = test_value(self->rank, i, 5);
    return BL_OK;
}

void gather_case_close(gather_case *c)
{
    (void)bl_stream_synchronize(c->self->stream);
    if (c->gathers) (void)bl_stream_synchronize(c->gathers);
    if (c->copies) (void)bl_stream_synchronize(c->copies);
    bl_gather_ring_destroy(c->ring);
    bl_device_free(c->self->device, BL_SPACE_DEVICE, c->shards);
    bl_stream_destroy(c->copies);
    bl_stream_destroy(c->gathers);
}

typedef struct check_args {
    const float *gathered;
    int n_ranks, first;
    float offset;
    unsigned pause_us;
} check_args;

static bl_status check_values(bl_stream *stream, const void *argument)
{
    const check_args *a = argument;
    (void)stream;
    usleep(a->pause_us);
    for (int r = 0; r < a->n_ranks; r++)
        for (int i = 0; i < FLOATS; i++)
            if (a->gathered[r * FLOATS + i] != test_value(r, a->first + i, 5) + a->offset)
                return BL_FAIL(BL_EINTERNAL, "float %d of rank %d is %g", i, r,
                               (double)a->gathered[r * FLOATS + i]);
    return BL_OK;
}

bl_status gather_case_use(gather_case *c, int64_t unit, int item, int64_t shard, float offset,
                          unsigned pause_us)
{
    const void *gathered;
    BL_TRY(bl_gather_ring_acquire(c->ring, unit, item, c->self->stream, &gathered));
    check_args args = {gathered, c->self->n_ranks, (int)shard * FLOATS, offset, pause_us};
    BL_TRY(bl_stream_call(c->self->stream, check_values, &args, sizeof args));
    return bl_gather_ring_validate(c->ring);
}

bl_status gather_case_release(gather_case *c, int64_t unit)
{
    BL_TRY(bl_gather_ring_release(c->ring, unit, c->self->stream));
    return bl_gather_ring_validate(c->ring);
}

static bl_status pause_task(bl_stream *stream, const void *argument)
{
    (void)stream;
    usleep(*(const unsigned *)argument);
    return BL_OK;
}

bl_status gather_case_pause(bl_stream *stream, unsigned pause_us)
{
    return bl_stream_call(stream, pause_task, &pause_us, sizeof pause_us);
}
