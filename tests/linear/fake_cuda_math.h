/* SPDX-License-Identifier: Apache-2.0 */
/* fake_cuda_math.h -- what a test can ask of fake_cuda_math.c. */
#ifndef BALLAST_TESTS_FAKE_CUDA_MATH_H
#define BALLAST_TESTS_FAKE_CUDA_MATH_H

#include <stdbool.h>

void fake_cublaslt_refuse_fp8(bool refuse);
int fake_cublaslt_fp8_products(void); /* so far */

#endif
