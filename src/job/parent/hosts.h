/* SPDX-License-Identifier: Apache-2.0 */
/* hosts.h -- the ranks of several hosts, each with a parent. */
#ifndef BALLAST_JOB_PARENT_HOSTS_H
#define BALLAST_JOB_PARENT_HOSTS_H

#include "job/parent/children.h"

/* Makes `links` of this host's n_here ranks, with the connections to those of all other hosts;
 * job_host_links_connect adds their own. Collective over the processes of `launch`, one per host,
 * which have agreed on n_here. Close `links` after a failure, too. BL_ERANK names who did not
 * come. */
bl_status job_hosts_meet(bl_launch *launch, int n_here, job_host_links *links);

#endif
