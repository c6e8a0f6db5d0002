/* SPDX-License-Identifier: Apache-2.0 */
/* tcp.h -- TCP connections between the ranks of a job that have no other: of one host's parent with
 * another's, or of processes that mpirun, srun, torchrun or a program of the user's has started.
 *
 *   place     where some ranks can be reached: their host's addresses, and a port
 *   key       of the job (key_internal.h): a connection without it is rejected (hello.h)
 *
 * Parents and the tasks of mpirun have a random key, which they exchange by MPI; other processes
 * have theirs of the job's secret. The connections are plain TCP: a program that can change packets
 * on the network can change the ranks' data.
 *
 * Every wait here has a limit, and its error names the missing ranks. */
#ifndef BALLAST_JOB_TCP_TCP_H
#define BALLAST_JOB_TCP_TCP_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "job/internal.h"
#include "job/key_internal.h"
#include "job/links_internal.h"

enum { JOB_PLACE_ADDRESSES = 16, JOB_HOST_BYTES = 72, JOB_BUILD_BYTES = 72 };

/* An address of either kind; plain bytes, to be sent between hosts of one byte order. */
typedef struct job_address {
    uint8_t is_v6;     /* 0: it is of IPv4 */
    uint8_t bytes[16]; /* of IPv4 the first 4 */
} job_address;

typedef struct job_place {
    char host[JOB_HOST_BYTES];   /* its name, for errors; NUL-terminated */
    char build[JOB_BUILD_BYTES]; /* bl_build_id of its program; NUL-terminated */
    int32_t first_rank, n_ranks;
    uint16_t port;
    uint16_t n_addresses;
    job_address addresses[JOB_PLACE_ADDRESSES];
    uint64_t process; /* a random number, at a rendezvous */
} job_place;

/* ---- tcp.c ---- */

/* Sockets that listen at one port of several addresses. */
typedef struct job_listener {
    int fds[JOB_PLACE_ADDRESSES], n;
    uint16_t port;
} job_listener;

/* On these addresses or, where there are none, on all; on `port` or, where that is 0, on a free
 * one. Addresses that this host does not have are left out unless it has none. Close it, also after
 * a failure. BL_ELIMIT, BL_EIO. */
bl_status job_tcp_listen(const job_address *addresses, int n_addresses, uint16_t port,
                         job_listener *out);
void job_tcp_close_listener(job_listener *listener); /* a zeroed one is fine */

/* This host's name and addresses, and this program's build: of a job of one host the loopback
 * address; else those of the network interface that the environment variable BALLAST_INTERFACE
 * names (*is_chosen); without it all but those of loopback interfaces, unless there are no others.
 * BL_EUSAGE: no such interface, or it has no address. */
bl_status job_place_describe(bool is_one_host, job_place *place, bool *is_chosen);

/* This process's place, with these ranks of the job, and the listener where they are reached: close
 * it, also after a failure. Ports of all addresses are open, unless the job has one host or the
 * interface is chosen. */
bl_status job_place_open(const bl_launch_info *info, int first_rank, int n_ranks, job_place *place,
                         bool *is_chosen, job_listener *listener);

/* All have this program's build, or BALLAST_ALLOW_BUILD_MISMATCH is set: then rank 0 warns.
 * BL_EUSAGE names two that differ; unless is_quiet, on rank 0 only: all ranks find the same, and
 * the others' text is empty. */
bl_status job_place_compare_builds(const job_place *places, int n_places, int rank, bool is_quiet);

/* Connects, until `deadline` (bl_now_s) at most. -1 with errno. */
int job_tcp_connect(const job_address *address, uint16_t port, double deadline);
/* Whether an errno says that there are no more descriptors: to wait does not help. */
bool job_tcp_is_limit(int code);
/* Whether accept's errno concerns one connection, which is gone then, and not the listening socket:
 * see accept(2). */
bool job_tcp_is_of_peer(int code);

/* All of it until the deadline, or false. The sockets are blocking. */
bool job_tcp_send(int fd, const void *bytes, size_t n_bytes, double deadline);
bool job_tcp_receive(int fd, void *bytes, size_t n_bytes, double deadline);

/* A connected socket's own address. */
bool job_tcp_own_address(int fd, job_address *out);

extern const job_address job_loopback;
bool job_address_is_loopback(const job_address *address);
/* False for other families, and for link-local addresses of IPv6, which mean nothing on another
 * host. An IPv4 address that a socket of IPv6 shows is one of IPv4. */
bool job_address_read(const struct sockaddr *in, job_address *out);
enum { JOB_ADDRESS_TEXT_BYTES = INET6_ADDRSTRLEN };
void job_address_format(const job_address *address, char text[JOB_ADDRESS_TEXT_BYTES]);

