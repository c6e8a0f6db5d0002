/* SPDX-License-Identifier: Apache-2.0 */
/* The communicator of several processes, "mpi", "shared" (Unix sockets and shared memory) or "tcp":
 * the cases of the local communicator's test with the same serial sums, bit for bit; and how a job
 * ends when one of its processes fails, hangs or dies. */
#include "mpi_job.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sizes.h"

static const double LIMIT_S = 300;

static const char *transport = "";

static bool is_mpi(void)
{
    return strcmp(transport, "mpi") == 0;
}

static void start(runs_child *child, const char *name, int n_ranks)
{
    char n_text[16];
    const char *argv[] = {SOCKET_RANKS_PROGRAM, n_text, name, transport, NULL};
    char *words[] = {(char *)name, NULL};

    snprintf(n_text, sizeof n_text, "%d", n_ranks);
    if (is_mpi())
        mpi_start(child, n_ranks, MPI_RANKS_PROGRAM, words);
    else
        mpi_start_program(child, argv);
}

static int run(const char *name, int n_ranks, runs_child *child)
{
    start(child, name, n_ranks);
    return runs_wait(child, LIMIT_S);
}

/* ---- trying ---- */

/* False when the job has ended with another code, or its log holds not exactly this one line of
 * error: that is said. */
static bool is_end(const runs_child *child, const char *name, int found, int code, const char *text)
{
    char *wrong = mpi_wrong_error(child, text), *log = runs_read(child->log, NULL);
    bool is_right = found == code && !wrong;

    if (!is_right)
        printf("WRONG, %s: exit %d, not %d; %s; all that was said:\n%s", name, found, code,
               wrong ? wrong : "the line is right", log);
    free(log);
    free(wrong);
    return is_right;
}

static bool ends_with(runs_child *child, const char *name, int code, const char *text)
{
    return is_end(child, name, runs_wait(child, LIMIT_S), code, text);
}

/* On a loaded machine an innocent process may stall for the deadline, or for so long that another
 * stops waiting for its word and reports as well. A defect fails in each try. */
static void try_case(bool (*is_right)(int i), int i)
{
    enum { MAX_TRIES = 3 };
    for (int n = 1; !is_right(i); n++)
        if (n == MAX_TRIES) fail_msg("wrong in each of %d tries", n);
}

/* ---- values ---- */

