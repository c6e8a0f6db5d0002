/* SPDX-License-Identifier: Apache-2.0 */
/* block.h -- one decoder layer on one micro-batch, forward and backward, with a choice of
 * activations to keep between the two.
 *
 * Touvron et al. 2023, arXiv:2302.13971; pre-norm residual layer:
 *   qkv = RoPE(norm1(x) W_qkv^T)          with q and k normed per head before RoPE (Qwen3)
 *   a   = attention(qkv)
 *   mid = x + a W_o^T
 *   g|u = norm2(mid) W_gate_up^T
 *   out = mid + (silu(g) u) W_down^T
 * with the weighted sum of the chosen experts' MLPs in place of one (Mixtral; ops/experts.h), or
 * added to one (GLM-4.5's shared experts), a clamped gate, and sinks in attention (gpt-oss);
 * with the outputs of attention and the MLP times a multiplier (Granite); norm2 of x in place of
 * mid, and h = gelu(norm2(x) W_gate_up^T) (Falcon); or with norm1 of a W_o^T and norm2 of the MLP's
 * output in place of the inputs' norms, and q and k normed over their whole width (OLMo 2);
 * each W with its LoRA term and its bias, if it has one. The rest is recomputed in backward by the
 * same ops in the same order: any choice gives the same bits. Norms and SwiGLU are always
 * recomputed; the outputs of W_o and W_down only where they are normed (backward does not read them
 * else). */
#ifndef BALLAST_ARCH_BLOCK_H
#define BALLAST_ARCH_BLOCK_H

#include "linear/apply.h"
#include "arch/arch.h"
#include "arch/config.h"
#include "arch/lora.h"
#include "arch/trained.h"
#include "ops/experts.h"

/* Activations that a block keeps besides its input, and their bytes per token (fp32 here, bf16 on a
 * GPU): a mask. */
typedef enum bl_save {
    BL_SAVE_ATTENTION = 1, /* attention output, log-sum-exp; mid, where the MLP reads it */
    BL_SAVE_QKV = 2,
    BL_SAVE_GATE_UP = 4,
    BL_SAVE_S0 = 0,
    BL_SAVE_S2 = BL_SAVE_ATTENTION,
    BL_SAVE_S3 = BL_SAVE_S2 | BL_SAVE_QKV,
    BL_SAVE_S4 = BL_SAVE_S3 | BL_SAVE_GATE_UP
} bl_save;

/* A micro-batch in device memory: a flat token stream without padding (a pass pads it:
 * model/feed_internal.h). Arrays of T elements, cu_seqlens of n_documents + 1. */
typedef struct bl_micro_batch {
    int64_t T, n_documents;
    int32_t *ids;      /* < vocab_size */
    int32_t *targets;  /* the token to predict; any value where weights[t] is 0 */
    float *weights;    /* of -log p(target) in the loss */
    int32_t *position; /* index of the token in its sample (the row of the data set) */
    /* Number of the token's sample in the step: with position the key of dropout. */
    int64_t *sample;
    int32_t *cu_seqlens; /* documents: positions and attention restart in each */
    /* The ids in host memory, for devices that cannot read the embedding table there: read before
     * the call that gets the micro-batch returns. Ignored on a CPU. */
    const int32_t *host_ids;
} bl_micro_batch;

/* Tables of RoPE in device memory, (n_positions, rotary_dim/2) each (arch/rope.h). */
typedef struct bl_block_rope {
    const float *cos_table, *sin_table;
    const float *query_cos_table, *query_sin_table; /* NULL: those of keys */
    int64_t long_after, long_offset;                /* as of bl_rope */
} bl_block_rope;

/* For a document of which parts are rotated one after the other: the tables of all its tokens. */
bl_block_rope bl_block_rope_of_document(const bl_block_rope *rope, int64_t n_tokens);

