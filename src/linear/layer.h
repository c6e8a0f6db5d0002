/* SPDX-License-Identifier: Apache-2.0 */
/* layer.h -- LoRA linear layers over frozen weights that are sharded, quantized and stored out of
 * the way.
 *
 *   y  = x W^T + s (D x A^T) B^T     s = alpha / r; equations and papers: linear/lora_linear.h
 *   dx = dy W  + D (s (dy B) A)
 *
 * A stack is a sequence of layers that share one ring of device memory. Each rank of the group
 * stores 1/n of the rows of every W, in device memory, host memory or page files; a call gathers
 * its layer's W just in time while the next layer's is in flight. Neither tier, ratio, ring depth
 * nor the number of ranks changes a bit of y, dx, dA or dB.
 *
 * A and B (fp32) and their gradients are on every rank, whole: the caller sums gradients over the
 * ranks (bl_comm_all_reduce_f32 over bl_linear_stack_gradients) and updates the weights. They are
 * the stack's, or with bl_linear_lora.is_external the caller's: each call gives them.
 *
 * Order of calls. The stack records calls and prefetches, from the second pass over its layers on,
 * what followed a call the last time. In the first pass it expects layers to go up and then down
 * (forward, backward; with forward_only: up, and again from the start). Another order is right,
 * too, but waits for its gathers; bl_linear_stack_get_stats counts them. Ranks of a group make the
 * same calls in the same order; where they gather different layers, all get BL_EINTERNAL, which
 * names both.
 *
 * Nothing is allocated after creation, except by bl_linear_stack_verify; with max_tokens 0, by
 * calls with more tokens than all before; and on the CPU by the first call with bf16 tensors. One
 * thread at a time calls a stack's functions: a call during a call of another thread is
 * BL_EUSAGE. */
#ifndef BALLAST_LINEAR_LAYER_H
#define BALLAST_LINEAR_LAYER_H

#include <stdbool.h>

#include "comm/comm.h"
#include "device/device.h"
#include "device/tensor.h"
#include "fp8/fp8.h"
#include "offload/tier.h"
#include "ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The LoRA term of a layer. r 0: none, the other members are not read. */
typedef struct bl_linear_lora {
    int64_t r;
    double alpha;
    bool use_rslora; /* s = alpha / sqrt(r), Kalajdzievski 2023, arXiv:2312.03732 */
    double dropout;  /* p of its input, in [0, 1); with forward_only: not applied */
    /* A, B and their gradients are the caller's memory, given by each call (bl_linear_call): the
     * layer is not in the stack's vectors, and nothing is initialized. */
    bool is_external;
} bl_linear_lora;

/* A layer, and where its frozen weight W (rows, cols) comes from: memory or a function. Both are
 * read by bl_linear_stack_create only, each rank its own rows; for BL_FORMAT_FP8_BLOCK whole blocks
 * of 128 rows, of which its neighbors have a part. */
typedef struct bl_linear_spec {
    int64_t rows, cols;
    bl_format format;   /* how W is stored */
    bl_dtype dtype;     /* of the rows given: BL_F32, BL_F16 or BL_BF16 */
    const void *weight; /* row-major and dense, host memory; NULL: */
    /* writes rows [begin, end) of W, dense, to `out` (host memory). From the thread of create. For
     * a tensor of a checkpoint: bl_stored_tensor_read_rows (store/safetensors.h). */
    bl_status (*read_rows)(void *user, int64_t begin, int64_t end, void *out);
    void *user;
    bl_matmul_mode mode; /* of products with W on CUDA (ops/matmul.h) */
    bl_linear_lora lora;
    const float *bias; /* (rows), added to y, frozen; host memory, read by create; NULL: none */
} bl_linear_spec;

