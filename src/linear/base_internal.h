/* SPDX-License-Identifier: Apache-2.0 */
/* base_internal.h -- the parts of a base, for code that makes one. */
#ifndef BALLAST_LINEAR_BASE_INTERNAL_H
#define BALLAST_LINEAR_BASE_INTERNAL_H

#include "linear/base.h"
#include "offload/gather_ring.h"

/* Holds the shards that the ring gathers. */
typedef struct bl_base_store {
    void *self;
    bl_status (*verify)(void *self); /* NULL: nothing to check */
    void (*destroy)(void *self);     /* NULL: nothing is owned */
} bl_base_store;

struct bl_base {
    const bl_base_layout *layout;
    /* Item i of unit u is part i of the unit's matrices. NULL: all units are resident, in
     * `shards`. */
    bl_gather_ring *ring;
    const char *shards;
    bl_base_store store;
    int64_t n_layers, n_distinct; /* bl_base_repeat_layers; n_distinct 0: not called */
};

/* What messages call a unit, and its number there; *index -1: none. */
const char *linear_unit_name(const bl_base_layout *layout, int64_t unit, int64_t *index);

#endif
