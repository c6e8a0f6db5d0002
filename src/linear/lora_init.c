/* SPDX-License-Identifier: Apache-2.0 */
/* lora_init.c -- A's first values: Philox keyed by seed, layer and projection, so that every rank
 * can make any part. */
#include <math.h>

#include "linear/lora_linear.h"
#include "ops/philox.h"

static void draw(uint64_t seed, int64_t layer, int projection, int64_t index, uint32_t words[4])
{
    bl_philox_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32) ^
                                              0x4c6f5241u}}; /* "LoRA": apart from dropout's keys */

    words[0] = (uint32_t)index, words[1] = (uint32_t)((uint64_t)index >> 32);
    words[2] = (uint32_t)layer, words[3] = (uint32_t)projection;
    bl_philox_4x32_10(words, key);
}

/* Uniform in [-1, 1), 24 bits. */
static float uniform(uint64_t seed, int64_t layer, int projection, int64_t index)
{
    uint32_t words[4];

    draw(seed, layer, projection, index, words);
    return (float)(words[0] >> 8) * 0x1p-23f - 1.0f;
}

void bl_lora_initialize(uint64_t seed, int64_t layer, int projection, int64_t K, int64_t begin,
                        int64_t count, float *out)
{
    float bound = (float)(1.0 / sqrt((double)K));

    for (int64_t i = 0; i < count; i++)
        out[i] = bound * uniform(seed, layer, projection, begin + i);
}

void bl_lora_initialize_normal(uint64_t seed, int64_t layer, int projection, int64_t begin,
                               int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4];
        draw(seed, layer, projection, begin + i, words);
        double radius = sqrt(-2.0 * log(((double)words[0] + 1.0) * 0x1p-32)),
               angle = 2.0 * M_PI * 0x1p-32 * (double)words[1];
        out[i] = (float)(radius * cos(angle));
    }
}