/* Of the layers of a kind. */
typedef struct bl_block_dims {
    bl_layer_kind layer_kind;
    int64_t hidden, n_heads, n_kv_heads, head_dim, rotary_dim;
    int64_t inter;                          /* of the MLP of all tokens; 0: none */
    int64_t n_experts, top_k, expert_inter; /* 0: no routed experts */
    bool is_top_k_normed, is_router_sigmoid, has_correction;
    int64_t n_router_groups, top_router_groups; /* as of bl_route, as is: */
    float routed_scale;
    int64_t expert_group, n_expert_groups; /* experts of a group of the base; their number */
    int64_t q_width, kv_width, qkv_width;  /* n_heads d; n_kv_heads d; their sum q + 2 kv */
    double eps;
    struct {
        int64_t rows, cols;
        int n_projections;
    } matrix[BL_LAYER_MATRICES];
    int64_t vector_offset[BL_LAYER_VECTORS]; /* in a layer's vectors */
    int64_t vector_floats;                   /* of a layer's vectors */
    int64_t bias_offset[BL_LAYER_MATRICES];  /* in a layer's vectors; -1: no bias */
    int64_t q_norm_width, k_norm_width;      /* a head, or all of them; 0: no norms of q and k */
    bool has_layer_norm, is_parallel, has_post_norms; /* as of bl_arch */
    bl_layer_vector mlp_norm;                         /* the norm before W_gate_up */
    bl_activation activation;
    float swiglu_alpha, swiglu_limit; /* of BL_SWIGLU_CLAMPED */
    bool has_sinks, has_router_bias;
    int64_t n_groups; /* of heads in a row of qkv, each q|k|v; n_kv_heads or 1 */
    bl_windows windows;
    bl_device_kind kind; /* of the device it runs on: sizes of scratch */
    /* How products with the frozen matrices are made on CUDA, and whether these are all stored as
     * bf16, so that products make no copies. */
    bl_matmul_mode mode;
    bl_matmul_sums sums;
    bool is_dense;
    /* Of each matrix's memory in a block's `prepared`; 0: none, copies are made in scratch. */
    size_t prepared_bytes[BL_LAYER_MATRICES];
    bl_dtype act;              /* of activations there */
    float residual_multiplier; /* of the outputs of attention and the MLP; 0: none */
    bl_block_rope rope;
} bl_block_dims;

/* Without the tables. act: the dtype of activations (bl_device_act). */
bl_block_dims bl_block_dims_of(const bl_model_config *config, bl_layer_kind layer_kind,
                               bl_device_kind kind, bl_dtype act);

/* Whether the product with `matrix` adds the residual itself: that with a sub-layer's last matrix,
 * where no bias, norm or factor comes between. */
bool bl_block_adds_in_product(const bl_block_dims *dims, bl_layer_matrix matrix);

/* Whether the matrix is those of all routed experts. */
bool bl_block_is_routed(bl_layer_matrix matrix);

/* Whether RMSNorm or SwiGLU writes the input of the forward product with `matrix`, and so can also
 * quantize it if the product reads E4M3 (bl_linear_operand). */
bool bl_block_quantizes_input(const bl_block_dims *dims, bl_layer_matrix matrix);

/* What a layer computes on T tokens, of dtype dims->act. x (T,H); qkv (T, q + 2 kv), rotated (with
 * head norms: as projected); attention (T,q); mid (T,H); gate_up (T, 2I), without a gate (T, I);
 * expert_gate_up (T top_k, 2I) of experts; lse (T,n_heads), by groups, fp32. */
typedef struct bl_block_tensors {
    bl_tensor x, qkv, attention, mid, gate_up, expert_gate_up;
    float *lse;
} bl_block_tensors;

/* T rounded up so that any tensor of so many rows ends on a boundary of 256 bytes. */
int64_t bl_block_rows(const bl_block_dims *dims, int64_t T);

