/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/memory.h"

#include "base/pool.h"
#include "base/sizes.h"
#include "device/staging.h"

/* Measured, docs/memory.md: what no function of ours allocates. */
enum {
    PROCESS_BYTES =
        4 << 20,          /* data and heap of program and libraries, stacks, streams, open files */
    BLAS_BYTES = 4 << 20, /* a thread's packing buffers and generated code */
};

static int64_t scale_bytes(const bl_base_layout *layout)
{
    int64_t n = 0;
    for (int64_t u = 0; u < layout->n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            const bl_weight *w = &layout->units[u].matrix[m].weight;
            for (int s = 0; s < w->n_segments; s++) {
                size_t codes, scales;
                if (bl_format_sizes(w->segment[s].format, w->segment[s].rows, w->cols, &codes,
                                    &scales))
                    n += (int64_t)scales;
            }
        }
    return n * (int64_t)sizeof(float);
}

int bl_plan_n_shards(const bl_train_config *config, const bl_topology *topology)
{
    return (int)bl_min_i64(config->shard_size, topology->n_ranks);
}

int64_t bl_plan_micro_batch_bytes(int64_t T_max)
{
    int64_t per_token =
        4 * (int64_t)sizeof(int32_t) + (int64_t)sizeof(float) + (int64_t)sizeof(int64_t);
    return bl_round_up(T_max * per_token + (int64_t)sizeof(int32_t), 64);
}

int64_t bl_plan_adapter_bytes(bl_device_kind kind, const bl_lora_layout *layout, int64_t n_layers,
                              int n_ranks, int ring_depth)
{
    int64_t chunk = bl_ceil_div(layout->n_floats, n_ranks),
            compute_bytes = (int64_t)bl_dtype_bytes(bl_act_dtype(kind)),
            copy = compute_bytes == sizeof(float) ? 0 : n_layers * chunk * compute_bytes;
    return (4 * n_layers * chunk + 2 * chunk * n_ranks + chunk) * (int64_t)sizeof(float) + copy +
           ring_depth * chunk * n_ranks * compute_bytes + BL_STAGING_BYTES;
}

/* ---- the pass ---- */

/* Tokens of the largest micro-batch that training can make of its rows; and of the largest of an
 * evaluation. */
static int64_t train_tokens(const bl_plan_input *in)
{
    return in->config->per_device_train_batch_size * in->longest_train_row;
}

static int64_t evaluation_tokens(const bl_plan_input *in)
{
    return in->config->per_device_eval_batch_size * in->longest_validation_row;
}

/* Micro-batches a visit: visit_tokens, or as many as make a gather worth its while. The same on all
 * ranks, whose data are the same. */
static int64_t visit_group(const bl_plan_input *in)
{
    enum { AUTO_TOKENS = 256 };
    const bl_train_config *c = in->config;
    int64_t micro_tokens = bl_max_i64(1, train_tokens(in));
    int64_t wanted = c->visit_tokens == BL_OPTION_AUTO ? AUTO_TOKENS : c->visit_tokens;
    return bl_min_i64(bl_max_i64(1, wanted / micro_tokens), c->gradient_accumulation_steps);
}

bl_pass_options bl_plan_pass_options(const bl_plan_input *in, unsigned save)
{
    const bl_train_config *c = in->config;
    return (bl_pass_options){
        .T_max =
            bl_max_i64(train_tokens(in), evaluation_tokens(in)), /* 0 without rows of the kind */
        .max_group = in->is_training ? (int)visit_group(in) : 1,
        .ring_depth = (int)c->ring_depth,
        .save = save,
        .training = in->is_training,
        .lora_r = in->lora->options.r,
        .lora_dropout = in->lora->options.dropout > 0,
        .offload_activations = c->activation_offload && in->is_training,
        .pin = true};
}

/* ---- the sum ---- */

static int64_t batch_bytes(const bl_plan_input *in, int64_t T_max)
{
    int64_t n_train = in->is_training ? 2 * in->config->gradient_accumulation_steps : 0,
            n_evaluation = in->longest_validation_row > 0 ? 1 : 0;
    enum { ON_DEVICE_AND_HOST = 2 };
    return (n_train + n_evaluation) * ON_DEVICE_AND_HOST * bl_plan_micro_batch_bytes(T_max);
}

bl_status bl_plan_predict_memory(const bl_plan_input *in, const bl_llama_placement *placement,
                                 unsigned save, bl_memory_ledger *out)
{
    const bl_train_config *c = in->config;
    const bl_llama_config *m = in->model;
    bl_pass_options pass = bl_plan_pass_options(in, save);
    int n_ranks = in->topology.n_ranks, n_here = in->topology.n_here;
    bl_base_layout layout;
    bl_llama_placed_bytes placed;

    BL_TRY(bl_llama_layout(m, in->formats, in->head_dtype, bl_plan_n_shards(c, &in->topology),
                           &layout));
    bl_status st = bl_llama_place_bytes(&layout, placement, (int)c->ring_depth, &placed);
    int64_t scales = scale_bytes(&layout);
    bl_base_layout_free(&layout);
    BL_TRY(st);
    int64_t norms = (2 * m->n_layers + 1) * m->hidden_size, rope = in->n_positions * m->head_dim;
    *out = (bl_memory_ledger){
        .frozen = (int64_t)(placed.device + placed.host) + scales +
                  (norms + rope) * (int64_t)sizeof(float),
        .ring = (int64_t)(placed.ring + placed.reader),
        .host = (int64_t)placed.host,
        .disk = (int64_t)placed.disk,
        .embedding = m->vocab_size * m->hidden_size * (int64_t)bl_dtype_bytes(in->embedding_dtype),
        .adapter = in->lora->n_floats ? bl_plan_adapter_bytes(pass.kind, in->lora, m->n_layers,
                                                              n_ranks, (int)c->ring_depth)
                                      : 0,
        .activations = bl_llama_pass_bytes(m, &pass) + bl_llama_pass_host_bytes(m, &pass),
        .batches = batch_bytes(in, pass.T_max),
        .scratch = c->threads * (BL_POOL_SCRATCH_BYTES + BLAS_BYTES),
        .other = PROCESS_BYTES,
    };
    out->total =
        (out->frozen + out->ring + out->adapter + out->activations + out->batches + out->scratch) *
            n_here +
        out->embedding + out->other;
    /* While weights are read, most of the rest is not there yet; with little of the rest, that is
     * the peak. */
    int64_t loading =
        (out->frozen + out->scratch + in->load_bytes + (int64_t)placed.writing) * n_here +
        out->embedding + out->other;
    out->total = bl_max_i64(out->total, loading);
    return BL_OK;
}
