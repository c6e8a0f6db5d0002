/* SPDX-License-Identifier: Apache-2.0 */
/* arch.h -- the families of models, as data: an entry per model_type of config.json.
 *
 * An entry says which keys of config.json its reader reads, which tensors a checkpoint has, of
 * which shapes and for what, and the names that PEFT gives to the projections. What a layer
 * computes from them is arch/block.h, for all families. Nothing outside arch/ knows a family by
 * name. */
#ifndef BALLAST_ARCH_ARCH_H
#define BALLAST_ARCH_ARCH_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "store/peft.h"

typedef enum bl_rope_kind {
    BL_ROPE_DEFAULT,
    BL_ROPE_LINEAR,
    BL_ROPE_LLAMA3,
    BL_ROPE_DYNAMIC,
    BL_ROPE_YARN,
    BL_ROPE_LONGROPE
} bl_rope_kind;

enum {
    BL_MODEL_MAX_EOS = 8,
    BL_MODEL_MAX_NEXTN = 8,
    BL_MODEL_MASK_LAYERS = 1024, /* layers that may differ in kind */
    BL_MODEL_ROPE_FACTORS = 128  /* pairs of a head that longrope has factors for */
};

/* Layers whose tokens see no more than so many tokens, themselves included. */
typedef struct bl_windows {
    int64_t tokens;                             /* 0: there are none */
    uint64_t layers[BL_MODEL_MASK_LAYERS / 64]; /* bit l % 64 of word l / 64: layer l is one */
} bl_windows;

/* Tokens that a token of `layer` sees, itself included; 0: all before it. */
int64_t bl_windows_of_layer(const bl_windows *windows, int64_t layer);

/* Kinds of layers, by their MLP: layers of one kind have the same tensors. */
typedef enum bl_layer_kind {
    BL_LAYER_DENSE,   /* one MLP */
    BL_LAYER_EXPERTS, /* routed experts, and perhaps an MLP for all tokens beside them */
    BL_LAYER_KINDS
} bl_layer_kind;

/* Which layers of a model are of which kind: bl_model_kinds. */
typedef struct bl_layer_kinds {
    bool has_experts;                          /* else all are dense */
    uint64_t dense[BL_MODEL_MASK_LAYERS / 64]; /* of a mixture: bit l % 64 of word l / 64 */
} bl_layer_kinds;
bl_layer_kind bl_layer_kind_of(const bl_layer_kinds *kinds, int64_t layer);
/* How many of layers [0, end) are of a kind. */
int64_t bl_layers_of_kind(const bl_layer_kinds *kinds, bl_layer_kind kind, int64_t end);

/* What an MLP computes between its matrices. */
typedef enum bl_activation {
    BL_SWIGLU, /* W_gate_up has a gate's rows and as many others */
    BL_GELU,   /* no gate */
    BL_GELU_BY_TANH,
    BL_SWIGLU_CLAMPED /* rows of gate and others take turns (ops/experts.h) */
} bl_activation;

typedef struct bl_arch bl_arch;

