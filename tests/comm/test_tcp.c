/* SPDX-License-Identifier: Apache-2.0 */
/* Connections with strangers among those who connect, or who answer; and without descriptors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "comm/tcp/tcp.h"

static const comm_address here = {.bytes = {127, 0, 0, 1}};
static const uint8_t token[COMM_TOKEN_BYTES] = "a token";

static double soon(void) /* for what must come: a slow machine has time */
{
    return bl_now_s() + 120;
}

static int listen_at(uint16_t *port)
{
    int fd;
    *port = 0;
    assert_int_equal(comm_tcp_listen(port, &fd), BL_OK);
    return fd;
}

static int accept_one(int listen_fd)
{
    int fd;
    assert_int_equal(comm_tcp_accept(listen_fd, soon(), &fd), BL_OK);
    assert_true(fd >= 0);
    return fd;
}

static int connect_to(uint16_t port)
{
    int fd = comm_tcp_connect(&here, port, soon());
    assert_true(fd >= 0);
    return fd;
}

/* A process of its own, which ends with this one. */
static pid_t start(int (*run)(const void *), const void *argument)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(run(argument));
}

static int wait_for(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Without taking its exit code. */
static bool has_ended(pid_t pid)
{
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

/* ---- torchrun's ranks ---- */

enum { CODE_FAILED = 1, CODE_SILENT, CODE_PORT_IN_USE };

typedef struct rank_case {
    int rank;
    uint16_t port; /* where it looks for rank 0, or listens as rank 0 */
} rank_case;

/* One of two ranks, which then send each other their number. */
static int run_rank(const void *argument)
{
    const rank_case *c = argument;
    bl_launch_info info = {
        .kind = BL_LAUNCH_TORCHRUN, .launcher = "torchrun", .rank = c->rank, .n_processes = 2};
    int sockets[2], other = -1;
    char port[16];

    snprintf(port, sizeof port, "%d", c->port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("BALLAST_PORT", port, 1);
    unsetenv("BALLAST_INTERFACE");
    if (comm_torchrun_meet(&info, sockets) != BL_OK) {
        if (strstr(bl_error_text(), strerror(EADDRINUSE))) return CODE_PORT_IN_USE;
        fprintf(stderr, "rank %d: %s\n", c->rank, bl_error_text());
        return CODE_FAILED;
    }
    int fd = sockets[1 - c->rank];
    return comm_tcp_send(fd, &c->rank, sizeof c->rank, soon()) &&
                   comm_tcp_receive(fd, &other, sizeof other, soon()) && other == 1 - c->rank
               ? 0
               : CODE_SILENT;
}

enum { MAX_BYTES = 4096, N_PLACES = 2, PLACES_BYTES = N_PLACES * (int)sizeof(comm_place) };

typedef struct words {
    int n;
    uint8_t bytes[MAX_BYTES];
} words;

/* What a rank says first: it ends with its place. */
static int take_arrival(int listen_fd, words *out)
{
    int fd = accept_one(listen_fd);
    ssize_t n = recv(fd, out->bytes, sizeof out->bytes, 0);
    assert_in_range(n, sizeof(comm_place), MAX_BYTES - 1);
    out->n = (int)n;
    return fd;
}

/* All that comes on fd, up to the end; a stranger may be silent for ever: not longer than rank 0 lives. */
static void hear(int fd, pid_t rank_0, double end_s, words *answer)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    ssize_t n = 1;

    answer->n = 0;
    while (n > 0 && bl_now_s() < end_s) {
        if (poll(&p, 1, 100) == 0) {
            if (has_ended(rank_0)) break;
            continue;
        }
        n = recv(fd, answer->bytes + answer->n, sizeof answer->bytes - (size_t)answer->n, 0);
        if (n > 0) answer->n += (int)n;
    }
}

/* Rank 0's answer to it. False: there is none, for rank 0 has ended. */
static bool ask_rank_0(pid_t rank_0, uint16_t port, const words *arrival, words *answer)
{
    double end_s = soon();

    while (bl_now_s() < end_s) {
        int fd = comm_tcp_connect(&here, port, end_s);
        if (fd >= 0) {
            if (comm_tcp_send(fd, arrival->bytes, (size_t)arrival->n, end_s))
                hear(fd, rank_0, end_s, answer);
            close(fd);
            if (answer->n > PLACES_BYTES) return true;
        }
        if (has_ended(rank_0)) return false;
        usleep(10000); /* it listens a little later */
    }
    fail_msg("rank 0 does not answer");
    return false;
}

/* Starts rank 0 and asks it. Until it listens, the port that was free may become another's. */
static pid_t start_rank_0(const words *arrival, words *answer)
{
    enum { MAX_TRIES = 10 };

    for (int n = 0; n < MAX_TRIES; n++) {
        rank_case zero = {.rank = 0};
        close(listen_at(&zero.port));
        pid_t pid = start(run_rank, &zero);
        if (ask_rank_0(pid, zero.port, arrival, answer)) return pid;
        assert_int_equal(wait_for(pid), CODE_PORT_IN_USE);
    }
    fail_msg("no port stayed free");
    return -1;
}

static void garble_magic(words *w, comm_place *places)
{
    (void)places;
    w->bytes[0] ^= 1;
}

static void garble_end(words *w, comm_place *places)
{
    (void)places;
    w->n--;
}

static void garble_host(words *w, comm_place *places)
{
    (void)w;
    memset(places[0].host, 'x', sizeof places[0].host);
}

static void garble_first_rank(words *w, comm_place *places)
{
    (void)w;
    places[1].first_rank = 1 << 30;
}

static void garble_n_ranks(words *w, comm_place *places)
{
    (void)w;
    places[0].n_ranks = 1 << 30;
}

static void garble_n_addresses(words *w, comm_place *places)
{
    (void)w;
    places[0].n_addresses = UINT16_MAX;
}

/* Between rank 1 and rank 0 is somebody who garbles rank 0's answer, each time in another place, and then no more. */
static void test_garbled_answer(void **state)
{
    static void (*const garble[])(words *, comm_place *) = {garble_magic,   garble_end,
                                                            garble_host,    garble_first_rank,
                                                            garble_n_ranks, garble_n_addresses};
    rank_case one = {.rank = 1};
    words arrival, answer = {0};
    comm_place places[N_PLACES];

    (void)state;
    int listen_fd = listen_at(&one.port);
    pid_t pid_1 = start(run_rank, &one);
    close(take_arrival(listen_fd, &arrival)); /* or rank 0 would inherit it; rank 1 comes again */
    pid_t pid_0 = start_rank_0(&arrival, &answer);
    for (size_t i = 0; i <= BL_COUNT(garble); i++) {
        int fd = take_arrival(listen_fd, &arrival);
        words now = answer;
        size_t n_before = (size_t)(answer.n - PLACES_BYTES);
        memcpy(places, now.bytes + n_before, sizeof places);
        if (i < BL_COUNT(garble)) garble[i](&now, places);
        memcpy(now.bytes + n_before, places, sizeof places);
        assert_true(comm_tcp_send(fd, now.bytes, (size_t)now.n, soon()));
        close(fd);
    }
    assert_int_equal(wait_for(pid_1), 0);
    assert_int_equal(wait_for(pid_0), 0);
    close(listen_fd);
}

/* Rank 0 was reached by an address of the host alone; what others need are the host's other ones. */
static void test_addresses_of_a_rank(void **state)
{
    rank_case one = {.rank = 1};
    words arrival;
    comm_place found = {0}, told;

    (void)state;
    unsetenv("BALLAST_INTERFACE");
    assert_int_equal(comm_place_find_addresses(&found), BL_OK);
    int listen_fd = listen_at(&one.port);
    pid_t pid = start(run_rank, &one);
    int fd = take_arrival(listen_fd, &arrival);
    memcpy(&told, arrival.bytes + arrival.n - sizeof told, sizeof told);
    assert_string_equal(told.host, found.host);
    assert_int_equal(told.n_addresses, found.n_addresses);
    assert_memory_equal(told.addresses, found.addresses,
                        found.n_addresses * sizeof found.addresses[0]);
    kill(pid, SIGKILL);
    wait_for(pid);
    close(fd);
    close(listen_fd);
}

/* ---- the mesh ---- */

typedef struct mesh_case {
    int own, listen_fd;
    double limit_s;
    comm_place places[2];
} mesh_case;

static mesh_case make_mesh(int own, uint16_t port, double limit_s)
{
    mesh_case c = {.own = own, .listen_fd = -1, .limit_s = limit_s};
    for (int i = 0; i < 2; i++)
        c.places[i] = (comm_place){.host = "here",
                                   .first_rank = i,
                                   .n_ranks = 1,
                                   .port = port,
                                   .n_addresses = 1,
                                   .addresses = {here}};
    return c;
}

static bl_status connect_mesh(const mesh_case *c)
{
    comm_mesh mesh = {.token = token,
                      .places = c->places,
                      .n_places = 2,
                      .own = c->own,
                      .listen_fd = c->listen_fd,
                      .limit_s = c->limit_s};
    comm_host_links links;

    bl_status st = comm_host_links_create(2, c->own, 1, &links);
    if (st == BL_OK) st = comm_mesh_connect(&mesh, &links);
    comm_host_links_close(&links);
    return st;
}

static int run_mesh(const void *argument)
{
    return connect_mesh(argument) == BL_OK ? 0 : 1;
}

/* Three that say nothing come before the peer, which waits long enough if each is heard out for half a second. */
static void test_silent_strangers(void **state)
{
    enum { N_STRANGERS = 3 };
    int strangers[N_STRANGERS];
    uint16_t port;

    (void)state;
    int listen_fd = listen_at(&port);
    for (int i = 0; i < N_STRANGERS; i++) strangers[i] = connect_to(port);
    mesh_case zero = make_mesh(0, port, 30.0), one = make_mesh(1, port, 14.0);
    zero.listen_fd = listen_fd;
    pid_t pid = start(run_mesh, &one);
    assert_int_equal(connect_mesh(&zero), BL_OK);
    assert_int_equal(wait_for(pid), 0);
    for (int i = 0; i < N_STRANGERS; i++) close(strangers[i]);
    close(listen_fd);
}

/* Listens on 127.0.0.`last` and answers no more: its queue of one is full. */
static int listen_in_silence(int last, uint16_t port, int *waiting)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + (uint32_t)last)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 0), 0);
    *waiting = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(*waiting, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

/* Interfaces that lead nowhere come before the one that leads to the host. */
static void test_silent_addresses(void **state)
{
    enum { N_SILENT = 4 };
    int silent[N_SILENT], waiting[N_SILENT];
    uint16_t port;

    (void)state;
    int listen_fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t own_bytes = sizeof own;
    assert_int_equal(bind(listen_fd, (struct sockaddr *)&own, sizeof own), 0); /* a free port */
    assert_int_equal(listen(listen_fd, 8), 0);
    assert_int_equal(getsockname(listen_fd, (struct sockaddr *)&own, &own_bytes), 0);
    port = ntohs(own.sin_port);
    mesh_case zero = make_mesh(0, port, 40.0), one = make_mesh(1, port, 18.0);
    zero.listen_fd = listen_fd;
    one.places[0].n_addresses = N_SILENT + 1;
    for (int i = 0; i < N_SILENT; i++) {
        silent[i] = listen_in_silence(2 + i, port, &waiting[i]);
        one.places[0].addresses[i] = (comm_address){.bytes = {127, 0, 0, (uint8_t)(2 + i)}};
    }
    one.places[0].addresses[N_SILENT] = here;
    pid_t pid = start(run_mesh, &one);
    assert_int_equal(connect_mesh(&zero), BL_OK);
    assert_int_equal(wait_for(pid), 0);
    for (int i = 0; i < N_SILENT; i++) {
        close(waiting[i]);
        close(silent[i]);
    }
    close(listen_fd);
}

/* ---- no more descriptors ---- */

static struct rlimit limit_descriptors(void)
{
    struct rlimit before, now;
    int next = dup(STDERR_FILENO);

    assert_true(next >= 0);
    close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    now = before;
    now.rlim_cur = (rlim_t)next;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &now), 0);
    return before;
}

