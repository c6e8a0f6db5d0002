/* SPDX-License-Identifier: Apache-2.0 */
/* rank_train.c -- the training loop of one rank.
 *
 * A step: count the labels of all ranks; forward, loss and backward, group by group; sum loss and
 * gradient norm; check them; AdamW. While a step runs, the rows of the next one are read and
 * tokenized: some before each visit of its passes. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "train/rank/trainer.h"

static bl_batches *batches_of(const bl_trainer *t, int64_t step)
{
    return t->batches[step & 1];
}

static void begin_fill(bl_trainer *t, int64_t step)
{
    bl_batches *batches = batches_of(t, step);

    bl_batches_clear(batches);
    t->fill = (bl_fill){.step = step,
                        .n_rows = batches->n_micro * t->config->per_device_train_batch_size};
}

static bl_status fill_row(bl_trainer *t, int64_t index)
{
    const bl_job *job = t->job;
    const bl_train_config *c = job->config;
    bl_sampler sampler = {job->data.train.n, (uint64_t)c->seed, c->shuffle};
    int64_t b = c->per_device_train_batch_size, micro = index / b;
    int64_t sample = (micro * job->topology.n_ranks + t->rank->index) * b + index % b;
    int64_t position = bl_train_position(c, sampler.n_rows, t->fill.step) + sample;

    /* The last step of an epoch may have fewer rows: this place stays empty. */
    if (position >= bl_train_position(c, sampler.n_rows, t->fill.step + 1)) return BL_OK;
    int64_t row = bl_sampler_row(&sampler, position);
    return bl_batches_append(batches_of(t, t->fill.step), (int)micro, job->data.train.set,
                             job->data.train.first + row, sample);
}

/* At most n rows. */
static void fill_rows(bl_trainer *t, int64_t n)
{
    bl_fill *f = &t->fill;

    for (; n > 0 && f->n_filled < f->n_rows && f->error.status == BL_OK; n--) {
        bl_status st = fill_row(t, f->n_filled);
        if (st == BL_OK)
            f->n_filled++;
        else
            bl_error_save(&f->error, st);
    }
}

static bl_status end_fill(bl_trainer *t)
{
    fill_rows(t, t->fill.n_rows);
    if (t->fill.error.status != BL_OK) return bl_error_restore(&t->fill.error);
    return bl_batches_upload(batches_of(t, t->fill.step), t->rank->compute);
}

/* Labels and tokens of the step over all ranks, and whether any rank wants to stop. */
static bl_status count_step(bl_trainer *t, const bl_batches *batches, int64_t totals[3])
{
    totals[0] = batches->n_labels;
    totals[1] = batches->n_tokens;
    totals[2] = atomic_load(&t->control->stop);
    return bl_talk_sum(&t->rank->talk, totals, 3);
}

/* Before a visit, while the one before it runs: its share of the next step's rows. */
static bool before_visit(void *user)
{
    bl_trainer *t = user;
    int64_t n_groups = bl_ceil_div(t->batches[0]->n_micro, t->job->plan.pass.max_group),
            n_visits = n_groups * (2 * t->job->model->config.n_layers + 1);

    if (atomic_load(&t->control->abandon) != 0) return true;
    fill_rows(t, bl_ceil_div(t->fill.n_rows, n_visits));
    return false;
}

/* Leaves the last group in *input. */
static bl_status run_groups(bl_trainer *t, const bl_batches *batches, int64_t step,
                            int64_t n_labels, bl_pass_input *input)
{
    int64_t group = t->job->plan.pass.max_group;

    t->rank->adapter.dropout = (bl_lora_dropout){.p = (float)t->job->lora.options.dropout,
                                                 .seed = (uint64_t)t->config->seed,
                                                 .step = (uint64_t)step};
    *input = (bl_pass_input){.micro = t->micro, .stop = before_visit, .stop_user = t};
    for (int64_t first = 0; first < batches->n_micro; first += group) {
        input->n_micro = (int)bl_min_i64(group, batches->n_micro - first);
        for (int m = 0; m < input->n_micro; m++)
            t->micro[m] = (bl_pass_micro){.batch = batches->micro + first + m,
                                          .adapter = &t->rank->adapter,
                                          .loss_sum = bl_adapter_state_loss_sum(t->rank->state),
                                          .gradients = bl_adapter_state_sink(t->rank->state),
                                          .loss_scale = 1.0 / (double)n_labels};
        BL_TRY(bl_pass_run(t->rank->pass, input));
    }
    return BL_OK;
}

