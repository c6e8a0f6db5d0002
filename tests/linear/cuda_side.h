/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_side.h -- a LoRA linear layer with its inputs in the memory of one device: the tests of
 * products on CUDA run the same layer on both. */
#ifndef BALLAST_TESTS_LINEAR_CUDA_SIDE_H
#define BALLAST_TESTS_LINEAR_CUDA_SIDE_H

#include "ops_test.h"

#include "linear/lora_linear.h"

enum { MAX_PARTS = BL_LORA_PARTS, MAX_BUFFERS = 40, MAX_GUARDS = 8, GUARD_BYTES = 4096 };

typedef struct layer_shape {
    const char *name;
    bool is_fp8_possible;
    int64_t T, K;
    int n_segments;
    struct {
        bl_format format;
        int64_t rows;
    } segment[MAX_PARTS];
    int n_parts;
    struct {
        int64_t r, row_begin, rows;
        float scale;
    } part[MAX_PARTS];
    bool is_stacked;
} layer_shape;

/* A layer whose pointers are memory of one device. */
typedef struct side {
    test_device d;
    bool is_cuda;
    void *buffers[MAX_BUFFERS];
    int n_buffers;
    void *guards[MAX_GUARDS]; /* behind workspaces: looked at by side_destroy */
    int n_guards;
    bl_lora_linear linear;
    bl_tensor x, dy, y, dx;
} side;

void check_status(bl_status st);

/* `bytes` of device memory of the side, freed with it; values NULL: garbage. */
void *side_memory(side *s, const void *values, size_t bytes);

/* n elements of bf16 or fp32 as doubles, which the caller frees. */
double *side_fetch(const side *s, const void *memory, int64_t n, bool is_half);

/* A layer of this shape with its inputs, the same on every device: values that bf16 holds. */
side side_create(test_device d, bl_pool *pool, const layer_shape *shape, float dropout,
                 bl_matmul_mode mode);
/* Gives the layer a workspace of the bytes that its members ask for now, with guarded bytes
 * behind. */
void side_take_workspace(side *s, int64_t T);
/* Gives the layer a residual, the same on every device. */
void side_add_residual(side *s, int64_t T);
void side_destroy(side *s);

/* forward and backward, to the end. */
void side_run(side *s, int64_t T);

#endif
