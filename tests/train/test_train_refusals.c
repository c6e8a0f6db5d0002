/* SPDX-License-Identifier: Apache-2.0 */
/* The program on a system that refuses io_uring or locked memory, and with a directory of page
 * files that is full, in memory, read-only, shared, damaged or removed. A run that can continue
 * gives the bits of an undisturbed one; any other ends with one line that names the reason, and can
 * be resumed. */
#include "refusals.h"
#include "runs.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "skip.h"

enum {
    RANKS = 2,
    STEPS = 3,
    EXIT_USAGE = 2,
    EXIT_LIMIT = 4,
    EXIT_CANNOT = 126,
    N_PAGE_FILES = 2 * RANKS
};

/* A run takes a tenth of a second, and no rank waits for a failed one; the deadline of ranks is
 * half an hour. */
static const double LIMIT_S = 300, FAILURE_S = 60;

/* ---- runs ---- */

static void keys(golden_args *args, const char *output)
{
    runs_standard(args, output, RANKS);
    runs_set(args, "max_steps", "%d", STEPS);
}

static void disk_keys(golden_args *args, const char *output, const char *pages)
{
    keys(args, output);
    runs_set(args, "offload_ratio", "1");
    runs_set(args, "offload_tier", "disk");
    runs_set(args, "offload_dir", "%s", pages);
    runs_set(args, "overwrite_output_dir", "true");
}

/* Long enough to be disturbed. */
static void long_keys(golden_args *args, const char *output, const char *pages)
{
    disk_keys(args, output, pages);
    runs_set(args, "gradient_accumulation_steps", "100");
    runs_set(args, "visit_tokens", "1");
}

static int run(golden_args *args, runs_child *child)
{
    runs_start(child, "train", args);
    return runs_wait(child, LIMIT_S);
}

static void assert_result(const golden_args *keys_of_plain, const char *output,
                          const runs_child *child)
{
    static char plain[2][GOLDEN_PATH_BYTES];
    bool is_long = false;
    for (int i = 0; i < keys_of_plain->n; i += 2)
        is_long |= strcmp(keys_of_plain->text[i] + 2, "visit_tokens") == 0;
    char *path = plain[is_long];

    if (!path[0]) {
        golden_args args = {0};
        runs_child undisturbed = {0};
        snprintf(path, GOLDEN_PATH_BYTES, "%s", runs_path("plain-%d", is_long));
        keys(&args, path);
        if (is_long) runs_set(&args, "gradient_accumulation_steps", "100");
        assert_int_equal(run(&args, &undisturbed), 0);
        golden_args_free(&args);
    }
    if (runs_are_same(path, output)) return;
    char *log = runs_read(child->log, NULL);
    print_error("%s\n", log);
    free(log);
    fail();
}

static int count(const runs_child *child, const char *part)
{
    int n = 0;
    char *log = runs_read(child->log, NULL);
    for (const char *at = strstr(log, part); at; at = strstr(at + 1, part)) n++;
    free(log);
    return n;
}

static const char *new_folder(const char *name)
{
    const char *path = runs_path("%s", name);
    assert_int_equal(bl_tree_remove(path), BL_OK);
    assert_int_equal(bl_dir_create(path), BL_OK);
    return path;
}

/* Files whose names contain `part`. */
static int count_files(const char *dir, const char *part)
{
    char **names;
    size_t n_names;
    int n = 0;

    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) n += strstr(names[i], part) != NULL;
    bl_names_free(names, n_names);
    return n;
}

/* ---- refusals by the system ---- */

static bool refuse_ring(const int *error)
{
    return refuse_system_call(SYS_io_uring_setup, *error);
}

static void test_io_uring_refused(void **state)
{
    static const int errors[] = {EPERM, ENOSYS, ENOMEM};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(errors); i++) {
        golden_args args = {0};
        runs_child child = {.prepare = refuse_ring, .arg = &errors[i]};
        disk_keys(&args, runs_path("no-ring"), new_folder("no-ring-pages"));
        int code = run(&args, &child);
        if (code == EXIT_CANNOT) TEST_SKIP("no seccomp here");
        assert_int_equal(code, 0);
        assert_result(&args, runs_path("no-ring"), &child);
        assert_int_equal(count(&child, "io_uring is not used, files are read with pread: "), 1);
        assert_int_equal(count(&child, strerror(errors[i])), 1);
        golden_args_free(&args);
    }
}

static bool lower_locked_memory(const int *limit_bytes)
{
    return refuse_locked_memory((size_t)*limit_bytes);
}

