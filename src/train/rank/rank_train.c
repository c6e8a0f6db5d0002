/* SPDX-License-Identifier: Apache-2.0 */
/* rank_train.c -- one run's part of the training loop of a rank (round.c): its rows and
 * micro-batches before the passes; after them the sum of loss and gradient norm, their check,
 * AdamW, evaluations and checkpoints. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "train/rank/evaluate.h"
#include "train/rank/preference.h"
#include "train/rank/rungs.h"
#include "train/rank/trainer.h"

static bl_batches *batches_of(const bl_trainer *t, int64_t step)
{
    return t->batches[step & 1];
}

void bl_trainer_begin_fill(bl_trainer *t, int64_t step)
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

void bl_trainer_fill(bl_trainer *t, int64_t n)
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

bl_status bl_trainer_end_fill(bl_trainer *t)
{
    if (t->fill.n_rows == 0) return BL_OK;
    bl_trainer_fill(t, t->fill.n_rows);
    if (t->fill.error.status != BL_OK) return bl_error_restore(&t->fill.error);
    bl_batches *batches = batches_of(t, t->fill.step);
    if (t->rank->preference)
        BL_TRY(
            bl_preference_mismatch(t->rank->preference, batches, t->mismatched[t->fill.step & 1]));
    return bl_batches_upload(batches, t->rank->compute);
}

bl_batches *bl_trainer_batches(const bl_trainer *t)
{
    return batches_of(t, t->steps_done);
}

int64_t bl_trainer_rows_to_fill(const bl_trainer *t)
{
    return t->fill.n_rows;
}

bl_status bl_trainer_begin_step(bl_trainer *t, const bl_round_totals *totals, bl_pass_micro *micro)
{
    const bl_batches *batches = bl_trainer_batches(t);
    struct bl_preference *preference = t->rank->preference;
    double n_means = (double)(preference ? totals->n_filled : totals->n_labels);

    if (totals->n_labels == 0)
        return BL_FAIL(BL_EINPUT,
                       "%s: step %lld has no label that carries loss: all its labels are masked",
                       t->config->train_file, (long long)t->steps_done + 1);
    t->started_s = bl_now_s();
    t->rank->adapter.dropout = (bl_lora_dropout){.p = (float)t->job->lora.options.dropout,
                                                 .seed = (uint64_t)t->config->seed,
                                                 .step = (uint64_t)t->steps_done};
    for (int m = 0; m < batches->n_micro; m++)
        micro[m] = bl_rank_train_micro(t->rank, batches->micro + m,
                                       bl_trained_state_loss_sum(t->rank->state), 1.0 / n_means);
    if (preference)
        bl_preference_begin(preference, BL_PREFERENCE_STEP,
                            bl_train_position(t->config, t->job->data.train.n, t->steps_done));
    if (t->steps_done + 1 < t->training->total_steps)
        bl_trainer_begin_fill(t, t->steps_done + 1);
    else
        t->fill = (bl_fill){.step = t->steps_done + 1};
    return BL_OK;
}

/* The first tensor at fault among those of the last group, which are still there. */
static void name_bad_tensor(bl_trainer *t, const bl_pass_input *input, char *name, size_t n_bytes)
{
    const bl_micro_batch *first = bl_trainer_batches(t)->micro;
    int64_t layer;
    int micro;

    t->rank->is_at_fault = bl_pass_find_bad(t->rank->pass, input, &layer, &micro) &&
                           input->micro[micro].adapter == bl_rank_adapter(t->rank);
    if (!t->rank->is_at_fault)
        snprintf(name, n_bytes,
                 "not among the outputs of the layers: the logits, a gradient, or an earlier "
                 "micro-batch");
    else if (layer < 0)
        snprintf(name, n_bytes, "the embedding, micro-batch %d",
                 (int)(input->micro[micro].batch - first));
    else
        snprintf(name, n_bytes, "the output of layer %lld, micro-batch %d", (long long)layer,
                 (int)(input->micro[micro].batch - first));
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

void bl_trainer_count_lanes(bl_trainer *t, bl_lane_totals lanes[BL_N_LANES])
{
    bl_timeline_totals before = t->counted, *now = &t->counted;

    bl_timeline_collect(t->rank->timeline);
    bl_timeline_get_totals(t->rank->timeline, now);
    for (int i = 0; i < BL_N_LANES; i++)
        lanes[i] = (bl_lane_totals){.busy_s = now->lane[i].busy_s - before.lane[i].busy_s,
                                    .stall_s = now->lane[i].stall_s - before.lane[i].stall_s,
                                    .n_bytes = now->lane[i].n_bytes - before.lane[i].n_bytes};
}

bl_status bl_trainer_count_fallbacks(bl_trainer *t, int64_t *n)
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

    bl_trainer_count_lanes(t, of_no_step);
    return bl_trainer_count_fallbacks(t, &n_fallbacks);
}

