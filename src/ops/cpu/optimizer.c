/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer.c -- AdamW and sums of squares on the CPU; partial sums have fixed bounds, so that
 * threads change no bit. */
#include "ops/optimizer.h"

#include <math.h>

#include "ops/cpu/half_avx512.h"
#include "ops/cpu/ops_cpu.h"

typedef struct adamw_job {
    bl_adamw_args args;
    bl_adamw_factors factors;
    float grad_scale;
    bl_philox_key key; /* of bf16 moments' rounding */
} adamw_job;

BL_CLONES static void adamw_block(const adamw_job *job, int64_t n, const float *grad, float *w,
                                  float *m, float *v)
{
    const bl_adamw_factors factors = job->factors;
    const float grad_scale = job->grad_scale;
    OPS_IVDEP
    for (int64_t i = 0; i < n; i++)
        bl_adamw_element(&factors, grad_scale, grad[i], w + i, m + i, v + i);
}

/* Elements whose numbers have the same upper 32 bits, and so the same key; the first has the lower
 * bits `low`. */
typedef struct bf16_block {
    bl_philox_key key;
    uint32_t low;
    int64_t n;
    const float *grad;
    float *w;
    uint16_t *m, *v;
} bf16_block;

/* bl_f32_to_bf16_random of 16 elements; random: words below 2^16. */
__attribute__((always_inline)) static inline void round_random_16(const float *x,
                                                                  const vu16 *random, uint16_t *y)
{
    vu16 bits = *(const vu16 *)x, is_nan = (vu16)((bits & 0x7fffffffu) > 0x7f800000u),
         rounded = (bits + (*random & ~is_nan)) >> 16;
    *(vh16 *)y = __builtin_convertvector(rounded | (is_nan & 0x40u), vh16);
}

/* The first n elements, a multiple of 16, in one loop: the divisions of some elements and the
 * random words of others overlap. */
BL_CLONES static void adamw_bf16_generic(const adamw_job *job, const bf16_block *b, int64_t n)
{
    const bl_adamw_factors factors = job->factors;
    const float grad_scale = job->grad_scale;
    const bf16_block block = *b;

    for (int64_t i = 0; i < n; i += 16) {
        const float *grad = block.grad + i;
        float m[16], v[16], *w = block.w + i;
        uint32_t words[16];
        *(vu16 *)m = __builtin_convertvector(*(const vh16 *)(block.m + i), vu16) << 16;
        *(vu16 *)v = __builtin_convertvector(*(const vh16 *)(block.v + i), vu16) << 16;
        OPS_IVDEP
        for (int k = 0; k < 16; k++) {
            words[k] = bl_rounding_word(block.key, block.low + (uint32_t)(i + k));
            bl_adamw_element(&factors, grad_scale, grad[k], w + k, m + k, v + k);
        }
        vu16 word = *(const vu16 *)words, low = word & 0xffffu, high = word >> 16;
        round_random_16(m, &low, block.m + i);
        round_random_16(v, &high, block.v + i);
    }
}

#ifdef HALF_AVX512
HALF_TARGET static void adamw_bf16_avx512(const adamw_job *job, const bf16_block *b, int64_t n)
{
    const bl_adamw_factors factors = job->factors;
    const float grad_scale = job->grad_scale;
    const bf16_block block = *b;
    const __m512i low_half = _mm512_set1_epi32(0xffff);

    for (int64_t i = 0; i < n; i += 16) {
        const float *grad = block.grad + i;
        float m[16], v[16], *w = block.w + i;
        uint32_t words[16];
        _mm512_storeu_ps(m, half_widen_16(block.m + i));
        _mm512_storeu_ps(v, half_widen_16(block.v + i));
        OPS_IVDEP
        for (int k = 0; k < 16; k++) {
            words[k] = bl_rounding_word(block.key, block.low + (uint32_t)(i + k));
            bl_adamw_element(&factors, grad_scale, grad[k], w + k, m + k, v + k);
        }
        __m512i word = _mm512_loadu_si512(words);
        half_round_random_16(_mm512_loadu_ps(m), _mm512_and_si512(word, low_half), block.m + i);
        half_round_random_16(_mm512_loadu_ps(v), _mm512_srli_epi32(word, 16), block.v + i);
    }
}
#endif

static void adamw_bf16_block(const adamw_job *job, const bf16_block *b)
{
    int64_t whole = b->n & ~INT64_C(15);
    OPS_KERNEL(adamw_bf16)(job, b, whole);
    for (int64_t i = whole; i < b->n; i++)
        bl_adamw_element_bf16(&job->factors, job->grad_scale, b->grad[i],
                              bl_rounding_word(b->key, b->low + (uint32_t)i), b->w + i, b->m + i,
                              b->v + i);
}

/* The elements [begin, begin + n) of the call, as bl_adamw_element_bf16. */
static void adamw_bf16(const adamw_job *job, int64_t begin, int64_t n)
{
    const bl_adamw_args *a = &job->args;

    for (int64_t end = begin + n; begin < end;) {
        uint64_t first = (uint64_t)(a->first + begin);
        bf16_block block = {
            .key = bl_rounding_key_of(job->key, (uint32_t)(first >> 32)),
            .low = (uint32_t)first,
            .n = bl_min_i64(end - begin, (INT64_C(1) << 32) - (int64_t)(uint32_t)first),
            .grad = a->grad + begin,
            .w = a->w + begin,
            .m = ops_bf16(a->m) + begin,
            .v = ops_bf16(a->v) + begin,
        };
        adamw_bf16_block(job, &block);
        begin += block.n;
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
