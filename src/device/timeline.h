/* SPDX-License-Identifier: Apache-2.0 */
/* timeline.h -- records the work of a rank's streams: spans in lanes, the time that compute stalled
 * on another lane, and bytes. A span is two stamps; nothing waits for it and nothing is allocated
 * after create.
 *
 * One thread, the rank's, calls everything here. A timeline may be NULL: nothing is recorded
 * then. */
#ifndef BALLAST_DEVICE_TIMELINE_H
#define BALLAST_DEVICE_TIMELINE_H

#include <stdbool.h>

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bl_lane {
    BL_LANE_COMPUTE,
    BL_LANE_GATHER, /* the frozen base, between ranks */
    BL_LANE_COPY,   /* host memory to device memory */
    BL_LANE_DISK,
    BL_LANE_ACTIVATIONS, /* device memory to host memory and back */
    BL_LANE_LORA,        /* LoRA's weights and gradients, between ranks */
    BL_N_LANES
} bl_lane;

BL_API const char *bl_lane_name(bl_lane lane); /* "compute", "gather", ... */

typedef struct bl_span {
    bl_lane lane;
    bool is_stall;    /* compute waited for this lane */
    const char *name; /* a literal, never freed */
    int64_t unit;     /* layer; -1: none */
    int item;         /* of the unit; -1: none */
    int64_t n_bytes;
    double begin_s, end_s; /* CLOCK_MONOTONIC */
} bl_span;

/* Called by bl_timeline_collect for each finished span, in the order of their beginnings. */
typedef void (*bl_span_sink)(void *user, const bl_span *span);

typedef struct bl_timeline bl_timeline;

/* Room for max_spans that are not collected yet; spans beyond are dropped and counted. sink may be
 * NULL. */
BL_API bl_status bl_timeline_create(bl_device *device, int max_spans, bl_span_sink sink,
                                    void *sink_user, bl_timeline **out);
BL_API void
bl_timeline_destroy(bl_timeline *timeline); /* after the streams are idle; NULL is fine */

/* A span begins and ends where `stream` is at the time of the call. *span is for end; the name is
 * kept, not copied. */
bl_status bl_timeline_begin(bl_timeline *timeline, bl_lane lane, const char *name, int64_t unit,
                            int item, bl_stream *stream, int *span);
bl_status bl_timeline_end(bl_timeline *timeline, int span, bl_stream *stream, int64_t n_bytes);

/* `stream` waits for `event`; the wait counts as a stall on `lane`. */
bl_status bl_timeline_wait(bl_timeline *timeline, bl_lane lane, const char *name, int64_t unit,
                           int item, bl_stream *stream, bl_event *event);
/* As bl_timeline_wait, for tasks of a host stream that queue work of the device: on a GPU the
 * calling thread waits too (device.h, bl_stream_create_host). */
bl_status bl_timeline_wait_here(bl_timeline *timeline, bl_lane lane, const char *name, int64_t unit,
                                int item, bl_stream *stream, bl_event *event);

/* Collects finished spans, up to the first that has not ended. Called where the host has waited
 * and streams have work left; begin does so, too, when room runs out. */
BL_API void bl_timeline_collect(bl_timeline *timeline);

/* Sums over all spans collected since create. */
typedef struct bl_lane_totals {
    double busy_s, stall_s; /* of spans; of waits */
    int64_t n_bytes;
} bl_lane_totals;
typedef struct bl_timeline_totals {
    bl_lane_totals lane[BL_N_LANES];
    int64_t n_dropped;
} bl_timeline_totals;
BL_API void bl_timeline_get_totals(const bl_timeline *timeline,
                                   bl_timeline_totals *out); /* zeros for NULL */

#ifdef __cplusplus
}
#endif

#endif
