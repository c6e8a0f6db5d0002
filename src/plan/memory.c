/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- the ledger of a run: every item calls the function that sizes the allocation
 * itself. */
#include "plan/memory.h"

#include "base/pool.h"
#include "trained/full.h"
#include "base/sizes.h"
#include "comm/nccl/nccl.h"
#include "model/batch.h"

/* Measured, docs/internals/plan.md: what no function of ours allocates: data and heap of program
 * and libraries, stacks, streams, open files. */
enum { PROCESS_BYTES = 4 << 20 };

/* A GPU's own, on top of what Ballast allocates there; assumed, docs/internals/plan.md. */
static const int64_t CONTEXT_BYTES = (int64_t)1 << 30, /* context, kernels, cuBLASLt */
    COMMUNICATOR_BYTES = (int64_t)3 << 29;             /* NCCL's buffers in a group of several */

static const char *const item_names[BL_MEMORY_ITEMS] = {
    [BL_MEMORY_BASE] = "frozen base",
    [BL_MEMORY_SCALES] = "its scales",
    [BL_MEMORY_NORMS] = "norms, RoPE tables",
    [BL_MEMORY_RING] = "ring of gathered layers",
    [BL_MEMORY_READER] = "disk read buffers",
    [BL_MEMORY_LORA] = "LoRA weights",
    [BL_MEMORY_GRADIENTS] = "LoRA gradients",
    [BL_MEMORY_ADAM] = "AdamW moments",
    [BL_MEMORY_LORA_RING] = "ring of LoRA weights",
    [BL_MEMORY_LAYER_INPUTS] = "layer inputs",
    [BL_MEMORY_SAVED] = "saved activations",
    [BL_MEMORY_BOUNDARY] = "boundary gradient",
    [BL_MEMORY_WORKSPACE] = "a layer's working set",
    [BL_MEMORY_PREPARED] = "prepared weights",
    [BL_MEMORY_LOGITS] = "logits",
    [BL_MEMORY_TOKENS] = "tokens of two steps",
    [BL_MEMORY_STAGING] = "staging",
    [BL_MEMORY_WORKERS] = "scratch of threads",
    [BL_MEMORY_COMMUNICATION] = "communicator",
    [BL_MEMORY_CONTEXT] = "CUDA context",
};

const char *bl_memory_item_name(bl_memory_item item, bool is_trained)
{
    if (is_trained && item == BL_MEMORY_BASE) return "weights";
    if (is_trained && item == BL_MEMORY_GRADIENTS) return "gradients";
    return item_names[item];
}

int64_t bl_memory_sum(const bl_memory_ledger *ledger, bl_memory_item first, bl_memory_item last)
{
    int64_t n_bytes = 0;
    for (int i = (int)first; i <= (int)last; i++)
        n_bytes += ledger->item[i].device + ledger->item[i].host;
    return n_bytes;
}

int64_t bl_memory_gpu_bytes(const bl_memory_ledger *ledger, int n_ranks)
{
    int64_t context = ledger->item[BL_MEMORY_CONTEXT].device,
            nccl = bl_min_i64(ledger->item[BL_MEMORY_COMMUNICATION].device, COMMUNICATOR_BYTES);

    if (context == 0) return 0; /* a CPU */
    return (ledger->device - context - nccl) * n_ranks;
}

int64_t bl_plan_gpu_reserve_bytes(int n_ranks)
{
    return CONTEXT_BYTES + (n_ranks > 1 ? COMMUNICATOR_BYTES : 0);
}

int bl_plan_processes_on_host(const bl_topology *topology)
{
    return (int)bl_ceil_div(topology->n_on_host, topology->n_here);
}

/* A process's part of the memory that the host has once. */
static int64_t shared_part(const bl_memory_ledger *m, const bl_topology *topology)
{
    return bl_ceil_div(m->shared, bl_plan_processes_on_host(topology));
}

int64_t bl_memory_own_bytes(const bl_memory_ledger *ledger, const bl_topology *topology)
{
    return ledger->total - shared_part(ledger, topology);
}

int64_t bl_memory_embedding_bytes(const bl_memory_ledger *ledger, const bl_topology *topology)
{
    return ledger->embedding * (ledger->shared > 0 ? 1 : bl_plan_processes_on_host(topology));
}

int64_t bl_plan_communicator_bytes(const bl_topology *topology)
{
    return topology->n_here < topology->n_ranks ? COMMUNICATOR_BYTES : 0;
}

