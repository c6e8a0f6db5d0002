/* SPDX-License-Identifier: Apache-2.0 */
/* The wire under failures: bytes that change in transit, and a thread that hangs.
 * The linker replaces comm_peer_begin_send by __wrap_comm_peer_begin_send. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sizes.h"
#include "comm/wire/peer.h"

/* ---- a bit that changes ---- */

enum { N = 40000 }; /* floats: a sum goes in chunks, and in several frames */

typedef struct end {
    int rank, fd;
    double deadline_s;
    bool is_right; /* of the sums that it got */
    bl_error error;
} end;

static void report_nothing(const bl_error *error)
{
    (void)error;
}

static bl_status sum_values(bl_comm *comm, bl_stream *stream, bool *is_right)
{
    static _Thread_local float values[N];

    *is_right = true;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N; i++) values[i] = (float)(bl_comm_rank(comm) + i % 7);
        BL_TRY(bl_comm_all_reduce_f32(comm, stream, values, N));
        BL_TRY(bl_stream_synchronize(stream));
        for (int i = 0; i < N; i++) *is_right &= values[i] == (float)(1 + 2 * (i % 7));
    }
    return BL_OK;
}

static void *run_rank(void *argument)
{
    end *e = argument;
    int sockets[2] = {-1, -1};
    bl_wire_links links = {
        .rank = e->rank, .n_processes = 2, .sockets = sockets, .n_on_host = 2, .shared_fd = -1};
    bl_wire *wire = NULL;
    bl_comm *comm = NULL;
    bl_device *device = NULL;
    bl_stream *stream = NULL;

    sockets[1 - e->rank] = e->fd;
    bl_status st = bl_wire_open_sockets(&links, report_nothing, &wire);
    if (st == BL_OK) {
        bl_wire_set_deadline(wire, e->deadline_s);
        st = bl_comm_create_wire(wire, &comm);
    }
    if (st == BL_OK) st = bl_device_create_cpu(1, &device);
    if (st == BL_OK) st = bl_stream_create(device, "test", &stream);
    if (st == BL_OK) st = sum_values(comm, stream, &e->is_right);
    bl_error_save(&e->error, st);
    if (wire && st != BL_OK) bl_wire_abort(wire, &e->error);
    bl_stream_destroy(stream);
    bl_device_destroy(device);
    bl_comm_destroy(comm);
    if (wire) (void)bl_wire_close(wire);
    return NULL;
}

typedef struct relay {
    int fds[2];
    int64_t damaged; /* which byte of what fds[0] says; -1: none */
    int bit;
    int64_t n_bytes; /* of fds[0] */
} relay;

static void *run_relay(void *argument)
{
    relay *r = argument;
    struct pollfd p[2] = {{.fd = r->fds[0], .events = POLLIN}, {.fd = r->fds[1], .events = POLLIN}};
    unsigned char bytes[16384];

    while (p[0].fd >= 0 || p[1].fd >= 0) {
        if (poll(p, 2, -1) < 0) continue;
        for (int i = 0; i < 2; i++) {
            if (!p[i].revents) continue;
            ssize_t n = recv(p[i].fd, bytes, sizeof bytes, 0);
            if (n <= 0) {
                shutdown(r->fds[1 - i], SHUT_WR);
                p[i].fd = -1;
                continue;
            }
            if (i == 0 && r->damaged >= r->n_bytes && r->damaged < r->n_bytes + n)
                bytes[r->damaged - r->n_bytes] ^= (unsigned char)(1 << r->bit);
            if (i == 0) r->n_bytes += n;
            (void)!send(r->fds[1 - i], bytes, (size_t)n, MSG_NOSIGNAL);
        }
    }
    close(r->fds[0]);
    close(r->fds[1]);
    return NULL;
}

/* Two ranks, and between them a relay that changes one bit of rank 0's bytes. Returns the number of
 * those bytes. */
