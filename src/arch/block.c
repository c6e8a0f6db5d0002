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

/* What all functions of a pass over one layer share. */
typedef struct block_call {
    bl_stream *stream;
    const bl_block *block;
    const bl_block_dims *dims; /* block->dims */
    const bl_micro_batch *batch;
    const bl_block_workspace *ws;
    bl_block_tensors t;      /* those that are not saved are in ws */
    int64_t position_offset; /* tokens before the batch's */
    float *gradients;        /* of LoRA weights, of backward products; NULL: not computed */
} block_call;

static block_call call_of(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                          const bl_block_tensors *tensors, const bl_block_workspace *ws)
{
    return (block_call){.stream = stream,
                        .block = block,
                        .dims = block->dims,
                        .batch = batch,
                        .ws = ws,
                        .t = bl_block_effective_tensors(tensors, ws)};
}

static bl_linear_use use_matrix(const block_call *c, bl_layer_matrix matrix, float *gradients)
{
    return arch_use_matrix(c->block, c->batch, c->ws, matrix, gradients);
}

/* Where the op that makes the input of `matrix` leaves it in E4M3, too, for the forward product
 * that comes next; none where it does not. */
static bl_quantized operand_of(const block_call *c, bl_layer_matrix matrix)
{
    bl_linear_use use = use_matrix(c, matrix, NULL);
    if (!bl_block_quantizes_input(c->dims, matrix) || c->dims->matrix[matrix].rows == 0)
        return (bl_quantized){0};
    return bl_linear_operand(c->stream, &use, c->batch->T, c->dims->act);
}

/* residual: added to y; may be none, and is where there is a bias. */
static bl_status linear_forward(const block_call *c, bl_layer_matrix matrix, bl_tensor x,
                                bl_tensor residual, bl_tensor y)
{
    bl_linear_use use = use_matrix(c, matrix, NULL);

    use.lora.residual = residual;
    use.lora.is_quantized = operand_of(c, matrix).codes != NULL;
    BL_TRY(bl_linear_apply(c->stream, &use, c->batch->T, x, y));
    if (c->dims->bias_offset[matrix] < 0) return BL_OK;
    return bl_add_bias(c->stream,
                       &(bl_add_bias_args){.T = c->batch->T,
                                           .N = c->dims->matrix[matrix].rows,
                                           .bias = c->block->vectors + c->dims->bias_offset[matrix],
                                           .y = y});
}

static bl_status linear_backward(const block_call *c, bl_layer_matrix matrix, bl_tensor x,
                                 bl_tensor dy, bl_tensor dx)
{
    bl_linear_use use = use_matrix(c, matrix, c->gradients);

    BL_TRY(bl_linear_pull_back(c->stream, &use, c->batch->T, x, dy, dx));
    return arch_add_matrix_gradient(c->stream, c->block, matrix, c->batch->T, x, dy, c->ws);
}

/* `norm` of x: its statistics are in ws between norm_forward and norm_backward. */
static bl_block_norm norm_of(const block_call *c, bl_layer_vector norm, bl_tensor x)
{
    const float *w = c->block->vectors + c->dims->vector_offset[norm];
    return (bl_block_norm){
        .T = c->batch->T, .w = w, .x = x, .rstd = c->ws->rstd, .mean = c->ws->mean};
}

/* ws->norm = norm of x, also in E4M3 where `quantized` is */
static bl_status norm_forward(const block_call *c, bl_layer_vector norm, bl_tensor x,
                              bl_quantized quantized)
{
    bl_block_norm n = norm_of(c, norm, x);
    n.quantized = quantized;
    return bl_block_norm_forward(c->stream, c->dims, &n, c->ws->norm);
}

/* *in = what a sub-layer's first matrix reads: norm of x, or x itself where outputs are normed. */
static bl_status branch_input(const block_call *c, bl_layer_vector norm, bl_tensor x,
                              bl_quantized quantized, bl_tensor *in)
{
    *in = c->dims->has_post_norms ? x : c->ws->norm;
    if (c->dims->has_post_norms) return BL_OK;
    return norm_forward(c, norm, x, quantized);
}