int bl_plan_n_shards(const bl_train_config *config, const bl_topology *topology)
{
    return (int)bl_min_i64(config->shard_size, topology->n_ranks);
}

/* ---- the pass ---- */

int64_t bl_plan_micro_tokens(const bl_plan_input *in)
{
    int64_t most = 0;
    for (int i = 0; i <= in->n_others; i++) {
        bl_plan_run run = bl_plan_run_at(in, i);
        most = bl_max_i64(most, run.config->per_device_train_batch_size * run.longest_train_row);
    }
    return most;
}

/* Of the largest micro-batch of an evaluation. */
static int64_t evaluation_tokens(const bl_plan_input *in)
{
    int64_t most = 0;
    for (int i = 0; i <= in->n_others; i++) {
        bl_plan_run run = bl_plan_run_at(in, i);
        most =
            bl_max_i64(most, run.config->per_device_eval_batch_size * run.longest_validation_row);
    }
    return most;
}

int64_t bl_plan_count_micro(const bl_plan_input *in)
{
    int64_t n = 0;
    for (int i = 0; i <= in->n_others; i++)
        n += bl_plan_run_at(in, i).config->gradient_accumulation_steps;
    return n;
}

/* Micro-batches per visit: visit_tokens, or as many as make a gather worth its while. The same on
 * all ranks, whose data are the same. */
static int64_t visit_group(const bl_plan_input *in)
{
    enum { AUTO_TOKENS = 256 };
    const bl_train_config *c = in->config;
    int64_t micro_tokens = bl_max_i64(1, bl_plan_micro_tokens(in));
    int64_t wanted = c->visit_tokens == BL_OPTION_AUTO ? AUTO_TOKENS : c->visit_tokens;
    return bl_min_i64(bl_max_i64(1, wanted / micro_tokens), bl_plan_count_micro(in));
}

static int64_t largest_r(const bl_plan_input *in)
{
    int64_t r = 0;
    for (int i = 0; i <= in->n_others; i++)
        r = bl_max_i64(r, bl_lora_largest_r(bl_plan_run_at(in, i).lora));
    return r;
}

/* Of LoRA terms of the embedding or the head. */
static int64_t largest_table_r(const bl_plan_input *in)
{
    int64_t r = 0;
    for (int i = 0; i <= in->n_others; i++) {
        const bl_lora_layout *lora = bl_plan_run_at(in, i).lora;
        if (lora->n_table_floats > 0) r = bl_max_i64(r, lora->options.r);
    }
    return r;
}

static bool some_drop(const bl_plan_input *in)
{
    bool drops = false;
    for (int i = 0; i <= in->n_others; i++)
        drops |= bl_plan_run_at(in, i).lora->options.dropout > 0;
    return drops;
}

static bool some_weigh(const bl_plan_input *in)
{
    bool weighs = false;
    for (int i = 0; i <= in->n_others; i++)
        weighs |= bl_plan_losses_of(bl_plan_run_at(in, i).config).is_preference;
    return weighs;
}

static bool some_refer(const bl_plan_input *in)
{
    bool refers = false;
    for (int i = 0; i <= in->n_others; i++)
        refers |= bl_plan_losses_of(bl_plan_run_at(in, i).config).has_reference;
    return refers;
}

/* Of a micro-batch, at most: those of the reference, and of kto's mismatched answers by policy and
 * reference. Of a training that computes the sums of the reference before: by the policy alone. */
static int companions(const bl_plan_input *in)
{
    int most = 0;
    for (int i = 0; i <= in->n_others; i++) {
        const bl_train_config *c = bl_plan_run_at(in, i).config;
        bl_losses losses = bl_plan_losses_of(c);
        bool has_companion =
            losses.has_reference && !(in->is_training && c->precompute_ref_log_probs);
        int n = (has_companion ? 1 : 0) + (losses.is_unpaired ? (has_companion ? 2 : 1) : 0);
        most = n > most ? n : most;
    }
    return most;
}

/* Micro-batches of evaluations in a visit of a step (eval_overlap): as many as end within a step,
 * in no more memory than that of the inputs of its layers. */
