/* SPDX-License-Identifier: Apache-2.0 */
/* pass.c -- one pass of a group of micro-batches through all layers, queued on streams.
 *
 * schedule.c says in which order; carry_out queues one action of it. For layers 0..L-1, the
 * head, and in training layers L-1..first (0, but with frozen weights):
 *
 *   prefetch   gathers of the units to come begin on their streams (linear/base.h)
 *   acquire    the compute stream waits for the layer's LoRA weights; each product waits for its
 *              frozen matrix (arch/block.c)
 *   work       micro-batch by micro-batch: block forward, or the head, or block backward with the
 *              layer's gradients handed to the micro-batch's sink
 *   release    slots of the rings are free for the units to come once this work has run
 *
 * Streams. compute: all arithmetic. The base's copy and gather streams: frozen weights to the
 * device and between ranks. The adapters' communication: LoRA weights in, gradients out.
 * activations: stack entries to host memory and back. They meet through events only; the host
 * waits in one place, wait_for_turn, which keeps it two visits ahead: enough to hide the
 * queueing, and soon enough for a stop or an error.
 *
 * Memory. `inputs` and `saved` are stacks of one entry per layer (offload/spill.h). An entry has
 * the rows of all micro-batches one behind the other: micro-batch m begins at first_row[m]. Two
 * things are per group: those entries, and d, the gradient at the boundary that backward has
 * reached. The workspace and the logits are per micro-batch: they are used again by the next
 * one.
 *
 *   device memory: inputs | d | transit | saved | logits | terms | feed | workspace |
 *                  prepared matrices
 *
 * Companions have no rows in the stacks: the input of layer l is in transit[l % 2].
 *
 * The layers: pass_layer.c. The head: pass_head.c. */
#include "model/pass.h"

#include <stdlib.h>

#include "base/sizes.h"
#include "device/staging.h"
#include "model/finite_internal.h"
#include "model/pass_internal.h"
#include "offload/arena.h"
#include "ops/elementwise.h"

/* item: 0 of inputs, 1 of saved tensors. */
static bl_status create_stack(const bl_pass *pass, const model_pass_size *m, int item, void *slots,
                              void *host, bl_spill **out)
{
    const model_stack_size *size = item == 0 ? &m->inputs : &m->saved;
    const void *inputs = &pass->input_row_bytes, *saved = &pass->saved_rows;
    return bl_spill_create(
        &(bl_spill_options){.device = pass->device,
                            .compute = pass->compute,
                            .copy = pass->options.activations,
                            .n_entries = size->n_entries,
                            .n_slots = size->n_slots,
                            .n_host = size->n_host,
                            .n_rows = m->rows,
                            .row_bytes = item == 0 ? model_input_row_bytes : model_saved_row_bytes,
                            .user = item == 0 ? inputs : saved,
                            .slots = slots,
                            .host = host,
                            .timeline = pass->options.timeline,
                            .item = item},
        out);
}

/* Of layers of a kind, for each micro-batch. */
static void place_workspaces(bl_pass *pass, const model_pass_size *m, int kind, char *memory)
{
    const bl_pass_options *o = &pass->options;
    const bl_block_dims *dims = &pass->dims[kind];
    int64_t T = bl_block_rows(dims, o->T_max);

    bl_block_place_workspace(dims, T, o->lora_r, o->lora_dropout, o->training, memory,
                             &pass->workspaces[0][kind]);
    for (int i = 1; i < model_pass_max_micro(o); i++) {
        pass->workspaces[i][kind] = pass->workspaces[0][kind];
        bl_block_place_visit(dims, T, memory + m->block - i * m->visit, &pass->workspaces[i][kind]);
    }
}

