/* SPDX-License-Identifier: Apache-2.0 */
/* units.c -- the gradients of a visit; the step over all units. */
#include "trained/units_paged_internal.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

bl_status trained_units_explain(const trained_units *units, int64_t unit, bl_status st)
{
    if (st == BL_OK) return BL_OK;
    return unit < units->n_units && !units->layout->units[unit].whole_ring
               ? bl_error_prefix(st, "state of layer %lld", (long long)unit)
               : bl_error_prefix(st, "state of the vocabulary's weights");
}

/* ---- the gradients of a visit ---- */

static float *gradients_in_memory(const trained_units *units, int64_t unit)
{
    return trained_units_gradient_place(units, unit).memory;
}

static bl_status open_unit(trained_units *units, int64_t unit, bl_stream *stream, float **rows)
{
    held_unit *u = &units->unit[unit];

    *rows = NULL;
    if (u->n_bytes[TRAINED_GRAD] == 0) return BL_OK;
    if (u->state >= UNIT_WAITING)
        return BL_FAIL(BL_EINTERNAL, "gradients of unit %lld, which waits for its update",
                       (long long)unit);
    if (u->tier != BL_TIER_DEVICE) {
        BL_TRY(trained_units_open_frame(units, unit, stream, rows));
    } else {
        *rows = gradients_in_memory(units, unit);
        if (u->state == UNIT_CLEAN)
            BL_TRY(bl_stream_zero(stream, *rows, (size_t)u->n_bytes[TRAINED_GRAD]));
    }
    u->state = UNIT_SUMMED;
    return BL_OK;
}

bl_status trained_units_open_gradient(trained_units *units, int64_t unit, bl_stream *stream,
                                      float **rows)
{
    BL_TRY(open_unit(units, unit, stream, rows));
    return unit < units->n_units ? trained_units_prefetch_next(units, unit) : BL_OK;
}

static bl_status sum_squares(trained_units *units, int64_t unit, const float *rows,
                             bl_stream *stream)
{
    BL_TRY(bl_stream_zero(stream, &units->squares[unit], sizeof(double)));
    return bl_sum_squares(
        stream, &(bl_sum_squares_args){units->unit[unit].n_bytes[TRAINED_GRAD] / UNITS_FLOAT, rows,
                                       &units->squares[unit]});
}

bl_status trained_units_close_gradient(trained_units *units, int64_t unit, bl_stream *stream)
{
    if (units->unit[unit].tier == BL_TIER_DEVICE) return BL_OK;
    if (unit < units->n_units)
        BL_TRY(sum_squares(units, unit, trained_units_frame_rows(units, unit), stream));
    return trained_units_close_frame(units, unit, stream);
}

/* ---- the step ---- */

/* Arguments for the elements of [first, end) of a span that have the learning rate of the first. */
static bl_adamw_args adamw_args(const trained_units *units, const trained_span *span, int64_t first,
                                int64_t end, char *const memory[TRAINED_N_ARRAYS], int64_t offset)
{
    const bl_model_config *config = &units->options.weights->model->config;
    int64_t cols = span->at.part->row_bytes / UNITS_FLOAT, end_row;
    bl_tensor m = bl_tensor_of(memory[TRAINED_M], units->options.placement.moments),
              v = bl_tensor_of(memory[TRAINED_V], units->options.placement.moments);
    bl_adamw_args args = units->update;

    args.lr *= bl_trained_rate(config, units->spans->set, span->at.idx_unit, span->at.idx_matrix,
                               span->row + first / cols, &end_row);
    if (end_row < INT64_MAX) end = bl_min_i64(end, (end_row - span->row) * cols);
    args.n = end - first;
    args.grad = (const float *)memory[TRAINED_GRAD] + offset;
    args.w = (float *)memory[TRAINED_W] + offset;
    args.m = bl_tensor_at(m, offset);
    args.v = bl_tensor_at(v, offset);
    args.seed = units->options.placement.seed;
    args.tensor = span->at.index;
    args.first = units->options.rank * ((int64_t)span->at.part->shard_bytes / UNITS_FLOAT) +
                 span->first + first;
    return args;
}

