/* SPDX-License-Identifier: Apache-2.0 */
/* model.h -- a communicator made of rates, for a device made of rates (device/model.h): one rank of
 * a group whose others do the same work at the same time. Collectives move nothing and take their
 * time. */
#ifndef BALLAST_COMM_MODEL_H
#define BALLAST_COMM_MODEL_H

#include "comm/comm.h"
#include "device/model.h"

/* n_ranks, numbered host by host, n_on_host of them on each. split_size: ranks of each group that
 * bl_comm_split makes. */
bl_status bl_comm_create_model(int rank, int n_ranks, int n_on_host, int split_size, bl_comm **out);

/* Between GPUs: gathers over hosts bring each part to each host once, here and in communicators
 * that are split from this one. */
void bl_comm_model_gather_by_hosts(bl_comm *comm);

/* An all-gather in a group of `size` ranks with `bytes` each, or a sum with `bytes` for each rank
 * in the result. In blocks of ranks (docs/design/0029): one exchange within blocks and one between
 * them, with the network bytes of the host that receives most; between GPUs a gather's two are
 * pipelined, in comm_gather_pieces. */
typedef enum bl_exchange_kind {
    BL_EXCHANGE_RING,   /* a gather: every host and every rank receives the bytes of all others */
    BL_EXCHANGE_BLOCKS, /* a gather in blocks */
    BL_EXCHANGE_SUM     /* in blocks, without the additions */
} bl_exchange_kind;
typedef struct bl_exchange {
    double size, n_on_host, bytes;
    bl_exchange_kind kind;
    int block; /* ranks per block (of GPUs' gathers, the ranks of a host); a ring has none */
} bl_exchange;
/* How communicators gather by default: processes on CPUs in blocks, GPUs by NCCL's ring. */
bl_exchange_kind bl_exchange_gather_kind(bl_device_kind kind);
/* rates->gather_bytes_per_s may be 0 with one rank per host: then only the network takes time. */
bl_work bl_exchange_work(const bl_exchange *exchange, bl_device_kind kind, const bl_rates *rates);

#endif
