/* SPDX-License-Identifier: Apache-2.0 */
/* Training checkpoints after a crash, a full disk, a failing fsync and a flipped bit. */
#include "tmp_dir.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"
#include "store/checkpoint.h"

/* ---- fault injection (the linker's --wrap) ---- */

static int pwrite_error, fsync_error, n_fsyncs_before_error;

ssize_t __real_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
int __real_fsync(int fd);
int __wrap_fsync(int fd);

ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset)
{
    if (!pwrite_error) return __real_pwrite(fd, src, n_bytes, offset);
    errno = pwrite_error;
    return -1;
}

int __wrap_fsync(int fd)
{
    if (!fsync_error || n_fsyncs_before_error-- > 0) return __real_fsync(fd);
    errno = fsync_error;
    fsync_error = 0; /* the kernel reports a lost page once */
    return -1;
}

static bool no_exchange, kill_at_exchange, is_taken_away;
static int n_renames_before_error = -1;

int __real_renameat2(int old_dir, const char *old, int new_dir, const char *new, unsigned flags);
int __wrap_renameat2(int old_dir, const char *old, int new_dir, const char *new, unsigned flags);
int __real_rename(const char *old, const char *new);
int __wrap_rename(const char *old, const char *new);

int __wrap_renameat2(int old_dir, const char *old, int new_dir, const char *new, unsigned flags)
{
    if (no_exchange) {
        errno = EINVAL;
        return -1;
    }
    int result = __real_renameat2(old_dir, old, new_dir, new, flags);
    if (kill_at_exchange) raise(SIGKILL);
    return result;
}

int __wrap_rename(const char *old, const char *new)
{
    if (is_taken_away) assert_int_equal(bl_tree_remove(old), BL_OK); /* by another program */
    if (n_renames_before_error < 0 || n_renames_before_error-- > 0) return __real_rename(old, new);
    if (kill_at_exchange) raise(SIGKILL);
    errno = EIO;
    return -1;
}

/* ---- helpers ---- */

