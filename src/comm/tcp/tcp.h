/* SPDX-License-Identifier: Apache-2.0 */
/* tcp.h -- TCP connections between the ranks of a job that have no other: of one host's parent with another's, or of processes that torchrun has started.
 *
 *   place     where some ranks can be reached: their host's addresses, and a port
 *   token     a random number of the job: who connects without it is turned away
 *
 * Parents tell each other the token by MPI, so they alone know it. torchrun's ranks get it from rank 0, which gives it to whoever first names
 * itself as an expected rank of the job: there it keeps jobs apart, not an attacker out. The connections are plain TCP: whoever can read
 * the network can read the token.
 *
 * Everything here waits up to a limit, and says then who did not come. */
#ifndef BALLAST_COMM_TCP_TCP_H
#define BALLAST_COMM_TCP_TCP_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/parent/children.h"

enum { COMM_TOKEN_BYTES = 32, COMM_PLACE_ADDRESSES = 16, COMM_HOST_BYTES = 72 };

/* An address of either kind; plain bytes, to be sent between hosts of one byte order. */
typedef struct comm_address {
    uint8_t is_v6;     /* 0: it is of IPv4 */
    uint8_t bytes[16]; /* of IPv4 the first 4 */
} comm_address;

typedef struct comm_place {
    char host[COMM_HOST_BYTES]; /* its name, for errors; NUL-terminated */
    int32_t first_rank, n_ranks;
    uint16_t port;
    uint16_t n_addresses;
    comm_address addresses[COMM_PLACE_ADDRESSES];
} comm_place;

/* ---- tcp.c ---- */

/* A listening socket on all addresses, on *port or, where that is 0, on a free one, then in *port. The caller's. BL_ELIMIT, BL_EIO. */
bl_status comm_tcp_listen(uint16_t *port, int *fd);

/* This host's name and addresses: those of the network interface that the environment variable BALLAST_INTERFACE names; without it all
 * but those of loopback interfaces, unless there are no others. BL_EUSAGE: no such interface, or it has no address. */
bl_status comm_place_find_addresses(comm_place *place);

/* Connects, until `deadline` (bl_now_s) at most. -1 with errno. */
int comm_tcp_connect(const comm_address *address, uint16_t port, double deadline);
/* The next one to connect; *fd -1: none until the deadline. BL_ELIMIT: no more descriptors; BL_EIO. */
bl_status comm_tcp_accept(int listen_fd, double deadline, int *fd);
/* Whether an errno says that there are no more descriptors: to wait does not help. */
bool comm_tcp_is_limit(int code);
/* For what an accepted connection says first, which a peer sends at once: a stranger that is silent holds up the others. */
static const double COMM_HELLO_S = 0.5;

/* All of it until the deadline, or false. The sockets are blocking. */
bool comm_tcp_send(int fd, const void *bytes, size_t n_bytes, double deadline);
bool comm_tcp_receive(int fd, void *bytes, size_t n_bytes, double deadline);

/* A connected socket's own address. */
bool comm_tcp_own_address(int fd, comm_address *out);

/* False for other families, and for link-local addresses of IPv6, which mean nothing on another host. An IPv4 address that a socket of IPv6
 * shows is one of IPv4. */
bool comm_address_read(const struct sockaddr *in, comm_address *out);
enum { COMM_ADDRESS_TEXT_BYTES = INET6_ADDRSTRLEN };
void comm_address_format(const comm_address *address, char text[COMM_ADDRESS_TEXT_BYTES]);

/* ---- mesh.c ---- */

typedef struct comm_mesh {
    const uint8_t *token;     /* [COMM_TOKEN_BYTES] */
    const comm_place *places; /* [n_places], in the order of their ranks */
    int n_places, own;
    int listen_fd; /* of places[own].port; borrowed */
    double limit_s;
} comm_mesh;

/* Each rank of this place with each rank of each other one: into `links`, whose local ranks are this place's. Collective over the places. BL_ERANK names
 * the place or rank that did not come; BL_ELIMIT: too few descriptors. */
bl_status comm_mesh_connect(const comm_mesh *mesh, comm_host_links *links);

/* ---- torchrun.c ---- */

/* The processes that torchrun has started meet at MASTER_ADDR, on the port that BALLAST_PORT names, or the one after MASTER_PORT (torchrun's own store
 * has that one), and are connected: sockets[n_processes], -1 at the own place; the caller's. Collective. BL_EUSAGE: a variable that is not as torchrun
 * sets it; BL_ERANK names who did not come; BL_ELIMIT: too few descriptors. */
bl_status comm_torchrun_meet(const bl_launch_info *info, int *sockets);

#endif
