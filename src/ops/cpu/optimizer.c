/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer.c -- AdamW and sums of squares on the CPU; partial sums have fixed bounds, so that
 * threads change no bit. */
#include "ops/optimizer.h"

#include <math.h>

#include "ops/cpu/ops_cpu.h"

typedef struct adamw_job {
    bl_adamw_args args;
    bl_adamw_factors factors;
    double grad_scale;
} adamw_job;

OPS_CLONES static void adamw_block(const adamw_job *job, int64_t n, const float *grad, float *w,
                                   float *m, float *v)
{
    const bl_adamw_factors factors = job->factors;
    const double grad_scale = job->grad_scale;
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++)
        bl_adamw_element(&factors, grad_scale, grad[i], w + i, m + i, v + i);
}

static void adamw_item(void *arg, int64_t index, void *scratch)
{
    const adamw_job *job = arg;
    const bl_adamw_args *a = &job->args;
    int64_t begin = index * OPS_ITEM_ELEMENTS, n = bl_min_i64(OPS_ITEM_ELEMENTS, a->n - begin);
    (void)scratch;
    adamw_block(job, n, a->grad + begin, a->w + begin, a->m + begin, a->v + begin);
}

bl_status ops_cpu_adamw(bl_stream *stream, const bl_adamw_args *args)
{
    adamw_job job = {.args = *args};
    const bl_adamw_args *a = &job.args;
    job.grad_scale = a->grad_scale ? *a->grad_scale : 1.0;
    job.factors = bl_adamw_factors_of(a->step, a->lr, a->beta1, a->beta2, a->eps, a->weight_decay);
    bl_pool_run(ops_pool(stream), bl_ceil_div(a->n, OPS_ITEM_ELEMENTS), adamw_item, &job);
    return BL_OK;
}

/* At most SUM_ITEMS partial sums, of equal length except the last: few enough for the stack
 * whatever n is. */
enum { SUM_ITEMS = 256 };

typedef struct sum_job {
    const float *x;
    int64_t n, per_item;
    double partial[SUM_ITEMS];
} sum_job;

static void sum_item(void *arg, int64_t index, void *scratch)
{
    sum_job *job = arg;
    int64_t begin = index * job->per_item;
    (void)scratch;
    job->partial[index] =
        ops_dot(job->x + begin, job->x + begin, bl_min_i64(job->per_item, job->n - begin));
}

bl_status ops_cpu_sum_squares(bl_stream *stream, const bl_sum_squares_args *a)
{
    sum_job job = {.x = a->x, .n = a->n};
    job.per_item = bl_round_up(bl_max_i64(OPS_ITEM_ELEMENTS, bl_ceil_div(a->n, SUM_ITEMS)), 16);
    int64_t n_items = bl_ceil_div(a->n, job.per_item);
    bl_pool_run(ops_pool(stream), n_items, sum_item, &job);
    double sum = 0;
    for (int64_t i = 0; i < n_items; i++) sum += job.partial[i];
    *a->sum += sum;
    return BL_OK;
}

bl_status ops_cpu_clip_scale(bl_stream *stream, const bl_clip_scale_args *a)
{
    (void)stream;
    *a->norm = sqrt(*a->sum_squares);
    *a->grad_scale = bl_clip_factor(a->max_norm, *a->norm);
    return BL_OK;
}