static bl_status add_bytes(bl_checkpoint *checkpoint, const char *name, const void *bytes,
                           size_t n_bytes)
{
    char path[512];

    snprintf(path, sizeof path, "%s/%s", bl_checkpoint_path(checkpoint), name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
    return bl_checkpoint_add_file(checkpoint, name);
}

/* Saves "weights" (n_bytes of the step's number) and "extra" with the state
 * {"step_again": step}. */
static bl_status save(const char *dir, int64_t step, size_t n_bytes)
{
    bl_checkpoint *checkpoint;
    char extra[32];
    unsigned char *bytes = malloc(n_bytes);
    memset(bytes, (int)step, n_bytes);

    bl_status st = bl_checkpoint_begin(dir, step, (int64_t)n_bytes, &checkpoint);
    if (st != BL_OK) {
        free(bytes);
        return st;
    }
    add_bytes(checkpoint, "weights", bytes, n_bytes); /* commit must remember a failure by itself */
    free(bytes);
    snprintf(extra, sizeof extra, "step %d", (int)step);
    add_bytes(checkpoint, "extra", extra, strlen(extra));
    json_t *state = json_pack("{s:I}", "step_again", (json_int_t)step);
    st = bl_checkpoint_commit(checkpoint, state);
    json_decref(state);
    return st;
}

static void assert_latest(const char *dir, int64_t expected)
{
    char *path;
    int64_t step = -1;
    json_t *state;

    assert_int_equal(bl_checkpoint_latest(dir, &path, &step, &state), BL_OK);
    if (expected < 0) {
        assert_null(path);
        assert_null(state);
        return;
    }
    assert_non_null(path);
    assert_int_equal(step, expected);
    assert_int_equal(json_integer_value(json_object_get(state, "step_again")), expected);
    json_decref(state);
    free(path);
}

static void assert_steps(const char *dir, const int64_t *expected, size_t n_expected)
{
    int64_t *steps;
    size_t n_steps;
    assert_int_equal(bl_checkpoint_list(dir, &steps, &n_steps), BL_OK);
    assert_int_equal(n_steps, n_expected);
    if (n_expected) assert_memory_equal(steps, expected, n_expected * sizeof *steps);
    free(steps);
}

/* Changes one byte of FOLDER/name. */
static void flip(const char *name, long offset)
{
    FILE *file = fopen(tmp_path(name), "r+");
    assert_non_null(file);
    fseek(file, offset, offset < 0 ? SEEK_END : SEEK_SET);
    int byte = fgetc(file);
    fseek(file, -1, SEEK_CUR);
    fputc(byte ^ 1, file);
    fclose(file);
}

static void assert_damaged(const char *name, const char *part)
{
    json_t *state = NULL;
    assert_int_equal(bl_checkpoint_verify(tmp_path(name), NULL, &state), BL_ECHECKPOINT);
    assert_null(state);
    assert_error_has(part);
}

/* ---- tests ---- */

static void test_round_trip(void **state)
{
    static const int64_t both[] = {12, 7};
    const char *dir = tmp_path("run/checkpoints");
    char *bytes;
    size_t n_bytes;

    (void)state;
    assert_latest(dir, -1);
    assert_steps(dir, NULL, 0);
    assert_int_equal(bl_checkpoint_clean(dir, NULL), BL_OK);
    assert_int_equal(save(dir, 7, 100), BL_EIO); /* a removed directory is not made again */
    assert_false(bl_file_exists(tmp_path("run")));
    tmp_subdir("run");
    assert_int_equal(save(dir, 7, 100), BL_OK);
    assert_int_equal(save(dir, 12, 0), BL_OK);
    assert_latest(dir, 12);
    tmp_subdir("run/checkpoints/step-0099"); /* not one of ours */
    tmp_subdir("run/checkpoints/step-99x");
    assert_steps(dir, both, 2);
    assert_int_equal(
        bl_file_read_all(tmp_path("run/checkpoints/step-7/extra"), 100, (void **)&bytes, &n_bytes),
        BL_OK);
    assert_string_equal(bytes, "step 7");
    free(bytes);
    assert_int_equal(save(dir, 7, 50), BL_OK); /* replaces */
    assert_int_equal(bl_checkpoint_verify(tmp_path("run/checkpoints/step-7"), NULL, NULL), BL_OK);
    assert_int_equal(bl_file_read_all(tmp_path("run/checkpoints/step-7/weights"), 100,
                                      (void **)&bytes, &n_bytes),
                     BL_OK);
    assert_int_equal(n_bytes, 50);
    free(bytes);
    assert_false(bl_file_exists(tmp_path("run/checkpoints/step-7.old.tmp")));
}

static void test_damage_is_found_and_passed_over(void **state)
{
    const char *dir = tmp_subdir("d");

    (void)state;
    for (int64_t step = 1; step <= 6; step++) assert_int_equal(save(dir, step, 3 << 20), BL_OK);
    flip("d/step-6/weights", (2 << 20) + 5);
    assert_damaged("d/step-6", "/d/step-6/weights: checksum mismatch");
    assert_int_equal(truncate(tmp_path("d/step-5/weights"), 9), 0);
    assert_damaged("d/step-5", "/weights: is 9 bytes, the manifest says 3145728");
    assert_int_equal(unlink(tmp_path("d/step-4/extra")), 0);
    assert_damaged("d/step-4", "/d/step-4/extra: No such file");
    assert_int_equal(unlink(tmp_path("d/step-3/manifest.json")), 0);
    assert_damaged("d/step-3", "/d/step-3/manifest.json: No such file");
    char *text;
    size_t n_bytes;
    assert_int_equal(
        bl_file_read_all(tmp_path("d/step-2/manifest.json"), 10000, (void **)&text, &n_bytes),
        BL_OK);
    flip("d/step-2/manifest.json",
         strstr(text, "\"step_again\": ") + 14 - text); /* 2 -> 3: still JSON */
    assert_damaged("d/step-2", "/d/step-2/manifest.json: checksum mismatch");
    free(text);
    assert_latest(dir, 1);
    put_text("d/step-1/manifest.json", "{}");
    assert_damaged("d/step-1", "key format: missing");
    put_text("d/step-1/manifest.json", "{\"format\":\"other\"}");
    assert_damaged("d/step-1", "key format: expected \"ballast-checkpoint-1\", got \"other\"");
    assert_latest(dir, -1);
}

static void test_full_disk(void **state)
{
    const char *dir = tmp_subdir("full");
    bl_checkpoint *checkpoint;

    (void)state;
    assert_int_equal(save(dir, 1, 10), BL_OK);
    assert_int_equal(bl_checkpoint_begin(dir, 2, INT64_MAX, &checkpoint), BL_ELIMIT);
    assert_error_has("/full: a checkpoint takes 9223372036854775807 bytes, the disk has ");
    pwrite_error = ENOSPC;
    assert_int_equal(save(dir, 2, 1000), BL_ELIMIT);
    pwrite_error = 0;
    assert_error_has("/full/step-2.tmp/manifest.json.tmp: writing ");
    assert_error_has(" bytes at offset 0: No space left on device");
    assert_false(bl_file_exists(tmp_path("full/step-2")));
    assert_false(bl_file_exists(tmp_path("full/step-2.tmp")));
    assert_latest(dir, 1);
}

/* Each fsync of a save in turn fails once; none may be retried into a checkpoint that counts as
 * good. */
static void test_failed_fsync_is_fatal(void **state)
{
    const char *dir = tmp_subdir("eio");
    int n_failed = 0;

    (void)state;
    assert_int_equal(save(dir, 1, 10), BL_OK);
    for (int i = 0;; i++) {
        fsync_error = EIO;
        n_fsyncs_before_error = i;
        bl_status st = save(dir, 2, 10);
        bool fired = fsync_error == 0;
        fsync_error = 0;
        if (!fired) {
            assert_int_equal(st, BL_OK);
            break;
        }
        assert_int_equal(st, BL_EIO);
        assert_error_has("fsync: Input/output error");
        n_failed++;
        char *path;
        assert_int_equal(bl_checkpoint_latest(dir, &path, NULL, NULL), BL_OK);
        /* Step 1, or step 2 where only the last fsync, of the parent, failed. */
        assert_non_null(path);
        free(path);
        assert_int_equal(bl_tree_remove(tmp_path("eio/step-2")), BL_OK);
    }
    /* the new folder's parent, weights, extra, manifest and its folder, the parent again */
    assert_int_equal(n_failed, 6);
}

static void test_wrong_names(void **state)
{
    const char *dir = tmp_subdir("names");
    static const char *const bad[] = {"sub/x", "manifest.json", "twice"};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        bl_checkpoint *checkpoint;
        json_t *empty = json_object();
        assert_int_equal(bl_checkpoint_begin(dir, 1, 0, &checkpoint), BL_OK);
        assert_int_equal(bl_dir_create(tmp_path("names/step-1.tmp/sub")), BL_OK);
        assert_int_equal(add_bytes(checkpoint, "twice", "", 0), BL_OK);
        assert_int_not_equal(add_bytes(checkpoint, bad[i], "", 0), BL_OK);
        assert_int_not_equal(bl_checkpoint_commit(checkpoint, empty), BL_OK);
        assert_false(bl_file_exists(tmp_path("names/step-1")));
        json_decref(empty);
    }
}

