/* SPDX-License-Identifier: Apache-2.0 */
/* layer_load.c -- a rank's rows of a stack's weights, from where the caller has them, for
 * linear/base_load.h.
 *
 * Rows are read and converted to their format in chunks of whole groups. Scales that every rank
 * holds whole are zero where another rank contributes them, so that their sum over the ranks is
 * exact. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/files.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "linear/base_load.h"
#include "linear/layer_internal.h"

enum { CHUNK_BYTES = 4 << 20 };

typedef struct load {
    bl_linear_stack *stack;
    const bl_base_job *jobs;
    bl_pool *pool, *own_pool; /* own_pool: on a device without workers */
    void *rows;               /* of a chunk */
    float *dense;
} load;

static int64_t chunk_rows(const bl_linear_spec *s)
{
    int64_t n = CHUNK_BYTES / (int64_t)sizeof(float) / s->cols / BL_FP8_BLOCK;
    return bl_max_i64(1, n) * BL_FP8_BLOCK;
}

/* The rows from `row` on that are read and stored together. */
static bl_base_rows chunk_at(const bl_linear_spec *s, int64_t row, int64_t end)
{
    bl_base_rows c = bl_base_rows_at(s->format, row, end, chunk_rows(s));
    c.dtype = s->dtype;
    return c;
}

static bl_status read_chunk(const load *l, int64_t layer, bl_base_rows *c)
{
    const bl_linear_spec *s = &l->stack->specs[layer];
    int64_t row_bytes = s->cols * (int64_t)bl_dtype_bytes(s->dtype);

    c->bytes = l->rows;
    if (s->weight) {
        c->bytes = (const char *)s->weight + c->row * row_bytes;
        return BL_OK;
    }
    bl_status st = s->read_rows(s->user, c->row, c->stop, l->rows);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "layer %" PRId64, layer);
}

/* ---- formats ---- */

