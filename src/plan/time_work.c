/* SPDX-License-Identifier: Apache-2.0 */
/* time_work.c -- what each action of a pass costs on one rank: the ops of arch/block.c and
 * linear/lora_linear.c in their order, at the costs of ops/cost.h, and the transfers of comm/ and
 * offload/. docs/model.md has the same as formulas. */
#include "plan/time_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/model.h"
#include "ops/cost.h"

/* Sums of operations; the current segment, if there is one. */
typedef struct tally {
    const bl_time_input *in;
    const bl_time_run *run;
    bl_block_dims dims;
    bl_cost_setting setting;
    int64_t T;   /* tokens of a micro-batch */
    bl_tensor x; /* an activation; only its dtype counts */
    double seconds, bytes;
    /* Weights prepared in this visit, which only its first micro-batch pays for. */
    double prepared_s, prepared_bytes;
    bl_matmul_prepared prepared[BL_LAYER_MATRICES];
    plan_segments *segments;
} tally;

static bool is_cuda(const bl_time_input *in)
{
    return in->kind == BL_DEVICE_CUDA;
}

static tally tally_of(const bl_time_input *in, const bl_time_run *run)
{
    tally t = {.in = in,
               .run = run,
               .dims = bl_block_dims_of(in->model, in->kind),
               .setting = {in->kind, in->document_tokens, in->label_part},
               .T = in->micro_tokens};
    t.x = bl_tensor_of(in, t.dims.act);
    for (int m = 0; m < BL_LAYER_MATRICES; m++) t.prepared[m].memory_bytes = SIZE_MAX;
    return t;
}

static void add_kernel(tally *t, const bl_cost_kernel *kernel)
{
    bool is_once = kernel->rate == BL_COST_PREPARE && !t->in->habits.decodes_each_use;
    *(is_once ? &t->prepared_s : &t->seconds) += bl_cost_seconds(kernel, &t->in->rates);
    *(is_once ? &t->prepared_bytes : &t->bytes) += kernel->bytes;
}

static void add(tally *t, bl_cost cost)
{
    for (int i = 0; i < cost.n; i++) add_kernel(t, &cost.kernel[i]);
}

/* Reads and writes of another system's kernels instead of an op: n elements per token. */
static void add_elements(tally *t, double n)
{
    add_kernel(t,
               &(bl_cost_kernel){.bytes = (double)t->T * n * (double)bl_dtype_bytes(t->x.dtype)});
}

static bl_work work_of(const bl_time_input *in, double seconds, double bytes)
{
    bl_work w = {.seconds = seconds};
    if (seconds <= 0) return w;
    w.use[BL_RESOURCE_CORES] = in->rates.compute_cores;
    if (is_cuda(in)) w.use[BL_RESOURCE_DEVICE_MEMORY] = bytes / seconds;
    return w;
}

/* Ends the current segment and begins that of `matrix`. What comes before the first acquire counts
 * to it. */
static void acquire(tally *t, int matrix)
{
    plan_segments *s = t->segments;

    if (s->n > 0) {
        plan_segment *last = &s->at[s->n - 1];
        last->work = work_of(t->in, t->seconds + t->prepared_s, t->bytes + t->prepared_bytes);
        last->later = work_of(t->in, t->seconds, t->bytes);
        t->seconds = t->bytes = t->prepared_s = t->prepared_bytes = 0;
    }
    if (matrix >= 0) s->at[s->n++] = (plan_segment){.matrix = matrix};
}

static void end_segments(tally *t)
{
    acquire(t, -1);
    for (int m = 0; m < BL_LAYER_MATRICES; m++) t->prepared[m].made = 0;
}

/* ---- frozen matrices and LoRA ---- */

typedef struct matrix_size {
    bl_weight weight;
    double stored_bytes;       /* of its codes */
    bl_matmul_mode mode;       /* of products with it, as asked for */
    bl_matmul_fallback reason; /* why that is not FP8 */
    bool is_fp8;               /* its products are made in FP8 */
    int n_parts;               /* with LoRA */
    int64_t part_rows[3], r;   /* rows of each; LoRA's rank */
} matrix_size;

