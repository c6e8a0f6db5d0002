/* SPDX-License-Identifier: Apache-2.0 */
/* session.h -- training under a loop of the caller's: a loaded base, and adapters over it that come
 * and go.
 *
 *   open -> create_lora, load -> forward_backward ... optim_step ... -> save_weights, save_state
 *
 * The verbs are those of Tinker (tinker-docs.thinkingmachines.ai). They run on the parts that
 * `ballast train` runs on: one forward_backward with reduction mean and one optim_step per step
 * have the bits of its step, where rows, their order and the keys are the same.
 *
 * Requests of different adapters that wait at the same time go through one visit of each layer. An
 * adapter's bits are those that it has alone.
 *
 * Any thread may call, for any adapter: a call waits until its request has run, on a thread of the
 * session. Requests of one adapter run in the order in which they came. An error of a request
 * concerns its adapter alone; only an error of the base (a page that cannot be read) ends the
 * session, and all later calls return it. A process that was forked does not have the session: each
 * call returns BL_EUSAGE.
 *
 * Errors of all functions: BL_EUSAGE and the argument at fault; BL_ENOMEM, BL_EIO, BL_ELIMIT. The
 * text is bl_error_text of the calling thread. */
#ifndef BALLAST_TRAIN_SESSION_H
#define BALLAST_TRAIN_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_session bl_session;
typedef struct bl_session_adapter bl_session_adapter;

/* Loads the base. keys[n]: "key=value", keys of `ballast train` (docs/python.md lists which):
 * model_name_or_path is required. per_device_train_batch_size, default 1 here, is the number of
 * rows in a micro-batch; visit_tokens auto: four micro-batches of full rows. One rank, on CPUs:
 * ranks above 1 and device cuda are BL_EUSAGE. */
BL_API bl_status bl_session_open(const char *const *keys, int n, bl_session **out);
/* Frees the session and its adapters. No other call may run or follow; not from a
 * bl_session_loss_fn. NULL is fine. In a forked process: nothing happens. */
BL_API void bl_session_close(bl_session *session);

/* A fresh adapter. keys[n]: lora_r, lora_alpha, lora_dropout, lora_target_modules, use_rslora,
 * seed; or init_adapter, a PEFT directory. BL_ENOMEM, before it is taken: more than the available
 * memory. The adapter is the session's until bl_session_drop or bl_session_close. */
BL_API bl_status bl_session_create_lora(bl_session *session, const char *const *keys, int n,
                                        bl_session_adapter **out);
/* The newest state in a directory of bl_session_save_state; continues with the bits of the adapter
 * that was saved. BL_ECHECKPOINT: damaged, or of another base, with the differences. */
BL_API bl_status bl_session_load(bl_session *session, const char *dir, bl_session_adapter **out);
/* Frees an adapter; no other call for it may run or follow. NULL is fine. */
BL_API void bl_session_drop(bl_session_adapter *adapter);

/* A row: arrays of n tokens, host memory, borrowed for the call. targets[t] is the token that
 * position t predicts (already shifted), -100: none. */
typedef struct bl_session_row {
    int64_t n; /* 1 .. max_seq_length */
    const int32_t *input_ids;
    const int32_t *targets;
    const float *weights;    /* finite, any sign; NULL: 1 each */
    const float *logprobs;   /* of importance_sampling: q_t, finite; else NULL */
    const float *advantages; /* of importance_sampling: A_t, finite; else NULL */
} bl_session_row;

/* The loss of a call, L. log p_t is that of targets[t]; sums are over all rows' tokens that have a
 * target and a weight other than 0, of which there are N. D = N with reduction mean, as `ballast
 * train`, and 1 with is_sum, as Tinker.
 *   cross_entropy         L = -(1/D) sum_t w_t log p_t
 *   importance_sampling   L = -(1/D) sum_t w_t exp(log p_t - q_t) A_t    (Tinker, "Losses")
 *   custom                L and dL/d log p_t are fn's; D = 1 */
typedef enum bl_session_loss_kind {
    BL_SESSION_CROSS_ENTROPY,
    BL_SESSION_IMPORTANCE_SAMPLING,
    BL_SESSION_CUSTOM
} bl_session_loss_kind;

