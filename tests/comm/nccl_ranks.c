/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_ranks.c -- starts this test program as ranks with a GPU each, plans kills and stops, and
 * checks how they end. */
#include "nccl_ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/wire.h"

enum { FIRST_FD = 100, BOARD_FD = FIRST_FD + NCCL_RANKS_MAX, SHARED_FD, HOST_FD };
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
enum { HANG_S = 300 };
#else
enum { HANG_S = 120 };
#endif

static void nap_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* ---- the test ---- */

static int connect_all(int sockets[NCCL_RANKS_MAX][NCCL_RANKS_MAX], int n)
{
    for (int a = 0; a < n; a++)
        for (int b = 0; b < a; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return -1;
            sockets[a][b] = pair[0];
            sockets[b][a] = pair[1];
        }
    return 0;
}

static _Noreturn void become_rank(const char *name, int rank, int n, const int *sockets,
                                  const int fds[4], const char *const *settings)
{
    char rank_text[16], n_text[16], parent[16];
    snprintf(rank_text, sizeof rank_text, "%d", rank);
    snprintf(n_text, sizeof n_text, "%d", n);
    snprintf(parent, sizeof parent, "%d", (int)getppid());
    setenv("BALLAST_EMULATED_DEVICES", "8", 1);
    for (; settings && *settings; settings++) putenv((char *)(uintptr_t)*settings);
    for (int i = 0; i < n; i++)
        if (i != rank) dup2(sockets[i], FIRST_FD + i);
    dup2(fds[0], BOARD_FD);
    dup2(fds[1], SHARED_FD);
    dup2(fds[2], HOST_FD);
    dup2(fds[3], STDERR_FILENO);
    execl("/proc/self/exe", "nccl_rank", name, rank_text, n_text, parent, (char *)NULL);
    _exit(126);
}

/* "BALLAST_EMULATED_FAULT=1:20:kill" */
static void note_planned_kill(nccl_job *job, const char *const *settings)
{
    int rank;
    for (; settings && *settings; settings++)
        if (strstr(*settings, ":kill") &&
            sscanf(*settings, "BALLAST_EMULATED_FAULT=%d:", &rank) == 1)
            job->is_killed[rank] = true;
}

void nccl_start(nccl_job *job, const char *name, int n_ranks, const char *const *settings)
{
    int sockets[NCCL_RANKS_MAX][NCCL_RANKS_MAX] = {{0}};
    int board_fd = memfd_create("board", MFD_CLOEXEC),
        shared_fd = memfd_create("bulk", MFD_CLOEXEC), host_fd = memfd_create("host", MFD_CLOEXEC);

    memset(job, 0, sizeof *job);
    job->n_ranks = n_ranks;
    note_planned_kill(job, settings);
    assert_true(board_fd >= 0 && shared_fd >= 0 && host_fd >= 0);
    assert_int_equal(ftruncate(board_fd, sizeof *job->board), 0);
    job->board = mmap(NULL, sizeof *job->board, PROT_READ | PROT_WRITE, MAP_SHARED, board_fd, 0);
    assert_ptr_not_equal(job->board, MAP_FAILED);
    assert_int_equal(connect_all(sockets, n_ranks), 0);
    fflush(NULL);
    for (int rank = 0; rank < n_ranks; rank++) {
        job->text_fds[rank] = memfd_create("stderr", MFD_CLOEXEC);
        assert_true(job->text_fds[rank] >= 0);
        int fds[4] = {board_fd, shared_fd, host_fd, job->text_fds[rank]};
        job->pids[rank] = fork();
        assert_true(job->pids[rank] >= 0);
        if (job->pids[rank] == 0) become_rank(name, rank, n_ranks, sockets[rank], fds, settings);
    }
    for (int a = 0; a < n_ranks; a++)
        for (int b = 0; b < n_ranks; b++)
            if (a != b) close(sockets[a][b]);
    close(board_fd);
    close(shared_fd);
    close(host_fd);
}