/* All memory and the stacks in it. */
static bl_status place(bl_pass *pass, const model_pass_size *m)
{
    const bl_pass_options *o = &pass->options;
    size_t n_host = (size_t)model_pass_stacks_host_bytes(m);
    char *host = NULL;

    BL_TRY(bl_device_alloc(pass->device, BL_SPACE_DEVICE, (size_t)model_pass_device_bytes(m),
                           "activations", (void **)&pass->memory));
    if (n_host > 0) {
        bl_arena_options arena = {.device = pass->device,
                                  .size_bytes = bl_arena_piece_bytes(n_host),
                                  .what = "offloaded activations",
                                  .node = -1,
                                  .pin = o->pin};
        BL_TRY(bl_arena_create(&arena, &pass->arena));
        host = bl_arena_take(pass->arena, n_host);
    }
    const bl_block_dims *dims = pass->any;
    char *d = pass->memory + m->inputs.slots_bytes, *transit = d + m->d,
         *saved = transit + 2 * m->transit, *logits = saved + m->saved.slots_bytes,
         *terms = logits + m->logits, *feed = terms + m->terms;
    pass->d = bl_tensor_of(d, dims->act);
    pass->logits = logits;
    for (int k = 0; k < BL_LAYER_KINDS; k++)
        place_workspaces(pass, m, k, feed + m->feed.device_bytes);
    bl_linear_prepared_place(&pass->options.prepared, feed + m->feed.device_bytes + m->block);
    model_term_space_place(dims->act, bl_block_rows(dims, o->T_max), o->terms_r, o->lora_dropout,
                           terms, &pass->terms);
    for (int i = 0; i < 2; i++)
        pass->transit[i] = bl_tensor_of(transit + i * m->transit, dims->act);
    if (o->weighs)
        BL_TRY(bl_twin_create(pass->device, (size_t)m->values, "log-probabilities", &pass->values));
    BL_TRY(bl_feed_create(pass->device, pass->weights, o->T_max, model_pass_max_micro(o), feed,
                          &pass->feed));
    for (int i = 0; i < MODEL_RUN_AHEAD; i++)
        BL_TRY(bl_event_create(pass->device, &pass->visited[i]));
    BL_TRY(create_stack(pass, m, 0, pass->memory, host, &pass->inputs));
    if (!o->training) return BL_OK;
    return create_stack(pass, m, 1, saved, host ? host + m->inputs.host_bytes : NULL, &pass->saved);
}

bl_status bl_pass_create(bl_device *device, const bl_model_weights *weights, bl_base *base,
                         bl_stream *compute, const bl_pass_options *options, bl_pass **out)
{
    const bl_model_config *config = &weights->model->config;
    bl_pass_options o = *options;

    *out = NULL;
    o.kind = bl_device_get_kind(device);
    o.act = bl_device_act(device);
    o.is_dense = weights->copy || bl_model_base_is_bf16(config, weights->model->formats);
    o.is_trained = weights->model->is_trained;
    o.has_table = weights->tables[BL_TABLE_EMBEDDING] != NULL;
    o.first_trained = weights->model->trained.first;
    model_pass_size m = model_pass_measure(config, &o);
    bl_pass *pass = calloc(1, sizeof *pass);
    if (!pass) return BL_FAIL(BL_ENOMEM, "a model pass");
    size_t n_max = (size_t)model_pass_max_micro(&o);
    *pass = (bl_pass){.device = device,
                      .weights = weights,
                      .base = base,
                      .compute = compute,
                      .options = o,
                      .n_layers = config->n_layers,
                      .hidden = config->hidden_size,
                      .first_row = calloc(n_max, sizeof *pass->first_row),
                      .host_values = calloc(n_max, sizeof *pass->host_values),
                      .batches = calloc(n_max, sizeof *pass->batches),
                      .workspaces = calloc(n_max, sizeof *pass->workspaces),
                      .head_terms = calloc(n_max, sizeof *pass->head_terms),
                      .adapters = calloc(n_max, sizeof *pass->adapters),
                      .lora_weights = calloc(n_max, sizeof *pass->lora_weights)};
    for (int k = 0; k < BL_LAYER_KINDS; k++) {
        pass->dims[k] = model_pass_dims(config, (bl_layer_kind)k, &o);
        pass->dims[k].rope = weights->dims.rope;
    }
    pass->any = &pass->dims[bl_model_kind(config, 0)];
    pass->input_row_bytes = (size_t)pass->hidden * bl_dtype_bytes(pass->any->act);
    pass->saved_rows = model_pass_saved_rows(config, &pass->options);
    pass->max_rows = o.max_group * bl_block_rows(pass->any, o.T_max);
    bl_status st = pass->first_row && pass->host_values && pass->batches && pass->workspaces &&
                           pass->head_terms && pass->adapters && pass->lora_weights
                       ? place(pass, &m)
                       : BL_FAIL(BL_ENOMEM, "a model pass");
    if (st != BL_OK) {
        bl_pass_destroy(pass);
        return st;
    }
    *out = pass;
    return BL_OK;
}

