/* SPDX-License-Identifier: Apache-2.0 */
/* gradient_file.c -- the summed gradients of a step as a safetensors file: LoRA's under the names
 * of the adapter's tensors, others under the model's. All ranks list the same tensors in one
 * order and take part in the gathers; rank 0 writes. */
#include <stdio.h>
#include <stdlib.h>

#include "trained/internal.h"
#include "trained/peft.h"
#include "base/sizes.h"

enum { FLOAT = sizeof(float) };

typedef enum entry_source {
    SOURCE_ROWS,       /* `tensor`: of the base */
    SOURCE_REPLICATED, /* `tensor` */
    SOURCE_FACTOR,     /* LoRA's, of a layer */
    SOURCE_TERM        /* LoRA's, of a table */
} entry_source;

typedef struct entry {
    char name[BL_PEFT_NAME_BYTES];
    int n_dims;
    int64_t shape[2];
    entry_source source;
    bl_arch_tensor tensor;
    int64_t layer;
    int module;
    bl_peft_factor factor;
} entry;

typedef struct dump {
    bl_trained_state *state;
    entry *entries;
    int64_t n;
    /* What state->whole[0] holds: this part, or a layer's LoRA weights; NULL, -1: nothing. */
    const bl_base_part *part;
    int64_t layer;
} dump;

static int64_t elements_of(const entry *e)
{
    return e->shape[0] * (e->n_dims > 1 ? e->shape[1] : 1);
}

/* ---- where the values are ---- */

/* Several ranks: gathers the part's rows of all of them; collective. Frozen rows have undefined
 * values. */
static bl_status gather_part(dump *d, int64_t unit, int matrix)
{
    const bl_trained_state *s = d->state;
    const trained_full *f = s->trained;
    const bl_base_part *part = &f->base_layout->units[unit].matrix[matrix].part[0];
    const float *rows;

    if (d->part == part) return BL_OK;
    d->part = part;
    for (int64_t i = f->spans.first[unit]; i < f->spans.first[unit + 1]; i++) {
        const trained_span *span = &f->spans.span[i];
        if (span->at.idx_matrix != matrix) continue;
        BL_TRY(trained_units_gradient(f->units, span, &rows));
        BL_TRY(bl_stream_copy(s->communication, s->partial + span->first, rows,
                              (size_t)(span->n * FLOAT)));
        BL_TRY(bl_stream_synchronize(s->communication)); /* the next call replaces `rows` */
    }
    return trained_gather_share(d->state, unit, s->partial, (int64_t)part->shard_bytes / FLOAT);
}

static bl_status find_rows(dump *d, const bl_arch_tensor *tensor, const float **out)
{
    const trained_full *f = d->state->trained;
    int64_t unit, row;
    int matrix;

    trained_full_place(f->config, tensor, &unit, &matrix, &row);
    int64_t cols = f->base_layout->units[unit].matrix[matrix].part[0].row_bytes / FLOAT;
    if (f->reduces) {
        BL_TRY(gather_part(d, unit, matrix));
        *out = d->state->whole[0] + row * cols;
        return BL_OK;
    }
    const trained_span *span = trained_span_at(&f->spans, unit, matrix, row);
    BL_TRY(trained_units_gradient(f->units, span, out));
    *out += (row - span->row) * cols;
    return BL_OK;
}

static bl_status find_factor(dump *d, const entry *e, const float **out)
{
    bl_trained_state *s = d->state;
    const bl_lora_layout *layout = s->layout;

    if (d->layer != e->layer)
        BL_TRY(trained_gather_share(s, e->layer, s->grad + trained_chunks_before(s, e->layer),
                                    trained_chunk(s, e->layer)));
    d->layer = e->layer;
    *out = s->whole[0] +
           (e->factor == BL_PEFT_A ? layout->a_offset[e->module] : layout->b_offset[e->module]);
    return BL_OK;
}

/* In PEFT's order, which is not that of device memory. */
static bl_status write_term(const dump *d, const entry *e, bl_safetensors_writer *writer)
{
    const bl_trained_state *s = d->state;
    size_t n_bytes = (size_t)(elements_of(e) * FLOAT);

    if (!writer) return BL_OK;
    float *values = malloc(n_bytes);
    if (!values) return BL_FAIL(BL_ENOMEM, "%zu bytes of gradients", n_bytes);
    bl_status st =
        trained_terms_download(s->terms, s->terms->grad, e->module, e->factor, s->staging, values);
    if (st == BL_OK)
        st = bl_safetensors_writer_put(writer, (size_t)(e - d->entries), 0, values, n_bytes);
    free(values);
    return st;
}

/* B of routed experts in PEFT's order. */
static bl_status write_experts(const dump *d, const entry *e, const float *values,
                               bl_safetensors_writer *writer)
{
    const bl_trained_state *s = d->state;
    int64_t n = elements_of(e);
    float *memory = malloc((size_t)(2 * n * FLOAT));

    if (!memory) return BL_FAIL(BL_ENOMEM, "%lld gradients of experts", (long long)n);
    bl_status st = bl_staging_download(s->staging, memory, values, (size_t)(n * FLOAT));
    bl_peft_stack_b(s->layout->n_experts[e->module], e->shape[0], s->layout->r[e->module], memory,
                    memory + n);
    if (st == BL_OK)
        st = bl_safetensors_writer_put(writer, (size_t)(e - d->entries), 0, memory + n,
                                       (size_t)(n * FLOAT));
    free(memory);
    return st;
}

