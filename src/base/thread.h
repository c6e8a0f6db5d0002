/* SPDX-License-Identifier: Apache-2.0 */
/* thread.h -- threads that take no signals, and conditions whose waits end by CLOCK_MONOTONIC,
 * which cannot be set. */
#ifndef BALLAST_BASE_THREAD_H
#define BALLAST_BASE_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>

/* As pthread_create with default attributes, but signals to the process are left to the threads
 * that expect them: the new thread blocks all but those that its own instructions raise (SIGSEGV,
 * SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT) and SIGPROF. */
int bl_thread_create(pthread_t *thread, void *(*main)(void *), void *argument);

/* Between the two, the calling thread blocks the same signals: around a library's call that makes
 * threads, which inherit that. What comes meanwhile waits for the end. They may be nested. */
void bl_thread_block_signals(sigset_t *old);
void bl_thread_restore_signals(const sigset_t *old);

void bl_condition_init(pthread_cond_t *condition);
/* Under the lock, which is given back meanwhile. False: the seconds are over. It may return true
 * without a signal. */
bool bl_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, double seconds);

#endif
