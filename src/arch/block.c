/* SPDX-License-Identifier: Apache-2.0 */
/* block.c -- one decoder layer on one micro-batch: forward, backward, and forward over a cache.
 *
 * Forward, row-major, T tokens; W are frozen, each product has LoRA's term
 * (linear/lora_linear.h):
 *
 *   n1      = norm(x) w1                          norm(x) = x / sqrt(mean(x^2) + eps)
 *   q|k|v   = n1 W_qkv^T, q and k rotated         saved with BL_SAVE_QKV, rotated; with norms of
 *                                                 heads before them, which then come next
 *   a, lse  = attention(q, k, v)                  saved with BL_SAVE_ATTENTION
 *   mid     = x + a W_out^T                       saved with BL_SAVE_ATTENTION
 *   n2      = norm(mid) w2
 *   g|u     = n2 W_gate_up^T                      saved with BL_SAVE_GATE_UP
 *   h       = silu(g) u                     or gelu(u), without g
 *   out     = mid + h W_down^T                    the next layer's x
 *
 * Backward gets d, the gradient of out, and leaves that of x there. What was not saved is
 * computed first, by the functions of forward and in its order, hence with its bits:
 *
 *   h       again;  dh = d W_down
 *   dg, du  = u silu'(g) dh, silu(g) dh           in the place of g|u: last use of it
 *   n2      again;  d += norm'(mid)^T (w2 (dg|du W_gate_up))       now the gradient of mid
 *   da      = d W_out
 *   dq|dk|dv = attention'(q, k, v, a, lse, da), dq and dk rotated back
 *   n1      again;  d += norm'(x)^T (w1 (dq|dk|dv W_qkv))          now the gradient of x
 *
 * With norms of outputs (OLMo 2) q|k|v and g|u are products of x and mid themselves, and
 *
 *   mid     = x + norm(a W_out^T) w1;   out = mid + norm(h W_down^T) w2
 *
 * Backward computes both products again, for the gradients of the norms, into d_norm.
 *
 * In a parallel layer (Falcon) n2 is a norm of x, n1 itself where there is one norm; mid is not
 * saved; and da is computed before d gets the MLP's part.
 *
 * Each product with a matrix also yields the gradients of its LoRA weights, or of the matrix
 * itself, from the same input and output gradient: that is why n1, n2 and h are needed again.
 * Gradients of the layer's own weights: block_weights.c.
 *
 * Streams: everything is queued on the caller's stream, in this order. A product acquires its
 * matrix (bl_linear_apply), so the stream waits for a gather as late as possible; the visit
 * releases all of a layer's matrices together. Nothing here waits on the host or allocates.
 *
 * Memory: block_memory.c. Families have other extents, matrices and vectors (arch/arch.h). */
#include "arch/block.h"
#include "arch/block_internal.h"

#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/rope.h"

/* One fused matrix with its adapters. */
static bl_linear_use use_matrix(const bl_block *block, bl_layer_matrix matrix,
                                const bl_micro_batch *batch, const bl_block_workspace *ws,
                                float *gradients)
{
    bl_linear_use use = {
        .base = block->base,
        .unit = block->layer,
        .matrix = (int)matrix,
        .prepared = block->prepared,
        .lora = {.mode = block->bf16_matrices >> matrix & 1u ? BL_MATMUL_BF16 : block->dims->mode,
                 .sums = block->dims->sums,
                 .workspace = ws->lora,
                 .workspace_bytes = ws->lora_bytes,
                 .dropout = block->dropout}};
    use.lora.dropout.sample = batch->sample;
    use.lora.dropout.position = batch->position;
    if (block->lora)
        bl_lora_layout_bind(block->lora, matrix, block->lora_weights, gradients, &use.lora);
    return use;
}

/* Where the op that makes the input of `matrix` leaves it in E4M3, too, for the forward product
 * that comes next; none where it does not. */
static bl_quantized operand_of(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                               const bl_micro_batch *batch, const bl_block_workspace *ws)
{
    bl_linear_use use = use_matrix(block, matrix, batch, ws, NULL);
    if (!bl_block_quantizes_input(block->dims, matrix)) return (bl_quantized){0};
    return bl_linear_operand(stream, &use, batch->T, block->dims->act);
}

