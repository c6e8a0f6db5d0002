/* SPDX-License-Identifier: Apache-2.0 */
/* save.c -- training checkpoints: their content, and how all ranks write one together. start.c: how
 * one is resumed.
 *
 *   checkpoints/step-N/state-RRRRR-of-NNNNN.safetensors   a rank's shard: adapter/shards.c
 *   checkpoints/step-N/adapter_model.safetensors,
 *                      adapter_config.json                the adapter after N steps, made from the
 *                                                         shards by rank 0; none of a run that
 *                                                         trains all weights
 *   checkpoints/step-N/config.yaml                        the resolved configuration
 *   checkpoints/step-N/manifest.json                      sizes and checksums; "state": step,
 *                                                         ranks, layout, fingerprints, log length
 *
 * Nothing else is state: the order of rows and dropout are functions of (seed, step, sample,
 * position). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "train/rank/trainer.h"

/* ---- saving ---- */

static json_t *describe(const bl_trainer *t, int64_t step, int64_t metrics_bytes)
{
    const bl_job *job = t->job;
    const bl_outcome *outcome = &t->output->outcome;
    json_t *state = json_pack(
        "{s:I, s:i, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f}", "step", (json_int_t)step, "ranks",
        job->topology.n_ranks, "n_layers", (json_int_t)job->model->config.n_layers,
        "floats_per_layer", (json_int_t)bl_job_layer_floats(job), "metrics_bytes",
        (json_int_t)metrics_bytes, "evaluated_step", (json_int_t)t->evaluated_step, "first_loss",
        outcome->first_loss, "last_loss", outcome->last_loss, "base_loss",
        isnan(outcome->base.loss) ? BL_LOSS_UNKNOWN : outcome->base.loss, "validation_loss",
        outcome->trained.loss);
    if (state && t->rungs.n > 0) {
        json_t *losses = json_array();
        for (int i = 0; losses && i < t->rungs.n; i++)
            (void)json_array_append_new(losses, json_real(t->rungs.loss[i]));
        if (json_object_set_new(state, "rung_losses", losses) != 0) {
            json_decref(state);
            return NULL;
        }
    }
    if (!state || t->best.step < 0) return state;
    json_t *best = json_pack("{s:I, s:f, s:I}", "best_step", (json_int_t)t->best.step, "best_loss",
                             t->best.loss, "stale_evaluations", (json_int_t)t->best.n_stale);
    if (!best || json_object_update(state, best) != 0) {
        json_decref(state);
        state = NULL;
    }
    json_decref(best);
    return state;
}

/* Writes the rank's file into the directory of the checkpoint of `step`, and describes it. */
static bl_status write_rank(bl_trainer *t, int64_t step, bl_checkpoint_file *out)
{
    char name[BL_SHARD_NAME_BYTES], *folder = NULL, *path = NULL;
    bl_status st = BL_OK;

    bl_adapter_shard_name(t->rank->index, t->job->topology.n_ranks, name);
    BL_TRY_GOTO(st, done, bl_checkpoint_step_tmp_path(t->training->checkpoint_dir, step, &folder));
    BL_TRY_GOTO(st, done, bl_path_join(folder, name, &path));
    /* Another host has made the folder, perhaps after this one has looked for those above it. */
    if (t->job->launch) (void)bl_dir_look_anew(folder);
    BL_TRY_GOTO(st, done, bl_adapter_state_write_shard(t->rank->state, path));
    st = bl_checkpoint_describe_file(path, out);
done:
    free(path);
    free(folder);
    return bl_output_failure(t->folder, st);
}

int64_t bl_job_checkpoint_bytes(const bl_job *job)
{
    enum { SLACK_BYTES = 1 << 20 };
    int64_t n_bytes;

    if (!job->model->is_trained)
        n_bytes = bl_adapter_checkpoint_bytes(&job->lora, &job->model->config, &job->modules.set);
    else if (bl_adapter_full_checkpoint_bytes(
                 &job->model->config, &job->model->trained, job->topology.n_ranks,
                 bl_train_config_moments(job->config), &n_bytes) != BL_OK)
        return INT64_MAX;
    return n_bytes + SLACK_BYTES;
}

int64_t bl_job_layer_floats(const bl_job *job)
{
    return job->model->is_trained ? bl_arch_layer_weights(&job->model->config) : job->lora.n_floats;
}

