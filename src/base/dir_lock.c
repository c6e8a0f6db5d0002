/* SPDX-License-Identifier: Apache-2.0 */
/* dir_lock.c -- the lock of a directory, files.h: flock on a file in it, which names its holder.
 *
 * flock belongs to the inode, and any process may remove and remake the directory's name: both are
 * compared after locking and by bl_dir_lock_check. A file system without flock causes a warning,
 * not an error; all else is the same. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/host_name.h"
#include "base/log.h"

static const char LOCK_NAME[] = ".ballast.lock";

enum { HOLDER_BYTES = 320, TRIES = 100 };

struct bl_dir_lock {
    char *dir, *path;
    int fd;
};

/* What the file says of its holder, with a NUL after it. */
static ssize_t read_holder(int fd, char holder[HOLDER_BYTES])
{
    ssize_t length;
    while ((length = pread(fd, holder, HOLDER_BYTES - 1, 0)) < 0 && errno == EINTR) continue;
    holder[length > 0 ? length : 0] = '\0';
    return length;
}

static bl_status fail_locked(const char *dir, int fd)
{
    char holder[HOLDER_BYTES], host[256];
    long pid;

    read_holder(fd, holder);
    if (sscanf(holder, "%ld %255s", &pid, host) == 2)
        return BL_FAIL(BL_EUSAGE, "%s is in use by pid %ld on %s", dir, pid, host);
    return BL_FAIL(BL_EUSAGE, "%s is in use by another process", dir);
}

/* Any process that may open the file can hold its lock. One of an earlier version is 0644. */
static bl_status close_to_others(const char *path, int fd)
{
    struct stat info;

    if (fstat(fd, &info) != 0) return bl_fail_errno(BL_EIO, "%s", path);
    bool is_open = S_ISREG(info.st_mode) && (info.st_mode & 077) != 0;
    if (!is_open || info.st_uid != geteuid() || fchmod(fd, 0600) == 0) return BL_OK;
    return bl_fail_errno(BL_EIO, "%s: chmod", path);
}

static bl_status open_lock(const char *path, int *fd)
{
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (*fd >= 0) return close_to_others(path, *fd);
    if (errno == ELOOP)
        return BL_FAIL(BL_EUSAGE, "%s: is a symbolic link, not a lock file: remove it", path);
    return bl_fail_errno(errno == EISDIR || errno == ENXIO ? BL_EUSAGE : BL_EIO, "%s", path);
}

static bool is_same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* Lustre mounted without flock, NFS without its lock service, some FUSE file systems. */
static bool has_no_locks(int error)
{
    return error == ENOSYS || error == EOPNOTSUPP || error == ENOLCK;
}

static bl_status lock_file(const char *dir, const char *path, int fd)
{
    while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EINTR) continue;
        if (errno == EWOULDBLOCK) return fail_locked(dir, fd);
        if (!has_no_locks(errno)) return bl_fail_errno(BL_EIO, "%s: flock", path);
        bl_log_warning("%s: its file system has no locks (%s): two runs in this folder are not "
                       "kept apart",
                       dir, strerror(errno));
        break;
    }
    return BL_OK;
}

/* Locks the file that has the name. *fd stays the caller's, also after a failure. */
static bl_status take_lock(const char *dir, const char *path, int *fd)
{
    struct stat opened, named;

    for (int n = 0; n < TRIES; n++) {
        BL_TRY(open_lock(path, fd));
        BL_TRY(lock_file(dir, path, *fd));
        if (fstat(*fd, &opened) != 0) return bl_fail_errno(BL_EIO, "%s", path);
        if (lstat(path, &named) == 0 && is_same_file(&opened, &named)) return BL_OK;
        close(*fd); /* removed between open and flock */
        *fd = -1;
    }
    return BL_FAIL(BL_EIO, "%s: is removed again and again", path);
}

/* A file with other content has its name by mistake, or by another name as well: it is not written
 * to. */