/* residual: added to y; may be none, and is where there is a bias. */
static bl_status linear_forward(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                const bl_micro_batch *batch, const bl_block_workspace *ws,
                                bl_tensor x, bl_tensor residual, bl_tensor y)
{
    const bl_block_dims *dims = block->dims;
    bl_linear_use use = use_matrix(block, matrix, batch, ws, NULL);

    use.lora.residual = residual;
    use.lora.is_quantized = operand_of(stream, block, matrix, batch, ws).codes != NULL;
    BL_TRY(bl_linear_apply(stream, &use, batch->T, x, y));
    if (dims->bias_offset[matrix] < 0) return BL_OK;
    return bl_add_bias(stream,
                       &(bl_add_bias_args){.T = batch->T,
                                           .N = dims->matrix[matrix].rows,
                                           .bias = block->vectors + dims->bias_offset[matrix],
                                           .y = y});
}

static bl_status linear_backward(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                 const bl_micro_batch *batch, const bl_block_workspace *ws,
                                 float *gradients, bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    bl_linear_use use = use_matrix(block, matrix, batch, ws, gradients);
    BL_TRY(bl_linear_pull_back(stream, &use, batch->T, x, dy, dx));
    return arch_add_matrix_gradient(stream, block, matrix, batch->T, x, dy, ws);
}

/* `norm` of x: its statistics are in ws between norm_forward and norm_backward. */
static bl_block_norm norm_of(const bl_block *block, int64_t T, bl_layer_vector norm, bl_tensor x,
                             const bl_block_workspace *ws)
{
    const float *w = block->vectors + block->dims->vector_offset[norm];
    return (bl_block_norm){.T = T, .w = w, .x = x, .rstd = ws->rstd, .mean = ws->mean};
}

/* ws->norm = norm of x, also in E4M3 where `quantized` is */
static bl_status norm_forward(bl_stream *stream, const bl_block *block, int64_t T,
                              bl_layer_vector norm, bl_tensor x, const bl_block_workspace *ws,
                              bl_quantized quantized)
{
    bl_block_norm n = norm_of(block, T, norm, x, ws);
    n.quantized = quantized;
    return bl_block_norm_forward(stream, block->dims, &n, ws->norm);
}

/* *in = what a sub-layer's first matrix reads: norm of x, or x itself where outputs are normed. */
static bl_status branch_input(bl_stream *stream, const bl_block *block, int64_t T,
                              bl_layer_vector norm, bl_tensor x, const bl_block_workspace *ws,
                              bl_quantized quantized, bl_tensor *in)
{
    *in = block->dims->has_post_norms ? x : ws->norm;
    if (block->dims->has_post_norms) return BL_OK;
    return norm_forward(stream, block, T, norm, x, ws, quantized);
}

/* d += gradient of x through what branch_input did, the gradient of *in being ws->d_norm, and its
 * norm the last that norm_forward computed */
static bl_status branch_input_backward(bl_stream *stream, const bl_block *block, int64_t T,
                                       bl_layer_vector norm, bl_tensor x,
                                       const bl_block_workspace *ws, bl_tensor d)
{
    bl_block_norm n = norm_of(block, T, norm, x, ws);

    if (block->dims->has_post_norms)
        return bl_add(
            stream, &(bl_add_args){.n = T * block->dims->hidden, .a = d, .b = ws->d_norm, .y = d});
    BL_TRY(arch_add_norm_gradient(stream, block, norm, &n, ws->d_norm));
    return bl_block_norm_backward(stream, block->dims, &n, true, ws->d_norm, d);
}

/* Heads whose q, k and v are neighbors in a row of qkv. Columns: of the first q, k and v there; of
 * the first q among all heads' outputs, of the first k among all keys. */
typedef struct head_group {
    int64_t n_heads, n_kv_heads;
    int64_t q, k, v;
    int64_t out, key;
} head_group;

static head_group group_of(const bl_block_dims *dims, int64_t group)
{
    int64_t q_width = dims->q_width / dims->n_groups, kv_width = dims->kv_width / dims->n_groups,
            first = group * (q_width + 2 * kv_width);
    return (head_group){.n_heads = dims->n_heads / dims->n_groups,
                        .n_kv_heads = dims->n_kv_heads / dims->n_groups,
                        .q = first,
                        .k = first + q_width,
                        .v = first + q_width + kv_width,
                        .out = group * q_width,
                        .key = group * kv_width};
}