enum { N_RANKS = 6 };

typedef struct rank_arg {
    bl_checkpoint *checkpoint;
    int rank;
} rank_arg;

static void *add_rank_file(void *arg)
{
    const rank_arg *rank = arg;
    char name[32];
    snprintf(name, sizeof name, "optimizer-%d", rank->rank);
    add_bytes(rank->checkpoint, name, name, strlen(name));
    return NULL;
}

static void test_ranks_add_their_files_together(void **state)
{
    const char *dir = tmp_subdir("ranks");
    bl_checkpoint *checkpoint;
    pthread_t threads[N_RANKS];
    rank_arg args[N_RANKS];
    json_t *empty = json_object();

    (void)state;
    assert_int_equal(bl_checkpoint_begin(dir, 3, 0, &checkpoint), BL_OK);
    for (int r = 0; r < N_RANKS; r++) {
        args[r] = (rank_arg){checkpoint, r};
        assert_int_equal(pthread_create(&threads[r], NULL, add_rank_file, &args[r]), 0);
    }
    for (int r = 0; r < N_RANKS; r++) pthread_join(threads[r], NULL);
    assert_int_equal(bl_checkpoint_commit(checkpoint, empty), BL_OK);
    assert_int_equal(bl_checkpoint_verify(tmp_path("ranks/step-3"), NULL, NULL), BL_OK);
    assert_int_equal(unlink(tmp_path("ranks/step-3/optimizer-5")), 0);
    assert_damaged("ranks/step-3", "optimizer-5: No such file");
    json_decref(empty);
}

/* What another process writes: entered as it was described there, and missed when it is not seen
 * here. */
