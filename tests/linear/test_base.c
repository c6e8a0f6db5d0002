/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts of row-shards for any shapes and shard counts, and the sources of frozen weights: what a rank gets
 * from gathered shards and from pages in any tier is bit for bit what the resident base has, for any ring
 * depth, prefetching, order of visits and timing. */
#include "ops_test.h"
#include "test_ranks.h"

#include <dirent.h>
#include <unistd.h>

#include "linear/base.h"
#include "offload/pager.h"

enum { UNITS = 5, HEAD = UNITS - 1 };

/* A model in small: widths that differ between units and inside a matrix, rows that no rank count divides, an
 * empty segment, more ranks than rows, and a head larger than a slot. */
static void make_layout(int n_shards, bl_base_unit units[UNITS], bl_base_layout *out)
{
    memset(units, 0, UNITS * sizeof *units);
    for (int u = 0; u < HEAD; u++) {
        units[u].n_matrices = BL_BASE_MATRICES;
        bl_base_matrix *m = units[u].matrix;
        bl_format narrow = u % 2 ? BL_FORMAT_FP8_ROW : BL_FORMAT_FP8_BLOCK;
        m[0].weight = (bl_weight){.rows = 47,
                                  .cols = 33,
                                  .n_segments = 3,
                                  .segment = {{narrow, NULL, NULL, 25},
                                              {narrow, NULL, NULL, 11},
                                              {narrow, NULL, NULL, 11}}};
        m[1].weight = (bl_weight){.rows = 3,
                                  .cols = 70 + u,
                                  .n_segments = 1,
                                  .segment = {{BL_FORMAT_F32, NULL, NULL, 3}}};
        m[2].weight = (bl_weight){.rows = 60,
                                  .cols = 33,
                                  .n_segments = 3, /* three widths: three parts */
                                  .segment = {{narrow, NULL, NULL, 30},
                                              {BL_FORMAT_BF16, NULL, NULL, 13},
                                              {narrow, NULL, NULL, 17}}};
        m[3].weight = (bl_weight){
            .rows = 21,
            .cols = 30,
            .n_segments = 2, /* two formats of one width: one part */
            .segment = {{BL_FORMAT_F16, NULL, NULL, 0}, {BL_FORMAT_BF16, NULL, NULL, 21}}};
    }
    units[HEAD].n_matrices = 1;
    units[HEAD].whole_ring = true;
    units[HEAD].matrix[0].weight = (bl_weight){
        .rows = 1001, .cols = 70, .n_segments = 1, .segment = {{BL_FORMAT_F32, NULL, NULL, 1001}}};
    *out = (bl_base_layout){.n_shards = n_shards, .n_units = UNITS, .units = units};
    assert_int_equal(bl_base_layout_finish(out), BL_OK);
}

/* ---- layouts ---- */

static void check_unit(const bl_base_unit *unit, int n_shards)
{
    size_t shard_end = 0, slot_end = 0;

    for (int m = 0; m < unit->n_matrices; m++) {
        const bl_base_matrix *matrix = &unit->matrix[m];
        int next_segment = 0;
        for (int p = 0; p < matrix->n_parts; p++) {
            const bl_base_part *part = &matrix->part[p];
            int64_t rows = 0, next_row = 0;
            assert_int_equal(part->first_segment, next_segment);
            for (int s = next_segment; s < next_segment + part->n_segments; s++) {
                const bl_weight_segment *segment = &matrix->weight.segment[s];
                assert_int_equal(part->row_bytes,
                                 matrix->weight.cols *
                                     (int64_t)bl_format_code_bytes(segment->format));
                rows += segment->rows;
            }
            assert_int_equal(part->rows, rows);
            next_segment += part->n_segments;
            for (int i = 0; i < n_shards; i++) { /* each row on exactly one rank, in order */
                int64_t begin, end;
                bl_base_part_rows(part, i, &begin, &end);
                assert_int_equal(begin, next_row);
                assert_true(end >= begin && end - begin <= part->shard_rows);
                assert_true(end == rows || end == (i + 1) * part->shard_rows);
                next_row = end;
            }
            assert_int_equal(next_row, rows);
            assert_int_equal(part->shard_bytes, part->shard_rows * part->row_bytes);
            assert_true(part->shard_offset >= shard_end &&
                        part->shard_offset % BL_DEVICE_ALIGNMENT_BYTES == 0);
            assert_true(part->slot_offset >= slot_end &&
                        part->slot_offset % BL_DEVICE_ALIGNMENT_BYTES == 0);
            shard_end = part->shard_offset + part->shard_bytes;
            slot_end = part->slot_offset + part->shard_bytes * (size_t)n_shards;
        }
        assert_int_equal(next_segment, matrix->weight.n_segments);
    }
    assert_true(unit->shard_bytes >= shard_end && unit->slot_bytes >= slot_end);
}