static bool is_exception(const bl_time_run *run, int matrix)
{
    return run->bf16_matrices >> matrix & 1u;
}

static matrix_size size_of(const bl_time_input *in, const bl_time_run *run, int matrix)
{
    bl_block_dims dims = bl_block_dims_of(in->model, in->kind);
    matrix_size m = {.mode = is_exception(run, matrix) ? BL_MATMUL_BF16 : in->mode,
                     .r = in->lora->options.r,
                     .reason = BL_FALLBACK_COUNT};

    for (int p = 0; p < in->model->arch->n_projections; p++) {
        int64_t rows, cols;
        if ((int)in->model->arch->projections[p].matrix != matrix) continue;
        bl_projection_shape(in->model, p, &rows, &cols);
        m.stored_bytes +=
            (double)rows * (double)cols * (double)bl_format_code_bytes(run->format[p]);
        m.weight.segment[m.weight.n_segments++] =
            (bl_weight_segment){.format = run->format[p], .rows = rows};
        m.weight.rows += rows;
        m.weight.cols = cols;
        if (in->lora->n_floats > 0 && in->lora->a_offset[p] >= 0) m.part_rows[m.n_parts++] = rows;
    }
    /* Training pads tokens to whole rows of a block. */
    bl_matmul_weight_args product = {
        .mode = m.mode, .T = bl_block_rows(&dims, in->micro_tokens), .weight = m.weight};
    m.is_fp8 = bl_matmul_weight_mode(&product, &m.reason) == BL_MATMUL_FP8 && is_cuda(in);
    return m;
}

void bl_time_count_products(const bl_time_input *in, bl_time_products *out)
{
    *out = (bl_time_products){.reason = BL_FALLBACK_COUNT};
    for (int r = 0; r < in->n_runs; r++)
        for (int matrix = 0; matrix < BL_LAYER_MATRICES; matrix++) {
            const bl_time_run *run = &in->runs[r];
            matrix_size m = size_of(in, run, matrix);
            out->n_matrices += run->n_layers;
            if (m.is_fp8) out->n_fp8 += run->n_layers;
            if (is_exception(run, matrix)) out->n_exceptions += run->n_layers;
            if (out->reason == BL_FALLBACK_COUNT) out->reason = m.reason;
        }
}

/* A product with the frozen matrix: y = x W^T or dx = dy W, added to what LoRA has left there. */
static void add_frozen(tally *t, const matrix_size *m, int matrix, bool forward)
{
    const bl_time_habits *habits = &t->in->habits;
    bl_matmul_weight_args product = {.forward = forward,
                                     .mode = m->is_fp8 ? BL_MATMUL_FP8 : BL_MATMUL_BF16,
                                     .beta = m->n_parts > 0 ? 1 : 0,
                                     .T = t->T,
                                     .in = t->x,
                                     .weight = m->weight};

    if (!habits->decodes_each_use) product.prepared = &t->prepared[matrix];
    for (int s = 0; s < m->weight.n_segments && habits->gathers_decoded && is_cuda(t->in); s++)
        product.weight.segment[s].format = BL_FORMAT_BF16;
    add(t, bl_cost_matmul_weight(&t->setting, &product));
}

/* C (T,N) = A (T,K) B, or one with the sum over T: either way, these are its operands. */
static void add_small(tally *t, int64_t K, int64_t N)
{
    add(t, bl_cost_matmul(&t->setting, &(bl_matmul_args){.M = t->T, .N = N, .K = K, .a = t->x}));
}

static void add_dropout(tally *t, int64_t width)
{
    if (t->in->lora->options.dropout > 0)
        add(t, bl_cost_dropout(&t->setting, &(bl_dropout_args){.T = t->T, .C = width, .y = t->x}));
}

/* x A^T, for all parts at once where they are a stack (linear/lora_linear.c). */
static void add_downs(tally *t, const matrix_size *m)
{
    int n_products = is_cuda(t->in) && !t->in->habits.is_eager ? 1 : m->n_parts;
    for (int i = 0; i < n_products; i++)
        add_small(t, m->weight.cols, m->r * (m->n_parts / n_products));
}

