/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's weights after loading: the rows of its shard, as quantizing the whole tensor gives them,
 * in any format, from any checkpoint, on any number of ranks. */
#include "made_model.h"
#include "ops_test.h"
#include "test_ranks.h"
#include "tmp_dir.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "fp8/packed.h"
#include "arch/config.h"
#include "arch/llama.h"
#include "linear/base_paged.h"
#include "store/safetensors.h"

/* ---- one rank: each projection has the bits of quantizing it whole ---- */

/* Of each projection, its segment of the fused matrix. */
static const int segments[BL_PROJECTIONS] = {0, 1, 2, 0, 0, 1, 0};

/* Of blocks that no format has: code * scale, in the format. */
static void decode_whole(bl_pool *pool, const bl_hf_weight *w, bl_format format,
                         const uint8_t *bytes, uint8_t *codes, float *scales)
{
    float *grid = test_floats(w->scale_rows * w->scale_cols),
          *values = test_floats(w->rows * w->cols);

    assert_int_equal(bl_hf_read_scales(w, grid), BL_OK);
    for (int64_t r = 0; r < w->rows; r++)
        for (int64_t c = 0; c < w->cols; c++) {
            int64_t i = r * w->cols + c;
            values[i] = bl_e4m3_to_f32(bytes[i]) *
                        grid[r / w->block_rows * w->scale_cols + c / w->block_cols];
            uint16_t half = bl_f32_to_bf16(values[i]);
            if (format == BL_FORMAT_F32) memcpy(codes + 4 * i, &values[i], 4);
            if (format == BL_FORMAT_BF16) memcpy(codes + 2 * i, &half, 2);
            if (format == BL_FORMAT_BF16) assert_true(bl_bf16_to_f32(half) == values[i]);
        }
    if (format == BL_FORMAT_FP8_ROW)
        assert_int_equal(
            bl_fp8_row_quantize(pool, BL_F32, values, 0, w->rows, w->cols, codes, scales), BL_OK);
    if (format == BL_FORMAT_FP8_BLOCK)
        assert_int_equal(
            bl_fp8_block_quantize(pool, BL_F32, values, 0, w->rows, w->cols, codes, scales), BL_OK);
    free(grid), free(values);
}

static void check_projection(const bl_model_weights *w, test_device d, int64_t layer, int p,
                             bl_format format)
{
    const bl_projection *info = &bl_llama_projections[p];
    bl_pool *pool = bl_device_pool(d.device);
    bl_base *base;
    bl_weight matrix;
    const bl_weight_segment *segment = &matrix.segment[segments[p]];
    size_t n_codes, n_scales;
    bl_format_bytes n;
    bl_hf_weight stored;
    char name[96];

    assert_int_equal(bl_base_create_resident(&w->layout, w->shards, &base), BL_OK);
    assert_int_equal(bl_base_acquire(base, layer, (int)info->matrix, d.stream, &matrix), BL_OK);
    snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)layer, info->module);
    assert_int_equal(bl_hf_get_weight(w->model->files, name, &stored), BL_OK);
    assert_int_equal(segment->format, format);
    assert_int_equal(segment->rows, stored.rows);
    assert_true(bl_format_sizes(format, stored.rows, stored.cols, &n_codes, &n_scales));
    assert_true(bl_format_measure(bl_format_describe(format), stored.rows, stored.cols, &n));
    void *bytes = test_alloc(stored.codes->n_bytes, 1);
    uint8_t *codes = test_alloc((int64_t)n_codes, 1);
    float *scales = test_floats((int64_t)n_scales);
    assert_int_equal(bl_stored_tensor_read(stored.codes, 0, (size_t)stored.codes->n_bytes, bytes),
                     BL_OK);
    if (stored.scale_kind == BL_SCALE_GRID || stored.scale_kind == BL_SCALE_MX) {
        decode_whole(pool, &stored, format, bytes, codes, scales);
    } else if (stored.scale_kind != BL_SCALE_NONE) {
        memcpy(codes, bytes, n_codes);
        assert_int_equal(bl_hf_read_scales(&stored, scales), BL_OK);
        for (size_t i = 1; stored.scale_kind == BL_SCALE_TENSOR && i < n_scales; i++)
            scales[i] = scales[0];
    } else if (format == BL_FORMAT_FP8_ROW) {
        assert_int_equal(bl_fp8_row_quantize(pool, stored.codes->dtype, bytes, 0, stored.rows,
                                             stored.cols, codes, scales),
                         BL_OK);
    } else if (format == BL_FORMAT_FP8_BLOCK) {
        assert_int_equal(bl_fp8_block_quantize(pool, stored.codes->dtype, bytes, 0, stored.rows,
                                               stored.cols, codes, scales),
                         BL_OK);
    } else if (bl_format_is_packed(format)) {
        assert_int_equal(bl_packed_quantize(pool, format, !w->model->largest_scales,
                                            stored.codes->dtype, bytes, 0, stored.rows, stored.cols,
                                            codes, scales),
                         BL_OK);
    } else {
        memcpy(codes, bytes, n_codes);
    }
    assert_memory_equal(segment->codes, codes, n_codes);
    if (n_scales)
        assert_memory_equal(segment->scales, scales, n.scales);
    else
        assert_null(segment->scales);
    free(bytes), free(codes), free(scales);
    bl_base_destroy(base);
}

