/* SPDX-License-Identifier: Apache-2.0 */
/* `ballast train --rank_processes true`, the parent of a process per rank on one host: it writes
 * the files that the same number of rank-threads writes, ends as one process would, and handles
 * faults in itself and in its ranks. */
#include "mpi_job.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "terminal.h"

static const double LIMIT_S = 600;

enum { LONG_STEPS = 400, LONGER_STEPS = 600, ENDLESS_STEPS = 1000000 };

static void make_args(golden_args *args, const char *output, int ranks)
{
    *args = (golden_args){0};
    runs_standard(args, output, ranks);
    runs_set(args, "rank_processes", "true");
}

static int train(const golden_args *args, runs_child *child)
{
    *child = (runs_child){0};
    runs_start(child, "train", args);
    return runs_wait(child, LIMIT_S);
}

static void assert_trained(const golden_args *args)
{
    runs_child child;
    int code = train(args, &child);
    mpi_assert_error(&child, NULL);
    assert_int_equal(code, 0);
}

static void train_threads(const golden_args *args)
{
    golden_args threads = {0};
    for (int i = 0; i < args->n; i += 2)
        if (strcmp(args->text[i], "--rank_processes") != 0)
            golden_args_add(&threads, args->text[i] + 2, "%s", args->text[i + 1]);
    assert_int_equal(golden_train(&threads), BL_OK);
    golden_args_free(&threads);
}

/* ---- the same bits ---- */

static void test_same_as_threads(void **state)
{
    static const int cases[][2] = {{1, 1}, {2, 2}, {2, 1}, {3, 3}, {4, 4}, {4, 2}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *threads = runs_path("threads-%zu", i),
                   *processes = runs_path("processes-%zu", i);
        golden_args args;
        make_args(&args, threads, cases[i][0]);
        runs_set(&args, "shard_size", "%d", cases[i][1]);
        train_threads(&args);
        runs_set(&args, "output_dir", "%s", processes);
        assert_trained(&args);
        if (!runs_are_same(threads, processes))
            fail_msg("%d ranks, shards of %d", cases[i][0], cases[i][1]);
        assert_true(bl_file_exists(runs_path("processes-%zu/README.md", i)));
        golden_args_free(&args);
    }
}

/* A copy of `whole` as a crash after step 4 would have left it. */
static const char *crashed(const char *whole, const char *name)
{
    const char *output = runs_path("%s", name);
    runs_copy(whole, output);
    for (int step = 5; step <= 8; step++)
        assert_int_equal(bl_tree_remove(runs_path("%s/checkpoints/step-%d", name, step)), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("%s/adapter_model.safetensors", name)), BL_OK);
    return output;
}

static void test_resume_across_kinds(void **state)
{
    const char *threads = runs_path("threads-whole"), *processes = runs_path("processes-whole");
    golden_args args;
    runs_child child;

    (void)state;
    make_args(&args, threads, 2);
    train_threads(&args);
    runs_set(&args, "output_dir", "%s", processes);
    assert_trained(&args);

    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "output_dir", "%s", crashed(threads, "threads-then-processes"));
    assert_trained(&args);
    assert_true(runs_are_same(threads, runs_path("threads-then-processes")));

    runs_set(&args, "output_dir", "%s", crashed(processes, "processes-then-threads"));
    train_threads(&args);
    assert_true(runs_are_same(threads, runs_path("processes-then-threads")));

    runs_set(&args, "output_dir", "%s", crashed(processes, "other-ranks"));
    runs_set(&args, "ranks", "3");
    assert_int_equal(train(&args, &child), 5);
    runs_assert_error(&child, "ranks: 2 -> 3");
    golden_args_free(&args);
}

/* ---- exit codes and errors: as one process's, and one line, the last one ---- */

