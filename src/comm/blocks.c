/* SPDX-License-Identifier: Apache-2.0 */
/* blocks.c -- arithmetic of the blocks of a sum. All blocks except the last have per_block ranks,
 * so a rank's place in its block is rank % per_block. */
#include "comm/blocks_internal.h"

#include "base/sizes.h"

static int min(int a, int b)
{
    return a < b ? a : b;
}

static int ceil_div(int a, int b)
{
    return (int)bl_ceil_div(a, b);
}

comm_blocks comm_blocks_of(int size, int per_block)
{
    comm_blocks b = {.size = size, .per_block = min(size, per_block)};
    b.n = ceil_div(size, b.per_block);
    return b;
}

int comm_block_of(const comm_blocks *b, int rank)
{
    return rank / b->per_block;
}

int comm_block_first(const comm_blocks *b, int block)
{
    return block * b->per_block;
}

int comm_block_length(const comm_blocks *b, int block)
{
    return min(b->per_block, b->size - comm_block_first(b, block));
}

int comm_block_helper(const comm_blocks *b, int block, int owner)
{
    return comm_block_first(b, block) + owner % b->per_block % comm_block_length(b, block);
}

/* Turns that a helper of `block` needs for the places of one block of owners. */
static int turns_per_block(const comm_blocks *b, int block)
{
    return ceil_div(b->per_block, comm_block_length(b, block));
}

int comm_block_turns(const comm_blocks *b, int block)
{
    return b->n * turns_per_block(b, block);
}

int comm_block_owner(const comm_blocks *b, int helper, int turn)
{
    int block = comm_block_of(b, helper), per_block = turns_per_block(b, block);
    int of = turn / per_block;
    int place = helper % b->per_block + turn % per_block * comm_block_length(b, block);
    return place < comm_block_length(b, of) ? comm_block_first(b, of) + place : -1;
}

int comm_block_own_turn(const comm_blocks *b, int rank)
{
    int block = comm_block_of(b, rank);
    return block * turns_per_block(b, block);
}

int comm_blocks_parts_at_once(const comm_blocks *b)
{
    int most = 0;
    if (b->n == 1) return b->size;
    for (int block = b->n - 2; block < b->n; block++) /* a full block, and the last */
        most = (int)bl_max_i64(most, comm_block_length(b, block) * comm_block_turns(b, block));
    return most + b->n;
}

int comm_blocks_parts_by_turn(const comm_blocks *b)
{
    if (b->n == 1) return b->size;
    return b->per_block + comm_block_turns(b, b->n - 1) + b->n; /* the last has the most turns */
}

/* ---- traffic ---- */

static int owners_of(const comm_blocks *b, int helper)
{
    int block = comm_block_of(b, helper), per_block = turns_per_block(b, block);
    int step = comm_block_length(b, block), place = helper % b->per_block;
    int in_last = comm_block_length(b, b->n - 1) - place;

    if (b->n == 1) return 1;
    int in_full = per_block - (place + (per_block - 1) * step >= b->per_block);
    return (b->n - 1) * in_full + (in_last > 0 ? ceil_div(in_last, step) : 0);
}

static int mates_of(const comm_blocks *b, int rank)
{
    return comm_block_length(b, comm_block_of(b, rank)) - 1;
}

int comm_blocks_received(const comm_blocks *b, int rank)
{
    return mates_of(b, rank) * owners_of(b, rank) + b->n - 1;
}

/* The ranks of [first, end) that are not on the host. */
static int outside(int first, int end, int host_first, int host_end)
{
    int from = first > host_first ? first : host_first, to = min(end, host_end);
    return end - first - (to > from ? to - from : 0);
}

/* Pairs of an owner and its helper in another block that are both among the ranks of a host. */
static int pairs_on_host(const comm_blocks *b, int first, int end)
{
    int blocks_begin = comm_block_of(b, first), blocks_end = comm_block_of(b, end - 1) + 1, n = 0;

    for (int rank = first; rank < end; rank++)
        for (int block = blocks_begin; block < blocks_end; block++) {
            int helper = comm_block_helper(b, block, rank);
            n += block != comm_block_of(b, rank) && helper >= first && helper < end;
        }
    return n;
}

/* The two exchanges of a sum, into a host. */
static comm_blocks_traffic sum_into_host(const comm_blocks *b, int first, int end)
{
    comm_blocks_traffic t = {.into_host_between = -pairs_on_host(b, first, end)};

    for (int rank = first; rank < end; rank++) {
        int own = comm_block_of(b, rank), own_first = comm_block_first(b, own);
        t.into_host_within += (int64_t)owners_of(b, rank) *
                              outside(own_first, own_first + comm_block_length(b, own), first, end);
        t.into_host_between += b->n - 1;
    }
    return t;
}

/* Those of a gather: helpers receive from owners, and the members of a block from its helpers. */
static comm_blocks_traffic gather_into_host(const comm_blocks *b, int first, int end)
{
    comm_blocks_traffic t = {.into_host_between = -pairs_on_host(b, first, end)};

    for (int rank = first; rank < end; rank++) {
        int own = comm_block_of(b, rank), own_first = comm_block_first(b, own);
        t.into_host_between += owners_of(b, rank) - 1;
        for (int i = own_first; i < own_first + comm_block_length(b, own); i++)
            if (i < first || i >= end) t.into_host_within += owners_of(b, i);
    }
    return t;
}

/* Alignments of hosts and blocks repeat after at most per_block hosts; the last block may be
 * shorter. */
static void count_hosts(const comm_blocks *b, int n_on_host,
                        comm_blocks_traffic (*into_host)(const comm_blocks *, int, int),
                        comm_blocks_traffic *out)
{
    int n_hosts = ceil_div(b->size, n_on_host);

    for (int host = 0; host < n_hosts; host++) {
        int first = host * n_on_host, end = min(b->size, first + n_on_host);
        if (host >= b->per_block && end <= comm_block_first(b, b->n - 1)) continue;
        comm_blocks_traffic t = into_host(b, first, end);
        out->into_host_within = bl_max_i64(out->into_host_within, t.into_host_within);
        out->into_host_between = bl_max_i64(out->into_host_between, t.into_host_between);
    }
}

/* A piece takes one launch of NCCL's, some 30 us; 2 MiB per rank take 0.4 ms of a network of
 * 40 GB/s per host of 8 ranks. The first and the last piece overlap with nothing. */
int comm_gather_pieces(int64_t bytes)
{
    enum { PIECE_BYTES = 2 << 20, MOST = 8 };
    int64_t n = bytes / PIECE_BYTES;
    return (int)(n < 1 ? 1 : n > MOST ? MOST : n);
}

comm_blocks_traffic comm_blocks_count(const comm_blocks *b, int n_on_host)
{
    int owners = owners_of(b, 0);
    comm_blocks_traffic t = {.received_within = (int64_t)mates_of(b, 0) * owners,
                             .received_between = b->n - 1,
                             .summed = (int64_t)(b->per_block + 1) * owners};

    if (b->n > 1) t.summed += b->n + 1;
    count_hosts(b, n_on_host, sum_into_host, &t);
    return t;
}

comm_blocks_traffic comm_blocks_count_gather(const comm_blocks *b, int n_on_host)
{
    int between = owners_of(b, 0) - 1;
    comm_blocks_traffic t = {.received_within = b->size - 1 - between, .received_between = between};

    count_hosts(b, n_on_host, gather_into_host, &t);
    return t;
}
