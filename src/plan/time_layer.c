/* SPDX-License-Identifier: Apache-2.0 */
/* time_layer.c -- what a decoder layer costs on one rank: the ops of arch/block.c and
 * linear/lora_linear.c in their order, at the costs of ops/cost.h. docs/model.md has the same as
 * formulas. */
#include "plan/time_layer_internal.h"

static bool is_cuda(const bl_time_input *in)
{
    return in->kind == BL_DEVICE_CUDA;
}

plan_tally plan_tally_of(const bl_time_input *in, const bl_time_run *run)
{
    plan_tally t = {.in = in,
                    .run = run,
                    .dims = bl_block_dims_of(in->model, in->kind, in->act),
                    .setting = {in->kind, in->document_tokens, in->label_part},
                    .T = in->micro_tokens};
    t.x = bl_tensor_of(in, t.dims.act);
    for (int m = 0; m < BL_LAYER_MATRICES; m++) t.prepared[m].memory_bytes = SIZE_MAX;
    return t;
}

/* A product's kernels of other kinds: its operands. */
static plan_group group_of(plan_group group, const bl_cost_kernel *kernel)
{
    if (kernel->rate == BL_COST_PREPARE) return PLAN_OF_PREPARE;
    return group == PLAN_OF_PRODUCTS && kernel->flops == 0 ? PLAN_OF_QUANTIZE : group;
}

static void add_kernel(plan_tally *t, plan_group group, const bl_cost_kernel *kernel)
{
    bool is_once = kernel->rate == BL_COST_PREPARE && !t->in->habits.decodes_each_use;
    double seconds = bl_cost_seconds(kernel, &t->in->rates);
    plan_group_sum *sum = &t->group[group_of(group, kernel)];

    *(is_once ? &t->prepared_s : &t->seconds) += seconds;
    *(is_once ? &t->prepared_bytes : &t->bytes) += kernel->bytes;
    sum->seconds += seconds;
    sum->bytes += kernel->bytes;
    sum->flops += kernel->flops;
}

void plan_tally_add(plan_tally *t, plan_group group, bl_cost cost)
{
    for (int i = 0; i < cost.n; i++) add_kernel(t, group, &cost.kernel[i]);
}

/* Reads and writes of another system's kernels instead of an op: n elements per token. */
static void add_elements(plan_tally *t, plan_group group, double n)
{
    add_kernel(t, group,
               &(bl_cost_kernel){.bytes = (double)t->T * n * (double)bl_dtype_bytes(t->x.dtype)});
}

bl_work plan_work_of(const bl_time_input *in, double seconds, double bytes)
{
    bl_work w = {.seconds = seconds};
    if (seconds <= 0) return w;
    w.use[BL_RESOURCE_CORES] = in->rates.compute_cores;
    if (is_cuda(in)) w.use[BL_RESOURCE_DEVICE_MEMORY] = bytes / seconds;
    return w;
}

/* Ends the current segment and begins that of `matrix`. What comes before the first acquire counts
 * to it. */
static void acquire(plan_tally *t, int matrix)
{
    plan_segments *s = t->segments;

    if (s->n > 0) {
        plan_segment *last = &s->at[s->n - 1];
        last->work = plan_work_of(t->in, t->seconds + t->prepared_s, t->bytes + t->prepared_bytes);
        last->later = plan_work_of(t->in, t->seconds, t->bytes);
        t->seconds = t->bytes = t->prepared_s = t->prepared_bytes = 0;
    }
    if (matrix >= 0) s->at[s->n++] = (plan_segment){.matrix = matrix};
}

static void end_segments(plan_tally *t)
{
    acquire(t, -1);
    for (int m = 0; m < BL_LAYER_MATRICES; m++) t->prepared[m].made = 0;
}

/* ---- frozen matrices and LoRA ---- */

static bool is_exception(const bl_time_run *run, int matrix)
{
    return run->bf16_matrices >> matrix & 1u;
}

