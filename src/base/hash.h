/* SPDX-License-Identifier: Apache-2.0 */
/* hash.h -- XXH3-64 of bytes in memory, with the widest vectors that this processor has. */
#ifndef BALLAST_BASE_HASH_H
#define BALLAST_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

/* XXH3-64 with a seed (libxxhash, XXH3_64bits_withSeed; the value depends on neither processor nor library version). bytes: host
 * memory, any alignment; NULL when n_bytes is 0. */
uint64_t bl_hash_bytes(const void *bytes, size_t n_bytes, uint64_t seed);

#endif
