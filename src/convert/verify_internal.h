/* SPDX-License-Identifier: Apache-2.0 */
/* verify_internal.h -- between verify.c (the report), verify_index.c (a checkpoint as matrices),
 * verify_adapter.c (an adapter's factors), verify_targets.c (what adapter_config.json names),
 * verify_loads.c (other programs), verify_delta.c (the values of a matrix), verify_explain.c
 * (another delta than its own) and verify_merged.c. */
#ifndef BALLAST_CONVERT_VERIFY_INTERNAL_H
#define BALLAST_CONVERT_VERIFY_INTERNAL_H

#include "convert/merge_internal.h"
#include "convert/verify.h"
#include "store/hf_model.h"
#include "store/pattern.h"
#include "store/peft_numbers.h"

enum { BL_VERIFY_NAME_BYTES = 512 };

/* ---- verify_index.c ---- */

/* Rows of a stored tensor, seen as a matrix (all axes but the last, the last). */
typedef struct bl_slice {
    const bl_stored_tensor *tensor;
    int64_t first_row, rows, cols;
} bl_slice;

/* A matrix, a vector, or one expert's part of a stacked tensor. */
typedef struct bl_verify_block {
    char *key;           /* the same for every way of storing it: see bl_verify_key */
    int64_t expert;      /* -1: of none */
    bool is_input_first; /* stacked as (E, in, out): gate and up are one block */
    bl_slice slice;
} bl_verify_block;

typedef struct bl_verify_index {
    bl_hf_model *model;
    bl_verify_block *blocks; /* in the order of their keys */
    size_t n, capacity;
    bool is_tied;     /* tie_word_embeddings */
    int64_t n_layers; /* num_hidden_layers; INT64_MAX: not given */
    bool is_llama4;   /* its experts are (E, in, out), and PEFT takes them for (E, out, in) */
} bl_verify_index;

/* BL_EINPUT: bl_hf_open's, a name that is too long, or two tensors for one matrix. */
bl_status bl_verify_index_open(const char *dir, bl_verify_index *out);
void bl_verify_index_close(bl_verify_index *index);
const bl_verify_block *bl_verify_find(const bl_verify_index *index,
                                      const char *key); /* NULL: none */

/* Whether a block's tensor has 4-bit codes (bl_hf_packed). */
bool bl_verify_is_packed(const bl_hf_model *model, const bl_stored_tensor *tensor);

/* A tensor's or module's name as transformers 5 has it in a text model: without "language_model.",
 * and block_sparse_moe.experts.0.w1 as mlp.experts.0.gate_proj. False: too long. */
bool bl_verify_key(const char *name, char key[BL_VERIFY_NAME_BYTES]);
/* The key with its layer's and expert's numbers replaced by "*". */
void bl_verify_class(const char *key, char text[BL_VERIFY_NAME_BYTES]);
/* N of the first "layers.N." or "h.N."; -1: none. */
int64_t bl_verify_layer(const char *key);

/* ---- verify_adapter.c ---- */

/* A and B of one module. */
typedef struct bl_pair {
    char *module;                  /* as in the file, without base_model.model. */
    char *key;                     /* of the block; of stacked experts "...mlp.experts" */
    const bl_stored_tensor *a, *b; /* NULL: absent */
    bool is_embedding;
    const char *parameter; /* of stacked experts: "gate_up_proj" or "down_proj"; else NULL */
    int64_t r;
    double scale;
    int64_t n_experts;  /* stacked in a and b; 1: a plain matrix */
    int64_t rows, cols; /* of the base's matrix, of one expert */
    bool is_transposed; /* A's columns are the base's rows */
    bool is_ambiguous;  /* square: the shapes do not tell */
    bool fits;          /* false: a fault was reported, or the module is absent */
    bool is_untargeted; /* adapter_config.json does not select it: PEFT drops it */
    bool has_nan;
} bl_pair;

typedef struct bl_verify_adapter {
    bl_safetensors *file;
    char *config_path;
    json_t *config;
    int64_t r;
    double alpha;
    bool use_rslora, fan_in_fan_out;
    bl_peft_numbers ranks, alphas;
    bl_pair *pairs; /* in the order of module */
    size_t n_pairs;
    const bl_stored_tensor **others; /* modules_to_save, frozen embeddings */
    size_t n_others;
    const char *layout; /* of stacked experts: a name of "layouts"; NULL: there are none */
} bl_verify_adapter;