static double step_flops(const bl_job *job, const bl_round_totals *totals, int64_t n_rows)
{
    const bl_model_config *config = &job->model->config;
    double n_tokens = (double)totals->n_tokens, n_labels = (double)totals->n_labels,
           mean_tokens = n_tokens / (double)n_rows;

    if (job->model->is_trained)
        return bl_trained_step_flops(config, &job->model->trained, n_tokens, mean_tokens, n_labels);
    double flops =
        bl_arch_step_flops(config, (double)bl_lora_floats_before(&job->lora, config->n_layers), 0,
                           n_tokens, mean_tokens, n_labels) +
        bl_lora_table_flops(&job->lora, n_tokens, n_labels);
    bool trains_head =
        job->modules.names.n > 0 && job->modules.set.unit[config->n_layers].matrix[0].n > 0;
    return trains_head
               ? flops + 2.0 * (double)config->vocab_size * (double)config->hidden_size * n_labels
               : flops;
}

static bl_status report_step(bl_trainer *t, int64_t step, const bl_round_totals *totals,
                             const bl_step_result *result)
{
    const bl_train_config *c = t->config;
    const bl_job *job = t->job;
    int64_t n = job->data.train.n, end = bl_train_position(c, n, step + 1);
    if (step == 0) t->output->outcome.first_loss = result->loss;
    t->output->outcome.last_loss = result->loss;
    bl_step_metrics metrics = {
        .step = step + 1,
        .total_steps = t->training->total_steps,
        .loss = result->loss,
        .grad_norm = result->grad_norm,
        .learning_rate = bl_train_learning_rate(c, step, t->training->total_steps),
        .epoch = (double)end / (double)n,
        .tokens = totals->n_tokens,
        .label_tokens = totals->n_labels,
        .step_s = bl_now_s() - t->started_s,
        .flops = step_flops(job, totals, end - bl_train_position(c, n, step)),
        .n_fallbacks = result->n_fallbacks,
        .preference = result->preference,
        .peak_flops = t->peak_flops * job->topology.n_ranks};
    memcpy(metrics.lanes, result->lanes, sizeof metrics.lanes);
    BL_TRY(bl_output_check_lock(t->output));
    return bl_metrics_step(t->output->metrics, &metrics);
}

bl_status bl_trainer_end_step(bl_trainer *t, const bl_round_totals *totals,
                              const bl_pass_input *last_group, bl_step_result *result)
{
    const bl_train_config *c = t->config;
    const bl_training *training = t->training;
    int64_t step = t->steps_done;
    double loss_sum;

    BL_TRY(bl_trained_state_reduce(t->rank->state, &loss_sum, &result->grad_norm, result->lanes));
    result->loss = loss_sum / (double)totals->n_labels;
    if (t->rank->preference) {
        BL_TRY(bl_preference_end(t->rank->preference, BL_PREFERENCE_STEP, &result->preference));
        result->loss = result->preference.step_loss;
    }
    if (!isfinite(result->loss) || !isfinite(result->grad_norm))
        return report_not_finite(t, step, result->loss, result->grad_norm, last_group);
    if (c->dump_gradients && step == training->start.step)
        BL_TRY(bl_trained_state_write_gradients(t->rank->state, c->dump_gradients));
    BL_TRY(bl_trained_state_update(
        t->rank->state, step + 1, bl_train_learning_rate(c, step, training->total_steps),
        c->adam_beta1, c->adam_beta2, c->adam_epsilon, c->weight_decay, c->max_grad_norm));
    t->steps_done = step + 1;
    return t->output ? report_step(t, step, totals, result) : BL_OK;
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

    if (!t->job->data.validation.set || t->evaluated_step >= step) return false;
    if (step == 0 || step == t->training->total_steps || bl_trainer_has_rung(t, step)) return true;
    if (c->eval_strategy == BL_EVAL_STEPS) return due(step, c->eval_steps);
    return c->eval_strategy == BL_EVAL_EPOCH && ends_epoch(t, step);
}

