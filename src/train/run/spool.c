/* SPDX-License-Identifier: Apache-2.0 */
/* spool.c -- the directory of a queue, by renames. */
#include "train/run/spool.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"

static const char RUNNING[] = "running", STOP[] = "stop";
static const char *const ends[BL_N_SPOOL_ENDS] = {
    [BL_SPOOL_DONE] = "done", [BL_SPOOL_FAILED] = "failed", [BL_SPOOL_REJECTED] = "rejected"};

struct bl_spool {
    char *dir;
    bl_dir_lock *lock;
    char **left; /* names in running/ when the queue started; next_left is returned next */
    size_t n_left, next_left;
    int64_t n_ended[BL_N_SPOOL_ENDS];
};

/* Only this user and root put files there: a job names files to read and to write. */
static bl_status make(const char *path)
{
    struct stat info;

    BL_TRY(bl_dir_create_private(path));
    BL_TRY(bl_path_check_private(path));
    if (stat(path, &info) != 0 || (info.st_mode & (S_IWGRP | S_IWOTH)) == 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s: other users may create files in it (mode %04o): chmod go-w %s",
                   path, (unsigned)(info.st_mode & 07777), path);
}

static bl_status make_in(const char *dir, const char *name)
{
    char *path;

    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = make(path);
    free(path);
    return st;
}

static bl_status open_dirs(bl_spool *s)
{
    char *path;

    BL_TRY(make(s->dir));
    BL_TRY(bl_dir_lock_acquire(s->dir, &s->lock));
    BL_TRY(make_in(s->dir, RUNNING));
    for (int i = 0; i < BL_N_SPOOL_ENDS; i++) BL_TRY(make_in(s->dir, ends[i]));
    BL_TRY(bl_path_join(s->dir, RUNNING, &path));
    bl_status st = bl_dir_list(path, &s->left, &s->n_left);
    free(path);
    return st;
}

/* NAME.yaml or NAME.yml, without a leading dot. */
static bool is_job(const char *name)
{
    return name[0] != '.' && (bl_text_ends_with(name, ".yaml") || bl_text_ends_with(name, ".yml"));
}

/* Removes DIR/end/name if it is the .error file of a job whose own file is missing. */
static bl_status drop_reason(const bl_spool *s, const char *end, const char *name)
{
    static const char ENDING[] = ".error";
    struct stat info;
    char *path, *job;
    bl_status st = BL_OK;

    if (!bl_text_ends_with(name, ENDING)) return BL_OK;
    BL_TRY(bl_text_format(&path, "%s/%s/%s", s->dir, end, name));
    if (!(job = strdup(path))) {
        free(path);
        return BL_FAIL(BL_ENOMEM, "job %s", name);
    }
    job[strlen(job) - strlen(ENDING)] = '\0';
    if (is_job(strrchr(job, '/') + 1) && lstat(job, &info) != 0 && errno == ENOENT &&
        unlink(path) != 0)
        st = bl_fail_errno(BL_EIO, "remove %s", path);
    free(job);
    free(path);
    return st;
}

static bl_status drop_reasons(const bl_spool *s, const char *end)
{
    char **names, *path;
    size_t n_names;

    BL_TRY(bl_path_join(s->dir, end, &path));
    bl_status st = bl_dir_list(path, &names, &n_names);
    free(path);
    BL_TRY(st);
    for (size_t i = 0; i < n_names && st == BL_OK; i++) st = drop_reason(s, end, names[i]);
    bl_names_free(names, n_names);
    return st;
}

bl_status bl_spool_open(const char *dir, bl_spool **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out || !((*out)->dir = strdup(dir))) return BL_FAIL(BL_ENOMEM, "queue %s", dir);
    bl_status st = open_dirs(*out);
    for (int i = 0; i < BL_N_SPOOL_ENDS && st == BL_OK; i++) st = drop_reasons(*out, ends[i]);
    if (st == BL_OK) return BL_OK;
    return bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "queue");
}

void bl_spool_close(bl_spool *s)
{
    if (!s) return;
    bl_names_free(s->left, s->n_left);
    bl_dir_lock_release(s->lock);
    free(s->dir);
    free(s);
}

static bl_status copy_name(const char *name, char **out)
{
    *out = strdup(name);
    return *out ? BL_OK : BL_FAIL(BL_ENOMEM, "job %s", name);
}

bl_status bl_spool_next(bl_spool *s, bool takes_none, char **name, bool *has_run)
{
    char **names;
    size_t n_names;
    bl_status st = BL_OK;

    *name = NULL;
    *has_run = true;
    while (s->next_left < s->n_left) {
        const char *left = s->left[s->next_left++];
        if (is_job(left)) return copy_name(left, name);
    }
    *has_run = false;
    if (takes_none) return BL_OK;
    BL_TRY(bl_dir_lock_check(s->lock));
    BL_TRY(bl_dir_list(s->dir, &names, &n_names));
    for (size_t i = 0; i < n_names && st == BL_OK && !*name; i++)
        if (is_job(names[i]) && !bl_spool_has(s, names[i], true)) st = copy_name(names[i], name);
    bl_names_free(names, n_names);
    return st;
}

static bl_status path_in(const char *dir, const char *sub, const char *name, char **path)
{
    return sub ? bl_text_format(path, "%s/%s/%s", dir, sub, name)
               : bl_text_format(path, "%s/%s", dir, name);
}

