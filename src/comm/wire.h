/* SPDX-License-Identifier: Apache-2.0 */
/* wire.h -- how the processes of a job exchange bytes: what collectives.c builds collectives from.
 *
 *   wire      this process's end: one thread, which makes every call of a socket, in the order of
 *             the exchanges
 *   channel   a channel of a group of ranks: its messages meet no others'. One exchange at a time.
 *
 * An exchange is a set of sends and receives and returns when all are done, or when the job is
 * aborted; after that nothing touches its buffers. */
#ifndef BALLAST_COMM_WIRE_H
#define BALLAST_COMM_WIRE_H

#include <stdbool.h>

#include "comm/call.h"
#include "comm/comm.h"

typedef struct bl_wire bl_wire;
typedef struct bl_wire_channel bl_wire_channel;

typedef struct bl_transfer {
    int peer; /* rank in the channel's group, not the own one */
    bool is_send;
    void *bytes; /* not written by a send */
    size_t n_bytes;
} bl_transfer;

/* Prints a job's error. Called on the wire's thread, which has time for it when others have not,
 * and in one process of the job: the lowest of those that still answer. */
typedef void (*bl_wire_report)(const bl_error *error);

/* How a process is connected with the others of its job. */
typedef struct bl_wire_links {
    int rank, n_processes;
    /* [n_processes]: a connected stream socket to each other process, Unix or TCP; -1 at the own
     * place. The array is borrowed for the call, the sockets are taken over, also when opening
     * fails. */
    int *sockets;
    int first_on_host,
        n_on_host; /* the ranks of this host: first_on_host <= rank < first + n_on_host */
    /* A memory file (memfd_create) that the processes of this host have in common and use for
     * nothing else; its size is set here. Taken over. -1: none (on all of them), and bulk data go
     * through the sockets. */
    int shared_fd;
} bl_wire_links;

/* Over sockets. A process that closes a socket without bl_wire_close, or is killed, has died: every
 * other process fails with BL_ERANK "rank 3 has died" at once. A process that hangs is found by the
 * deadline. */
bl_status bl_wire_open_sockets(const bl_wire_links *links, bl_wire_report report, bl_wire **out);

/* Whether the error says only that a process has ended: the process that started it knows why. */
bool bl_wire_is_loss(const bl_error *error);

/* Ends the exchanges. Without an abort: waits for all processes and returns BL_OK. After one:
 * returns the status that all processes agree on; its text has been reported. The wire is not
 * freed: threads that still run may abort it, ask it for its first error and come out of its
 * exchanges. Once. */
bl_status bl_wire_end(bl_wire *wire);

/* bl_wire_end, and frees the wire: no other thread uses it. */
bl_status bl_wire_close(bl_wire *wire);

int bl_wire_rank(const bl_wire *wire);
int bl_wire_size(const bl_wire *wire);
/* 0: none. While no exchange is under way. */
void bl_wire_set_deadline(bl_wire *wire, double deadline_s);

/* Ends the process, should the wire's thread hang itself: in a system call, or where the process
 * has no more processor time. After the deadline those that wait for it report that, and call
 * `leave`. NULL, as at first: their exchanges fail then. */
void bl_wire_set_leave(bl_wire *wire, void (*leave)(bl_status st));

void bl_wire_abort(bl_wire *wire, const bl_error *error);
void bl_wire_first_error(bl_wire *wire, bl_error *out);

/* Group numbers: a number is agreed on by taking the largest of what its members propose. */
int bl_wire_propose_group(bl_wire *wire);
void bl_wire_take_group(bl_wire *wire, int group);

uint64_t bl_wire_next_call(bl_wire *wire); /* the next bl_comm_call.number */

/* A channel of `group` (1 or more), for its member number `rank` of `size`, job_ranks[size].
 * `channel_idx` < 2 tells the group's channels apart. */
bl_status bl_wire_channel_create(bl_wire *wire, int group, int channel_idx, int size,
                                 const int *job_ranks, bl_wire_channel **out);
void bl_wire_channel_destroy(bl_wire_channel *channel); /* NULL is fine */

/* At most one transfer a peer and direction. In a call all ranks make the same number of exchanges,
 * also ones without transfers: their numbers tell which of several waits is the earliest. `call`
 * names the collective in errors. A meeting fails with BL_ERANK, naming the peers not heard from, a
 * deadline after its start; another exchange, a deadline after the last transfer (or piece of
 * 1 GiB) that was completed. BL_ECANCELED: aborted. */
bl_status bl_wire_channel_exchange(bl_wire_channel *channel, const bl_comm_call *call,
                                   bool is_meeting, const bl_transfer *transfers, int n_transfers);

/* The communicator of all processes (collectives.c). */
bl_status bl_comm_create_wire(bl_wire *wire, bl_comm **out);
/* From now on the communicator closes the wire when it is destroyed. */
void bl_wire_comm_own(bl_comm *comm);
bool bl_wire_comm_is(const bl_comm *comm); /* whether it is of this kind */

/* On the thread that splits: sends n_bytes to each of the ranks `peers` of a wire communicator and
 * receives as many from each, peer i's at theirs + i * n_bytes. Messages between two ranks keep
 * their order, whatever other ranks are sent. A silent rank is BL_ERANK after the deadline, for not
 * having reached `call`, which gets the next number: the ranks tell each other in one order. */
bl_status bl_wire_comm_tell(bl_comm *comm, const bl_comm_call *call, int n_peers, const int *peers,
                            const void *own, void *theirs, size_t n_bytes);

#endif
