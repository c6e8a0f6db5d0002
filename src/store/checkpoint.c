/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.c -- saving a state so that a crash at any point leaves a complete checkpoint.
 *
 * A checkpoint exists when its manifest does, and the manifest is durable only after all that it
 * lists. The steps of a save, and the state after a crash at each:
 *
 *   begin      step-N.tmp is created, after the disk's free space was compared with the need
 *                  -> step-N.tmp without a manifest: deleted at the next start
 *   add_file   fsync of each file, by any thread or process; its size and XXH3-64 are noted
 *                  -> the same
 *   commit 1   the manifest: written beside its name, fsync, rename, fsync of step-N.tmp
 *                  -> step-N.tmp, complete but without its name: deleted, the older ones remain
 *   commit 2   step-N.tmp is renamed to step-N. An older step-N changes places with it in one
 *              system call (RENAME_EXCHANGE) or, where the file system cannot, steps aside as
 *              step-N.old.tmp
 *                  -> the older or the new one is complete; bl_checkpoint_clean renames back one
 *                     that stepped aside
 *   commit 3   fsync of the directory, and only then the older one is removed
 *
 * Reading checks the manifest's own hash first, then sizes, then, where asked, the hash of every
 * file. The latest checkpoint is found by trying: the highest step that passes. Of several failures
 * the first is kept (note_failure), so that a caller who overlooks one cannot commit. */
#include "store/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "store/checkpoint_internal.h"

enum { MAX_MANIFEST_BYTES = 64 << 20, HASH_PIECE_BYTES = 1 << 20, HASH_TEXT_BYTES = 17 };

static const char MANIFEST_NAME[] = "manifest.json";
static const char MANIFEST_FORMAT[] = "ballast-checkpoint-1";

struct bl_checkpoint {
    char *dir;
    char *path;     /* dir/step-N */
    char *tmp_path; /* dir/step-N.tmp */
    int64_t step;
    pthread_mutex_t lock; /* guards what follows */
    json_t *files;        /* name -> {"bytes", "xxh3_64"} */
    bl_error failure;     /* the first one, or BL_OK */
};

/* ---- hashes ---- */

static void hash_text(XXH64_hash_t hash, char text[HASH_TEXT_BYTES])
{
    snprintf(text, HASH_TEXT_BYTES, "%016" PRIx64, (uint64_t)hash);
}

/* The hash of a file's content, read through fd. */
static bl_status hash_file(int fd, const char *path, int64_t n_bytes, XXH64_hash_t *value)
{
    bl_status st = BL_OK;
    void *piece = malloc(HASH_PIECE_BYTES);
    XXH3_state_t *hash = XXH3_createState();

    if (!piece || !hash) {
        st = BL_FAIL(BL_ENOMEM, "%s: hashing it", path);
        goto done;
    }
    XXH3_64bits_reset(hash);
    for (int64_t at = 0; at < n_bytes;) {
        size_t n = (size_t)bl_min_i64(HASH_PIECE_BYTES, n_bytes - at);
        BL_TRY_GOTO(st, done, bl_file_read_full(fd, path, piece, n, at));
        XXH3_64bits_update(hash, piece, n);
        at += (int64_t)n;
    }
    *value = XXH3_64bits_digest(hash);
done:
    XXH3_freeState(hash);
    free(piece);
    return st;
}

/* The hash of a manifest without its own "xxh3_64": key order and spacing do not matter. */
static bl_status hash_manifest(const json_t *manifest, const char *path, char text[HASH_TEXT_BYTES])
{
    char *dump = json_dumps(manifest, JSON_COMPACT | JSON_SORT_KEYS);

    if (!dump) return BL_FAIL(BL_ENOMEM, "%s: hashing it", path);
    hash_text(XXH3_64bits(dump, strlen(dump)), text);
    free(dump);
    return BL_OK;
}

/* ---- saving ---- */

bl_status store_checkpoint_step_path(const char *dir, int64_t step, char **path)
{
    return bl_text_format(path, "%s/step-%" PRId64, dir, step);
}

bl_status bl_checkpoint_step_tmp_path(const char *dir, int64_t step, char **path)
{
    return bl_text_format(path, "%s/step-%" PRId64 "%s", dir, step, BL_CHECKPOINT_TMP);
}

