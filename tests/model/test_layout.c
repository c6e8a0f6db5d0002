/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of a large model's base: shards, ring, disk. */
#include "ops_test.h"

#include "arch/config.h"
#include "arch/llama.h"
#include "linear/base_paged.h"
#include "model/weights.h"

/* The largest known model, laid out for eight ranks: 2 x 53,248 x 16,384 codes in one matrix, 405
 * billion in all. */
static void test_layout_of_405b(void **state)
{
    bl_model_config config;
    bl_base_layout layout;
    (void)state;

    assert_int_equal(bl_model_config_preset("llama3.1-405b", &config), BL_OK);
    bl_format *formats = test_alloc(config.n_layers * BL_PROJECTIONS, sizeof *formats);
    for (int64_t i = 0; i < config.n_layers * BL_PROJECTIONS; i++) formats[i] = BL_FORMAT_FP8_ROW;
    assert_int_equal(bl_model_layout(&config, formats, BL_BF16, BL_DEVICE_CPU, 8, &layout), BL_OK);
    int64_t per_layer = 16384ll * (16384 + 2 * 1024) + 16384ll * 16384 + 3 * 16384ll * 53248,
            head = 2 * 128256ll * 16384;
    /* Every row count is a multiple of 8, and every shard of the alignment. */
    assert_int_equal(layout.shard_bytes, (size_t)(126 * per_layer + head) / 8);
    assert_int_equal(layout.units[0].slot_bytes, (size_t)per_layer);
    bl_tier *tiers = test_alloc(bl_base_part_count(&layout), sizeof *tiers);
    bl_base_paged_bytes n;
    for (int64_t i = 0; i < bl_base_part_count(&layout); i++) tiers[i] = BL_TIER_HOST;
    assert_int_equal(bl_base_paged_measure(&layout, tiers, 2, false, 0, &n), BL_OK);
    assert_int_equal(n.ring, (size_t)(2 * per_layer)); /* more than the head */
    free(tiers);
    /* What all disk pages are written through, 32 MiB twice for a host and 4 and 8 MiB a rank at
     * least; nothing in memory. */
    static const struct {
        int n;
        size_t writing;
    } hosts[] = {{0, 64 << 20}, {1, 64 << 20}, {2, 32 << 20}, {8, 12 << 20}, {16, 12 << 20}};
    for (size_t i = 0; i < BL_COUNT(hosts); i++) {
        bl_placement placement = {.ratio = 1, .tier = BL_TIER_DISK, .n = hosts[i].n};
        bl_placed_bytes placed;
        assert_int_equal(bl_placement_measure(&layout, &placement, BL_DEVICE_CPU, 2, &placed),
                         BL_OK);
        assert_int_equal(placed.disk, layout.shard_bytes);
        assert_int_equal(placed.writing, hosts[i].writing);
        placement.tier = BL_TIER_HOST;
        assert_int_equal(bl_placement_measure(&layout, &placement, BL_DEVICE_CPU, 2, &placed),
                         BL_OK);
        assert_int_equal(placed.writing, 0);
    }
    assert_int_equal(layout.units[125].offset, (size_t)(125 * per_layer) / 8);
    bl_base_layout_free(&layout);
    free(formats);
}

/* In 4 bits: 0.53125 bytes per weight in a shard, in the ring and on disk. */
static void test_packed_layout_of_405b(void **state)
{
    bl_model_config config;
    bl_base_layout layout;
    (void)state;

    assert_int_equal(bl_model_config_preset("llama3.1-405b", &config), BL_OK);
    bl_format *formats = test_alloc(config.n_layers * BL_PROJECTIONS, sizeof *formats);
    for (int64_t i = 0; i < config.n_layers * BL_PROJECTIONS; i++) formats[i] = BL_FORMAT_MXFP4;
    assert_int_equal(bl_model_layout(&config, formats, BL_BF16, BL_DEVICE_CPU, 8, &layout), BL_OK);
    int64_t per_layer =
                (16384ll * (16384 + 2 * 1024) + 16384ll * 16384 + 3 * 16384ll * 53248) * 17 / 32,
            head = 2 * 128256ll * 16384;
    assert_int_equal(layout.shard_bytes, (size_t)(126 * per_layer + head) / 8);
    assert_int_equal(layout.units[0].slot_bytes, (size_t)per_layer);
    bl_base_layout_free(&layout);
    free(formats);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout_of_405b),
        cmocka_unit_test(test_packed_layout_of_405b),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
