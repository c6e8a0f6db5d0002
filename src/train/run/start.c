/* SPDX-License-Identifier: Apache-2.0 */
/* start.c -- where a training starts, and which files of output_dir may be removed.
 *
 * A name that the run will write, and that is there although no run in output_dir wrote it
 * (base/file_list.h), is exit 2 whatever the keys are: output.c for files, here for
 * checkpoints/step-N that are not before the start. Otherwise, by the files that runs in output_dir
 * wrote and the key that is true:
 *
 *   output_dir holds            neither   resume_from_checkpoint        overwrite_output_dir
 *   nothing, or an empty log    start     start                         start
 *   a log, nothing else         exit 2    start over                    start over
 *   result, no checkpoint       exit 2    exit 2                        start over
 *   a whole checkpoint          exit 2    resume the newest whole one   start over
 *   damaged checkpoints only    exit 2    exit 5                        start over
 *
 * The result is an adapter or a model.
 *
 * resume_from_checkpoint PATH resumes that checkpoint or is exit 5. To start over removes the files
 * that runs in output_dir wrote and nothing else: checkpoints one by one, never a directory that
 * may hold more. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "trained/choose.h"
#include "trained/peft.h"
#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "train/data/sampler.h"
#include "train/training_internal.h"

/* ---- files of earlier runs in output_dir ---- */

typedef struct traces {
    bool has_log, has_adapter, has_checkpoints; /* has_log: steps; has_adapter: or a model */
} traces;

static bl_status look_at(const bl_output *output, const bl_train_config *c, const char *name,
                         bool *found)
{
    struct stat info;
    char *path;

    BL_TRY(bl_path_join(c->output_dir, name, &path));
    *found = bl_file_list_has(output->files, path) && lstat(path, &info) == 0 && info.st_size > 0;
    free(path);
    return BL_OK;
}

static bl_status find_traces(const bl_training *training, const bl_output *output, traces *out)
{
    const bl_train_config *c = training->config;
    int64_t *steps;
    size_t n_steps;
    bool has_model;

    BL_TRY(look_at(output, c, BL_OUTPUT_METRICS, &out->has_log));
    BL_TRY(look_at(output, c, BL_OUTPUT_ADAPTER, &out->has_adapter));
    BL_TRY(look_at(output, c, BL_OUTPUT_MODEL, &has_model));
    out->has_adapter |= has_model;
    BL_TRY(bl_checkpoint_list_owned(training->checkpoint_dir, output->files, &steps, &n_steps));
    free(steps);
    out->has_checkpoints = n_steps > 0;
    return BL_OK;
}

typedef bl_status (*file_fn)(const char *path, int64_t *n_bytes);

static bl_status add_size(const char *path, int64_t *n_bytes)
{
    *n_bytes += bl_tree_bytes(path);
    return BL_OK;
}

static bl_status delete_file(const char *path, int64_t *n_bytes)
{
    (void)n_bytes;
    return bl_tree_remove(path);
}

/* Files of the old run in output_dir/runs. */
static bl_status for_old_events(const bl_train_config *c, const bl_output *output, file_fn f,
                                int64_t *n_bytes)
{
    char *dir, **names;
    size_t n_names;

    BL_TRY(bl_path_join(c->output_dir, BL_OUTPUT_RUNS, &dir));
    bl_status st = BL_OK;
    bool is_dir = false;
    if (bl_file_exists(dir)) st = bl_path_is_dir(dir, &is_dir);
    if (is_dir && (st = bl_dir_list(dir, &names, &n_names)) == BL_OK) {
        for (size_t i = 0; i < n_names && st == BL_OK; i++) {
            char *path;
            st = bl_path_join(dir, names[i], &path);
            if (st != BL_OK) break;
            if (bl_file_list_has(output->files, path)) st = f(path, n_bytes);
            free(path);
        }
        bl_names_free(names, n_names);
    }
    free(dir);
    return st;
}

