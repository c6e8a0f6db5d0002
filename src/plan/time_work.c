/* SPDX-License-Identifier: Apache-2.0 */
/* time_work.c -- what each action of a pass costs on one rank: layers (time_layer.c), the head, and
 * the transfers of comm/ and offload/. docs/model.md has the same as formulas. */
#include "plan/time_layer_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/model.h"
#include "model/weights.h"

static bool is_cuda(const bl_time_input *in)
{
    return in->kind == BL_DEVICE_CUDA;
}

/* ---- transfers ---- */

static bl_work transfer(const bl_time_input *in, double seconds)
{
    return (bl_work){.seconds = seconds,
                     .use = {[BL_RESOURCE_CORES] = is_cuda(in) ? 0 : in->rates.copy_cores}};
}

bl_exchange plan_gather_of(const bl_time_input *in, double size, double bytes)
{
    double n_on_host = (double)in->n_ranks / in->n_hosts;
    bl_exchange e = {.size = size,
                     .n_on_host = n_on_host,
                     .bytes = bytes,
                     .kind = bl_exchange_gather_kind(in->kind),
                     .block = in->sum_block > 0 ? in->sum_block : BL_COMM_SUM_BLOCK};

    if (is_cuda(in) && in->gathers_by_hosts && size > n_on_host && n_on_host > 1) {
        e.kind = BL_EXCHANGE_BLOCKS;
        e.block = (int)ceil(n_on_host);
    }
    return e;
}

bl_exchange plan_sum_of(const bl_time_input *in, double bytes)
{
    bl_exchange e = plan_gather_of(in, in->n_ranks, bytes);
    e.kind = BL_EXCHANGE_SUM;
    e.block = in->sum_block > 0 ? in->sum_block : BL_COMM_SUM_BLOCK;
    return e;
}

bl_work plan_exchange(const bl_time_input *in, const bl_exchange *e)
{
    return bl_exchange_work(e, in->kind, &in->rates);
}

void plan_add_without_network(bl_work *work, double seconds)
{
    double all = work->seconds + seconds;
    if (all > 0) work->use[BL_RESOURCE_NETWORK] *= work->seconds / all;
    work->seconds = all;
}

static bl_work gather(const bl_time_input *in, double size, double bytes)
{
    bl_exchange e = plan_gather_of(in, size, bytes);
    return plan_exchange(in, &e);
}

bl_work plan_copy(const bl_time_input *in, double bytes, bool is_in)
{
    const bl_rates *r = &in->rates;
    double rate = is_in ? r->copy_in_bytes_per_s : r->copy_out_bytes_per_s;
    bl_work w = transfer(in, bytes > 0 ? bytes / rate : 0);

    if (!is_cuda(in)) return w;
    w.use[is_in ? BL_RESOURCE_LINK_IN : BL_RESOURCE_LINK_OUT] = rate;
    w.use[BL_RESOURCE_LINK_BOTH] = w.use[BL_RESOURCE_HOST_MEMORY] =
        w.use[BL_RESOURCE_DEVICE_MEMORY] = rate;
    return w;
}

bl_work plan_disk_work(double bytes, double bytes_per_s)
{
    return (bl_work){.seconds = bytes > 0 ? bytes / bytes_per_s : 0,
                     .use = {[BL_RESOURCE_DISK] = 1, [BL_RESOURCE_HOST_MEMORY] = bytes_per_s}};
}

/* Without a core. */
static void pace(const bl_time_input *in, double bytes, bl_work *copy)
{
    if (in->rates.pace_bytes_per_s > 0) {
        double paused = copy->seconds + bytes / in->rates.pace_bytes_per_s;
        copy->use[BL_RESOURCE_CORES] *= copy->seconds / paused;
        copy->seconds = paused;
    }
    if (in->habits.copy_back_bytes_per_s > 0)
        copy->seconds += bytes / in->habits.copy_back_bytes_per_s;
}

/* Shards are where the pager stores them; with gathers_decoded a rank gathers its decoded shard. */
static plan_item item_of(const bl_time_input *in, double rows, double cols, double stored_bytes)
{
    const bl_rates *r = &in->rates;
    double size = in->n_shards, bytes = ceil(rows / size) * (stored_bytes / rows), gathered = bytes;
    plan_item item = {.shard_bytes = (int64_t)bytes, .copy = plan_copy(in, bytes, true)};

    if (r->disk_bytes_per_s > 0) {
        item.read = plan_disk_work(bytes, r->disk_bytes_per_s);
        item.read.use[BL_RESOURCE_CORES] = transfer(in, 0).use[BL_RESOURCE_CORES];
    }
    item.copy_read = in->writes_device ? (bl_work){.seconds = 0} : item.copy;
    pace(in, bytes, &item.copy);
    pace(in, bytes, &item.copy_read);
    if (in->habits.gathers_decoded) gathered = 2 * ceil(rows / size) * cols;
    item.gather = item.gather_resident = gather(in, size, gathered);
    if (in->habits.gathers_decoded && is_cuda(in)) {
        plan_add_without_network(&item.gather, ceil(rows / size) * cols / r->decode_weights_per_s);
        item.gather_resident = item.gather;
    } else if (size > 1 && r->memory_bytes_per_s > 0) { /* to its place in the slot */
        plan_add_without_network(&item.gather_resident, 2 * bytes / r->memory_bytes_per_s);
    }
    return item;
}

