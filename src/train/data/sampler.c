/* SPDX-License-Identifier: Apache-2.0 */
/* sampler.c -- the order of rows (a Feistel permutation per epoch), steps per epoch, and learning
 * rate schedules. */
#include "train/data/sampler.h"

#include <math.h>

#include "base/sizes.h"
#include "ops/philox.h"

enum { ROUNDS = 6 };

/* A permutation of [0, 4^half_bits). */
static uint64_t feistel(uint64_t value, int half_bits, uint64_t seed, uint64_t epoch)
{
    uint64_t mask = (UINT64_C(1) << half_bits) - 1, left = value >> half_bits, right = value & mask;
    bl_philox_key key = {
        {(uint32_t)seed,
         (uint32_t)(seed >> 32) ^ 0x53687566u}}; /* "Shuf": apart from other uses of the seed */

    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t words[4] = {(uint32_t)right, (uint32_t)epoch, (uint32_t)(epoch >> 32), round};
        bl_philox_4x32_10(words, key);
        uint64_t next = left ^ (words[0] & mask);
        left = right;
        right = next;
    }
    return left << half_bits | right;
}

int64_t bl_sampler_row(const bl_sampler *sampler, int64_t position)
{
    int64_t epoch = position / sampler->n_rows, index = position % sampler->n_rows;
    int half_bits = 1;

    if (!sampler->shuffle) return index;
    while (half_bits < 31 && (INT64_C(1) << 2 * half_bits) < sampler->n_rows) half_bits++;
    uint64_t value = (uint64_t)index;
    do value = feistel(value, half_bits, sampler->seed, (uint64_t)epoch);
    while (value >= (uint64_t)sampler->n_rows);
    return (int64_t)value;
}

int64_t bl_train_batch_rows(const bl_train_config *config)
{
    return config->per_device_train_batch_size * config->gradient_accumulation_steps *
           config->ranks;
}

int64_t bl_train_position(const bl_train_config *config, int64_t n_rows, int64_t step)
{
    int64_t batch = bl_train_batch_rows(config);

    if (config->epoch_end == BL_EPOCH_CONTINUE) return step * batch;
    int64_t n_steps = bl_ceil_div(n_rows, batch); /* of an epoch */
    return step / n_steps * n_rows + step % n_steps * batch;
}

int64_t bl_train_total_steps(const bl_train_config *config, int64_t n_rows)
{
    if (config->max_steps > 0) return config->max_steps;
    if (config->epoch_end == BL_EPOCH_SHORT_STEP) {
        double n_steps = (double)bl_ceil_div(n_rows, bl_train_batch_rows(config));
        return bl_max_i64(1, (int64_t)ceil(config->num_train_epochs * n_steps));
    }
    double rows = ceil(config->num_train_epochs * (double)n_rows);
    return bl_max_i64(1, bl_ceil_div((int64_t)rows, bl_train_batch_rows(config)));
}

double bl_train_learning_rate(const bl_train_config *config, int64_t step, int64_t total_steps)
{
    int64_t warmup = config->warmup_steps > 0
                         ? config->warmup_steps
                         : (int64_t)ceil(config->warmup_ratio * (double)total_steps);
    double factor = 1.0;

    if (config->lr_scheduler_type != BL_LR_CONSTANT && step < warmup)
        factor = (double)step / (double)warmup;
    else if (config->lr_scheduler_type == BL_LR_LINEAR)
        factor =
            fmax(0.0, (double)(total_steps - step) / (double)bl_max_i64(1, total_steps - warmup));
    else if (config->lr_scheduler_type == BL_LR_COSINE) {
        double progress = (double)(step - warmup) / (double)bl_max_i64(1, total_steps - warmup);
        factor = fmax(0.0, 0.5 * (1.0 + cos(3.14159265358979323846 * progress)));
    }
    return config->learning_rate * factor;
}