static int64_t count_overlapped(const bl_plan_input *in)
{
    int64_t group = visit_group(in), n_passes = bl_ceil_div(bl_plan_count_micro(in), group), n = 0,
            most = in->config->activation_offload ? group : group * ((in->model->n_layers + 1) / 2);
    if (!in->is_training) return 0;
    for (int i = 0; i <= in->n_others; i++) {
        bl_plan_run run = bl_plan_run_at(in, i);
        int64_t per_visit = run.config->per_device_eval_batch_size * in->topology.n_ranks;
        if (run.config->eval_overlap)
            n += bl_ceil_div(bl_ceil_div(run.n_validation_rows, per_visit), n_passes);
    }
    return bl_min_i64(n, most);
}

int bl_plan_count_overlapped(const bl_plan_input *in, const bl_pass_options *pass)
{
    int n = companions(in);
    return in->is_training ? (pass->max_companions - pass->max_group * n) / (1 + n) : 0;
}

/* Whether layers compute with a copy of trained weights (bl_model_weights). */
static bool has_copy(const bl_plan_input *in)
{
    return bl_train_config_is_full(in->config) && bl_train_config_act(in->config) != BL_F32;
}

bl_pass_options bl_plan_pass_options(const bl_plan_input *in, unsigned save)
{
    const bl_train_config *c = in->config;
    return (bl_pass_options){
        .kind = bl_train_config_device_kind(c),
        .act = bl_train_config_act(c),
        .mode = c->compute_dtype == BL_COMPUTE_FP8 ? BL_MATMUL_FP8 : BL_MATMUL_BF16,
        .sums = (bl_matmul_sums)c->fp8_fast_accumulation,
        .is_dense = has_copy(in) || bl_model_base_is_bf16(in->model, in->formats),
        .is_trained = bl_train_config_is_full(c),
        .has_table = in->modules && bl_trained_has_embedding(in->modules),
        .first_trained = in->trained ? in->trained->first : 0,
        .T_max = bl_max_i64(bl_plan_micro_tokens(in),
                            evaluation_tokens(in)), /* 0 without rows of the kind */
        .max_group = in->is_training ? (int)visit_group(in) : 1,
        .max_companions = (in->is_training ? (int)visit_group(in) : 1) * companions(in) +
                          (int)count_overlapped(in) * (1 + companions(in)),
        .weighs = some_weigh(in),
        .ring_depth = (int)c->ring_depth,
        .save = save,
        .n_saving_all =
            c->activation_checkpointing_layers == BL_OPTION_AUTO
                ? 0
                : bl_max_i64(0, in->model->n_layers - c->activation_checkpointing_layers),
        .training = in->is_training,
        .lora_r = largest_r(in),
        .lora_dropout = some_drop(in),
        .terms_r = largest_table_r(in),
        .offload_activations = c->activation_offload && in->is_training,
        .pin = true};
}

static bl_status lay_out(const bl_plan_input *in, bl_device_kind kind, bl_base_layout *out)
{
    int n_shards = bl_plan_n_shards(in->config, &in->topology);

    if (bl_train_config_is_full(in->config))
        return bl_model_layout_trained(in->model, n_shards, out);
    return bl_model_layout(in->model, in->formats, in->head_dtype, kind, n_shards, out);
}

bl_status bl_plan_prepare(const bl_plan_input *in, bl_pass_options *pass)
{
    bl_base_layout layout;

    BL_TRY(lay_out(in, pass->kind, &layout));
    bl_linear_prepared_measure(pass->kind, &layout, in->model->n_layers, pass->mode,
                               pass->bf16_matrices, &pass->prepared);
    bl_base_layout_free(&layout);
    return BL_OK;
}

bool bl_plan_uses_prepared(const bl_plan_input *in, const bl_pass_options *pass)
{
    /* In FP8 a layer that is recomputed multiplies codes as they are, and transposes them once, for
     * dx. */
    bool recomputes = in->is_training && pass->save != BL_SAVE_S4 && pass->mode == BL_MATMUL_BF16;
    return pass->kind == BL_DEVICE_CUDA && !has_copy(in) && (pass->max_group > 1 || recomputes);
}

/* ---- the sum ---- */

/* In device memory, and the same in host memory. */
static int64_t batch_bytes(const bl_plan_input *in, int64_t T_max, int64_t n_overlapped)
{
    int64_t n = 0;

    for (int i = 0; i <= in->n_others; i++) {
        bl_plan_run run = bl_plan_run_at(in, i);
        int64_t n_run = in->is_training ? 2 * run.config->gradient_accumulation_steps : 0;
        if (run.longest_validation_row > 0)
            n_run += 2 * (run.config->eval_overlap ? bl_max_i64(1, n_overlapped) : 1);
        n += n_run * (bl_plan_losses_of(run.config).is_unpaired ? 2 : 1);
    }
    return n * bl_batches_micro_bytes(T_max);
}

