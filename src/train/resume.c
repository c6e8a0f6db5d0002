/* SPDX-License-Identifier: Apache-2.0 */
/* resume.c -- training checkpoints: what is in one, how it is written by all ranks together, and when it may be resumed.
 *
 *   checkpoints/step-N/state-RRRRR-of-NNNNN.safetensors   a rank's shard: adapter_shards.c
 *   checkpoints/step-N/config.yaml                        the resolved configuration
 *   checkpoints/step-N/manifest.json                      sizes and checksums; "state": step, ranks, layout, fingerprints, log length
 *
 * There is no other state: the order of rows and dropout are functions of (seed, step, sample, position). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "train/trainer.h"

/* ---- saving ---- */

static json_t *describe(const bl_trainer *t, int64_t step, int64_t metrics_bytes)
{
    const bl_job *job = &t->training->job;
    const bl_outcome *outcome = &t->output->outcome;
    return json_pack("{s:I, s:i, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f}", "step", (json_int_t)step,
                     "ranks", job->topology.n_ranks, "n_layers",
                     (json_int_t)job->model->config.n_layers, "floats_per_layer",
                     (json_int_t)job->lora.n_floats, "metrics_bytes", (json_int_t)metrics_bytes,
                     "evaluated_step", (json_int_t)t->evaluated_step, "first_loss",
                     outcome->first_loss, "last_loss", outcome->last_loss, "base_loss",
                     outcome->base.loss, "validation_loss", outcome->trained.loss);
}

/* Writes the rank's file into the folder of the checkpoint of `step`, and says what is in it. */
static bl_status write_rank(bl_trainer *t, int64_t step, bl_checkpoint_file *out)
{
    char name[BL_SHARD_NAME_BYTES], *folder = NULL, *path = NULL;
    bl_status st = BL_OK;

    bl_adapter_shard_name(t->rank->index, t->training->job.topology.n_ranks, name);
    BL_TRY_GOTO(st, done, bl_checkpoint_step_tmp_path(t->training->checkpoint_dir, step, &folder));
    BL_TRY_GOTO(st, done, bl_path_join(folder, name, &path));
    /* Another host has made the folder, perhaps after this one has looked for those above it. */
    if (t->training->job.launch) (void)bl_dir_look_anew(folder);
    BL_TRY_GOTO(st, done, bl_adapter_state_write_shard(t->rank->state, path));
    st = bl_checkpoint_describe_file(path, out);
done:
    free(path);
    free(folder);
    return bl_output_failure(t->folder, st);
}

static int64_t checkpoint_bytes(const bl_job *job)
{
    enum { SLACK_BYTES = 1 << 20 };
    return bl_plan_checkpoint_bytes(&job->lora, job->model->config.n_layers) + SLACK_BYTES;
}

/* Begin and commit: rank 0's. */
static bl_status begin_save(const bl_trainer *t, int64_t step)
{
    const bl_training *training = t->training;
    bl_output *output = t->output;
    char *path = NULL;

    BL_TRY(bl_output_check_lock(output));
    BL_TRY(bl_checkpoint_begin(training->checkpoint_dir, step, checkpoint_bytes(&training->job),
                               &output->saving));
    BL_TRY(bl_path_join(bl_checkpoint_path(output->saving), "config.yaml", &path));
    bl_status st = bl_train_config_write_resolved(training->job.config, path);
    if (st == BL_OK) st = bl_checkpoint_add_file(output->saving, "config.yaml");
    free(path);
    return st;
}