plan_matrix plan_matrix_of(const bl_time_input *in, const bl_time_run *run, int matrix)
{
    bl_block_dims dims = bl_block_dims_of(in->model, in->kind, in->act);
    plan_matrix m = {.mode = is_exception(run, matrix) ? BL_MATMUL_BF16 : in->mode,
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
            plan_matrix m = plan_matrix_of(in, run, matrix);
            out->n_matrices += run->n_layers;
            if (m.is_fp8) out->n_fp8 += run->n_layers;
            if (is_exception(run, matrix)) out->n_exceptions += run->n_layers;
            if (out->reason == BL_FALLBACK_COUNT) out->reason = m.reason;
        }
}

/* With the frozen matrix: y = x W^T or dx = dy W. */
static bl_matmul_weight_args product_of(plan_tally *t, const plan_matrix *m, int matrix,
                                        bool forward)
{
    return (bl_matmul_weight_args){
        .forward = forward,
        .mode = m->is_fp8 ? BL_MATMUL_FP8 : BL_MATMUL_BF16,
        .sums = t->in->sums,
        .T = t->T,
        .in = t->x,
        .weight = m->weight,
        .prepared = t->in->habits.decodes_each_use ? NULL : &t->prepared[matrix]};
}

/* The codes that the op before the forward product with `matrix` writes for it; only their sizes
 * are set. */
static bl_quantized operand_of(plan_tally *t, int matrix)
{
    const bl_time_habits *habits = &t->in->habits;
    plan_matrix m = plan_matrix_of(t->in, t->run, matrix);
    bl_matmul_weight_args product = product_of(t, &m, matrix, true);

    product.scratch = t;
    product.scratch_bytes = SIZE_MAX;
    if (habits->is_eager || habits->gathers_decoded || habits->recomputes_all ||
        !bl_block_quantizes_input(&t->dims, (bl_layer_matrix)matrix))
        return (bl_quantized){0};
    return bl_matmul_weight_operand(t->in->kind, &product);
}

/* adds: to what LoRA has left there, or to the residual. */
static void add_frozen(plan_tally *t, const plan_matrix *m, int matrix, bool forward, bool adds)
{
    const bl_time_habits *habits = &t->in->habits;
    bl_matmul_weight_args product = product_of(t, m, matrix, forward);

    product.beta = adds ? 1 : 0;
    product.is_quantized = forward && operand_of(t, matrix).codes;
    for (int s = 0; s < m->weight.n_segments && habits->gathers_decoded && is_cuda(t->in); s++)
        product.weight.segment[s].format = BL_FORMAT_BF16;
    plan_tally_add(t, PLAN_OF_PRODUCTS, bl_cost_matmul_weight(&t->setting, &product));
}

/* C (T,N) = A (T,K) B, or one with the sum over T: either way, these are its operands; with the
 * addend, if there is one. */
static void add_small_to(plan_tally *t, int64_t K, int64_t N, bl_tensor addend)
{
    plan_tally_add(
        t, PLAN_OF_LORA,
        bl_cost_matmul(
            &t->setting,
            &(bl_matmul_args){.M = t->T, .N = N, .K = K, .beta = 1, .a = t->x, .addend = addend}));
}

static void add_small(plan_tally *t, int64_t K, int64_t N)
{
    add_small_to(t, K, N, (bl_tensor){0});
}

static void add_dropout(plan_tally *t, int64_t width)
{
    if (t->in->lora->options.dropout > 0)
        plan_tally_add(
            t, PLAN_OF_LORA,
            bl_cost_dropout(&t->setting, &(bl_dropout_args){.T = t->T, .C = width, .y = t->x}));
}

