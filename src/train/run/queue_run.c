/* SPDX-License-Identifier: Apache-2.0 */
/* queue_run.c -- a training over a queue, from its configuration to its end. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "train/run/queue.h"

/* Places the base so that a run with its keys and rows of full length fits. */
static bl_status place_base(bl_queue *q)
{
    bl_job *job = &q->runs[0].training.job;
    bl_plan_input input;

    BL_TRY(bl_job_place_base(job, &input));
    q->available_bytes = input.available_bytes;
    q->gpu_available_bytes = input.gpu_available_bytes;
    BL_TRY(bl_job_print_model(job, false));
    bl_log_info("memory predicted for the base and one run of the queue's keys, with full rows:");
    bl_plan_print(&input, &job->plan);
    return bl_plan_check(&input, &job->plan);
}

static bl_status open_base(bl_queue *q)
{
    bl_job *job = &q->runs[0].training.job;
    const bl_train_config *c = job->config;

    BL_TRY(bl_job_place_ranks(job));
    if (job->topology.first_here == 0) BL_TRY(bl_spool_open(c->queue, &q->spool));
    BL_TRY(bl_job_open_model(job));
    bl_job_print_base_formats(job, "training");
    BL_TRY(bl_job_identify(job));
    if (job->launch) {
        BL_TRY(bl_job_check_processes(job, c->queue));
        BL_TRY(bl_job_compare_products(job));
    }
    return place_base(q);
}

static void report_stopped(bl_queue *q)
{
    bl_error error;
    bool is_written;

    bl_error_save(&error, BL_ESTOPPED);
    for (int run = 1; run <= BL_QUEUE_ROOM; run++)
        if (q->runs[run].output.metrics &&
            bl_training_write_report(&q->runs[run].training, &q->runs[run].output, &is_written) !=
                BL_OK)
            bl_log_warning("no report: %s", bl_error_text());
    (void)bl_error_restore(&error);
}

static bl_status serve(bl_queue *q)
{
    bl_job *job = &q->runs[0].training.job;
    bl_peak_memory peak = {0};

    BL_TRY(open_base(q));
    BL_TRY(bl_job_open_trace(job));
    if (q->spool) bl_log_info("queue %s: jobs are YAML files moved there", job->config->queue);
    bl_status st = bl_training_run_ranks(q->runs, 1 + BL_QUEUE_ROOM, q, &peak);
    if (st == BL_ESTOPPED) report_stopped(q);
    if (st != BL_OK) return st;
    bl_trace *trace = job->trace;
    job->trace = NULL;
    BL_TRY(bl_trace_close(trace));
    if (!q->spool) return BL_OK;
    bl_spool_clear_stop(q->spool);
    bl_log_info("queue %s: stopped; %lld jobs done, %lld failed, %lld rejected", job->config->queue,
                (long long)bl_spool_count(q->spool, BL_SPOOL_DONE),
                (long long)bl_spool_count(q->spool, BL_SPOOL_FAILED),
                (long long)bl_spool_count(q->spool, BL_SPOOL_REJECTED));
    return BL_OK;
}

static void close_queue(bl_queue *q)
{
    for (int run = BL_QUEUE_ROOM; run > 0; run--)
        if (atomic_load(&q->slot[run].state) != BL_SLOT_FREE) bl_queue_free_slot(q, run);
    bl_job_close(&q->runs[0].training.job); /* the base last */
    bl_spool_close(q->spool);
    pthread_mutex_destroy(&q->changing);
    free(q->runs);
    free(q);
}

bl_status bl_train_run_queue(const bl_train_config *config, bl_launch *launch,
                             const struct bl_pager_hooks *hooks)
{
    bl_queue *q = calloc(1, sizeof *q);
    bl_error error;

    if (!q) return BL_FAIL(BL_ENOMEM, "a queue");
    pthread_mutex_init(&q->changing, NULL);
    q->runs = calloc(1 + BL_QUEUE_ROOM, sizeof *q->runs);
    bl_status st = q->runs ? BL_OK : BL_FAIL(BL_ENOMEM, "the runs of a queue");
    if (st == BL_OK) {
        q->runs[0].training =
            (bl_training){.config = config,
                          .name = "queue",
                          .job = {.config = config, .launch = launch, .hooks = hooks}};
        st = serve(q);
    }
    bl_error_save(&error, st);
    bl_log_set_label(NULL);
    if (q->runs) {
        close_queue(q);
    } else {
        free(q);
    }
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