/* n_heads from `column` on, by the tables of q or of k. */
static bl_status rotate_heads(bl_stream *stream, const bl_block_dims *dims,
                              const bl_micro_batch *batch, int64_t position_offset, int direction,
                              bool is_query, int64_t n_heads, int64_t column, bl_tensor qkv)
{
    const bl_block_rope *rope = &dims->rope;
    return bl_rope(stream,
                   &(bl_rope_args){.T = batch->T,
                                   .n_heads = n_heads,
                                   .d = dims->head_dim,
                                   .row_stride = dims->qkv_width,
                                   .n_documents = batch->n_documents,
                                   .position_offset = position_offset,
                                   .direction = direction,
                                   .cu_seqlens = batch->cu_seqlens,
                                   .cos_table = is_query ? rope->query_cos_table : rope->cos_table,
                                   .sin_table = is_query ? rope->query_sin_table : rope->sin_table,
                                   .x = bl_tensor_at(qkv, column),
                                   .long_after = rope->long_after,
                                   .long_offset = rope->long_offset,
                                   .d_rotated = dims->rotary_dim});
}

/* q and k are neighbors in a group: one call rotates both, unless q has separate tables. */
static bl_status rotate(bl_stream *stream, const bl_block_dims *dims, const bl_micro_batch *batch,
                        int64_t position_offset, int direction, bl_tensor qkv)
{
    bool is_apart = dims->rope.query_cos_table != NULL;

    for (int64_t i = 0; i < dims->n_groups; i++) {
        head_group g = group_of(dims, i);
        BL_TRY(rotate_heads(stream, dims, batch, position_offset, direction, is_apart,
                            is_apart ? g.n_heads : g.n_heads + g.n_kv_heads, g.q, qkv));
        if (is_apart)
            BL_TRY(rotate_heads(stream, dims, batch, position_offset, direction, false,
                                g.n_kv_heads, g.k, qkv));
    }
    return BL_OK;
}

static bl_status compute_qkv(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                             int64_t position_offset, const bl_block_workspace *ws,
                             const bl_block_tensors *t)
{
    bl_quantized quantized = operand_of(stream, block, BL_QKV, batch, ws);
    bl_tensor in;

    BL_TRY(branch_input(stream, block, batch->T, BL_ATTENTION_NORM, t->x, ws, quantized, &in));
    BL_TRY(linear_forward(stream, block, BL_QKV, batch, ws, in, (bl_tensor){0}, t->qkv));
    if (block->dims->q_norm_width > 0) return BL_OK; /* compute_qk rotates */
    return rotate(stream, block->dims, batch, position_offset, +1, t->qkv);
}

/* q and k as attention reads them, from qkv as compute_qkv leaves it: its norms of heads, like all
 * norms, are always recomputed. */
static bl_status compute_qk(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                            int64_t position_offset, const bl_block_workspace *ws,
                            const bl_block_tensors *t)
{
    if (block->dims->q_norm_width == 0) return BL_OK;
    BL_TRY(arch_norm_heads(stream, block, batch->T, BL_Q_NORM, t->qkv, ws));
    BL_TRY(arch_norm_heads(stream, block, batch->T, BL_K_NORM, t->qkv, ws));
    return rotate(stream, block->dims, batch, position_offset, +1, ws->qk);
}

/* The results of compute_qk; v is in qkv. */
static bl_tensor qk_of(const bl_block_dims *dims, const bl_block_workspace *ws,
                       const bl_block_tensors *t)
{
    return dims->q_norm_width > 0 ? ws->qk : t->qkv;
}

static int64_t window_of(const bl_block *block)
{
    return bl_windows_of_layer(&block->dims->windows, block->layer);
}

/* A group's rows of the log-sum-exps, or of another array (T, n_heads) that is kept by groups. */
static float *rows_of(float *lse, int64_t T, const bl_block_dims *dims, const head_group *g)
{
    return lse ? lse + T * (g->out / dims->head_dim) : NULL;
}

