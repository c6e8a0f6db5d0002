/* SPDX-License-Identifier: Apache-2.0 */
/* torchrun.c -- how processes that torchrun has started find each other. Rank 0 listens at a port that all know; each other rank tells it where it can be
 * reached, and gets the list of all and the job's token. Then all are connected (mesh.c). */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/tcp/tcp.h"

/* Processes of several hosts start when their schedulers let them. */
static const double MEET_S = 300.0, CONNECT_S = 60.0, TRY_S = 5.0;
/* The others wait for rank 0 a little longer: it, which knows who did not come, should be the one to say so. */
static const double VISIT_S = 330.0;

typedef struct meeting {
    int rank, n;
    const char *address; /* MASTER_ADDR */
    uint16_t port;
    uint64_t job; /* of torchrun's name of the job: neighbors with other jobs do not mix */
    double limit_s, deadline;
    bool is_interface_chosen;
    comm_place own;     /* as this rank knows it */
    comm_place *places; /* [n] */
    uint8_t token[COMM_TOKEN_BYTES];
} meeting;

/* The first words of a rank to rank 0. */
typedef struct arrival {
    char magic[8];
    uint64_t job;
    int32_t n;
    comm_place place;
} arrival;

/* Rank 0's, when all have come; the places follow. */
typedef struct answer {
    char magic[8];
    uint8_t token[COMM_TOKEN_BYTES];
} answer;

static const char MAGIC[8] = "ballast0", ANSWER_MAGIC[8] = "ballast2";

static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (; text && *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u; /* FNV-1a */
    return hash;
}

static bl_status read_port(uint16_t *port)
{
    const char *own = getenv("BALLAST_PORT"), *master = getenv("MASTER_PORT");
    const char *text = own ? own : master ? master : "";
    char *end;
    long value = strtol(text, &end, 10);

    if (!own) value++; /* torchrun's own store listens at MASTER_PORT */
    if (end == text || *end || value < 1 || value > 65535)
        return BL_FAIL(BL_EUSAGE,
                       "%s '%s': the port at which ranks meet is BALLAST_PORT, or the one after "
                       "MASTER_PORT",
                       own ? "BALLAST_PORT" : "MASTER_PORT", text);
    *port = (uint16_t)value;
    return BL_OK;
}

static bl_status read_meeting(const bl_launch_info *info, meeting *m)
{
    const char *interface = getenv("BALLAST_INTERFACE");
    double limit_s = info->rank == 0 ? MEET_S : VISIT_S;

    *m = (meeting){.rank = info->rank,
                   .n = info->n_processes,
                   .address = getenv("MASTER_ADDR"),
                   .job = hash_text(0xcbf29ce484222325u, getenv("TORCHELASTIC_RUN_ID")),
                   .limit_s = limit_s,
                   .deadline = bl_now_s() + limit_s,
                   .is_interface_chosen = interface && interface[0]};
    if (!m->address) return BL_FAIL(BL_EUSAGE, "MASTER_ADDR is not set: rank 0's host");
    BL_TRY(read_port(&m->port));
    m->places = calloc((size_t)m->n, sizeof *m->places);
    return m->places ? BL_OK : BL_FAIL(BL_ENOMEM, "the addresses of %d ranks", m->n);
}

/* What this rank tells of itself. */
static bl_status describe_self(meeting *m, uint16_t port)
{
    BL_TRY(comm_place_find_addresses(&m->own));
    m->own.first_rank = m->rank;
    m->own.n_ranks = 1;
    m->own.port = port;
    return BL_OK;
}

static bool is_loopback(const comm_address *a)
{
    return a->is_v6 ? memcmp(a->bytes, &in6addr_loopback, sizeof a->bytes) == 0
                    : a->bytes[0] == IN_LOOPBACKNET;
}

/* The address over which rank 0 was met comes first: it certainly leads from one host to another. Not so a host's own name for itself; nor is one
 * wanted that is not of the chosen interface. */
static void prefer(const meeting *m, const comm_address *address, comm_place *place)
{
    int i = 0;

    if (is_loopback(address)) return;
    while (i < place->n_addresses && memcmp(&place->addresses[i], address, sizeof *address) != 0)
        i++;
    if (i == place->n_addresses) {
        if (m->is_interface_chosen) return;
        if (i < COMM_PLACE_ADDRESSES)
            place->n_addresses++;
        else
            i--; /* the last one gives way */
    }
    memmove(&place->addresses[1], &place->addresses[0], (size_t)i * sizeof place->addresses[0]);
    place->addresses[0] = *address;
}

