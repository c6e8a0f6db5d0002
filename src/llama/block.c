/* SPDX-License-Identifier: Apache-2.0 */
#include "llama/block.h"

#include "base/sizes.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/rope.h"

enum { FLOAT_ALIGN = 64 }; /* tensors start on 256-byte boundaries */

bl_block_dims bl_block_dims_of(const bl_llama_config *config)
{
    bl_block_dims dims = {.hidden = config->hidden_size,
                          .inter = config->intermediate_size,
                          .n_heads = config->n_heads,
                          .n_kv_heads = config->n_kv_heads,
                          .head_dim = config->head_dim,
                          .eps = config->rms_norm_eps};
    dims.q_width = dims.n_heads * dims.head_dim;
    dims.kv_width = dims.n_kv_heads * dims.head_dim;
    dims.qkv_width = dims.q_width + 2 * dims.kv_width;
    return dims;
}

/* Hands out consecutive pieces of `memory`; with memory NULL only counts. */
typedef struct bump {
    float *memory;
    int64_t used;
} bump;

static float *take(bump *from, int64_t floats)
{
    float *piece = from->memory ? from->memory + from->used : NULL;
    from->used += bl_round_up(floats, FLOAT_ALIGN);
    return piece;
}

static void place_tensors(const bl_block_dims *dims, unsigned which, int64_t T, bump *from,
                          bl_block_tensors *out)
{
    *out = (bl_block_tensors){0};
    if (which & BL_SAVE_ATTENTION) {
        out->mid = take(from, T * dims->hidden);
        out->attention = take(from, T * dims->q_width);
        out->lse = take(from, T * dims->n_heads);
    }
    if (which & BL_SAVE_QKV) out->qkv = take(from, T * dims->qkv_width);
    if (which & BL_SAVE_GATE_UP) out->gate_up = take(from, T * 2 * dims->inter);
}

int64_t bl_block_saved_floats(const bl_block_dims *dims, unsigned save)
{
    bl_block_tensors unused;
    bump counter = {0};
    place_tensors(dims, save, FLOAT_ALIGN, &counter, &unused);
    return counter.used / FLOAT_ALIGN;
}

void bl_block_place_saved(const bl_block_dims *dims, unsigned save, int64_t T_max, float *memory,
                          bl_block_tensors *tensors)
{
    bump from = {memory, 0};
    place_tensors(dims, save, bl_round_up(T_max, FLOAT_ALIGN), &from, tensors);
}

static int64_t place_workspace(const bl_block_dims *dims, int64_t T, int64_t r, bool dropout,
                               bool training, float *memory, bl_block_workspace *ws)
{
    bump from = {memory, 0};
    int64_t widest = bl_max_i64(bl_max_i64(dims->hidden, dims->q_width), dims->inter);

    *ws = (bl_block_workspace){0};
    place_tensors(dims, BL_SAVE_S4, T, &from, &ws->tensors);
    ws->norm = take(&from, T * dims->hidden);
    ws->rstd = take(&from, T);
    ws->h = take(&from, T * (training ? bl_max_i64(dims->inter, dims->q_width) : dims->inter));
    ws->lora = take(&from, r > 0 ? bl_lora_linear_workspace_floats(T, widest, r, dropout) : 0);
    if (training) {
        ws->dh = take(&from, T * bl_max_i64(dims->inter, dims->qkv_width));
        ws->d_norm = take(&from, T * dims->hidden);
        ws->delta = take(&from, T * dims->n_heads);
        ws->d_attention = ws->h; /* the MLP's backward is over when that of attention begins */
        ws->d_qkv = ws->dh;
    }
    return from.used;
}

int64_t bl_block_workspace_floats(const bl_block_dims *dims, int64_t T_max, int64_t r, bool dropout,
                                  bool training)
{
    bl_block_workspace unused;
    return place_workspace(dims, T_max, r, dropout, training, NULL, &unused);
}

void bl_block_place_workspace(const bl_block_dims *dims, int64_t T_max, int64_t r, bool dropout,
                              bool training, float *memory, bl_block_workspace *workspace)
{
    place_workspace(dims, T_max, r, dropout, training, memory, workspace);
}

