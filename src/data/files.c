/* SPDX-License-Identifier: Apache-2.0 */
/* files.c -- the files that a data set is made of, and copies of the rows that cannot be read again
 * where they are: of compressed files, CSV and stdin. A copy is a temporary file without a name, in
 * TMPDIR; other processes of the host open it through /proc of the one that made it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/files.h"
#include "base/hub.h"
#include "base/log.h"
#include "base/sizes.h"
#include "data/internal.h"

enum { COPY_BYTES = 1 << 20 };

static const char *const row_names[] = {".jsonl", ".json", ".ndjson", ".csv", ".tsv"};
static const char *const packed_names[] = {".gz", ".zst"};
static const char *const other_names[] = {".parquet", ".arrow", ".feather",
                                          ".orc",     ".avro",  ".xlsx"};

static bool ends_in(const char *name, size_t n_name, const char *const *ends, size_t n,
                    size_t *n_end)
{
    for (size_t i = 0; i < n; i++) {
        *n_end = strlen(ends[i]);
        if (n_name > *n_end && !strncasecmp(name + n_name - *n_end, ends[i], *n_end)) return true;
    }
    return false;
}

/* The length of the name without .gz or .zst. */
static size_t plain_length(const char *name)
{
    size_t n = strlen(name), n_end;
    return ends_in(name, n, packed_names, BL_COUNT(packed_names), &n_end) ? n - n_end : n;
}

char bl_data_separator(const char *path)
{
    static const char *const csv = ".csv", *const tsv = ".tsv";
    size_t n_end, n = plain_length(path);

    return ends_in(path, n, &csv, 1, &n_end)   ? ','
           : ends_in(path, n, &tsv, 1, &n_end) ? '\t'
                                               : '\0';
}

/* ---- the list ---- */

static bl_status add_file(bl_samples *samples, const char *path, double share)
{
    bl_data_file *grown = realloc(samples->file, (samples->n_files + 1) * sizeof *grown);

    if (!grown) return BL_FAIL(BL_ENOMEM, "list of data files");
    samples->file = grown;
    bl_data_file *file = &samples->file[samples->n_files];
    *file = (bl_data_file){.path = strdup(path), .fd = -1, .share = share};
    if (!file->path) return BL_FAIL(BL_ENOMEM, "list of data files");
    samples->n_files++;
    return BL_OK;
}

static bl_status add_named(bl_samples *samples, const char *dir, const char *name, double share)
{
    size_t n_end, n = plain_length(name);
    char *path;

    if (name[0] == '.') return BL_OK;
    if (ends_in(name, strlen(name), other_names, BL_COUNT(other_names), &n_end))
        return BL_FAIL(BL_EINPUT,
                       "%s: has %s, which cannot be read: convert it to JSON lines (docs/data.md), "
                       "or remove it",
                       dir, name);
    if (!ends_in(name, n, row_names, BL_COUNT(row_names), &n_end)) return BL_OK;
    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = add_file(samples, path, share);
    free(path);
    return st;
}

static bl_status add_folder(bl_samples *samples, const char *dir, double share)
{
    size_t n_names = 0, n_before = samples->n_files;
    char **names = NULL;

    BL_TRY(bl_dir_list(dir, &names, &n_names));
    bl_status st = BL_OK;
    for (size_t i = 0; i < n_names && st == BL_OK; i++)
        st = add_named(samples, dir, names[i], share);
    bl_names_free(names, n_names);
    if (st == BL_OK && samples->n_files == n_before)
        st = BL_FAIL(BL_EINPUT,
                     "%s: a directory without data files (.jsonl, .json, .ndjson, .csv, .tsv, also "
                     "with .gz or .zst)",
                     dir);
    return st;
}

bl_status bl_data_files_list(bl_samples *samples, const bl_dataset_options *options)
{
    for (size_t i = 0; i <= options->n_more_paths; i++) {
        const char *path = i ? options->more_paths[i - 1] : options->path;
        double share = options->shares ? options->shares[i] : 1;
        bool is_dir = false;
        size_t n_end;
        if (!ends_in(path, plain_length(path), row_names, BL_COUNT(row_names), &n_end) ||
            strstr(path, "://"))
            BL_TRY(bl_hub_check_dataset(path));
        if (strcmp(path, "-")) BL_TRY(bl_path_is_dir(path, &is_dir));
        BL_TRY(is_dir ? add_folder(samples, path, share) : add_file(samples, path, share));
    }
    return BL_OK;
}