/* Whether bytes of the network are what rank `rank` can have said of itself. */
static bool is_place_of(const comm_place *place, int rank)
{
    return memchr(place->host, '\0', sizeof place->host) && place->first_rank == rank &&
           place->n_ranks == 1 && place->n_addresses >= 1 &&
           place->n_addresses <= COMM_PLACE_ADDRESSES;
}

/* ---- rank 0 ---- */

static bl_status say_missing(const meeting *m)
{
    char list[128] = "";
    size_t used = 0;
    int n_missing = 0;

    for (int i = 1; i < m->n; i++) {
        if (m->places[i].n_ranks > 0) continue;
        if (used < sizeof list - 16)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", i);
        n_missing++;
    }
    return BL_FAIL(BL_ERANK, "%s %s did not come to %s port %d within %.0f s",
                   n_missing == 1 ? "rank" : "ranks", list, m->address, m->port, m->limit_s);
}

/* The rank that is at the other end of fd, if it is still expected, or -1; its place is then known. */
static int welcome(meeting *m, int fd)
{
    arrival a;

    if (!comm_tcp_receive(fd, &a, sizeof a, bl_now_s() + COMM_HELLO_S) ||
        memcmp(a.magic, MAGIC, sizeof a.magic) != 0 || a.job != m->job || a.n != m->n)
        return -1;
    int rank = a.place.first_rank;
    if (rank < 1 || rank >= m->n || m->places[rank].n_ranks > 0 || !is_place_of(&a.place, rank))
        return -1;
    m->places[rank] = a.place;
    return rank;
}

static bl_status tell_all(const meeting *m, const int *ranks_fd)
{
    answer own;

    memcpy(own.magic, ANSWER_MAGIC, sizeof own.magic);
    memcpy(own.token, m->token, sizeof own.token);
    for (int i = 1; i < m->n; i++)
        if (!comm_tcp_send(ranks_fd[i], &own, sizeof own, m->deadline) ||
            !comm_tcp_send(ranks_fd[i], m->places, (size_t)m->n * sizeof *m->places, m->deadline))
            return bl_fail_errno(BL_ERANK, "rank %d on host %s went away while ranks met", i,
                                 m->places[i].host);
    return BL_OK;
}

static bl_status gather(meeting *m, int listen_fd, int *ranks_fd)
{
    for (int n = 1; n < m->n;) {
        int fd;
        BL_TRY(comm_tcp_accept(listen_fd, m->deadline, &fd));
        if (fd < 0) return say_missing(m);
        int rank = welcome(m, fd);
        if (rank < 0) {
            close(fd);
            continue;
        }
        ranks_fd[rank] = fd;
        n++;
    }
    return tell_all(m, ranks_fd);
}

static bl_status receive_all(meeting *m)
{
    int *ranks_fd = malloc((size_t)m->n * sizeof *ranks_fd), listen_fd = -1;

    if (!ranks_fd) return BL_FAIL(BL_ENOMEM, "%d ranks", m->n);
    for (int i = 0; i < m->n; i++) ranks_fd[i] = -1;
    m->places[0] = m->own;
    bl_status st = comm_tcp_listen(&m->port, &listen_fd);
    if (st != BL_OK)
        bl_error_prefix(st, "the port at which ranks meet (BALLAST_PORT, or MASTER_PORT + 1)");
    if (st == BL_OK && getrandom(m->token, sizeof m->token, 0) != sizeof m->token)
        st = bl_fail_errno(BL_EIO, "getrandom");
    if (st == BL_OK) st = gather(m, listen_fd, ranks_fd);
    for (int i = 0; i < m->n; i++)
        if (ranks_fd[i] >= 0) close(ranks_fd[i]);
    if (listen_fd >= 0) close(listen_fd);
    free(ranks_fd);
    return st;
}

/* ---- the others ---- */