/* The contents of config.json, read: arch/config.h. */
typedef struct bl_model_config {
    const bl_arch *arch;
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t n_layers, n_heads, n_kv_heads; /* n_kv_heads divides n_heads */
    int64_t head_dim;                      /* even; n_heads * head_dim need not be hidden_size */
    int64_t max_position_embeddings;
    double rms_norm_eps; /* of LayerNorm, where the entry has it */
    bool tie_word_embeddings;
    bool is_untied_by_head; /* that was not given: a head that is stored is not tied */
    bool is_head_apart;     /* that was true, and a stored head differs: not tied */

    int64_t rotary_dim; /* channels of a head that RoPE rotates, the first ones; even; 0: all */
    double rotary_part; /* of head_dim, unless a key says so; 0: 1 */
    double rope_theta;
    bl_rope_kind rope_kind;
    double rope_factor;                                 /* linear, llama3, dynamic, yarn */
    double rope_low_freq_factor, rope_high_freq_factor; /* llama3; low < high */
    int64_t rope_original_max_positions;                /* llama3, yarn, longrope */
    double rope_beta_fast, rope_beta_slow;              /* yarn: turns; slow < fast */
    bool rope_is_exact;                                 /* yarn: bounds of pairs are not rounded */
    double rope_attention_factor;                       /* of cosines and sines; 0: 1 */
    double rope_short[BL_MODEL_ROPE_FACTORS], rope_long[BL_MODEL_ROPE_FACTORS]; /* longrope */
    double query_beta; /* Llama 4's scaling of q by position; 0: none */

    int64_t bos_token_id; /* -1: none */
    int64_t eos_token_ids[BL_MODEL_MAX_EOS];
    int n_eos_token_ids;

    /* What some models have beyond Llama; 0: it has not. */
    bl_activation activation;
    int64_t n_experts; /* each token's MLP is top_k of so many, of expert_size; 0: one MLP */
    uint64_t dense_layers[BL_MODEL_MASK_LAYERS / 64]; /* of a mixture: as of bl_layer_kinds */
    int64_t top_k, expert_size;
    int64_t expert_group;         /* not of config.json: bl_arch_expert_group's choice; 0: auto */
    int64_t shared_size;          /* of the MLP beside the experts */
    bool is_top_k_normed;         /* the chosen experts' weights sum to 1 */
    bool is_router_sigmoid;       /* as of bl_route, as are: */
    int64_t n_groups, top_groups; /* of experts; 0: none */
    double routed_scale;          /* of the experts' weights; 0: 1 */
    int64_t first_experts;        /* the first layer with experts, unless a key says so */
    int64_t n_nextn;              /* next-token-prediction layers, which are left out */
    double swiglu_alpha, swiglu_limit; /* of BL_SWIGLU_CLAMPED */
    unsigned biases; /* bit m: the projections of bl_layer_matrix m have a bias each */
    bl_windows windows;
    double embedding_multiplier; /* of the first layer's input */
    double residual_multiplier;  /* of a sub-layer's output */
    double attention_multiplier; /* of q . k, in place of 1 / sqrt(head_dim) */
    double logits_scaling;       /* divides the logits */
} bl_model_config;

/* The matrices of a layer as a block multiplies with them: q|k|v, o, gate|up, down; and those of
 * all routed experts, one below the other. Each is one or several projections, stacked along the
 * rows. Also the index of a matrix in a base unit. A layer of a kind that has no projection of a
 * matrix has it with 0 rows. */
typedef enum bl_layer_matrix {
    BL_QKV,
    BL_OUT,
    BL_GATE_UP,
    BL_MLP_DOWN,
    BL_EXPERTS_GATE_UP,
    BL_EXPERTS_DOWN,
    BL_LAYER_MATRICES
} bl_layer_matrix;

/* The vectors of a layer except biases, by their use in a block: fp32, whole on every rank. */
typedef enum bl_layer_vector {
    BL_ATTENTION_NORM,      /* before W_qkv; with has_post_norms of W_out's output */
    BL_ATTENTION_NORM_BIAS, /* LayerNorm's: behind its weight */
    /* before W_gate_up, or of W_down's output; absent: the norm before W_qkv */
    BL_MLP_NORM,
    BL_MLP_NORM_BIAS,
    BL_Q_NORM, /* of each head of q, and of k, or of all heads as one row, before RoPE */
    BL_K_NORM,
    BL_ROUTER, /* (n_experts, hidden); it and those behind it are of layers with experts alone */
    BL_ROUTER_BIAS,
    BL_ROUTER_CORRECTION, /* of the choice of experts */
    BL_SINKS,             /* of each head, in attention's softmax */
    BL_LAYER_VECTORS
} bl_layer_vector;

