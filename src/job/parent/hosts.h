/* SPDX-License-Identifier: Apache-2.0 */
/* hosts.h -- connects the ranks of several hosts before they are started. Each host has a parent,
 * which is a process of the launch and starts the host's ranks. */
#ifndef BALLAST_JOB_PARENT_HOSTS_H
#define BALLAST_JOB_PARENT_HOSTS_H

#include "job/parent/children.h"

/* Makes `links` of this host's n_here ranks, with the connections to those of all other hosts;
 * job_host_links_connect adds their own. Collective over the processes of `launch`, one per host,
 * which have agreed on n_here. Close `links` after a failure, too. BL_ERANK names the hosts that
 * did not connect. */
bl_status job_hosts_meet(bl_launch *launch, int n_here, job_host_links *links);

#endif
