/* SPDX-License-Identifier: Apache-2.0 */
/* files.c -- reading whole files, writing files that appear complete or not at all (temporary file,
 * fsync, rename), directories. */
#include "base/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file_progress.h"
#include "base/sizes.h"

/* ---- reading ---- */

/* A wrong path is a user error (BL_EINPUT); everything else is a system error. */
static bl_status fail_open(const char *path)
{
    bool wrong_path = errno == ENOENT || errno == ENOTDIR || errno == EACCES || errno == ELOOP ||
                      errno == ENAMETOOLONG || errno == EPERM || errno == EISDIR;
    return bl_fail_errno(wrong_path ? BL_EINPUT : BL_EIO, "%s", path);
}

static bl_status check_regular(bl_status otherwise, const char *path, const struct stat *info)
{
    if (S_ISREG(info->st_mode)) return BL_OK;
    const char *kind = S_ISDIR(info->st_mode)    ? "a folder"
                       : S_ISFIFO(info->st_mode) ? "a FIFO"
                       : S_ISSOCK(info->st_mode) ? "a socket"
                                                 : "a device";
    return BL_FAIL(otherwise, "%s: is %s, not a regular file", path, kind);
}

bl_status bl_file_open(const char *path, int *fd, int64_t *n_bytes)
{
    struct stat info;

    *fd = -1;
    if (stat(path, &info) != 0) return fail_open(path);
    BL_TRY(check_regular(BL_EINPUT, path, &info));
    /* O_NONBLOCK: should the name have become a FIFO since, open must still return. */
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0) return fail_open(path);
    bl_status st = fstat(opened, &info) == 0 ? check_regular(BL_EINPUT, path, &info)
                                             : bl_fail_errno(BL_EIO, "%s", path);
    if (st != BL_OK) {
        close(opened);
        return st;
    }
    *fd = opened;
    if (n_bytes) *n_bytes = info.st_size;
    return BL_OK;
}

bl_status bl_file_read_full(int fd, const char *path, void *dst, size_t n_bytes,
                            int64_t offset_bytes)
{
    char *to = dst;

    while (n_bytes > 0) {
        ssize_t got = pread(fd, to, n_bytes, offset_bytes);
        if (got < 0) {
            if (errno == EINTR) continue;
            return bl_fail_errno(BL_EIO, "%s: reading %zu bytes at offset %" PRId64, path, n_bytes,
                                 offset_bytes);
        }
        if (got == 0)
            return BL_FAIL(BL_EIO,
                           "%s: ends at offset %" PRId64 ", where %zu more bytes are expected",
                           path, offset_bytes, n_bytes);
        bl_file_note_move();
        to += got;
        n_bytes -= (size_t)got;
        offset_bytes += got;
    }
    return BL_OK;
}

bl_status bl_file_read_all(const char *path, size_t max_bytes, void **bytes, size_t *n_bytes)
{
    bl_status st = BL_OK;
    char *block = NULL;
    int64_t size = 0;
    int fd = -1;

    *bytes = NULL;
    *n_bytes = 0;
    BL_TRY(bl_file_open(path, &fd, &size));
    if ((uint64_t)size > max_bytes) {
        st = BL_FAIL(BL_EINPUT, "%s: is %" PRId64 " bytes, more than the limit of %zu", path, size,
                     max_bytes);
        goto done;
    }
    if (!(block = malloc((size_t)size + 1))) {
        st = BL_FAIL(BL_ENOMEM, "%s: %" PRId64 " bytes", path, size);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_file_read_full(fd, path, block, (size_t)size, 0));
    block[size] = '\0';
    *bytes = block;
    *n_bytes = (size_t)size;
    block = NULL;
done:
    free(block);
    close(fd);
    return st;
}

bl_status bl_text_skip_mark(const char *path, const char **text, size_t *n_bytes)
{
    static const struct {
        const char *bytes, *name;
        size_t n_bytes;
    } marks[] = {{"\xef\xbb\xbf", NULL, 3},
                 {"\xff\xfe\0\0", "UTF-32", 4},
                 {"\0\0\xfe\xff", "UTF-32", 4},
                 {"\xff\xfe", "UTF-16", 2},
                 {"\xfe\xff", "UTF-16", 2}};

    for (size_t i = 0; i < BL_COUNT(marks); i++) {
        if (*n_bytes < marks[i].n_bytes || memcmp(*text, marks[i].bytes, marks[i].n_bytes))
            continue;
        if (marks[i].name)
            return BL_FAIL(BL_EINPUT, "%s: the text is %s; save it as UTF-8", path, marks[i].name);
        *text += marks[i].n_bytes;
        *n_bytes -= marks[i].n_bytes;
        break;
    }
    return BL_OK;
}

