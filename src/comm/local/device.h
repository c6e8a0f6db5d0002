/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- the local communicator's collectives where host functions cannot do the work:
 * between the devices of ranks on CUDA. Internal to comm/.
 *
 * A host function may neither call CUDA nor wait for another stream's, so the ranks meet on their
 * own threads, as the calls are made: a call returns when every rank of the group has made it.
 * Gathers and broadcasts are copies between device memories, ordered by the ranks' events; nothing
 * waits for the GPU. Sums of several ranks go through pinned host memory, piece by piece, in the
 * order that the CPU has, and wait for the GPU: they are for tests of several ranks on one GPU, not
 * for speed. A rank alone copies. */
#ifndef BALLAST_COMM_LOCAL_DEVICE_H
#define BALLAST_COMM_LOCAL_DEVICE_H

#include "comm/local/group.h"

/* What a rank keeps between its collectives: events and a piece of pinned memory of its device.
 * Made by the first one. */
typedef struct comm_local_device comm_local_device;

typedef struct comm_local_seat {
    comm_local_meeting *meeting;
    int rank, size, sum_block;
    const void **pieces; /* [size]: of the ranks, in a sum */
    comm_local_device *device;
} comm_local_seat;

bl_status comm_local_device_run(comm_local_seat *seat, bl_stream *stream, const bl_comm_task *task);

/* Before the device that its streams belong to; NULL is fine. */
void comm_local_device_destroy(comm_local_device *device);

#endif
