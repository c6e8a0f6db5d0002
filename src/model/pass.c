/* SPDX-License-Identifier: Apache-2.0 */
/* pass.c -- one pass of a group of micro-batches through all layers, queued on streams.
 *
 * schedule.c says in which order; carry_out queues one action of it. For layers 0..L-1, the
 * head, and in training layers L-1..0:
 *
 *   prefetch   gathers of the units to come begin on their streams (linear/base.h, ring/)
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
 *   device memory: inputs | d | transit | saved | logits | feed | workspace | prepared matrices
 *
 * Companions have no rows in the stacks: the input of layer l is in transit[l % 2].
 *
 * The head: x -> norm -> logits -> loss, and the gradient of x from the same call, so that
 * logits of (T, vocab) never outlive a piece of them (ops/loss_head.h). With a weigher the head is
 * run twice: for the log-probabilities of all micro-batches, which the host waits for, and with the
 * weights that they give; so of the micro-batches that are weighed. */
#include "model/pass.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "device/staging.h"
#include "model/feed_internal.h"
#include "model/finite_internal.h"
#include "model/pass_size_internal.h"
#include "model/schedule.h"
#include "offload/arena.h"
#include "offload/spill.h"
#include "ops/loss_head.h"
#include "ops/norm.h"

enum {
    RUN_AHEAD = 2 /* visits that are queued and have not ended */
};

struct bl_pass {
    bl_device *device;
    const bl_model_weights *weights;
    bl_base *base;
    bl_stream *compute;
    bl_pass_options options;
    bl_block_dims dims; /* the weights', with the options' mode */
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
    /* [max_micro]: the adapters of the pass under way, each once, and a layer's weights of each. */
    const bl_pass_adapter **adapters;
    bl_tensor *lora_weights;
    int n_adapters;
    bl_feed *feed;
    bl_micro_batch *batches;      /* [max_micro]: those of the pass under way, padded */
    bl_event *visited[RUN_AHEAD]; /* ends of visits, in turn */
    uint64_t n_visits;            /* so far, of all passes */
    bl_schedule schedule; /* of the pass under way; has_backward: some micro-batch of it has */
    bl_weight head;       /* of the pass under way, from its visit on */
    int span;             /* of the visit under way */
    bl_block_workspace workspace;
};

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
    const bl_block_dims *dims = &pass->dims;
    char *d = pass->memory + m->inputs.slots_bytes, *transit = d + m->d,
         *saved = transit + 2 * m->transit, *logits = saved + m->saved.slots_bytes,
         *feed = logits + m->logits;
    pass->d = bl_tensor_of(d, dims->act);
    pass->logits = logits;
    bl_block_place_workspace(dims, bl_block_rows(dims, o->T_max), o->lora_r, o->lora_dropout,
                             o->training, feed + m->feed.device_bytes, &pass->workspace);
    bl_linear_prepared_place(&pass->options.prepared, feed + m->feed.device_bytes + m->block);
    for (int i = 0; i < 2; i++)
        pass->transit[i] = bl_tensor_of(transit + i * m->transit, dims->act);
    if (o->weighs)
        BL_TRY(bl_twin_create(pass->device, (size_t)m->values, "log-probabilities", &pass->values));
    BL_TRY(bl_feed_create(pass->device, pass->weights, o->T_max, model_pass_max_micro(o), feed,
                          &pass->feed));
    for (int i = 0; i < RUN_AHEAD; i++) BL_TRY(bl_event_create(pass->device, &pass->visited[i]));
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
    o.is_dense = bl_model_base_is_bf16(config, weights->model->formats);
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
                      .dims = model_pass_dims(config, &o),
                      .first_row = calloc(n_max, sizeof *pass->first_row),
                      .host_values = calloc(n_max, sizeof *pass->host_values),
                      .batches = calloc(n_max, sizeof *pass->batches),
                      .adapters = calloc(n_max, sizeof *pass->adapters),
                      .lora_weights = calloc(n_max, sizeof *pass->lora_weights)};
    pass->dims.rope = weights->dims.rope;
    pass->input_row_bytes = (size_t)pass->hidden * bl_dtype_bytes(pass->dims.act);
    pass->saved_rows = model_pass_saved_rows(config, &pass->dims, &pass->options);
    pass->max_rows = o.max_group * bl_block_rows(&pass->dims, o.T_max);
    bl_status st = pass->first_row && pass->host_values && pass->batches && pass->adapters &&
                           pass->lora_weights
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
    for (int i = 0; i < RUN_AHEAD; i++) bl_event_destroy(pass->visited[i]);
    free(pass->first_row);
    free(pass->batches);
    free(pass->adapters);
    free(pass->lora_weights);
    free(pass);
}

