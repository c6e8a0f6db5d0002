/* SPDX-License-Identifier: Apache-2.0 */
/* counter.h -- a number that only grows, and threads that sleep until it has reached a value.
 *
 * What one thread did before advancing is visible to a thread whose wait that advance ended;
 * nothing else is ordered. That is why this is not a mutex with a condition variable: a mutex
 * orders each holder after all earlier ones, and ThreadSanitizer would then overlook a buffer
 * that is used without the event that should guard it. */
#ifndef BALLAST_BASE_COUNTER_H
#define BALLAST_BASE_COUNTER_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct bl_counter {
    _Atomic uint64_t value;
    _Atomic uint64_t wake_at; /* no sleeper waits for less */
    _Atomic uint32_t n_wakes; /* the word sleepers sleep on */
} bl_counter;

void bl_counter_init(bl_counter *counter); /* at 0; needs no destruction */

/* Sets the value, which must not shrink; one thread at a time. */
void bl_counter_advance(bl_counter *counter, uint64_t value);

/* Returns once the value is >= target: looks for a few microseconds, then sleeps. Any number of
 * threads. */
void bl_counter_wait(bl_counter *counter, uint64_t target);

#endif
