/* SPDX-License-Identifier: Apache-2.0 */
/* verdict.h -- how a parent judges a job when none of its ranks is left: from how they ended, and
 * from their reports. verdict.c has the table; parent.c prints and sends the verdict. */
#ifndef BALLAST_JOB_PARENT_VERDICT_H
#define BALLAST_JOB_PARENT_VERDICT_H

#include "job/parent/children.h"

/* How the ranks ended: the strongest evidence first. */
typedef enum job_evidence {
    JOB_LEFT_AT_ONCE,      /* a second request: the parent has killed them */
    JOB_KILLED_ON_REQUEST, /* by the signal that asked to stop, before it began */
    JOB_KILLED,
    JOB_STOPPED,       /* with the exit code of a stop, which the ranks of all hosts know */
    JOB_STOPPED_ALONE, /* the same, but others may not know */
    JOB_EXITED,        /* with another exit code than 0 and that of a lost rank */
    JOB_EXITED_LOST,   /* with that of a lost rank */
    JOB_LATE_IN_EXIT,  /* killed by the parent: it had done all */
    JOB_LATE,          /* killed by the parent: it did not end when the others did */
    JOB_ENDED_WELL,
    JOB_N_EVIDENCES
} job_evidence;

/* What a rank has reported: of a rank that has gone, the parent knows more than the others and NCCL
 * do. */
typedef enum job_reported {
    JOB_NO_REPORT,
    JOB_INDIRECT_REPORT,
    JOB_REPORT,
    JOB_N_REPORTS
} job_reported;

typedef enum job_verdict {
    JOB_SUCCESS,
    JOB_WARN_OF_EXIT,
    JOB_PRINT_REPORT,
    JOB_PRINT_STOP,
    JOB_PRINT_STOP_TO_ALL, /* sent to the other hosts' parents, too */
    JOB_PRINT_KILLED,
    JOB_PRINT_EXITED,
    JOB_PRINT_LATE
} job_verdict;

/* For how long a job over several hosts first waits for the others' reports. */
typedef enum job_wait { JOB_NO_WAIT, JOB_SHORT_WAIT, JOB_LONG_WAIT } job_wait;

typedef struct job_judgement {
    job_verdict verdict;
    job_wait wait;
} job_judgement;

job_judgement job_judge(job_evidence evidence, job_reported report);

/* What the parent itself knows of the end. */
typedef struct job_requests {
    int asked;              /* the signal that asked to stop; 0: none */
    bool is_left_at_once;   /* it came twice */
    bool is_stop_known;     /* to the ranks of all hosts */
    bool is_killed_in_exit; /* those that were left had closed their communicators */
} job_requests;

/* *first: the first child to end that way; NULL: none. All have ended. */
job_evidence job_find_evidence(const job_children *children, const job_requests *requests,
                               const job_child **first);

#endif
