/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer.c -- AdamW and sums of squares on the CPU; partial sums have fixed bounds, so that
 * threads change no bit. */
#include "ops/optimizer.h"

#include <math.h>

#include "ops/cpu/ops_cpu.h"

typedef struct adamw_job {
    bl_adamw_args args;
    bl_adamw_factors factors;
    float grad_scale;
    bl_philox_key key; /* of bf16 moments' rounding */
} adamw_job;

OPS_CLONES static void adamw_block(const adamw_job *job, int64_t n, const float *grad, float *w,
                                   float *m, float *v)
{
    const bl_adamw_factors factors = job->factors;
    const float grad_scale = job->grad_scale;
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++)
        bl_adamw_element(&factors, grad_scale, grad[i], w + i, m + i, v + i);
}

/* The bits of 16 floats rounded by those of `random`, in the low halves; as
 * bl_f32_to_bf16_random. */
__attribute__((always_inline)) static inline void round_random_16(const float *x,
                                                                  const vu16 *random, uint16_t *y)
{
    vu16 bits = *(const vu16 *)x, is_special = (vu16)((bits & 0x7f800000u) == 0x7f800000u),
         is_nan = (vu16)((bits & 0x7fffffffu) > 0x7f800000u),
         rounded = (bits + (*random & 0xffffu & ~is_special)) >> 16;
    *(vh16 *)y = __builtin_convertvector(rounded | (is_nan & 0x40u), vh16);
}

/* Element i by the word of element low + i; n up to OPS_BLOCK. */
OPS_CLONES static void round_moments(bl_philox_key key, uint32_t low, int64_t n, const float *m,
                                     const float *v, uint16_t *m_out, uint16_t *v_out)
{
    uint32_t words[OPS_BLOCK];
    int64_t i = 0;

    for (int64_t k = 0; k < n; k++) words[k] = bl_rounding_word(key, low + (uint32_t)k);
    for (; i + 16 <= n; i += 16) {
        vu16 word = *(const vu16 *)(words + i), high = word >> 16;
        round_random_16(m + i, &word, m_out + i);
        round_random_16(v + i, &high, v_out + i);
    }
    for (; i < n; i++) {
        m_out[i] = bl_f32_to_bf16_random(m[i], words[i]);
        v_out[i] = bl_f32_to_bf16_random(v[i], words[i] >> 16);
    }
}

/* The elements [begin, begin + n) of the call, as bl_adamw_element_bf16, in blocks whose fp32
 * moments stay in the L1 cache. A word's key depends on the bits of an element's number above
 * 32. */
static void adamw_bf16(const adamw_job *job, int64_t begin, int64_t n)
{
    const bl_adamw_args *a = &job->args;
    float m[OPS_BLOCK], v[OPS_BLOCK];

    for (int64_t end = begin + n, count; begin < end; begin += count) {
        uint64_t first = (uint64_t)(a->first + begin);
        uint16_t *m_out = ops_bf16(a->m) + begin, *v_out = ops_bf16(a->v) + begin;
        count = bl_min_i64(bl_min_i64(end - begin, OPS_BLOCK),
                           (INT64_C(1) << 32) - (int64_t)(uint32_t)first);
        ops_widen(count, m_out, m);
        ops_widen(count, v_out, v);
        adamw_block(job, count, a->grad + begin, a->w + begin, m, v);
        round_moments(bl_rounding_key_of(job->key, (uint32_t)(first >> 32)), (uint32_t)first, count,
                      m, v, m_out, v_out);
    }
}

static void adamw_item(void *arg, int64_t index, void *scratch)
{
    const adamw_job *job = arg;
    const bl_adamw_args *a = &job->args;
    int64_t begin = index * OPS_ITEM_ELEMENTS, n = bl_min_i64(OPS_ITEM_ELEMENTS, a->n - begin);
    (void)scratch;
    if (a->m.dtype == BL_BF16)
        adamw_bf16(job, begin, n);
    else
        adamw_block(job, n, a->grad + begin, a->w + begin, ops_f32(a->m) + begin,
                    ops_f32(a->v) + begin);
}

bl_status ops_cpu_adamw(bl_stream *stream, const bl_adamw_args *args)
{
    adamw_job job = {.args = *args};
    const bl_adamw_args *a = &job.args;
    job.grad_scale = a->grad_scale ? (float)*a->grad_scale : 1.0f;
    job.factors = bl_adamw_factors_of(a->step, a->lr, a->beta1, a->beta2, a->eps, a->weight_decay);
    job.key = bl_rounding_key(a->seed, (uint64_t)a->step, (uint32_t)a->tensor);
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

bl_status ops_cpu_add_sums(bl_stream *stream, const bl_add_sums_args *a)
{
    double sum = *a->sum;
    (void)stream;
    for (int64_t i = 0; i < a->n; i++) sum += a->sums[i];
    *a->sum = sum;
    return BL_OK;
}

bl_status ops_cpu_clip_scale(bl_stream *stream, const bl_clip_scale_args *a)
{
    (void)stream;
    *a->norm = sqrt(*a->sum_squares);
    *a->grad_scale = bl_clip_factor(a->max_norm, *a->norm);
    return BL_OK;
}
