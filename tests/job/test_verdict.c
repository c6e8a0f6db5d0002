/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a job's ends, row by row, and how the ends of children are read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <signal.h>

#include "base/sizes.h"
#include "job/parent/verdict.h"

/* ---- the table ---- */

/* Without a report, with indirect. A rank's own report is the verdict, except after a second
 * request. */
static const struct {
    job_evidence evidence;
    job_judgement without, indirect;
} rows[] = {
    {JOB_LEFT_AT_ONCE, {JOB_PRINT_STOP, JOB_NO_WAIT}, {JOB_PRINT_STOP, JOB_NO_WAIT}},
    {JOB_KILLED_ON_REQUEST,
     {JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT},
     {JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT}},
    {JOB_KILLED, {JOB_PRINT_KILLED, JOB_NO_WAIT}, {JOB_PRINT_KILLED, JOB_NO_WAIT}},
    {JOB_STOPPED, {JOB_PRINT_STOP, JOB_NO_WAIT}, {JOB_PRINT_STOP, JOB_NO_WAIT}},
    {JOB_STOPPED_ALONE, {JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT}, {JOB_PRINT_STOP_TO_ALL, JOB_NO_WAIT}},
    {JOB_EXITED, {JOB_PRINT_EXITED, JOB_SHORT_WAIT}, {JOB_PRINT_EXITED, JOB_SHORT_WAIT}},
    {JOB_EXITED_LOST, {JOB_PRINT_EXITED, JOB_LONG_WAIT}, {JOB_PRINT_REPORT, JOB_LONG_WAIT}},
    {JOB_LATE_IN_EXIT, {JOB_WARN_OF_EXIT, JOB_NO_WAIT}, {JOB_PRINT_REPORT, JOB_LONG_WAIT}},
    {JOB_LATE, {JOB_PRINT_LATE, JOB_LONG_WAIT}, {JOB_PRINT_REPORT, JOB_LONG_WAIT}},
    {JOB_ENDED_WELL, {JOB_SUCCESS, JOB_NO_WAIT}, {JOB_PRINT_REPORT, JOB_NO_WAIT}},
};

static void assert_judged(job_evidence evidence, job_reported report, job_judgement expected)
{
    job_judgement found = job_judge(evidence, report);
    if (found.verdict != expected.verdict || found.wait != expected.wait)
        fail_msg("evidence %d, report %d: verdict %d and wait %d, not %d and %d", evidence, report,
                 found.verdict, found.wait, expected.verdict, expected.wait);
}

static void test_every_row(void **state)
{
    (void)state;
    assert_int_equal(BL_COUNT(rows), JOB_N_EVIDENCES);
    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        job_verdict own = rows[i].evidence == JOB_LEFT_AT_ONCE ? JOB_PRINT_STOP : JOB_PRINT_REPORT;
        assert_int_equal(rows[i].evidence, i);
        assert_judged(rows[i].evidence, JOB_NO_REPORT, rows[i].without);
        assert_judged(rows[i].evidence, JOB_INDIRECT_REPORT, rows[i].indirect);
        assert_judged(rows[i].evidence, JOB_REPORT, (job_judgement){own, JOB_NO_WAIT});
    }
}

/* ---- the ends of children ---- */

enum { STOP_CODE = 75, LOST_CODE = 7 };

static int exited(int code) /* wait(2)'s status */
{
    return code << 8;
}

typedef struct end_case {
    job_child child[3]; /* wait_status, n_th, is_ended_by_us */
    job_requests requests;
    job_evidence evidence;
    int first; /* -1: none */
} end_case;

static const job_child WELL = {.n_th = 9};

static void test_ends_of_children(void **state)
{
    const job_child killed = {.wait_status = SIGSEGV, .n_th = 3},
                    asked = {.wait_status = SIGTERM, .n_th = 2},
                    ended = {.wait_status = SIGKILL, .n_th = 1, .is_ended_by_us = true},
                    exits = {.wait_status = exited(1), .n_th = 4},
                    exits_first = {.wait_status = exited(3), .n_th = 2},
                    stops = {.wait_status = exited(STOP_CODE), .n_th = 2},
                    lost = {.wait_status = exited(LOST_CODE), .n_th = 1};
    const job_requests none = {0}, term = {.asked = SIGTERM}, twice = {.is_left_at_once = true},
                       known = {.is_stop_known = true}, done = {.is_killed_in_exit = true};
    const end_case cases[] = {
        {{WELL, WELL, WELL}, none, JOB_ENDED_WELL, -1},
        {{WELL, ended, WELL}, none, JOB_LATE, 1},
        {{WELL, ended, WELL}, done, JOB_LATE_IN_EXIT, 1},
        {{ended, lost, WELL}, none, JOB_EXITED_LOST, 1},
        {{ended, lost, WELL}, done, JOB_EXITED_LOST, 1},
        {{lost, exits, ended}, none, JOB_EXITED, 1},
        {{exits, exits_first, lost}, none, JOB_EXITED, 1},
        {{lost, stops, WELL}, none, JOB_STOPPED_ALONE, 1},
        {{lost, stops, WELL}, known, JOB_STOPPED, 1},
        {{stops, exits, WELL}, none, JOB_STOPPED_ALONE, 0},
        {{exits_first, lost, killed}, none, JOB_KILLED, 2},
        {{killed, asked, WELL}, none, JOB_KILLED, 1},
        {{killed, asked, WELL}, term, JOB_KILLED_ON_REQUEST, 1},
        {{killed, exits, WELL}, term, JOB_KILLED, 0},
        {{killed, asked, ended}, twice, JOB_LEFT_AT_ONCE, 1},
    };

    (void)state;
    assert_int_equal(bl_status_exit_code(BL_ESTOPPED), STOP_CODE);
    assert_int_equal(bl_status_exit_code(BL_ERANK), LOST_CODE);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        end_case c = cases[i];
        job_children children = {.child = c.child, .n = 3};
        const job_child *first;
        job_evidence found = job_find_evidence(&children, &c.requests, &first);
        if (found != c.evidence) fail_msg("case %zu: evidence %d, not %d", i, found, c.evidence);
        if (first != (c.first < 0 ? NULL : &c.child[c.first]))
            fail_msg("case %zu: another child was first", i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_row),
                                       cmocka_unit_test(test_ends_of_children)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
