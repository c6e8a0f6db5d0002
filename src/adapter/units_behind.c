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

#include "adapter/units_paged_internal.h"
#include "base/clock.h"
#include "base/sizes.h"

/* ---- one unit ---- */

static bl_status put(units_behind *b, const adapter_span *span, adapter_array array,
                     int64_t at_bytes, int64_t element, const void *bytes, int64_t n_bytes)
{
    BL_TRY(bl_safetensors_writer_put(b->file.writer, b->file.tensor[array],
                                     span->file_first * element + at_bytes, bytes,
                                     (size_t)n_bytes));
    atomic_fetch_add(&b->n_bytes_written, n_bytes);
    atomic_store(&b->moved_s, bl_now_s());
    return BL_OK;
}

static bl_status put_memory(units_behind *b, const adapter_span *span, adapter_array array,
                            int64_t element, const char *memory)
{
    bl_staging *staging = b->staging;
    int64_t total = span->file_n * element;

    for (int64_t at = 0, n; at < total; at += n) {
        n = bl_min_i64((int64_t)staging->n_bytes, total - at);
        BL_TRY(bl_staging_download(staging, staging->bytes, memory + at, (size_t)n));
        BL_TRY(put(b, span, array, at, element, staging->bytes, n));
        if (atomic_load(&b->is_dropped)) return BL_OK;
    }
    return BL_OK;
}

static bl_status put_disk(adapter_units *units, const adapter_span *span, adapter_array array,
                          int64_t element)
{
    units_behind *b = &units->behind;
    bl_reader *updates, *reader = array == ADAPTER_W ? b->weights_reader : b->reader;

    for (int64_t first = 0, n; first < span->file_n; first += n) {
        n = bl_min_i64(UNITS_PIECE_ELEMENTS, span->file_n - first);
        bl_io_read io = adapter_units_transfer(units, span, array, first, n, b->piece, &updates);
        BL_TRY(bl_reader_submit(reader, &io));
        BL_TRY(adapter_units_wait(units, reader, &io, span->at.idx_unit));
        BL_TRY(put(b, span, array, first * element, element, b->piece, n * element));
        if (atomic_load(&b->is_dropped)) return BL_OK;
    }
    return BL_OK;
}

static bl_status put_unit(adapter_units *units, int64_t unit)
{
    const adapter_spans *spans = units->spans;

    for (int64_t s = spans->first[unit]; s < spans->first[unit + 1]; s++)
        for (int i = 0; i < (int)ADAPTER_GRAD; i++) {
            const adapter_span *span = &spans->span[s];
            int64_t element = adapter_units_element(units, (adapter_array)i);
            const char *memory = adapter_units_span_memory(units, span, (adapter_array)i);
            BL_TRY(memory ? put_memory(&units->behind, span, (adapter_array)i, element, memory)
                          : put_disk(units, span, (adapter_array)i, element));
        }
    return BL_OK;
}

/* ---- tasks ---- */

enum { TASK_FIRST = -1, TASK_END = -2 }; /* or a unit */

typedef struct behind_args {
    adapter_units *units;
    int64_t task;
} behind_args;

static bl_status run(adapter_units *units, int64_t task)
{
    const adapter_units_file *file = &units->behind.file;

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

static bl_status queue_task(adapter_units *units, int64_t task)
{
    const behind_args args = {units, task};
    return bl_stream_call(units->behind.stream, behind_task, &args, sizeof args);
}

/* After the last unit also queues the end of the file. */
static bl_status queue_unit(adapter_units *units, int64_t unit)
{
    units_behind *b = &units->behind;

    b->is_queued[unit] = true;
    b->n_left--;
    BL_TRY(queue_task(units, unit));
    BL_TRY(bl_event_record(b->written[unit], b->stream));
    return b->n_left == 0 ? queue_task(units, TASK_END) : BL_OK;
}

/* ---- the file ---- */

static int64_t count_bytes(const adapter_units *units)
{
    const adapter_spans *spans = units->spans;
    int64_t n = 0;

    for (int64_t s = 0; s < spans->first[units->n_units]; s++)
        for (int i = 0; i < (int)ADAPTER_GRAD; i++)
            n += spans->span[s].file_n * adapter_units_element(units, (adapter_array)i);
    return n;
}

bl_status adapter_units_begin_file(adapter_units *units, const adapter_units_file *file)
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
        if (units->unit[u].state != UNIT_WAITING) BL_TRY(queue_unit(units, u));
    return BL_OK;
}

