/* SPDX-License-Identifier: Apache-2.0 */
/* peak.c -- independent sums in registers, sixteen vectors or four tiles, so that neither the
 * instruction's latency nor memory bounds the loop. */
#include "bench/command/peak.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "ops/gemm.h"

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

/* Four tiles of sums, as in the products: an instruction does not wait for the previous one. Known
 * processors begin one every 16 cycles, so there are fewer rounds. */
enum { AMX_ROUNDS = ROUNDS / 32 };
__attribute__((target("amx-tile,amx-bf16"))) static void run_amx(void *arg, int64_t index,
                                                                 void *scratch)
{
    /* Palette 1, eight tiles of 16 rows of 64 bytes. */
    static const uint16_t config[32] = {1,  0,  0,  0,  0,      0,      0,      0,     64, 64,
                                        64, 64, 64, 64, 64,     64,     0,      0,     0,  0,
                                        0,  0,  0,  0,  0x1010, 0x1010, 0x1010, 0x1010};
    (void)arg, (void)index, (void)scratch;
    _tile_loadconfig(config);
    _tile_zero(4);
    _tile_zero(5);
    for (int round = 0; round < AMX_ROUNDS * N_SUMS / 4; round++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_release();
}

typedef struct loop {
    const char *name;
    bl_pool_fn run;
    double flops; /* of one instruction */
    int rounds;
} loop;

/* Whether the products use AMX. */
static bool uses_amx(void)
{
    char text[BL_CPU_GEMM_TEXT_BYTES];
    bl_cpu_gemm_describe_bf16(text);
    return strstr(text, "amx_bf16") != NULL;
}

static loop find_loop(bl_peak_kind kind)
{
    if (kind == BL_PEAK_BF16 && uses_amx())
        return (loop){"tdpbf16ps tmm", run_amx, 2 * 16 * 16 * 32, AMX_ROUNDS};
    if (kind == BL_PEAK_BF16)
        return __builtin_cpu_supports("avx512bf16") ? (loop){"vdpbf16ps zmm", run_bf16, 64, ROUNDS}
                                                    : (loop){0};
    if (__builtin_cpu_supports("avx512f")) return (loop){"vfmadd231ps zmm", run_avx512, 32, ROUNDS};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (loop){"vfmadd231ps ymm", run_avx2, 16, ROUNDS};
    return (loop){0};
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
    return (double)n_items * l.rounds * N_SUMS * l.flops / (bl_now_s() - start);
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
