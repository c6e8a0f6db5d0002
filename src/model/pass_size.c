/* SPDX-License-Identifier: Apache-2.0 */
/* pass_size.c -- the memory of a pass: its size, and the part that is touched. */
#include "model/pass_size_internal.h"

#include "base/memory.h"
#include "base/sizes.h"
#include "model/table_terms_internal.h"
#include "offload/arena.h"
#include "offload/spill.h"
#include "ops/loss_head.h"

enum {
    OFFLOAD_SLOTS = 2,     /* offload/spill.h: transfers have the time of a visit */
    ALIGNMENT_BYTES = 256, /* where tensors begin */
};

bl_block_dims model_pass_dims(const bl_model_config *config, bl_layer_kind kind,
                              const bl_pass_options *o)
{
    bl_block_dims dims = bl_block_dims_of(config, kind, o->kind, o->act);

    dims.mode = o->mode;
    dims.sums = o->sums;
    dims.is_dense = o->is_dense;
    for (int m = 0; m < BL_LAYER_MATRICES; m++)
        dims.prepared_bytes[m] = o->prepared.matrix[m].memory_bytes;
    return dims;
}

unsigned bl_pass_save_of(const bl_pass_options *o, int64_t n_layers, int64_t layer)
{
    if (layer < o->first_trained) return BL_SAVE_S0;
    /* Spread evenly: their transfers, too. */
    bool saves_all = (layer + 1) * o->n_saving_all / n_layers > layer * o->n_saving_all / n_layers;
    return saves_all ? BL_SAVE_S4 : o->save;
}

model_saved_rows model_pass_saved_rows(const bl_model_config *config, const bl_pass_options *o)
{
    model_saved_rows rows = {
        .options = o, .n_layers = config->n_layers, .kinds = bl_model_kinds(config)};

    for (int k = 0; k < BL_LAYER_KINDS; k++) {
        bl_block_dims dims = model_pass_dims(config, (bl_layer_kind)k, o);
        rows.light[k] = (size_t)bl_block_saved_bytes(&dims, o->save);
        rows.all[k] = (size_t)bl_block_saved_bytes(&dims, BL_SAVE_S4);
    }
    return rows;
}

size_t model_input_row_bytes(const void *user, int64_t entry)
{
    (void)entry;
    return *(const size_t *)user;
}

size_t model_saved_row_bytes(const void *user, int64_t layer)
{
    const model_saved_rows *rows = user;
    unsigned save = bl_pass_save_of(rows->options, rows->n_layers, layer);
    bl_layer_kind kind = bl_layer_kind_of(&rows->kinds, layer);
    return save == BL_SAVE_S4 ? rows->all[kind] : save == BL_SAVE_S0 ? 0 : rows->light[kind];
}

/* The workspace, without those of further micro-batches, is that of the kind of layer that needs
 * most: *widest. */
static int64_t block_bytes(const bl_model_config *config, const bl_pass_options *o, int64_t T,
                           bl_layer_kind *widest)
{
    int64_t most = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++) {
        bl_block_dims dims = model_pass_dims(config, (bl_layer_kind)k, o);
        int64_t n = bl_block_workspace_bytes(&dims, T, o->lora_r, o->lora_dropout, o->training);
        if (bl_model_layers_of(config, (bl_layer_kind)k) == 0 || n <= most) continue;
        most = n;
        *widest = (bl_layer_kind)k;
    }
    return most;
}

static void measure_stack(int64_t n_rows, size_t (*row_bytes)(const void *, int64_t),
                          const void *user, model_stack_size *s)
{
    bl_spill_bytes n = bl_spill_measure(&(bl_spill_options){.n_entries = s->n_entries,
                                                            .n_slots = s->n_slots,
                                                            .n_host = s->n_host,
                                                            .n_rows = n_rows,
                                                            .row_bytes = row_bytes,
                                                            .user = user});
    s->slots_bytes = (int64_t)n.slots;
    s->host_bytes = (int64_t)n.host;
}

int model_pass_max_micro(const bl_pass_options *o)
{
    return o->max_group + o->max_companions;
}

model_pass_size model_pass_measure(const bl_model_config *config, const bl_pass_options *o)
{
    bl_block_dims dims = model_pass_dims(config, bl_model_kind(config, 0), o),
                  of_experts = model_pass_dims(config, BL_LAYER_EXPERTS, o);
    int64_t T = bl_block_rows(&dims, o->T_max), rows = o->max_group * T, L = config->n_layers;
    size_t row_bytes = (size_t)dims.hidden * bl_dtype_bytes(dims.act);
    size_t logits = bl_loss_head_scratch_bytes(o->kind, T, config->hidden_size, config->vocab_size);
    bl_layer_kind widest;
    model_pass_size m = {.rows = rows, .inputs = {.n_entries = L + 1, .n_slots = 2}};

    m.block = block_bytes(config, o, T, &widest);
    m.visit = bl_block_visit_bytes(&of_experts, T);
    m.block += (model_pass_max_micro(o) - 1) * m.visit;
    m.workspace = m.block + (int64_t)bl_linear_prepared_bytes(&o->prepared);
    m.logits = bl_round_up((int64_t)logits, ALIGNMENT_BYTES);
    m.feed =
        bl_feed_measure(&dims, o->is_trained || o->has_table, o->T_max, model_pass_max_micro(o));
    m.transit = o->max_companions * T * (int64_t)row_bytes;
    m.terms = model_term_space_bytes(dims.act, T, o->terms_r, config->hidden_size, o->lora_dropout);
    if (o->weighs) m.values = model_pass_max_micro(o) * T * (int64_t)sizeof(float);
    if (o->training) {
        m.d = rows * (int64_t)row_bytes;
        m.saved = (model_stack_size){.n_entries = L, .n_slots = L};
        m.inputs.n_slots = L + 1;
    }
    if (o->training && o->offload_activations) {
        m.inputs.n_slots = bl_min_i64(OFFLOAD_SLOTS, L + 1);
        m.inputs.n_host = L + 1; /* all: find_bad looks at them */
        m.saved.n_slots = bl_min_i64(OFFLOAD_SLOTS, L);
        m.saved.n_host = L - m.saved.n_slots;
    }
    model_saved_rows saved = model_pass_saved_rows(config, o);
    measure_stack(rows, model_input_row_bytes, &row_bytes, &m.inputs);
    measure_stack(rows, model_saved_row_bytes, &saved, &m.saved);
    return m;
}

