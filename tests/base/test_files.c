/* SPDX-License-Identifier: Apache-2.0 */
/* Files that misbehave: short reads, EINTR, EIO, full disks and failing fsyncs are injected with
 * the linker's --wrap. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file_progress.h"
#include "base/files.h"

/* ---- fault injection ---- */

static struct {
    size_t max_bytes; /* of one pread or pwrite; 0: no limit */
    int n_eintr;      /* how many calls are interrupted first */
    int error;        /* errno of the call after `n_good` good ones; 0: none */
    int n_good;
    int fsync_error;
    int n_calls;
} fault;

ssize_t __real_pread(int fd, void *dst, size_t n_bytes, off_t offset);
ssize_t __wrap_pread(int fd, void *dst, size_t n_bytes, off_t offset);
ssize_t __real_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
int __real_fsync(int fd);
int __wrap_fsync(int fd);

/* Whether this call fails, with errno set; else shortens it. */
static bool inject(size_t *n_bytes)
{
    fault.n_calls++;
    if (fault.n_eintr > 0) {
        fault.n_eintr--;
        errno = EINTR;
        return true;
    }
    if (fault.error && fault.n_good-- <= 0) {
        errno = fault.error;
        return true;
    }
    if (fault.max_bytes && *n_bytes > fault.max_bytes) *n_bytes = fault.max_bytes;
    return false;
}

ssize_t __wrap_pread(int fd, void *dst, size_t n_bytes, off_t offset)
{
    return inject(&n_bytes) ? -1 : __real_pread(fd, dst, n_bytes, offset);
}

ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset)
{
    return inject(&n_bytes) ? -1 : __real_pwrite(fd, src, n_bytes, offset);
}

int __wrap_fsync(int fd)
{
    if (!fault.fsync_error) return __real_fsync(fd);
    errno = fault.fsync_error;
    fault.fsync_error = 0; /* the kernel reports a lost page once */
    return -1;
}

static int clear_fault(void **state)
{
    (void)state;
    memset(&fault, 0, sizeof fault);
    return 0;
}

/* ---- a scratch folder ---- */

static char folder[] = "/tmp/ballast-files-XXXXXX";

static int create_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

