/* SPDX-License-Identifier: Apache-2.0 */
/* processes.c -- connects the processes of a given address and port, and makes a communicator of
 * their connections. */
#include "job/processes.h"

#include <stdlib.h>

#include "job/internal.h"
#include "job/tcp/tcp.h"

enum { MAX_RANKS = 1 << 20 };

static const double MEET_S = 300.0;

static void report_nothing(const bl_error *error) /* callers have it from bl_comm_first_error */
{
    (void)error;
}

static bl_status check(const bl_comm_processes *job)
{
    if (!job) return BL_FAIL(BL_EUSAGE, "bl_comm_create_processes: job is NULL");
    if (job->n_ranks < 1 || job->n_ranks > MAX_RANKS || job->rank < 0 || job->rank >= job->n_ranks)
        return BL_FAIL(BL_EUSAGE, "bl_comm_create_processes: rank %d of %d", job->rank,
                       job->n_ranks);
    if (job->port == 0) return BL_FAIL(BL_EUSAGE, "bl_comm_create_processes: port is 0");
    if (!job->is_one_host && (!job->address || !job->secret))
        return BL_FAIL(BL_EUSAGE,
                       "bl_comm_create_processes: ranks of several hosts need address and secret");
    return BL_OK;
}

static bl_status connect_ranks(const bl_comm_processes *job, const bl_launch_info *info,
                               int *sockets)
{
    job_rendezvous rendezvous = {.info = info,
                                 .address = job->is_one_host ? "127.0.0.1" : job->address,
                                 .port = job->port,
                                 .port_key = "port",
                                 .job = job->port,
                                 .secret = job->secret,
                                 .is_quiet = true,
                                 .limit_s = job->meet_s > 0 ? job->meet_s : MEET_S};

    if (job->n_ranks > 1) return job_rendezvous_connect(&rendezvous, sockets);
    sockets[0] = -1;
    return BL_OK;
}

static bl_status open_wire(const bl_comm_processes *job, int *sockets, bl_wire **wire)
{
    bl_launch_info info = {.rank = job->rank,
                           .n_processes = job->n_ranks,
                           .local_rank = job->is_one_host ? job->rank : 0,
                           .n_local = job->is_one_host ? job->n_ranks : 1};

    BL_TRY(connect_ranks(job, &info, sockets));
    return job_open_connected(&info, sockets, report_nothing, wire);
}

bl_status bl_comm_create_processes(const bl_comm_processes *job, bl_comm **out)
{
    bl_wire *wire = NULL;

    if (!out) return BL_FAIL(BL_EUSAGE, "bl_comm_create_processes: out is NULL");
    *out = NULL;
    BL_TRY(check(job));
    int *sockets = malloc((size_t)job->n_ranks * sizeof *sockets);
    if (!sockets) return BL_FAIL(BL_ENOMEM, "connections of %d ranks", job->n_ranks);
    bl_status st = open_wire(job, sockets, &wire);
    free(sockets);
    if (st != BL_OK) return st;
    bl_wire_set_deadline(wire, job->deadline_s);
    st = bl_comm_create_wire(wire, out);
    if (st == BL_OK) {
        bl_wire_comm_own(*out);
        return BL_OK;
    }
    bl_error error;
    bl_error_save(&error, st);
    bl_wire_abort(wire, &error);
    (void)bl_wire_close(wire);
    return bl_error_restore(&error);
}
