/* SPDX-License-Identifier: Apache-2.0 */
/* base_paged.h -- a base whose shards may be outside device memory: the pager of offload/ loads and
 * gathers them. A separate library (bl_linear_paged) over linear and offload, which do not know
 * each other. */
#ifndef BALLAST_LINEAR_BASE_PAGED_H
#define BALLAST_LINEAR_BASE_PAGED_H

#include "linear/base.h"
#include "offload/pager.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The parts of the layout are the first pages of `pages`, in order, each of its part's shard_bytes.
 * pages (sealed) and layout are borrowed until the base is destroyed; options->comm is the shard
 * group (NULL when n_shards is 1). */
bl_status bl_base_create_paged(const bl_base_layout *layout, bl_pages *pages,
                               const bl_pager_options *options, bl_base **out);
/* The tier of each part (offload/tier.h), of scales their codes': `ratio` of the bytes in `tier`,
 * of which with BL_TIER_DISK host_part in host memory after all. BL_ENOMEM. */
bl_status bl_base_assign_tiers(const bl_base_layout *layout, bl_tier tier, double ratio,
                               double host_part, bl_tier *tiers);

/* For plans: bytes of the parts by tier, of the ring (device memory) and of the reader of parts on
 * disk (host memory). ring, reader: SIZE_MAX for more than a size_t can count. */
typedef struct bl_base_paged_bytes {
    size_t device, host, disk, ring, reader;
} bl_base_paged_bytes;
/* bounces: the host cannot write device memory. queue_depth: as in bl_pager_options. BL_ENOMEM. */
bl_status bl_base_paged_measure(const bl_base_layout *layout, const bl_tier *tiers, int ring_depth,
                                bool bounces, int queue_depth, bl_base_paged_bytes *out);

#ifdef __cplusplus
}
#endif

#endif
