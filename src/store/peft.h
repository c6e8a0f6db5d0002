/* SPDX-License-Identifier: Apache-2.0 */
/* peft.h -- LoRA adapters as huggingface/peft stores them: adapter_config.json and
 * adapter_model.safetensors.
 *
 *   y = base(x) + scale * B (A x)     Hu et al. 2021, arXiv:2106.09685, eq. 3
 *   scale = alpha / r, or alpha / sqrt(r) with use_rslora (Kalajdzievski 2023, arXiv:2312.03732)
 * Tensors base_model.model.model.layers.{i}.{module}.lora_A.weight [r, in] and ...lora_B.weight
 * [out, r]; of the embedding ...lora_embedding_A [r, vocab] and ...lora_embedding_B [hidden, r].
 * Whole tensors of modules_to_save: base_model.model.{tensor}. */
#ifndef BALLAST_STORE_PEFT_H
#define BALLAST_STORE_PEFT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"

typedef enum bl_peft_factor { BL_PEFT_A, BL_PEFT_B } bl_peft_factor;

/* The modules that an adapter may target: a model's projections, each in every layer. A module is
 * its index in this list. The embedding and the head, of which there is one each, follow; for these
 * a layer is ignored. */
enum { BL_PEFT_MAX_MODULES = 12, BL_PEFT_EMBEDDING = BL_PEFT_MAX_MODULES, BL_PEFT_HEAD };

/* A parameter of three dimensions that has the matrices of a layer's experts (transformers 5), and
 * the names of these where each expert is a module (transformers 4). */
enum { BL_PEFT_MAX_ROUTED = 2, BL_PEFT_MAX_PIECES = 2 };
typedef struct bl_peft_routed {
    const char *parameter;                 /* in a layer: "mlp.experts.gate_up_proj" */
    const char *experts;                   /* "block_sparse_moe.experts" */
    const char *piece[BL_PEFT_MAX_PIECES]; /* "w1", "w3": of equally many rows; NULL: one */
} bl_peft_routed;

typedef struct bl_peft_modules {
    const char *layers; /* "model.layers" */
    int n;
    const char *path[BL_PEFT_MAX_MODULES]; /* in a layer: "self_attn.q_proj" */
    uint32_t partial; /* bit m: some layers of the family's models may lack module m */
    uint32_t absent; /* bit m: no layer of the model has module m, which names then do not select */
    /* Bit m: the last name of module m means routed experts to PEFT from 0.18.2 on: its weight is
     * one of target_parameters. */
    uint32_t ambiguous;
    /* Whether a layer has a module; NULL: each has all. */
    bool (*has)(const void *user, int64_t layer, int module);
    const void *user; /* borrowed */
    /* Of a larger model, whose other modules may have the same last names: target_modules is
     * written as a pattern of whole paths. LoRA terms of its embedding and head are rejected. */
    bool is_part;
    const char *embedding, *head; /* last names of these modules; NULL: unknown */
    /* In modules_to_save: names and expressions may select them, and they do not become targets. */
    bool saves_embedding, saves_head;
    /* Parameters of routed experts: module n + i is routed[i]. The factors of all experts of a
     * layer are one module's: A (experts r, in), B (experts out, r), expert by expert. */
    int n_routed;
    bl_peft_routed routed[BL_PEFT_MAX_ROUTED];
    bool is_nested; /* more than one of them is a target: bl_peft_nest */
} bl_peft_modules;  /* the texts are borrowed, by open adapters too */

/* Sets is_nested for these targets. */
void bl_peft_nest(bl_peft_modules *modules, uint32_t targets);
bool bl_peft_is_routed(const bl_peft_modules *modules, int module);
/* What `name` selects of routed experts, as "experts", a parameter or the name of an expert's
 * matrix: *module, or -1 of all of them; *piece of it, or -1 of the whole. False: nothing. */
bool bl_peft_expert_parse(const bl_peft_modules *modules, const char *name, int *module,
                          int *piece);

enum { BL_PEFT_NAME_BYTES = 128 };
/* "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight",
 * "base_model.model.model.embed_tokens.lora_embedding_A" */
void bl_peft_tensor_name(const bl_peft_modules *modules, int64_t layer, int module,
                         bl_peft_factor factor, char name[BL_PEFT_NAME_BYTES]);

/* All projections but those of routed experts, as `targets` below: what "all-linear" selects in
 * PEFT, which also adapts routers. And those of routed experts. */
