/* SPDX-License-Identifier: Apache-2.0 */
/* units_behind.c -- writes a checkpoint file while the next steps run. One task per unit, on a host
 * stream, copies the unit's moments and weights into the file. A unit is written
 *
 *   after    the update of the checkpoint's step: at once, or if the unit is WAITING, after its
 *            update
 *   before   the next update, which waits for the unit's event `written`
 *
 * So the file has the state after one step, without a copy of the state. A whole step is between
 * two updates of a unit. Each array has a fixed place in the file, so units can be written in any
 * order.
 *
 * A failed task saves its error for end_file. Later tasks then do nothing, and training streams
 * that wait for them do not fail. */
#include <math.h>
#include <stdlib.h>

#include "trained/units_paged_internal.h"
#include "base/clock.h"
#include "base/sizes.h"

/* ---- one unit ---- */

static bl_status put(units_behind *b, const trained_span *span, trained_array array,
                     int64_t at_bytes, int64_t element, const void *bytes, int64_t n_bytes)
{
    BL_TRY(bl_safetensors_writer_put(b->file.writer, b->file.tensor[array],
                                     span->file_first * element + at_bytes, bytes,
                                     (size_t)n_bytes));
    atomic_fetch_add(&b->n_bytes_written, n_bytes);
    atomic_store(&b->moved_s, bl_now_s());
    return BL_OK;
}

static bl_status put_array(trained_units *units, const trained_span *span, trained_array array)
{
    units_behind *b = &units->behind;
    int64_t element = trained_units_element(units, array), total = span->file_n * element;

    for (int64_t at = 0, n; at < total; at += n) {
        bl_place from = trained_units_place(units, span, array, at / element);
        bool is_on_disk = from.tier == BL_TIER_DISK;
        const bl_place to = {.tier = BL_TIER_HOST,
                             .memory = is_on_disk ? b->piece : b->staging->bytes};
        n = bl_min_i64(is_on_disk ? UNITS_PIECE_ELEMENTS * element : (int64_t)b->staging->n_bytes,
                       total - at);
        bl_status st = bl_transfer_now(&b->mover, &from, &to, trained_units_place_bytes(&from, n));
        BL_TRY(is_on_disk ? trained_units_explain(units, span->at.idx_unit, st) : st);
        BL_TRY(put(b, span, array, at, element, to.memory, n));
        if (atomic_load(&b->is_dropped)) return BL_OK;
    }
    return BL_OK;
}

static bl_status put_unit(trained_units *units, int64_t unit)
{
    const trained_spans *spans = units->spans;

    for (int64_t s = spans->first[unit]; s < spans->first[unit + 1]; s++)
        for (int i = 0; i < (int)TRAINED_GRAD; i++)
            BL_TRY(put_array(units, &spans->span[s], (trained_array)i));
    return BL_OK;
}

/* ---- tasks ---- */

enum { TASK_FIRST = -1, TASK_END = -2 }; /* or a unit */

typedef struct behind_args {
    trained_units *units;
    int64_t task;
} behind_args;

static bl_status run(trained_units *units, int64_t task)
{
    const trained_units_file *file = &units->behind.file;

    if (task == TASK_FIRST) return file->first(file->user, units->behind.staging);
    return task == TASK_END ? file->end(file->user) : put_unit(units, task);
}

static bl_status behind_task(bl_stream *stream, const void *args)
{
    const behind_args *a = args;
    units_behind *b = &a->units->behind;

    (void)stream;
    if (b->error.status == BL_OK && !atomic_load(&b->is_dropped)) {
        bl_status st = run(a->units, a->task);
        if (st != BL_OK) bl_error_save(&b->error, st);
    }
    if (a->task == TASK_END) atomic_store(&b->is_done, true);
    return BL_OK;
}

static bl_status queue_task(trained_units *units, int64_t task)
{
    const behind_args args = {units, task};
    return bl_stream_call(units->behind.stream, behind_task, &args, sizeof args);
}

/* After the last unit also queues the end of the file. */
static bl_status queue_unit(trained_units *units, int64_t unit)
{
    units_behind *b = &units->behind;

    b->is_queued[unit] = true;
    b->n_left--;
    BL_TRY(queue_task(units, unit));
    BL_TRY(bl_event_record(b->written[unit], b->stream));
    return b->n_left == 0 ? queue_task(units, TASK_END) : BL_OK;
}

/* ---- the file ---- */

static int64_t count_bytes(const trained_units *units)
{
    const trained_spans *spans = units->spans;
    int64_t n = 0;

    for (int64_t s = 0; s < spans->first[units->n_units]; s++)
        for (int i = 0; i < (int)TRAINED_GRAD; i++)
            n += spans->span[s].file_n * trained_units_element(units, (trained_array)i);
    return n;
}

bl_status trained_units_begin_file(trained_units *units, const trained_units_file *file)
{
    units_behind *b = &units->behind;

    if (b->is_active) return BL_FAIL(BL_EINTERNAL, "a checkpoint before the last one's end");
    b->file = *file;
    b->is_active = true;
    b->n_left = units->n_units;
    b->error = (bl_error){.status = BL_OK};
    b->began_s = bl_now_s();
    b->n_bytes = count_bytes(units);
    atomic_store(&b->moved_s, b->began_s);
    atomic_store(&b->n_bytes_written, 0);
    atomic_store(&b->is_dropped, false);
    atomic_store(&b->is_done, false);
    for (int64_t u = 0; u < units->n_units; u++) b->is_queued[u] = false;
    BL_TRY(queue_task(units, TASK_FIRST));
    BL_TRY(bl_event_record(b->written[units->n_units], b->stream));
    for (int64_t u = 0; u < units->n_units; u++)
        if (units->unit[u].state < UNIT_WAITING) BL_TRY(queue_unit(units, u));
    return BL_OK;
}

