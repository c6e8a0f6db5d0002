/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.c -- the ranks of all places with each other. A place first connects to those before it in
 * the list, then takes the connections of those after it: the first place takes at once, and each
 * one can connect when those before it have, so no places wait in a circle.
 *
 * Both ends prove that they know the job's key (hello.h). */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "job/tcp/hello.h"

/* An address that does not answer: at first, so that all of a host's are tried in time, but with
 * time to send a lost SYN again, which takes a second; then, should the network be slow. */
static const double FIRST_TRY_S = 2.5, TRY_S = 5.0;

static int n_ranks_of(const job_mesh *m)
{
    const job_place *last = &m->places[m->n_places - 1];
    return last->first_rank + last->n_ranks;
}

static int *socket_to(const job_host_links *links, int from, int to)
{
    return job_host_links_at(links, from - links->first_on_host, to);
}

static bool is_in(const job_place *place, int rank)
{
    return rank >= place->first_rank && rank - place->first_rank < place->n_ranks;
}

/* ---- to those before ---- */

/* True: fd is the connection of the two ranks. */
static bool introduce(const job_mesh *m, int fd, int from, int to, double deadline)
{
    job_hello hello = {.key = m->key,
                       .greeting = {.n_ranks = n_ranks_of(m), .from = from, .to = to}};
    uint8_t nothing;

    return job_hello_claim(fd, &hello, NULL, 0, deadline) &&
           job_hello_hear(fd, &hello, &nothing, 0, deadline);
}

/* An address that both hosts have (a bridge of containers, say) leads from the one to itself. */
static bool has_address(const job_place *place, const job_address *address)
{
    for (int i = 0; i < place->n_addresses; i++)
        if (memcmp(&place->addresses[i], address, sizeof *address) == 0) return true;
    return false;
}

static bool has_addresses_of(const job_place *place, const job_place *other)
{
    for (int i = 0; i < other->n_addresses; i++)
        if (!has_address(place, &other->addresses[i])) return false;
    return true;
}

/* In any order; the one may know an address more. */
static bool is_same_host(const job_mesh *m, const job_place *place)
{
    const job_place *own = &m->places[m->own];
    return has_addresses_of(own, place) || has_addresses_of(place, own);
}

/* -1 with errno: none of the addresses, beginning with *found, has answered. *found is then the one
 * that has. */