/* Calls `f` for the files of the old run outside of checkpoints. The configuration is not among
 * them: it is replaced, and this run may have been started from it. Nor are the reference's sums,
 * which may be this run's, too. */
static bl_status for_old_files(const bl_train_config *c, const bl_output *output, file_fn f,
                               int64_t *n_bytes)
{
    bool is_last = false;

    for (size_t i = 0; !is_last; i++) {
        const char *name = bl_output_name(i);
        char *path;
        is_last = name == NULL;
        if (is_last) name = BL_OUTPUT_MODEL;
        if (!strcmp(name, BL_OUTPUT_CONFIG) || !strcmp(name, BL_OUTPUT_REFERENCE)) continue;
        BL_TRY(bl_path_join(c->output_dir, name, &path));
        bl_status st = bl_file_list_has(output->files, path) ? f(path, n_bytes) : BL_OK;
        free(path);
        BL_TRY(st);
    }
    return for_old_events(c, output, f, n_bytes);
}

static bl_status add_step_size(const char *dir, int64_t step, int64_t *n_bytes)
{
    char *path;
    BL_TRY(bl_text_format(&path, "%s/step-%" PRId64, dir, step));
    *n_bytes += bl_tree_bytes(path);
    free(path);
    return BL_OK;
}

/* Adds the bytes that delete_old_run would free. Changes nothing on disk. */
static bl_status add_old_run_size(const bl_training *training, const bl_output *output,
                                  int64_t *n_bytes)
{
    int64_t *steps;
    size_t n_steps;

    BL_TRY(bl_checkpoint_list_owned(training->checkpoint_dir, output->files, &steps, &n_steps));
    bl_status st = BL_OK;
    for (size_t i = 0; i < n_steps && st == BL_OK; i++)
        st = add_step_size(training->checkpoint_dir, steps[i], n_bytes);
    free(steps);
    BL_TRY(st);
    return for_old_files(training->config, output, add_size, n_bytes);
}

/* Newest checkpoints first: a crash leaves older ones. */
static bl_status delete_old_run(const bl_training *training, const bl_output *output)
{
    int64_t *steps;
    size_t n_steps;

    BL_TRY(bl_checkpoint_list_owned(training->checkpoint_dir, output->files, &steps, &n_steps));
    bl_status st = BL_OK;
    for (size_t i = 0; i < n_steps && st == BL_OK; i++)
        st = bl_checkpoint_remove(training->checkpoint_dir, steps[i]);
    free(steps);
    BL_TRY(st);
    return for_old_files(training->config, output, delete_file, NULL);
}

bl_status bl_training_start_over(const bl_training *training, const bl_output *output)
{
    return training->start.starts_over ? delete_old_run(training, output) : BL_OK;
}

/* Checkpoints of others that a save of this run would replace. */
static bl_status check_later_steps(const bl_training *training, const bl_output *output)
{
    const bl_start *start = &training->start;
    bl_status st = bl_checkpoint_check_others(training->checkpoint_dir, output->files,
                                              start->dir ? start->step : -1);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "output_dir");
}

/* ---- a checkpoint to resume ---- */

/* Whether the steps that are done had the learning rates that this run would have given them. */
static bool is_same_course(const bl_training *training, const bl_train_config *before)
{
    const bl_train_config *now = training->config;
    int64_t n = training->job.data.train.n, total_before = bl_train_total_steps(before, n),
            total = bl_train_total_steps(now, n);

    if (training->start.step > total) return false;
    for (int64_t step = 0; step < training->start.step; step++)
        if (bl_train_learning_rate(before, step, total_before) !=
            bl_train_learning_rate(now, step, total))
            return false;
    return true;
}

