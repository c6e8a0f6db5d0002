/* SPDX-License-Identifier: Apache-2.0 */
/* fast_sums.h -- sums of FP8 products as Hopper's tensor cores accumulate them.
 *
 * DeepSeek-V3 (arXiv:2412.19437, 3.3.2 and its note on the accumulator) found about 14 bits: the
 * products of an instruction and the accumulator are aligned to the largest of them by shifts to
 * the right, and what is below 14 bits is cut off. An instruction of wgmma takes 32 terms of FP8.
 * Here the cut is towards zero at 2^-13 of the largest one's leading bit. What the hardware does
 * beyond this is not published. */
#ifndef BALLAST_EMULATOR_FAST_SUMS_H
#define BALLAST_EMULATOR_FAST_SUMS_H

#include <stdint.h>

enum { EMULATED_FAST_TERMS = 32, EMULATED_FAST_BITS = 14 };

/* The sum of a[i] b[i], i < k. Values of FP8 codes: products are exact in fp32. */
float emulated_fast_sum(int64_t k, const float *a, const float *b);

#endif
