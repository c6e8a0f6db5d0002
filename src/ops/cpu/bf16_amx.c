/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_amx.c -- bf16 products with AMX (tdpbf16ps): Sapphire Rapids and later. No processor with
 * AMX has run it: tests compile it against tests/ops/amx_emulated.c.
 *
 * A tile register has 16 rows of 64 bytes: 16 x 32 of A, 16 pairs x 16 columns of B as panels have
 * them, or 16 x 16 sums. Four of the eight hold sums, 32 x 32 of the output; two loads of A and two
 * of B feed four multiplications. B's panel stays in the second-level cache (tileloaddt1), A's rows
 * in the first-level cache.
 *
 * tdpbf16ps adds to an element t + u: t = sum over p of a[2p] b[2p], u = sum over p of a[2p+1]
 * b[2p+1], p = 0 to 15 in this order, each addition rounded once to fp32, subnormals taken as zero
 * (Intel, Software Developer's Manual, volume 2, TDPBF16PS). So bits differ from vdpbf16ps's. They
 * depend on where a block's depth begins, which neither tiles nor threads change.
 *
 * gcc 12's intrinsics do not tell the compiler that memory is read: what is stored for a tile load
 * in the same function needs `stored` between them. */
#include <immintrin.h>
#include <string.h>

#include "ops/cpu/bf16_avx512.h"

#define TARGET_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#define INLINE_AMX static inline __attribute__((always_inline)) TARGET_AMX

enum {
    PAIR = 2,
    TILE = 16, /* rows of a tile, and its elements of 32 bits */
    DEPTH = TILE * PAIR,
    PANEL = OPS_BF16_PANEL,
    STRIDE = OPS_BF16_A_STRIDE,
    ROWS = 2 * TILE,
    ACROSS = 4 /* tiles of attention's product next to each other */
};
_Static_assert((int)ROWS <= (int)OPS_BF16_ROWS && (int)DEPTH == (int)OPS_BF16_DEPTH_UNIT &&
                   (int)PANEL == 2 * TILE,
               "a block is two by two tiles of sums");

/* The operand of ldtilecfg: all eight tiles have 16 rows of 64 bytes (SDM, volume 1, TILECFG). */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "the operand of ldtilecfg");