/* files[n_ranks]: what write_rank said on each rank. */
static bl_status commit_save(const bl_trainer *t, int64_t step, const bl_checkpoint_file *files)
{
    const bl_job *job = &t->training->job;
    bl_output *output = t->output;
    int64_t metrics_bytes;

    BL_TRY(bl_output_check_lock(output));
    for (int i = 0; i < job->topology.n_ranks; i++) {
        char name[BL_SHARD_NAME_BYTES];
        bl_adapter_shard_name(i, job->topology.n_ranks, name);
        BL_TRY(bl_checkpoint_add_described(output->saving, name, &files[i]));
    }
    BL_TRY(bl_metrics_sync(output->metrics, &metrics_bytes));
    json_t *state = describe(t, step, metrics_bytes);
    bl_status st = state ? bl_job_describe_identity(job, t->rank->weights->checksum, state)
                         : BL_FAIL(BL_ENOMEM, "description of a checkpoint");
    if (st == BL_OK) st = bl_machine_record(job, state);
    if (st == BL_OK) {
        st = bl_checkpoint_commit(output->saving, state);
        output->saving = NULL;
    }
    json_decref(state);
    if (st != BL_OK) return st;
    return bl_checkpoint_prune(t->training->checkpoint_dir, step, job->config->save_total_limit);
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
    for (int i = 0; i < first->training->job.topology.n_ranks; i++)
        BL_TRY(write_rank(&trainers[i], step, &files[i]));
    return bl_output_failure(first->output, commit_save(first, step, files));
}

/* ---- choosing ---- */

