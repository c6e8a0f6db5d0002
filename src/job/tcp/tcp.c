/* SPDX-License-Identifier: Apache-2.0 */
/* tcp.c -- addresses, listening and connecting, and whole reads and writes with a deadline. */
#include "job/tcp/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/build_id.h"
#include "base/clock.h"
#include "base/host_name.h"
#include "base/log.h"
#include "base/sizes.h"

static const char INTERFACE_VARIABLE[] = "BALLAST_INTERFACE";
static const char ANY_BUILD_VARIABLE[] = "BALLAST_ALLOW_BUILD_MISMATCH";

const job_address job_loopback = {.bytes = {IN_LOOPBACKNET, 0, 0, 1}};

/* ---- addresses ---- */

static socklen_t to_socket_address(const job_address *a, uint16_t port,
                                   struct sockaddr_storage *out)
{
    memset(out, 0, sizeof *out);
    if (a->is_v6) {
        struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        memcpy(&v6->sin6_addr, a->bytes, sizeof v6->sin6_addr);
        return sizeof *v6;
    }
    struct sockaddr_in *v4 = (struct sockaddr_in *)out;
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    memcpy(&v4->sin_addr, a->bytes, sizeof v4->sin_addr);
    return sizeof *v4;
}

bool job_address_read(const struct sockaddr *in, job_address *out)
{
    const uint8_t *bytes;

    *out = (job_address){0};
    if (in && in->sa_family == AF_INET) {
        memcpy(out->bytes, &((const struct sockaddr_in *)in)->sin_addr, 4);
        return true;
    }
    if (!in || in->sa_family != AF_INET6) return false;
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)in)->sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(v6)) return false;
    bytes = v6->s6_addr;
    out->is_v6 = !IN6_IS_ADDR_V4MAPPED(v6);
    if (out->is_v6)
        memcpy(out->bytes, bytes, 16);
    else
        memcpy(out->bytes, bytes + 12, 4);
    return true;
}

void job_address_format(const job_address *address, char text[JOB_ADDRESS_TEXT_BYTES])
{
    inet_ntop(address->is_v6 ? AF_INET6 : AF_INET, address->bytes, text, JOB_ADDRESS_TEXT_BYTES);
}

static void add_addresses(const struct ifaddrs *list, const char *name, bool wants_loopback,
                          job_place *place)
{
    for (; list && place->n_addresses < JOB_PLACE_ADDRESSES; list = list->ifa_next) {
        bool is_loopback = list->ifa_flags & IFF_LOOPBACK;
        if (!(list->ifa_flags & IFF_UP)) continue;
        if (name ? strcmp(list->ifa_name, name) != 0 : is_loopback != wants_loopback) continue;
        if (job_address_read(list->ifa_addr, &place->addresses[place->n_addresses]))
            place->n_addresses++;
    }
}

bool job_address_is_loopback(const job_address *a)
{
    return a->is_v6 ? memcmp(a->bytes, &in6addr_loopback, sizeof a->bytes) == 0
                    : a->bytes[0] == IN_LOOPBACKNET;
}

static bl_status find_addresses(const char *name, job_place *place)
{
    struct ifaddrs *list = NULL;

    if (getifaddrs(&list) != 0) return bl_fail_errno(BL_EIO, "this host's addresses: getifaddrs");
    add_addresses(list, name, false, place);
    if (!name && place->n_addresses == 0) add_addresses(list, NULL, true, place);
    freeifaddrs(list);
    if (place->n_addresses > 0) return BL_OK;
    if (name)
        return BL_FAIL(BL_EUSAGE, "%s: host %s has no interface %s with an address",
                       INTERFACE_VARIABLE, place->host, name);
    return BL_FAIL(BL_EUSAGE, "host %s has no network address", place->host);
}

bl_status job_place_describe(bool is_one_host, job_place *place, bool *is_chosen)
{
    const char *name = getenv(INTERFACE_VARIABLE);

    memset(place, 0, sizeof *place);
    bl_host_name(place->host, sizeof place->host);
    snprintf(place->build, sizeof place->build, "%s", bl_build_id());
    *is_chosen = !is_one_host && name && name[0];
    if (!is_one_host) return find_addresses(*is_chosen ? name : NULL, place);
    place->addresses[0] = job_loopback;
    place->n_addresses = 1;
    return BL_OK;
}

