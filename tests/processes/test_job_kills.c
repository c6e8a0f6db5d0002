/* SPDX-License-Identifier: Apache-2.0 */
/* A job of three processes is killed over and over, a rank or its parent at a time, at moments that
 * differ from run to run, and resumed each time: it ends as the undisturbed run. The argument is
 * the kind of job: "mpirun" starts it, "ballast" starts its ranks itself, or "gpus", the same with
 * an emulated GPU for each rank. When the parent ballast loses a rank, one line names that rank.
 * BALLAST_KILLS is the number of kills (10). */
#include "mpi_job.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "store/checkpoint.h"

enum { N_RANKS = 3 };

/* END_S: until a job that has not ended after a kill is taken for a defect. */
static const double LIMIT_S = 600, END_S = 30;

/* A step of an emulated GPU is small and takes tenths of a second still. */
static const struct form {
    const char *name;
    bool is_mpirun, has_gpus;
    int max_steps, save_steps;
} forms[] = {
    {.name = "mpirun", .is_mpirun = true, .max_steps = 150, .save_steps = 5},
    {.name = "ballast", .max_steps = 150, .save_steps = 5},
    {.name = "gpus", .has_gpus = true, .max_steps = 12, .save_steps = 2},
};

static const struct form *form;

static struct {
    double whole_s, longest_s; /* the undisturbed run; from a kill to the job's end */
    int n_killed, n_of_parent, n_in_save, n_resumed, n_through;
} book;

static void start(runs_child *child, const golden_args *args)
{
    *child = (runs_child){0};
    if (form->is_mpirun)
        mpi_start_ballast(child, N_RANKS, NULL, "train", args);
    else
        runs_start(child, "train", args);
}

/* The parent's report of rank `rank`, which was killed: exit code 7 and a line. */
static void check_end(const runs_child *child, int code, int rank)
{
    char text[64];

    if (form->is_mpirun) return;
    if (rank < 0) {
        assert_int_equal(code, -SIGKILL);
        return;
    }
    snprintf(text, sizeof text, "rank %d (process ", rank);
    assert_int_equal(code, 7);
    mpi_assert_error(child, text);
    mpi_assert_error(child, "was killed by signal 9");
}

static void kill_args(golden_args *args, const char *output)
{
    runs_standard(args, output, N_RANKS);
    runs_set(args, "max_steps", "%d", form->max_steps);
    runs_set(args, "save_steps", "%d", form->save_steps);
    runs_set(args, "save_total_limit", "2");
    runs_set(args, "eval_strategy", "no");
    runs_unset(args, "eval_steps");
    runs_unset(args, "validation_file");
    runs_set(args, "resume_from_checkpoint", "true");
    if (!form->is_mpirun) runs_set(args, "rank_processes", "true");
    if (!form->has_gpus) return;
    runs_set(args, "device", "cuda");
    runs_set(args, "offload_ratio", "0.5");
    runs_set(args, "max_seq_length", "16");
    runs_set(args, "gradient_accumulation_steps", "1");
}

/* Looks for, or removes, the files of an incomplete checkpoint. */
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

static int64_t newest_step(const char *output)
{
    char checkpoints[GOLDEN_PATH_BYTES + 16];
    int64_t *steps;
    size_t n;

    snprintf(checkpoints, sizeof checkpoints, "%s/checkpoints", output);
    assert_int_equal(bl_checkpoint_list(checkpoints, &steps, &n), BL_OK);
    int64_t newest = n > 0 ? steps[0] : 0;
    free(steps);
    return newest;
}

/* The moment of a kill: inside a save of this life, when it has completed n_saves or more; or, with
 * n_saves < 0, any, from before the first step to the last. */
static void wait_for_moment(const runs_child *child, const char *output, int n_saves, int64_t begun)
{
    double deadline = bl_now_s() + LIMIT_S;
    int64_t step = begun + n_saves * form->save_steps;

    if (n_saves < 0) runs_sleep_s(runs_random_s(0.7 * book.whole_s));
    while (n_saves >= 0 && runs_is_alive(child) && bl_now_s() < deadline &&
           !(find_unfinished(output, false) && newest_step(output) >= step))
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
    if (step < (logged - 1) / form->save_steps * form->save_steps)
        fail_msg("after %d steps the newest checkpoint is of %d", (int)logged, (int)step);
    free(path);
}

