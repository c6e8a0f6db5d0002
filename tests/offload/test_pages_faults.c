/* SPDX-License-Identifier: Apache-2.0 */
/* Page files after crashes and on disks that are full, that fail or refuse. */
#include "pages_case.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"
#include "skip.h"

enum { ANOTHER_USER = 65534, BLOCK_BYTES = 4 << 20, OF_LIST = -1 };

/* ---- fault injection (the linker's --wrap); page files are written by several threads ---- */

static atomic_int pwrite_error, n_held, n_failed;
static int64_t error_offset; /* writes of pages from there on fail; OF_LIST: of the list */
static int fsync_error, fallocate_error;
static atomic_int n_fsyncs, n_fsyncs_before_error;
static bool pwrite_is_short, pwrite_refuses_direct, first_block_fails_second;
static atomic_bool pwrite_is_held;
static pid_t killed_at_pwrite;       /* this process */
static bool removes_before_dir_sync; /* the page file, which has its name by then */

ssize_t __real_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_fallocate(int fd, int mode, off_t offset, off_t n_bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t n_bytes);

/* The list's bytes are not whole blocks. */
static bool is_to_fail(size_t n_bytes, off_t offset)
{
    bool of_list = n_bytes % BL_IO_ALIGN_BYTES != 0;
    return of_list ? error_offset == OF_LIST : error_offset != OF_LIST && offset >= error_offset;
}

ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset)
{
    int error = pwrite_error;

    atomic_fetch_add(&n_held, 1);
    while (pwrite_is_held) usleep(100);
    while (first_block_fails_second && offset == 0 && n_failed == 0) usleep(100);
    if (error && is_to_fail(n_bytes, offset)) {
        if (error == EINTR && atomic_exchange(&pwrite_error, 0) == 0)
            return __real_pwrite(fd, src, n_bytes, offset);
        atomic_fetch_add(&n_failed, 1);
        errno = error;
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
    struct stat info;

    n_fsyncs++;
    if (removes_before_dir_sync && fstat(fd, &info) == 0 && S_ISDIR(info.st_mode))
        assert_int_equal(unlink(pages_in_dir(".pages")), 0);
    if (!fsync_error || n_fsyncs_before_error-- > 0) return __real_fsync(fd);
    errno = fsync_error;
    return -1;
}

int __wrap_fallocate(int fd, int mode, off_t offset, off_t n_bytes)
{
    if (!fallocate_error) return __real_fallocate(fd, mode, offset, n_bytes);
    errno = fallocate_error;
    return -1;
}

static int64_t disk_bytes; /* of a disk that has the page file only; 0: the real one */

bl_status __real_bl_dir_free_bytes(const char *path, int64_t *n_bytes);
bl_status __wrap_bl_dir_free_bytes(const char *path, int64_t *n_bytes);
bl_status __wrap_bl_dir_free_bytes(const char *path, int64_t *n_bytes)
{
    struct stat info;

    if (!disk_bytes) return __real_bl_dir_free_bytes(path, n_bytes);
    bool has_file = stat(pages_in_dir(".pages"), &info) == 0;
    *n_bytes = disk_bytes - (has_file ? info.st_size : 0);
    return BL_OK;
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
    pages_assert_made(dir, false); /* the dead process's file is gone */

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
        int error;
        int64_t offset;
        bl_status status;
        const char *part;
    } failures[] = {
        {ENOSPC, 0, BL_ELIMIT, "page layer 0 o: "},
        {ENOSPC, 4194304, BL_ELIMIT,
         "writing 8192 bytes at offset 4194304: No space left on device"},
        {EDQUOT, 4206592, BL_ELIMIT, "page scales: "},
        {EIO, 4202496, BL_EIO, "page layer 1 \"o\": "},
        {EIO, 12603392, BL_EIO,
         "writing 1048576 bytes at offset 12603392: Input/output error"}, /* the last page's end */
        {ENOSPC, 13651968, BL_ELIMIT, "writing 4096 bytes at offset 13651968"}, /* the seal */
        {ENOSPC, OF_LIST, BL_ELIMIT, ".json.tmp-"},
    };
    const char *dir = pages_new_dir();
    const struct rlimit small = {3 << 20, RLIM_INFINITY};
    struct rlimit whole;

    (void)state;
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        pwrite_error = failures[i].error;
        error_offset = failures[i].offset;
        assert_refused(dir, failures[i].status, failures[i].part);
        pwrite_error = 0;
        assert_int_equal(pages_count_files(dir), 0);
    }
    /* The list and the pages are durable before their names are. */
    static const char *const synced[] = {".json.tmp-", ".pages.tmp-"};
    for (int i = 0; i < 2; i++) {
        fsync_error = EIO;
        n_fsyncs_before_error = i;
        assert_refused(dir, BL_EIO, "fsync: Input/output error");
        pages_assert_error_has(synced[i]);
        fsync_error = 0;
        assert_int_equal(pages_count_files(dir), 0);
    }
    fallocate_error = ENOSPC;
    assert_refused(dir, BL_ELIMIT, "the page file takes 13656064 bytes, the disk had ");
    assert_int_equal(pages_count_files(dir), 0);
    fallocate_error = EOPNOTSUPP;
    n_fsyncs = 0;
    pages_assert_made(dir, false);
    assert_int_equal(n_fsyncs, 3); /* and the folder's */
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
}

