/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_job.h -- a job under mpirun, to be watched, signalled and killed; tests/train/runs.h for several
 * processes. */
#ifndef BALLAST_TESTS_MPI_JOB_H
#define BALLAST_TESTS_MPI_JOB_H

#include "runs.h"

/* Says why and returns false where there is no mpirun. */
bool mpi_is_here(void);

/* mpirun -n n_ranks PROGRAM words...; words end with NULL. What mpirun and the ranks say goes to child->log.
 */
void mpi_start(runs_child *child, int n_ranks, const char *program, char *const *words);

/* `ballast COMMAND args` as n_ranks processes; a key "ranks" is left out. `program` NULL: the program itself,
 * or a script that starts it. */
void mpi_start_ballast(runs_child *child, int n_ranks, const char *program, const char *command,
                       const golden_args *args);

/* The process of a rank, waited for up to a minute. */
pid_t mpi_process_of(const runs_child *child, int rank);

/* Waits until the log holds `text` n times; fails when the job ends before. */
void mpi_wait_for_text(const runs_child *child, const char *text, int n);

/* Whether the process exists and is no zombie. */
bool mpi_is_running(pid_t pid);

/* Fails unless none of the processes is running any more, or within a minute. */
void mpi_assert_gone(const pid_t *pids, int n);

/* Ends like runs_wait, after a rank has been killed at any moment. One that dies while MPI starts may leave
 * Open MPI 4.1's mpirun waiting for itself, with no process left (docs/launch.md): after limit_s it is
 * killed, and the code is minus SIGKILL. */
int mpi_wait_after_kill(runs_child *child, const pid_t *ranks, int n_ranks, double limit_s);

/* Fails unless the log holds exactly one line "ballast: error: ..." (none: text NULL), and it contains
 * `text`. */
void mpi_assert_error(const runs_child *child, const char *text);

#endif
