/* SPDX-License-Identifier: Apache-2.0 */
/* rounding_internal.h -- stochastic rounding from fp32 to bf16, its random bits a function of a
 * counter. A value x between the bf16 neighbors a < b becomes b with probability (x - a) / (b - a),
 * so the mean is x (Gupta, Agrawal, Gopalakrishnan & Narayanan 2015, arXiv:1502.02551, section 3).
 * Usable from C and from CUDA, so that both devices round alike.
 *
 * A random word of 32 bits belongs to (seed, step, tensor, element):
 *
 *   once a call:  key = words 0 and 1 of philox(counter = {step lo, step hi, tensor, 2^32 - 1},
 *                                               key = {seed lo, seed hi})
 *   word = mix(mix(element lo ^ key[0]) + key[1] + 0x9E3779B9 * element hi)
 *
 * mix is a permutation of 32 bits with the constants that Wellons' search for hash functions found
 * (github.com/skeeto/hash-prospector): two multiplications, so that drawing a word takes less time
 * than moving an element's bytes. Philox itself would take four times as many instructions.
 * Word 3 of the counter tells these keys from dropout's (philox.h), whose matrices are below it. */
#ifndef BALLAST_OPS_ROUNDING_INTERNAL_H
#define BALLAST_OPS_ROUNDING_INTERNAL_H

#include <stdint.h>
#include <string.h>

#include "base/host_device.h"
#include "ops/philox.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Once per call. */
BL_HOST_DEVICE bl_philox_key bl_rounding_key(uint64_t seed, uint64_t step, uint32_t tensor)
{
    uint32_t counter[4] = {(uint32_t)step, (uint32_t)(step >> 32), tensor, UINT32_MAX};
    bl_philox_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    bl_philox_4x32_10(counter, key);
    key.word[0] = counter[0];
    key.word[1] = counter[1];
    return key;
}

/* The permutation `mix`. */
BL_HOST_DEVICE uint32_t bl_rounding_mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    return x ^ x >> 15;
}

/* The key of the elements whose bits above 32 are `high`; the word of one of them. */
BL_HOST_DEVICE bl_philox_key bl_rounding_key_of(bl_philox_key key, uint32_t high)
{
    key.word[1] += 0x9E3779B9u * high;
    return key;
}
BL_HOST_DEVICE uint32_t bl_rounding_word(bl_philox_key key, uint32_t low)
{
    return bl_rounding_mix(bl_rounding_mix(low ^ key.word[0]) + key.word[1]);
}

/* value rounded up in magnitude if the 16 bits that it loses and the low 16 bits of `random`
 * together pass 2^16. Infinity and NaN stay unchanged. */
BL_HOST_DEVICE uint16_t bl_f32_to_bf16_random(float value, uint32_t random)
{
    uint32_t bits, special;
    memcpy(&bits, &value, sizeof bits);
    special = bits >> 16 | ((bits & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u);
    return (uint16_t)((bits & 0x7f800000u) == 0x7f800000u ? special
                                                          : (bits + (random & 0xffffu)) >> 16);
}

#ifdef __cplusplus
}
#endif

#endif
