/* SPDX-License-Identifier: Apache-2.0 */
/* files.c -- opens a reader's files, with O_DIRECT where the file system grants it. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "io/reader_internal.h"

/* out->fd: open already, or -1. */
static bl_status open_file(const char *path, bool direct, bl_io_file *out)
{
    if (!(out->path = strdup(path))) return BL_FAIL(BL_ENOMEM, "%s: opening it", path);
    if (out->fd < 0) BL_TRY(bl_file_open(path, &out->fd, NULL));
    /* Also takes back O_NONBLOCK, under which io_uring would give up instead of waiting. */
    bool granted = direct && fcntl(out->fd, F_SETFL, O_DIRECT) == 0;
    if (!granted && fcntl(out->fd, F_SETFL, 0) != 0) return bl_fail_errno(BL_EIO, "%s", path);
    atomic_init(&out->is_direct, granted);
    return BL_OK;
}

/* fd: of file 0, or -1. */
static bl_status open_files(const char *const *paths, int n_files, int fd, bool direct,
                            bl_io_files **out)
{
    bl_status st = BL_OK;

    *out = NULL;
    bl_io_files *files = calloc(1, sizeof *files + (size_t)n_files * sizeof files->file[0]);
    if (!files) {
        if (fd >= 0) close(fd);
        return BL_FAIL(BL_ENOMEM, "%d open files", n_files);
    }
    for (int i = 0; i < n_files; i++) files->file[i].fd = i == 0 ? fd : -1;
    files->n_files = n_files;
    atomic_init(&files->has_warned, false);
    files->warned = &files->has_warned;
    for (int i = 0; i < n_files; i++)
        BL_TRY_GOTO(st, done, open_file(paths[i], direct, &files->file[i]));
    *out = files;
    files = NULL;
done:
    bl_io_files_close(files);
    return st;
}

bl_status bl_io_files_open(const char *const *paths, int n_files, bool direct, bl_io_files **out)
{
    return open_files(paths, n_files, -1, direct, out);
}

bl_status bl_io_files_adopt(const char *path, int fd, bool direct, bl_io_files **out)
{
    return open_files(&path, 1, fd, direct, out);
}

void bl_io_files_warn_with(bl_io_files *files, bl_io_files *other)
{
    files->warned = other->warned;
}

int bl_io_files_descriptor(const bl_io_files *files, int index)
{
    return files->file[index].fd;
}

void bl_io_files_close(bl_io_files *files)
{
    if (!files) return;
    for (int i = 0; i < files->n_files; i++) {
        if (files->file[i].fd >= 0) close(files->file[i].fd);
        free(files->file[i].path);
    }
    free(files);
}
