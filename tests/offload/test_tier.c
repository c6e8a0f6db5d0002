/* SPDX-License-Identifier: Apache-2.0 */
/* The guarantees of bl_tier_spread, over random sizes and ratios. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "offload/tier.h"

enum { MAX_PIECES = 300, N_ROUNDS = 4000 };

/* xorshift64: the same sequence everywhere. */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Of one of four kinds: equal pieces, any sizes, a few giants among dwarfs, empty ones among
 * others. */
static void make_sizes(uint64_t *state, size_t *n_bytes, int64_t n_pieces)
{
    uint64_t kind = next_random(state) % 4;
    size_t equal = 1 + next_random(state) % (1ULL << 33);

    for (int64_t i = 0; i < n_pieces; i++) {
        uint64_t r = next_random(state);
        n_bytes[i] = kind == 0   ? equal
                     : kind == 1 ? r % (1ULL << 33)
                     : kind == 2 ? (r % 16 ? 1 + r % 4096 : 1 + r % (1ULL << 33))
                                 : (r % 3 ? 1 + r % 65536 : 0);
    }
}

/* Of the bytes of any first k pieces, those chosen differ from the ratio's share by at most the
 * largest piece. The comparison is exact up to its own rounding and that of the code under test:
 * each of k additions is off by half an ulp of the total at most. */
static void check_prefixes(const size_t *n_bytes, int64_t n_pieces, double ratio, bl_tier tier,
                           const bl_tier *tiers)
{
    double all = 0, chosen = 0, largest = 0, total = 0;

    for (int64_t i = 0; i < n_pieces; i++) {
        total += (double)n_bytes[i];
        largest = fmax(largest, (double)n_bytes[i]);
    }
    for (int64_t i = 0; i < n_pieces; i++) {
        assert_true(tiers[i] == tier || tiers[i] == BL_TIER_DEVICE);
        all += (double)n_bytes[i];
        if (tiers[i] == tier) chosen += (double)n_bytes[i];
        double excess = fabs(chosen - ratio * all) - largest;
        if (excess > 4 * (double)n_pieces * DBL_EPSILON * total)
            fail_msg("after %lld of %lld pieces %.0f of %.0f bytes are chosen at a ratio of %g",
                     (long long)i + 1, (long long)n_pieces, chosen, all, ratio);
    }
}

static void test_spread(void **state)
{
    static size_t n_bytes[MAX_PIECES];
    static bl_tier tiers[MAX_PIECES], again[MAX_PIECES];
    uint64_t random = 20240731;

    (void)state;
    for (int round = 0; round < N_ROUNDS; round++) {
        int64_t n_pieces = 1 + (int64_t)(next_random(&random) % MAX_PIECES);
        double ratio = (double)(next_random(&random) >> 11) * 0x1p-53;
        bl_tier tier = round % 2 ? BL_TIER_HOST : BL_TIER_DISK;

        make_sizes(&random, n_bytes, n_pieces);
        bl_tier_spread(n_bytes, n_pieces, ratio, tier, tiers);
        check_prefixes(n_bytes, n_pieces, ratio, tier, tiers);
        bl_tier_spread(n_bytes, n_pieces, ratio, tier, again);
        assert_memory_equal(tiers, again, (size_t)n_pieces * sizeof *tiers);
    }
}