bl_status adapter_units_continue_file(adapter_units *units, int64_t unit)
{
    units_behind *b = &units->behind;

    if (!b->is_active || b->is_queued[unit]) return BL_OK;
    BL_TRY(bl_stream_wait(b->stream, units->updated));
    return queue_unit(units, unit);
}

bl_status adapter_units_wait_for_file(adapter_units *units, int64_t unit, bl_lane lane,
                                      bl_stream *stream)
{
    units_behind *b = &units->behind;

    if (!b->is_active || (unit >= 0 && !b->is_queued[unit])) return BL_OK;
    return bl_timeline_wait(units->options.timeline, lane, "checkpoint", unit, -1, stream,
                            b->written[unit < 0 ? units->n_units : unit]);
}

bool adapter_units_file_is_done(adapter_units *units)
{
    const units_behind *b = &units->behind;
    return atomic_load(&b->is_done) || bl_stream_status(b->stream) != BL_OK;
}

bl_adapter_shard_progress adapter_units_file_progress(const adapter_units *units)
{
    const units_behind *b = &units->behind;
    int64_t n_written = atomic_load(&b->n_bytes_written), n_left = b->n_bytes - n_written;
    double now_s = bl_now_s(), moved_s = atomic_load(&b->moved_s);
    bool is_over = n_left <= 0 || atomic_load(&b->is_done);

    return (bl_adapter_shard_progress){
        .has_waiting = b->n_left > 0,
        .writing_s = moved_s - b->began_s,
        .idle_s = now_s - moved_s,
        .left_s = is_over         ? 0
                  : n_written > 0 ? (now_s - b->began_s) / (double)n_written * (double)n_left
                                  : INFINITY};
}

bl_status adapter_units_end_file(adapter_units *units)
{
    units_behind *b = &units->behind;

    if (!b->is_active) return BL_OK;
    bl_status st = b->n_left > 0 ? adapter_units_flush(units) : BL_OK;
    if (st == BL_OK) st = bl_stream_synchronize(b->stream);
    if (st != BL_OK) {
        bl_error error;
        bl_error_save(&error, st);
        adapter_units_drop_file(units);
        return bl_error_restore(&error);
    }
    b->is_active = false;
    return b->error.status == BL_OK ? BL_OK : bl_error_restore(&b->error);
}

void adapter_units_drop_file(adapter_units *units)
{
    units_behind *b = &units->behind;

    if (!b->is_active) return;
    atomic_store(&b->is_dropped, true);
    (void)bl_stream_synchronize(b->stream);
    b->is_active = false;
}

bl_stream *adapter_units_behind(const adapter_units *units)
{
    return units->behind.stream;
}

/* ---- memory ---- */

bl_status adapter_units_create_behind(adapter_units *units, const bl_adapter_units_bytes *n)
{
    units_behind *b = &units->behind;
    bl_device *device = units->options.device;
    bl_io_files *weights = bl_pages_files(units->options.weights->pages);

    BL_TRY(bl_stream_create_host(device, "checkpoint", &b->stream));
    BL_TRY(bl_staging_create(device, BL_STAGING_BYTES, "staging of a checkpoint", &b->staging));
    b->written = calloc((size_t)units->n_units + 1, sizeof *b->written);
    b->is_queued = calloc((size_t)units->n_units + 1, sizeof *b->is_queued);
    if (!b->written || !b->is_queued) return BL_FAIL(BL_ENOMEM, "the units of a checkpoint");
    for (int64_t u = 0; u <= units->n_units; u++) BL_TRY(bl_event_create(device, &b->written[u]));
    if (n->behind > BL_STAGING_BYTES)
        BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, (size_t)UNITS_PIECE_ELEMENTS * UNITS_FLOAT,
                               "pieces of a checkpoint", (void **)&b->piece));
    if (units->files)
        BL_TRY(adapter_units_create_reader(units, units->files, UNITS_BEHIND_DEPTH, &b->reader));
    if (weights)
        BL_TRY(adapter_units_create_reader(units, weights, UNITS_BEHIND_DEPTH, &b->weights_reader));
    return BL_OK;
}

void adapter_units_destroy_behind(adapter_units *units)
{
    units_behind *b = &units->behind;

    if (b->stream) adapter_units_drop_file(units);
    bl_stream_destroy(b->stream);
    bl_reader_destroy(b->reader);
    bl_reader_destroy(b->weights_reader);
    for (int64_t u = 0; b->written && u <= units->n_units; u++) bl_event_destroy(b->written[u]);
    bl_staging_destroy(b->staging);
    bl_device_free(units->options.device, BL_SPACE_HOST, b->piece);
    free(b->written);
    free(b->is_queued);
}
