/* SPDX-License-Identifier: Apache-2.0 */
/* layer_problem.h -- a small stack of layers with its inputs, for the tests of linear/layer.h. */
#ifndef BALLAST_TESTS_LINEAR_LAYER_PROBLEM_H
#define BALLAST_TESTS_LINEAR_LAYER_PROBLEM_H

#include "ops_test.h"

#include "linear/layer.h"

enum { LAYERS = 3, T = 9 };

typedef enum lora_kind { PLAIN, LORA, DROPOUT, N_KINDS } lora_kind;

typedef struct layer_shape {
    int64_t rows, cols;
} layer_shape;

/* Fewer rows than ranks; blocks of 128 rows that ranks share; the last one suits FP8 products. */
extern const layer_shape shapes[LAYERS];

/* Every output of a pass over the stack: a rank's bits. */
typedef struct outputs {
    float *y[LAYERS], *dx[LAYERS], *dA[LAYERS], *dB[LAYERS];
} outputs;

/* Inputs of all layers, the same on all ranks. Weights are multiples of bf16: fp32 rows and bf16
 * rows are the same ones. */
typedef struct problem {
    bl_format format;
    lora_kind kind;
    bl_linear_spec specs[LAYERS], bf16_specs[LAYERS];
    float *w[LAYERS], *x[LAYERS], *dy[LAYERS], *B[LAYERS];
    uint16_t *bf16[LAYERS];
    int64_t sample[T];
    int32_t position[T];
    outputs first; /* of the first run */
} problem;

void create_problem(problem *p, bl_format format, lora_kind kind);
void free_problem(problem *p);
int64_t lora_r(const problem *p, int layer);

outputs create_outputs(const problem *p);
void free_outputs(outputs *o);

/* A read_rows whose user is a spec with bf16 rows in memory. */
bl_status read_bf16(void *user, int64_t begin, int64_t end, void *out);

/* Copies the problem's B into a layer, where it is zero at first. */
bl_status set_B(bl_stream *stream, bl_linear_stack *stack, const problem *p, int layer);

/* y of layer 0, alone. */
void forward_once(test_device d, bl_linear_stack *stack, const problem *p, float *y);

#endif
