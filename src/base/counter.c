/* SPDX-License-Identifier: Apache-2.0 */
/* counter.c -- advances a counter and wakes the threads whose value is reached.
 *
 * The two sides meet as in Dekker's algorithm: a waiter announces its target and then looks at the
 * value once more, the advancer sets the value and then looks for announced targets, each with a
 * full fence in between, so at least one of them sees the other. Clearing wake_at may drop a target
 * that was announced meanwhile; n_wakes grows after that, so its owner, who read n_wakes before
 * announcing, does not fall asleep. */
#include "base/counter.h"

#include <linux/futex.h>
#include <limits.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/pause.h"

/* ThreadSanitizer knows no fences, and needs none here: the order of other memory is carried by
 * `value` alone. */
__attribute__((no_sanitize("thread"))) static void full_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

void bl_counter_init(bl_counter *counter)
{
    atomic_init(&counter->value, 0);
    atomic_init(&counter->wake_at, UINT64_MAX);
    atomic_init(&counter->n_wakes, 0);
}

void bl_counter_advance(bl_counter *counter, uint64_t value)
{
    atomic_store_explicit(&counter->value, value, memory_order_release);
    full_fence();
    if (atomic_load_explicit(&counter->wake_at, memory_order_relaxed) > value) return;
    atomic_store_explicit(&counter->wake_at, UINT64_MAX, memory_order_relaxed);
    atomic_fetch_add_explicit(&counter->n_wakes, 1, memory_order_release);
    syscall(SYS_futex, &counter->n_wakes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static int reached(bl_counter *counter, uint64_t target)
{
    return atomic_load_explicit(&counter->value, memory_order_acquire) >= target;
}

void bl_counter_wait(bl_counter *counter, uint64_t target)
{
    for (int i = 0; i < BL_SPIN_ROUNDS; i++) {
        if (reached(counter, target)) return;
        bl_cpu_pause();
    }
    for (;;) {
        uint32_t n_wakes = atomic_load_explicit(&counter->n_wakes, memory_order_acquire);
        uint64_t at = atomic_load_explicit(&counter->wake_at, memory_order_relaxed);
        while (at > target &&
               !atomic_compare_exchange_weak_explicit(&counter->wake_at, &at, target,
                                                      memory_order_relaxed, memory_order_relaxed))
            ;
        full_fence();
        if (reached(counter, target)) return;
        syscall(SYS_futex, &counter->n_wakes, FUTEX_WAIT_PRIVATE, n_wakes, NULL, NULL, 0);
        if (reached(counter, target)) return;
    }
}
