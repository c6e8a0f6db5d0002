/* SPDX-License-Identifier: Apache-2.0 */
/* replicated.c -- the state of tensors that every rank trains whole: a list of ranges, each of the
 * model's vectors, or a table, or the terms. */
#include "trained/replicated_internal.h"

#include <stdlib.h>

#include "trained/internal.h"
#include "trained/terms_internal.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

enum { FLOAT = sizeof(float) };

typedef struct range {
    int64_t n, before; /* floats; those of all earlier ranges */
    float *w, *grad;
    bool decays;
    double rate; /* of learning, relative to the run's */
} range;

struct trained_replicated {
    trained_replicated_options options;
    bl_device *device;
    const bl_model_config *config;
    int64_t n_ranges, n_floats, n_sums;
    range *range;
    range *sum;   /* [n_sums]: gradients that are summed at once */
    float *m, *v; /* [n_floats] */
    float *vector_grad, *table_grad[BL_MODEL_TABLES]; /* NULL: frozen */
};

/* ---- sets ---- */

static int64_t table_floats(const bl_model_config *config)
{
    return config->vocab_size * config->hidden_size;
}

bool trained_set_has_table(const bl_trained_set *set, bl_model_table table)
{
    int64_t unit = set->n_layers + (table == BL_TABLE_EMBEDDING ? 1 : 0);
    return set->unit[unit].matrix[0].n > 0;
}

int64_t trained_vector_floats(const bl_trained_set *set)
{
    int64_t n = 0;

    for (int64_t i = 0; set && i < set->n_ranges; i++) n += set->range[i].n;
    return n;
}

int64_t trained_modules_floats(const bl_model_config *config, const bl_trained_set *set)
{
    int64_t n = trained_vector_floats(set);

    for (int t = 0; set && set->n_tensors > 0 && t < BL_MODEL_TABLES; t++)
        if (trained_set_has_table(set, (bl_model_table)t)) n += table_floats(config);
    return n;
}

int64_t trained_modules_before(const bl_model_config *config, const bl_trained_set *set,
                               const bl_arch_tensor *tensor)
{
    int64_t n = 0;

    if (tensor->role != BL_ROLE_VECTOR) {
        bool follows =
            tensor->role == BL_ROLE_HEAD && trained_set_has_table(set, BL_TABLE_EMBEDDING);
        return trained_vector_floats(set) + (follows ? table_floats(config) : 0);
    }
    for (int64_t i = 0; i < set->n_ranges && set->range[i].begin < tensor->offset; i++)
        n += bl_min_i64(set->range[i].n, tensor->offset - set->range[i].begin);
    return n;
}

bl_replicated_bytes bl_trained_replicated_measure(const bl_model_config *config,
                                                  const bl_trained_set *set,
                                                  const bl_lora_layout *layout, bl_device_kind kind,
                                                  bl_dtype act)
{
    int64_t terms = layout ? layout->n_table_floats : 0,
            tables = trained_modules_floats(config, set) - trained_vector_floats(set),
            vectors = set && set->n_tensors > 0 ? bl_arch_vector_floats(config) : 0,
            head =
                tables > 0 && trained_set_has_table(set, BL_TABLE_HEAD) ? table_floats(config) : 0,
            copies = act == BL_F32 ? 0 : terms * (int64_t)bl_dtype_bytes(act);

    if (bl_model_copies_head(kind)) copies += head * (int64_t)bl_dtype_bytes(BL_BF16);
    return (bl_replicated_bytes){.weights = (tables + terms) * FLOAT + copies,
                                 .moments =
                                     2 * (tables + trained_vector_floats(set) + terms) * FLOAT,
                                 .gradients = (tables + vectors + terms) * FLOAT};
}

/* ---- create ---- */

static void add_range(trained_replicated *r, float *w, float *grad, int64_t n, bool decays,
                      double rate)
{
    r->range[r->n_ranges++] = (range){n, r->n_floats, w, grad, decays, rate};
    r->n_floats += n;
}

/* Adds the trained vectors in [begin, begin + n): as one range, or one per vector if they have
 * rates. */
static void add_vector_ranges(trained_replicated *r, int64_t begin, int64_t n)
{
    const bl_trained_set *set = r->options.set;
    float *w = r->options.weights->vectors;
    int64_t n_tensors = set->rate ? bl_arch_tensor_count(r->config) : 0;

    if (!set->rate) add_range(r, w + begin, r->vector_grad + begin, n, false, 1);
    for (int64_t i = 0; i < n_tensors; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(r->config, i);
        if (t.role == BL_ROLE_VECTOR && t.offset >= begin && t.offset < begin + n)
            add_range(r, w + t.offset, r->vector_grad + t.offset, t.shape[0], false, set->rate[i]);
    }
}

