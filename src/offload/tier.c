/* SPDX-License-Identifier: Apache-2.0 */
#include "offload/tier.h"

const char *bl_tier_name(bl_tier tier)
{
    static const char *const names[] = {"device", "host", "disk"};
    return names[tier];
}

void bl_tier_spread(const size_t *n_bytes, int64_t n_pieces, double ratio, bl_tier tier,
                    bl_tier *tiers)
{
    double debt_bytes = 0; /* the ratio's share of the bytes so far that has not been chosen */

    for (int64_t i = 0; i < n_pieces; i++) {
        double bytes = (double)n_bytes[i];
        debt_bytes += ratio * bytes;
        tiers[i] = ratio > 0 && debt_bytes >= bytes / 2 ? tier : BL_TIER_DEVICE;
        if (tiers[i] == tier) debt_bytes -= bytes;
    }
}