/* A CPU's pages take memory when they are written: what micro-batches of T_train tokens and
 * evaluations reach, one of which is that of a micro-batch by a reference. */
static bl_pass_bytes pass_bytes(const bl_plan_input *in, const bl_pass_options *pass,
                                int64_t T_train)
{
    int64_t T_evaluation = evaluation_tokens(in);

    if (some_refer(in)) T_evaluation = bl_max_i64(T_evaluation, T_train);
    return pass->kind == BL_DEVICE_CPU ? bl_pass_touched(in->model, pass, T_train, T_evaluation)
                                       : bl_pass_measure(in->model, pass);
}

/* The weights are the base. */
static bl_status add_trained(const bl_plan_input *in, const bl_base_layout *layout,
                             const bl_placement *placement, const bl_optimizer_placement *optimizer,
                             bl_memory_ledger *out)
{
    bl_tier *tiers = calloc((size_t)bl_base_part_count(layout) + 1, sizeof *tiers);
    bl_trained_full_bytes n = {0};

    bl_status st = tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of pages");
    if (st == BL_OK) st = bl_placement_assign(layout, placement, tiers);
    if (st == BL_OK)
        st = bl_trained_full_measure(in->model, layout, in->trained, tiers, optimizer, &n);
    free(tiers);
    out->item[BL_MEMORY_ADAM].device += n.units.moments + 2 * n.vector_moment;
    out->item[BL_MEMORY_ADAM].host += n.units.host_moments;
    out->item[BL_MEMORY_GRADIENTS].device +=
        n.units.gradients + n.units.device_frames + n.vector_gradients + n.whole + n.part;
    out->item[BL_MEMORY_GRADIENTS].host += n.units.host_gradients + n.units.host_frames;
    out->item[BL_MEMORY_STAGING].host += n.staging + n.units.pieces + n.units.behind;
    out->disk += n.units.disk;
    return st;
}

/* The copy that layers compute with, which the ring gathers in place of the weights. */
static bl_status add_copy(const bl_plan_input *in, const bl_base_layout *weights,
                          const bl_placement *placement, bl_memory_ledger *out)
{
    bl_device_kind kind = bl_train_config_device_kind(in->config);
    bl_base_layout layout;
    bl_placed_bytes placed;

    if (!has_copy(in)) return BL_OK;
    BL_TRY(bl_model_layout_copy(in->model, weights->n_shards, &layout));
    bl_status st = bl_placement_measure_copy(weights, &layout, placement, kind,
                                             (int)in->config->ring_depth, &placed);
    out->item[BL_MEMORY_BASE].device += (int64_t)placed.device;
    out->item[BL_MEMORY_BASE].host += (int64_t)placed.host;
    out->disk += (int64_t)placed.disk;
    out->item[BL_MEMORY_RING].device =
        (int64_t)(kind == BL_DEVICE_CPU ? placed.ring_used : placed.ring);
    out->item[BL_MEMORY_READER].host = (int64_t)placed.reader;
    bl_base_layout_free(&layout);
    return st;
}

static bl_status add_base(const bl_plan_input *in, const bl_placement *placement,
                          const bl_optimizer_placement *optimizer, bl_memory_ledger *out,
                          int64_t *writing)
{
    const bl_train_config *c = in->config;
    bl_base_layout layout;
    bl_placed_bytes placed;

    bl_device_kind kind = bl_train_config_device_kind(c);

    BL_TRY(lay_out(in, kind, &layout));
    bl_status st = bl_placement_measure(&layout, placement, kind, (int)c->ring_depth, &placed);
    bl_model_whole_bytes whole = bl_model_measure_whole(in->model, &layout, kind, in->n_positions);
    out->disk = (int64_t)placed.disk;
    if (st == BL_OK && in->is_training && bl_train_config_is_full(c))
        st = add_trained(in, &layout, placement, optimizer, out);
    out->item[BL_MEMORY_BASE] = (bl_memory_amount){(int64_t)placed.device, (int64_t)placed.host};
    out->item[BL_MEMORY_SCALES].device = whole.scales;
    out->item[BL_MEMORY_NORMS].device = whole.vectors + whole.rope_tables;
    bool is_cpu = bl_train_config_device_kind(c) == BL_DEVICE_CPU;
    out->item[BL_MEMORY_RING].device = (int64_t)(is_cpu ? placed.ring_used : placed.ring);
    out->item[BL_MEMORY_READER].host = (int64_t)placed.reader;
    *writing = (int64_t)placed.writing;
    if (st == BL_OK) st = add_copy(in, &layout, placement, out);
    bl_base_layout_free(&layout);
    return st;
}

