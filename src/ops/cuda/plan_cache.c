/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cache.c -- a hash table whose entries are also in a list by age. */
#include "ops/cuda/plan_cache.h"

#include <stddef.h>
#include <string.h>

#include "base/xxh3.h"

static ops_plan_entry **bucket_of(ops_plan_cache *cache, const ops_plan_key *key)
{
    return &cache->bucket[XXH3_64bits(key, sizeof *key) % OPS_PLAN_CACHE_BUCKETS];
}

static void unlink_age(ops_plan_cache *cache, ops_plan_entry *entry)
{
    *(entry->newer ? &entry->newer->older : &cache->newest) = entry->older;
    *(entry->older ? &entry->older->newer : &cache->oldest) = entry->newer;
}

static void make_newest(ops_plan_cache *cache, ops_plan_entry *entry)
{
    entry->newer = NULL;
    entry->older = cache->newest;
    *(cache->newest ? &cache->newest->newer : &cache->oldest) = entry;
    cache->newest = entry;
}

ops_plan_entry *ops_plan_cache_find(ops_plan_cache *cache, const ops_plan_key *key)
{
    ops_plan_entry *entry = *bucket_of(cache, key);

    while (entry && memcmp(&entry->key, key, sizeof *key) != 0) entry = entry->next_in_bucket;
    if (!entry) return NULL;
    unlink_age(cache, entry);
    make_newest(cache, entry);
    return entry;
}

ops_plan_entry *ops_plan_cache_take(ops_plan_cache *cache)
{
    ops_plan_entry *entry = cache->oldest;

    if (!entry) return NULL;
    ops_plan_entry **link = bucket_of(cache, &entry->key);
    while (*link != entry) link = &(*link)->next_in_bucket;
    *link = entry->next_in_bucket;
    unlink_age(cache, entry);
    cache->n_entries--;
    return entry;
}

ops_plan_entry *ops_plan_cache_add(ops_plan_cache *cache, ops_plan_entry *entry)
{
    ops_plan_entry *gone =
        cache->n_entries == OPS_PLAN_CACHE_MAX ? ops_plan_cache_take(cache) : NULL;
    ops_plan_entry **bucket = bucket_of(cache, &entry->key);

    entry->next_in_bucket = *bucket;
    *bucket = entry;
    make_newest(cache, entry);
    cache->n_entries++;
    return gone;
}
