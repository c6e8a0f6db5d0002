/* SPDX-License-Identifier: Apache-2.0 */
/* layer_runs.h -- whole runs of a LoRA linear layer on the emulated GPU, with all their outputs. */
#ifndef BALLAST_TESTS_LINEAR_LAYER_RUNS_H
#define BALLAST_TESTS_LINEAR_LAYER_RUNS_H

#include "cuda_side.h"

enum { N_OUTPUTS = 2 + 2 * MAX_PARTS };

extern const layer_shape runs_row_shape, runs_block_shape;

typedef struct fixture {
    test_device cpu, gpu;
} fixture;

int runs_setup(void **state);
int runs_teardown(void **state);
/* Another GPU, since plans remember rejections permanently. */
void runs_renew_gpu(fixture *f);

/* y, dx, and dA and dB of each part. */
typedef struct outputs {
    double *value[N_OUTPUTS];
    int64_t n[N_OUTPUTS];
} outputs;

outputs runs_layer(side *s, const layer_shape *l);
/* A layer of this shape, made for the run. */
outputs runs_shape(fixture *f, const layer_shape *l, float dropout, bl_matmul_mode mode);
bool runs_are_same(const outputs *a, const outputs *b); /* to the bit */
void runs_free(outputs *o);

#endif
