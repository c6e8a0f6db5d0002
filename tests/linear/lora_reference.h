/* SPDX-License-Identifier: Apache-2.0 */
/* lora_reference.h -- the four equations of linear/lora_linear.h as naive double loops. */
#ifndef BALLAST_TESTS_LINEAR_LORA_REFERENCE_H
#define BALLAST_TESTS_LINEAR_LORA_REFERENCE_H

#include <stdbool.h>

#include "linear/lora_linear.h"

/* Of `linear`, parts and dropout are read: A and B in fp32. w (N,K), decoded. */
typedef struct lora_inputs {
    const bl_lora_linear *linear;
    int64_t T, K, N;
    const double *w;
    const float *x, *dy;
} lora_inputs;

typedef struct lora_reference {
    double *y, *dx, *dA[BL_LORA_PARTS], *dB[BL_LORA_PARTS];
} lora_reference;

/* sizes: of the inputs' absolute values, for bounds. */
lora_reference lora_reference_compute(const lora_inputs *inputs, bool sizes);
void lora_reference_free(lora_reference *reference);

#endif
