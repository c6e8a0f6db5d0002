/* SPDX-License-Identifier: Apache-2.0 */
/* System calls that fail in a training: strace attaches to the child and makes the K-th call of a
 * kind fail in each thread that gets there.
 *
 *   test_faults_syscalls [POINTS]      how many points in all (60), spread over kinds, errors and
 *                                      calls
 *
 * Left out: errors of write that the program's only writes, to the log and to eventfds, never see.
 * Skipped where strace is missing or may not trace. */
#include "faults.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"

enum { EXIT_INPUT = 3, EXIT_LIMIT = 4, EXIT_CHECKPOINT = 5, EXIT_SKIPPED = 77, MAX_THREADS = 256 };

typedef struct error_name {
    int code;
    const char *name;
} error_name;

static const error_name error_names[] = {
    {EIO, "EIO"},       {ENOSPC, "ENOSPC"},     {ENOMEM, "ENOMEM"}, {EMFILE, "EMFILE"},
    {EACCES, "EACCES"}, {EINTR, "EINTR"},       {EAGAIN, "EAGAIN"}, {ENOLCK, "ENOLCK"},
    {ENOSYS, "ENOSYS"}, {ENOTSUP, "EOPNOTSUPP"}};

typedef struct fault {
    const char *call;
    int error;
    bool is_harmless; /* the result must be as if nothing had happened */
    bool has_no_path;
} fault;

static const fault faults[] = {
    {"openat", EIO, false, false},     {"openat", EACCES, false, false},
    {"openat", EMFILE, false, false},  {"openat", ENOSPC, false, false},
    {"openat", ENOMEM, false, false},  {"read", EIO, false, false},
    {"read", EINTR, true, false},      {"pread64", EIO, false, false},
    {"pread64", EINTR, true, false},   {"write", EINTR, true, false},
    {"pwrite64", EIO, false, false},   {"pwrite64", ENOSPC, false, false},
    {"pwrite64", EINTR, true, false},  {"fsync", EIO, false, false},
    {"fsync", ENOSPC, false, false},   {"rename", EIO, false, false},
    {"rename", ENOSPC, false, false},  {"rename", EACCES, false, false},
    {"mkdir", EACCES, false, false},   {"mkdir", ENOSPC, false, false},
    {"ftruncate", EIO, false, false},  {"flock", EINTR, true, false},
    {"flock", EIO, false, false},      {"getdents64", EIO, false, false},
    {"newfstatat", EIO, false, false}, {"newfstatat", EACCES, false, false},
    {"statfs", EIO, false, false},     {"lseek", EIO, false, false},
    {"unlinkat", EIO, false, false},   {"unlinkat", EACCES, false, false},
    {"unlink", EIO, false, false},     {"rmdir", EIO, false, false},
    {"close", EIO, false, false},      {"close", EINTR, true, false},
    {"fcntl", EIO, false, false},      {"madvise", EAGAIN, true, true},
    {"clone3", EAGAIN, false, true},   {"fallocate", ENOSPC, false, false},
    {"fallocate", EINTR, true, false}, {"mlock", ENOMEM, true, true},
    {"flock", ENOLCK, true, false},    {"flock", ENOTSUP, true, false},
    {"flock", ENOSYS, true, false}, /* as where there are no locks */
#ifndef FAULTS_SANITIZED            /* a sanitizer ends the process when its own fail */
    {"mmap", ENOMEM, false, true},     {"mprotect", ENOMEM, false, true},
#endif
};

static int n_points = 60;
static long n_calls[FAULTS_JOBS]
                   [BL_COUNT(faults)]; /* the most that one thread makes of faults[i].call */

static const char *name_of(int error)
{
    for (size_t i = 0; i < BL_COUNT(error_names); i++)
        if (error_names[i].code == error) return error_names[i].name;
    fail_msg("errno %d has no name here", error);
    return NULL;
}

/* ---- strace ---- */

typedef struct tracer {
    char trace[64], inject[96]; /* options; inject may be empty */
    pid_t pid;
} tracer;

static bool is_traced(pid_t pid)
{
    char path[64], line[128];
    int by = 0;

    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "TracerPid: %d", &by) == 1) break;
    if (file) fclose(file);
    return by != 0;
}

static void attach(void *arg, pid_t child)
{
    tracer *self = arg;
    char pid_text[16];
    double deadline = bl_now_s() + 60;

    snprintf(pid_text, sizeof pid_text, "%d", (int)child);
    fflush(NULL);
    self->pid = fork();
    assert_true(self->pid >= 0);
    if (self->pid == 0) {
        const char *argv[] = {"strace", "-f", "-qq",       "-o", runs_path("trace"), "-p",
                              pid_text, "-e", self->trace, "-e", self->inject,       NULL};
        int null = open("/dev/null", O_RDWR);
        if (!self->inject[0]) argv[9] = NULL;
        dup2(null, STDERR_FILENO);
        execvp(argv[0], (char **)argv);
        _exit(127);
    }
    while (!is_traced(child) && waitpid(self->pid, NULL, WNOHANG) == 0 && bl_now_s() < deadline)
        runs_sleep_s(0.001);
}

static void run_traced(faults_job job, tracer *self, faults_outcome *outcome)
{
    const faults_hooks hooks = {.attach = attach, .arg = self};
    faults_run(job, &hooks, outcome);
    waitpid(self->pid, NULL, 0); /* it ends with the child; ECHILD if it never began */
}