static void test_values(void **state)
{
    static const char *const cases[] = {"values",   "negative_zero",  "split",
                                        "pipeline", "gather_is_held", "blocks"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (int n_ranks = 1; n_ranks <= 8; n_ranks += n_ranks < 4 ? 1 : 4) {
            runs_child child = {0};
            if (is_mpi() && (n_ranks == 1 || n_ranks == 8))
                continue; /* one is not a job; eight are slow */
            int code = run(cases[i], n_ranks, &child);
            mpi_assert_error(&child, NULL);
            if (code != 0) fail_msg("%s, %d ranks: exit %d", cases[i], n_ranks, code);
        }
}

/* ---- failures ---- */

static const struct {
    const char *name;
    int n_ranks, code;
    const char *text;
} failures[] = {
    {"abort", 4, 4, "error: rank 1: shard.bin: a short read"},
    {"deadline", 4, 7, "error: ranks 1, 3 did not reach all_reduce within 2.0 s"},
    {"deadline_of_group", 3, 7, "error: rank 2 did not reach barrier within 2.0 s"},
    {"label", 3, 7, "error: rank 1 did not reach all_gather of layer 17 within 2.0 s"},
    {"labels_disagree", 2, 1,
     "broadcast of layer 3, 8 bytes (0), and all_reduce of the head, 8 bytes (0)"},
    {"other_label", 3, 1,
     "all_gather of layer 4, 100 bytes (0), and all_gather of layer 5, 100 bytes (0)"},
    {"other_size", 3, 1, "ranks 0 and 2 call different collectives"},
    {"other_kind", 3, 1, "ranks 0 and 1 call different collectives"},
    {"other_root", 3, 1, "ranks 0 and 1 call different collectives"},
    {"other_element", 3, 1, "ranks 0 and 1 call different collectives"},
    {"fail_at_the_end", 3, 5, "error: rank 1: checkpoint 7 is damaged"},
    {"stopped", 3, 7, "error: rank 1 did not reach barrier within 2.0 s"},
};

static bool fails_rightly(int i)
{
    runs_child child = {0};
    start(&child, failures[i].name, failures[i].n_ranks);
    return ends_with(&child, failures[i].name, failures[i].code, failures[i].text);
}

/* Whatever happens: one line of error, and the exit code of its kind. */
static void test_failures(void **state)
{
    (void)state;
    for (int i = 0; i < (int)BL_COUNT(failures); i++) try_case(fails_rightly, i);
}

/* A stop is not an error: one line, of another kind. */
static void test_stop_together(void **state)
{
    runs_child child = {0};

    (void)state;
    assert_int_equal(run("stop_together", 3, &child), 75);
    mpi_assert_error(&child, NULL);
    char *log = runs_read(child.log, NULL), *line = strstr(log, "ballast: stopped after step 3\n");
    assert_non_null(line);
    assert_null(strstr(line + 1, "ballast: stopped"));
    free(log);
}

static bool one_of_two_speaks(int unused)
{
    runs_child child = {0};

    (void)unused;
    int code = run("two_fail", 4, &child);
    return code == 3 ? is_end(&child, "two_fail", code, 3, "error: rank 1: train.jsonl:3: no JSON")
                     : is_end(&child, "two_fail", code, 6, "error: rank 2: a loss of nan");
}

/* Each of two ranks fails by itself, or hears of the other first: the line and the code are one
 * rank's. */
static void test_two_ranks_fail(void **state)
{
    (void)state;
    try_case(one_of_two_speaks, 0);
}

static bool is_given_up(int unused)
{
    runs_child child = {0};

    (void)unused;
    start(&child, "given_up", 3);
    pid_t stopped = mpi_process_of(&child, 0);
    mpi_wait_for_text(&child, "has given up\n", 1);
    kill(stopped, SIGCONT);
    return ends_with(&child, "given_up", 7, "error: rank 0 did not reach barrier within 2.0 s");
}

/* A rank that continues just after the others have given it up prints nothing; the others report
 * the failure. */
static void test_a_rank_comes_back(void **state)
{
    (void)state;
    try_case(is_given_up, 0);
}

enum { N_WAITING = 3 };

/* Ranks in the middle of a job that does not end by itself. */
static void start_waiting(runs_child *child, pid_t ranks[N_WAITING])
{
    start(child, "for_ever", N_WAITING);
    for (int i = 0; i < N_WAITING; i++) ranks[i] = mpi_process_of(child, i);
    mpi_wait_for_text(child, "has started\n", N_WAITING);
    for (int i = 0; i < N_WAITING; i++) assert_true(mpi_is_running(ranks[i]));
}

static bool killed_rank_is_named(int unused)
{
    runs_child child = {0};
    pid_t ranks[N_WAITING];
    bool is_right = true;

    (void)unused;
    start_waiting(&child, ranks);
    kill(ranks[1], SIGKILL);
    if (is_mpi())
        assert_int_equal(runs_wait(&child, LIMIT_S), 128 + SIGKILL);
    else
        is_right = ends_with(&child, "for_ever", 7, "error: rank 1 has died");
    mpi_assert_gone(ranks, N_WAITING);
    return is_right;
}

/* mpirun reports a process that was killed as 128 and its signal, and ends the others. Over sockets
 * the others find the dead rank themselves, and name it. */
static void test_a_rank_is_killed(void **state)
{
    (void)state;
    try_case(killed_rank_is_named, 0);
}

static void test_the_starter_is_killed(void **state)
{
    runs_child child = {0};
    pid_t ranks[N_WAITING];

    (void)state;
    start_waiting(&child, ranks);
    kill(child.pid, SIGKILL);
    assert_int_equal(runs_wait(&child, LIMIT_S), -SIGKILL);
    mpi_assert_gone(ranks, N_WAITING);
}

enum { N_BUSY = 4 };

static void start_busy(runs_child *child, const char *name, pid_t ranks[N_BUSY])
{
    start(child, name, N_BUSY);
    for (int i = 0; i < N_BUSY; i++) ranks[i] = mpi_process_of(child, i);
    mpi_wait_for_text(child, "is busy\n", 1);
}

static bool strike_busy(const char *name, int i, int victim, int number, const char *says,
                        double *took_s)
{
    runs_child child = {0};
    pid_t ranks[N_BUSY];
    char text[64];

    start_busy(&child, name, ranks);
    runs_sleep_s(1e-3 * (i * 7919 % 61));
    kill(ranks[victim], number);
    *took_s = -bl_now_s();
    snprintf(text, sizeof text, "error: rank %d %s", victim, says);
    bool is_right = ends_with(&child, name, 7, text);
    *took_s += bl_now_s();
    mpi_assert_gone(ranks, N_BUSY);
    return is_right;
}

static bool killed_busy_rank_is_named(int i)
{
    double took_s;
    bool is_right = strike_busy("busy", i, i % N_BUSY, SIGKILL, "has died", &took_s);
    printf("after a kill the others were gone within %.3f s\n", took_s);
    return is_right && took_s < 0.5 * LIMIT_S;
}

/* A rank is killed at any moment of any collective: the others end at once, not by a deadline (300
 * s), and name it. */
static void test_ranks_are_killed_at_random(void **state)
{
    enum { KILLS = 12 };
    (void)state;
    for (int i = 0; i < KILLS; i++) try_case(killed_busy_rank_is_named, i);
}

static bool stopped_busy_rank_is_named(int i)
{
    double took_s;
    return strike_busy("busy_deadline", i, (i + 1) % N_BUSY, SIGSTOP, "", &took_s);
}

/* A rank is stopped at any moment of any collective, in the middle of its bytes, too: the deadline
 * finds it, and not those that wait for it. */
static void test_ranks_are_stopped_at_random(void **state)
{
    enum { STOPS = 3 };
    (void)state;
    for (int i = 0; i < STOPS; i++) try_case(stopped_busy_rank_is_named, i);
}

static int count_text(const char *text, const char *wanted)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, wanted)); at++) n++;
    return n;
}