void bl_pass_destroy(bl_pass *pass)
{
    if (!pass) return;
    bl_spill_destroy(pass->inputs);
    bl_spill_destroy(pass->saved);
    bl_arena_destroy(pass->arena);
    bl_twin_destroy(pass->values);
    free(pass->host_values);
    bl_device_free(pass->device, BL_SPACE_DEVICE, pass->memory);
    bl_feed_destroy(pass->feed);
    for (int i = 0; i < MODEL_RUN_AHEAD; i++) bl_event_destroy(pass->visited[i]);
    free(pass->first_row);
    free(pass->batches);
    free(pass->workspaces);
    free(pass->head_terms);
    free(pass->adapters);
    free(pass->lora_weights);
    free(pass);
}

static bl_status prefetch_lora(bl_pass *pass, int64_t layer)
{
    for (int a = 0; a < pass->n_adapters; a++)
        BL_TRY(bl_gather_ring_prefetch(pass->adapters[a]->ring, layer));
    return BL_OK;
}

static bl_status acquire_lora(bl_pass *pass, int64_t layer)
{
    for (int a = 0; a < pass->n_adapters; a++) {
        const void *weights;
        BL_TRY(bl_gather_ring_acquire(pass->adapters[a]->ring, layer, 0, pass->compute, &weights));
        pass->lora_weights[a] = bl_tensor_of(weights, pass->d.dtype);
    }
    return BL_OK;
}

static bl_status release_lora(bl_pass *pass, int64_t layer)
{
    for (int a = 0; a < pass->n_adapters; a++)
        BL_TRY(bl_gather_ring_release(pass->adapters[a]->ring, layer, pass->compute));
    return BL_OK;
}

/* Whether the pass fits the options of create. */
static bl_status check_input(const bl_pass *pass, const bl_pass_input *input)
{
    const bl_pass_options *o = &pass->options;
    int n_companions = 0;

    for (int m = 0; m < input->n_micro; m++) {
        const bl_pass_micro *micro = &input->micro[m];
        n_companions += micro->is_companion;
        bool is_of_adapter = !pass->weights->model->is_trained;
        if (micro->gradients &&
            (!o->training || micro->is_companion || is_of_adapter != (micro->adapter != NULL)))
            return BL_FAIL(BL_EINTERNAL, "gradients of a micro-batch without trained weights");
        const bl_pass_adapter *adapter = micro->adapter;
        bool drops = adapter && micro->gradients && adapter->dropout.p > 0;
        if (adapter &&
            (bl_lora_largest_r(adapter->lora) > o->lora_r || (drops && !o->lora_dropout)))
            return BL_FAIL(BL_EINTERNAL, "an adapter beyond the pass's options");
        BL_TRY(model_terms_check(o, micro));
        if (micro->is_weighed && (!o->weighs || !input->weigher))
            return BL_FAIL(BL_EINTERNAL, "a weighed micro-batch in a pass without weigher");
    }
    if (input->n_micro - n_companions > o->max_group || n_companions > o->max_companions)
        return BL_FAIL(BL_EINTERNAL, "%d micro-batches, %d of them companions, in a pass of %d",
                       input->n_micro, n_companions, o->max_group);
    return BL_OK;
}

/* The pass's adapters, each once. */
static void collect_adapters(bl_pass *pass, const bl_pass_input *input)
{
    pass->n_adapters = 0;
    for (int m = 0; m < input->n_micro; m++) {
        const bl_pass_adapter *adapter = input->micro[m].adapter;
        int a = 0;
        if (!adapter) continue;
        while (a < pass->n_adapters && pass->adapters[a] != adapter) a++;
        pass->adapters[a] = adapter;
        if (a == pass->n_adapters) pass->n_adapters++;
    }
}

int64_t bl_pass_token_step(const bl_pass *pass)
{
    return bl_feed_token_step(pass->feed);
}