static void test_accept_without_descriptors(void **state)
{
    uint16_t port;
    int fd;

    (void)state;
    int listen_fd = listen_at(&port), peer = connect_to(port);
    struct rlimit before = limit_descriptors();
    bl_status st = comm_tcp_accept(listen_fd, soon(), &fd);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(st, BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), strerror(EMFILE)));
    close(accept_one(listen_fd)); /* it waited */
    close(peer);
    close(listen_fd);
}

/* Not after limit_s: no peer is missing. */
static void test_connect_without_descriptors(void **state)
{
    comm_host_links links;
    uint16_t port;

    (void)state;
    int listen_fd = listen_at(&port);
    mesh_case one = make_mesh(1, port, 1e6);
    comm_mesh mesh = {.token = token,
                      .places = one.places,
                      .n_places = 2,
                      .own = 1,
                      .listen_fd = -1,
                      .limit_s = one.limit_s};
    assert_int_equal(comm_host_links_create(2, 1, 1, &links), BL_OK); /* raises the limit */
    struct rlimit before = limit_descriptors();
    bl_status st = comm_mesh_connect(&mesh, &links);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(st, BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), strerror(EMFILE)));
    comm_host_links_close(&links);
    close(listen_fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_garbled_answer),
                                       cmocka_unit_test(test_addresses_of_a_rank),
                                       cmocka_unit_test(test_silent_strangers),
                                       cmocka_unit_test(test_silent_addresses),
                                       cmocka_unit_test(test_accept_without_descriptors),
                                       cmocka_unit_test(test_connect_without_descriptors)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
