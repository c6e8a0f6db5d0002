/* SPDX-License-Identifier: Apache-2.0 */
/* children.h -- the ranks of a host as child processes: their start, messages and end. Used by one
 * thread, the parent's main one. */
#ifndef BALLAST_JOB_PARENT_CHILDREN_H
#define BALLAST_JOB_PARENT_CHILDREN_H

#include <signal.h>
#include <sys/types.h>

#include "job/internal.h"
#include "job/links_internal.h"

typedef struct job_child {
    pid_t pid;
    int rank;       /* of the job */
    int control_fd; /* this end of its socket */
    bool is_running, is_ended_by_us;
    int wait_status; /* of wait(2), once it does not run */
    int n_th;        /* exit order, from 1 */
} job_child;

typedef struct job_children {
    job_child *child;
    int n, n_running, n_ended;
    void *line; /* of bl_log_share_line */
} job_children;

/* Starts a child for each rank of the host, each in a separate process group (Ctrl-C reaches the
 * parent alone), with `mask` as its signal mask, no standard input, and of this process's other
 * descriptors none but its own. Closes `links`. After a failure the children that did start are
 * killed. Free `out` after a failure, too. */
bl_status job_children_start(job_host_links *links, char *const *argv, const sigset_t *mask,
                             job_children *out);
void job_children_free(job_children *children); /* none is running */

/* Takes note of those that have ended. */
void job_children_reap(job_children *children);
void job_children_signal(const job_children *children, int signal_number); /* those that run */
void job_children_kill(job_children *children);

/* What child i has to say: true, and *out is a job's error. Does not wait. */
bool job_children_read(const job_children *children, int i, bl_error *out);

#endif