static int try_addresses(const job_mesh *m, const job_place *place, int from, int to, int *found,
                         double try_s, double deadline)
{
    int code = EHOSTUNREACH;

    for (int k = 0; k < place->n_addresses; k++) {
        int i = (*found + k) % place->n_addresses;
        const job_address *address = &place->addresses[i];
        double try_until = bl_now_s() + try_s;
        if (has_address(&m->places[m->own], address) && !is_same_host(m, place)) continue;
        int fd = job_tcp_connect(address, place->port, try_until < deadline ? try_until : deadline);
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

static bl_status connect_pair(job_mesh *m, const job_place *place, int from, int to, int *found,
                              double deadline, int *out)
{
    const struct timespec pause = {0, 100 * 1000 * 1000};
    char text[JOB_ADDRESS_TEXT_BYTES] = "";
    double try_s = FIRST_TRY_S;
    int code;

    for (;;) {
        *out = try_addresses(m, place, from, to, found, try_s, deadline);
        if (*out >= 0) return BL_OK;
        if (job_tcp_is_limit(errno))
            return bl_fail_errno(BL_ELIMIT, "the connection to rank %d on host %s", to,
                                 place->host);
        code = errno;
        if (bl_now_s() >= deadline) break;
        try_s = TRY_S;
        job_patience_log(&m->patience, "rank %d on host %s (port %d): %s", to, place->host,
                         place->port, strerror(code));
        nanosleep(&pause, NULL);
    }
    if (place->n_addresses > 0) job_address_format(&place->addresses[*found], text);
    errno = code;
    return bl_fail_errno(BL_ERANK,
                         "no connection to rank %d on host %s (%s port %d) within %.0f s; "
                         "BALLAST_INTERFACE chooses the network",
                         to, place->host, text, place->port, m->limit_s);
}

static bl_status connect_to(job_mesh *m, const job_place *place, job_host_links *links,
                            double deadline)
{
    const job_place *own = &m->places[m->own];
    int found = 0;

    for (int from = own->first_rank; from < own->first_rank + own->n_ranks; from++)
        for (int to = place->first_rank; to < place->first_rank + place->n_ranks; to++)
            BL_TRY(connect_pair(m, place, from, to, &found, deadline, socket_to(links, from, to)));
    return BL_OK;
}

/* ---- from those after ---- */

static int count_expected(const job_mesh *m)
{
    int n = 0;
    for (int i = m->own + 1; i < m->n_places; i++)
        n += m->places[i].n_ranks * m->places[m->own].n_ranks;
    return n;
}

typedef struct door {
    const job_mesh *mesh;
    job_host_links *links;
    int n_left;
} door;

static bool expects(void *user, int from, int to)
{
    const door *d = user;
    const job_place *own = &d->mesh->places[d->mesh->own];
    return is_in(own, to) && from >= own->first_rank + own->n_ranks && from < n_ranks_of(d->mesh);
}

/* A rank that comes again has not heard the answer: it uses the last connection. */
static bool admits(void *user, const job_hello *hello, const void *claim, int fd)
{
    static const double ANSWER_S = 1.0; /* a new connection has room for it */
    door *d = user;
    int *place = socket_to(d->links, hello->greeting.to, hello->greeting.from);

    (void)claim;
    if (!job_hello_answer(fd, hello, NULL, 0, bl_now_s() + ANSWER_S)) return false;
    if (*place >= 0)
        close(*place);
    else
        d->n_left--;
    *place = fd;
    return true;
}

/* The first rank that has not connected, and its place. */
static const job_place *find_missing(const job_mesh *m, const job_host_links *links, int *rank)
{
    const job_place *own = &m->places[m->own];

    *rank = own->first_rank;
    for (int i = m->own + 1; i < m->n_places; i++) {
        const job_place *p = &m->places[i];
        for (*rank = p->first_rank; *rank < p->first_rank + p->n_ranks; ++*rank)
            for (int to = own->first_rank; to < own->first_rank + own->n_ranks; to++)
                if (*socket_to(links, to, *rank) < 0) return p;
    }
    return own;
}

static bl_status take_expected(job_mesh *m, job_host_links *links, double deadline)
{
    door d = {.mesh = m, .links = links, .n_left = count_expected(m)};
    job_reception r = {.listener = m->listener,
                       .key = m->key,
                       .n_ranks = n_ranks_of(m),
                       .expects = expects,
                       .admits = admits,
                       .user = &d};
    bl_status st = d.n_left > 0 ? job_reception_open(&r) : BL_OK;
    int rank;

    while (st == BL_OK && d.n_left > 0) {
        const job_place *place = find_missing(m, links, &rank);
        double now_s = bl_now_s();
        if (now_s >= deadline) {
            st = BL_FAIL(BL_ERANK,
                         "rank %d on host %s did not connect to host %s within %.0f s; "
                         "BALLAST_INTERFACE chooses the network",
                         rank, place->host, m->places[m->own].host, m->limit_s);
            break;
        }
        job_patience_log(&m->patience, "rank %d on host %s to connect to port %d of host %s", rank,
                         place->host, m->listener->port, m->places[m->own].host);
        st = job_reception_wait(&r, now_s + 1.0 < deadline ? now_s + 1.0 : deadline);
    }
    job_reception_close(&r);
    return st;
}

bl_status job_mesh_connect(job_mesh *m, job_host_links *links)
{
    double deadline = bl_now_s() + m->limit_s;

    if (m->info) job_patience_begin(&m->patience, m->info);
    for (int i = 0; i < m->own; i++) BL_TRY(connect_to(m, &m->places[i], links, deadline));
    return take_expected(m, links, deadline);
}

bl_status job_mesh_connect_ranks(job_mesh *m, int *sockets)
{
    job_host_links links;

    bl_status st = job_host_links_create(m->n_places, m->own, 1, &links);
    if (st == BL_OK) st = job_mesh_connect(m, &links);
    for (int i = 0; i < m->n_places && st == BL_OK; i++) {
        sockets[i] = links.sockets[i];
        links.sockets[i] = -1;
    }
    job_host_links_close(&links);
    return st;
}