bl_status job_place_open(const bl_launch_info *info, int first_rank, int n_ranks, job_place *place,
                         bool *is_chosen, job_listener *listener)
{
    bool is_one_host = info->n_local == info->n_processes;

    *listener = (job_listener){.n = 0};
    BL_TRY(job_place_describe(is_one_host, place, is_chosen));
    place->first_rank = first_rank;
    place->n_ranks = n_ranks;
    BL_TRY(job_tcp_listen(place->addresses, is_one_host || *is_chosen ? place->n_addresses : 0, 0,
                          listener));
    place->port = listener->port;
    return BL_OK;
}

/* All ranks find the same: one of them reports it, and the launcher may end the others when it has
 * left. */
static bl_status leave_to_rank_0(int rank)
{
    if (rank == 0) return BL_EUSAGE;
    nanosleep(&(struct timespec){2, 0}, NULL);
    return BL_FAIL(BL_EUSAGE, "%s", "");
}

bl_status job_place_compare_builds(const job_place *places, int n_places, int rank, bool is_quiet)
{
    const char *allowed = getenv(ANY_BUILD_VARIABLE);

    for (int i = 1; i < n_places; i++) {
        const job_place *a = &places[0], *b = &places[i];
        if (strncmp(a->build, b->build, JOB_BUILD_BYTES) == 0) continue;
        if (!allowed || strcmp(allowed, "1") != 0) {
            bl_status st = BL_FAIL(BL_EUSAGE,
                                   "rank %d on host %s is build %s and rank %d on host %s build "
                                   "%s: results may differ; install one build on all hosts, or "
                                   "set %s=1 on all ranks",
                                   a->first_rank, a->host, a->build, b->first_rank, b->host,
                                   b->build, ANY_BUILD_VARIABLE);
            return is_quiet ? st : leave_to_rank_0(rank);
        }
        if (rank == 0 && !is_quiet)
            bl_log_warning("rank %d on host %s is build %s, not %s; %s allows that", b->first_rank,
                           b->host, b->build, a->build, ANY_BUILD_VARIABLE);
    }
    return BL_OK;
}

bool job_tcp_own_address(int fd, job_address *out)
{
    struct sockaddr_storage storage;
    socklen_t n = sizeof storage;
    return getsockname(fd, (struct sockaddr *)&storage, &n) == 0 &&
           job_address_read((struct sockaddr *)&storage, out);
}

/* ---- connections ---- */

static int fail_and_close(int fd, int code)
{
    if (fd >= 0) close(fd);
    errno = code;
    return -1;
}

/* Whether fd is ready for `events` before the deadline. */
static bool wait_for(int fd, short events, double deadline)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = events};
        double left_s = deadline - bl_now_s();
        int n = poll(&p, 1, left_s > 0 ? (int)(1e3 * left_s) + 1 : 0);
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return false;
        if (n == 0 && bl_now_s() >= deadline) {
            errno = ETIMEDOUT;
            return false;
        }
    }
}

/* Connections to it go through `address` only: of IPv6 those of IPv4 as well, where it is the one
 * for all. -1 with errno. */
static int open_listening(const job_address *address, uint16_t port, bool is_for_all)
{
    struct sockaddr_storage storage;
    int only_v6 = !is_for_all, on = 1;
    socklen_t n = to_socket_address(address, port, &storage);
    int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) return -1;
    if (address->is_v6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only_v6, sizeof only_v6);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on,
               sizeof on); /* not to wait for a job that has just ended */
    if (bind(fd, (struct sockaddr *)&storage, n) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    return fail_and_close(fd, errno);
}

/* Both kinds have it at the same place. */
static uint16_t port_of(int fd)
{
    struct sockaddr_storage storage = {0};
    socklen_t n = sizeof storage;

    if (getsockname(fd, (struct sockaddr *)&storage, &n) != 0) return 0;
    return ntohs(((const struct sockaddr_in *)&storage)->sin_port);
}

/* All addresses: by a socket of IPv6, or of IPv4 where the system has no other. */
static bool listen_on_all(uint16_t port, job_listener *out)
{
    int fd = open_listening(&(job_address){.is_v6 = 1}, port, true);

    if (fd < 0 && errno != EADDRINUSE && !job_tcp_is_limit(errno))
        fd = open_listening(&(job_address){.is_v6 = 0}, port, true);
    if (fd < 0) return false;
    out->fds[out->n++] = fd;
    return true;
}

