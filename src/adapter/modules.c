/* SPDX-License-Identifier: Apache-2.0 */
/* modules.c -- the state of modules that are trained whole beside LoRA: a list of parts. A part is
 * a range of the model's vectors, or a table. */
#include "adapter/modules_internal.h"

#include <stdlib.h>

#include "adapter/internal.h"
#include "adapter/terms_internal.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

enum { FLOAT = sizeof(float) };

const char *const adapter_module_names[MODULES_ARRAYS] = {"m_modules", "v_modules", "w_modules"};

typedef struct module_part {
    int64_t n, before; /* floats; those of all earlier parts */
    float *w, *grad;
    bool decays;
} module_part;

struct adapter_modules {
    bl_device *device;
    const bl_model_weights *weights;
    const bl_model_config *config;
    const bl_trained_set *set;
    int64_t n_parts, n_floats;
    module_part *part;
    float *m, *v; /* [n_floats] */
    bl_module_gradients gradients;
};

static int64_t table_floats(const bl_model_config *config)
{
    return config->vocab_size * config->hidden_size;
}

bool adapter_modules_have_table(const bl_trained_set *set, bl_model_table table)
{
    int64_t unit = set->n_layers + (table == BL_TABLE_EMBEDDING ? 1 : 0);
    return set->unit[unit].matrix[0].n > 0;
}

int64_t adapter_modules_floats(const bl_model_config *config, const bl_trained_set *set)
{
    int64_t n = 0;

    if (!set || set->n_tensors == 0) return 0;
    for (int64_t i = 0; i < set->n_ranges; i++) n += set->range[i].n;
    for (int t = 0; t < BL_MODEL_TABLES; t++)
        if (adapter_modules_have_table(set, (bl_model_table)t)) n += table_floats(config);
    return n;
}

int64_t adapter_modules_before(const bl_model_config *config, const bl_trained_set *set,
                               const bl_arch_tensor *tensor)
{
    bool is_vector = tensor->role == BL_ROLE_VECTOR;
    int64_t n = 0;

    for (int64_t i = 0; i < set->n_ranges; i++)
        if (!is_vector || set->range[i].begin < tensor->offset)
            n += is_vector ? bl_min_i64(set->range[i].n, tensor->offset - set->range[i].begin)
                           : set->range[i].n;
    if (tensor->role == BL_ROLE_HEAD && adapter_modules_have_table(set, BL_TABLE_EMBEDDING))
        n += table_floats(config);
    return n;
}

static void add_part(adapter_modules *m, float *w, float *grad, int64_t n, bool decays)
{
    m->part[m->n_parts++] = (module_part){n, m->n_floats, w, grad, decays};
    m->n_floats += n;
}

static bl_status take(const adapter_modules *m, int64_t n, const char *what, float **out)
{
    return bl_device_alloc(m->device, BL_SPACE_DEVICE, (size_t)n * FLOAT, what, (void **)out);
}

/* The parts of the set, with their gradients. */
static bl_status add_set(adapter_modules *m, bl_model_weights *weights)
{
    const bl_trained_set *set = m->set;
    bl_module_gradients *g = &m->gradients;

    g->set = set;
    BL_TRY(take(m, bl_arch_vector_floats(m->config), "gradients of norms", &g->vectors));
    for (int64_t i = 0; i < set->n_ranges; i++)
        add_part(m, weights->vectors + set->range[i].begin, g->vectors + set->range[i].begin,
                 set->range[i].n, false);
    for (int t = 0; t < BL_MODEL_TABLES; t++) {
        if (!adapter_modules_have_table(set, (bl_model_table)t)) continue;
        BL_TRY(take(m, table_floats(m->config), "gradients of a table", &g->tables[t]));
        add_part(m, weights->tables[t], g->tables[t], table_floats(m->config), true);
    }
    return BL_OK;
}

static bl_status allocate(adapter_modules *m, bl_model_weights *weights, bl_adapter_terms *terms)
{
    if (m->set) BL_TRY(add_set(m, weights));
    if (terms) {
        BL_TRY(adapter_terms_train(terms));
        add_part(m, terms->w, terms->grad, terms->layout->n_table_floats, true);
    }
    BL_TRY(take(m, m->n_floats, "AdamW first moments", &m->m));
    return take(m, m->n_floats, "AdamW second moments", &m->v);
}

bl_status adapter_modules_create(bl_model_weights *weights, const bl_trained_set *set,
                                 bl_adapter_terms *terms, adapter_modules **out)
{
    adapter_modules *m = calloc(1, sizeof *m);
    size_t n_parts = (size_t)(set ? set->n_ranges : 0) + BL_MODEL_TABLES + 1;
    module_part *part = calloc(n_parts, sizeof *part);

    *out = NULL;
    if (!m || !part) {
        free(m), free(part);
        return BL_FAIL(BL_ENOMEM, "the state of modules_to_save");
    }
    *m = (adapter_modules){.device = weights->device,
                           .weights = weights,
                           .config = &weights->model->config,
                           .set = set,
                           .part = part};
    bl_status st = allocate(m, weights, terms);
    if (st != BL_OK) {
        adapter_modules_destroy(m);
        return st;
    }
    *out = m;
    return BL_OK;
}

