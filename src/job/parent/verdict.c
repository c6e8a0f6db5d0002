/* SPDX-License-Identifier: Apache-2.0 */
/* verdict.c -- the table of a job's ends.
 *
 * A rank's own report is the job's error, whatever ended the others. Without one, or where it says
 * only that another rank has gone, the parent names the rank that went first. A rank that only saw
 * another host's go is the last to report: that host's parent knows why, and may take LEFT_S
 * (parent.c) and SHORT_WAIT, and ranks with much pinned memory seconds to go. */
#include "job/parent/verdict.h"

#include <assert.h>
#include <sys/wait.h>

static const job_judgement judgements[JOB_N_EVIDENCES][JOB_N_REPORTS] = {
    [JOB_LEFT_AT_ONCE] = {{JOB_PRINT_STOP, JOB_NO_WAIT},
                          {JOB_PRINT_STOP, JOB_NO_WAIT},
                          {JOB_PRINT_STOP, JOB_NO_WAIT}},
    [JOB_KILLED_ON_REQUEST] = {{JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT},
                               {JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT},
                               {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_KILLED] = {{JOB_PRINT_KILLED, JOB_NO_WAIT},
                    {JOB_PRINT_KILLED, JOB_NO_WAIT},
                    {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_STOPPED] = {{JOB_PRINT_STOP, JOB_NO_WAIT},
                     {JOB_PRINT_STOP, JOB_NO_WAIT},
                     {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_STOPPED_ALONE] = {{JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT},
                           {JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT},
                           {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_EXITED] = {{JOB_PRINT_EXITED, JOB_SHORT_WAIT},
                    {JOB_PRINT_EXITED, JOB_SHORT_WAIT},
                    {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_EXITED_LOST] = {{JOB_PRINT_EXITED, JOB_LONG_WAIT},
                         {JOB_PRINT_REPORT, JOB_LONG_WAIT},
                         {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_LATE_IN_EXIT] = {{JOB_WARN_OF_EXIT, JOB_NO_WAIT},
                          {JOB_PRINT_REPORT, JOB_LONG_WAIT},
                          {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_LATE] = {{JOB_PRINT_LATE, JOB_LONG_WAIT},
                  {JOB_PRINT_REPORT, JOB_LONG_WAIT},
                  {JOB_PRINT_REPORT, JOB_NO_WAIT}},
    [JOB_ENDED_WELL] = {{JOB_SUCCESS, JOB_NO_WAIT},
                        {JOB_PRINT_REPORT, JOB_NO_WAIT},
                        {JOB_PRINT_REPORT, JOB_NO_WAIT}},
};

job_judgement job_judge(job_evidence evidence, job_reported report)
{
    assert(evidence < JOB_N_EVIDENCES && report < JOB_N_REPORTS);
    return judgements[evidence][report];
}

static bool has_exited_with(const job_child *c, bl_status st)
{
    return WIFEXITED(c->wait_status) && WEXITSTATUS(c->wait_status) == bl_status_exit_code(st);
}

static job_evidence classify(const job_child *c, const job_requests *r)
{
    if (WIFSIGNALED(c->wait_status) && c->is_ended_by_us)
        return r->is_killed_in_exit ? JOB_LATE_IN_EXIT : JOB_LATE;
    if (WIFSIGNALED(c->wait_status)) return JOB_KILLED;
    if (has_exited_with(c, BL_OK)) return JOB_ENDED_WELL;
    return has_exited_with(c, BL_ERANK) ? JOB_EXITED_LOST : JOB_EXITED;
}

job_evidence job_find_evidence(const job_children *children, const job_requests *requests,
                               const job_child **first)
{
    job_evidence found = JOB_ENDED_WELL;

    *first = NULL;
    for (int i = 0; i < children->n; i++) {
        const job_child *c = &children->child[i];
        job_evidence evidence = classify(c, requests);
        assert(!c->is_running);
        if (evidence > found || evidence == JOB_ENDED_WELL) continue;
        if (evidence == found && c->n_th > (*first)->n_th) continue;
        found = evidence;
        *first = c;
    }
    if (requests->is_left_at_once) return JOB_LEFT_AT_ONCE;
    if (found == JOB_KILLED && WTERMSIG((*first)->wait_status) == requests->asked)
        return JOB_KILLED_ON_REQUEST;
    if (found == JOB_EXITED && has_exited_with(*first, BL_ESTOPPED))
        return requests->is_stop_known ? JOB_STOPPED : JOB_STOPPED_ALONE;
    return found;
}
