/* SPDX-License-Identifier: Apache-2.0 */
/* group.h -- the micro-batches of one pass, as a rank puts them together: those of the steps of its
 * runs; companions of preference losses (preference.h); overlapped evaluations (evaluate.h).
 * A rank has one group, which the passes use one after the other. */
#ifndef BALLAST_TRAIN_RANK_GROUP_H
#define BALLAST_TRAIN_RANK_GROUP_H

#include "model/batch.h"
#include "model/pass.h"

struct bl_preference;
struct bl_preference_sums;

/* Micro-batches whose losses are of preferences: batches->micro[first .. first + n - 1]. */
typedef struct bl_group_part {
    struct bl_preference *preference;
    int purpose; /* bl_preference_purpose */
    struct bl_preference_sums *sums;
    const bl_batches *batches, *mismatched; /* mismatched NULL: not kto's */
    int first, n;
    int at, companions_at; /* of the group's micro: they, and their companions */
} bl_group_part;

typedef struct bl_group {
    bl_pass_micro *micro; /* [room] */
    int n_micro, room;
    bl_group_part *part; /* [room] */
    int n_parts;
    bl_pass_weigher weigher; /* preference.c's, once there is a part */
} bl_group;

/* Room for a pass with these options. BL_ENOMEM. */
bl_status bl_group_create(const bl_pass_options *pass, bl_group **out);
void bl_group_destroy(bl_group *group); /* NULL is fine */

void bl_group_clear(bl_group *group);
/* Where they are in the group. BL_EINTERNAL: no room. */
bl_status bl_group_add(bl_group *group, const bl_pass_micro *micro, int n, int *at);
/* For bl_pass_run; borrows the group. */
bl_pass_input bl_group_input(const bl_group *group);

#endif
