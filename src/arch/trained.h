/* SPDX-License-Identifier: Apache-2.0 */
/* trained.h -- which tensors of a model full fine-tuning trains; the others are frozen.
 *
 * Each tensor is chosen by its name. Matrices of a base's units (layers, head, embedding) consist
 * of one or several tensors, stacked along the rows: q|k|v, gate|up. Spans are the trained rows of
 * a matrix. A tied embedding and head are one weight: either name means it.
 *
 * The backward pass ends at layer `first`: no trained tensor is before it. */
#ifndef BALLAST_ARCH_TRAINED_H
#define BALLAST_ARCH_TRAINED_H

#include "arch/arch.h"

/* Most spans of a matrix: of three tensors the outer two. */
enum { BL_TRAINED_SPANS = 2 };

typedef struct bl_trained_span {
    int64_t begin, n;
} bl_trained_span;

/* Ascending; tensors that are neighbors are one span. */
typedef struct bl_trained_spans {
    int n;
    bl_trained_span at[BL_TRAINED_SPANS];
} bl_trained_spans;

typedef struct bl_trained_unit {
    bl_trained_spans matrix[BL_LAYER_MATRICES]; /* rows; a table's: matrix[0] */
    bl_trained_spans bias[BL_LAYER_MATRICES];   /* elements of the bias of a matrix */
    unsigned vectors; /* bit v: bl_layer_vector v; of the head's unit the final norm is the first */
} bl_trained_unit;

typedef struct bl_trained_set {
    int64_t n_layers;
    bl_trained_unit *unit; /* [n_layers + 2]: layers; head, with the final norm; embedding */
    uint8_t *tensor;       /* [bl_arch_tensor_count]: 1 if it is trained */
    int64_t first;         /* n_layers: backward ends with the head */
    bool is_all;
    int64_t n_tensors, n_weights;         /* trained; a tied weight counts once */
    int64_t n_all_tensors, n_all_weights; /* of the model */
    /* Of all vectors of the model (bl_arch_vector_floats) the trained floats, ascending, neighbors
     * as one. */
    int64_t n_ranges;
    bl_trained_span *range;
    /* [bl_arch_tensor_count]: learning rates relative to the run's; NULL: 1. Of a tied weight those
     * of embedding and head are equal. */
    double *rate;
} bl_trained_set;

/* Lists of regular expressions over the tensors' names, as BL_PATTERN_COMPONENTS has them
 * (store/pattern.h). */
typedef struct bl_trained_patterns {
    const char *const *trainable; /* none: every tensor */
    int64_t n_trainable;
    const char *const *freeze; /* excluded from `trainable` */
    int64_t n_freeze;
} bl_trained_patterns;

/* The caller frees *out. BL_EUSAGE: an expression that matches no tensor, or nothing is left;
 * BL_ENOMEM. all: of no patterns. */
bl_status bl_trained_choose(const bl_model_config *config, const bl_trained_patterns *patterns,
                            bl_trained_set *out);
bl_status bl_trained_all(const bl_model_config *config, bl_trained_set *out);
/* The modules that are trained whole beside LoRA, selected as by PEFT's modules_to_save: norms,
 * embedding and head whose path ends in one of the names (Python's str.endswith). A tied embedding
 * and head are two weights. Status `refusal`, with `where` in the text: a name that selects no such
 * module, or a projection. */
bl_status bl_trained_choose_modules(const bl_model_config *config, const char *const *names,
                                    int64_t n_names, bl_status refusal, const char *where,
                                    bl_trained_set *out);
void bl_trained_free(bl_trained_set *set); /* zeros are fine */

/* Whether the unit has trained matrices. */
bool bl_trained_has_matrices(const bl_trained_unit *unit);
/* Whether the embedding is trained, also as a tied head. */
bool bl_trained_has_embedding(const bl_trained_set *set);
/* Whether the attention of a layer has trained tensors, its norms included. */
bool bl_trained_has_attention(const bl_trained_unit *unit);

/* A projection that is trained while others of its fused matrix are not: its name, "q_proj"; NULL:
 * there is none. */
const char *bl_trained_partial(const bl_model_config *config, const bl_trained_set *set);

/* The trained tensor of that name; false: there is none, or it is frozen. */
bool bl_trained_find(const bl_model_config *config, const bl_trained_set *set, const char *name,
                     bl_arch_tensor *out);

/* The relative learning rate of a row of a matrix of a unit; *end: the next row that may have
 * another. */
double bl_trained_rate(const bl_model_config *config, const bl_trained_set *set, int64_t unit,
                       int matrix, int64_t row, int64_t *end);

enum { BL_TRAINED_TEXT_BYTES = 256 };
/* "33.6 M of 134.5 M weights trained, 9 of 272 tensors; ..." */
void bl_trained_describe(const bl_model_config *config, const bl_trained_set *set,
                         char text[BL_TRAINED_TEXT_BYTES]);

/* Model FLOPs of a step with gradients of the set, as bl_arch_step_flops counts them. */
double bl_trained_step_flops(const bl_model_config *config, const bl_trained_set *set,
                             double n_tokens, double mean_tokens, double n_labels);

#endif
