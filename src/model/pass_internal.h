/* SPDX-License-Identifier: Apache-2.0 */
/* pass_internal.h -- the parts of a pass, for pass.c, layers in pass_layer.c, the head in
 * pass_head.c. */
#ifndef BALLAST_MODEL_PASS_INTERNAL_H
#define BALLAST_MODEL_PASS_INTERNAL_H

#include "device/staging.h"
#include "model/feed_internal.h"
#include "model/pass.h"
#include "model/pass_size_internal.h"
#include "model/schedule_internal.h"
#include "model/table_terms_internal.h"
#include "offload/arena.h"
#include "offload/spill.h"

enum {
    MODEL_RUN_AHEAD = 2 /* visits that are queued and have not ended */
};

struct bl_pass {
    bl_device *device;
    const bl_model_weights *weights;
    bl_base *base;
    bl_stream *compute;
    bl_pass_options options;
    bl_block_dims dims[BL_LAYER_KINDS]; /* with the options' mode */
    const bl_block_dims *any;           /* of layer 0: what all layers have alike */
    int64_t n_layers, hidden;
    char *memory;    /* device memory, all of it */
    bl_arena *arena; /* host memory, all of it; NULL without offload */
    /* Entry l: the group's inputs of layer l (n_layers: of the final norm), [rows][hidden]. */
    bl_spill *inputs;
    /* Entry l: what layer l's forward keeps, rows of saved_rows; NULL without training. */
    bl_spill *saved;
    bl_tensor d; /* [rows][hidden]: gradient of the boundary between two layers */
    void *logits;
    size_t input_row_bytes; /* of the stack of inputs; the stack of saved tensors: */
    model_saved_rows saved_rows;
    int64_t *first_row; /* [max_micro]: of each micro-batch, each of bl_feed_rows; in transit or in
                            the other tensors */
    int64_t max_rows;   /* of those: max_group micro-batches */
    bl_tensor transit[2]; /* [rows of max_companions micro-batches][hidden] */
    bl_twin *values;      /* [max_micro * T_max], of group_row; NULL: no weigher */
    float **host_values;  /* [max_micro]: those of each micro-batch; NULL: it is not weighed */
    /* [max_micro]: the adapters of the current pass, each once, and a layer's weights of each. */
    const bl_pass_adapter **adapters;
    bl_tensor *lora_weights;
    int n_adapters;
    bl_feed *feed;
    bl_micro_batch *batches;            /* [max_micro]: those of the current pass, padded */
    bl_event *visited[MODEL_RUN_AHEAD]; /* ends of visits, in turn */
    uint64_t n_visits;                  /* so far, of all passes */
    bl_schedule schedule; /* of the current pass; has_backward: some micro-batch of it has */
    bl_weight head;       /* of the current pass, from its visit on */
    int span;             /* of the current visit */
    /* [max_micro]: with parts in common; of each kind in the same memory. */
    bl_block_workspace (*workspaces)[BL_LAYER_KINDS];
    bl_unit_gradients gradients; /* of the micro-batch whose backward has begun */
    model_term_space terms;
    bl_loss_head_term *head_terms; /* [max_micro]: of the last visit of the head */
};

static inline bl_layer_kind model_kind_of(const bl_pass *pass, int64_t layer)
{
    return bl_layer_kind_of(&pass->saved_rows.kinds, layer);
}

/* The input of layer `layer` (n_layers: of the final norm) for micro-batch m. */
static inline bl_tensor model_boundary(const bl_pass *pass, const bl_pass_micro *micro,
                                       int64_t layer, int m)
{
    if (micro->is_companion)
        return bl_tensor_at(pass->transit[layer % 2], pass->first_row[m] * pass->hidden);
    bl_tensor inputs = bl_tensor_of(bl_spill_at(pass->inputs, layer), pass->d.dtype);
    return bl_tensor_at(inputs, pass->first_row[m] * pass->hidden);
}

/* Of a micro-batch among all of the group: companions' are after the others. */
static inline int64_t model_group_row(const bl_pass *pass, const bl_pass_micro *micro, int m)
{
    return pass->first_row[m] + (micro->is_companion ? pass->max_rows : 0);
}

static inline bl_tensor model_boundary_gradient(const bl_pass *pass, int m)
{
    return bl_tensor_at(pass->d, pass->first_row[m] * pass->hidden);
}

/* The dropout of the term of the head. */
static inline bl_lora_dropout model_head_dropout(const bl_pass *pass, const bl_pass_micro *micro,
                                                 int m)
{
    bl_lora_dropout dropout = micro->adapter->dropout;

    if (!micro->gradients) dropout.p = 0;
    dropout.layer = (int32_t)pass->n_layers;
    dropout.matrix = 0;
    dropout.sample = pass->batches[m].sample;
    dropout.position = pass->batches[m].position;
    return dropout;
}

/* pass_layer.c: an action on a micro-batch of a layer's visit. */
bl_status model_pass_run_layer(bl_pass *pass, const bl_pass_input *input, const bl_action *action);

/* pass_head.c: the visit of the head, of micro-batch m of the group. */
bl_status model_pass_run_head(bl_pass *pass, const bl_pass_input *input, int m);

#endif