/* The first tensor at fault among those of the last group, which are still there. */
static void name_bad_tensor(bl_trainer *t, const bl_pass_input *input, char *name, size_t n_bytes)
{
    const bl_micro_batch *first = batches_of(t, t->steps_done)->micro;
    int64_t layer;
    int micro;

    t->rank->is_at_fault = bl_pass_find_bad(t->rank->pass, input, &layer, &micro);
    if (!t->rank->is_at_fault)
        snprintf(name, n_bytes,
                 "not among the outputs of the layers: the logits, a gradient, or an earlier "
                 "micro-batch");
    else if (layer < 0)
        snprintf(name, n_bytes, "the embedding, micro-batch %d",
                 (int)(input->micro->batch - first) + micro);
    else
        snprintf(name, n_bytes, "the output of layer %lld, micro-batch %d", (long long)layer,
                 (int)(input->micro->batch - first) + micro);
}

/* BL_ENUMERIC with the step, the samples and the first tensor at fault. */
static bl_status report_not_finite(bl_trainer *t, int64_t step, double loss, double grad_norm,
                                   const bl_pass_input *input)
{
    const bl_train_config *c = t->config;
    bl_sampler sampler = {t->job->data.train.n, (uint64_t)c->seed, c->shuffle};
    int64_t first = bl_train_position(c, sampler.n_rows, step),
            n = bl_train_position(c, sampler.n_rows, step + 1) - first;
    char rows[160] = "", tensor[128];
    int used = 0;

    BL_TRY(bl_stream_synchronize(t->rank->compute));
    name_bad_tensor(t, input, tensor, sizeof tensor);
    for (int64_t i = 0; i < n && used < (int)sizeof rows - 32; i++)
        used +=
            snprintf(rows + used, sizeof rows - (size_t)used, "%s%lld", i ? ", " : "",
                     (long long)(t->job->data.train.first + bl_sampler_row(&sampler, first + i)));
    return BL_FAIL(
        BL_ENUMERIC,
        "step %lld: loss %g, gradient norm %g; first bad tensor on rank %d: %s; rows (from 0) %s%s",
        (long long)step + 1, loss, grad_norm, t->rank->index, tensor, rows,
        used >= (int)sizeof rows - 32 ? ", ..." : "");
}

/* The totals of this rank's lanes since the last call. */
static void count_lanes(bl_trainer *t, bl_lane_totals lanes[BL_N_LANES])
{
    bl_timeline_totals before = t->counted, *now = &t->counted;

    bl_timeline_collect(t->rank->timeline);
    bl_timeline_get_totals(t->rank->timeline, now);
    for (int i = 0; i < BL_N_LANES; i++)
        lanes[i] = (bl_lane_totals){.busy_s = now->lane[i].busy_s - before.lane[i].busy_s,
                                    .stall_s = now->lane[i].stall_s - before.lane[i].stall_s,
                                    .n_bytes = now->lane[i].n_bytes - before.lane[i].n_bytes};
}

/* Of this rank since the last call; -1: the run is not in FP8. */
static bl_status count_fallbacks(bl_trainer *t, int64_t *n)
{
    int64_t counts[BL_FALLBACK_COUNT], sum = 0;

    *n = -1;
    if (t->config->compute_dtype != BL_COMPUTE_FP8) return BL_OK;
    BL_TRY(bl_matmul_count_fallbacks(t->rank->device, counts));
    for (int i = 0; i < BL_FALLBACK_COUNT; i++) sum += counts[i];
    *n = sum - t->counted_fallbacks;
    t->counted_fallbacks = sum;
    return BL_OK;
}

bl_status bl_trainer_forget_counts(bl_trainer *t)
{
    bl_lane_totals of_no_step[BL_N_LANES];
    int64_t n_fallbacks;

    count_lanes(t, of_no_step);
    return count_fallbacks(t, &n_fallbacks);
}