/* x A^T, for all parts at once where they are a stack (linear/lora_linear.c). */
static void add_downs(plan_tally *t, const plan_matrix *m)
{
    int n_products = is_cuda(t->in) && !t->in->habits.is_eager ? 1 : m->n_parts;
    for (int i = 0; i < n_products; i++)
        add_small(t, m->weight.cols, m->r * (m->n_parts / n_products));
}

/* Whether the product adds the residual itself. */
static bool adds_in_product(const plan_tally *t, int matrix)
{
    return is_cuda(t->in) && !t->in->habits.is_eager &&
           bl_block_adds_in_product(&t->dims, (bl_layer_matrix)matrix);
}

static void linear_forward(plan_tally *t, int matrix)
{
    plan_matrix m = plan_matrix_of(t->in, t->run, matrix);
    bool has_residual = adds_in_product(t, matrix);

    acquire(t, matrix);
    if (m.n_parts > 0) {
        add_dropout(t, m.weight.cols);
        add_downs(t, &m);
        for (int p = 0; p < m.n_parts; p++)
            add_small_to(t, m.r, m.part_rows[p], has_residual ? t->x : (bl_tensor){0});
        /* scaled, and added to the frozen product */
        if (t->in->habits.is_eager) add_elements(t, PLAN_OF_LORA, 5 * (double)m.weight.rows);
    }
    add_frozen(t, &m, matrix, true, m.n_parts > 0 || has_residual);
}

/* dW += dy^T x of some rows; the sum is read and written, in fp32. */
static void add_gradient(plan_tally *t, int64_t rows, const plan_matrix *m)
{
    float there = 0; /* its address is not followed */
    bl_tensor sum = bl_tensor_f32(&there);
    bl_cost cost = bl_cost_matmul(&t->setting, &(bl_matmul_args){.M = rows,
                                                                 .N = m->weight.cols,
                                                                 .K = t->T,
                                                                 .beta = 1,
                                                                 .a = t->x,
                                                                 .c = sum,
                                                                 .addend = sum});
    cost.kernel[0].rate = BL_COST_GEMM;
    plan_tally_add(t, PLAN_OF_GRADIENTS, cost);
}

static void add_gradients(plan_tally *t, int matrix, const plan_matrix *m)
{
    const bl_trained_unit *trained = t->run->trained;

    if (!t->in->is_trained) return;
    if (!trained) add_gradient(t, m->weight.rows, m);
    for (int i = 0; trained && i < trained->matrix[matrix].n; i++)
        add_gradient(t, trained->matrix[matrix].at[i].n, m);
}

/* As arch/block_weights.c: what backward omits in its last layer. */
static bool ends_at_qkv(const plan_tally *t)
{
    unsigned norm = 1u << BL_ATTENTION_NORM | 1u << BL_ATTENTION_NORM_BIAS;
    return t->run->is_last && (t->dims.has_post_norms || !(t->run->trained->vectors & norm));
}

static bool ends_at_mlp(const plan_tally *t)
{
    return t->run->is_last && !t->dims.is_parallel && !bl_trained_has_attention(t->run->trained);
}

static void linear_backward(plan_tally *t, int matrix)
{
    plan_matrix m = plan_matrix_of(t->in, t->run, matrix);

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
            add_elements(t, PLAN_OF_LORA, 2 * (double)m.weight.rows + 3 * (double)m.weight.cols);
    }
    if (!(matrix == BL_QKV && ends_at_qkv(t))) add_frozen(t, &m, matrix, false, m.n_parts > 0);
    add_gradients(t, matrix, &m);
}

/* ---- the block: arch/block.c in the same order ---- */

