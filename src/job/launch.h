/* SPDX-License-Identifier: Apache-2.0 */
/* launch.h -- the processes of a job, from startup to shutdown.
 *
 * Who starts them:
 *   (none)          one process; its ranks are threads. launch is NULL.
 *   mpirun, srun    a process per rank, connected by TCP, for which MPI exchanges addresses; or a
 *                   process per host, which starts that host's ranks
 *   torchrun        a process per rank, which meet at MASTER_ADDR and are connected by TCP
 *   ballast         a child of bl_launch_run_ranks, which has its connections from its parent
 *
 * What a process does:
 *   begin    first: reads the environment, sets log verbosity
 *   open     connects it with the others; NULL when it is alone
 *   create   the communicator of all processes
 *   close    with the status this process ended with: all processes leave with one status
 * or, between open and close, in the place of being a rank:
 *   run_ranks    starts this host's ranks and waits for them
 *
 * A process that fails tells the others before it leaves, each of them tells all others what it
 * heard, and all leave with the error of the lowest rank that failed, which one of them prints (a
 * child: its parent). Should mpirun, srun or a parent die, the kernel ends its processes
 * (PR_SET_PDEATHSIG). */
#ifndef BALLAST_JOB_LAUNCH_H
#define BALLAST_JOB_LAUNCH_H

#include <stdbool.h>

#include "comm/comm.h"

typedef struct bl_launch bl_launch;

/* Ends the process at once, with the exit code of `st` and without its exit handlers: threads of
 * the process still run, and use what these would free. The program's own; it must not return. */
typedef void (*bl_launch_leave_fn)(bl_status st);

typedef enum bl_launch_kind {
    BL_LAUNCH_ALONE,
    BL_LAUNCH_MPI,
    BL_LAUNCH_TORCHRUN,
    BL_LAUNCH_CHILD
} bl_launch_kind;

/* What the environment says: that of a parent's child, of Open MPI, of PMI (MPICH, Intel MPI), of
 * torchrun, or of a Slurm step. */
typedef struct bl_launch_info {
    bl_launch_kind kind;
    const char *launcher; /* "mpirun", "srun", "torchrun", "ballast"; NULL: none */
    int rank, n_processes;
    int local_rank,
        n_local; /* among the processes on this host; 0 and 1 when the launcher does not say */
} bl_launch_info;

/* Any thread; opens nothing. A set of variables that does not place this process counts as absent:
 * bl_launch_begin rejects it. */
void bl_launch_read(bl_launch_info *out);

/* Every process of a job calls it first, before it starts threads. From then on every process but
 * that of rank 0 logs nothing but errors (base/log.h), and that one, if it is a child, not before
 * bl_launch_open: its parent has said what there is to say about the configuration. BL_EUSAGE: the
 * variable of a child is not its parent's, or a launcher's variables are malformed, contradict each
 * other or are incomplete; BL_ERANK: its parent is gone. */
bl_status bl_launch_begin(bl_launch_info *out);

typedef struct bl_launch_options {
    /* For bl_launch_leave, and to limit the time that the end takes; NULL: bl_launch_leave is
     * unused, and the end has no limit. */
    bl_launch_leave_fn leave;
    /* A directory that all processes see, for the secret of those that torchrun has started, unless
     * BALLAST_SECRET has one; NULL: none. Borrowed for the call. */
    const char *secret_dir;
    /* This process will close with a failure: other processes may fail as well and arrive within
     * seconds, or not at all. */
    bool has_failed;
} bl_launch_options;

/* *out = NULL when this process is alone. All processes of the job call it, once, before they start
 * threads. BL_EUSAGE: mpirun or srun has started several processes, but this is a build without
 * MPI, or the launcher does not know the MPI; the error's text is empty but in the first process of
 * a host, as all find the same. Also: processes of different builds, or without a common secret.
 * BL_ERANK: a process did not come. */
bl_status bl_launch_open(const bl_launch_options *options, bl_launch **out);

int bl_launch_rank(const bl_launch *launch); /* NULL: 0 */
int bl_launch_size(const bl_launch *launch); /* NULL: 1 */