static void linear_forward(tally *t, int matrix)
{
    matrix_size m = size_of(t->in, t->run, matrix);

    acquire(t, matrix);
    if (m.n_parts > 0) {
        add_dropout(t, m.weight.cols);
        add_downs(t, &m);
        for (int p = 0; p < m.n_parts; p++) add_small(t, m.r, m.part_rows[p]);
        /* scaled, and added to the frozen product */
        if (t->in->habits.is_eager) add_elements(t, 5 * (double)m.weight.rows);
    }
    add_frozen(t, &m, matrix, true);
}

static void linear_backward(tally *t, int matrix)
{
    matrix_size m = size_of(t->in, t->run, matrix);

    acquire(t, matrix);
    if (m.n_parts > 0) {
        add_dropout(t, m.weight.cols);
        add_downs(t, &m);
        for (int p = 0; p < m.n_parts; p++) { /* dB and du */
            add_small(t, m.part_rows[p], m.r);
            add_small(t, m.part_rows[p], m.r);
        }
        add_downs(t, &m); /* dA */
        add_downs(t, &m); /* dx */
        add_dropout(t, m.weight.cols);
        if (t->in->habits.is_eager)
            add_elements(t, 2 * (double)m.weight.rows + 3 * (double)m.weight.cols);
    }
    add_frozen(t, &m, matrix, false);
}

/* ---- the block: arch/block.c in the same order ---- */

/* Eager: to fp32, squared, mean, scaled, back, times the weight. */
static void norm_forward(tally *t)
{
    if (t->in->habits.is_eager)
        add_elements(t, 18 * (double)t->dims.hidden);
    else if (t->dims.has_layer_norm)
        add(t,
            bl_cost_layernorm_forward(&t->setting, &(bl_layernorm_forward_args){
                                                       .T = t->T, .H = t->dims.hidden, .x = t->x}));
    else
        add(t,
            bl_cost_rmsnorm_forward(&t->setting, &(bl_rmsnorm_forward_args){
                                                     .T = t->T, .H = t->dims.hidden, .x = t->x}));
}

static void norm_backward(tally *t)
{
    if (t->in->habits.is_eager)
        add_elements(t, 36 * (double)t->dims.hidden);
    else if (t->dims.has_layer_norm)
        add(t, bl_cost_layernorm_backward(
                   &t->setting,
                   &(bl_layernorm_backward_args){.T = t->T, .H = t->dims.hidden, .x = t->x}));
    else
        add(t,
            bl_cost_rmsnorm_backward(&t->setting, &(bl_rmsnorm_backward_args){
                                                      .T = t->T, .H = t->dims.hidden, .x = t->x}));
}

/* Of q and k. Eager: two products, half of it negated, put together, a sum. */
static void rotate(tally *t)
{
    const bl_block_dims *d = &t->dims;

    if (t->in->habits.is_eager) add_elements(t, 10 * (double)(d->q_width + d->kv_width));
    for (int64_t g = 0; g < d->n_groups && !t->in->habits.is_eager; g++)
        add(t, bl_cost_rope(&t->setting,
                            &(bl_rope_args){.T = t->T,
                                            .n_heads = (d->n_heads + d->n_kv_heads) / d->n_groups,
                                            .d = d->head_dim,
                                            .x = t->x}));
}

/* Eager: keys and values, repeated. */
static void attention_forward(tally *t)
{
    const bl_block_dims *d = &t->dims;

    for (int64_t g = 0; g < d->n_groups; g++)
        add(t, bl_cost_attention_forward(&t->setting, &(bl_attention_forward_args){
                                                          .T = t->T,
                                                          .n_heads = d->n_heads / d->n_groups,
                                                          .n_kv_heads = d->n_kv_heads / d->n_groups,
                                                          .d = d->head_dim,
                                                          .q = t->x}));
    if (t->in->habits.is_eager) add_elements(t, 2 * (double)d->q_width);
}