static bl_status check_content(const char *path, int fd)
{
    char holder[HOLDER_BYTES];
    struct stat info;

    if (fstat(fd, &info) != 0) return bl_fail_errno(BL_EIO, "%s", path);
    bool is_lock = S_ISREG(info.st_mode) && info.st_size < HOLDER_BYTES;
    ssize_t length = is_lock ? read_holder(fd, holder) : 0;
    if (length < 0) return bl_fail_errno(BL_EIO, "%s: reading it", path);
    is_lock = is_lock && (length == 0 || (holder[0] >= '0' && holder[0] <= '9'));
    return is_lock ? BL_OK : BL_FAIL(BL_EUSAGE, "%s: is not a lock file: remove it", path);
}

static bl_status write_holder(const char *path, int fd)
{
    char host[256], holder[HOLDER_BYTES];

    bl_host_name(host, sizeof host);
    int length = snprintf(holder, sizeof holder, "%ld %s\n", (long)getpid(), host);
    if (ftruncate(fd, 0) != 0) return bl_fail_errno(BL_EIO, "%s: ftruncate", path);
    return bl_file_write_full(fd, path, holder, (size_t)length, 0);
}

/* Without a file. Also after a failure it is the caller's to release. */
static bl_status create_lock(const char *dir, bl_dir_lock **out)
{
    bl_dir_lock *lock = *out = calloc(1, sizeof *lock);

    if (!lock) return BL_FAIL(BL_ENOMEM, "the lock of %s", dir);
    lock->fd = -1;
    BL_TRY(bl_text_format(&lock->dir, "%s", dir));
    return bl_path_join(dir, LOCK_NAME, &lock->path);
}

bl_status bl_dir_lock_acquire(const char *dir, bl_dir_lock **out)
{
    bl_dir_lock *lock;

    *out = NULL;
    bl_status st = create_lock(dir, &lock);
    if (st == BL_OK) st = take_lock(dir, lock->path, &lock->fd);
    if (st == BL_OK) st = check_content(lock->path, lock->fd);
    if (st == BL_OK) st = write_holder(lock->path, lock->fd);
    if (st == BL_OK)
        *out = lock;
    else
        bl_dir_lock_release(lock);
    return st;
}

bl_status bl_dir_lock_look(const char *dir, bl_dir_lock **out)
{
    bl_dir_lock *lock;

    *out = NULL;
    bl_status st = create_lock(dir, &lock);
    if (st == BL_OK) lock->fd = open(lock->path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (st == BL_OK && lock->fd >= 0)
        *out = lock;
    else
        bl_dir_lock_release(lock);
    return st;
}

bl_status bl_dir_lock_check(const bl_dir_lock *lock)
{
    struct stat opened, named;

    if (fstat(lock->fd, &opened) != 0) return BL_OK;
    bool is_there = lstat(lock->path, &named) == 0;
    if (is_there ? is_same_file(&opened, &named)
                 : errno != ENOENT && errno != ENOTDIR && errno != ESTALE)
        return BL_OK;
    return BL_FAIL(BL_EIO,
                   "%s: was removed%s while this process used it (its lock file is %s); nothing "
                   "more is written",
                   lock->dir, is_there ? " and made again" : "", is_there ? "another one" : "gone");
}

void bl_dir_lock_release(bl_dir_lock *lock)
{
    if (!lock) return;
    if (lock->fd >= 0) close(lock->fd);
    free(lock->path);
    free(lock->dir);
    free(lock);
}

void bl_dir_lock_remove(bl_dir_lock *lock)
{
    struct stat opened, named;

    /* Held, so that flock fails only where there are no locks: another process may hold it, too. */
    if (lock && fstat(lock->fd, &opened) == 0 && lstat(lock->path, &named) == 0 &&
        is_same_file(&opened, &named) && flock(lock->fd, LOCK_EX | LOCK_NB) == 0)
        unlink(lock->path);
    bl_dir_lock_release(lock);
}
