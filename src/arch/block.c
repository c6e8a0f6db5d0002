/* SPDX-License-Identifier: Apache-2.0 */
/* block.c -- one decoder layer on one micro-batch: forward, backward, and forward over a cache.
 *
 * Forward, row-major, T tokens; W are frozen, each product has LoRA's term
 * (linear/lora_linear.h):
 *
 *   n1      = norm(x) w1                          norm(x) = x / sqrt(mean(x^2) + eps)
 *   q|k|v   = n1 W_qkv^T, q and k rotated         saved with BL_SAVE_QKV, rotated
 *   a, lse  = attention(q, k, v)                  saved with BL_SAVE_ATTENTION
 *   mid     = x + a W_out^T                       saved with BL_SAVE_ATTENTION
 *   n2      = norm(mid) w2
 *   g|u     = n2 W_gate_up^T                      saved with BL_SAVE_GATE_UP
 *   h       = silu(g) u
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
 * Each product with a matrix also yields the gradients of its LoRA weights, from the same input
 * and output gradient: that is why n1, n2 and h are needed again.
 *
 * Streams: everything is queued on the caller's stream, in this order. A product acquires its
 * matrix (bl_linear_apply), so the stream waits for a gather as late as possible; the visit
 * releases all of a layer's matrices together. Nothing here waits on the host or allocates.
 *
 * Memory: what is saved lies where the pass put it (bl_block_place_saved); the rest in one
 * workspace for all layers. There, buffers whose uses do not overlap are shared: da is in h,
 * dq|dk|dv in dh. Sizes come from the code that places (with no memory, `bump` only counts), so
 * they cannot differ.
 *
 * Families of models use these functions with other extents, matrices and vectors (arch/arch.h). */
#include "arch/block.h"

#include "base/sizes.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/rope.h"

enum { ALIGNMENT_BYTES = 256 }; /* where tensors begin */

bl_block_dims bl_block_dims_of(const bl_model_config *config, bl_device_kind kind)
{
    bl_block_dims dims = {.hidden = config->hidden_size,
                          .inter = config->intermediate_size,
                          .n_heads = config->n_heads,
                          .n_kv_heads = config->n_kv_heads,
                          .head_dim = config->head_dim,
                          .eps = config->rms_norm_eps,
                          .kind = kind,
                          .act = bl_act_dtype(kind)};
    dims.q_width = dims.n_heads * dims.head_dim;
    dims.kv_width = dims.n_kv_heads * dims.head_dim;
    dims.qkv_width = dims.q_width + 2 * dims.kv_width;
    for (int p = 0; p < config->arch->n_projections; p++) {
        int m = (int)config->arch->projections[p].matrix;
        int64_t rows;
        bl_projection_shape(config, p, &rows, &dims.matrix[m].cols);
        dims.matrix[m].rows += rows;
        dims.matrix[m].n_projections++;
    }
    for (int v = 0; v < BL_LAYER_VECTORS; v++)
        dims.vector_offset[v] = bl_arch_vector_offset(config, (bl_layer_vector)v);
    dims.vector_floats = bl_arch_layer_floats(config);
    return dims;
}

/* Hands out consecutive pieces of `memory`; with memory NULL only counts. */
typedef struct bump {
    char *memory;
    bl_dtype act; /* of tensors */
    int64_t used; /* bytes */
} bump;

static void *take_bytes(bump *from, int64_t n_bytes)
{
    char *piece = from->memory ? from->memory + from->used : NULL;
    from->used += bl_round_up(n_bytes, ALIGNMENT_BYTES);
    return piece;
}

static bl_tensor take(bump *from, int64_t n_elements)
{
    int64_t n_bytes = n_elements * (int64_t)bl_dtype_bytes(from->act);
    return bl_tensor_of(take_bytes(from, n_bytes), from->act);
}

static float *take_floats(bump *from, int64_t n_floats)
{
    return take_bytes(from, n_floats * (int64_t)sizeof(float));
}

static void place_tensors(const bl_block_dims *dims, unsigned which, int64_t T, bump *from,
                          bl_block_tensors *out)
{
    *out = (bl_block_tensors){0};
    if (which & BL_SAVE_ATTENTION) {
        out->mid = take(from, T * dims->hidden);
        out->attention = take(from, T * dims->q_width);
        out->lse = take_floats(from, T * dims->n_heads);
    }
    if (which & BL_SAVE_QKV) out->qkv = take(from, T * dims->qkv_width);
    if (which & BL_SAVE_GATE_UP) out->gate_up = take(from, T * 2 * dims->inter);
}

