/* SPDX-License-Identifier: Apache-2.0 */
/* units_frames.c -- the gradients of a unit during a visit, if they are not in device memory: a
 * frame, in which compute adds them up, and their moves to host memory or disk and back. Frames are
 * device memory on a GPU:
 *
 *   a frame     entered by                                     left by
 *   READ        queue_read: after all writes from its memory   open_frame
 *   OPEN        open_frame: read, or cleared                   close_frame
 *   WRITTEN     close_frame: `written`, after copy and write   queue_read, open_frame
 *
 * On a GPU the disk's moves pass through a host frame of the same size, in use as long as its
 * frame. Frames of layers share memory with that of a tied embedding (overlap). */
#include "trained/units_paged_internal.h"
#include "base/sizes.h"

int64_t trained_units_frames_bytes(const bl_base_layout *layout, int64_t n_held,
                                   const held_unit *units, int64_t *table_bytes)
{
    int64_t layer = 0, tied = 0;

    *table_bytes = 0;
    for (int64_t u = 0; u < n_held; u++) {
        if (units[u].tier == BL_TIER_DEVICE) continue;
        bool is_table = u < layout->n_units && layout->units[u].whole_ring;
        int64_t *most = u == layout->n_units ? &tied : is_table ? table_bytes : &layer;
        *most = bl_max_i64(*most, units[u].n_bytes[TRAINED_GRAD]);
    }
    return *table_bytes + bl_max_i64(2 * layer, tied);
}

/* ---- memory ---- */

/* The frames' places in a block; tied and layers have the same. */
static void place_frames(const trained_units *units, char *block, char *places[N_FRAMES])
{
    int64_t table_bytes,
        n = trained_units_frames_bytes(units->layout, units->n_held, units->unit, &table_bytes),
        layer_bytes = (n - table_bytes) / 2 / BL_DEVICE_ALIGNMENT_BYTES * BL_DEVICE_ALIGNMENT_BYTES;

    for (int i = 0; i < N_FRAMES; i++) places[i] = NULL;
    if (!block) return;
    places[FRAME_TABLE] = block;
    places[FRAME_TIED] = places[FRAME_LAYER] = block + table_bytes;
    places[FRAME_LAYER + 1] = places[FRAME_LAYER] + layer_bytes;
}

bl_status trained_units_create_frames(trained_units *units, const bl_trained_units_bytes *n)
{
    bl_device *device = units->options.device;
    char *memory[N_FRAMES], *host[N_FRAMES];

    if (n->device_frames > 0)
        BL_TRY(bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)n->device_frames,
                               "a visit's gradients", (void **)&units->device_frames));
    if (n->host_frames > 0)
        BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, (size_t)n->host_frames, "a visit's gradients",
                               (void **)&units->host_frames));
    place_frames(units, units->device_frames ? units->device_frames : units->host_frames, memory);
    place_frames(units, units->host_frames, host);
    for (int i = 0; i < N_FRAMES; i++) {
        held_frame *frame = &units->frame[i];
        *frame = (held_frame){.memory = memory[i], .host = host[i], .unit = -1};
        BL_TRY(bl_event_create(device, &frame->ready));
        BL_TRY(bl_event_create(device, &frame->written));
    }
    return BL_OK;
}

void trained_units_destroy_frames(trained_units *units)
{
    for (int i = 0; i < N_FRAMES; i++) {
        bl_event_destroy(units->frame[i].ready);
        bl_event_destroy(units->frame[i].written);
    }
    bl_device_free(units->options.device, BL_SPACE_DEVICE, units->device_frames);
    bl_device_free(units->options.device, BL_SPACE_HOST, units->host_frames);
}

/* ---- moves ---- */

static int frame_of(const trained_units *units, int64_t unit)
{
    if (unit == units->n_units) return FRAME_TIED;
    if (units->layout->units[unit].whole_ring) return FRAME_TABLE;
    return FRAME_LAYER + (int)(unit & 1);
}

/* Whether two frames have memory in common. */
static bool overlap(int a, int b)
{
    return a == b || (a == FRAME_TIED && b < FRAME_TABLE) || (b == FRAME_TIED && a < FRAME_TABLE);
}

static bool is_on_disk(const trained_units *units, int64_t unit)
{
    return units->unit[unit].tier == BL_TIER_DISK;
}

static bl_lane lane_of(const trained_units *units, int64_t unit)
{
    return is_on_disk(units, unit) ? BL_LANE_DISK : BL_LANE_COPY;
}

/* The move between the unit's frame and its tier. */
static bl_move move_of(const trained_units *units, int64_t unit, bool is_out)
{
    const held_frame *frame = &units->frame[frame_of(units, unit)];
    const bl_place home = trained_units_gradient_place(units, unit),
                   device = {.tier = BL_TIER_DEVICE, .memory = frame->memory};

    return (bl_move){.from = is_out ? device : home,
                     .to = is_out ? home : device,
                     .n_bytes = (size_t)units->unit[unit].n_bytes[TRAINED_GRAD],
                     .through = is_on_disk(units, unit) ? frame->host : NULL,
                     .lane = BL_LANE_COPY,
                     .name = "gradients",
                     .unit = unit,
                     .item = -1};
}

/* Waits for the last moves out of its memory; those to disk are on the same stream. */
static bl_status queue_read(trained_units *units, int64_t unit)
{
    int index = frame_of(units, unit);
    const bl_move move = move_of(units, unit, false);

    units->frame[index].unit = unit;
    for (int i = 0; units->is_gpu && i < N_FRAMES; i++)
        if (overlap(i, index)) BL_TRY(bl_stream_wait(units->visit.in, units->frame[i].written));
    return bl_transfer_queue(&units->visit, &move, NULL, units->frame[index].ready);
}

static bl_status clear_frame(trained_units *units, int64_t unit, bl_stream *stream)
{
    int index = frame_of(units, unit);

    for (int i = 0; i < N_FRAMES; i++)
        if (overlap(i, index))
            BL_TRY(bl_timeline_wait(units->options.timeline, lane_of(units, unit), "gradients",
                                    unit, -1, stream, units->frame[i].written));
    return bl_stream_zero(stream, units->frame[index].memory,
                          (size_t)units->unit[unit].n_bytes[TRAINED_GRAD]);
}

/* ---- visits ---- */

float *trained_units_frame_rows(const trained_units *units, int64_t unit)
{
    return (float *)units->frame[frame_of(units, unit)].memory;
}

bl_status trained_units_open_frame(trained_units *units, int64_t unit, bl_stream *stream,
                                   float **rows)
{
    held_frame *frame = &units->frame[frame_of(units, unit)];

    *rows = trained_units_frame_rows(units, unit);
    if (units->unit[unit].state == UNIT_CLEAN) return clear_frame(units, unit, stream);
    if (frame->unit != unit) BL_TRY(queue_read(units, unit));
    frame->unit = -1;
    return bl_timeline_wait(units->options.timeline, lane_of(units, unit), "gradients", unit, -1,
                            stream, frame->ready);
}

bl_status trained_units_prefetch_next(trained_units *units, int64_t unit)
{
    int64_t next = unit - 1; /* also of the head */

    if (next < 0 || units->layout->units[next].whole_ring ||
        units->unit[next].tier == BL_TIER_DEVICE || units->unit[next].state != UNIT_SUMMED)
        return BL_OK;
    return queue_read(units, next);
}

bl_status trained_units_close_frame(trained_units *units, int64_t unit, bl_stream *stream)
{
    const bl_move move = move_of(units, unit, true);
    return bl_transfer_queue(&units->visit, &move, stream,
                             units->frame[frame_of(units, unit)].written);
}
