/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_cases.h -- a rank's part in the tests of the GPU communicator. The values are those of
 * comm_cases.h. */
#ifndef BALLAST_TESTS_NCCL_CASES_H
#define BALLAST_TESTS_NCCL_CASES_H

#include "nccl_ranks.h"

/* Ranks that mean to come do so within this time of each other, on a loaded machine as well. */
#define NCCL_DEADLINE_S      5
#define NCCL_DEADLINE_S_TEXT "5.0 s"

/* Launches of a crowd: the first ones end, then so many wait on a stream that is held up, the
 * others on another one. All that wait are more than twice as many as a watch has room for at its
 * start. The pauses take longer than the deadline. */
enum {
    NCCL_GATHERED_BYTES = (6 << 20) + 5, /* of each rank, in "gather": several pieces */
    NCCL_ONE_SUM_FLOATS = 1000,          /* per rank, in the sum of "one_sum" */
    NCCL_CROWD_FIRST = 30,
    NCCL_CROWD_HELD = 70,
    NCCL_CROWD = 170,
    NCCL_CROWD_PAUSES = 16,
    NCCL_CROWD_PAUSE_MS = 500
};

extern const nccl_case nccl_cases[]; /* ends with a name NULL */

/* nccl_failures.c */
bl_status nccl_fail_other_kind(nccl_self *self); /* rank 1 calls something else */
bl_status nccl_fail_other_size(nccl_self *self);
bl_status nccl_fail_other_label(nccl_self *self);
bl_status
nccl_fail_other_comm(nccl_self *self); /* rank 1 launches on two communicators in the other order */
bl_status nccl_fail_other_trust(nccl_self *self); /* rank 1 trusts the order a call too early */
bl_status nccl_fail_away(
    nccl_self *self); /* rank 1 comes to no collective; marks 2 where another's ends well */
bl_status nccl_fail_away_in_pair(
    nccl_self *self); /* of 4, in pairs: rank 3 does not come to its pair's gather */
bl_status
nccl_fail_own(nccl_self *self); /* rank 1's own error, while the others are in a collective */
bl_status nccl_fail_idle(nccl_self *self); /* no collective, until the job fails */
bl_status
nccl_fail_own_idle(nccl_self *self); /* the same; rank 1 fails by itself when mark 1 is made */
bl_status
nccl_rounds(nccl_self *self); /* many collectives, for faults at one of them; marks 0 once */
bl_status nccl_rounds_late(nccl_self *self); /* the same, when mark 1 is made */
bl_status
nccl_rounds_of_two(nccl_self *self); /* the same on two communicators, on one stream and on two */
bl_status nccl_pause(
    nccl_self *self); /* rank 0 comes when mark 1 is made, the others have marked 0 and wait */
bl_status nccl_crowd_slow(nccl_self *self); /* a crowd whose last ones come one after the other */
bl_status nccl_fail_crowd_first(nccl_self *self); /* one never continues */
bl_status nccl_fail_crowd_last(nccl_self *self);  /* rank 1 leaves the last one out */

#endif