static void checkpoint_free(bl_checkpoint *checkpoint)
{
    pthread_mutex_destroy(&checkpoint->lock);
    json_decref(checkpoint->files);
    free(checkpoint->dir);
    free(checkpoint->path);
    free(checkpoint->tmp_path);
    free(checkpoint);
}

static bl_status check_space(const char *dir, int64_t n_bytes)
{
    int64_t free_bytes;

    bl_status st = bl_dir_free_bytes(dir, &free_bytes);
    if (st != BL_OK) return st == BL_EINPUT ? bl_error_prefix(BL_EIO, "made a moment ago") : st;
    if (free_bytes < n_bytes)
        return BL_FAIL(BL_ELIMIT, "%s: a checkpoint takes %" PRId64 " bytes, the disk has %" PRId64,
                       dir, n_bytes, free_bytes);
    return BL_OK;
}

bl_status bl_checkpoint_begin(const char *dir, int64_t step, int64_t n_bytes, bl_checkpoint **out)
{
    bl_status st = BL_OK;
    bl_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);

    *out = NULL;
    if (!checkpoint) return BL_FAIL(BL_ENOMEM, "%s: a checkpoint", dir);
    pthread_mutex_init(&checkpoint->lock, NULL);
    checkpoint->step = step;
    if (!(checkpoint->files = json_object())) {
        st = BL_FAIL(BL_ENOMEM, "%s: a checkpoint", dir);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_text_format(&checkpoint->dir, "%s", dir));
    BL_TRY_GOTO(st, done, store_checkpoint_step_path(dir, step, &checkpoint->path));
    BL_TRY_GOTO(st, done, bl_checkpoint_step_tmp_path(dir, step, &checkpoint->tmp_path));
    if ((st = bl_dir_create_child(dir)) !=
        BL_OK) { /* a run's own directory, which existed: not an error of its input */
        st = st == BL_EINPUT ? BL_EIO : st;
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_tree_remove(checkpoint->tmp_path));
    BL_TRY_GOTO(st, done, check_space(dir, n_bytes));
    BL_TRY_GOTO(st, done, bl_dir_create_child(checkpoint->tmp_path));
    *out = checkpoint;
    checkpoint = NULL;
done:
    if (checkpoint) checkpoint_free(checkpoint);
    return st;
}

const char *bl_checkpoint_path(const bl_checkpoint *checkpoint)
{
    return checkpoint->tmp_path;
}

/* Remembers the first failure, so that a caller who misses it cannot commit. */
static bl_status note_failure(bl_checkpoint *checkpoint, bl_status st)
{
    if (st == BL_OK) return st;
    pthread_mutex_lock(&checkpoint->lock);
    if (checkpoint->failure.status == BL_OK) bl_error_save(&checkpoint->failure, st);
    pthread_mutex_unlock(&checkpoint->lock);
    return st;
}

static bl_status record_file(bl_checkpoint *checkpoint, const char *name, int64_t n_bytes,
                             const char *hash)
{
    bl_status st = BL_OK;

    bl_json_watch_memory();
    pthread_mutex_lock(&checkpoint->lock);
    if (strchr(name, '/') || !strcmp(name, MANIFEST_NAME) ||
        json_object_get(checkpoint->files, name))
        st = BL_FAIL(BL_EINTERNAL, "checkpoint file %s: no name of its own", name);
    else if (json_object_set_new(
                 checkpoint->files, name,
                 json_pack("{s:I, s:s}", "bytes", (json_int_t)n_bytes, "xxh3_64", hash)) != 0)
        st = bl_json_ran_out() ? BL_FAIL(BL_ENOMEM, "checkpoint file %s", name)
                               : BL_FAIL(BL_EINTERNAL, "checkpoint file %s: no valid name", name);
    pthread_mutex_unlock(&checkpoint->lock);
    return st;
}

bl_status bl_checkpoint_describe_file(const char *path, bl_checkpoint_file *out)
{
    bl_status st = BL_OK;
    XXH64_hash_t hash = 0;
    int fd = -1;

    *out = (bl_checkpoint_file){0};
    st = bl_file_open(path, &fd, &out->n_bytes);
    if (st == BL_EINPUT) st = bl_error_prefix(BL_EIO, "written a moment ago");
    if (st != BL_OK) goto done;
    BL_TRY_GOTO(st, done, bl_file_sync(fd, path));
    BL_TRY_GOTO(st, done, hash_file(fd, path, out->n_bytes, &hash));
    out->xxh3_64 = hash;
done:
    if (fd >= 0) close(fd);
    return st;
}

