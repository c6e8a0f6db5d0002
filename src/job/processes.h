/* SPDX-License-Identifier: Apache-2.0 */
/* processes.h -- a communicator between processes that another program has started: torchrun, a
 * scheduler, a program of yours. A process is one rank.
 *
 * The ranks meet at rank 0's address and port, prove to each other that they know the same secret,
 * and are connected by TCP, each with each. Their communicator is for host memory; on GPUs,
 * bl_comm_create_nccl (comm/nccl/nccl.h) makes one for device memory of it, a GPU per process. */
#ifndef BALLAST_JOB_PROCESSES_H
#define BALLAST_JOB_PROCESSES_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_comm_processes {
    int rank, n_ranks;
    /* Where rank 0 listens while the ranks meet: a name or a number of its host, and a free port.
     * Equal on all ranks. On several hosts, the environment variable BALLAST_INTERFACE chooses the
     * network interface of all other connections. */
    const char *address;
    uint16_t port;
    /* At least 16 characters, equal on all ranks. NULL, of one host only: a random one, in a file
     * of /dev/shm that this user alone can read. */
    const char *secret;
    /* all ranks are on one host: they listen on the loopback address only, and `address` is not
     * used */
    bool is_one_host;
    double meet_s; /* how long ranks wait for each other at first; 0: 300 */
    /* how long a rank waits for another inside one collective; 0: without a limit */
    double deadline_s;
} bl_comm_processes;

/* Collective among the ranks; strings are borrowed for the call. Destroy the communicators split
 * from *out before it: destroying *out waits for the other ranks to do the same, or for deadline_s,
 * and closes the connections. BL_EUSAGE: a wrong value, a secret that others do not have, or ranks
 * of different builds; BL_ERANK names who did not come; BL_ELIMIT: too few descriptors. */
BL_API bl_status bl_comm_create_processes(const bl_comm_processes *job, bl_comm **out);

#ifdef __cplusplus
}
#endif

#endif
