/* SPDX-License-Identifier: Apache-2.0 */
/* host_ranks.c -- forks N ranks that are connected by sockets, and kills what hangs. */
#include "host_ranks.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/wire.h"

static const double HANG_S = 300;

/* Shared by the test and its ranks, which write to their own places. */
static host_rank_end *all_ends;

void host_rank_say(const test_rank *self, int idx, int64_t value)
{
    all_ends[self->rank].values[idx] = value;
}

static int own_rank; /* of this process */

static void report(const bl_error *error)
{
    all_ends[own_rank].reported = *error;
}

static bl_status run_rank(bl_comm *comm, test_rank_fn fn, void *arg)
{
    test_rank self = {
        .rank = bl_comm_rank(comm), .n_ranks = bl_comm_size(comm), .comm = comm, .arg = arg};
    bl_status st;

    BL_TRY_GOTO(st, done, bl_device_create_cpu(1, &self.device));
    BL_TRY_GOTO(st, done, bl_stream_create(self.device, "test", &self.stream));
    BL_TRY_GOTO(st, done, fn(&self));
    st = bl_stream_synchronize(self.stream);
done:
    bl_error_save(&all_ends[self.rank].error, st);
    if (st != BL_OK) bl_comm_abort(comm, &all_ends[self.rank].error);
    bl_stream_destroy(self.stream);
    bl_device_destroy(self.device);
    return st;
}

static void be_rank(const bl_wire_links *links, double deadline_s, test_rank_fn fn, void *arg)
{
    bl_wire *wire;
    bl_comm *comm;
    host_rank_end *end = &all_ends[links->rank];

    own_rank = links->rank;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    bl_status st = bl_wire_open_sockets(links, report, &wire);
    if (st == BL_OK) {
        bl_wire_set_deadline(wire, deadline_s);
        st = bl_comm_create_wire(wire, &comm);
        if (st == BL_OK) st = run_rank(comm, fn, arg);
        if (st == BL_OK) bl_comm_destroy(comm);
        (void)bl_wire_close(wire);
    } else {
        bl_error_save(&end->error, st);
    }
    _exit(0);
}

static void connect_ranks(int n_ranks, int sockets[HOST_RANKS_MAX][HOST_RANKS_MAX])
{
    for (int a = 0; a < n_ranks; a++) {
        sockets[a][a] = -1;
        for (int b = 0; b < a; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) abort();
            sockets[a][b] = pair[0];
            sockets[b][a] = pair[1];
        }
    }
}

static void close_others(int n_ranks, int own, int sockets[HOST_RANKS_MAX][HOST_RANKS_MAX])
{
    for (int a = 0; a < n_ranks; a++)
        for (int b = 0; a != own && b < n_ranks; b++)
            if (a != b) close(sockets[a][b]);
}

/* Whatever hangs, is stopped or not, is killed with all others that are left, and the test ends
 * here. */
static void wait_for_all(int n_ranks, const pid_t *pids)
{
    double end_s = bl_now_s() + HANG_S;
    for (int r = 0; r < n_ranks; r++) {
        int status;
        pid_t ended;
        while ((ended = waitpid(pids[r], &status, WNOHANG)) == 0 && bl_now_s() < end_s)
            usleep(1000);
        if (ended != pids[r]) {
            fprintf(stderr, "host_ranks: rank %d of %d had not ended after %.0f s\n", r, n_ranks,
                    HANG_S);
            for (int left = r; left < n_ranks; left++) kill(pids[left], SIGKILL);
            abort();
        }
        all_ends[r].signal_number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    }
}

void host_ranks_run(int n_ranks, double deadline_s, test_rank_fn fn, void *arg, host_rank_end *ends)
{
    int sockets[HOST_RANKS_MAX][HOST_RANKS_MAX];
    pid_t pids[HOST_RANKS_MAX];
    size_t n_bytes = HOST_RANKS_MAX * sizeof *all_ends;

    all_ends = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all_ends == MAP_FAILED || n_ranks > HOST_RANKS_MAX) abort();
    connect_ranks(n_ranks, sockets);
    fflush(NULL);
    for (int r = 0; r < n_ranks; r++) {
        if ((pids[r] = fork()) < 0) abort();
        if (pids[r] > 0) continue;
        close_others(n_ranks, r, sockets);
        bl_wire_links links = {.rank = r,
                               .n_processes = n_ranks,
                               .sockets = sockets[r],
                               .n_on_host = n_ranks,
                               .shared_fd = -1};
        be_rank(&links, deadline_s, fn, arg);
    }
    close_others(n_ranks, -1, sockets);
    wait_for_all(n_ranks, pids);
    memcpy(ends, all_ends, (size_t)n_ranks * sizeof *ends);
    munmap(all_ends, n_bytes);
}