typedef struct bl_verify {
    const bl_verify_options *options;
    bl_verify_index base, merged;
    bl_verify_adapter adapter;
    json_t *report, *faults, *warnings; /* the lists belong to the report */
} bl_verify;

/* Both formats are printf's for `found`. Without memory the entry is left out:
 * bl_json_ran_out. */
void bl_verify_fault(bl_verify *v, const char *kind, const char *tensor, const char *expected,
                     const char *found, ...) BL_PRINTF(5, 6);
void bl_verify_warning(bl_verify *v, const char *format, ...) BL_PRINTF(2, 3);

bl_status bl_verify_adapter_open(bl_verify *v);
void bl_verify_adapter_close(bl_verify_adapter *adapter);
/* The block of a module's weight; of a tied head that of the embedding. NULL: none. */
const bl_verify_block *bl_verify_find_weight(const bl_verify *v, const char *key, bool *is_tied);
/* The block that the tensor `name` of modules_to_save replaces, or of a frozen copy; NULL: none.
 * *is_tied: it is the tied head's, which the base stores as the embedding. */
const bl_verify_block *bl_verify_find_other(const bl_verify *v, const char *name, bool *is_tied);
/* The tensor's name without base_model.model. and base_layer. */
void bl_verify_other_name(const bl_stored_tensor *tensor, char name[BL_VERIFY_NAME_BYTES]);

/* ---- verify_targets.c ---- */

bl_status bl_verify_targets(bl_verify *v);

/* ---- verify_loads.c ---- */

bl_status bl_verify_loads(bl_verify *v);

/* ---- verify_delta.c ---- */

/* The delta s B A of a block: A of one pair and expert, B of the same, or to explain a fault of
 * another. Rows are those of the base's matrix (of gate_up_proj) from `row` on. */
typedef struct bl_factors {
    const bl_pair *a, *b;
    int64_t expert_a, expert_b, row;
    bool is_expert_slow; /* B's columns of an expert are neighbors */
    bool is_flipped;     /* the transpose; of square matrices */
} bl_factors;

/* d: the delta; R and Q: W + d and W rounded to nearest to M's dtype. */
typedef struct bl_delta_sums {
    bl_merge_sums direct;
    double effect;                    /* |R - Q|^2 */
    double off, off_along, off_noise; /* |M - R|^2, <M - R, d>, sum of (M - R)^2 d^2 */
    double change, change_along;      /* |M - Q|^2, <M - Q, d> */
    double direct_noise;              /* sum of (M - W - d)^2 d^2 */
    double gaps;                      /* sum of squares of half the distance of neighbors */
    int64_t n, n_differ;              /* elements; of which M is not R */
    int64_t n_outside;                /* farther than rounding: to either neighbor with a delta */
    int64_t n_bad_base, n_bad_merged; /* NaN, infinity */
} bl_delta_sums;

typedef struct bl_delta_sides {
    const bl_hf_model *base_model, *merged_model; /* base_model: of codes; else NULL is fine */
    bl_slice base, merged;                        /* of the same rows and cols */
} bl_delta_sides;

/* Buffers of a comparison. */
typedef struct bl_delta bl_delta;
bl_status bl_delta_create(bl_pool *pool, bl_delta **out);
void bl_delta_destroy(bl_delta *delta); /* NULL is fine */

/* Overwrites *out with the sums over the first max_rows rows. factors NULL: the delta is 0.
 * BL_EINPUT: dtypes that are not float or FP8 with scales. */
bl_status bl_delta_compare(bl_delta *delta, const bl_delta_sides *sides, const bl_factors *factors,
                           int64_t max_rows, bl_delta_sums *out);
/* Whether two matrices of the same size and dtype have the same bytes. */
bl_status bl_delta_same_bytes(bl_delta *delta, const bl_slice *a, const bl_slice *b, bool *out);

/* ---- verify_explain.c ---- */

/* Which other delta of the adapter a matrix has, in words: "B of expert 3"; false: none. */
bl_status bl_verify_explain(const bl_verify *v, bl_delta *delta, const bl_delta_sides *sides,
                            const bl_factors *own, char text[BL_VERIFY_NAME_BYTES], bool *found);

/* ---- verify_merged.c ---- */

bl_status bl_verify_merged(bl_verify *v);
/* Frozen weights in an adapter, which PEFT may write (save_embedding_layers), are the base's. */
bl_status bl_verify_frozen(bl_verify *v);

#endif
