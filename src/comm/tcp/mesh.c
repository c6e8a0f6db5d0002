/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.c -- the ranks of all places with each other. A place first connects to those before it in the list, then takes the connections of those after
 * it: the first place takes at once, and each one can connect when those before it have, so nobody waits in a circle.
 *
 * Who connects says the job's token, its rank and the rank it wants; who is reached answers with the same. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/tcp/tcp.h"

/* An address that does not answer: at first, so that all of a host's are tried in time, but with time to send a lost SYN again, which
 * takes a second; then, should the network be slow. */
static const double FIRST_TRY_S = 2.5, TRY_S = 5.0;

typedef struct hello {
    char magic[8];
    uint8_t token[COMM_TOKEN_BYTES];
    int32_t from, to;
} hello;

static const char MAGIC[8] = "ballast1";

static hello make_hello(const comm_mesh *m, int from, int to)
{
    hello h = {.from = from, .to = to};
    memcpy(h.magic, MAGIC, sizeof h.magic);
    memcpy(h.token, m->token, sizeof h.token);
    return h;
}

static bool is_of_job(const comm_mesh *m, const hello *h)
{
    return memcmp(h->magic, MAGIC, sizeof h->magic) == 0 &&
           memcmp(h->token, m->token, sizeof h->token) == 0;
}

static int *socket_to(const comm_host_links *links, int from, int to)
{
    return &links->sockets[(size_t)(from - links->first_on_host) * (size_t)links->n_ranks +
                           (size_t)to];
}

static bool is_in(const comm_place *place, int rank)
{
    return rank >= place->first_rank && rank - place->first_rank < place->n_ranks;
}

/* ---- to those before ---- */

/* True: fd is the connection of the two ranks. */
static bool introduce(const comm_mesh *m, int fd, int from, int to, double deadline)
{
    hello own = make_hello(m, from, to), answer;
    if (!comm_tcp_send(fd, &own, sizeof own, deadline) ||
        !comm_tcp_receive(fd, &answer, sizeof answer, deadline))
        return false;
    if (is_of_job(m, &answer) && answer.from == to && answer.to == from) return true;
    errno = EPROTO;
    return false;
}

/* An address that both hosts have (a bridge of containers, say) leads from the one to itself. */
static bool has_address(const comm_place *place, const comm_address *address)
{
    for (int i = 0; i < place->n_addresses; i++)
        if (memcmp(&place->addresses[i], address, sizeof *address) == 0) return true;
    return false;
}

static bool has_addresses_of(const comm_place *place, const comm_place *other)
{
    for (int i = 0; i < other->n_addresses; i++)
        if (!has_address(place, &other->addresses[i])) return false;
    return true;
}

/* In any order; the one may know an address more. */
static bool is_same_host(const comm_mesh *m, const comm_place *place)
{
    const comm_place *own = &m->places[m->own];
    return has_addresses_of(own, place) || has_addresses_of(place, own);
}

/* -1 with errno: none of the addresses, beginning with *found, has answered. *found is then the one that has. */
static int try_addresses(const comm_mesh *m, const comm_place *place, int from, int to, int *found,
                         double try_s, double deadline)
{
    int code = EHOSTUNREACH;

    for (int k = 0; k < place->n_addresses; k++) {
        int i = (*found + k) % place->n_addresses;
        const comm_address *address = &place->addresses[i];
        double try_until = bl_now_s() + try_s;
        if (has_address(&m->places[m->own], address) && !is_same_host(m, place)) continue;
        int fd =
            comm_tcp_connect(address, place->port, try_until < deadline ? try_until : deadline);
        if (fd >= 0 && introduce(m, fd, from, to, deadline)) {
            *found = i;
            return fd;
        }
        code = errno;
        if (fd >= 0) close(fd);
    }
    errno = code;
    return -1;
}

