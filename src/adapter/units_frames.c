/* SPDX-License-Identifier: Apache-2.0 */
/* units_frames.c -- the gradients of a unit during a visit, if they are not in device memory: a
 * frame, in which compute adds them up, and their way to host memory or disk and back. Frames are
 * device memory on a GPU. Copies run on the streams `out` and `in`, the disk's work on `disk`:
 *
 *   a frame     entered by                                     left by
 *   READ        queue_read: after all writes from its memory   open_frame
 *   OPEN        open_frame: read, or cleared                   close_frame
 *   WRITTEN     close_frame: `written`, after copy and write   queue_read, open_frame
 *
 * On a GPU the disk's transfers are from and to a host frame of the same size, in use as long as
 * its frame. */
#include "adapter/units_paged_internal.h"
#include "base/sizes.h"

int64_t adapter_units_frames_bytes(const bl_base_layout *layout, int64_t n_held,
                                   const held_unit *units, int64_t *table_bytes)
{
    int64_t layer = 0, tied = 0;

    *table_bytes = 0;
    for (int64_t u = 0; u < n_held; u++) {
        if (units[u].tier == BL_TIER_DEVICE) continue;
        bool is_table = u < layout->n_units && layout->units[u].whole_ring;
        int64_t *most = u == layout->n_units ? &tied : is_table ? table_bytes : &layer;
        *most = bl_max_i64(*most, units[u].n_bytes[ADAPTER_GRAD]);
    }
    return *table_bytes + bl_max_i64(2 * layer, tied);
}

/* ---- memory ---- */

/* The frames' places in a block; tied and layers have the same. */
static void place_frames(const adapter_units *units, char *block, char *places[N_FRAMES])
{
    int64_t table_bytes,
        n = adapter_units_frames_bytes(units->layout, units->n_held, units->unit, &table_bytes),
        layer_bytes = (n - table_bytes) / 2 / BL_DEVICE_ALIGNMENT_BYTES * BL_DEVICE_ALIGNMENT_BYTES;

    for (int i = 0; i < N_FRAMES; i++) places[i] = NULL;
    if (!block) return;
    places[FRAME_TABLE] = block;
    places[FRAME_TIED] = places[FRAME_LAYER] = block + table_bytes;
    places[FRAME_LAYER + 1] = places[FRAME_LAYER] + layer_bytes;
}

bl_status adapter_units_create_frames(adapter_units *units, const bl_adapter_units_bytes *n)
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
        BL_TRY(bl_event_create(device, &frame->complete));
        BL_TRY(bl_event_create(device, &frame->ready));
        BL_TRY(bl_event_create(device, &frame->written));
    }
    return BL_OK;
}

void adapter_units_destroy_frames(adapter_units *units)
{
    for (int i = 0; i < N_FRAMES; i++) {
        bl_event_destroy(units->frame[i].complete);
        bl_event_destroy(units->frame[i].ready);
        bl_event_destroy(units->frame[i].written);
    }
    bl_device_free(units->options.device, BL_SPACE_DEVICE, units->device_frames);
    bl_device_free(units->options.device, BL_SPACE_HOST, units->host_frames);
}

/* ---- transfers ---- */

static int frame_of(const adapter_units *units, int64_t unit)
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

static bool is_on_disk(const adapter_units *units, int64_t unit)
{
    return units->unit[unit].tier == BL_TIER_DISK;
}

static bl_lane lane_of(const adapter_units *units, int64_t unit)
{
    return is_on_disk(units, unit) ? BL_LANE_DISK : BL_LANE_COPY;
}

/* On a GPU: where copies of the frame come from and go to. */
static void *host_of(const adapter_units *units, int64_t unit)
{
    const held_unit *u = &units->unit[unit];
    if (is_on_disk(units, unit)) return units->frame[frame_of(units, unit)].host;
    return units->memory[BL_TIER_HOST][ADAPTER_GRAD] + u->offset[ADAPTER_GRAD];
}

typedef struct frame_args {
    adapter_units *units;
    int64_t unit;
    bool is_write;
} frame_args;

static bl_status frame_task(bl_stream *stream, const void *args)
{
    const frame_args *a = args;
    adapter_units *units = a->units;
    const held_unit *u = &units->unit[a->unit];
    bl_io_read io = {.offset_bytes = u->offset[ADAPTER_GRAD],
                     .n_bytes = (size_t)u->n_bytes[ADAPTER_GRAD],
                     .dst = units->frame[frame_of(units, a->unit)].host};

    (void)stream;
    BL_TRY(a->is_write ? bl_reader_submit_write(units->reader, &io)
                       : bl_reader_submit(units->reader, &io));
    return adapter_units_wait(units, units->reader, &io, a->unit);
}