/* writer NULL: this rank only takes part in the gather. */
static bl_status write_entry(dump *d, const entry *e, bl_safetensors_writer *writer)
{
    const bl_trained_state *s = d->state;
    const float *values = NULL;

    switch (e->source) {
    case SOURCE_TERM:
        return write_term(d, e, writer);
    case SOURCE_FACTOR:
        BL_TRY(find_factor(d, e, &values));
        break;
    case SOURCE_ROWS:
        BL_TRY(find_rows(d, &e->tensor, &values));
        break;
    case SOURCE_REPLICATED:
        values = trained_replicated_gradient(s->replicated, &e->tensor);
        break;
    }
    if (!writer) return BL_OK;
    if (e->source == SOURCE_FACTOR && e->factor == BL_PEFT_B && s->layout->n_experts[e->module] > 1)
        return write_experts(d, e, values, writer);
    return trained_put_bytes(writer, (size_t)(e - d->entries), 0, s->staging, values,
                             (size_t)(elements_of(e) * FLOAT));
}

/* ---- the list ---- */

static void add_tensors(dump *d)
{
    const bl_trained_state *s = d->state;
    const bl_model_config *config = trained_replicated_config(s->replicated);
    const bl_trained_set *set = trained_replicated_set(s->replicated);
    int64_t n = set ? bl_arch_tensor_count(config) : 0;

    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(config, i);
        bool is_alias = s->trained && t.role == BL_ROLE_HEAD && config->tie_word_embeddings;
        if (!set->tensor[i] || is_alias) continue;
        entry *e = &d->entries[d->n++];
        *e = (entry){.n_dims = t.n_dims,
                     .shape = {t.shape[0], t.shape[1]},
                     .source =
                         s->trained && t.role != BL_ROLE_VECTOR ? SOURCE_ROWS : SOURCE_REPLICATED,
                     .tensor = t};
        snprintf(e->name, sizeof e->name, "%s%s", s->trained ? "" : "base_model.model.", t.name);
    }
}

/* Both factors of a module. */
static void add_module(dump *d, int64_t layer, int module, int64_t n_in, int64_t n_out,
                       entry_source source)
{
    const bl_lora_layout *layout = d->state->layout;
    bl_peft_modules modules = bl_arch_peft_modules(layout->arch);
    bool is_table = module >= BL_PEFT_EMBEDDING;
    int64_t r = is_table ? layout->options.r : layout->r[module],
            experts = is_table ? 1 : layout->n_experts[module];

    bl_peft_nest(&modules, bl_lora_peft_config(&layout->options).targets);

    for (int f = 0; f < 2; f++) {
        entry *e = &d->entries[d->n++];
        *e = (entry){.n_dims = 2,
                     .shape = {f == BL_PEFT_A ? experts * r : n_out / experts,
                               f == BL_PEFT_A ? n_in : experts * r},
                     .source = source,
                     .layer = layer,
                     .module = module,
                     .factor = (bl_peft_factor)f};
        bl_peft_tensor_name(&modules, layer, module, e->factor, e->name);
    }
}

static void add_factors(dump *d)
{
    const bl_trained_state *s = d->state;
    const bl_lora_layout *layout = s->layout;
    int64_t r = layout->options.r;

    for (int64_t l = 0; l < s->n_layers; l++)
        for (int p = 0; p < layout->arch->n_projections; p++)
            if (bl_lora_has(layout, l, p))
                add_module(d, l, p, layout->a_cols[p], layout->b_rows[p], SOURCE_FACTOR);
    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++)
        if (layout->options.table[m - BL_PEFT_EMBEDDING])
            add_module(d, 0, m, trained_term_floats(layout, m, BL_PEFT_A) / r,
                       trained_term_floats(layout, m, BL_PEFT_B) / r, SOURCE_TERM);
}

/* ---- the file ---- */

static bl_status create_file(const dump *d, const char *path, bl_safetensors_writer **out)
{
    static const char *const metadata[] = {"content", BL_GRADIENTS_MARK};
    bl_stored_tensor_spec *specs = calloc((size_t)d->n, sizeof *specs);

    if (!specs) return BL_FAIL(BL_ENOMEM, "the list of gradients");
    for (int64_t i = 0; i < d->n; i++) {
        const entry *e = &d->entries[i];
        specs[i] = (bl_stored_tensor_spec){e->name, BL_F32, e->n_dims, {e->shape[0], e->shape[1]}};
    }
    bl_status st = bl_safetensors_create(path, specs, (size_t)d->n, metadata, 1, out);
    free(specs);
    return st;
}

static bl_status write_all(dump *d, const char *path)
{
    bl_safetensors_writer *writer = NULL;
    bl_status st = BL_OK;

    if (bl_comm_rank(d->state->world) == 0) BL_TRY(create_file(d, path, &writer));
    for (int64_t i = 0; i < d->n; i++)
        BL_TRY_GOTO(st, done, write_entry(d, &d->entries[i], writer));
    if (writer) st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    return st;
}

bl_status bl_trained_state_write_gradients(bl_trained_state *s, const char *path)
{
    const bl_model_config *config = trained_replicated_config(s->replicated);
    int64_t most = config ? bl_arch_tensor_count(config) : 0;
    dump d = {.state = s, .layer = -1};

    BL_TRY(bl_stream_synchronize(s->compute)); /* whole[0] is then idle, and the gradients final */
    BL_TRY(bl_stream_synchronize(s->communication));
    BL_TRY(bl_trained_full_flush(s)); /* the last of them may be in flight to the disk */
    if (s->layout) most += 2 * (s->n_layers * s->layout->arch->n_projections + BL_MODEL_TABLES);
    d.entries = calloc((size_t)most, sizeof *d.entries);
    if (!d.entries) return BL_FAIL(BL_ENOMEM, "the list of gradients");
    add_tensors(&d);
    if (s->layout) add_factors(&d);
    bl_status st = write_all(&d, path);
    free(d.entries);
    return st;
}