static void test_layout(void **state)
{
    (void)state;
    for (int n_shards = 1; n_shards <= 70;
         n_shards++) { /* past the rows of every matrix but the head */
        bl_base_unit units[UNITS];
        bl_base_layout layout;
        size_t offset = 0;
        make_layout(n_shards, units, &layout);
        for (int u = 0; u < UNITS; u++) {
            assert_int_equal(units[u].offset, offset);
            offset += units[u].shard_bytes;
            check_unit(&units[u], n_shards);
        }
        assert_int_equal(layout.shard_bytes, offset);
        assert_int_equal(units[0].matrix[0].n_parts, 1);
        assert_int_equal(units[0].matrix[2].n_parts, 3);
        assert_int_equal(units[0].matrix[3].n_parts, 1);
    }
}

/* Each part once, in order; none of a layout without units. */
static void test_walk(void **state)
{
    bl_base_unit units[UNITS];
    bl_base_layout layout;
    int64_t n = 0;

    (void)state;
    make_layout(3, units, &layout);
    bl_base_walk w = {.layout = &layout};
    for (int u = 0; u < UNITS; u++)
        for (int m = 0; m < units[u].n_matrices; m++)
            for (int p = 0; p < units[u].matrix[m].n_parts; p++, n++) {
                assert_true(bl_base_next(&w));
                assert_int_equal(w.index, n);
                assert_int_equal(w.idx_unit, u);
                assert_int_equal(w.idx_matrix, m);
                assert_int_equal(w.idx_part, p);
                assert_ptr_equal(w.matrix, &units[u].matrix[m]);
                assert_ptr_equal(w.part, &units[u].matrix[m].part[p]);
            }
    assert_false(bl_base_next(&w));
    assert_false(bl_base_next(&w));
    assert_int_equal(w.index, n);
    assert_int_equal(bl_base_part_count(&layout), n);
    layout.n_units = 0;
    assert_int_equal(bl_base_part_count(&layout), 0);
}

static void check_too_large(int64_t rows, int64_t cols)
{
    bl_base_unit unit = {.n_matrices = 1};
    bl_base_layout layout = {.n_shards = 8, .n_units = 1, .units = &unit};
    unit.matrix[0].weight = (bl_weight){.rows = rows,
                                        .cols = cols,
                                        .n_segments = 1,
                                        .segment = {{BL_FORMAT_F32, NULL, NULL, rows}}};
    assert_int_equal(bl_base_layout_finish(&layout), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "too large"));
}

static void test_layout_that_overflows(void **state)
{
    (void)state;
    check_too_large(INT64_MAX / 8, 16);
    check_too_large(1, INT64_MAX / 2);
    check_too_large((int64_t)1 << 31, (int64_t)1 << 31);
    check_too_large((int64_t)1 << 58, 1);

    /* Each unit fits, all together do not. */
    enum { MANY = 300 };
    bl_base_unit *units = test_alloc(MANY, sizeof *units);
    bl_base_layout layout = {.n_shards = 1, .n_units = MANY, .units = units};
    for (int u = 0; u < MANY; u++) {
        units[u].n_matrices = 1;
        units[u].matrix[0].weight =
            (bl_weight){.rows = (int64_t)1 << 28,
                        .cols = (int64_t)1 << 28,
                        .n_segments = 1,
                        .segment = {{BL_FORMAT_FP8_ROW, NULL, NULL, (int64_t)1 << 28}}};
    }
    assert_int_equal(bl_base_layout_finish(&layout), BL_EINPUT);
    free(units);
}

/* ---- sources ---- */

