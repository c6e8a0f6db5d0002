/* SPDX-License-Identifier: Apache-2.0 */
/* simulation.h -- streams in simulated time: each does its operations in order, waits for those of
 * others, and shares the machine's resources with them.
 *
 * A work of `seconds` takes that long when nothing else runs. While it runs at full speed it uses
 * so much of each resource per second. Concurrent works slow down evenly (max-min fair, in parts of
 * full speed) where a resource would be used beyond its capacity: as kernels' schedulers, memory
 * controllers and links share, when few ask them. */
#ifndef BALLAST_DEVICE_SIMULATION_H
#define BALLAST_DEVICE_SIMULATION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { BL_SIM_STREAMS = 640 }; /* at most, numbered from 0: 256 runs have two each */

typedef enum bl_resource {
    BL_RESOURCE_CORES,
    BL_RESOURCE_DEVICE_MEMORY,
    BL_RESOURCE_LINK_IN, /* host to device */
    BL_RESOURCE_LINK_OUT,
    BL_RESOURCE_LINK_BOTH, /* the sum of both ways */
    BL_RESOURCE_HOST_MEMORY,
    BL_RESOURCE_NETWORK, /* into the host: fraction of its time */
    BL_RESOURCE_DISK,    /* the same */
    BL_RESOURCES
} bl_resource;

typedef struct bl_work {
    double seconds;
    double use[BL_RESOURCES]; /* per second, at full speed */
} bl_work;

enum { BL_SIM_NOTHING = -1 }; /* an event that was never recorded: no wait; no operation */

typedef struct bl_sim_op {
    const bl_work *work; /* borrowed; NULL: a wait for operation `of` */
    int of;              /* BL_SIM_NOTHING: no wait, a mark in the stream */
    int stream;
    /* A span of the timeline, from here to the end of operation span_end; name NULL: none. */
    const char *name;
    bool is_stall;
    int span_end, lane, item;
    int64_t unit, n_bytes;
    /* Set by the simulation. */
    int next;              /* of the stream; BL_SIM_NOTHING: the last */
    double begin_s, end_s; /* the stream came to it; it was through with it */
} bl_sim_op;

typedef struct bl_simulation {
    bl_sim_op *ops; /* in the order in which they were queued */
    int n_ops, n_max, n_streams;
    int first[BL_SIM_STREAMS], last[BL_SIM_STREAMS];
    double capacity[BL_RESOURCES]; /* per second; 0: no limit */
    /* The time, and where each stream is. */
    double now;
    int head[BL_SIM_STREAMS];          /* the operation that it is at; BL_SIM_NOTHING: it is idle */
    bool is_under_way[BL_SIM_STREAMS]; /* head is a work that has begun */
    double left_s[BL_SIM_STREAMS];     /* of it, at full speed */
    double speed[BL_SIM_STREAMS];      /* of it, 0..1 */
} bl_simulation;

void bl_simulation_init(bl_simulation *sim);
void bl_simulation_free(bl_simulation *sim);

/* Queues `op` on its stream, at the simulation's time; a span ends with it. BL_ENOMEM. */
bl_status bl_simulation_add(bl_simulation *sim, const bl_sim_op *op);

/* The operation that was queued last on a stream: an event recorded there now. */
int bl_simulation_event(const bl_simulation *sim, int stream);

/* Whether an operation has ended; BL_SIM_NOTHING has. */
bool bl_simulation_is_done(const bl_simulation *sim, int op);

/* Until an operation has ended, or all have: sets begin_s and end_s. More may be queued after it.
 * BL_EINTERNAL: streams wait for each other permanently. */
bl_status bl_simulation_run_until(bl_simulation *sim, int op);
bl_status bl_simulation_run(bl_simulation *sim);

#endif