/* Whether the schedule of saves has this step, independently of evaluations. */
static bool save_is_scheduled(const bl_trainer *t, int64_t step)
{
    const bl_train_config *c = t->config;

    if (step == t->training->total_steps) return true;
    if (c->save_strategy == BL_SAVE_STEPS) return due(step, c->save_steps);
    return c->save_strategy == BL_SAVE_EPOCH && ends_epoch(t, step);
}

static bool save_is_due(const bl_trainer *t, int64_t step)
{
    const bl_train_config *c = t->config;

    if (bl_trainer_stops_early(t) || bl_trainer_has_rung(t, step)) return true;
    if (t->best.step == step && (c->load_best_model_at_end || c->save_strategy == BL_SAVE_BEST))
        return true;
    return save_is_scheduled(t, step);
}

static void begin_evaluation(bl_trainer *t)
{
    t->evaluates = true;
    t->evaluation_s = 0;
    bl_evaluation_begin(t->rank->evaluation);
}

/* Whether it goes on in the visits of the next step (eval_overlap), if there is one: after a rung
 * it may be that there is none. */
static bool evaluation_overlaps(const bl_trainer *t)
{
    return t->rank->evaluation->n_overlapped > 0 && bl_trainer_goes_on(t) &&
           !bl_trainer_has_rung(t, t->steps_done);
}

/* Of the steps that are done. */
static bl_status end_evaluation(bl_trainer *t)
{
    const bl_train_config *c = t->config;
    double started = bl_now_s();
    int64_t step = t->steps_done;
    bl_eval_result result;

    t->evaluates = false;
    BL_TRY(bl_evaluation_end(t->rank->evaluation, &result));
    if (step > 0) bl_trainer_note_loss(t, step, result.loss);
    if (step > 0) bl_trainer_note_rung(t, step, result.loss);
    if (t->output) {
        bool compares = c->load_best_model_at_end || c->early_stopping_patience > 0;
        if (step == 0) t->output->outcome.base = result;
        t->output->outcome.trained = result;
        BL_TRY(bl_output_check_lock(t->output));
        bl_eval_metrics metrics = {.step = step,
                                   .loss = result.loss,
                                   .label_tokens = result.label_tokens,
                                   .seconds = t->evaluation_s + bl_now_s() - started,
                                   .best = compares ? &t->best : NULL,
                                   .preference = result.preference};
        BL_TRY(bl_metrics_eval(t->output->metrics, &metrics));
    }
    t->evaluated_step = step;
    return BL_OK;
}

/* At the run's start the best step needs a checkpoint that has its loss: one that was made before
 * the evaluation, or is in another output_dir, is not that. */
static bl_status save_start(bl_trainer *t)
{
    int64_t step = t->training->start.step;

    if (!t->config->load_best_model_at_end || t->best.step != step) return BL_OK;
    if (t->training->start.best.step != step) t->saved_step = -1;
    return bl_trainer_save(t, step);
}

static bl_status save_if_due(bl_trainer *t)
{
    int64_t step = t->steps_done;

    if (step == t->training->start.step) return save_start(t);
    if (!save_is_due(t, step)) return BL_OK;
    BL_TRY(bl_rank_verify_base(t->rank));
    return bl_trainer_save(t, step);
}

/* Full fine-tuning: the evaluation ends just before the update of the next step, which would wait
 * for a checkpoint that is begun then. */