/* d += gradient of x through what branch_input did, the gradient of *in being ws->d_norm, and its
 * norm the last that norm_forward computed */
static bl_status branch_input_backward(const block_call *c, bl_layer_vector norm, bl_tensor x,
                                       bl_tensor d)
{
    bl_block_norm n = norm_of(c, norm, x);

    if (c->dims->has_post_norms)
        return bl_add(
            c->stream,
            &(bl_add_args){.n = c->batch->T * c->dims->hidden, .a = d, .b = c->ws->d_norm, .y = d});
    BL_TRY(arch_add_norm_gradient(c->stream, c->block, norm, &n, c->ws->d_norm));
    return bl_block_norm_backward(c->stream, c->dims, &n, true, c->ws->d_norm, d);
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
static bl_status rotate_heads(const block_call *c, int direction, bool is_query, int64_t n_heads,
                              int64_t column, bl_tensor qkv)
{
    const bl_block_rope *rope = &c->dims->rope;
    return bl_rope(c->stream,
                   &(bl_rope_args){.T = c->batch->T,
                                   .n_heads = n_heads,
                                   .d = c->dims->head_dim,
                                   .row_stride = c->dims->qkv_width,
                                   .n_documents = c->batch->n_documents,
                                   .position_offset = c->position_offset,
                                   .direction = direction,
                                   .cu_seqlens = c->batch->cu_seqlens,
                                   .cos_table = is_query ? rope->query_cos_table : rope->cos_table,
                                   .sin_table = is_query ? rope->query_sin_table : rope->sin_table,
                                   .x = bl_tensor_at(qkv, column),
                                   .long_after = rope->long_after,
                                   .long_offset = rope->long_offset,
                                   .d_rotated = c->dims->rotary_dim});
}

/* q and k are neighbors in a group: one call rotates both, unless q has separate tables. */
static bl_status rotate(const block_call *c, int direction, bl_tensor qkv)
{
    bool is_apart = c->dims->rope.query_cos_table != NULL;

    for (int64_t i = 0; i < c->dims->n_groups; i++) {
        head_group g = group_of(c->dims, i);
        BL_TRY(rotate_heads(c, direction, is_apart, is_apart ? g.n_heads : g.n_heads + g.n_kv_heads,
                            g.q, qkv));
        if (is_apart) BL_TRY(rotate_heads(c, direction, false, g.n_kv_heads, g.k, qkv));
    }
    return BL_OK;
}

static bl_status compute_qkv(const block_call *c)
{
    bl_quantized quantized = operand_of(c, BL_QKV);
    bl_tensor in;

    BL_TRY(branch_input(c, BL_ATTENTION_NORM, c->t.x, quantized, &in));
    BL_TRY(linear_forward(c, BL_QKV, in, (bl_tensor){0}, c->t.qkv));
    if (c->dims->q_norm_width > 0) return BL_OK; /* compute_qk rotates */
    return rotate(c, +1, c->t.qkv);
}

/* q and k as attention reads them, from qkv as compute_qkv leaves it: its norms of heads, like all
 * norms, are always recomputed. */
static bl_status compute_qk(const block_call *c)
{
    if (c->dims->q_norm_width == 0) return BL_OK;
    BL_TRY(arch_norm_heads(c->stream, c->block, c->batch->T, BL_Q_NORM, c->t.qkv, c->ws));
    BL_TRY(arch_norm_heads(c->stream, c->block, c->batch->T, BL_K_NORM, c->t.qkv, c->ws));
    return rotate(c, +1, c->ws->qk);
}

/* The results of compute_qk; v is in qkv. */
static bl_tensor qk_of(const block_call *c)
{
    return c->dims->q_norm_width > 0 ? c->ws->qk : c->t.qkv;
}

static int64_t window_of(const block_call *c)
{
    return bl_windows_of_layer(&c->dims->windows, c->block->layer);
}

/* A group's sinks; NULL: there are none. */
static const float *sinks_of(const block_call *c, const head_group *g)
{
    if (!c->dims->has_sinks) return NULL;
    return c->block->vectors + c->dims->vector_offset[BL_SINKS] + g->out / c->dims->head_dim;
}

/* A group's rows of the log-sum-exps, or of another array (T, n_heads) that is kept by groups. */
static float *rows_of(const block_call *c, float *lse, const head_group *g)
{
    return lse ? lse + c->batch->T * (g->out / c->dims->head_dim) : NULL;
}

/* Attention of a group over the keys and values of the call's tokens. */
static bl_attention_forward_args attention_of(const block_call *c, const head_group *g)
{
    bl_tensor qk = qk_of(c);
    return (bl_attention_forward_args){.T = c->batch->T,
                                       .n_heads = g->n_heads,
                                       .n_kv_heads = g->n_kv_heads,
                                       .d = c->dims->head_dim,
                                       .n_documents = c->batch->n_documents,
                                       .window = window_of(c),
                                       .q_stride = c->dims->qkv_width,
                                       .kv_stride = c->dims->qkv_width,
                                       .o_stride = c->dims->q_width,
                                       .cu_seqlens = c->batch->cu_seqlens,
                                       .q = bl_tensor_at(qk, g->q),
                                       .k = bl_tensor_at(qk, g->k),
                                       .v = bl_tensor_at(c->t.qkv, g->v),
                                       .o = bl_tensor_at(c->t.attention, g->out),
                                       .lse = rows_of(c, c->t.lse, g),
                                       .sinks = sinks_of(c, g)};
}

static bl_status compute_attention(const block_call *c)
{
    for (int64_t i = 0; i < c->dims->n_groups; i++) {
        head_group g = group_of(c->dims, i);
        bl_attention_forward_args args = attention_of(c, &g);
        BL_TRY(bl_attention_forward(c->stream, &args));
    }
    return BL_OK;
}

/* y = the sub-layer's x times the residual multiplier, if there is one; y may be x. */
static bl_status scale_branch(const block_call *c, bl_tensor x, bl_tensor y)
{
    return bl_scale(c->stream, &(bl_scale_args){.n = c->batch->T * c->dims->hidden,
                                                .scale = c->dims->residual_multiplier,
                                                .x = x,
                                                .y = y});
}

/* y = x + y as the sub-layer's last product left it, or its norm with norms of outputs */
static bl_status join_branch(const block_call *c, bl_layer_vector norm, bl_tensor x, bl_tensor y)
{
    bool is_normed = c->dims->has_post_norms;

    if (is_normed) BL_TRY(norm_forward(c, norm, y, (bl_quantized){0}));
    if (c->dims->residual_multiplier > 0) BL_TRY(scale_branch(c, y, y));
    return bl_add(c->stream, &(bl_add_args){.n = c->batch->T * c->dims->hidden,
                                            .a = x,
                                            .b = is_normed ? c->ws->norm : y,
                                            .y = y});
}

/* y = x + the last matrix of the sub-layer times `input`; x + its norm with norms of outputs.
 * Where nothing comes between, the product adds x itself. */
static bl_status add_branch(const block_call *c, bl_layer_matrix matrix, bl_layer_vector norm,
                            bl_tensor input, bl_tensor x, bl_tensor y)
{
    if (bl_block_adds_in_product(c->dims, matrix)) return linear_forward(c, matrix, input, x, y);
    BL_TRY(linear_forward(c, matrix, input, (bl_tensor){0}, y));
    return join_branch(c, norm, x, y);
}

/* *dy = the gradient of matrix' output for its input, d being that of the sum: d, or in ws->norm.
 * With norms of outputs, these are computed again. */
static bl_status branch_gradient(const block_call *c, bl_layer_matrix matrix, bl_layer_vector norm,
                                 bl_tensor input, bl_tensor d, bl_tensor *dy)
{
    *dy = c->dims->residual_multiplier > 0 || c->dims->has_post_norms ? c->ws->norm : d;
    if (c->dims->has_post_norms) {
        bl_block_norm n = norm_of(c, norm, c->ws->d_norm);
        BL_TRY(linear_forward(c, matrix, input, (bl_tensor){0}, c->ws->d_norm));
        BL_TRY(bl_block_norm_forward(c->stream, c->dims, &n, c->ws->norm));
        BL_TRY(arch_add_norm_gradient(c->stream, c->block, norm, &n, d));
        return bl_block_norm_backward(c->stream, c->dims, &n, false, d, *dy);
    }
    return c->dims->residual_multiplier > 0 ? scale_branch(c, d, *dy) : BL_OK;
}

/* mid = x + o(attention) */
static bl_status compute_mid(const block_call *c)
{
    return add_branch(c, BL_OUT, BL_ATTENTION_NORM, c->t.attention, c->t.x, c->t.mid);
}

static bl_tensor mlp_input(const block_call *c)
{
    return c->dims->is_parallel ? c->t.x : c->t.mid;
}

static bl_status compute_gate_up(const block_call *c)
{
    bl_quantized quantized = operand_of(c, BL_GATE_UP);
    bl_tensor in;

    BL_TRY(branch_input(c, c->dims->mlp_norm, mlp_input(c), quantized, &in));
    return linear_forward(c, BL_GATE_UP, in, (bl_tensor){0}, c->t.gate_up);
}

/* out = mid + down(h); out may be mid's memory only if mid is not read again */
static bl_status compute_out(const block_call *c, bl_tensor out)
{
    bl_quantized quantized = operand_of(c, BL_MLP_DOWN);

    BL_TRY(arch_activate(c->stream, c->dims, c->dims->inter, c->batch->T, (bl_row_range){0},
                         c->t.gate_up, c->ws->h, quantized));
    return add_branch(c, BL_MLP_DOWN, c->dims->mlp_norm, c->ws->h, c->t.mid, out);
}

/* ---- the layer ---- */

/* out of mid; of routed experts their routing alone */
static bl_status forward_mlp(const block_call *c, bl_tensor out)
{
    if (c->dims->n_experts > 0)
        BL_TRY(arch_experts_route(c->stream, c->block, c->batch->T, c->ws, c->t.mid));
    if (c->dims->inter == 0) return BL_OK;
    BL_TRY(compute_gate_up(c));
    return compute_out(c, out);
}

bl_status bl_block_forward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                           const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                           bl_tensor out)
{
    block_call call = call_of(stream, block, batch, tensors, workspace);
    const block_call *c = &call;

    BL_TRY(compute_qkv(c));
    BL_TRY(compute_qk(c));
    BL_TRY(compute_attention(c));
    BL_TRY(compute_mid(c));
    return forward_mlp(c, out);
}

