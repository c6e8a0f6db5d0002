/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_jobs.c -- jobs that succeed, jobs that fail, and logs of the fake NCCL. */
#include "nccl_jobs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

void nccl_run_fine(const char *name, int n_ranks, const char *const *settings)
{
    nccl_job job;
    nccl_start(&job, name, n_ranks, settings);
    nccl_wait(&job);
    nccl_assert_fine(&job);
}

void nccl_try_again(const char *name, nccl_attempt attempt, const void *arg)
{
    enum { MAX_TRIES = 3 };

    for (int i = 0; i < MAX_TRIES; i++) {
        if (i > 0) print_message("again: %s\n", name);
        if (attempt(arg)) return;
    }
    fail_msg("%s failed otherwise than it should, %d times", name, MAX_TRIES);
}

typedef struct failing {
    const char *name;
    int n_ranks, code;
    const char *const *settings;
    const char *text;
} failing;

static bool fails(const void *arg)
{
    const failing *f = arg;
    nccl_job job;

    nccl_start(&job, f->name, f->n_ranks, f->settings);
    nccl_wait(&job);
    assert_int_equal(atomic_load(&job.board->marks[2]), 0); /* no lost collective ended well */
    return nccl_has_failed(&job, f->code, f->text);
}

void nccl_run_failing(const char *name, int n_ranks, const char *const *settings, int code,
                      const char *text)
{
    nccl_try_again(name, fails, &(failing){name, n_ranks, code, settings, text});
}

void nccl_log_open(nccl_log *log)
{
    strcpy(log->file, "/tmp/nccl_log.XXXXXX");
    int fd = mkstemp(log->file);
    assert_true(fd >= 0);
    close(fd);
    snprintf(log->setting, sizeof log->setting, "BALLAST_EMULATED_NCCL_LOG=%s", log->file);
}

const char *nccl_log_read(const nccl_log *log, int rank)
{
    static char text[4096];
    char path[64];
    snprintf(path, sizeof path, "%s.%d", log->file, rank);
    FILE *file = fopen(path, "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = '\0';
    if (file) fclose(file);
    return text;
}

void nccl_log_await(const nccl_log *log, int rank, const char *line)
{
    double end_s = bl_now_s() + 60;
    while (!strstr(nccl_log_read(log, rank), line)) {
        if (bl_now_s() > end_s) fail_msg("rank %d's NCCL did not say: %s", rank, line);
        usleep(1000);
    }
}

void nccl_log_close(const nccl_log *log, int n_ranks)
{
    char path[64];
    unlink(log->file);
    for (int rank = 0; rank < n_ranks; rank++) {
        snprintf(path, sizeof path, "%s.%d", log->file, rank);
        unlink(path);
    }
}