/* When to log that one still waits: some seconds after the start, then every half minute. */
typedef struct job_patience {
    double start_s, next_s;
    bool speaks;  /* false: another process of the host does */
    bool unmutes; /* the log of this process is silent otherwise */
} job_patience;

void job_patience_begin(job_patience *patience, const bl_launch_info *info);
/* Logs "waiting since 5 s for ...", if it is time to. */
void job_patience_log(job_patience *patience, const char *format, ...) BL_PRINTF(2, 3);

/* ---- mesh.c ---- */

#define JOB_CONNECT_S 60.0 /* a mesh's limit where all places are known to listen */

typedef struct job_mesh {
    const job_key *key;
    const job_place *places; /* [n_places], in the order of their ranks */
    int n_places, own;
    const job_listener *listener; /* of places[own].port; borrowed */
    const bl_launch_info *info;   /* borrowed; NULL: waits are not logged */
    double limit_s;
    job_patience patience; /* set by connect */
} job_mesh;

/* Each rank of this place with each rank of each other one: into `links`, whose local ranks are
 * this place's. Collective over the places. BL_ERANK names the place or rank that did not come;
 * BL_ELIMIT: too few descriptors. */
bl_status job_mesh_connect(job_mesh *mesh, job_host_links *links);

/* The same of places of one rank each: sockets[n_places], -1 at the own place; the caller's. */
bl_status job_mesh_connect_ranks(job_mesh *mesh, int *sockets);

/* ---- rendezvous.c ---- */

/* Processes that know where rank 0 listens. */
typedef struct job_rendezvous {
    const bl_launch_info *info; /* rank, n_processes, local_rank, n_local */
    const char *address;        /* of rank 0's host: a name or a number */
    uint16_t port;
    const char *port_key; /* where the user sets the port, for errors */
    uint64_t job;         /* a number of the job, the same on all ranks */
    const char *secret;   /* NULL: from a file in dir */
    const char *dir;      /* which all ranks see; NULL: none */
    bool is_quiet;        /* nothing is logged */
    double limit_s;
} job_rendezvous;

/* Rank 0 listens at the port, each other rank tells it where it can be reached and gets the list of
 * all; then all are connected: sockets[n_processes], -1 at the own place; the caller's. Collective.
 * BL_EUSAGE: different builds or numbers of ranks, two processes of one rank, or no common secret;
 * BL_ERANK names who did not come; BL_ELIMIT: too few descriptors. */
bl_status job_rendezvous_connect(const job_rendezvous *rendezvous, int *sockets);

/* ---- torchrun.c ---- */

/* job_rendezvous_connect of the processes that torchrun has started: at MASTER_ADDR, on the port
 * that BALLAST_PORT names, or the one after MASTER_PORT (torchrun's own store has that one); the
 * secret is BALLAST_SECRET or in `dir`. BL_EUSAGE: a variable that is not as torchrun sets it. */
bl_status job_torchrun_connect(const bl_launch_info *info, const char *dir, double limit_s,
                               int *sockets);

/* ---- launcher.c ---- */

/* The processes that mpirun or srun has started: MPI, which is closed again, carries their
 * addresses and a random key; then they are connected: sockets as above. *key is the job's. */
bl_status job_mpi_connect(const bl_launch_info *info, job_key *key, int *sockets);

/* ---- bulk.c ---- */

/* A memory file that all ranks of a job of one host have, for bl_wire_links.shared_fd; -1, on all
 * of them, where the job has several hosts, or a rank cannot open it. Collective. The caller's.
 * BL_ERANK: a rank went away. */
bl_status job_bulk_share(const bl_launch_info *info, const int *sockets, int *fd);

/* The wire of processes that are connected, with that memory. Takes the sockets over, also when it
 * fails. */
bl_status job_open_connected(const bl_launch_info *info, int *sockets, bl_wire_report report,
                             bl_wire **out);

/* ---- mpi.c; mpi_absent.c in a build without MPI ---- */

/* BL_EUSAGE: processes of srun that MPI could not start with, as there is no PMIx; it would end
 * them without a usable error. Opens nothing. */
bl_status job_mpi_check(const bl_launch_info *info);

/* all[n_processes * n_bytes] = n_bytes from each process, by MPI, which is started for that and
 * ended. Once. BL_EUSAGE when MPI does not see all processes, and in a build without it; BL_ERANK:
 * it does not start within the limit. */
bl_status job_mpi_gather(const bl_launch_info *info, const void *own, void *all, size_t n_bytes,
                         double limit_s);

#endif