/* dx = the gradient of the MLP's normed input */
static bl_status backward_mlp(const block_call *c, bl_tensor d, bl_tensor dx)
{
    bl_quantized none = {0}, quantized = none;
    bl_tensor dy, in;

    /* Only norms of outputs need the product with W_down again. */
    if (c->dims->has_post_norms) quantized = operand_of(c, BL_MLP_DOWN);
    BL_TRY(arch_activate(c->stream, c->dims, c->dims->inter, c->batch->T, (bl_row_range){0},
                         c->t.gate_up, c->ws->h, quantized));
    BL_TRY(branch_gradient(c, BL_MLP_DOWN, c->dims->mlp_norm, c->ws->h, d, &dy));
    BL_TRY(linear_backward(c, BL_MLP_DOWN, c->ws->h, dy, c->ws->dh));
    BL_TRY(arch_activate_backward(c->stream, c->dims, c->dims->inter, c->batch->T,
                                  (bl_row_range){0}, c->ws->dh, c->t.gate_up));
    BL_TRY(branch_input(c, c->dims->mlp_norm, mlp_input(c), none, &in));
    return linear_backward(c, BL_GATE_UP, in, c->t.gate_up, dx);
}

/* ws->d_attention = the gradient of attention's output */
static bl_status backward_out(const block_call *c, bl_tensor d)
{
    bl_tensor dy;

    BL_TRY(branch_gradient(c, BL_OUT, BL_ATTENTION_NORM, c->t.attention, d, &dy));
    return linear_backward(c, BL_OUT, c->t.attention, dy, c->ws->d_attention);
}

