/* SPDX-License-Identifier: Apache-2.0 */
/* group.h -- where the ranks of one process meet: the state that the ranks of a local communicator
 * share.
 *
 *   job    all ranks of a run: the first error, and all groups, so that an abort reaches each of
 *          them
 *   group  the ranks of one communicator: two meetings (one for collectives, which run on streams,
 *          and one for splits, which run on the ranks' own threads) and a scratch buffer for
 *          reductions
 *
 * A collective: publish what this rank brings, meet, verify, move the bytes, part.
 *   - comm_local_meet is the only wait that abort and deadline end. A meeting that has happened
 *     remains valid, and all ranks continue: a collective happens on every rank or on none.
 *   - From meet to the last part a rank does nothing that can wait for anything but the others'
 *     copying, so comm_local_part cannot hang and is not canceled: no rank returns, and frees its
 *     buffers, while another still reads them. */
#ifndef BALLAST_COMM_LOCAL_GROUP_H
#define BALLAST_COMM_LOCAL_GROUP_H

#include <stdbool.h>

#include "comm/backend.h"

enum { COMM_LOCAL_SCRATCH_BYTES = 256 << 10 }; /* one of two halves: fits the second-level cache */

typedef struct comm_local_group comm_local_group;
typedef struct comm_local_meeting comm_local_meeting;

/* What a rank brings to a meeting. Those it meets may read it until they part. */
typedef struct comm_local_call {
    bl_comm_call what; /* equal on all ranks */
    const void *send;
    int color;               /* split */
    comm_local_group *group; /* split: made by the first rank of a color */
    bl_event *ready, *done;  /* device.h: of the rank's stream */
    const void *piece;       /* the same: of a sum, in host memory */
} comm_local_call;

/* A group shared by `size` ranks, each of which releases it once: a new job, or the members
 * parent_ranks[0..size) of a group of the same job. */
bl_status comm_local_group_create_job(int size, double deadline_s, comm_local_group **out);
bl_status comm_local_group_create(comm_local_group *parent, int size, const int *parent_ranks,
                                  comm_local_group **out);
void comm_local_group_release(comm_local_group *group);

unsigned char *
comm_local_group_scratch(comm_local_group *group,
                         int half); /* COMM_LOCAL_SCRATCH_BYTES, shared by the ranks */

comm_local_meeting *comm_local_collectives(comm_local_group *group);
comm_local_meeting *comm_local_splits(comm_local_group *group);

/* Publishes `call` for `rank` and waits for the others. BL_ECANCELED: the job was aborted;
 * BL_ERANK: a rank did not arrive in time; BL_EINTERNAL: the ranks call different things. After a
 * failure the meeting is over for good. */
bl_status comm_local_meet(comm_local_meeting *meeting, int rank, const comm_local_call *call);
void comm_local_part(comm_local_meeting *meeting, int rank);
comm_local_call *comm_local_call_of(comm_local_meeting *meeting,
                                    int rank); /* between meet and part */

void comm_local_abort(comm_local_group *group, const bl_error *error);
void comm_local_first_error(comm_local_group *group, bl_error *out);

#endif