static void layer_amounts(const bl_time_input *in, const bl_time_run *run, plan_layer *out)
{
    plan_tally t = plan_tally_of(in, run);

    *out = (plan_layer){.saved_bytes = bl_block_rows(&t.dims, in->micro_tokens) *
                                       bl_block_saved_bytes(&t.dims, run->save)};
    for (int m = 0; m < BL_LAYER_MATRICES; m++) {
        plan_matrix size = plan_matrix_of(in, run, m);
        out->item[m] =
            item_of(in, (double)size.weight.rows, (double)size.weight.cols, size.stored_bytes);
    }
    plan_block_forward(&t, &out->forward);
    plan_block_backward(&t, run->save, &out->backward);
    plan_block_backward(&t, BL_SAVE_S4, &out->backward_kept);
}

/* ---- head, LoRA's communication, optimizer ---- */

bool plan_has_own_head(const bl_time_input *in)
{
    return in->modules && in->modules->unit[in->model->n_layers].matrix[0].n > 0;
}

static bool trains_head(const bl_time_input *in)
{
    if (!in->is_trained) return plan_has_own_head(in);
    return !in->trained || in->trained->unit[in->model->n_layers].matrix[0].n > 0;
}

/* With the gradient of the last layer's output, or for the loss or log-probabilities alone. */
static bl_work head_work(const bl_time_input *in, bool has_gradient)
{
    const bl_model_config *m = in->model;
    plan_tally t = plan_tally_of(in, NULL);
    bl_format format = BL_FORMAT_F32;
    float trained = 0; /* its address is not followed: only whether it is there counts */
    bl_loss_head_term term = {.r = in->lora->options.r};
    bl_weight head = {.rows = m->vocab_size, .cols = m->hidden_size, .n_segments = 1};

    if (!plan_has_own_head(in))
        bl_format_from_dtype(in->head_dtype, &format);
    else if (bl_model_copies_head(in->kind))
        format = BL_FORMAT_BF16;
    head.segment[0] = (bl_weight_segment){.format = format, .rows = head.rows};
    plan_norm_forward(&t);
    plan_tally_add(
        &t, PLAN_OF_PRODUCTS,
        bl_cost_loss_head(
            &t.setting,
            &(bl_loss_head_args){.T = t.T,
                                 .H = m->hidden_size,
                                 .V = m->vocab_size,
                                 .head = head,
                                 .x = t.x,
                                 .dx = has_gradient ? t.x : (bl_tensor){0},
                                 .term = in->lora->options.table[BL_TABLE_HEAD] ? &term : NULL,
                                 .d_head = has_gradient && trains_head(in) ? &trained : NULL}));
    if (has_gradient) plan_norm_backward(&t);
    return plan_work_of(in, t.seconds, t.bytes);
}

static bl_work embed_work(const bl_time_input *in)
{
    plan_tally t = plan_tally_of(in, NULL);

    plan_tally_add(
        &t, PLAN_OF_PRODUCTS,
        bl_cost_embedding(&t.setting,
                          &(bl_embedding_args){.T = t.T, .H = in->model->hidden_size, .y = t.x}));
    return plan_work_of(in, t.seconds, t.bytes);
}

static double bytes_of(bl_cost cost)
{
    double bytes = 0;
    for (int i = 0; i < cost.n; i++) bytes += cost.kernel[i].bytes;
    return bytes;
}

/* The squares of the gradients, AdamW; then the gradients are cleared. */
static double optimizer_bytes(const bl_time_input *in, int64_t n)
{
    plan_tally t = plan_tally_of(in, NULL);

    return bytes_of(bl_cost_sum_squares(&t.setting, &(bl_sum_squares_args){.n = n})) +
           bytes_of(bl_cost_adamw(&t.setting, &(bl_adamw_args){.n = n, .m = bl_tensor_f32(NULL)})) +
           (double)sizeof(float) * (double)n;
}

/* A GPU's copy of an adapter's head, which each update renews. */
static double head_copy_bytes(const bl_time_input *in)
{
    plan_tally t = plan_tally_of(in, NULL);
    int64_t n = in->model->vocab_size * in->model->hidden_size;

    if (!plan_has_own_head(in) || !bl_model_copies_head(in->kind)) return 0;
    return bytes_of(bl_cost_cast(
        &t.setting,
        &(bl_cast_args){.n = n, .x = bl_tensor_f32(NULL), .y = bl_tensor_of(NULL, BL_BF16)}));
}

/* modules_to_save, terms of the embedding and the head: gradients are summed over the ranks, and
 * every rank updates all of them. */