static uint8_t code_at(int64_t unit, int matrix, int segment, int64_t row, int64_t byte)
{
    return (uint8_t)(int)(127.0f * test_value((int)(unit * 100 + matrix * 10 + segment),
                                              row * 4096 + byte, 3));
}

static void fill_part(const bl_base_walk *at, int shard, uint8_t *out)
{
    const bl_weight *weight = &at->matrix->weight;
    const bl_base_part *part = at->part;
    int64_t begin, end, first = 0;
    bl_base_part_rows(part, shard, &begin, &end);
    for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++) {
        for (int64_t r = 0; r < weight->segment[s].rows; r++) {
            if (first + r < begin || first + r >= end) continue;
            uint8_t *row = out + (first + r - begin) * part->row_bytes;
            for (int64_t b = 0; b < part->row_bytes; b++)
                row[b] = code_at(at->idx_unit, at->idx_matrix, s, r, b);
        }
        first += weight->segment[s].rows;
    }
}

static bl_status make_shards(const bl_base_layout *layout, bl_device *device, int shard, void **out)
{
    BL_TRY(bl_device_alloc(device, BL_SPACE_DEVICE, layout->shard_bytes, "shards", out));
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);)
        fill_part(&w, shard,
                  (uint8_t *)*out + layout->units[w.idx_unit].offset + w.part->shard_offset);
    return BL_OK;
}

typedef struct compare_args {
    bl_weight got, want;
    int64_t unit;
    int matrix;
} compare_args;

static bl_status compare_codes(bl_stream *stream, const void *argument)
{
    const compare_args *a = argument;
    (void)stream;
    TEST_CHECK(a->got.rows == a->want.rows && a->got.cols == a->want.cols &&
               a->got.n_segments == a->want.n_segments);
    for (int s = 0; s < a->want.n_segments; s++) {
        const bl_weight_segment *got = &a->got.segment[s], *want = &a->want.segment[s];
        TEST_CHECK(got->rows == want->rows && got->format == want->format);
        if (memcmp(got->codes, want->codes,
                   (size_t)(want->rows * a->want.cols) * bl_format_code_bytes(want->format)) != 0)
            return BL_FAIL(BL_EINTERNAL, "unit %lld, matrix %d, segment %d: other codes",
                           (long long)a->unit, a->matrix, s);
    }
    return BL_OK;
}
_Static_assert(sizeof(compare_args) <= BL_STREAM_ARGS_BYTES, "arguments of a task");

static bl_status pause_task(bl_stream *stream, const void *argument)
{
    (void)stream;
    usleep(*(const unsigned *)argument);
    return BL_OK;
}

/* Up to a millisecond, or nothing: another delay for each rank, visit and stream. */
static bl_status pause_stream(bl_stream *stream, int rank, int64_t visit, int which)
{
    float value = test_value(rank, visit * 2 + which, 17);
    unsigned us = value > 0 ? (unsigned)(1000 * value) : 0;
    return us ? bl_stream_call(stream, pause_task, &us, sizeof us) : BL_OK;
}

static void test_resident_has_each_row(void **state)
{
    bl_base_unit units[UNITS];
    bl_base_layout layout;
    void *codes;
    bl_base *base;
    test_device d = test_device_create(1);
    (void)state;

    make_layout(1, units, &layout);
    assert_int_equal(make_shards(&layout, d.device, 0, &codes), BL_OK);
    assert_int_equal(bl_base_create_resident(&layout, codes, &base), BL_OK);
    for (int u = 0; u < UNITS; u++)
        for (int m = 0; m < units[u].n_matrices; m++) {
            bl_weight w;
            assert_int_equal(bl_base_acquire(base, u, m, d.stream, &w), BL_OK);
            for (int s = 0; s < w.n_segments; s++) {
                int64_t row_bytes = w.cols * (int64_t)bl_format_code_bytes(w.segment[s].format);
                const uint8_t *at = w.segment[s].codes;
                for (int64_t i = 0; i < w.segment[s].rows * row_bytes; i++)
                    assert_int_equal(at[i], code_at(u, m, s, i / row_bytes, i % row_bytes));
            }
            assert_int_equal(bl_base_release(base, u, d.stream), BL_OK);
        }
    bl_base_destroy(base);
    bl_device_free(d.device, BL_SPACE_DEVICE, codes);
    test_device_destroy(d);
}

