/* SPDX-License-Identifier: Apache-2.0 */
/* tier.c -- spreads bytes over tiers by error diffusion: the share not yet chosen is carried from
 * piece to piece. */
#include "offload/tier.h"

const char *bl_tier_name(bl_tier tier)
{
    static const char *const names[] = {"device", "host", "disk"};
    return names[tier];
}

/* Of the pieces in tier `from`, moves those that hold `ratio` of their bytes to `to`. */
static void move(const size_t *n_bytes, int64_t n_pieces, double ratio, bl_tier from, bl_tier to,
                 bl_tier *tiers)
{
    double debt_bytes = 0; /* the ratio's share of the bytes so far that has not been chosen */

    for (int64_t i = 0; i < n_pieces; i++) {
        double bytes = (double)n_bytes[i];
        if (tiers[i] != from) continue;
        debt_bytes += ratio * bytes;
        if (ratio == 0 || debt_bytes < bytes / 2) continue;
        tiers[i] = to;
        debt_bytes -= bytes;
    }
}

void bl_tier_spread(const size_t *n_bytes, int64_t n_pieces, double ratio, bl_tier tier,
                    bl_tier *tiers)
{
    for (int64_t i = 0; i < n_pieces; i++) tiers[i] = BL_TIER_DEVICE;
    if (tier != BL_TIER_DEVICE) move(n_bytes, n_pieces, ratio, BL_TIER_DEVICE, tier, tiers);
}

void bl_tier_spread_two(const size_t *n_bytes, int64_t n_pieces, double ratio, double host_part,
                        bl_tier *tiers)
{
    bl_tier_spread(n_bytes, n_pieces, ratio, BL_TIER_DISK, tiers);
    move(n_bytes, n_pieces, host_part, BL_TIER_DISK, BL_TIER_HOST, tiers);
}
