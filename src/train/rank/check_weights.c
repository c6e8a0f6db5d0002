/* SPDX-License-Identifier: Apache-2.0 */
/* check_weights.c -- compares the weights that a rank has read with those of the other ranks and of
 * the checkpoint that is resumed. */
#include <stdlib.h>

#include "base/log.h"
#include "train/rank/trainer.h"

/* Each shard group has read a copy of the base, and each rank the norms and the embedding, of its
 * host's files. */
bl_status bl_rank_compare_weights(bl_rank *r)
{
    int n_ranks = r->job->topology.n_ranks, other = 0;

    if (n_ranks == 1) return BL_OK;
    uint64_t *all = calloc((size_t)n_ranks, sizeof *all);
    if (!all) return BL_FAIL(BL_ENOMEM, "checksums");
    all[r->index] = r->weights->checksum;
    bl_status st = bl_host_comm_gather(&r->host_comm, all, sizeof *all);
    while (st == BL_OK && other < n_ranks && all[other] == all[0]) other++;
    free(all);
    if (st != BL_OK || other == n_ranks) return st;
    return BL_FAIL(BL_EUSAGE, "the model's weights are not the same on rank 0 and on rank %d",
                   other);
}

bl_status bl_trainer_check_weights(bl_trainer *t)
{
    const bl_start *start = &t->training->start;

    if (!start->dir || !start->has_weights || start->weights == t->rank->weights->checksum)
        return BL_OK;
    t->start_differs = true;
    if (!bl_train_config_allows(t->config, BL_DIFFERENCE_MODEL))
        return BL_FAIL(BL_ECHECKPOINT,
                       "%s was made by another run: the model's weights differ "
                       "(allow_resume_mismatch: [%s] resumes it, not bit-identically)",
                       start->dir, BL_DIFFERENCE_MODEL);
    if (t->rank->index == 0)
        bl_log_warning("resuming %s although this run differs, so not bit-identical: the model's "
                       "weights differ",
                       start->dir);
    return BL_OK;
}
