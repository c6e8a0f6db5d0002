/* SPDX-License-Identifier: Apache-2.0 */
/* Pages in any tier give a rank the weights of the resident base, bit for bit, for any ring depth,
 * way of reading, prefetching, order of visits and timing. */
#include "base_case.h"

#include <dirent.h>
#include <math.h>
#include <unistd.h>

#include "linear/base_paged.h"

enum { MAX_PAGES = UNITS * BL_BASE_MATRICES * BL_BASE_PARTS };

typedef struct paged_case {
    base_case visits;
    int tiers; /* a bl_tier, or 3: all of them in turn */
    bl_io_engine engine;
    bl_pager_hooks hooks;
    const char *dir;
} paged_case;

/* Pages of all parts, filled; their order is the layout's. */
static bl_status make_pages(test_rank *self, const paged_case *c, const bl_base_layout *layout,
                            bl_tier *tiers, bl_pages **out)
{
    bl_pages_options options = {.device = self->device,
                                .node = -1,
                                .dir = c->dir,
                                .key = 5,
                                .shard = self->rank,
                                .n_shards = self->n_ranks};
    bl_page_spec specs[MAX_PAGES];
    char names[MAX_PAGES][32];

    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
        bl_tier tier = (bl_tier)(c->tiers < 3 ? c->tiers : (int)(w.index % 3));
        char *name = names[w.index];
        snprintf(name, sizeof names[0], "unit %d %d.%d", (int)w.idx_unit, w.idx_matrix, w.idx_part);
        specs[w.index] = (bl_page_spec){name, w.part->shard_bytes, tier};
        tiers[w.index] = tier;
    }
    BL_TRY(bl_pages_create(&options, bl_base_part_count(layout), specs, out));
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
        uint8_t *bytes = calloc(1, w.part->shard_bytes + 1);
        TEST_CHECK(bytes);
        base_case_fill(&w, self->rank, bytes);
        bl_status st = bl_pages_write(*out, w.index, 0, bytes, w.part->shard_bytes);
        free(bytes);
        BL_TRY(st);
    }
    return bl_pages_seal(*out);
}

static bl_status compare_paged(test_rank *self)
{
    const paged_case *c = self->arg;
    bl_base_unit units[UNITS], whole_units[UNITS];
    bl_base_layout layout, whole;
    void *everything = NULL;
    bl_tier tiers[MAX_PAGES];
    bl_base_paged_bytes n;
    bl_pages *pages = NULL;
    bl_base *paged = NULL, *resident = NULL, *wrong;
    bl_stream *gathers = NULL, *copies = NULL;
    bl_status st;

    base_case_layout(self->n_ranks, units, &layout);
    base_case_layout(1, whole_units, &whole);
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gathers", &gathers));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "copies", &copies));
    BL_TRY_GOTO(st, done, base_case_shards(&whole, self->device, 0, &everything));
    BL_TRY_GOTO(st, done, bl_base_create_resident(&whole, everything, &resident));
    BL_TRY_GOTO(st, done, make_pages(self, c, &layout, tiers, &pages));
    bl_pager_options options = {.device = self->device,
                                .comm = self->n_ranks > 1 ? self->comm : NULL,
                                .copy = copies,
                                .gather = gathers,
                                .ring_depth = c->visits.depth,
                                .io_engine = c->engine,
                                .hooks = &c->hooks};
    size_t before = bl_device_bytes(self->device);
    BL_TRY_GOTO(st, done, bl_base_create_paged(&layout, pages, &options, &paged));
    BL_TRY_GOTO(st, done, bl_base_paged_measure(&layout, tiers, c->visits.depth, false, 0, &n));
    TEST_CHECK_GOTO(st, done, bl_device_bytes(self->device) - before == n.ring);
    BL_TRY_GOTO(st, done, base_case_visit(self, &c->visits, paged, resident, gathers));
    layout.n_shards++;
    TEST_CHECK_GOTO(
        st, done, bl_base_create_paged(&layout, pages, &options, &wrong) == BL_EINTERNAL && !wrong);
    layout.n_shards--;
    units[2].matrix[1].part[0].shard_bytes++;
    TEST_CHECK_GOTO(
        st, done, bl_base_create_paged(&layout, pages, &options, &wrong) == BL_EINTERNAL && !wrong);
    TEST_CHECK_GOTO(st, done, strstr(bl_error_text(), "unit 2 1.0"));
done:
    (void)bl_stream_synchronize(self->stream);
    bl_base_destroy(paged);
    bl_base_destroy(resident);
    bl_pages_destroy(pages);
    bl_device_free(self->device, BL_SPACE_DEVICE, everything);
    bl_stream_destroy(gathers);
    bl_stream_destroy(copies);
    return st;
}

