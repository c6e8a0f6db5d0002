/* SPDX-License-Identifier: Apache-2.0 */
/* peak.c -- sixteen independent sums in registers, so that neither the instruction's latency nor
 * memory bounds the loop. */
#include "bench/command/peak.h"

#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum { N_SUMS = 16, ROUNDS = 20000, ITEMS_PER_THREAD = 16 };

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The empty assembly keeps the sums in registers, and every multiply-add. */
#define LOOP(type, zero, multiply_add)                                                             \
    type sum[N_SUMS];                                                                              \
    UNROLL for (int i = 0; i < N_SUMS; i++) sum[i] = zero;                                         \
    for (int round = 0; round < ROUNDS; round++) {                                                 \
        UNROLL for (int i = 0; i < N_SUMS; i++) sum[i] = multiply_add;                             \
        UNROLL for (int i = 0; i < N_SUMS; i++) __asm__ volatile("" : "+v"(sum[i]));               \
    }

__attribute__((target("avx2,fma"))) static void run_avx2(void *arg, int64_t index, void *scratch)
{
    __m256 x = _mm256_set1_ps(1.0f);
    (void)arg, (void)index, (void)scratch;
    __asm__ volatile("" : "+x"(x));
    LOOP(__m256, _mm256_setzero_ps(), _mm256_fmadd_ps(x, x, sum[i]))
}

__attribute__((target("avx512f"))) static void run_avx512(void *arg, int64_t index, void *scratch)
{
    __m512 x = _mm512_set1_ps(1.0f);
    (void)arg, (void)index, (void)scratch;
    __asm__ volatile("" : "+v"(x));
    LOOP(__m512, _mm512_setzero_ps(), _mm512_fmadd_ps(x, x, sum[i]))
}

__attribute__((target("avx512f,avx512bf16"))) static void run_bf16(void *arg, int64_t index,
                                                                   void *scratch)
{
    __m512i x = _mm512_set1_epi16(0x3f80); /* 1 */
    (void)arg, (void)index, (void)scratch;
    __asm__ volatile("" : "+v"(x));
    LOOP(__m512, _mm512_setzero_ps(), _mm512_dpbf16_ps(sum[i], (__m512bh)x, (__m512bh)x))
}

typedef struct loop {
    const char *name;
    bl_pool_fn run;
    double flops; /* of one instruction */
} loop;

static loop find_loop(bl_peak_kind kind)
{
    if (kind == BL_PEAK_BF16)
        return __builtin_cpu_supports("avx512bf16") ? (loop){"vdpbf16ps zmm", run_bf16, 64}
                                                    : (loop){NULL, NULL, 0};
    if (__builtin_cpu_supports("avx512f")) return (loop){"vfmadd231ps zmm", run_avx512, 32};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (loop){"vfmadd231ps ymm", run_avx2, 16};
    return (loop){NULL, NULL, 0};
}

const char *bl_peak_name(bl_peak_kind kind)
{
    return find_loop(kind).name;
}

double bl_peak_measure(bl_pool *pool, bl_peak_kind kind)
{
    loop l = find_loop(kind);
    int64_t n_items = (int64_t)bl_pool_threads(pool) * ITEMS_PER_THREAD;
    double start = bl_now_s();

    bl_pool_run(pool, n_items, l.run, NULL);
    return (double)n_items * ROUNDS * N_SUMS * l.flops / (bl_now_s() - start);
}
#else
const char *bl_peak_name(bl_peak_kind kind)
{
    (void)kind;
    return NULL;
}

double bl_peak_measure(bl_pool *pool, bl_peak_kind kind)
{
    (void)pool, (void)kind;
    return 0;
}
#endif
