/* SPDX-License-Identifier: Apache-2.0 */
/* The program stopped, killed and starved from outside; resumed, it ends with the same bits as an
 * undisturbed run.
 *
 * The moments are random and differ from run to run; BALLAST_KILLS: how many kills (20). */
#include "runs.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/checkpoint.h"
#include "skip.h"

enum { EXIT_USAGE = 2, EXIT_LIMIT = 4, EXIT_STOPPED = 75 };
enum { STEPS = 60, SLOW_STEPS = 3, SAVE_STEPS = 5, MAX_LIVES = 200 };
enum { MAX_TRIES = 20 }; /* where a run can be through before it is signaled */

static const double LIMIT_S = 600; /* for a child; a sanitizer makes it 20 times slower */

static const int stop_signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGXCPU};

static void run_keys(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "max_steps", "%d", STEPS);
    runs_set(args, "save_steps", "%d", SAVE_STEPS);
    runs_set(args, "save_total_limit", "3");
    runs_set(args, "eval_steps", "15");
    runs_set(args, "resume_from_checkpoint", "true");
}

/* Few long steps: of about half a second each without a sanitizer. */
static void slow_keys(golden_args *args, const char *output, int ranks)
{
    run_keys(args, output, ranks);
    runs_set(args, "max_steps", "%d", SLOW_STEPS);
    runs_set(args, "save_steps", "0");
    runs_set(args, "visit_tokens", "1");
    runs_set(args, "gradient_accumulation_steps", "%d", 800 / ranks);
}

typedef void (*keys_fn)(golden_args *args, const char *output, int ranks);

static int train(keys_fn keys, const char *output, int ranks)
{
    golden_args args = {0};
    runs_child child = {0};

    keys(&args, output, ranks);
    runs_start(&child, "train", &args);
    int code = runs_wait(&child, LIMIT_S);
    if (code != 0) runs_assert_error(&child, "");
    golden_args_free(&args);
    return code;
}

static void start(runs_child *child, keys_fn keys, const char *output, int ranks)
{
    golden_args args = {0};
    keys(&args, output, ranks);
    runs_start(child, "train", &args);
    golden_args_free(&args);
}

/* The same run, undisturbed; made once for each number of ranks. */
static const char *whole_run(keys_fn keys, const char *name, int ranks)
{
    const char *output = runs_path("%s-%d", name, ranks);
    if (!bl_file_exists(output)) assert_int_equal(train(keys, output, ranks), 0);
    return output;
}

/* Until the child has got as far as its first lines; false when it has ended without any. */
static bool wait_for_log(const runs_child *child)
{
    for (;;) {
        bool is_alive = runs_is_alive(child); /* first: one that has ended says no more */
        size_t n = 0;
        if (bl_file_exists(child->log)) free(runs_read(child->log, &n));
        if (n > 0 || !is_alive) return n > 0;
        runs_sleep_s(0.001);
    }
}

/* Until the child has said `text`, or has ended. */
static void wait_for_text(const runs_child *child, const char *text)
{
    for (bool said = false; !said && runs_is_alive(child);) {
        char *log = bl_file_exists(child->log) ? runs_read(child->log, NULL) : NULL;
        said = log && strstr(log, text);
        free(log);
        if (!said) runs_sleep_s(0.001);
    }
}

/* Until the step has been logged, or the child has ended. */
static void wait_for_step(const runs_child *child, const char *output, int64_t step)
{
    while (runs_is_alive(child) && runs_logged_steps(output) < step) runs_sleep_s(0.002);
}

/* Leaves a run in `output` that was asked to stop once `step` was logged, and had not come to its
 * end by then. */
static void stop_after_step(keys_fn keys, const char *output, int ranks, int64_t step)
{
    int code = 0;

    for (int n = 0; n < MAX_TRIES && code != EXIT_STOPPED; n++) {
        runs_child child = {0};
        assert_int_equal(bl_tree_remove(output), BL_OK);
        start(&child, keys, output, ranks);
        wait_for_step(&child, output, step);
        kill(child.pid, SIGTERM);
        code = runs_wait(&child, LIMIT_S);
        assert_true(code == 0 || code == EXIT_STOPPED);
    }
    assert_int_equal(code, EXIT_STOPPED);
}

/* ---- requests to stop ---- */