int64_t bl_block_rows(const bl_block_dims *dims, int64_t T)
{
    return bl_round_up(T, ALIGNMENT_BYTES / (int64_t)bl_dtype_bytes(dims->act));
}

int64_t bl_block_saved_bytes(const bl_block_dims *dims, unsigned save)
{
    bl_block_tensors unused;
    bump counter = {.act = dims->act};
    int64_t rows = bl_block_rows(dims, 1);
    place_tensors(dims, save, rows, &counter, &unused);
    return counter.used / rows;
}

void bl_block_place_saved(const bl_block_dims *dims, unsigned save, int64_t T_max, void *memory,
                          bl_block_tensors *tensors)
{
    bump from = {memory, dims->act, 0};
    place_tensors(dims, save, bl_block_rows(dims, T_max), &from, tensors);
}

/* One of the layer's matrices in any format, for sizes. */
static bl_weight matrix_of_format(const bl_block_dims *dims, int matrix, bl_format format)
{
    return (bl_weight){.rows = dims->matrix[matrix].rows,
                       .cols = dims->matrix[matrix].cols,
                       .n_segments = 1,
                       .segment = {{.format = format, .rows = dims->matrix[matrix].rows}}};
}

/* The formats that a matrix may have, which are not known here. */
static const bl_format any_format[] = {BL_FORMAT_BF16, BL_FORMAT_F32, BL_FORMAT_FP8_ROW,
                                       BL_FORMAT_FP8_BLOCK};

static size_t n_formats(const bl_block_dims *dims)
{
    return dims->is_dense ? 1 : BL_COUNT(any_format);
}

static size_t matrix_workspace_bytes(const bl_block_dims *dims, int matrix, int64_t T, int64_t r,
                                     bool dropout)
{
    bl_matmul_prepared prepared = {.memory_bytes = dims->prepared_bytes[matrix]};
    size_t most = 0;

    for (size_t f = 0; f < n_formats(dims); f++)
        for (int mode = BL_MATMUL_BF16; mode <= (int)dims->mode; mode++) {
            bl_lora_linear linear = {.weight = matrix_of_format(dims, matrix, any_format[f]),
                                     .n_parts = r > 0 ? dims->matrix[matrix].n_projections : 0,
                                     .is_stacked = true,
                                     .dropout = {.p = dropout ? 0.5f : 0.0f},
                                     .mode = (bl_matmul_mode)mode,
                                     .prepared = &prepared};
            for (int p = 0; p < linear.n_parts; p++) linear.part[p].r = r;
            size_t n_bytes = bl_lora_linear_workspace_bytes(dims->kind, &linear, T);
            if (n_bytes > most) most = n_bytes;
        }
    return most;
}

/* Of the layer's matrix that needs most. */
static size_t lora_workspace_bytes(const bl_block_dims *dims, int64_t T, int64_t r, bool dropout)
{
    size_t most = 0;

    for (int m = 0; m < BL_LAYER_MATRICES; m++) {
        size_t n_bytes = matrix_workspace_bytes(dims, m, T, r, dropout);
        if (n_bytes > most) most = n_bytes;
    }
    return most;
}

static int64_t place_workspace(const bl_block_dims *dims, int64_t T, int64_t r, bool dropout,
                               bool training, void *memory, bl_block_workspace *ws)
{
    bump from = {memory, dims->act, 0};

    *ws = (bl_block_workspace){0};
    place_tensors(dims, BL_SAVE_S4, T, &from, &ws->tensors);
    ws->norm = take(&from, T * dims->hidden);
    ws->rstd = take_floats(&from, T);
    ws->h = take(&from, T * (training ? bl_max_i64(dims->inter, dims->q_width) : dims->inter));
    ws->lora_bytes = lora_workspace_bytes(dims, T, r, dropout);
    ws->lora = take_bytes(&from, (int64_t)ws->lora_bytes);
    if (training) {
        ws->dh = take(&from, T * bl_max_i64(dims->inter, dims->qkv_width));
        ws->d_norm = take(&from, T * dims->hidden);
        ws->delta = take_floats(&from, T * dims->n_heads);
        ws->d_attention = ws->h; /* the MLP's backward is over when that of attention begins */
        ws->d_qkv = ws->dh;
    }
    return from.used;
}

int64_t bl_block_workspace_bytes(const bl_block_dims *dims, int64_t T_max, int64_t r, bool dropout,
                                 bool training)
{
    bl_block_workspace unused;
    return place_workspace(dims, T_max, r, dropout, training, NULL, &unused);
}

