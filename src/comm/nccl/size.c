/* SPDX-License-Identifier: Apache-2.0 */
/* size.c -- the memory of a communicator of GPUs, for it and for plans. Part of every build. */
#include "base/sizes.h"
#include "comm/blocks_internal.h"
#include "comm/nccl/nccl.h"

enum { PART_ALIGNMENT = 256 };

size_t bl_nccl_scratch_bytes(int n_ranks, int sum_block, size_t sum_bytes)
{
    if (n_ranks < 2) return 0;
    comm_blocks blocks = comm_blocks_of(n_ranks, sum_block);
    int64_t bytes = bl_max_i64((int64_t)sum_bytes, BL_NCCL_SCRATCH_BYTES);
    return (size_t)bl_round_up(bl_ceil_div(bytes, n_ranks), PART_ALIGNMENT) *
           (size_t)comm_blocks_parts_at_once(&blocks);
}
