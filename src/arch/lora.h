/* SPDX-License-Identifier: Apache-2.0 */
/* lora.h -- the LoRA weights of a model: which projections have them, and where they are in a
 * layer's flat vector.
 *
 * Flat order: layer, then the architecture's projections (PEFT's module order), A (r,K) before B
 * (N,r). A stacked layout has, matrix by matrix, the A's of all projections before their B's: what
 * bl_lora_linear's is_stacked wants of devices with bf16 activations. Routed experts have one pair
 * of factors: A (experts r,K) and B (experts N,r), expert by expert. Layers of one kind are alike,
 * and a projection begins at the same place in all kinds that have it; gradients have the same
 * layout. A layer's vector is sharded over all ranks: rank i holds floats [i c, (i+1) c), c =
 * ceil(n / ranks) of the layer's n floats, zero-padded at the end; the shards of layers follow one
 * another.
 *
 * The terms of the embedding and the head are in a separate vector, whole on every rank: A before B
 * of each, the embedding first. The embedding's A is stored transposed, (vocab, r), so
 * that a token's column of PEFT's A is a row. */
#ifndef BALLAST_ARCH_LORA_H
#define BALLAST_ARCH_LORA_H

#include <stdbool.h>
#include <stdint.h>

#include "linear/lora_linear.h"
#include "arch/arch.h"

typedef struct bl_lora_options {
    int64_t r;
    double alpha;
    bool use_rslora;
    double dropout;                  /* p of the LoRA path's input dropout, in [0, 1) */
    bool target[BL_MAX_PROJECTIONS]; /* by the architecture's projections */
    bool table[BL_MODEL_TABLES];
    /* Of routed experts' projections; 0: as above. */
    int64_t own_r[BL_MAX_PROJECTIONS];
    double own_alpha[BL_MAX_PROJECTIONS];
    bl_peft_layout layout; /* of them in the written adapter */
} bl_lora_options;

typedef struct bl_lora_layout {
    const bl_arch *arch;
    bl_lora_options options;
    float scale; /* alpha / r, or alpha / sqrt(r); of tables */
    /* Of each projection, and the experts whose factors it has; 1: it is a matrix. */
    int64_t r[BL_MAX_PROJECTIONS], n_experts[BL_MAX_PROJECTIONS];
    float scale_of[BL_MAX_PROJECTIONS];
    /* Floats from the start of the layer's vector; -1: not a target. */
    int64_t a_offset[BL_MAX_PROJECTIONS];
    int64_t b_offset[BL_MAX_PROJECTIONS];
    int64_t a_cols[BL_MAX_PROJECTIONS], b_rows[BL_MAX_PROJECTIONS]; /* b_rows: of all experts */
    int64_t row_begin[BL_MAX_PROJECTIONS];                          /* in the fused matrix */
    bl_layer_kinds kinds;
    bool has_kind[BL_LAYER_KINDS]; /* the model has such layers */
    int64_t
        kind_floats[BL_LAYER_KINDS]; /* of a layer, without padding; 0 of kinds without layers */
    int64_t n_floats;                /* the larger one; 0: no adapter */
    bool is_stacked;
    /* Floats from the start of the tables' vector; -1: not a target. */
    int64_t table_a[BL_MODEL_TABLES], table_b[BL_MODEL_TABLES];
    int64_t n_table_floats;
    int64_t vocab, hidden;
    /* Learning rates of A and B relative to the run's; without has_rates all are 1. */
    bool has_rates;
    double rate[BL_MAX_PROJECTIONS][2], table_rate[BL_MODEL_TABLES][2];
} bl_lora_layout;

/* s of W + s B A: alpha / r, or with rslora alpha / sqrt(r). */
double bl_lora_scale(double alpha, int64_t r, bool use_rslora);

/* options NULL: no adapter at all. */
void bl_lora_layout_init(const bl_model_config *config, const bl_lora_options *options,
                         bl_lora_layout *out);
/* Moves the projections of a layout between the two orders. */
void bl_lora_layout_stack(bl_lora_layout *layout, bool is_stacked);

/* Floats of layer `layer`, and of all layers before it; of its shard of one of n_ranks ranks, and
 * of those of all layers before it. Layer n_layers: of all. */
int64_t bl_lora_layer_floats(const bl_lora_layout *layout, int64_t layer);
int64_t bl_lora_floats_before(const bl_lora_layout *layout, int64_t layer);
int64_t bl_lora_chunk(const bl_lora_layout *layout, int64_t layer, int n_ranks);
int64_t bl_lora_chunks_before(const bl_lora_layout *layout, int64_t layer, int n_ranks);
/* Whether layer `layer` has a term of the projection. */
bool bl_lora_has(const bl_lora_layout *layout, int64_t layer, int projection);

/* Sets `linear`'s parts for fused matrix `matrix` of a layer of a kind; weights and gradients are
 * flat vectors of one layer, gradients NULL in a forward. Leaves weight, dropout and workspace
 * alone. */
void bl_lora_layout_bind(const bl_lora_layout *layout, bl_layer_kind kind, bl_layer_matrix matrix,
                         bl_tensor weights, float *gradients, bl_lora_linear *linear);

/* Floats of a projection's factor, of all its experts. */
int64_t bl_lora_factor_floats(const bl_lora_layout *layout, int projection, bl_peft_factor factor);
/* Whether routed experts are among the targets. */
bool bl_lora_has_experts(const bl_lora_layout *layout);
/* The largest r of a target; options.r where there is none. */
int64_t bl_lora_largest_r(const bl_lora_layout *layout);

/* Weights of an adapter of n_layers layers. */
int64_t bl_lora_n_weights(const bl_lora_layout *layout, int64_t n_layers);

/* FLOPs of a step of the terms of the embedding and the head: forward, and twice as many backward.
 * Products with the head's B are only for tokens with labels. */
double bl_lora_table_flops(const bl_lora_layout *layout, double n_tokens, double n_labels);

/* Floats of a factor of a table's term: r times vocab or hidden. */
int64_t bl_lora_table_floats(const bl_lora_layout *layout, bl_model_table table,
                             bl_peft_factor factor);
/* Initial values of floats [begin, begin + count) of the tables' vector, as PEFT's: head as the
 * projections; embedding A = 0, B ~ N(0, 1). Element i of a factor is a function of (seed, table,
 * i) alone. */
void bl_lora_layout_initialize_tables(const bl_lora_layout *layout, uint64_t seed, int64_t begin,
                                      int64_t count, float *out);

/* A ~ U(-1/sqrt(K), 1/sqrt(K)) (PEFT's kaiming_uniform with a = sqrt 5), B = 0. Element i of
 * projection p in layer l is a function of (seed, l, p, i) alone. Writes floats [begin, begin +
 * count) of the layer's flat vector to out; past n_floats: 0. */
void bl_lora_layout_initialize(const bl_lora_layout *layout, uint64_t seed, int64_t layer,
                               int64_t begin, int64_t count, float *out);

#endif