static bl_status connect_pair(const comm_mesh *m, const comm_place *place, int from, int to,
                              int *found, double deadline, int *out)
{
    const struct timespec pause = {0, 100 * 1000 * 1000};
    char text[COMM_ADDRESS_TEXT_BYTES] = "";
    double try_s = FIRST_TRY_S;
    int code;

    for (;;) {
        *out = try_addresses(m, place, from, to, found, try_s, deadline);
        if (*out >= 0) return BL_OK;
        if (comm_tcp_is_limit(errno))
            return bl_fail_errno(BL_ELIMIT, "the connection to rank %d on host %s", to,
                                 place->host);
        code = errno;
        if (bl_now_s() >= deadline) break;
        try_s = TRY_S;
        nanosleep(&pause, NULL);
    }
    if (place->n_addresses > 0) comm_address_format(&place->addresses[*found], text);
    errno = code;
    return bl_fail_errno(BL_ERANK,
                         "no connection to rank %d on host %s (%s port %d) within %.0f s; "
                         "BALLAST_INTERFACE chooses the network",
                         to, place->host, text, place->port, m->limit_s);
}

static bl_status connect_to(const comm_mesh *m, const comm_place *place, comm_host_links *links,
                            double deadline)
{
    const comm_place *own = &m->places[m->own];
    int found = 0;

    for (int from = own->first_rank; from < own->first_rank + own->n_ranks; from++)
        for (int to = place->first_rank; to < place->first_rank + place->n_ranks; to++)
            BL_TRY(connect_pair(m, place, from, to, &found, deadline, socket_to(links, from, to)));
    return BL_OK;
}

/* ---- from those after ---- */

static int count_expected(const comm_mesh *m)
{
    int n = 0;
    for (int i = m->own + 1; i < m->n_places; i++)
        n += m->places[i].n_ranks * m->places[m->own].n_ranks;
    return n;
}

/* Takes fd, if it is of a rank that is still expected; or closes it. */
static bool take(const comm_mesh *m, int fd, comm_host_links *links, double deadline)
{
    const comm_place *own = &m->places[m->own], *last = &m->places[m->n_places - 1];
    double try_until = bl_now_s() + COMM_HELLO_S;
    hello h;

    if (comm_tcp_receive(fd, &h, sizeof h, try_until < deadline ? try_until : deadline) &&
        is_of_job(m, &h) && is_in(own, h.to) && h.from >= own->first_rank + own->n_ranks &&
        h.from < last->first_rank + last->n_ranks && *socket_to(links, h.to, h.from) < 0) {
        hello answer = make_hello(m, h.to, h.from);
        if (comm_tcp_send(fd, &answer, sizeof answer, deadline)) {
            *socket_to(links, h.to, h.from) = fd;
            return true;
        }
    }
    close(fd);
    return false;
}

static bl_status name_missing(const comm_mesh *m, const comm_host_links *links)
{
    const comm_place *own = &m->places[m->own];

    for (int i = m->own + 1; i < m->n_places; i++) {
        const comm_place *p = &m->places[i];
        for (int rank = p->first_rank; rank < p->first_rank + p->n_ranks; rank++)
            for (int to = own->first_rank; to < own->first_rank + own->n_ranks; to++)
                if (*socket_to(links, to, rank) < 0)
                    return BL_FAIL(BL_ERANK,
                                   "rank %d on host %s did not connect to host %s within %.0f s; "
                                   "BALLAST_INTERFACE chooses the network",
                                   rank, p->host, own->host, m->limit_s);
    }
    return BL_FAIL(BL_EINTERNAL, "all ranks are connected");
}

static bl_status take_expected(const comm_mesh *m, comm_host_links *links, double deadline)
{
    for (int n = count_expected(m); n > 0;) {
        int fd;
        BL_TRY(comm_tcp_accept(m->listen_fd, deadline, &fd));
        if (fd < 0) return name_missing(m, links);
        n -= take(m, fd, links, deadline);
    }
    return BL_OK;
}

bl_status comm_mesh_connect(const comm_mesh *m, comm_host_links *links)
{
    double deadline = bl_now_s() + m->limit_s;

    for (int i = 0; i < m->own; i++) BL_TRY(connect_to(m, &m->places[i], links, deadline));
    return take_expected(m, links, deadline);
}
