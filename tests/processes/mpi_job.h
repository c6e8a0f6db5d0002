/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_job.h -- a job of processes, under mpirun or not, to be watched, signaled and killed;
 * tests/train/runs.h for several processes. */
#ifndef BALLAST_TESTS_MPI_JOB_H
#define BALLAST_TESTS_MPI_JOB_H

#include "runs.h"

/* Where mpirun is missing, prints the reason and returns false. */
bool mpi_is_here(void);

/* mpirun -n n_ranks PROGRAM words...; words end with NULL. The output of mpirun and the ranks goes
 * to child->log. */
void mpi_start(runs_child *child, int n_ranks, const char *program, char *const *words);

/* The same of any program that starts the ranks: argv ends with NULL and is borrowed for the
 * call. */
void mpi_start_program(runs_child *child, const char *const *argv);

/* `ballast COMMAND args` as n_ranks processes; a key "ranks" is left out. `program` NULL: the
 * program itself, or a script that starts it. */
void mpi_start_ballast(runs_child *child, int n_ranks, const char *program, const char *command,
                       const golden_args *args);

/* The process of a rank, waited for up to a minute; 0: the job has ended, or, with mpi_process_of,
 * the test has failed. */
pid_t mpi_find_process(const runs_child *child, int rank);
pid_t mpi_process_of(const runs_child *child, int rank);

/* Waits until the log holds `text` n times; fails when the job ends before. */
void mpi_wait_for_text(const runs_child *child, const char *text, int n);

/* Waits until the log of `output` has n steps. False: the job has ended before; of the second
 * function the test has failed. */
bool mpi_comes_to_step(const runs_child *child, const char *output, int64_t n);
void mpi_wait_for_steps(const runs_child *child, const char *output, int64_t n);

/* Until the process is stopped (SIGSTOP). */
void mpi_wait_for_stop(pid_t pid);

/* Of /proc/PID/stat: 'T' is stopped; '?': the process does not exist. */
char mpi_state_of(pid_t pid);

/* Whether the process exists and is not a zombie. */
bool mpi_is_running(pid_t pid);

/* Fails unless none of the processes is running any more, or within a minute. */
void mpi_assert_gone(const pid_t *pids, int n);

/* Fails, with `what`, when this process, which has waited for all that it started, still has
 * children a minute later: a job's orphans become children of a process that set
 * PR_SET_CHILD_SUBREAPER. */
void mpi_assert_nobody_left(const char *what);

/* Takes down the names of this user's files in /dev/shm. */
void mpi_note_shared_memory(void);

/* Fails when there is one that was not there then, is not Open MPI's, and is still there after a
 * minute: other programs have theirs, too. */
void mpi_assert_shared_memory(void);

/* Fails unless all threads of the process but its first block SIGTERM. */
void mpi_assert_one_thread_takes_signals(pid_t pid);

/* Ends like runs_wait, after a rank has been killed at any moment. One that dies while MPI starts
 * may leave Open MPI 4.1's mpirun waiting for itself, with no process left (docs/launch.md): after
 * limit_s it is killed, and the code is minus SIGKILL. */
int mpi_wait_after_kill(runs_child *child, const pid_t *ranks, int n_ranks, double limit_s);

/* NULL when the log holds exactly one line "ballast: error: ..." (none: text NULL; "ballast:
 * stopped ..." where text begins so), and it contains `text`. Otherwise the difference, for the
 * caller to free. */
char *mpi_wrong_error(const runs_child *child, const char *text);

/* Fails where there is something wrong. */
void mpi_assert_error(const runs_child *child, const char *text);

#endif
