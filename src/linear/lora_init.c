/* SPDX-License-Identifier: Apache-2.0 */
/* lora_init.c -- A's first values: Philox keyed by seed, layer and projection, so that every rank
 * can make any part. */
#include <math.h>

#include "linear/lora_linear.h"
#include "ops/philox.h"

/* Uniform in [-1, 1), 24 bits. */
static float uniform(uint64_t seed, int64_t layer, int projection, int64_t index)
{
    uint32_t words[4] = {(uint32_t)index, (uint32_t)((uint64_t)index >> 32), (uint32_t)layer,
                         (uint32_t)projection};
    bl_philox_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32) ^
                                              0x4c6f5241u}}; /* "LoRA": apart from dropout's keys */
    bl_philox_4x32_10(words, key);
    return (float)(words[0] >> 8) * 0x1p-23f - 1.0f;
}

void bl_lora_initialize(uint64_t seed, int64_t layer, int projection, int64_t K, int64_t begin,
                        int64_t count, float *out)
{
    float bound = (float)(1.0 / sqrt((double)K));

    for (int64_t i = 0; i < count; i++)
        out[i] = bound * uniform(seed, layer, projection, begin + i);
}