static bool listen_on_each(const job_address *addresses, int n_addresses, uint16_t port,
                           job_listener *out)
{
    int code = EADDRNOTAVAIL;

    for (int i = 0; i < n_addresses; i++) {
        int fd = open_listening(&addresses[i], out->n ? out->port : port, false);
        if (fd < 0 && errno == EADDRNOTAVAIL) continue;
        if (fd < 0) {
            code = errno;
            job_tcp_close_listener(out);
            errno = code;
            return false;
        }
        out->fds[out->n++] = fd;
        out->port = port_of(fd);
    }
    errno = code;
    return out->n > 0;
}

bl_status job_tcp_listen(const job_address *addresses, int n_addresses, uint16_t port,
                         job_listener *out)
{
    enum { TRIES = 16 }; /* a free port of the first address may be another's at the next */
    bool is_open = false;

    for (int i = 0; i < TRIES && !is_open; i++) {
        *out = (job_listener){.n = 0};
        is_open = n_addresses > 0 ? listen_on_each(addresses, n_addresses, port, out)
                                  : listen_on_all(port, out);
        if (!is_open && (port != 0 || errno != EADDRINUSE)) break;
    }
    if (!is_open)
        return bl_fail_errno(job_tcp_is_limit(errno) ? BL_ELIMIT : BL_EIO,
                             "listening on TCP port %d", port);
    out->port = port_of(out->fds[0]);
    return BL_OK;
}

void job_tcp_close_listener(job_listener *listener)
{
    for (int i = 0; i < listener->n; i++) close(listener->fds[i]);
    listener->n = 0;
}

int job_tcp_connect(const job_address *address, uint16_t port, double deadline)
{
    struct sockaddr_storage storage;
    socklen_t n = to_socket_address(address, port, &storage), n_code = sizeof(int);
    int code = 0, fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) return -1;
    if (connect(fd, (struct sockaddr *)&storage, n) != 0) {
        if (errno != EINPROGRESS) return fail_and_close(fd, errno);
        if (!wait_for(fd, POLLOUT, deadline)) return fail_and_close(fd, errno);
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &n_code) != 0) code = errno;
        if (code != 0) return fail_and_close(fd, code);
    }
    fcntl(fd, F_SETFL, 0); /* blocking again */
    return fd;
}

bool job_tcp_is_limit(int code)
{
    return code == EMFILE || code == ENFILE;
}

bool job_tcp_is_of_peer(int code)
{
    static const int codes[] = {ECONNABORTED, EINTR,     EAGAIN, ENETDOWN,     EPROTO,
                                ENOPROTOOPT,  EHOSTDOWN, ENONET, EHOSTUNREACH, EOPNOTSUPP,
                                ENETUNREACH,  ETIMEDOUT, EPERM};
    for (size_t i = 0; i < BL_COUNT(codes); i++)
        if (codes[i] == code) return true;
    return false;
}

bool job_tcp_send(int fd, const void *bytes, size_t n_bytes, double deadline)
{
    for (size_t done = 0; done < n_bytes;) {
        if (!wait_for(fd, POLLOUT, deadline)) return false;
        ssize_t n =
            send(fd, (const char *)bytes + done, n_bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno != EINTR && errno != EAGAIN) return false;
        if (n > 0) done += (size_t)n;
    }
    return true;
}

bool job_tcp_receive(int fd, void *bytes, size_t n_bytes, double deadline)
{
    for (size_t done = 0; done < n_bytes;) {
        if (!wait_for(fd, POLLIN, deadline)) return false;
        ssize_t n = recv(fd, (char *)bytes + done, n_bytes - done, MSG_DONTWAIT);
        if (n == 0) errno = ECONNRESET;
        if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return false;
        if (n > 0) done += (size_t)n;
    }
    return true;
}

/* ---- waiting ---- */

void job_patience_begin(job_patience *patience, const bl_launch_info *info)
{
    static const double FIRST_S = 3.0;

    *patience = (job_patience){
        .start_s = bl_now_s(), .speaks = info->local_rank == 0, .unmutes = info->rank > 0};
    patience->next_s = patience->start_s + FIRST_S;
}

void job_patience_log(job_patience *patience, const char *format, ...)
{
    static const double AGAIN_S = 30.0;
    double now_s = bl_now_s();
    char text[512];
    va_list args;

    if (!patience->speaks || now_s < patience->next_s) return;
    patience->next_s = now_s + AGAIN_S;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (patience->unmutes) bl_log_set_silent(false);
    bl_log_info("waiting for %.0f s for %s", now_s - patience->start_s, text);
    if (patience->unmutes) bl_log_set_silent(true);
}
