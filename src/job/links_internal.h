/* SPDX-License-Identifier: Apache-2.0 */
/* links_internal.h -- the connections of a host's ranks, before they are started: a socket per
 * local rank and rank of the job. */
#ifndef BALLAST_JOB_LINKS_INTERNAL_H
#define BALLAST_JOB_LINKS_INTERNAL_H

#include <stddef.h>

#include "base/status.h"

/* The connections of one host's ranks, before they are started. */
typedef struct job_host_links {
    int n_ranks, first_on_host, n_on_host;
    int *sockets; /* [n_on_host * n_ranks]: of each local rank to each rank of the job; -1: none */
} job_host_links;

/* Lets this process open n descriptors and some more: up to the hard limit; beyond it, the call
 * that opens one fails. */
void job_host_allow_descriptors(size_t n);

/* All -1. BL_ENOMEM. Close it after a failure, too. */
bl_status job_host_links_create(int n_ranks, int first_on_host, int n_on_host, job_host_links *out);
/* The ranks of the host with each other. BL_ELIMIT: too few descriptors. */
bl_status job_host_links_connect(job_host_links *links);
/* Of the local rank number `local` to a rank of the job. */
int *job_host_links_at(const job_host_links *links, int local, int rank);
void job_host_links_close(job_host_links *links);

#endif
