/* SPDX-License-Identifier: Apache-2.0 */
/* links.c -- the table of a host's sockets: its memory, its limits, the sockets inside the host. */
#include "job/links_internal.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

int *job_host_links_at(const job_host_links *links, int local, int rank)
{
    return &links->sockets[(size_t)local * (size_t)links->n_ranks + (size_t)rank];
}

void job_host_allow_descriptors(size_t n)
{
    enum { OTHERS = 256 };
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= n + OTHERS) return;
    limit.rlim_cur = limit.rlim_max < n + OTHERS ? limit.rlim_max : n + OTHERS;
    setrlimit(RLIMIT_NOFILE, &limit);
}

bl_status job_host_links_create(int n_ranks, int first_on_host, int n_on_host, job_host_links *out)
{
    *out = (job_host_links){
        .n_ranks = n_ranks, .first_on_host = first_on_host, .n_on_host = n_on_host};
    size_t n = (size_t)n_on_host * (size_t)n_ranks; /* both at most 2^20 */
    out->sockets = malloc(n * sizeof *out->sockets);
    if (!out->sockets) return BL_FAIL(BL_ENOMEM, "the connections of %d ranks", n_ranks);
    for (size_t i = 0; i < n; i++) out->sockets[i] = -1;
    job_host_allow_descriptors(n);
    return BL_OK;
}

void job_host_links_close(job_host_links *links)
{
    size_t n = (size_t)links->n_on_host * (size_t)links->n_ranks;
    for (size_t i = 0; links->sockets && i < n; i++)
        if (links->sockets[i] >= 0) close(links->sockets[i]);
    free(links->sockets);
    links->sockets = NULL;
}

bl_status job_host_links_connect(job_host_links *links)
{
    for (int i = 0; i < links->n_on_host; i++)
        for (int k = 0; k < i; k++) {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
                return bl_fail_errno(BL_EIO, "the connections of %d ranks: socketpair",
                                     links->n_on_host);
            *job_host_links_at(links, i, links->first_on_host + k) = ends[0];
            *job_host_links_at(links, k, links->first_on_host + i) = ends[1];
        }
    return BL_OK;
}
