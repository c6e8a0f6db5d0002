/* SPDX-License-Identifier: Apache-2.0 */
/* simulate_internal.h -- streams in simulated time: each does its operations in order, waits for those of
 * others, and shares the machine's resources with them.
 *
 * A work of `seconds` takes that long when nothing else runs. While it runs at full speed it uses so much a second of each
 * resource. What is under way together slows down evenly (max-min fair, in parts of full speed) where a
 * resource would be used beyond its capacity: as kernels' schedulers, memory controllers and links
 * share, when they are asked by few. */
#ifndef BALLAST_PLAN_SIMULATE_INTERNAL_H
#define BALLAST_PLAN_SIMULATE_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef enum plan_stream {
    PLAN_COMPUTE,
    PLAN_GATHER,
    PLAN_COPY,
    PLAN_READER, /* not a stream of the program: its queue of reads */
    PLAN_LORA,
    PLAN_ACTIVATIONS,
    PLAN_N_STREAMS
} plan_stream;

typedef enum plan_resource {
    PLAN_CORES,
    PLAN_DEVICE_MEMORY,
    PLAN_LINK_IN, /* host to device */
    PLAN_LINK_OUT,
    PLAN_LINK_BOTH, /* the sum of both ways */
    PLAN_HOST_MEMORY,
    PLAN_PEERS, /* between devices, and hosts */
    PLAN_N_RESOURCES
} plan_resource;

typedef struct plan_work {
    double seconds;
    double use[PLAN_N_RESOURCES]; /* a second, at full speed */
} plan_work;

enum { PLAN_NOTHING = -1 }; /* an event that was never recorded: no wait */

typedef struct plan_op {
    const plan_work *work; /* borrowed; NULL: a wait for operation `of` */
    int of;                /* PLAN_NOTHING: no wait, a mark in the stream */
    int stream;
    /* A span of the timeline, from here to the end of operation span_end; name NULL: none. */
    const char *name;
    bool is_stall;
    int span_end, lane, item;
    int64_t unit, n_bytes;
    /* Set by the simulation. */
    int next;              /* of the stream; PLAN_NOTHING: the last */
    double begin_s, end_s; /* the stream came to it; it was through with it */
} plan_op;

typedef struct plan_simulation {
    plan_op *ops; /* in the order in which they were queued */
    int n_ops, n_max;
    int first[PLAN_N_STREAMS], last[PLAN_N_STREAMS];
    double capacity[PLAN_N_RESOURCES]; /* a second; 0: of no concern */
} plan_simulation;

void plan_simulation_init(plan_simulation *sim);
void plan_simulation_free(plan_simulation *sim);

/* Queues `op` on its stream; if it is a span, it ends with it. BL_ENOMEM. */
bl_status plan_simulation_add(plan_simulation *sim, const plan_op *op);

/* The operation that was queued last, anywhere; and on a stream: an event recorded there now. */
int plan_simulation_last(const plan_simulation *sim);
int plan_simulation_event(const plan_simulation *sim, plan_stream stream);

/* From time 0 until all is done: sets begin_s and end_s. BL_EINTERNAL: streams wait for each other for ever. */
bl_status plan_simulation_run(plan_simulation *sim);

#endif
