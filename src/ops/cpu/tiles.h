/* SPDX-License-Identifier: Apache-2.0 */
/* tiles.h -- how the output of a product is cut into tiles, one pool item each. Internal to ops/.
 * Tiles change no bit of the products that use it, so they are chosen by the number of threads. */
#ifndef BALLAST_OPS_CPU_TILES_H
#define BALLAST_OPS_CPU_TILES_H

#include <stdint.h>

/* Sides of a tile, in elements, and what the kernels are. */
typedef struct ops_tile_limits {
    int64_t most_m, most_n;
    int64_t unit_m, unit_n; /* rows of a block, columns of a panel */
    double multiply_adds;   /* per cycle */
} ops_tile_limits;

typedef struct ops_tiles {
    int64_t m, n, count;
} ops_tiles;

ops_tiles ops_choose_tiles(int64_t M, int64_t N, ops_tile_limits limits, int n_threads);

/* The side of `n` tiles of equal size, in whole units. */
int64_t ops_tile_side(int64_t size, int64_t n, int64_t unit);

#endif