/* ---- counting ---- */

typedef struct thread_count {
    int tid;
    long n[BL_COUNT(faults)];
} thread_count;

static thread_count *find_thread(thread_count *threads, int tid)
{
    for (size_t i = 0; i < MAX_THREADS; i++) {
        if (threads[i].tid == 0) threads[i].tid = tid;
        if (threads[i].tid == tid) return &threads[i];
    }
    fail_msg("more than %d threads", MAX_THREADS);
    return NULL;
}

static void count_calls(faults_job job)
{
    static thread_count threads[MAX_THREADS];
    static const int no_code[] = {0};
    char line[4096], call[64];
    faults_outcome outcome;
    tracer counter = {.trace = "trace=all"};
    int tid;

    memset(threads, 0, sizeof threads);
    run_traced(job, &counter, &outcome);
    assert_true(faults_check(job, "undisturbed", no_code, &outcome));
    FILE *file = fopen(runs_path("trace"), "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%d %63[a-z0-9_](", &tid, call) != 2) continue;
        thread_count *thread = find_thread(threads, tid);
        for (size_t i = 0; i < BL_COUNT(faults); i++) {
            if (strcmp(faults[i].call, call) != 0) continue;
            thread->n[i]++;
            n_calls[job][i] = bl_max_i64(n_calls[job][i], thread->n[i]);
        }
    }
    fclose(file);
}

/* ---- points ---- */

/* Whether all is as it should be. */
static bool check_point(faults_job job, const fault *f, long k, int *n_failed)
{
    int codes[4] = {0}, n = 0;
    char what[128];
    faults_outcome outcome;
    tracer self = {0};

    if (!f->is_harmless) codes[n++] = EXIT_LIMIT;
    if (f->error == EACCES) codes[n++] = EXIT_INPUT; /* of an input: a bad one */
    if (!f->is_harmless && job == FAULTS_RESUME) codes[n++] = EXIT_CHECKPOINT;
    snprintf(what, sizeof what, "%s %ld fails with %s", f->call, k, name_of(f->error));
    snprintf(self.trace, sizeof self.trace, "trace=%s", f->call);
    snprintf(self.inject, sizeof self.inject, "inject=%s:error=%s:when=%ld", f->call,
             name_of(f->error), k);
    run_traced(job, &self, &outcome);
    *n_failed += outcome.code != 0;
    if (!faults_check(job, what, codes, &outcome)) return false;
    if (outcome.code == 0 || f->has_no_path) return true;
    if (strstr(outcome.text, strerror(f->error)) && strchr(outcome.text, '/')) return true;
    print_error("job %s, %s: no path or no reason in \"%s\"\n", faults_job_name(job), what,
                outcome.text);
    return false;
}

static void check_job(faults_job job)
{
    int n_done = 0, n_failed = 0, n_bad = 0, n = n_points / FAULTS_JOBS;
    size_t n_kinds = 0;

    count_calls(job);
    for (size_t i = 0; i < BL_COUNT(faults); i++) n_kinds += n_calls[job][i] > 0;
    assert_true(n_kinds > 20);
    /* Round the kinds, each time at the next of a kind's calls; few points start elsewhere in each
     * job. */
    for (int round = 0; n_done < n; round++) {
        int n_before = n_done;
        for (size_t j = 0; j < BL_COUNT(faults) && n_done < n; j++) {
            size_t i = (j + (size_t)job * BL_COUNT(faults) / FAULTS_JOBS) % BL_COUNT(faults);
            long calls = n_calls[job][i], rounds = n / (long)n_kinds + 1,
                 stride = bl_max_i64(1, calls / rounds);
            long k = 1 + round * stride;
            if (calls == 0 || k > calls) continue;
            n_bad += !check_point(job, &faults[i], k, &n_failed);
            n_done++;
        }
        if (n_done == n_before) break; /* every call was met */
    }
    printf("job %s: %zu kinds of faults, %d points, %d of them ended in an error\n",
           faults_job_name(job), n_kinds, n_done, n_failed);
    assert_int_equal(n_bad, 0);
    assert_true(n_failed > 0);
}

static void test_fresh(void **state)
{
    (void)state;
    check_job(FAULTS_FRESH);
}

static void test_resume(void **state)
{
    (void)state;
    check_job(FAULTS_RESUME);
}

static void test_text(void **state)
{
    (void)state;
    check_job(FAULTS_TEXT);
}

static void test_offload(void **state)
{
    (void)state;
    check_job(FAULTS_OFFLOAD);
}

/* Whether strace can attach to a child of this test, as it will to the trainings. */
static bool can_trace(void)
{
    pid_t sleeper = fork();
    char command[128];

    if (sleeper == 0) {
        runs_sleep_s(10);
        _exit(0);
    }
    snprintf(command, sizeof command, "timeout 1 strace -qq -o /dev/null -p %d 2>/dev/null",
             (int)sleeper);
    int status = system(command); /* timeout's 124: it was attached until then */
    kill(sleeper, SIGKILL);
    waitpid(sleeper, NULL, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 124;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fresh),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_offload),
    };

    if (!can_trace()) {
        printf("skipped: no strace, or it may not trace\n");
        return EXIT_SKIPPED;
    }
    if (argc > 1) n_points = atoi(argv[1]);
    return cmocka_run_group_tests(tests, faults_set_up, faults_tear_down);
}