static void test_small_disk(void **state)
{
    const char *dir = pages_new_dir();

    (void)state;
    if (mount("none", dir, "tmpfs", 0, "size=4m") != 0)
        TEST_SKIP("a file system of its own: mount: %s", strerror(errno));
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
    error_offset = BLOCK_BYTES;
    pages_assert_made(dir, false);
    assert_int_equal(pwrite_error, 0);
}

/* All pages are fewer blocks than may wait: while none has been written, the caller gets on, and
 * the first ones are all with the system. A run that is given up leaves nothing. */
static void test_writes_are_not_waited_for(void **state)
{
    for (int seals = 0; seals < 2; seals++) {
        const char *dir = pages_new_dir();
        bl_pages *pages;

        (void)state;
        n_held = 0;
        pwrite_is_held = true;
        assert_int_equal(pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages), BL_OK);
        assert_int_equal(pages_fill_only(pages), BL_OK);
        while (n_held < 4) usleep(100);
        pwrite_is_held = false;
        if (seals) assert_int_equal(bl_pages_seal(pages), BL_OK);
        if (seals) pages_assert_contents(pages);
        bl_pages_destroy(pages);
        assert_int_equal(pages_count_files(dir), seals ? 2 : 0);
    }
}

/* A later block fails before the first does: the message is the first one's. */
static void test_first_failure(void **state)
{
    const char *dir = pages_new_dir();

    (void)state;
    first_block_fails_second = true;
    n_failed = 0;
    error_offset = 0;
    pwrite_error = EIO;
    assert_refused(dir, BL_EIO, "page layer 0 o: ");
    pages_assert_error_has("at offset 0: Input/output error");
    pwrite_error = 0;
    first_block_fails_second = false;
}

static void test_folder(void **state)
{
    const char *dir = pages_new_dir();

    (void)state;
    assert_refused(pages_path_of("absent"), BL_EIO, "absent: No such file or directory");
    assert_int_equal(bl_file_write_atomic(pages_path_of("file"), "x", 1), BL_OK);
    assert_refused(pages_path_of("file"), BL_EIO, "file: Not a directory");
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

/* No other run is to blame, and the input is not. */
static void test_removed_when_written(void **state)
{
    const char *dir = pages_new_dir();
    bl_pages *pages;

    (void)state;
    removes_before_dir_sync = true;
    assert_int_equal(pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages), BL_OK);
    bl_status st = pages_fill(pages);
    removes_before_dir_sync = false;
    assert_int_equal(st, BL_EIO);
    pages_assert_error_has(".pages: No such file or directory");
    assert_null(strstr(bl_error_text(), "another run"));
    bl_pages_destroy(pages);
}

/* On a disk that has room for one file what was rejected goes before the next one takes its space;
 * not where that would not do, or is not needed. */
static void test_rejected_file_gives_its_space(void **state)
{
    enum { FILE_BYTES = 13656064 };
    static const int64_t disks[] = {0, FILE_BYTES - 1, FILE_BYTES};
    const char *dir = pages_new_dir();
    bl_pages *pages;

    (void)state;
    pages_assert_made(dir, false);
    pages_flip(pages_in_dir(".json"), 20);
    for (int i = 0; i < 3; i++) {
        disk_bytes = disks[i];
        bl_status st = pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages);
        disk_bytes = 0;
        assert_int_equal(st, i == 1 ? BL_ELIMIT : BL_OK);
        assert_int_equal(bl_file_exists(pages_in_dir(".pages")), i < 2);
        bl_pages_destroy(pages);
    }
    pages_assert_made(dir, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_while_writing),
        cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_small_disk),
        cmocka_unit_test(test_odd_writes),
        cmocka_unit_test(test_writes_are_not_waited_for),
        cmocka_unit_test(test_first_failure),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_removed_when_written),
        cmocka_unit_test(test_rejected_file_gives_its_space),
    };
    return cmocka_run_group_tests(tests, pages_set_up, pages_tear_down);
}
