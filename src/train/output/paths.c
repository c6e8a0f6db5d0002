/* SPDX-License-Identifier: Apache-2.0 */
/* paths.c -- before a run writes anything: whether an output is also an input, or another output,
 * or not a file at all. Names do not decide that (links, "..", mounts): device and inode do, and
 * the resolved path of a file that does not exist yet.
 *
 *   written         dump_gradients, trace (a file per process), the names below in output_dir;
 *                   their NAME.tmp
 *   removed         everything in output_dir/checkpoints, and in output_dir/model where all weights
 *                   are trained
 *   not compared    offload_dir, and logging_dir or output_dir/runs: page files and event files are
 *                   new files with unique names
 *
 * output_dir/config.resolved.yaml may be the configuration itself: it is written to be read
 * back. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_kind.h"
#include "base/files.h"
#include "base/sizes.h"
#include "trained/state.h"
#include "train/trace.h"
#include "train/training_internal.h"

typedef struct place {
    const char *key;
    char *path, *full; /* as given; resolved */
    bool exists;
    dev_t device;
    ino_t inode;
} place;

typedef struct places {
    place *item;
    size_t n, capacity;
} places;

static const char OUTPUT_KEY[] = "output_dir", CONFIG_KEY[] = "the configuration",
                  RESUME_KEY[] = "resume_from_checkpoint";

/* Besides those of bl_output_name. */
static const char *const kept[] = {".ballast.lock", ".ballast-files"};

/* ---- places ---- */

static void places_free(places *list)
{
    for (size_t i = 0; i < list->n; i++) {
        free(list->item[i].path);
        free(list->item[i].full);
    }
    free(list->item);
}

/* The path without links. For a file that does not exist: that of its directory, and the name. */
static bl_status resolve(const char *path, char **full)
{
    char *parent = NULL;
    size_t length = strlen(path);

    if ((*full = realpath(path, NULL))) return BL_OK;
    if (errno == ENOMEM) return BL_FAIL(BL_ENOMEM, "resolving the path %s", path);
    while (length > 1 && path[length - 1] == '/') length--;
    size_t folder = length;
    while (folder > 0 && path[folder - 1] != '/') folder--;
    if (folder == length || (length == 1 && path[0] == '.'))
        return bl_text_format(full, "%s", path); /* no folder */
    BL_TRY(folder == 0 ? bl_text_format(&parent, ".")
                       : bl_text_format(&parent, "%.*s", (int)folder, path));
    char *start = NULL;
    bl_status st = resolve(parent, &start);
    if (st == BL_OK)
        st = bl_text_format(full, "%s/%.*s", start, (int)(length - folder), path + folder);
    free(start);
    free(parent);
    return st;
}

/* Takes `path` over, also when it fails. */
static bl_status add(places *list, const char *key, char *path)
{
    struct stat info;
    place p = {.key = key, .path = path};

    bl_status st = resolve(path, &p.full);
    if (st == BL_OK && list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 32;
        place *grown = reallocarray(list->item, capacity, sizeof *grown);
        if (grown) list->item = grown;
        if (grown) list->capacity = capacity;
        if (!grown) st = BL_FAIL(BL_ENOMEM, "a list of %zu paths", capacity);
    }
    if (st != BL_OK) {
        free(p.full);
        free(path);
        return st;
    }
    if ((p.exists = stat(path, &info) == 0)) {
        p.device = info.st_dev;
        p.inode = info.st_ino;
    }
    list->item[list->n++] = p;
    return BL_OK;
}

static bl_status add_path(places *list, const char *key, const char *path)
{
    char *text = NULL;
    BL_TRY(bl_text_format(&text, "%s", path));
    return add(list, key, text);
}

static bl_status add_in(places *list, const char *key, const char *dir, const char *name,
                        const char *end)
{
    char *path = NULL, *text = NULL;
    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = bl_text_format(&text, "%s%s", path, end);
    free(path);
    BL_TRY(st);
    return add(list, key, text);
}

static bool is_same(const place *a, const place *b)
{
    if (a->exists && b->exists) return a->device == b->device && a->inode == b->inode;
    return strcmp(a->full, b->full) == 0;
}

/* ---- inputs ---- */

/* A directory and its entries. One that cannot be listed is not an error here: reading it is. */
static bl_status add_folder(places *files, places *folders, const char *key, const char *dir)
{
    char **names;
    size_t n_names;

    BL_TRY(add_path(folders, key, dir));
    bl_status st = bl_dir_list(dir, &names, &n_names);
    if (st != BL_OK) return st == BL_ENOMEM ? st : BL_OK;
    for (size_t i = 0; i < n_names && st == BL_OK; i++) st = add_in(files, key, dir, names[i], "");
    bl_names_free(names, n_names);
    return st;
}

