/* SPDX-License-Identifier: Apache-2.0 */
/* schedule_internal.h -- the order of a pass: its actions for one group of micro-batches, one by
 * one.
 *
 * No device, no memory, no time: pass.c carries the actions out on streams. src/model/README.md has
 * the table of visits. */
#ifndef BALLAST_MODEL_SCHEDULE_INTERNAL_H
#define BALLAST_MODEL_SCHEDULE_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "arch/arch.h"
#include "base/status.h"

/* Where an action names a unit it is a layer, or n_layers for the head. Entries of the stacks
 * (offload/spill.h): inputs[l] is the group's input of layer l, inputs[n_layers] that of the final
 * norm; saved[l] is what layer l's forward keeps. */
typedef enum bl_action_kind {
    BL_ACTION_VISIT, /* visit `visit` begins; nothing of it is queued yet */
    /* Before the unit's trained weights are used: makes their update, if it is pending. */
    BL_ACTION_UPDATE,
    BL_ACTION_PREFETCH_LORA,  /* the unit's trainable weights are used soon */
    BL_ACTION_PREFETCH_BASE,  /* the unit's frozen weights are used soon */
    BL_ACTION_PREFETCH_GROUP, /* and those of a group of the layer's experts */
    BL_ACTION_BEGIN,          /* the visit's own work begins */
    BL_ACTION_ACQUIRE_LORA,
    BL_ACTION_ACQUIRE_EMBEDDING, /* before the micro-batches are embedded; then released */
    BL_ACTION_ACQUIRE_HEAD,      /* layers acquire their matrices one by one (arch/block.h) */
    BL_ACTION_RESERVE_INPUT,
    BL_ACTION_RESERVE_SAVED,
    BL_ACTION_TAKE_INPUT,
    BL_ACTION_TAKE_SAVED,
    BL_ACTION_EMBED, /* micro-batch `micro`, as are the next three; before the first visit */
    BL_ACTION_FORWARD,
    BL_ACTION_HEAD,
    BL_ACTION_BACKWARD,
    /* With routed experts (arch/block.h): of `micro` with group `group`, after FORWARD; and before
     * BACKWARD. */
    BL_ACTION_FORWARD_GROUP,
    BL_ACTION_BACKWARD_BEGIN,
    BL_ACTION_BACKWARD_GROUP,
    BL_ACTION_RELEASE_GROUP,  /* of the base */
    BL_ACTION_EMBED_BACKWARD, /* after those of layer 0 */
    /* Around the micro-batches of a visit that give gradients of the unit's own weights; the
     * embedding's, also where it is the head, are those of unit n_layers + 1. */
    BL_ACTION_OPEN_GRADIENTS,
    BL_ACTION_CLOSE_GRADIENTS,
    BL_ACTION_PUT_INPUT,
    BL_ACTION_PUT_SAVED,
    BL_ACTION_DROP_INPUT,
    BL_ACTION_DROP_SAVED,
    BL_ACTION_RELEASE_BASE,
    BL_ACTION_RELEASE_LORA,
    BL_ACTION_END, /* of the visit's work */
    BL_N_ACTIONS
} bl_action_kind;

typedef struct bl_action {
    bl_action_kind kind;
    int64_t visit; /* the current one; -1: before the first */
    int64_t unit;  /* layer, head, or entry of the stack */
    int micro;     /* -1: the action is not a micro-batch's */
    int64_t group; /* of experts */
} bl_action;

typedef struct bl_schedule {
    int64_t n_layers;
    int n_micro;      /* micro-batches of the group */
    int ring_depth;   /* units to look ahead, the visit's own included; and groups of experts */
    int64_t n_groups; /* of experts, of each layer that has some; 0: none */
    const bl_layer_kinds *kinds; /* NULL: all layers have */
    /* Backward takes a micro-batch through all groups before the next: experts have gradients. */
    bool is_one_by_one;
    bool has_backward; /* else forward and loss alone */
    /* The head is the embedding: it is not a unit, nothing is gathered for it. */
    bool head_is_tied;
    /* The units' weights are trained, and may change between passes: none is prefetched or kept for
     * the next one. The embedding is a unit, too, and has a gradient. */
    bool is_trained;
    int64_t embedding; /* with is_trained: its unit; that of the head where both are one */
    /* Backward ends with layer first (n_layers: with the head). If the embedding is trained, also
     * together with LoRA, its gradient follows layer 0. */
    int64_t first;
    bool embedding_has_gradient;
} bl_schedule;

/* n_layers + 1, and n_layers - first more with a backward pass: visits of layers 0..L-1, of the
 * head, unit L, and of layers L-1..first. */
int64_t bl_schedule_n_visits(const bl_schedule *schedule);

/* Carries out one action; any status except BL_OK ends the pass. */
typedef bl_status (*bl_action_sink)(void *user, const bl_action *action);

/* All actions of a pass, in order; the first status of sink that is not BL_OK, or BL_OK. */
bl_status bl_schedule_run(const bl_schedule *schedule, bl_action_sink sink, void *user);

#endif