typedef struct bl_linear_options {
    bl_device *device; /* borrowed, as is comm */
    bl_comm *comm;     /* the group; NULL: this rank alone. Free for other use after create */
    bl_tier tier;    /* where `ratio` of each rank's bytes are stored; the others: device memory */
    double ratio;    /* 0..1 */
    const char *dir; /* of page files, for BL_TIER_DISK; must exist */
    /* Names the contents of the page files: under another key they are rewritten. 0: a hash of the
     * rows, which are then read at each start. */
    uint64_t key;
    bool pin;       /* pin the memory of the host tier */
    int ring_depth; /* layers gathered at a time, the current one included; 0: 2 */
    /* Largest T of a call. 0: any; the workspace grows when a call needs more, which then waits
     * until the work before it on its stream has ended. */
    int64_t max_tokens;
    uint64_t seed;     /* of A's first values and of dropout's masks */
    bool forward_only; /* no backward: neither gradients nor dropout */
} bl_linear_options;

typedef struct bl_linear_stack bl_linear_stack;
typedef struct bl_linear_layer bl_linear_layer;

/* Bytes of one rank. */
typedef struct bl_linear_memory {
    size_t frozen; /* device memory: frozen rows, with their scales in fp8_block */
    size_t ring;   /* device memory: gathered layers */
    size_t scales; /* device memory: in fp8_row the scales of all rows */
    size_t lora;   /* device memory: A, B and their gradients, biases, and on CUDA bf16 copies */
    size_t work;   /* device memory: needed by a call besides x, y, dy and dx */
    size_t host;   /* host memory: frozen rows */
    size_t reader; /* host memory: buffers of reads from disk */
    size_t disk;   /* page files */
} bl_linear_memory;

/* The sizes that create takes, without taking them. Errors: as bl_linear_stack_create's for specs
 * and options. */
BL_API bl_status bl_linear_stack_plan(const bl_linear_options *options, int64_t n_layers,
                                      const bl_linear_spec *specs, bl_linear_memory *out);

/* Reads, quantizes and stores this rank's rows. A is uniform in [-1/sqrt(cols), 1/sqrt(cols)), B
 * zero. Collective over the group; specs and options are equal on all ranks except the source of
 * rows, dir and pin. A rank that fails aborts its job (bl_comm_abort), so that no other waits for
 * it. BL_EUSAGE: an option or spec, or ranks that differ; BL_EINPUT: a weight that is not finite,
 * dir; BL_ENOMEM, BL_ELIMIT, BL_EIO: memory and files; the error of read_rows. */
BL_API bl_status bl_linear_stack_create(const bl_linear_options *options, int64_t n_layers,
                                        const bl_linear_spec *specs, bl_linear_stack **out);
/* After the streams of its calls are idle; NULL is fine. Page files stay, for the next start. */
BL_API void bl_linear_stack_destroy(bl_linear_stack *stack);

/* Borrowed until the stack is destroyed; NULL unless layer is in [0, n_layers). */
BL_API bl_linear_layer *bl_linear_stack_layer(bl_linear_stack *stack, int64_t layer);

/* All layers' LoRA weights, A before B in order of layers, each from a multiple of 64 floats on
 * with zeros between: *n_floats (may be NULL) of device memory. Gradients likewise; NULL with
 * forward_only. */
BL_API float *bl_linear_stack_weights(bl_linear_stack *stack, int64_t *n_floats);
BL_API float *bl_linear_stack_gradients(bl_linear_stack *stack, int64_t *n_floats);

/* Dropout's keys in the calls that follow: a mask depends on the seed, `step`, the layer, and of
 * each token its sample and position. forward and backward of a step need the same. sample,
 * position: device memory, of T elements each in every call, borrowed until the next such call;
 * NULL: 0, and the token's index. At first: step 0, NULL, NULL. */
BL_API void bl_linear_stack_set_dropout(bl_linear_stack *stack, uint64_t step,
                                        const int64_t *sample, const int32_t *position);

/* Views into the two vectors; B follows A. r 0, is_external: all NULL. */
typedef struct bl_linear_lora_view {
    int64_t r;
    float *A, *B;   /* (r, cols), (rows, r) */
    float *dA, *dB; /* overwritten by backward, unless a call accumulates */
} bl_linear_lora_view;
BL_API bl_linear_lora_view bl_linear_layer_lora(const bl_linear_layer *layer);