/* Row shards in device memory. */
static void test_sharded_equals_resident(void **state)
{
    static const int ranks[] = {1, 2, 3, 4, 8}, depths[] = {1, 2, 4};
    (void)state;
    for (size_t r = 0; r < BL_COUNT(ranks); r++)
        for (size_t d = 0; d < BL_COUNT(depths); d++)
            for (int variant = 0; variant < 3; variant++) {
                paged_case c = {.visits = {.depth = depths[d],
                                           .look_ahead = variant * depths[d],
                                           .pauses = variant != 1},
                                .tiers = BL_TIER_DEVICE};
                bl_status st = test_ranks_run(ranks[r], 1, 60, compare_paged, &c, NULL);
                if (st != BL_OK)
                    print_error("%d ranks, depth %d, ahead %d: %s\n", ranks[r], depths[d],
                                c.visits.look_ahead, bl_error_text());
                assert_int_equal(st, BL_OK);
            }
}

/* Files of a test are few: one list and one page file a rank. */
static void remove_dir(const char *dir)
{
    DIR *d = opendir(dir);
    const struct dirent *entry;
    char path[512];

    while (d && (entry = readdir(d)) != NULL) {
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (entry->d_name[0] != '.') unlink(path);
    }
    if (d) closedir(d);
    rmdir(dir);
}

static void test_paged_equals_resident(void **state)
{
    static const int ranks[] = {1, 2, 4}, depths[] = {1, 2, 4};
    (void)state;
    for (size_t r = 0; r < BL_COUNT(ranks); r++)
        for (size_t d = 0; d < BL_COUNT(depths); d++)
            for (int tiers = 0; tiers < 4; tiers++)
                for (int way = 0; way < 4; way++) {
                    char dir[] = "/tmp/ballast-base-XXXXXX";
                    if (tiers < 2 && way > 0) break; /* nothing is on disk */
                    assert_non_null(mkdtemp(dir));
                    paged_case c = {
                        .visits = {.depth = depths[d],
                                   .look_ahead = (way + tiers) % 3 * depths[d],
                                   .pauses = way != 1},
                        .tiers = tiers,
                        .engine = way & 1 ? BL_IO_PREAD : BL_IO_URING,
                        .hooks = {.bounces = way & 2, .is_synchronous = way == 3 && d == 1},
                        .dir = dir};
                    bl_status st = test_ranks_run(ranks[r], 1, 60, compare_paged, &c, NULL);
                    remove_dir(dir);
                    if (st != BL_OK)
                        print_error("%d ranks, depth %d, tiers %d, way %d: %s\n", ranks[r],
                                    depths[d], tiers, way, bl_error_text());
                    assert_int_equal(st, BL_OK);
                }
}

/* Scales are where their codes are, and count with them: half of the bytes are half of both. */
static void test_scales_have_the_tier_of_their_codes(void **state)
{
    static const bl_tier tiers[] = {BL_TIER_HOST, BL_TIER_DISK};
    (void)state;
    for (int n_shards = 1; n_shards <= 4; n_shards++)
        for (int i = 0; i <= 10; i++)
            for (size_t t = 0; t < BL_COUNT(tiers); t++) {
                bl_base_unit units[UNITS];
                bl_base_layout layout;
                bl_tier of[MAX_PAGES];
                size_t moved = 0, largest = 0, all = 0, page = 0;
                base_case_layout(n_shards, units, &layout);
                assert_int_equal(bl_base_assign_tiers(&layout, tiers[t], i / 10.0, 0.5, of), BL_OK);
                for (bl_base_walk w = {.layout = &layout}; bl_base_next(&w);) {
                    if (w.part->is_scales) assert_int_equal(of[w.index], of[w.index - 1]);
                    page = w.part->shard_bytes + (w.part->is_scales ? page : 0);
                    if (page > largest) largest = page;
                    all += w.part->shard_bytes;
                    if (of[w.index] != BL_TIER_DEVICE) moved += w.part->shard_bytes;
                }
                assert_true(fabs((double)moved - i / 10.0 * (double)all) <= (double)largest);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sharded_equals_resident),
        cmocka_unit_test(test_paged_equals_resident),
        cmocka_unit_test(test_scales_have_the_tier_of_their_codes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
