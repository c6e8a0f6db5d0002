/* SPDX-License-Identifier: Apache-2.0 */
/* pass_layer.c -- the work of a layer's visit: a micro-batch forward, or backward with the layer's
 * gradients handed to the micro-batch's sink; with routed experts in parts (arch/block.h). */
#include "model/pass_internal.h"

static const bl_block_workspace *workspace_of(const bl_pass *pass, int64_t layer, int m)
{
    return &pass->workspaces[m][model_kind_of(pass, layer)];
}

/* Activations that a layer's forward leaves for its backward. Only the head comes between those of
 * the last layer, so with a single micro-batch, or where each
 * has its part of the workspace, that still holds all that it computed. */
static bl_block_tensors kept_tensors(const bl_pass *pass, const bl_pass_input *input, int64_t layer,
                                     int m)
{
    bl_block_tensors t = {0};
    const bl_block_dims *dims = &pass->dims[model_kind_of(pass, layer)];
    size_t row_bytes = model_saved_row_bytes(&pass->saved_rows, layer);
    if (input->micro[m].gradients && row_bytes > 0)
        bl_block_place_saved(
            dims, bl_pass_save_of(&pass->options, pass->n_layers, layer), pass->batches[m].T,
            (char *)bl_spill_at(pass->saved, layer) + (size_t)pass->first_row[m] * row_bytes, &t);
    bool has_experts = dims->n_experts > 0;
    if (layer == pass->n_layers - 1 && (input->n_micro == 1 || has_experts)) {
        bl_tensor gate_up = t.gate_up, expert_gate_up = t.expert_gate_up;
        t = bl_block_effective_tensors(&t, workspace_of(pass, layer, m));
        t.expert_gate_up = expert_gate_up;    /* the workspace has a group's rows */
        if (has_experts) t.gate_up = gate_up; /* and the last micro-batch's */
    }
    t.x = model_boundary(pass, &input->micro[m], layer, m);
    return t;
}

/* The layer of the current visit, with the adapter of a micro-batch. */
static bl_block block_of(bl_pass *pass, const bl_pass_micro *micro, int64_t layer)
{
    bl_block block = {.dims = &pass->dims[model_kind_of(pass, layer)],
                      .base = pass->base,
                      .layer = layer,
                      .vectors = bl_model_layer_vectors(pass->weights, layer),
                      .prepared = &pass->options.prepared};
    int a = 0;

    if (pass->options.bf16_matrices) block.bf16_matrices = pass->options.bf16_matrices[layer];
    if (!micro->adapter) return block;
    while (pass->adapters[a] != micro->adapter) a++;
    block.lora = micro->adapter->lora;
    block.lora_weights = pass->lora_weights[a];
    block.dropout = micro->adapter->dropout;
    if (!micro->gradients) block.dropout.p = 0;
    return block;
}

static bl_status run_forward(bl_pass *pass, const bl_pass_input *input, const bl_action *action)
{
    int m = action->micro;
    bl_block_tensors kept = kept_tensors(pass, input, action->unit, m);
    bl_block block = block_of(pass, &input->micro[m], action->unit);
    bl_tensor out = model_boundary(pass, &input->micro[m], action->unit + 1, m);

    return action->kind == BL_ACTION_FORWARD
               ? bl_block_forward(pass->compute, &block, &pass->batches[m], &kept,
                                  workspace_of(pass, action->unit, m), out)
               : bl_block_forward_group(pass->compute, &block, &pass->batches[m], &kept,
                                        workspace_of(pass, action->unit, m), action->group, out);
}

/* The sink's place for gradients is one micro-batch's at a time: of experts from their first group
 * on, else only for the last part. */
static bl_status begin_gradients(bl_pass *pass, const bl_gradient_sink *sink,
                                 const bl_action *action)
{
    bool has_groups = pass->dims[model_kind_of(pass, action->unit)].n_expert_groups > 0;
    bl_action_kind first =
        has_groups && pass->schedule.is_one_by_one ? BL_ACTION_BACKWARD_BEGIN : BL_ACTION_BACKWARD;

    if (action->kind != first) return BL_OK;
    pass->gradients = (bl_unit_gradients){.lora = NULL};
    return sink->begin(sink->user, action->unit, pass->compute, &pass->gradients);
}

static bl_status run_backward(bl_pass *pass, const bl_pass_input *input, const bl_action *action)
{
    int m = action->micro;
    const bl_gradient_sink *sink = input->micro[m].gradients;
    const bl_block_workspace *ws = workspace_of(pass, action->unit, m);
    const bl_micro_batch *batch = &pass->batches[m];

    if (!sink) return BL_OK;
    BL_TRY(begin_gradients(pass, sink, action));
    bl_tensor d = model_boundary_gradient(pass, m);
    bl_block_tensors kept = kept_tensors(pass, input, action->unit, m);
    bl_block block = block_of(pass, &input->micro[m], action->unit);
    if (action->kind == BL_ACTION_BACKWARD_BEGIN)
        return bl_block_backward_begin(pass->compute, &block, batch, &kept, ws);
    if (action->kind == BL_ACTION_BACKWARD_GROUP)
        return bl_block_backward_group(pass->compute, &block, batch, &kept, ws, action->group, d,
                                       pass->schedule.is_one_by_one ? pass->gradients.lora : NULL);
    if (pass->gradients.weights.trained) block.trained = &pass->gradients.weights;
    block.is_last = action->unit == pass->schedule.first && !pass->schedule.embedding_has_gradient;
    BL_TRY(bl_block_backward(pass->compute, &block, batch, &kept, ws, d, pass->gradients.lora));
    return sink->end(sink->user, action->unit, pass->compute);
}

bl_status model_pass_run_layer(bl_pass *pass, const bl_pass_input *input, const bl_action *action)
{
    bool is_forward = action->kind == BL_ACTION_FORWARD || action->kind == BL_ACTION_FORWARD_GROUP;
    return is_forward ? run_forward(pass, input, action) : run_backward(pass, input, action);
}
