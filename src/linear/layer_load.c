/* SPDX-License-Identifier: Apache-2.0 */
/* layer_load.c -- a rank's rows of a stack's weights, from where the caller has them into pages.
 *
 * Rows are read, quantized and written in chunks of whole rows of 128 x 128 blocks. A block's scale
 * needs all of its rows, so up to 127 rows of the neighbors are read as well; the rank that stores
 * a block's first row contributes its scale. Scales are zero where another rank contributes them, so
 * that their sum over the ranks is exact. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/files.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "linear/layer_internal.h"

enum { CHUNK_BYTES = 4 << 20, NAME_BYTES = 32, PAD_BYTES = 4096 };

typedef struct load {
    bl_linear_stack *stack;
    bl_pool *pool, *own_pool; /* own_pool: on a device without workers */
    float *scales;            /* this rank's, of all layers */
    void *rows, *codes;       /* of a chunk; codes are pinned */
    float *dense, *grid;
} load;

/* Rows [row, stop) to store, for which [first, last) are read. */
typedef struct chunk {
    int64_t row, stop, first, last;
} chunk;

static int64_t chunk_rows(const bl_linear_spec *s)
{
    int64_t n = CHUNK_BYTES / (int64_t)sizeof(float) / s->cols / BL_FP8_BLOCK;
    return bl_max_i64(1, n) * BL_FP8_BLOCK;
}

static chunk chunk_at(const bl_linear_spec *s, int64_t row, int64_t end)
{
    int64_t first = row / BL_FP8_BLOCK * BL_FP8_BLOCK;
    chunk c = {row, bl_min_i64(first + chunk_rows(s), end), row, 0};

    c.last = c.stop;
    if (s->format == BL_FORMAT_FP8_BLOCK) {
        c.first = first;
        c.last = bl_min_i64(bl_round_up(c.stop, BL_FP8_BLOCK), s->rows);
    }
    return c;
}

static bl_status read_chunk(const load *l, int64_t layer, const chunk *c, const void **out)
{
    const bl_linear_spec *s = &l->stack->specs[layer];
    int64_t row_bytes = s->cols * (int64_t)bl_dtype_bytes(s->dtype);

    *out = l->rows;
    if (s->weight) {
        *out = (const char *)s->weight + c->first * row_bytes;
        return BL_OK;
    }
    bl_status st = s->read_rows(s->user, c->first, c->last, l->rows);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "layer %" PRId64, layer);
}

/* ---- formats ---- */

