/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- shared by the files behind launch.h. */
#ifndef BALLAST_JOB_INTERNAL_H
#define BALLAST_JOB_INTERNAL_H

#include "job/launch.h"
#include "job/key_internal.h"
#include "comm/wire.h"

/* What a parent hands to a child, by one variable of its environment; descriptors are the child's
 * from its start. */
typedef struct bl_launch_child {
    int parent;        /* process */
    int rank, n_ranks; /* of the job */
    int first_on_host, n_on_host;
    int control_fd; /* socket to the parent: job_message, one a packet */
    int line_fd;    /* memory file of bl_log_share_line */
    int bulk_fd;    /* bl_wire_links.shared_fd */
    int memory_fd;  /* bl_launch_host_memory_fd */
    int *sockets;   /* [n_ranks]: bl_wire_links.sockets */
} bl_launch_child;

/* environment.c. The launchers' variables are numbers that agree, and each launcher's are complete:
 * this process does not train alone because one is missing. Warns of an incomplete set where
 * another launcher's places this process among several: `info`, of bl_launch_read. BL_EUSAGE names
 * variable and value. */
bl_status job_environment_check(const bl_launch_info *info);

/* The definition "NAME=value", the caller's to free; NULL: no memory. */
char *job_child_format(const bl_launch_child *child);
bool job_child_is(const char *definition); /* of that name */
/* BL_EUSAGE: the variable is not as job_child_format writes it. Free `out` after success. */
bl_status job_child_read(bl_launch_child *out);
void job_child_free(bl_launch_child *child);
int job_child_control(void); /* its control_fd; -1: this process is not a child. Takes no memory */

/* What a child tells its parent: the job's error, in place of printing it; or BL_OK, when it has
 * closed its wire and nothing but its exit is left, of all ranks of the job then; or BL_ESTOPPED
 * without a text, when it stops and all ranks of the job know. */
typedef struct job_message {
    bl_error error;
} job_message;

/* ---- report.c ---- */

/* Prints the job's error, or has the parent print it: the last line of this process. */
void job_report(const bl_error *error);
/* The job has been reported, if there was something to report. A child reports to its parent that
 * it has closed. Returns st, without a text. */
bl_status job_end_report(bl_status st);

struct bl_launch {
    bl_launch_info info;
    bl_wire *wire;
    bl_launch_leave_fn leave;
    job_key key;   /* of the job, where mpirun or srun has started its processes */
    int memory_fd; /* -1: none */
    /* when this process's main thread first saw that the job has failed; 0: it has not */
    double told_s;
};

#endif
