/* SPDX-License-Identifier: Apache-2.0 */
/* scratch.c -- an unnamed file of a given size (O_TMPFILE, or a name that is removed at once). */
#include "offload/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/files.h"

/* For file systems without O_TMPFILE. */
static bl_status open_named(const char *dir, int *fd)
{
    char *path = NULL;

    BL_TRY(bl_text_format(&path, "%s/state.tmp-XXXXXX", dir));
    *fd = mkostemp(path, O_CLOEXEC);
    bl_status st = *fd >= 0 ? BL_OK : bl_fail_errno(BL_EIO, "%s: creating it", path);
    if (st == BL_OK && unlink(path) != 0) st = bl_fail_errno(BL_EIO, "%s: removing it", path);
    free(path);
    return st;
}

static bl_status open_unnamed(const char *dir, int *fd)
{
    while ((*fd = open(dir, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600)) < 0 && errno == EINTR) continue;
    if (*fd >= 0) return BL_OK;
    if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL) return open_named(dir, fd);
    return bl_fail_errno(BL_EIO, "%s: creating a file in it", dir);
}

static bl_status lacks_space(const char *dir, const char *what, int64_t n_bytes, int64_t free_bytes)
{
    return BL_FAIL(BL_ELIMIT, "%s: the %s takes %" PRId64 " bytes, the disk has %" PRId64, dir,
                   what, n_bytes, free_bytes);
}

static bl_status take_space(const char *dir, const char *what, int64_t n_bytes, int fd)
{
    int64_t free_bytes;
    int result;

    BL_TRY(bl_dir_free_bytes(dir, &free_bytes));
    if (free_bytes < n_bytes) return lacks_space(dir, what, n_bytes, free_bytes);
    while ((result = fallocate(fd, 0, 0, n_bytes)) != 0 && errno == EINTR) continue;
    if (result != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        return lacks_space(dir, what, n_bytes, free_bytes);
    if (result != 0 && ftruncate(fd, n_bytes) != 0) /* the file system cannot allocate in advance */
        return bl_fail_errno(BL_EIO, "%s: making room for the %s", dir, what);
    return BL_OK;
}

bl_status bl_scratch_open(const char *dir, const char *what, int64_t n_bytes, bl_io_files **out)
{
    char *name = NULL;
    int fd = -1;
    bl_status st = BL_OK;

    *out = NULL;
    BL_TRY_GOTO(st, done, open_unnamed(dir, &fd));
    BL_TRY_GOTO(st, done, take_space(dir, what, n_bytes, fd));
    BL_TRY_GOTO(st, done, bl_text_format(&name, "%s (%s)", dir, what));
    st = bl_io_files_adopt(name, fd, true, out);
    fd = -1;
done:
    if (fd >= 0) close(fd);
    free(name);
    return st;
}