static bool trains_embedding(const bl_pass_input *input)
{
    for (int m = 0; m < input->n_micro; m++)
        if (input->micro[m].gradients && input->micro[m].gradients->has_embedding) return true;
    return false;
}

static bool trains_experts(const bl_pass_input *input)
{
    for (int m = 0; m < input->n_micro; m++)
        if (input->micro[m].gradients && input->micro[m].adapter &&
            bl_lora_has_experts(input->micro[m].adapter->lora))
            return true;
    return false;
}

/* Micro-batches are contiguous, so that an entry is moved in one piece, without the room for more
 * tokens. */
static bl_status begin_pass(bl_pass *pass, const bl_pass_input *input)
{
    bool has_backward = false;
    int64_t end[2] = {0, 0}; /* rows taken: in the stacks, in transit */

    BL_TRY(check_input(pass, input));
    collect_adapters(pass, input);
    for (int m = 0; m < input->n_micro; m++) {
        const bl_pass_micro *micro = &input->micro[m];
        pass->first_row[m] = end[micro->is_companion];
        end[micro->is_companion] += bl_feed_rows(pass->feed, micro->batch->T);
        has_backward = has_backward || micro->gradients;
    }
    int64_t n_rows = end[false];

    pass->head = pass->weights->tied_head;
    pass->schedule = (bl_schedule){.n_layers = pass->n_layers,
                                   .n_micro = input->n_micro,
                                   .ring_depth = pass->options.ring_depth,
                                   .has_backward = has_backward,
                                   .n_groups = pass->dims[BL_LAYER_EXPERTS].n_expert_groups,
                                   .kinds = &pass->saved_rows.kinds,
                                   .is_one_by_one = trains_experts(input),
                                   .head_is_tied = pass->head.rows > 0,
                                   .is_trained = pass->weights->model->is_trained,
                                   .first = pass->options.first_trained,
                                   .embedding_has_gradient = trains_embedding(input),
                                   .embedding = bl_model_embedding_unit(pass->weights->model)};
    BL_TRY(bl_spill_begin(pass->inputs, n_rows, has_backward));
    bl_spill_take_from(pass->inputs, pass->schedule.first);
    if (has_backward) {
        BL_TRY(bl_spill_begin(pass->saved, n_rows, true));
        bl_spill_take_from(pass->saved, pass->schedule.first);
    }
    BL_TRY(bl_feed_begin(pass->feed));
    for (int m = 0; m < input->n_micro; m++)
        BL_TRY(bl_feed_pad(pass->feed, pass->compute, m, input->micro[m].batch, &pass->batches[m]));
    return BL_OK;
}

/* A stop that comes while the thread waits is seen before anything more is queued. Spans are
 * collected here, while streams have a visit to do: at the end of a step they would wait. */
static bl_status wait_for_turn(bl_pass *pass, const bl_pass_input *input)
{
    BL_TRY(bl_event_synchronize(pass->visited[pass->n_visits % MODEL_RUN_AHEAD]));
    bl_timeline_collect(pass->options.timeline);
    if (!input->stop || !input->stop(input->stop_user)) return BL_OK;
    return BL_FAIL(BL_ESTOPPED, "stopped inside a step");
}

static bl_status end_visit(bl_pass *pass)
{
    BL_TRY(bl_timeline_end(pass->options.timeline, pass->span, pass->compute, 0));
    return bl_event_record(pass->visited[pass->n_visits++ % MODEL_RUN_AHEAD], pass->compute);
}

static bl_status begin_visit(bl_pass *pass, const bl_action *action)
{
    int64_t head = pass->n_layers;
    const char *name = action->visit < head    ? "forward"
                       : action->visit == head ? "head"
                                               : "backward";

    return bl_timeline_begin(pass->options.timeline, BL_LANE_COMPUTE, name, action->unit, -1,
                             pass->compute, &pass->span);
}

static bl_status acquire_embedding(bl_pass *pass, int64_t unit)
{
    bl_weight table;

    BL_TRY(bl_base_acquire(pass->base, unit, 0, pass->compute, &table));
    bl_feed_set_table(pass->feed, table.segment[0].codes,
                      table.segment[0].format == BL_FORMAT_BF16 ? BL_BF16 : BL_F32);
    return BL_OK;
}

