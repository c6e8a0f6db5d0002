/* SPDX-License-Identifier: Apache-2.0 */
/* timeline.c -- records spans and collects those that have ended. Spans are in a ring in the order
 * of their beginnings. [first, next) are not collected yet; the oldest is collected first, so a
 * span delays all later ones until it ends. */
#include "device/timeline.h"

#include <stdlib.h>

#include "base/clock.h"

enum { NO_SPAN = -1 };

typedef struct entry {
    bl_span span;
    bool has_ended; /* its end has been queued */
    bl_stamp *begin, *end;
} entry;

struct bl_timeline {
    int max_spans;
    int64_t first, next;
    entry *entries; /* [max_spans] */
    bl_span_sink sink;
    void *sink_user;
    bl_timeline_totals totals;
};

const char *bl_lane_name(bl_lane lane)
{
    static const char *const names[BL_N_LANES] = {"compute", "gather",      "copy",
                                                  "disk",    "activations", "lora"};
    return names[lane];
}

bl_status bl_timeline_create(bl_device *device, int max_spans, bl_span_sink sink, void *sink_user,
                             bl_timeline **out)
{
    bl_status st = BL_OK;

    *out = NULL;
    bl_timeline *self = calloc(1, sizeof *self);
    if (!self) return BL_FAIL(BL_ENOMEM, "a timeline");
    *self = (bl_timeline){.max_spans = max_spans, .sink = sink, .sink_user = sink_user};
    self->entries = calloc((size_t)max_spans, sizeof *self->entries);
    if (!self->entries) st = BL_FAIL(BL_ENOMEM, "a timeline of %d spans", max_spans);
    for (int i = 0; st == BL_OK && i < max_spans; i++) {
        st = bl_stamp_create(device, &self->entries[i].begin);
        if (st == BL_OK) st = bl_stamp_create(device, &self->entries[i].end);
    }
    if (st != BL_OK) {
        bl_timeline_destroy(self);
        return st;
    }
    *out = self;
    return BL_OK;
}

void bl_timeline_destroy(bl_timeline *self)
{
    if (!self) return;
    for (int i = 0; self->entries && i < self->max_spans; i++) {
        bl_stamp_destroy(self->entries[i].begin);
        bl_stamp_destroy(self->entries[i].end);
    }
    free(self->entries);
    free(self);
}

static bl_status begin(bl_timeline *self, const bl_span *span, bl_stream *stream, int *index)
{
    *index = NO_SPAN;
    if (!self) return BL_OK;
    if (self->next - self->first == self->max_spans) bl_timeline_collect(self);
    if (self->next - self->first == self->max_spans) {
        self->totals.n_dropped++;
        return BL_OK;
    }
    *index = (int)(self->next++ % self->max_spans);
    entry *e = &self->entries[*index];
    e->span = *span;
    e->has_ended = false;
    return bl_stamp_record(e->begin, stream);
}

bl_status bl_timeline_begin(bl_timeline *self, bl_lane lane, const char *name, int64_t unit,
                            int item, bl_stream *stream, int *span)
{
    return begin(self, &(bl_span){.lane = lane, .name = name, .unit = unit, .item = item}, stream,
                 span);
}

bl_status bl_timeline_end(bl_timeline *self, int span, bl_stream *stream, int64_t n_bytes)
{
    if (!self || span == NO_SPAN) return BL_OK;
    entry *e = &self->entries[span];
    e->span.n_bytes = n_bytes;
    e->has_ended = true;
    return bl_stamp_record(e->end, stream);
}

static bl_status wait_for(bl_timeline *self, const bl_span *stall, bl_stream *stream,
                          bl_event *event, bool is_here)
{
    int span;

    BL_TRY(begin(self, stall, stream, &span));
    if (is_here) BL_TRY(bl_event_synchronize(event));
    BL_TRY(bl_stream_wait(stream, event));
    return bl_timeline_end(self, span, stream, 0);
}

bl_status bl_timeline_wait(bl_timeline *self, bl_lane lane, const char *name, int64_t unit,
                           int item, bl_stream *stream, bl_event *event)
{
    bl_span stall = {.lane = lane, .is_stall = true, .name = name, .unit = unit, .item = item};
    return wait_for(self, &stall, stream, event, false);
}

bl_status bl_timeline_wait_here(bl_timeline *self, bl_lane lane, const char *name, int64_t unit,
                                int item, bl_stream *stream, bl_event *event)
{
    bl_span stall = {.lane = lane, .is_stall = true, .name = name, .unit = unit, .item = item};
    bool is_gpu = bl_device_get_kind(bl_stream_device(stream)) == BL_DEVICE_CUDA;
    return wait_for(self, &stall, stream, event, is_gpu);
}

void bl_timeline_collect(bl_timeline *self)
{
    for (; self && self->first < self->next; self->first++) {
        entry *e = &self->entries[self->first % self->max_spans];
        double end_s = e->has_ended ? bl_stamp_seconds(e->end) : BL_NEVER_S;
        if (end_s == BL_NEVER_S) return;
        bl_span *span = &e->span;
        bl_lane_totals *lane = &self->totals.lane[span->lane];
        span->begin_s = bl_stamp_seconds(e->begin);
        span->end_s = end_s;
        *(span->is_stall ? &lane->stall_s : &lane->busy_s) += bl_stamp_elapsed_s(e->begin, e->end);
        lane->n_bytes += span->n_bytes;
        if (self->sink) self->sink(self->sink_user, span);
    }
}

void bl_timeline_get_totals(const bl_timeline *self, bl_timeline_totals *out)
{
    *out = self ? self->totals : (bl_timeline_totals){0};
}