bl_status bl_spool_path(const char *dir, const char *name, bool has_run, char **path)
{
    return path_in(dir, has_run ? RUNNING : NULL, name, path);
}

bool bl_spool_has(const bl_spool *s, const char *name, bool has_run)
{
    struct stat info;
    char *path;

    if (bl_spool_path(s->dir, name, has_run, &path) != BL_OK) return true;
    bool is_there = lstat(path, &info) == 0 || errno != ENOENT;
    free(path);
    return is_there;
}

static void sync_dir(const char *dir, const char *sub)
{
    char *path;
    int fd;

    if ((sub ? bl_path_join(dir, sub, &path) : bl_text_format(&path, "%s", dir)) != BL_OK) return;
    if ((fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) >= 0) {
        (void)fsync(fd);
        close(fd);
    }
    free(path);
}

/* The target of a relative symbolic link, made absolute; *target NULL: it is not one. */
static bl_status find_target(const bl_spool *s, const char *from, const char *path, char **target)
{
    char text[PATH_MAX], *dir, *full;
    ssize_t n = readlink(path, text, sizeof text - 1);

    *target = NULL;
    if (n < 0 || text[0] == '/') return BL_OK; /* rename reports a missing file */
    text[n] = '\0';
    BL_TRY(path_in(s->dir, from, "", &dir));
    full = realpath(dir, NULL);
    bl_status st = full ? bl_text_format(target, "%s/%s", full, text)
                        : bl_fail_errno(BL_EIO, "find the path of %s", dir);
    free(full);
    free(dir);
    return st;
}

/* The new link replaces the old one in one step: a crash leaves either. */
static bl_status fix_link(const bl_spool *s, const char *from, const char *path)
{
    char *target, *made = NULL;
    bl_status st;

    BL_TRY(find_target(s, from, path, &target));
    if (!target) return BL_OK;
    BL_TRY_GOTO(st, done, bl_text_format(&made, "%s/.ballast.link", s->dir));
    if ((unlink(made) != 0 && errno != ENOENT) || symlink(target, made) != 0 ||
        rename(made, path) != 0)
        st = bl_fail_errno(BL_EIO, "%s: link to %s", path, target);
done:
    free(made);
    free(target);
    return st;
}

/* A directory, which may have a job's name, neither replaces a file nor is replaced by one: then it
 * takes the first free name of NAME.1, NAME.2, ... */
static bool rename_to_free(const char *source, const char *target)
{
    enum { MAX_NAMES = 100000 };
    bool is_moved = rename(source, target) == 0;

    for (int i = 1; !is_moved && i < MAX_NAMES; i++) {
        char *other;
        struct stat info;
        if (errno != EISDIR && errno != ENOTDIR && errno != ENOTEMPTY && errno != EEXIST) break;
        int code = errno;
        if (bl_text_format(&other, "%s.%d", target, i) != BL_OK) break;
        is_moved = lstat(other, &info) != 0 && rename(source, other) == 0;
        if (!is_moved) errno = code;
        free(other);
    }
    return is_moved;
}

static bl_status move(const bl_spool *s, const char *name, const char *from, const char *to)
{
    char *source = NULL, *target = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, path_in(s->dir, from, name, &source));
    BL_TRY_GOTO(st, done, path_in(s->dir, to, name, &target));
    BL_TRY_GOTO(st, done, fix_link(s, from, source));
    if (!rename_to_free(source, target)) {
        st = bl_fail_errno(BL_EIO, "%s: rename to %s", source, target);
        goto done;
    }
    sync_dir(s->dir, to);
    sync_dir(s->dir, from);
done:
    free(source);
    free(target);
    return st;
}

bl_status bl_spool_begin(bl_spool *s, const char *name)
{
    return move(s, name, NULL, RUNNING);
}

static bl_status write_line(const bl_spool *s, const char *name, const char *end, const char *line)
{
    char *path = NULL, *text = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_text_format(&path, "%s/%s/%s.error", s->dir, end, name));
    BL_TRY_GOTO(st, done, bl_text_format(&text, "%s\n", line));
    st = bl_file_write_atomic(path, text, strlen(text));
done:
    free(path);
    free(text);
    return st;
}

bl_status bl_spool_end_job(bl_spool *s, const char *name, bool has_run, bl_spool_end end,
                           const char *line)
{
    BL_TRY(bl_dir_lock_check(s->lock));
    if (line && write_line(s, name, ends[end], line) != BL_OK) /* a name that is too long */
        bl_log_warning("job %s: %s", name, bl_error_text());
    s->n_ended[end]++;
    bl_status st = move(s, name, has_run ? RUNNING : NULL, ends[end]);
    if (st == BL_OK || bl_spool_has(s, name, has_run)) return st;
    bl_log_warning("job %s: its file was removed", name);
    return BL_OK;
}

bool bl_spool_stops(const bl_spool *s)
{
    char *path;

    if (bl_path_join(s->dir, STOP, &path) != BL_OK) return false;
    bool stops = access(path, F_OK) == 0;
    free(path);
    return stops;
}

void bl_spool_clear_stop(const bl_spool *s)
{
    char *path;

    if (bl_path_join(s->dir, STOP, &path) != BL_OK) return;
    (void)unlink(path);
    free(path);
}

int64_t bl_spool_count(const bl_spool *s, bl_spool_end end)
{
    return s->n_ended[end];
}