bl_block_tensors bl_block_effective_tensors(const bl_block_tensors *kept,
                                            const bl_block_workspace *ws)
{
    bl_block_tensors t = *kept;
    if (!t.qkv) t.qkv = ws->tensors.qkv;
    if (!t.attention) t.attention = ws->tensors.attention;
    if (!t.lse) t.lse = ws->tensors.lse;
    if (!t.mid) t.mid = ws->tensors.mid;
    if (!t.gate_up) t.gate_up = ws->tensors.gate_up;
    return t;
}

/* One fused matrix with its adapters. */
static bl_linear_use use_matrix(const bl_block *block, bl_llama_matrix matrix,
                                const bl_micro_batch *batch, const bl_block_workspace *ws,
                                float *gradients)
{
    bl_linear_use use = {.base = block->base,
                         .unit = block->layer,
                         .matrix = (int)matrix,
                         .lora = {.workspace = ws->lora, .dropout = block->dropout}};
    use.lora.dropout.sample = batch->sample;
    use.lora.dropout.position = batch->position;
    if (block->lora)
        bl_lora_layout_bind(block->lora, matrix, block->lora_weights, gradients, &use.lora);
    return use;
}

static bl_status linear_forward(bl_stream *stream, const bl_block *block, bl_llama_matrix matrix,
                                const bl_micro_batch *batch, const bl_block_workspace *ws,
                                const float *x, float *y)
{
    bl_linear_use use = use_matrix(block, matrix, batch, ws, NULL);
    return bl_linear_apply(stream, &use, batch->T, x, y);
}

static bl_status linear_backward(bl_stream *stream, const bl_block *block, bl_llama_matrix matrix,
                                 const bl_micro_batch *batch, const bl_block_workspace *ws,
                                 float *gradients, const float *x, const float *dy, float *dx)
{
    bl_linear_use use = use_matrix(block, matrix, batch, ws, gradients);
    return bl_linear_pull_back(stream, &use, batch->T, x, dy, dx);
}

/* ws->norm, ws->rstd = norm of x */
static bl_status norm_forward(bl_stream *stream, const bl_block_dims *dims, int64_t T,
                              const float *w, const float *x, const bl_block_workspace *ws)
{
    return bl_rmsnorm_forward(stream, &(bl_rmsnorm_forward_args){.T = T,
                                                                 .H = dims->hidden,
                                                                 .eps = dims->eps,
                                                                 .x = x,
                                                                 .w = w,
                                                                 .y = ws->norm,
                                                                 .rstd = ws->rstd});
}

/* d += gradient of x through the norm whose output has gradient ws->d_norm; ws->rstd is that of norm_forward */
static bl_status norm_backward(bl_stream *stream, const bl_block_dims *dims, int64_t T,
                               const float *w, const float *x, const bl_block_workspace *ws,
                               float *d)
{
    return bl_rmsnorm_backward(stream, &(bl_rmsnorm_backward_args){.T = T,
                                                                   .H = dims->hidden,
                                                                   .accumulate = 1,
                                                                   .x = x,
                                                                   .w = w,
                                                                   .rstd = ws->rstd,
                                                                   .dy = ws->d_norm,
                                                                   .dx = d});
}

/* q and k are neighbours in a fused row: one call rotates both. */
static bl_status rotate(bl_stream *stream, const bl_block_dims *dims, const bl_micro_batch *batch,
                        int64_t position_offset, int direction, float *qkv)
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
    BL_TRY(norm_forward(stream, block->dims, batch->T, block->norm1, t->x, ws));
    BL_TRY(linear_forward(stream, block, BL_QKV, batch, ws, ws->norm, t->qkv));
    return rotate(stream, block->dims, batch, position_offset, +1, t->qkv);
}

