/* SPDX-License-Identifier: Apache-2.0 */
/* launch.h -- the processes of a job that mpirun or srun has started, one rank each, from their first words
 * to their common end.
 *
 *   open     the environment says whether there are others; then MPI starts, on a thread of its own
 *   create   the communicator of all processes
 *   close    with the status this process ended with: all processes leave with one status
 *
 * A process that fails tells the others before it leaves, each of them tells all others what it heard, and
 * all leave with the error of the lowest rank that failed. A process without a word for two seconds is left
 * behind: mpirun ends it. Should the launcher die, the kernel ends its processes (PR_SET_PDEATHSIG). */
#ifndef BALLAST_COMM_LAUNCH_H
#define BALLAST_COMM_LAUNCH_H

#include <stdbool.h>

#include "comm/comm.h"

typedef struct bl_launch bl_launch;

/* Ends the process at once, with the exit code of `st` and without its exit handlers: threads of the process
 * still run, and use what these would free. The program's own; it must not return. */
typedef void (*bl_launch_leave_fn)(bl_status st);

/* What a launcher's environment says: Open MPI's, that of PMI (MPICH, Intel MPI), or a Slurm step's. */
typedef struct bl_launch_info {
    const char *launcher; /* "mpirun", "srun"; NULL: none */
    int rank, n_processes;
    int local_rank,
        n_local; /* among the processes on this host; 0 and 1 when the launcher does not say */
} bl_launch_info;

void bl_launch_read(bl_launch_info *out);

/* *out = NULL when this process is alone. `leave` is for bl_launch_leave; NULL: nobody calls that. All processes of the job call it, once, before they start threads.
 * Every process but rank 0 logs no more (base/log.h). BL_EUSAGE: several processes, but a build without MPI,
 * or an MPI that the launcher does not know. */
bl_status bl_launch_open(bl_launch_leave_fn leave, bl_launch **out);

int bl_launch_rank(const bl_launch *launch); /* NULL: 0 */
int bl_launch_size(const bl_launch *launch); /* NULL: 1 */

/* The communicator of all processes; deadline_s as in comm.h. Destroy it before closing. */
bl_status bl_launch_create_comm(bl_launch *launch, double deadline_s, bl_comm **out);

/* For a process whose ranks are busy although another has failed: true when it has been told for so long that
 * it should leave without waiting for them. */
bool bl_launch_should_leave(bl_launch *launch);

/* Ends the job and then, by `leave`, the process, with the job's status: what a main thread does while its
 * ranks still run. Files stay whole. Frees `launch`; does not return. */
void bl_launch_leave(bl_launch *launch);

/* Ends the job: waits until all processes have come here with BL_OK or BL_ESTOPPED, or one has failed. Frees
 * `launch`. Returns the job's status; this thread's error text is empty when the user has been told, by this
 * process or another. NULL: returns st. */
bl_status bl_launch_close(bl_launch *launch, bl_status st);

#endif