/* Stops the run again and again, each time with the next signal, until it is through. */
static void stop_until_done(int ranks)
{
    const char *whole = whole_run(run_keys, "whole", ranks), *output = runs_path("stopped");
    int n_stops = 0, code = EXIT_STOPPED;

    assert_int_equal(bl_tree_remove(output), BL_OK);
    for (int life = 0; life < MAX_LIVES && code != 0; life++) {
        runs_child child = {0};
        start(&child, run_keys, output, ranks);
        if (wait_for_log(&child)) {
            /* Soon at first, or a fast machine is through before. */
            runs_sleep_s(runs_random_s(0.1 * (1 + n_stops)));
            kill(child.pid, stop_signals[(size_t)life % BL_COUNT(stop_signals)]);
        }
        code = runs_wait(&child, LIMIT_S);
        if (code == 0 && n_stops > 0) break;
        if (code == 0) { /* through at once: from the beginning */
            assert_int_equal(bl_tree_remove(output), BL_OK);
            code = EXIT_STOPPED;
            continue;
        }
        runs_assert_stopped(&child, "resume with --resume_from_checkpoint true");
        assert_int_equal(code, EXIT_STOPPED);
        n_stops++;
    }
    assert_int_equal(code, 0);
    assert_true(n_stops > 0);
    printf("%d ranks: stopped %d times\n", ranks, n_stops);
    assert_true(runs_are_same(whole, output));
}

static void test_stop_at_any_moment(void **state)
{
    (void)state;
    stop_until_done(1);
    stop_until_done(3);
}

static void grace_keys(golden_args *args, const char *output, int ranks)
{
    slow_keys(args, output, ranks);
    runs_set(args, "grace_s", "0.05");
}

/* A step that takes longer than grace_s is given up; what was complete before it is saved. */
static void test_grace_runs_out(void **state)
{
    static const int rank_counts[] = {1, 3};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(rank_counts); i++) {
        const char *whole = whole_run(slow_keys, "slow", rank_counts[i]),
                   *output = runs_path("grace-%zu", i);
        for (int step = 0; step < SLOW_STEPS; step++) { /* one stop inside each step */
            runs_child child = {0};
            start(&child, grace_keys, output, rank_counts[i]);
            if (step > 0 || !wait_for_log(&child)) wait_for_step(&child, output, step);
            runs_sleep_s(0.1 + runs_random_s(0.1));
            kill(child.pid, SIGTERM);
            int code = runs_wait(&child, LIMIT_S);
            if (code == 0) break; /* this machine's steps are shorter than the sleep above */
            assert_int_equal(code, EXIT_STOPPED);
            runs_assert_stopped(&child, "resume with --resume_from_checkpoint true");
            char *log = runs_read(child.log, NULL);
            printf("%s", strstr(log, "ballast: stopped"));
            free(log);
        }
        assert_int_equal(train(grace_keys, output, rank_counts[i]), 0);
        assert_true(runs_are_same(whole, output));
    }
}

static void evaluating_keys(golden_args *args, const char *output, int ranks)
{
    run_keys(args, output, ranks);
    runs_set(args, "max_steps", "6");
    runs_set(args, "eval_steps", "2");
    runs_set(args, "save_steps", "0");
    runs_set(args, "grace_s", "0.01");
    runs_set(args, "per_device_eval_batch_size", "1");
    runs_set(args, "validation_file", "%s", runs_path("long-validation.jsonl"));
}

/* A run that mostly evaluates is stopped mostly in an evaluation: each is still in the log once. */
static void test_stopped_in_an_evaluation(void **state)
{
    enum { ROWS = 3000 };
    FILE *file = fopen(runs_path("long-validation.jsonl"), "w");
    int code = EXIT_STOPPED, n_stops = 0;

    (void)state;
    assert_non_null(file);
    for (int i = 0; i < ROWS; i++)
        fprintf(file, "{\"input_ids\":[%d,%d,5,%d,7,8,9,10]}\n", 3 + i % 90, 3 + i % 7, 3 + i % 31);
    assert_int_equal(fclose(file), 0);
    const char *whole = whole_run(evaluating_keys, "evaluating", 2),
               *output = runs_path("stopped-evaluating");
    for (int life = 0; life < MAX_LIVES && code != 0; life++) {
        runs_child child = {0};
        start(&child, evaluating_keys, output, 2);
        if (wait_for_log(&child) && n_stops < 8) {
            runs_sleep_s(runs_random_s(0.1) * (1 + n_stops));
            kill(child.pid, SIGTERM);
        }
        code = runs_wait(&child, LIMIT_S);
        assert_true(code == 0 || code == EXIT_STOPPED);
        n_stops += code != 0;
        if (n_stops > 0) continue;
        assert_int_equal(bl_tree_remove(output), BL_OK); /* through at once: from the beginning */
        code = EXIT_STOPPED;
    }
    printf("stopped %d times\n", n_stops);
    assert_true(n_stops > 0);
    assert_true(runs_are_same(whole, output));
}

