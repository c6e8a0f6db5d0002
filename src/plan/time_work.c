/* SPDX-License-Identifier: Apache-2.0 */
/* time_work.c -- floating-point operations and bytes of what arch/block.c, linear/lora_linear.c, ops/ and
 * comm/ do, and the seconds that they take at given rates; docs/model.md has the same as formulae.
 *
 * An operation takes max(flops / rate, bytes / memory's rate, launch_s). */
#include "plan/time_internal.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"

/* Sums of operations; the segment under way, if there is one. */
typedef struct tally {
    const bl_time_input *in;
    const bl_time_run *run;
    bl_block_dims dims;
    double T, element; /* tokens of a micro-batch; bytes of an activation */
    double seconds, bytes;
    /* Weights prepared in this visit, which only its first micro-batch pays for. */
    double prepared_s, prepared_bytes;
    bool is_decoded[BL_LAYER_MATRICES], is_transposed[BL_LAYER_MATRICES];
    plan_segments *segments;
} tally;

static bool is_cuda(const bl_time_input *in)
{
    return in->kind == BL_DEVICE_CUDA;
}

static void add(tally *t, double flops, double flops_per_s, double bytes)
{
    const bl_time_rates *r = &t->in->rates;
    double seconds = r->launch_s;

    if (flops > 0) seconds = fmax(seconds, flops / flops_per_s);
    if (r->memory_bytes_per_s > 0) seconds = fmax(seconds, bytes / r->memory_bytes_per_s);
    t->seconds += seconds;
    t->bytes += bytes;
}

/* Reads and writes of `n` elements a token. */
static void add_elementwise(tally *t, double n)
{
    add(t, 0, 0, t->T * n * t->element);
}

static plan_work work_of(const bl_time_input *in, double seconds, double bytes)
{
    plan_work w = {.seconds = seconds};
    if (seconds <= 0) return w;
    w.use[PLAN_CORES] = in->rates.compute_cores;
    if (is_cuda(in)) w.use[PLAN_DEVICE_MEMORY] = bytes / seconds;
    return w;
}

/* Ends the segment under way and begins that of `matrix`. What comes before the first acquire counts to it. */
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
    for (int m = 0; m < BL_LAYER_MATRICES; m++) t->is_decoded[m] = t->is_transposed[m] = false;
}

/* ---- frozen matrices and LoRA ---- */

typedef struct matrix_size {
    double rows, cols;         /* W (rows, cols) */
    double stored_bytes;       /* of its codes */
    bool is_fp8;               /* all of it is stored so */
    bl_matmul_mode mode;       /* of products with it, as ops/ makes them; CUDA */
    bl_matmul_fallback reason; /* why that is not FP8 */
    int64_t n_parts;           /* with LoRA */
    double part_rows[3], r;    /* rows of each; LoRA's rank */
} matrix_size;

static bool is_exception(const bl_time_run *run, int matrix)
{
    return run->bf16_matrices >> matrix & 1u;
}

/* Of all its products: training pads tokens to whole rows of a block. */
static bl_matmul_mode mode_of(const bl_time_input *in, const bl_time_run *run, int matrix,
                              const bl_weight *weight, bl_matmul_fallback *reason)
{
    bl_block_dims dims = bl_block_dims_of(in->model, in->kind);
    bl_matmul_mode mode = is_exception(run, matrix) ? BL_MATMUL_BF16 : in->mode;

    return bl_matmul_weight_mode(
        &(bl_matmul_weight_args){
            .mode = mode, .T = bl_block_rows(&dims, in->micro_tokens), .weight = *weight},
        reason);
}

static matrix_size size_of(const bl_time_input *in, const bl_time_run *run, int matrix)
{
    matrix_size m = {.is_fp8 = true, .r = (double)in->lora->options.r, .reason = BL_FALLBACK_COUNT};
    bl_weight weight = {.rows = 0};

    for (int p = 0; p < BL_PROJECTIONS; p++) {
        int64_t rows, cols;
        if ((int)bl_projection_get((bl_projection)p)->matrix != matrix) continue;
        bl_projection_shape(in->model, (bl_projection)p, &rows, &cols);
        m.rows += (double)rows;
        m.cols = (double)cols;
        m.stored_bytes +=
            (double)rows * (double)cols * (double)bl_format_code_bytes(run->format[p]);
        m.is_fp8 = m.is_fp8 && bl_format_is_fp8(run->format[p]);
        weight.segment[weight.n_segments++] =
            (bl_weight_segment){.format = run->format[p], .rows = rows};
        weight.rows += rows;
        weight.cols = cols;
        if (in->lora->n_floats > 0 && in->lora->a_offset[p] >= 0)
            m.part_rows[m.n_parts++] = (double)rows;
    }
    m.mode = mode_of(in, run, matrix, &weight, &m.reason);
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
            if (is_cuda(in) && m.mode == BL_MATMUL_FP8) out->n_fp8 += run->n_layers;
            if (is_exception(run, matrix)) out->n_exceptions += run->n_layers;
            if (out->reason == BL_FALLBACK_COUNT) out->reason = m.reason;
        }
}