/* Of modules_to_save and an adapter's terms of tables; NULL: none. Moments and gradients only in
 * training. */
static void add_replicated(const bl_plan_input *in, const bl_trained_set *modules,
                           const bl_lora_layout *lora, bl_dtype act, bool is_training,
                           bl_memory_ledger *out)
{
    bl_replicated_bytes n = bl_trained_replicated_measure(
        in->model, modules, lora, bl_train_config_device_kind(in->config), act);

    out->item[BL_MEMORY_LORA].device += n.weights;
    out->item[BL_MEMORY_ADAM].device += is_training ? n.moments : 0;
    out->item[BL_MEMORY_GRADIENTS].device += is_training ? n.gradients : 0;
}

static void add_adapter(const bl_plan_input *in, const bl_lora_layout *lora, bl_dtype act,
                        bl_memory_ledger *out)
{
    if (lora->n_floats == 0) return;
    add_replicated(in, NULL, lora, act, in->is_training, out);
    bl_adapter_bytes n = bl_trained_state_measure(
        act, lora, in->model->n_layers, in->topology.n_ranks, (int)in->config->ring_depth);
    out->item[BL_MEMORY_LORA].device += n.shard + n.copy;
    out->item[BL_MEMORY_ADAM].device += 2 * n.shard;
    out->item[BL_MEMORY_GRADIENTS].device += n.shard + n.part + 2 * n.whole;
    out->item[BL_MEMORY_LORA_RING].device += n.ring;
    out->item[BL_MEMORY_STAGING].host += n.staging;
}

/* A continued adapter's reference is the adapter as it began; with precompute_ref_log_probs before
 * the first step alone. */
static void add_reference(const bl_plan_input *in, const bl_plan_run *run, bl_dtype act,
                          bl_memory_ledger *out)
{
    if (!in->is_training || !run->config->init_adapter ||
        !bl_plan_losses_of(run->config).has_reference)
        return;
    bl_adapter_bytes n = bl_trained_state_measure(
        act, run->lora, in->model->n_layers, in->topology.n_ranks, (int)in->config->ring_depth);
    add_replicated(in, NULL, run->lora, act, false, out);
    out->item[BL_MEMORY_LORA].device += n.shard + n.copy;
    out->item[BL_MEMORY_LORA_RING].device += n.ring;
    out->item[BL_MEMORY_STAGING].host += n.staging;
}

static void add_pass(const bl_plan_input *in, const bl_pass_options *pass, int64_t T_train,
                     bl_memory_ledger *out)
{
    bl_pass_bytes n = pass_bytes(in, pass, T_train);
    bool is_cpu = pass->kind == BL_DEVICE_CPU;
    int64_t T = is_cpu ? bl_max_i64(T_train, evaluation_tokens(in)) : pass->T_max,
            tokens = batch_bytes(in, T, bl_plan_count_overlapped(in, pass));

    out->item[BL_MEMORY_LAYER_INPUTS] = (bl_memory_amount){n.inputs + n.companions, n.host_inputs};
    out->item[BL_MEMORY_SAVED] = (bl_memory_amount){n.saved, n.host_saved};
    out->item[BL_MEMORY_BOUNDARY].device = n.boundary;
    int64_t prepared = (int64_t)bl_linear_prepared_bytes(&pass->prepared);
    out->item[BL_MEMORY_WORKSPACE].device = n.workspace - prepared + n.terms;
    out->item[BL_MEMORY_PREPARED].device = prepared;
    out->item[BL_MEMORY_LOGITS].device = n.logits;
    out->item[BL_MEMORY_TOKENS] =
        (bl_memory_amount){tokens + n.feed + n.values, tokens + n.host_embeddings + n.values};
}

