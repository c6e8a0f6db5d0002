/* SPDX-License-Identifier: Apache-2.0 */
/* bl_model_quantize and bl_model_merge killed before each system call that changes the disk, one
 * after the other, and on a disk that becomes full: run once more, each ends with the bytes of an
 * undisturbed run, and leaves nothing else behind. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "convert/merge.h"
#include "convert/quantize.h"
#include "skip.h"

static char folder[] = "/tmp/ballast-test-quantize-killed.XXXXXX";

static int n_left = -1; /* calls until the process ends; negative: it does not */

static int64_t n_free = -1; /* bytes until the disk is full; negative: it is not */

static void count(void)
{
    if (n_left >= 0 && n_left-- == 0) kill(getpid(), SIGKILL);
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, mode_t mode);
int __real_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode);
int __real_flock(int fd, int how);
int __wrap_flock(int fd, int how);
int __real_ftruncate(int fd, off_t n_bytes);
int __wrap_ftruncate(int fd, off_t n_bytes);
ssize_t __real_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);

int __wrap_open(const char *path, int flags, mode_t mode)
{
    if (flags & O_CREAT) count();
    return __real_open(path, flags, mode);
}

int __wrap_mkdir(const char *path, mode_t mode)
{
    count();
    return __real_mkdir(path, mode);
}

int __wrap_flock(int fd, int how)
{
    count();
    return __real_flock(fd, how);
}

int __wrap_ftruncate(int fd, off_t n_bytes)
{
    count();
    return __real_ftruncate(fd, n_bytes);
}

ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset)
{
    count();
    if (n_free >= 0 && (int64_t)n_bytes > n_free) {
        n_bytes = (size_t)n_free;
        errno = ENOSPC;
        if (n_bytes == 0) return -1;
    }
    if (n_free >= 0) n_free -= (int64_t)n_bytes;
    return __real_pwrite(fd, src, n_bytes, offset);
}

int __wrap_fsync(int fd)
{
    count();
    return __real_fsync(fd);
}

int __wrap_rename(const char *from, const char *to)
{
    count();
    return __real_rename(from, to);
}

static int set_up(void **state)
{
    (void)state;
    return !mkdtemp(folder);
}

static int tear_down(void **state)
{
    (void)state;
    return bl_tree_remove(folder) != BL_OK;
}

typedef bl_status (*convert_fn)(const char *source, const char *target, bl_pool *pool);

static bl_status quantize(const char *source, const char *target, bl_pool *pool)
{
    const bl_quantize_options options = {
        .source = source, .target = target, .format = BL_FORMAT_FP8_ROW, .pool = pool};
    bl_quantize_result result;
    return bl_model_quantize(&options, &result);
}

static const char *adapter;

static bl_status merge(const char *source, const char *target, bl_pool *pool)
{
    const bl_merge_adapter adapters[] = {{adapter, 1.0}};
    const bl_merge_options options = {.source = source,
                                      .target = target,
                                      .adapters = adapters,
                                      .n_adapters = 1,
                                      .format = BL_MERGE_FP8_ROW,
                                      .rounding = BL_MERGE_STOCHASTIC,
                                      .pool = pool};
    bl_merge_result result;
    return bl_model_merge(&options, &result);
}

/* In a child, which is killed before its call `n_calls`; negative: not. Returns whether it was
 * killed. */