/* The arguments of a call. Built zeroed, with size_bytes = sizeof(bl_linear_call): members that a
 * later version adds at the end are zero then. Every pointer is device memory, borrowed until the
 * stream has passed the call. */
typedef struct bl_linear_call {
    size_t size_bytes;
    int64_t T;
    int64_t rows, cols; /* of the layer as the caller sees it; compared unless 0 */
    /* x, dx (T, cols), y, dy (T, rows), row-major. One dtype: bf16, or on the CPU fp32 or bf16. A
     * CPU with AVX512-BF16 multiplies bf16 tensors as they are, A and B rounded to bf16, with fp32
     * sums; another computes in fp32, a panel of tokens at a time, and rounds once. */
    bl_tensor x, y;   /* y: of forward */
    bl_tensor dy, dx; /* of backward; no dx skips it */
    /* With is_external: (r, cols), (rows, r). dA, dB: of backward. Other layers: not read. */
    const float *A, *B;
    float *dA, *dB;
    bool accumulate;   /* dA and dB are added to, not overwritten */
    bool skip_dropout; /* as if the layer had none: evaluation */
    bool skip_bias;    /* y without the layer's bias */
    /* With `has_keys` in place of those of bl_linear_stack_set_dropout: */
    bool has_keys;
    uint64_t step;
    const int64_t *sample;   /* (T); NULL: 0 */
    const int32_t *position; /* (T); NULL: the token's index */
} bl_linear_call;

/* Queue themselves on `stream`, of the stack's device, and return. Calls on different streams are
 * ordered by the caller. forward: y is overwritten; x and y do not overlap. backward: x is the
 * forward's input; dx is overwritten and overlaps neither x nor dy. BL_EUSAGE: an argument that is
 * NULL or of another dtype, by its name; other rows or cols; T beyond max_tokens; backward with
 * forward_only; a call during another thread's. BL_ENOMEM: workspace. Else the error of stream or
 * group. */
BL_API bl_status bl_linear_call_forward(bl_linear_layer *layer, bl_stream *stream,
                                        const bl_linear_call *call);
BL_API bl_status bl_linear_call_backward(bl_linear_layer *layer, bl_stream *stream,
                                         const bl_linear_call *call);

/* The same for layers whose A and B are the stack's; dA and dB are overwritten. */
BL_API bl_status bl_linear_layer_forward(bl_linear_layer *layer, bl_stream *stream, int64_t T,
                                         bl_tensor x, bl_tensor y);
BL_API bl_status bl_linear_layer_backward(bl_linear_layer *layer, bl_stream *stream, int64_t T,
                                          bl_tensor x, bl_tensor dy, bl_tensor dx);

/* One rank's account. size_bytes = sizeof(bl_linear_stats) before the call. */
typedef struct bl_linear_stats {
    size_t size_bytes;
    bl_linear_memory memory; /* as planned; work: as grown */
    int64_t n_forward, n_backward;
    /* Layers that were loaded into the ring; not those in device memory of a group of one. */
    int64_t n_gathers;
    size_t gathered_bytes; /* of n_gathers, whole layers */
    int64_t n_on_demand;   /* of n_gathers: not prefetched before their call */
    int64_t n_strays;      /* calls that broke the recorded order */
    /* Time that calls waited for their layer, over the n_timed calls that were measured: those
     * before which the measurement of an earlier one had ended. */
    int64_t n_timed;
    double wait_s;
} bl_linear_stats;
BL_API bl_status bl_linear_stack_get_stats(bl_linear_stack *stack, bl_linear_stats *out);

/* Checks stored rows against the checksums of when they were written; streams idle. BL_EINPUT. */
BL_API bl_status bl_linear_stack_verify(bl_linear_stack *stack);

#ifdef __cplusplus
}
#endif

#endif