static bl_status compute_attention(bl_stream *stream, const bl_block *block,
                                   const bl_micro_batch *batch, const bl_block_workspace *ws,
                                   const bl_block_tensors *t)
{
    const bl_block_dims *dims = block->dims;
    bl_tensor qk = qk_of(dims, ws, t);

    for (int64_t i = 0; i < dims->n_groups; i++) {
        head_group g = group_of(dims, i);
        bl_attention_forward_args args = {.T = batch->T,
                                          .n_heads = g.n_heads,
                                          .n_kv_heads = g.n_kv_heads,
                                          .d = dims->head_dim,
                                          .n_documents = batch->n_documents,
                                          .window = window_of(block),
                                          .q_stride = dims->qkv_width,
                                          .kv_stride = dims->qkv_width,
                                          .o_stride = dims->q_width,
                                          .cu_seqlens = batch->cu_seqlens,
                                          .q = bl_tensor_at(qk, g.q),
                                          .k = bl_tensor_at(qk, g.k),
                                          .v = bl_tensor_at(t->qkv, g.v),
                                          .o = bl_tensor_at(t->attention, g.out),
                                          .lse = rows_of(t->lse, batch->T, dims, &g)};
        BL_TRY(bl_attention_forward(stream, &args));
    }
    return BL_OK;
}

/* y = the sub-layer's x times the residual multiplier, if there is one; y may be x. */
static bl_status scale_branch(bl_stream *stream, const bl_block_dims *dims, int64_t T, bl_tensor x,
                              bl_tensor y)
{
    return bl_scale(stream,
                    &(bl_scale_args){
                        .n = T * dims->hidden, .scale = dims->residual_multiplier, .x = x, .y = y});
}

/* y = x + the last matrix of the sub-layer times `input`; x + its norm with norms of outputs.
 * Where nothing comes between, the product adds x itself. */
static bl_status add_branch(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                            bl_layer_vector norm, const bl_micro_batch *batch,
                            const bl_block_workspace *ws, bl_tensor input, bl_tensor x, bl_tensor y)
{
    const bl_block_dims *dims = block->dims;
    bool is_normed = dims->has_post_norms;
    int64_t T = batch->T;

    if (bl_block_adds_in_product(dims, matrix))
        return linear_forward(stream, block, matrix, batch, ws, input, x, y);
    BL_TRY(linear_forward(stream, block, matrix, batch, ws, input, (bl_tensor){0}, y));
    if (is_normed) BL_TRY(norm_forward(stream, block, T, norm, y, ws, (bl_quantized){0}));
    if (dims->residual_multiplier > 0) BL_TRY(scale_branch(stream, dims, T, y, y));
    return bl_add(
        stream,
        &(bl_add_args){.n = T * dims->hidden, .a = x, .b = is_normed ? ws->norm : y, .y = y});
}

/* *dy = the gradient of matrix' output for its input, d being that of the sum: d, or in ws->norm.
 * With norms of outputs, these are computed again. */
static bl_status branch_gradient(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                 bl_layer_vector norm, const bl_micro_batch *batch,
                                 const bl_block_workspace *ws, bl_tensor input, bl_tensor d,
                                 bl_tensor *dy)
{
    const bl_block_dims *dims = block->dims;

    *dy = dims->residual_multiplier > 0 || dims->has_post_norms ? ws->norm : d;
    if (dims->has_post_norms) {
        bl_block_norm n = norm_of(block, batch->T, norm, ws->d_norm, ws);
        BL_TRY(linear_forward(stream, block, matrix, batch, ws, input, (bl_tensor){0}, ws->d_norm));
        BL_TRY(bl_block_norm_forward(stream, dims, &n, ws->norm));
        BL_TRY(arch_add_norm_gradient(stream, block, norm, &n, d));
        return bl_block_norm_backward(stream, dims, &n, false, d, *dy);
    }
    return dims->residual_multiplier > 0 ? scale_branch(stream, dims, batch->T, d, *dy) : BL_OK;
}

/* mid = x + o(attention) */
static bl_status compute_mid(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                             const bl_block_workspace *ws, const bl_block_tensors *t)
{
    return add_branch(stream, block, BL_OUT, BL_ATTENTION_NORM, batch, ws, t->attention, t->x,
                      t->mid);
}