static bl_status record_described(bl_checkpoint *checkpoint, const char *name,
                                  const bl_checkpoint_file *file)
{
    char hash[HASH_TEXT_BYTES];
    hash_text(file->xxh3_64, hash);
    return record_file(checkpoint, name, file->n_bytes, hash);
}

bl_status bl_checkpoint_add_file(bl_checkpoint *checkpoint, const char *name)
{
    bl_checkpoint_file file;
    char *path = NULL;

    bl_status st = bl_path_join(checkpoint->tmp_path, name, &path);
    if (st == BL_OK) st = bl_checkpoint_describe_file(path, &file);
    if (st == BL_OK) st = record_described(checkpoint, name, &file);
    free(path);
    return note_failure(checkpoint, st);
}

bl_status bl_checkpoint_add_described(bl_checkpoint *checkpoint, const char *name,
                                      const bl_checkpoint_file *file)
{
    bl_status st = BL_OK;
    char *path = NULL;
    int64_t n_bytes = 0;
    int fd = -1;

    BL_TRY_GOTO(st, done, bl_path_join(checkpoint->tmp_path, name, &path));
    st = bl_file_open(path, &fd, &n_bytes);
    if (st == BL_EINPUT) st = bl_error_prefix(BL_EIO, "written by another process");
    if (st == BL_OK && n_bytes != file->n_bytes)
        st = BL_FAIL(BL_EIO,
                     "%s: has %" PRId64 " bytes here, %" PRId64
                     " where it was written: no shared folder?",
                     path, n_bytes, file->n_bytes);
    if (st == BL_OK) st = record_described(checkpoint, name, file);
done:
    if (fd >= 0) close(fd);
    free(path);
    return note_failure(checkpoint, st);
}

static bl_status write_manifest(const bl_checkpoint *checkpoint, const json_t *state)
{
    bl_status st = BL_OK;
    char hash[HASH_TEXT_BYTES];
    char *path = NULL, *text = NULL;

    bl_json_watch_memory();
    json_t *manifest =
        json_pack("{s:s, s:I, s:O, s:O}", "format", MANIFEST_FORMAT, "step",
                  (json_int_t)checkpoint->step, "files", checkpoint->files, "state", state);
    BL_TRY_GOTO(st, done, bl_path_join(checkpoint->tmp_path, MANIFEST_NAME, &path));
    if (!manifest && !bl_json_ran_out()) {
        st = BL_FAIL(BL_EINTERNAL, "%s: a state that is no JSON", path);
        goto done;
    }
    BL_TRY_GOTO(st, done, hash_manifest(manifest, path, hash));
    json_object_set_new(manifest, "xxh3_64", json_string(hash));
    text = json_dumps(manifest, JSON_INDENT(2) | JSON_SORT_KEYS);
    if (!text || bl_json_ran_out()) {
        st = BL_FAIL(BL_ENOMEM, "%s: writing it", path);
        goto done;
    }
    st = bl_file_write_atomic(path, text,
                              strlen(text)); /* also makes the directory's entries durable */
done:
    json_decref(manifest);
    free(text);
    free(path);
    return st;
}

/* Gives step-N.tmp its name. An older step-N changes places with it and is removed; where that
 * cannot be done it steps aside, and comes back when the rename fails, or in bl_checkpoint_clean.
 * One of the two is always there. */
static bl_status publish(const bl_checkpoint *checkpoint)
{
    bl_status st = BL_OK;
    char *path = checkpoint->path, *tmp_path = checkpoint->tmp_path, *aside = NULL;
    bool exists;

    BL_TRY(bl_text_format(&aside, "%s%s", path, BL_CHECKPOINT_ASIDE));
    BL_TRY_GOTO(st, done, bl_path_exists(path, &exists));
    if (exists && renameat2(AT_FDCWD, tmp_path, AT_FDCWD, path, RENAME_EXCHANGE) == 0) {
        BL_TRY_GOTO(st, done, bl_dir_sync(checkpoint->dir));
        st = bl_tree_remove(tmp_path);
        goto done;
    }
    if (exists) {
        BL_TRY_GOTO(st, done, bl_tree_remove(aside));
        if (rename(path, aside) != 0 && errno != ENOENT) {
            st = bl_fail_errno(BL_EIO, "%s: renaming it to %s", path, aside);
            goto done;
        }
    }
    if (rename(tmp_path, path) != 0) {
        st = bl_fail_errno(BL_EIO, "%s: renaming it to %s", tmp_path, path);
        if (exists) (void)!rename(aside, path); /* else bl_checkpoint_clean does it */
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_dir_sync(checkpoint->dir));
    st = bl_tree_remove(aside);
done:
    free(aside);
    return st;
}

