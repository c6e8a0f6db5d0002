/* SPDX-License-Identifier: Apache-2.0 */
/* attention_grid.c -- the number of blocks that share a tile of keys. */
#include "ops/cuda/attention_grid.h"

int64_t ops_attention_pieces(int64_t n_items)
{
    int64_t n_pieces = 1;
    while (n_pieces < OPS_ATTENTION_PIECES_MAX && n_items * n_pieces < OPS_ATTENTION_BLOCKS)
        n_pieces *= 2;
    return n_pieces;
}
