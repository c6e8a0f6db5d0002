/* SPDX-License-Identifier: Apache-2.0 */
/* preference.h -- preference losses of a run on one rank: the reference policy goes through the
 * layers in the visits of the policy, as companions of its micro-batches, and the losses are
 * weighed in the visit of the head. A pass can have those of several runs.
 *
 * With precompute_ref_log_probs the sums of the reference are known instead
 * (preference/reference.h; precompute.c): from begin_collecting to end_collecting, passes of the
 * policy's micro-batches are made with the reference, and its sums collected. */
#ifndef BALLAST_TRAIN_RANK_PREFERENCE_H
#define BALLAST_TRAIN_RANK_PREFERENCE_H

#include "train/preference/losses.h"
#include "train/preference/reference.h"
#include "train/rank.h"
#include "train/rank/group.h"

typedef struct bl_preference bl_preference;

/* Of the sums that a training of the job knows before its first step; zeros: none. */
bl_reference_size bl_preference_size(const bl_job *job);

/* Sums under way, each with a separate begin and end. */
typedef enum bl_preference_purpose {
    BL_PREFERENCE_STEP,
    BL_PREFERENCE_EVALUATION,
    BL_PREFERENCE_PURPOSES
} bl_preference_purpose;

/* Of rank->job's losses; *out NULL: they are none of preferences. After bl_rank_fill_adapter: where
 * a training continues an adapter, that is read once more, as the reference; else the reference is
 * the base alone. With precompute_ref_log_probs the sums are 0 yet. Borrows the rank.
 * Collective. */
bl_status bl_preference_create(bl_rank *rank, bl_preference **out);
void bl_preference_destroy(bl_preference *preference); /* NULL is fine */

/* Micro-batches beside `batches`, for the mismatched answers of kto; *out NULL: not needed. Makes
 * batches keep what losses need to know of tokens. preference may be NULL. */
bl_status bl_preference_prepare(const bl_preference *preference, bl_batches *batches,
                                bl_batches **mismatched);
/* After rows were appended and before the upload: fills and uploads `mismatched`, if there is
 * one. */
bl_status bl_preference_mismatch(const bl_preference *preference, const bl_batches *batches,
                                 bl_batches *mismatched);

/* Sums begin at 0. first_position: of a step, that of its sample 0 (data/sampler.h). */
void bl_preference_begin(bl_preference *preference, bl_preference_purpose purpose,
                         int64_t first_position);

/* The group has the micro-batches first .. first + n - 1 of `batches` from `at` on: adds their
 * companions, and has them weighed into the sums. Both batches are borrowed until the pass has run;
 * mismatched NULL: not kto's. BL_EINTERNAL: no room. */
bl_status bl_preference_join(bl_preference *preference, bl_preference_purpose purpose,
                             const bl_batches *batches, const bl_batches *mismatched, int first,
                             int n, int at, bl_group *group);

/* Of a training with precompute_ref_log_probs: its sums, to be read or collected; else NULL. */
bl_reference_sums *bl_preference_known(const bl_preference *preference); /* NULL is fine */
/* Between them, join has the micro-batches from `at` on go through the reference, and keeps its
 * sums of this rank's rows. begin reads the adapter that the reference is; end makes the sums those
 * of all ranks, and frees that adapter, in any case. Collective. BL_ENUMERIC: one is not finite. */
bl_status bl_preference_begin_collecting(bl_preference *preference);
bl_status bl_preference_end_collecting(bl_preference *preference);

/* Over all passes since begin and all ranks; collective. */
bl_status bl_preference_end(bl_preference *preference, bl_preference_purpose purpose,
                            bl_preference_metrics *out);

#endif