/* The matrices of (vocab, hidden) outside the layers. */
typedef enum bl_model_table { BL_TABLE_EMBEDDING, BL_TABLE_HEAD, BL_MODEL_TABLES } bl_model_table;

/* A dimension of a tensor, from the configuration. */
typedef enum bl_extent {
    BL_EXTENT_HIDDEN,
    BL_EXTENT_INTER,
    BL_EXTENT_Q,  /* n_heads head_dim */
    BL_EXTENT_KV, /* n_kv_heads head_dim */
    BL_EXTENT_QKV,
    BL_EXTENT_GATE_UP, /* 2 intermediate_size */
    BL_EXTENT_HEAD,
    BL_EXTENT_HEADS,           /* n_heads */
    BL_EXTENT_EXPERT,          /* expert_size */
    BL_EXTENT_SHARED,          /* shared_size */
    BL_EXTENT_EXPERTS,         /* n_experts */
    BL_EXTENT_EXPERTS_GATE_UP, /* n_experts 2 expert_size */
    BL_EXTENT_EXPERTS_HIDDEN   /* n_experts hidden_size */
} bl_extent;

enum {
    BL_MAX_PROJECTIONS = BL_PEFT_MAX_MODULES,
    BL_TENSOR_NAME_BYTES = 96,
    BL_EXPERT_PIECES = 2,
    BL_TENSOR_DIMS = 3
};

/* A frozen matrix of a layer as a checkpoint stores it: "LAYERS.3.MODULE.weight". It may be held in
 * another format, and LoRA may target it. With bl_model_config.biases it has a vector
 * "LAYERS.3.MODULE.bias" of its rows. */
typedef struct bl_projection {
    const char *module; /* "self_attn.q_proj" */
    bl_layer_matrix
        matrix;           /* that it is part of, behind those of it that come earlier in the list */
    bl_extent rows, cols; /* output channels, input channels */
} bl_projection;

/* The tensors of a projection that has the matrices of all experts, one below the other:
 * "LAYERS.3.EXPERTS.7.PIECE.weight" of each expert, whose pieces are equally high and follow one
 * another. */
typedef struct bl_expert_names {
    const char *experts; /* "mlp.experts" */
    const char *piece[BL_EXPERT_PIECES];
} bl_expert_names;

typedef struct bl_vector {
    const char *name; /* "input_layernorm.weight" in each layer; NULL: the family has none */
    bl_extent extent;
} bl_vector;

typedef struct bl_preset {
    const char *name; /* "llama3.1-8b" */
    bl_model_config config;
} bl_preset;

struct bl_arch {
    const char *model_type; /* "llama" */
    const char *class_name; /* "LlamaForCausalLM" */
    const char *title;      /* in messages: "Llama" */

    /* config.json. `keys`, NULL-terminated: those that `read` reads; every other key that changes
     * some model's forward pass must have the value that changes nothing (config_keys.c). `read`
     * finds `defaults` and the entry in *config. `describe`: bl_model_config_describe. */
    const char *const *keys;
    bl_model_config defaults;
    bl_status (*read)(const char *file, const json_t *root, bl_model_config *config);
    json_t *(*describe)(const bl_model_config *config);
    const bl_preset *presets;
    size_t n_presets;
    bool has_query_scaling; /* llama_4_scaling_beta of rope_parameters is read */