/* ---- several ranks: shards are parts of one rank's matrices; all have all whole scales ---- */

typedef struct sharded_load {
    const bl_model_weights *whole;
    const char *pages_dir;
} sharded_load;

static bl_status check_shards(const bl_model_weights *mine, const bl_model_weights *whole, int rank)
{
    bl_base_walk theirs = {.layout = &whole->layout};

    for (bl_base_walk w = {.layout = &mine->layout}; bl_base_next(&w) && bl_base_next(&theirs);) {
        const char *shard = (const char *)mine->shards + mine->layout.units[w.idx_unit].offset +
                            w.part->shard_offset;
        const char *all = (const char *)whole->shards + whole->layout.units[w.idx_unit].offset +
                          theirs.part->shard_offset;
        int64_t begin, end;
        bl_base_part_rows(w.part, rank, &begin, &end);
        size_t n_bytes = (size_t)((end - begin) * w.part->row_bytes);
        TEST_CHECK(memcmp(shard, all + begin * w.part->row_bytes, n_bytes) == 0);
        for (size_t i = n_bytes; i < w.part->shard_bytes; i++) TEST_CHECK(shard[i] == 0);
    }
    size_t n_scale_bytes = (size_t)whole->n_scales * sizeof(float);
    TEST_CHECK(mine->n_scales == whole->n_scales);
    TEST_CHECK(mine->checksum == whole->checksum);
    TEST_CHECK(memcmp(mine->scales, whole->scales, n_scale_bytes) == 0);
    TEST_CHECK(memcmp(mine->vectors, whole->vectors, (2 * LAYERS + 1) * HIDDEN * sizeof(float)) ==
               0);
    return BL_OK;
}

/* A shard is the same when it is written to page files in pieces of 128 rows, and when it is read
 * from existing files. */
static bl_status check_pages(test_rank *self, const bl_model_weights *mine)
{
    const sharded_load *load = self->arg;
    bl_placement placement = {
        .ratio = 1, .tier = BL_TIER_DISK, .dir = load->pages_dir, .staging_bytes = 1};

    for (int again = 0; again < 2; again++) {
        bl_model_weights *paged;
        bl_staging *staging = NULL;
        BL_TRY(bl_model_weights_load(load->whole->model, self->device, self->comm, self->stream,
                                     &placement, &paged));
        bl_status st = bl_pages_has_disk(paged->pages) == (again == 1)
                           ? BL_OK
                           : BL_FAIL(BL_EINTERNAL, "page files: load %d", again);
        if (st == BL_OK) st = bl_staging_create(self->device, 10000, "a test's pages", &staging);
        for (int64_t page = 0; st == BL_OK && page < bl_pages_count(mine->pages); page++) {
            size_t n_bytes = bl_pages_spec(mine->pages, page)->n_bytes;
            char *bytes = malloc(n_bytes + 1);
            st = bl_pages_read(paged->pages, page, staging, bytes);
            if (st == BL_OK && memcmp(bytes, bl_pages_memory(mine->pages, page), n_bytes) != 0)
                st = BL_FAIL(BL_EINTERNAL, "page %s differs",
                             bl_pages_spec(mine->pages, page)->name);
            free(bytes);
        }
        if (st == BL_OK &&
            memcmp(paged->scales, mine->scales, (size_t)mine->n_scales * sizeof(float)) != 0)
            st = BL_FAIL(BL_EINTERNAL, "scales differ");
        if (st == BL_OK && paged->checksum != mine->checksum)
            st = BL_FAIL(BL_EINTERNAL, "checksums differ: load %d", again);
        bl_staging_destroy(staging);
        bl_model_weights_free(paged);
        BL_TRY(st);
    }
    return BL_OK;
}

