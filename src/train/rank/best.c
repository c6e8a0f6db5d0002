/* SPDX-License-Identifier: Apache-2.0 */
/* best.c -- the evaluation with the lowest loss: early stopping, and which step's adapter is the
 * result of a run.
 *
 * As transformers 5: a loss below the lowest so far makes its step the best (Trainer,
 * _determine_best_metric). An evaluation counts as stale unless its loss is also lower by more than
 * early_stopping_threshold; early_stopping_patience of them in a row end the run
 * (EarlyStoppingCallback). The best step always has a checkpoint with load_best_model_at_end, since
 * its evaluation is followed by a save. */
#include <stdlib.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "convert/trained.h"
#include "train/rank/trainer.h"

bool bl_trainer_note_loss(bl_trainer *t, int64_t step, double loss)
{
    bl_best *best = &t->best;
    bool is_lowest = best->step < 0 || loss < best->loss;

    if (best->step < 0 || (is_lowest && best->loss - loss > t->config->early_stopping_threshold))
        best->n_stale = 0;
    else
        best->n_stale++;
    if (is_lowest) {
        best->step = step;
        best->loss = loss;
    }
    return is_lowest;
}

bool bl_trainer_is_out_of_patience(const bl_trainer *t)
{
    int64_t patience = t->config->early_stopping_patience;
    return patience > 0 && t->best.n_stale >= patience;
}

bool bl_trainer_stops_early(const bl_trainer *t)
{
    return bl_trainer_is_out_of_patience(t) || t->rungs.stopped_at > 0;
}

/* The adapter of a checkpoint of n_ranks ranks. */
static bl_status export_adapter(const bl_trainer *t, const char *dir, int n_ranks)
{
    const bl_job *job = t->job;

    return bl_adapter_export_shards(&job->lora, &job->modules, &job->model->config, dir, n_ranks,
                                    job->config->output_dir, job->config->model_name_or_path,
                                    job->config->adapter_dtype == BL_ADAPTER_BF16);
}

/* The model of one, in place of an earlier run's. */
static bl_status export_model(const bl_trainer *t, const char *dir, int n_ranks)
{
    bl_trained_options options = {.source = t->config->model_name_or_path,
                                  .checkpoint = dir,
                                  .n_ranks = n_ranks,
                                  .trained = &t->job->model->trained,
                                  .is_f32 = t->config->model_dtype == BL_MODEL_F32};
    char *target = NULL, *readme = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_path_join(t->config->output_dir, BL_OUTPUT_MODEL, &target));
    BL_TRY_GOTO(st, done, bl_tree_remove(target));
    BL_TRY_GOTO(
        st, done,
        bl_training_readme(t->training, &t->output->outcome, t->config->output_dir, &readme));
    options.target = target;
    options.readme = readme;
    st = bl_model_write_trained(&options);
done:
    free(readme);
    free(target);
    return st;
}

/* From the checkpoint of a step, which ranks of another number may have written. Rank 0's. */
static bl_status export_step(const bl_trainer *t, int64_t step)
{
    char *dir = NULL;
    json_t *state = NULL;
    int64_t n_ranks;

    BL_TRY(bl_text_format(&dir, "%s/step-%lld", t->training->checkpoint_dir, (long long)step));
    bl_status st = bl_checkpoint_verify(dir, NULL, &state);
    if (st == BL_OK)
        st = bl_json_get_int(dir, state, "ranks", BL_JSON_REQUIRED, 1, 1 << 20, &n_ranks);
    if (st == BL_OK)
        st = t->job->model->is_trained ? export_model(t, dir, (int)n_ranks)
                                       : export_adapter(t, dir, (int)n_ranks);
    json_decref(state);
    free(dir);
    return st;
}

static bl_status export_best(const bl_trainer *t)
{
    bl_status st = export_step(t, t->best.step);
    return st == BL_ECHECKPOINT
               ? bl_error_prefix(st, "load_best_model_at_end: the checkpoint of the lowest loss is "
                                     "damaged, --resume_from_checkpoint true takes the best of the "
                                     "rest")
               : st;
}

/* Written and verified by this run, or verified at its start. */
static bl_status export_last(const bl_trainer *t)
{
    bl_status st = export_step(t, t->steps_done);
    return st == BL_ECHECKPOINT ? bl_error_prefix(BL_EIO, "reading the last checkpoint again") : st;
}

/* Before the files appear. README.md follows when the ranks have ended. */
static bl_status list_adapter(const bl_trainer *t)
{
    static const char *const added[] = {BL_OUTPUT_ADAPTER, BL_OUTPUT_ADAPTER_CONFIG,
                                        BL_OUTPUT_README},
                             *const model[] = {BL_OUTPUT_MODEL, BL_OUTPUT_README};

    BL_TRY(bl_output_check_lock(t->output));
    if (t->job->model->is_trained)
        return bl_output_list(t->config->output_dir, t->output, model, BL_COUNT(model));
    return bl_output_list(t->config->output_dir, t->output, added, BL_COUNT(added));
}

static bool takes_best(const bl_trainer *t)
{
    return t->config->load_best_model_at_end && t->best.step >= 0 && t->best.step != t->steps_done;
}

/* bl_trainer_work_fn; user: rank 0's trainer. */
static bl_status export_result(void *user)
{
    const bl_trainer *t = user;
    bl_status st = takes_best(t) ? export_best(t) : export_last(t);
    return bl_output_failure(t->folder, st);
}

/* The result is written from a checkpoint, by rank 0 alone. */
bl_status bl_trainer_write_adapter(bl_trainer *t)
{
    bool is_best = takes_best(t);

    /* Of a run that had nothing left to do, the checkpoint is another's. */
    if (!is_best) BL_TRY(bl_trainer_save(t, t->steps_done));
    BL_TRY(bl_trainer_end_save(t));
    if (t->output) {
        bl_outcome *outcome = &t->output->outcome;
        BL_TRY(list_adapter(t));
        outcome->n_steps = outcome->adapter_step = t->steps_done;
        outcome->rung = t->rungs.stopped_at;
        if (is_best) {
            outcome->adapter_step = t->best.step;
            outcome->trained.loss = t->best.loss;
        }
    }
    BL_TRY(bl_host_comm_barrier(&t->rank->host_comm));
    atomic_store(&t->is_saving, true);
    return bl_trainer_work_on_files(t, t->output ? export_result : NULL, t);
}