static void attention_backward(tally *t)
{
    const bl_block_dims *d = &t->dims;

    for (int64_t g = 0; g < d->n_groups; g++)
        add(t,
            bl_cost_attention_backward(&t->setting, &(bl_attention_backward_args){
                                                        .T = t->T,
                                                        .n_heads = d->n_heads / d->n_groups,
                                                        .n_kv_heads = d->n_kv_heads / d->n_groups,
                                                        .d = d->head_dim,
                                                        .q = t->x}));
    if (t->in->habits.is_eager) add_elements(t, 2 * (double)d->q_width);
}

static void activate(tally *t)
{
    if (t->in->habits.is_eager)
        add_elements(t, 5 * (double)t->dims.inter);
    else if (t->dims.activation != BL_SWIGLU)
        add(t, bl_cost_gelu_forward(&t->setting,
                                    &(bl_gelu_forward_args){.n = t->T * t->dims.inter, .h = t->x}));
    else
        add(t, bl_cost_swiglu_forward(&t->setting, &(bl_swiglu_forward_args){
                                                       .T = t->T, .I = t->dims.inter, .h = t->x}));
}

static void activate_backward(tally *t)
{
    if (t->in->habits.is_eager)
        add_elements(t, 10 * (double)t->dims.inter);
    else if (t->dims.activation != BL_SWIGLU)
        add(t, bl_cost_gelu_backward(
                   &t->setting, &(bl_gelu_backward_args){.n = t->T * t->dims.inter, .dh = t->x}));
    else
        add(t,
            bl_cost_swiglu_backward(&t->setting, &(bl_swiglu_backward_args){
                                                     .T = t->T, .I = t->dims.inter, .dh = t->x}));
}

static void residual(tally *t)
{
    add(t, bl_cost_add(&t->setting, &(bl_add_args){.n = t->T * t->dims.hidden, .y = t->x}));
}

static void compute_qkv(tally *t)
{
    norm_forward(t);
    linear_forward(t, BL_QKV);
    rotate(t);
}

static void compute_mid(tally *t)
{
    linear_forward(t, BL_OUT);
    residual(t);
}

static void compute_gate_up(tally *t)
{
    norm_forward(t);
    linear_forward(t, BL_GATE_UP);
}

static void block_forward(tally *t, plan_segments *out)
{
    t->segments = out;
    compute_qkv(t);
    attention_forward(t);
    compute_mid(t);
    compute_gate_up(t);
    activate(t);
    linear_forward(t, BL_MLP_DOWN);
    residual(t);
    end_segments(t);
}

static void block_backward(tally *t, unsigned has, plan_segments *out)
{
    t->segments = out;
    if (!(has & BL_SAVE_QKV)) compute_qkv(t);
    if (!(has & BL_SAVE_ATTENTION)) {
        attention_forward(t);
        if (!t->dims.is_parallel || t->in->habits.recomputes_all) compute_mid(t);
    }
    if (!(has & BL_SAVE_GATE_UP)) compute_gate_up(t);
    activate(t);
    if (t->in->habits.recomputes_all && has == BL_SAVE_S0) {
        linear_forward(t, BL_MLP_DOWN);
        residual(t);
    }
    linear_backward(t, BL_MLP_DOWN);
    activate_backward(t);
    norm_forward(t);
    linear_backward(t, BL_GATE_UP);
    if (!t->dims.is_parallel) norm_backward(t);
    linear_backward(t, BL_OUT);
    if (t->dims.is_parallel) norm_backward(t);
    attention_backward(t);
    rotate(t);
    norm_forward(t);
    linear_backward(t, BL_QKV);
    norm_backward(t);
    end_segments(t);
}

/* ---- transfers ---- */

static bl_work transfer(const bl_time_input *in, double seconds)
{
    return (bl_work){.seconds = seconds,
                     .use = {[BL_RESOURCE_CORES] = is_cuda(in) ? 0 : in->rates.copy_cores}};
}