static void add_sum(trained_replicated *r, float *grad, int64_t n)
{
    r->sum[r->n_sums++] = (range){.n = n, .grad = grad};
}

static bl_status take(const trained_replicated *r, int64_t n, const char *what, float **out)
{
    return bl_device_alloc(r->device, BL_SPACE_DEVICE, (size_t)n * FLOAT, what, (void **)out);
}

/* Full fine-tuning sums all vectors at once, of which the frozen ones have zeros. */
static bl_status add_vectors(trained_replicated *r)
{
    const bl_trained_set *set = r->options.set;
    int64_t n_vectors = bl_arch_vector_floats(r->config);

    BL_TRY(take(r, n_vectors, "gradients of norms", &r->vector_grad));
    for (int64_t i = 0; i < set->n_ranges; i++) {
        const bl_trained_span *span = &set->range[i];
        add_vector_ranges(r, span->begin, span->n);
        if (r->options.has_tables) add_sum(r, r->vector_grad + span->begin, span->n);
    }
    if (!r->options.has_tables) add_sum(r, r->vector_grad, n_vectors);
    return BL_OK;
}

static bl_status add_table(trained_replicated *r, bl_model_table table)
{
    int64_t n = table_floats(r->config), end;
    double rate = bl_trained_rate(r->config, r->options.set,
                                  r->config->n_layers + (table == BL_TABLE_EMBEDDING), 0, 0, &end);

    BL_TRY(take(r, n, "gradients of a table", &r->table_grad[table]));
    add_range(r, r->options.weights->tables[table], r->table_grad[table], n, true, rate);
    add_sum(r, r->table_grad[table], n);
    return BL_OK;
}

/* Adds the terms: as one range, or one per factor if they have rates. */
static bl_status add_terms(trained_replicated *r)
{
    const bl_adapter_terms *terms = r->options.terms;
    const bl_lora_layout *layout = terms->layout;

    BL_TRY(trained_terms_train(r->options.terms));
    add_sum(r, terms->grad, layout->n_table_floats);
    if (!layout->has_rates) add_range(r, terms->w, terms->grad, layout->n_table_floats, true, 1);
    for (int i = 0; i < 2 * BL_MODEL_TABLES && layout->has_rates; i++) {
        bl_model_table table = i / 2 == 0 ? BL_TABLE_EMBEDDING : BL_TABLE_HEAD;
        bl_peft_factor factor = i % 2 == 0 ? BL_PEFT_A : BL_PEFT_B;
        int64_t at = factor == BL_PEFT_A ? layout->table_a[table] : layout->table_b[table];
        if (at >= 0)
            add_range(r, terms->w + at, terms->grad + at,
                      bl_lora_table_floats(layout, table, factor), true,
                      layout->table_rate[table][factor]);
    }
    return BL_OK;
}

static bl_status allocate(trained_replicated *r)
{
    const trained_replicated_options *o = &r->options;

    if (o->set && (o->set->n_ranges > 0 || o->has_tables)) BL_TRY(add_vectors(r));
    for (int t = 0; o->set && o->has_tables && t < BL_MODEL_TABLES; t++)
        if (trained_set_has_table(o->set, (bl_model_table)t))
            BL_TRY(add_table(r, (bl_model_table)t));
    if (o->terms) BL_TRY(add_terms(r));
    if (r->n_floats == 0) return BL_OK;
    BL_TRY(take(r, r->n_floats, "AdamW first moments", &r->m));
    return take(r, r->n_floats, "AdamW second moments", &r->v);
}

bl_status trained_replicated_create(const trained_replicated_options *options,
                                    trained_replicated **out)
{
    size_t most = 3 * BL_MODEL_TABLES + 1; /* per table: itself, and two factors */
    trained_replicated *r = calloc(1, sizeof *r);

    *out = NULL;
    if (!r) return BL_FAIL(BL_ENOMEM, "the state of replicated tensors");
    if (options->set) most += (size_t)bl_arch_tensor_count(&options->weights->model->config);
    *r = (trained_replicated){.options = *options,
                              .device = options->weights->device,
                              .config = &options->weights->model->config,
                              .range = calloc(most, sizeof *r->range),
                              .sum = calloc(most, sizeof *r->sum)};
    bl_status st =
        r->range && r->sum ? allocate(r) : BL_FAIL(BL_ENOMEM, "the state of replicated tensors");
    if (st != BL_OK) {
        trained_replicated_destroy(r);
        return st;
    }
    *out = r;
    return BL_OK;
}

void trained_replicated_destroy(trained_replicated *r)
{
    if (!r) return;
    float *const blocks[] = {r->m, r->v, r->vector_grad, r->table_grad[0], r->table_grad[1]};
    for (size_t i = 0; i < BL_COUNT(blocks); i++)
        bl_device_free(r->device, BL_SPACE_DEVICE, blocks[i]);
    free(r->range);
    free(r->sum);
    free(r);
}

