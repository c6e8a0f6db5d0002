/* SPDX-License-Identifier: Apache-2.0 */
/* blocks_internal.h -- the blocks of ranks in which sums are made (docs/design/0029), and who sends
 * what to whom. Blocks have per_block ranks, the last one may have fewer. A sum reaches its owner
 * in two exchanges:
 *
 *   within a block   every member gets the block's values for some owners, and sums them in rank
 *                    order: the helper of these owners. Owners that have the helper's place in
 *                    their own block; a shorter block's members have more. An owner helps itself.
 *   between blocks   every owner gets a sum from its helper in each other block, and adds the sums
 *                    in the blocks' order
 *
 * A gather goes the same ways backwards: every owner sends its part to its helper in each other
 * block, and helpers send what they have to their block.
 *
 * A helper has one owner, or none, in each of its turns; turns are numbered alike in a block. */
#ifndef BALLAST_COMM_BLOCKS_INTERNAL_H
#define BALLAST_COMM_BLOCKS_INTERNAL_H

#include <stdint.h>

typedef struct comm_blocks {
    int size, per_block, n; /* ranks; of them in a block, at most `size`; blocks */
} comm_blocks;

comm_blocks comm_blocks_of(int size, int per_block);

int comm_block_of(const comm_blocks *blocks, int rank);
int comm_block_first(const comm_blocks *blocks, int block); /* its lowest rank */
int comm_block_length(const comm_blocks *blocks, int block);
int comm_block_helper(const comm_blocks *blocks, int block, int owner); /* a rank of `block` */
int comm_block_turns(const comm_blocks *blocks, int block);
int comm_block_owner(const comm_blocks *blocks, int helper, int turn); /* -1: none */
/* The turn in which a rank helps itself. */
int comm_block_own_turn(const comm_blocks *blocks, int rank);

/* The largest scratch of any rank, in parts: with all turns at once
 * [member of the block][turn] and [block], or turn by turn [member], [turn] and [block]. One block
 * has no more than [member]. */
int comm_blocks_parts_at_once(const comm_blocks *blocks);
int comm_blocks_parts_by_turn(const comm_blocks *blocks);

/* Parts that a reduce-scatter brings a rank. */
int comm_blocks_received(const comm_blocks *blocks, int rank);

/* Parts that a reduce-scatter moves: `received` by rank 0, `summed` read and written by it in sums;
 * through the network, into the host that receives most, by the two exchanges. Hosts have n_on_host
 * ranks, numbered host by host. */
typedef struct comm_blocks_traffic {
    int64_t received_within, received_between, summed, into_host_within, into_host_between;
} comm_blocks_traffic;
comm_blocks_traffic comm_blocks_count(const comm_blocks *blocks, int n_on_host);

#endif