static double modules_s(const bl_time_input *in, double optimizer_rate)
{
    double n = in->n_ranks, bytes;
    int64_t n_weights = (in->modules ? in->modules->n_weights : 0) + in->lora->n_table_floats;

    if (n_weights == 0) return 0;
    bytes = ceil((double)n_weights / n) * sizeof(float);
    bl_exchange sum = plan_sum_of(in, bytes);
    return (optimizer_bytes(in, n_weights) + head_copy_bytes(in)) / optimizer_rate +
           plan_exchange(in, &sum).seconds + gather(in, n, bytes).seconds;
}

static void lora_amounts(const bl_time_input *in, plan_amounts *out)
{
    const bl_rates *r = &in->rates;
    double n = in->n_ranks, chunk = ceil((double)in->lora->n_floats / n),
           element = (double)bl_dtype_bytes(in->act);
    double rate = r->memory_bytes_per_s > 0 ? r->memory_bytes_per_s : INFINITY;
    double optimizer_rate = r->optimizer_bytes_per_s > 0 ? r->optimizer_bytes_per_s : rate;
    plan_tally t = plan_tally_of(in, NULL);
    bl_add_args sum = {.n = (int64_t)chunk, .y = bl_tensor_f32(NULL)};

    bl_exchange reduce = plan_sum_of(in, chunk * 4);

    out->lora_gather = gather(in, n, chunk * element);
    plan_add_without_network(&out->lora_gather, 2 * chunk * element / rate);
    out->lora_gather_bytes = (int64_t)((n - 1) * chunk * element);
    out->lora_reduce = plan_exchange(in, &reduce);
    plan_add_without_network(&out->lora_reduce, bl_exchange_summed(&reduce) / rate);
    out->lora_reduce_bytes = (int64_t)bl_exchange_received(&reduce);
    out->lora_add = transfer(in, bytes_of(bl_cost_add(&t.setting, &sum)) / rate);
    /* Of trained weights: plan_trained_optimizer_s. */
    int64_t n_shard = (int64_t)chunk * in->model->n_layers;
    out->optimizer_s = (in->is_trained ? 0 : optimizer_bytes(in, n_shard)) / optimizer_rate +
                       modules_s(in, optimizer_rate) +
                       2 * (r->gather_latency_s + (in->n_hosts > 1 ? r->network_latency_s : 0)) +
                       r->step_overhead_s;
}

/* The first run whose layers are those of run r, in another number: few kinds alternate. */
static int first_like(const bl_time_input *in, int r)
{
    int i = 0;

    for (;; i++) {
        const bl_time_run *a = &in->runs[i], *b = &in->runs[r];
        if (a->save == b->save && a->is_last == b->is_last &&
            a->bf16_matrices == b->bf16_matrices &&
            memcmp(a->format, b->format, sizeof a->format) == 0 &&
            (a->trained == b->trained ||
             (a->trained && b->trained && memcmp(a->trained, b->trained, sizeof *a->trained) == 0)))
            return i;
    }
}

bl_status plan_amounts_create(const bl_time_input *in, plan_amounts *out)
{
    const bl_model_config *m = in->model;
    bl_block_dims dims = bl_block_dims_of(m, in->kind, in->act);
    double V = (double)m->vocab_size, H = (double)m->hidden_size;
    double head_bytes = V * H * (double)bl_dtype_bytes(in->head_dtype);
    double element = (double)bl_dtype_bytes(dims.act);

    *out = (plan_amounts){
        .input_bytes = (int64_t)((double)bl_block_rows(&dims, in->micro_tokens) * H * element)};
    out->layers = calloc((size_t)in->n_runs, sizeof *out->layers);
    if (!out->layers) return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    for (int r = 0; r < in->n_runs; r++) {
        int like = first_like(in, r);
        if (like < r)
            out->layers[r] = out->layers[like];
        else
            layer_amounts(in, &in->runs[r], &out->layers[r]);
    }
    out->head_item = item_of(in, V, H, head_bytes);
    out->head_item.gather = gather(
        in, in->n_shards, ceil(V / in->n_shards) * H * (double)bl_dtype_bytes(in->head_dtype));
    out->head = head_work(in, true);
    out->head_forward = head_work(in, false);
    out->embed = embed_work(in);
    if (in->is_trained) plan_trained_amounts(in, out);
    if (in->modules || in->lora->options.table[BL_TABLE_EMBEDDING])
        out->embed_backward = plan_embedding_gradient(in);
    lora_amounts(in, out);
    return BL_OK;
}

void plan_amounts_free(plan_amounts *amounts)
{
    free(amounts->layers);
}

double plan_model_flops(const bl_time_input *in)
{
    double tokens = (double)in->micro_tokens * in->n_micro * in->n_ranks * in->useful_part,
           labels = tokens * in->label_part;

    if (in->trained)
        return bl_trained_step_flops(in->model, in->trained, tokens, in->document_tokens, labels);
    double flops = bl_arch_step_flops(in->model, (double)in->lora->n_floats, 0, tokens,
                                      in->document_tokens, labels);
    flops += bl_lora_table_flops(in->lora, tokens, labels);
    if (plan_has_own_head(in))
        flops += 2.0 * (double)in->model->vocab_size * (double)in->model->hidden_size * labels;
    return in->is_trained ? flops + bl_arch_gradient_flops(in->model, tokens, labels) : flops;
}