bl_status trained_units_continue_file(trained_units *units, int64_t unit)
{
    units_behind *b = &units->behind;

    if (!b->is_active || b->is_queued[unit]) return BL_OK;
    BL_TRY(bl_stream_wait(b->stream, units->unit[unit].updated));
    return queue_unit(units, unit);
}

bl_status trained_units_wait_for_file(trained_units *units, int64_t unit, bl_lane lane,
                                      bl_stream *stream)
{
    units_behind *b = &units->behind;

    if (!b->is_active || (unit >= 0 && !b->is_queued[unit])) return BL_OK;
    return (stream == units->disk ? bl_timeline_wait : bl_timeline_wait_here)(
        units->options.timeline, lane, "checkpoint", unit, -1, stream,
        b->written[unit < 0 ? units->n_units : unit]);
}

bool trained_units_file_is_done(trained_units *units)
{
    const units_behind *b = &units->behind;
    return atomic_load(&b->is_done) || bl_stream_status(b->stream) != BL_OK;
}

bl_trained_shard_progress trained_units_file_progress(const trained_units *units)
{
    const units_behind *b = &units->behind;
    int64_t n_written = atomic_load(&b->n_bytes_written), n_left = b->n_bytes - n_written;
    double now_s = bl_now_s(), moved_s = atomic_load(&b->moved_s);
    bool is_over = n_left <= 0 || atomic_load(&b->is_done);

    return (bl_trained_shard_progress){
        .has_waiting = b->n_left > 0,
        .writing_s = moved_s - b->began_s,
        .idle_s = now_s - moved_s,
        .left_s = is_over         ? 0
                  : n_written > 0 ? (now_s - b->began_s) / (double)n_written * (double)n_left
                                  : INFINITY};
}

bl_status trained_units_end_file(trained_units *units)
{
    units_behind *b = &units->behind;

    if (!b->is_active) return BL_OK;
    bl_status st = b->n_left > 0 ? trained_units_flush(units) : BL_OK;
    if (st == BL_OK) st = bl_stream_synchronize(b->stream);
    if (st != BL_OK) {
        bl_error error;
        bl_error_save(&error, st);
        trained_units_drop_file(units);
        return bl_error_restore(&error);
    }
    b->is_active = false;
    return b->error.status == BL_OK ? BL_OK : bl_error_restore(&b->error);
}

void trained_units_drop_file(trained_units *units)
{
    units_behind *b = &units->behind;

    if (!b->is_active) return;
    atomic_store(&b->is_dropped, true);
    (void)bl_stream_synchronize(b->stream);
    b->is_active = false;
}

bl_stream *trained_units_behind(const trained_units *units)
{
    return units->behind.stream;
}

/* ---- memory ---- */

bl_status trained_units_create_behind(trained_units *units, const bl_trained_units_bytes *n)
{
    units_behind *b = &units->behind;
    bl_device *device = units->options.device;
    bl_io_files *const files[] = {[FILE_STATE] = units->files,
                                  [FILE_WEIGHTS] = bl_pages_files(units->options.weights->pages)};

    BL_TRY(bl_stream_create_host(device, "checkpoint", &b->stream));
    BL_TRY(bl_staging_create(device, BL_STAGING_BYTES, "staging of a checkpoint", &b->staging));
    b->mover = (bl_mover){.device = device, .out = b->staging->stream};
    b->written = calloc((size_t)units->n_units + 1, sizeof *b->written);
    b->is_queued = calloc((size_t)units->n_units + 1, sizeof *b->is_queued);
    if (!b->written || !b->is_queued) return BL_FAIL(BL_ENOMEM, "the units of a checkpoint");
    for (int64_t u = 0; u <= units->n_units; u++) BL_TRY(bl_event_create(device, &b->written[u]));
    if (n->behind > BL_STAGING_BYTES)
        BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, (size_t)UNITS_PIECE_ELEMENTS * UNITS_FLOAT,
                               "pieces of a checkpoint", (void **)&b->piece));
    for (size_t f = 0; f < BL_COUNT(files); f++)
        if (files[f])
            BL_TRY(trained_units_create_reader(units, files[f], UNITS_BEHIND_DEPTH,
                                               &b->mover.reader[f]));
    return BL_OK;
}

void trained_units_destroy_behind(trained_units *units)
{
    units_behind *b = &units->behind;

    if (b->stream) trained_units_drop_file(units);
    bl_stream_destroy(b->stream);
    for (int f = 0; f < BL_MOVER_FILES; f++) bl_reader_destroy(b->mover.reader[f]);
    for (int64_t u = 0; b->written && u <= units->n_units; u++) bl_event_destroy(b->written[u]);
    bl_staging_destroy(b->staging);
    bl_device_free(units->options.device, BL_SPACE_HOST, b->piece);
    free(b->written);
    free(b->is_queued);
}
