/* SPDX-License-Identifier: Apache-2.0 */
/* lock.h -- a lock that ThreadSanitizer does not see. That grids run one at a time is the emulator's way, not an order that
 * a program may count on: of two kernels on two streams without an event between them it must report a race. */
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

#endif