void bl_block_place_workspace(const bl_block_dims *dims, int64_t T_max, int64_t r, bool dropout,
                              bool training, void *memory, bl_block_workspace *workspace)
{
    place_workspace(dims, T_max, r, dropout, training, memory, workspace);
}

bl_block_tensors bl_block_effective_tensors(const bl_block_tensors *kept,
                                            const bl_block_workspace *ws)
{
    bl_block_tensors t = *kept;
    if (!bl_tensor_is_there(t.qkv)) t.qkv = ws->tensors.qkv;
    if (!bl_tensor_is_there(t.attention)) t.attention = ws->tensors.attention;
    if (!t.lse) t.lse = ws->tensors.lse;
    if (!bl_tensor_is_there(t.mid)) t.mid = ws->tensors.mid;
    if (!bl_tensor_is_there(t.gate_up)) t.gate_up = ws->tensors.gate_up;
    return t;
}

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
                 .workspace = ws->lora,
                 .workspace_bytes = ws->lora_bytes,
                 .dropout = block->dropout}};
    use.lora.dropout.sample = batch->sample;
    use.lora.dropout.position = batch->position;
    if (block->lora)
        bl_lora_layout_bind(block->lora, matrix, block->lora_weights, gradients, &use.lora);
    return use;
}

static bl_status linear_forward(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                const bl_micro_batch *batch, const bl_block_workspace *ws,
                                bl_tensor x, bl_tensor y)
{
    bl_linear_use use = use_matrix(block, matrix, batch, ws, NULL);
    return bl_linear_apply(stream, &use, batch->T, x, y);
}

static bl_status linear_backward(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                 const bl_micro_batch *batch, const bl_block_workspace *ws,
                                 float *gradients, bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    bl_linear_use use = use_matrix(block, matrix, batch, ws, gradients);
    return bl_linear_pull_back(stream, &use, batch->T, x, dy, dx);
}

/* ws->norm, ws->rstd = norm of x */
static bl_status norm_forward(bl_stream *stream, const bl_block *block, int64_t T,
                              bl_layer_vector norm, bl_tensor x, const bl_block_workspace *ws)
{
    const bl_block_dims *dims = block->dims;
    return bl_rmsnorm_forward(
        stream, &(bl_rmsnorm_forward_args){.T = T,
                                           .H = dims->hidden,
                                           .eps = dims->eps,
                                           .x = x,
                                           .w = block->vectors + dims->vector_offset[norm],
                                           .y = ws->norm,
                                           .rstd = ws->rstd});
}

/* d += gradient of x through the norm whose output has gradient ws->d_norm; ws->rstd is that of
 * norm_forward */
static bl_status norm_backward(bl_stream *stream, const bl_block *block, int64_t T,
                               bl_layer_vector norm, bl_tensor x, const bl_block_workspace *ws,
                               bl_tensor d)
{
    const bl_block_dims *dims = block->dims;
    return bl_rmsnorm_backward(
        stream, &(bl_rmsnorm_backward_args){.T = T,
                                            .H = dims->hidden,
                                            .accumulate = 1,
                                            .x = x,
                                            .w = block->vectors + dims->vector_offset[norm],
                                            .rstd = ws->rstd,
                                            .dy = ws->d_norm,
                                            .dx = d});
}

/* q and k are neighbors in a fused row: one call rotates both. */
static bl_status rotate(bl_stream *stream, const bl_block_dims *dims, const bl_micro_batch *batch,
                        int64_t position_offset, int direction, bl_tensor qkv)
{
    return bl_rope(stream, &(bl_rope_args){.T = batch->T,
                                           .n_heads = dims->n_heads + dims->n_kv_heads,
                                           .d = dims->head_dim,
                                           .row_stride = dims->qkv_width,
                                           .n_documents = batch->n_documents,
                                           .position_offset = position_offset,
                                           .direction = direction,
                                           .cu_seqlens = batch->cu_seqlens,
                                           .cos_table = dims->cos_table,
                                           .sin_table = dims->sin_table,
                                           .x = qkv});
}

static bl_status compute_qkv(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                             int64_t position_offset, const bl_block_workspace *ws,
                             const bl_block_tensors *t)
{
    BL_TRY(norm_forward(stream, block, batch->T, BL_ATTENTION_NORM, t->x, ws));
    BL_TRY(linear_forward(stream, block, BL_QKV, batch, ws, ws->norm, t->qkv));
    return rotate(stream, block->dims, batch, position_offset, +1, t->qkv);
}