void adapter_modules_destroy(adapter_modules *m)
{
    if (!m) return;
    float *const blocks[] = {m->m, m->v, m->gradients.vectors, m->gradients.tables[0],
                             m->gradients.tables[1]};
    for (size_t i = 0; i < BL_COUNT(blocks); i++)
        bl_device_free(m->device, BL_SPACE_DEVICE, blocks[i]);
    free(m->part);
    free(m);
}

const bl_module_gradients *adapter_modules_gradients(const adapter_modules *m)
{
    return m && m->set ? &m->gradients : NULL;
}

bl_status adapter_modules_reduce(adapter_modules *m, bl_comm *world, bl_stream *stream, double *sum)
{
    if (!m) return BL_OK;
    bl_comm_set_label(world, "the gradients of modules_to_save", -1);
    for (int64_t i = 0; i < m->n_parts && bl_comm_size(world) > 1; i++)
        BL_TRY(bl_comm_all_reduce_f32(world, stream, m->part[i].grad, m->part[i].n));
    bl_comm_set_label(world, NULL, 0);
    for (int64_t i = 0; i < m->n_parts && bl_comm_rank(world) == 0; i++) /* equal on all ranks */
        BL_TRY(bl_sum_squares(stream, &(bl_sum_squares_args){m->part[i].n, m->part[i].grad, sum}));
    return BL_OK;
}

bl_status adapter_modules_update(adapter_modules *m, bl_stream *stream, const bl_adamw_args *args)
{
    for (int64_t i = 0; m && i < m->n_parts; i++) {
        const module_part *part = &m->part[i];
        bl_adamw_args one = *args;
        if (!part->decays) one.weight_decay = 0;
        one.n = part->n;
        one.grad = part->grad;
        one.w = part->w;
        one.m = bl_tensor_f32(m->m + part->before);
        one.v = bl_tensor_f32(m->v + part->before);
        BL_TRY(bl_adamw(stream, &one));
        BL_TRY(bl_stream_zero(stream, part->grad, (size_t)part->n * FLOAT));
    }
    return BL_OK;
}

bl_status adapter_modules_publish(const adapter_modules *m, bl_stream *stream)
{
    return m ? bl_model_round_head(m->weights, stream) : BL_OK;
}

/* ---- checkpoints ---- */

static float *array_of(const adapter_modules *m, const module_part *part,
                       adapter_module_array array)
{
    float *const arrays[] = {m->m + part->before, m->v + part->before, part->w};
    return arrays[array];
}

bl_status adapter_modules_append(const adapter_modules *m, adapter_module_array array,
                                 bl_staging *staging, bl_safetensors_writer *writer)
{
    for (int64_t i = 0; i < m->n_parts; i++)
        BL_TRY(adapter_append_bytes(writer, staging, array_of(m, &m->part[i], array),
                                    (size_t)(m->part[i].n * FLOAT)));
    return BL_OK;
}

bl_status adapter_modules_load(adapter_modules *m, const bl_safetensors *file, bl_staging *staging)
{
    for (int a = 0; a < MODULES_ARRAYS; a++) {
        const bl_stored_tensor *t = bl_safetensors_find(file, adapter_module_names[a]);
        if (!t || t->dtype != BL_F32 || t->n_dims != 1 || t->shape[0] != m->n_floats)
            return BL_FAIL(BL_ECHECKPOINT, "%s: tensor %s is not F32 [%lld]",
                           bl_safetensors_path(file), adapter_module_names[a],
                           (long long)m->n_floats);
        for (int64_t i = 0; i < m->n_parts; i++)
            BL_TRY(adapter_load_bytes(staging, t, m->part[i].before * FLOAT,
                                      (size_t)(m->part[i].n * FLOAT),
                                      array_of(m, &m->part[i], (adapter_module_array)a)));
    }
    return BL_OK;
}

int64_t adapter_modules_count(const adapter_modules *m)
{
    return m->n_floats;
}

int64_t adapter_modules_tensors(const adapter_modules *m)
{
    return m->set ? bl_arch_tensor_count(m->config) : 0;
}

const float *adapter_modules_gradient(const adapter_modules *m, int64_t i, bl_arch_tensor *tensor)
{
    if (!m->set->tensor[i]) return NULL;
    *tensor = bl_arch_tensor_at(m->config, i);
    if (tensor->role == BL_ROLE_VECTOR) return m->gradients.vectors + tensor->offset;
    return m->gradients.tables[tensor->role == BL_ROLE_HEAD ? BL_TABLE_HEAD : BL_TABLE_EMBEDDING];
}
