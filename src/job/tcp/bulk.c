/* SPDX-License-Identifier: Apache-2.0 */
/* bulk.c -- a memory file in common for processes of one host that were started each by itself.
 * Rank 0 makes it, the others open it by /proc, which lets processes of one user do so. It has no
 * name, and is gone with the last of them. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "job/tcp/tcp.h"

static const double SHARE_S = 60.0;

typedef struct offer {
    int64_t pid, fd; /* fd -1: there is none */
    uint64_t device, inode;
} offer;

static int create_file(offer *o)
{
    struct stat info;
    int fd = memfd_create("ballast-bulk", MFD_CLOEXEC);

    *o = (offer){.pid = getpid(), .fd = fd};
    if (fd >= 0 && fstat(fd, &info) == 0) {
        o->device = info.st_dev;
        o->inode = info.st_ino;
    }
    return fd;
}

/* -1: of another namespace of processes, say. */
static int open_file(const offer *o)
{
    char path[64];
    struct stat info;

    if (o->fd < 0) return -1;
    snprintf(path, sizeof path, "/proc/%" PRId64 "/fd/%" PRId64, o->pid, o->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return -1;
    if (fstat(fd, &info) == 0 && info.st_dev == o->device && info.st_ino == o->inode) return fd;
    close(fd);
    return -1;
}

static bl_status fail_gone(int rank)
{
    return bl_fail_errno(BL_ERANK, "rank %d went away while ranks met", rank);
}

/* Rank 0: whether all have it. */
static bl_status offer_to_all(const offer *o, int n, const int *sockets, double deadline,
                              bool *have_all)
{
    uint8_t has;

    for (int i = 1; i < n; i++)
        if (!job_tcp_send(sockets[i], o, sizeof *o, deadline)) return fail_gone(i);
    *have_all = o->fd >= 0;
    for (int i = 1; i < n; i++) {
        if (!job_tcp_receive(sockets[i], &has, 1, deadline)) return fail_gone(i);
        *have_all &= has == 1;
    }
    has = *have_all;
    for (int i = 1; i < n; i++)
        if (!job_tcp_send(sockets[i], &has, 1, deadline)) return fail_gone(i);
    return BL_OK;
}

static bl_status take_offer(int socket, double deadline, int *fd, bool *have_all)
{
    offer o;
    uint8_t has;

    if (!job_tcp_receive(socket, &o, sizeof o, deadline)) return fail_gone(0);
    *fd = open_file(&o);
    has = *fd >= 0;
    if (!job_tcp_send(socket, &has, 1, deadline) || !job_tcp_receive(socket, &has, 1, deadline))
        return fail_gone(0);
    *have_all = has == 1;
    return BL_OK;
}

bl_status job_bulk_share(const bl_launch_info *info, const int *sockets, int *out)
{
    double deadline = bl_now_s() + SHARE_S;
    bool have_all = false;
    bl_status st;
    offer o;
    int fd = -1;

    *out = -1;
    if (info->n_local != info->n_processes) return BL_OK;
    if (info->rank == 0) {
        fd = create_file(&o);
        st = offer_to_all(&o, info->n_processes, sockets, deadline, &have_all);
    } else {
        st = take_offer(sockets[0], deadline, &fd, &have_all);
    }
    if (st == BL_OK && have_all)
        *out = fd;
    else if (fd >= 0)
        close(fd);
    return st;
}

bl_status job_open_connected(const bl_launch_info *info, int *sockets, bl_wire_report report,
                             bl_wire **out)
{
    bl_wire_links links = {.rank = info->rank,
                           .n_processes = info->n_processes,
                           .sockets = sockets,
                           .first_on_host = info->rank - info->local_rank,
                           .n_on_host = info->n_local};

    *out = NULL;
    bl_status st = job_bulk_share(info, sockets, &links.shared_fd);
    if (st == BL_OK) return bl_wire_open_sockets(&links, report, out);
    for (int i = 0; i < info->n_processes; i++)
        if (sockets[i] >= 0) close(sockets[i]);
    return st;
}