static bl_work exchange(const bl_time_input *in, double size, double bytes, bool is_all_to_all)
{
    bl_exchange e = {size, (double)in->n_ranks / in->n_hosts, bytes, is_all_to_all};
    return bl_exchange_work(&e, in->kind, &in->rates);
}

static bl_work copy_work(const bl_time_input *in, double bytes, bool is_in)
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
    plan_item item = {.shard_bytes = (int64_t)bytes, .copy = copy_work(in, bytes, true)};

    if (r->disk_bytes_per_s > 0) {
        item.read = transfer(in, bytes / r->disk_bytes_per_s);
        item.read.use[BL_RESOURCE_HOST_MEMORY] = r->disk_bytes_per_s;
    }
    item.copy_read = in->writes_device ? (bl_work){.seconds = 0} : item.copy;
    pace(in, bytes, &item.copy);
    pace(in, bytes, &item.copy_read);
    if (in->habits.gathers_decoded) gathered = 2 * ceil(rows / size) * cols;
    item.gather = item.gather_resident = exchange(in, size, gathered, false);
    if (in->habits.gathers_decoded && is_cuda(in)) {
        item.gather.seconds += ceil(rows / size) * cols / r->decode_weights_per_s;
        item.gather_resident.seconds = item.gather.seconds;
    } else if (size > 1 && r->memory_bytes_per_s > 0) { /* to its place in the slot */
        item.gather_resident.seconds += 2 * bytes / r->memory_bytes_per_s;
    }
    return item;
}

static void layer_amounts(const bl_time_input *in, const bl_time_run *run, int group,
                          plan_layer *out)
{
    tally t = tally_of(in, run);

    *out = (plan_layer){.saved_bytes = bl_block_rows(&t.dims, in->micro_tokens) *
                                       bl_block_saved_bytes(&t.dims, run->save)};
    for (int m = 0; m < BL_LAYER_MATRICES; m++) {
        matrix_size size = size_of(in, run, m);
        out->item[m] =
            item_of(in, (double)size.weight.rows, (double)size.weight.cols, size.stored_bytes);
    }
    block_forward(&t, &out->forward);
    block_backward(&t, run->save, &out->backward);
    block_backward(&t, BL_SAVE_S4, &out->backward_kept);
    out->saved_out = copy_work(in, (double)(group * out->saved_bytes), false);
    out->saved_back = copy_work(in, (double)(group * out->saved_bytes), true);
}

/* ---- head, LoRA's communication, optimizer ---- */

static bl_work head_work(const bl_time_input *in)
{
    const bl_model_config *m = in->model;
    tally t = tally_of(in, NULL);
    bl_format format = BL_FORMAT_F32;
    bl_weight head = {.rows = m->vocab_size, .cols = m->hidden_size, .n_segments = 1};

    bl_format_from_dtype(in->head_dtype, &format);
    head.segment[0] = (bl_weight_segment){.format = format, .rows = head.rows};
    norm_forward(&t);
    add(&t, bl_cost_loss_head(&t.setting, &(bl_loss_head_args){.T = t.T,
                                                               .H = m->hidden_size,
                                                               .V = m->vocab_size,
                                                               .head = head,
                                                               .x = t.x,
                                                               .dx = t.x}));
    norm_backward(&t);
    return work_of(in, t.seconds, t.bytes);
}

static bl_work embed_work(const bl_time_input *in)
{
    tally t = tally_of(in, NULL);

    add(&t, bl_cost_embedding(
                &t.setting, &(bl_embedding_args){.T = t.T, .H = in->model->hidden_size, .y = t.x}));
    return work_of(in, t.seconds, t.bytes);
}

static double bytes_of(bl_cost cost)
{
    double bytes = 0;
    for (int i = 0; i < cost.n; i++) bytes += cost.kernel[i].bytes;
    return bytes;
}

/* The squares of the gradients, AdamW; then the gradients are cleared. */
static double optimizer_bytes(const bl_time_input *in, int64_t chunk)
{
    tally t = tally_of(in, NULL);
    int64_t n = chunk * in->model->n_layers;

    return bytes_of(bl_cost_sum_squares(&t.setting, &(bl_sum_squares_args){.n = n})) +
           bytes_of(bl_cost_adamw(&t.setting, &(bl_adamw_args){.n = n})) +
           (double)sizeof(float) * (double)n;
}

