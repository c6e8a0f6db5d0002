/* SPDX-License-Identifier: Apache-2.0 */
/* launcher.c -- processes that mpirun or srun has started. MPI carries their addresses and a random key and is closed before the ranks are connected:
 * it listens on all interfaces, and what a stranger sends there may block it. */
#include <stdlib.h>
#include <string.h>

#include "comm/tcp/tcp.h"

static const double MEET_S = 300.0, CONNECT_S = 60.0;

typedef struct record {
    comm_key key; /* the first one's is the job's */
    comm_place place;
} record;

static bl_status describe_self(const bl_launch_info *info, comm_listener *listener, record *own)
{
    bool is_one_host = info->n_local == info->n_processes, is_chosen;

    memset(own, 0, sizeof *own);
    BL_TRY(comm_random(&own->key, sizeof own->key));
    BL_TRY(comm_place_describe(is_one_host, &own->place, &is_chosen));
    own->place.first_rank = info->rank;
    own->place.n_ranks = 1;
    BL_TRY(comm_tcp_listen(own->place.addresses,
                           is_one_host || is_chosen ? own->place.n_addresses : 0, 0, listener));
    own->place.port = listener->port;
    return BL_OK;
}

static bl_status connect_all(const bl_launch_info *info, const comm_key *key, const record *all,
                             const comm_listener *listener, int *sockets)
{
    int n = info->n_processes;
    comm_place *places = calloc((size_t)n, sizeof *places);
    comm_mesh mesh = {.key = key,
                      .places = places,
                      .n_places = n,
                      .own = info->rank,
                      .listener = listener,
                      .limit_s = CONNECT_S};

    if (!places) return BL_FAIL(BL_ENOMEM, "the addresses of %d processes", n);
    for (int i = 0; i < n; i++) places[i] = all[i].place; /* by MPI, of processes of one start */
    bl_status st = comm_place_compare_builds(places, n, info->rank, false);
    comm_patience_begin(&mesh.patience, info);
    if (st == BL_OK) st = comm_mesh_connect_ranks(&mesh, sockets);
    free(places);
    return st;
}

bl_status comm_mpi_meet(const bl_launch_info *info, comm_key *key, int *sockets)
{
    record own, *all = calloc((size_t)info->n_processes, sizeof *all);
    comm_listener listener = {.n = 0};

    for (int i = 0; i < info->n_processes; i++) sockets[i] = -1;
    bl_status st = all ? comm_mpi_check(info)
                       : BL_FAIL(BL_ENOMEM, "the addresses of %d processes", info->n_processes);
    if (st == BL_OK) st = describe_self(info, &listener, &own);
    if (st == BL_OK) st = comm_mpi_gather(info, &own, all, sizeof own, MEET_S);
    if (st == BL_OK) *key = all[0].key;
    if (st == BL_OK) st = connect_all(info, key, all, &listener, sockets);
    comm_tcp_close_listener(&listener);
    free(all);
    return st;
}