static bl_status list_inputs(const bl_train_config *c, places *files, places *folders)
{
    const struct {
        const char *key, *path;
    } named[] = {{CONFIG_KEY, c->source.file},
                 {"train_file", c->train_file},
                 {"validation_file", c->validation_file},
                 {"chat_template", c->chat_template}};

    for (size_t i = 0; i < BL_COUNT(named); i++)
        if (named[i].path) BL_TRY(add_path(files, named[i].key, named[i].path));
    for (int64_t i = 0; i < c->more_train_files.n_items; i++)
        BL_TRY(add_path(files, "more_train_files", c->more_train_files.items[i]));
    BL_TRY(add_folder(files, folders, "model_name_or_path", c->model_name_or_path));
    if (c->init_adapter) BL_TRY(add_folder(files, folders, "init_adapter", c->init_adapter));
    if (bl_train_config_resume(c) == BL_RESUME_PATH)
        BL_TRY(add_folder(files, folders, RESUME_KEY, c->resume_from_checkpoint));
    return BL_OK;
}

/* ---- outputs ---- */

typedef enum how { RENAMED, IN_PLACE } how;

/* Takes `path` over, also when it fails. */
static bl_status add_output(places *list, const char *key, char *path, how written)
{
    struct stat info;
    char *tmp = NULL;
    bool is_device = stat(path, &info) == 0 && S_ISCHR(info.st_mode);

    bl_status st = written == IN_PLACE && is_device ? BL_OK : bl_file_check_output(path);
    if (st != BL_OK) bl_error_prefix(st, "%s", key);
    if (st == BL_OK && written == RENAMED) st = bl_text_format(&tmp, "%s.tmp", path);
    if (st != BL_OK) {
        free(path);
        return st;
    }
    if ((st = add(list, key, path)) == BL_OK) return tmp ? add(list, key, tmp) : BL_OK;
    free(tmp);
    return st;
}

static bl_status add_in_output(places *list, const char *dir, const char *name)
{
    char *path;
    BL_TRY(bl_path_join(dir, name, &path));
    return add_output(list, OUTPUT_KEY, path, RENAMED);
}

/* Processes of one job write a file each. */
static bl_status trace_path(const bl_job *job, char **path)
{
    if (!job->launch) return bl_text_format(path, "%s", job->config->trace);
    return bl_text_format(path, "%s.rank%d", job->config->trace, job->topology.first_here);
}

bl_status bl_job_open_trace(bl_job *job)
{
    char *path = NULL;

    if (!job->config->trace) return BL_OK;
    BL_TRY(trace_path(job, &path));
    bl_status st = bl_trace_open(path, job->topology.first_here, job->topology.n_here, &job->trace);
    free(path);
    return st;
}

static bl_status list_outputs(const bl_job *job, places *list)
{
    const bl_train_config *c = job->config;
    char *path = NULL;

    for (size_t i = 0; bl_output_name(i); i++)
        BL_TRY(add_in_output(list, c->output_dir, bl_output_name(i)));
    for (size_t i = 0; i < BL_COUNT(kept); i++) BL_TRY(add_in_output(list, c->output_dir, kept[i]));
    if (c->dump_gradients) {
        BL_TRY(bl_text_format(&path, "%s", c->dump_gradients));
        BL_TRY(add_output(list, "dump_gradients", path, RENAMED));
    }
    if (!c->trace) return BL_OK;
    BL_TRY(trace_path(job, &path));
    return add_output(list, "trace", path, IN_PLACE);
}

/* ---- comparing ---- */

static bool is_record_of_itself(const place *output, const place *input)
{
    const char *name = strrchr(output->path, '/');
    return input->key == CONFIG_KEY && output->key == OUTPUT_KEY && name &&
           strcmp(name + 1, BL_OUTPUT_CONFIG) == 0;
}

/* After the comparisons, which say more. */
static bl_status check_kinds(const bl_job *job)
{
    const bl_train_config *c = job->config;
    char *path;

    if (c->dump_gradients)
        BL_TRY(bl_file_check_kind("dump_gradients", c->dump_gradients, BL_GRADIENTS_MARK));
    if (!c->trace) return BL_OK;
    BL_TRY(trace_path(job, &path));
    bl_status st = bl_file_check_kind("trace", path, BL_TRACE_MARK);
    free(path);
    return st;
}

static bl_status compare_with_inputs(const places *written, const places *read)
{
    for (size_t i = 0; i < written->n; i++)
        for (size_t k = 0; k < read->n; k++) {
            const place *output = &written->item[i], *input = &read->item[k];
            if (is_same(output, input) && !is_record_of_itself(output, input))
                return BL_FAIL(BL_EUSAGE, "%s: %s would overwrite %s (%s)", output->key,
                               output->path, input->path, input->key);
        }
    return BL_OK;
}

static bl_status compare_outputs(const places *written)
{
    for (size_t i = 0; i < written->n; i++)
        for (size_t k = i + 1; k < written->n; k++)
            if (strcmp(written->item[i].key, written->item[k].key) != 0 &&
                is_same(&written->item[i], &written->item[k]))
                return BL_FAIL(BL_EUSAGE, "%s: %s and %s (%s) are one file", written->item[k].key,
                               written->item[k].path, written->item[i].path, written->item[i].key);
    return BL_OK;
}