/* logp[row][t]: log p_t, 0 without a target. Fills gradient[row][t] = dL/d log p_t, 0 on entry, and
 * *loss; all finite. Runs on the thread of the call, while the session waits in the visit of the
 * head: it may not call the session. An error becomes the call's, and adds no gradient. */
typedef bl_status (*bl_session_loss_fn)(void *user, const float *const *logp,
                                        float *const *gradient, double *loss);

/* A loss of bl_session_forward_backward. fn and user: of custom. */
typedef struct bl_session_loss {
    bl_session_loss_kind kind;
    bool is_sum;
    bl_session_loss_fn fn;
    void *user;
} bl_session_loss;

typedef struct bl_session_result {
    double loss;
    double weight_sum; /* of the N tokens */
    int64_t n_targets; /* N */
} bl_session_result;

/* Adds the gradient of L to the adapter's, which grow until optim_step. logp[row] (n of the row,
 * overwritten): log p_t, 0 without a target or with weight 0; NULL: not wanted. All micro-batches
 * of a custom loss are in one pass: BL_ELIMIT where visit_tokens is too small for them.
 * BL_ENUMERIC: L is not finite; the adapter's gradients so far are dropped, its weights are as
 * before. */
BL_API bl_status bl_session_forward_backward(bl_session_adapter *adapter,
                                             const bl_session_row *rows, int64_t n_rows,
                                             const bl_session_loss *loss, float *const *logp,
                                             bl_session_result *out);
/* log p_t, without gradients and dropout: as above. */
BL_API bl_status bl_session_forward(bl_session_adapter *adapter, const bl_session_row *rows,
                                    int64_t n_rows, float *const *logp);

/* AdamW as `ballast train` makes it (src/README.md, "The step"), and clipping to max_grad_norm; 0:
 * off. */
typedef struct bl_session_step {
    double lr, beta1, beta2, eps, weight_decay, max_grad_norm;
} bl_session_step;

/* An update by the gradients since the last one; *grad_norm (NULL: not wanted) is theirs before
 * clipping. BL_EUSAGE: there are none. BL_ENUMERIC: the norm is not finite; they are dropped. */
BL_API bl_status bl_session_optim_step(bl_session_adapter *adapter, const bl_session_step *step,
                                       double *grad_norm);

/* Continues the n_prompt ids by at most n_most, which it writes to ids; *n: how many. Ends before
 * an end-of-text id of the model or of its tokenizer. temperature 0: the likeliest id; else drawn
 * by (seed, place). Together at most max_seq_length. Each token is a visit of all layers. */
typedef struct bl_session_sampling {
    double temperature; /* >= 0 */
    int64_t top_k;      /* 0: all */
    double top_p;       /* 1: all */
    uint64_t seed;
} bl_session_sampling;
BL_API bl_status bl_session_sample(bl_session_adapter *adapter, const int32_t *prompt,
                                   int64_t n_prompt, const bl_session_sampling *sampling,
                                   int64_t n_most, int32_t *ids, int64_t *n);

/* Token ids of n_bytes of UTF-8, with those that the tokenizer puts around a text, and the text of
 * ids, without special tokens and without a NUL. *n, *n_bytes: all that there are, of which the
 * first `room` are written. BL_EUSAGE: the model has no tokenizer.json. */
BL_API bl_status bl_session_encode(bl_session *session, const char *text, size_t n_bytes,
                                   int32_t *ids, int64_t room, int64_t *n);
BL_API bl_status bl_session_decode(bl_session *session, const int32_t *ids, int64_t n_ids,
                                   char *text, int64_t room, int64_t *n_bytes);

/* Writes a PEFT adapter into dir, which is created; its files are replaced. */
BL_API bl_status bl_session_save_weights(bl_session_adapter *adapter, const char *dir);
/* Writes DIR/step-N, a checkpoint of the adapter, its moments and its keys, N the number of its
 * updates; complete and durable, or not there (store/checkpoint.h). Other steps stay. BL_EUSAGE:
 * gradients wait for optim_step, which a state does not have. */
BL_API bl_status bl_session_save_state(bl_session_adapter *adapter, const char *dir);

/* Of a session so far: passes over the layers, and requests that wait for one now. */
typedef struct bl_session_stats {
    int64_t n_passes, n_waiting;
} bl_session_stats;
BL_API bl_status bl_session_get_stats(bl_session *session, bl_session_stats *out);

#ifdef __cplusplus
}
#endif

#endif