/* Of a visit's first micro-batch, or of each. */
static void add_prepared(tally *t, double seconds, double bytes)
{
    bool is_each = t->in->habits.decodes_each_use;
    *(is_each ? &t->seconds : &t->prepared_s) += seconds;
    *(is_each ? &t->bytes : &t->prepared_bytes) += bytes;
}

/* A weight is decoded, or its codes are transposed, at its first use in a visit. */
static void prepare(tally *t, const matrix_size *m, int matrix, bool forward)
{
    const bl_time_rates *r = &t->in->rates;
    bool decodes = m->mode == BL_MATMUL_BF16;
    double weights = m->rows * m->cols;

    if (!is_cuda(t->in) || !m->is_fp8 || t->in->habits.gathers_decoded) return;
    if (t->in->habits.decodes_each_use) t->is_decoded[matrix] = t->is_transposed[matrix] = false;
    if (decodes && !t->is_decoded[matrix]) { /* a byte is read, two are written */
        t->is_decoded[matrix] = true;
        add_prepared(t, weights / r->decode_weights_per_s, 3 * weights);
    }
    if (!decodes && !forward && !t->is_transposed[matrix]) { /* one and one */
        t->is_transposed[matrix] = true;
        add_prepared(t, weights * 2 / 3 / r->decode_weights_per_s, 2 * weights);
    }
}

/* A product with the frozen matrix: y = x W^T or dx = dy W, added to what LoRA has left there. */
static void add_frozen(tally *t, const matrix_size *m, bool forward, bool accumulates)
{
    const bl_time_input *in = t->in;
    bool is_fp8 = is_cuda(in) && m->mode == BL_MATMUL_FP8;
    double width_in = forward ? m->cols : m->rows, width_out = forward ? m->rows : m->cols;
    double weight_bytes = is_fp8        ? m->rows * m->cols
                          : is_cuda(in) ? 2 * m->rows * m->cols
                                        : m->stored_bytes;
    double outputs = t->T * width_out * t->element * (accumulates ? 2 : 1);

    if (is_fp8) add(t, 0, 0, t->T * width_in * (t->element + 1)); /* quantised */
    add(t, 2 * t->T * m->rows * m->cols,
        is_fp8 ? in->rates.fp8_gemm_flops_per_s : in->rates.gemm_flops_per_s,
        weight_bytes + t->T * width_in * (is_fp8 ? 1 : t->element) + outputs);
}

/* C (T,N) = A (T,K) B, or one with the sum over T: whichever way, these are its operands. */
static void add_small(tally *t, double K, double N)
{
    const bl_time_rates *r = &t->in->rates;
    add(t, 2 * t->T * K * N, r->lora_flops_per_s > 0 ? r->lora_flops_per_s : r->gemm_flops_per_s,
        (t->T * (K + N) + K * N) * t->element);
}

static void add_dropout(tally *t, double width)
{
    if (t->in->lora->options.dropout > 0) add_elementwise(t, 2 * width);
}

/* x A^T, for all parts at once where they are a stack (linear/lora_linear.c). */
static void add_downs(tally *t, const matrix_size *m)
{
    int64_t n_products = is_cuda(t->in) && !t->in->habits.is_eager ? 1 : m->n_parts;
    for (int64_t i = 0; i < n_products; i++)
        add_small(t, m->cols, m->r * (double)(m->n_parts / n_products));
}

static void linear_forward(tally *t, int matrix)
{
    matrix_size m = size_of(t->in, t->run, matrix);

    acquire(t, matrix);
    prepare(t, &m, matrix, true);
    if (m.n_parts > 0) {
        add_dropout(t, m.cols);
        add_downs(t, &m);
        for (int p = 0; p < m.n_parts; p++) add_small(t, m.r, m.part_rows[p]);
        /* scaled, and added to the frozen product */
        if (t->in->habits.is_eager) add_elementwise(t, 5 * m.rows);
    }
    add_frozen(t, &m, true, m.n_parts > 0);
}