static int64_t run_damaged(int64_t damaged, int bit, end ends[2])
{
    relay between = {.damaged = damaged, .bit = bit};
    pthread_t threads[3];

    for (int i = 0; i < 2; i++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        ends[i] = (end){.rank = i, .fd = pair[0], .deadline_s = 60};
        between.fds[i] = pair[1];
    }
    assert_int_equal(pthread_create(&threads[2], NULL, run_relay, &between), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ends[i]), 0);
    for (int i = 0; i < 3; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    return between.n_bytes;
}

/* Wherever it is: in a head, in a message, in bulk data. No rank gets a wrong sum; both end with 7,
 * and the text names the sender. */
static void test_damaged_bytes(void **state)
{
    enum { N_TRIED = 48, N_HEADS = 24 };
    end ends[2];

    (void)state;
    int64_t n_bytes = run_damaged(-1, 0, ends);
    assert_int_equal(ends[0].error.status, BL_OK);
    assert_int_equal(ends[1].error.status, BL_OK);
    assert_true(ends[0].is_right && ends[1].is_right);
    assert_true(n_bytes > (int64_t)(N * sizeof(float)));
    int64_t n_first = n_bytes - 64; /* those of the end are after the sums */
    for (int i = 0; i < N_TRIED; i++) {
        int64_t at = i < N_HEADS ? i * 5 : (int64_t)(i - N_HEADS) * (n_first / (N_TRIED - N_HEADS));
        run_damaged(at, i % 8, ends);
        if (!ends[1].is_right || !ends[0].is_right ||
            bl_status_exit_code(ends[1].error.status) != 7 ||
            !strstr(ends[1].error.text, "what rank 0 sent was damaged on its way"))
            fail_msg("byte %lld of %lld, bit %d: right %d %d, status %d, %s", (long long)at,
                     (long long)n_bytes, i % 8, ends[0].is_right, ends[1].is_right,
                     ends[1].error.status, ends[1].error.text);
    }
}

/* ---- a thread that hangs ---- */

static bool hangs;

bl_status __real_comm_peer_begin_send(comm_peer *peer, comm_piece *piece);
bl_status __wrap_comm_peer_begin_send(comm_peer *peer, comm_piece *piece);
bl_status __wrap_comm_peer_begin_send(comm_peer *peer, comm_piece *piece)
{
    if (hangs) pause(); /* no signal comes */
    return __real_comm_peer_begin_send(peer, piece);
}

static void report_to_stdout(const bl_error *error)
{
    puts(error->text);
    fflush(stdout);
}

static void leave(bl_status st)
{
    _exit(bl_status_exit_code(st));
}

static void be_rank_that_hangs(void)
{
    bl_comm_call call = {.kind = BL_COMM_BARRIER};
    bl_transfer transfer = {.peer = 1, .is_send = true, .bytes = &call, .n_bytes = 1};
    const int ranks[] = {0, 1};
    int pair[2], sockets[2] = {-1, -1};
    bl_wire_links links = {.n_processes = 2, .sockets = sockets, .n_on_host = 2, .shared_fd = -1};
    bl_wire_channel *channel;
    bl_wire *wire;

    hangs = true;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) _exit(126);
    sockets[1] = pair[0];
    if (bl_wire_open_sockets(&links, report_to_stdout, &wire) != BL_OK) _exit(126);
    bl_wire_set_leave(wire, leave);
    bl_wire_set_deadline(wire, 0.5);
    if (bl_wire_channel_create(wire, 1, 0, 2, ranks, &channel) != BL_OK) _exit(126);
    (void)bl_wire_channel_exchange(channel, &call, true, &transfer, 1);
    _exit(125);
}

/* The deadline is not kept by the thread that hangs. */
static void test_thread_hangs(void **state)
{
    char text[256] = "";
    int ends[2], status;

    (void)state;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(ends[1], STDOUT_FILENO);
        be_rank_that_hangs();
    }
    close(ends[1]);
    assert_true(read(ends[0], text, sizeof text - 1) > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 7);
    assert_non_null(strstr(text, "rank 0: the thread that talks to the others has hung"));
    close(ends[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_damaged_bytes),
                                       cmocka_unit_test(test_thread_hangs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