void bl_data_files_free(bl_samples *samples)
{
    for (size_t i = 0; i < samples->n_files; i++) {
        if (samples->file[i].fd >= 0) close(samples->file[i].fd);
        free(samples->file[i].path);
    }
    free(samples->file);
}

const bl_data_file *bl_data_file_of(const bl_samples *samples, size_t index)
{
    size_t low = 0, high = samples->n_files;

    while (high - low > 1) { /* the last file that begins at or before the sample */
        size_t middle = low + (high - low) / 2;
        *(samples->file[middle].first <= index ? &low : &high) = middle;
    }
    return &samples->file[low];
}

size_t bl_data_file_times(const bl_data_file *file, size_t row)
{
    return (size_t)((double)(row + 1) * file->share) - (size_t)((double)row * file->share);
}

/* ---- copies ---- */

bl_status bl_row_spool_create(bl_data_file *file)
{
    const char *dir = getenv("TMPDIR");
    char *path;

    file->is_copy = true;
    BL_TRY(bl_text_format(&path, "%s/ballast-rows-XXXXXX", dir && *dir ? dir : "/tmp"));
    file->fd = mkostemp(path, O_CLOEXEC);
    bl_status st = file->fd < 0 ? bl_fail_errno(BL_EIO, "%s: a copy of its rows at %s (TMPDIR)",
                                                file->path, path)
                                : BL_OK;
    if (file->fd >= 0) unlink(path);
    free(path);
    return st;
}

bl_status bl_row_spool_add(bl_row_spool *copy, bl_row *row)
{
    row->offset_bytes = copy->n_written + (int64_t)copy->text.n;
    BL_TRY(bl_bytes_append(&copy->text, row->text, row->n_bytes));
    return copy->text.n >= COPY_BYTES ? bl_row_spool_flush(copy) : BL_OK;
}

bl_status bl_row_spool_flush(bl_row_spool *copy)
{
    BL_TRY(bl_file_write_full(copy->file->fd, "the copy of rows in TMPDIR", copy->text.data,
                              copy->text.n, copy->n_written));
    copy->n_written += (int64_t)copy->text.n;
    copy->text.n = 0;
    return BL_OK;
}

/* ---- other processes of the host ---- */

/* What the first rank tells of a file; its path follows. */
typedef struct told_file {
    uint64_t first;
    int64_t pid, fd; /* of a copy; fd -1: none */
} told_file;

static bl_status take_file(bl_samples *samples, const told_file *told, const char *path)
{
    char link[64];

    BL_TRY(add_file(samples, path, 1));
    bl_data_file *file = &samples->file[samples->n_files - 1];
    file->first = (size_t)told->first;
    file->is_copy = told->fd >= 0;
    if (!file->is_copy) return bl_file_open(file->path, &file->fd, NULL);
    snprintf(link, sizeof link, "/proc/%lld/fd/%lld", (long long)told->pid, (long long)told->fd);
    file->fd = open(link, O_RDONLY | O_CLOEXEC);
    return file->fd >= 0 ? BL_OK
                         : bl_fail_errno(BL_EIO, "%s: the copy of its rows, %s", path, link);
}

bl_status bl_data_files_share(bl_samples *samples)
{
    bool is_first = bl_host_memory_rank(samples->host) == 0;
    uint64_t n_files = samples->n_files;

    BL_TRY(bl_host_memory_tell(samples->host, &n_files, sizeof n_files));
    for (uint64_t i = 0; i < n_files; i++) {
        told_file told;
        char path[BL_PLACE_BYTES * 8] = "";
        memset(&told, 0, sizeof told);
        if (is_first) {
            const bl_data_file *file = &samples->file[i];
            if (strlen(file->path) >= sizeof path)
                return BL_FAIL(BL_EUSAGE, "%s: a path of more than %zu bytes", file->path,
                               sizeof path - 1);
            told = (told_file){
                .first = file->first, .pid = getpid(), .fd = file->is_copy ? file->fd : -1};
            strcpy(path, file->path);
        }
        BL_TRY(bl_host_memory_tell(samples->host, &told, sizeof told));
        BL_TRY(bl_host_memory_tell(samples->host, path, sizeof path));
        if (!is_first) BL_TRY(take_file(samples, &told, path));
    }
    return BL_OK;
}
