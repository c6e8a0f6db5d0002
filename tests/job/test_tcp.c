/* SPDX-License-Identifier: Apache-2.0 */
/* Connections between places: with foreign processes that connect; with unreachable addresses;
 * without descriptors. */
#include "tcp_case.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

static const job_key key = {"a key"};

/* ---- the mesh ---- */

typedef struct mesh_case {
    int own;
    const job_listener *listener;
    double limit_s;
    job_place places[2];
} mesh_case;

static mesh_case make_mesh(int own, uint16_t port, double limit_s)
{
    mesh_case c = {.own = own, .limit_s = limit_s};
    for (int i = 0; i < 2; i++)
        c.places[i] = (job_place){.host = "here",
                                  .first_rank = i,
                                  .n_ranks = 1,
                                  .port = port,
                                  .n_addresses = 1,
                                  .addresses = {tcp_here}};
    return c;
}

static bl_status connect_mesh(const mesh_case *c)
{
    job_mesh mesh = {.key = &key,
                     .places = c->places,
                     .n_places = 2,
                     .own = c->own,
                     .listener = c->listener,
                     .limit_s = c->limit_s};
    job_host_links links;

    bl_status st = job_host_links_create(2, c->own, 1, &links);
    if (st == BL_OK) st = job_mesh_connect(&mesh, &links);
    job_host_links_close(&links);
    return st;
}

static int run_mesh(const void *argument)
{
    return connect_mesh(argument) == BL_OK ? 0 : 1;
}

/* Many that say nothing, or half a greeting, come before the peer and stay: it need not wait for
 * each of them. */
static void test_silent_strangers(void **state)
{
    enum { N_STRANGERS = 400 };
    int strangers[N_STRANGERS];

    (void)state;
    job_listener l = tcp_listen_here();
    for (int i = 0; i < N_STRANGERS; i++) {
        strangers[i] = tcp_connect(l.port);
        if (i % 2) (void)!write(strangers[i], "ballast4", 8);
    }
    mesh_case zero = make_mesh(0, l.port, 60.0), one = make_mesh(1, l.port, 60.0);
    zero.listener = &l;
    pid_t pid = tcp_start(run_mesh, &one);
    assert_int_equal(connect_mesh(&zero), BL_OK);
    assert_int_equal(tcp_wait_for(pid), 0);
    for (int i = 0; i < N_STRANGERS; i++) close(strangers[i]);
    job_tcp_close_listener(&l);
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
    job_listener l = {.fds = {listen_fd}, .n = 1, .port = port};
    zero.listener = &l;
    one.places[0].n_addresses = N_SILENT + 1;
    for (int i = 0; i < N_SILENT; i++) {
        silent[i] = listen_in_silence(2 + i, port, &waiting[i]);
        one.places[0].addresses[i] = (job_address){.bytes = {127, 0, 0, (uint8_t)(2 + i)}};
    }
    one.places[0].addresses[N_SILENT] = tcp_here;
    pid_t pid = tcp_start(run_mesh, &one);
    assert_int_equal(connect_mesh(&zero), BL_OK);
    assert_int_equal(tcp_wait_for(pid), 0);
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

static bool expect_all(void *user, int from, int to)
{
    (void)user, (void)from, (void)to;
    return true;
}

/* A guest that says nothing is a state like any other; more guests than places are none. */
static void test_broken_reception_is_found(void **state)
{
    (void)state;
    job_listener l = tcp_listen_here();
    job_reception r = {.listener = &l, .key = &key, .n_ranks = 2, .expects = expect_all};
    int peer = tcp_connect(l.port);
    assert_int_equal(job_reception_open(&r), BL_OK);
    while (r.n_guests == 0) assert_int_equal(job_reception_wait(&r, bl_now_s() + 0.01), BL_OK);
    assert_int_equal(job_reception_validate(&r), BL_OK);
    r.n_guests = JOB_GUESTS + 1;
    assert_int_equal(job_reception_validate(&r), BL_EINTERNAL);
    r.n_guests = 1;
    job_reception_close(&r);
    close(peer);
    job_tcp_close_listener(&l);
}

static void test_accept_without_descriptors(void **state)
{
    (void)state;
    job_listener l = tcp_listen_here();
    job_reception r = {.listener = &l, .key = &key, .n_ranks = 2, .expects = expect_all};
    int peer = tcp_connect(l.port);
    assert_int_equal(job_reception_open(&r), BL_OK);
    struct rlimit before = limit_descriptors();
    bl_status st = job_reception_wait(&r, tcp_soon());
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(st, BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), strerror(EMFILE)));
    job_reception_close(&r);
    close(tcp_accept(&l)); /* it waited */
    close(peer);
    job_tcp_close_listener(&l);
}

/* Not after limit_s: no peer is missing. */
static void test_connect_without_descriptors(void **state)
{
    job_host_links links;

    (void)state;
    job_listener l = tcp_listen_here();
    mesh_case one = make_mesh(1, l.port, 1e6);
    job_mesh mesh = {
        .key = &key, .places = one.places, .n_places = 2, .own = 1, .limit_s = one.limit_s};
    assert_int_equal(job_host_links_create(2, 1, 1, &links), BL_OK); /* raises the limit */
    struct rlimit before = limit_descriptors();
    bl_status st = job_mesh_connect(&mesh, &links);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(st, BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), strerror(EMFILE)));
    job_host_links_close(&links);
    job_tcp_close_listener(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_silent_strangers),
                                       cmocka_unit_test(test_silent_addresses),
                                       cmocka_unit_test(test_broken_reception_is_found),
                                       cmocka_unit_test(test_accept_without_descriptors),
                                       cmocka_unit_test(test_connect_without_descriptors)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