/* Eager: to fp32, squared, mean, scaled, back, times the weight. */
static void norm_forward(plan_tally *t, bl_quantized quantized)
{
    if (t->in->habits.is_eager)
        add_elements(t, PLAN_OF_ELEMENTWISE, 18 * (double)t->dims.hidden);
    else if (t->dims.has_layer_norm)
        plan_tally_add(
            t, PLAN_OF_ELEMENTWISE,
            bl_cost_layernorm_forward(&t->setting, &(bl_layernorm_forward_args){
                                                       .T = t->T, .H = t->dims.hidden, .x = t->x}));
    else
        plan_tally_add(t, PLAN_OF_ELEMENTWISE,
                       bl_cost_rmsnorm_forward(
                           &t->setting,
                           &(bl_rmsnorm_forward_args){
                               .T = t->T, .H = t->dims.hidden, .x = t->x, .quantized = quantized}));
}

void plan_norm_forward(plan_tally *t)
{
    norm_forward(t, (bl_quantized){0});
}

void plan_norm_backward(plan_tally *t)
{
    float there = 0; /* its address is not followed */
    bool is_frozen = t->run && t->run->trained && t->run->trained->vectors == 0;

    if (t->in->is_trained && !is_frozen)
        plan_tally_add(
            t, PLAN_OF_ELEMENTWISE,
            bl_cost_norm_gradients(&t->setting,
                                   &(bl_norm_gradients_args){
                                       .T = t->T, .H = t->dims.hidden, .dy = t->x, .dw = &there}));
    if (t->in->habits.is_eager)
        add_elements(t, PLAN_OF_ELEMENTWISE, 36 * (double)t->dims.hidden);
    else if (t->dims.has_layer_norm)
        plan_tally_add(t, PLAN_OF_ELEMENTWISE,
                       bl_cost_layernorm_backward(&t->setting,
                                                  &(bl_layernorm_backward_args){
                                                      .T = t->T, .H = t->dims.hidden, .x = t->x}));
    else
        plan_tally_add(t, PLAN_OF_ELEMENTWISE,
                       bl_cost_rmsnorm_backward(
                           &t->setting,
                           &(bl_rmsnorm_backward_args){.T = t->T, .H = t->dims.hidden, .x = t->x}));
}

/* Of q and k. Eager: two products, half of it negated, put together, a sum. */
static void rotate(plan_tally *t)
{
    const bl_block_dims *d = &t->dims;

    if (t->in->habits.is_eager)
        add_elements(t, PLAN_OF_ELEMENTWISE, 10 * (double)(d->q_width + d->kv_width));
    for (int64_t g = 0; g < d->n_groups && !t->in->habits.is_eager; g++)
        plan_tally_add(
            t, PLAN_OF_ELEMENTWISE,
            bl_cost_rope(&t->setting,
                         &(bl_rope_args){.T = t->T,
                                         .n_heads = (d->n_heads + d->n_kv_heads) / d->n_groups,
                                         .d = d->head_dim,
                                         .x = t->x,
                                         .d_rotated = d->rotary_dim}));
}

/* Eager: keys and values, repeated. */
static void attention_forward(plan_tally *t)
{
    const bl_block_dims *d = &t->dims;

    for (int64_t g = 0; g < d->n_groups; g++)
        plan_tally_add(
            t, PLAN_OF_ATTENTION,
            bl_cost_attention_forward(
                &t->setting, &(bl_attention_forward_args){.T = t->T,
                                                          .n_heads = d->n_heads / d->n_groups,
                                                          .n_kv_heads = d->n_kv_heads / d->n_groups,
                                                          .d = d->head_dim,
                                                          .q = t->x}));
    if (t->in->habits.is_eager) add_elements(t, PLAN_OF_ATTENTION, 2 * (double)d->q_width);
}

static void attention_backward(plan_tally *t)
{
    const bl_block_dims *d = &t->dims;

    for (int64_t g = 0; g < d->n_groups; g++)
        plan_tally_add(t, PLAN_OF_ATTENTION,
                       bl_cost_attention_backward(
                           &t->setting,
                           &(bl_attention_backward_args){.T = t->T,
                                                         .n_heads = d->n_heads / d->n_groups,
                                                         .n_kv_heads = d->n_kv_heads / d->n_groups,
                                                         .d = d->head_dim,
                                                         .q = t->x}));
    if (t->in->habits.is_eager) add_elements(t, PLAN_OF_ATTENTION, 2 * (double)d->q_width);
}