bl_status trained_units_adamw(const trained_units *units, const trained_span *span, int64_t first,
                              int64_t n, char *const memory[TRAINED_N_ARRAYS], bl_stream *stream,
                              bl_status (*adamw)(bl_stream *stream, const bl_adamw_args *args))
{
    for (int64_t at = 0; at < n;) {
        bl_adamw_args args = adamw_args(units, span, first + at, first + n, memory, at);
        BL_TRY(adamw(stream, &args));
        at += args.n;
    }
    return BL_OK;
}

/* The gradients of a unit without a visit are zero. */
static bl_status visit_all(trained_units *units, bl_stream *stream)
{
    float *rows;

    for (int64_t u = 0; u < units->n_held; u++) {
        if (units->unit[u].state != UNIT_CLEAN) continue;
        BL_TRY(open_unit(units, u, stream, &rows));
        BL_TRY(trained_units_close_gradient(units, u, stream));
    }
    return BL_OK;
}

bl_status trained_units_join(trained_units *units, bl_stream *stream)
{
    int64_t head = units->n_units - 1, embedding = units->n_units;
    float *to, *from;

    BL_TRY(visit_all(units, stream));
    if (!units->options.is_tied || units->unit[head].n_bytes[TRAINED_GRAD] == 0) return BL_OK;
    BL_TRY(open_unit(units, head, stream, &to));
    BL_TRY(open_unit(units, embedding, stream, &from));
    BL_TRY(bl_accumulate(
        stream, &(bl_accumulate_args){.n = units->unit[head].n_bytes[TRAINED_GRAD] / UNITS_FLOAT,
                                      .x = bl_tensor_f32(from),
                                      .y = bl_tensor_f32(to)}));
    units->unit[embedding].state = UNIT_CLEAN;
    return trained_units_close_gradient(units, head, stream);
}

bl_status trained_units_sum_squares(trained_units *units, bl_stream *stream, double *sum)
{
    for (int64_t u = 0; u < units->n_units; u++)
        if (units->unit[u].tier == BL_TIER_DEVICE && units->unit[u].n_bytes[TRAINED_GRAD] > 0)
            BL_TRY(sum_squares(units, u, gradients_in_memory(units, u), stream));
    return bl_add_sums(stream, &(bl_add_sums_args){units->n_units, units->squares, sum});
}

/* Span by span: the weights are pages. */
static bl_status update_in_memory(trained_units *units, const trained_span *span)
{
    char *memory[TRAINED_N_ARRAYS];

    for (int i = 0; i < TRAINED_N_ARRAYS; i++)
        memory[i] = trained_units_place(units, span, (trained_array)i, 0).memory;
    BL_TRY(trained_units_adamw(units, span, 0, span->n, memory, units->options.compute, bl_adamw));
    return bl_model_round_rows(units->options.weights, &span->at, span->first, span->n,
                               (const float *)memory[TRAINED_W], units->options.compute);
}

static bl_status update_unit_in_memory(trained_units *units, int64_t unit)
{
    const trained_spans *spans = units->spans;

    BL_TRY(trained_units_wait_for_file(units, unit, BL_LANE_DISK, units->options.compute));
    for (int64_t i = spans->first[unit]; i < spans->first[unit + 1]; i++)
        BL_TRY(update_in_memory(units, &spans->span[i]));
    return BL_OK;
}

/* The host's updates wait for the clipping scale, from compute, and on a GPU for the last
 * gradients, from `out`. */
static bl_status let_host_update(trained_units *units)
{
    bl_stream *compute = units->options.compute;

    if (units->is_gpu) {
        BL_TRY(bl_stream_copy(compute, units->grad_scale, units->update.grad_scale,
                              sizeof *units->grad_scale));
        units->update.grad_scale = units->grad_scale;
        BL_TRY(bl_transfer_order(units->disk, units->visit.out, units->updated));
    }
    return bl_transfer_order(units->disk, compute, units->updated);
}

bl_status trained_units_update(trained_units *units, const bl_adamw_args *args)
{
    units->update = *args;
    units->n_read = units->n_updated = 0;
    for (int64_t u = 0; u < units->n_units; u++) {
        units->unit[u].state = units->unit[u].is_paged ? UNIT_WAITING : UNIT_CLEAN;
        if (!units->unit[u].is_paged) BL_TRY(update_unit_in_memory(units, u));
    }
    return units->disk ? let_host_update(units) : BL_OK;
}