static bl_status load_shard(test_rank *self)
{
    const sharded_load *load = self->arg;
    bl_model_weights *mine;
    BL_TRY(bl_model_weights_load(load->whole->model, self->device, self->comm, self->stream, NULL,
                                 &mine));
    bl_status st = check_shards(mine, load->whole, self->rank);
    if (st == BL_OK) st = check_pages(self, mine);
    bl_model_weights_free(mine);
    return st;
}

/* Returns the checksum of the weights. */
static uint64_t check_model(const made *m, bl_base_format choice, bl_format format)
{
    static const int ranks[] = {1, 2, 3, 5, 8};
    bl_model *model = open_host(make_model(m), choice);
    test_device d = test_device_create(2);
    bl_model_weights *whole;
    bl_comm *comm;

    assert_int_equal(bl_comm_create_local(1, 0, &comm), BL_OK);
    assert_int_equal(bl_model_weights_load(model, d.device, comm, d.stream, NULL, &whole), BL_OK);
    for (int64_t l = 0; l < LAYERS; l++)
        for (int p = 0; p < BL_PROJECTIONS; p++) check_projection(whole, d, l, p, format);
    sharded_load load = {whole, tmp_path("pages")};
    assert_int_equal(bl_tree_remove(load.pages_dir), BL_OK);
    assert_int_equal(bl_dir_create(load.pages_dir), BL_OK);
    for (size_t i = 0; i < BL_COUNT(ranks); i++) {
        bl_status st = test_ranks_run(ranks[i], 1, 60, load_shard, &load, NULL);
        if (st != BL_OK)
            print_error("%s, %d ranks: %s\n", bl_format_name(format), ranks[i], bl_error_text());
        assert_int_equal(st, BL_OK);
    }
    /* A model that was written again, even with the same bytes, gets new page files. */
    const struct timespec long_ago[2] = {{1, 0}, {1, 0}};
    assert_int_equal(
        utimensat(AT_FDCWD, bl_safetensors_path(bl_hf_file(model->files, 0)), long_ago, 0), 0);
    assert_int_equal(test_ranks_run(ranks[0], 1, 60, load_shard, &load, NULL), BL_OK);
    uint64_t checksum = whole->checksum;
    bl_model_weights_free(whole);
    bl_model_close(model);
    bl_comm_destroy(comm);
    test_device_destroy(d);
    return checksum;
}

/* ---- page files of earlier versions ---- */

/* The key in the name of the only page file: base-KEY-0-of-1.pages. */
static uint64_t key_of_page_file(const char *dir)
{
    char **names;
    size_t n_names;
    uint64_t key = 0;

    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    assert_int_equal(n_names, 2); /* and its list */
    assert_int_equal(sscanf(names[0], "base-%16" SCNx64 "-0-of-1", &key), 1);
    bl_names_free(names, n_names);
    return key;
}