static void activate(plan_tally *t, bl_quantized quantized)
{
    if (t->in->habits.is_eager)
        add_elements(t, PLAN_OF_ACTIVATION, 5 * (double)t->dims.inter);
    else if (t->dims.activation != BL_SWIGLU)
        plan_tally_add(
            t, PLAN_OF_ACTIVATION,
            bl_cost_gelu_forward(&t->setting,
                                 &(bl_gelu_forward_args){.n = t->T * t->dims.inter, .h = t->x}));
    else
        plan_tally_add(t, PLAN_OF_ACTIVATION,
                       bl_cost_swiglu_forward(
                           &t->setting,
                           &(bl_swiglu_forward_args){
                               .T = t->T, .I = t->dims.inter, .h = t->x, .quantized = quantized}));
}

static void activate_backward(plan_tally *t)
{
    if (t->in->habits.is_eager)
        add_elements(t, PLAN_OF_ACTIVATION, 10 * (double)t->dims.inter);
    else if (t->dims.activation != BL_SWIGLU)
        plan_tally_add(
            t, PLAN_OF_ACTIVATION,
            bl_cost_gelu_backward(&t->setting,
                                  &(bl_gelu_backward_args){.n = t->T * t->dims.inter, .dh = t->x}));
    else
        plan_tally_add(t, PLAN_OF_ACTIVATION,
                       bl_cost_swiglu_backward(
                           &t->setting,
                           &(bl_swiglu_backward_args){.T = t->T, .I = t->dims.inter, .dh = t->x}));
}

static void add(plan_tally *t)
{
    plan_tally_add(t, PLAN_OF_ELEMENTWISE,
                   bl_cost_add(&t->setting, &(bl_add_args){.n = t->T * t->dims.hidden, .y = t->x}));
}

/* To the output of a sub-layer's last matrix. */
static void residual(plan_tally *t, int matrix)
{
    if (!adds_in_product(t, matrix)) add(t);
}

/* Of a sub-layer's input, or of its output, as the model has it; backward computes it again. */
static void norm(plan_tally *t, bool is_of_output)
{
    if (is_of_output == t->dims.has_post_norms) plan_norm_forward(t);
}

/* Of the input of the forward product with `matrix`. */
static void norm_input(plan_tally *t, int matrix)
{
    if (!t->dims.has_post_norms) norm_forward(t, operand_of(t, matrix));
}

/* A sub-layer that reads its input as it is: the gradient is added. */
static void norm_input_backward(plan_tally *t)
{
    if (t->dims.has_post_norms)
        add(t);
    else
        plan_norm_backward(t);
}

static void norm_output_backward(plan_tally *t, int matrix)
{
    if (!t->dims.has_post_norms) return;
    linear_forward(t, matrix);
    plan_norm_forward(t);
    plan_norm_backward(t);
}

static void compute_qkv(plan_tally *t)
{
    norm_input(t, BL_QKV);
    linear_forward(t, BL_QKV);
    rotate(t);
}

static void compute_mid(plan_tally *t)
{
    linear_forward(t, BL_OUT);
    norm(t, true);
    residual(t, BL_OUT);
}

static void compute_gate_up(plan_tally *t)
{
    norm_input(t, BL_GATE_UP);
    linear_forward(t, BL_GATE_UP);
}

void plan_block_forward(plan_tally *t, plan_segments *out)
{
    t->segments = out;
    compute_qkv(t);
    attention_forward(t);
    compute_mid(t);
    compute_gate_up(t);
    activate(t, operand_of(t, BL_MLP_DOWN));
    linear_forward(t, BL_MLP_DOWN);
    norm(t, true);
    residual(t, BL_MLP_DOWN);
    end_segments(t);
}