static bl_tensor mlp_input(const bl_block_dims *dims, const bl_block_tensors *t)
{
    return dims->is_parallel ? t->x : t->mid;
}

static bl_status compute_gate_up(bl_stream *stream, const bl_block *block,
                                 const bl_micro_batch *batch, const bl_block_workspace *ws,
                                 const bl_block_tensors *t)
{
    bl_quantized quantized = operand_of(stream, block, BL_GATE_UP, batch, ws);
    bl_tensor in;

    BL_TRY(branch_input(stream, block, batch->T, block->dims->mlp_norm, mlp_input(block->dims, t),
                        ws, quantized, &in));
    return linear_forward(stream, block, BL_GATE_UP, batch, ws, in, (bl_tensor){0}, t->gate_up);
}

static bl_gelu_form form_of(const bl_block_dims *dims)
{
    return dims->activation == BL_GELU ? BL_GELU_ERF : BL_GELU_TANH;
}

/* h = silu(g) u, also in E4M3 where `quantized` is, or gelu(gate_up) */
static bl_status activate(bl_stream *stream, const bl_block_dims *dims, int64_t T,
                          bl_tensor gate_up, bl_tensor h, bl_quantized quantized)
{
    if (dims->activation == BL_SWIGLU)
        return bl_swiglu_forward(
            stream,
            &(bl_swiglu_forward_args){
                .T = T, .I = dims->inter, .gate_up = gate_up, .h = h, .quantized = quantized});
    return bl_gelu_forward(
        stream,
        &(bl_gelu_forward_args){.n = T * dims->inter, .form = form_of(dims), .u = gate_up, .h = h});
}

/* gate_up = its gradient, dh being that of h */
static bl_status activate_backward(bl_stream *stream, const bl_block_dims *dims, int64_t T,
                                   bl_tensor dh, bl_tensor gate_up)
{
    if (dims->activation == BL_SWIGLU)
        return bl_swiglu_backward(
            stream,
            &(bl_swiglu_backward_args){
                .T = T, .I = dims->inter, .gate_up = gate_up, .dh = dh, .d_gate_up = gate_up});
    return bl_gelu_backward(
        stream,
        &(bl_gelu_backward_args){
            .n = T * dims->inter, .form = form_of(dims), .u = gate_up, .dh = dh, .du = gate_up});
}

/* out = mid + down(h); out may be mid's memory only if mid is not read again */
static bl_status compute_out(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                             const bl_block_workspace *ws, const bl_block_tensors *t, bl_tensor out)
{
    bl_quantized quantized = operand_of(stream, block, BL_MLP_DOWN, batch, ws);

    BL_TRY(activate(stream, block->dims, batch->T, t->gate_up, ws->h, quantized));
    return add_branch(stream, block, BL_MLP_DOWN, block->dims->mlp_norm, batch, ws, ws->h, t->mid,
                      out);
}

bl_status bl_block_forward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                           const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                           bl_tensor out)
{
    bl_block_tensors t = bl_block_effective_tensors(tensors, workspace);

    BL_TRY(compute_qkv(stream, block, batch, 0, workspace, &t));
    BL_TRY(compute_qk(stream, block, batch, 0, workspace, &t));
    BL_TRY(compute_attention(stream, block, batch, workspace, &t));
    BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    return compute_out(stream, block, batch, workspace, &t, out);
}

/* ws->d_norm = the gradient of the MLP's normed input */
static bl_status backward_mlp(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                              const bl_block_workspace *ws, const bl_block_tensors *t, bl_tensor d,
                              float *gradients)
{
    const bl_block_dims *dims = block->dims;
    bl_quantized none = {0}, quantized = none;
    bl_tensor dy, in;

    /* Only norms of outputs need the product with W_down again. */
    if (dims->has_post_norms) quantized = operand_of(stream, block, BL_MLP_DOWN, batch, ws);
    BL_TRY(activate(stream, dims, batch->T, t->gate_up, ws->h, quantized));
    BL_TRY(branch_gradient(stream, block, BL_MLP_DOWN, dims->mlp_norm, batch, ws, ws->h, d, &dy));
    BL_TRY(linear_backward(stream, block, BL_MLP_DOWN, batch, ws, gradients, ws->h, dy, ws->dh));
    BL_TRY(activate_backward(stream, dims, batch->T, ws->dh, t->gate_up));
    BL_TRY(
        branch_input(stream, block, batch->T, dims->mlp_norm, mlp_input(dims, t), ws, none, &in));
    return linear_backward(stream, block, BL_GATE_UP, batch, ws, gradients, in, t->gate_up,
                           ws->d_norm);
}

