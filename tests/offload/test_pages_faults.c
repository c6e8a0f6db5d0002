/* SPDX-License-Identifier: Apache-2.0 */
/* What crashes and disks that are full, that fail or refuse do to page files. */
#include "pages_case.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"

enum { ANOTHER_USER = 65534 };

/* ---- fault injection (the linker's --wrap) ---- */

static int pwrite_error, n_pwrites_before_error, fsync_error, fallocate_error;
static bool pwrite_is_short, pwrite_refuses_direct;
static pid_t killed_at_pwrite; /* this process */

ssize_t __real_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_fallocate(int fd, int mode, off_t offset, off_t n_bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t n_bytes);

ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset)
{
    if (pwrite_error && n_pwrites_before_error-- <= 0) {
        errno = pwrite_error;
        if (pwrite_error == EINTR) pwrite_error = 0;
        return -1;
    }
    if (pwrite_refuses_direct && fcntl(fd, F_GETFL) & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    if (pwrite_is_short && n_bytes > 1000) n_bytes = n_bytes / 2 + 1;
    ssize_t put = __real_pwrite(fd, src, n_bytes, offset);
    if (killed_at_pwrite == getpid() && offset > 0) raise(SIGKILL);
    return put;
}

int __wrap_fsync(int fd)
{
    if (!fsync_error) return __real_fsync(fd);
    errno = fsync_error;
    return -1;
}

int __wrap_fallocate(int fd, int mode, off_t offset, off_t n_bytes)
{
    if (!fallocate_error) return __real_fallocate(fd, mode, offset, n_bytes);
    errno = fallocate_error;
    return -1;
}

/* ---- tests ---- */

static void die_at_pwrite(void)
{
    killed_at_pwrite = getpid();
}

static void test_killed_while_writing(void **state)
{
    const char *dir = pages_new_dir();
    int status;

    (void)state;
    waitpid(pages_fork_writer(dir, die_at_pwrite), &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(pages_count_files(dir), 1);
    pages_assert_made(dir, false); /* and what the dead one left is gone */

    assert_int_equal(unlink(pages_in_dir(".json")), 0); /* killed between the renames */
    bl_pages *pages;
    assert_int_equal(pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
    assert_int_equal(pages_count_files(dir), 0);
}

static void assert_refused(const char *dir, bl_status expected, const char *part)
{
    bl_pages *pages;

    bl_status st = pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages);
    if (st == BL_OK) st = pages_fill(pages);
    bl_error error;
    bl_error_save(&error, st); /* destroy must not lose the reason */
    if (pages) assert_int_equal(pages_count_files(dir), 0);
    bl_pages_destroy(pages);
    assert_int_equal(st, expected);
    bl_error_restore(&error);
    pages_assert_error_has(part);
}

static void test_disk_full(void **state)
{
    static const struct {
        int error, n_writes_before;
        bl_status status;
        const char *part;
    } failures[] = {
        {ENOSPC, 0, BL_ELIMIT, "page layer 0 o: "},
        {ENOSPC, 1, BL_ELIMIT, "writing 8192 bytes at offset 4194304: No space left on device"},
        {EDQUOT, 3, BL_ELIMIT, "page scales: "},
        {ENOSPC, 7, BL_ELIMIT, "writing 4096 bytes at offset "}, /* the seal */
        {ENOSPC, 8, BL_ELIMIT, ".json.tmp-"},
        {EIO, 2, BL_EIO, "Input/output error"},
    };
    const char *dir = pages_new_dir();
    const struct rlimit small = {3 << 20, RLIM_INFINITY};
    struct rlimit whole;

    (void)state;
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        pwrite_error = failures[i].error;
        n_pwrites_before_error = failures[i].n_writes_before;
        assert_refused(dir, failures[i].status, failures[i].part);
        pwrite_error = 0;
        assert_int_equal(pages_count_files(dir), 0);
    }
    fsync_error = EIO;
    assert_refused(dir, BL_EIO, "fsync: Input/output error");
    fsync_error = 0;
    assert_int_equal(pages_count_files(dir), 0);
    fallocate_error = ENOSPC;
    assert_refused(dir, BL_ELIMIT, "the page file takes 13656064 bytes, the disk had ");
    assert_int_equal(pages_count_files(dir), 0);
    fallocate_error = EOPNOTSUPP;
    pages_assert_made(dir, false);
    fallocate_error = 0;

    dir = pages_new_dir();
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &whole), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_refused(dir, BL_ELIMIT, "File too large");
    fallocate_error = EOPNOTSUPP; /* then the write meets the limit */
    assert_refused(dir, BL_ELIMIT, "File too large");
    fallocate_error = 0;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &whole), 0);
    assert_int_equal(pages_count_files(dir), 0);

    if (mount("none", dir, "tmpfs", 0, "size=4m") != 0) {
        print_message("skipped: a small disk of its own (no right to mount)\n");
        return;
    }
    assert_refused(dir, BL_ELIMIT, "/d: the page file takes 13656064 bytes, the disk has 4194304");
    assert_int_equal(pages_count_files(dir), 0);
    assert_int_equal(umount(dir), 0);
}

static void test_odd_writes(void **state)
{
    const char *dir = pages_new_dir();

    (void)state;
    pwrite_is_short = true;
    pages_assert_made(dir, false);
    pwrite_is_short = false;
    dir = pages_new_dir();
    pwrite_refuses_direct = true;
    pages_assert_made(dir, false);
    pwrite_refuses_direct = false;
    dir = pages_new_dir();
    pwrite_error = EINTR;
    n_pwrites_before_error = 1;
    pages_assert_made(dir, false);
    assert_int_equal(pwrite_error, 0);
}

static void test_folder(void **state)
{
    const char *dir = pages_new_dir();

    (void)state;
    assert_refused(pages_path_of("absent"), BL_EINPUT, "absent: No such file or directory");
    assert_int_equal(bl_file_write_atomic(pages_path_of("file"), "x", 1), BL_OK);
    assert_refused(pages_path_of("file"), BL_EINPUT, "file: Not a directory");
    assert_refused(NULL, BL_EINTERNAL, "no folder");
    if (geteuid() == 0) assert_int_equal(chmod(pages_path_of(""), 0755), 0);
    assert_int_equal(chmod(dir, 0555), 0);
    if (geteuid() == 0) assert_int_equal(seteuid(ANOTHER_USER), 0);
    bl_pages *pages;
    bl_status st = pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages);
    if (getuid() == 0) assert_int_equal(seteuid(0), 0);
    assert_int_equal(st, BL_EIO);
    pages_assert_error_has("creating it: Permission denied");
    assert_int_equal(chmod(dir, 0755), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_while_writing),
        cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_odd_writes),
        cmocka_unit_test(test_folder),
    };
    return cmocka_run_group_tests(tests, pages_set_up, pages_tear_down);
}
