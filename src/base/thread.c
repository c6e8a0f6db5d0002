/* SPDX-License-Identifier: Apache-2.0 */
/* thread.c -- threads start with all signals blocked except those of faults, so that one thread of
 * the process takes signals. */
#include "base/thread.h"

#include <math.h>
#include <time.h>

#include "base/sizes.h"

void bl_thread_block_signals(sigset_t *old)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF};
    sigset_t blocked;

    sigfillset(&blocked);
    for (size_t i = 0; i < BL_COUNT(own); i++) sigdelset(&blocked, own[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, old);
}

void bl_thread_restore_signals(const sigset_t *old)
{
    pthread_sigmask(SIG_SETMASK, old, NULL);
}

int bl_thread_create(pthread_t *thread, void *(*main)(void *), void *argument)
{
    sigset_t old;

    bl_thread_block_signals(&old);
    int code = pthread_create(thread, NULL, main, argument);
    bl_thread_restore_signals(&old);
    return code;
}

/* ---- conditions ---- */

void bl_condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool bl_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, double seconds)
{
    struct timespec until;
    double whole_s = floor(seconds);

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)whole_s;
    until.tv_nsec += (long)((seconds - whole_s) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return pthread_cond_timedwait(condition, lock, &until) == 0;
}