static bl_status report_step(bl_trainer *t, int64_t step, double loss, double grad_norm,
                             const int64_t totals[3], double started, const bl_lane_totals *lanes)
{
    const bl_train_config *c = t->config;
    const bl_job *job = t->job;
    int64_t n = job->data.train.n, end = bl_train_position(c, n, step + 1);
    if (step == 0) t->output->outcome.first_loss = loss;
    t->output->outcome.last_loss = loss;
    bl_step_metrics metrics = {
        .step = step + 1,
        .total_steps = t->training->total_steps,
        .loss = loss,
        .grad_norm = grad_norm,
        .learning_rate = bl_train_learning_rate(c, step, t->training->total_steps),
        .epoch = (double)end / (double)n,
        .tokens = totals[1],
        .label_tokens = totals[0],
        .step_s = bl_now_s() - started,
        .flops = bl_arch_step_flops(
            &job->model->config, (double)job->lora.n_floats, (double)totals[1],
            (double)totals[1] / (double)(end - bl_train_position(c, n, step)), (double)totals[0]),
        .peak_flops = t->peak_flops * job->topology.n_ranks};
    memcpy(metrics.lanes, lanes, sizeof metrics.lanes);
    BL_TRY(count_fallbacks(t, &metrics.n_fallbacks));
    BL_TRY(bl_output_check_lock(t->output));
    return bl_metrics_step(t->output->metrics, &metrics);
}

static bl_status train_step(bl_trainer *t, int64_t step, const int64_t totals[3])
{
    const bl_train_config *c = t->config;
    const bl_training *training = t->training;
    double started = bl_now_s(), loss_sum, grad_norm;
    bool is_last = step + 1 == training->total_steps;
    bl_lane_totals lanes[BL_N_LANES];

    if (totals[0] == 0)
        return BL_FAIL(BL_EINPUT,
                       "%s: step %lld has no label that carries loss: all its labels are masked",
                       c->train_file, (long long)step + 1);
    bl_pass_input input;
    if (!is_last) begin_fill(t, step + 1);
    BL_TRY(run_groups(t, batches_of(t, step), step, totals[0], &input));
    if (!is_last) BL_TRY(end_fill(t));
    BL_TRY(bl_adapter_state_join(t->rank->state));
    count_lanes(t, lanes);
    BL_TRY(bl_adapter_state_reduce(t->rank->state, &loss_sum, &grad_norm, lanes));
    double loss = loss_sum / (double)totals[0];
    if (!isfinite(loss) || !isfinite(grad_norm))
        return report_not_finite(t, step, loss, grad_norm, &input);
    if (c->dump_gradients && step == training->start.step)
        BL_TRY(bl_adapter_state_write_gradients(t->rank->state, c->dump_gradients));
    BL_TRY(bl_adapter_state_update(
        t->rank->state, step + 1, bl_train_learning_rate(c, step, training->total_steps),
        c->adam_beta1, c->adam_beta2, c->adam_epsilon, c->weight_decay, c->max_grad_norm));
    t->steps_done = step + 1;
    return t->output ? report_step(t, step, loss, grad_norm, totals, started, lanes) : BL_OK;
}

static bool due(int64_t step, int64_t every)
{
    return every > 0 && step % every == 0;
}

static bool ends_epoch(const bl_trainer *t, int64_t step)
{
    int64_t rows = t->job->data.train.n;
    return bl_train_position(t->config, rows, step) / rows !=
           bl_train_position(t->config, rows, step - 1) / rows;
}

static bool evaluation_is_due(const bl_trainer *t, int64_t step)
{
    const bl_train_config *c = t->config;

    if (!t->job->data.validation.set) return false;
    if (step == 0 || step == t->training->total_steps) return true;
    if (c->eval_strategy == BL_EVAL_STEPS) return due(step, c->eval_steps);
    return c->eval_strategy == BL_EVAL_EPOCH && ends_epoch(t, step);
}

static bool save_is_due(const bl_trainer *t, int64_t step)
{
    const bl_train_config *c = t->config;

    if (step == t->training->total_steps || bl_trainer_stops_early(t)) return true;
    if (t->best.step == step && (c->load_best_model_at_end || c->save_strategy == BL_SAVE_BEST))
        return true;
    if (c->save_strategy == BL_SAVE_STEPS) return due(step, c->save_steps);
    return c->save_strategy == BL_SAVE_EPOCH && ends_epoch(t, step);
}