static const tile_config config = {.palette = 1,
                                   .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                   .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

TARGET_AMX static void begin(void)
{
    _tile_loadconfig(&config);
}

/* Tiles in use are saved at every switch of threads: 8 KiB. */
TARGET_AMX static void end(void)
{
    _tile_release();
}

INLINE_AMX void stored(void)
{
    __asm__ volatile("" ::: "memory");
}

/* ---- the product ---- */

/* sums[32][32]: A's 16 or 32 rows times a panel of 16 or 32 columns. */
INLINE_AMX void sum_tiles(const uint16_t *a, const uint16_t *b, int64_t n_pairs, bool is_high,
                          bool is_wide, float *sums)
{
    const int64_t a_bytes = STRIDE * 2, b_pairs = is_wide ? PANEL : TILE, b_bytes = b_pairs * 4,
                  sums_bytes = PANEL * 4;
    _tile_zero(0);
    if (is_wide) _tile_zero(1);
    if (is_high) _tile_zero(2);
    if (is_high && is_wide) _tile_zero(3);
    for (int64_t p = 0; p < n_pairs; p += TILE, a += DEPTH, b += TILE * PAIR * b_pairs) {
        _tile_stream_loadd(6, b, b_bytes);
        _tile_loadd(4, a, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (is_wide) {
            _tile_stream_loadd(7, b + PAIR * TILE, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (is_high) {
            _tile_loadd(5, a + TILE * STRIDE, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (is_high && is_wide) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, sums_bytes);
    if (is_wide) _tile_stored(1, sums + TILE, sums_bytes);
    if (is_high) _tile_stored(2, sums + TILE * PANEL, sums_bytes);
    if (is_high && is_wide) _tile_stored(3, sums + TILE * PANEL + TILE, sums_bytes);
}

/* Missing rows of A, up to whole tiles, are multiplied, and their products dropped. */
TARGET_AMX static void multiply(const ops_bf16_block *s)
{
    _Alignas(64) float sums[ROWS * PANEL];
    bool is_wide = s->n_cols > OPS_BF16_NARROW;
    for (int64_t i = 0; i < s->n_rows; i++) prefetch_row(s, i, is_wide ? 2 : 1);
    if (s->n_rows > TILE && is_wide)
        sum_tiles(s->a, s->panel, s->n_pairs, true, true, sums);
    else if (s->n_rows > TILE)
        sum_tiles(s->a, s->panel, s->n_pairs, true, false, sums);
    else if (is_wide)
        sum_tiles(s->a, s->panel, s->n_pairs, false, true, sums);
    else
        sum_tiles(s->a, s->panel, s->n_pairs, false, false, sums);
    for (int64_t i = 0; i < s->n_rows; i++) {
        finish(s, i, 0, _mm512_load_ps(sums + i * PANEL));
        if (is_wide) finish(s, i, TILE, _mm512_load_ps(sums + i * PANEL + TILE));
    }
}

/* ---- attention's product ---- */

/* Parts of tiles, with zeros around them. */
typedef struct staged {
    _Alignas(64) uint16_t a[TILE * DEPTH];
    _Alignas(64) uint16_t b[TILE * ACROSS * TILE * PAIR];
} staged;

INLINE_AMX void stage_a(const uint16_t *a, int64_t lda, int rows, int64_t pairs, staged *s)
{
    __mmask16 there = mask_16(pairs);
    for (int r = 0; r < TILE; r++) {
        __m512i row =
            r < rows ? _mm512_maskz_loadu_epi32(there, a + r * lda) : _mm512_setzero_si512();
        _mm512_store_si512(s->a + r * DEPTH, row);
    }
}

INLINE_AMX void stage_b(const uint16_t *b, int64_t ldb, int64_t pairs, int tiles, staged *s)
{
    memset(s->b, 0, sizeof s->b);
    for (int64_t p = 0; p < pairs; p++)
        memcpy(s->b + p * ACROSS * TILE * PAIR, b + p * PAIR * ldb,
               (size_t)(tiles * TILE * PAIR) * sizeof *b);
}

/* Sums 0 to `tiles` - 1 += a tile of A times as many of B. */
INLINE_AMX void add_tiles(const uint16_t *a, int64_t a_bytes, const uint16_t *b, int64_t b_bytes,
                          int tiles)
{
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(5, b, b_bytes);
    _tile_dpbf16ps(0, 4, 5);
    if (tiles < 2) return;
    _tile_loadd(6, b + TILE * PAIR, b_bytes);
    _tile_dpbf16ps(1, 4, 6);
    if (tiles < 3) return;
    _tile_loadd(7, b + 2 * TILE * PAIR, b_bytes);
    _tile_dpbf16ps(2, 4, 7);
    if (tiles < 4) return;
    _tile_loadd(5, b + 3 * TILE * PAIR, b_bytes);
    _tile_dpbf16ps(3, 4, 5);
}

/* sums[4][16][16] of at most 16 rows and `tiles` times 16 columns. */
INLINE_AMX void sum_row_of_tiles(const ops_bf16_tile *t, int64_t row, int64_t column, int rows,
                                 int tiles, float *sums)
{
    const uint16_t *a = t->A + row * t->lda, *b = t->B + PAIR * column;
    const int64_t staged_b_bytes = ACROSS * TILE * PAIR * 2;
    staged s;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t p = 0; p < t->n_pairs; p += TILE, a += DEPTH, b += TILE * PAIR * t->ldb) {
        int64_t left = t->n_pairs - p;
        bool is_whole = left >= TILE, takes_a = rows == TILE && is_whole;
        if (!takes_a) stage_a(a, t->lda, rows, left, &s);
        if (!is_whole) stage_b(b, t->ldb, left, tiles, &s);
        stored();
        add_tiles(takes_a ? a : s.a, takes_a ? t->lda * 2 : DEPTH * 2, is_whole ? b : s.b,
                  is_whole ? t->ldb * 4 : staged_b_bytes, tiles);
    }
    _tile_stored(0, sums, TILE * 4);
    _tile_stored(1, sums + TILE * TILE, TILE * 4);
    _tile_stored(2, sums + 2 * TILE * TILE, TILE * 4);
    _tile_stored(3, sums + 3 * TILE * TILE, TILE * 4);
}

/* rows x n of C. */
INLINE_AMX void multiply_row_of_tiles(const ops_bf16_tile *t, int64_t row, int64_t column, int rows,
                                      int64_t n)
{
    _Alignas(64) float sums[ACROSS * TILE * TILE];
    int tiles = (int)((n + TILE - 1) / TILE);
    __m512 alpha = _mm512_set1_ps(t->alpha);
    sum_row_of_tiles(t, row, column, rows, tiles, sums);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < tiles; v++) {
            float *c = t->C + (row + r) * t->ldc + column + TILE * v;
            __mmask16 there = mask_16(n - TILE * v);
            __m512 value = _mm512_mul_ps(_mm512_load_ps(sums + (v * TILE + r) * TILE), alpha);
            if (t->accumulate) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(there, c));
            _mm512_mask_storeu_ps(c, there, value);
        }
}

TARGET_AMX static void multiply_tile(const ops_bf16_tile *t)
{
    for (int64_t row = 0; row < t->M; row += TILE)
        for (int64_t column = 0; column < t->N; column += ACROSS * TILE) {
            int rows = t->M - row < TILE ? (int)(t->M - row) : TILE;
            int64_t left = t->N - column, n = left < ACROSS * TILE ? left : ACROSS * TILE;
            multiply_row_of_tiles(t, row, column, rows, n);
        }
}

/* ---- A and B: as for vdpbf16ps, with zeros up to whole tiles ---- */

static const ops_bf16_kernels *const packing = &ops_bf16_kernels_avx512;

static int64_t padding(int64_t depth)
{
    return (DEPTH - depth % DEPTH) % DEPTH;
}

static void pad_rows(int64_t n_rows, int64_t depth, uint16_t *dst)
{
    for (int64_t i = 0; i < n_rows; i++)
        memset(dst + i * STRIDE + depth, 0, (size_t)padding(depth) * sizeof *dst);
}

static void pad_panel(int64_t depth, int64_t width, uint16_t *panel)
{
    int64_t there = depth + depth % PAIR;
    memset(panel + there * width, 0, (size_t)(padding(there) * width) * sizeof *panel);
}

static void narrow(const float *src, uint16_t *dst, int64_t n)
{
    packing->narrow(src, dst, n);
}

static void copy_rows(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                      const float *scale, uint16_t *dst)
{
    packing->copy_rows(src, ld, n_rows, depth, scale, dst);
    pad_rows(n_rows, depth, dst);
}

static void copy_columns(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                         uint16_t *dst)
{
    packing->copy_columns(src, ld, n_rows, depth, dst);
    pad_rows(n_rows, depth, dst);
}

static void pack_rows(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols, int64_t width,
                      uint16_t *panel)
{
    packing->pack_rows(src, ld, depth, n_cols, width, panel);
    pad_panel(depth, width, panel);
}

static void pack_columns(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols,
                         int64_t width, uint16_t *panel)
{
    packing->pack_columns(src, ld, depth, n_cols, width, panel);
    pad_panel(depth, width, panel);
}

const ops_bf16_kernels ops_bf16_kernels_amx = {.name = "amx_bf16",
                                               .rows = ROWS,
                                               .depth_unit = DEPTH,
                                               .multiply_adds = 512,
                                               .begin = begin,
                                               .end = end,
                                               .narrow = narrow,
                                               .copy_rows = copy_rows,
                                               .copy_columns = copy_columns,
                                               .pack_rows = pack_rows,
                                               .pack_columns = pack_columns,
                                               .multiply = multiply,
                                               .multiply_tile = multiply_tile};
