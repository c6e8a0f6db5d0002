/* SPDX-License-Identifier: Apache-2.0 */
/* trainer.c -- the parts of a rank that only a training needs. */
#include "train/rank/trainer.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "ops/gemm.h"
#include "train/rank/preference.h"

/* C = A B^T of N x N matrices that begin one after the other in `block`, in the dtype of
 * activations. */
static bl_status multiply(const bl_trainer *t, int64_t N, float *block)
{
    bl_pool *pool = bl_device_pool(t->rank->device);
    float *A = block, *B = A + N * N, *C = B + N * N;

    if (bl_device_act(t->rank->device) == BL_F32)
        return bl_cpu_gemm_f32(pool, false, true, N, N, N, 1.0f, A, N, B, N, 0.0f, C, N);
    return bl_cpu_gemm_bf16(pool, false, true, N, N, N, 1.0f, (const uint16_t *)A, N,
                            (const uint16_t *)B, N, 0.0f, BL_F32, C, N);
}

/* The rate of a plain GEMM of this rank while the other ranks run theirs: mfu is a fraction of it.
 * That of a GPU stays unknown. */
static void measure_peak(bl_trainer *t)
{
    enum { N = 512, RUNS = 4 };
    static const double LEAST_S = 0.05; /* of runs that other processes do not interrupt */
    if (bl_device_get_kind(t->rank->device) != BL_DEVICE_CPU) return;
    float *block = calloc(3 * N * N, sizeof *block);
    if (!block) return;
    for (int i = 0; i < 2 * N * N; i++) block[i] = 1.0f;
    double first_s = bl_now_s();
    for (int run = 0; run < RUNS || bl_now_s() - first_s < LEAST_S; run++) {
        double start = bl_now_s();
        if (multiply(t, N, block) != BL_OK) break;
        double flops = 2.0 * N * N * N / (bl_now_s() - start);
        if (flops > t->peak_flops) t->peak_flops = flops;
    }
    free(block);
}

static bl_status fill_adapter(bl_trainer *t)
{
    const bl_start *start = &t->training->start;
    if (!start->dir) return bl_rank_fill_adapter(t->rank);
    bl_status st = bl_trained_state_read_shards(t->rank->state, start->dir, start->n_ranks);
    return bl_output_failure(t->folder, st); /* it is usually in output_dir */
}

/* What is a run's besides its adapter. */
static bl_status create_run(bl_trainer *t)
{
    const bl_job *job = t->job;

    BL_TRY(bl_rank_create_evaluation(t->rank));
    for (int i = 0; i < 2; i++) {
        BL_TRY(bl_batches_create(t->rank->device, (int)job->config->gradient_accumulation_steps,
                                 job->plan.pass.T_max, &t->batches[i]));
        BL_TRY(bl_preference_prepare(t->rank->preference, t->batches[i], &t->mismatched[i]));
    }
    t->files = calloc((size_t)job->topology.n_ranks, sizeof *t->files);
    return t->files ? BL_OK : BL_FAIL(BL_ENOMEM, "checkpoint files");
}

bl_status bl_trainer_setup(bl_trainer *t, int64_t n_micro)
{
    bl_rank *r = t->rank;

    BL_TRY(bl_rank_open(r));
    measure_peak(t);
    BL_TRY(bl_rank_load_base(r));
    BL_TRY(bl_trainer_check_weights(t));
    BL_TRY(bl_rank_create_adapter(r));
    BL_TRY(fill_adapter(t));
    t->micro = calloc((size_t)n_micro, sizeof *t->micro);
    if (!t->micro) return BL_FAIL(BL_ENOMEM, "micro-batches");
    BL_TRY(bl_rank_create_pass(r));
    return create_run(t);
}

bl_status bl_trainer_setup_base(bl_trainer *t)
{
    BL_TRY(bl_rank_open(t->rank));
    measure_peak(t);
    t->has_ended = true;
    return bl_rank_load_base(t->rank);
}

static bl_status create_adapter(bl_trainer *t)
{
    return bl_rank_create_adapter(t->rank);
}

bl_status bl_trainer_setup_beside(bl_trainer *t, const bl_trainer *lead, bl_agree_fn agree,
                                  void *user)
{
    static bl_status (*const steps[])(bl_trainer *) = {bl_trainer_check_weights, create_adapter,
                                                       fill_adapter, create_run};

    bl_rank_borrow(t->rank, lead->rank, t->job);
    t->peak_flops = lead->peak_flops;
    for (size_t i = 0; i < BL_COUNT(steps); i++) {
        bl_status own = steps[i](t);
        BL_TRY(agree ? agree(user, own) : own);
    }
    return BL_OK;
}

void bl_trainer_free(bl_trainer *t)
{
    bl_trainer_drop_save(t);
    if (t->rank->lead) bl_rank_close_run(t->rank);
    for (int i = 0; i < 2; i++) {
        bl_batches_destroy(t->batches[i]);
        bl_batches_destroy(t->mismatched[i]);
    }
    free(t->files);
    free(t->micro);
    t->rank = NULL;
}
