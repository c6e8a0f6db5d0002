/* SPDX-License-Identifier: Apache-2.0 */
/* A small training on three emulated GPUs, a process each, in which one rank is killed, stopped,
 * slowed down or made to fail where it launches a collective of NCCL: at any launch, of the
 * warm-up, of a step or of a save, as it makes its communicators and as it destroys them. Launches
 * are counted in a run in which nothing happens. After each
 *   - the parent ends in time, with the right code and one line of error that names the rank
 *   - no process is left
 *   - resumed, the run ends as the undisturbed one, bit for bit
 * A rank that is slower than the others, by less than the deadline, must not be seen at all.
 *
 * Without arguments a sample; "all": every launch. test_process_faults has the faults of the wire
 * and of files. */
#include "cuda_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "emulator/emulated.h"
#include "mpi_job.h"

enum { N_RANKS = 3, TEXT_BYTES = 256 };

/* The deadline is long enough that a loaded machine makes no innocent rank late. */
static const double DEADLINE_S = 20, LIMIT_S = 600;

static bool is_all; /* every launch */

/* A fault and its effects. */
typedef struct action {
    const char *what;        /* BALLAST_EMULATED_FAULT */
    int code;                /* 0: not noticed */
    const char *line;        /* with the rank's number */
    bool waits;              /* for the deadline */
    int n_sample, n_resumed; /* of the sample */
} action;

static const action actions[] = {
    {"kill", 7, "rank %d (process ", false, 5, 2},
    {"fail", 4, "rank %d: nccl", false, 4, 1},
    {"stop", 7, "rank %d ", true, 2, 1},
    {"slow=2", 0, NULL, false, 2, 0},
};

/* ---- one run ---- */

static void make_args(golden_args *args, const char *output, bool resumes)
{
    *args = (golden_args){0};
    cuda_runs_standard(args, output, N_RANKS);
    runs_set(args, "save_steps", "1");
    runs_set(args, "max_steps", "2"); /* also in the strict mode: the second is resumed */
    runs_set(args, "step_deadline_s", "%g", DEADLINE_S);
    if (!resumes) return;
    runs_unset(args, "overwrite_output_dir");
    runs_set(args, "resume_from_checkpoint", "true");
}

/* The exit code; the log is in child->log. */
static int train(runs_child *child, const char *output, const char *fault, bool resumes)
{
    golden_args args;
    make_args(&args, output, resumes);
    *child = (runs_child){0};
    setenv("BALLAST_EMULATED_FAULT", fault, 1);
    runs_start(child, "train", &args);
    int code = runs_wait(child, LIMIT_S);
    unsetenv("BALLAST_EMULATED_FAULT");
    golden_args_free(&args);
    return code;
}

static void fail_with_log(const char *fault, const char *what, const runs_child *child)
{
    char *log = runs_read(child->log, NULL);
    fail_msg("%s: %s\n%s", fault, what, log);
    free(log);
}

/* ---- one fault ---- */

static double worst_s; /* of the runs with a fault that is waited for, the deadline left out */

static void try_fault(const action *a, int rank, const char *when, bool is_resumed)
{
    char fault[TEXT_BYTES], line[TEXT_BYTES];
    const char *output = runs_path("struck");
    runs_child child;

    snprintf(fault, sizeof fault, "%d:%s:%s", rank, when, a->what);
    double began_s = bl_now_s();
    int code = train(&child, output, fault, false);
    double took_s = bl_now_s() - began_s - (a->waits ? DEADLINE_S : 0);
    mpi_assert_nobody_left(fault);
    if (code != a->code) {
        snprintf(line, sizeof line, "exit code %d, not %d", code, a->code);
        fail_with_log(fault, line, &child);
    }
    if (a->waits && took_s > worst_s) worst_s = took_s;
    if (a->line) {
        bool is_nameless =
            rank == 0 && a->code == 4; /* the first rank's own errors have no number */
        if (is_nameless)
            snprintf(line, sizeof line, "error: nccl");
        else
            snprintf(line, sizeof line, a->line, rank);
        mpi_assert_error(&child, line);
        if (!is_resumed) return;
        code = train(&child, output, "", true);
        if (code != 0) fail_with_log(fault, "not resumed", &child);
    }
    if (!runs_are_same(runs_path("whole"), output)) fail_with_log(fault, "another adapter", &child);
}

/* The launches of a rank in the undisturbed run. */
static int count_launches(int rank)
{
    char *log = runs_read(runs_path("launches.%d", rank), NULL), *at = log;
    int n = 0;
    for (; (at = strstr(at, "launch ")); at++) n++;
    free(log);
    return n;
}

static void run_undisturbed(void)
{
    runs_child child;
    setenv("BALLAST_EMULATED_NCCL_LOG", runs_path("launches"), 1);
    int code = train(&child, runs_path("whole"), "", false);
    unsetenv("BALLAST_EMULATED_NCCL_LOG");
    if (code != 0) fail_with_log("none", "failed", &child);
}

/* ---- tests ---- */

static void test_at_launches(void **state)
{
    (void)state;
    run_undisturbed();
    int n_launches = count_launches(0);
    assert_true(n_launches > 20);
    for (int rank = 1; rank < N_RANKS; rank++) assert_int_equal(count_launches(rank), n_launches);
    for (size_t i = 0; i < BL_COUNT(actions); i++) {
        const action *a = &actions[i];
        int n_tried = is_all ? n_launches : a->n_sample;
        for (int t = 0; t < n_tried; t++) {
            char when[16];
            /* The first and the last, and between them evenly; another rank each time. */
            int n = is_all ? t + 1 : 1 + t * (n_launches - 1) / (n_tried - 1);
            snprintf(when, sizeof when, "%d", n);
            try_fault(a, (t + (int)i) % N_RANKS, when, is_all || t >= n_tried - a->n_resumed);
        }
    }
    printf("%d launches a rank; with a stopped rank %.1f s and the deadline\n", n_launches,
           worst_s);
}

static void test_at_start_and_end(void **state)
{
    static const char *const moments[] = {"init", "destroy"};
    (void)state;
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < (is_all ? 3 : 1); i++)
            try_fault(&actions[i], (1 + m + i) % N_RANKS, moments[m], m == 1);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_at_launches),
        cmocka_unit_test(test_at_start_and_end),
    };
    is_all = argc == 2 && strcmp(argv[1], "all") == 0;
    if (cuda_runs_are_slow() && !is_all) {
        printf("skip: the strict mode takes too long for so many runs\n");
        return CUDA_SKIPPED;
    }
    if (!emulated_cuda_have_devices(3)) return CUDA_SKIPPED;
    setenv("BALLAST_EMULATED_DEVICES", "3", 1);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
