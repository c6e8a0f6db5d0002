/* SPDX-License-Identifier: Apache-2.0 */
/* layer_internal.h -- a stack of layers, shared by layer.c (creation), layer_call.c
 * (calls), layer_order.c (which layers the ring holds), layer_plan.c (sizes) and layer_load.c
 * (rows). Layer i is unit i of the base, with one matrix of one segment: a page, and one of scales
 * if its format has BL_SCALES_PAGED. */
#ifndef BALLAST_LINEAR_LAYER_INTERNAL_H
#define BALLAST_LINEAR_LAYER_INTERNAL_H

#include "device/staging.h"
#include "linear/apply.h"
#include "linear/layer.h"
#include "offload/pages.h"

#define BL_LINEAR_MAX_TOKENS (INT64_C(1) << 30)

struct bl_linear_layer {
    bl_linear_stack *stack;
    int64_t index;
    int64_t r, a_offset, b_offset; /* in the stack's vectors; external: in its copies */
    bool is_external;
    float scale, dropout;
    bl_matmul_mode mode;
    int64_t scale_offset, n_scales; /* in the stack's scales */
    bl_tier tier;
    int64_t bias_offset; /* in the stack's biases; -1: none */
};

typedef struct bl_linear_recorded {
    int32_t layer;
    bool is_backward;
} bl_linear_recorded;

/* The order of calls: layer_order.c. Counted from the first on. */
typedef struct bl_linear_order {
    bl_linear_recorded *calls; /* the last `capacity` of n_calls */
    int64_t capacity, n_calls;
    int64_t match; /* the earlier call whose successors are expected; -1: none */
    int64_t n_gathers, n_on_demand, n_strays;
    size_t gathered_bytes;
} bl_linear_order;

struct bl_linear_stack {
    bl_linear_options options;
    bl_linear_memory memory;
    const bl_linear_spec *specs; /* the caller's, until create returns */
    int rank, n_ranks, ring_depth;
    int64_t n_layers;
    bl_linear_layer *layers;
    bl_base_layout layout;
    bl_tier *tiers; /* of pages */

    bl_comm *comm; /* the stack's own; NULL in a group of one */
    bl_stream *copy, *gather;
    bl_pages *pages;
    bl_base *base;
    float *scales; /* of all layers whose format has BL_SCALES_WHOLE */
    int64_t n_scales;
    float *weights, *gradients;
    bl_tensor copies;             /* of the weights in bl_device_act; none where that is fp32 */
    int64_t n_floats, n_external; /* n_external: of the largest layer with is_external */
    bl_tensor biases;             /* in bl_device_act */
    int64_t n_biases;
    /* For up to n_tokens: */
    int64_t n_tokens;
    void *work;
    size_t work_bytes;
    bl_tensor ones; /* NULL without biases */
    /* Of the CPU, for calls with bf16 tensors, taken by the first: copies of one layer's A and B;
     * or without bf16 products x, dx and y or dy of a panel of tokens. */
    bl_tensor halves;
    float *panel;

    bool has_dropout;
    uint64_t step;
    const int64_t *sample;
    const int32_t *position;
    int64_t *no_sample;
    int32_t *token;

    bool is_in_call; /* read and written atomically */
    int64_t n_forward, n_backward, n_timed;
    bl_stamp *begin_wait, *end_wait;
    double wait_s;
    bool is_timing; /* the stamps were recorded and not read yet */

    bl_linear_order order;
    int64_t *held, *wanted; /* units in the ring, at most ring_depth; those of the next call */
    int64_t n_held;
    int64_t last_layer;
    int direction; /* of calls: +1 or -1 */
};

/* Fills options, n_layers, layers, layout, tiers and memory. */
bl_status bl_linear_stack_outline(bl_linear_stack *stack, const bl_linear_options *options,
                                  int64_t n_layers, const bl_linear_spec *specs);

/* Writes this rank's rows into pages, which it creates, and the scales that it holds whole. */
bl_status bl_linear_stack_load(bl_linear_stack *stack, bl_staging *staging);

/* The layer's LoRA terms except A, B, their gradients and the mask's keys. */
bl_lora_linear bl_linear_layer_outline(const bl_linear_layer *layer);

/* The workspace of calls with T tokens, and all that they need. */
size_t bl_linear_stack_work_bytes(const bl_linear_stack *stack, int64_t T);
size_t bl_linear_stack_call_bytes(const bl_linear_stack *stack, int64_t T);
/* Makes the workspace, the tokens' numbers and the ones large enough for T tokens; what held them
 * before is freed, and nothing queued may use it. */
bl_status bl_linear_stack_reserve(bl_linear_stack *stack, int64_t T);

/* Whether bf16 tensors are multiplied as they are; else by way of fp32. */
bool bl_linear_stack_multiplies_bf16(const bl_linear_stack *stack);

bl_status bl_linear_order_create(bl_linear_order *order, int64_t n_layers);
/* Has the ring hold the layers expected from a call of `layer` on. */
bl_status bl_linear_order_turn(bl_linear_stack *stack, int64_t layer, bool is_backward,
                               bl_stream *stream);

#endif
