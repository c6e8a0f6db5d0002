/* SPDX-License-Identifier: Apache-2.0 */
/* page_file.c -- one page file and its list: found by key and verified by its seal, or written
 * under a temporary name and renamed. */
#include "offload/page_file_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "offload/page_writer_internal.h"

enum { READ_DEPTH = 4, STAT_BLOCK_BYTES = 512 };

/* A file that does not have its final name yet. */
typedef struct tmp_file {
    char *path; /* NULL once it has its final name */
    int fd;     /* -1: none */
} tmp_file;

struct bl_page_file {
    char *dir, *path, *list_path;
    bl_page_owner owner;
    int64_t n_bytes;    /* with the seal */
    bl_io_files *files; /* READING */

    tmp_file tmp; /* WRITING */
    bl_page_writer *writer;
};

/* The directory is the run's own: an unreadable file there is BL_EIO, not bad input. */
static bl_status of_folder(bl_status st)
{
    return st == BL_EINPUT ? BL_EIO : st;
}

/* ---- files under construction ---- */

static int lock_file(int fd, int how)
{
    int result;
    while ((result = flock(fd, how)) != 0 && errno == EINTR) continue;
    return result;
}

/* Removes a file whose lock is free. Where files cannot be locked it is kept. */
static void remove_stale(const char *path)
{
    struct stat opened, named;

    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0) return;
    if (lock_file(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &opened) == 0 &&
        stat(path, &named) == 0 && opened.st_ino == named.st_ino)
        unlink(path);
    close(fd);
}

static void tmp_abandon(tmp_file *tmp)
{
    if (tmp->fd >= 0 && tmp->path) unlink(tmp->path);
    if (tmp->fd >= 0) close(tmp->fd);
    free(tmp->path);
    *tmp = (tmp_file){.fd = -1};
}

/* A new file "PATH.tmp-PID-N", locked. N differs between threads, and between hosts of a shared
 * directory. */