/* Longer than a process may be silent when others ask, and shorter than the deadline. */
static void test_a_busy_rank_pauses(void **state)
{
    runs_child child = {0};
    pid_t ranks[N_BUSY];

    (void)state;
    start_busy(&child, "busy", ranks);
    kill(ranks[2], SIGSTOP);
    runs_sleep_s(3);
    char *log = runs_read(child.log, NULL);
    int n_before = count_text(log, "is busy\n");
    free(log);
    kill(ranks[2], SIGCONT);
    mpi_wait_for_text(&child, "is busy\n", n_before + 1);
    mpi_assert_error(&child, NULL);
    kill(child.pid, SIGKILL);
    assert_int_equal(runs_wait(&child, LIMIT_S), -SIGKILL);
    mpi_assert_gone(ranks, N_BUSY);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_stop_together),
        cmocka_unit_test(test_two_ranks_fail),
        cmocka_unit_test(test_a_rank_comes_back),
        cmocka_unit_test(test_a_rank_is_killed),
        cmocka_unit_test(test_the_starter_is_killed),
        cmocka_unit_test(test_a_busy_rank_pauses),
        cmocka_unit_test(test_ranks_are_stopped_at_random),
        cmocka_unit_test(test_ranks_are_killed_at_random), /* the last: mpirun has test_mpi_kills */
    };
    if (argc != 2) return 2;
    transport = argv[1];
    if (is_mpi() && !mpi_is_here()) return 77;
    return _cmocka_run_group_tests("tests", tests, BL_COUNT(tests) - is_mpi(), runs_set_up,
                                   runs_tear_down);
}