/* Rows in a format that is not FP8, through fp32, which holds all three. */
static bl_status store_rows(const load *l, const bl_base_job *job, const bl_base_rows *c)
{
    int64_t n = (c->stop - c->row) * job->cols, at = (c->row - job->begin) * job->cols;

    bl_dtype_to_f32(c->dtype, c->bytes, l->dense, (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = job->format == BL_FORMAT_F16    ? bl_f32_to_f16(l->dense[i])
                        : job->format == BL_FORMAT_BF16 ? bl_f32_to_bf16(l->dense[i])
                                                        : 0;
        float stored = job->format == BL_FORMAT_F16    ? bl_f16_to_f32(half)
                       : job->format == BL_FORMAT_BF16 ? bl_bf16_to_f32(half)
                                                       : l->dense[i];
        if (!isfinite(stored))
            return BL_FAIL(BL_EINPUT, "row %" PRId64 ", column %" PRId64 " is not finite in %s",
                           c->row + i / job->cols, i % job->cols, bl_format_name(job->format));
        if (job->format == BL_FORMAT_F32)
            ((float *)job->codes)[at + i] = stored;
        else
            ((uint16_t *)job->codes)[at + i] = half;
    }
    return BL_OK;
}

/* A unit of the base is a layer. */
static bl_status load_rows(void *user, size_t idx_job, uint64_t *checksum)
{
    const load *l = user;
    const bl_base_job *job = &l->jobs[idx_job];
    bl_base_rows c;

    (void)checksum;
    for (int64_t row = job->begin; row < job->end; row = c.stop) {
        c = chunk_at(&l->stack->specs[job->unit], row, job->end);
        BL_TRY(read_chunk(l, job->unit, &c));
        bl_status st = bl_format_has_scales(job->format) ? bl_base_quantize(l->pool, job, &c)
                                                         : store_rows(l, job, &c);
        if (st != BL_OK) return bl_error_prefix(st, "layer %" PRId64, job->unit);
    }
    return BL_OK;
}

/* ---- pages ---- */

/* Of what this rank's page file holds: the layers' shapes and formats and the rows they are made
 * of. */
static bl_status hash_rows(const load *l, uint64_t *key)
{
    const bl_linear_stack *stack = l->stack;
    uint64_t hash = 0;

    for (int64_t i = 0; i < stack->n_layers; i++) {
        const bl_linear_spec *s = &stack->specs[i];
        int64_t begin, end, shape[] = {s->rows, s->cols, s->format, s->dtype};
        bl_base_rows c;
        hash = XXH3_64bits_withSeed(shape, sizeof shape, hash);
        bl_base_part_rows(&stack->layout.units[i].matrix[0].part[0], stack->rank, &begin, &end);
        for (int64_t row = begin; row < end; row = c.stop) {
            c = chunk_at(s, row, end);
            BL_TRY(read_chunk(l, i, &c));
            hash = XXH3_64bits_withSeed(
                c.bytes, (size_t)((c.stop - c.row) * s->cols) * bl_dtype_bytes(s->dtype), hash);
        }
    }
    *key = hash;
    return BL_OK;
}

/* The caller has made it. Errors after this check are the system's. */
static bl_status check_dir(const char *dir)
{
    bool is_dir;

    BL_TRY(bl_path_is_dir(dir, &is_dir));
    return is_dir ? BL_OK : BL_FAIL(BL_EINPUT, "%s: is not a directory", dir);
}

static void name_page(void *user, const bl_base_walk *at, char name[BL_PAGE_NAME_BYTES])
{
    (void)user;
    snprintf(name, BL_PAGE_NAME_BYTES, "layer %" PRId64, at->idx_unit);
}

static bl_status create_pages(const load *l)
{
    bl_linear_stack *stack = l->stack;
    const bl_linear_options *o = &stack->options;
    bl_pages_options options = {.device = o->device,
                                .pin = o->pin,
                                .node = -1,
                                .dir = o->dir,
                                .key = o->key,
                                .shard = stack->rank,
                                .n_shards = stack->n_ranks,
                                .n_on_host = stack->n_ranks};
    bool has_disk = bl_base_has_disk(&stack->layout, stack->tiers);

    if (has_disk) BL_TRY(check_dir(o->dir));
    if (has_disk && o->key == 0) BL_TRY(hash_rows(l, &options.key));
    return bl_base_create_pages(&stack->layout, stack->tiers, stack->n_scales, &options, name_page,
                                NULL, &stack->pages);
}

/* The buffers of a chunk of the layer with the largest. */
static bl_status take_buffers(load *l)
{
    size_t rows = 1, dense = 1;

    for (int64_t i = 0; i < l->stack->n_layers; i++) {
        const bl_linear_spec *s = &l->stack->specs[i];
        int64_t n_rows = bl_min_i64(chunk_rows(s), s->rows), n = n_rows * s->cols;
        size_t bytes[] = {s->weight ? 0 : (size_t)n * bl_dtype_bytes(s->dtype),
                          bl_format_has_scales(s->format) ? 0 : (size_t)n * sizeof(float)};
        if (bytes[0] > rows) rows = bytes[0];
        if (bytes[1] > dense) dense = bytes[1];
    }
    l->rows = malloc(rows);
    l->dense = malloc(dense);
    if (!l->rows || !l->dense)
        return BL_FAIL(BL_ENOMEM, "buffers to load %zu bytes of rows at a time", rows);
    return BL_OK;
}

static bl_status take_pool(load *l)
{
    bl_device *device = l->stack->options.device;

    if ((l->pool = bl_device_pool(device))) return BL_OK;
    BL_TRY(bl_pool_create((int)bl_cores_usable(), &l->own_pool));
    l->pool = l->own_pool;
    return BL_OK;
}

bl_status bl_linear_stack_load(bl_linear_stack *stack, bl_staging *staging)
{
    load l = {.stack = stack};
    bl_base_load *base = NULL;
    size_t n_jobs;
    bl_status st;

    BL_TRY_GOTO(st, done, take_pool(&l));
    BL_TRY_GOTO(st, done, take_buffers(&l));
    BL_TRY_GOTO(st, done, create_pages(&l));
    bl_base_load_options options = {.device = stack->options.device,
                                    .layout = &stack->layout,
                                    .pages = stack->pages,
                                    .shard = stack->rank,
                                    .staging_bytes = CHUNK_BYTES,
                                    .staging = staging};
    BL_TRY_GOTO(st, done, bl_base_load_create(&options, &base));
    l.jobs = bl_base_load_jobs(base, &n_jobs);
    BL_TRY_GOTO(st, done, bl_base_load_run(base, load_rows, &l, stack->scales, stack->n_scales));
    if (stack->comm && stack->n_scales > 0) { /* those of the other ranks' rows */
        BL_TRY_GOTO(
            st, done,
            bl_comm_all_reduce_f32(stack->comm, stack->gather, stack->scales, stack->n_scales));
        st = bl_stream_synchronize(stack->gather);
    }
done:
    bl_base_load_destroy(base);
    free(l.dense);
    free(l.rows);
    bl_pool_destroy(l.own_pool);
    return st;
}
