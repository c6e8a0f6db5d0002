/* SPDX-License-Identifier: Apache-2.0 */
/* philox.h -- Philox 4x32-10, Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy
 * as 1, 2, 3" (SC'11), section 3.3, and the counters of dropout. Usable from C and from CUDA, so
 * that both devices draw the same mask.
 *
 * Dropout's mask at row t, column c. Words are uint32; lo and hi are the halves of a 64-bit number.
 *
 *   once a call:  key' = words 0 and 1 of philox(counter = {step lo, step hi, layer, matrix},
 *                                                key = {seed lo, seed hi})
 *   random = word c % 4 of philox(counter = {c / 4, position[t], sample[t] lo, sample[t] hi}, key =
 *   key') kept when random >= floor(p 2^32), p taken exactly; multiplied by (float)(1 / (1 -
 *   (double)p))
 *
 * Under one key' no two elements share a counter; c / 4 fits 32 bits since C < 2^34. */
#ifndef BALLAST_OPS_PHILOX_H
#define BALLAST_OPS_PHILOX_H

#include <stdint.h>

#include "base/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Philox's key: two words. */
typedef struct bl_philox_key {
    uint32_t word[2];
} bl_philox_key;

/* counter[4] becomes the four random words. */
BL_HOST_DEVICE void bl_philox_4x32_10(uint32_t counter[4], bl_philox_key key)
{
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * counter[0],
                 product1 = (uint64_t)0xCD9E8D57u * counter[2];
        uint32_t word1 = counter[1], word3 = counter[3];
        counter[0] = (uint32_t)(product1 >> 32) ^ word1 ^ key.word[0];
        counter[1] = (uint32_t)product1;
        counter[2] = (uint32_t)(product0 >> 32) ^ word3 ^ key.word[1];
        counter[3] = (uint32_t)product0;
        key.word[0] += 0x9E3779B9u; /* the golden ratio */
        key.word[1] += 0xBB67AE85u; /* sqrt(3) - 1 */
    }
}

/* key' above: once per call. */
BL_HOST_DEVICE bl_philox_key bl_dropout_key(uint64_t seed, uint64_t step, int32_t layer,
                                            int32_t matrix)
{
    uint32_t counter[4] = {(uint32_t)step, (uint32_t)(step >> 32), (uint32_t)layer,
                           (uint32_t)matrix};
    bl_philox_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    bl_philox_4x32_10(counter, key);
    key.word[0] = counter[0];
    key.word[1] = counter[1];
    return key;
}

/* The random words of columns 4 group ... 4 group + 3 of one row. */
BL_HOST_DEVICE void bl_dropout_words(bl_philox_key key, int64_t sample, int32_t position,
                                     uint32_t group, uint32_t words[4])
{
    words[0] = group;
    words[1] = (uint32_t)position;
    words[2] = (uint32_t)(uint64_t)sample;
    words[3] = (uint32_t)((uint64_t)sample >> 32);
    bl_philox_4x32_10(words, key);
}

/* An element is dropped when its word is below this. p in [0, 1). */
BL_HOST_DEVICE uint32_t bl_dropout_threshold(float p)
{
    return (uint32_t)((double)p * 4294967296.0);
}

/* The factor of a kept element. */
BL_HOST_DEVICE float bl_dropout_scale(float p)
{
    return (float)(1.0 / (1.0 - (double)p));
}

#ifdef __cplusplus
}
#endif

#endif