static void test_files_of_other_processes(void **state)
{
    const char *dir = tmp_subdir("described");
    char *folder, path[512];
    bl_checkpoint *checkpoint;
    bl_checkpoint_file file;
    json_t *nothing = json_object();

    (void)state;
    for (int round = 0; round < 3; round++) {
        assert_int_equal(bl_checkpoint_begin(dir, round, 100, &checkpoint), BL_OK);
        assert_int_equal(bl_checkpoint_step_tmp_path(dir, round, &folder), BL_OK);
        assert_string_equal(folder, bl_checkpoint_path(checkpoint));
        snprintf(path, sizeof path, "%s/theirs", folder);
        free(folder);
        assert_int_equal(bl_file_write_atomic(path, "abc", 3), BL_OK);
        assert_int_equal(bl_checkpoint_describe_file(path, &file), BL_OK);
        assert_int_equal(file.n_bytes, 3);
        if (round == 1) assert_int_equal(bl_tree_remove(path), BL_OK);
        if (round == 2) assert_int_equal(bl_file_write_atomic(path, "abcd", 4), BL_OK);
        bl_status expected = round == 0 ? BL_OK : BL_EIO;
        assert_int_equal(bl_checkpoint_add_described(checkpoint, "theirs", &file), expected);
        if (round > 0) assert_non_null(strstr(bl_error_text(), "theirs"));
        assert_int_equal(bl_checkpoint_commit(checkpoint, nothing), expected);
    }
    json_decref(nothing);
    assert_latest(dir, 0);
    /* The description is what counts: a file that changes its content afterwards is found out. */
    const char *latest = tmp_path("described/step-0");
    snprintf(path, sizeof path, "%s/theirs", latest);
    assert_int_equal(bl_file_write_atomic(path, "abd", 3), BL_OK);
    assert_int_equal(bl_checkpoint_verify(latest, NULL, NULL), BL_ECHECKPOINT);
}

static void test_prune_keeps_what_is_needed(void **state)
{
    static const int64_t all[] = {50, 40, 30, 20, 10}, two_whole[] = {50, 40, 30};
    const char *dir = tmp_subdir("prune");

    (void)state;
    for (int64_t step = 10; step <= 50; step += 10) assert_int_equal(save(dir, step, 10), BL_OK);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, -1, 0), BL_OK);
    assert_steps(dir, all, 5);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, -1, 9), BL_OK);
    assert_steps(dir, all, 5);
    flip("prune/step-50/weights", 0);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, -1, 2),
                     BL_ECHECKPOINT); /* the new checkpoint is damaged: touch nothing */
    assert_steps(dir, all, 5);
    flip("prune/step-50/weights", 0);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, -1, 4), BL_OK);
    assert_steps(dir, all, 4);
    assert_int_equal(truncate(tmp_path("prune/step-40/weights"), 1), 0);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, -1, 1),
                     BL_OK); /* 40 is not whole: 30 stays */
    assert_steps(dir, two_whole, 3);
    assert_latest(dir, 50);

    put_text("prune/step-60.tmp", "");
    tmp_subdir("prune/step-70.tmp");
    tmp_subdir("prune/step-70.tmp.d");
    assert_int_equal(bl_checkpoint_clean(dir, NULL), BL_OK);
    assert_false(bl_file_exists(tmp_path("prune/step-60.tmp")));
    assert_false(bl_file_exists(tmp_path("prune/step-70.tmp")));
    assert_true(bl_file_exists(tmp_path("prune/step-70.tmp.d")));
    assert_steps(dir, two_whole, 3);
}

static void test_prune_keeps_the_best(void **state)
{
    static const int64_t three[] = {50, 40, 20}, two[] = {50, 20}, with_damaged[] = {50, 40, 30};
    const char *dir = tmp_subdir("best");

    (void)state;
    for (int64_t step = 10; step <= 50; step += 10) assert_int_equal(save(dir, step, 10), BL_OK);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, 20, 3), BL_OK);
    assert_steps(dir, three, 3);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, 20, 1), BL_OK);
    assert_steps(dir, two, 2);
    /* The saved one is the best; one that is not there; a damaged one does not count as whole. */
    assert_int_equal(save(dir, 30, 10), BL_OK);
    assert_int_equal(save(dir, 40, 10), BL_OK);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, 50, 3), BL_OK);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, 20, 3), BL_OK);
    assert_steps(dir, with_damaged, 3);
    assert_int_equal(truncate(tmp_path("best/step-30/weights"), 1), 0);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 50, 30, 2), BL_OK);
    assert_steps(dir, with_damaged, 3);
}

/* A run that fell back, or was started, before the highest step: its new checkpoints stay, the
 * higher old ones are removed, whole or damaged. */
static void test_prune_after_an_older_start(void **state)
{
    static const int64_t all[] = {60, 50, 40, 30, 20, 10}, kept[] = {40, 30}, only[] = {10};
    const char *dir = tmp_subdir("branch");

    (void)state;
    for (int64_t step = 10; step <= 60; step += 10) assert_int_equal(save(dir, step, 10), BL_OK);
    flip("branch/step-60/weights", 0);
    flip("branch/step-40/weights", 0);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 40, -1, 2), BL_ECHECKPOINT);
    assert_error_has("step-40/weights: checksum mismatch");
    assert_steps(dir, all, 6);
    flip("branch/step-40/weights", 0);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 40, -1, 2), BL_OK);
    assert_steps(dir, kept, 2);
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 45, -1, 2), BL_EIO);
    assert_error_has("step-45");
    assert_steps(dir, kept, 2);
    assert_int_equal(save(dir, 10, 10), BL_OK);
    is_taken_away = true;
    assert_int_equal(bl_checkpoint_prune(dir, NULL, 10, -1, 2), BL_OK);
    is_taken_away = false;
    assert_steps(dir, only, 1);
}

