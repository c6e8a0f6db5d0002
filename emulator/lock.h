/* SPDX-License-Identifier: Apache-2.0 */
/* lock.h -- hidden from ThreadSanitizer: a lock, and the emulator's own work (the C library's
 * functions report theirs). The emulator runs grids one at a time, but a program must not rely on
 * that order: of two kernels on two streams without an event between them ThreadSanitizer must
 * report a race. */
#ifndef BALLAST_TESTS_EMULATE_LOCK_H
#define BALLAST_TESTS_EMULATE_LOCK_H

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

struct unseen_lock {
    int state; /* 0: free, 1: held, 2: held, and others may wait */
};

static inline void unseen_take(unseen_lock *lock)
{
    int seen = 0;
    if (__atomic_compare_exchange_n(&lock->state, &seen, 1, false, __ATOMIC_ACQUIRE,
                                    __ATOMIC_RELAXED))
        return;
    while (__atomic_exchange_n(&lock->state, 2, __ATOMIC_ACQUIRE) != 0)
        syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, 2, nullptr, nullptr, 0);
}

static inline void unseen_give(unseen_lock *lock)
{
    if (__atomic_exchange_n(&lock->state, 0, __ATOMIC_RELEASE) == 2)
        syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

struct unseen_guard {
    unseen_lock *lock;
    explicit unseen_guard(unseen_lock *l) : lock(l) { unseen_take(l); }
    ~unseen_guard() { unseen_give(lock); }
    unseen_guard(const unseen_guard &) = delete;
    unseen_guard &operator=(const unseen_guard &) = delete;
};

extern "C" {
void __tsan_ignore_thread_begin(void) __attribute__((weak));
void __tsan_ignore_thread_end(void) __attribute__((weak));
}

static inline void unseen_begin(void)
{
    if (__tsan_ignore_thread_begin) __tsan_ignore_thread_begin();
}

static inline void unseen_end(void)
{
    if (__tsan_ignore_thread_end) __tsan_ignore_thread_end();
}

struct unseen_work {
    unseen_work() { unseen_begin(); }
    ~unseen_work() { unseen_end(); }
    unseen_work(const unseen_work &) = delete;
    unseen_work &operator=(const unseen_work &) = delete;
};

#endif