int64_t model_pass_device_bytes(const model_pass_size *m)
{
    return m->inputs.slots_bytes + m->d + m->saved.slots_bytes + m->logits + m->feed.device_bytes +
           m->workspace + 2 * m->transit + m->terms;
}

int64_t model_pass_stacks_host_bytes(const model_pass_size *m)
{
    return m->inputs.host_bytes + m->saved.host_bytes;
}

bl_pass_bytes bl_pass_measure(const bl_model_config *config, const bl_pass_options *options)
{
    model_pass_size m = model_pass_measure(config, options);
    return (bl_pass_bytes){.inputs = m.inputs.slots_bytes,
                           .saved = m.saved.slots_bytes,
                           .boundary = m.d,
                           .logits = m.logits,
                           .workspace = m.workspace,
                           .feed = m.feed.device_bytes,
                           .companions = 2 * m.transit,
                           .terms = m.terms,
                           .values = m.values,
                           .host_inputs = m.inputs.host_bytes,
                           .host_saved = m.saved.host_bytes,
                           .host_embeddings = m.feed.host_bytes};
}

/* Of n buffers of `size` bytes together, of which `used` are written, the first of each: where they
 * begin in a page is chance, and so each reaches a page more. */
static int64_t touched(int64_t n, int64_t size, int64_t used)
{
    if (used <= 0) return 0;
    return bl_min_i64(size, used + n * bl_memory_touched_page_bytes());
}

/* Rows of micro-batches are contiguous from the beginning of each buffer. The workspace has room
 * for every tensor of a layer; those that are kept for backward are used there by evaluations
 * alone. The arena of host memory is touched when it is made. */
bl_pass_bytes bl_pass_touched(const bl_model_config *config, const bl_pass_options *options,
                              int64_t T_train, int64_t T_evaluation)
{
    bl_layer_kind widest = BL_LAYER_DENSE;
    (void)block_bytes(config, options, options->T_max, &widest);
    bl_block_dims dims = model_pass_dims(config, widest, options);
    bl_pass_options of_train = *options, of_evaluation = *options;
    int64_t T = bl_max_i64(T_train, T_evaluation), n_unused = 0,
            n_buffers = bl_block_scratch_buffers(&dims);

    of_train.T_max = T_train;
    of_evaluation.T_max = T_evaluation;
    of_evaluation.max_group = 1;
    model_pass_size train = model_pass_measure(config, &of_train),
                    evaluation = model_pass_measure(config, &of_evaluation);
    if (options->training) n_unused = bl_block_rows(&dims, T) - bl_block_rows(&dims, T_evaluation);
    model_pass_size full = model_pass_measure(config, options),
                    *longer = T_train >= T_evaluation ? &train : &evaluation;
    unsigned always = options->n_saving_all < config->n_layers ? options->save : BL_SAVE_S4;
    /* Of experts gate_up is never there; each micro-batch of the group has its tensors. */
    if (dims.n_experts > 0) always &= BL_SAVE_S3;
    if (dims.n_experts > 0 && options->training)
        n_unused += (options->max_group - 1) * bl_block_rows(&dims, T_train);
    int64_t workspace = longer->workspace - n_unused * bl_block_saved_bytes(&dims, always);
    int64_t float_bytes = (int64_t)sizeof(float),
            n_logits = config->vocab_size + config->hidden_size;
    bl_pass_bytes all = bl_pass_measure(config, options);

    all.inputs = touched(full.inputs.n_slots, full.inputs.slots_bytes,
                         bl_max_i64(train.inputs.slots_bytes, evaluation.inputs.slots_bytes));
    all.saved = touched(full.saved.n_slots, full.saved.slots_bytes, train.saved.slots_bytes);
    all.boundary = touched(1, full.d, train.d);
    all.companions = touched(2, full.transit, bl_max_i64(train.transit, evaluation.transit));
    all.terms = touched(3, full.terms, longer->terms);
    all.workspace =
        bl_min_i64(all.workspace, touched(n_buffers, n_buffers * full.workspace, workspace));
    if (longer->workspace == full.workspace) all.workspace = workspace;
    all.logits = bl_min_i64(all.logits, T * n_logits * float_bytes);
    return all;
}