static void linear_backward(tally *t, int matrix)
{
    matrix_size m = size_of(t->in, t->run, matrix);

    acquire(t, matrix);
    prepare(t, &m, matrix, false);
    if (m.n_parts > 0) {
        add_dropout(t, m.cols);
        add_downs(t, &m);
        for (int p = 0; p < m.n_parts; p++) { /* dB and du */
            add_small(t, m.part_rows[p], m.r);
            add_small(t, m.part_rows[p], m.r);
        }
        add_downs(t, &m); /* dA */
        add_downs(t, &m); /* dx */
        add_dropout(t, m.cols);
        if (t->in->habits.is_eager) add_elementwise(t, 2 * m.rows + 3 * m.cols);
    }
    add_frozen(t, &m, false, m.n_parts > 0);
}

/* ---- the block: arch/block.c in the same order ---- */

/* Reads and writes of an element of x. Eager: to fp32, squared, mean, scaled, back, times the weight. */
static void norm_forward(tally *t)
{
    add_elementwise(t, (t->in->habits.is_eager ? 18 : 2) * (double)t->dims.hidden);
}

static void norm_backward(tally *t)
{
    add_elementwise(t, (t->in->habits.is_eager ? 36 : 4) * (double)t->dims.hidden);
}

/* Of q and k. Eager: two products, half of it negated, put together, a sum. */
static void rotate(tally *t)
{
    double width = (double)(t->dims.q_width + t->dims.kv_width);
    add_elementwise(t, (t->in->habits.is_eager ? 10 : 2) * width);
}

static void attention_forward(tally *t)
{
    double q = (double)t->dims.q_width, qkv = (double)t->dims.qkv_width;
    add(t, 2 * t->T * t->in->document_tokens * q, t->in->rates.attention_forward_flops_per_s,
        t->T * (q + qkv) * t->element);
    if (t->in->habits.is_eager) add_elementwise(t, 2 * q); /* keys and values, repeated */
}

static void attention_backward(tally *t)
{
    double q = (double)t->dims.q_width, qkv = (double)t->dims.qkv_width;
    add(t, 5 * t->T * t->in->document_tokens * q, t->in->rates.attention_backward_flops_per_s,
        t->T * (2 * q + 2 * qkv) * t->element);
    if (t->in->habits.is_eager) add_elementwise(t, 2 * q);
}

static void swiglu_forward(tally *t)
{
    add_elementwise(t, (t->in->habits.is_eager ? 5 : 3) * (double)t->dims.inter);
}

static void swiglu_backward(tally *t)
{
    add_elementwise(t, (t->in->habits.is_eager ? 10 : 5) * (double)t->dims.inter);
}

static void residual(tally *t)
{
    add_elementwise(t, 3 * (double)t->dims.hidden);
}

static void compute_qkv(tally *t)
{
    norm_forward(t);
    linear_forward(t, BL_QKV);
    rotate(t);
}

static void compute_mid(tally *t)
{
    attention_forward(t);
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
    compute_mid(t);
    compute_gate_up(t);
    swiglu_forward(t);
    linear_forward(t, BL_MLP_DOWN);
    residual(t);
    end_segments(t);
}

static void block_backward(tally *t, unsigned has, plan_segments *out)
{
    t->segments = out;
    if (!(has & BL_SAVE_QKV)) compute_qkv(t);
    if (!(has & BL_SAVE_ATTENTION)) compute_mid(t);
    if (!(has & BL_SAVE_GATE_UP)) compute_gate_up(t);
    swiglu_forward(t);
    if (t->in->habits.recomputes_all && has == BL_SAVE_S0) {
        linear_forward(t, BL_MLP_DOWN);
        residual(t);
    }
    linear_backward(t, BL_MLP_DOWN);
    swiglu_backward(t);
    norm_forward(t);
    linear_backward(t, BL_GATE_UP);
    norm_backward(t);
    linear_backward(t, BL_OUT);
    attention_backward(t);
    rotate(t);
    norm_forward(t);
    linear_backward(t, BL_QKV);
    norm_backward(t);
    end_segments(t);
}

/* ---- transfers ---- */

static double ranks_per_host(const bl_time_input *in)
{
    return (double)in->n_ranks / in->n_hosts;
}

static plan_work transfer(const bl_time_input *in, double seconds)
{
    return (plan_work){.seconds = seconds,
                       .use = {[PLAN_CORES] = is_cuda(in) ? 0 : in->rates.copy_cores}};
}