static double embedding_multiplier(const bl_pass *pass)
{
    double multiplier = pass->weights->model->config.embedding_multiplier;
    return multiplier != 0 ? multiplier : 1.0;
}

/* With the adapter's term. */
static bl_status run_embed(bl_pass *pass, const bl_pass_input *input, int m)
{
    const bl_pass_micro *micro = &input->micro[m];
    const bl_table_term *term = model_table_term(micro->adapter, BL_TABLE_EMBEDDING);
    bl_tensor y = model_boundary(pass, micro, 0, m);

    BL_TRY(
        bl_feed_embed(pass->feed, pass->compute, micro->batch, model_group_row(pass, micro, m), y));
    if (!term) return BL_OK;
    return model_term_embed(pass->compute, term, embedding_multiplier(pass), micro->batch->T,
                            pass->hidden, micro->batch->ids, &pass->terms, y);
}

/* Of the rows of the table, and of the term, for the micro-batch's tokens, without padding. */
static bl_status run_embedding_backward(bl_pass *pass, const bl_pass_input *input, int m)
{
    const bl_gradient_sink *sink = input->micro[m].gradients;
    const bl_micro_batch *batch = input->micro[m].batch;
    const bl_table_term *term = model_table_term(input->micro[m].adapter, BL_TABLE_EMBEDDING);
    int64_t unit = pass->n_layers + 1;
    bl_unit_gradients gradients = {.lora = NULL};
    double multiplier = embedding_multiplier(pass);

    if (!sink) return BL_OK;
    BL_TRY(sink->begin(sink->user, unit, pass->compute, &gradients));
    if (term)
        BL_TRY(model_term_embed_backward(pass->compute, term, multiplier, batch->T, pass->hidden,
                                         batch->ids, model_boundary_gradient(pass, m), &pass->terms,
                                         &gradients));
    if (gradients.weights.matrix[0][0])
        BL_TRY(bl_embedding_backward(
            pass->compute, &(bl_embedding_backward_args){.T = batch->T,
                                                         .H = pass->hidden,
                                                         .scale = (float)multiplier,
                                                         .ids = batch->ids,
                                                         .dy = model_boundary_gradient(pass, m),
                                                         .table = gradients.weights.matrix[0][0]}));
    return sink->end(sink->user, unit, pass->compute);
}

/* Where the model's weights are trained all micro-batches have the same. */
static const bl_gradient_sink *common_sink(const bl_pass_input *input)
{
    for (int m = 0; m < input->n_micro; m++)
        if (input->micro[m].gradients) return input->micro[m].gradients;
    return NULL;
}

static bl_status open_gradients(bl_pass *pass, const bl_pass_input *input, int64_t unit)
{
    const bl_gradient_sink *sink = common_sink(input);
    return sink ? sink->open(sink->user, unit, pass->compute) : BL_OK;
}

static bl_status close_gradients(bl_pass *pass, const bl_pass_input *input, int64_t unit)
{
    const bl_gradient_sink *sink = common_sink(input);
    return sink ? sink->close(sink->user, unit, pass->compute) : BL_OK;
}

typedef struct pass_run {
    bl_pass *pass;
    const bl_pass_input *input;
} pass_run;

