/* SPDX-License-Identifier: Apache-2.0 */
/* run_evaluation.c -- an evaluation, from its configuration to its result. */
#include "trained/choose.h"
#include "train/rank/ranks.h"

static bl_status evaluate_rank(bl_rank *r, void *user)
{
    bl_eval_result result;

    BL_TRY(bl_rank_open(r));
    BL_TRY(bl_rank_load_base(r));
    BL_TRY(bl_rank_create_adapter(r));
    BL_TRY(bl_rank_fill_adapter(r));
    BL_TRY(bl_rank_create_pass(r));
    BL_TRY(bl_rank_create_evaluation(r));
    BL_TRY(bl_rank_warm_up(r));
    /* Where calls are compared, all so far have been; the rest repeats a whole pass. */
    BL_TRY(bl_comm_trust_order(r->world));
    BL_TRY(bl_rank_evaluate(r, &result));
    if (r->index == 0) *(bl_eval_result *)user = result;
    return BL_OK;
}

bl_status bl_job_evaluate(bl_job *job, bl_eval_result *out)
{
    bl_ranks ranks;

    bl_status st = bl_ranks_create(job, &ranks);
    if (st == BL_OK) {
        st = bl_ranks_start(&ranks, evaluate_rank, out);
        while (bl_ranks_wait(&ranks, NULL, NULL)) continue;
        st = bl_ranks_join(&ranks, st);
    }
    bl_error error; /* freeing meets the streams' own errors */
    bl_error_save(&error, st);
    bl_ranks_free(&ranks);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

static bl_status open_job(bl_job *job)
{
    const bl_train_config *c = job->config;

    BL_TRY(bl_job_open_model(job));
    BL_TRY(bl_run_data_open_evaluation(c, &job->model->config, job->host_memory,
                                       job->topology.n_here, &job->data));
    bl_job_measure_rows(job);
    BL_TRY(bl_adapter_choose_lora(c, &job->model->config, false, &job->lora));
    BL_TRY(bl_adapter_choose_modules(c, &job->model->config, false, &job->modules));
    bl_job_print_base_formats(job, "memory");
    if (!job->data.validation.set) return BL_FAIL(BL_EUSAGE, "eval needs validation_file");
    BL_TRY(bl_job_identify(job));
    return job->launch ? bl_job_check_processes(job, NULL) : BL_OK;
}

static bl_status evaluate(bl_job *job, bl_eval_result *out)
{
    BL_TRY(bl_job_place_ranks(job));
    BL_TRY(open_job(job));
    bl_plan_input input = bl_job_plan_input(job);
    BL_TRY(bl_job_choose_plan(job, &input));
    bl_plan_print(&input, &job->plan);
    BL_TRY(bl_plan_check(&input, &job->plan));
    return bl_job_evaluate(job, out);
}

bl_status bl_eval_run(const bl_train_config *config, bl_launch *launch, bl_eval_result *out)
{
    bl_job job = {.config = config, .launch = launch};

    *out = (bl_eval_result){0};
    bl_status st = evaluate(&job, out);
    out->base = job.base_formats;
    bl_error error;
    bl_error_save(&error, st);
    bl_job_close(&job);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
