/* SPDX-License-Identifier: Apache-2.0 */
/* save.c -- training checkpoints: their content, and how all ranks write one together. start.c: how
 * one is resumed.
 *
 *   checkpoints/step-N/state-RRRRR-of-NNNNN.safetensors   a rank's shard: trained/checkpoint.c
 *   checkpoints/step-N/adapter_model.safetensors,
 *                      adapter_config.json                the adapter after N steps, made from the
 *                                                         shards by rank 0; none of a run that
 *                                                         trains all weights
 *   checkpoints/step-N/config.yaml                        the resolved configuration
 *   checkpoints/step-N/manifest.json                      sizes and checksums; "state": step,
 *                                                         ranks, layout, fingerprints, log length
 *
 * A checkpoint is written in two parts. In full fine-tuning both are behind the steps
 * (bl_trained_state_begin_shard): the sum over ranks that begins each round counts the ranks that
 * have done part 1, and part 2 begins when all have. LoRA's parts are done before the next step.
 *
 *   1  each rank: its file, durable, and the file's checksum
 *   2  rank 0: the manifest, the rename, and bl_checkpoint_prune
 *
 * The next save, the end of the run and a stop wait for both.
 *
 * Nothing else is state: the order of rows and dropout are functions of (seed, step, sample,
 * position). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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

/* The path of the rank's file in the checkpoint that is written; the caller frees it. */
static bl_status find_path(const bl_trainer *t, int64_t step, char **path)
{
    char name[BL_SHARD_NAME_BYTES], *folder = NULL;

    bl_trained_shard_name(t->rank->index, t->job->topology.n_ranks, name);
    BL_TRY(bl_checkpoint_step_tmp_path(t->training->checkpoint_dir, step, &folder));
    bl_status st = bl_path_join(folder, name, path);
    /* Another host has made the folder, perhaps after this one has looked for those above it. */
    if (st == BL_OK && t->job->launch) (void)bl_dir_look_anew(folder);
    free(folder);
    return st;
}

/* Writes the rank's file, and describes it. */
static bl_status write_rank(bl_trainer *t, int64_t step, bl_checkpoint_file *out)
{
    char *path = NULL;

    bl_status st = find_path(t, step, &path);
    if (st == BL_OK) st = bl_trained_state_write_shard(t->rank->state, path);
    if (st == BL_OK) st = bl_checkpoint_describe_file(path, out);
    free(path);
    return bl_output_failure(t->folder, st);
}

int64_t bl_job_checkpoint_bytes(const bl_job *job)
{
    enum { SLACK_BYTES = 1 << 20 };
    int64_t n_bytes;

    if (!job->model->is_trained)
        n_bytes = bl_adapter_checkpoint_bytes(&job->lora, &job->model->config, &job->modules.set);
    else if (bl_trained_full_checkpoint_bytes(
                 &job->model->config, &job->model->trained, job->topology.n_ranks,
                 bl_train_config_moments(job->config), &n_bytes) != BL_OK)
        return INT64_MAX;
    return n_bytes + SLACK_BYTES;
}