/* ws->d_qkv = the gradients of q and k as attention reads them, and of v */
static bl_status attention_backward(const block_call *c)
{
    bl_tensor qk = qk_of(c);

    for (int64_t i = 0; i < c->dims->n_groups; i++) {
        head_group g = group_of(c->dims, i);
        bl_attention_backward_args args = {.T = c->batch->T,
                                           .n_heads = g.n_heads,
                                           .n_kv_heads = g.n_kv_heads,
                                           .d = c->dims->head_dim,
                                           .n_documents = c->batch->n_documents,
                                           .window = window_of(c),
                                           .q_stride = c->dims->qkv_width,
                                           .kv_stride = c->dims->qkv_width,
                                           .o_stride = c->dims->q_width,
                                           .cu_seqlens = c->batch->cu_seqlens,
                                           .q = bl_tensor_at(qk, g.q),
                                           .k = bl_tensor_at(qk, g.k),
                                           .v = bl_tensor_at(c->t.qkv, g.v),
                                           .o = bl_tensor_at(c->t.attention, g.out),
                                           .lse = rows_of(c, c->t.lse, &g),
                                           .do_ = bl_tensor_at(c->ws->d_attention, g.out),
                                           .dq = bl_tensor_at(c->ws->d_qkv, g.q),
                                           .dk = bl_tensor_at(c->ws->d_qkv, g.k),
                                           .dv = bl_tensor_at(c->ws->d_qkv, g.v),
                                           .delta = rows_of(c, c->ws->delta, &g)};
        BL_TRY(bl_attention_backward(c->stream, &args));
    }
    return BL_OK;
}