/* ws->d_attention = the gradient of attention's output */
static bl_status backward_out(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                              const bl_block_workspace *ws, const bl_block_tensors *t, bl_tensor d,
                              float *gradients)
{
    bl_tensor dy;

    BL_TRY(
        branch_gradient(stream, block, BL_OUT, BL_ATTENTION_NORM, batch, ws, t->attention, d, &dy));
    return linear_backward(stream, block, BL_OUT, batch, ws, gradients, t->attention, dy,
                           ws->d_attention);
}

/* ws->d_qkv = the gradients of q and k as attention reads them, and of v */
static bl_status attention_backward(bl_stream *stream, const bl_block *block,
                                    const bl_micro_batch *batch, const bl_block_workspace *ws,
                                    const bl_block_tensors *t)
{
    const bl_block_dims *dims = block->dims;
    bl_tensor qk = qk_of(dims, ws, t);

    for (int64_t i = 0; i < dims->n_groups; i++) {
        head_group g = group_of(dims, i);
        bl_attention_backward_args args = {.T = batch->T,
                                           .n_heads = g.n_heads,
                                           .n_kv_heads = g.n_kv_heads,
                                           .d = dims->head_dim,
                                           .n_documents = batch->n_documents,
                                           .window = window_of(block),
                                           .q_stride = dims->qkv_width,
                                           .kv_stride = dims->qkv_width,
                                           .o_stride = dims->q_width,
                                           .cu_seqlens = batch->cu_seqlens,
                                           .q = bl_tensor_at(qk, g.q),
                                           .k = bl_tensor_at(qk, g.k),
                                           .v = bl_tensor_at(t->qkv, g.v),
                                           .o = bl_tensor_at(t->attention, g.out),
                                           .lse = rows_of(t->lse, batch->T, dims, &g),
                                           .do_ = bl_tensor_at(ws->d_attention, g.out),
                                           .dq = bl_tensor_at(ws->d_qkv, g.q),
                                           .dk = bl_tensor_at(ws->d_qkv, g.k),
                                           .dv = bl_tensor_at(ws->d_qkv, g.v),
                                           .delta = rows_of(ws->delta, batch->T, dims, &g)};
        BL_TRY(bl_attention_backward(stream, &args));
    }
    return BL_OK;
}

static bl_status backward_qkv(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                              const bl_block_workspace *ws, const bl_block_tensors *t, bl_tensor d,
                              float *gradients)
{
    const bl_block_dims *dims = block->dims;
    bl_tensor in;

    BL_TRY(attention_backward(stream, block, batch, ws, t));
    BL_TRY(rotate(stream, dims, batch, 0, -1, ws->d_qkv));
    if (dims->q_norm_width > 0) {
        BL_TRY(arch_norm_heads_backward(stream, block, batch->T, BL_Q_NORM, t->qkv, ws, ws->d_qkv));
        BL_TRY(arch_norm_heads_backward(stream, block, batch->T, BL_K_NORM, t->qkv, ws, ws->d_qkv));
    }
    BL_TRY(
        branch_input(stream, block, batch->T, BL_ATTENTION_NORM, t->x, ws, (bl_quantized){0}, &in));
    bool ends_here = arch_ends_at_qkv(block);
    BL_TRY(linear_backward(stream, block, BL_QKV, batch, ws, gradients, in, ws->d_qkv,
                           ends_here ? (bl_tensor){0} : ws->d_norm));
    if (ends_here) return BL_OK;
    return branch_input_backward(stream, block, batch->T, BL_ATTENTION_NORM, t->x, ws, d);
}