static bl_status queue_disk(adapter_units *units, int64_t unit, bool is_write)
{
    const frame_args args = {units, unit, is_write};
    int span;

    BL_TRY(bl_timeline_begin(units->options.timeline, BL_LANE_DISK, "gradients", unit, -1,
                             units->disk, &span));
    BL_TRY(bl_stream_call(units->disk, frame_task, &args, sizeof args));
    return bl_timeline_end(units->options.timeline, span, units->disk,
                           units->unit[unit].n_bytes[ADAPTER_GRAD]);
}

static bl_status queue_copy(adapter_units *units, int64_t unit, bl_stream *stream, void *dst,
                            const void *src)
{
    int64_t n_bytes = units->unit[unit].n_bytes[ADAPTER_GRAD];
    int span;

    BL_TRY(bl_timeline_begin(units->options.timeline, BL_LANE_COPY, "gradients", unit, -1, stream,
                             &span));
    BL_TRY(bl_stream_copy(stream, dst, src, (size_t)n_bytes));
    return bl_timeline_end(units->options.timeline, span, stream, n_bytes);
}

/* Runs after the last writes of what was in its memory; of the disk's, on the same stream. */
static bl_status queue_read(adapter_units *units, int64_t unit)
{
    int index = frame_of(units, unit);
    held_frame *frame = &units->frame[index];

    frame->unit = unit;
    if (is_on_disk(units, unit)) {
        BL_TRY(queue_disk(units, unit, false));
        BL_TRY(bl_event_record(frame->ready, units->disk));
    }
    if (!units->is_gpu) return BL_OK;
    if (is_on_disk(units, unit)) BL_TRY(bl_stream_wait(units->in, frame->ready));
    for (int i = 0; i < N_FRAMES; i++)
        if (overlap(i, index)) BL_TRY(bl_stream_wait(units->in, units->frame[i].written));
    BL_TRY(queue_copy(units, unit, units->in, frame->memory, host_of(units, unit)));
    return bl_event_record(frame->ready, units->in);
}

static bl_status clear_frame(adapter_units *units, int64_t unit, bl_stream *stream)
{
    int index = frame_of(units, unit);

    for (int i = 0; i < N_FRAMES; i++)
        if (overlap(i, index))
            BL_TRY(bl_timeline_wait(units->options.timeline, lane_of(units, unit), "gradients",
                                    unit, -1, stream, units->frame[i].written));
    return bl_stream_zero(stream, units->frame[index].memory,
                          (size_t)units->unit[unit].n_bytes[ADAPTER_GRAD]);
}

/* ---- visits ---- */

float *adapter_units_frame_rows(const adapter_units *units, int64_t unit)
{
    return (float *)units->frame[frame_of(units, unit)].memory;
}

bl_status adapter_units_open_frame(adapter_units *units, int64_t unit, bl_stream *stream,
                                   float **rows)
{
    held_frame *frame = &units->frame[frame_of(units, unit)];

    *rows = adapter_units_frame_rows(units, unit);
    if (units->unit[unit].state == UNIT_CLEAN) return clear_frame(units, unit, stream);
    if (frame->unit != unit) BL_TRY(queue_read(units, unit));
    frame->unit = -1;
    return bl_timeline_wait(units->options.timeline, lane_of(units, unit), "gradients", unit, -1,
                            stream, frame->ready);
}

bl_status adapter_units_prefetch_next(adapter_units *units, int64_t unit)
{
    int64_t next = unit - 1; /* also of the head */

    if (next < 0 || units->layout->units[next].whole_ring ||
        units->unit[next].tier == BL_TIER_DEVICE || units->unit[next].state != UNIT_SUMMED)
        return BL_OK;
    return queue_read(units, next);
}

bl_status adapter_units_close_frame(adapter_units *units, int64_t unit, bl_stream *stream)
{
    held_frame *frame = &units->frame[frame_of(units, unit)];
    bl_stream *last = stream;

    if (units->is_gpu) {
        BL_TRY(bl_event_record(frame->complete, last));
        BL_TRY(bl_stream_wait(units->out, frame->complete));
        last = units->out;
        BL_TRY(queue_copy(units, unit, last, host_of(units, unit), frame->memory));
    }
    if (is_on_disk(units, unit)) {
        BL_TRY(bl_event_record(frame->complete, last));
        BL_TRY(bl_stream_wait(units->disk, frame->complete));
        last = units->disk;
        BL_TRY(queue_disk(units, unit, true));
    }
    return bl_event_record(frame->written, last);
}
