/* SPDX-License-Identifier: Apache-2.0 */
/* The AMX kernels, compiled once more with tile instructions in C in place of the intrinsics. A
 * program with this object takes ops_bf16_kernels_amx from here, not from the library. */
#include "amx_emulated.h"

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"

enum { TILES = 8, ROWS_MOST = 16, ROW_BYTES_MOST = 64, ELEMENTS = 16 };

/* A thread's registers. */
static _Thread_local struct {
    bool is_configured;
    uint16_t row_bytes[TILES];
    uint8_t rows[TILES];
    unsigned char data[TILES][ROWS_MOST][ROW_BYTES_MOST];
} tile;

static atomic_int n_threads_with_tiles;
static _Atomic amx_fault broken;

bool amx_emulated_break(amx_fault fault)
{
    broken = fault;
    return true;
}

/* The kernels finish their sums with AVX-512, as on a processor with AMX. */
const char *amx_obstacle(void)
{
    return __builtin_cpu_supports("avx512bf16") ? NULL : "this processor has no AVX512-BF16";
}

static void require(bool condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "emulated AMX: %s\n", what);
    abort();
}

__attribute__((destructor)) static void require_released(void)
{
    require(n_threads_with_tiles == 0, "a thread has not released its tiles");
}

static void load_config(const void *operand)
{
    const unsigned char *byte = operand;
    require(byte[0] == 1 && byte[1] == 0, "#GP: LDTILECFG: palette 1, first row 0");
    for (int i = 2; i < 64; i++)
        require(byte[i] == 0 || (i >= 16 && i < 32) || (i >= 48 && i < 56),
                "#GP: LDTILECFG: reserved bytes");
    if (!tile.is_configured) n_threads_with_tiles++;
    memset(&tile, 0, sizeof tile);
    tile.is_configured = true;
    memcpy(tile.row_bytes, byte + 16, sizeof tile.row_bytes);
    memcpy(tile.rows, byte + 48, sizeof tile.rows);
    for (int i = 0; i < TILES; i++)
        require(tile.rows[i] <= ROWS_MOST && tile.row_bytes[i] <= ROW_BYTES_MOST &&
                    (tile.rows[i] == 0) == (tile.row_bytes[i] == 0),
                "#GP: LDTILECFG: size of a tile");
}

static void release(void)
{
    if (tile.is_configured) n_threads_with_tiles--;
    tile.is_configured = false;
}

static void require_tile(int i)
{
    require(tile.is_configured, "#UD: no configuration");
    require(i >= 0 && i < TILES && tile.rows[i] > 0, "#UD: this tile is not configured");
}

static void zero(int i)
{
    require_tile(i);
    memset(tile.data[i], 0, sizeof tile.data[i]);
}

static void load(int i, const void *base, int64_t stride)
{
    zero(i);
    for (int row = 0; row < tile.rows[i]; row++)
        memcpy(tile.data[i][row], (const char *)base + row * stride, tile.row_bytes[i]);
}

static void store(int i, void *base, int64_t stride)
{
    require_tile(i);
    for (int row = 0; row < tile.rows[i]; row++)
        memcpy((char *)base + row * stride, tile.data[i][row], tile.row_bytes[i]);
}

/* A subnormal is a zero of its sign, as an operand and as a result. */
static inline float flush(float x)
{
    return fabsf(x) < FLT_MIN ? copysignf(0, x) : x;
}

static inline float read_bf16(const unsigned char *row, int i)
{
    uint16_t half;
    memcpy(&half, row + 2 * i, sizeof half);
    return flush(bl_bf16_to_f32(half));
}

/* even[n] = sum over k of a[2k] b[k][2n], odd[n] the same of the odd elements. */
__attribute__((target("avx2,fma"))) static void sum_row(const unsigned char *a,
                                                        unsigned char b[][ROW_BYTES_MOST],
                                                        int n_pairs, float even[ELEMENTS],
                                                        float odd[ELEMENTS])
{
    for (int k = 0; k < n_pairs; k++) {
        float first = read_bf16(a, 2 * k), second = read_bf16(a, 2 * k + 1);
        for (int n = 0; n < ELEMENTS; n++) {
            even[n] = flush(fmaf(first, read_bf16(b[k], 2 * n), even[n]));
            odd[n] = flush(fmaf(second, read_bf16(b[k], 2 * n + 1), odd[n]));
        }
    }
}

static void multiply_add(int c, int a, int b)
{
    require_tile(a);
    require_tile(b);
    require_tile(c);
    require(a != b && b != c && a != c, "#UD: TDPBF16PS: a tile twice");
    require(tile.rows[c] == tile.rows[a] && tile.row_bytes[c] == tile.row_bytes[b] &&
                tile.row_bytes[a] == 4 * tile.rows[b],
            "#UD: TDPBF16PS: sizes of tiles");
    amx_fault fault = broken;
    int rows = tile.rows[c] - (fault == AMX_LAST_ROW),
        n_pairs = tile.rows[b] - (fault == AMX_LAST_PAIR);
    for (int m = 0; m < rows; m++) {
        float even[ELEMENTS] = {0}, odd[ELEMENTS] = {0}, sum[ELEMENTS];
        sum_row(tile.data[a][m], tile.data[b], n_pairs, even, odd);
        memcpy(sum, tile.data[c][m], sizeof sum);
        for (int n = 0; n < tile.row_bytes[c] / 4; n++)
            sum[n] = flush(flush(sum[n]) + flush(even[n] + (fault == AMX_ODD ? 0 : odd[n])));
        memcpy(tile.data[c][m], sum, sizeof sum);
    }
}

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig                    load_config
#define _tile_release                       release
#define _tile_zero(i)                       zero(i)
#define _tile_loadd(i, base, stride)        load(i, base, stride)
#define _tile_stream_loadd(i, base, stride) load(i, base, stride)
#define _tile_stored(i, base, stride)       store(i, base, stride)
#define _tile_dpbf16ps(c, a, b)             multiply_add(c, a, b)
#include "ops/cpu/bf16_amx.c"
