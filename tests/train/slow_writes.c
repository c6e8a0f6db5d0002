/* SPDX-License-Identifier: Apache-2.0 */
/* slow_writes.c -- a library for LD_PRELOAD: slows writes to some files of a job of processes.
 * BALLAST_TEST_SLOW_WRITES=SECONDS[:N]: every write to a file whose path contains
 * BALLAST_TEST_SLOW_FILES, and every fsync of one, takes SECONDS more; with N, only call number N
 * of each process, counted from 1. Negative SECONDS: the process is stopped (SIGSTOP). */
/* libc's checked inline functions would conflict with the functions that this file defines. */
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static atomic_int n_calls;

static bool is_slow(int fd, double *seconds)
{
    const char *request = getenv("BALLAST_TEST_SLOW_WRITES"),
               *files = getenv("BALLAST_TEST_SLOW_FILES");
    char link[64], path[4096];
    int which = 0;

    if (!request || !files || sscanf(request, "%lf:%d", seconds, &which) < 1) return false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return false;
    path[n] = 0;
    return strstr(path, files) && (which == 0 || atomic_fetch_add(&n_calls, 1) + 1 == which);
}

static void wait_if_slow(int fd)
{
    double seconds;

    if (!is_slow(fd, &seconds)) return;
    if (seconds < 0) {
        raise(SIGSTOP);
        return;
    }
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

#define EXPORT __attribute__((visibility("default")))
typedef ssize_t (*write_at)(int, const void *, size_t, off_t);

EXPORT ssize_t pwrite(int fd, const void *bytes, size_t n_bytes, off_t at)
{
    wait_if_slow(fd);
    return ((write_at)dlsym(RTLD_NEXT, "pwrite"))(fd, bytes, n_bytes, at);
}

EXPORT ssize_t pwrite64(int fd, const void *bytes, size_t n_bytes, off_t at)
{
    wait_if_slow(fd);
    return ((write_at)dlsym(RTLD_NEXT, "pwrite64"))(fd, bytes, n_bytes, at);
}

EXPORT int fsync(int fd)
{
    wait_if_slow(fd);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