/* The sanitizers' mlock does nothing and reports success: no warning then. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_UNLOCKED = 0 };
#else
enum { N_UNLOCKED = RANKS };
#endif

static void test_little_locked_memory(void **state)
{
    static const int limit_bytes = 4096;
    golden_args args = {0};
    runs_child child = {.prepare = lower_locked_memory, .arg = &limit_bytes};

    (void)state;
    keys(&args, runs_path("unlocked"));
    runs_set(&args, "offload_ratio", "1");
    runs_set(&args, "activation_offload", "true");
    int code = run(&args, &child);
    if (code == EXIT_CANNOT) TEST_SKIP("this process may not lower RLIMIT_MEMLOCK");
    assert_int_equal(code, 0);
    assert_result(&args, runs_path("unlocked"), &child);
    assert_int_equal(count(&child, "warning: offloaded weights: cannot lock "), N_UNLOCKED);
    assert_true(count(&child, "RLIMIT_MEMLOCK allows 4096 ") >= N_UNLOCKED);
    assert_true(count(&child, "ulimit -l ") >= N_UNLOCKED);
    golden_args_free(&args);
}

/* ---- the folder ---- */

static void mount_memory(const char *dir, const char *options)
{
    if (mount("tmpfs", dir, "tmpfs", 0, options) != 0)
        TEST_SKIP("a file system of its own: mount: %s", strerror(errno));
}

/* Detached: the kernel may release files read with io_uring a little after the process's end. */
static void unmount(const char *dir)
{
    assert_int_equal(umount2(dir, MNT_DETACH), 0);
}

/* On tmpfs; then full, and read-only with the page files and without them. */
static void test_file_systems(void **state)
{
    const char *dir = new_folder("disk"), *output = runs_path("on-disk");
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    disk_keys(&args, output, dir);
    mount_memory(dir, "size=16k");
    double start = bl_now_s();
    assert_int_equal(run(&args, &child), EXIT_LIMIT);
    assert_true(bl_now_s() - start < FAILURE_S);
    runs_assert_error(&child, "/disk: the page file takes ");
    runs_assert_error(&child, " bytes, the disk has ");
    assert_int_equal(count_files(dir, ""), 0);
    unmount(dir);

    mount_memory(dir, "size=16m");
    assert_int_equal(run(&args, &child), 0);
    assert_result(&args, output, &child);
    assert_int_equal(count(&child, "warning: offload_dir "), 1);
    assert_int_equal(count(&child, " keeps its files in memory"), 1);
    assert_int_equal(count_files(dir, ""), N_PAGE_FILES);

    assert_int_equal(mount("tmpfs", dir, "tmpfs", MS_REMOUNT | MS_RDONLY, "size=16m"), 0);
    assert_int_equal(run(&args, &child), 0);
    assert_result(&args, output, &child);
    assert_int_equal(count(&child, "page files of this model are there"), 1);
    unmount(dir);

    mount_memory(dir, "size=16m");
    assert_int_equal(mount("tmpfs", dir, "tmpfs", MS_REMOUNT | MS_RDONLY, "size=16m"), 0);
    assert_int_equal(run(&args, &child), EXIT_LIMIT);
    runs_assert_error(&child, ".pages.tmp-");
    runs_assert_error(&child, "creating it: Read-only file system");
    unmount(dir);
    golden_args_free(&args);
}

static void test_two_runs_share_a_folder(void **state)
{
    enum { ROUNDS = 3 };

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const char *dir = new_folder("shared");
        runs_child children[2] = {0};
        golden_args args[2] = {0};
        for (int i = 0; i < 2; i++) {
            disk_keys(&args[i], runs_path("sharing-%d", i), dir);
            runs_start(&children[i], "train", &args[i]);
        }
        for (int i = 0; i < 2; i++) assert_int_equal(runs_wait(&children[i], LIMIT_S), 0);
        for (int i = 0; i < 2; i++) {
            assert_result(&args[i], runs_path("sharing-%d", i), &children[i]);
            golden_args_free(&args[i]);
        }
        assert_int_equal(count_files(dir, ""), N_PAGE_FILES);
    }
}

/* Killed at random moments, most of them while it writes pages, a run leaves files that the next
 * one removes. */
static void test_killed_while_writing(void **state)
{
    enum { KILLS = 12, MAX_KILLS = 200 };
    const char *dir = new_folder("killed-pages"), *output = runs_path("killed");
    golden_args args = {0};
    runs_child child = {0};
    int n_halves = 0;

    (void)state;
    disk_keys(&args, output, dir);
    for (int i = 0; i < KILLS || (n_halves == 0 && i < MAX_KILLS); i++) {
        runs_start(&child, "train", &args);
        while (runs_is_alive(&child) && count_files(dir, ".tmp-") == 0) usleep(200);
        usleep((useconds_t)(200 * (i % 4)));
        kill(child.pid, SIGKILL);
        runs_wait(&child, LIMIT_S);
        n_halves += count_files(dir, ".tmp-") > 0;
        if (count_files(dir, ".tmp-") == 0) new_folder("killed-pages");
    }
    assert_true(n_halves > 0);
    assert_int_equal(run(&args, &child), 0);
    assert_result(&args, output, &child);
    assert_int_equal(count_files(dir, ""), N_PAGE_FILES);
    golden_args_free(&args);
}