/* Bytes per row of the tensors that `save` keeps beside x; bl_block_rows(T_max) rows are needed.
 * place_saved places the kept tensors of T_max tokens at `memory` (members that are not kept are
 * none). */
int64_t bl_block_saved_bytes(const bl_block_dims *dims, unsigned save);
void bl_block_place_saved(const bl_block_dims *dims, unsigned save, int64_t T_max, void *memory,
                          bl_block_tensors *tensors);

/* Scratch for one micro-batch of at most T_max tokens: the unsaved tensors, and what lives within
 * one call, in so many buffers. */
int bl_block_scratch_buffers(const bl_block_dims *dims);
typedef struct bl_block_workspace {
    bl_block_tensors tensors; /* where tensors go that are not kept; x unused */
    bl_tensor norm, h, dh, d_norm, d_attention, d_qkv;
    float *rstd, *mean, *delta; /* mean: with LayerNorm */
    bl_tensor qk;     /* with head norms: q and k, normed and rotated, in the columns of qkv */
    float *head_rstd; /* with head norms: (T, n_heads), then (T, n_kv_heads) */
    /* Of experts: where the call's tokens go, for the arrays of the largest T; an input or output
     * of all their rows (T top_k, H). */
    void *routing;
    bl_tensor mlp_input; /* (T,H): what the experts read */
    float *sum;          /* (T,H): with several groups, of the tokens between two of them */
    bl_tensor rows;      /* of a group, as are tensors.expert_gate_up, h and dh then */
    void *lora;          /* of the LoRA linear layer */
    size_t lora_bytes;
} bl_block_workspace;

/* The tensors of a call: the kept ones where they are kept, the others in the workspace. */
bl_block_tensors bl_block_effective_tensors(const bl_block_tensors *kept,
                                            const bl_block_workspace *workspace);

/* training false: what forward needs only. r: LoRA rank (0 = none). */
int64_t bl_block_workspace_bytes(const bl_block_dims *dims, int64_t T_max, int64_t r, bool dropout,
                                 bool training);
void bl_block_place_workspace(const bl_block_dims *dims, int64_t T_max, int64_t r, bool dropout,
                              bool training, void *memory, bl_block_workspace *workspace);

/* With routed experts, of `workspace`, placed by the function above: the part that each further
 * micro-batch of a visit needs for itself, else 0 bytes. */
int64_t bl_block_visit_bytes(const bl_block_dims *dims, int64_t T_max);
void bl_block_place_visit(const bl_block_dims *dims, int64_t T_max, void *memory,
                          bl_block_workspace *workspace);

/* A norm of T rows of x (T,H): RMSNorm, or LayerNorm, whose bias follows w. rstd and mean (T) are
 * overwritten by forward, or NULL, and read by backward; y = norm(x); dx (+)= the gradient of x. */
typedef struct bl_block_norm {
    int64_t T;
    const float *w;
    bl_tensor x;
    float *rstd, *mean;
    bl_quantized quantized; /* of y; forward, RMSNorm alone. None: not quantized */
} bl_block_norm;
bl_status bl_block_norm_forward(bl_stream *stream, const bl_block_dims *dims,
                                const bl_block_norm *norm, bl_tensor y);
bl_status bl_block_norm_backward(bl_stream *stream, const bl_block_dims *dims,
                                 const bl_block_norm *norm, bool accumulate, bl_tensor dy,
                                 bl_tensor dx);
/* dw += the gradient of w; behind it is LayerNorm's bias, with its own. Of `vectors`, a mask, bit
 * `weight`, a bl_layer_vector, and the next say which of the two are trained. Before dy is
 * overwritten. */
bl_status bl_block_norm_gradients(bl_stream *stream, const bl_block_dims *dims,
                                  const bl_block_norm *norm, bl_tensor dy, unsigned vectors,
                                  bl_layer_vector weight, float *dw);

/* Where the gradients of a layer's own weights are added to: fp32, device memory, overlapping
 * nothing. */