static bl_status evaluate_if_due(bl_trainer *t, int64_t step)
{
    const bl_train_config *c = t->config;
    double started = bl_now_s();
    bl_eval_result result;
    bl_lane_totals of_no_step[BL_N_LANES];

    if (t->evaluated_step >= step || !evaluation_is_due(t, step)) return BL_OK;
    BL_TRY(bl_rank_evaluate(t->rank, &result));
    count_lanes(t, of_no_step);
    if (step > 0) bl_trainer_note_loss(t, step, result.loss);
    if (t->output) {
        bool compares = c->load_best_model_at_end || c->early_stopping_patience > 0;
        if (step == 0) t->output->outcome.base = result;
        t->output->outcome.trained = result;
        BL_TRY(bl_output_check_lock(t->output));
        BL_TRY(bl_metrics_eval(t->output->metrics, step, result.loss, result.label_tokens,
                               bl_now_s() - started, compares ? &t->best : NULL));
    }
    t->evaluated_step = step;
    return BL_OK;
}

/* A base that has changed has spoilt the steps since the last checkpoint: none is made of them.
 * Prefetches for the next step end first. */
static bl_status verify_base(bl_trainer *t)
{
    if (t->config->verify_base == BL_VERIFY_FIRST) return BL_OK;
    BL_TRY(bl_stream_synchronize(t->rank->copy));
    BL_TRY(bl_stream_synchronize(t->rank->gather));
    return bl_base_verify(t->rank->base);
}

/* The work due after `step` steps: evaluation, checkpoint. */
static bl_status after_step(bl_trainer *t, int64_t step)
{
    BL_TRY(evaluate_if_due(t, step));
    if (!save_is_due(t, step)) return BL_OK;
    BL_TRY(verify_base(t));
    return bl_trainer_save(t, step);
}

static bool goes_on(const bl_trainer *t, int64_t step)
{
    return step < t->training->total_steps && !bl_trainer_stops_early(t);
}

/* Before the first step; or an evaluation that a stop cut short. The best step
 * needs a checkpoint here that has its loss: one that was made before the evaluation, or is in
 * another output_dir, is not that. */
static bl_status evaluate_start(bl_trainer *t)
{
    int64_t step = t->training->start.step;

    BL_TRY(evaluate_if_due(t, step));
    if (!t->config->load_best_model_at_end || t->best.step != step) return BL_OK;
    if (t->training->start.best.step != step) t->saved_step = -1;
    return bl_trainer_save(t, step);
}

bl_status bl_trainer_run(bl_trainer *t)
{
    const bl_training *training = t->training;
    const bl_start *start = &training->start;
    int64_t totals[3];

    t->steps_done = start->step;
    t->saved_step = start->is_saved && !t->start_differs ? start->step : -1;
    t->evaluated_step = start->evaluated_step;
    t->best = start->best;
    BL_TRY(evaluate_start(t));
    if (goes_on(t, start->step)) {
        begin_fill(t, start->step);
        BL_TRY(end_fill(t));
    }
    for (int64_t step = start->step; goes_on(t, step); step++) {
        BL_TRY(count_step(t, batches_of(t, step), totals));
        if (totals[2] > 0) {
            atomic_store(&t->is_saving, true);
            BL_TRY(verify_base(t));
            BL_TRY(bl_trainer_save(t, step));
            return BL_FAIL(BL_ESTOPPED,
                           "stopped on request after step %lld of %lld; resume with "
                           "--resume_from_checkpoint true",
                           (long long)step, (long long)training->total_steps);
        }
        atomic_store(&t->is_saving, false);
        BL_TRY(train_step(t, step, totals));
        BL_TRY(after_step(t, step + 1));
        /* The collectives of a step, and all before it, have been the same on all ranks. */
        if (step == start->step) BL_TRY(bl_comm_trust_order(t->rank->world));
    }
    if (t->output && t->steps_done < training->total_steps)
        bl_log_info("stopped early after step %lld of %lld: %lld evaluations in a row without a "
                    "better loss (early_stopping_patience); the lowest is %.4f, of step %lld",
                    (long long)t->steps_done, (long long)training->total_steps,
                    (long long)t->best.n_stale, t->best.loss, (long long)t->best.step);
    return bl_trainer_write_adapter(t);
}
