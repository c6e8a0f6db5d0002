/* SPDX-License-Identifier: Apache-2.0 */
/* time_trained.c -- the additional work of a step of full fine-tuning: gradients of units, reduced
 * over the ranks as in adapter/full.c, gradients of the embedding, and AdamW over the trained
 * rows. */
#include "plan/time_layer_internal.h"

#include <math.h>

#include "arch/arch.h"

enum { FLOAT = sizeof(float) };

/* ---- gradients ---- */

/* A unit's matrices, and which of them are trained; NULL: all. */
typedef struct unit_items {
    const plan_item *item;
    int n;
    double code_bytes;
    const bl_trained_unit *trained;
} unit_items;

static bool is_trained(const unit_items *u, int matrix)
{
    return !u->trained || u->trained->matrix[matrix].n > 0;
}

/* A rank's weights in the trained matrices. */
static double rows_of(const unit_items *u)
{
    double n = 0;
    for (int i = 0; i < u->n; i++)
        if (is_trained(u, i)) n += (double)u->item[i].shard_bytes / u->code_bytes;
    return n;
}

static int64_t shard_bytes_of(const unit_items *u)
{
    int64_t n_bytes = 0;
    for (int i = 0; i < u->n; i++)
        if (is_trained(u, i))
            n_bytes += (int64_t)((double)u->item[i].shard_bytes / u->code_bytes * FLOAT);
    return n_bytes;
}

/* A sum by blocks of ranks (comm/model.h), or by a ring, which reads n parts and writes one. Then
 * the sum is added to the shard. */
static plan_gradients gradients_of(const bl_time_input *in, const unit_items *u)
{
    double n = in->n_ranks, rows = rows_of(u), sent = in->habits.reduces_in_ring ? 2 : FLOAT,
           rate = in->rates.memory_bytes_per_s > 0 ? in->rates.memory_bytes_per_s : INFINITY;

    if (in->n_ranks == 1 || rows == 0) return (plan_gradients){.n_bytes = 0};
    bl_exchange sum = plan_sum_of(in, rows * sent), ring = plan_gather_of(in, n, rows * sent),
                shards = plan_sum_of(in, (double)shard_bytes_of(u));
    ring.kind = BL_EXCHANGE_RING;
    bool is_ring = in->habits.reduces_in_ring;
    plan_gradients g = {.zero = plan_work_of(in, n * rows * FLOAT / rate, n * rows * FLOAT),
                        .n_bytes = (int64_t)bl_exchange_received(&shards)};
    g.reduce = plan_exchange(in, is_ring ? &ring : &sum);
    double summed = is_ring ? (n + 1) * sent * rows : bl_exchange_summed(&sum);
    plan_add_without_network(&g.reduce, (summed + 3 * FLOAT * rows) / rate);
    return g;
}

bl_work plan_embedding_gradient(const bl_time_input *in)
{
    plan_tally t = plan_tally_of(in, NULL);

    plan_tally_add(&t, PLAN_OF_ELEMENTWISE,
                   bl_cost_embedding_backward(
                       &t.setting, &(bl_embedding_backward_args){
                                       .T = t.T, .H = in->model->hidden_size, .dy = t.x}));
    return plan_work_of(in, t.seconds, t.bytes);
}

static double table_code_bytes(const bl_time_input *in)
{
    return (double)bl_dtype_bytes(in->head_dtype);
}

static double layer_code_bytes(const bl_time_run *run)
{
    return (double)bl_format_code_bytes(run->format[0]);
}

static unit_items table_of(const bl_time_input *in, const plan_amounts *amounts, int64_t behind)
{
    int64_t unit = in->model->n_layers + behind;
    return (unit_items){&amounts->head_item, 1, table_code_bytes(in),
                        in->trained ? &in->trained->unit[unit] : NULL};
}

static unit_items layer_of(const bl_time_input *in, const plan_amounts *amounts, int run)
{
    return (unit_items){amounts->layers[run].item, BL_LAYER_MATRICES,
                        layer_code_bytes(&in->runs[run]), in->runs[run].trained};
}

int64_t plan_trained_elements(const bl_time_input *in, const plan_item *item, bool is_layer)
{
    double code_bytes = is_layer ? layer_code_bytes(in->runs) : table_code_bytes(in);
    return (int64_t)((double)item->shard_bytes / code_bytes);
}

/* The head's and the embedding's are alike; where one of the two is frozen, its are none. */
void plan_trained_amounts(const bl_time_input *in, plan_amounts *amounts)
{
    for (int r = 0; r < in->n_runs; r++) {
        unit_items layer = layer_of(in, amounts, r);
        amounts->layers[r].gradients = gradients_of(in, &layer);
    }
    for (int t = 0; t < 2; t++) {
        unit_items table = table_of(in, amounts, t);
        amounts->gradients[t] = gradients_of(in, &table);
    }
    amounts->embed_backward = plan_embedding_gradient(in);
}

/* ---- the update ---- */

static double bytes_of(bl_cost cost)
{
    double bytes = 0;
    for (int i = 0; i < cost.n; i++) bytes += cost.kernel[i].bytes;
    return bytes;
}

/* Squares, AdamW, clearing of gradients; and rounding into the bf16 copy, if there is one. */
static double update_bytes(const plan_tally *t, double n, double code_bytes, bl_dtype moments)
{
    int64_t rows = (int64_t)n;
    const bl_adamw_args adamw = {.n = rows, .m = bl_tensor_of(NULL, moments)};
    double bytes = bytes_of(bl_cost_sum_squares(&t->setting, &(bl_sum_squares_args){.n = rows})) +
                   bytes_of(bl_cost_adamw(&t->setting, &adamw)) + FLOAT * n;
    return bytes + (code_bytes < FLOAT ? (FLOAT + code_bytes) * n : 0);
}

/* A tied embedding's gradients are also cleared, and added to the head's. */
static double unit_bytes(const plan_tally *t, const plan_state *s, int64_t unit)
{
    bool is_layer = unit < s->n_layers, is_tied = !is_layer && s->in->model->tie_word_embeddings;
    double rows = 0,
           code_bytes = is_layer ? layer_code_bytes(s->in->runs) : table_code_bytes(s->in);

    if (s->unit[unit].is_paged) return 0;
    for (int i = 0; i < (is_layer ? BL_LAYER_MATRICES : 1); i++)
        rows += (double)s->unit[unit].n_trained[i];
    return update_bytes(t, rows, code_bytes, s->in->moments) + (is_tied ? 4 * FLOAT * rows : 0);
}

double plan_trained_optimizer_s(const bl_time_input *in, const plan_state *state)
{
    plan_tally t = plan_tally_of(in, NULL);
    const bl_rates *r = &in->rates;
    double rate = r->optimizer_bytes_per_s > 0 ? r->optimizer_bytes_per_s : r->memory_bytes_per_s,
           vectors = in->trained ? 0 : (double)bl_arch_vector_floats(in->model), bytes;

    for (int64_t i = 0; in->trained && i < in->trained->n_ranges; i++)
        vectors += (double)in->trained->range[i].n;
    bytes = update_bytes(&t, vectors, FLOAT, BL_F32);
    for (int64_t u = 0; u < state->n_units; u++) bytes += unit_bytes(&t, state, u);
    return rate > 0 ? bytes / rate : 0;
}