uint32_t bl_peft_all_routed(const bl_peft_modules *modules);
uint32_t bl_peft_all(const bl_peft_modules *modules);

/* The part of a path behind its last point: "q_proj". */
const char *bl_peft_last_name(const char *path);

/* What `name` selects, as an item of PEFT's target_modules: the modules whose path
 * "model.layers.{i}.{module}" it is, or ends in "." and it, as bits. *layer is -1 for those of
 * every layer. 0: no module. */
uint32_t bl_peft_target_parse(const bl_peft_modules *modules, const char *name, int64_t *layer);
/* N of "layers.N" or "model.layers.N", the first n bytes of `name`; false: it is neither. */
bool bl_peft_layer_parse(const char *layers, const char *name, size_t n, int64_t *layer);

/* The modules that a list of such names selects, or a regular expression (matched as Python's
 * re.fullmatch does, by PCRE2, against each path): bit m of *targets, module m, the embedding and
 * the head among them. Only names select routed experts. Refused, with `refusal` and "where:
 * reason": a name that selects nothing, a module that is selected in some of the layers only that
 * have it. */
bl_status bl_peft_match_names(const bl_peft_modules *modules, bl_status refusal, const char *where,
                              const char *const *names, size_t n_names, int64_t n_layers,
                              uint32_t *targets);
bl_status bl_peft_match_pattern(const bl_peft_modules *modules, bl_status refusal,
                                const char *where, const char *pattern, int64_t n_layers,
                                uint32_t *targets);

/* A tensor of the base that does not belong to a target module: "model.norm.weight". */
typedef struct bl_peft_other {
    char name[BL_PEFT_NAME_BYTES]; /* "": it belongs to a target */
    int n_dims;
    int64_t shape[2];
} bl_peft_other;

/* The base model's shape. */
typedef struct bl_peft_base {
    bl_peft_modules modules;
    int64_t n_layers;
    int64_t in_features[BL_PEFT_MAX_MODULES], out_features[BL_PEFT_MAX_MODULES]; /* of one expert */
    int64_t n_experts;
    int64_t vocab, hidden; /* embedding and head are (vocab, hidden) */
    /* Describes tensor i of the base, for modules_to_save; false: i is past the last. NULL: the
     * tensors are unknown, and not checked. */
    bool (*other)(const void *user, int64_t i, bl_peft_other *out);
    const void *other_user; /* borrowed */
} bl_peft_base;

/* modules_to_save: names select the modules whose path ends in one of them (str.endswith). */
enum { BL_PEFT_MAX_SAVED = 16, BL_PEFT_SAVED_BYTES = 64 };
typedef struct bl_peft_saved_names {
    int n;
    char name[BL_PEFT_MAX_SAVED][BL_PEFT_SAVED_BYTES];
} bl_peft_saved_names;
/* False: the list is full. */
bool bl_peft_add_saved(bl_peft_saved_names *names, const char *name);
/* Sets saves_embedding and saves_head if the names select these modules: they do not become targets
 * then, as in huggingface/peft inject_adapter. */
void bl_peft_except_saved(const bl_peft_saved_names *names, bl_peft_modules *modules);

/* How an adapter has the factors of routed experts. W (experts, out, in):
 * STACKED     PEFT from 0.19.1 on: A (experts r, in), row e r + j; B (out, r experts), column
 *             j experts + e
 * FIRST_AXIS  PEFT 0.17.0 to 0.19.0: A (experts r, out) is B of STACKED, B (in, r experts) is A
 * PER_EXPERT  a pair for each expert and piece, as of any projection (transformers 4) */
typedef enum bl_peft_layout {
    BL_PEFT_STACKED,
    BL_PEFT_FIRST_AXIS,
    BL_PEFT_PER_EXPERT
} bl_peft_layout;

typedef struct bl_peft_config {
    int64_t r;
    double alpha;
    double dropout;
    bool use_rslora;
    uint32_t targets; /* bit m: module m, of every layer; at least one projection */
    bl_peft_saved_names saved;
    /* Of routed experts; 0: r, alpha. */
    int64_t own_r[BL_PEFT_MAX_MODULES];
    double own_alpha[BL_PEFT_MAX_MODULES];
    bl_peft_layout layout;
    /* PER_EXPERT: an expert's pieces have different A. These are below one another in A of the
     * parameter, whose r is that of all pieces; B is 0 where rows of a piece meet another's A. */
    bool is_divided;
} bl_peft_config;