int64_t bl_job_layer_floats(const bl_job *job)
{
    if (!job->model->is_trained) return job->lora.n_floats;
    return bl_arch_layer_weights(&job->model->config, BL_LAYER_DENSE); /* no mixtures are */
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

/* The manifest's state, without the files, as of now. */
static bl_status describe_all(const bl_trainer *t, int64_t step, json_t **out)
{
    int64_t metrics_bytes;

    BL_TRY(bl_metrics_sync(t->output->metrics, &metrics_bytes));
    json_t *state = describe(t, step, metrics_bytes);
    bl_status st = state ? bl_job_describe_identity(t->job, t->rank->weights->checksum, state)
                         : BL_FAIL(BL_ENOMEM, "description of a checkpoint");
    if (st == BL_OK) st = bl_products_record(t->job, state);
    *out = state;
    return st;
}

/* Begin and commit: rank 0's. */
static bl_status begin_save(bl_trainer *t, int64_t step)
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

/* After any outcome. */
static void clear_save(bl_trainer *t)
{
    json_decref(t->save.state);
    free(t->save.path);
    t->save.state = NULL;
    t->save.path = NULL;
    t->save.is_active = t->save.is_described = t->save.commits = false;
}

bl_status bl_trainer_describe_save(bl_trainer *t)
{
    t->save.is_described = true;
    t->save.best_step = t->job->config->load_best_model_at_end ? t->best.step : -1;
    if (!t->output) return BL_OK;
    return bl_output_failure(t->output, describe_all(t, t->save.step, &t->save.state));
}

static bl_status start_save(bl_trainer *t, int64_t step)
{
    clear_save(t);
    t->save.step = step;
    return t->output ? bl_output_failure(t->output, begin_save(t, step)) : BL_OK;
}

bl_status bl_job_add_adapter(const bl_job *job, bl_checkpoint *saving)
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

/* t->files[n_ranks]: the files that the ranks have written. */
static bl_status commit_save(const bl_trainer *t)
{
    const bl_job *job = t->job;
    const bl_saving *save = &t->save;
    bl_output *output = t->output;

    BL_TRY(bl_output_check_lock(output));
    for (int i = 0; i < job->topology.n_ranks; i++) {
        char name[BL_SHARD_NAME_BYTES];
        bl_trained_shard_name(i, job->topology.n_ranks, name);
        BL_TRY(bl_checkpoint_add_described(output->saving, name, &t->files[i]));
    }
    if (!job->model->is_trained) BL_TRY(bl_job_add_adapter(job, output->saving));
    bl_status st = bl_checkpoint_commit(output->saving, save->state);
    output->saving = NULL;
    if (st != BL_OK) return st;
    return bl_checkpoint_prune(t->training->checkpoint_dir, output->files, save->step,
                               save->best_step, job->config->save_total_limit);
}

/* ---- behind the steps ---- */

/* Runs when the rank's file is complete. */
static bl_status describe_rank(void *user)
{
    bl_trainer *t = user;
    return bl_output_failure(t->folder,
                             bl_checkpoint_describe_file(t->save.path, &t->files[t->rank->index]));
}

/* bl_trainer_work_fn, both; user: the trainer. */

static bl_status begin_file(void *user)
{
    bl_trainer *t = user;
    bl_status st = find_path(t, t->save.step, &t->save.path);

    if (st == BL_OK)
        st = bl_trained_state_begin_shard(t->rank->state, t->save.path, describe_rank, t);
    return bl_output_failure(t->folder, st);
}

static bl_status commit_work(void *user)
{
    bl_trainer *t = user;
    bl_status st = bl_output_failure(t->output, commit_save(t));

    bl_error_save(&t->save.error, st);
    atomic_store(&t->save.is_committed, true);
    return st;
}

static bl_status commit_task(bl_stream *stream, const void *args)
{
    bl_trainer *const *t = args;

    (void)stream;
    bl_file_note_progress(&(*t)->save.progress);
    (void)commit_work(*t); /* finish returns its failure */
    bl_file_note_progress(NULL);
    return BL_OK;
}

/* The stream that writes behind the steps; NULL: all is written before the next step. */
static bl_stream *behind_of(const bl_trainer *t)
{
    return bl_trained_state_behind(t->rank->state);
}

static bl_status await_stream(const bl_trainer *t)
{
    return behind_of(t) ? bl_stream_synchronize(behind_of(t)) : BL_OK;
}

static bl_status begin_commit(bl_trainer *t)
{
    t->save.commits = true;
    atomic_store(&t->save.is_committed, false);
    atomic_store(&t->save.progress.has_begun, false);
    if (!behind_of(t)) return bl_trainer_work_on_files(t, t->output ? commit_work : NULL, t);
    return t->output ? bl_stream_call(behind_of(t), commit_task, &t, sizeof t) : BL_OK;
}

/* ---- a slow disk ---- */

enum { POLL_NS = 20 * 1000 * 1000 };

/* Fraction of step_deadline_s: for a shorter stall, collectives on the device may wait. */
static const double STALL_PART = 0.125;

/* Reading the file for its checksum, after the last write, may take as long as writing it. */
static bl_status check_progress(const bl_trainer *t, const bl_trained_shard_progress *p)
{
    double deadline_s = t->config->step_deadline_s;
    double limit_s = p->left_s > 0 ? deadline_s : deadline_s + p->writing_s;

    if (deadline_s <= 0 || p->idle_s <= limit_s) return BL_OK;
    return BL_FAIL(BL_EIO,
                   "%s: rank %d has written nothing for %.0f s (step_deadline_s %g): the disk is "
                   "slow or hangs; use a faster one, or a larger step_deadline_s",
                   t->save.path, t->rank->index, p->idle_s, deadline_s);
}

/* bl_host_comm_is_busy_fn, all three; user: the trainer. */

static bl_status look_at_file(bl_trainer *t, bool is_busy, const bl_trained_shard_progress *p)
{
    if (!is_busy) return BL_OK;
    BL_TRY(check_progress(t, p));
    nanosleep(&(struct timespec){0, POLL_NS}, NULL);
    return BL_OK;
}

static bl_status look_whether_it_stalls(void *user, bool *is_busy)
{
    bl_trainer *t = user;
    bl_trained_shard_progress p = bl_trained_state_shard_progress(t->rank->state);

    *is_busy = !p.has_waiting && p.left_s > STALL_PART * t->config->step_deadline_s;
    return look_at_file(t, *is_busy, &p);
}

static bl_status look_whether_it_is_done(void *user, bool *is_busy)
{
    bl_trainer *t = user;
    bl_trained_shard_progress p = bl_trained_state_shard_progress(t->rank->state);

    *is_busy = !bl_trained_state_shard_is_done(t->rank->state);
    return look_at_file(t, *is_busy, &p);
}

static bl_status look_at_commit(void *user, bool *is_busy)
{
    bl_trainer *t = user;

    *is_busy = !bl_trainer_save_is_done(t);
    if (!*is_busy) return BL_OK;
    BL_TRY(bl_trainer_check_files(t, &t->save.progress));
    nanosleep(&(struct timespec){0, POLL_NS}, NULL);
    return BL_OK;
}

bl_status bl_trainer_await_save(bl_trainer *t)
{
    if (!t->save.is_active || t->save.commits || t->steps_done <= t->save.step ||
        t->config->step_deadline_s <= 0)
        return BL_OK;
    return bl_host_comm_wait(&t->rank->host_comm, look_whether_it_stalls, t);
}

static bl_status await_file(bl_trainer *t)
{
    if (bl_trained_state_shard_progress(t->rank->state).has_waiting)
        BL_TRY(bl_trained_full_flush(t->rank->state));
    return bl_host_comm_wait(&t->rank->host_comm, look_whether_it_is_done, t);
}

/* ---- both parts ---- */

/* Collective: waits for part 1, and begins part 2. */
static bl_status collect(bl_trainer *t)
{
    bl_rank *r = t->rank;

    BL_TRY(bl_trained_state_end_shard(r->state));
    if (!t->save.is_described) BL_TRY(bl_trainer_describe_save(t)); /* stopped in an evaluation */
    BL_TRY(bl_host_comm_gather(&r->host_comm, t->files, sizeof *t->files));
    return begin_commit(t);
}

/* Waits for part 2. */
static bl_status finish(bl_trainer *t)
{
    bl_status st = BL_OK;

    if (t->output) {
        st = await_stream(t);
        if (st == BL_OK && t->save.error.status != BL_OK) st = bl_error_restore(&t->save.error);
    }
    if (st == BL_OK) t->saved_step = t->save.step;
    clear_save(t);
    return st;
}

bool bl_trainer_save_is_done(const bl_trainer *t)
{
    if (!t->save.is_active || !t->save.is_described) return false;
    if (!t->save.commits) return bl_trained_state_shard_is_done(t->rank->state);
    return !t->output || atomic_load(&t->save.is_committed) ||
           (behind_of(t) && bl_stream_status(behind_of(t)) != BL_OK);
}

bl_status bl_trainer_advance_save(bl_trainer *t)
{
    return t->save.commits ? finish(t) : collect(t);
}

bl_status bl_trainer_end_save(bl_trainer *t)
{
    if (!t->save.is_active) return BL_OK;
    BL_TRY(bl_host_comm_barrier(&t->rank->host_comm));
    atomic_store(&t->is_saving, true);
    if (!t->save.commits) {
        BL_TRY(await_file(t));
        BL_TRY(collect(t));
    }
    BL_TRY(bl_host_comm_wait(&t->rank->host_comm, look_at_commit, t));
    BL_TRY(finish(t));
    return bl_host_comm_barrier(&t->rank->host_comm);
}

void bl_trainer_drop_save(bl_trainer *t)
{
    if (t->save.is_active) {
        bl_trained_state_drop_shard(t->rank->state);
        (void)await_stream(t);
    }
    clear_save(t);
}

/* ---- a whole save ---- */

bl_status bl_trainer_begin_save(bl_trainer *t, int64_t step)
{
    BL_TRY(bl_trainer_end_save(t));
    if (t->saved_step == step) return BL_OK;
    BL_TRY(bl_stream_synchronize(t->rank->compute));
    BL_TRY(start_save(t, step));
    BL_TRY(bl_host_comm_barrier(&t->rank->host_comm));
    atomic_store(&t->is_saving, true);
    BL_TRY(behind_of(t) ? begin_file(t) : bl_trainer_work_on_files(t, begin_file, t));
    t->save.is_active = true;
    return BL_OK;
}

bl_status bl_trainer_save(bl_trainer *t, int64_t step)
{
    BL_TRY(bl_trainer_begin_save(t, step));
    if (!t->save.is_active) return BL_OK;
    BL_TRY(bl_trainer_describe_save(t));
    return behind_of(t) ? BL_OK : bl_trainer_end_save(t);
}

void bl_trainers_settle_save(bl_trainer *trainers)
{
    bl_trainer *first = &trainers[0];
    int n_ranks = first->job->topology.n_ranks;

    /* The next save reports a failure again. */
    if (first->save.is_active && first->save.commits) (void)finish(first);
    for (int i = 0; i < n_ranks; i++) bl_trainer_drop_save(&trainers[i]);
}

bl_status bl_trainers_save(bl_trainer *trainers, int64_t step)
{
    bl_trainer *first = &trainers[0];

    BL_TRY(start_save(first, step));
    BL_TRY(bl_trainer_describe_save(first));
    for (int i = 0; i < first->job->topology.n_ranks; i++)
        BL_TRY(write_rank(&trainers[i], step, &first->files[i]));
    return bl_output_failure(first->output, commit_save(first));
}