/* `line` is "key: old -> new". Keys that act through the learning rate alone are compared by it. */
static void add_key(const char *line, bool is_same_rate, bl_differences *d)
{
    static const char *const of_rate[] = {"learning_rate", "lr_scheduler_type", "warmup_ratio",
                                          "warmup_steps",  "num_train_epochs",  "max_steps"};
    char key[64];

    snprintf(key, sizeof key, "%.*s", (int)strcspn(line, ":"), line);
    for (size_t i = 0; i < BL_COUNT(of_rate); i++)
        if (is_same_rate && strcmp(key, of_rate[i]) == 0) return;
    bl_differences_add(d, key, "%.*s", (int)strcspn(line, "\n"), line);
}

/* Weights and moments are those of the chosen tensors: nothing makes them another choice's, also
 * where all sizes are the same. */
static bl_status check_trained(const bl_training *training, const bl_train_config *before)
{
    const bl_model *model = training->job.model;
    const char *dir = training->start.dir;
    bl_trained_set set;

    if (!model->is_trained || !bl_train_config_is_full(before)) return BL_OK;
    bl_status st = bl_adapter_choose_trained(before, &model->config, &set);
    if (st != BL_OK) return bl_error_prefix(st == BL_EUSAGE ? BL_ECHECKPOINT : st, "%s", dir);
    bool is_same = memcmp(set.tensor, model->trained.tensor,
                          (size_t)bl_arch_tensor_count(&model->config)) == 0;
    bl_trained_free(&set);
    if (is_same) return BL_OK;
    return BL_FAIL(BL_ECHECKPOINT,
                   "%s has weights and moments of other tensors than trainable_modules and freeze "
                   "choose now: give both keys as they were, or start a new run in another "
                   "output_dir",
                   dir);
}

static bool is_same_set(const bl_model_config *config, const bl_trained_set *a,
                        const bl_trained_set *b)
{
    if (a->n_tensors != b->n_tensors) return false;
    return a->n_tensors == 0 ||
           memcmp(a->tensor, b->tensor, (size_t)bl_arch_tensor_count(config)) == 0;
}

/* Of the adapter in a checkpoint; false: it has none, as those of earlier versions. */
static bl_status read_modules(const bl_training *training, bool *is_there, bl_lora_options *lora,
                              bl_saved_modules *saved)
{
    const bl_model_config *config = &training->job.model->config;
    bl_peft_modules modules = bl_model_peft_modules(config);
    bl_peft_config peft;
    char *path;

    BL_TRY(bl_path_join(training->start.dir, BL_OUTPUT_ADAPTER_CONFIG, &path));
    *is_there = bl_file_exists(path);
    free(path);
    if (!*is_there) return BL_OK;
    bl_status st = bl_peft_load_config(training->start.dir, &modules, config->n_layers, &peft);
    if (st == BL_OK) st = bl_saved_modules_of_peft(&peft, config, training->start.dir, saved);
    if (st == BL_OK) bl_lora_options_of_peft(&peft, lora);
    return st == BL_EINPUT ? BL_ECHECKPOINT : st;
}

/* Those of routed experts: other names may give these other ranks. */
static bool is_same_ranks(const bl_lora_layout *layout, const bl_lora_options *options)
{
    for (int p = 0; p < layout->arch->n_projections; p++)
        if (options->own_r[p] > 0 && layout->r[p] != options->own_r[p]) return false;
    return true;
}

/* The same of LoRA terms and modules_to_save. */
static bl_status check_modules(const bl_training *training, const bl_train_config *before)
{
    const bl_job *job = &training->job;
    bl_saved_modules saved;
    bl_lora_options lora;
    bool is_there;

    if (job->model->is_trained || bl_train_config_is_full(before)) return BL_OK;
    BL_TRY(read_modules(training, &is_there, &lora, &saved));
    if (!is_there) return BL_OK;
    bool is_same = is_same_set(&job->model->config, &saved.set, &job->modules.set) &&
                   memcmp(lora.target, job->lora.options.target, sizeof lora.target) == 0 &&
                   memcmp(lora.table, job->lora.options.table, sizeof lora.table) == 0 &&
                   is_same_ranks(&job->lora, &lora);
    bl_saved_modules_free(&saved);
    if (is_same) return BL_OK;
    return BL_FAIL(BL_ECHECKPOINT,
                   "%s has weights and moments of other modules than lora_target_modules and "
                   "modules_to_save choose now: give both keys as they were, or start a new run in "
                   "another output_dir",
                   training->start.dir);
}