/* Two tiers: together as one would be, and the host's part is spread over them. */
static void test_two_tiers(void **state)
{
    static size_t n_bytes[MAX_PIECES], n_chosen_bytes[MAX_PIECES];
    static bl_tier one[MAX_PIECES], two[MAX_PIECES], chosen[MAX_PIECES];
    uint64_t random = 3;

    (void)state;
    for (int round = 0; round < N_ROUNDS; round++) {
        int64_t n_pieces = 1 + (int64_t)(next_random(&random) % MAX_PIECES), n = 0;
        double ratio = (double)(next_random(&random) >> 11) * 0x1p-53,
               host_part =
                   round % 4 ? (double)(next_random(&random) >> 11) * 0x1p-53 : round / 4 % 2;

        make_sizes(&random, n_bytes, n_pieces);
        bl_tier_spread(n_bytes, n_pieces, ratio, BL_TIER_DISK, one);
        bl_tier_spread_two(n_bytes, n_pieces, ratio, host_part, two);
        for (int64_t i = 0; i < n_pieces; i++) {
            assert_int_equal(one[i] == BL_TIER_DEVICE, two[i] == BL_TIER_DEVICE);
            if (one[i] == BL_TIER_DEVICE) continue;
            n_chosen_bytes[n] = n_bytes[i];
            chosen[n++] = two[i] == BL_TIER_HOST ? BL_TIER_HOST : BL_TIER_DEVICE;
        }
        check_prefixes(n_chosen_bytes, n, host_part, BL_TIER_HOST, chosen);
    }
}

static void test_none_and_all(void **state)
{
    static size_t n_bytes[MAX_PIECES];
    static bl_tier tiers[MAX_PIECES];
    uint64_t random = 7;

    (void)state;
    for (int round = 0; round < N_ROUNDS; round++) {
        int64_t n_pieces = 1 + (int64_t)(next_random(&random) % MAX_PIECES);
        make_sizes(&random, n_bytes, n_pieces);
        bl_tier_spread(n_bytes, n_pieces, 0, BL_TIER_HOST, tiers);
        for (int64_t i = 0; i < n_pieces; i++) assert_int_equal(tiers[i], BL_TIER_DEVICE);
        bl_tier_spread(n_bytes, n_pieces, 1, BL_TIER_HOST, tiers);
        for (int64_t i = 0; i < n_pieces; i++) assert_int_equal(tiers[i], BL_TIER_HOST);
    }
    bl_tier_spread(n_bytes, 0, 0.5, BL_TIER_HOST, tiers);
}

/* Decoder layers are equal pieces. Any 126 ratios: as many layers as the ratio says, to the
 * nearest, and the gaps between two neighbors of a kind differ by one at most, so that the link is
 * never idle and then late. */
static void test_layers_alternate(void **state)
{
    enum { N_LAYERS = 126 };
    size_t n_bytes[N_LAYERS];
    bl_tier tiers[N_LAYERS];

    (void)state;
    for (int i = 0; i < N_LAYERS; i++) n_bytes[i] = 3187671040;
    for (int wanted = 1; wanted < N_LAYERS; wanted++) {
        int n_chosen = 0, last = -1, shortest = N_LAYERS, longest = 0;

        bl_tier_spread(n_bytes, N_LAYERS, (double)wanted / N_LAYERS, BL_TIER_HOST, tiers);
        for (int i = 0; i < N_LAYERS; i++) {
            if (tiers[i] != BL_TIER_HOST) continue;
            if (last >= 0) {
                shortest = i - last < shortest ? i - last : shortest;
                longest = i - last > longest ? i - last : longest;
            }
            last = i;
            n_chosen++;
        }
        assert_int_equal(n_chosen, wanted);
        if (n_chosen > 1) assert_in_range(longest, shortest, shortest + 1);
        /* Never a prefix: with at least two on either side, the first two layers and the last two
         * are not all of one kind. */
        if (wanted >= 2 && wanted <= N_LAYERS / 2) {
            assert_false(tiers[0] == BL_TIER_HOST && tiers[1] == BL_TIER_HOST);
            assert_false(tiers[N_LAYERS - 2] == BL_TIER_HOST &&
                         tiers[N_LAYERS - 1] == BL_TIER_HOST);
        }
    }
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(bl_tier_name(BL_TIER_DEVICE), "device");
    assert_string_equal(bl_tier_name(BL_TIER_HOST), "host");
    assert_string_equal(bl_tier_name(BL_TIER_DISK), "disk");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spread),       cmocka_unit_test(test_two_tiers),
        cmocka_unit_test(test_none_and_all), cmocka_unit_test(test_layers_alternate),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