/* Before the checkpoint's directory appears. */
static bl_status list_step(const bl_trainer *t, int64_t step)
{
    char *path = NULL;

    BL_TRY(bl_text_format(&path, "%s/step-%" PRId64, t->training->checkpoint_dir, step));
    bl_status st = bl_file_list_add(t->output->files, (const char *const *)&path, 1);
    free(path);
    return st;
}

/* Begin and commit: rank 0's. */
static bl_status begin_save(const bl_trainer *t, int64_t step)
{
    const bl_training *training = t->training;
    bl_output *output = t->output;
    char *path = NULL;

    BL_TRY(bl_output_check_lock(output));
    BL_TRY(list_step(t, step));
    BL_TRY(bl_checkpoint_begin(training->checkpoint_dir, step, bl_job_checkpoint_bytes(t->job),
                               &output->saving));
    BL_TRY(bl_path_join(bl_checkpoint_path(output->saving), "config.yaml", &path));
    bl_status st = bl_train_config_write_resolved(t->config, path);
    if (st == BL_OK) st = bl_checkpoint_add_file(output->saving, "config.yaml");
    free(path);
    return st;
}

/* From the shards, which are complete: needs no rank. */
static bl_status add_adapter(const bl_job *job, bl_checkpoint *saving)
{
    static const char *const names[] = {BL_OUTPUT_ADAPTER, BL_OUTPUT_ADAPTER_CONFIG};
    const char *dir = bl_checkpoint_path(saving);

    bl_status st = bl_adapter_export_shards(
        &job->lora, &job->modules, &job->model->config, dir, job->topology.n_ranks, dir,
        job->config->model_name_or_path, job->config->adapter_dtype == BL_ADAPTER_BF16);
    if (st == BL_ECHECKPOINT) st = bl_error_prefix(BL_EIO, "written a moment ago");
    for (size_t i = 0; st == BL_OK && i < BL_COUNT(names); i++)
        st = bl_checkpoint_add_file(saving, names[i]);
    return st;
}

/* files[n_ranks]: what write_rank said on each rank. */
static bl_status commit_save(const bl_trainer *t, int64_t step, const bl_checkpoint_file *files)
{
    const bl_job *job = t->job;
    bl_output *output = t->output;
    int64_t metrics_bytes;

    BL_TRY(bl_output_check_lock(output));
    for (int i = 0; i < job->topology.n_ranks; i++) {
        char name[BL_SHARD_NAME_BYTES];
        bl_adapter_shard_name(i, job->topology.n_ranks, name);
        BL_TRY(bl_checkpoint_add_described(output->saving, name, &files[i]));
    }
    if (!job->model->is_trained) BL_TRY(add_adapter(job, output->saving));
    BL_TRY(bl_metrics_sync(output->metrics, &metrics_bytes));
    json_t *state = describe(t, step, metrics_bytes);
    bl_status st = state ? bl_job_describe_identity(job, t->rank->weights->checksum, state)
                         : BL_FAIL(BL_ENOMEM, "description of a checkpoint");
    if (st == BL_OK) st = bl_products_record(job, state);
    if (st == BL_OK) {
        st = bl_checkpoint_commit(output->saving, state);
        output->saving = NULL;
    }
    json_decref(state);
    if (st != BL_OK) return st;
    return bl_checkpoint_prune(t->training->checkpoint_dir, output->files, step,
                               job->config->load_best_model_at_end ? t->best.step : -1,
                               job->config->save_total_limit);
}

bl_status bl_trainer_save(bl_trainer *t, int64_t step)
{
    bl_rank *r = t->rank;
    if (t->saved_step == step) return BL_OK;
    BL_TRY(bl_stream_synchronize(r->compute));
    if (t->output) BL_TRY(bl_output_failure(t->output, begin_save(t, step)));
    BL_TRY(bl_talk_meet(&r->talk));
    atomic_store(&t->is_saving, true);
    BL_TRY(write_rank(t, step, &t->files[r->index]));
    BL_TRY(bl_talk_gather(&r->talk, t->files, sizeof *t->files));
    if (t->output) BL_TRY(bl_output_failure(t->output, commit_save(t, step, t->files)));
    t->saved_step = step;
    return bl_talk_meet(&r->talk);
}

bl_status bl_trainers_save(bl_trainer *trainers, int64_t step)
{
    bl_trainer *first = &trainers[0];
    bl_checkpoint_file *files = first->files;

    BL_TRY(bl_output_failure(first->output, begin_save(first, step)));
    for (int i = 0; i < first->job->topology.n_ranks; i++)
        BL_TRY(write_rank(&trainers[i], step, &files[i]));
    return bl_output_failure(first->output, commit_save(first, step, files));
}