bl_status bl_path_is_dir(const char *path, bool *is_dir)
{
    struct stat info;

    *is_dir = false;
    if (stat(path, &info) != 0) return fail_open(path);
    *is_dir = S_ISDIR(info.st_mode);
    return BL_OK;
}

bl_status bl_path_exists(const char *path, bool *exists)
{
    struct stat info;

    *exists = stat(path, &info) == 0;
    return *exists || errno == ENOENT || errno == ENOTDIR ? BL_OK : fail_open(path);
}

bool bl_file_exists(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0;
}

/* ---- writing ---- */

bl_status bl_file_write_full(int fd, const char *path, const void *src, size_t n_bytes,
                             int64_t offset_bytes)
{
    const char *from = src;

    while (n_bytes > 0) {
        ssize_t put = pwrite(fd, from, n_bytes, offset_bytes);
        if (put < 0) {
            if (errno == EINTR) continue;
            return bl_fail_errno(BL_EIO, "%s: writing %zu bytes at offset %" PRId64, path, n_bytes,
                                 offset_bytes);
        }
        bl_file_note_move();
        from += put;
        n_bytes -= (size_t)put;
        offset_bytes += put;
    }
    return BL_OK;
}

bl_status bl_file_sync(int fd, const char *path)
{
    bl_file_note_sync(true);
    bl_status st = fsync(fd) == 0 ? BL_OK : bl_fail_errno(BL_EIO, "%s: fsync", path);
    bl_file_note_sync(false);
    return st;
}

bl_status bl_dir_sync(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return bl_fail_errno(BL_EIO, "%s", path);
    bl_status st = bl_file_sync(fd, path);
    close(fd);
    return st;
}

bl_status bl_file_check_output(const char *path)
{
    static const char of_process[] = "/proc/";
    char target[sizeof of_process];
    struct stat info;

    if (stat(path, &info) == 0) BL_TRY(check_regular(BL_EUSAGE, path, &info));
    ssize_t n_bytes =
        readlink(path, target, sizeof target); /* as /dev/stdout: renaming would replace the link */
    if (n_bytes >= (ssize_t)sizeof of_process - 1 &&
        memcmp(target, of_process, sizeof of_process - 1) == 0)
        return BL_FAIL(BL_EUSAGE, "%s: is a link to an open file of a process, not a regular file",
                       path);
    return BL_OK;
}

/* The folder that holds `path`, as a new block. */
static bl_status parent_of(const char *path, char **out)
{
    const char *slash = strrchr(path, '/');
    if (!slash) return bl_text_format(out, ".");
    if (slash == path) return bl_text_format(out, "/");
    return bl_text_format(out, "%.*s", (int)(slash - path), path);
}

struct bl_writer {
    char *path;
    char *tmp_path;
    char *parent;
    int64_t n_bytes;
    int fd; /* -1 once closed */
};

static void writer_free(bl_writer *writer)
{
    if (writer->fd >= 0) close(writer->fd);
    free(writer->path);
    free(writer->tmp_path);
    free(writer->parent);
    free(writer);
}

/* Removes a file that a crash left, or a link, but not the link's target. Anything else stays, and
 * creating the file fails. */
static void remove_stale_tmp(const char *tmp_path)
{
    struct stat info;
    if (lstat(tmp_path, &info) == 0 && (S_ISREG(info.st_mode) || S_ISLNK(info.st_mode)))
        unlink(tmp_path);
}