static void second_keys(golden_args *args, const char *output, int ranks)
{
    slow_keys(args, output, ranks);
    runs_set(args, "max_steps", "%d", SLOW_STEPS + 2);
}

/* Two signals in the fourth of five steps, of a run that goes on after the first or second; the run
 * is stopped (SIGSTOP) when the second one comes. Whether it left at once. */
static bool leave_at_second_signal(const char *output, bool is_later)
{
    runs_child child = {0};

    start(&child, second_keys, output, 3);
    wait_for_step(&child, output, 3);
    if (!is_later) kill(child.pid, SIGSTOP);
    kill(child.pid, SIGTERM);
    if (is_later) {
        wait_for_text(&child, "stopping after this step");
        kill(child.pid, SIGSTOP);
        runs_sleep_s(1.1);
    }
    kill(child.pid, SIGINT);
    kill(child.pid, SIGCONT);
    int code = runs_wait(&child, LIMIT_S);
    if (code == 0) return false; /* it was through before */
    assert_int_equal(code, EXIT_STOPPED);
    runs_assert_stopped(&child, "stopped ");
    char *log = runs_read(child.log, NULL);
    bool at_once = strstr(log, "stopped at once") != NULL;
    free(log);
    return at_once;
}

/* The second signal does not wait for anything; earlier checkpoints are whole. */
static void test_second_signal(void **state)
{
    const char *whole = whole_run(second_keys, "slow-5", 3), *output = runs_path("second");
    bool at_once = false;
    char *path;
    int64_t step;

    (void)state;
    for (int n = 0; n < MAX_TRIES && !at_once; n++) {
        stop_after_step(second_keys, output, 3, 1); /* leaves a checkpoint */
        /* `timeout` signals the run and at once the run's group: that is one request. */
        assert_false(leave_at_second_signal(output, false));
        stop_after_step(second_keys, output, 3, 1);
        at_once = leave_at_second_signal(output, true);
    }
    assert_true(at_once);
    assert_int_equal(bl_checkpoint_latest(runs_path("second/checkpoints"), &path, &step, NULL),
                     BL_OK);
    assert_non_null(path);
    assert_int_equal(bl_checkpoint_verify(path, &step, NULL), BL_OK);
    free(path);
    assert_int_equal(train(second_keys, output, 3), 0);
    assert_true(runs_are_same(whole, output));
}

/* A closing terminal and its shell each send SIGHUP; a limit of CPU time, SIGXCPU every second. */
static void test_signals_that_repeat_themselves(void **state)
{
    static const int repeated[] = {SIGHUP, SIGXCPU};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(repeated); i++) {
        const char *output = runs_path("repeated-%zu", i);
        int code = 0;
        for (int n = 0; n < MAX_TRIES && code == 0; n++) {
            runs_child child = {0};
            assert_int_equal(bl_tree_remove(output), BL_OK);
            start(&child, slow_keys, output, 2);
            wait_for_step(&child, output, 1);
            kill(child.pid, repeated[i]);
            wait_for_text(&child, "stopping after this step");
            kill(child.pid, repeated[i]);
            code = runs_wait(&child, LIMIT_S);
            if (code != 0) runs_assert_stopped(&child, "stopped on request after step");
        }
        assert_int_equal(code, EXIT_STOPPED);
        assert_int_equal(train(slow_keys, output, 2), 0);
        assert_true(runs_are_same(whole_run(slow_keys, "slow", 2), output));
    }
}

static bool ignore_hangups(const int *arg)
{
    (void)arg;
    return signal(SIGHUP, SIG_IGN) != SIG_ERR;
}

/* As under nohup: a SIGHUP that was ignored at the start stays ignored. */
static void test_no_hangup(void **state)
{
    const char *output = runs_path("nohup");
    runs_child child = {.prepare = ignore_hangups};

    (void)state;
    start(&child, slow_keys, output, 2);
    assert_true(wait_for_log(&child)); /* it ignores them by then */
    kill(child.pid, SIGHUP);
    wait_for_step(&child, output, 1);
    kill(child.pid, SIGHUP);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    assert_true(runs_are_same(whole_run(slow_keys, "slow", 2), output));
}

/* ---- killing ---- */

static bool save_is_under_way(const char *output)
{
    char path[GOLDEN_PATH_BYTES + 16];
    bool found = false;
    const struct dirent *entry;

    snprintf(path, sizeof path, "%s/checkpoints", output);
    DIR *dir = opendir(path);
    if (!dir) return false;
    while (!found && (entry = readdir(dir))) found = strstr(entry->d_name, ".tmp") != NULL;
    closedir(dir);
    return found;
}

