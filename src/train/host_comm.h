/* SPDX-License-Identifier: Apache-2.0 */
/* host_comm.h -- small collectives in host memory: counts, checksums, decisions. The data are sent
 * between hosts, never between GPUs, and no work is queued on a GPU. Every function is collective
 * over the communicator, is called by the rank's own thread, and returns when it is done; so the
 * buffers may be the caller's own variables. Errors: the communicator's (comm.h). */
#ifndef BALLAST_TRAIN_HOST_COMM_H
#define BALLAST_TRAIN_HOST_COMM_H

#include "comm/comm.h"

typedef struct bl_host_comm {
    bl_comm *comm;     /* borrowed */
    bl_stream *stream; /* of a CPU device */
    bl_device *device; /* owned, with the stream; NULL: both are borrowed */
} bl_host_comm;

/* `stream`, of a CPU device, is borrowed. NULL: the host_comm makes one. BL_ENOMEM, BL_ELIMIT. */
bl_status bl_host_comm_open(bl_comm *comm, bl_stream *stream, bl_host_comm *out);
void bl_host_comm_close(
    bl_host_comm *host_comm); /* one that is all zero is fine; the communicator lives longer */

/* `all` has n_bytes per rank, in rank order; the caller fills in its part, and receives the
 * others. */
bl_status bl_host_comm_gather(const bl_host_comm *host_comm, void *all, size_t n_bytes);
/* `bytes` becomes rank 0's on all ranks. */
bl_status bl_host_comm_broadcast(const bl_host_comm *host_comm, void *bytes, size_t n_bytes);
/* values[i] becomes the sum over the ranks. */
bl_status bl_host_comm_sum(const bl_host_comm *host_comm, int64_t *values, int64_t n);
bl_status bl_host_comm_sum_real(const bl_host_comm *host_comm, double *values, int64_t n);
/* Sums until no rank is busy; a rank that is gone or hangs misses the next sum, and is found after
 * the deadline. `look` returns whether this rank is busy, after a pause if it is; its failure ends
 * the wait. */
typedef bl_status (*bl_host_comm_is_busy_fn)(void *user, bool *is_busy);
bl_status bl_host_comm_wait(const bl_host_comm *host_comm, bl_host_comm_is_busy_fn look,
                            void *user);
/* Returns when all ranks have called it. */
bl_status bl_host_comm_barrier(const bl_host_comm *host_comm);

#endif
