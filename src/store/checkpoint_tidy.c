/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_tidy.c -- removes checkpoints: old ones, incomplete ones after a crash, all of a run.
 * Only listed ones. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/checkpoint_internal.h"

enum { MIN_KEPT = 2 };

/* Out of sight first: a crash in the middle must not leave half a checkpoint under a checkpoint's
 * name. */
bl_status bl_checkpoint_remove(const char *dir, int64_t step)
{
    bl_status st = BL_OK;
    char *path = NULL, *tmp_path = NULL;

    BL_TRY_GOTO(st, done, store_checkpoint_step_path(dir, step, &path));
    BL_TRY_GOTO(st, done, bl_text_format(&tmp_path, "%s%s", path, BL_CHECKPOINT_TMP));
    BL_TRY_GOTO(st, done, bl_tree_remove(tmp_path));
    if (rename(path, tmp_path) == 0)
        st = bl_tree_remove(tmp_path);
    else if (errno != ENOENT) /* another process may have removed it */
        st = bl_fail_errno(BL_EIO, "%s: renaming it to %s", path, tmp_path);
done:
    free(path);
    free(tmp_path);
    return st;
}

/* Verifies the checkpoint that this process has just saved; a missing one is BL_EIO, not damage. */
static bl_status verify_saved(const char *dir, int64_t step)
{
    char *path = NULL;
    bool exists;

    BL_TRY(store_checkpoint_step_path(dir, step, &path));
    bl_status st = bl_path_exists(path, &exists);
    if (st == BL_OK && !exists) st = BL_FAIL(BL_EIO, "%s: saved a moment ago, is gone", path);
    if (st == BL_OK) st = bl_checkpoint_verify(path, NULL, NULL);
    free(path);
    return st == BL_EINPUT ? bl_error_prefix(BL_EIO, "saved a moment ago") : st;
}

static bool owns_step(const char *dir, const bl_file_list *files, int64_t step)
{
    char *path;

    if (!files) return true;
    if (store_checkpoint_step_path(dir, step, &path) != BL_OK) return false;
    bool owns = bl_file_list_has(files, path);
    free(path);
    return owns;
}

bl_status bl_checkpoint_list_owned(const char *dir, const bl_file_list *files, int64_t **steps,
                                   size_t *n_steps)
{
    size_t n = 0;

    BL_TRY(bl_checkpoint_list(dir, steps, n_steps));
    for (size_t i = 0; i < *n_steps; i++)
        if (owns_step(dir, files, (*steps)[i])) (*steps)[n++] = (*steps)[i];
    *n_steps = n;
    return BL_OK;
}

/* Whether the checkpoint's files are there, at their sizes. */
static bl_status look_whole(const char *dir, int64_t step, bool *is_whole)
{
    char *path = NULL;

    BL_TRY(store_checkpoint_step_path(dir, step, &path));
    bl_status st = store_checkpoint_check(path, false, NULL, NULL);
    free(path);
    *is_whole = st == BL_OK;
    return st == BL_ECHECKPOINT ? BL_OK : st;
}

/* Of steps[n], newest first: those to remove, in front. Keeps best_step, `limit` from saved_step on
 * with it, and further ones until two are whole. The content of older ones was read when they were
 * saved. */
static bl_status choose_removed(const char *dir, int64_t saved_step, int64_t best_step,
                                int64_t limit, int64_t *steps, size_t n, size_t *n_removed)
{
    int64_t n_kept = 0, n_whole = 0;
    bool is_whole;

    *n_removed = 0;
    if (best_step >= saved_step) best_step = -1;
    for (size_t i = 0; i < n; i++) {
        if (steps[i] != best_step) continue;
        BL_TRY(look_whole(dir, best_step, &is_whole));
        n_kept++;
        n_whole += is_whole;
    }
    for (size_t i = 0; i < n; i++) {
        if (steps[i] == best_step) continue;
        if (steps[i] > saved_step || (n_whole >= MIN_KEPT && n_kept >= limit)) {
            steps[(*n_removed)++] = steps[i];
            continue;
        }
        BL_TRY(look_whole(dir, steps[i], &is_whole));
        n_kept++;
        n_whole += is_whole;
    }
    return BL_OK;
}