static void test_exit_codes(void **state)
{
    const struct {
        const char *key, *value;
        int code;
        const char *text;
    } cases[] = {
        {"shard_size", "2", 2, "shard_size 2 does not divide ranks 3"},
        {"train_file", "/absent.jsonl", 3, "/absent.jsonl: No such file"},
        {"output_dir", "/proc/ballast", 4, "/proc/ballast"},
        {"model_name_or_path", runs_overflowing_model(), 6, "not finite"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args;
        runs_child processes, threads = {0};
        make_args(&args, runs_path("code-%zu", i), 3);
        runs_set(&args, cases[i].key, "%s", cases[i].value);
        int code = train(&args, &processes);
        if (code != cases[i].code)
            fail_msg("%s: exit %d, not %d: %s", cases[i].key, code, cases[i].code,
                     runs_read(processes.log, NULL));
        runs_assert_error(&processes, cases[i].text);
        runs_unset(&args, "rank_processes");
        runs_set(&args, "overwrite_output_dir", "true");
        runs_start(&threads, "train", &args);
        assert_int_equal(runs_wait(&threads, LIMIT_S), code);
        golden_args_free(&args);
    }
}

/* One rank cannot open its trace: the run that rank 0 was to overwrite is kept. */
static void test_one_rank_is_refused(void **state)
{
    const char *output = runs_path("kept"), *trace = runs_path("trace.json");
    golden_args args;
    runs_child child;

    (void)state;
    make_args(&args, output, 3);
    assert_int_equal(train(&args, &child), 0);
    runs_set(&args, "overwrite_output_dir", "true");
    runs_set(&args, "trace", "%s", trace);
    assert_int_equal(symlink(runs_path("no/such/trace.json"), runs_path("trace.json.rank1")), 0);
    assert_int_equal(train(&args, &child), 4);
    runs_assert_error(&child, "rank 1: open ");
    assert_true(bl_file_exists(runs_path("kept/adapter_model.safetensors")));
    golden_args_free(&args);
}

/* ---- signals ---- */

static void long_run(golden_args *args, const char *output, int ranks, int steps)
{
    make_args(args, output, ranks);
    runs_set(args, "max_steps", "%d", steps);
    runs_set(args, "save_steps", "40");
    runs_set(args, "eval_steps", "100");
}

static void find_ranks(const runs_child *child, pid_t *ranks, int n)
{
    for (int i = 0; i < n; i++) ranks[i] = mpi_process_of(child, i);
}

typedef struct stop {
    int number, to_rank; /* -1: the parent */
    const char *grace;
} stop;

/* False: the run was over before it was signaled. */
static bool is_stopped(golden_args *args, const char *output, const stop *s)
{
    runs_child child = {0};
    pid_t ranks[3];

    runs_set(args, "grace_s", "%s", s->grace);
    runs_start(&child, "train", args);
    for (int i = 0; i < 3; i++) ranks[i] = mpi_find_process(&child, i);
    /* By then the log ends where the checkpoint does. */
    mpi_wait_for_text(&child, "memory predicted", 1);
    pid_t pid = s->to_rank < 0 ? child.pid : ranks[s->to_rank];
    if (mpi_comes_to_step(&child, output, runs_logged_steps(output) + 3) && pid > 0)
        kill(pid, s->number);
    int code = runs_wait(&child, LIMIT_S);
    mpi_assert_gone(ranks, 3);
    if (code == 0) return false;
    if (code != 75) fail_msg("signal %d: exit %d: %s", s->number, code, runs_read(child.log, NULL));
    runs_assert_stopped(&child, "stopped");
    return true;
}

/* Each signal, to the parent or to one rank: all stop after one step, once. And a step longer than
 * grace_s. */
static void test_stop_and_go_on(void **state)
{
    static const stop cases[] = {{SIGTERM, -1, "20"}, {SIGINT, -1, "20"},  {SIGUSR1, -1, "0"},
                                 {SIGHUP, -1, "20"},  {SIGXCPU, -1, "20"}, {SIGTERM, 2, "20"},
                                 {SIGUSR1, 0, "20"}};
    enum { MAX_AGAIN = 5 };
    const char *whole = runs_path("long-whole"), *output = runs_path("long");
    golden_args args;
    int n_again = 0;

    (void)state;
    long_run(&args, whole, 3, LONG_STEPS);
    train_threads(&args);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "output_dir", "%s", output);
    for (size_t i = 0; i < BL_COUNT(cases);) {
        /* One that stops with the last step done resumes nothing. */
        if (is_stopped(&args, output, &cases[i]) && runs_logged_steps(output) < LONG_STEPS) {
            i++;
            continue;
        }
        printf("again: signal %d came after the last step: all stops\n", cases[i].number);
        if (++n_again > MAX_AGAIN) fail_msg("no run was stopped in time");
        assert_int_equal(bl_tree_remove(output), BL_OK);
        i = 0;
    }
    assert_trained(&args);
    assert_true(runs_are_same(whole, output));
    golden_args_free(&args);
}