static bl_status tmp_create(const char *path, tmp_file *out)
{
    struct stat info;

    *out = (tmp_file){.fd = -1};
    for (int n = 0;; n++) {
        BL_TRY(bl_text_format(&out->path, "%s.tmp-%ld-%d", path, (long)getpid(), n));
        out->fd = open(out->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (out->fd < 0 && errno != EEXIST && errno != EINTR) {
            bl_status st = bl_fail_errno(BL_EIO, "%s: creating it", out->path);
            tmp_abandon(out);
            return st;
        }
        /* Between open and lock another process may have removed it as stale. Without locks of the
         * file system it continues: no file counts as stale there. */
        if (out->fd >= 0 &&
            (lock_file(out->fd, LOCK_EX) != 0 || fstat(out->fd, &info) != 0 || info.st_nlink > 0))
            return BL_OK;
        if (out->fd >= 0) close(out->fd);
        free(out->path);
        *out = (tmp_file){.fd = -1};
    }
}

/* It stays open and locked, so that no process takes it for one without a list. */
static bl_status tmp_rename(tmp_file *tmp, const char *path)
{
    if (rename(tmp->path, path) != 0)
        return bl_fail_errno(BL_EIO, "%s: renaming it to %s", tmp->path, path);
    free(tmp->path);
    tmp->path = NULL;
    return BL_OK;
}

/* What crashes have left: files under construction, and a page file without a list. */
static bl_status remove_rubbish(const bl_page_file *file)
{
    const char *const finals[] = {file->path, file->list_path};
    bl_status st = BL_OK;
    char **names = NULL;
    size_t n_names = 0;
    bool has_list;

    BL_TRY(of_folder(bl_dir_list(file->dir, &names, &n_names)));
    for (size_t i = 0; i < n_names && st == BL_OK; i++)
        for (size_t j = 0; j < BL_COUNT(finals) && st == BL_OK; j++) {
            const char *final = strrchr(finals[j], '/') + 1;
            size_t length = strlen(final);
            char *path = NULL;
            if (strncmp(names[i], final, length) != 0 ||
                strncmp(names[i] + length, ".tmp-", 5) != 0)
                continue;
            st = bl_path_join(file->dir, names[i], &path);
            if (st == BL_OK) remove_stale(path);
            free(path);
        }
    bl_names_free(names, n_names);
    if (st == BL_OK) st = of_folder(bl_path_exists(file->list_path, &has_list));
    if (st == BL_OK && !has_list) remove_stale(file->path);
    return st;
}

/* ---- reading ---- */

bl_status bl_page_file_read(const bl_page_file *file, int64_t offset_bytes, void *dst,
                            size_t n_bytes)
{
    const int64_t n_requests = bl_ceil_div((int64_t)n_bytes, BL_IO_CHUNK_BYTES),
                  n_aligned = bl_round_up((int64_t)n_bytes, BL_IO_ALIGN_BYTES);
    const bl_reader_options options = {.engine = BL_IO_PREAD, /* a thread per request at a time */
                                       .queue_depth = (int)bl_min_i64(n_requests, READ_DEPTH),
                                       .chunk_bytes =
                                           (size_t)bl_min_i64(n_aligned, BL_IO_CHUNK_BYTES)};
    bl_io_read read = {.offset_bytes = offset_bytes, .n_bytes = n_bytes, .dst = dst};
    bl_reader *reader;

    if (n_bytes == 0) return BL_OK;
    BL_TRY(bl_reader_create(&options, file->files, &reader));
    bl_status st = bl_reader_submit(reader, &read);
    if (st == BL_OK) st = bl_reader_wait(reader, &read);
    bl_reader_destroy(reader);
    return st;
}

static void make_seal(uint64_t list_hash, char seal[BL_IO_ALIGN_BYTES])
{
    memset(seal, 0, BL_IO_ALIGN_BYTES);
    snprintf(seal, BL_IO_ALIGN_BYTES, "ballast-pages-2 %016" PRIx64 "\n", list_hash);
}

/* Opens the file for readers; BL_EINPUT only when it is not the one of the list. */
static bl_status open_sealed(bl_page_file *file, uint64_t list_hash)
{
    const char *const path = file->path;
    char expected[BL_IO_ALIGN_BYTES], found[BL_IO_ALIGN_BYTES];

    BL_TRY(of_folder(bl_io_files_open(&path, 1, true, &file->files)));
    make_seal(list_hash, expected);
    bl_status st = bl_page_file_read(file, file->n_bytes - BL_IO_ALIGN_BYTES, found, sizeof found);
    if (st == BL_OK && memcmp(expected, found, sizeof found) != 0)
        st = BL_FAIL(BL_EINPUT, "%s: does not belong to its list, or one of them is damaged", path);
    if (st == BL_OK) return BL_OK;
    bl_io_files_close(file->files);
    file->files = NULL;
    return st;
}

/* Weights that another user could have written are not used, and not replaced either. */
static bl_status check_owner(const bl_page_file *file)
{
    BL_TRY(bl_path_check_private(file->list_path));
    return bl_path_check_private(file->path);
}

/* BL_EINPUT or BL_EIO: no file is complete. */
static bl_status find_whole(bl_page_file *file, size_t n_places, bl_page_place *places)
{
    uint64_t list_hash = 0;
    int64_t n_bytes = 0;
    int fd;

    BL_TRY(bl_page_list_read(file->list_path, &file->owner, n_places, places, &file->n_bytes,
                             &list_hash));
    BL_TRY(bl_file_open(file->path, &fd, &n_bytes));
    close(fd);
    if (n_bytes != file->n_bytes)
        return BL_FAIL(BL_EINPUT, "%s: is %" PRId64 " bytes, its list says %" PRId64, file->path,
                       n_bytes, file->n_bytes);
    return open_sealed(file, list_hash);
}

/* ---- writing ---- */

/* Pages in the order they were given; the seal. */
static bl_status place_pages(bl_page_file *file, size_t n_places, bl_page_place *places)
{
    size_t end = 0;

    for (size_t i = 0; i < n_places; i++) {
        size_t taken = places[i].n_bytes ? places[i].n_bytes : 1;
        places[i].offset_bytes = (int64_t)end;
        if (taken > INT64_MAX / 2 ||
            bl_add_overflows(end, (size_t)bl_round_up((int64_t)taken, BL_IO_ALIGN_BYTES), &end) ||
            end > INT64_MAX / 2)
            return BL_FAIL(BL_ELIMIT, "%s: pages of more bytes than can be counted", file->dir);
    }
    file->n_bytes = (int64_t)end + BL_IO_ALIGN_BYTES;
    return BL_OK;
}

/* The file that was rejected stays until another has its name, unless the disk lacks its space and
 * no more. */
static bl_status measure_space(bl_page_file *file, int64_t *free_bytes)
{
    struct stat rejected;

    BL_TRY(of_folder(bl_dir_free_bytes(file->dir, free_bytes)));
    if (*free_bytes >= file->n_bytes || stat(file->path, &rejected) != 0 ||
        file->n_bytes - *free_bytes > (int64_t)rejected.st_blocks * STAT_BLOCK_BYTES)
        return BL_OK;
    bl_page_file_distrust(file);
    remove_stale(file->path);
    return of_folder(bl_dir_free_bytes(file->dir, free_bytes));
}

/* Ranks that share a disk would all find the same bytes free: each allocates its bytes at once. */
static bl_status take_space(bl_page_file *file)
{
    int64_t free_bytes;
    int result;

    BL_TRY(measure_space(file, &free_bytes));
    if (free_bytes < file->n_bytes)
        return BL_FAIL(BL_ELIMIT,
                       "%s: the page file takes %" PRId64 " bytes, the disk has %" PRId64,
                       file->dir, file->n_bytes, free_bytes);
    BL_TRY(tmp_create(file->path, &file->tmp));
    while ((result = fallocate(file->tmp.fd, 0, 0, file->n_bytes)) != 0 && errno == EINTR) continue;
    if (result != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        return bl_fail_errno(BL_ELIMIT,
                             "%s: the page file takes %" PRId64 " bytes, the disk had %" PRId64,
                             file->tmp.path, file->n_bytes, free_bytes);
    return BL_OK; /* other refusals: a file system that cannot tell in advance */
}

static bl_status begin_writing(bl_page_file *file, int n_writers, size_t n_places,
                               bl_page_place *places)
{
    size_t largest_bytes = BL_IO_ALIGN_BYTES; /* the seal */

    for (size_t i = 0; i < n_places; i++)
        if (places[i].n_bytes > largest_bytes) largest_bytes = places[i].n_bytes;
    BL_TRY(place_pages(file, n_places, places));
    BL_TRY(take_space(file));
    return bl_page_writer_create(file->tmp.fd, file->tmp.path, n_writers, largest_bytes,
                                 &file->writer);
}

static void stop_writing(bl_page_file *file)
{
    bl_page_writer_destroy(file->writer); /* first: it writes to the file */
    file->writer = NULL;
    tmp_abandon(&file->tmp);
}

static bl_status check_writing(const bl_page_file *file)
{
    return file->writer ? BL_OK : BL_FAIL(BL_EINTERNAL, "%s: is not being written", file->path);
}

bl_status bl_page_file_begin(bl_page_file *file, const char *name, int64_t offset_bytes)
{
    BL_TRY(check_writing(file));
    bl_page_writer_begin(file->writer, name, offset_bytes);
    return BL_OK;
}

bl_status bl_page_file_append(bl_page_file *file, const void *bytes, size_t n_bytes)
{
    BL_TRY(check_writing(file));
    bl_status st = bl_page_writer_append(file->writer, bytes, n_bytes);
    if (st != BL_OK) stop_writing(file);
    return st;
}

bl_status bl_page_file_end(bl_page_file *file)
{
    BL_TRY(check_writing(file));
    bl_status st = bl_page_writer_end(file->writer);
    if (st != BL_OK) stop_writing(file);
    return st;
}

/* The pages, the list, each durable before its rename. */
static bl_status rename_both(bl_page_file *file, const char *text)
{
    bl_status st = BL_OK;
    tmp_file list;

    BL_TRY(tmp_create(file->list_path, &list));
    BL_TRY_GOTO(st, done, bl_file_write_full(list.fd, list.path, text, strlen(text), 0));
    BL_TRY_GOTO(st, done, bl_file_sync(list.fd, list.path));
    BL_TRY_GOTO(st, done, bl_file_sync(file->tmp.fd, file->tmp.path));
    BL_TRY_GOTO(st, done, tmp_rename(&file->tmp, file->path));
    BL_TRY_GOTO(st, done, tmp_rename(&list, file->list_path));
    st = bl_dir_sync(file->dir);
done:
    tmp_abandon(&list);
    return st;
}

bl_status bl_page_file_publish(bl_page_file *file, size_t n_places, const bl_page_place *places)
{
    bl_status st = BL_OK;
    char seal[BL_IO_ALIGN_BYTES];
    uint64_t list_hash = 0;
    char *text = NULL;

    BL_TRY(check_writing(file));
    BL_TRY_GOTO(
        st, done,
        bl_page_list_write(&file->owner, file->n_bytes, n_places, places, &text, &list_hash));
    make_seal(list_hash, seal);
    BL_TRY_GOTO(st, done, bl_page_file_begin(file, NULL, file->n_bytes - BL_IO_ALIGN_BYTES));
    BL_TRY_GOTO(st, done, bl_page_file_append(file, seal, sizeof seal));
    BL_TRY_GOTO(st, done, bl_page_file_end(file));
    BL_TRY_GOTO(st, done, bl_page_writer_wait(file->writer));
    BL_TRY_GOTO(st, done, rename_both(file, text));
    st = open_sealed(file, list_hash);
    if (st == BL_EINPUT)
        st = bl_error_prefix(BL_EUSAGE,
                             "another run with other pages has just written the same file");
done:
    stop_writing(file);
    free(text);
    return st;
}

bl_status bl_page_file_take(bl_page_file *file)
{
    bl_status st = BL_OK;

    BL_TRY(check_writing(file));
    BL_TRY_GOTO(st, done, bl_page_writer_wait(file->writer));
    int fd = open(file->tmp.path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        st = bl_fail_errno(BL_EIO, "%s: opening it", file->tmp.path);
    else
        st = bl_io_files_adopt(file->path, fd, true, &file->files);
done:
    stop_writing(file); /* with its name */
    return st;
}

/* ---- the file ---- */

bl_io_files *bl_page_file_files(const bl_page_file *file)
{
    return file->files;
}

const char *bl_page_file_path(const bl_page_file *file)
{
    return file->path;
}

void bl_page_file_distrust(bl_page_file *file)
{
    unlink(file->list_path);
}

void bl_page_file_close(bl_page_file *file)
{
    if (!file) return;
    stop_writing(file);
    bl_io_files_close(file->files);
    free(file->dir);
    free(file->path);
    free(file->list_path);
    free(file);
}

static bl_status name_files(bl_page_file *file, const char *dir)
{
    const bl_page_owner *owner = &file->owner;

    BL_TRY(bl_text_format(&file->dir, "%s", *dir ? dir : "."));
    BL_TRY(bl_text_format(&file->path, "%s/base-%016" PRIx64 "-%d-of-%d.pages", file->dir,
                          owner->key, owner->shard, owner->n_shards));
    return bl_text_format(&file->list_path, "%s/base-%016" PRIx64 "-%d-of-%d.json", file->dir,
                          owner->key, owner->shard, owner->n_shards);
}

static bl_status create(const char *dir, const bl_page_owner *owner, bl_page_file **out)
{
    bl_page_file *file = calloc(1, sizeof *file);

    *out = file;
    if (!file) return BL_FAIL(BL_ENOMEM, "%s: a page file", dir);
    file->owner = *owner;
    file->tmp.fd = -1;
    BL_TRY(name_files(file, dir));
    return remove_rubbish(file);
}

bl_status bl_page_file_create(const char *dir, const bl_page_owner *owner, int n_writers,
                              size_t n_places, bl_page_place *places, bl_page_file **out)
{
    bl_page_file *file;

    *out = NULL;
    bl_status st = create(dir, owner, &file);
    if (st == BL_OK) st = begin_writing(file, n_writers, n_places, places);
    if (st != BL_OK) {
        bl_page_file_close(file);
        return st;
    }
    *out = file;
    return BL_OK;
}

bl_status bl_page_file_open(const char *dir, const bl_page_owner *owner, int n_writers,
                            size_t n_places, bl_page_place *places, bool *is_whole,
                            bl_page_file **out)
{
    bl_status st = BL_OK;
    bl_page_file *file;

    *out = NULL;
    *is_whole = false;
    BL_TRY_GOTO(st, done, create(dir, owner, &file));
    BL_TRY_GOTO(st, done, check_owner(file));
    if (bl_file_exists(file->list_path)) {
        st = find_whole(file, n_places, places);
        *is_whole = st == BL_OK;
        if (st != BL_OK && st != BL_EINPUT && st != BL_EIO) goto done;
        if (st != BL_OK) bl_log_info("the page file is written anew: %s", bl_error_text());
    }
    if (!*is_whole) BL_TRY_GOTO(st, done, begin_writing(file, n_writers, n_places, places));
    *out = file;
    file = NULL;
done:
    bl_page_file_close(file);
    return st;
}
