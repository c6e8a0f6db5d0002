/* SPDX-License-Identifier: Apache-2.0 */
/* The functions that instrumented code calls before each access, in place of ThreadSanitizer's
 * (instrument.h). They serve the emulator's own search for races. In a program with ThreadSanitizer
 * they report accesses to global memory to it instead: it searches for races between streams, and
 * the other build for races within a grid. */
#include "grid.h"

#define HOOK extern "C" __attribute__((visibility("default")))

extern "C" {
void __tsan_func_entry(void *) __attribute__((weak));
void __tsan_func_exit(void) __attribute__((weak));
void __tsan_read_range(void *, unsigned long) __attribute__((weak));
void __tsan_write_range(void *, unsigned long) __attribute__((weak));
}

extern const char __start_emulated_indices[],
    __stop_emulated_indices[]; /* threadIdx and the others */

static void tell_sanitizer(const void *p, size_t bytes, bool is_store, const void *pc)
{
    __tsan_func_entry((void *)pc); /* so that its report has the kernel's line */
    if (is_store)
        __tsan_write_range((void *)p, bytes);
    else
        __tsan_read_range((void *)p, bytes);
    __tsan_func_exit();
}

static bool is_instrumented;

static inline bool is_on_stack(const void *p)
{
    return (const char *)p >= emulated_stacks && (const char *)p < emulated_stacks_end;
}

static void see(const void *p, size_t bytes, bool is_store, const void *pc, bool in_kernel)
{
    if (!__tsan_read_range) {
        if (in_kernel) emulated_accessed(p, bytes, is_store, pc);
    } else if (!in_kernel || !emulated_find_place((const char *)p).is_shared) {
        tell_sanitizer(p, bytes, is_store, pc);
    }
}

void emulated_tell(const void *p, size_t bytes, bool is_store, const void *pc)
{
    if (is_instrumented) see(p, bytes, is_store, pc, true);
}

bool emulated_is_checked()
{
    return is_instrumented && !__tsan_read_range;
}

static inline void look(const void *p, size_t bytes, bool is_store, const void *pc)
{
    const char *at = (const char *)p;
    if (is_on_stack(at) || (at >= __start_emulated_indices && at < __stop_emulated_indices)) return;
    /* A launcher, in a host thread, may call while a grid runs in another. */
    see(p, bytes, is_store, pc, is_on_stack(__builtin_frame_address(0)) && emulated_now.in_thread);
}

#define HOOKS(bytes)                                                                               \
    HOOK void emulated_read##bytes(const void *p)                                                  \
    {                                                                                              \
        look(p, bytes, false, __builtin_return_address(0));                                        \
    }                                                                                              \
    HOOK void emulated_write##bytes(const void *p)                                                 \
    {                                                                                              \
        look(p, bytes, true, __builtin_return_address(0));                                         \
    }

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

HOOK void emulated_read_range(const void *p, unsigned long bytes)
{
    look(p, bytes, false, __builtin_return_address(0));
}

HOOK void emulated_write_range(const void *p, unsigned long bytes)
{
    look(p, bytes, true, __builtin_return_address(0));
}

HOOK void emulated_instrumented_init(void)
{
    is_instrumented = true;
}

HOOK void emulated_func_entry(void *) {}

HOOK void emulated_func_exit(void) {}
