/* SPDX-License-Identifier: Apache-2.0 */
/* launcher.c -- processes that mpirun or srun has started. MPI carries their addresses and a random
 * key and is closed before the ranks are connected: it listens on all interfaces, and what a
 * stranger sends there may block it. */
#include <stdlib.h>
#include <string.h>

#include "job/tcp/tcp.h"

static const double MEET_S = 300.0;

typedef struct record {
    job_key key; /* the first one's is the job's */
    job_place place;
} record;

static bl_status describe_self(const bl_launch_info *info, job_listener *listener, record *own)
{
    bool is_chosen;

    memset(own, 0, sizeof *own);
    BL_TRY(job_random(&own->key, sizeof own->key));
    return job_place_open(info, info->rank, 1, &own->place, &is_chosen, listener);
}

static bl_status connect_all(const bl_launch_info *info, const job_key *key, const record *all,
                             const job_listener *listener, int *sockets)
{
    int n = info->n_processes;
    job_place *places = calloc((size_t)n, sizeof *places);
    job_mesh mesh = {.key = key,
                     .places = places,
                     .n_places = n,
                     .own = info->rank,
                     .listener = listener,
                     .info = info,
                     .limit_s = JOB_CONNECT_S};

    if (!places) return BL_FAIL(BL_ENOMEM, "the addresses of %d processes", n);
    for (int i = 0; i < n; i++) places[i] = all[i].place; /* by MPI, of processes of one start */
    bl_status st = job_place_compare_builds(places, n, info->rank, false);
    if (st == BL_OK) st = job_mesh_connect_ranks(&mesh, sockets);
    free(places);
    return st;
}

bl_status job_mpi_connect(const bl_launch_info *info, job_key *key, int *sockets)
{
    record own, *all = calloc((size_t)info->n_processes, sizeof *all);
    job_listener listener = {.n = 0};

    for (int i = 0; i < info->n_processes; i++) sockets[i] = -1;
    bl_status st = all ? job_mpi_check(info)
                       : BL_FAIL(BL_ENOMEM, "the addresses of %d processes", info->n_processes);
    if (st == BL_OK) st = describe_self(info, &listener, &own);
    if (st == BL_OK) st = job_mpi_gather(info, &own, all, sizeof own, MEET_S);
    if (st == BL_OK) *key = all[0].key;
    if (st == BL_OK) st = connect_all(info, key, all, &listener, sockets);
    job_tcp_close_listener(&listener);
    free(all);
    return st;
}
