/* SPDX-License-Identifier: Apache-2.0 */
/* pause.h -- how long a thread looks again before it goes to sleep. A wake-up costs about 5 us on
 * either side, so looking for about as long is never much worse than sleeping at once; threads of
 * several ranks often share a core, so never longer. */
#ifndef BALLAST_BASE_PAUSE_H
#define BALLAST_BASE_PAUSE_H

enum { BL_SPIN_ROUNDS = 100 };

static inline void bl_cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* `yield` is a no-op on most cores */
#endif
}

#endif
