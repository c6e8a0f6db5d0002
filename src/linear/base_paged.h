/* SPDX-License-Identifier: Apache-2.0 */
/* base_paged.h -- a base whose shards may lie outside device memory: the pager of offload/ brings and gathers
 * them. A library of its own (bl_linear_paged) over linear and offload, which do not know each other. */
#ifndef BALLAST_LINEAR_BASE_PAGED_H
#define BALLAST_LINEAR_BASE_PAGED_H

#include "linear/base.h"
#include "offload/pager.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The parts of the layout are the first pages of `pages`, in order, each of
 * its part's shard_bytes. pages (sealed) and layout are borrowed until the base is destroyed; options->comm is the shard group (NULL when
 * n_shards is 1). */
BL_API bl_status bl_base_create_paged(const bl_base_layout *layout, bl_pages *pages,
                                      const bl_pager_options *options, bl_base **out);
/* Device memory of its ring, for plans: is_resident[bl_base_part_count(layout)] says of each page
 * whether it lies in device memory. SIZE_MAX: more than a size_t can count. */
BL_API size_t bl_base_paged_ring_bytes(const bl_base_layout *layout, const bool *is_resident,
                                       int ring_depth);
/* Host memory of its reader, likewise, with the pages that lie on disk; bounces: the host cannot write device memory; queue_depth: as in
 * the options. */
BL_API size_t bl_base_paged_reader_bytes(const bl_base_layout *layout, const bool *is_on_disk,
                                         bool bounces, int queue_depth);

#ifdef __cplusplus
}
#endif

#endif
