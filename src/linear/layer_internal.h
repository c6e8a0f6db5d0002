/* SPDX-License-Identifier: Apache-2.0 */
/* layer_internal.h -- a stack of layers, shared by layer.c (calls), layer_plan.c (sizes) and
 * layer_load.c (rows). Layer i is unit i of the base, with one matrix of one part: page i. */
#ifndef BALLAST_LINEAR_LAYER_INTERNAL_H
#define BALLAST_LINEAR_LAYER_INTERNAL_H

#include "device/staging.h"
#include "linear/apply.h"
#include "linear/layer.h"
#include "offload/pages.h"

struct bl_linear_layer {
    bl_linear_stack *stack;
    int64_t index;
    int64_t r, a_offset, b_offset; /* in the stack's vectors */
    float scale, dropout;
    bl_matmul_mode mode;
    int64_t scale_offset, n_scales; /* in the stack's scales */
};

struct bl_linear_stack {
    bl_linear_options options;
    bl_linear_memory memory;
    const bl_linear_spec *specs; /* the caller's, until create returns */
    int rank, n_ranks, ring_depth;
    int64_t n_layers;
    bl_linear_layer *layers;
    bl_base_layout layout;
    bl_tier *tiers; /* of layers */

    bl_comm *comm; /* the stack's own; NULL in a group of one */
    bl_stream *copy, *gather;
    bl_pages *pages;
    bl_base *base;
    float *scales;
    int64_t n_scales;
    float *weights, *gradients;
    bl_tensor copies; /* of the weights in bl_act_dtype; none where that is fp32 */
    int64_t n_floats;
    void *work;
    size_t work_bytes;

    bool has_dropout;
    uint64_t step;
    const int64_t *sample;
    const int32_t *position;
    int64_t *no_sample;
    int32_t *token;

    int64_t *held, *wanted; /* units in the ring, at most ring_depth; those of the next call */
    int64_t n_held;
    int64_t last_layer;
    int direction; /* of calls: +1 or -1 */
};

/* Fills options, n_layers, layers, layout, tiers and memory. */
bl_status bl_linear_stack_outline(bl_linear_stack *stack, const bl_linear_options *options,
                                  int64_t n_layers, const bl_linear_spec *specs);

/* Writes this rank's rows into pages, which it creates, and the scales of all rows. */
bl_status bl_linear_stack_load(bl_linear_stack *stack, bl_staging *staging);

/* The layer's LoRA terms, its workspace and its dropout, for a call. */
bl_linear_use bl_linear_layer_use(const bl_linear_layer *layer);

#endif
