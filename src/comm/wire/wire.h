/* SPDX-License-Identifier: Apache-2.0 */
/* wire.h -- how the processes of a job exchange bytes: what collectives.c builds collectives from. wire.c and
 * mpi.c implement it; absent.c stands in for them where there is no MPI.
 *
 *   wire   this process's end: one thread, which makes every MPI call, in the order they were given
 *   channel   a channel of a group of ranks: its messages meet no others'. One exchange at a time.
 *
 * An exchange is a set of sends and receives and returns when all are done, or when the job is aborted; after
 * that nothing touches its buffers. */
#ifndef BALLAST_COMM_WIRE_WIRE_H
#define BALLAST_COMM_WIRE_WIRE_H

#include <stdbool.h>

#include "comm/comm_internal.h"

typedef struct bl_wire bl_wire;
typedef struct bl_wire_channel bl_wire_channel;

typedef struct bl_transfer {
    int peer; /* rank in the channel's group, not the own one */
    bool is_send;
    void *bytes; /* not written by a send */
    size_t n_bytes;
} bl_transfer;

/* Prints a job's error. Called on the wire's thread, which has time for it when others have not, and in one
 * process of the job: the lowest of those that still answer. */
typedef void (*bl_wire_report)(const bl_error *error);

/* Starts MPI. BL_EUSAGE when it does not see n_processes. */
bl_status bl_wire_open(int rank, int n_processes, bl_wire_report report, bl_wire **out);

/* Ends MPI and frees the wire. Without an abort: waits for all processes and returns BL_OK. After one:
 * returns the status that all processes agree on; its text has been reported. */
bl_status bl_wire_close(bl_wire *wire);

int bl_wire_rank(const bl_wire *wire);
int bl_wire_size(const bl_wire *wire);
void bl_wire_set_deadline(bl_wire *wire, double deadline_s); /* 0: none; before the first channel */

void bl_wire_abort(bl_wire *wire, const bl_error *error);
void bl_wire_first_error(bl_wire *wire, bl_error *out);

/* Group numbers: a number is agreed on by taking the largest of what its members propose. */
int bl_wire_propose_group(bl_wire *wire);
void bl_wire_take_group(bl_wire *wire, int group);

/* A channel of `group` (1 or more), for its member number `rank` of `size`, job_ranks[size]. `channel_idx` < 2
 * tells the group's channels apart. */
bl_status bl_wire_channel_create(bl_wire *wire, int group, int channel_idx, int size,
                                 const int *job_ranks, bl_wire_channel **out);
void bl_wire_channel_destroy(bl_wire_channel *channel); /* NULL is fine */

/* At most one transfer a peer and direction. `kind` names the collective in errors. A meeting fails with
 * BL_ERANK, naming the peers not heard from, a deadline after its start; another exchange, a deadline after
 * the last transfer (or piece of 1 GiB) that was completed. BL_ECANCELLED: aborted. */
bl_status bl_wire_channel_exchange(bl_wire_channel *channel, bl_comm_kind kind, bool is_meeting,
                                   const bl_transfer *transfers, int n_transfers);

/* The communicator of all processes (collectives.c). */
bl_status bl_comm_create_wire(bl_wire *wire, bl_comm **out);

#endif