/* The keys, the data and the model. */
static bl_status list_differences(bl_training *training, const json_t *state, bl_differences *d)
{
    bl_train_config *before = NULL;
    char *path = NULL, *keys = NULL;
    bl_status st;

    BL_TRY(bl_path_join(training->start.dir, "config.yaml", &path));
    BL_TRY_GOTO(st, done, bl_train_config_read_back(path, &before));
    BL_TRY_GOTO(st, done, check_trained(training, before));
    BL_TRY_GOTO(st, done, check_modules(training, before));
    BL_TRY_GOTO(st, done, bl_train_config_diff(before, training->config, BL_EFFECT_RESULT, &keys));
    bool is_same_rate = is_same_course(training, before);
    for (const char *line = keys; *line; line += strcspn(line, "\n") + 1)
        add_key(line, is_same_rate, d);
    st = bl_job_list_identity(&training->job, state, &training->start, d);
done:
    bl_train_config_free(before);
    free(keys);
    free(path);
    return st;
}

/* BL_ECHECKPOINT: something differs and is not allowed by its name. fits: the weights have the
 * checkpoint's sizes. */
static bl_status check_differences(bl_training *training, const json_t *state, bool fits)
{
    bl_start *start = &training->start;
    char *all = NULL, *refused = NULL;
    size_t n_all = 0, n_refused = 0;
    bl_differences d = {.config = training->config,
                        .all = open_memstream(&all, &n_all),
                        .refused = open_memstream(&refused, &n_refused)};
    bl_status st = d.all && d.refused ? list_differences(training, state, &d)
                                      : BL_FAIL(BL_ENOMEM, "the differences of two runs");

    if (d.all && fclose(d.all) != 0 && st == BL_OK) st = BL_FAIL(BL_ENOMEM, "differences");
    if (d.refused && fclose(d.refused) != 0 && st == BL_OK) st = BL_FAIL(BL_ENOMEM, "differences");
    if (st == BL_OK && n_all > 0) {
        all[n_all - 2] = '\0'; /* the last "; " */
        start->is_saved = false;
        if (d.is_refused && !fits)
            st = BL_FAIL(BL_ECHECKPOINT,
                         "%s was made by another run: %s (its weights have other sizes: it cannot "
                         "be resumed)",
                         start->dir, all);
        else if (d.is_refused)
            st = BL_FAIL(BL_ECHECKPOINT,
                         "%s was made by another run: %s (allow_resume_mismatch: [%s] resumes it, "
                         "not bit-identically)",
                         start->dir, all, refused);
        else
            bl_log_warning("resuming %s although this run differs, so not bit-identical: %s",
                           start->dir, all);
    }
    free(all);
    free(refused);
    return st;
}

static const bl_best NO_BEST = {.step = -1};

/* Checkpoints before any evaluation, and of earlier versions, have none. */
static bl_status read_best(const char *where, const json_t *state, bl_best *best)
{
    *best = NO_BEST;
    BL_TRY(bl_json_get_int(where, state, "best_step", BL_JSON_OPTIONAL, 0, INT64_MAX, &best->step));
    BL_TRY(
        bl_json_get_real(where, state, "best_loss", BL_JSON_OPTIONAL, -1e300, 1e300, &best->loss));
    return bl_json_get_int(where, state, "stale_evaluations", BL_JSON_OPTIONAL, 0, INT64_MAX,
                           &best->n_stale);
}