    /* The checkpoint. A tensor's name is a module's with ".weight" behind it. */
    const char *layers;               /* "model.layers" */
    const char *peft_layers;          /* as PEFT names them; NULL: as `layers` */
    const char *final_norm;           /* "model.norm" */
    const char *embedding;            /* "model.embed_tokens" */
    const char *head;                 /* "lm_head" */
    const bl_projection *projections; /* in the order of PEFT's modules: that of the LoRA weights */
    int n_projections;
    /* The last ones are of routed experts; before them are n_shared that layers
     * with experts have besides, before those n_dense that only the other layers have. All others
     * are in all layers. names[i]: of the tensors of the i-th
     * of these; NULL: each is one tensor "LAYERS.3.MODULE" of three dimensions, as transformers 5
     * stacks experts: (n_experts, output channels, input channels), or with is_transposed
     * (n_experts, input channels, output channels). A bias is "LAYERS.3.MODULE_bias",
     * (n_experts, output channels). */
    int n_dense, n_shared, n_routed;
    const bl_expert_names *names;
    bool is_transposed;
    bl_vector vectors[BL_LAYER_VECTORS];
    /* The same, as adapters have experts one by one. */
    const bl_expert_names *adapters;
    /* The entry of the same models without norms of q and k, which the key use_qk_norm selects. */
    const bl_arch *plain;
    const bl_arch *stacked; /* the entry of the same models with stacked experts; NULL: none */
    /* Beginnings of names of tensors that are not read, NULL-terminated: the model is part of a
     * larger one. NULL: there are none. */
    const char *const *skipped;

    /* The layer (arch/block.h). */
    bool has_layer_norm; /* LayerNorm with biases, also at the end; else RMSNorm */
    bool is_parallel;    /* attention and MLP read the same input */
    bool has_post_norms; /* norms of the sub-layers' outputs, not inputs; not with is_parallel */
    /* Rows of W_qkv: for each key head its queries, the key, the value; else all queries, all keys,
     * all values. Not with norms of heads. */
    bool is_grouped;
};

/* ---- kinds of layers ---- */

bl_layer_kinds bl_model_kinds(const bl_model_config *config);
bl_layer_kind bl_model_kind(const bl_model_config *config, int64_t layer);
int64_t bl_model_layers_of(const bl_model_config *config, bl_layer_kind kind);
void bl_model_set_dense(bl_model_config *config, int64_t layer);

/* ---- projections ---- */

/* Shape of the stored weight: rows = output channels, cols = input channels. */
void bl_projection_shape(const bl_model_config *config, int projection, int64_t *rows,
                         int64_t *cols);
/* The first row of the projection in its fused matrix. */
int64_t bl_projection_row(const bl_model_config *config, int projection);
/* Whether layers of the kind have it; whether a layer has; whether some layer of the model has. */
bool bl_arch_has(const bl_arch *arch, bl_layer_kind kind, int projection);
bool bl_model_has(const bl_model_config *config, int64_t layer, int projection);
bool bl_model_has_somewhere(const bl_model_config *config, int projection);
/* Whether it is of routed experts. */
bool bl_arch_is_routed(const bl_arch *arch, int projection);
/* "q_proj" */
const char *bl_projection_name(const bl_projection *projection);
/* The projection that is segment `segment` of a matrix of layers of a kind; NULL: there is none. */
const bl_projection *bl_arch_segment(const bl_arch *arch, bl_layer_kind kind, int matrix,
                                     int segment);

/* The projection that a tensor of that name is a weight of, and its layer; -1: of none. */
int bl_arch_find_projection(const bl_arch *arch, const char *tensor, int64_t *layer);
/* The same, and the first row of the projection that the tensor has. */
int bl_arch_find_rows(const bl_model_config *config, const char *tensor, int64_t *layer,
                      int64_t *row);
/* Weights of the projections of one layer of a kind; and those that a token is multiplied with, the
 * router's among them. */
int64_t bl_arch_layer_weights(const bl_model_config *config, bl_layer_kind kind);
double bl_arch_active_weights(const bl_model_config *config, bl_layer_kind kind);

/* The projections for store/peft.h: module i is projection i, routed experts are its last ones. Of
 * a model, without those that no layer has. */
bl_peft_modules bl_arch_peft_modules(const bl_arch *arch);
bl_peft_modules bl_model_peft_modules(const bl_model_config *config);

/* Experts of a sub-unit of the base (linear/base.h): config->expert_group, at most all; auto: as
 * many as have the weights of the layer's other matrices, at least one. 0: there are none. */