/* ---- a step ---- */

void trained_replicated_place(const trained_replicated *r, int64_t unit, bl_unit_gradients *out)
{
    int64_t head = r ? r->config->n_layers : 0;

    if (!r) return;
    if (r->options.set) out->weights.trained = &r->options.set->unit[unit];
    if (r->vector_grad && unit <= head)
        out->weights.vectors = r->vector_grad + bl_arch_vectors_before(r->config, unit);
    if (unit < head) return;
    bl_model_table table = unit == head ? BL_TABLE_HEAD : BL_TABLE_EMBEDDING;
    out->weights.matrix[0][0] = r->table_grad[table];
    if (r->options.terms) trained_terms_place(r->options.terms, table, out);
}

bl_status trained_replicated_reduce(trained_replicated *r, bl_comm *world, bl_stream *stream,
                                    double *sum)
{
    if (!r) return BL_OK;
    bl_comm_set_label(world, r->options.label, -1);
    for (int64_t i = 0; i < r->n_sums && bl_comm_size(world) > 1; i++)
        BL_TRY(bl_comm_all_reduce_f32(world, stream, r->sum[i].grad, r->sum[i].n));
    bl_comm_set_label(world, NULL, 0);
    for (int64_t i = 0; i < r->n_sums && bl_comm_rank(world) == 0; i++) /* equal on all ranks */
        BL_TRY(bl_sum_squares(stream, &(bl_sum_squares_args){r->sum[i].n, r->sum[i].grad, sum}));
    return BL_OK;
}

bl_status trained_replicated_clear(trained_replicated *r, bl_stream *stream)
{
    for (int64_t i = 0; r && i < r->n_sums; i++)
        BL_TRY(bl_stream_zero(stream, r->sum[i].grad, (size_t)r->sum[i].n * FLOAT));
    return BL_OK;
}

bl_status trained_replicated_update(trained_replicated *r, bl_stream *stream,
                                    const bl_adamw_args *args)
{
    for (int64_t i = 0; r && i < r->n_ranges; i++) {
        const range *at = &r->range[i];
        bl_adamw_args one = *args;
        if (!at->decays) one.weight_decay = 0;
        one.lr *= at->rate;
        one.n = at->n;
        one.grad = at->grad;
        one.w = at->w;
        one.m = bl_tensor_f32(r->m + at->before);
        one.v = bl_tensor_f32(r->v + at->before);
        BL_TRY(bl_adamw(stream, &one));
    }
    return trained_replicated_clear(r, stream);
}

bl_status trained_replicated_publish(const trained_replicated *r, bl_stream *stream)
{
    return r ? bl_model_round_head(r->options.weights, stream) : BL_OK;
}

/* ---- files ---- */

int64_t trained_replicated_floats(const trained_replicated *r)
{
    return r ? r->n_floats : 0;
}

const bl_model_config *trained_replicated_config(const trained_replicated *r)
{
    return r && r->options.set ? r->config : NULL;
}

const bl_trained_set *trained_replicated_set(const trained_replicated *r)
{
    return r ? r->options.set : NULL;
}

const float *trained_replicated_gradient(const trained_replicated *r, const bl_arch_tensor *tensor)
{
    if (tensor->role == BL_ROLE_VECTOR) return r->vector_grad + tensor->offset;
    return r->table_grad[tensor->role == BL_ROLE_HEAD ? BL_TABLE_HEAD : BL_TABLE_EMBEDDING];
}

static float *array_of(const trained_replicated *r, const range *at, int array)
{
    float *const arrays[REPLICATED_ARRAYS] = {r->m + at->before, r->v + at->before, at->w};
    return arrays[array];
}

bl_status trained_replicated_put(const trained_replicated *r, int array, bl_staging *staging,
                                 bl_safetensors_writer *writer, size_t index)
{
    for (int64_t i = 0; r && i < r->n_ranges; i++)
        BL_TRY(trained_put_bytes(writer, index, r->range[i].before * FLOAT, staging,
                                 array_of(r, &r->range[i], array),
                                 (size_t)(r->range[i].n * FLOAT)));
    return BL_OK;
}

bl_status trained_replicated_load(trained_replicated *r, int array, bl_staging *staging,
                                  const bl_stored_tensor *tensor)
{
    for (int64_t i = 0; r && i < r->n_ranges; i++)
        BL_TRY(trained_load_bytes(staging, tensor, r->range[i].before * FLOAT,
                                  (size_t)(r->range[i].n * FLOAT),
                                  array_of(r, &r->range[i], array)));
    return BL_OK;
}
