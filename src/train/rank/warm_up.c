/* SPDX-License-Identifier: Apache-2.0 */
/* warm_up.c -- a step that changes nothing, before the first of a job whose GPUs belong to several
 * processes.
 *
 * A collective's kernel waits on its GPU for the other GPUs. When a kernel, or a product of
 * cuBLASLt, runs for the first time, CUDA may wait for the kernels that run already: so each runs
 * once while no collective waits for this rank, with a meeting of all ranks before and after.
 * Our own kernels are loaded when CUDA starts (CUDA_MODULE_LOADING, cli/train.c); products are
 * chosen and loaded here.
 *
 * It is complete because it is the trainer's own code: a group of micro-batches as large as the
 * plan allows goes through the pass with dropout and gradients, one alone as in an evaluation, then
 * the sums and the optimizer run. Then micro-batches of every other number of tokens that a step
 * may have in its layers go through the pass (bl_pass_token_step). A product that is new afterwards
 * is a warning (ops/matmul.h).
 *
 * It changes nothing: the gradients' scale is 0, gradients and loss are cleared, the optimizer
 * works on zeros in the buffers of a layer's gradients, weights are only gathered, and dropout has
 * no state. It takes only the memory of a step. */
#include "trained/full.h"
#include "base/log.h"
#include "base/sizes.h"
#include "comm/nccl/nccl.h"
#include "ops/matmul.h"
#include "train/rank/evaluate.h"
#include "train/rank/trainer.h"

enum { FIRST_DEADLINE_S = 120 };

static bl_status synchronize(const bl_rank *r)
{
    bl_stream *const streams[] = {r->compute, r->communication, r->copy, r->gather, r->activations};
    for (size_t i = 0; i < BL_COUNT(streams); i++)
        if (streams[i]) BL_TRY(bl_stream_synchronize(streams[i]));
    return BL_OK;
}

/* T tokens that could be a step's, in documents of the longest row. */
static void fill(const bl_rank *r, bl_batches *batches, int index, int64_t T)
{
    bl_batches_fill_zeros(batches, index, T, r->job->model->n_positions);
}

/* Of the first n_filled micro-batches, as often as n_micro takes them. */
static bl_status run_group(bl_trainer *t, bl_pass_micro *micro, int n_micro, int n_filled)
{
    bl_rank *r = t->rank;
    const bl_job *job = t->job;
    bl_pass_input input = {
        .n_micro = n_micro, .micro = micro, .stop = r->stop, .stop_user = r->stop_user};

    r->adapter.dropout = (bl_lora_dropout){.p = (float)job->lora.options.dropout,
                                           .seed = (uint64_t)job->config->seed};
    for (int m = 0; m < input.n_micro; m++)
        micro[m] = (bl_pass_micro){.batch = t->batches[0]->micro + m % n_filled,
                                   .adapter = bl_rank_adapter(r),
                                   .loss_sum = bl_trained_state_loss_sum(r->state),
                                   .gradients = bl_trained_state_sink(r->state),
                                   .loss_scale = 0.0};
    BL_TRY(bl_pass_run(r->pass, &input));
    r->adapter.dropout = (bl_lora_dropout){0};
    return BL_OK;
}

/* All numbers of tokens but the largest, as many in a group as there is room for. */
static bl_status run_shorter(bl_trainer *t, bl_pass_micro *micro)
{
    bl_rank *r = t->rank;
    bl_batches *batches = t->batches[0];
    int64_t T_max = t->job->plan.pass.T_max, step = bl_pass_token_step(r->pass);
    int most = (int)bl_min_i64(t->job->plan.pass.max_group, batches->n_micro);

    for (int64_t T = step; step > 0 && T < T_max;) {
        int n = 0;
        BL_TRY(synchronize(r)); /* the last batches have been read */
        bl_batches_clear(batches);
        for (; n < most && T < T_max; n++, T += step) fill(r, batches, n, T);
        BL_TRY(bl_batches_upload(batches, r->compute));
        BL_TRY(run_group(t, micro, n, n));
    }
    return BL_OK;
}