bl_status bl_writer_open(const char *path, bl_writer **out)
{
    bl_status st = BL_OK;
    bl_writer *writer = calloc(1, sizeof *writer);

    *out = NULL;
    if (!writer) return BL_FAIL(BL_ENOMEM, "%s: a file writer", path);
    writer->fd = -1;
    BL_TRY_GOTO(st, done, bl_text_format(&writer->path, "%s", path));
    BL_TRY_GOTO(st, done, bl_text_format(&writer->tmp_path, "%s.tmp", path));
    BL_TRY_GOTO(st, done, parent_of(path, &writer->parent));
    BL_TRY_GOTO(st, done, bl_file_check_output(path));
    remove_stale_tmp(writer->tmp_path);
    writer->fd = open(writer->tmp_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (writer->fd < 0) {
        st = bl_fail_errno(BL_EIO, "%s: creating it", writer->tmp_path);
        goto done;
    }
    *out = writer;
    writer = NULL;
done:
    if (writer) writer_free(writer);
    return st;
}

bl_status bl_writer_append(bl_writer *writer, const void *bytes, size_t n_bytes)
{
    BL_TRY(bl_file_write_full(writer->fd, writer->tmp_path, bytes, n_bytes, writer->n_bytes));
    writer->n_bytes += (int64_t)n_bytes;
    return BL_OK;
}

bl_status bl_writer_put(bl_writer *writer, int64_t offset_bytes, const void *bytes, size_t n_bytes)
{
    BL_TRY(bl_file_write_full(writer->fd, writer->tmp_path, bytes, n_bytes, offset_bytes));
    writer->n_bytes += (int64_t)n_bytes;
    return BL_OK;
}

int64_t bl_writer_bytes(const bl_writer *writer)
{
    return writer->n_bytes;
}

bl_status bl_writer_commit(bl_writer *writer)
{
    bl_status st = BL_OK;

    BL_TRY_GOTO(st, done, bl_file_sync(writer->fd, writer->tmp_path));
    int closed = close(writer->fd);
    writer->fd = -1;
    if (closed != 0 &&
        errno != EINTR) { /* interrupted: it is closed all the same, and was synced */
        st = bl_fail_errno(BL_EIO, "%s: close", writer->tmp_path);
        goto done;
    }
    if (rename(writer->tmp_path, writer->path) != 0) {
        st = bl_fail_errno(BL_EIO, "%s: renaming it to %s", writer->tmp_path, writer->path);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_dir_sync(writer->parent));
done:
    if (st != BL_OK) unlink(writer->tmp_path);
    writer_free(writer);
    return st;
}

void bl_writer_abort(bl_writer *writer)
{
    if (!writer) return;
    unlink(writer->tmp_path);
    writer_free(writer);
}

bl_status bl_file_write_atomic(const char *path, const void *bytes, size_t n_bytes)
{
    bl_writer *writer;

    BL_TRY(bl_writer_open(path, &writer));
    bl_status st = bl_writer_append(writer, bytes, n_bytes);
    if (st != BL_OK) {
        bl_writer_abort(writer);
        return st;
    }
    return bl_writer_commit(writer);
}

/* ---- folders ---- */

/* One folder, its parent being there; a new one is made durable in it. */
static bl_status create_folder(const char *path, mode_t mode)
{
    char *parent = NULL;

    if (mkdir(path, mode) != 0) {
        if (errno == EEXIST) return BL_OK;
        return bl_fail_errno(errno == ENOTDIR ? BL_EINPUT : BL_EIO, "%s: creating the folder",
                             path);
    }
    BL_TRY(parent_of(path, &parent));
    bl_status st = bl_dir_sync(parent);
    free(parent);
    return st;
}

static bl_status check_folder(const char *path)
{
    struct stat info;

    if (stat(path, &info) != 0) return bl_fail_errno(BL_EIO, "%s", path);
    if (!S_ISDIR(info.st_mode)) return BL_FAIL(BL_EINPUT, "%s: exists and is not a folder", path);
    return BL_OK;
}

/* mode: of the last folder, when it is new. */
static bl_status create_path(const char *path, mode_t mode)
{
    bl_status st = BL_OK;
    char *prefix = NULL;

    BL_TRY(bl_text_format(&prefix, "%s", path));
    for (char *at = prefix + (*prefix == '/');; at++) {
        if (*at != '/' && *at != '\0') continue;
        char separator = *at;
        *at = '\0';
        if (*prefix && at[-1] != '/')
            BL_TRY_GOTO(st, done, create_folder(prefix, separator ? 0777 : mode));
        *at = separator;
        if (separator == '\0') break;
    }
    st = check_folder(path);
done:
    free(prefix);
    return st;
}

bl_status bl_dir_create_child(const char *path)
{
    BL_TRY(create_folder(path, 0777));
    return check_folder(path);
}

bl_status bl_dir_create(const char *path)
{
    return create_path(path, 0777);
}

bl_status bl_dir_create_private(const char *path)
{
    return create_path(path, 0700);
}

bl_status bl_path_check_private(const char *path)
{
    struct stat info;

    if (stat(path, &info) != 0) return errno == ENOENT ? BL_OK : fail_open(path);
    if (info.st_uid != geteuid() && info.st_uid != 0)
        return BL_FAIL(BL_EUSAGE, "%s: belongs to another user (uid %ld): use a path of your own",
                       path, (long)info.st_uid);
    bool sticky = S_ISDIR(info.st_mode) && (info.st_mode & S_ISVTX) != 0;
    if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0 && !sticky)
        return BL_FAIL(BL_EUSAGE, "%s: other users may write it (mode %03o): chmod go-w %s", path,
                       (unsigned)(info.st_mode & 0777), path);
    return BL_OK;
}