/* An all-gather in a group of `size` ranks that each bring `bytes`: a ring, through which every host and every rank receives what
 * the others bring. An all-to-all is as much, and of a host's bytes only what comes from others. */
static plan_work exchange(const bl_time_input *in, double size, double bytes, bool is_all_to_all)
{
    const bl_time_rates *r = &in->rates;
    double here = fmin(size, ranks_per_host(in)), received = (size - 1) * bytes, seconds = 0;

    if (size > 1) seconds = r->gather_latency_s + received / r->gather_bytes_per_s;
    if (size > here) {
        double into_host = is_all_to_all ? (size - here) * here * bytes : received;
        seconds = fmax(seconds, r->network_latency_s + into_host / r->network_bytes_per_s);
    }
    plan_work w = transfer(in, seconds);
    if (seconds > 0) w.use[PLAN_DEVICE_MEMORY] = 2 * received / seconds;
    return w;
}

static plan_work copy_work(const bl_time_input *in, double bytes, bool is_in)
{
    const bl_time_rates *r = &in->rates;
    double rate = is_in ? r->copy_in_bytes_per_s : r->copy_out_bytes_per_s;
    plan_work w = transfer(in, bytes > 0 ? bytes / rate : 0);

    if (!is_cuda(in)) return w;
    w.use[is_in ? PLAN_LINK_IN : PLAN_LINK_OUT] = rate;
    w.use[PLAN_LINK_BOTH] = w.use[PLAN_HOST_MEMORY] = w.use[PLAN_DEVICE_MEMORY] = rate;
    return w;
}

/* Without a core. */
static void pace(const bl_time_input *in, double bytes, plan_work *copy)
{
    if (in->rates.pace_bytes_per_s > 0) {
        double paused = copy->seconds + bytes / in->rates.pace_bytes_per_s;
        copy->use[PLAN_CORES] *= copy->seconds / paused;
        copy->seconds = paused;
    }
    if (in->habits.copy_back_bytes_per_s > 0)
        copy->seconds += bytes / in->habits.copy_back_bytes_per_s;
}

/* Shards lie where the pager has them; with gathers_decoded a rank gathers what it has decoded. */
static plan_item item_of(const bl_time_input *in, double rows, double cols, double stored_bytes)
{
    const bl_time_rates *r = &in->rates;
    double size = in->n_shards, bytes = ceil(rows / size) * (stored_bytes / rows), gathered = bytes;
    plan_item item = {.shard_bytes = (int64_t)bytes, .copy = copy_work(in, bytes, true)};

    if (r->disk_bytes_per_s > 0) {
        item.read = transfer(in, bytes / r->disk_bytes_per_s);
        item.read.use[PLAN_HOST_MEMORY] = r->disk_bytes_per_s;
    }
    item.copy_read = in->writes_device ? (plan_work){.seconds = 0} : item.copy;
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
    bl_block_dims dims = bl_block_dims_of(in->model, in->kind);
    tally t = {.in = in,
               .run = run,
               .dims = dims,
               .T = (double)in->micro_tokens,
               .element = (double)bl_dtype_bytes(dims.act)};

    *out = (plan_layer){.saved_bytes = bl_block_rows(&dims, in->micro_tokens) *
                                       bl_block_saved_bytes(&dims, run->save)};
    for (int m = 0; m < BL_LAYER_MATRICES; m++) {
        matrix_size size = size_of(in, run, m);
        out->item[m] = item_of(in, size.rows, size.cols, size.stored_bytes);
    }
    block_forward(&t, &out->forward);
    block_backward(&t, run->save, &out->backward);
    block_backward(&t, BL_SAVE_S4, &out->backward_kept);
    out->saved_out = copy_work(in, (double)(group * out->saved_bytes), false);
    out->saved_back = copy_work(in, (double)(group * out->saved_bytes), true);
}

/* ---- head, LoRA's communication, optimizer ---- */