/* As they were when every rank had all scales: pages of codes, and one of the rank's scales. */
static void write_old_pages(const bl_model_weights *w, const char *dir, uint64_t key)
{
    enum { N_SCALES = 100 };
    const bl_pages_options options = {
        .device = w->device, .node = -1, .dir = dir, .key = key, .n_shards = 1};
    int64_t n_pages = bl_base_part_count(&w->layout), n = 0;
    bl_page_spec *specs = test_alloc(n_pages + 1, sizeof *specs);
    bl_pages *pages;

    for (bl_base_walk at = {.layout = &w->layout}; bl_base_next(&at);)
        if (!at.part->is_scales) specs[n++] = *bl_pages_spec(w->pages, at.index);
    assert_true(n < n_pages);
    specs[n++] = (bl_page_spec){"scales", N_SCALES * sizeof(float), BL_TIER_DISK};
    assert_int_equal(bl_pages_create(&options, n, specs, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    for (int64_t i = 0; i < n; i++) {
        char *zeros = calloc(1, specs[i].n_bytes + 1);
        assert_int_equal(bl_pages_write(pages, i, 0, zeros, specs[i].n_bytes), BL_OK);
        free(zeros);
    }
    assert_int_equal(bl_pages_seal(pages), BL_OK);
    bl_pages_destroy(pages);
    free(specs);
}

/* They lack the pages of scales, and are rewritten once. */
static void test_page_files_without_scales(void **state)
{
    const made m = {.dtype = BL_BF16, .has_embedding = true, .has_head = true};
    bl_model *model = open_host(make_model(&m), BL_BASE_FP8_BLOCK);
    bl_placement placement = {.ratio = 1, .tier = BL_TIER_DISK, .dir = tmp_path("old pages")};
    test_device d = test_device_create(2);
    bl_model_weights *first, *weights;
    bl_comm *comm;

    (void)state;
    assert_int_equal(bl_dir_create(placement.dir), BL_OK);
    assert_int_equal(bl_comm_create_local(1, 0, &comm), BL_OK);
    assert_int_equal(bl_model_weights_load(model, d.device, comm, d.stream, &placement, &first),
                     BL_OK);
    write_old_pages(first, placement.dir, key_of_page_file(placement.dir));
    for (int again = 0; again < 2; again++) {
        assert_int_equal(
            bl_model_weights_load(model, d.device, comm, d.stream, &placement, &weights), BL_OK);
        assert_int_equal(bl_pages_has_disk(weights->pages), again);
        assert_true(weights->checksum == first->checksum);
        assert_int_equal(weights->n_scales, 0);
        bl_model_weights_free(weights);
    }
    bl_model_weights_free(first);
    bl_model_close(model);
    bl_comm_destroy(comm);
    test_device_destroy(d);
}

/* ---- formats ---- */

static void test_formats_and_ranks(void **state)
{
    static const bl_dtype dtypes[] = {BL_F32, BL_BF16, BL_F16};
    static const bl_format stored[] = {BL_FORMAT_F32, BL_FORMAT_BF16, BL_FORMAT_F16};
    (void)state;
    for (int i = 0; i < 3; i++) {
        made m = {.dtype = dtypes[i], .tied = i == 1, .has_embedding = true, .has_head = i != 1};
        uint64_t checksum = check_model(&m, BL_BASE_AUTO, BL_FORMAT_FP8_ROW);
        assert_true(check_model(&m, BL_BASE_FP8_ROW, BL_FORMAT_FP8_ROW) == checksum);
        assert_true(check_model(&m, BL_BASE_FP8_BLOCK, BL_FORMAT_FP8_BLOCK) == checksum);
        assert_true(check_model(&m, BL_BASE_STORED, stored[i]) == checksum);
        assert_true(check_model(&m, BL_BASE_MXFP4, BL_FORMAT_MXFP4) == checksum);
        assert_true(check_model(&m, BL_BASE_INT4_G32, BL_FORMAT_INT4_G32) == checksum);
    }
}

/* Rows that are no whole groups, and page files of other scales. */
static void test_packed_formats(void **state)
{
    made m = {.dtype = BL_BF16, .has_embedding = true, .has_head = true};
    test_device d = test_device_create(2);
    bl_placement placement = {
        .ratio = 1, .tier = BL_TIER_DISK, .dir = tmp_path("pages"), .staging_bytes = 1};
    bl_model *model;
    bl_comm *comm;

    (void)state;
    const char *dir = make_model(&m);
    assert_int_equal(bl_model_open(dir, BL_BASE_NF4, 16, &model), BL_EUSAGE);
    assert_error_has("base_format nf4: the rows of model.layers.0.self_attn.q_proj.weight have 160 "
                     "weights, which are not whole groups of 64; use mxfp4 or int4_g32");
    assert_int_equal(bl_tree_remove(placement.dir), BL_OK);
    assert_int_equal(bl_dir_create(placement.dir), BL_OK);
    assert_int_equal(bl_comm_create_local(1, 0, &comm), BL_OK);
    model = open_host(dir, BL_BASE_MXFP4);
    for (int i = 0; i < 3; i++) { /* the second scales are not those of the first file */
        bl_model_weights *weights;
        model->largest_scales = i == 1;
        assert_int_equal(
            bl_model_weights_load(model, d.device, comm, d.stream, &placement, &weights), BL_OK);
        assert_int_equal(bl_pages_has_disk(weights->pages), i == 2);
        bl_model_weights_free(weights);
    }
    bl_model_close(model);
    bl_comm_destroy(comm);
    test_device_destroy(d);
}

static void test_fp8_checkpoints(void **state)
{
    static const bl_format kept[] = {0, BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK};
    (void)state;
    for (int kind = BL_SCALE_TENSOR; kind <= BL_SCALE_BLOCK; kind++) {
        made m = {.dtype = BL_BF16,
                  .scales = (bl_scale_kind)kind,
                  .has_embedding = true,
                  .has_head = true};
        bl_model *model;
        uint64_t checksum = check_model(&m, BL_BASE_AUTO, kept[kind]);
        assert_true(check_model(&m, BL_BASE_STORED, kept[kind]) == checksum);
        bl_base_format other = kind == BL_SCALE_BLOCK ? BL_BASE_FP8_ROW : BL_BASE_FP8_BLOCK;
        assert_int_equal(bl_model_open(tmp_path("model"), other, 16, &model), BL_EUSAGE);
        assert_error_has("would lose by being quantized again");
        assert_null(model);
    }
}

/* Blocks that no format has: exact, in more bytes; quantized again on demand only. */
static void test_decoded_checkpoints(void **state)
{
    (void)state;
    for (int kind = BL_SCALE_GRID; kind <= BL_SCALE_MX; kind++) {
        made m = {.dtype = BL_BF16,
                  .scales = (bl_scale_kind)kind,
                  .has_embedding = true,
                  .has_head = true};
        bl_format exact = kind == BL_SCALE_MX ? BL_FORMAT_BF16 : BL_FORMAT_F32;
        uint64_t checksum = check_model(&m, BL_BASE_AUTO, exact);
        assert_true(check_model(&m, BL_BASE_STORED, exact) == checksum);
        assert_true(check_model(&m, BL_BASE_FP8_ROW, BL_FORMAT_FP8_ROW) == checksum);
        assert_true(check_model(&m, BL_BASE_FP8_BLOCK, BL_FORMAT_FP8_BLOCK) == checksum);
    }
}

/* ---- the checksum is of every tensor ---- */

static uint64_t checksum_of(const char *dir, bl_base_format format)
{
    test_device d = test_device_create(2);
    bl_model *model = open_host(dir, format);
    bl_model_weights *weights;
    bl_comm *comm;

    assert_int_equal(bl_comm_create_local(1, 0, &comm), BL_OK);
    assert_int_equal(bl_model_weights_load(model, d.device, comm, d.stream, NULL, &weights), BL_OK);
    uint64_t checksum = weights->checksum;
    bl_model_weights_free(weights);
    bl_model_close(model);
    bl_comm_destroy(comm);
    test_device_destroy(d);
    return checksum;
}

/* Turns one bit over: the lowest of the element in the middle. */
static void flip_middle(const char *path, const bl_stored_tensor *t)
{
    int64_t width = (int64_t)bl_dtype_bytes(t->dtype),
            at = t->offset_bytes + t->n_bytes / width / 2 * width;
    int fd = open(path, O_RDWR);
    uint8_t byte;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    assert_int_equal(close(fd), 0);
}

static void check_flips(const made *m, bl_base_format format)
{
    const char *dir = make_model(m), *path = tmp_path("model/model.safetensors");
    uint64_t checksum = checksum_of(dir, format);
    bl_safetensors *file;

    assert_int_equal(bl_safetensors_open(path, &file), BL_OK);
    for (size_t i = 0; i < bl_safetensors_count(file); i++) {
        const bl_stored_tensor *t = bl_safetensors_at(file, i);
        flip_middle(path, t);
        if (checksum_of(dir, format) == checksum) fail_msg("a bit of %s is not seen", t->name);
        flip_middle(path, t);
    }
    assert_true(checksum_of(dir, format) == checksum);
    bl_safetensors_close(file);
}

static void test_every_tensor_is_in_the_checksum(void **state)
{
    const made plain = {.dtype = BL_BF16, .has_embedding = true, .has_head = true};
    const made tied = {.dtype = BL_F32, .tied = true, .has_embedding = true};

    (void)state;
    check_flips(&plain, BL_BASE_FP8_ROW);
    check_flips(&plain, BL_BASE_FP8_BLOCK);
    check_flips(&plain, BL_BASE_STORED);
    check_flips(&tied, BL_BASE_AUTO);
    for (int kind = BL_SCALE_TENSOR; kind <= BL_SCALE_BLOCK; kind++) {
        const made fp8 = {.dtype = BL_BF16,
                          .scales = (bl_scale_kind)kind,
                          .has_embedding = true,
                          .has_head = true};
        check_flips(&fp8, BL_BASE_AUTO);
    }
}

/* Rows that change places, within a tensor or between two of one shape, are another model. */
static void test_places_are_in_the_checksum(void **state)
{
    const made m = {.dtype = BL_BF16, .has_embedding = true, .has_head = true};
    const char *dir = make_model(&m), *path = tmp_path("model/model.safetensors");
    static const char *const names[] = {"model.layers.0.mlp.gate_proj.weight",
                                        "model.layers.0.mlp.up_proj.weight"};
    uint64_t checksum = checksum_of(dir, BL_BASE_STORED);
    bl_safetensors *file;
    char rows[2][HIDDEN * 2];

    (void)state;
    assert_int_equal(bl_safetensors_open(path, &file), BL_OK);
    const bl_stored_tensor *gate = bl_safetensors_find(file, names[0]),
                           *up = bl_safetensors_find(file, names[1]);
    const int64_t places[][2] = {{gate->offset_bytes, gate->offset_bytes + HIDDEN * 2},
                                 {gate->offset_bytes, up->offset_bytes}};
    int fd = open(path, O_RDWR);
    for (size_t i = 0; i < BL_COUNT(places); i++)
        for (int turn = 0; turn < 2; turn++) {
            for (int k = 0; k < 2; k++)
                assert_int_equal(pread(fd, rows[k], sizeof rows[k], places[i][k]), sizeof rows[k]);
            for (int k = 0; k < 2; k++)
                assert_int_equal(pwrite(fd, rows[1 - k], sizeof rows[k], places[i][k]),
                                 sizeof rows[k]);
            assert_true((checksum_of(dir, BL_BASE_STORED) == checksum) == (turn == 1));
        }
    close(fd);
    bl_safetensors_close(file);
}

/* ---- bad weights ---- */

static void check_refused(const made *m, bl_base_format format, const char *place)
{
    const char *dir = make_model(m);
    bl_model *model;
    bl_model_weights *weights = NULL;
    test_device d = test_device_create(1);
    bl_comm *comm;

    assert_int_equal(bl_comm_create_local(1, 0, &comm), BL_OK);
    bl_status st = bl_model_open(dir, format, 16, &model);
    if (st == BL_OK) st = bl_model_weights_load(model, d.device, comm, d.stream, NULL, &weights);
    assert_int_equal(st, BL_EINPUT);
    assert_null(weights);
    assert_error_has(m->poisoned);
    assert_error_has(place);
    assert_error_has("model.safetensors");
    bl_model_close(model);
    bl_comm_destroy(comm);
    test_device_destroy(d);
}

static void test_weights_that_are_not_finite(void **state)
{
    static const bl_dtype dtypes[] = {BL_F32, BL_BF16, BL_F16};
    static const bl_base_format formats[] = {BL_BASE_FP8_ROW, BL_BASE_FP8_BLOCK, BL_BASE_STORED};
    (void)state;
    for (int i = 0; i < 9; i++) {
        made m = {.dtype = dtypes[i / 3],
                  .has_embedding = true,
                  .has_head = true,
                  .poisoned = "model.layers.1.mlp.up_proj.weight",
                  .poisoned_index = 131 * HIDDEN + 17};
        check_refused(&m, formats[i % 3], "row 131, column 17");
    }
    made m = {.dtype = BL_BF16,
              .scales = BL_SCALE_ROW,
              .has_embedding = true,
              .has_head = true,
              .poisoned = "model.layers.0.self_attn.v_proj.weight",
              .poisoned_index = 47 * HIDDEN + 159};
    check_refused(&m, BL_BASE_AUTO, "row 47, column 159");
    m.scales = BL_SCALE_MX;
    check_refused(&m, BL_BASE_AUTO, "row 47, column 159");
    check_refused(&m, BL_BASE_FP8_BLOCK, "row 47, column 159");
    for (int i = 0; i < 3; i++) {
        made around = {.dtype = dtypes[i],
                       .has_embedding = true,
                       .has_head = true,
                       .poisoned = "lm_head.weight",
                       .poisoned_index = 49 * HIDDEN};
        check_refused(&around, BL_BASE_AUTO, "row 49, column 0");
        around.poisoned = "model.embed_tokens.weight";
        check_refused(&around, BL_BASE_AUTO, "row 49, column 0");
        around.poisoned = "model.layers.1.post_attention_layernorm.weight";
        around.poisoned_index = 9;
        check_refused(&around, BL_BASE_AUTO, "element 9");
        around.poisoned = "model.norm.weight";
        check_refused(&around, BL_BASE_AUTO, "element 9");
    }
}

static void test_tied_table_under_either_name(void **state)
{
    size_t n_bytes = VOCAB * HIDDEN * sizeof(float);
    float *tables[3];
    (void)state;
    for (int i = 0; i < 3; i++) {
        made m = {.dtype = BL_F32, .tied = true, .has_embedding = i != 1, .has_head = i != 0};
        bl_model *model = open_host(make_model(&m), BL_BASE_AUTO);
        tables[i] = test_alloc((int64_t)n_bytes, 1);
        memcpy(tables[i], model->embedding, n_bytes);
        bl_model_close(model);
    }
    assert_memory_equal(tables[0], tables[1], n_bytes);
    assert_memory_equal(tables[0], tables[2], n_bytes);
    for (int i = 0; i < 3; i++) free(tables[i]);

    made missing = {.dtype = BL_F32, .has_embedding = true};
    bl_model *model;
    assert_int_equal(bl_model_open(make_model(&missing), BL_BASE_AUTO, 16, &model), BL_EINPUT);
    assert_error_has("lm_head.weight");
    missing = (made){.dtype = BL_F32, .tied = true};
    assert_int_equal(bl_model_open(make_model(&missing), BL_BASE_AUTO, 16, &model), BL_EINPUT);
    assert_error_has("embed_tokens");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats_and_ranks),
        cmocka_unit_test(test_page_files_without_scales),
        cmocka_unit_test(test_packed_formats),
        cmocka_unit_test(test_fp8_checkpoints),
        cmocka_unit_test(test_decoded_checkpoints),
        cmocka_unit_test(test_every_tensor_is_in_the_checksum),
        cmocka_unit_test(test_places_are_in_the_checksum),
        cmocka_unit_test(test_weights_that_are_not_finite),
        cmocka_unit_test(test_tied_table_under_either_name),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