/* Whether the resolved `path` is inside the directory, at any depth. Shortens `path`. */
static bool lies_in(char *path, const place *folder)
{
    struct stat info;

    for (char *slash; (slash = strrchr(path, '/')) && slash != path;) {
        *slash = '\0';
        if (stat(path, &info) == 0 && info.st_dev == folder->device && info.st_ino == folder->inode)
            return true;
    }
    return false;
}

/* Checkpoints are removed by their limit, and all of them when a run starts over; a model is
 * replaced. */
static bl_status compare_with_removed(const bl_train_config *c, const place *folder,
                                      const places *read)
{
    for (size_t i = 0; i < read->n && folder->exists; i++) {
        const place *input = &read->item[i];
        bool stays =
            input->key == RESUME_KEY || (input->key == CONFIG_KEY && !c->overwrite_output_dir);
        char *path = NULL;
        if (stays) continue;
        BL_TRY(bl_text_format(&path, "%s", input->full));
        bool lies = lies_in(path, folder);
        free(path);
        if (lies)
            return BL_FAIL(BL_EUSAGE, "%s: %s is in %s, where output_dir's run removes files",
                           input->key, input->path, folder->path);
    }
    return BL_OK;
}

/* A file of the run that is in the queue's directory would be taken for a job, or moved. */
static bl_status check_queue(const bl_job *job, const places *written)
{
    const bl_train_config *c = job->config;
    places queue = {0}, dirs = {0};
    bl_status st;

    if (!job->lead) return BL_OK;
    BL_TRY_GOTO(st, done, add_path(&queue, "queue", job->lead->config->queue));
    if (c->logging_dir)
        BL_TRY_GOTO(st, done, add_in(&dirs, "logging_dir", c->logging_dir, "x", ""));
    for (size_t i = 0; i < written->n + dirs.n && st == BL_OK; i++) {
        const place *p = i < dirs.n ? &dirs.item[i] : &written->item[i - dirs.n];
        char *path;
        BL_TRY_GOTO(st, done, bl_text_format(&path, "%s", p->full));
        if (lies_in(path, &queue.item[0]))
            st = BL_FAIL(BL_EUSAGE, "%s: %s is in the directory of queue %s: use another directory",
                         p->key, p->path, job->lead->config->queue);
        free(path);
    }
done:
    places_free(&dirs);
    places_free(&queue);
    return st;
}

static bl_status check_folders(const bl_train_config *c, const places *read, places *checkpoints)
{
    places output = {0};
    bl_status st = add_path(&output, OUTPUT_KEY, c->output_dir);
    bool is_dir = true;

    for (size_t i = 0; i < read->n && st == BL_OK; i++)
        if (is_same(&output.item[0], &read->item[i]))
            st = BL_FAIL(BL_EUSAGE, "output_dir: %s is the folder of %s (%s)", c->output_dir,
                         read->item[i].key, read->item[i].path);
    if (st == BL_OK) st = add_in(checkpoints, OUTPUT_KEY, c->output_dir, BL_OUTPUT_CHECKPOINTS, "");
    if (st == BL_OK && bl_train_config_is_full(c))
        st = add_in(checkpoints, OUTPUT_KEY, c->output_dir, BL_OUTPUT_MODEL, "");
    if (st == BL_OK && checkpoints->item[0].exists)
        st = bl_path_is_dir(checkpoints->item[0].path, &is_dir);
    if (st == BL_OK && !is_dir)
        st = BL_FAIL(BL_EUSAGE, "output_dir: %s: is not a folder", checkpoints->item[0].path);
    /* Steps there may be another run's, which save_total_limit would remove. */
    struct stat info;
    if (st == BL_OK && lstat(checkpoints->item[0].path, &info) == 0 && S_ISLNK(info.st_mode))
        st = BL_FAIL(BL_EUSAGE,
                     "output_dir: %s: is a symbolic link: remove it, or make output_dir the link",
                     checkpoints->item[0].path);
    places_free(&output);
    return st;
}

bl_status bl_job_check_paths(const bl_job *job)
{
    const bl_train_config *c = job->config;
    places files = {0}, folders = {0}, written = {0}, checkpoints = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, list_inputs(c, &files, &folders));
    BL_TRY_GOTO(st, done, check_folders(c, &folders, &checkpoints));
    BL_TRY_GOTO(st, done, list_outputs(job, &written));
    BL_TRY_GOTO(st, done, compare_with_inputs(&written, &files));
    BL_TRY_GOTO(st, done, compare_outputs(&written));
    BL_TRY_GOTO(st, done, check_queue(job, &written));
    for (size_t i = 0; i < checkpoints.n; i++) {
        BL_TRY_GOTO(st, done, compare_with_removed(c, &checkpoints.item[i], &files));
        BL_TRY_GOTO(st, done, compare_with_removed(c, &checkpoints.item[i], &folders));
    }
    st = check_kinds(job);
done:
    places_free(&checkpoints);
    places_free(&written);
    places_free(&folders);
    places_free(&files);
    return st;
}
