/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that meet at rank 0's port: foreign processes that connect, or relay and change messages;
 * the ranks' secret; their listening addresses; their logs. */
#include "tcp_case.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/build_id.h"
#include "base/files.h"
#include "base/sizes.h"

static uint16_t find_free_port(void)
{
    job_listener l = tcp_listen_here();
    job_tcp_close_listener(&l);
    return l.port;
}

/* Without taking its exit code. */
static bool has_ended(pid_t pid)
{
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

/* ---- ranks that meet ---- */

enum { CODE_FAILED = 1, CODE_SILENT, CODE_PORT_IN_USE };

typedef struct rank_case {
    int rank;
    uint16_t port; /* where it looks for rank 0, or listens as rank 0 */
    const char *secret, *dir;
    double limit_s;
    const char *interface;
    bool is_one_host;
    int n; /* ranks; 0: 2 */
} rank_case;

static const char SECRET[] = "a secret of the job";

/* What a rank writes to their memory, the other one reads there. */
static bool shares_memory(const bl_launch_info *info, const int *sockets)
{
    int fd, rank = info->rank, other = -1;

    if (job_bulk_share(info, sockets, &fd) != BL_OK || fd < 0 || ftruncate(fd, 4096) != 0)
        return false;
    int *words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (words == MAP_FAILED) return false;
    words[rank] = 40 + rank;
    return job_tcp_send(sockets[1 - rank], &rank, sizeof rank, tcp_soon()) &&
           job_tcp_receive(sockets[1 - rank], &other, sizeof other, tcp_soon()) &&
           words[1 - rank] == 41 - rank;
}

/* One of two ranks, which then send each other their number. */
static int run_rank(const void *argument)
{
    const rank_case *c = argument;
    enum { MAX_RANKS = 3 };
    bl_launch_info info = {
        .launcher = "torchrun", .rank = c->rank, .n_processes = c->n ? c->n : 2, .n_local = 1};
    job_rendezvous rendezvous = {.info = &info,
                                 .address = "127.0.0.1",
                                 .port = c->port,
                                 .port_key = "the port",
                                 .job = 7,
                                 .secret = c->secret,
                                 .dir = c->dir,
                                 .limit_s = c->limit_s > 0 ? c->limit_s : 120};
    int sockets[MAX_RANKS], other = -1;

    if (c->is_one_host) info.n_local = 2, info.local_rank = c->rank;
    unsetenv("BALLAST_INTERFACE");
    if (c->interface) setenv("BALLAST_INTERFACE", c->interface, 1);
    if (job_rendezvous_connect(&rendezvous, sockets) != BL_OK) {
        if (strstr(bl_error_text(), strerror(EADDRINUSE))) return CODE_PORT_IN_USE;
        fprintf(stderr, "rank %d: %s\n", c->rank, bl_error_text());
        return CODE_FAILED;
    }
    if (c->n > 2) return 0;
    if (c->is_one_host && !shares_memory(&info, sockets)) return CODE_FAILED;
    int fd = sockets[1 - c->rank];
    return job_tcp_send(fd, &c->rank, sizeof c->rank, tcp_soon()) &&
                   job_tcp_receive(fd, &other, sizeof other, tcp_soon()) && other == 1 - c->rank
               ? 0
               : CODE_SILENT;
}

/* Starts rank 0, until it listens. Its port is free, but may become another's. */
static pid_t start_rank_0(rank_case *zero)
{
    enum { MAX_TRIES = 10 };

    for (int n = 0; n < MAX_TRIES; n++) {
        zero->port = find_free_port();
        pid_t pid = tcp_start(run_rank, zero);
        while (!has_ended(pid)) {
            int fd = job_tcp_connect(&tcp_here, zero->port, tcp_soon());
            if (fd >= 0) close(fd);
            if (fd >= 0 && !has_ended(pid)) return pid;
            usleep(10000);
        }
        assert_int_equal(tcp_wait_for(pid), CODE_PORT_IN_USE);
    }
    fail_msg("no port stayed free");
    return -1;
}

/* The bytes that went over a connection in each direction. */
typedef struct words {
    size_t n;
    uint8_t bytes[8192];
} words;

/* Forwards all bytes until one end closes. `garbled` >= 0: that byte of rank 0's is changed. */
static void relay(int rank_1, int rank_0, int64_t garbled, words *of_1)
{
    struct pollfd p[2] = {{.fd = rank_1, .events = POLLIN}, {.fd = rank_0, .events = POLLIN}};
    size_t n_of_0 = 0;

    of_1->n = 0;
    for (;;) {
        uint8_t bytes[4096];
        assert_true(poll(p, 2, 120000) > 0);
        int from = p[0].revents ? 0 : 1;
        ssize_t n = recv(p[from].fd, bytes, sizeof bytes, 0);
        if (n <= 0) return;
        if (from == 0) {
            assert_true(of_1->n + (size_t)n <= sizeof of_1->bytes);
            memcpy(of_1->bytes + of_1->n, bytes, (size_t)n);
            of_1->n += (size_t)n;
        } else {
            if (garbled >= (int64_t)n_of_0 && garbled < (int64_t)n_of_0 + n)
                bytes[garbled - (int64_t)n_of_0] ^= 1;
            n_of_0 += (size_t)n;
        }
        if (!job_tcp_send(p[1 - from].fd, bytes, (size_t)n, tcp_soon())) return;
    }
}

static void relay_once(const job_listener *middle, uint16_t port_0, int64_t garbled, words *of_1)
{
    int rank_1 = tcp_accept(middle), rank_0 = tcp_connect(port_0);
    relay(rank_1, rank_0, garbled, of_1);
    close(rank_1);
    close(rank_0);
}

enum { CHALLENGE_BYTES = sizeof(job_challenge), ANSWER_AT = CHALLENGE_BYTES };

/* Between rank 1 and rank 0 is a relay that changes a byte of rank 0's, each time another one, and
 * then none. */
static void test_garbled_words(void **state)
{
    static const int64_t garbled[] = {
        0,                                              /* magic */
        offsetof(job_challenge, nonce),                 /* random number */
        CHALLENGE_BYTES - 1,                            /* proof */
        ANSWER_AT,                                      /* proof of the answer */
        ANSWER_AT + JOB_MAC_BYTES,                      /* number of the key */
        ANSWER_AT + JOB_MAC_BYTES + JOB_KEY_BYTES + 80, /* rank 0's place */
        ANSWER_AT + JOB_MAC_BYTES + JOB_KEY_BYTES + (int)sizeof(job_place) + 80, /* rank 1's */
        -1};
    rank_case zero = {.rank = 0, .secret = SECRET}, one = {.rank = 1, .secret = SECRET};
    words of_1;

    (void)state;
    job_listener middle = tcp_listen_here();
    pid_t pid_0 = start_rank_0(&zero);
    one.port = middle.port;
    pid_t pid_1 = tcp_start(run_rank, &one);
    for (size_t i = 0; i < 3; i++) relay_once(&middle, zero.port, garbled[i], &of_1);
    /* From here on rank 0 has answered, and does not listen any more: all ranks have connected, and
     * a garbled answer ends the job. */
    relay_once(&middle, zero.port, -1, &of_1);
    assert_int_equal(tcp_wait_for(pid_1), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    for (size_t i = 3; garbled[i] >= 0; i++) {
        pid_0 = start_rank_0(&zero);
        one.limit_s = 1e-9; /* and LONGER_S */
        pid_1 = tcp_start(run_rank, &one);
        relay_once(&middle, zero.port, garbled[i], &of_1);
        int fd = tcp_accept(&middle); /* it was not taken: rank 1 comes again */
        close(fd);
        kill(pid_1, SIGKILL);
        kill(pid_0, SIGKILL);
        tcp_wait_for(pid_1);
        tcp_wait_for(pid_0);
    }
    job_tcp_close_listener(&middle);
}

/* All that comes on fd until the other end closes it. */
static size_t hear_all(int fd)
{
    uint8_t bytes[4096];
    size_t n_heard = 0;
    struct pollfd p = {.fd = fd, .events = POLLIN};

    for (;;) {
        assert_int_equal(poll(&p, 1, 120000), 1);
        ssize_t n = recv(fd, bytes, sizeof bytes, 0);
        if (n <= 0) return n_heard;
        n_heard += (size_t)n;
    }
}

/* A stranger that has heard all that rank 1 says, and says it again, hears a challenge and no
 * address; and rank 1 can still come. */
static void test_replay(void **state)
{
    rank_case zero = {.rank = 0, .secret = SECRET}, one = {.rank = 1, .secret = SECRET};
    words of_1;

    (void)state;
    job_listener middle = tcp_listen_here();
    pid_t pid_0 = start_rank_0(&zero);
    one.port = middle.port;
    pid_t pid_1 = tcp_start(run_rank, &one);
    int rank_1 = tcp_accept(&middle);
    job_challenge challenge = {.magic = "ballast4"};
    /* Rank 1 rejects a challenge from a process that does not know the secret: it never sends its
     * proof. */
    assert_true(job_tcp_receive(rank_1, of_1.bytes, sizeof(job_greeting), tcp_soon()));
    assert_true(job_tcp_send(rank_1, &challenge, sizeof challenge, tcp_soon()));
    assert_int_equal(hear_all(rank_1), 0);
    close(rank_1);
    /* In the middle of a true start: garbled at the end of the challenge, so that rank 1 goes; then
     * without. */
    relay_once(&middle, zero.port, -1, &of_1);
    assert_int_equal(tcp_wait_for(pid_1), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    assert_true(of_1.n > sizeof(job_greeting) + JOB_MAC_BYTES);

    pid_0 = start_rank_0(&zero);
    int stranger = tcp_connect(zero.port);
    assert_true(job_tcp_send(stranger, of_1.bytes, of_1.n, tcp_soon()));
    assert_int_equal(hear_all(stranger), CHALLENGE_BYTES);
    close(stranger);
    one.port = zero.port;
    pid_1 = tcp_start(run_rank, &one);
    assert_int_equal(tcp_wait_for(pid_1), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    job_tcp_close_listener(&middle);
}

/* stderr of the ranks that are started until read_log. */
static int open_log(int *before)
{
    int log = open("/tmp", O_TMPFILE | O_RDWR, 0600);

    *before = dup(STDERR_FILENO);
    assert_true(log >= 0 && *before >= 0 && dup2(log, STDERR_FILENO) >= 0);
    return log;
}

static void read_log(int log, int before, char *text, size_t n_bytes)
{
    dup2(before, STDERR_FILENO);
    close(before);
    memset(text, 0, n_bytes);
    assert_true(pread(log, text, n_bytes - 1, 0) > 0);
    close(log);
}

static void assert_has(const char *text, const char *wanted)
{
    if (!strstr(text, wanted)) fail_msg("no \"%s\" in\n%s", wanted, text);
}

/* Both name the reason, rank 1 within seconds. */
static void test_other_secret(void **state)
{
    rank_case zero = {.rank = 0, .secret = SECRET, .limit_s = 12}, one = {.rank = 1};
    char text[4096];
    int err, log = open_log(&err);

    (void)state;
    one.secret = "another secret of it";
    pid_t pid_0 = start_rank_0(&zero);
    one.port = zero.port;
    assert_int_equal(tcp_wait_for(tcp_start(run_rank, &one)), CODE_FAILED);
    assert_false(has_ended(pid_0));
    assert_int_equal(tcp_wait_for(pid_0), CODE_FAILED);
    read_log(log, err, text, sizeof text);
    assert_has(text, "rank 1 did not come to 127.0.0.1 port");
    assert_has(text, "did not know the job's secret");
    assert_has(text, "have different secrets");
    char *first =
        strstr(text, "turned away a process of 127.0.0.1 that claims to be rank 1: it does not");
    assert_non_null(first);
    assert_null(strstr(first + 1, "turned away")); /* once */
}

/* A process with another number of ranks ends at once; the job goes on without it. */
static void test_other_size(void **state)
{
    rank_case zero = {.rank = 0, .secret = SECRET}, one = {.rank = 1, .secret = SECRET},
              other = one;
    char text[4096];
    int err, log = open_log(&err);

    (void)state;
    pid_t pid_0 = start_rank_0(&zero);
    other.port = one.port = zero.port;
    other.n = 3;
    other.rank = 2; /* which this job has not */
    assert_int_equal(tcp_wait_for(tcp_start(run_rank, &other)), CODE_FAILED);
    pid_t pid_1 = tcp_start(run_rank, &one);
    assert_int_equal(tcp_wait_for(pid_1), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    read_log(log, err, text, sizeof text);
    assert_has(text, "claims to be rank 2: it has 3 ranks (WORLD_SIZE), this job has 2");
    assert_has(text, "rank 2 has 3 ranks and rank 0, at 127.0.0.1 port");
}

/* Of two processes of one rank the second one ends at once. */
static void test_rank_twice(void **state)
{
    rank_case zero = {.rank = 0, .secret = SECRET, .n = 3},
              one = {.rank = 1, .secret = SECRET, .n = 3},
              two = {.rank = 2, .secret = SECRET, .n = 3};
    char text[4096];
    pid_t pids[2];
    int err, log = open_log(&err);

    (void)state;
    pid_t pid_0 = start_rank_0(&zero);
    two.port = one.port = zero.port;
    for (int i = 0; i < 2; i++) pids[i] = tcp_start(run_rank, &one);
    while (!has_ended(pids[0]) && !has_ended(pids[1])) usleep(10000);
    int ended = has_ended(pids[0]) ? 0 : 1;
    assert_int_equal(tcp_wait_for(pids[ended]), CODE_FAILED);
    assert_int_equal(tcp_wait_for(tcp_start(run_rank, &two)), 0);
    assert_int_equal(tcp_wait_for(pids[1 - ended]), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    read_log(log, err, text, sizeof text);
    assert_has(text, "claims to be rank 1: another process has that rank (RANK)");
    assert_has(text, "another process is rank 1 for rank 0, at 127.0.0.1 port");
}

/* Greetings that are not this job's: of another job, and of another version. */
static void test_other_greetings(void **state)
{
    rank_case zero = {.rank = 0, .secret = SECRET}, one = {.rank = 1, .secret = SECRET};
    job_greeting greeting = {.magic = "ballast4", .job = 8, .n_ranks = 2, .from = 1};
    char text[4096];
    int err, log = open_log(&err);

    (void)state;
    pid_t pid_0 = start_rank_0(&zero);
    for (int i = 0; i < 2; i++) {
        int stranger = tcp_connect(zero.port);
        if (i) memcpy(greeting.magic, "ballast1", sizeof greeting.magic);
        assert_true(job_tcp_send(stranger, &greeting, sizeof greeting, tcp_soon()));
        assert_int_equal(hear_all(stranger), 0);
        close(stranger);
    }
    one.port = zero.port;
    assert_int_equal(tcp_wait_for(tcp_start(run_rank, &one)), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    read_log(log, err, text, sizeof text);
    assert_has(text, "it is of another job");
    assert_has(text, "it is another version of Ballast");
}

/* ---- the secret's file ---- */

static void find_secret_file(const char *dir, char *path, size_t path_bytes)
{
    char **names;
    size_t n;

    path[0] = '\0';
    assert_int_equal(bl_dir_list(dir, &names, &n), BL_OK);
    for (size_t i = 0; i < n; i++)
        if (strstr(names[i], ".ballast.secret")) snprintf(path, path_bytes, "%s/%s", dir, names[i]);
    bl_names_free(names, n);
}

static void test_secret_file(void **state)
{
    char dir[] = "/tmp/ballast-tcp-XXXXXX", path[256], *made;
    rank_case zero = {.rank = 0}, one = {.rank = 1};
    struct stat info;
    job_key written, seen;
    bool is_there;

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(job_secret_create(dir, 7, &made, &written), BL_OK);
    assert_int_equal(stat(made, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(job_secret_read(dir, 7, &seen, &is_there), BL_OK);
    assert_true(is_there);
    assert_memory_equal(&seen, &written, sizeof seen);
    assert_int_equal(job_secret_read(dir, 8, &seen, &is_there), BL_OK);
    assert_false(is_there);
    char *other;
    assert_int_equal(job_secret_create(made, 7, &other, &seen), BL_EUSAGE);
    assert_int_equal(chmod(made, 0640), 0);
    assert_int_equal(job_secret_read(dir, 7, &seen, &is_there), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), made));
    free(made);

    /* It is of a run that was killed; a new start replaces it, and removes its own. Rank 1 has read
     * the old one before. */
    assert_int_equal(job_secret_create(dir, 7, &made, &written), BL_OK);
    one.dir = zero.dir = dir;
    job_listener middle = tcp_listen_here();
    one.port = middle.port;
    pid_t pid_1 = tcp_start(run_rank, &one);
    int early = tcp_accept(&middle);
    pid_t pid_0 = start_rank_0(&zero);
    words of_1;
    int rank_0 = tcp_connect(zero.port);
    relay(early, rank_0, -1, &of_1);
    close(early);
    close(rank_0);
    relay_once(&middle, zero.port, -1, &of_1);
    assert_int_equal(tcp_wait_for(pid_1), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    find_secret_file(dir, path, sizeof path);
    assert_string_equal(path, "");
    free(made);
    job_tcp_close_listener(&middle);
    assert_int_equal(rmdir(dir), 0);
}

/* ---- where it listens ---- */

/* The addresses of /proc/net/tcp and tcp6 that listen at `port`; returns how many, and how many are
 * not loopback addresses. */
static int count_listening(uint16_t port, int *n_open)
{
    static const char *const files[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    int n = 0;

    *n_open = 0;
    for (size_t f = 0; f < BL_COUNT(files); f++) {
        FILE *file = fopen(files[f], "r");
        char line[512], address[64];
        unsigned found_port, state;
        while (file && fgets(line, sizeof line, file)) {
            if (sscanf(line, " %*d: %63[0-9A-F]:%x %*[0-9A-F]:%*x %x", address, &found_port,
                       &state) != 3 ||
                found_port != port || state != 0x0A)
                continue;
            bool is_loopback = strcmp(address, "0100007F") == 0 ||
                               strcmp(address, "00000000000000000000000001000000") == 0;
            n++;
            *n_open += !is_loopback;
        }
        if (file) fclose(file);
    }
    return n;
}

static void test_interface_is_bound(void **state)
{
    rank_case zero = {.rank = 0, .secret = SECRET, .interface = "lo"};
    job_place place;
    job_listener l;
    int n_open;
    bool is_chosen;

    (void)state;
    pid_t pid_0 = start_rank_0(&zero);
    assert_true(count_listening(zero.port, &n_open) > 0);
    assert_int_equal(n_open, 0);
    kill(pid_0, SIGKILL);
    tcp_wait_for(pid_0);

    /* A job of one host. */
    unsetenv("BALLAST_INTERFACE");
    assert_int_equal(job_place_describe(true, &place, &is_chosen), BL_OK);
    assert_int_equal(job_tcp_listen(place.addresses, place.n_addresses, 0, &l), BL_OK);
    assert_int_equal(count_listening(l.port, &n_open), 1);
    assert_int_equal(n_open, 0);
    job_tcp_close_listener(&l);
}

/* Without a name for rank 0, a secret and a directory. */
static void test_one_host(void **state)
{
    rank_case zero = {.rank = 0, .is_one_host = true}, one = {.rank = 1, .is_one_host = true};

    (void)state;
    pid_t pid_0 = start_rank_0(&zero);
    one.port = zero.port;
    pid_t pid_1 = tcp_start(run_rank, &one);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    assert_int_equal(tcp_wait_for(pid_1), 0);
}

static void test_builds(void **state)
{
    job_place places[2];
    bool is_chosen;

    (void)state;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(job_place_describe(true, &places[i], &is_chosen), BL_OK);
        places[i].first_rank = i;
    }
    assert_string_equal(places[0].build, bl_build_id());
    assert_int_equal(job_place_compare_builds(places, 2, 1, true), BL_OK);
    strcpy(places[1].build, "0123456789abcdef");
    assert_int_equal(job_place_compare_builds(places, 2, 1, true), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), bl_build_id()));
    assert_non_null(strstr(bl_error_text(), "0123456789abcdef"));
    setenv("BALLAST_ALLOW_BUILD_MISMATCH", "1", 1);
    assert_int_equal(job_place_compare_builds(places, 2, 1, true), BL_OK);
    unsetenv("BALLAST_ALLOW_BUILD_MISMATCH");
}

/* No other rank arrives: the log has the wait and the address. */
static void test_waiting_is_logged(void **state)
{
    rank_case one = {.rank = 1, .secret = SECRET, .port = find_free_port()};
    int ends[2], err = dup(STDERR_FILENO);
    char text[512] = "", wanted[64];

    (void)state;
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    pid_t pid = tcp_start(run_rank, &one);
    dup2(err, STDERR_FILENO);
    close(err);
    close(ends[1]);
    struct pollfd p = {.fd = ends[0], .events = POLLIN};
    assert_int_equal(poll(&p, 1, 60000), 1);
    assert_true(read(ends[0], text, sizeof text - 1) > 0);
    snprintf(wanted, sizeof wanted, "for rank 0 at 127.0.0.1 port %d", one.port);
    assert_non_null(strstr(text, "waiting for"));
    assert_non_null(strstr(text, wanted));
    kill(pid, SIGKILL);
    tcp_wait_for(pid);
    close(ends[0]);
}

/* Rank 0 was reached by an address of the host alone; what others need are the host's other
 * ones. */
static void test_addresses_of_a_rank(void **state)
{
    rank_case zero = {.rank = 0, .secret = SECRET}, one = {.rank = 1, .secret = SECRET};
    job_place found, told;
    words of_1;
    bool is_chosen;

    (void)state;
    unsetenv("BALLAST_INTERFACE");
    assert_int_equal(job_place_describe(false, &found, &is_chosen), BL_OK);
    job_listener middle = tcp_listen_here();
    pid_t pid_0 = start_rank_0(&zero);
    one.port = middle.port;
    pid_t pid_1 = tcp_start(run_rank, &one);
    relay_once(&middle, zero.port, -1, &of_1);
    assert_int_equal(tcp_wait_for(pid_1), 0);
    assert_int_equal(tcp_wait_for(pid_0), 0);
    assert_int_equal(of_1.n, sizeof(job_greeting) + JOB_MAC_BYTES + sizeof told);
    memcpy(&told, of_1.bytes + of_1.n - sizeof told, sizeof told);
    assert_string_equal(told.host, found.host);
    assert_int_equal(told.n_addresses, found.n_addresses);
    assert_memory_equal(told.addresses, found.addresses,
                        found.n_addresses * sizeof found.addresses[0]);
    job_tcp_close_listener(&middle);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_garbled_words),
                                       cmocka_unit_test(test_replay),
                                       cmocka_unit_test(test_other_secret),
                                       cmocka_unit_test(test_other_size),
                                       cmocka_unit_test(test_rank_twice),
                                       cmocka_unit_test(test_other_greetings),
                                       cmocka_unit_test(test_secret_file),
                                       cmocka_unit_test(test_interface_is_bound),
                                       cmocka_unit_test(test_builds),
                                       cmocka_unit_test(test_one_host),
                                       cmocka_unit_test(test_waiting_is_logged),
                                       cmocka_unit_test(test_addresses_of_a_rank)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
