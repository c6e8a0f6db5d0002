/* SPDX-License-Identifier: Apache-2.0 */
/* rank.h -- one rank of a job: its device, its part of the model, its pass. */
#ifndef BALLAST_TRAIN_RANK_H
#define BALLAST_TRAIN_RANK_H

#include "device/staging.h"
#include "trained/full.h"
#include "model/batch.h"
#include "train/job.h"
#include "train/host_comm.h"

/* Its own thread's, while that runs. Of several runs over one base each has a bl_rank here; all but
 * the first have borrowed everything but `job` and what follows `pass`. */
typedef struct bl_rank {
    const bl_job *job;
    const struct bl_rank *lead; /* the rank whose base this run uses; NULL: this one's */
    int index;
    bool is_at_fault; /* of a failure that all ranks see, the reason is this one's */
    /* Asked while the base is loaded, and in passes that are of no step; true ends them with
     * BL_ESTOPPED. NULL: never. */
    bool (*stop)(void *user);
    void *stop_user;

    /* Of host memory. `host_comm` carries all small data; it exists as long as the rank. */
    bl_comm *host_world;
    bl_host_comm host_comm;
    /* Of device memory: of all ranks, on `communication`; of this rank's shard group, on `gather`.
     * On a CPU `world` is `host_world` itself. */
    bl_comm *world, *shard_group;
    bl_device *device;
    bl_stream *compute, *copy, *activations; /* the last: NULL unless activations are offloaded */
    bl_stream *communication;                /* LoRA's weights, gradients, sums */
    bl_stream *gather;                       /* the base */
    bl_timeline *timeline;
    bl_trace_rank trace_lane;
    bl_model_weights *weights;
    bl_base *base;
    bl_pass *pass;
    bl_trained_state *state; /* NULL: nothing is trained, and no adapter */
    bl_pass_adapter adapter; /* of every micro-batch; zeros: there is none */
    struct bl_group *group;  /* the lead's, of one pass after the other */
    /* Of the validation rows (rank/evaluate.h); NULL: there are none. */
    struct bl_evaluation *evaluation;
    /* Of preference losses (rank/preference.h); NULL: another loss. */
    struct bl_preference *preference;
} bl_rank;

/* rank_setup.c: everything that a rank needs, in this order, on its own thread. Some are collective
 * over the job. Close after a failure, too, and after the thread has ended. */

bl_status bl_rank_open(bl_rank *rank); /* device, streams, communicators */
/* The second half of bl_rank_load_base: needs rank->weights. */
bl_status bl_rank_create_base(bl_rank *rank);
/* The frozen base. BL_EUSAGE: ranks have read different weights. BL_ESTOPPED: rank->stop. */
bl_status bl_rank_load_base(bl_rank *rank);
/* Room for the adapter, if the job has one; and its weights: init_adapter's, or fresh ones. */
bl_status bl_rank_create_adapter(bl_rank *rank);
bl_status bl_rank_fill_adapter(bl_rank *rank);
/* Of the rank's device, streams and communicator. */
bl_trained_context bl_rank_context(const bl_rank *rank);
/* &rank->adapter; NULL: there is none. */
const bl_pass_adapter *bl_rank_adapter(const bl_rank *rank);
bl_status bl_rank_create_pass(bl_rank *rank);
/* The objects of the loss and, with validation data, of evaluations; after fill_adapter. */
bl_status bl_rank_create_evaluation(bl_rank *rank);
/* Instead of the pass, one of job->plan.pass, which has changed; the streams are idle. */
bl_status bl_rank_replace_pass(bl_rank *rank);
/* A micro-batch whose gradients go to the rank's state: -sum_t w_t log p_t is added to *loss_sum,
 * its gradient is multiplied by loss_scale. */
bl_pass_micro bl_rank_train_micro(const bl_rank *rank, const bl_micro_batch *batch,
                                  double *loss_sum, double loss_scale);
/* Compares all of the base with its checksums where verify_base asks for that before a
 * checkpoint. */
bl_status bl_rank_verify_base(bl_rank *rank);
/* Another run's rank over the base of `lead`, which has its pass and outlives it: needs a separate
 * adapter and evaluation. bl_rank_close_run ends it. */
void bl_rank_borrow(bl_rank *rank, const bl_rank *lead, const bl_job *job);
/* Frees what is a run's; the streams are idle. */
void bl_rank_close_run(bl_rank *rank);
/* warm_up.c: after create_pass, with an evaluation's rows. Where GPUs of several processes work
 * together, all that an evaluation runs has then run once, while no rank waited for another;
 * elsewhere nothing happens. Collective over the job. */
bl_status bl_rank_warm_up(bl_rank *rank);
/* Waits for its streams, and ignores their errors. */
void bl_rank_drain(bl_rank *rank);
void bl_rank_close(bl_rank *rank);

/* evaluate.c: the mean loss over the job's validation rows; collective, the same result on every
 * rank. */
bl_status bl_rank_evaluate(bl_rank *rank, bl_eval_result *out);

/* check_weights.c: BL_EUSAGE when ranks have read different weights; collective over the job. */
bl_status bl_rank_compare_weights(bl_rank *rank);

#endif