/* bl_action_sink: queues one action of the schedule. */
static bl_status carry_out(void *user, const bl_action *action)
{
    const pass_run *run = user;
    bl_pass *pass = run->pass;
    const bl_pass_input *input = run->input;
    int64_t unit = action->unit;
    int m = action->micro;

    switch (action->kind) {
    case BL_ACTION_VISIT:
        return wait_for_turn(pass, input);
    case BL_ACTION_UPDATE:
        return input->updates ? input->updates->update(input->updates->user, unit) : BL_OK;
    case BL_ACTION_PREFETCH_LORA:
        return prefetch_lora(pass, unit);
    case BL_ACTION_PREFETCH_BASE:
        return bl_base_prefetch(pass->base, unit);
    case BL_ACTION_PREFETCH_GROUP:
        return bl_base_prefetch(pass->base, bl_base_group(pass->base, unit, action->group));
    case BL_ACTION_RELEASE_GROUP:
        return bl_base_release(pass->base, bl_base_group(pass->base, unit, action->group),
                               pass->compute);
    case BL_ACTION_BEGIN:
        return begin_visit(pass, action);
    case BL_ACTION_ACQUIRE_LORA:
        return acquire_lora(pass, unit);
    case BL_ACTION_ACQUIRE_EMBEDDING:
        return acquire_embedding(pass, unit);
    case BL_ACTION_ACQUIRE_HEAD:
        return bl_base_acquire(pass->base, unit, 0, pass->compute, &pass->head);
    case BL_ACTION_RESERVE_INPUT:
        return bl_spill_reserve(pass->inputs, unit);
    case BL_ACTION_RESERVE_SAVED:
        return bl_spill_reserve(pass->saved, unit);
    case BL_ACTION_TAKE_INPUT:
        return bl_spill_take(pass->inputs, unit);
    case BL_ACTION_TAKE_SAVED:
        return bl_spill_take(pass->saved, unit);
    case BL_ACTION_EMBED:
        return run_embed(pass, input, m);
    case BL_ACTION_FORWARD:
    case BL_ACTION_FORWARD_GROUP:
    case BL_ACTION_BACKWARD_BEGIN:
    case BL_ACTION_BACKWARD_GROUP:
    case BL_ACTION_BACKWARD:
        return model_pass_run_layer(pass, input, action);
    case BL_ACTION_HEAD:
        return model_pass_run_head(pass, input, m);
    case BL_ACTION_EMBED_BACKWARD:
        return run_embedding_backward(pass, input, m);
    case BL_ACTION_OPEN_GRADIENTS:
        return open_gradients(pass, input, unit);
    case BL_ACTION_CLOSE_GRADIENTS:
        return close_gradients(pass, input, unit);
    case BL_ACTION_PUT_INPUT:
        return bl_spill_put(pass->inputs, unit);
    case BL_ACTION_PUT_SAVED:
        return bl_spill_put(pass->saved, unit);
    case BL_ACTION_DROP_INPUT:
        return bl_spill_drop(pass->inputs, unit);
    case BL_ACTION_DROP_SAVED:
        return bl_spill_drop(pass->saved, unit);
    case BL_ACTION_RELEASE_BASE:
        bl_linear_prepared_forget(&pass->options.prepared);
        return bl_base_release(pass->base, unit, pass->compute);
    case BL_ACTION_RELEASE_LORA:
        return release_lora(pass, unit);
    case BL_ACTION_END:
        return end_visit(pass);
    case BL_N_ACTIONS:
        break;
    }
    return BL_FAIL(BL_EINTERNAL, "action %d of a pass", (int)action->kind);
}

bl_status bl_pass_run(bl_pass *pass, const bl_pass_input *input)
{
    BL_TRY(begin_pass(pass, input));
    return bl_schedule_run(&pass->schedule, carry_out, &(pass_run){pass, input});
}

static bool find_bad(const bl_pass *pass, const bl_pass_input *input, bl_staging *staging,
                     int64_t *layer, int *micro)
{
    for (*layer = -1; *layer < pass->n_layers; ++*layer) {
        bl_tensor x = bl_tensor_of(bl_spill_look(pass->inputs, *layer + 1), pass->d.dtype);
        if (!bl_tensor_is_there(x)) return false;
        for (*micro = 0; *micro < input->n_micro; ++*micro)
            if (!input->micro[*micro].is_companion &&
                !model_all_finite(staging, bl_tensor_at(x, pass->first_row[*micro] * pass->hidden),
                                  input->micro[*micro].batch->T * pass->hidden))
                return true;
    }
    return false;
}

bool bl_pass_find_bad(const bl_pass *pass, const bl_pass_input *input, int64_t *layer, int *micro)
{
    bl_staging *staging;

    if (pass->options.activations && bl_stream_synchronize(pass->options.activations) != BL_OK)
        return false;
    if (bl_staging_create(pass->device, BL_STAGING_BYTES, "staging of activations", &staging) !=
        BL_OK)
        return false;
    bool found = find_bad(pass, input, staging, layer, micro);
    bl_staging_destroy(staging);
    return found;
}

bl_status bl_pass_validate(const bl_pass *pass)
{
    BL_TRY(bl_spill_validate(pass->inputs));
    return pass->saved ? bl_spill_validate(pass->saved) : BL_OK;
}