/* Stops it (SIGSTOP) between its first step and its last; on a loaded machine this process may come
 * too late for that. */
static void stop_in_the_middle(golden_args *args, const char *output, runs_child *child)
{
    enum { MAX_TRIES = 20 };
    bool is_through = true;

    for (int n = 0; n < MAX_TRIES && is_through; n++) {
        assert_int_equal(bl_tree_remove(output), BL_OK);
        runs_start(child, "train", args);
        while (runs_is_alive(child) && runs_logged_steps(output) < 1) runs_sleep_s(0.001);
        is_through = !runs_stop(child) || runs_logged_steps(output) == STEPS;
        if (!is_through) continue;
        kill(child->pid, SIGCONT);
        assert_int_equal(runs_wait(child, LIMIT_S), 0);
    }
    assert_false(is_through);
}

static void test_folder_removed_meanwhile(void **state)
{
    const char *dir = new_folder("removed"), *output = runs_path("removing");
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    long_keys(&args, output, dir);
    stop_in_the_middle(&args, output, &child);
    assert_int_equal(bl_tree_remove(dir), BL_OK);
    kill(child.pid, SIGCONT);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    assert_result(&args, output, &child);
    golden_args_free(&args);
}

static void truncate_page_files(const char *dir)
{
    char **names, *path;
    size_t n_names;

    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) {
        assert_int_equal(bl_path_join(dir, names[i], &path), BL_OK);
        assert_int_equal(truncate(path, 4096), 0);
        free(path);
    }
    bl_names_free(names, n_names);
}

static void test_files_truncated_meanwhile(void **state)
{
    const char *dir = new_folder("truncated"), *output = runs_path("truncating");
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    long_keys(&args, output, dir);
    stop_in_the_middle(&args, output, &child);
    truncate_page_files(dir);
    kill(child.pid, SIGCONT);
    assert_int_equal(runs_wait(&child, FAILURE_S), EXIT_LIMIT);
    runs_assert_error(&child, ": page ");
    runs_assert_error(&child, ".pages: ends at offset ");
    runs_unset(&args, "overwrite_output_dir");
    runs_set(&args, "resume_from_checkpoint", "true");
    assert_int_equal(run(&args, &child), 0);
    assert_result(&args, output, &child);
    golden_args_free(&args);
}

/* Page files are this user's alone; with those, and in a folder, that others may have written, no
 * run starts. */
static void test_page_files_of_others(void **state)
{
    const char *output = runs_path("owned"), *pages = runs_path("private/pages");
    golden_args args = {0};
    runs_child child = {0};
    char **names;
    size_t n_names;
    struct stat info;

    (void)state;
    disk_keys(&args, output, pages);
    assert_int_equal(run(&args, &child), 0);
    assert_int_equal(stat(pages, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0700);
    assert_int_equal(bl_dir_list(pages, &names, &n_names), BL_OK);
    assert_int_equal(n_names, N_PAGE_FILES);
    for (size_t i = 0; i < n_names; i++) {
        const char *path = runs_path("private/pages/%s", names[i]);
        assert_int_equal(stat(path, &info), 0);
        assert_int_equal(info.st_mode & 0777, 0600);
        assert_int_equal(chmod(path, 0620), 0);
        assert_int_equal(run(&args, &child), EXIT_USAGE);
        runs_assert_error(&child, "other users may write it (mode 620)");
        assert_int_equal(chmod(path, 0600), 0);
    }
    assert_int_equal(chmod(pages, 0777), 0);
    assert_int_equal(run(&args, &child), EXIT_USAGE);
    runs_assert_error(&child, "private/pages: other users may write it (mode 777): chmod go-w");
    assert_int_equal(chmod(pages, 0700), 0);
    if (geteuid() == 0) { /* who else may give files away? */
        assert_int_equal(chown(runs_path("private/pages/%s", names[0]), 65534, 0), 0);
        assert_int_equal(run(&args, &child), EXIT_USAGE);
        runs_assert_error(&child, "belongs to another user (uid 65534)");
        assert_int_equal(chown(runs_path("private/pages/%s", names[0]), 0, 0), 0);
    }
    assert_int_equal(run(&args, &child), 0);
    bl_names_free(names, n_names);
    golden_args_free(&args);
}

static int tear_down(void **state)
{
    (void)umount2(runs_path("disk"), MNT_DETACH); /* of a test that failed */
    return runs_tear_down(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_io_uring_refused),
        cmocka_unit_test(test_little_locked_memory),
        cmocka_unit_test(test_file_systems),
        cmocka_unit_test(test_two_runs_share_a_folder),
        cmocka_unit_test(test_killed_while_writing),
        cmocka_unit_test(test_folder_removed_meanwhile),
        cmocka_unit_test(test_files_truncated_meanwhile),
        cmocka_unit_test(test_page_files_of_others),
    };
    return cmocka_run_group_tests_name("refusals", tests, runs_set_up, tear_down);
}