/* Up to the n-th save of this life, and into it. */
static void wait_for_save(const runs_child *child, const char *output, int n)
{
    for (bool before = true; n > 0 && runs_is_alive(child);) {
        bool now = save_is_under_way(output);
        n -= now && !before;
        before = now;
        if (n > 0) runs_sleep_s(0.0005);
    }
    runs_sleep_s(runs_random_s(0.03));
}

/* At most one interval is lost: that after the last save which a later step proves finished. */
static void check_newest(const char *output)
{
    char checkpoints[GOLDEN_PATH_BYTES + 16], *path;
    int64_t step = 0, logged = runs_logged_steps(output);

    snprintf(checkpoints, sizeof checkpoints, "%s/checkpoints", output);
    assert_int_equal(bl_checkpoint_latest(checkpoints, &path, &step, NULL), BL_OK);
    if (!path) step = 0;
    free(path);
    if (step < (logged - 1) / SAVE_STEPS * SAVE_STEPS)
        fail_msg("after %d steps the newest checkpoint is of %d", (int)logged, (int)step);
}

static void kill_often(int ranks, int n_kills)
{
    const char *whole = whole_run(run_keys, "whole", ranks), *output = runs_path("killed");
    int n_runs = 0, n_in_save = 0;

    assert_int_equal(bl_tree_remove(output), BL_OK);
    for (int n = 0; n < n_kills;) {
        runs_child child = {0};
        start(&child, run_keys, output, ranks);
        wait_for_log(&child);
        if (n % 2)
            runs_sleep_s(runs_random_s(0.5));
        else
            wait_for_save(&child, output, 1 + (int)(random() % 4));
        kill(child.pid, SIGKILL);
        int code = runs_wait(&child, LIMIT_S);
        if (code == -SIGKILL) {
            n_in_save += save_is_under_way(output);
            check_newest(output);
            runs_assert_listed(output);
            n++;
            continue;
        }
        assert_int_equal(code, 0);
        n_runs++;
        assert_true(runs_are_same(whole, output));
        assert_int_equal(bl_tree_remove(output), BL_OK);
    }
    assert_int_equal(train(run_keys, output, ranks), 0);
    assert_true(runs_are_same(whole, output));
    printf("%d ranks: killed %d times, %d of them inside a save; %d runs were through by then\n",
           ranks, n_kills, n_in_save, n_runs);
}

static void test_killed_at_any_moment(void **state)
{
    const char *wanted = getenv("BALLAST_KILLS");
    int n = wanted ? atoi(wanted) : 20;

    (void)state;
    kill_often(1, n / 2);
    kill_often(3, n - n / 2);
}

/* ---- sharing and running out ---- */

/* Leaves a run that has the folder and is stopped: it keeps it, however long another one takes. */
static void stop_with_folder(runs_child *child, const char *output)
{
    bool is_under_way = false;

    for (int n = 0; n < MAX_TRIES && !is_under_way; n++) {
        assert_int_equal(bl_tree_remove(output), BL_OK);
        start(child, slow_keys, output, 1);
        wait_for_text(child, "memory predicted");
        is_under_way = runs_stop(child) && runs_logged_steps(output) < SLOW_STEPS;
        if (is_under_way) continue;
        kill(child->pid, SIGCONT);
        assert_int_equal(runs_wait(child, LIMIT_S), 0);
    }
    assert_true(is_under_way);
}

static void test_two_runs_in_one_folder(void **state)
{
    const char *output = runs_path("shared");
    runs_child first = {0}, second = {0};
    char holder[320], host[256];

    (void)state;
    stop_with_folder(&first, output);
    start(&second, slow_keys, output, 1);
    assert_int_equal(runs_wait(&second, LIMIT_S), EXIT_USAGE);
    assert_int_equal(gethostname(host, sizeof host), 0);
    snprintf(holder, sizeof holder, "is in use by pid %d on %s", (int)first.pid, host);
    runs_assert_error(&second, holder);
    kill(first.pid, SIGKILL); /* a stale lock is none */
    assert_int_equal(runs_wait(&first, LIMIT_S), -SIGKILL);
    assert_int_equal(train(slow_keys, output, 1), 0);
    assert_true(runs_are_same(whole_run(slow_keys, "slow", 1), output));
}