bl_status trained_units_round(trained_units *units)
{
    const bl_model_weights *weights = units->options.weights;

    if (!weights->copy) return BL_OK;
    for (bl_base_walk at = {.layout = units->layout}; bl_base_next(&at);) {
        const float *rows = bl_pages_memory(weights->pages, at.index);
        int64_t n = (int64_t)at.part->shard_bytes / UNITS_FLOAT;
        bl_tier tier = bl_pages_spec(weights->pages, at.index)->tier;
        BL_TRY(trained_units_is_apart(units->is_gpu, tier)
                   ? trained_units_queue_round(units, &at)
                   : bl_model_round_rows(weights, &at, 0, n, rows, units->options.compute));
    }
    return units->disk ? bl_stream_synchronize(units->disk) : BL_OK;
}

void trained_units_forget(trained_units *units)
{
    for (int64_t u = 0; u < units->n_held; u++) units->unit[u].state = UNIT_CLEAN;
}

/* The lane to which an update is charged; *n_bytes: the bytes that it moves there. */
static bl_lane lane_of_update(const trained_units *units, int64_t unit, int64_t *n_bytes)
{
    enum { BF16 = 2 }; /* bytes */
    int64_t on_disk = 0, copied = 0;

    for (int64_t s = units->spans->first[unit]; s < units->spans->first[unit + 1]; s++) {
        const trained_span *span = &units->spans->span[s];
        for (int i = 0; i < TRAINED_N_ARRAYS; i++) {
            int64_t n = span->n * trained_units_element(units, (trained_array)i);
            bl_tier tier = trained_units_place(units, span, (trained_array)i, 0).tier;
            int64_t both_ways = i == TRAINED_GRAD ? n : 2 * n;
            on_disk += tier == BL_TIER_DISK ? both_ways : 0;
            copied += tier == BL_TIER_DEVICE ? both_ways : 0;
        }
        if (!units->options.weights->copy) continue;
        bl_tier tier = trained_units_copy_place(units, &span->at, 0).tier;
        on_disk += tier == BL_TIER_DISK ? BF16 * span->n : 0;
        copied += tier == BL_TIER_DEVICE ? BF16 * span->n : 0;
    }
    *n_bytes = on_disk > 0 ? on_disk : copied;
    return on_disk > 0 ? BL_LANE_DISK : BL_LANE_COPY;
}

static bl_status queue_update(trained_units *units, int64_t unit)
{
    held_unit *u = &units->unit[unit];
    int64_t n_bytes;
    int span;

    if (u->state != UNIT_WAITING) return BL_OK;
    bl_lane lane = lane_of_update(units, unit, &n_bytes);
    BL_TRY(trained_units_wait_for_file(units, unit, BL_LANE_DISK, units->disk));
    BL_TRY(
        bl_timeline_begin(units->options.timeline, lane, "update", unit, -1, units->disk, &span));
    BL_TRY(trained_units_queue_update(units, unit));
    BL_TRY(bl_timeline_end(units->options.timeline, span, units->disk, n_bytes));
    u->state = UNIT_QUEUED;
    return bl_event_record(u->updated, units->disk);
}

/* On a GPU this thread, not a stream of the GPU, waits for the update, which queues copies.
 * Meanwhile the host's thread makes the next one. */
bl_status trained_units_update_unit(trained_units *units, int64_t unit)
{
    held_unit *u = &units->unit[unit];
    int64_t n_bytes, next;

    if (unit >= units->n_units || u->state < UNIT_WAITING) return BL_OK;
    BL_TRY(queue_update(units, unit));
    next = u->first_piece + u->n_pieces;
    if (units->is_gpu && next < units->n_pieces)
        BL_TRY(queue_update(units, units->piece[next].span->at.idx_unit));
    u->state = UNIT_CLEAN;
    BL_TRY(trained_units_continue_file(units, unit));
    if (!units->is_gpu) BL_TRY(bl_base_shards_changed(units->options.base, units->disk));
    return bl_timeline_wait_here(units->options.timeline, lane_of_update(units, unit, &n_bytes),
                                 "update", unit, -1, units->options.compute, u->updated);
}

bl_status trained_units_flush(trained_units *units)
{
    if (!units->disk) return BL_OK;
    for (int64_t i = 0; i < units->n_pieces; i++)
        BL_TRY(trained_units_update_unit(units, units->piece[i].span->at.idx_unit));
    BL_TRY(bl_stream_synchronize(units->disk));
    return units->visit.out ? bl_stream_synchronize(units->visit.out) : BL_OK;
}
