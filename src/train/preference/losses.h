/* SPDX-License-Identifier: Apache-2.0 */
/* losses.h -- preference losses as functions of log-probabilities: their values, and the signed
 * weight of each token's log-probability, which is all that their gradient needs.
 *
 * A micro-batch has answers y, each a document with a prompt. Over the tokens of an answer, with
 * logp of the policy and of the reference,
 *
 *   s(y) = sum_t a_t logp_t             a_t = ld_alpha beyond the shorter answer's length, else 1
 *   r(y) = s(y) - s_ref(y)              c, d: r of the chosen and of the rejected answer
 *   m(y) = mean_t logp_t                n(y): tokens of the answer
 *
 *   sigmoid        -log S(beta (c - d))                    S(x) = 1 / (1 + e^-x)
 *   hinge          max(0, 1 - beta (c - d))
 *   ipo            (c / n_c - d / n_d - 1 / (2 beta))^2
 *   sigmoid_norm   -log S(beta (c / n_c - d / n_d))
 *   robust         (-(1 - e) log S(beta (c - d)) + e log S(-beta (c - d))) / (1 - 2 e)
 *   apo_zero       1 - S(beta c) + S(beta d)
 *   apo_down       S(beta c) + 1 - S(beta (c - d))
 *   simpo          -(1 - e) log S(x) - e log S(-x),        x = beta (m_c - m_d) - gamma
 *   orpo           nll - beta log S(odds(m_c) - odds(m_d)), odds(x) = x - log(1 - e^x)
 *   sft            -mean logp_t of the chosen answers' tokens of the micro-batch
 *   kto            desirable_weight (1 - S(beta (r - kl))), undesirable_weight (1 - S(beta (kl -
 *                  r)))
 *
 * e is label_smoothing; nll is the mean over all tokens of the chosen answers and their prompts.
 * The loss of a micro-batch is the mean over its pairs, of kto over its answers; that of a step the
 * mean over its micro-batches. This is what TRL 1.16 computes (DPOTrainer, ORPOTrainer, CPOTrainer,
 * KTOTrainer). Papers: docs/preference.md. */
#ifndef BALLAST_TRAIN_PREFERENCE_LOSSES_H
#define BALLAST_TRAIN_PREFERENCE_LOSSES_H

#include "config/config.h"
#include "model/batch.h"
#include "train/preference.h"

/* Sums over micro-batches; all are doubles, to be summed over ranks as they are. Those of rewards
 * and log-probabilities are over answers. */
typedef struct bl_preference_sums {
    double n_micro, n_rows;                  /* that are not empty; pairs, or answers of kto */
    double loss_by_micro;                    /* of each micro-batch, less loss_at_start */
    double loss_by_row;                      /* the same, times its rows */
    double n_chosen, n_rejected, n_accurate; /* answers; pairs whose chosen reward is higher */
    double rewards_chosen, rewards_rejected, logps_chosen, logps_rejected;
    double kl; /* of each micro-batch */
} bl_preference_sums;
enum { BL_PREFERENCE_N_SUMS = sizeof(bl_preference_sums) / sizeof(double) };

/* A micro-batch of preferences in host memory: answers as documents, of pairs chosen and rejected
 * in turn. */
typedef struct bl_preference_micro {
    int64_t n_documents;
    const int32_t *ends;             /* [n_documents + 1], from 0 */
    const uint8_t *marks;            /* of tokens; model/batch.h */
    const float *policy, *reference; /* log-probabilities; reference NULL: see reference_sums */
    /* [n_documents]: s_ref of bl_preference_sum_reference, instead of `reference`. Both NULL: no
     * loss needs one. */
    const double *reference_sums;
    double kl;      /* of kto */
    float *weights; /* of tokens, overwritten; may be `policy`; NULL: losses alone */
} bl_preference_micro;

/* Value of the losses where policy and reference are equal, which their sums leave out: the first
 * step of a new adapter then has this loss to the last bit, whatever it is summed over. */
double bl_preference_loss_at_start(const bl_losses *losses);

/* Adds to *sums. weights[t] becomes -d loss / d logp_t of the micro-batch's loss: the loss head's
 * weight. */
void bl_preference_weigh(const bl_losses *losses, const bl_preference_micro *micro,
                         bl_preference_sums *sums);

/* sums[n_documents], overwritten: s_ref(y) of each document's answer, from micro->reference. */
void bl_preference_sum_reference(const bl_losses *losses, const bl_preference_micro *micro,
                                 double *sums);

/* The mean over a micro-batch's answers of the difference of their log-probabilities, for kto's
 * kl. */
double bl_preference_divergence(const bl_preference_micro *micro);

/* summary.c: the metrics of sums over all ranks. */
bl_preference_metrics bl_preference_summarize(const bl_losses *losses,
                                              const bl_preference_sums *sums);

#endif
