/* SPDX-License-Identifier: Apache-2.0 */
/* gradients.c -- the sink of gradients of a pass, of LoRA's weights and of the model's rows alike:
 * reduce-scatters each unit's gradients and adds them to the rank's rows.
 *
 * The whole gradient of a layer is in one of two buffers in turn, a table's takes the memory of
 * both. When a micro-batch has completed it, the communication stream sums each of its shares over
 * the ranks (`written`), then the buffer may be used again (`reduced`). Sums are added to the rows
 * in the order of micro-batches. */
#include <stdlib.h>

#include "trained/internal.h"
#include "ops/elementwise.h"

static bool is_table(const bl_trained_state *s, int64_t unit)
{
    return unit >= s->n_layers;
}

static float *whole_of(const bl_trained_state *s, int64_t unit)
{
    return s->whole[is_table(s, unit) ? 0 : s->turn];
}

static const trained_shares *shares_of(const bl_trained_state *s, int64_t unit)
{
    static const trained_shares none = {.n = 0};
    return unit < s->n_shared ? &s->shares[unit] : &none;
}

/* Opened rows may still be read on compute by the last update. */
static bl_status sink_open(void *user, int64_t unit, bl_stream *stream)
{
    bl_trained_state *s = user;

    if (!s->n_shared) return s->open(s, unit, stream);
    BL_TRY(bl_event_record(s->opened, stream));
    BL_TRY(bl_stream_wait(s->communication, s->opened));
    return s->open(s, unit, s->communication);
}

static bl_status sink_close(void *user, int64_t unit, bl_stream *stream)
{
    bl_trained_state *s = user;
    return s->close(s, unit, s->n_shared ? s->communication : stream);
}

/* Waits until the last gradient in the buffer is reduced. */
static bl_status wait_for_whole(const bl_trained_state *s, int64_t unit, bl_stream *stream)
{
    for (int i = 0; i < 2; i++)
        if (is_table(s, unit) || i == s->turn)
            BL_TRY(bl_timeline_wait(s->timeline, BL_LANE_LORA, "wait", unit, -1, stream,
                                    s->reduced[i]));
    return BL_OK;
}

static bl_status sink_begin(void *user, int64_t unit, bl_stream *stream, bl_unit_gradients *out)
{
    bl_trained_state *s = user;
    float *whole = NULL;

    if (shares_of(s, unit)->n > 0) {
        BL_TRY(wait_for_whole(s, unit, stream));
        whole = whole_of(s, unit);
    }
    trained_replicated_place(s->replicated, unit, out);
    return s->begin(s, unit, stream, whole, out);
}

static bl_status add_pieces(const bl_trained_state *s, const trained_share *share)
{
    for (int64_t i = share->first; i < share->first + share->n_pieces; i++) {
        const trained_piece *piece = &s->pieces[i];
        BL_TRY(bl_accumulate(s->communication,
                             &(bl_accumulate_args){.n = piece->n,
                                                   .x = bl_tensor_f32(s->partial + piece->from),
                                                   .y = bl_tensor_f32(s->rows + piece->to),
                                                   .without_workers = true}));
    }
    return BL_OK;
}

static bl_status reduce_shares(bl_trained_state *s, int64_t unit, int turn, const float *whole)
{
    const trained_shares *shares = shares_of(s, unit);

    for (int k = 0; k < shares->n; k++) {
        const trained_share *share = &shares->at[k];
        bl_comm_set_label(s->world, s->label, unit);
        BL_TRY(bl_comm_reduce_scatter_f32(s->world, s->communication, whole + share->offset,
                                          s->partial, share->n));
        bl_comm_set_label(s->world, NULL, 0);
        for (int i = 0; i < 2 && k + 1 == shares->n; i++)
            if (is_table(s, unit) || i == turn)
                BL_TRY(bl_event_record(s->reduced[i], s->communication));
        BL_TRY(add_pieces(s, share));
    }
    return BL_OK;
}