/* LoRA's communicator sums a layer's gradients at once, the base's only scales. */
static int64_t sums_bytes(const bl_plan_input *in)
{
    const bl_topology *topology = &in->topology;

    if (topology->n_here == topology->n_ranks) return 0;
    bl_adapter_bytes lora =
        bl_trained_state_measure(bl_train_config_act(in->config), in->lora, in->model->n_layers,
                                 topology->n_ranks, (int)in->config->ring_depth);
    int block = (int)in->config->sum_block;
    return (int64_t)(bl_nccl_scratch_bytes(topology->n_ranks, block, (size_t)lora.whole) +
                     bl_nccl_scratch_bytes(bl_plan_n_shards(in->config, topology), block, 0));
}

static void add_machine(const bl_plan_input *in, bl_device_kind kind, bl_memory_ledger *out)
{
    out->item[BL_MEMORY_WORKERS].host = in->config->threads * (int64_t)BL_POOL_SCRATCH_BYTES;
    if (kind == BL_DEVICE_CPU) return;
    out->item[BL_MEMORY_CONTEXT].device = CONTEXT_BYTES;
    out->item[BL_MEMORY_COMMUNICATION].device =
        bl_plan_communicator_bytes(&in->topology) + sums_bytes(in);
}

/* Of a rank, while weights are read: most of the rest is not there yet. */
static int64_t loading_bytes(const bl_plan_input *in, bool is_cpu, int64_t writing,
                             const bl_memory_ledger *m)
{
    int64_t held = m->item[BL_MEMORY_BASE].host;
    if (is_cpu)
        held += m->item[BL_MEMORY_BASE].device + m->item[BL_MEMORY_SCALES].device +
                m->item[BL_MEMORY_NORMS].device;
    return held + in->config->threads * (int64_t)BL_POOL_SCRATCH_BYTES + in->load_bytes + writing;
}

/* T_train: tokens of the largest micro-batch with gradients. */
static bl_status predict(const bl_plan_input *in, const bl_placement *placement,
                         const bl_optimizer_placement *optimizer, const bl_pass_options *pass,
                         int64_t T_train, bl_memory_ledger *out)
{
    const bl_model_config *m = in->model;
    bool is_cpu = pass->kind == BL_DEVICE_CPU;
    int n_here = in->topology.n_here;
    int64_t writing, host = 0;

    bool has_table = !bl_train_config_is_full(in->config); /* else it is among the base */

    *out =
        (bl_memory_ledger){.embedding = has_table ? m->vocab_size * m->hidden_size *
                                                        (int64_t)bl_dtype_bytes(in->embedding_dtype)
                                                  : 0,
                           .data = in->data_bytes,
                           .process = PROCESS_BYTES,
                           .tokenizer = in->tokenizer_bytes};
    if (in->topology.shares_memory) out->shared = out->embedding + out->data;
    BL_TRY(add_base(in, placement, optimizer, out, &writing));
    for (int i = 0; i <= in->n_others; i++) {
        bl_plan_run run = bl_plan_run_at(in, i);
        add_adapter(in, run.lora, pass->act, out);
        add_reference(in, &run, pass->act, out);
    }
    add_replicated(in, in->modules, NULL, BL_F32, in->is_training, out);
    add_pass(in, pass, T_train, out);
    add_machine(in, pass->kind, out);
    for (int i = 0; i < BL_MEMORY_ITEMS; i++) {
        out->device += out->item[i].device;
        host += out->item[i].host;
    }
    if (is_cpu) host += out->device;
    int64_t around =
        out->process + out->tokenizer +
        (out->shared > 0 ? shared_part(out, &in->topology) : out->embedding + out->data);
    /* With little of the rest, loading is the peak. */
    out->loading = loading_bytes(in, is_cpu, writing, out) * n_here + around;
    out->total = bl_max_i64(host * n_here + around, out->loading);
    return BL_OK;
}

bl_status bl_plan_predict_memory(const bl_plan_input *in, const bl_placement *placement,
                                 const bl_optimizer_placement *optimizer,
                                 const bl_pass_options *pass, bl_memory_ledger *out)
{
    return predict(in, placement, optimizer, pass, bl_plan_micro_tokens(in), out);
}

bl_status bl_plan_expect_memory(const bl_plan_input *in, const bl_placement *placement,
                                const bl_optimizer_placement *optimizer,
                                const bl_pass_options *pass, bl_memory_ledger *out)
{
    return predict(in, placement, optimizer, pass,
                   in->rows.largest > 0 ? in->rows.largest : bl_plan_micro_tokens(in), out);
}