int64_t bl_peft_rank(const bl_peft_config *config, int module);

/* ---- reading ---- */

typedef struct bl_peft_adapter bl_peft_adapter;

/* Reads `dir`/adapter_config.json alone. target_modules may be a list of names, "all-linear" or a
 * regular expression; see bl_peft_match_names. Of an adapter with experts one by one its tensors
 * are read, too. BL_EINPUT names the key that is bad or not supported: DoRA, biases, per-layer
 * ranks, alphas or targets, ... */
bl_status bl_peft_load_config(const char *dir, const bl_peft_modules *modules, int64_t n_layers,
                              bl_peft_config *out);

/* The document dir/adapter_config.json of LoRA on any modules and parameters of any model: as
 * bl_peft_check_keys, but rank_pattern, alpha_pattern, fan_in_fan_out and target_parameters may
 * have values. *file is its path. The caller frees both; after an error both are NULL. */
bl_status bl_peft_load_any_keys(const char *dir, char **file, json_t **root);

/* Opens the adapter in `dir` and compares its tensors with its config and the base: BL_EINPUT lists
 * all that are missing, extra or of a wrong shape or dtype. *out is closed with bl_peft_close. */
bl_status bl_peft_open(const char *dir, const bl_peft_base *base, bl_peft_adapter **out);
void bl_peft_close(bl_peft_adapter *adapter); /* NULL is fine */

/* What bl_peft_open checks, where no base is at hand: its sizes are those of the adapter's own
 * tensors. */
bl_status bl_peft_check(const char *dir, const bl_peft_modules *modules);

const bl_peft_config *bl_peft_get_config(const bl_peft_adapter *adapter);

/* One factor as float: A is dst[r, in_features], B is dst[out_features, r]; of routed experts those
 * of all, one below the other. The module must be a target. Any thread. */
bl_status bl_peft_read(const bl_peft_adapter *adapter, int64_t layer, int module,
                       bl_peft_factor factor, float *dst);

/* Elements [begin, begin + n) of a tensor of modules_to_save, "model.norm.weight", as float.
 * BL_EINPUT: the adapter lacks the tensor, or has fewer elements. */
bl_status bl_peft_read_saved(const bl_peft_adapter *adapter, const char *tensor, int64_t begin,
                             int64_t n, float *dst);

/* Whether the adapter has the frozen weight of the targeted embedding or head, which PEFT may write
 * (save_embedding_layers). It is not compared with the model's. */
bool bl_peft_has_base_weight(const bl_peft_adapter *adapter, int module);
/* Elements [begin, begin + n) of it, as float. BL_EINPUT: as bl_peft_read_saved. */
bl_status bl_peft_read_base_weight(const bl_peft_adapter *adapter, int module, int64_t begin,
                                   int64_t n, float *dst);

/* ---- writing ---- */

/* B (out, r experts) of BL_PEFT_STACKED from B (experts out, r). */
void bl_peft_stack_b(int64_t n_experts, int64_t out, int64_t r, const float *b, float *stacked);

/* Fills dst with elements [begin, begin + n) of a tensor of modules_to_save. */
typedef bl_status (*bl_peft_fill_saved_fn)(void *arg, const char *tensor, int64_t begin, int64_t n,
                                           float *dst);

/* Fills dst with one factor, of the shape that bl_peft_read gives it. Called once for each, in the
 * order of the file. */
typedef bl_status (*bl_peft_fill_fn)(void *arg, int64_t layer, int module, bl_peft_factor factor,
                                     float *dst);

/* Writes both files into `dir`, the tensors first, each atomically. At most one factor, the factors
 * of a layer's routed experts, or a piece of a saved tensor is held in memory. config->layout:
 * STACKED, or PER_EXPERT, whose pieces get the same A. fill_saved: NULL without config->saved.
 * dtype is BL_F32 or BL_BF16 (rounded to nearest even). base_name is written as
 * base_model_name_or_path. The errors of base/files.h and of `fill`. */
bl_status bl_peft_write(const char *dir, const bl_peft_config *config, const bl_peft_base *base,
                        const char *base_name, bl_dtype dtype, bl_peft_fill_fn fill,
                        bl_peft_fill_saved_fn fill_saved, void *arg);

#endif