bl_status bl_checkpoint_prune(const char *dir, const bl_file_list *files, int64_t saved_step,
                              int64_t best_step, int64_t limit)
{
    bl_status st = BL_OK;
    int64_t *steps = NULL;
    size_t n_steps = 0, n_removed = 0;

    if (limit <= 0) return BL_OK;
    BL_TRY(verify_saved(dir, saved_step));
    BL_TRY_GOTO(st, done, bl_checkpoint_list_owned(dir, files, &steps, &n_steps));
    BL_TRY_GOTO(st, done,
                choose_removed(dir, saved_step, best_step, limit, steps, n_steps, &n_removed));
    for (size_t i = 0; i < n_removed; i++)
        BL_TRY_GOTO(st, done, bl_checkpoint_remove(dir, steps[i]));
done:
    free(steps);
    return st == BL_EINPUT ? bl_error_prefix(BL_EIO, "checkpoints of this run") : st;
}

/* `path` ends with BL_CHECKPOINT_TMP: it goes, unless it is a step that stepped aside for one that
 * never came. */
static bl_status clean_path(const char *path)
{
    if (bl_text_ends_with(path, BL_CHECKPOINT_ASIDE)) {
        char *step;
        BL_TRY(
            bl_text_format(&step, "%.*s", (int)(strlen(path) - strlen(BL_CHECKPOINT_ASIDE)), path));
        bool is_back = !bl_file_exists(step) && rename(path, step) == 0;
        free(step);
        if (is_back) return BL_OK;
    }
    return bl_tree_remove(path);
}

/* N of step-N.tmp and step-N.old.tmp; of step-N too with `whole`. */
static bool parse_covered(const char *name, bool whole, int64_t *step)
{
    char step_name[32];
    size_t length = strcspn(name, ".");

    if (length >= sizeof step_name) return false;
    if (strcmp(name + length, BL_CHECKPOINT_TMP) != 0 &&
        strcmp(name + length, BL_CHECKPOINT_ASIDE) != 0 && !(whole && name[length] == '\0'))
        return false;
    snprintf(step_name, sizeof step_name, "%.*s", (int)length, name);
    return store_checkpoint_parse_step(step_name, step);
}

bl_status bl_checkpoint_check_others(const char *dir, const bl_file_list *files, int64_t after)
{
    char **names;
    size_t n_names;
    bool exists;
    bl_status st = BL_OK;

    BL_TRY(bl_path_exists(dir, &exists));
    if (!exists) return BL_OK;
    BL_TRY(bl_dir_list(dir, &names, &n_names));
    for (size_t i = 0; i < n_names && st == BL_OK; i++) {
        int64_t step;
        char *path = NULL;
        if (!parse_covered(names[i], true, &step) || step <= after) continue;
        st = store_checkpoint_step_path(dir, step, &path);
        if (st == BL_OK) st = bl_file_list_check(files, path);
        free(path);
    }
    bl_names_free(names, n_names);
    return st;
}

bl_status bl_checkpoint_clean(const char *dir, const bl_file_list *files)
{
    bl_status st = BL_OK;
    char **names = NULL;
    size_t n_names = 0;
    bool exists;

    BL_TRY(bl_path_exists(dir, &exists));
    if (!exists) return BL_OK;
    BL_TRY(bl_dir_list(dir, &names, &n_names));
    for (size_t i = 0; i < n_names && st == BL_OK; i++) {
        char *path = NULL;
        int64_t step;
        if (!parse_covered(names[i], false, &step) || !owns_step(dir, files, step)) continue;
        st = bl_path_join(dir, names[i], &path);
        if (st == BL_OK) st = clean_path(path);
        free(path);
    }
    bl_names_free(names, n_names);
    return st;
}
