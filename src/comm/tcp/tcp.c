/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/tcp/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"

static const char INTERFACE_VARIABLE[] = "BALLAST_INTERFACE";

/* ---- addresses ---- */

static socklen_t to_socket_address(const comm_address *a, uint16_t port,
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

bool comm_address_read(const struct sockaddr *in, comm_address *out)
{
    const uint8_t *bytes;

    *out = (comm_address){0};
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

void comm_address_format(const comm_address *address, char text[COMM_ADDRESS_TEXT_BYTES])
{
    inet_ntop(address->is_v6 ? AF_INET6 : AF_INET, address->bytes, text, COMM_ADDRESS_TEXT_BYTES);
}

static void add_addresses(const struct ifaddrs *list, const char *name, bool wants_loopback,
                          comm_place *place)
{
    for (; list && place->n_addresses < COMM_PLACE_ADDRESSES; list = list->ifa_next) {
        bool is_loopback = list->ifa_flags & IFF_LOOPBACK;
        if (!(list->ifa_flags & IFF_UP)) continue;
        if (name ? strcmp(list->ifa_name, name) != 0 : is_loopback != wants_loopback) continue;
        if (comm_address_read(list->ifa_addr, &place->addresses[place->n_addresses]))
            place->n_addresses++;
    }
}

bl_status comm_place_find_addresses(comm_place *place)
{
    struct ifaddrs *list = NULL;
    const char *name = getenv(INTERFACE_VARIABLE);

    if (name && !name[0]) name = NULL;
    if (gethostname(place->host, sizeof place->host) != 0) strcpy(place->host, "a host");
    place->host[sizeof place->host - 1] = '\0';
    place->n_addresses = 0;
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

bool comm_tcp_own_address(int fd, comm_address *out)
{
    struct sockaddr_storage storage;
    socklen_t n = sizeof storage;
    return getsockname(fd, (struct sockaddr *)&storage, &n) == 0 &&
           comm_address_read((struct sockaddr *)&storage, out);
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

/* Of IPv6, which takes connections of IPv4 as well, or of IPv4 where the system has no other. */
static int open_listening(uint16_t port)
{
    struct sockaddr_storage storage;
    int off = 0, on = 1;

    for (int is_v6 = 1; is_v6 >= 0; is_v6--) {
        int fd = socket(is_v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) continue;
        if (is_v6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on,
                   sizeof on); /* not to wait for a job that has just ended */
        socklen_t n = to_socket_address(&(comm_address){.is_v6 = is_v6}, port, &storage);
        if (bind(fd, (struct sockaddr *)&storage, n) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
        int code = errno;
        if (is_v6 == 0 || code == EADDRINUSE) return fail_and_close(fd, code);
        close(fd);
    }
    return -1;
}

bl_status comm_tcp_listen(uint16_t *port, int *fd)
{
    struct sockaddr_storage storage;
    socklen_t n = sizeof storage;

    *fd = open_listening(*port);
    if (*fd < 0)
        return bl_fail_errno(comm_tcp_is_limit(errno) ? BL_ELIMIT : BL_EIO,
                             "listening on TCP port %d", *port);
    if (getsockname(*fd, (struct sockaddr *)&storage, &n) != 0) {
        close(*fd);
        *fd = -1;
        return bl_fail_errno(BL_EIO, "getsockname");
    }
    /* Both kinds have it at the same place. */
    *port = ntohs(((const struct sockaddr_in *)&storage)->sin_port);
    return BL_OK;
}

int comm_tcp_connect(const comm_address *address, uint16_t port, double deadline)
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

bool comm_tcp_is_limit(int code)
{
    return code == EMFILE || code == ENFILE;
}

/* Of this connection, which is gone then, and not of the listening socket: see accept(2). */
static bool is_of_peer(int code)
{
    static const int codes[] = {ECONNABORTED, EINTR,     EAGAIN, ENETDOWN,     EPROTO,
                                ENOPROTOOPT,  EHOSTDOWN, ENONET, EHOSTUNREACH, EOPNOTSUPP,
                                ENETUNREACH,  ETIMEDOUT, EPERM};
    for (size_t i = 0; i < BL_COUNT(codes); i++)
        if (codes[i] == code) return true;
    return false;
}

bl_status comm_tcp_accept(int listen_fd, double deadline, int *fd)
{
    *fd = -1;
    for (;;) {
        if (!wait_for(listen_fd, POLLIN, deadline)) {
            if (errno == ETIMEDOUT) return BL_OK;
            return bl_fail_errno(BL_EIO, "waiting for connections");
        }
        *fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (*fd >= 0) return BL_OK;
        if (!is_of_peer(errno))
            return bl_fail_errno(comm_tcp_is_limit(errno) ? BL_ELIMIT : BL_EIO,
                                 "taking the connections of other ranks");
    }
}

bool comm_tcp_send(int fd, const void *bytes, size_t n_bytes, double deadline)
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

bool comm_tcp_receive(int fd, void *bytes, size_t n_bytes, double deadline)
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
