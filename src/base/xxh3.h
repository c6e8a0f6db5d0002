/* SPDX-License-Identifier: Apache-2.0 */
/* xxh3.h -- libxxhash's XXH3, with the widest vectors that this processor has: Debian builds the
 * library for any x86-64, and its dispatch header makes the same calls look for AVX2 and AVX-512
 * first, which is up to 4 times as fast. Values do not depend on it. */
#ifndef BALLAST_BASE_XXH3_H
#define BALLAST_BASE_XXH3_H

#include <xxhash.h>

#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#endif

#endif
