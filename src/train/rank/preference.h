/* SPDX-License-Identifier: Apache-2.0 */
/* preference.h -- preference losses of a run on one rank: the reference policy goes through the
 * layers in the visits of the policy, as companions of its micro-batches, and the losses are
 * weighed in the visit of the head. A pass can have those of several runs. */
#ifndef BALLAST_TRAIN_RANK_PREFERENCE_H
#define BALLAST_TRAIN_RANK_PREFERENCE_H

#include "train/preference/losses.h"
#include "train/rank.h"
#include "train/rank/group.h"

typedef struct bl_preference bl_preference;

/* Sums under way, each with a separate begin and end. */
typedef enum bl_preference_purpose {
    BL_PREFERENCE_STEP,
    BL_PREFERENCE_EVALUATION,
    BL_PREFERENCE_PURPOSES
} bl_preference_purpose;

/* Of rank->job's losses; *out NULL: they are none of preferences. After bl_rank_fill_adapter: where
 * a training continues an adapter, that is read once more, as the reference; else the reference is
 * the base alone. Borrows the rank. Collective. */
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

/* Sums begin at 0. */
void bl_preference_begin(bl_preference *preference, bl_preference_purpose purpose);

/* The group has the micro-batches first .. first + n - 1 of `batches` from `at` on: adds their
 * companions, and has them weighed into the sums. Both batches are borrowed until the pass has run;
 * mismatched NULL: not kto's. BL_EINTERNAL: no room. */
bl_status bl_preference_join(bl_preference *preference, bl_preference_purpose purpose,
                             const bl_batches *batches, const bl_batches *mismatched, int first,
                             int n, int at, bl_group *group);

/* Over all passes since begin and all ranks; collective. */
bl_status bl_preference_end(bl_preference *preference, bl_preference_purpose purpose,
                            bl_preference_metrics *out);

#endif