bl_status bl_checkpoint_commit(bl_checkpoint *checkpoint, const json_t *state)
{
    bl_status st = BL_OK;

    if (checkpoint->failure.status != BL_OK) {
        st = bl_error_restore(&checkpoint->failure);
        goto done;
    }
    BL_TRY_GOTO(st, done, write_manifest(checkpoint, state));
    BL_TRY_GOTO(st, done, publish(checkpoint));
done:
    if (st != BL_OK) {
        bl_error failure;
        bl_error_save(&failure, st);
        bl_checkpoint_abort(checkpoint);
        return bl_error_restore(&failure);
    }
    checkpoint_free(checkpoint);
    return st;
}

void bl_checkpoint_abort(bl_checkpoint *checkpoint)
{
    if (!checkpoint) return;
    bl_tree_remove(checkpoint->tmp_path); /* .tmp marks any rest as incomplete */
    checkpoint_free(checkpoint);
}

void bl_checkpoint_leave(bl_checkpoint *checkpoint)
{
    if (checkpoint) checkpoint_free(checkpoint);
}

/* ---- finding ---- */

/* A file of the manifest against the disk; its content only when asked for. */
static bl_status check_file(const char *dir, const char *name, const json_t *entry,
                            bool read_content)
{
    bl_status st = BL_OK;
    const char *hash = NULL;
    char found[HASH_TEXT_BYTES];
    XXH64_hash_t value;
    char *path = NULL;
    int64_t n_bytes = 0, size = 0;
    int fd = -1;

    if (strchr(name, '/') || !strcmp(name, ".."))
        return BL_FAIL(BL_EINPUT, "%s: file name %s leaves it", dir, name);
    BL_TRY(bl_json_check_object(dir, entry));
    BL_TRY(bl_json_get_int(name, entry, "bytes", BL_JSON_REQUIRED, 0, INT64_MAX, &n_bytes));
    BL_TRY(bl_json_get_string(name, entry, "xxh3_64", BL_JSON_REQUIRED, &hash));
    BL_TRY_GOTO(st, done, bl_path_join(dir, name, &path));
    BL_TRY_GOTO(st, done, bl_file_open(path, &fd, &size));
    if (size != n_bytes) {
        st = BL_FAIL(BL_EINPUT, "%s: is %" PRId64 " bytes, the manifest says %" PRId64, path, size,
                     n_bytes);
        goto done;
    }
    if (!read_content) goto done;
    BL_TRY_GOTO(st, done, hash_file(fd, path, size, &value));
    hash_text(value, found);
    if (strcmp(found, hash) != 0)
        st = BL_FAIL(BL_EINPUT, "%s: checksum mismatch: content %s, manifest %.32s", path, found,
                     hash);
done:
    if (fd >= 0) close(fd);
    free(path);
    return st;
}

/* Checks the manifest against itself; *files and *state are borrowed from it. */
static bl_status check_manifest(const char *path, json_t *manifest, int64_t *step,
                                const json_t **files, const json_t **state)
{
    char found[HASH_TEXT_BYTES];
    const char *format = NULL, *hash = NULL;

    BL_TRY(bl_json_check_object(path, manifest));
    BL_TRY(bl_json_get_string(path, manifest, "format", BL_JSON_REQUIRED, &format));
    if (strcmp(format, MANIFEST_FORMAT) != 0)
        return BL_FAIL(BL_EINPUT, "%s: key format: expected \"%s\", got \"%.64s\"", path,
                       MANIFEST_FORMAT, format);
    BL_TRY(bl_json_get_string(path, manifest, "xxh3_64", BL_JSON_REQUIRED, &hash));
    bl_json_watch_memory();
    json_t *unhashed = json_copy(manifest);
    json_object_del(unhashed, "xxh3_64");
    bl_status st = hash_manifest(unhashed, path, found);
    json_decref(unhashed);
    if (st != BL_OK) return st;
    if (bl_json_ran_out()) return BL_FAIL(BL_ENOMEM, "%s: checking it", path);
    if (strcmp(found, hash) != 0) return BL_FAIL(BL_EINPUT, "%s: checksum mismatch", path);
    BL_TRY(bl_json_get_int(path, manifest, "step", BL_JSON_REQUIRED, 0, INT64_MAX, step));
    BL_TRY(bl_json_get_object(path, manifest, "files", BL_JSON_REQUIRED, files));
    return bl_json_get_object(path, manifest, "state", BL_JSON_REQUIRED, state);
}