static void lora_amounts(const bl_time_input *in, plan_amounts *out)
{
    const bl_rates *r = &in->rates;
    double n = in->n_ranks, chunk = ceil((double)in->lora->n_floats / n),
           element = (double)bl_dtype_bytes(bl_act_dtype(in->kind));
    double rate = r->memory_bytes_per_s > 0 ? r->memory_bytes_per_s : INFINITY;
    double optimizer_rate = r->optimizer_bytes_per_s > 0 ? r->optimizer_bytes_per_s : rate;
    tally t = tally_of(in, NULL);
    bl_add_args sum = {.n = (int64_t)chunk, .y = bl_tensor_f32(NULL)};

    out->lora_gather = exchange(in, n, chunk * element, false);
    out->lora_gather.seconds += 2 * chunk * element / rate;
    out->lora_gather_bytes = (int64_t)((n - 1) * chunk * element);
    out->lora_reduce = exchange(in, n, chunk * 4, true);
    out->lora_reduce.seconds += (n + 1) * chunk * 4 / rate;
    out->lora_reduce_bytes = (int64_t)((n - 1) * chunk * 4);
    out->lora_add = transfer(in, bytes_of(bl_cost_add(&t.setting, &sum)) / rate);
    out->optimizer_s = optimizer_bytes(in, (int64_t)chunk) / optimizer_rate +
                       2 * (r->gather_latency_s + (in->n_hosts > 1 ? r->network_latency_s : 0)) +
                       r->step_overhead_s;
}

/* The first run whose layers are those of run r, but for their number: few kinds alternate. */
static int first_like(const bl_time_input *in, int r)
{
    int i = 0;

    for (;; i++) {
        const bl_time_run *a = &in->runs[i], *b = &in->runs[r];
        if (a->save == b->save && a->bf16_matrices == b->bf16_matrices &&
            memcmp(a->format, b->format, sizeof a->format) == 0)
            return i;
    }
}

bl_status plan_amounts_create(const bl_time_input *in, int group, plan_amounts *out)
{
    const bl_model_config *m = in->model;
    bl_block_dims dims = bl_block_dims_of(m, in->kind);
    double V = (double)m->vocab_size, H = (double)m->hidden_size;
    double head_bytes = V * H * (double)bl_dtype_bytes(in->head_dtype);
    double element = (double)bl_dtype_bytes(dims.act);

    *out = (plan_amounts){
        .input_bytes = (int64_t)((double)bl_block_rows(&dims, in->micro_tokens) * H * element)};
    out->layers = calloc((size_t)in->n_runs, sizeof *out->layers);
    if (!out->layers) return BL_FAIL(BL_ENOMEM, "a prediction");
    for (int r = 0; r < in->n_runs; r++) {
        int like = first_like(in, r);
        if (like < r)
            out->layers[r] = out->layers[like];
        else
            layer_amounts(in, &in->runs[r], group, &out->layers[r]);
    }
    out->head_item = item_of(in, V, H, head_bytes);
    out->head_item.gather.seconds =
        exchange(in, in->n_shards,
                 ceil(V / in->n_shards) * H * (double)bl_dtype_bytes(in->head_dtype), false)
            .seconds;
    out->head = head_work(in);
    out->embed = embed_work(in);
    lora_amounts(in, out);
    out->input_out = copy_work(in, (double)(group * out->input_bytes), false);
    out->input_back = copy_work(in, (double)(group * out->input_bytes), true);
    return BL_OK;
}

void plan_amounts_free(plan_amounts *amounts)
{
    free(amounts->layers);
}

double plan_model_flops(const bl_time_input *in)
{
    double tokens = (double)in->micro_tokens * in->n_micro * in->n_ranks * in->useful_part;

    return bl_arch_step_flops(in->model, (double)in->lora->n_floats, tokens, in->document_tokens,
                              tokens * in->label_part);
}