static int remove_entry(const char *path, const struct stat *info, int flag, struct FTW *walk)
{
    (void)info, (void)flag, (void)walk;
    bool is_removed = remove(path) == 0 || errno == ENOENT;
    bl_file_note_move();
    return !is_removed;
}

bl_status bl_tree_remove(const char *path)
{
    enum { MAX_OPEN_FOLDERS = 16 };

    if (nftw(path, remove_entry, MAX_OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT)
        return bl_fail_errno(BL_EIO, "%s: removing it", path);
    return BL_OK;
}

static _Thread_local int64_t tree_bytes;

static int add_entry(const char *path, const struct stat *info, int flag, struct FTW *walk)
{
    (void)path, (void)walk;
    if (flag == FTW_F && info->st_nlink == 1) tree_bytes += (int64_t)info->st_blocks * 512;
    return 0;
}

int64_t bl_tree_bytes(const char *path)
{
    enum { MAX_OPEN_FOLDERS = 16 };

    tree_bytes = 0;
    (void)nftw(path, add_entry, MAX_OPEN_FOLDERS, FTW_PHYS);
    return tree_bytes;
}

static uint64_t open_folder(const char *path)
{
    struct stat info;
    uint64_t inode = 0;

    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return 0;
    if (fstat(fd, &info) == 0) inode = info.st_ino;
    close(fd);
    return inode;
}

uint64_t bl_dir_look_anew(const char *path)
{
    char *prefix = strdup(path);

    if (!prefix) return open_folder(path);
    if (*prefix != '/') open_folder(".");
    for (char *at = prefix; (at = strchr(at, '/')); at++) {
        if (at == prefix) continue;
        *at = '\0';
        open_folder(prefix);
        *at = '/';
    }
    free(prefix);
    return open_folder(path);
}

bl_status bl_dir_free_bytes(const char *path, int64_t *n_bytes)
{
    struct statvfs info;
    size_t free_bytes;

    *n_bytes = 0;
    if (statvfs(path, &info) != 0) return fail_open(path);
    if (bl_mul_overflows(info.f_bavail, info.f_frsize, &free_bytes) || free_bytes > INT64_MAX)
        free_bytes = INT64_MAX;
    *n_bytes = (int64_t)free_bytes;
    return BL_OK;
}

bool bl_dir_is_in_memory(const char *path)
{
    struct statfs info;
    return statfs(path, &info) == 0 && (info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

bl_status bl_dir_list(const char *path, char ***names, size_t *n_names)
{
    bl_status st = BL_OK;
    char **list = NULL;
    size_t n = 0, capacity = 0;
    struct dirent *entry;

    *names = NULL;
    *n_names = 0;
    DIR *dir = opendir(path);
    if (!dir) return fail_open(path);
    while (errno = 0, (entry = readdir(dir)) != NULL) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (n == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            char **grown = reallocarray(list, capacity, sizeof *grown);
            if (!grown) {
                st = BL_FAIL(BL_ENOMEM, "%s: a list of %zu names", path, capacity);
                goto done;
            }
            list = grown;
        }
        BL_TRY_GOTO(st, done, bl_text_format(&list[n], "%s", entry->d_name));
        n++;
    }
    if (errno != 0) {
        st = bl_fail_errno(BL_EIO, "%s: listing it", path);
        goto done;
    }
    if (n) qsort(list, n, sizeof *list, compare_names);
    *names = list;
    *n_names = n;
    list = NULL;
done:
    bl_names_free(list, n);
    closedir(dir);
    return st;
}

void bl_names_free(char **names, size_t n_names)
{
    for (size_t i = 0; names && i < n_names; i++) free(names[i]);
    free(names);
}

/* ---- names ---- */

bl_status bl_text_format(char **out, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    int length = vasprintf(out, format, args);
    va_end(args);
    if (length >= 0) return BL_OK;
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "a text");
}

bool bl_text_ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

bl_status bl_path_join(const char *dir, const char *name, char **out)
{
    size_t length = strlen(dir);
    const char *separator = length == 0 || dir[length - 1] == '/' ? "" : "/";
    return bl_text_format(out, "%s%s%s", dir, separator, name);
}