bl_status store_checkpoint_check(const char *dir, bool read_content, int64_t *step, json_t **state)
{
    bl_status st = BL_OK;
    int64_t found_step = 0;
    char *path = NULL;
    json_t *manifest = NULL, *entry;
    const json_t *files = NULL, *found_state = NULL;
    const char *name;

    BL_TRY(bl_path_join(dir, MANIFEST_NAME, &path));
    BL_TRY_GOTO(st, done, bl_json_load(path, MAX_MANIFEST_BYTES, &manifest));
    BL_TRY_GOTO(st, done, check_manifest(path, manifest, &found_step, &files, &found_state));
    json_object_foreach((json_t *)files, name, entry)
        BL_TRY_GOTO(st, done, check_file(dir, name, entry, read_content));
    if (step) *step = found_step;
    if (state) *state = json_incref((json_t *)found_state);
done:
    json_decref(manifest);
    free(path);
    if (st == BL_EINPUT || st == BL_EIO) return bl_error_prefix(BL_ECHECKPOINT, "checkpoint");
    return st;
}

bl_status bl_checkpoint_verify(const char *path, int64_t *step, json_t **state)
{
    if (state) *state = NULL;
    return store_checkpoint_check(path, true, step, state);
}

static int compare_steps_descending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* N of exactly "step-N"; "step-07" or a number that does not fit would name another directory. */
bool store_checkpoint_parse_step(const char *name, int64_t *step)
{
    char canonical[32];

    if (strncmp(name, "step-", 5) != 0) return false;
    *step = strtoll(name + 5, NULL, 10);
    snprintf(canonical, sizeof canonical, "step-%" PRId64, *step);
    return *step >= 0 && !strcmp(name, canonical);
}

bl_status bl_checkpoint_list(const char *dir, int64_t **steps, size_t *n_steps)
{
    char **names = NULL;
    size_t n_names = 0;
    bool exists;

    *steps = NULL;
    *n_steps = 0;
    BL_TRY(bl_path_exists(dir, &exists));
    if (!exists) return BL_OK;
    BL_TRY(bl_dir_list(dir, &names, &n_names));
    int64_t *list = calloc(n_names + 1, sizeof *list);
    size_t n = 0;
    for (size_t i = 0; list && i < n_names; i++)
        n += store_checkpoint_parse_step(names[i], &list[n]);
    bl_names_free(names, n_names);
    if (!list) return BL_FAIL(BL_ENOMEM, "%s: %zu names", dir, n_names);
    qsort(list, n, sizeof *list, compare_steps_descending);
    *steps = list;
    *n_steps = n;
    return BL_OK;
}

bl_status bl_checkpoint_latest(const char *dir, char **path, int64_t *step, json_t **state)
{
    bl_status st = BL_OK;
    int64_t *steps = NULL;
    size_t n_steps = 0;

    *path = NULL;
    if (state) *state = NULL;
    BL_TRY(bl_checkpoint_list(dir, &steps, &n_steps));
    for (size_t i = 0; i < n_steps && !*path && st == BL_OK; i++) {
        BL_TRY_GOTO(st, done, store_checkpoint_step_path(dir, steps[i], path));
        st = bl_checkpoint_verify(*path, step, state);
        if (st == BL_OK) break;
        free(*path);
        *path = NULL;
        if (st != BL_ECHECKPOINT) break;
        bl_log_warning("skipped: %s", bl_error_text());
        st = BL_OK;
    }
done:
    free(steps);
    return st;
}
