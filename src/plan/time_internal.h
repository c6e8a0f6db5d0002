/* SPDX-License-Identifier: Apache-2.0 */
/* time_internal.h -- the costs of a step's work on one rank (time_work.c), the passes of a round
 * (time_round.c), and the schedule carried out with them (time_machine.c). */
#ifndef BALLAST_PLAN_TIME_INTERNAL_H
#define BALLAST_PLAN_TIME_INTERNAL_H

#include "comm/model.h"
#include "device/simulation.h"
#include "model/schedule.h"
#include "plan/time.h"

typedef enum plan_stream {
    PLAN_COMPUTE,
    PLAN_GATHER,
    PLAN_COPY,
    PLAN_READER, /* not a stream of the program: its queue of reads */
    PLAN_LORA,
    PLAN_ACTIVATIONS,
    PLAN_STATE, /* the three of adapter/units.c: `disk`, and on a GPU `in` and `out` */
    PLAN_STATE_IN,
    PLAN_STATE_OUT,
    PLAN_N_STREAMS
} plan_stream;

enum { PLAN_MAX_SEGMENTS = 8 }; /* a backward pass acquires at most seven matrices */

/* What compute does from the acquire of a matrix to the next. */
typedef struct plan_segment {
    int matrix;
    bl_work work,
        later; /* of a visit's first micro-batch, for which weights are prepared; of others */
} plan_segment;

typedef struct plan_segments {
    int n;
    plan_segment at[PLAN_MAX_SEGMENTS];
} plan_segments;

/* Bringing a matrix of a unit. */
typedef struct plan_item {
    int64_t shard_bytes;
    bl_work read, copy, gather; /* read: from disk; gather: own shard in device memory or not */
    bl_work copy_read;          /* of what was read */
    bl_work gather_resident;    /* the same where the own shard is copied to its place first */
} plan_item;

/* Where all weights are trained: the gradients of a unit's matrices, on several ranks. */
typedef struct plan_gradients {
    bl_work zero, reduce; /* a whole unit's before backward; reduced, and added to the shard */
    int64_t n_bytes;      /* received */
} plan_gradients;

/* A decoder layer of a run. */
typedef struct plan_layer {
    plan_item item[BL_LAYER_MATRICES];
    plan_segments forward, backward, backward_kept; /* kept: nothing is recomputed */
    int64_t saved_bytes;                            /* of one micro-batch */
    plan_gradients gradients;
} plan_layer;

/* Of micro-batches that are alike; what moves the base is the same for all of them. */
typedef struct plan_amounts {
    plan_layer *layers; /* [n_runs] */
    plan_item head_item;
    bl_work head, embed;         /* of one micro-batch */
    bl_work head_forward;        /* without a gradient */
    bl_work embed_backward;      /* if the embedding is trained */
    plan_gradients gradients[2]; /* of the head, of the embedding */
    bl_work lora_gather, lora_reduce, lora_add;
    int64_t lora_gather_bytes, lora_reduce_bytes;
    int64_t input_bytes; /* of a stack's entry: one micro-batch */
    double optimizer_s;
} plan_amounts;

/* Whether modules_to_save include the head; then the base's head is not gathered. */
bool plan_has_own_head(const bl_time_input *input);

/* Of the input's own micro-batches. */
bl_status plan_amounts_create(const bl_time_input *input, plan_amounts *out);
void plan_amounts_free(plan_amounts *amounts);

/* An activation to host memory, or back. */
bl_work plan_copy(const bl_time_input *input, double bytes, bool is_in);

/* time_trained.c: of all trained weights, in amounts whose items are there. */
bl_work plan_embedding_gradient(const bl_time_input *input);
void plan_trained_amounts(const bl_time_input *input, plan_amounts *amounts);
/* Elements of a rank's rows of a matrix. */
int64_t plan_trained_elements(const bl_time_input *input, const plan_item *item, bool is_layer);

/* An all-gather of `bytes` from each rank of a group of `size`; a sum over all ranks with `bytes`
 * for each rank. */
bl_exchange plan_gather_of(const bl_time_input *input, double size, double bytes);
bl_exchange plan_sum_of(const bl_time_input *input, double bytes);
bl_work plan_exchange(const bl_time_input *input, const bl_exchange *exchange);
/* Adds work on the same stream that does not use the network. */
void plan_add_without_network(bl_work *work, double seconds);

/* Of a step, all ranks: bl_time_estimate.model_flops. */
double plan_model_flops(const bl_time_input *input);

bl_work plan_disk_work(double bytes, double bytes_per_s);

/* ---- trained weights and their state, in any tier: time_state.c ---- */