/* A rank hangs, so that no rank can stop after the step: the second signal does not wait. */
static void test_second_signal(void **state)
{
    golden_args args;
    runs_child child = {0};
    pid_t ranks[3];

    (void)state;
    long_run(&args, runs_path("twice"), 3, ENDLESS_STEPS);
    runs_start(&child, "train", &args);
    find_ranks(&child, ranks, 3);
    mpi_wait_for_steps(&child, runs_path("twice"), 5);
    kill(ranks[1], SIGSTOP);
    kill(child.pid, SIGTERM);
    mpi_wait_for_text(&child, "to quit now", 1);
    runs_sleep_s(1.1);       /* sooner, it would be the same request */
    kill(child.pid, SIGHUP); /* closed terminals repeat it: it does not count */
    kill(child.pid, SIGINT);
    assert_int_equal(runs_wait(&child, LIMIT_S), 75);
    runs_assert_stopped(&child, "stopped at once on request");
    mpi_assert_gone(ranks, 3);
    golden_args_free(&args);
}

static bool ignore_children(const int *arg)
{
    return signal(SIGCHLD, SIG_IGN) != SIG_ERR && !arg;
}

/* A service manager signals all processes of a job: a rank has the request from it and from its
 * parent. It is one: the step's state is saved. The program that started the parent ignores
 * SIGCHLD, which a program inherits. */
static void test_a_signal_to_all(void **state)
{
    golden_args args;
    runs_child child = {.prepare = ignore_children};
    pid_t ranks[3];

    (void)state;
    long_run(&args, runs_path("to-all"), 3, ENDLESS_STEPS);
    runs_start(&child, "train", &args);
    find_ranks(&child, ranks, 3);
    mpi_wait_for_steps(&child, runs_path("to-all"), 5);
    kill(ranks[1], SIGSTOP); /* the step cannot end before all signals have come */
    for (int i = 0; i < 3; i++) kill(ranks[i], SIGTERM);
    mpi_wait_for_text(&child, "to quit now", 1);
    kill(child.pid, SIGTERM);
    kill(ranks[1], SIGCONT);
    assert_int_equal(runs_wait(&child, LIMIT_S), 75);
    runs_assert_stopped(&child, "stopped on request after step");
    mpi_assert_gone(ranks, 3);
    golden_args_free(&args);
}

/* A signal to the process must reach the thread that waits for it, not another one, whose handler
 * would leave. */
static void test_one_thread_takes_signals(void **state)
{
    golden_args args;
    runs_child child = {0};
    pid_t ranks[2];

    (void)state;
    long_run(&args, runs_path("masks"), 2, ENDLESS_STEPS);
    runs_set(&args, "threads", "2");
    runs_start(&child, "train", &args);
    find_ranks(&child, ranks, 2);
    mpi_wait_for_steps(&child, runs_path("masks"), 5);
    for (int i = 0; i < 2; i++) mpi_assert_one_thread_takes_signals(ranks[i]);
    kill(child.pid, SIGTERM);
    assert_int_equal(runs_wait(&child, LIMIT_S), 75);
    golden_args_free(&args);
}

