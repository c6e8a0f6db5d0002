/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cache.h -- the plan of each product's shape, by everything that it depends on: a hash table
 * of at most OPS_PLAN_CACHE_MAX entries, which evicts the least recently used one. Host memory;
 * knows neither CUDA nor the contents of an entry. Internal to ops/.
 *
 * A training step asks for at most 50 products per number of tokens, and numbers of tokens are
 * multiples of 128: 4096 entries are 80 such numbers. */
#ifndef BALLAST_OPS_CUDA_PLAN_CACHE_H
#define BALLAST_OPS_CUDA_PLAN_CACHE_H

#include <stdint.h>

enum { OPS_PLAN_CACHE_MAX = 4096, OPS_PLAN_CACHE_BUCKETS = 4096 };

/* All of one type: compared as bytes. */
typedef struct ops_plan_key {
    int64_t kind, transpose_a, transpose_b, fast_sums, splits_sums, d_type, accumulates;
    int64_t m, n, k, lda, ldb, ldd;
    int64_t align_a, align_b, align_c, align_d, workspace_bytes;
} ops_plan_key;

/* The first member of the owner's entry. The cache sets the links. */
typedef struct ops_plan_entry {
    ops_plan_key key;
    struct ops_plan_entry *next_in_bucket, *newer, *older;
} ops_plan_entry;

typedef struct ops_plan_cache {
    int n_entries;
    ops_plan_entry *newest, *oldest; /* by when they were last asked for */
    ops_plan_entry *bucket[OPS_PLAN_CACHE_BUCKETS];
} ops_plan_cache;

/* The entry of this key, now the newest; NULL when there is none. */
ops_plan_entry *ops_plan_cache_find(ops_plan_cache *cache, const ops_plan_key *key);

/* Adds an entry whose key there is none of. Returns the entry that had to go, for the caller to
 * free; NULL. */
ops_plan_entry *ops_plan_cache_add(ops_plan_cache *cache, ops_plan_entry *entry);

/* Takes the oldest entry out, for the caller to free; NULL when there is none left. */
ops_plan_entry *ops_plan_cache_take(ops_plan_cache *cache);

#endif