/* The rungs that the run has reached, if there are any. */
static bl_status read_rungs(const char *where, const json_t *state, bl_rungs *rungs)
{
    const json_t *losses = json_object_get(state, "rung_losses");

    *rungs = (bl_rungs){.n = (int)json_array_size(losses)};
    if (rungs->n > BL_MAX_RUNGS)
        return BL_FAIL(BL_ECHECKPOINT, "%s: %d rungs, at most %d are known", where, rungs->n,
                       BL_MAX_RUNGS);
    for (int i = 0; i < rungs->n; i++)
        rungs->loss[i] = json_number_value(json_array_get(losses, (size_t)i));
    return BL_OK;
}

/* Whether output_dir has the checkpoint of that step and loss: another run from an earlier step may
 * have replaced it, and save_total_limit removed it. */
static bl_status find_best(const bl_training *training, const bl_best *best, bool *is_there)
{
    char *dir = NULL;
    json_t *state = NULL;
    bl_best found = NO_BEST;

    BL_TRY(bl_text_format(&dir, "%s/step-%" PRId64, training->checkpoint_dir, best->step));
    bl_status st = bl_checkpoint_verify(dir, NULL, &state);
    if (st == BL_OK) st = read_best(dir, state, &found);
    *is_there = st == BL_OK && found.step == best->step && found.loss == best->loss;
    json_decref(state);
    free(dir);
    return st == BL_ECHECKPOINT || st == BL_EINPUT ? BL_OK : st;
}

/* The best step's checkpoint is needed at the end, if it is not the one that is resumed. */
static bl_status check_best(bl_training *training)
{
    bl_start *start = &training->start;
    int64_t step = start->best.step;
    bool is_there;

    if (!training->config->load_best_model_at_end || step < 0 || step == start->step) return BL_OK;
    BL_TRY(find_best(training, &start->best, &is_there));
    if (is_there) return BL_OK;
    bl_log_warning("%s/step-%" PRId64 ", the checkpoint of the lowest validation loss so far, is "
                   "missing or damaged: load_best_model_at_end takes the best of the evaluations "
                   "from here on",
                   training->checkpoint_dir, step);
    start->best = NO_BEST;
    return BL_OK;
}

static bl_status check_state(bl_training *training, const json_t *state, bl_outcome *outcome)
{
    const bl_job *job = &training->job;
    bl_start *start = &training->start;
    int64_t ranks, layers, floats;

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
    if (outcome->base.loss == BL_LOSS_UNKNOWN) outcome->base.loss = NAN;
    BL_TRY(bl_json_get_real(start->dir, state, "validation_loss", BL_JSON_REQUIRED, -1e300, 1e300,
                            &outcome->trained.loss));
    BL_TRY(read_best(start->dir, state, &start->best));
    BL_TRY(read_rungs(start->dir, state, &start->rungs));
    start->n_ranks = (int)ranks;
    bool fits = layers == job->model->config.n_layers && floats == bl_job_layer_floats(job);
    BL_TRY(check_differences(training, state, fits));
    if (!fits)
        return BL_FAIL(BL_ECHECKPOINT,
                       "%s: it holds %lld layers of %lld %s weights, this run has %lld of %lld",
                       start->dir, (long long)layers, (long long)floats,
                       job->model->is_trained ? "trained" : "LoRA",
                       (long long)job->model->config.n_layers, (long long)bl_job_layer_floats(job));
    if (start->other_validation) {
        start->evaluated_step = -1;
        start->best = NO_BEST;
        start->rungs.n = 0;
        outcome->base.loss = NAN;
    }
    return check_best(training);
}

static bl_status find_checkpoint(bl_training *training, const bl_output *output, json_t **state)
{
    const bl_train_config *c = training->config;
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
    BL_TRY(bl_checkpoint_list_owned(folder, output->files, &steps, &n_steps));
    free(steps);
    if (n_steps == 0) return BL_OK;
    return BL_FAIL(BL_ECHECKPOINT,
                   "%s: all %zu checkpoints are damaged (%.600s); overwrite_output_dir true "
                   "starts over and deletes them",
                   folder, n_steps, reason.text);
}

