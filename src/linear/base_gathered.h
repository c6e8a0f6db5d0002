/* SPDX-License-Identifier: Apache-2.0 */
/* base_gathered.h -- a base whose shards are one array in device memory, gathered from there by a
 * ring: for weights that change between passes, which have neither pages nor checksums. */
#ifndef BALLAST_LINEAR_BASE_GATHERED_H
#define BALLAST_LINEAR_BASE_GATHERED_H

#include "device/timeline.h"
#include "linear/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All borrowed. */
typedef struct bl_base_gathered_options {
    bl_device *device;
    bl_comm *comm; /* the shard group; NULL when n_shards is 1 */
    bl_stream *gather;
    int ring_depth;
    bl_timeline *timeline; /* may be NULL */
} bl_base_gathered_options;

/* layout and shards (layout->shard_bytes, device memory: units at their offset, parts at their
 * shard_offset) are borrowed until the base is destroyed. Of one shard, acquire gives the shards
 * themselves. */
bl_status bl_base_create_gathered(const bl_base_layout *layout, const void *shards,
                                  const bl_base_gathered_options *options, bl_base **out);

/* Device memory of the ring; SIZE_MAX for more than a size_t can count, or without memory for the
 * list of units. */
size_t bl_base_gathered_ring_bytes(const bl_base_layout *layout, int ring_depth);

#ifdef __cplusplus
}
#endif

#endif
