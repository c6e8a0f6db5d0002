/* SPDX-License-Identifier: Apache-2.0 */
/* group.c -- a list of micro-batches with room for the largest pass. */
#include "train/rank/group.h"

#include <stdlib.h>
#include <string.h>

bl_status bl_group_create(const bl_pass_options *pass, bl_group **out)
{
    int room = pass->max_group + pass->max_companions;

    *out = NULL;
    bl_group *group = calloc(1, sizeof *group);
    if (!group) return BL_FAIL(BL_ENOMEM, "a group of micro-batches");
    *group = (bl_group){.micro = calloc((size_t)room, sizeof *group->micro),
                        .room = room,
                        .part = calloc((size_t)room, sizeof *group->part)};
    if (!group->micro || !group->part) {
        bl_group_destroy(group);
        return BL_FAIL(BL_ENOMEM, "a group of %d micro-batches", room);
    }
    *out = group;
    return BL_OK;
}

void bl_group_destroy(bl_group *group)
{
    if (!group) return;
    free(group->micro);
    free(group->part);
    free(group);
}

void bl_group_clear(bl_group *group)
{
    group->n_micro = 0;
    group->n_parts = 0;
}

bl_status bl_group_add(bl_group *group, const bl_pass_micro *micro, int n, int *at)
{
    if (n > group->room - group->n_micro)
        return BL_FAIL(BL_EINTERNAL, "%d more micro-batches in a group with %d of %d", n,
                       group->n_micro, group->room);
    *at = group->n_micro;
    memcpy(group->micro + group->n_micro, micro, (size_t)n * sizeof *micro);
    group->n_micro += n;
    return BL_OK;
}

bl_pass_input bl_group_input(const bl_group *group)
{
    return (bl_pass_input){.n_micro = group->n_micro,
                           .micro = group->micro,
                           .weigher = group->n_parts > 0 ? &group->weigher : NULL};
}