/* Saves step 7 again, and is killed as the new folder takes the place of the old one; or fails
 * there. */
static void replace_and_die(const char *dir, bool with_exchange)
{
    int status;
    pid_t child = fork();

    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        kill_at_exchange = true;
        no_exchange = !with_exchange;
        n_renames_before_error = with_exchange ? -1 : 2; /* the manifest's, then the old folder's */
        save(dir, 7, 200);
        _exit(1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Of a checkpoint and the one that replaces it, one is there whatever happens. */
static void test_a_replaced_checkpoint_never_vanishes(void **state)
{
    static const int64_t one[] = {7};
    const char *dir = tmp_subdir("replaced");

    (void)state;
    for (int with_exchange = 0; with_exchange < 2; with_exchange++) {
        assert_int_equal(save(dir, 7, 100), BL_OK);
        replace_and_die(dir, with_exchange);
        assert_int_equal(bl_checkpoint_clean(dir, NULL), BL_OK);
        assert_steps(dir, one, 1);
        assert_latest(dir, 7);
        assert_false(bl_file_exists(tmp_path("replaced/step-7.tmp")));
        assert_false(bl_file_exists(tmp_path("replaced/step-7.old.tmp")));
    }
    no_exchange = true;
    n_renames_before_error = 2;
    assert_int_equal(save(dir, 7, 100), BL_EIO);
    assert_latest(dir, 7);
    n_renames_before_error = -1;
    assert_int_equal(save(dir, 7, 100), BL_OK);
    no_exchange = false;
    assert_latest(dir, 7);
    tmp_subdir("replaced/step-7.old.tmp");
    assert_int_equal(bl_checkpoint_clean(dir, NULL), BL_OK);
    assert_false(bl_file_exists(tmp_path("replaced/step-7.old.tmp")));
    assert_latest(dir, 7);
}

/* Saves without end, telling each finished step; never returns. */
static void save_forever(const char *dir, int64_t step, int told)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed assertion must not leave it behind */
    for (;; step++) {
        if (save(dir, step, 200000) != BL_OK ||
            bl_checkpoint_prune(dir, NULL, step, -1, 2) != BL_OK)
            _exit(1);
        if (write(told, &step, sizeof step) != sizeof step) _exit(1);
    }
}

/* SIGKILL at a random moment of a save, again and again: what had been reported as saved, or newer,
 * always loads. */
static void test_sigkill_in_the_middle_of_saves(void **state)
{
    enum { N_KILLS = 30 };
    const char *dir = tmp_subdir("kill");
    unsigned seed = 1;
    int64_t last_told = 0;

    (void)state;
    for (int k = 0; k < N_KILLS; k++) {
        int told[2], status;
        int64_t step;
        assert_int_equal(pipe(told), 0);
        pid_t child = fork();
        if (child == 0) save_forever(dir, last_told + 1, told[1]);
        close(told[1]);
        assert_int_equal(read(told[0], &step, sizeof step),
                         sizeof step); /* at least one save got through */
        last_told = step;
        usleep((useconds_t)(rand_r(&seed) % 20000));
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        while (read(told[0], &step, sizeof step) == sizeof step) last_told = step;
        close(told[0]);

        char *path;
        int64_t latest;
        assert_int_equal(bl_checkpoint_latest(dir, &path, &latest, NULL), BL_OK);
        assert_non_null(path);
        assert_true(latest == last_told || latest == last_told + 1);
        free(path);
        assert_int_equal(bl_checkpoint_clean(dir, NULL), BL_OK);
        last_told = latest;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_damage_is_found_and_passed_over),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_failed_fsync_is_fatal),
        cmocka_unit_test(test_wrong_names),
        cmocka_unit_test(test_ranks_add_their_files_together),
        cmocka_unit_test(test_files_of_other_processes),
        cmocka_unit_test(test_prune_keeps_what_is_needed),
        cmocka_unit_test(test_prune_keeps_the_best),
        cmocka_unit_test(test_prune_after_an_older_start),
        cmocka_unit_test(test_a_replaced_checkpoint_never_vanishes),
        cmocka_unit_test(test_sigkill_in_the_middle_of_saves),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
