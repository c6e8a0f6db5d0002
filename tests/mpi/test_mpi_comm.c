/* SPDX-License-Identifier: Apache-2.0 */
/* The communicator of several processes under mpirun: the cases of the local communicator's test with the
 * same serial sums, bit for bit; and how a job ends when one of its processes fails, hangs or dies. */
#include "mpi_job.h"

#include <signal.h>
#include <stdio.h>

#include "base/sizes.h"

/* mpirun's own end takes up to three seconds. */
static const double LIMIT_S = 300;

static int run(const char *name, int n_ranks, runs_child *child)
{
    char *words[] = {(char *)name, NULL};
    mpi_start(child, n_ranks, MPI_RANKS_PROGRAM, words);
    return runs_wait(child, LIMIT_S);
}

static void test_values(void **state)
{
    static const char *const cases[] = {"values", "negative_zero", "split", "pipeline",
                                        "gather_is_held"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (int n_ranks = 2; n_ranks <= 4; n_ranks++) {
            runs_child child = {0};
            int code = run(cases[i], n_ranks, &child);
            mpi_assert_error(&child, NULL);
            if (code != 0) fail_msg("%s, %d ranks: exit %d", cases[i], n_ranks, code);
        }
}

/* Whatever happens: one line of error, and the exit code of its kind. */
static void test_failures(void **state)
{
    static const struct {
        const char *name;
        int n_ranks, code;
        const char *text;
    } cases[] = {
        {"abort", 4, 4, "error: rank 1: shard.bin: a short read"},
        {"deadline", 4, 7, "error: ranks 1, 3 did not reach all_reduce within 2.0 s"},
        {"deadline_of_group", 3, 7, "error: rank 2 did not reach barrier within 2.0 s"},
        {"other_size", 3, 1, "ranks 0 and 2 call different collectives"},
        {"other_kind", 3, 1, "ranks 0 and 1 call different collectives"},
        {"other_root", 3, 1, "ranks 0 and 1 call different collectives"},
        {"other_element", 3, 1, "ranks 0 and 1 call different collectives"},
        {"fail_at_the_end", 3, 5, "error: rank 1: checkpoint 7 is damaged"},
        {"two_fail", 4, 3, "error: rank 1: train.jsonl:3: no JSON"},
        {"stop_together", 3, 75, "error: stopped after step 3"},
        {"stopped", 3, 7, "error: rank 1 did not reach barrier within 2.0 s"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        runs_child child = {0};
        int code = run(cases[i].name, cases[i].n_ranks, &child);
        if (code != cases[i].code)
            fail_msg("%s: exit %d, not %d", cases[i].name, code, cases[i].code);
        mpi_assert_error(&child, cases[i].text);
    }
}

/* A rank that comes back when the others have just given it up tells nobody anything, and leaves it to them
 * to do so. */
static void test_a_rank_comes_back(void **state)
{
    runs_child child = {0};
    char *words[] = {"given_up", NULL};

    (void)state;
    mpi_start(&child, 3, MPI_RANKS_PROGRAM, words);
    pid_t stopped = mpi_process_of(&child, 0);
    mpi_wait_for_text(&child, "has given up\n", 1);
    kill(stopped, SIGCONT);
    assert_int_equal(runs_wait(&child, LIMIT_S), 7);
    mpi_assert_error(&child, "error: rank 0 did not reach barrier within 2.0 s");
}

enum { N_WAITING = 3 };

/* Ranks in the middle of a job that does not end by itself. */
static void start_waiting(runs_child *child, pid_t ranks[N_WAITING])
{
    char *words[] = {"for_ever", NULL};

    mpi_start(child, N_WAITING, MPI_RANKS_PROGRAM, words);
    for (int i = 0; i < N_WAITING; i++) ranks[i] = mpi_process_of(child, i);
    mpi_wait_for_text(child, "has started\n", N_WAITING);
    for (int i = 0; i < N_WAITING; i++) assert_true(mpi_is_running(ranks[i]));
}

/* mpirun reports a process that was killed as 128 and its signal, and ends the others. */
static void test_a_rank_is_killed(void **state)
{
    runs_child child = {0};
    pid_t ranks[N_WAITING];

    (void)state;
    start_waiting(&child, ranks);
    kill(ranks[1], SIGKILL);
    assert_int_equal(runs_wait(&child, LIMIT_S), 128 + SIGKILL);
    mpi_assert_gone(ranks, N_WAITING);
}

static void test_mpirun_is_killed(void **state)
{
    runs_child child = {0};
    pid_t ranks[N_WAITING];

    (void)state;
    start_waiting(&child, ranks);
    kill(child.pid, SIGKILL);
    assert_int_equal(runs_wait(&child, LIMIT_S), -SIGKILL);
    mpi_assert_gone(ranks, N_WAITING);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_a_rank_comes_back),
        cmocka_unit_test(test_a_rank_is_killed),
        cmocka_unit_test(test_mpirun_is_killed),
    };
    if (!mpi_is_here()) return 77;
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