/* Resuming an explicit older checkpoint: warns of the later ones. */
static bl_status warn_of_newer(const bl_training *training)
{
    const bl_start *start = &training->start;
    int64_t *steps, n_newer = 0;
    size_t n_steps;

    BL_TRY(bl_checkpoint_list(training->checkpoint_dir, &steps, &n_steps));
    while ((size_t)n_newer < n_steps && steps[n_newer] > start->step) n_newer++;
    if (n_newer > 0 && training->config->save_total_limit > 0)
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

static bl_status resume(bl_training *training, bl_output *output, const traces *found)
{
    const bl_train_config *c = training->config;
    bl_start *start = &training->start;
    json_t *state = NULL;

    bl_status st = find_checkpoint(training, output, &state);
    bool is_found = st == BL_OK && start->dir;
    if (is_found) st = check_state(training, state, &output->outcome);
    /* What a key of another version of Ballast, or a missing one, is here. */
    if (is_found && (st == BL_EUSAGE || st == BL_EINPUT))
        st = bl_error_prefix(BL_ECHECKPOINT, "checkpoint");
    if (st == BL_OK && start->dir) st = bl_products_compare(&training->job, start->dir, state);
    json_decref(state);
    if (st != BL_OK) return st;
    if (start->dir) {
        bl_log_info("resuming %s after step %lld", start->dir, (long long)start->step);
        return bl_train_config_resume(c) == BL_RESUME_PATH ? warn_of_newer(training) : BL_OK;
    }
    if (found->has_adapter)
        return BL_FAIL(
            BL_EUSAGE,
            "output_dir %s holds %s and no checkpoint to resume: use another output_dir, "
            "or overwrite_output_dir: true to delete it",
            c->output_dir, bl_train_config_is_full(c) ? "a model" : "an adapter");
    bl_log_info("%s has no checkpoint to resume: starting at step 0", c->output_dir);
    start->step = 0;
    start->starts_over = true;
    return BL_OK;
}

static bl_status choose_start(bl_training *training, bl_output *output)
{
    const bl_train_config *c = training->config;
    bl_start *start = &training->start;
    traces found;

    BL_TRY(find_traces(training, output, &found));
    if (bl_train_config_resume(c) != BL_RESUME_NO) return resume(training, output, &found);
    start->starts_over = found.has_log || found.has_adapter || found.has_checkpoints;
    if (start->starts_over && !c->overwrite_output_dir)
        return BL_FAIL(BL_EUSAGE,
                       "output_dir %s holds a run already: set resume_from_checkpoint: true to "
                       "resume it, or overwrite_output_dir: true to delete it",
                       c->output_dir);
    return BL_OK;
}

/* In the process of rank 0: others neither look into output_dir nor change it. */
static bl_status prepare_folder(bl_training *training, bl_output *output)
{
    const bl_job *job = &training->job;
    int64_t free_bytes, needed = bl_job_checkpoint_bytes(job);

    BL_TRY(bl_checkpoint_clean(training->checkpoint_dir, output->files));
    BL_TRY(choose_start(training, output));
    BL_TRY(check_later_steps(training, output));
    BL_TRY(bl_dir_free_bytes(job->config->output_dir, &free_bytes));
    if (training->start.starts_over) BL_TRY(add_old_run_size(training, output, &free_bytes));
    if (free_bytes >= needed) return BL_OK;
    return BL_FAIL(BL_ELIMIT, "%s: a checkpoint takes %lld bytes, the disk has %lld",
                   job->config->output_dir, (long long)needed, (long long)free_bytes);
}

bl_status bl_training_find_start(bl_training *training, bl_output *output)
{
    bl_job *job = &training->job;

    BL_TRY(bl_output_check_lock(output));
    training->start.evaluated_step = -1;
    training->start.best = NO_BEST;
    BL_TRY(bl_path_join(job->config->output_dir, BL_OUTPUT_CHECKPOINTS, &training->checkpoint_dir));
    if (job->topology.first_here > 0) return BL_OK;
    return bl_output_failure(output, prepare_folder(training, output));
}