/* Rank 0's answer on fd. False with errno; EPROTO: it is somebody else's. */
static bool hear_answer(meeting *m, int fd)
{
    answer a;

    if (!comm_tcp_receive(fd, &a, sizeof a, m->deadline)) return false;
    errno = EPROTO;
    if (memcmp(a.magic, ANSWER_MAGIC, sizeof a.magic) != 0) return false;
    if (!comm_tcp_receive(fd, m->places, (size_t)m->n * sizeof *m->places, m->deadline))
        return false;
    errno = EPROTO;
    for (int i = 0; i < m->n; i++)
        if (!is_place_of(&m->places[i], i)) return false;
    memcpy(m->token, a.token, sizeof m->token);
    return true;
}

/* One connection to rank 0, through all of it. False with errno: try again. */
static bool visit(meeting *m, const comm_address *master)
{
    double try_until = bl_now_s() + TRY_S;
    arrival a = {.job = m->job, .n = m->n, .place = m->own};
    int fd = comm_tcp_connect(master, m->port, try_until < m->deadline ? try_until : m->deadline);

    if (fd < 0) return false;
    comm_address address;
    if (comm_tcp_own_address(fd, &address)) prefer(m, &address, &a.place);
    memcpy(a.magic, MAGIC, sizeof a.magic);
    bool is_done = comm_tcp_send(fd, &a, sizeof a, m->deadline) && hear_answer(m, fd);
    int code = errno;
    close(fd);
    if (is_done) prefer(m, master, &m->places[0]);
    errno = code;
    return is_done;
}

static bool try_addresses(meeting *m, const struct addrinfo *list)
{
    errno = EAFNOSUPPORT;
    for (; list; list = list->ai_next) {
        comm_address address;
        if (comm_address_read(list->ai_addr, &address) && visit(m, &address)) return true;
    }
    return false;
}

/* False: *found is of getaddrinfo and, if that has found it, *code is an errno. */
static bool try_master(meeting *m, int *found, int *code)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;

    *found = getaddrinfo(m->address, NULL, &hints, &list);
    if (*found != 0) return false;
    bool is_done = try_addresses(m, list);
    *code = errno;
    freeaddrinfo(list);
    return is_done;
}

static bl_status visit_master(meeting *m)
{
    const struct timespec pause = {0, 200 * 1000 * 1000};
    int found, code = 0;

    for (;;) { /* a name may be known a little later, too */
        if (try_master(m, &found, &code)) return BL_OK;
        bool is_limit = found == 0 && comm_tcp_is_limit(code);
        errno = code;
        if (is_limit) return bl_fail_errno(BL_ELIMIT, "the connection to rank 0");
        if (bl_now_s() >= m->deadline) break;
        nanosleep(&pause, NULL);
    }
    if (found != 0) return BL_FAIL(BL_ERANK, "MASTER_ADDR %s: %s", m->address, gai_strerror(found));
    errno = code;
    return bl_fail_errno(BL_ERANK, "rank 0 was not met at %s port %d within %.0f s", m->address,
                         m->port, m->limit_s);
}

/* ---- */

static bl_status connect_all(meeting *m, int listen_fd, comm_host_links *links, int *sockets)
{
    comm_mesh mesh = {.token = m->token,
                      .places = m->places,
                      .n_places = m->n,
                      .own = m->rank,
                      .listen_fd = listen_fd,
                      .limit_s = CONNECT_S};

    BL_TRY(comm_mesh_connect(&mesh, links));
    for (int i = 0; i < m->n; i++) {
        sockets[i] = links->sockets[i];
        links->sockets[i] = -1;
    }
    return BL_OK;
}

bl_status comm_torchrun_meet(const bl_launch_info *info, int *sockets)
{
    comm_host_links links = {0};
    uint16_t port = 0;
    int listen_fd = -1;
    meeting m;

    for (int i = 0; i < info->n_processes; i++) sockets[i] = -1;
    bl_status st = read_meeting(info, &m);
    /* First, because rank 0 has a connection to each already while they meet: this allows so many. */
    if (st == BL_OK) st = comm_host_links_create(m.n, m.rank, 1, &links);
    if (st == BL_OK) st = comm_tcp_listen(&port, &listen_fd);
    if (st == BL_OK) st = describe_self(&m, port);
    if (st == BL_OK) st = m.rank == 0 ? receive_all(&m) : visit_master(&m);
    if (st == BL_OK) st = connect_all(&m, listen_fd, &links, sockets);
    comm_host_links_close(&links);
    if (listen_fd >= 0) close(listen_fd);
    free(m.places);
    return st;
}