static bl_status compute_attention(bl_stream *stream, const bl_block *block,
                                   const bl_micro_batch *batch, const bl_block_tensors *t)
{
    const bl_block_dims *dims = block->dims;
    return bl_attention_forward(
        stream, &(bl_attention_forward_args){.T = batch->T,
                                             .n_heads = dims->n_heads,
                                             .n_kv_heads = dims->n_kv_heads,
                                             .d = dims->head_dim,
                                             .n_documents = batch->n_documents,
                                             .q_stride = dims->qkv_width,
                                             .kv_stride = dims->qkv_width,
                                             .o_stride = dims->q_width,
                                             .cu_seqlens = batch->cu_seqlens,
                                             .q = t->qkv,
                                             .k = t->qkv + dims->q_width,
                                             .v = t->qkv + dims->q_width + dims->kv_width,
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
    BL_TRY(norm_forward(stream, block->dims, batch->T, block->norm2, t->mid, ws));
    return linear_forward(stream, block, BL_GATE_UP, batch, ws, ws->norm, t->gate_up);
}

/* out = mid + down(h); out may be mid's own place only if nobody reads mid again */
static bl_status compute_out(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                             const bl_block_workspace *ws, const bl_block_tensors *t, float *out)
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
                           float *out)
{
    bl_block_tensors t = bl_block_effective_tensors(tensors, workspace);

    BL_TRY(compute_qkv(stream, block, batch, 0, workspace, &t));
    BL_TRY(compute_attention(stream, block, batch, &t));
    BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    return compute_out(stream, block, batch, workspace, &t, out);
}

static bl_status backward_mlp(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                              const bl_block_workspace *ws, const bl_block_tensors *t, float *d,
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
    BL_TRY(norm_forward(stream, dims, batch->T, block->norm2, t->mid, ws));
    BL_TRY(linear_backward(stream, block, BL_GATE_UP, batch, ws, gradients, ws->norm, t->gate_up,
                           ws->d_norm));
    return norm_backward(stream, dims, batch->T, block->norm2, t->mid, ws, d);
}

static bl_status backward_attention(bl_stream *stream, const bl_block *block,
                                    const bl_micro_batch *batch, const bl_block_workspace *ws,
                                    const bl_block_tensors *t, float *d, float *gradients)
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
                                                               .k = t->qkv + k,
                                                               .v = t->qkv + v,
                                                               .o = t->attention,
                                                               .lse = t->lse,
                                                               .do_ = ws->d_attention,
                                                               .dq = ws->d_qkv,
                                                               .dk = ws->d_qkv + k,
                                                               .dv = ws->d_qkv + v,
                                                               .delta = ws->delta}));
    BL_TRY(rotate(stream, dims, batch, 0, -1, ws->d_qkv));
    BL_TRY(norm_forward(stream, dims, batch->T, block->norm1, t->x, ws));
    BL_TRY(linear_backward(stream, block, BL_QKV, batch, ws, gradients, ws->norm, ws->d_qkv,
                           ws->d_norm));
    return norm_backward(stream, dims, batch->T, block->norm1, t->x, ws, d);
}

bl_status bl_block_backward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                            const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                            float *d, float *gradients)
{
    bl_block_tensors t = bl_block_effective_tensors(tensors, workspace);

    if (!tensors->qkv) BL_TRY(compute_qkv(stream, block, batch, 0, workspace, &t));
    if (!tensors->mid) {
        BL_TRY(compute_attention(stream, block, batch, &t));
        BL_TRY(compute_mid(stream, block, batch, workspace, &t));
    }
    if (!tensors->gate_up) BL_TRY(compute_gate_up(stream, block, batch, workspace, &t));
    BL_TRY(backward_mlp(stream, block, batch, workspace, &t, d, gradients));
    return backward_attention(stream, block, batch, workspace, &t, d, gradients);
}

typedef struct append_rows_args {
    int64_t T, width, row_stride;
    const float *src;
    float *dst;
} append_rows_args;

/* Dense rows at dst from rows of a wider matrix. */
static bl_status append_rows(bl_stream *stream, const void *arguments)
{
    const append_rows_args *a = arguments;
    (void)stream;
    for (int64_t t = 0; t < a->T; t++)
        for (int64_t c = 0; c < a->width; c++)
            a->dst[t * a->width + c] = a->src[t * a->row_stride + c];
    return BL_OK;
}

bl_status bl_block_extend(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                          int64_t n_past, float *k_cache, float *v_cache,
                          const bl_block_workspace *workspace, float *x)
{
    const bl_block_dims *dims = block->dims;
    bl_block_tensors t = bl_block_effective_tensors(&(bl_block_tensors){.x = x}, workspace);
    int64_t T = batch->T, kv = dims->kv_width;

    BL_TRY(compute_qkv(stream, block, batch, n_past, workspace, &t));
    append_rows_args append = {T, kv, dims->qkv_width, t.qkv + dims->q_width,
                               k_cache + n_past * kv};
    BL_TRY(bl_stream_call(stream, append_rows, &append, sizeof append));
    append.src = t.qkv + dims->q_width + kv;
    append.dst = v_cache + n_past * kv;
    BL_TRY(bl_stream_call(stream, append_rows, &append, sizeof append));
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