typedef struct sharded_case {
    int depth, look_ahead; /* look_ahead 0: no prefetch */
    bool pauses;
} sharded_case;

static bl_status visit(test_rank *self, const sharded_case *c, bl_base *sharded, bl_base *resident,
                       bl_stream *gathers, const int *order, int n, int at)
{
    int64_t unit = order[at];
    for (int ahead = 0; ahead < c->look_ahead && at + ahead < n; ahead++) {
        BL_TRY(bl_base_prefetch(sharded, order[at + ahead]));
        if (order[at + ahead] == HEAD) break; /* it will need the whole ring */
    }
    if (c->pauses) BL_TRY(pause_stream(gathers, self->rank, at, 0));
    for (int m = 0; m < (unit == HEAD ? 1 : BL_BASE_MATRICES); m++) {
        compare_args args = {.unit = unit, .matrix = m};
        BL_TRY(bl_base_acquire(sharded, unit, m, self->stream, &args.got));
        BL_TRY(bl_base_acquire(resident, unit, m, self->stream, &args.want));
        if (c->pauses && m == 1) BL_TRY(pause_stream(self->stream, self->rank, at, 1));
        BL_TRY(bl_stream_call(self->stream, compare_codes, &args, sizeof args));
    }
    if (at + 1 < n && order[at + 1] == unit) return BL_OK; /* visited again at once */
    return bl_base_release(sharded, unit, self->stream);
}

/* Two training passes, one forward, and some jumping about. */
static bl_status visit_all(test_rank *self, const sharded_case *c, bl_base *base, bl_base *resident,
                           bl_stream *gathers)
{
    static const int order[] = {0, 1, 2, 3, HEAD, 3, 2, 1,    0,    0, 1, 2, 3, HEAD, 3,
                                2, 1, 0, 0, 1,    2, 3, HEAD, HEAD, 2, 0, 3, 3, 1};
    int64_t allocations = bl_device_allocations(self->device);

    for (int i = 0; i < (int)BL_COUNT(order); i++)
        BL_TRY(visit(self, c, base, resident, gathers, order, BL_COUNT(order), i));
    BL_TRY(bl_stream_synchronize(self->stream));
    BL_TRY(bl_stream_synchronize(gathers));
    TEST_CHECK(bl_device_allocations(self->device) == allocations);
    return bl_base_verify(base);
}

static bl_status compare_sharded(test_rank *self)
{
    const sharded_case *c = self->arg;
    bl_base_unit units[UNITS], whole_units[UNITS];
    bl_base_layout layout, whole;
    void *shards = NULL, *everything = NULL;
    bl_base *sharded = NULL, *resident = NULL;
    bl_stream *gathers = NULL;
    bl_status st;

    make_layout(self->n_ranks, units, &layout);
    make_layout(1, whole_units, &whole);
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gathers", &gathers));
    BL_TRY_GOTO(st, done, make_shards(&layout, self->device, self->rank, &shards));
    BL_TRY_GOTO(st, done, make_shards(&whole, self->device, 0, &everything));
    BL_TRY_GOTO(st, done, bl_base_create_resident(&whole, everything, &resident));
    size_t before = bl_device_bytes(self->device);
    BL_TRY_GOTO(st, done,
                bl_base_create_sharded(&layout, shards, self->device, self->comm, gathers, c->depth,
                                       &sharded));
    TEST_CHECK_GOTO(st, done,
                    bl_device_bytes(self->device) - before ==
                        bl_base_sharded_ring_bytes(&layout, c->depth));
    st = visit_all(self, c, sharded, resident, gathers);
done:
    (void)bl_stream_synchronize(self->stream);
    if (gathers) (void)bl_stream_synchronize(gathers);
    bl_base_destroy(sharded);
    bl_base_destroy(resident);
    bl_device_free(self->device, BL_SPACE_DEVICE, shards);
    bl_device_free(self->device, BL_SPACE_DEVICE, everything);
    bl_stream_destroy(gathers);
    return st;
}

