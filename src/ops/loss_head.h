/* SPDX-License-Identifier: Apache-2.0 */
/* loss_head.h -- the language-model head and the weighted negative log-likelihood, without
 * ever holding all logits. */
#ifndef BALLAST_OPS_LOSS_HEAD_H
#define BALLAST_OPS_LOSS_HEAD_H

#include "ops/ops.h"
#include "ops/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The LoRA term s B A of a head: u = A D x of the caller, and its gradient. */
typedef struct bl_loss_head_term {
    int64_t r;
    float scale;
    bl_tensor u, du, B;
    float *dB;
} bl_loss_head_term;

/* logits_t = W x_t;  logp_t = logits_t[target_t] - log sum_v exp(logits_tv)
 *   *loss_sum += - sum_t weight_t logp_t                                 (double, tokens in order)
 *   dx_t = scale weight_t W^T (softmax(logits_t) - onehot(target_t))     (scale = 1 / the step's
 *                                                                        labels)
 *   dW += sum_t scale weight_t (softmax(logits_t) - onehot(target_t)) x_t^T
 * A token of weight 0 costs nothing, adds nothing and gets dx_t = 0 and logp_t = 0; its target is
 * not looked at. Weights may be negative.
 *
 * With a LoRA term (linear/lora_linear.h), u_t = A D x_t made by the caller:
 *   logits_t = W x_t + s B u_t
 *   du_t = s B^T g_t, dB += s sum_t g_t u_t^T, g_t = scale weight_t (softmax(logits_t) -
 *                                                                    onehot(target_t))
 * dx is without the term's part, A^T du_t. A token of weight 0 gets du_t = 0.
 *
 * x (T,H); head (V,H), any format; targets, weights (T).
 * logits: scratch of bl_loss_head_scratch_bytes.
 * dx (T,H) overwritten, may be x; none for forward only. logp (T) overwritten, or NULL.
 * loss_sum: one double, added to, or NULL.
 * d_head (V,H): dW, fp32, added to, in the order of chunks of tokens; NULL: the head is frozen. It
 * needs dx (BL_EINTERNAL). Of bf16 tensors, softmax - onehot is rounded to bf16 for both products;
 * sums are fp32.
 * term: not on CUDA (BL_EINTERNAL). u and du (T,r) and B (V,r) of x's dtype; du is overwritten, dB
 * fp32, added to; without dx neither is touched.
 *
 * Memory: tokens that count are packed and taken in chunks whose logits fit the scratch; packed
 * inputs and gradients share dx. On the CPU the scratch is at most 64 MiB, or 16 tokens' logits
 * where those are more. The vocabulary is not split: the gradient would need each logit again. A
 * logit that is not finite makes the loss not finite; the caller checks. BL_EINPUT on the stream: a
 * target outside [0, V) of a token that counts. */
typedef struct bl_loss_head_args {
    int64_t T, H, V;
    bl_weight head;
    bl_tensor x, dx;
    const int32_t *targets;
    const float *weights;
    double scale;
    void *logits;
    float *logp;
    double *loss_sum;
    float *d_head;
    const bl_loss_head_term *term; /* borrowed until the op has run; NULL: none */
} bl_loss_head_args;
BL_API bl_status bl_loss_head(bl_stream *stream, const bl_loss_head_args *args);

/* T: the largest that a call will have; ignored on the CPU, and so is H. */
BL_API size_t bl_loss_head_scratch_bytes(bl_device_kind kind, int64_t T, int64_t H, int64_t V);

#ifdef __cplusplus
}
#endif

#endif