void plan_block_backward(plan_tally *t, unsigned has, plan_segments *out)
{
    t->segments = out;
    if (!(has & BL_SAVE_QKV)) compute_qkv(t);
    if (!(has & BL_SAVE_ATTENTION)) {
        attention_forward(t);
        if (!t->dims.is_parallel || t->in->habits.recomputes_all) compute_mid(t);
    }
    if (!(has & BL_SAVE_GATE_UP)) compute_gate_up(t);
    activate(t, t->dims.has_post_norms ? operand_of(t, BL_MLP_DOWN) : (bl_quantized){0});
    if (t->in->habits.recomputes_all && has == BL_SAVE_S0) {
        linear_forward(t, BL_MLP_DOWN);
        residual(t, BL_MLP_DOWN);
    }
    norm_output_backward(t, BL_MLP_DOWN);
    linear_backward(t, BL_MLP_DOWN);
    activate_backward(t);
    norm(t, false);
    linear_backward(t, BL_GATE_UP);
    if (!t->dims.is_parallel) norm_input_backward(t);
    if (ends_at_mlp(t)) {
        end_segments(t);
        return;
    }
    norm_output_backward(t, BL_OUT);
    linear_backward(t, BL_OUT);
    if (t->dims.is_parallel) norm_input_backward(t);
    attention_backward(t);
    rotate(t);
    norm(t, false);
    linear_backward(t, BL_QKV);
    if (!ends_at_qkv(t)) norm_input_backward(t);
    end_segments(t);
}

/* ---- by group ---- */

static const char *const group_names[PLAN_N_GROUPS] = {[PLAN_OF_PRODUCTS] = "frozen products",
                                                       [PLAN_OF_ATTENTION] = "attention",
                                                       [PLAN_OF_LORA] = "LoRA",
                                                       [PLAN_OF_GRADIENTS] = "weight gradients",
                                                       [PLAN_OF_QUANTIZE] = "operands to FP8",
                                                       [PLAN_OF_PREPARE] = "copies of W",
                                                       [PLAN_OF_ACTIVATION] = "activation function",
                                                       [PLAN_OF_ELEMENTWISE] = "norms, RoPE, adds"};

/* Of a micro-batch; copies of W serve the group. */
static bl_time_amount amount_of(const bl_time_input *in, const plan_tally *t, int group)
{
    double part = group == PLAN_OF_PREPARE && !in->habits.decodes_each_use ? 1.0 / in->group : 1;
    const plan_group_sum *sum = &t->group[group];
    return (bl_time_amount){part * sum->seconds, part * sum->bytes, part * sum->flops};
}

void bl_time_budget_layer(const bl_time_input *in, bl_time_budget *out)
{
    plan_segments unused = {.n = 0};
    const bl_time_run *run = &in->runs[0];
    plan_tally forward = plan_tally_of(in, run), kept = forward, backward = forward;

    plan_block_forward(&forward, &unused);
    unused.n = 0;
    plan_block_backward(&kept, BL_SAVE_S4, &unused);
    unused.n = 0;
    plan_block_backward(&backward, run->save, &unused);
    *out = (bl_time_budget){.n = PLAN_N_GROUPS};
    for (int g = 0; g < PLAN_N_GROUPS; g++) {
        bl_time_budget_line *line = &out->line[g];
        bl_time_amount all = amount_of(in, &backward, g), own = amount_of(in, &kept, g);
        line->name = in->is_trained && g == PLAN_OF_PRODUCTS ? "products with W" : group_names[g];
        line->part[BL_TIME_OF_FORWARD] = amount_of(in, &forward, g);
        line->part[BL_TIME_OF_BACKWARD] = own;
        line->part[BL_TIME_OF_RECOMPUTATION] = (bl_time_amount){
            all.seconds - own.seconds, all.bytes - own.bytes, all.flops - own.flops};
    }
}