bl_status bl_block_backward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                            const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                            bl_tensor d, float *gradients)
{
    bl_block_tensors t = bl_block_effective_tensors(tensors, workspace);
    bool is_parallel = block->dims->is_parallel;
    bl_layer_vector mlp_norm = block->dims->mlp_norm;

    if (!bl_tensor_is_there(tensors->qkv))
        BL_TRY(compute_qkv(stream, block, batch, 0, workspace, &t));
    BL_TRY(compute_qk(stream, block, batch, 0, workspace, &t));
    if (!bl_tensor_is_there(tensors->attention)) {
        BL_TRY(compute_attention(stream, block, batch, workspace, &t));
        if (!is_parallel) BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    }
    if (!bl_tensor_is_there(tensors->gate_up))
        BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    BL_TRY(backward_mlp(stream, block, batch, workspace, &t, d, gradients));
    /* d is the gradient of attention's output as it is in a parallel layer, else with the MLP's. */
    if (!is_parallel)
        BL_TRY(branch_input_backward(stream, block, batch->T, mlp_norm, t.mid, workspace, d));
    if (arch_ends_at_mlp(block)) return BL_OK;
    BL_TRY(backward_out(stream, block, batch, workspace, &t, d, gradients));
    if (is_parallel)
        BL_TRY(branch_input_backward(stream, block, batch->T, mlp_norm, t.x, workspace, d));
    return backward_qkv(stream, block, batch, workspace, &t, d, gradients);
}

/* The new keys or values of a group, columns from `column` on of `from`, to its columns of a
 * cache. */
static bl_status append_rows(bl_stream *stream, const bl_block_dims *dims, int64_t T,
                             const head_group *g, bl_tensor from, int64_t column, bl_tensor cache)
{
    return bl_stream_copy_rows(
        stream, &(bl_row_copy){.dst = bl_tensor_at(cache, g->key).data,
                               .src = bl_tensor_at(from, column).data,
                               .dst_stride = bl_tensor_bytes(cache, dims->kv_width),
                               .src_stride = bl_tensor_bytes(from, dims->qkv_width),
                               .row_bytes = bl_tensor_bytes(cache, g->n_kv_heads * dims->head_dim),
                               .n_rows = (size_t)T});
}

/* Keys and values of the new tokens to the caches; attention over these. */
static bl_status extend_attention(bl_stream *stream, const bl_block *block,
                                  const bl_micro_batch *batch, int64_t n_past, bl_tensor k_cache,
                                  bl_tensor v_cache, const bl_block_workspace *ws,
                                  const bl_block_tensors *t)
{
    const bl_block_dims *dims = block->dims;
    bl_tensor qk = qk_of(dims, ws, t);
    int64_t next = n_past * dims->kv_width;

    for (int64_t i = 0; i < dims->n_groups; i++) {
        head_group g = group_of(dims, i);
        bl_attention_forward_args args = {.T = batch->T,
                                          .n_heads = g.n_heads,
                                          .n_kv_heads = g.n_kv_heads,
                                          .d = dims->head_dim,
                                          .n_documents = 1,
                                          .position_offset = n_past,
                                          .window = window_of(block),
                                          .q_stride = dims->qkv_width,
                                          .kv_stride = dims->kv_width,
                                          .o_stride = dims->q_width,
                                          .cu_seqlens = batch->cu_seqlens,
                                          .q = bl_tensor_at(qk, g.q),
                                          .k = bl_tensor_at(k_cache, g.key),
                                          .v = bl_tensor_at(v_cache, g.key),
                                          .o = bl_tensor_at(t->attention, g.out)};
        BL_TRY(append_rows(stream, dims, batch->T, &g, qk, g.k, bl_tensor_at(k_cache, next)));
        BL_TRY(append_rows(stream, dims, batch->T, &g, t->qkv, g.v, bl_tensor_at(v_cache, next)));
        BL_TRY(bl_attention_forward(stream, &args));
    }
    return BL_OK;
}

bl_status bl_block_extend(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                          int64_t n_past, bl_tensor k_cache, bl_tensor v_cache,
                          const bl_block_workspace *workspace, bl_tensor x)
{
    bl_block_tensors t = bl_block_effective_tensors(&(bl_block_tensors){.x = x}, workspace);

    BL_TRY(compute_qkv(stream, block, batch, n_past, workspace, &t));
    BL_TRY(compute_qk(stream, block, batch, n_past, workspace, &t));
    BL_TRY(extend_attention(stream, block, batch, n_past, k_cache, v_cache, workspace, &t));
    BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    return compute_out(stream, block, batch, workspace, &t, x);
}
