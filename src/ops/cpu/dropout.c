/* SPDX-License-Identifier: Apache-2.0 */
/* dropout.c -- dropout on the CPU: masks are drawn by blocks of Philox words that stay in the
 * first-level cache. */
#include "ops/elementwise.h"

#include "ops/cpu/ops_cpu.h"
#include "ops/philox.h"

enum {
    GROUPS = 64,
    BLOCK = 4 * GROUPS
}; /* columns are drawn by blocks that stay in the first-level cache */

typedef struct dropout_job {
    bl_dropout_args args;
    bl_philox_key key;
    uint32_t threshold;
    float scale;
} dropout_job;

typedef struct dropout_scratch {
    uint32_t words[BLOCK];
    float x[BLOCK], y[BLOCK];
} dropout_scratch;

BL_CLONES static void draw_block(bl_philox_key key, int64_t sample, int32_t position,
                                 uint32_t first_group, uint32_t *words)
{
    for (uint32_t i = 0; i < GROUPS; i++) {
        uint32_t group[4];
        bl_dropout_words(key, sample, position, first_group + i, group);
        for (int k = 0; k < 4; k++) words[4 * i + (uint32_t)k] = group[k];
    }
}

BL_CLONES static void mask_block(int64_t n, uint32_t threshold, float scale, const uint32_t *words,
                                 const float *x, float *y)
{
    OPS_IVDEP
    for (int64_t c = 0; c < n; c++) {
        float kept = x[c] * scale;
        y[c] = words[c] >= threshold ? kept : 0.0f;
    }
}

static void dropout_item(void *arg, int64_t index, void *scratch)
{
    const dropout_job *job = arg;
    const bl_dropout_args *a = &job->args;
    int64_t rows = ops_rows_per_item(a->C), end = bl_min_i64(a->T, (index + 1) * rows);
    dropout_scratch *s = scratch;
    for (int64_t t = index * rows; t < end; t++) {
        for (int64_t c = 0; c < a->C; c += BLOCK) {
            int64_t at = t * a->C + c, n = bl_min_i64(BLOCK, a->C - c);
            float *y = ops_place(a->y, at, s->y);
            draw_block(job->key, a->sample[t], a->position[t], (uint32_t)(c / 4), s->words);
            mask_block(n, job->threshold, job->scale, s->words, ops_read(a->x, at, n, s->x), y);
            ops_write(a->y, at, n, y);
        }
    }
}

static void copy_item(void *arg, int64_t index, void *scratch)
{
    const bl_dropout_args *a = arg;
    int64_t rows = ops_rows_per_item(a->C), begin = index * rows,
            end = bl_min_i64(a->T, begin + rows);
    (void)scratch;
    memcpy(bl_tensor_at(a->y, begin * a->C).data, bl_tensor_at(a->x, begin * a->C).data,
           bl_tensor_bytes(a->y, (end - begin) * a->C));
}

bl_status ops_cpu_dropout(bl_stream *stream, const bl_dropout_args *args)
{
    dropout_job job = {.args = *args};
    int64_t n_items = bl_ceil_div(job.args.T, ops_rows_per_item(job.args.C));
    if (job.args.p == 0.0f) {
        if (job.args.y.data != job.args.x.data)
            bl_pool_run(ops_pool(stream), n_items, copy_item, &job.args);
        return BL_OK;
    }
    job.key = bl_dropout_key(job.args.seed, job.args.step, job.args.layer, job.args.matrix);
    job.threshold = bl_dropout_threshold(job.args.p);
    job.scale = bl_dropout_scale(job.args.p);
    bl_pool_run(ops_pool(stream), n_items, dropout_item, &job);
    return BL_OK;
}