/* A rank that was stopped takes no alarm. */
static void wait_for(nccl_job *job, int rank)
{
    double end_s = bl_now_s() + 2 * HANG_S;
    int status;
    pid_t ended;

    if (job->is_over[rank]) return;
    while ((ended = waitpid(job->pids[rank], &status, WNOHANG)) == 0) {
        if (bl_now_s() > end_s) kill(job->pids[rank], SIGKILL);
        nap_ms(1);
    }
    assert_int_equal(ended, job->pids[rank]);
    job->is_over[rank] = true;
    job->codes[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    (void)!pread(job->text_fds[rank], job->text[rank], NCCL_TEXT_BYTES - 1, 0);
    close(job->text_fds[rank]);
}

void nccl_wait_but(nccl_job *job, int rank)
{
    for (int i = 0; i < job->n_ranks; i++)
        if (i != rank) wait_for(job, i);
}

void nccl_wait(nccl_job *job)
{
    nccl_wait_but(job, -1);
}

void nccl_await(const nccl_job *job, int mark, int n)
{
    double end_s = bl_now_s() + HANG_S;
    while (atomic_load(&job->board->marks[mark]) < n) {
        if (bl_now_s() > end_s) fail_msg("mark %d was not made %d times", mark, n);
        nap_ms(1);
    }
}

void nccl_await_failure(const nccl_job *job, int rank)
{
    double end_s = bl_now_s() + HANG_S;
    while (atomic_load(&job->board->failed_s[rank]) == 0) {
        if (bl_now_s() > end_s) fail_msg("rank %d did not fail", rank);
        nap_ms(1);
    }
}

void nccl_assert_fine(const nccl_job *job)
{
    for (int rank = 0; rank < job->n_ranks; rank++)
        if (job->codes[rank] != 0)
            fail_msg("rank %d ended with %d: %s", rank, job->codes[rank], job->text[rank]);
}

void nccl_kill(nccl_job *job, int rank)
{
    job->is_killed[rank] = true;
    kill(job->pids[rank], SIGKILL);
}

static void count_lines(const char *at, const char *text, int *n_lines, int *n_right)
{
    static const char ERROR[] = "ballast: error: ";

    for (; (at = strstr(at, ERROR)); at++) {
        ++*n_lines;
        const char *found = strstr(at, text), *end = strchr(at, '\n');
        *n_right += found && (!end || found < end);
    }
}

bool nccl_has_failed(const nccl_job *job, int code, const char *text)
{
    int n_lines = 0, n_right = 0, n_odd = 0;

    for (int rank = 0; rank < job->n_ranks; rank++) {
        n_odd +=
            job->codes[rank] != code && !(job->is_killed[rank] && job->codes[rank] == -SIGKILL);
        count_lines(job->text[rank], text, &n_lines, &n_right);
    }
    if (n_odd == 0 && n_lines == 1 && n_right == 1) return true;
    print_error("%d lines of error, %d of them with: %s; not ended with %d: %d ranks\n", n_lines,
                n_right, text, code, n_odd);
    for (int rank = 0; rank < job->n_ranks; rank++)
        print_error("%d ended with %d: %s\n", rank, job->codes[rank], job->text[rank]);
    return false;
}

/* ---- a rank ---- */

void nccl_mark(const nccl_self *self, int mark)
{
    atomic_fetch_add(&self->board->marks[mark], 1);
}

void nccl_await_mark(const nccl_self *self, int mark, int n)
{
    while (atomic_load(&self->board->marks[mark]) < n) nap_ms(1);
}

static void report(const bl_error *error)
{
    bl_log_error(error->text);
    bl_log_set_silent(true);
}

/* As the program leaves (launch.h): the job is informed, the process ends with its code; the rank
 * may still use the wire. */
static void leave(void *user)
{
    bl_wire *wire = user;
    _exit(bl_status_exit_code(bl_wire_end(wire)));
}

/* BALLAST_TEST_ON_HOST=N: rank r is on simulated host r / N, with BALLAST_TEST_ROUND on host r % N.
 * Hosts have the same name. The boot id of host h > 0 is in the file that BALLAST_TEST_BOOT_ID
 * names, with .h appended to its name. */
static bl_status move_to_other_host(const nccl_self *self)
{
    const char *prefix = getenv("BALLAST_TEST_BOOT_ID"), *text = getenv("BALLAST_TEST_ON_HOST");
    char file[128];
    int n = text ? atoi(text) : self->n_ranks;
    int host = getenv("BALLAST_TEST_ROUND") ? self->rank % n : self->rank / n;

    if (!prefix || !text || host == 0) return BL_OK;
    snprintf(file, sizeof file, "%s.%d", prefix, host);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount(file, "/proc/sys/kernel/random/boot_id", NULL, MS_BIND, NULL) != 0)
        return bl_fail_errno(BL_EIO, "%s", file);
    return BL_OK;
}