static bl_status sink_end(void *user, int64_t unit, bl_stream *stream)
{
    bl_trained_state *s = user;
    const trained_shares *shares = shares_of(s, unit);
    const float *whole = whole_of(s, unit);
    int turn = s->turn, span;
    int64_t received = 0;

    if (shares->n == 0) return BL_OK;
    if (!is_table(s, unit)) s->turn ^= 1;
    BL_TRY(bl_event_record(s->written[turn], stream));
    BL_TRY(bl_stream_wait(s->communication, s->written[turn]));
    BL_TRY(bl_timeline_begin(s->timeline, BL_LANE_LORA, "gradients", unit, -1, s->communication,
                             &span));
    BL_TRY(reduce_shares(s, unit, turn, whole));
    for (int k = 0; k < shares->n; k++)
        received += bl_comm_sum_received(s->world, shares->at[k].n * (int64_t)sizeof(float));
    return bl_timeline_end(s->timeline, span, s->communication, received);
}

bl_status trained_gather_share(bl_trained_state *s, int64_t unit, const float *rows, int64_t n)
{
    bl_comm_set_label(s->world, s->label, unit);
    BL_TRY(bl_comm_all_gather(s->world, s->communication, rows, s->whole[0],
                              (size_t)n * sizeof(float)));
    bl_comm_set_label(s->world, NULL, 0);
    return bl_stream_synchronize(s->communication);
}

/* ---- create ---- */

bl_status trained_create_shares(bl_trained_state *s, int64_t n_units, int64_t n_pieces)
{
    s->n_shared = n_units;
    s->shares = calloc((size_t)n_units, sizeof *s->shares);
    s->pieces = calloc((size_t)n_pieces + 1, sizeof *s->pieces);
    return s->shares && s->pieces ? BL_OK : BL_FAIL(BL_ENOMEM, "the shares of gradients");
}

void trained_add_share(bl_trained_state *s, int64_t unit, int64_t offset, int64_t n)
{
    trained_shares *shares = &s->shares[unit];
    shares->at[shares->n++] = (trained_share){.offset = offset, .n = n, .first = s->n_pieces};
}

void trained_add_piece(bl_trained_state *s, int64_t unit, int64_t from, int64_t n, int64_t to)
{
    trained_shares *shares = &s->shares[unit];
    shares->at[shares->n - 1].n_pieces++;
    s->pieces[s->n_pieces++] = (trained_piece){from, n, to};
}

bl_status trained_create_sink(bl_trained_state *s, int64_t whole_bytes, int64_t second_bytes,
                              int64_t part_bytes)
{
    s->whole_bytes = whole_bytes;
    s->sink.user = s;
    s->sink.begin = sink_begin;
    s->sink.end = sink_end;
    if (s->open) s->sink.open = sink_open, s->sink.close = sink_close;
    BL_TRY(bl_event_create(s->device, &s->opened));
    for (int i = 0; i < 2; i++) {
        BL_TRY(bl_event_create(s->device, &s->written[i]));
        BL_TRY(bl_event_create(s->device, &s->reduced[i]));
    }
    if (whole_bytes == 0) return BL_OK;
    BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)whole_bytes, "a layer's gradients",
                           (void **)&s->whole[0]));
    s->whole[1] = s->whole[0] + second_bytes / (int64_t)sizeof(float);
    return bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)part_bytes, "reduced gradients",
                           (void **)&s->partial);
}

void trained_free_sink(bl_trained_state *s)
{
    free(s->shares);
    free(s->pieces);
    bl_device_free(s->device, BL_SPACE_DEVICE, s->whole[0]);
    bl_device_free(s->device, BL_SPACE_DEVICE, s->partial);
    for (int i = 0; i < 2; i++) {
        bl_event_destroy(s->written[i]);
        bl_event_destroy(s->reduced[i]);
    }
    bl_event_destroy(s->opened);
}
