/* SPDX-License-Identifier: Apache-2.0 */
/* A job of three processes is killed over and over, a rank or mpirun at a time, at moments that differ from run to run, and resumed
 * each time: it ends as the run that nobody disturbed. BALLAST_KILLS says how often it is killed (10). */
#include "mpi_job.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/files.h"
#include "store/checkpoint.h"

enum { N_RANKS = 3, SAVE_STEPS = 5 };

static const double LIMIT_S = 600;

static void kill_args(golden_args *args, const char *output)
{
    runs_standard(args, output, N_RANKS);
    runs_set(args, "max_steps", "150");
    runs_set(args, "save_steps", "%d", SAVE_STEPS);
    runs_set(args, "save_total_limit", "2");
    runs_set(args, "eval_strategy", "no");
    runs_unset(args, "eval_steps");
    runs_unset(args, "validation_file");
    runs_set(args, "resume_from_checkpoint", "true");
}

/* Looks for, or removes, what a checkpoint under construction has written. */
static bool find_unfinished(const char *output, bool removes)
{
    char path[2 * GOLDEN_PATH_BYTES];
    bool found = false;
    const struct dirent *entry;

    snprintf(path, sizeof path, "%s/checkpoints", output);
    DIR *dir = opendir(path);
    if (!dir) return false;
    while ((entry = readdir(dir))) {
        if (!strstr(entry->d_name, ".tmp")) continue;
        found = true;
        snprintf(path, sizeof path, "%s/checkpoints/%s", output, entry->d_name);
        if (removes) assert_int_equal(bl_tree_remove(path), BL_OK);
    }
    closedir(dir);
    return found;
}

/* The moment of a kill: inside a save of this life, or any, from before the first step to the last. */
static void wait_for_moment(const runs_child *child, const char *output, bool in_save)
{
    double deadline = bl_now_s() + LIMIT_S;

    if (!in_save) runs_sleep_s((double)random() / RAND_MAX * 1.5);
    while (in_save && runs_is_alive(child) && !find_unfinished(output, false) &&
           bl_now_s() < deadline)
        runs_sleep_s(0.0005);
}

/* The newest checkpoint can be used, and at most one interval is lost. */
static void check_newest(const char *output, int64_t logged)
{
    char checkpoints[GOLDEN_PATH_BYTES + 16], *path;
    int64_t step = 0;

    snprintf(checkpoints, sizeof checkpoints, "%s/checkpoints", output);
    assert_int_equal(bl_checkpoint_latest(checkpoints, &path, &step, NULL), BL_OK);
    if (path) assert_int_equal(bl_checkpoint_verify(path, &step, NULL), BL_OK);
    if (step < (logged - 1) / SAVE_STEPS * SAVE_STEPS)
        fail_msg("after %d steps the newest checkpoint is of %d", (int)logged, (int)step);
    free(path);
}

static void test_killed_at_any_moment(void **state)
{
    const char *wanted = getenv("BALLAST_KILLS"), *whole = runs_path("whole"),
               *output = runs_path("killed");
    int n_kills = wanted ? atoi(wanted) : 10, n_through = 0, n_in_save = 0;
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    srandom((unsigned)time(NULL));
    kill_args(&args, whole);
    mpi_start_ballast(&child, N_RANKS, NULL, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    runs_set(&args, "output_dir", "%s", output);
    for (int n = 0; n < n_kills; n++) {
        pid_t ranks[N_RANKS];
        child = (runs_child){0};
        find_unfinished(output, true);
        mpi_start_ballast(&child, N_RANKS, NULL, "train", &args);
        for (int i = 0; i < N_RANKS; i++) ranks[i] = mpi_process_of(&child, i);
        wait_for_moment(&child, output, n % 2);
        n_in_save += find_unfinished(output, false);
        kill(n % 4 == 3 ? child.pid : ranks[n % N_RANKS], SIGKILL);
        int code = mpi_wait_after_kill(&child, ranks, N_RANKS, 30);
        if (code == 0) { /* it was through before the signal came */
            assert_true(runs_are_same(whole, output));
            assert_int_equal(bl_tree_remove(output), BL_OK);
            n_through++;
            continue;
        }
        check_newest(output, runs_logged_steps(output));
    }
    child = (runs_child){0};
    mpi_start_ballast(&child, N_RANKS, NULL, "train", &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    assert_true(runs_are_same(whole, output));
    printf("killed %d times, %d of them inside a save; %d runs were through by then\n", n_kills,
           n_in_save, n_through);
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_killed_at_any_moment)};
    if (!mpi_is_here()) return 77;
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
