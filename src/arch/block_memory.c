/* SPDX-License-Identifier: Apache-2.0 */
/* block_memory.c -- the sizes of a decoder layer, and where its tensors are.
 *
 * Saved tensors are where the pass put them (bl_block_place_saved); the rest in one workspace for
 * all layers. There, buffers whose uses do not overlap are shared: da is in h, dq|dk|dv in dh.
 * Sizes come from the code that places (with no memory, `bump` only counts), so they cannot
 * differ. */
#include "arch/block.h"
#include "arch/block_internal.h"
#include "arch/rope.h"
#include "base/sizes.h"

enum { ALIGNMENT_BYTES = 256 }; /* where tensors begin */

static void set_experts(const bl_model_config *config, bl_block_dims *dims)
{
    dims->n_experts = config->n_experts;
    dims->top_k = config->top_k;
    dims->expert_inter = config->expert_size;
    dims->is_top_k_normed = config->is_top_k_normed;
    dims->is_router_sigmoid = config->is_router_sigmoid;
    dims->has_correction = config->arch->vectors[BL_ROUTER_CORRECTION].name != NULL;
    dims->n_router_groups = config->n_groups;
    dims->top_router_groups = config->top_groups;
    dims->routed_scale = (float)config->routed_scale;
    dims->expert_group = bl_arch_expert_group(config);
    dims->n_expert_groups = bl_ceil_div(dims->n_experts, dims->expert_group);
}

bl_block_dims bl_block_dims_of(const bl_model_config *config, bl_layer_kind layer_kind,
                               bl_device_kind kind, bl_dtype act)
{
    bl_block_dims dims = {.layer_kind = layer_kind,
                          .hidden = config->hidden_size,
                          .n_heads = config->n_heads,
                          .n_kv_heads = config->n_kv_heads,
                          .head_dim = config->head_dim,
                          .rotary_dim = bl_model_rotary_dim(config),
                          .eps = config->rms_norm_eps,
                          .windows = config->windows,
                          .residual_multiplier = (float)config->residual_multiplier,
                          .kind = kind,
                          .act = act};
    if (layer_kind == BL_LAYER_EXPERTS && config->n_experts > 0) set_experts(config, &dims);
    dims.q_width = dims.n_heads * dims.head_dim;
    dims.kv_width = dims.n_kv_heads * dims.head_dim;
    dims.qkv_width = dims.q_width + 2 * dims.kv_width;
    for (int p = 0; p < config->arch->n_projections; p++) {
        int m = (int)config->arch->projections[p].matrix;
        int64_t rows;
        if (!bl_arch_has(config->arch, layer_kind, p)) continue;
        bl_projection_shape(config, p, &rows, &dims.matrix[m].cols);
        dims.matrix[m].rows += rows;
        dims.matrix[m].n_projections++;
    }
    dims.inter = dims.matrix[BL_MLP_DOWN].cols;
    for (int v = 0; v < BL_LAYER_VECTORS; v++)
        dims.vector_offset[v] = bl_arch_vector_offset(config, layer_kind, (bl_layer_vector)v);
    dims.vector_floats = bl_arch_layer_floats(config, layer_kind);
    for (int m = 0; m < BL_LAYER_MATRICES; m++)
        dims.bias_offset[m] = bl_arch_bias_offset(config, layer_kind, (bl_layer_matrix)m);
    dims.q_norm_width = bl_arch_vector_width(config, layer_kind, BL_Q_NORM);
    dims.k_norm_width = bl_arch_vector_width(config, layer_kind, BL_K_NORM);
    dims.has_layer_norm = config->arch->has_layer_norm;
    dims.is_parallel = config->arch->is_parallel;
    dims.has_post_norms = config->arch->has_post_norms;
    dims.mlp_norm = config->arch->vectors[BL_MLP_NORM].name ? BL_MLP_NORM : BL_ATTENTION_NORM;
    dims.activation = config->activation;
    dims.swiglu_alpha = (float)config->swiglu_alpha;
    dims.swiglu_limit = (float)config->swiglu_limit;
    dims.has_sinks = bl_arch_vector_width(config, layer_kind, BL_SINKS) > 0;
    dims.has_router_bias = bl_arch_vector_width(config, layer_kind, BL_ROUTER_BIAS) > 0;
    dims.n_groups = config->arch->is_grouped ? dims.n_kv_heads : 1;
    return dims;
}

/* Rows that a token has at most in the group of experts that is computed; 0: no experts. */
static int64_t rows_at_once(const bl_block_dims *dims)
{
    return bl_min_i64(dims->top_k, dims->expert_group);
}

