/* SPDX-License-Identifier: Apache-2.0 */
/* Faults that tests plant in the fake NCCL, at a given call of a given rank; and the log of
 * launches. */
#include <ctype.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nccl_fake.h"
#include "runtime.h"

static atomic_int own_rank = -1;
static atomic_int n_launches;

void emulated_nccl_set_rank(int rank)
{
    int nobody = -1;
    (void)atomic_compare_exchange_strong(&own_rank, &nobody, rank);
}

/* ---- faults ---- */

typedef struct fault {
    int rank;
    nccl_moment moment;
    int n; /* of a launch */
    char what[16];
    double seconds; /* of slow */
} fault;

static _Noreturn void refuse(const char *text)
{
    emulated_fatal(
        "BALLAST_EMULATED_FAULT=%s: RANK:WHEN:WHAT, with commas between several; WHEN is "
        "a number from 1, init, split, window, abort, destroy or ask; WHAT is kill, stop, fail, "
        "hang or slow=SECONDS",
        text);
}

static fault read_fault(const char *text, const char *whole)
{
    static const char *const moments[] = {
        [NCCL_AT_INIT] = "init",     [NCCL_AT_ABORT] = "abort",     [NCCL_AT_SPLIT] = "split",
        [NCCL_AT_WINDOW] = "window", [NCCL_AT_DESTROY] = "destroy", [NCCL_AT_ASK] = "ask",
    };
    fault f = {.moment = NCCL_AT_LAUNCH};
    char when[16], end;
    if (sscanf(text, "%d:%15[^:]:%15[^,]", &f.rank, when, f.what) != 3) refuse(whole);
    for (int i = 0; i <= NCCL_AT_ASK; i++)
        if (moments[i] && strcmp(when, moments[i]) == 0) f.moment = (nccl_moment)i;
    if (f.moment == NCCL_AT_LAUNCH && (sscanf(when, "%d%c", &f.n, &end) != 1 || f.n < 1))
        refuse(whole);
    if (sscanf(f.what, "slow=%lf%c", &f.seconds, &end) == 1) return f;
    static const char *const whats[] = {"kill", "stop", "fail", "hang"};
    for (size_t i = 0; i < sizeof whats / sizeof *whats; i++)
        if (strcmp(f.what, whats[i]) == 0) return f;
    refuse(whole);
}

static ncclResult_t strike(const fault *f)
{
    struct timespec nap = {(time_t)f->seconds,
                           (long)((f->seconds - (double)(time_t)f->seconds) * 1e9)};
    emulated_nccl_log("fault %s", f->what);
    switch (f->what[0]) {
    case 'k':
        kill(getpid(), SIGKILL);
        break;
    case 'h':
        for (;;) pause();
    case 'f':
        return emulated_nccl_fail(ncclSystemError, "a fault that a test asked for");
    default:
        if (f->seconds > 0)
            nanosleep(&nap, NULL);
        else
            kill(getpid(), SIGSTOP);
    }
    return ncclSuccess;
}

ncclResult_t emulated_nccl_fault(nccl_moment moment)
{
    const char *whole = emulated_settings_get()->fault;
    int n = moment == NCCL_AT_LAUNCH ? 1 + atomic_fetch_add(&n_launches, 1) : 0;
    ncclResult_t result = ncclSuccess;
    for (const char *text = whole; text && *text; text += *text == ',') {
        fault f = read_fault(text, whole);
        if (f.rank == atomic_load(&own_rank) && f.moment == moment && f.n == n) {
            ncclResult_t struck = strike(&f);
            if (struck != ncclSuccess) result = struck;
        }
        text += strcspn(text, ",");
    }
    return result;
}

/* ---- the log ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;

bool emulated_nccl_is_logging(void)
{
    return emulated_settings_get()->nccl_log && atomic_load(&own_rank) >= 0;
}

void emulated_nccl_log(const char *format, ...)
{
    va_list arguments;
    char path[4096];
    if (!emulated_nccl_is_logging()) return;
    pthread_mutex_lock(&lock);
    if (!file) {
        snprintf(path, sizeof path, "%s.%d", emulated_settings_get()->nccl_log,
                 atomic_load(&own_rank));
        file = fopen(path, "we");
        if (!file) emulated_fatal("BALLAST_EMULATED_NCCL_LOG: cannot write %s", path);
        setvbuf(file, NULL, _IOLBF, BUFSIZ); /* whole lines, whenever the process is killed */
    }
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fputc('\n', file);
    pthread_mutex_unlock(&lock);
}

/* Streams in the order of their first launch: the same on all ranks of a program. */
int emulated_nccl_stream_number(cudaStream_t stream)
{
    enum { MAX_STREAMS = 64 };
    static cudaStream_t known[MAX_STREAMS];
    static int n;
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < n && known[i] != stream) i++;
    if (i == n && n < MAX_STREAMS) known[n++] = stream;
    pthread_mutex_unlock(&lock);
    return i;
}