/* Before there is anything to stop: at any moment after the start. */
static void test_early_signal(void **state)
{
    golden_args args;
    runs_child child = {0};

    (void)state;
    long_run(&args, runs_path("early"), 3, ENDLESS_STEPS);
    runs_set(&args, "overwrite_output_dir", "true");
    for (int i = 0; i < 8; i++) {
        pid_t ranks[3];
        runs_start(&child, "train", &args);
        find_ranks(&child, ranks, 3);
        runs_sleep_s(0.01 * i);
        kill(child.pid, SIGTERM);
        int code = runs_wait(&child, LIMIT_S);
        if (code != 75) fail_msg("%d: exit %d: %s", i, code, runs_read(child.log, NULL));
        runs_assert_stopped(&child, "stopped");
        mpi_assert_gone(ranks, 3);
    }
    golden_args_free(&args);
}

/* ---- a terminal ---- */

/* Ctrl-C reaches the foreground, the parent alone; the error is below the progress line, and the
 * last one. */
static void test_ctrl_c(void **state)
{
    static char text[1 << 16];
    golden_args args;
    runs_child child = {.prepare = terminal_take};
    pid_t ranks[3];

    (void)state;
    int fd = terminal_open();
    long_run(&args, runs_path("ctrl-c"), 3, ENDLESS_STEPS);
    runs_start(&child, "train", &args);
    find_ranks(&child, ranks, 3);
    text[0] = '\0';
    terminal_read(fd, text, sizeof text, "step 3/", LIMIT_S);
    assert_int_equal(write(fd, "\x03", 1), 1);
    terminal_read(fd, text, sizeof text, "resume with --resume_from_checkpoint true\r\n", LIMIT_S);
    assert_int_equal(runs_wait(&child, LIMIT_S), 75);
    const char *asked = strstr(text, "Interrupt: stopping after this step");
    assert_non_null(asked);
    assert_null(strstr(asked + 1, "Interrupt"));
    const char *error = strstr(text, "ballast: stopped ");
    assert_non_null(error);
    assert_true(error > text && (error[-1] == '\n' || error[-1] == 'K')); /* \033[K */
    assert_null(strstr(error + 1, "ballast: stopped "));
    assert_null(strstr(text, "ballast: error: "));
    mpi_assert_gone(ranks, 3);
    close(fd);
    golden_args_free(&args);
}

/* ---- Ctrl-Z ---- */

/* As a shell does: the kernel does not stop members of an orphaned process group. */
static bool make_group(const int *arg)
{
    return setpgid(0, 0) == 0 && !arg;
}

/* Stopped for longer than a deadline: no rank is reported, and the result is the same. */
static void test_ctrl_z(void **state)
{
    const char *whole = runs_path("longer-whole"), *output = runs_path("longer");
    golden_args args;
    runs_child child = {.prepare = make_group};
    pid_t ranks[3];

    (void)state;
    long_run(&args, whole, 3, LONGER_STEPS);
    train_threads(&args);
    runs_set(&args, "output_dir", "%s", output);
    runs_set(&args, "step_deadline_s", "15"); /* longer than a disk takes for a save */
    runs_start(&child, "train", &args);
    find_ranks(&child, ranks, 3);
    mpi_wait_for_steps(&child, output, 5);
    kill(child.pid, SIGTSTP);
    mpi_wait_for_stop(child.pid);
    for (int i = 0; i < 3; i++) mpi_wait_for_stop(ranks[i]);
    runs_sleep_s(18);
    kill(child.pid, SIGCONT);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    mpi_assert_error(&child, NULL);
    assert_true(runs_are_same(whole, output));
    golden_args_free(&args);
}

/* ---- ranks and parents that are lost ---- */