/* codes = rows in a stored format, through fp32, which holds all three. */
static bl_status store_rows(const load *l, const bl_linear_spec *s, const chunk *c,
                            const void *rows)
{
    int64_t n = (c->stop - c->row) * s->cols;

    bl_dtype_to_f32(s->dtype, rows, l->dense, (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = s->format == BL_FORMAT_F16    ? bl_f32_to_f16(l->dense[i])
                        : s->format == BL_FORMAT_BF16 ? bl_f32_to_bf16(l->dense[i])
                                                      : 0;
        float stored = s->format == BL_FORMAT_F16    ? bl_f16_to_f32(half)
                       : s->format == BL_FORMAT_BF16 ? bl_bf16_to_f32(half)
                                                     : l->dense[i];
        if (!isfinite(stored))
            return BL_FAIL(BL_EINPUT, "row %" PRId64 ", column %" PRId64 " is not finite in %s",
                           c->row + i / s->cols, i % s->cols, bl_format_name(s->format));
        if (s->format == BL_FORMAT_F32)
            ((float *)l->codes)[i] = stored;
        else
            ((uint16_t *)l->codes)[i] = half;
    }
    return BL_OK;
}

/* scales: of the layer. begin: this rank's first row. */
static bl_status quantize_blocks(const load *l, const bl_linear_spec *s, const chunk *c,
                                 int64_t begin, const void *rows, float *scales)
{
    int64_t width = bl_ceil_div(s->cols, BL_FP8_BLOCK), first = c->first / BL_FP8_BLOCK,
            n_rows = bl_ceil_div(c->last, BL_FP8_BLOCK) - first;
    const char *own =
        (const char *)rows + (c->row - c->first) * s->cols * (int64_t)bl_dtype_bytes(s->dtype);

    memset(l->grid, 0, (size_t)(n_rows * width) * sizeof *l->grid);
    BL_TRY(bl_fp8_block_absmax(l->pool, s->dtype, rows, c->first, c->last, s->cols, l->grid));
    for (int64_t i = 0; i < n_rows * width; i++) l->grid[i] = bl_fp8_scale(l->grid[i]);
    for (int64_t b = 0; b < n_rows; b++)
        if ((first + b) * BL_FP8_BLOCK >= begin)
            memcpy(scales + (first + b) * width, l->grid + b * width,
                   (size_t)width * sizeof *scales);
    return bl_fp8_block_encode(l->pool, s->dtype, own, c->row, c->stop, s->cols, l->grid, l->codes);
}

static bl_status encode(const load *l, const bl_linear_layer *layer, const chunk *c, int64_t begin,
                        const void *rows)
{
    const bl_linear_spec *s = &l->stack->specs[layer->index];
    float *scales = l->scales + layer->scale_offset;

    switch (s->format) {
    case BL_FORMAT_FP8_ROW:
        return bl_fp8_row_quantise(l->pool, s->dtype, rows, c->row, c->stop, s->cols, l->codes,
                                   scales + c->row);
    case BL_FORMAT_FP8_BLOCK:
        return quantize_blocks(l, s, c, begin, rows, scales);
    default:
        return store_rows(l, s, c, rows);
    }
}

/* ---- layers ---- */

/* Ranks behind the last row store zeros. */
static bl_status pad_page(const load *l, int64_t page, size_t written)
{
    size_t n_bytes = bl_pages_spec(l->stack->pages, page)->n_bytes;

    if (written < n_bytes) memset(l->codes, 0, PAD_BYTES);
    while (written < n_bytes) {
        size_t n = n_bytes - written < PAD_BYTES ? n_bytes - written : PAD_BYTES;
        BL_TRY(bl_pages_write(l->stack->pages, page, written, l->codes, n));
        written += n;
    }
    return BL_OK;
}

static bl_status load_layer(const load *l, int64_t i)
{
    bl_linear_stack *stack = l->stack;
    const bl_linear_spec *s = &stack->specs[i];
    const bl_base_part *part = &stack->layout.units[i].matrix[0].part[0];
    int64_t begin, end;
    size_t written = 0;
    chunk c;

    if (stack->tiers[i] == BL_TIER_DISK && bl_pages_has_disk(stack->pages)) return BL_OK;
    bl_base_part_rows(part, stack->rank, &begin, &end);
    for (int64_t row = begin; row < end; row = c.stop) {
        const void *rows;
        c = chunk_at(s, row, end);
        BL_TRY(read_chunk(l, i, &c, &rows));
        bl_status st = encode(l, &stack->layers[i], &c, begin, rows);
        if (st != BL_OK) return bl_error_prefix(st, "layer %" PRId64, i);
        size_t n_bytes = (size_t)((c.stop - c.row) * part->row_bytes);
        BL_TRY(bl_pages_write(stack->pages, i, written, l->codes, n_bytes));
        written += n_bytes;
    }
    return pad_page(l, i, written);
}

/* Of what this rank's page file holds: the layers' shapes and formats and the rows they are made of. */
static bl_status hash_rows(const load *l, uint64_t *key)
{
    const bl_linear_stack *stack = l->stack;
    uint64_t hash = 0;

    for (int64_t i = 0; i < stack->n_layers; i++) {
        const bl_linear_spec *s = &stack->specs[i];
        int64_t begin, end, shape[] = {s->rows, s->cols, s->format, s->dtype};
        chunk c;
        hash = XXH3_64bits_withSeed(shape, sizeof shape, hash);
        bl_base_part_rows(&stack->layout.units[i].matrix[0].part[0], stack->rank, &begin, &end);
        for (int64_t row = begin; row < end; row = c.stop) {
            const void *rows;
            c = chunk_at(s, row, end);
            BL_TRY(read_chunk(l, i, &c, &rows));
            hash = XXH3_64bits_withSeed(
                rows, (size_t)((c.last - c.first) * s->cols) * bl_dtype_bytes(s->dtype), hash);
        }
    }
    *key = hash;
    return BL_OK;
}

/* The caller's to have made. What becomes of it later is the system's. */
static bl_status check_dir(const char *dir)
{
    bool is_dir;

    BL_TRY(bl_path_is_dir(dir, &is_dir));
    return is_dir ? BL_OK : BL_FAIL(BL_EINPUT, "%s: is not a directory", dir);
}

static bl_status create_pages(const load *l, bool has_disk)
{
    bl_linear_stack *stack = l->stack;
    const bl_linear_options *o = &stack->options;
    int64_t n = stack->n_layers, n_pages = n + (has_disk ? 1 : 0);
    bl_pages_options options = {.device = o->device,
                                .pin = o->pin,
                                .node = -1,
                                .dir = o->dir,
                                .key = o->key,
                                .shard = stack->rank,
                                .n_shards = stack->n_ranks,
                                .n_on_host = stack->n_ranks};
    bl_page_spec *specs = calloc((size_t)n_pages, sizeof *specs);
    char(*names)[NAME_BYTES] = calloc((size_t)n_pages, sizeof *names);
    bl_status st = specs && names ? BL_OK : BL_FAIL(BL_ENOMEM, "linear stack");

    for (int64_t i = 0; st == BL_OK && i < n; i++) {
        snprintf(names[i], NAME_BYTES, "layer %" PRId64, i);
        specs[i] = (bl_page_spec){names[i], stack->layout.units[i].matrix[0].part[0].shard_bytes,
                                  stack->tiers[i]};
    }
    if (st == BL_OK && has_disk)
        specs[n] = (bl_page_spec){"scales", (size_t)stack->n_scales * sizeof(float), BL_TIER_DISK};
    if (st == BL_OK && has_disk) st = check_dir(o->dir);
    if (st == BL_OK && has_disk && o->key == 0) st = hash_rows(l, &options.key);
    if (st == BL_OK) st = bl_pages_create(&options, n_pages, specs, &stack->pages);
    free(names);
    free(specs);
    return st;
}

/* Scales are stored beside the codes in the page file, or read from there. */
static bl_status keep_scales(const load *l, bl_staging *staging)
{
    bl_pages *pages = l->stack->pages;

    if (!bl_pages_has_disk(pages))
        return bl_pages_write(pages, l->stack->n_layers, 0, l->scales,
                              (size_t)l->stack->n_scales * sizeof(float));
    if (l->stack->n_scales == 0) return BL_OK;
    bl_status st = bl_pages_read(pages, l->stack->n_layers, staging, l->scales);
    if (st == BL_EINPUT) bl_pages_distrust_disk(pages); /* the next start writes the file anew */
    return st;
}

/* The buffers of a chunk of the layer with the largest. */
static bl_status take_buffers(load *l)
{
    size_t rows = 1, codes = PAD_BYTES, dense = 1, grid = 1;

    for (int64_t i = 0; i < l->stack->n_layers; i++) {
        const bl_linear_spec *s = &l->stack->specs[i];
        int64_t n_rows = bl_min_i64(chunk_rows(s), s->rows), n = n_rows * s->cols;
        bool is_stored = !bl_format_is_fp8(s->format);
        size_t bytes[] = {
            s->weight ? 0 : (size_t)n * bl_dtype_bytes(s->dtype),
            (size_t)n * bl_format_code_bytes(s->format), is_stored ? (size_t)n * sizeof(float) : 0,
            (size_t)(bl_ceil_div(n_rows, BL_FP8_BLOCK) * bl_ceil_div(s->cols, BL_FP8_BLOCK)) *
                sizeof(float)};
        if (bytes[0] > rows) rows = bytes[0];
        if (bytes[1] > codes) codes = bytes[1];
        if (bytes[2] > dense) dense = bytes[2];
        if (bytes[3] > grid) grid = bytes[3];
    }
    l->rows = malloc(rows);
    l->dense = malloc(dense);
    l->grid = malloc(grid);
    l->scales = calloc((size_t)l->stack->n_scales + 1, sizeof *l->scales);
    if (!l->rows || !l->dense || !l->grid || !l->scales)
        return BL_FAIL(BL_ENOMEM, "buffers to load %zu bytes of rows at a time", rows);
    return bl_device_alloc(l->stack->options.device, BL_SPACE_HOST, codes, "codes on their way",
                           &l->codes);
}

static bl_status take_pool(load *l)
{
    bl_device *device = l->stack->options.device;

    if ((l->pool = bl_device_pool(device))) return BL_OK;
    BL_TRY(bl_pool_create((int)bl_cores_usable(), &l->own_pool));
    l->pool = l->own_pool;
    return BL_OK;
}

/* Scales to the device, and those of the other ranks' rows from them. */
static bl_status share_scales(const load *l, bl_staging *staging)
{
    bl_linear_stack *stack = l->stack;

    if (stack->n_scales == 0) return BL_OK;
    BL_TRY(bl_staging_upload(staging, stack->scales, l->scales,
                             (size_t)stack->n_scales * sizeof(float)));
    if (!stack->comm) return BL_OK;
    BL_TRY(bl_comm_all_reduce_f32(stack->comm, stack->gather, stack->scales, stack->n_scales));
    return bl_stream_synchronize(stack->gather);
}

bl_status bl_linear_stack_load(bl_linear_stack *stack, bl_staging *staging)
{
    load l = {.stack = stack};
    bool has_disk = stack->memory.disk > 0, was_written;
    bl_status st;

    BL_TRY_GOTO(st, done, take_pool(&l));
    BL_TRY_GOTO(st, done, take_buffers(&l));
    BL_TRY_GOTO(st, done, create_pages(&l, has_disk));
    was_written = bl_pages_has_disk(stack->pages);
    if (was_written) BL_TRY_GOTO(st, done, keep_scales(&l, staging));
    for (int64_t i = 0; i < stack->n_layers; i++) BL_TRY_GOTO(st, done, load_layer(&l, i));
    if (has_disk && !was_written) BL_TRY_GOTO(st, done, keep_scales(&l, staging));
    BL_TRY_GOTO(st, done, bl_pages_seal(stack->pages));
    st = share_scales(&l, staging);
done:
    free(l.scales);
    free(l.grid);
    free(l.dense);
    bl_device_free(stack->options.device, BL_SPACE_HOST, l.codes);
    free(l.rows);
    bl_pool_destroy(l.own_pool);
    return st;
}