typedef struct bl_weight_gradients {
    const bl_trained_unit *trained;                     /* borrowed */
    float *matrix[BL_LAYER_MATRICES][BL_TRAINED_SPANS]; /* of each span (n, cols), dense */
    float *vectors; /* as bl_block.vectors, biases included; those that are frozen stay */
} bl_weight_gradients;

/* One layer as a visit sees it. Borrowed for the visit. */
typedef struct bl_block {
    const bl_block_dims *dims;
    bl_base *base;
    int64_t layer;
    const float *vectors;       /* the layer's, of dims->vector_floats */
    const bl_lora_layout *lora; /* NULL: no adapter */
    bl_tensor lora_weights;     /* the layer's flat vector, gathered, of dtype dims->act */
    bl_lora_dropout dropout;    /* layer, matrix, sample and position are filled in here */
    unsigned bf16_matrices;     /* bit m: bl_layer_matrix m is an exception from dims->mode */
    /* Of dims->prepared_bytes: what products make of the layer's matrices, kept until it is
     * forgotten; NULL: each product makes it. */
    bl_linear_prepared *prepared;
    const bl_weight_gradients *trained; /* of backward; NULL: the layer's weights are frozen */
    bool is_last;                       /* of backward: no gradient of x is needed */
} bl_block;

/* All acquire the layer's matrices of `base` and leave the release to the visit. Of a layer with
 * routed experts, forward, backward and extend are the parts that the other matrices have, a shared
 * expert's among them:
 *
 *   forward, or extend; then forward_group of each group of experts in ascending order
 *   backward_begin; backward_group of each in ascending order; then backward
 *
 * Between the calls for a micro-batch there may be those for others of the visit, each with its
 * workspace (bl_block_place_visit). */

/* out (T,H) = the layer's output; it overlaps none of `tensors`. Tensors that `tensors` has go
 * there, the others to the workspace. */
bl_status bl_block_forward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                           const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                           bl_tensor out);

/* Adds to `out` what a group's experts give, in the order of the experts; the last group completes
 * it. */
bl_status bl_block_forward_group(bl_stream *stream, const bl_block *block,
                                 const bl_micro_batch *batch, const bl_block_tensors *tensors,
                                 const bl_block_workspace *workspace, int64_t group, bl_tensor out);

/* Computes again what backward_group reads and `tensors` has not; without experts nothing. */
bl_status bl_block_backward_begin(bl_stream *stream, const bl_block *block,
                                  const bl_micro_batch *batch, const bl_block_tensors *tensors,
                                  const bl_block_workspace *workspace);
/* d and gradients: as of backward; only the group's gradients are written, d is read. */
bl_status bl_block_backward_group(bl_stream *stream, const bl_block *block,
                                  const bl_micro_batch *batch, const bl_block_tensors *tensors,
                                  const bl_block_workspace *workspace, int64_t group, bl_tensor d,
                                  float *gradients);

/* d (T,H): the gradient of the output, replaced by that of x; with is_last undefined afterwards.
 * gradients: the layer's flat vector, fp32, overwritten where there are adapters. With
 * block->trained the gradients of the layer's trained weights are added to those, dW = dy^T x of
 * their rows among them. Kept tensors are consumed: gate_up is overwritten. */
bl_status bl_block_backward(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                            const bl_block_tensors *tensors, const bl_block_workspace *workspace,
                            bl_tensor d, float *gradients);

/* Generation: one document whose first `n_past` tokens are in the caches already. k_cache, v_cache
 * (capacity, kv) of this layer get the T new rows appended; x (T,H) becomes the output. */
bl_status bl_block_extend(bl_stream *stream, const bl_block *block, const bl_micro_batch *batch,
                          int64_t n_past, bl_tensor k_cache, bl_tensor v_cache,
                          const bl_block_workspace *workspace, bl_tensor x);

#endif