static bl_status backward_qkv(const block_call *c, bl_tensor d)
{
    bl_tensor in;

    BL_TRY(attention_backward(c));
    BL_TRY(rotate(c, -1, c->ws->d_qkv));
    if (c->dims->q_norm_width > 0) {
        BL_TRY(arch_norm_heads_backward(c->stream, c->block, c->batch->T, BL_Q_NORM, c->t.qkv,
                                        c->ws, c->ws->d_qkv));
        BL_TRY(arch_norm_heads_backward(c->stream, c->block, c->batch->T, BL_K_NORM, c->t.qkv,
                                        c->ws, c->ws->d_qkv));
    }
    BL_TRY(branch_input(c, BL_ATTENTION_NORM, c->t.x, (bl_quantized){0}, &in));
    bool ends_here = arch_ends_at_qkv(c->block);
    BL_TRY(
        linear_backward(c, BL_QKV, in, c->ws->d_qkv, ends_here ? (bl_tensor){0} : c->ws->d_norm));
    if (ends_here) return BL_OK;
    return branch_input_backward(c, BL_ATTENTION_NORM, c->t.x, d);
}

/* What forward computed up to mid, where it was not kept. */
static bl_status recompute(const block_call *c, const bl_block_tensors *tensors)
{
    if (!bl_tensor_is_there(tensors->qkv)) BL_TRY(compute_qkv(c));
    BL_TRY(compute_qk(c));
    if (bl_tensor_is_there(tensors->attention)) return BL_OK;
    BL_TRY(compute_attention(c));
    return c->dims->is_parallel ? BL_OK : compute_mid(c);
}

bl_status bl_block_backward_begin(bl_stream *stream, const bl_block *block,
                                  const bl_micro_batch *batch, const bl_block_tensors *tensors,
                                  const bl_block_workspace *workspace)
{
    block_call c = call_of(stream, block, batch, tensors, workspace);

    if (block->dims->n_experts == 0) return BL_OK;
    BL_TRY(recompute(&c, tensors));
    return arch_experts_route(stream, block, batch->T, workspace, c.t.mid);
}

/* ws->d_norm += the gradient through a shared expert, for which ws->rows is free */
static bl_status add_shared(const block_call *c, const bl_block_tensors *tensors, bl_tensor d)
{
    if (c->dims->inter == 0) return BL_OK;
    if (!bl_tensor_is_there(tensors->gate_up)) BL_TRY(compute_gate_up(c));
    BL_TRY(backward_mlp(c, d, c->ws->rows));
    return bl_add(c->stream, &(bl_add_args){.n = c->batch->T * c->dims->hidden,
                                            .a = c->ws->d_norm,
                                            .b = c->ws->rows,
                                            .y = c->ws->d_norm});
}

