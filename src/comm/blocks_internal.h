/* SPDX-License-Identifier: Apache-2.0 */
/* blocks_internal.h -- the blocks of ranks in which sums are made (docs/design/0029), and the
 * transfers between their ranks. Blocks have per_block ranks; the last one may have fewer. The
 * owner of a sum is the rank that stores it. A sum reaches its owner in two exchanges:
 *
 *   within a block   every rank is the helper of some owners. It receives the values that its block
 *                    has for them, and sums these in rank order. It helps the owners with the same
 *                    place in their blocks, itself among them. In a shorter block a rank helps
 *                    more owners.
 *   between blocks   every owner receives one sum from its helper in each other block, and adds
 *                    the sums in the order of the blocks
 *
 * A gather takes the same paths in reverse: every owner sends its part to its helper in each other
 * block, and helpers send all their parts to the ranks of their block.
 *
 * A helper has at most one owner in each of its turns. All ranks of a block number turns alike. */
#ifndef BALLAST_COMM_BLOCKS_INTERNAL_H
#define BALLAST_COMM_BLOCKS_INTERNAL_H

#include <stdint.h>

typedef struct comm_blocks {
    int size, per_block, n; /* ranks; ranks per block, at most `size`; blocks */
} comm_blocks;

comm_blocks comm_blocks_of(int size, int per_block);

int comm_block_of(const comm_blocks *blocks, int rank);
int comm_block_first(const comm_blocks *blocks, int block); /* its lowest rank */
int comm_block_length(const comm_blocks *blocks, int block);
int comm_block_helper(const comm_blocks *blocks, int block, int owner); /* a rank of `block` */
int comm_block_turns(const comm_blocks *blocks, int block);
/* -1: none, as in turns from comm_block_turns on. */
int comm_block_owner(const comm_blocks *blocks, int helper, int turn);
/* The turn in which a rank helps itself. */
int comm_block_own_turn(const comm_blocks *blocks, int rank);

/* The largest scratch of any rank, in parts. With all turns at once: [member of the block][turn]
 * and [block]. Turn by turn: [member], [turn] and [block]. A single block: [member]. */
int comm_blocks_parts_at_once(const comm_blocks *blocks);
int comm_blocks_parts_by_turn(const comm_blocks *blocks);

/* Parts that a rank receives in a reduce-scatter. */
int comm_blocks_received(const comm_blocks *blocks, int rank);

/* Parts that a collective moves. received: by rank 0. summed: read and written by the additions of
 * rank 0. into_host: over the network, into the host that receives most. within, between: the two
 * exchanges. Hosts have n_on_host ranks, numbered host by host. */
typedef struct comm_blocks_traffic {
    int64_t received_within, received_between, summed, into_host_within, into_host_between;
} comm_blocks_traffic;
comm_blocks_traffic comm_blocks_count(const comm_blocks *blocks, int n_on_host); /* a sum's */
comm_blocks_traffic comm_blocks_count_gather(const comm_blocks *blocks, int n_on_host);

/* Pieces of a gather of `bytes` per rank between GPUs of several hosts: while one piece is sent
 * over the network, the previous one is sent within the hosts. At least 1. */
int comm_gather_pieces(int64_t bytes);

#endif