static bl_status compute_attention(bl_stream *stream, const bl_block *block,
                                   const bl_micro_batch *batch, const bl_block_tensors *t)
{
    const bl_block_dims *dims = block->dims;
    return bl_attention_forward(
        stream,
        &(bl_attention_forward_args){.T = batch->T,
                                     .n_heads = dims->n_heads,
                                     .n_kv_heads = dims->n_kv_heads,
                                     .d = dims->head_dim,
                                     .n_documents = batch->n_documents,
                                     .q_stride = dims->qkv_width,
                                     .kv_stride = dims->qkv_width,
                                     .o_stride = dims->q_width,
                                     .cu_seqlens = batch->cu_seqlens,
                                     .q = t->qkv,
                                     .k = bl_tensor_at(t->qkv, dims->q_width),
                                     .v = bl_tensor_at(t->qkv, dims->q_width + dims->kv_width),
                                     .o = t->attention,
                                     .lse = t->lse});
}

/* mid = x + o(attention) */
static bl_status compute_mid(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                             const bl_block_workspace *ws, const bl_block_tensors *t)
{
    BL_TRY(linear_forward(stream, block, BL_OUT, batch, ws, t->attention, t->mid));
    return bl_add(
        stream,
        &(bl_add_args){.n = batch->T * block->dims->hidden, .a = t->x, .b = t->mid, .y = t->mid});
}

static bl_status compute_gate_up(bl_stream *stream, const bl_block *block,
                                 const bl_micro_batch *batch, const bl_block_workspace *ws,
                                 const bl_block_tensors *t)
{
    BL_TRY(norm_forward(stream, block, batch->T, BL_MLP_NORM, t->mid, ws));
    return linear_forward(stream, block, BL_GATE_UP, batch, ws, ws->norm, t->gate_up);
}

/* out = mid + down(h); out may be mid's own place only if nobody reads mid again */
static bl_status compute_out(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                             const bl_block_workspace *ws, const bl_block_tensors *t, bl_tensor out)
{
    BL_TRY(bl_swiglu_forward(
        stream, &(bl_swiglu_forward_args){
                    .T = batch->T, .I = block->dims->inter, .gate_up = t->gate_up, .h = ws->h}));
    BL_TRY(linear_forward(stream, block, BL_MLP_DOWN, batch, ws, ws->h, out));
    return bl_add(
        stream,
        &(bl_add_args){.n = batch->T * block->dims->hidden, .a = t->mid, .b = out, .y = out});
}

bl_status bl_block_forward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                           const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                           bl_tensor out)
{
    bl_block_tensors t = bl_block_effective_tensors(tensors, workspace);

    BL_TRY(compute_qkv(stream, block, batch, 0, workspace, &t));
    BL_TRY(compute_attention(stream, block, batch, &t));
    BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    return compute_out(stream, block, batch, workspace, &t, out);
}

static bl_status backward_mlp(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                              const bl_block_workspace *ws, const bl_block_tensors *t, bl_tensor d,
                              float *gradients)
{
    const bl_block_dims *dims = block->dims;

    BL_TRY(bl_swiglu_forward(
        stream, &(bl_swiglu_forward_args){
                    .T = batch->T, .I = dims->inter, .gate_up = t->gate_up, .h = ws->h}));
    BL_TRY(linear_backward(stream, block, BL_MLP_DOWN, batch, ws, gradients, ws->h, d, ws->dh));
    BL_TRY(bl_swiglu_backward(stream, &(bl_swiglu_backward_args){.T = batch->T,
                                                                 .I = dims->inter,
                                                                 .gate_up = t->gate_up,
                                                                 .dh = ws->dh,
                                                                 .d_gate_up = t->gate_up}));
    BL_TRY(norm_forward(stream, block, batch->T, BL_MLP_NORM, t->mid, ws));
    BL_TRY(linear_backward(stream, block, BL_GATE_UP, batch, ws, gradients, ws->norm, t->gate_up,
                           ws->d_norm));
    return norm_backward(stream, block, batch->T, BL_MLP_NORM, t->mid, ws, d);
}