/* ws->d_norm of what backward_group left there; and what other micro-batches have overwritten. */
static bl_status end_experts(const block_call *c, const bl_block_tensors *tensors, bl_tensor d)
{
    BL_TRY(arch_experts_route_backward(c->stream, c->block, c->batch->T, c->ws, c->ws->d_norm));
    BL_TRY(add_shared(c, tensors, d));
    BL_TRY(norm_forward(c, c->dims->mlp_norm, c->t.mid, (bl_quantized){0}));
    return compute_qk(c);
}

/* ws->d_norm of all: the last product is that with W_gate_up. */
static bl_status begin_backward(const block_call *c, const bl_block_tensors *tensors, bl_tensor d)
{
    if (c->dims->n_experts > 0) return end_experts(c, tensors, d);
    BL_TRY(recompute(c, tensors));
    if (!bl_tensor_is_there(tensors->gate_up)) BL_TRY(compute_gate_up(c));
    return backward_mlp(c, d, c->ws->d_norm);
}

bl_status bl_block_backward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                            const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                            bl_tensor d, float *gradients)
{
    block_call call = call_of(stream, block, batch, tensors, workspace);
    const block_call *c = &call;
    bool is_parallel = block->dims->is_parallel;
    bl_layer_vector mlp_norm = block->dims->mlp_norm;

    call.gradients = gradients;
    BL_TRY(begin_backward(c, tensors, d));
    /* d is the gradient of attention's output as it is in a parallel layer, else with the MLP's. */
    if (!is_parallel) BL_TRY(branch_input_backward(c, mlp_norm, c->t.mid, d));
    if (arch_ends_at_mlp(block)) return BL_OK;
    BL_TRY(backward_out(c, d));
    if (is_parallel) BL_TRY(branch_input_backward(c, mlp_norm, c->t.x, d));
    return backward_qkv(c, d);
}

/* The new keys or values of a group, columns from `column` on of `from`, to its columns of a
 * cache. */
static bl_status append_rows(const block_call *c, const head_group *g, bl_tensor from,
                             int64_t column, bl_tensor cache)
{
    return bl_stream_copy_rows(
        c->stream,
        &(bl_row_copy){.dst = bl_tensor_at(cache, g->key).data,
                       .src = bl_tensor_at(from, column).data,
                       .dst_stride = bl_tensor_bytes(cache, c->dims->kv_width),
                       .src_stride = bl_tensor_bytes(from, c->dims->qkv_width),
                       .row_bytes = bl_tensor_bytes(cache, g->n_kv_heads * c->dims->head_dim),
                       .n_rows = (size_t)c->batch->T});
}

/* Keys and values of the new tokens to the caches; attention over these. */
static bl_status extend_attention(const block_call *c, bl_tensor k_cache, bl_tensor v_cache)
{
    int64_t next = c->position_offset * c->dims->kv_width;

    for (int64_t i = 0; i < c->dims->n_groups; i++) {
        head_group g = group_of(c->dims, i);
        bl_attention_forward_args args = attention_of(c, &g);
        args.n_documents = 1;
        args.position_offset = c->position_offset;
        args.kv_stride = c->dims->kv_width;
        args.k = bl_tensor_at(k_cache, g.key);
        args.v = bl_tensor_at(v_cache, g.key);
        args.lse = NULL;
        BL_TRY(append_rows(c, &g, qk_of(c), g.k, bl_tensor_at(k_cache, next)));
        BL_TRY(append_rows(c, &g, c->t.qkv, g.v, bl_tensor_at(v_cache, next)));
        BL_TRY(bl_attention_forward(c->stream, &args));
    }
    return BL_OK;
}

bl_status bl_block_extend(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                          int64_t n_past, bl_tensor k_cache, bl_tensor v_cache,
                          const bl_block_workspace *workspace, bl_tensor x)
{
    block_call call = call_of(stream, block, batch, &(bl_block_tensors){.x = x}, workspace);
    const block_call *c = &call;

    call.position_offset = n_past;
    BL_TRY(compute_qkv(c));
    BL_TRY(compute_qk(c));
    BL_TRY(extend_attention(c, k_cache, v_cache));
    BL_TRY(compute_mid(c));
    return forward_mlp(c, x);
}