/* As an evaluation has it. */
static bl_status run_forward(bl_rank *r, int64_t T)
{
    bl_batches *batches = r->evaluation->batches[0];
    bl_pass_micro one = {.batch = batches->micro,
                         .adapter = bl_rank_adapter(r),
                         .loss_sum = r->evaluation->sums->memory};

    bl_batches_clear(batches);
    fill(r, batches, 0, T);
    BL_TRY(bl_batches_upload(batches, r->compute));
    BL_TRY(bl_pass_run(r->pass, &(bl_pass_input){.n_micro = 1, .micro = &one}));
    return synchronize(r);
}

/* Free GPU memory in bytes. The rank has allocated all of its memory by now: a difference is memory
 * that CUDA and NCCL take at their first use. -1: not known. */
static int64_t free_bytes(const bl_rank *r)
{
    size_t n_free, n_total;
    bool is_known = bl_device_measure_cuda(r->job->topology.gpu, &n_free, &n_total) == BL_OK;
    return is_known ? (int64_t)n_free : -1;
}

static void log_memory(const bl_rank *r, int64_t before)
{
    int64_t after = free_bytes(r);
    if (before >= 0 && after >= 0)
        bl_log_info("GPU memory that CUDA and NCCL took in the warm-up: %.3f GB, %.1f GB are free",
                    bl_gb(before - after), bl_gb(after));
}

static bool is_needed(const bl_rank *r)
{
    return r->job->launch && r->job->gpu.n_gpus > 0;
}

/* All ranks have loaded: from here to the end of the first step one that comes late is late by
 * seconds. What hangs on a new machine must not take step_deadline_s to show. */
static bl_status meet_before(bl_rank *r)
{
    BL_TRY(bl_host_comm_barrier(&r->host_comm));
    bl_nccl_limit_deadline(r->world, FIRST_DEADLINE_S);
    return BL_OK;
}

bl_status bl_rank_warm_up(bl_rank *r)
{
    if (!is_needed(r)) return BL_OK;
    int64_t before = free_bytes(r), T_max = r->job->plan.pass.T_max,
            step = bl_pass_token_step(r->pass);
    BL_TRY(meet_before(r));
    BL_TRY(run_forward(r, T_max));
    for (int64_t T = step; step > 0 && T < T_max; T += step) BL_TRY(run_forward(r, T));
    BL_TRY(bl_matmul_end_warm_up(r->device));
    log_memory(r, before);
    return bl_host_comm_barrier(&r->host_comm);
}

/* micro: room for a group. */
static bl_status warm_up(bl_trainer *t, bl_pass_micro *micro)
{
    bl_rank *r = t->rank;

    if (r->evaluation) BL_TRY(run_forward(r, t->job->plan.pass.T_max));
    bl_batches_clear(t->batches[0]);
    fill(r, t->batches[0], 0, t->job->plan.pass.T_max);
    BL_TRY(bl_batches_upload(t->batches[0], r->compute));
    BL_TRY(run_group(t, micro, t->job->plan.pass.max_group, 1));
    BL_TRY(run_shorter(t, micro));
    BL_TRY(bl_trained_state_join(r->state));
    BL_TRY(bl_trained_state_warm_up(r->state));
    return synchronize(r);
}

bl_status bl_trainers_warm_up(bl_trainer **trainers, int n, bl_pass_micro *micro)
{
    bl_trainer *lead = trainers[0];
    bl_rank *r = lead->rank;

    if (!is_needed(r)) return BL_OK;
    int64_t before = free_bytes(r);
    BL_TRY(meet_before(r));
    for (int i = 0; i < n; i++) BL_TRY(warm_up(trainers[i], micro));
    BL_TRY(bl_trainer_forget_counts(lead));
    BL_TRY(bl_matmul_end_warm_up(r->device));
    log_memory(r, before);
    return bl_host_comm_barrier(&r->host_comm);
}