static bl_status backward_attention(bl_stream *stream, const bl_block *block,
                                    const bl_micro_batch *batch, const bl_block_workspace *ws,
                                    const bl_block_tensors *t, bl_tensor d, float *gradients)
{
    const bl_block_dims *dims = block->dims;
    int64_t k = dims->q_width, v = dims->q_width + dims->kv_width;

    BL_TRY(linear_backward(stream, block, BL_OUT, batch, ws, gradients, t->attention, d,
                           ws->d_attention));
    BL_TRY(bl_attention_backward(stream,
                                 &(bl_attention_backward_args){.T = batch->T,
                                                               .n_heads = dims->n_heads,
                                                               .n_kv_heads = dims->n_kv_heads,
                                                               .d = dims->head_dim,
                                                               .n_documents = batch->n_documents,
                                                               .q_stride = dims->qkv_width,
                                                               .kv_stride = dims->qkv_width,
                                                               .o_stride = dims->q_width,
                                                               .cu_seqlens = batch->cu_seqlens,
                                                               .q = t->qkv,
                                                               .k = bl_tensor_at(t->qkv, k),
                                                               .v = bl_tensor_at(t->qkv, v),
                                                               .o = t->attention,
                                                               .lse = t->lse,
                                                               .do_ = ws->d_attention,
                                                               .dq = ws->d_qkv,
                                                               .dk = bl_tensor_at(ws->d_qkv, k),
                                                               .dv = bl_tensor_at(ws->d_qkv, v),
                                                               .delta = ws->delta}));
    BL_TRY(rotate(stream, dims, batch, 0, -1, ws->d_qkv));
    BL_TRY(norm_forward(stream, block, batch->T, BL_ATTENTION_NORM, t->x, ws));
    BL_TRY(linear_backward(stream, block, BL_QKV, batch, ws, gradients, ws->norm, ws->d_qkv,
                           ws->d_norm));
    return norm_backward(stream, block, batch->T, BL_ATTENTION_NORM, t->x, ws, d);
}

bl_status bl_block_backward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                            const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                            bl_tensor d, float *gradients)
{
    bl_block_tensors t = bl_block_effective_tensors(tensors, workspace);

    if (!bl_tensor_is_there(tensors->qkv))
        BL_TRY(compute_qkv(stream, block, batch, 0, workspace, &t));
    if (!bl_tensor_is_there(tensors->mid)) {
        BL_TRY(compute_attention(stream, block, batch, &t));
        BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    }
    if (!bl_tensor_is_there(tensors->gate_up))
        BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    BL_TRY(backward_mlp(stream, block, batch, workspace, &t, d, gradients));
    return backward_attention(stream, block, batch, workspace, &t, d, gradients);
}

/* T dense rows at dst from columns [column, column + width) of qkv. */
static bl_status append_rows(bl_stream *stream, const bl_block_dims *dims, int64_t T, bl_tensor qkv,
                             int64_t column, int64_t width, bl_tensor dst)
{
    return bl_stream_copy_rows(stream,
                               &(bl_row_copy){.dst = dst.data,
                                              .src = bl_tensor_at(qkv, column).data,
                                              .dst_stride = bl_tensor_bytes(dst, width),
                                              .src_stride = bl_tensor_bytes(qkv, dims->qkv_width),
                                              .row_bytes = bl_tensor_bytes(dst, width),
                                              .n_rows = (size_t)T});
}

bl_status bl_block_extend(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                          int64_t n_past, bl_tensor k_cache, bl_tensor v_cache,
                          const bl_block_workspace *workspace, bl_tensor x)
{
    const bl_block_dims *dims = block->dims;
    bl_block_tensors t = bl_block_effective_tensors(&(bl_block_tensors){.x = x}, workspace);
    int64_t T = batch->T, kv = dims->kv_width;

    BL_TRY(compute_qkv(stream, block, batch, n_past, workspace, &t));
    BL_TRY(
        append_rows(stream, dims, T, t.qkv, dims->q_width, kv, bl_tensor_at(k_cache, n_past * kv)));
    BL_TRY(append_rows(stream, dims, T, t.qkv, dims->q_width + kv, kv,
                       bl_tensor_at(v_cache, n_past * kv)));
    BL_TRY(
        bl_attention_forward(stream, &(bl_attention_forward_args){.T = T,
                                                                  .n_heads = dims->n_heads,
                                                                  .n_kv_heads = dims->n_kv_heads,
                                                                  .d = dims->head_dim,
                                                                  .n_documents = 1,
                                                                  .position_offset = n_past,
                                                                  .q_stride = dims->qkv_width,
                                                                  .kv_stride = kv,
                                                                  .o_stride = dims->q_width,
                                                                  .cu_seqlens = batch->cu_seqlens,
                                                                  .q = t.qkv,
                                                                  .k = k_cache,
                                                                  .v = v_cache,
                                                                  .o = t.attention}));
    BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    return compute_out(stream, block, batch, workspace, &t, x);
}