static bool run(convert_fn convert, const char *source, const char *target, int n_calls)
{
    int status;
    pid_t child = fork();

    assert_true(child >= 0);
    if (child == 0) {
        bl_pool *pool;
        if (bl_pool_create(1, &pool) != BL_OK) _exit(1);
        n_left = n_calls;
        bl_status st = convert(source, target, pool);
        if (st != BL_OK) fprintf(stderr, "%s\n", bl_error_text());
        _exit(st != BL_OK);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return true;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("after %d calls: status %x", n_calls, (unsigned)status);
    return false;
}

static void assert_same_file(const char *dir_a, const char *dir_b, const char *name)
{
    char path_a[512], path_b[512];
    void *a, *b;
    size_t n_a, n_b;

    snprintf(path_a, sizeof path_a, "%s/%s", dir_a, name);
    snprintf(path_b, sizeof path_b, "%s/%s", dir_b, name);
    assert_int_equal(bl_file_read_all(path_a, 1 << 30, &a, &n_a), BL_OK);
    assert_int_equal(bl_file_read_all(path_b, 1 << 30, &b, &n_b), BL_OK);
    if (n_a != n_b || memcmp(a, b, n_a) != 0) fail_msg("%s and %s differ", path_a, path_b);
    free(a);
    free(b);
}

static void assert_same_folder(const char *dir_a, const char *dir_b)
{
    char **a, **b;
    size_t n_a, n_b;

    assert_int_equal(bl_dir_list(dir_a, &a, &n_a), BL_OK);
    assert_int_equal(bl_dir_list(dir_b, &b, &n_b), BL_OK);
    for (size_t i = 0; i < n_b; i++)
        if (i >= n_a || strcmp(a[i], b[i]) != 0) fail_msg("%s/%s is not in %s", dir_b, b[i], dir_a);
    assert_int_equal(n_a, n_b);
    for (size_t i = 0; i < n_a; i++)
        if (strcmp(a[i], ".ballast.lock") != 0)
            assert_same_file(dir_a, dir_b, a[i]); /* it names its last holder */
    bl_names_free(a, n_a);
    bl_names_free(b, n_b);
}

static void kill_before_each_call(convert_fn convert, const char *source)
{
    char whole[256], target[256];
    int n = 0;

    snprintf(whole, sizeof whole, "%s/whole", folder);
    snprintf(target, sizeof target, "%s/killed/target", folder);
    assert_int_equal(bl_tree_remove(whole), BL_OK);
    assert_false(run(convert, source, whole, -1));
    for (bool killed = true; killed; n++) {
        char killed_dir[256];
        snprintf(killed_dir, sizeof killed_dir, "%s/killed", folder);
        assert_int_equal(bl_tree_remove(killed_dir), BL_OK);
        killed = run(convert, source, target, n);
        if (killed && n % 3 == 0)
            run(convert, source, target, n / 2); /* and once more on its way back */
        assert_false(run(convert, source, target, -1));
        assert_same_folder(whole, target);
    }
    print_message("%s: killed before each of %d calls\n", source, n - 1);
    assert_true(n > 20);
}

/* ---- a full disk ---- */

/* In a child, with room for so many bytes. Returns the exit code of its status; `text`: its
 * error. */
static int run_with_room(convert_fn convert, const char *source, const char *target, int64_t room,
                         char text[BL_ERROR_TEXT_BYTES])
{
    int status, ends[2];

    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        bl_pool *pool;
        if (bl_pool_create(1, &pool) != BL_OK) _exit(1);
        n_free = room;
        bl_status st = convert(source, target, pool);
        const char *error = st == BL_OK ? "" : bl_error_text();
        (void)!write(ends[1], error, strlen(error));
        _exit(bl_status_exit_code(st));
    }
    close(ends[1]);
    ssize_t n = read(ends[0], text, BL_ERROR_TEXT_BYTES - 1);
    close(ends[0]);
    text[n > 0 ? n : 0] = '\0';
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Files under their final names are those of an undisturbed run; without config.json it is no
 * model. */
static void assert_nothing_half(const char *whole, const char *target)
{
    char **names, path[600];
    size_t n_names;

    assert_int_equal(bl_dir_list(target, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) {
        assert_string_not_equal(names[i], "config.json");
        snprintf(path, sizeof path, "%s/%s", whole, names[i]);
        if (bl_text_ends_with(names[i], ".safetensors") && bl_file_exists(path))
            assert_same_file(whole, target, names[i]);
    }
    bl_names_free(names, n_names);
}

/* Of all files but the last one, config.json: with room for them, that one does not fit. */
static int64_t bytes_without_config(const char *dir)
{
    char **names, path[600];
    size_t n_names, n;
    int64_t sum = 0;
    void *bytes;

    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) {
        if (strcmp(names[i], "config.json") == 0 || names[i][0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        assert_int_equal(bl_file_read_all(path, 1 << 30, &bytes, &n), BL_OK);
        free(bytes);
        sum += (int64_t)n;
    }
    bl_names_free(names, n_names);
    return sum;
}

static void fill_the_disk(convert_fn convert, const char *source)
{
    enum { N_ROOMS = 24, EXIT_LIMIT = 4 };
    char whole[256], target[256], text[BL_ERROR_TEXT_BYTES];

    snprintf(whole, sizeof whole, "%s/fits", folder);
    snprintf(target, sizeof target, "%s/full", folder);
    assert_int_equal(bl_tree_remove(whole), BL_OK);
    assert_false(run(convert, source, whole, -1));
    int64_t most = bytes_without_config(whole);
    for (int i = 0; i < N_ROOMS; i++) {
        assert_int_equal(bl_tree_remove(target), BL_OK);
        int code = run_with_room(convert, source, target, most * i / (N_ROOMS - 1), text);
        if (code != EXIT_LIMIT) fail_msg("room %d: exit code %d: %s", i, code, text);
        if (!strstr(text, target) || !strstr(text, "No space left on device"))
            fail_msg("room %d: %s", i, text);
        assert_nothing_half(whole, target);
        /* Full again, and then not. */
        assert_int_equal(run_with_room(convert, source, target, 0, text), EXIT_LIMIT);
        assert_nothing_half(whole, target);
        assert_false(run(convert, source, target, -1));
        assert_same_folder(whole, target);
    }
}

static void test_full_disk(void **state)
{
    (void)state;
    adapter = "tests/golden/train/adapters/tiny-gqa-mlp";
    fill_the_disk(merge, "tests/golden/train/models/tiny-gqa");
    fill_the_disk(quantize, "tests/golden/train/models/tiny-gqa");
}

static void test_golden_model(void **state)
{
    (void)state;
    kill_before_each_call(quantize, "tests/golden/train/models/tiny-gqa");
}

static void test_merged_model(void **state)
{
    (void)state;
    adapter = "tests/golden/train/adapters/tiny-gqa-mlp";
    kill_before_each_call(merge, "tests/golden/train/models/tiny-gqa");
}

static void test_sharded_model(void **state)
{
    (void)state;
    const char *data = getenv("BALLAST_TEST_DATA");
    char source[512];

    TEST_SKIP_WITHOUT_DATA(data);
    snprintf(source, sizeof source, "%s/models/stories260K-bf16-sharded", data);
    kill_before_each_call(quantize, source);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_model),
        cmocka_unit_test(test_merged_model),
        cmocka_unit_test(test_sharded_model),
        cmocka_unit_test(test_full_disk),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