/* One life; it ends with the kill number n, or it was through before the signal came: false. */
static bool kill_once(const golden_args *args, const char *output, int n)
{
    int victim = n % 4 == 3 ? -1 : n % N_RANKS; /* -1: the parent */
    bool in_save = (n + n / 4) % 2;
    int64_t begun = newest_step(output);
    pid_t ranks[N_RANKS];
    runs_child child;

    if (in_save) find_unfinished(output, true);
    start(&child, args);
    for (int i = 0; i < N_RANKS; i++) ranks[i] = mpi_find_process(&child, i);
    wait_for_moment(&child, output, in_save ? n / 2 % 2 : -1, begun);
    in_save = in_save && find_unfinished(output, false);
    pid_t pid = victim < 0 ? child.pid : ranks[victim];
    if (pid > 0) kill(pid, SIGKILL); /* else it was through */
    double killed_s = bl_now_s();
    int64_t logged = runs_logged_steps(output);
    int code = mpi_wait_after_kill(&child, ranks, N_RANKS, END_S);
    double took_s = bl_now_s() - killed_s;
    if (!form->is_mpirun) mpi_assert_nobody_left(form->name);
    if (code == 0) return false;
    int64_t more = runs_logged_steps(output) - logged;
    if (form->has_gpus && more > 3) fail_msg("%d more steps after the kill", (int)more);
    check_end(&child, code, victim);
    check_newest(output, logged + more);
    book.n_in_save += in_save;
    book.n_resumed += begun > 0;
    book.n_of_parent += victim < 0;
    if (took_s > book.longest_s) book.longest_s = took_s;
    return true;
}

static void run_whole(const golden_args *args)
{
    double began_s = bl_now_s();
    runs_child child;

    start(&child, args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    book.whole_s = bl_now_s() - began_s;
    if (form->has_gpus) mpi_wait_for_text(&child, "NCCL 2.", 1);
}

static void test_killed_at_any_moment(void **state)
{
    const char *wanted = getenv("BALLAST_KILLS");
    char whole[GOLDEN_PATH_BYTES], output[GOLDEN_PATH_BYTES]; /* each start takes a path, too */
    int n_kills = wanted ? atoi(wanted) : 10;
    golden_args args = {0};
    runs_child child;

    (void)state;
    mpi_note_shared_memory();
    runs_seed_random();
    snprintf(whole, sizeof whole, "%s", runs_path("whole"));
    snprintf(output, sizeof output, "%s", runs_path("killed"));
    kill_args(&args, whole);
    run_whole(&args);
    runs_set(&args, "output_dir", "%s", output);
    while (book.n_killed < n_kills) {
        if (kill_once(&args, output, book.n_killed + book.n_through)) {
            book.n_killed++;
            continue;
        }
        assert_true(runs_are_same(whole, output));
        assert_int_equal(bl_tree_remove(output), BL_OK);
        assert_true(++book.n_through < 100 + n_kills);
    }
    start(&child, &args);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    assert_true(runs_are_same(whole, output));
    printf("killed %d times, %d times the parent, %d times inside a save, %d times after it "
           "was resumed; %d runs were through before; a job ended within %.1f s (undisturbed it "
           "takes %.1f s)\n",
           book.n_killed, book.n_of_parent, book.n_in_save, book.n_resumed, book.n_through,
           book.longest_s, book.whole_s);
    if (n_kills >= 10) assert_true(book.n_resumed > 0 && book.n_in_save > 0);
    mpi_assert_shared_memory();
    golden_args_free(&args);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_killed_at_any_moment)};
    for (size_t i = 0; i < BL_COUNT(forms); i++)
        if (argc == 2 && strcmp(argv[1], forms[i].name) == 0) form = &forms[i];
    if (!form) return 2;
    if (form->is_mpirun && !mpi_is_here()) return 77;
    if (form->has_gpus) setenv("BALLAST_EMULATED_DEVICES", "3", 1);
    if (!form->is_mpirun) prctl(PR_SET_CHILD_SUBREAPER, 1);
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
