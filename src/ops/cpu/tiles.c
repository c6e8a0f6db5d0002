/* SPDX-License-Identifier: Apache-2.0 */
/* tiles.c -- chooses the tiles of a product by a model of their cost. */
#include "ops/cpu/tiles.h"

#include <math.h>

#include "base/sizes.h"

enum { TRIES_M = 12, TRIES_N = 24 }; /* ways to cut either side */

int64_t ops_tile_side(int64_t size, int64_t n, int64_t unit)
{
    return bl_max_i64(bl_ceil_div(bl_ceil_div(size, n), unit), 1) * unit;
}

/* About how many cycles the tiles take per element of the inner dimension: what a thread computes,
 * and a part of a tile more for waiting. Measured on a Zen 4: 0.2 cycles to copy an element of A,
 * 0.45 to decode and pack one of B. */
static double cost_of_tiles(int64_t M, int64_t N, ops_tiles tiles, double multiply_adds,
                            int n_threads)
{
    double height = (double)bl_min_i64(tiles.m, M), width = (double)bl_min_i64(tiles.n, N);
    double n_rounds = (double)bl_ceil_div(tiles.count, n_threads) + (n_threads > 1 ? 0.15 : 0);

    return n_rounds * (height * width / multiply_adds + 0.2 * height + 0.45 * width);
}

ops_tiles ops_choose_tiles(int64_t M, int64_t N, ops_tile_limits limits, int n_threads)
{
    int64_t most_m = limits.most_m / limits.unit_m * limits.unit_m,
            least_m = bl_max_i64(bl_ceil_div(M, most_m), 1),
            least_n = bl_max_i64(bl_ceil_div(N, limits.most_n), 1);
    ops_tiles best = {0};
    double least = INFINITY;

    for (int64_t n_m = least_m; n_m < least_m + TRIES_M; n_m++)
        for (int64_t n_n = least_n; n_n < least_n + TRIES_N; n_n++) {
            ops_tiles tiles = {.m = ops_tile_side(M, n_m, limits.unit_m),
                               .n = ops_tile_side(N, n_n, limits.unit_n)};
            tiles.count = bl_ceil_div(M, tiles.m) * bl_ceil_div(N, tiles.n);
            double cost = cost_of_tiles(M, N, tiles, limits.multiply_adds, n_threads);
            if (cost >= least) continue;
            least = cost;
            best = tiles;
        }
    return best;
}