/* A unit of the base, or the gradients of a tied embedding. */
typedef struct plan_unit {
    bl_tier tier;                                   /* of moments and gradients */
    bool is_paged;                                  /* the host updates it */
    int64_t n_elements[BL_LAYER_MATRICES], n_bytes; /* of its parts; of its gradients, aligned */
    int64_t n_trained[BL_LAYER_MATRICES];           /* of n_elements, on the rank with most */
    bl_work clear, square, in, out, read, write;    /* of its gradients */
    bl_lane lane;                                   /* of the update */
    int64_t update_bytes;
    bl_work update;
} plan_unit;

typedef struct plan_state {
    const bl_time_input *in;
    int64_t n_layers, n_units;
    plan_unit *unit;  /* [n_units + 1] */
    bl_tier *weights; /* of each part, one after the other */
    bool is_paged;    /* some unit */
} plan_state;

/* amounts: of any micro-batch. plan_state_free frees *out, also after a failure. */
bl_status plan_state_create(const bl_time_input *input, const plan_amounts *amounts,
                            const int *run_of_layer, int64_t n_layers, plan_state *out);
void plan_state_free(plan_state *state);
/* To plan_pass.tiers. */
void plan_state_copy_weights(const plan_state *state, bl_tier *tiers);
/* time_trained.c: at the end of a step, squares, and updates of units that are not paged. */
double plan_trained_optimizer_s(const bl_time_input *input, const plan_state *state);

/* ---- one pass ---- */

enum { PLAN_NO_ADAPTER = -1 };

typedef struct plan_micro {
    const plan_amounts *amounts;                 /* of micro-batches like it */
    int adapter;                                 /* its number; PLAN_NO_ADAPTER: the base alone */
    bool has_gradient, is_companion, is_weighed; /* as bl_pass_micro's */
} plan_micro;

/* An entry of the stacks that goes to host memory: of the group's micro-batches. */
typedef struct plan_entry {
    int64_t n_bytes;
    bl_work out, back;
} plan_entry;

typedef struct plan_pass {
    const bl_time_input *input;
    const plan_micro *micro; /* [schedule.n_micro] */
    bl_schedule schedule;
    const bl_schedule *before; /* of the pass that has prefetched for this one; NULL: none has */
    int n_joins;               /* trainings whose gradients compute waits for behind the pass */
    const int *run_of_layer;   /* [n_layers]: which run a layer belongs to */
    const plan_state *state;   /* NULL: not all weights are trained */
    /* Of its step. A first one makes the updates of the step before, if there is one (`before`). */
    bool is_first, is_last;
    /* [(n_layers + 2) * BL_LAYER_MATRICES]: of each matrix; a table's is the first of its row */
    const bl_tier *tiers;
    plan_entry input_entry, *saved_entry; /* saved_entry [n_runs] */
    /* Results: of each visit, the operations of compute that begin and end it. */
    bl_simulation sim;
    int *visit_begin, *visit_end; /* [n_visits] */
} plan_pass;

/* Queues the pass; BL_ENOMEM. */
bl_status plan_pass_queue(plan_pass *pass);

/* ---- time_round.c: the passes of a round ---- */

/* Kinds of micro-batches of a training. */
typedef enum plan_kind {
    PLAN_OF_STEP,
    PLAN_OF_STEP_ALONE, /* the same rows without gradients */
    PLAN_OF_STEP_REFERENCE,
    PLAN_OF_EVALUATION,
    PLAN_OF_EVALUATION_REFERENCE,
    PLAN_N_KINDS
} plan_kind;

typedef struct plan_round {
    const bl_time_input *input;
    int n_trainings;
    plan_amounts *amounts; /* [n_trainings * PLAN_N_KINDS]; layers NULL: not made */
    int64_t *left;         /* [n_trainings]: micro-batches of an overlapped evaluation */
    plan_micro *micro;     /* of the pass under way */
    int n_micro, room;
} plan_round;

/* with_evaluations: of the trainings that have them. BL_ENOMEM. Free it after a failure, too. */
bl_status plan_round_create(const bl_time_input *input, bool with_evaluations, plan_round *out);
void plan_round_free(plan_round *round);

/* The input as if training i were alone. */
bl_time_input plan_training_of(const bl_time_input *input, int i);

/* A pass: round->micro [n_micro], valid for the call. is_last: of a round. */
typedef bl_status (*plan_pass_sink)(void *user, const plan_round *round, bool is_last);

/* All passes of a round, in order, with the evaluation of training i in them if left[i] > 0. */
bl_status plan_round_each(plan_round *round, plan_pass_sink sink, void *user);
/* Of an evaluation in separate passes of at most n_most micro-batches. */
bl_status plan_evaluation_each(plan_round *round, int training, int n_most, plan_pass_sink sink,
                               void *user);

#endif