static plan_work head_work(const bl_time_input *in, double head_bytes)
{
    const bl_time_rates *r = &in->rates;
    const bl_model_config *m = in->model;
    bl_block_dims dims = bl_block_dims_of(m, in->kind);
    tally t = {.in = in,
               .dims = dims,
               .T = (double)in->micro_tokens,
               .element = (double)bl_dtype_bytes(dims.act)};
    double rate = r->head_flops_per_s > 0 ? r->head_flops_per_s : r->gemm_flops_per_s;
    double tokens = t.T * in->label_part, V = (double)m->vocab_size, H = (double)m->hidden_size;

    norm_forward(&t);
    for (int product = 0; product < 2; product++) /* logits; dx */
        add(&t, 2 * tokens * V * H, rate, head_bytes + tokens * (V + H) * t.element);
    /* fp32 logits are read for the maximum, the sum and the gradient, which is written */
    add(&t, 0, 0, tokens * V * (3 * 4 + t.element));
    norm_backward(&t);
    return work_of(in, t.seconds, t.bytes);
}

static void lora_amounts(const bl_time_input *in, plan_amounts *out)
{
    const bl_time_rates *r = &in->rates;
    double n = in->n_ranks, chunk = ceil((double)in->lora->n_floats / n),
           element = (double)bl_dtype_bytes(bl_act_dtype(in->kind));
    double rate = r->memory_bytes_per_s > 0 ? r->memory_bytes_per_s : INFINITY;
    double optimizer_rate = r->optimizer_bytes_per_s > 0 ? r->optimizer_bytes_per_s : rate;

    out->lora_gather = exchange(in, n, chunk * element, false);
    out->lora_gather.seconds += 2 * chunk * element / rate;
    out->lora_gather_bytes = (int64_t)((n - 1) * chunk * element);
    out->lora_reduce = exchange(in, n, chunk * 4, true);
    out->lora_reduce.seconds += (n + 1) * chunk * 4 / rate;
    out->lora_reduce_bytes = (int64_t)((n - 1) * chunk * 4);
    out->lora_add = transfer(in, 3 * chunk * 4 / rate);
    /* Squares: g is read; AdamW: w, m, v read and written, g read; g is cleared. */
    out->optimizer_s = 9 * 4 * chunk * (double)in->model->n_layers / optimizer_rate +
                       2 * (r->gather_latency_s + (in->n_hosts > 1 ? r->network_latency_s : 0)) +
                       r->step_overhead_s;
}

bl_status plan_amounts_create(const bl_time_input *in, int group, plan_amounts *out)
{
    const bl_model_config *m = in->model;
    bl_block_dims dims = bl_block_dims_of(m, in->kind);
    double V = (double)m->vocab_size, H = (double)m->hidden_size;
    double head_bytes = V * H * (double)bl_dtype_bytes(in->head_dtype);
    double element = (double)bl_dtype_bytes(dims.act), T = (double)in->micro_tokens;

    *out = (plan_amounts){
        .input_bytes = (int64_t)((double)bl_block_rows(&dims, in->micro_tokens) * H * element)};
    out->layers = calloc((size_t)in->n_runs, sizeof *out->layers);
    if (!out->layers) return BL_FAIL(BL_ENOMEM, "a prediction");
    for (int r = 0; r < in->n_runs; r++) layer_amounts(in, &in->runs[r], group, &out->layers[r]);
    out->head_item = item_of(in, V, H, head_bytes);
    out->head_item.gather.seconds =
        exchange(in, in->n_shards,
                 ceil(V / in->n_shards) * H * (double)bl_dtype_bytes(in->head_dtype), false)
            .seconds;
    out->head = head_work(in, head_bytes);
    tally embed = {.in = in, .dims = dims, .T = T, .element = element};
    add_elementwise(&embed, 2 * H);
    out->embed = work_of(in, embed.seconds, embed.bytes);
    lora_amounts(in, out);
    out->input_out = copy_work(in, (double)(group * out->input_bytes), false);
    out->input_back = copy_work(in, (double)(group * out->input_bytes), true);
    return BL_OK;
}

void plan_amounts_free(plan_amounts *amounts)
{
    free(amounts->layers);
}

/* As train/rank_train.c counts them for metrics.jsonl. */
double plan_model_flops(const bl_time_input *in)
{
    const bl_model_config *c = in->model;
    bl_block_dims d = bl_block_dims_of(c, in->kind);
    double layer = (double)d.hidden * (double)(2 * d.q_width + 2 * d.kv_width + 3 * d.inter);
    double tokens = (double)in->micro_tokens * in->n_micro * in->n_ranks * in->useful_part;
    double attention = 2 * (double)d.q_width * in->document_tokens;
    double per_token = (double)c->n_layers *
                       (4 * layer + 6 * (double)in->lora->n_floats + (2.0 + 4.0) * attention / 2);

    return per_token * tokens +
           4 * (double)c->vocab_size * (double)c->hidden_size * tokens * in->label_part;
}
