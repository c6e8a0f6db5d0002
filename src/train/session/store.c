/* SPDX-License-Identifier: Apache-2.0 */
/* store.c -- an adapter's files: PEFT's, and states in the format of a run's checkpoints
 * (rank/save.c), without a log and without data. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/checkpoint.h"
#include "train/session/session_internal.h"
#include "train/training_internal.h"

static const char config_name[] = "config.yaml";

/* The adapter's file in `dir`, and its name. */
static bl_status write_shard(bl_session_adapter *a, const char *dir, char name[BL_SHARD_NAME_BYTES])
{
    char *path;

    bl_trained_shard_name(0, 1, name);
    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = bl_trained_state_write_shard(a->rank.state, path);
    free(path);
    return st;
}

/* ---- PEFT ---- */

static bl_status export(bl_session_adapter *a, const char *dir, const char *shards)
{
    const bl_job *job = &a->job;
    char name[BL_SHARD_NAME_BYTES];

    BL_TRY(bl_tree_remove(shards));
    BL_TRY(bl_dir_create(shards));
    BL_TRY(write_shard(a, shards, name));
    return bl_adapter_export_shards(&job->lora, &job->modules, &job->model->config, shards, 1, dir,
                                    job->config->model_name_or_path, false);
}

static bl_status run_save_weights(session_request *r)
{
    const char *dir = r->user;
    char *shards;
    bl_error error;

    BL_TRY(bl_dir_create(dir));
    BL_TRY(bl_path_join(dir, ".ballast-state.tmp", &shards));
    bl_status st = export(r->adapter, dir, shards);
    bl_error_save(&error, st);
    (void)bl_tree_remove(shards);
    free(shards);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

static bl_status check_dir(const char *dir)
{
    return dir && *dir ? BL_OK : BL_FAIL(BL_EUSAGE, "dir is not given");
}

bl_status bl_session_save_weights(bl_session_adapter *a, const char *dir)
{
    session_request r = {.adapter = a, .run = run_save_weights, .user = (void *)dir};

    BL_TRY(check_dir(dir));
    return train_session_submit(a->session, &r);
}

/* ---- states ---- */

static bl_status add_config(const bl_session_adapter *a, bl_checkpoint *saving)
{
    char *path;

    BL_TRY(bl_path_join(bl_checkpoint_path(saving), config_name, &path));
    bl_status st = bl_train_config_write_resolved(a->config, path);
    free(path);
    return st == BL_OK ? bl_checkpoint_add_file(saving, config_name) : st;
}

static bl_status describe(const bl_session_adapter *a, json_t **out)
{
    const bl_job *job = &a->job;
    json_t *state = json_pack("{s:I, s:i, s:I, s:I}", "step", (json_int_t)a->n_updates, "ranks", 1,
                              "n_layers", (json_int_t)job->model->config.n_layers,
                              "floats_per_layer", (json_int_t)job->lora.n_floats);

    *out = state;
    if (!state) return BL_FAIL(BL_ENOMEM, "description of a state");
    BL_TRY(bl_job_describe_identity(job, a->rank.weights->checksum, state));
    return bl_products_record(job, state);
}

static bl_status fill_state(bl_session_adapter *a, bl_checkpoint *saving, json_t **state)
{
    char name[BL_SHARD_NAME_BYTES];

    BL_TRY(write_shard(a, bl_checkpoint_path(saving), name));
    BL_TRY(bl_checkpoint_add_file(saving, name));
    BL_TRY(add_config(a, saving));
    BL_TRY(bl_job_add_adapter(&a->job, saving));
    return describe(a, state);
}

static bl_status save(bl_session_adapter *a, const char *dir)
{
    bl_checkpoint *saving;
    json_t *state = NULL;
    bl_error error;

    BL_TRY(bl_rank_verify_base(&a->rank));
    BL_TRY(bl_checkpoint_begin(dir, a->n_updates, bl_job_checkpoint_bytes(&a->job), &saving));
    bl_status st = fill_state(a, saving, &state);
    bl_error_save(&error, st);
    if (st == BL_OK)
        st = bl_checkpoint_commit(saving, state);
    else
        bl_checkpoint_abort(saving);
    json_decref(state);
    return error.status == BL_OK ? st : bl_error_restore(&error);
}

static bl_status run_save_state(session_request *r)
{
    bl_session_adapter *a = r->adapter;
    const char *dir = r->user;
    bl_dir_lock *lock;

    if (a->n_calls > 0)
        return BL_FAIL(BL_EUSAGE,
                       "save_state: gradients of %lld forward_backward calls wait for optim_step, "
                       "and a state does not have them",
                       (long long)a->n_calls);
    BL_TRY(bl_dir_create(dir));
    BL_TRY(bl_dir_lock_acquire(dir, &lock));
    bl_status st = save(a, dir);
    bl_dir_lock_release(lock);
    return st;
}

bl_status bl_session_save_state(bl_session_adapter *a, const char *dir)
{
    session_request r = {.adapter = a, .run = run_save_state, .user = (void *)dir};

    BL_TRY(check_dir(dir));
    return train_session_submit(a->session, &r);
}

/* ---- load ---- */

typedef struct loading {
    const char *dir;
    char *path; /* of the checkpoint */
    json_t *state;
    bl_session_adapter *made;
} loading;

static bl_status list_differences(const bl_session *s, const loading *l, bl_differences *d)
{
    bl_job job = s->job; /* a state has no data */
    bl_start start = {0};
    bool differs;
    char *path;

    job.identity.train = job.identity.validation = 0;
    BL_TRY(bl_job_list_identity(&job, l->state, &start, d));
    if (start.has_weights && start.weights != s->rank->weights->checksum)
        bl_differences_add(d, BL_DIFFERENCE_MODEL, "the model's weights differ");
    BL_TRY(bl_path_join(l->path, config_name, &path));
    bl_status st = bl_train_config_compare_session(s->config, path, d->all, &differs);
    free(path);
    d->is_refused |= differs;
    return st;
}

static bl_status compare(const bl_session *s, const loading *l)
{
    char *all = NULL, *refused = NULL;
    size_t n_all, n_refused;
    bl_differences d = {.config = s->config,
                        .all = open_memstream(&all, &n_all),
                        .refused = open_memstream(&refused, &n_refused)};

    bl_status st = d.all && d.refused ? list_differences(s, l, &d)
                                      : BL_FAIL(BL_ENOMEM, "differences of a state");
    if (d.all) fclose(d.all);
    if (d.refused) fclose(d.refused);
    if (st == BL_OK && d.is_refused)
        st = BL_FAIL(BL_ECHECKPOINT, "%s was made over another base: %.*s", l->path,
                     (int)bl_max_i64(0, (int64_t)n_all - 2), all);
    free(all);
    free(refused);
    return st;
}

static bl_status load(bl_session *s, loading *l)
{
    bl_train_config *config;
    int64_t step;
    char *path;

    BL_TRY(bl_checkpoint_latest(l->dir, &l->path, &step, &l->state));
    if (!l->path) return BL_FAIL(BL_ECHECKPOINT, "%s: has no state", l->dir);
    BL_TRY(compare(s, l));
    BL_TRY(bl_products_compare(&s->job, l->path, l->state));
    BL_TRY(bl_path_join(l->path, config_name, &path));
    bl_status st = bl_train_config_continue_adapter(s->config, path, l->path, &config);
    free(path);
    BL_TRY(st);
    BL_TRY(train_session_create_adapter(s, config, l->path, &l->made));
    l->made->n_updates = step;
    return BL_OK;
}

static bl_status run_load(session_request *r)
{
    loading *l = r->user;

    bl_status st = load(r->session, l);
    json_decref(l->state);
    free(l->path);
    return st;
}

bl_status bl_session_load(bl_session *s, const char *dir, bl_session_adapter **out)
{
    loading l = {.dir = dir};
    session_request r = {.run = run_load, .user = &l};

    *out = NULL;
    BL_TRY(check_dir(dir));
    BL_TRY(train_session_submit(s, &r));
    *out = l.made;
    return BL_OK;
}