static void test_a_rank_dies(void **state)
{
    static const int signals[] = {SIGKILL, SIGSEGV, SIGABRT};
    static const char *const texts[] = {"was killed by signal 9 (Killed); the system does that",
                                        "was killed by signal 11 (Segmentation fault)",
                                        "was killed by signal 6 (Aborted)"};

    (void)state;
    for (int i = 0; i < 3; i++) {
        golden_args args;
        runs_child child = {0};
        pid_t ranks[3];
        char text[64];

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        if (signals[i] == SIGSEGV) continue; /* theirs */
#endif
        long_run(&args, runs_path("dies-%d", i), 3, ENDLESS_STEPS);
        runs_start(&child, "train", &args);
        find_ranks(&child, ranks, 3);
        mpi_wait_for_steps(&child, runs_path("dies-%d", i), 45);
        kill(ranks[i], signals[i]);
        assert_int_equal(runs_wait(&child, LIMIT_S), 7);
        snprintf(text, sizeof text, "rank %d (process %d) ", i, (int)ranks[i]);
        runs_assert_error(&child, text);
        runs_assert_error(&child, texts[i]);
        mpi_assert_gone(ranks, 3);
        assert_true(bl_file_exists(runs_path("dies-%d/checkpoints/step-40/manifest.json", i)));
        golden_args_free(&args);
    }
}

static void test_the_parent_dies(void **state)
{
    golden_args args;
    runs_child child = {0};
    pid_t ranks[3];

    (void)state;
    long_run(&args, runs_path("orphans"), 3, ENDLESS_STEPS);
    runs_start(&child, "train", &args);
    find_ranks(&child, ranks, 3);
    mpi_wait_for_steps(&child, runs_path("orphans"), 5);
    kill(child.pid, SIGKILL);
    assert_int_equal(runs_wait(&child, LIMIT_S), -SIGKILL);
    mpi_assert_gone(ranks, 3);
    golden_args_free(&args);
}

static void test_a_rank_hangs(void **state)
{
    golden_args args;
    runs_child child = {0};
    pid_t ranks[3];

    (void)state;
    for (int hung = 0; hung < 2; hung++) {
        char text[32];
        long_run(&args, runs_path("hangs-%d", hung), 3, ENDLESS_STEPS);
        runs_set(&args, "step_deadline_s", "5");
        runs_start(&child, "train", &args);
        find_ranks(&child, ranks, 3);
        mpi_wait_for_steps(&child, runs_path("hangs-%d", hung), 5);
        kill(ranks[hung], SIGSTOP);
        assert_int_equal(runs_wait(&child, LIMIT_S), 7);
        /* Another rank may wait for it in the middle of a collective that the one who speaks is
         * through with. */
        snprintf(text, sizeof text, "%d", hung);
        runs_assert_error(&child, "rank");
        runs_assert_error(&child, text);
        mpi_assert_gone(ranks, 3);
        golden_args_free(&args);
    }
}

/* Only rank 0 checks output_dir; its error ends all ranks. */
static void test_output_dir_is_removed(void **state)
{
    golden_args args;
    runs_child child = {0};
    pid_t ranks[3];

    (void)state;
    long_run(&args, runs_path("removed"), 3, ENDLESS_STEPS);
    runs_start(&child, "train", &args);
    find_ranks(&child, ranks, 3);
    mpi_wait_for_steps(&child, runs_path("removed"), 5);
    assert_int_equal(rename(runs_path("removed"), runs_path("removed-2")), 0);
    assert_int_equal(runs_wait(&child, LIMIT_S), 4);
    runs_assert_error(&child, "was removed while this process used it");
    mpi_assert_gone(ranks, 3);
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_as_threads),
        cmocka_unit_test(test_resume_across_kinds),
        cmocka_unit_test(test_exit_codes),
        cmocka_unit_test(test_one_rank_is_refused),
        cmocka_unit_test(test_stop_and_go_on),
        cmocka_unit_test(test_second_signal),
        cmocka_unit_test(test_a_signal_to_all),
        cmocka_unit_test(test_one_thread_takes_signals),
        cmocka_unit_test(test_early_signal),
        cmocka_unit_test(test_ctrl_c),
        cmocka_unit_test(test_ctrl_z),
        cmocka_unit_test(test_a_rank_dies),
        cmocka_unit_test(test_the_parent_dies),
        cmocka_unit_test(test_a_rank_hangs),
        cmocka_unit_test(test_output_dir_is_removed),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
