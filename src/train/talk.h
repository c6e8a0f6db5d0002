/* SPDX-License-Identifier: Apache-2.0 */
/* talk.h -- small collectives in host memory: counts, checksums, decisions. The data are sent
 * between hosts, never between GPUs, and no work is queued on a GPU. Every
 * function is collective over the communicator, is called by the rank's own thread, and returns
 * when it is done; so the buffers may be the caller's own variables. Errors: the communicator's
 * (comm.h). */
#ifndef BALLAST_TRAIN_TALK_H
#define BALLAST_TRAIN_TALK_H

#include "comm/comm.h"

typedef struct bl_talk {
    bl_comm *comm;     /* borrowed */
    bl_stream *stream; /* of a CPU device */
    bl_device *device; /* owned, with the stream; NULL: both are borrowed */
} bl_talk;

/* `stream`, of a CPU device, is borrowed. NULL: the talk makes one. BL_ENOMEM, BL_ELIMIT. */
bl_status bl_talk_open(bl_comm *comm, bl_stream *stream, bl_talk *out);
void bl_talk_close(bl_talk *talk); /* one that is all zero is fine; the communicator lives longer */

/* `all` has n_bytes per rank, in rank order; the own part is filled in, the others come. */
bl_status bl_talk_gather(const bl_talk *talk, void *all, size_t n_bytes);
/* `bytes` becomes rank 0's on all ranks. */
bl_status bl_talk_broadcast(const bl_talk *talk, void *bytes, size_t n_bytes);
/* values[i] becomes the sum over the ranks. */
bl_status bl_talk_sum(const bl_talk *talk, int64_t *values, int64_t n);
bl_status bl_talk_sum_real(const bl_talk *talk, double *values, int64_t n);
/* Sums until no rank is busy; a rank that is gone or hangs misses the next sum, and is found after
 * the deadline. look tells whether this rank is busy, after a pause if it is; its failure ends the
 * wait. */
typedef bl_status (*bl_talk_look_fn)(void *user, bool *is_busy);
bl_status bl_talk_wait(const bl_talk *talk, bl_talk_look_fn look, void *user);
/* Returns when all ranks have called it. */
bl_status bl_talk_meet(const bl_talk *talk);

#endif