/* The memory file that the ranks of this host have from their parent, empty at first, for what the
 * host needs once (comm/host_memory.h). The launch's own; -1: none, as under mpirun, srun and
 * torchrun, which start each by itself. */
int bl_launch_host_memory_fd(const bl_launch *launch);

/* The communicator of all processes; deadline_s as in comm.h. Destroy it before closing. */
bl_status bl_launch_create_comm(bl_launch *launch, double deadline_s, bl_comm **out);

/* For a process whose ranks are busy although another has failed: true when it has known for so
 * long that it should leave without waiting for them. */
bool bl_launch_should_leave(bl_launch *launch);

/* Ends the job and then, by `leave`, the process, with the job's status: for a main thread whose
 * ranks still run. Files stay whole. They may use `launch` and its communicators until the process
 * ends: nothing is freed. Does not return. */
void bl_launch_leave(bl_launch *launch);

/* Ends the job: waits until all processes have called it with BL_OK or BL_ESTOPPED, or one has
 * failed. Frees `launch`. From then on this process has BL_LAUNCH_EXIT_S to exit, or `leave` is
 * called: files are whole, and the remaining work may wait for a driver or a stranger. Returns the
 * job's status; this thread's error text is empty when this process or another has printed the
 * error. NULL: returns st. */
bl_status bl_launch_close(bl_launch *launch, bl_status st);

#define BL_LAUNCH_EXIT_S 60.0 /* pinned memory of hundreds of GB takes seconds to be freed */

/* Calls `leave` with `st` unless the process exits within limit_s. NULL: does nothing. */
void bl_launch_limit_exit(bl_launch_leave_fn leave, bl_status st, double limit_s);

/* The one line of this thread's error, unless its text is empty: on stderr, or by the parent. For a
 * program's last words. */
void bl_launch_print_error(bl_status st);

/* ---- the parent of a host's ranks ---- */

/* A request to stop that is repeated within this many seconds of the first one is the same one:
 * `timeout` and service managers signal a process, and then all of its group. */
#define BL_LAUNCH_ONE_REQUEST_S 1.0

/* All processes of `launch` start as many ranks, n_here (0: they are ranks themselves), or all fail
 * with BL_EUSAGE. Collective, after bl_launch_open. NULL is fine. */
bl_status bl_launch_agree(bl_launch *launch, int n_here);

typedef struct bl_launch_ranks {
    int n_here;        /* ranks of this host; with `launch`, of each host */
    char *const *argv; /* of every child, NULL-terminated: this program again */
    /* Signals that ask to stop (SIGTERM, SIGINT, SIGUSR1, SIGXCPU, SIGHUP) go to the ranks; a
     * second one, later than BL_LAUNCH_ONE_REQUEST_S, ends them, and the call, at once. So does
     * BL_REPORT_SIGNAL, which ends nothing. false: they end this process, and the ranks with
     * it. */
    bool takes_requests;
    /* Of the ranks' communicator; 0: none. A rank that runs on for so long, plus the time in which
     * the others find that out, after another has ended well, is killed. */
    double deadline_s;
    /* A rank that still runs so long after all have closed their communicators is killed, with a
     * warning: only its exit is left, where a driver may hang, and the job is done. */
    double exit_s;
} bl_launch_ranks;

/* Runs this program (/proc/self/exe) n_here times, a rank each, connected with each other by
 * sockets, and with `launch` (of a process per host that mpirun or srun has started; else NULL)
 * with the ranks of the other hosts: one job of n_here ranks per host, numbered host by host. Waits
 * for them: passes signals on, stops and continues with them (SIGTSTP, SIGCONT), and ends those
 * that are left a few seconds after one has failed. Call it on the main thread: the children end
 * when the thread does. Signals stay blocked afterwards; the process is about to exit.
 *
 * Returns the job's status. This thread's error text is one line for the user: a rank's own error,
 * or which rank was killed, by what, or which one hung at its end. BL_ERANK, BL_EIO, BL_ELIMIT: a
 * rank could not be started. */
bl_status bl_launch_run_ranks(bl_launch *launch, const bl_launch_ranks *ranks);

#endif
