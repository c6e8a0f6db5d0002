/* SPDX-License-Identifier: Apache-2.0 */
#include "base/hash.h"

#include <xxhash.h>

#if defined(__x86_64__)
#include <xxh_x86dispatch.h> /* the library is built for any x86-64; this lets it look for AVX2 and AVX-512: 4 times as fast */
#endif

uint64_t bl_hash_bytes(const void *bytes, size_t n_bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(bytes, n_bytes, seed);
}