static void test_sharded_equals_resident(void **state)
{
    static const int ranks[] = {1, 2, 3, 4, 8}, depths[] = {1, 2, 4};
    (void)state;
    for (size_t r = 0; r < BL_COUNT(ranks); r++)
        for (size_t d = 0; d < BL_COUNT(depths); d++)
            for (int variant = 0; variant < 3; variant++) {
                sharded_case c = {
                    .depth = depths[d], .look_ahead = variant * depths[d], .pauses = variant != 1};
                bl_status st = test_ranks_run(ranks[r], 1, 60, compare_sharded, &c, NULL);
                if (st != BL_OK)
                    print_error("%d ranks, depth %d, ahead %d: %s\n", ranks[r], c.depth,
                                c.look_ahead, bl_error_text());
                assert_int_equal(st, BL_OK);
            }
}

/* ---- paged ---- */

enum { MAX_PAGES = UNITS * BL_BASE_MATRICES * BL_BASE_SEGMENTS };

typedef struct paged_case {
    sharded_case visits;
    int tiers; /* a bl_tier, or 3: all of them in turn */
    bl_io_engine engine;
    bl_pager_hooks hooks;
    const char *dir;
} paged_case;

/* Pages of all parts, filled; their order is the layout's. */
static bl_status make_pages(test_rank *self, const paged_case *c, const bl_base_layout *layout,
                            bool *is_resident, bl_pages **out)
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
        is_resident[w.index] = tier == BL_TIER_DEVICE;
    }
    BL_TRY(bl_pages_create(&options, bl_base_part_count(layout), specs, out));
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
        uint8_t *bytes = calloc(1, w.part->shard_bytes + 1);
        TEST_CHECK(bytes);
        fill_part(&w, self->rank, bytes);
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
    bool is_resident[MAX_PAGES];
    bl_pages *pages = NULL;
    bl_base *paged = NULL, *resident = NULL, *wrong;
    bl_stream *gathers = NULL, *copies = NULL;
    bl_status st;

    make_layout(self->n_ranks, units, &layout);
    make_layout(1, whole_units, &whole);
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gathers", &gathers));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "copies", &copies));
    BL_TRY_GOTO(st, done, make_shards(&whole, self->device, 0, &everything));
    BL_TRY_GOTO(st, done, bl_base_create_resident(&whole, everything, &resident));
    BL_TRY_GOTO(st, done, make_pages(self, c, &layout, is_resident, &pages));
    bl_pager_options options = {.device = self->device,
                                .comm = self->n_ranks > 1 ? self->comm : NULL,
                                .copy = copies,
                                .gather = gathers,
                                .ring_depth = c->visits.depth,
                                .io_engine = c->engine,
                                .hooks = &c->hooks};
    size_t before = bl_device_bytes(self->device);
    BL_TRY_GOTO(st, done, bl_base_create_paged(&layout, pages, &options, &paged));
    TEST_CHECK_GOTO(st, done,
                    bl_device_bytes(self->device) - before ==
                        bl_base_paged_ring_bytes(&layout, is_resident, c->visits.depth));
    BL_TRY_GOTO(st, done, visit_all(self, &c->visits, paged, resident, gathers));
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

static void test_wrong_number_of_shards(void **state)
{
    bl_base_unit units[UNITS];
    bl_base_layout layout;
    bl_comm *comm;
    bl_base *base = (bl_base *)units;
    test_device d = test_device_create(1);
    (void)state;

    make_layout(2, units, &layout);
    assert_int_equal(bl_comm_create_local(1, 0, &comm), BL_OK);
    assert_int_equal(bl_base_create_resident(&layout, NULL, &base), BL_EINTERNAL);
    assert_null(base);
    assert_int_equal(bl_base_create_sharded(&layout, NULL, d.device, comm, d.stream, 2, &base),
                     BL_EINTERNAL);
    assert_null(base);
    bl_base_destroy(NULL);
    bl_comm_destroy(comm);
    test_device_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_walk),
        cmocka_unit_test(test_layout_that_overflows),
        cmocka_unit_test(test_resident_has_each_row),
        cmocka_unit_test(test_sharded_equals_resident),
        cmocka_unit_test(test_paged_equals_resident),
        cmocka_unit_test(test_wrong_number_of_shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
