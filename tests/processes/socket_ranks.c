/* SPDX-License-Identifier: Apache-2.0 */
/* A job of processes that are connected by sockets: socket_ranks N CASE shared|unix|tcp: Unix
 * sockets with shared memory for bulk data, or alone, or TCP alone. The first process starts the
 * others, itself again with their sockets in the environment, each to run a case of rank_cases.h;
 * waits for them; kills those that are still there some seconds after the first has failed; and
 * ends with the code of the first that has. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "rank_cases.h"

enum { MAX_RANKS = 16 };

static const double PATIENCE_S = 5; /* longer than the others' words are waited for */

typedef struct job {
    int n_ranks, shared_fd;
    int sockets[MAX_RANKS][MAX_RANKS]; /* [rank][peer] */
    pid_t pids[MAX_RANKS];
} job;

/* ---- a rank ---- */

static void report(const bl_error *error)
{
    if (error->status == BL_ESTOPPED)
        bl_log_stopped(error->text);
    else
        bl_log_error(error->text);
    bl_log_set_silent(true);
}

static int next_number(const char **text)
{
    char *end;
    long value = strtol(*text, &end, 10);
    if (end == *text) abort();
    *text = end;
    return (int)value;
}

/* Returns the job's status, after it has been reported to the other ranks and to the user. */
static bl_status run_rank(const char *name, const char *text)
{
    int sockets[MAX_RANKS];
    const rank_case *which = rank_case_find(name);
    bl_wire_links links = {.sockets = sockets};
    bl_wire *wire;
    bl_error error;

    if (!which) return BL_FAIL(BL_EUSAGE, "no case %s", name);
    links.rank = next_number(&text);
    links.n_processes = links.n_on_host = next_number(&text);
    links.shared_fd = next_number(&text);
    for (int i = 0; i < links.n_processes; i++) sockets[i] = next_number(&text);
    BL_TRY(bl_wire_open_sockets(&links, report, &wire));
    bl_status st = rank_case_run(which, wire);
    bl_error_save(&error, st);
    if (st == BL_ESTOPPED && links.rank == 0) report(&error);
    if (st != BL_OK && st != BL_ESTOPPED) bl_wire_abort(wire, &error);
    bl_status verdict = bl_wire_close(wire);
    return verdict != BL_OK ? verdict : st;
}

static int be_rank(const char *name, const char *links)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return bl_status_exit_code(run_rank(name, links));
}

/* ---- the first process ---- */

static bool connect_tcp(int pair[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bool is_well = listener >= 0 &&
                   bind(listener, (struct sockaddr *)&address, sizeof address) == 0 &&
                   listen(listener, 1) == 0 &&
                   getsockname(listener, (struct sockaddr *)&address, &length) == 0 &&
                   (pair[0] = socket(AF_INET, SOCK_STREAM, 0)) >= 0 &&
                   connect(pair[0], (struct sockaddr *)&address, sizeof address) == 0 &&
                   (pair[1] = accept(listener, NULL, NULL)) >= 0;
    close(listener);
    return is_well;
}

static bool connect_all(job *j, bool tcp)
{
    for (int a = 0; a < j->n_ranks; a++) {
        j->sockets[a][a] = -1;
        for (int b = 0; b < a; b++) {
            int pair[2];
            if (tcp ? !connect_tcp(pair) : socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
                return false;
            j->sockets[a][b] = pair[0];
            j->sockets[b][a] = pair[1];
        }
    }
    return true;
}

/* In the child: it keeps its own ends only. */
static void become_rank(const job *j, int rank, const char *name)
{
    char links[512], number[16];
    int length = snprintf(links, sizeof links, "%d %d %d", rank, j->n_ranks, j->shared_fd);

    for (int i = 0; i < j->n_ranks; i++)
        length +=
            snprintf(links + length, sizeof links - (size_t)length, " %d", j->sockets[rank][i]);
    for (int a = 0; a < j->n_ranks; a++)
        for (int b = 0; a != rank && b < j->n_ranks; b++)
            if (a != b) close(j->sockets[a][b]);
    snprintf(number, sizeof number, "%d", rank);
    setenv("BALLAST_TEST_RANK", number, 1);
    setenv("BALLAST_TEST_LINKS", links, 1);
    execl("/proc/self/exe", "socket_ranks", name, NULL);
    _exit(126);
}

static bool start_all(job *j, const char *name)
{
    fflush(NULL);
    for (int rank = 0; rank < j->n_ranks; rank++) {
        j->pids[rank] = fork();
        if (j->pids[rank] == 0) become_rank(j, rank, name);
        if (j->pids[rank] < 0) return false;
    }
    for (int a = 0; a < j->n_ranks; a++)
        for (int b = 0; b < j->n_ranks; b++)
            if (a != b) close(j->sockets[a][b]);
    return true;
}

/* The code of the first that ended with one that is not 0; a rank that was killed has none. */
static int wait_for_all(job *j)
{
    const struct timespec pause = {0, 1000 * 1000};
    double kill_at_s = 0;
    int code = 0, n_left = j->n_ranks;

    while (n_left > 0) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid > 0) {
            n_left--;
            for (int i = 0; i < j->n_ranks; i++)
                if (j->pids[i] == pid) j->pids[i] = 0;
            if (WIFEXITED(status) && code == 0) code = WEXITSTATUS(status);
            if (status != 0 && kill_at_s == 0) kill_at_s = bl_now_s() + PATIENCE_S;
        } else {
            nanosleep(&pause, NULL);
        }
        if (kill_at_s == 0 || bl_now_s() < kill_at_s) continue;
        for (int i = 0; i < j->n_ranks; i++)
            if (j->pids[i] > 0) kill(j->pids[i], SIGKILL);
    }
    return code;
}

int main(int argc, char **argv)
{
    const char *links = getenv("BALLAST_TEST_LINKS");
    job j = {.shared_fd = -1};

    if (links && argc == 2) return be_rank(argv[1], links);
    if (argc != 4 || (j.n_ranks = atoi(argv[1])) < 1 || j.n_ranks > MAX_RANKS) {
        fputs("run it as: socket_ranks N CASE shared|unix|tcp\n", stderr);
        return 2;
    }
    if (strcmp(argv[3], "shared") == 0) j.shared_fd = memfd_create("ranks", 0);
    if (!connect_all(&j, strcmp(argv[3], "tcp") == 0) || !start_all(&j, argv[2])) {
        perror("socket_ranks");
        return 4;
    }
    return wait_for_all(&j);
}
