/* SPDX-License-Identifier: Apache-2.0 */
/* attention_grid.h -- how the kernel of dk and dv divides its work. Arithmetic only: no GPU is
 * asked. Internal to ops/. */
#ifndef BALLAST_OPS_CUDA_ATTENTION_GRID_H
#define BALLAST_OPS_CUDA_ATTENTION_GRID_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    OPS_ATTENTION_KEYS = 64,      /* of a tile */
    OPS_ATTENTION_PIECES_MAX = 8, /* the blocks of a cluster that every Hopper device grants */
    OPS_ATTENTION_BLOCKS = 1000   /* wanted: about four for each place of a GPU, two of which are
                                     on each of 132 multiprocessors */
};

/* A tile of keys is seen by the queries behind it: the first tile of T tokens has T / 64 times the
 * work of the last. Each tile's work is cut into so many equal pieces, a block each, where there
 * are n_items tiles of all heads: few tiles would leave places of the GPU empty, or most of them
 * waiting for the first tile's block. */
int64_t ops_attention_pieces(int64_t n_items);

#ifdef __cplusplus
}
#endif

#endif