int64_t bl_arch_expert_group(const bl_model_config *config);
/* The key expert_group: n, or auto if n is negative. BL_EUSAGE: the model has no routed experts. */
bl_status bl_arch_set_expert_group(bl_model_config *config, int64_t n);

/* ---- tensors ---- */

typedef enum bl_tensor_role {
    BL_ROLE_PROJECTION,
    BL_ROLE_VECTOR,
    BL_ROLE_EMBEDDING,
    BL_ROLE_HEAD /* of a tied model the embedding under another name: it may be there or not */
} bl_tensor_role;

typedef struct bl_arch_tensor {
    char name[BL_TENSOR_NAME_BYTES];
    bl_tensor_role role;
    int64_t layer;  /* of a projection or a vector; n_layers: the final norm's */
    int projection; /* its place in bl_arch.projections */
    int64_t row;    /* of a projection: where the tensor's rows begin */
    int64_t offset; /* of a vector: floats from the start of all vectors */
    int n_dims;
    int64_t shape[BL_TENSOR_DIMS];
} bl_arch_tensor;

/* The tensors of a checkpoint, 0 <= i < count: layer by layer its projections, its vectors and its
 * biases, then the final norm, its bias, the embedding and the head. */
int64_t bl_arch_tensor_count(const bl_model_config *config);
bl_arch_tensor bl_arch_tensor_at(const bl_model_config *config, int64_t i);
int64_t bl_arch_tensor_elements(const bl_arch_tensor *tensor);
/* The tensor that has row `row` of a projection. */
bl_arch_tensor bl_arch_stored_at(const bl_model_config *config, int64_t layer, int projection,
                                 int64_t row);

/* Whether the tensor is the bias of a projection. */
bool bl_arch_is_bias(const bl_model_config *config, const bl_arch_tensor *tensor);

/* "model.layers.3.self_attn.q_proj.weight"; not of routed experts. */
void bl_arch_projection_tensor(const bl_arch *arch, int64_t layer, const bl_projection *projection,
                               char name[BL_TENSOR_NAME_BYTES]);
/* "lm_head.weight" */
void bl_arch_module_tensor(const char *module, char name[BL_TENSOR_NAME_BYTES]);

/* Floats of the vectors of one layer of a kind, biases included, and from their start to one of
 * them; floats of all vectors of the model, whose last ones are the final norm, and of those before
 * a layer's. */
int64_t bl_arch_layer_floats(const bl_model_config *config, bl_layer_kind kind);
int64_t bl_arch_vector_offset(const bl_model_config *config, bl_layer_kind kind,
                              bl_layer_vector vector);
/* Floats of one; 0: such layers have none. */
int64_t bl_arch_vector_width(const bl_model_config *config, bl_layer_kind kind,
                             bl_layer_vector vector);
/* From the start of a layer's vectors to the bias of a fused matrix, in the order of its rows; -1:
 * it has none. */
int64_t bl_arch_bias_offset(const bl_model_config *config, bl_layer_kind kind,
                            bl_layer_matrix matrix);
int64_t bl_arch_vector_floats(const bl_model_config *config);
int64_t bl_arch_vectors_before(const bl_model_config *config, int64_t layer);

/* ---- work ---- */

/* Model FLOPs of a step: forward of every frozen matrix and of attention, their input gradients
 * from layer `first` on, three times the LoRA path of n_lora_floats, of all layers; no
 * recomputation.
 * Samples have mean_tokens; the head works on n_labels of the n_tokens. Where weights are trained:
 * arch/trained.h. */
double bl_arch_step_flops(const bl_model_config *config, double n_lora_floats, int64_t first,
                          double n_tokens, double mean_tokens, double n_labels);
/* Those that are added where all weights are trained: the gradients of all matrices. */
double bl_arch_gradient_flops(const bl_model_config *config, double n_tokens, double n_labels);

#endif