static bl_status open_and_run(nccl_self *self, const nccl_case *which, bl_wire *wire)
{
    BL_TRY(move_to_other_host(self));
    BL_TRY(bl_host_memory_open(HOST_FD, self->host, &self->host_memory));
    bl_nccl_options options = {.name = "test",
                               .host_memory = self->host_memory,
                               .deadline_s = which->deadline_s,
                               .copy_engines = which->copy_engines,
                               .gathers_by_hosts = getenv("BALLAST_TEST_BY_HOSTS") != NULL,
                               .compares_calls =
                                   !which->trusts_order && which->first_deadline_s <= 0,
                               .sum_bytes = which->sum_bytes,
                               .leave = leave,
                               .leave_user = wire};
    const char *n_gpus = getenv("BALLAST_TEST_GPUS"); /* further ranks have the last one */
    BL_TRY(bl_device_create_cuda(
        n_gpus && atoi(n_gpus) <= self->rank ? atoi(n_gpus) - 1 : self->rank, &self->device));
    BL_TRY(bl_stream_create(self->device, "test", &self->stream));
    BL_TRY(bl_comm_create_nccl(self->host, self->device, &options, &self->comm));
    if (which->first_deadline_s > 0) bl_nccl_limit_deadline(self->comm, which->first_deadline_s);
    if (which->trusts_order) BL_TRY(bl_comm_trust_order(self->comm));
    BL_TRY(which->body(self));
    return bl_stream_synchronize(self->stream);
}

/* In the order in which a training ends: first informs the job, then waits for streams. */
static bl_status run_case(nccl_self *self, const nccl_case *which, bl_wire *wire)
{
    bl_error error;

    bl_status st = open_and_run(self, which, wire);
    bl_error_save(&error, st);
    if (st != BL_OK) atomic_store(&self->board->failed_s[self->rank], bl_now_s());
    if (st != BL_OK) bl_comm_abort(self->host, &error);
    bl_stream_destroy(self->stream);
    bl_comm_destroy(self->comm);
    bl_device_destroy(self->device);
    bl_host_memory_close(self->host_memory);
    bl_comm_destroy(self->host);
    return bl_error_restore(&error);
}

static bl_status run_rank(nccl_self *self, const nccl_case *which)
{
    int sockets[NCCL_RANKS_MAX];
    bl_wire_links links = {.rank = self->rank,
                           .n_processes = self->n_ranks,
                           .sockets = sockets,
                           .n_on_host = self->n_ranks,
                           .shared_fd = SHARED_FD};
    bl_wire *wire;
    bl_error error;

    if (!which->name) return BL_FAIL(BL_EUSAGE, "no such case");
    for (int i = 0; i < self->n_ranks; i++) sockets[i] = i == self->rank ? -1 : FIRST_FD + i;
    if (self->rank > 0) bl_log_set_silent(true);
    BL_TRY(bl_wire_open_sockets(&links, report, &wire));
    bl_wire_set_deadline(wire, which->deadline_s);
    bl_status st = bl_comm_create_wire(wire, &self->host);
    if (st == BL_OK) st = run_case(self, which, wire);
    bl_error_save(&error, st);
    if (st != BL_OK) bl_wire_abort(wire, &error);
    bl_status verdict = bl_wire_close(wire);
    return verdict != BL_OK ? verdict : st;
}

void nccl_become(int argc, char **argv, const nccl_case *cases)
{
    if (argc != 5 || strcmp(argv[0], "nccl_rank") != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != atoi(argv[4])) _exit(1);
    alarm(HANG_S);
    nccl_self self = {.rank = atoi(argv[2]), .n_ranks = atoi(argv[3])};
    self.board = mmap(NULL, sizeof *self.board, PROT_READ | PROT_WRITE, MAP_SHARED, BOARD_FD, 0);
    if (self.board == MAP_FAILED) _exit(1);
    while (cases->name && strcmp(cases->name, argv[1]) != 0) cases++;
    exit(bl_status_exit_code(run_rank(&self, cases)));
}
