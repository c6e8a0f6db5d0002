/* SPDX-License-Identifier: Apache-2.0 */
/* comm_cases.h -- a rank's part in the tests of any communicator: collectives against serial sums,
 * bit for bit, and failures. */
#ifndef BALLAST_TESTS_COMM_COMM_CASES_H
#define BALLAST_TESTS_COMM_COMM_CASES_H

#include "test_ranks.h"

bl_status comm_case_world_values(test_rank *self);   /* every collective, many lengths */
bl_status comm_case_sums_in_blocks(test_rank *self); /* blocks of 1 to 5 ranks; also in splits */
/* 0 + -0 is +0: the sum starts from zero, also with one rank. */
bl_status comm_case_negative_zero(test_rank *self);
bl_status comm_case_split_values(test_rank *self); /* the same in groups */

/* The steps of a layer's visit: gather ahead on one stream, compute on another, reduce on a third,
 * over a ring of buffers; each is late now and then. */
bl_status comm_case_run_pipeline(test_rank *self);

/* Two communicators of the same ranks: a gather that waits for a rank holds up no reduction. */
bl_status comm_case_gather_is_held(test_rank *self);

/* Rank 1's task fails with BL_EIO after ten rounds; the others check that they are canceled
 * everywhere, and return BL_ECANCELED "all canceled". */
bl_status comm_case_one_rank_fails(test_rank *self);

/* For the cases below. Ranks that do not fail arrive within this time of each other; where one did
 * not, since its machine stalled, the test tries again. */
#define COMM_CASE_DEADLINE_S 2.0

/* Odd ranks come to a collective when the job has failed without them. */
bl_status comm_case_two_ranks_stay_away(test_rank *self);

/* Rank 2, which is rank 1 of the even ones, does not come to their barrier. */
bl_status comm_case_split_rank_stays_away(test_rank *self);

/* Rank 1 does not come to the gather of layer 17. */
bl_status comm_case_labeled_rank_stays_away(test_rank *self);

/* Rank 1 calls an all_reduce of the head, the others a broadcast of layer 3. */
bl_status comm_case_labels_disagree(test_rank *self);

/* One rank calls something else: BL_EINTERNAL on all. */
bl_status comm_case_other_label(test_rank *self); /* layer 5 on rank 1, 4 on the others */
bl_status comm_case_other_size(test_rank *self);
bl_status comm_case_other_kind(test_rank *self);
bl_status comm_case_other_root(test_rank *self);
bl_status comm_case_other_element(test_rank *self);

#endif