/* A log that is empty is left by a start that was refused: no step was made. */
static bl_status leaves_a_trace(const char *path, bool *found)
{
    struct stat info;

    BL_TRY(bl_path_exists(path, found));
    if (*found && stat(path, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == 0)
        *found = false;
    return BL_OK;
}

static bl_status holds_a_run(const bl_train_config *c, bool *found)
{
    static const char *const traces[] = {"adapter_model.safetensors", "metrics.jsonl",
                                         "checkpoints"};
    *found = false;
    for (size_t i = 0; i < BL_COUNT(traces) && !*found; i++) {
        char *path;
        BL_TRY(bl_path_join(c->output_dir, traces[i], &path));
        bl_status st = leaves_a_trace(path, found);
        free(path);
        if (st != BL_OK) return st;
    }
    return BL_OK;
}

/* config.resolved.yaml is replaced: it may be what this run was started from. */
/* What a run leaves in output_dir: removed, or measured where `n_bytes` is given. */
static bl_status visit_old_run(const bl_train_config *c, int64_t *n_bytes)
{
    static const char *const traces[] = {"adapter_model.safetensors", "adapter_config.json",
                                         "README.md", "metrics.jsonl", "checkpoints"};
    for (size_t i = 0; i < BL_COUNT(traces); i++) {
        char *path;
        bl_status st = BL_OK;
        BL_TRY(bl_path_join(c->output_dir, traces[i], &path));
        if (n_bytes)
            *n_bytes += bl_tree_bytes(path);
        else
            st = bl_tree_remove(path);
        free(path);
        if (st != BL_OK) return st;
    }
    return BL_OK;
}

bl_status bl_training_start_over(const bl_training *training)
{
    return training->start.starts_over ? visit_old_run(training->job.config, NULL) : BL_OK;
}

/* The keys, the data and the model that differ from the checkpoint's; "" when none. */
static bl_status list_differences(bl_training *training, const json_t *state, char **text)
{
    bl_train_config *before = NULL;
    char *path = NULL, *keys = NULL;
    size_t n_bytes = 0;
    bl_status st = BL_OK;

    BL_TRY(bl_path_join(training->start.dir, "config.yaml", &path));
    BL_TRY_GOTO(st, done, bl_train_config_read_back(path, &before));
    BL_TRY_GOTO(st, done,
                bl_train_config_diff(before, training->job.config, BL_EFFECT_RESULT, &keys));
    FILE *out = open_memstream(text, &n_bytes);
    if (!out) {
        st = BL_FAIL(BL_ENOMEM, "the differences of two runs");
        goto done;
    }
    for (const char *c = keys; *c; c++)
        if (*c != '\n')
            fputc(*c, out);
        else
            fputs("; ", out);
    st = bl_job_list_identity(&training->job, state, &training->start, out);
    if (fclose(out) != 0 && st == BL_OK) st = BL_FAIL(BL_ENOMEM, "the differences of two runs");
    if (st == BL_OK && n_bytes > 0) (*text)[n_bytes - 2] = '\0';
done:
    bl_train_config_free(before);
    free(keys);
    free(path);
    return st;
}

static bl_status check_state(bl_training *training, const json_t *state, bl_outcome *outcome)
{
    const bl_job *job = &training->job;
    bl_start *start = &training->start;
    int64_t ranks, layers, floats;
    char *differences = NULL;

    BL_TRY(bl_json_get_int(start->dir, state, "ranks", BL_JSON_REQUIRED, 1, 1 << 20, &ranks));
    BL_TRY(bl_json_get_int(start->dir, state, "n_layers", BL_JSON_REQUIRED, 1, INT64_MAX, &layers));
    BL_TRY(bl_json_get_int(start->dir, state, "floats_per_layer", BL_JSON_REQUIRED, 1, INT64_MAX,
                           &floats));
    BL_TRY(bl_json_get_int(start->dir, state, "metrics_bytes", BL_JSON_REQUIRED, 0, INT64_MAX,
                           &start->metrics_bytes));
    BL_TRY(bl_json_get_int(start->dir, state, "evaluated_step", BL_JSON_REQUIRED, -1, INT64_MAX,
                           &start->evaluated_step));
    BL_TRY(bl_json_get_real(start->dir, state, "first_loss", BL_JSON_REQUIRED, -1e300, 1e300,
                            &outcome->first_loss));
    BL_TRY(bl_json_get_real(start->dir, state, "last_loss", BL_JSON_REQUIRED, -1e300, 1e300,
                            &outcome->last_loss));
    BL_TRY(bl_json_get_real(start->dir, state, "base_loss", BL_JSON_REQUIRED, -1e300, 1e300,
                            &outcome->base.loss));
    BL_TRY(bl_json_get_real(start->dir, state, "validation_loss", BL_JSON_REQUIRED, -1e300, 1e300,
                            &outcome->trained.loss));
    start->n_ranks = (int)ranks;
    if (layers != job->model->config.n_layers || floats != job->lora.n_floats)
        return BL_FAIL(BL_ECHECKPOINT,
                       "%s: it holds %lld layers of %lld LoRA weights, this run has %lld of %lld",
                       start->dir, (long long)layers, (long long)floats,
                       (long long)job->model->config.n_layers, (long long)job->lora.n_floats);
    BL_TRY(list_differences(training, state, &differences));
    bl_status st = BL_OK;
    if (differences[0] != '\0') {
        start->is_saved = false;
        if (job->config->allow_resume_mismatch)
            bl_log_warning("resuming %s although this run differs, so not bit-identical: %s",
                           start->dir, differences);
        else
            st = BL_FAIL(BL_ECHECKPOINT,
                         "%s was made by another run: %s (allow_resume_mismatch true resumes it, "
                         "not bit-identically)",
                         start->dir, differences);
    }
    free(differences);
    return st;
}

static bl_status find_checkpoint(bl_training *training, json_t **state)
{
    const bl_train_config *c = training->job.config;
    const char *folder = training->checkpoint_dir;
    bl_start *start = &training->start;

    if (bl_train_config_resume(c) == BL_RESUME_PATH) {
        start->dir = strdup(c->resume_from_checkpoint);
        if (!start->dir) return BL_FAIL(BL_ENOMEM, "a path");
        return bl_checkpoint_verify(start->dir, &start->step, state);
    }
    BL_TRY(bl_checkpoint_latest(folder, &start->dir, &start->step, state));
    start->is_saved = start->dir != NULL;
    if (start->dir) return BL_OK;
    int64_t *steps;
    size_t n_steps;
    bl_error reason; /* why the last of them was passed over */
    bl_error_save(&reason, BL_ECHECKPOINT);
    BL_TRY(bl_checkpoint_list(folder, &steps, &n_steps));
    free(steps);
    if (n_steps == 0) return BL_OK;
    return BL_FAIL(BL_ECHECKPOINT,
                   "%s: all %zu checkpoints are damaged (%.600s); overwrite_output_dir true "
                   "starts over and deletes them",
                   folder, n_steps, reason.text);
}

/* Of an explicit older checkpoint: what becomes of those after it. */
static bl_status warn_of_newer(const bl_training *training)
{
    const bl_start *start = &training->start;
    int64_t *steps, n_newer = 0;
    size_t n_steps;

    BL_TRY(bl_checkpoint_list(training->checkpoint_dir, &steps, &n_steps));
    while ((size_t)n_newer < n_steps && steps[n_newer] > start->step) n_newer++;
    if (n_newer > 0 && training->job.config->save_total_limit > 0)
        bl_log_warning(
            "%s: the next save removes the checkpoints after step %lld, step-%lld to step-%lld",
            training->checkpoint_dir, (long long)start->step, (long long)steps[n_newer - 1],
            (long long)steps[0]);
    else if (n_newer > 0)
        bl_log_warning("%s: the checkpoints after step %lld, step-%lld to step-%lld, stay "
                       "(save_total_limit 0): resume_from_checkpoint true takes the highest step",
                       training->checkpoint_dir, (long long)start->step,
                       (long long)steps[n_newer - 1], (long long)steps[0]);
    free(steps);
    return BL_OK;
}

static bl_status choose_start(bl_training *training, bl_outcome *outcome)
{
    const bl_train_config *c = training->job.config;
    bl_start *start = &training->start;
    json_t *state = NULL;
    bool holds;

    if (bl_train_config_resume(c) != BL_RESUME_NO) {
        bl_status st = find_checkpoint(training, &state);
        bool is_found = st == BL_OK && start->dir;
        if (is_found) st = check_state(training, state, outcome);
        /* What a key of another version of Ballast, or a missing one, is here. */
        if (is_found && (st == BL_EUSAGE || st == BL_EINPUT))
            st = bl_error_prefix(BL_ECHECKPOINT, "checkpoint");
        if (st == BL_OK && start->dir) st = bl_machine_compare(&training->job, start->dir, state);
        json_decref(state);
        if (st != BL_OK) return st;
        if (start->dir) {
            bl_log_info("resuming %s after step %lld", start->dir, (long long)start->step);
            return bl_train_config_resume(c) == BL_RESUME_PATH ? warn_of_newer(training) : BL_OK;
        }
        bl_log_info("%s has no checkpoint to resume: starting over", c->output_dir);
        start->step = 0;
        start->starts_over = true;
        return BL_OK;
    }
    BL_TRY(holds_a_run(c, &holds));
    start->starts_over = holds;
    if (holds && !c->overwrite_output_dir)
        return BL_FAIL(BL_EUSAGE,
                       "output_dir %s holds a run already: set resume_from_checkpoint: true to go "
                       "on with it, or "
                       "overwrite_output_dir: true to lose it",
                       c->output_dir);
    return BL_OK;
}

/* The part of the process that rank 0 belongs to: others neither look into output_dir nor change it. */
static bl_status prepare_folder(bl_training *training, bl_outcome *outcome)
{
    const bl_job *job = &training->job;
    int64_t free_bytes;

    BL_TRY(bl_checkpoint_clean(training->checkpoint_dir));
    BL_TRY(choose_start(training, outcome));
    BL_TRY(bl_dir_free_bytes(job->config->output_dir, &free_bytes));
    if (training->start.starts_over) BL_TRY(visit_old_run(job->config, &free_bytes));
    if (free_bytes >= checkpoint_bytes(job)) return BL_OK;
    return BL_FAIL(BL_ELIMIT, "%s: a checkpoint takes %lld bytes, the disk has %lld",
                   job->config->output_dir, (long long)checkpoint_bytes(job),
                   (long long)free_bytes);
}

bl_status bl_training_prepare_resume(bl_training *training, bl_outcome *outcome)
{
    bl_job *job = &training->job;

    training->start.evaluated_step = -1;
    BL_TRY(bl_path_join(job->config->output_dir, "checkpoints", &training->checkpoint_dir));
    if (job->topology.first_here == 0) BL_TRY(prepare_folder(training, outcome));
    return job->launch ? bl_job_share_start(job, &training->start) : BL_OK;
}
