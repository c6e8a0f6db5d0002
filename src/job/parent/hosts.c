/* SPDX-License-Identifier: Apache-2.0 */
/* hosts.c -- the parents of several hosts, which mpirun or srun has started: by their connection
 * they tell each other how many ranks they have and where these can be reached; then the ranks are
 * connected, before they are started. */
#include "job/parent/hosts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/host_name.h"
#include "job/tcp/tcp.h"

static const double MEET_S = 300.0;

typedef struct host_record {
    uint8_t salt[JOB_KEY_BYTES]; /* the first one's is the job's */
    job_place place;
} host_record;

static bl_status describe_self(const bl_launch *launch, int n_here, job_listener *listener,
                               host_record *own)
{
    bool is_chosen;

    memset(own, 0, sizeof *own);
    BL_TRY(job_random(own->salt, sizeof own->salt));
    return job_place_open(&launch->info, launch->info.rank * n_here, n_here, &own->place,
                          &is_chosen, listener);
}

/* `bytes` from every process to every process of `launch`. */
static bl_status all_gather(bl_launch *launch, const char *what, const void *own, void *all,
                            size_t bytes)
{
    bl_comm_call call = {.kind = BL_COMM_ALL_GATHER, .bytes = bytes};
    int n = launch->info.n_processes, rank = launch->info.rank, n_peers = 0;
    int *peers = calloc((size_t)n, sizeof *peers);
    char *to = all;
    bl_comm *comm = NULL;

    snprintf(call.label.text, sizeof call.label.text, "%s", what);
    for (int i = 0; peers && i < n; i++)
        if (i != rank) peers[n_peers++] = i;
    bl_status st =
        peers ? bl_launch_create_comm(launch, MEET_S, &comm) : BL_FAIL(BL_ENOMEM, "%d hosts", n);
    if (st == BL_OK) st = bl_wire_comm_tell(comm, &call, n_peers, peers, own, all, bytes);
    if (st == BL_OK) {
        memmove(to + (size_t)(rank + 1) * bytes, to + (size_t)rank * bytes,
                (size_t)(n - 1 - rank) * bytes);
        memcpy(to + (size_t)rank * bytes, own, bytes);
    }
    bl_comm_destroy(comm);
    free(peers);
    return st;
}

typedef struct intent {
    char host[JOB_HOST_BYTES];
    int32_t n_ranks;
} intent;

static bl_status compare_intents(const intent *all, int n)
{
    for (int i = 1; i < n; i++)
        if (all[i].n_ranks != all[0].n_ranks)
            return BL_FAIL(BL_EUSAGE,
                           "the process on host %s would start %d ranks and that on host %s %d: "
                           "equal numbers are needed, of visible GPUs or by the key ranks",
                           all[0].host, all[0].n_ranks, all[i].host, all[i].n_ranks);
    return BL_OK;
}

bl_status bl_launch_agree(bl_launch *launch, int n_here)
{
    intent own = {.n_ranks = n_here}, *all;

    if (!launch || launch->info.kind != BL_LAUNCH_MPI) return BL_OK;
    int n = launch->info.n_processes;
    bl_host_name(own.host, sizeof own.host);
    all = calloc((size_t)n, sizeof *all);
    if (!all) return BL_FAIL(BL_ENOMEM, "%d hosts", n);
    bl_status st = all_gather(launch, "who starts ranks", &own, all, sizeof own);
    if (st == BL_OK) st = compare_intents(all, n);
    free(all);
    return st;
}

static bl_status connect_hosts(const bl_launch *launch, const host_record *all,
                               const job_listener *listener, job_host_links *links)
{
    int n_hosts = launch->info.n_processes;
    job_place *places = calloc((size_t)n_hosts, sizeof *places);
    job_key key;
    job_mesh mesh = {.key = &key,
                     .places = places,
                     .n_places = n_hosts,
                     .own = launch->info.rank,
                     .listener = listener,
                     .info = &launch->info,
                     .limit_s = JOB_CONNECT_S};

    if (!places) return BL_FAIL(BL_ENOMEM, "the addresses of %d hosts", n_hosts);
    for (int i = 0; i < n_hosts; i++) {
        places[i] = all[i].place;
        places[i].host[JOB_HOST_BYTES - 1] = '\0';
    }
    job_key_derive(&launch->key, all[0].salt, &key);
    bl_status st = job_mesh_connect(&mesh, links);
    free(places);
    return st;
}

static bl_status connect_parents(bl_launch *launch, int n_here, job_listener *listener,
                                 host_record *all, job_host_links *links)
{
    const bl_launch_info *info = &launch->info;
    host_record own;

    BL_TRY(describe_self(launch, n_here, listener, &own));
    BL_TRY(all_gather(launch, "the hosts' addresses", &own, all, sizeof own));
    BL_TRY(job_host_links_create(info->n_processes * n_here, info->rank * n_here, n_here, links));
    return connect_hosts(launch, all, listener, links);
}

bl_status job_hosts_meet(bl_launch *launch, int n_here, job_host_links *links)
{
    host_record *all = calloc((size_t)launch->info.n_processes, sizeof *all);
    job_listener listener = {.n = 0};

    *links = (job_host_links){0};
    bl_status st = all ? connect_parents(launch, n_here, &listener, all, links)
                       : BL_FAIL(BL_ENOMEM, "the addresses of %d hosts", launch->info.n_processes);
    job_tcp_close_listener(&listener);
    free(all);
    return st;
}
