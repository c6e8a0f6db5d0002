/* SPDX-License-Identifier: Apache-2.0 */
/* clones.h -- functions that the compiler makes once per instruction set. */
#ifndef BALLAST_BASE_CLONES_H
#define BALLAST_BASE_CLONES_H

/* One copy of the function per instruction set, chosen when the program is loaded. Not under
 * sanitizers: the choice would run before their runtime is ready. For clang 14 such a function must
 * be static, and still its name must be the only one in the program. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define BL_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BL_SANITIZED 1
#endif
#if defined(__x86_64__) && !defined(BL_SANITIZED)
#define BL_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BL_CLONES
#endif

#endif