static const char *in_folder(const char *name)
{
    static char paths[4][256];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void assert_error_has(const char *part)
{
    if (!strstr(bl_error_text(), part))
        fail_msg("error \"%s\" lacks \"%s\"", bl_error_text(), part);
}

/* ---- reading ---- */

static void test_short_reads_and_interrupts(void **state)
{
    char *bytes;
    size_t n_bytes;

    (void)state;
    assert_int_equal(bl_file_write_atomic(in_folder("ten"), "0123456789", 10), BL_OK);
    fault.max_bytes = 3;
    fault.n_eintr = 2;
    fault.n_calls = 0;
    assert_int_equal(bl_file_read_all(in_folder("ten"), 10, (void **)&bytes, &n_bytes), BL_OK);
    assert_int_equal(n_bytes, 10);
    assert_string_equal(bytes, "0123456789");
    assert_int_equal(fault.n_calls, 2 + 4); /* 3 + 3 + 3 + 1 */
    free(bytes);
}

static void test_read_errors_name_the_place(void **state)
{
    char bytes[16];
    int fd;

    (void)state;
    assert_int_equal(bl_file_open(in_folder("ten"), &fd, NULL), BL_OK);
    fault.max_bytes = 4;
    fault.error = EIO;
    fault.n_good = 1;
    assert_int_equal(bl_file_read_full(fd, "ten", bytes, 8, 2), BL_EIO);
    assert_string_equal(bl_error_text(), "ten: reading 4 bytes at offset 6: Input/output error");
    clear_fault(NULL);
    assert_int_equal(bl_file_read_full(fd, "ten", bytes, 8, 4), BL_EIO);
    assert_string_equal(bl_error_text(), "ten: ends at offset 10, where 2 more bytes are expected");
    close(fd);
}

static void test_only_regular_files_open(void **state)
{
    void *bytes;
    size_t n_bytes;
    int fd = 7;
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    (void)state;
    assert_int_equal(mkfifo(in_folder("fifo"), 0600), 0);
    assert_int_equal(bl_file_open(in_folder("fifo"), &fd, NULL), BL_EINPUT);
    assert_int_equal(fd, -1);
    assert_error_has("/fifo: is a FIFO, not a regular file");
    assert_int_equal(bl_file_open(folder, &fd, NULL), BL_EINPUT);
    assert_error_has("is a folder, not a regular file");
    assert_int_equal(bl_file_open("/dev/null", &fd, NULL), BL_EINPUT);
    assert_string_equal(bl_error_text(), "/dev/null: is a device, not a regular file");
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s/s", folder);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(bl_file_open(address.sun_path, &fd, NULL), BL_EINPUT);
    assert_error_has("is a socket, not a regular file");
    close(listener);
    assert_int_equal(bl_file_open(in_folder("absent"), &fd, NULL), BL_EINPUT);
    assert_error_has("/absent: No such file or directory");
    assert_int_equal(bl_file_read_all(in_folder("ten"), 9, &bytes, &n_bytes), BL_EINPUT);
    assert_error_has("/ten: is 10 bytes, more than the limit of 9");
    assert_null(bytes);
}

/* ---- writing ---- */

static void assert_content(const char *path, const char *expected)
{
    char *bytes;
    size_t n_bytes;
    clear_fault(NULL);
    assert_int_equal(bl_file_read_all(path, 1000, (void **)&bytes, &n_bytes), BL_OK);
    assert_string_equal(bytes, expected);
    free(bytes);
}

static void test_atomic_writes(void **state)
{
    const char *path = in_folder("atomic");
    bl_writer *writer;

    (void)state;
    fault.max_bytes = 2;
    fault.n_eintr = 1;
    assert_int_equal(bl_file_write_atomic(path, "old one", 7), BL_OK);
    assert_content(path, "old one");

    fault.max_bytes = 3;
    fault.error = ENOSPC;
    fault.n_good = 2;
    assert_int_equal(bl_file_write_atomic(path, "longer new one", 14), BL_ELIMIT);
    assert_error_has("/atomic.tmp: writing 8 bytes at offset 6: No space left on device");
    assert_false(bl_file_exists(in_folder("atomic.tmp")));
    assert_content(path, "old one");

    fault.fsync_error = EIO;
    assert_int_equal(bl_file_write_atomic(path, "new", 3), BL_EIO);
    assert_error_has("/atomic.tmp: fsync: Input/output error");
    assert_false(bl_file_exists(in_folder("atomic.tmp")));
    assert_content(path, "old one");

    assert_int_equal(bl_writer_open(path, &writer), BL_OK);
    assert_int_equal(bl_writer_append(writer, "ab", 2), BL_OK);
    assert_int_equal(bl_writer_append(writer, "cd", 2), BL_OK);
    assert_int_equal(bl_writer_bytes(writer), 4);
    assert_content(path, "old one");
    assert_int_equal(bl_writer_commit(writer), BL_OK);
    assert_content(path, "abcd");
    assert_int_equal(bl_file_write_atomic(in_folder("none/x"), "x", 1), BL_EIO);
    assert_error_has("/none/x.tmp: creating it: No such file");
}

/* What is renamed over a device, or over a name of one, would take its place. */
static void test_only_regular_files_are_replaced(void **state)
{
    const char *fifo = in_folder("out-fifo"), *link_path = in_folder("out-link"),
               *dir = in_folder("out-dir");
    struct stat info;

    (void)state;
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(bl_file_write_atomic(fifo, "x", 1), BL_EUSAGE);
    assert_error_has("/out-fifo: is a FIFO, not a regular file");
    assert_int_equal(lstat(fifo, &info), 0);
    assert_true(S_ISFIFO(info.st_mode));

    assert_int_equal(symlink("/dev/null", link_path), 0);
    assert_int_equal(bl_file_write_atomic(link_path, "x", 1), BL_EUSAGE);
    assert_error_has("/out-link: is a device, not a regular file");
    assert_int_equal(unlink(link_path), 0);
    assert_int_equal(symlink("/proc/self/fd/1", link_path), 0);
    assert_int_equal(bl_file_write_atomic(link_path, "x", 1), BL_EUSAGE);
    assert_int_equal(lstat(link_path, &info), 0);
    assert_true(S_ISLNK(info.st_mode));

    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(bl_file_write_atomic(dir, "x", 1), BL_EUSAGE);
    assert_error_has("/out-dir: is a folder, not a regular file");
    assert_int_equal(bl_file_write_atomic("/dev/null", "x", 1), BL_EUSAGE);
    assert_int_equal(stat("/dev/null", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
}

/* PATH.tmp may be left by a crash, or be a link to an unrelated file. */
static void test_what_is_at_the_tmp_name(void **state)
{
    const char *path = in_folder("t"), *tmp = in_folder("t.tmp"), *other = in_folder("t-other");
    struct stat info;

    (void)state;
    assert_int_equal(bl_file_write_atomic(other, "precious", 8), BL_OK);
    assert_int_equal(symlink(other, tmp), 0);
    assert_int_equal(bl_file_write_atomic(path, "1", 1), BL_OK);
    assert_content(path, "1");
    assert_content(other, "precious");
    assert_int_equal(link(other, tmp), 0);
    assert_int_equal(bl_file_write_atomic(path, "2", 1), BL_OK);
    assert_content(path, "2");
    assert_content(other, "precious");
    assert_int_equal(mkfifo(tmp, 0600), 0);
    assert_int_equal(bl_file_write_atomic(path, "3", 1), BL_EIO);
    assert_error_has("t.tmp: creating it: File exists");
    assert_int_equal(lstat(tmp, &info), 0);
    assert_true(S_ISFIFO(info.st_mode));
    assert_content(path, "2");
}

/* ---- folders ---- */

static void test_folders(void **state)
{
    static const char *const expected[] = {".hidden", "a", "a.b", "b"};
    char **names;
    size_t n_names;
    int64_t free_bytes;

    (void)state;
    assert_int_equal(bl_dir_create(in_folder("p//q/r/")), BL_OK);
    assert_int_equal(bl_dir_create(in_folder("p/q/r")), BL_OK);
    assert_int_equal(bl_file_write_atomic(in_folder("p/file"), "", 0), BL_OK);
    assert_int_equal(bl_dir_create(in_folder("p/file")), BL_EINPUT);
    assert_error_has("exists and is not a folder");
    assert_int_equal(bl_dir_create(in_folder("p/file/x")), BL_EINPUT);
    assert_error_has("p/file/x: creating the folder: Not a directory");
    assert_int_equal(bl_dir_create_child(in_folder("p/s/t")), BL_EIO);
    assert_error_has("p/s/t: creating the folder: No such file or directory");
    assert_false(bl_file_exists(in_folder("p/s")));
    for (int again = 0; again < 2; again++)
        assert_int_equal(bl_dir_create_child(in_folder("p/s")), BL_OK);
    assert_int_equal(bl_dir_create_child(in_folder("p/file")), BL_EINPUT);
    /* A link inside a removed tree is removed, its target is not. */
    assert_int_equal(bl_dir_create(in_folder("other")), BL_OK);
    assert_int_equal(bl_file_write_atomic(in_folder("other/file"), "", 0), BL_OK);
    assert_int_equal(symlink(in_folder("other"), in_folder("p/q/link")), 0);
    assert_int_equal(bl_tree_remove(in_folder("p")), BL_OK);
    assert_false(bl_file_exists(in_folder("p")));
    assert_true(bl_file_exists(in_folder("other/file")));
    assert_int_equal(bl_tree_remove(in_folder("p")), BL_OK);

    assert_int_equal(bl_dir_create(in_folder("l")), BL_OK);
    for (size_t i = 4; i-- > 0;) {
        char name[32];
        snprintf(name, sizeof name, "l/%s", expected[i]);
        assert_int_equal(bl_file_write_atomic(in_folder(name), "", 0), BL_OK);
    }
    assert_int_equal(bl_dir_list(in_folder("l"), &names, &n_names), BL_OK);
    assert_int_equal(n_names, 4);
    for (size_t i = 0; i < 4; i++) assert_string_equal(names[i], expected[i]);
    bl_names_free(names, n_names);
    assert_int_equal(bl_dir_list(in_folder("absent"), &names, &n_names), BL_EINPUT);
    assert_int_equal(bl_dir_free_bytes(folder, &free_bytes), BL_OK);
    assert_true(free_bytes > 0);
    assert_int_equal(bl_dir_free_bytes(in_folder("absent"), &free_bytes), BL_EINPUT);
    assert_false(bl_dir_is_in_memory(in_folder("absent")));
    assert_false(bl_dir_is_in_memory("/proc"));
    assert_true(bl_dir_is_in_memory("/dev/shm"));
}

/* The holder is another process; after its SIGKILL the lock is free though its file is still
 * there. */
static void test_lock_dies_with_its_holder(void **state)
{
    bl_dir_lock *lock = NULL;
    char expected[128], host[64], byte;
    int ready[2], status;

    (void)state;
    assert_int_equal(pipe(ready), 0);
    pid_t holder = fork();
    if (holder == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed assertion must not leave it behind */
        if (bl_dir_lock_acquire(folder, &lock) != BL_OK || write(ready[1], "x", 1) != 1) _exit(1);
        pause();
        _exit(1);
    }
    close(ready[1]); /* the read ends with the holder */
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(bl_dir_lock_acquire(folder, &lock), BL_EUSAGE);
    assert_null(lock);
    gethostname(host, sizeof host);
    snprintf(expected, sizeof expected, " is in use by pid %d on %s", (int)holder, host);
    assert_error_has(expected);
    kill(holder, SIGKILL);
    assert_int_equal(waitpid(holder, &status, 0), holder);
    assert_int_equal(bl_dir_lock_acquire(folder, &lock), BL_OK);
    bl_dir_lock_release(lock);
    assert_int_equal(bl_dir_lock_acquire(folder, &lock), BL_OK);
    bl_dir_lock_release(lock);
    bl_dir_lock_release(NULL);
    close(ready[0]);
}

/* Processes that take the lock and remove its file never hold it together. */
static void test_lock_file_removed_under_others(void **state)
{
    enum { N = 4, TURNS = 200 };
    pid_t child[N];

    (void)state;
    for (int i = 0; i < N; i++) {
        if ((child[i] = fork()) != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int turn = 0; turn < TURNS;) {
            bl_dir_lock *lock;
            if (bl_dir_lock_acquire(folder, &lock) != BL_OK) continue;
            int fd = open(in_folder("held"), O_CREAT | O_EXCL | O_WRONLY, 0600);
            if (fd < 0 || bl_dir_lock_check(lock) != BL_OK || unlink(in_folder("held")) != 0)
                _exit(1);
            close(fd);
            bl_dir_lock_remove(lock);
            turn++;
        }
        _exit(0);
    }
    for (int i = 0; i < N; i++) {
        int status;
        assert_int_equal(waitpid(child[i], &status, 0), child[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(access(in_folder(".ballast.lock"), F_OK), -1);
    bl_dir_lock_remove(NULL);
}

static const char *new_folder(const char *name)
{
    const char *path = in_folder(name);
    assert_int_equal(mkdir(path, 0700), 0);
    return path;
}

static void test_lock_of_a_folder_made_again(void **state)
{
    const char *path = new_folder("again"), *file = in_folder("again/.ballast.lock");
    bl_dir_lock *first, *second;

    (void)state;
    assert_int_equal(bl_dir_lock_acquire(path, &first), BL_OK);
    assert_int_equal(bl_dir_lock_check(first), BL_OK);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(bl_dir_lock_check(first), BL_EIO);
    assert_error_has("/again: was removed while this process used it");
    assert_int_equal(bl_tree_remove(path), BL_OK);
    assert_int_equal(bl_dir_lock_check(first), BL_EIO);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(bl_dir_lock_acquire(path, &second), BL_OK);
    assert_int_equal(bl_dir_lock_check(second), BL_OK);
    assert_int_equal(bl_dir_lock_check(first), BL_EIO);
    assert_error_has("/again: was removed and made again while this process used it");
    bl_dir_lock_release(first);
    assert_int_equal(bl_dir_lock_check(second), BL_OK);
    bl_dir_lock_release(second);
}

/* Another process of the same run has no lock, and sees all the same that the folder has gone. */
static void test_lock_that_is_looked_at(void **state)
{
    const char *path = new_folder("seen");
    bl_dir_lock *holder, *seen, *third;

    (void)state;
    assert_int_equal(bl_dir_lock_look(path, &seen), BL_OK);
    assert_null(seen); /* there is none yet */
    /* Any process that can open the file could hold the lock; one of an earlier version is open to
     * all. */
    assert_int_equal(close(open(in_folder("seen/.ballast.lock"), O_CREAT | O_WRONLY, 0644)), 0);
    assert_int_equal(bl_dir_lock_acquire(path, &holder), BL_OK);
    struct stat info;
    assert_int_equal(stat(in_folder("seen/.ballast.lock"), &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(bl_dir_lock_look(path, &seen), BL_OK);
    assert_int_equal(bl_dir_lock_check(seen), BL_OK);
    assert_int_equal(bl_tree_remove(path), BL_OK);
    assert_int_equal(bl_dir_lock_check(seen), BL_EIO);
    assert_error_has("was removed while this process used it");
    assert_int_equal(bl_dir_create(path), BL_OK);
    assert_int_equal(bl_dir_lock_acquire(path, &third), BL_OK); /* looking holds nothing */
    assert_int_equal(bl_dir_lock_check(seen), BL_EIO);
    assert_error_has("made again");
    bl_dir_lock_release(seen);
    bl_dir_lock_release(holder);
    bl_dir_lock_release(third);
}

/* Nothing but a lock file is written to, whatever has its name. */
static void test_no_lock_at_its_name(void **state)
{
    const char *path = new_folder("named"), *file = in_folder("named/.ballast.lock"),
               *other = in_folder("named/x");
    bl_dir_lock *lock;

    (void)state;
    assert_int_equal(bl_file_write_atomic(other, "precious", 8), BL_OK);
    assert_int_equal(symlink(other, file), 0);
    assert_int_equal(bl_dir_lock_acquire(path, &lock), BL_EUSAGE);
    assert_error_has("/.ballast.lock: is a symbolic link, not a lock file: remove it");
    assert_content(other, "precious");
    assert_int_equal(unlink(file), 0);
    assert_int_equal(symlink("absent", file), 0);
    assert_int_equal(bl_dir_lock_acquire(path, &lock), BL_EUSAGE);
    assert_false(bl_file_exists(in_folder("named/absent")));
    assert_int_equal(unlink(file), 0);
    assert_int_equal(link(other, file), 0);
    assert_int_equal(bl_dir_lock_acquire(path, &lock), BL_EUSAGE);
    assert_error_has("/.ballast.lock: is not a lock file");
    assert_content(other, "precious");
    assert_int_equal(unlink(file), 0);
    assert_int_equal(mkfifo(file, 0600), 0);
    assert_int_equal(bl_dir_lock_acquire(path, &lock), BL_EUSAGE);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(mkdir(file, 0700), 0);
    assert_int_equal(bl_dir_lock_acquire(path, &lock), BL_EUSAGE);
    assert_int_equal(rmdir(file), 0);
    fault.n_eintr = 2;
    assert_int_equal(bl_dir_lock_acquire(path, &lock), BL_OK);
    bl_dir_lock_release(lock);
}

static void test_path_join(void **state)
{
    static const char *const cases[][3] = {
        {"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"", "b", "b"}, {"/", "b", "/b"}};
    char *path;

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(bl_path_join(cases[i][0], cases[i][1], &path), BL_OK);
        assert_string_equal(path, cases[i][2]);
        free(path);
    }
}

/* 0.05 s without a call is a hang; a sync may take as long as the work before it, too. */
static void test_work_that_hangs(void **state)
{
    const struct timespec pause = {0, 100 * 1000 * 1000};
    bl_file_progress progress = {0};
    double idle_s;

    (void)state;
    assert_false(bl_file_hangs(&progress, 0.05, &idle_s));
    bl_file_note_progress(&progress);
    assert_false(bl_file_hangs(&progress, 10, &idle_s));
    nanosleep(&pause, NULL);
    assert_true(bl_file_hangs(&progress, 0.05, &idle_s));
    assert_true(idle_s >= 0.1);
    assert_int_equal(bl_dir_sync("/"), BL_OK);
    assert_false(bl_file_hangs(&progress, 0.05, &idle_s));
    bl_file_note_progress(NULL);
    nanosleep(&pause, NULL);
    assert_int_equal(bl_dir_sync("/"), BL_OK);
    assert_true(bl_file_hangs(&progress, 0.05, &idle_s));
    atomic_store(&progress.began_s, atomic_load(&progress.moved_s) - 1e9); /* below 0 */
    assert_true(bl_file_hangs(&progress, 0.05, &idle_s));
    atomic_store(&progress.syncs, true);
    assert_false(bl_file_hangs(&progress, 0.05, &idle_s));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_short_reads_and_interrupts, clear_fault),
        cmocka_unit_test_teardown(test_read_errors_name_the_place, clear_fault),
        cmocka_unit_test_teardown(test_only_regular_files_open, clear_fault),
        cmocka_unit_test_teardown(test_atomic_writes, clear_fault),
        cmocka_unit_test(test_only_regular_files_are_replaced),
        cmocka_unit_test(test_what_is_at_the_tmp_name),
        cmocka_unit_test(test_work_that_hangs),
        cmocka_unit_test(test_folders),
        cmocka_unit_test(test_lock_dies_with_its_holder),
        cmocka_unit_test(test_lock_file_removed_under_others),
        cmocka_unit_test(test_lock_of_a_folder_made_again),
        cmocka_unit_test(test_lock_that_is_looked_at),
        cmocka_unit_test_teardown(test_no_lock_at_its_name, clear_fault),
        cmocka_unit_test(test_path_join),
    };
    return cmocka_run_group_tests(tests, create_folder, remove_folder);
}
