/* SPDX-License-Identifier: Apache-2.0 */
/* fake_cuda_math.h -- what a test can ask of fake_cuda_math.c. */
#ifndef BALLAST_TESTS_FAKE_CUDA_MATH_H
#define BALLAST_TESTS_FAKE_CUDA_MATH_H

#include <stdbool.h>

void fake_cublaslt_refuse_fp8(bool refuse);
int fake_cublaslt_products(void);         /* so far */
int fake_cublaslt_fp8_products(void);     /* of those, in FP8 */
int fake_cublaslt_fast_sums(void);        /* of those, with fast sums */
void fake_cublaslt_slow_first(bool slow); /* the first of three candidates pretends to be */
int fake_cublaslt_last_candidate(void);

#endif