/* Of the MLP's buffers, which serve a shared expert and groups of routed ones in turn. */
static int64_t inter_width(const bl_block_dims *dims)
{
    return bl_max_i64(dims->inter, rows_at_once(dims) * dims->expert_inter);
}

bool bl_block_adds_in_product(const bl_block_dims *dims, bl_layer_matrix matrix)
{
    bool has_bias = dims->bias_offset[matrix] >= 0 && !bl_block_is_routed(matrix);

    return (matrix == BL_OUT || matrix == BL_MLP_DOWN || matrix == BL_EXPERTS_DOWN) &&
           !dims->has_post_norms && !(dims->residual_multiplier > 0) && !has_bias;
}

bool bl_block_is_routed(bl_layer_matrix matrix)
{
    return matrix == BL_EXPERTS_GATE_UP || matrix == BL_EXPERTS_DOWN;
}

bool bl_block_quantizes_input(const bl_block_dims *dims, bl_layer_matrix matrix)
{
    if (matrix == BL_MLP_DOWN) return dims->activation == BL_SWIGLU;
    return matrix != BL_OUT && !dims->has_layer_norm && !dims->has_post_norms;
}

bl_block_rope bl_block_rope_of_document(const bl_block_rope *rope, int64_t n_tokens)
{
    bl_block_rope one = *rope;

    one.long_after = 0;
    if (rope->long_after == 0 || n_tokens <= rope->long_after) return one;
    one.cos_table += rope->long_offset;
    one.sin_table += rope->long_offset;
    if (!one.query_cos_table) return one;
    one.query_cos_table += rope->long_offset;
    one.query_sin_table += rope->long_offset;
    return one;
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

/* for_all: in the workspace: also what no backward reads; of experts a group's rows. */
static void place_tensors(const bl_block_dims *dims, unsigned which, bool for_all, int64_t T,
                          bump *from, bl_block_tensors *out)
{
    *out = (bl_block_tensors){0};
    if (which & BL_SAVE_ATTENTION) {
        if (for_all || !dims->is_parallel) out->mid = take(from, T * dims->hidden);
        out->attention = take(from, T * dims->q_width);
        out->lse = take_floats(from, T * dims->n_heads);
    }
    if (which & BL_SAVE_QKV) out->qkv = take(from, T * dims->qkv_width);
    int64_t n_rows = for_all ? rows_at_once(dims) : dims->top_k;
    if (which & BL_SAVE_GATE_UP && dims->inter > 0)
        out->gate_up = take(from, T * dims->matrix[BL_GATE_UP].rows);
    if (which & BL_SAVE_GATE_UP && dims->n_experts > 0)
        out->expert_gate_up = take(from, T * n_rows * 2 * dims->expert_inter);
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
    place_tensors(dims, save, false, rows, &counter, &unused);
    return counter.used / rows;
}

void bl_block_place_saved(const bl_block_dims *dims, unsigned save, int64_t T_max, void *memory,
                          bl_block_tensors *tensors)
{
    bump from = {memory, dims->act, 0};
    place_tensors(dims, save, false, bl_block_rows(dims, T_max), &from, tensors);
}

/* One of the layer's matrices in any format, for sizes. */
static bl_weight matrix_of_format(const bl_block_dims *dims, int matrix, bl_format format)
{
    return (bl_weight){.rows = dims->matrix[matrix].rows,
                       .cols = dims->matrix[matrix].cols,
                       .n_segments = 1,
                       .segment = {{.format = format, .rows = dims->matrix[matrix].rows}}};
}

size_t arch_experts_term_bytes(const bl_block_dims *dims, int64_t T, int64_t r)
{
    int64_t n_bytes = T * rows_at_once(dims) * r * (int64_t)bl_dtype_bytes(dims->act);
    return 2 * (size_t)bl_round_up(n_bytes, ALIGNMENT_BYTES);
}

static size_t matrix_workspace_bytes(const bl_block_dims *dims, int matrix, int64_t T, int64_t r,
                                     bool dropout)
{
    bl_matmul_prepared prepared = {.memory_bytes = dims->prepared_bytes[matrix]};
    size_t most = 0;

    if (bl_block_is_routed((bl_layer_matrix)matrix)) return arch_experts_term_bytes(dims, T, r);
    /* Which formats the matrices have is not known here. */
    for (int f = 0; f < BL_FORMAT_COUNT; f++)
        for (int mode = BL_MATMUL_BF16; mode <= (int)dims->mode; mode++) {
            if (dims->is_dense && f != BL_FORMAT_BF16) continue;
            bl_lora_linear linear = {.weight = matrix_of_format(dims, matrix, (bl_format)f),
                                     .n_parts = r > 0 ? dims->matrix[matrix].n_projections : 0,
                                     .is_stacked = true,
                                     .dropout = {.p = dropout ? 0.5f : 0.0f},
                                     .mode = (bl_matmul_mode)mode,
                                     .prepared = &prepared};
            for (int p = 0; p < linear.n_parts; p++) linear.part[p].r = r;
            size_t n_bytes = bl_lora_linear_workspace_bytes(dims->kind, dims->act, &linear, T);
            if (n_bytes > most) most = n_bytes;
        }
    return most;
}

/* Of the layer's matrix that needs most. */
static size_t lora_workspace_bytes(const bl_block_dims *dims, int64_t T, int64_t r, bool dropout)
{
    size_t most = 0;

    for (int m = 0; m < BL_LAYER_MATRICES; m++) {
        if (dims->matrix[m].rows == 0) continue;
        size_t n_bytes = matrix_workspace_bytes(dims, m, T, r, dropout);
        if (n_bytes > most) most = n_bytes;
    }
    return most;
}

int bl_block_scratch_buffers(const bl_block_dims *dims)
{
    enum { OF_ALL = 7, OF_EXPERTS = 4 };
    return OF_ALL + (dims->n_experts > 0 ? OF_EXPERTS : 0);
}

/* What a micro-batch needs from the begin to the end of a visit: its rows are computed group by
 * group, with those of other micro-batches in between. */
static void place_visit(const bl_block_dims *dims, int64_t T, bump *from, bl_block_workspace *ws)
{
    bl_tensor gate_up = ws->tensors.gate_up, of_group = ws->tensors.expert_gate_up;
    size_t n_bytes = bl_routing_bytes(T, dims->n_experts, dims->top_k);

    place_tensors(dims, BL_SAVE_S3, true, T, from, &ws->tensors);
    ws->tensors.gate_up = gate_up;
    ws->tensors.expert_gate_up = of_group;
    ws->routing = take_bytes(from, (int64_t)n_bytes);
    ws->mlp_input = take(from, T * dims->hidden);
    if (dims->n_expert_groups > 1) ws->sum = take_floats(from, T * dims->hidden);
    ws->d_norm = ws->mlp_input; /* of a token: read before its last group, written after it */
}

static int64_t place_workspace(const bl_block_dims *dims, int64_t T, int64_t r, bool dropout,
                               bool training, void *memory, bl_block_workspace *ws)
{
    bump from = {memory, dims->act, 0};

    *ws = (bl_block_workspace){0};
    place_tensors(dims, dims->n_experts > 0 ? BL_SAVE_GATE_UP : BL_SAVE_S4, true, T, &from,
                  &ws->tensors);
    ws->norm = take(&from, T * dims->hidden);
    ws->rstd = take_floats(&from, T);
    if (dims->has_layer_norm) ws->mean = take_floats(&from, T);
    ws->h = take(&from,
                 T * (training ? bl_max_i64(inter_width(dims), dims->q_width) : inter_width(dims)));
    if (dims->n_experts > 0) {
        place_visit(dims, T, &from, ws);
        ws->rows = take(&from, T * rows_at_once(dims) * dims->hidden);
    }
    if (dims->q_norm_width > 0) {
        ws->qk = take(&from, T * dims->qkv_width);
        ws->head_rstd = take_floats(&from, T * (dims->n_heads + dims->n_kv_heads));
    }
    ws->lora_bytes = lora_workspace_bytes(dims, T, r, dropout);
    ws->lora = take_bytes(&from, (int64_t)ws->lora_bytes);
    if (training) {
        ws->dh = take(&from, T * bl_max_i64(inter_width(dims), dims->qkv_width));
        if (dims->n_experts == 0) ws->d_norm = take(&from, T * dims->hidden);
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
    if (!bl_tensor_is_there(t.expert_gate_up)) t.expert_gate_up = ws->tensors.expert_gate_up;
    return t;
}

int64_t bl_block_visit_bytes(const bl_block_dims *dims, int64_t T_max)
{
    bl_block_workspace unused = {0};
    bump counter = {.act = dims->act};

    if (dims->n_experts > 0) place_visit(dims, T_max, &counter, &unused);
    return counter.used;
}

void bl_block_place_visit(const bl_block_dims *dims, int64_t T_max, void *memory,
                          bl_block_workspace *ws)
{
    bump from = {memory, dims->act, 0};

    if (dims->n_experts > 0) place_visit(dims, T_max, &from, ws);
}
