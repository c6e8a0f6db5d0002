/* SPDX-License-Identifier: Apache-2.0 */
/* time_machine_internal.h -- one rank in simulated time: its streams, rings, stacks and gradients;
 * for the files of time_machine. */
#ifndef BALLAST_PLAN_TIME_MACHINE_INTERNAL_H
#define BALLAST_PLAN_TIME_MACHINE_INTERNAL_H

#include "plan/time_internal.h"
#include "ring/ring_slots.h"

enum { MACHINE_SPILL_SLOTS = 2, MACHINE_ITEMS = BL_LAYER_MATRICES, MACHINE_TURNS = 2 };

typedef struct machine_slot_events {
    int brought[MACHINE_ITEMS], ready[MACHINE_ITEMS], free, gathered;
} machine_slot_events;

typedef struct machine_ring {
    bl_ring_slots held;
    machine_slot_events *events; /* [depth] */
} machine_ring;

/* One of the pass's stacks. */
typedef struct machine_stack {
    int64_t n_slots, n_host;
    int item;
    bool is_moving[MACHINE_SPILL_SLOTS], is_coming[MACHINE_SPILL_SLOTS];
    int moved[MACHINE_SPILL_SLOTS];
} machine_stack;

/* Memory for a layer's gradients, used in turn: when each was reduced. */
typedef struct machine_turns {
    int turn, reduced[MACHINE_TURNS];
} machine_turns;

typedef struct machine_adapter {
    int number; /* plan_micro.adapter */
    const plan_amounts *amounts;
    machine_ring ring;
    machine_turns gradients;
} machine_adapter;

/* Frames of trained weights' gradients: two of layers, a table's, a tied embedding's. */
enum { MACHINE_FRAMES = 4 };
typedef struct machine_frames {
    bool is_clean; /* the first pass of a step: gradients begin with zeros */
    int ready[MACHINE_FRAMES], written[MACHINE_FRAMES]; /* operations */
    int64_t held[MACHINE_FRAMES];                       /* the unit that was read into it */
} machine_frames;

typedef struct machine {
    plan_pass *pass;
    bl_simulation *sim;
    const bl_time_input *in;
    machine_ring base;
    machine_adapter *adapters; /* [n_adapters], each of the pass once */
    int n_adapters;
    machine_turns weights; /* of the base, where it is trained */
    machine_stack inputs, saved;
    machine_frames frames;
    bool is_before; /* prefetches are complete before time 0 */
} machine;

/* ---- operations ---- */

bl_status plan_machine_wait(machine *m, plan_stream stream, int event);
/* As bl_timeline_wait: compute stalls on a lane. */
bl_status plan_machine_stall(machine *m, bl_lane lane, int event, int64_t unit, int item);
/* The same of any stream, with a name. */
bl_status plan_machine_stall_on(machine *m, plan_stream stream, bl_lane lane, const char *name,
                                int event, int64_t unit, int item);
bl_status plan_machine_work(machine *m, plan_stream stream, bl_lane lane, const bl_work *work);
bl_status plan_machine_span(machine *m, plan_stream stream, bl_lane lane, const char *name,
                            int64_t unit, int item, int64_t n_bytes, const bl_work *work);

/* ---- time_machine_base.c ---- */

static inline int64_t machine_head_unit(const machine *m)
{
    return m->pass->schedule.n_layers;
}

/* The head, and a trained embedding that is not the head. */
static inline bool machine_is_table(const machine *m, int64_t unit)
{
    return unit >= machine_head_unit(m);
}

/* Of micro-batches like `amounts`. */
static inline const plan_layer *machine_layer(const machine *m, const plan_amounts *amounts,
                                              int64_t layer)
{
    return &amounts->layers[m->pass->run_of_layer[layer]];
}

/* Of the base, which is the same for all micro-batches. */
static inline const plan_amounts *machine_base(const machine *m)
{
    return m->pass->micro[0].amounts;
}

bl_status plan_machine_create_ring(machine_ring *ring, int depth);
void plan_machine_free_ring(machine_ring *ring);
void plan_machine_release(machine *m, machine_ring *ring, int64_t unit);

bl_status plan_machine_prefetch_base(machine *m, int64_t unit);
bl_status plan_machine_acquire_base(machine *m, int64_t unit, int item);

/* ---- time_machine_adapters.c: trainable weights, and gradients of either kind ---- */

/* Those of the pass's micro-batches, each once. BL_ENOMEM. */
bl_status plan_machine_create_adapters(machine *m);
void plan_machine_free_adapters(machine *m);

bl_status plan_machine_prefetch_lora(machine *m, int64_t layer);
bl_status plan_machine_acquire_lora(machine *m, int64_t layer);
void plan_machine_release_lora(machine *m, int64_t layer);

/* Around a micro-batch that has gradients, of a layer or, where all weights are trained, of a
 * table. */
bl_status plan_machine_begin_gradients(machine *m, const plan_micro *micro, int64_t unit);
bl_status plan_machine_end_gradients(machine *m, const plan_micro *micro, int64_t unit);
bl_status plan_machine_join(machine *m);

/* ---- time_state.c: around the micro-batches of a visit that has gradients; updates ---- */

void plan_machine_init_frames(machine *m);
bl_status plan_machine_open_gradients(machine *m, int64_t unit);
bl_status plan_machine_close_gradients(machine *m, int64_t unit);
/* After a step's last pass: adds a tied embedding's gradients to the head's. */
bl_status plan_machine_join_tied(machine *m);
bl_status plan_machine_update(machine *m, int64_t unit);

#endif
