/* SPDX-License-Identifier: Apache-2.0 */
/* base_gathered.h -- a base whose shards are one array in device memory, from which a ring gathers:
 * for the bf16 copy of trained weights, which changes between passes and has neither pages nor
 * checksums. */
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

/* Borrows layout and shards (layout->shard_bytes, device memory: units at their offset, parts at
 * their shard_offset) until the base is destroyed. With one shard, acquire returns the shards
 * without a copy. */
bl_status bl_base_create_gathered(const bl_base_layout *layout, const void *shards,
                                  const bl_base_gathered_options *options, bl_base **out);

/* Device memory of the ring; SIZE_MAX: it exceeds a size_t, or the list of units could not be
 * allocated. */
size_t bl_base_gathered_ring_bytes(const bl_base_layout *layout, int ring_depth);

#ifdef __cplusplus
}
#endif

#endif
