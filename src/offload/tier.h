/* SPDX-License-Identifier: Apache-2.0 */
/* tier.h -- the tier of a piece of the frozen base, and the assignment of pieces to tiers. */
#ifndef BALLAST_OFFLOAD_TIER_H
#define BALLAST_OFFLOAD_TIER_H

#include <stddef.h>
#include <stdint.h>

#include "base/api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bl_tier {
    BL_TIER_DEVICE, /* device memory: nothing to load */
    BL_TIER_HOST,   /* the arena: pinned host memory */
    BL_TIER_DISK    /* page files */
} bl_tier;

BL_API const char *bl_tier_name(bl_tier tier); /* "device", "host", "disk" */

/* tiers[i] = `tier` for pieces that hold `ratio` (0..1) of all bytes, as nearly as whole pieces
 * allow, and BL_TIER_DEVICE for the others. Pieces are given in the order of use; the chosen ones
 * are spread evenly over them: of the bytes of any first k pieces, those chosen differ from the
 * ratio's share by at most the largest piece. 0 chooses none, 1 all. The same on every rank. */
void bl_tier_spread(const size_t *n_bytes, int64_t n_pieces, double ratio, bl_tier tier,
                    bl_tier *tiers);

/* The same over two tiers: of the pieces chosen, those that hold `host_part` (0..1) of their bytes
 * are BL_TIER_HOST, spread evenly over them, and the others BL_TIER_DISK. */
void bl_tier_spread_two(const size_t *n_bytes, int64_t n_pieces, double ratio, double host_part,
                        bl_tier *tiers);

#ifdef __cplusplus
}
#endif

#endif