/* The input of layer `layer` (n_layers: of the final norm) for micro-batch m. */
static bl_tensor boundary(const bl_pass *pass, const bl_pass_micro *micro, int64_t layer, int m)
{
    if (micro->is_companion)
        return bl_tensor_at(pass->transit[layer % 2], pass->first_row[m] * pass->hidden);
    bl_tensor inputs = bl_tensor_of(bl_spill_at(pass->inputs, layer), pass->d.dtype);
    return bl_tensor_at(inputs, pass->first_row[m] * pass->hidden);
}

/* Of a micro-batch among all of the group: companions' come behind the others. */
static int64_t group_row(const bl_pass *pass, const bl_pass_micro *micro, int m)
{
    return pass->first_row[m] + (micro->is_companion ? pass->max_rows : 0);
}

static bl_tensor boundary_gradient(const bl_pass *pass, int m)
{
    return bl_tensor_at(pass->d, pass->first_row[m] * pass->hidden);
}

/* Activations that a layer's forward leaves for its backward. Only the head comes between those of
 * the last layer, so with a single micro-batch the workspace still holds all that it computed. */
static bl_block_tensors kept_tensors(const bl_pass *pass, const bl_pass_input *input, int64_t layer,
                                     int m)
{
    bl_block_tensors t = {0};
    size_t row_bytes = model_saved_row_bytes(&pass->saved_rows, layer);
    if (input->micro[m].gradients && row_bytes > 0)
        bl_block_place_saved(
            &pass->dims, bl_pass_save_of(&pass->options, pass->n_layers, layer), pass->batches[m].T,
            (char *)bl_spill_at(pass->saved, layer) + (size_t)pass->first_row[m] * row_bytes, &t);
    if (layer == pass->n_layers - 1 && input->n_micro == 1)
        t = bl_block_effective_tensors(&t, &pass->workspace);
    t.x = boundary(pass, &input->micro[m], layer, m);
    return t;
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

/* The layer of the visit under way, with the adapter of a micro-batch. */
static bl_block block_of(bl_pass *pass, const bl_pass_micro *micro, int64_t layer)
{
    bl_block block = {.dims = &pass->dims,
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

/* Whether the pass fits the options of create. */
static bl_status check_input(const bl_pass *pass, const bl_pass_input *input)
{
    const bl_pass_options *o = &pass->options;
    int n_companions = 0;

    for (int m = 0; m < input->n_micro; m++) {
        const bl_pass_micro *micro = &input->micro[m];
        n_companions += micro->is_companion;
        if (micro->gradients && (!micro->adapter || !o->training || micro->is_companion))
            return BL_FAIL(BL_EINTERNAL, "gradients of a micro-batch without adapter or training");
        bool drops = micro->gradients && micro->adapter->dropout.p > 0;
        if (micro->adapter &&
            (micro->adapter->lora->options.r > o->lora_r || (drops && !o->lora_dropout)))
            return BL_FAIL(BL_EINTERNAL, "an adapter beyond the pass's options");
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
                                   .head_is_tied = pass->head.rows > 0};
    BL_TRY(bl_spill_begin(pass->inputs, n_rows, has_backward));
    if (has_backward) BL_TRY(bl_spill_begin(pass->saved, n_rows, true));
    BL_TRY(bl_feed_begin(pass->feed));
    for (int m = 0; m < input->n_micro; m++)
        BL_TRY(bl_feed_pad(pass->feed, pass->compute, m, input->micro[m].batch, &pass->batches[m]));
    return BL_OK;
}

/* A stop that comes while the thread waits is seen before anything more is queued. Spans are
 * collected here, while streams have a visit to do: at the end of a step they would wait. */
static bl_status wait_for_turn(bl_pass *pass, const bl_pass_input *input)
{
    BL_TRY(bl_event_synchronize(pass->visited[pass->n_visits % RUN_AHEAD]));
    bl_timeline_collect(pass->options.timeline);
    if (!input->stop || !input->stop(input->stop_user)) return BL_OK;
    return BL_FAIL(BL_ESTOPPED, "stopped inside a step");
}

static bl_status end_visit(bl_pass *pass)
{
    BL_TRY(bl_timeline_end(pass->options.timeline, pass->span, pass->compute, 0));
    return bl_event_record(pass->visited[pass->n_visits++ % RUN_AHEAD], pass->compute);
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

static bl_status run_forward(bl_pass *pass, const bl_pass_input *input, int64_t layer, int m)
{
    bl_block_tensors kept = kept_tensors(pass, input, layer, m);
    bl_block block = block_of(pass, &input->micro[m], layer);

    return bl_block_forward(pass->compute, &block, &pass->batches[m], &kept, &pass->workspace,
                            boundary(pass, &input->micro[m], layer + 1, m));
}

/* Final norm and head: the loss and, in training, the gradient of the last layer's output, with the
 * weights of the batch or others; or, with logp, the log-probabilities alone. */
static bl_status run_head(bl_pass *pass, const bl_pass_micro *micro, int m, const float *weights,
                          float *logp)
{
    const bl_model_config *config = &pass->weights->model->config;
    const bl_micro_batch *b = &pass->batches[m];
    bool has_gradient = micro->gradients && !logp;
    bl_tensor d = {0};
    bl_block_norm norm = {.T = b->T,
                          .w = bl_model_layer_vectors(pass->weights, pass->n_layers),
                          .x = boundary(pass, micro, pass->n_layers, m),
                          .rstd = pass->workspace.rstd,
                          .mean = pass->workspace.mean};

    if (has_gradient) d = boundary_gradient(pass, m);
    BL_TRY(bl_block_norm_forward(pass->compute, &pass->dims, &norm, pass->workspace.norm));
    BL_TRY(bl_loss_head(pass->compute, &(bl_loss_head_args){.T = b->T,
                                                            .H = pass->hidden,
                                                            .V = config->vocab_size,
                                                            .head = pass->head,
                                                            .x = pass->workspace.norm,
                                                            .targets = b->targets,
                                                            .weights = weights,
                                                            .scale = micro->loss_scale,
                                                            .logits = pass->logits,
                                                            .dx = d,
                                                            .logp = logp,
                                                            .loss_sum = micro->loss_sum}));
    if (!has_gradient) return BL_OK;
    return bl_block_norm_backward(pass->compute, &pass->dims, &norm, false, d, d);
}

/* Queues the copy of micro-batch m's part of `values`. */
static bl_status move_values(bl_pass *pass, const bl_pass_input *input, int m, bool up)
{
    size_t offset = (size_t)group_row(pass, &input->micro[m], m) * sizeof(float),
           n_bytes = (size_t)pass->batches[m].T * sizeof(float);

    return up ? bl_twin_upload(pass->values, pass->compute, offset, n_bytes)
              : bl_twin_download(pass->values, pass->compute, offset, n_bytes);
}

/* After the last micro-batch's log-probabilities: the host gives their weights. */
static bl_status weigh(bl_pass *pass, const bl_pass_input *input)
{
    const float *device_values = pass->values->memory;

    for (int m = 0; m < input->n_micro; m++) {
        pass->host_values[m] = NULL;
        if (!input->micro[m].is_weighed) continue;
        BL_TRY(move_values(pass, input, m, false));
        pass->host_values[m] = (float *)pass->values->host + group_row(pass, &input->micro[m], m);
    }
    BL_TRY(bl_stream_synchronize(pass->compute));
    BL_TRY(input->weigher->weigh(input->weigher->user, pass->host_values));
    for (int m = 0; m < input->n_micro; m++) {
        const bl_pass_micro *micro = &input->micro[m];
        if (!micro->gradients || !micro->is_weighed) continue;
        BL_TRY(move_values(pass, input, m, true));
        BL_TRY(run_head(pass, micro, m, device_values + group_row(pass, micro, m), NULL));
    }
    return BL_OK;
}

static bl_status run_heads(bl_pass *pass, const bl_pass_input *input, int m)
{
    const bl_pass_micro *micro = &input->micro[m];
    float *logp = NULL;

    if (micro->is_weighed) logp = (float *)pass->values->memory + group_row(pass, micro, m);
    BL_TRY(run_head(pass, micro, m, pass->batches[m].weights, logp));
    return input->weigher && m + 1 == input->n_micro ? weigh(pass, input) : BL_OK;
}

static bl_status run_backward(bl_pass *pass, const bl_pass_input *input, int64_t layer, int m)
{
    const bl_gradient_sink *sink = input->micro[m].gradients;
    float *gradients;

    if (!sink) return BL_OK;
    bl_block_tensors kept = kept_tensors(pass, input, layer, m);
    bl_block block = block_of(pass, &input->micro[m], layer);
    BL_TRY(sink->begin(sink->user, layer, pass->compute, &gradients));
    BL_TRY(bl_block_backward(pass->compute, &block, &pass->batches[m], &kept, &pass->workspace,
                             boundary_gradient(pass, m), gradients));
    return sink->end(sink->user, layer, pass->compute);
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
    case BL_ACTION_PREFETCH_LORA:
        return prefetch_lora(pass, unit);
    case BL_ACTION_PREFETCH_BASE:
        return bl_base_prefetch(pass->base, unit);
    case BL_ACTION_BEGIN:
        return begin_visit(pass, action);
    case BL_ACTION_ACQUIRE_LORA:
        return acquire_lora(pass, unit);
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
        return bl_feed_embed(pass->feed, pass->compute, input->micro[m].batch,
                             group_row(pass, &input->micro[m], m),
                             boundary(pass, &input->micro[m], 0, m));
    case BL_ACTION_FORWARD:
        return run_forward(pass, input, unit, m);
    case BL_ACTION_HEAD:
        return run_heads(pass, input, m);
    case BL_ACTION_BACKWARD:
        return run_backward(pass, input, unit, m);
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
