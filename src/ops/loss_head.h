/* SPDX-License-Identifier: Apache-2.0 */
/* loss_head.h -- the frozen language-model head and the weighted negative log-likelihood, without ever holding all logits. */
#ifndef BALLAST_OPS_LOSS_HEAD_H
#define BALLAST_OPS_LOSS_HEAD_H

#include "ops/ops.h"
#include "ops/weight.h"

/* logits_t = W x_t;  logp_t = logits_t[target_t] - log sum_v exp(logits_tv);
 *   *loss_sum += - sum_t weight_t logp_t                                (double, tokens in order)
 *   dx_t = scale weight_t W^T (softmax(logits_t) - onehot(target_t))     (scale = 1 / number of labels of the step)
 * A token of weight 0 costs nothing, adds nothing and gets dx_t = 0 and logp_t = 0; its target is not looked at. Weights may be negative.
 * x (T,H); head (V,H), any format; targets, weights (T); logits: scratch of bl_loss_head_scratch_floats(V) floats.
 * dx (T,H) overwritten, or NULL for forward only; logp (T) overwritten, or NULL; loss_sum: one double, added to, or NULL.
 * A logit that is not finite makes the loss not finite; the caller checks. */
typedef struct bl_loss_head_args {
    int64_t T, H, V;
    const bl_weight *head; /* host pointer, valid until the op has run */
    const float *x;
    const int32_t *targets;
    const float *weights;
    double scale;
    float *logits, *dx, *logp;
    double *loss_sum;
} bl_loss_head_args;
bl_status bl_loss_head(bl_stream *stream, const bl_loss_head_args *args);
int64_t bl_loss_head_scratch_floats(int64_t V);

#endif