static bl_status save_before_evaluation(bl_trainer *t)
{
    int64_t step = t->steps_done;

    if (!t->job->model->is_trained || step == t->training->start.step ||
        !save_is_scheduled(t, step))
        return BL_OK;
    return bl_trainer_begin_save(t, step);
}

bl_status bl_trainer_after_step(bl_trainer *t)
{
    if (evaluation_is_due(t, t->steps_done)) {
        begin_evaluation(t);
        if (evaluation_overlaps(t)) return save_before_evaluation(t);
        BL_TRY(bl_trainer_await_save(t));
        BL_TRY(end_evaluation(t));
    }
    return save_if_due(t);
}

bl_status bl_trainer_join_evaluation(bl_trainer *t, int64_t n_passes, bl_group *group, int *room)
{
    double started = bl_now_s();
    int64_t left = t->evaluates ? bl_evaluation_left(t->rank->evaluation) : 0;
    int n = (int)bl_min_i64(bl_ceil_div(left, n_passes), *room);

    if (n == 0) return BL_OK;
    n = (int)bl_min_i64(n, bl_evaluation_capacity(t->rank->evaluation));
    *room -= n;
    BL_TRY(bl_evaluation_join(t->rank->evaluation, n, group));
    t->evaluation_s += bl_now_s() - started;
    return BL_OK;
}

bl_status bl_trainer_end_evaluation(bl_trainer *t)
{
    if (!t->evaluates) return BL_OK;
    BL_TRY(end_evaluation(t));
    if (t->save.is_active && t->save.step == t->steps_done) return bl_trainer_describe_save(t);
    return save_if_due(t);
}

bool bl_trainer_goes_on(const bl_trainer *t)
{
    return bl_trainer_has_more(t) && !bl_trainer_waits(t);
}

bool bl_trainer_has_more(const bl_trainer *t)
{
    return t->status == BL_OK && t->steps_done < t->training->total_steps &&
           !bl_trainer_stops_early(t);
}

bl_status bl_trainer_start(bl_trainer *t)
{
    const bl_start *start = &t->training->start;

    t->steps_done = start->step;
    t->saved_step = start->is_saved && !t->start_differs ? start->step : -1;
    t->evaluated_step = start->evaluated_step;
    t->best = start->best;
    t->rungs = start->rungs;
    if (bl_trainer_has_more(t) || evaluation_is_due(t, t->steps_done))
        BL_TRY(bl_trainer_precompute(t));
    /* Before the first step; or an evaluation that a stop cut short. */
    BL_TRY(bl_trainer_after_step(t));
    if (!bl_trainer_has_more(t)) return BL_OK;
    bl_trainer_begin_fill(t, start->step);
    return bl_trainer_end_fill(t);
}

bl_status bl_trainer_stop(bl_trainer *t)
{
    atomic_store(&t->is_saving, true);
    BL_TRY(bl_rank_verify_base(t->rank));
    BL_TRY(bl_trainer_save(t, t->steps_done));
    BL_TRY(bl_trainer_end_save(t));
    return BL_FAIL(BL_ESTOPPED,
                   "stopped on request after step %lld of %lld; resume with "
                   "--resume_from_checkpoint true",
                   (long long)t->steps_done, (long long)t->training->total_steps);
}

bl_status bl_trainer_end(bl_trainer *t)
{
    int64_t total = t->training->total_steps;

    t->has_ended = true;
    if (t->output && t->rungs.stopped_at > 0)
        bl_log_info("stopped at the rung of %lld steps, of %lld (reduction_factor)",
                    (long long)t->rungs.stopped_at, (long long)total);
    else if (t->output && t->steps_done < total)
        bl_log_info("stopped early after step %lld of %lld: %lld evaluations in a row without a "
                    "better loss (early_stopping_patience); the lowest is %.4f, of step %lld",
                    (long long)t->steps_done, (long long)total, (long long)t->best.n_stale,
                    t->best.loss, (long long)t->best.step);
    return bl_trainer_write_adapter(t);
}
