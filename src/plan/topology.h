/* SPDX-License-Identifier: Apache-2.0 */
/* topology.h -- the ranks of a job: how many there are, and which belong to a process and a
 * host. */
#ifndef BALLAST_PLAN_TOPOLOGY_H
#define BALLAST_PLAN_TOPOLOGY_H

#include <stdbool.h>

typedef struct bl_topology {
    int n_ranks;            /* of the job */
    int first_here, n_here; /* this process's ranks: n_here of them, from first_here on */
    /* The same among the ranks of this host, whose processes share its memory, disks and cores:
     * first_on_host counts them from 0. */
    int first_on_host, n_on_host;
    /* Its processes have one memory file (comm/host_memory.h): data needed once per host is there
     * once. */
    bool shares_memory;
    int gpu; /* of this process's ranks, which share it: CUDA's number */
} bl_topology;

#endif