/* Leaves a run stopped in its first half in `output`; returns the step of its newest checkpoint. */
static int64_t stop_in_the_middle(const char *output)
{
    char checkpoints[GOLDEN_PATH_BYTES + 16], *path;
    int64_t step = STEPS;

    snprintf(checkpoints, sizeof checkpoints, "%s/checkpoints", output);
    for (int n = 0; n < MAX_TRIES && step > STEPS / 2; n++) {
        stop_after_step(run_keys, output, 1, SAVE_STEPS + 1);
        assert_int_equal(bl_checkpoint_latest(checkpoints, &path, &step, NULL), BL_OK);
        assert_non_null(path);
        free(path);
    }
    assert_true(step <= STEPS / 2);
    return step;
}

/* RLIMIT_FSIZE simulates a disk that is full in the middle of a file. */
static void test_file_size_limit(void **state)
{
    const char *output = runs_path("limited"), *checkpoints = runs_path("limited/checkpoints");
    int64_t before = stop_in_the_middle(output), after;
    golden_args args = {0};
    runs_child child = {.max_file_bytes = 40000}; /* a checkpoint's state has 120 kB */
    char *path;

    (void)state;
    run_keys(&args, output, 1);
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), EXIT_LIMIT);
    runs_assert_error(&child, "limited/checkpoints/step-");
    runs_assert_error(&child, "bytes");
    assert_int_equal(bl_checkpoint_latest(checkpoints, &path, &after, NULL), BL_OK);
    free(path);
    assert_int_equal(after, before);
    assert_false(save_is_under_way(output));
    assert_int_equal(train(run_keys, output, 1), 0);
    assert_true(runs_are_same(whole_run(run_keys, "whole", 1), output));
    golden_args_free(&args);
}

/* Writes zeros until no more than leave_bytes are free, or nothing goes in any more. */
static void fill_disk(const char *disk, const char *path, int64_t leave_bytes)
{
    static const char zeros[4096];
    int64_t free_bytes;
    FILE *file = fopen(path, "ab");

    if (!file) return; /* as full as can be */
    setvbuf(file, NULL, _IONBF, 0);
    do assert_int_equal(bl_dir_free_bytes(disk, &free_bytes), BL_OK);
    while (free_bytes > leave_bytes && fwrite(zeros, sizeof zeros, 1, file) == 1);
    fclose(file);
}

static int unmount_disk(void **state)
{
    (void)state;
    umount2(runs_path("disk"), MNT_DETACH); /* fails where there was nothing to mount */
    return 0;
}

static void test_full_disk(void **state)
{
    enum {
        ROOM_BYTES = 400000
    }; /* for one more checkpoint, not for those of half a run, which are six */
    const char *disk = runs_path("disk"), *output = runs_path("disk/run"),
               *ballast = runs_path("disk/full");
    runs_child child = {0};
    golden_args args = {0};
    char *path;

    (void)state;
    assert_int_equal(bl_dir_create(disk), BL_OK);
    if (mount("tmpfs", disk, "tmpfs", 0, "size=16m") != 0)
        TEST_SKIP("a full disk needs a file system to fill: mount: %s", strerror(errno));
    int64_t before = stop_in_the_middle(output), after;
    run_keys(&args, output, 1);

    fill_disk(disk, ballast, 200000); /* known before the first step */
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), EXIT_LIMIT);
    runs_assert_error(&child, "disk/run: a checkpoint takes");
    assert_int_equal(unlink(ballast), 0);

    fill_disk(disk, ballast, ROOM_BYTES); /* full while it runs */
    runs_set(&args, "save_total_limit", "0");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), EXIT_LIMIT);
    runs_assert_error(&child, "disk/run");
    assert_int_equal(unlink(ballast), 0);
    assert_int_equal(bl_checkpoint_latest(runs_path("disk/run/checkpoints"), &path, &after, NULL),
                     BL_OK);
    assert_non_null(path);
    free(path);
    assert_true(after >= before);

    assert_int_equal(train(run_keys, output, 1), 0);
    assert_true(runs_are_same(whole_run(run_keys, "whole", 1), output));
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stop_at_any_moment),
        cmocka_unit_test(test_grace_runs_out),
        cmocka_unit_test(test_stopped_in_an_evaluation),
        cmocka_unit_test(test_signals_that_repeat_themselves),
        cmocka_unit_test(test_no_hangup),
        cmocka_unit_test(test_second_signal),
        cmocka_unit_test(test_killed_at_any_moment),
        cmocka_unit_test(test_two_runs_in_one_folder),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test_teardown(test_full_disk, unmount_disk),
    };
    const char *only = getenv("BALLAST_TEST"); /* a pattern of test names */

    if (only) cmocka_set_test_filter(only);
    runs_seed_random();
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
