/* SPDX-License-Identifier: Apache-2.0 */
/* made_weights.c -- weights without a checkpoint: one block of random values is mapped repeatedly,
 * and a base repeats a few layers as many. */
#include "bench/command/made_weights.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/sizes.h"
#include "device/staging.h"
#include "fp8/element.h"

/* A block of random weights, which all are cut from: element i is a function of i alone. */
enum { BLOCK_BYTES = 16 << 20 };

static const float WEIGHT_STD = 0.02f;
static const float CODE_STD = 64.0f; /* of codes: a row's largest weight is some seven times that */

/* SplitMix64's mixer. */
static uint64_t mix(uint64_t i)
{
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Two normal deviates (Box and Muller) of counter `i`. */
static void normals(uint64_t i, float out[2])
{
    uint64_t z = mix(i);
    float u = ((float)(uint32_t)(z >> 40) + 0.5f) * 0x1p-24f,
          angle = (float)(uint32_t)z * (float)(2 * 3.14159265358979 * 0x1p-32),
          radius = sqrtf(-2 * logf(u));
    out[0] = radius * cosf(angle);
    out[1] = radius * sinf(angle);
}

/* The scale that gives weights their size: all 4-bit codes are equally likely. */
static float scale_of(const bl_format_descriptor *f)
{
    float squares = 0;

    if (!f->values) return WEIGHT_STD / CODE_STD;
    for (int code = 0; code < 16; code++) squares += f->values[code] * f->values[code];
    return WEIGHT_STD / sqrtf(squares / 16);
}

static void fill_scales(char *block, const bl_format_descriptor *f)
{
    float value = scale_of(f);
    uint16_t half = bl_f32_to_bf16(value);
    uint8_t exponent = (uint8_t)(127 + ilogbf(value));
    const void *scale = f->scale_dtype == BL_F32    ? (const void *)&value
                        : f->scale_dtype == BL_BF16 ? (const void *)&half
                                                    : &exponent;
    size_t n = bl_dtype_bytes(f->scale_dtype);

    for (size_t i = 0; i < BLOCK_BYTES; i += n) memcpy(block + i, scale, n);
}

/* Codes or values of a format, bf16 of one without scales. */
static void fill_codes(char *block, bl_format format)
{
    float pair[2];
    uint16_t halves[2];

    for (size_t i = 0; bl_format_is_packed(format) && i < BLOCK_BYTES; i += sizeof(uint64_t)) {
        uint64_t codes = mix(i);
        memcpy(block + i, &codes, sizeof codes);
    }
    if (bl_format_is_packed(format)) return;
    bool is_half = !bl_format_has_scales(format);
    size_t width = is_half ? sizeof *halves : 1;
    for (size_t i = 0; i < BLOCK_BYTES / width; i += 2) {
        normals(i, pair);
        for (size_t k = 0; k < 2; k++) {
            halves[k] = bl_f32_to_bf16(pair[k] * WEIGHT_STD);
            if (!is_half) block[i + k] = (char)bl_f32_to_e4m3(pair[k] * CODE_STD);
        }
        if (is_half) memcpy(block + i * width, halves, sizeof halves);
    }
}

/* ---- a model ---- */

/* n_bytes that all are the block's: the same pages of memory again and again. */
static bl_status map_repeatedly(size_t n_bytes, void **out)
{
    size_t n_mapped = (size_t)bl_round_up((int64_t)n_bytes, BLOCK_BYTES);
    int fd = memfd_create("ballast-bench", MFD_CLOEXEC);

    *out = NULL;
    if (fd < 0 || ftruncate(fd, BLOCK_BYTES) != 0) {
        bl_status st = bl_fail_errno(BL_ENOMEM, "a block of weights");
        if (fd >= 0) close(fd);
        return st;
    }
    char *memory = mmap(NULL, n_mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool is_mapped = memory != MAP_FAILED;
    for (size_t at = 0; is_mapped && at < n_mapped; at += BLOCK_BYTES)
        is_mapped = mmap(memory + at, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                         fd, 0) != MAP_FAILED;
    close(fd);
    if (!is_mapped) {
        if (memory != MAP_FAILED) munmap(memory, n_mapped);
        return bl_fail_errno(BL_ENOMEM, "an embedding of %zu bytes", n_bytes);
    }
    fill_codes(memory, BL_FORMAT_BF16);
    *out = memory;
    return BL_OK;
}

static size_t embedding_bytes(const bl_model_config *c)
{
    return (size_t)(c->vocab_size * c->hidden_size) * sizeof(uint16_t);
}

static bl_format format_of(bl_base_format format)
{
    bl_format made = BL_FORMAT_FP8_ROW;

    (void)bl_format_parse(bl_base_format_name(format), &made); /* not of auto */
    return format == BL_BASE_STORED ? BL_FORMAT_BF16 : made;
}

bl_status bl_made_model_open(const bl_model_config *config, bl_base_format format,
                             int64_t n_positions, bl_model **out)
{
    size_t n_formats = bl_model_format_count(config);
    bl_model *model = calloc(1, sizeof *model);
    bl_status st = BL_OK;

    *out = NULL;
    if (model)
        *model = (bl_model){.config = *config,
                            .embedding_dtype = BL_BF16,
                            .head_dtype = BL_BF16,
                            .formats = malloc(n_formats * sizeof *model->formats),
                            .n_positions = n_positions};
    if (!model || !model->formats)
        st = BL_FAIL(BL_ENOMEM, "a model of %lld layers", (long long)config->n_layers);
    else
        st = map_repeatedly(embedding_bytes(config), &model->embedding);
    if (st != BL_OK) {
        bl_made_model_close(model);
        return st;
    }
    for (size_t i = 0; i < n_formats; i++) model->formats[i] = format_of(format);
    *out = model;
    return BL_OK;
}

void bl_made_model_close(bl_model *model)
{
    if (!model) return;
    if (model->embedding)
        munmap(model->embedding,
               (size_t)bl_round_up((int64_t)embedding_bytes(&model->config), BLOCK_BYTES));
    free(model->formats);
    free(model);
}

/* ---- weights ---- */

/* A page from somewhere in the block on. */
static bl_status write_page(bl_pages *pages, int64_t page, const char *block)
{
    size_t n_bytes = bl_pages_spec(pages, page)->n_bytes,
           from = (size_t)page * 64 * 977 % BLOCK_BYTES;

    for (size_t at = 0, n; at < n_bytes; at += n) {
        size_t place = (from + at) % BLOCK_BYTES;
        n = (size_t)bl_min_i64((int64_t)(n_bytes - at), (int64_t)(BLOCK_BYTES - place));
        BL_TRY(bl_pages_write(pages, page, at, block + place, n));
    }
    return BL_OK;
}

static void name_page(void *user, const bl_base_walk *at, char name[BL_PAGE_NAME_BYTES])
{
    bl_model_page_name(user, at, name);
}

static bl_status create_pages(bl_model_weights *w, int shard, const bl_placement *placement)
{
    bl_model_config config = w->model->config;
    bl_pages_options options = {.device = w->device,
                                .pin = placement->pin,
                                .node = -1,
                                .shard = shard,
                                .n_shards = w->layout.n_shards};
    bl_tier *tiers = calloc((size_t)bl_base_part_count(&w->layout) + 1, sizeof *tiers);
    bl_status st = tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of pages");

    if (st == BL_OK) st = bl_placement_assign(&w->layout, placement, tiers);
    if (st == BL_OK)
        st = bl_base_create_pages(&w->layout, tiers, w->n_scales, &options, name_page, &config,
                                  &w->pages);
    free(tiers);
    return st;
}

static bl_status fill_pages(bl_model_weights *w)
{
    char *blocks[BL_FORMAT_COUNT][2] = {{NULL}}; /* pinned: pages are copied from there */
    bl_status st = BL_OK;

    for (bl_base_walk at = {.layout = &w->layout}; st == BL_OK && bl_base_next(&at);) {
        const bl_weight *weight = &at.matrix->weight;
        bl_format format = weight->segment[at.part->first_segment].format;
        char **block = &blocks[format][at.part->is_scales];
        if (!*block) {
            st = bl_device_alloc(w->device, BL_SPACE_HOST, BLOCK_BYTES, "a block of weights",
                                 (void **)block);
            if (st == BL_OK && at.part->is_scales)
                fill_scales(*block, bl_format_describe(format));
            else if (st == BL_OK)
                fill_codes(*block, format);
        }
        if (st == BL_OK) st = write_page(w->pages, at.index, *block);
    }
    for (int i = 0; i < BL_FORMAT_COUNT; i++)
        for (int k = 0; k < 2; k++) bl_device_free(w->device, BL_SPACE_HOST, blocks[i][k]);
    return st == BL_OK ? bl_pages_seal(w->pages) : st;
}

/* The same value everywhere. */
static bl_status fill(bl_staging *staging, float *to, int64_t n, float value)
{
    int64_t most = (int64_t)(staging->n_bytes / sizeof *to);
    float *values = staging->bytes;

    for (int64_t i = 0; i < bl_min_i64(n, most); i++) values[i] = value;
    for (int64_t at = 0, count; at < n; at += count) {
        count = bl_min_i64(most, n - at);
        BL_TRY(bl_staging_upload(staging, to + at, values, (size_t)count * sizeof *to));
    }
    return BL_OK;
}

bl_status bl_made_vectors_create(const bl_model *model, bl_device *device, float **out)
{
    int64_t n = bl_arch_vector_floats(&model->config);
    bl_staging *staging;

    *out = NULL;
    BL_TRY(bl_staging_create(device, BL_STAGING_BYTES, "staging of norms", &staging));
    bl_status st =
        bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)n * sizeof **out, "norms", (void **)out);
    if (st == BL_OK) st = fill(staging, *out, n, 1.0f);
    bl_staging_destroy(staging);
    return st;
}

bl_status bl_made_weights_create(const bl_model *model, bl_device *device, int shard, int n_shards,
                                 const bl_placement *placement, bl_model_weights **out)
{
    const bl_model_config *c = &model->config;
    bl_model_weights *w = NULL;
    bl_staging *staging = NULL;
    bl_status st = BL_OK;

    *out = NULL;
    BL_TRY_GOTO(st, done,
                bl_staging_create(device, BL_STAGING_BYTES, "staging of weights", &staging));
    BL_TRY_GOTO(st, done, bl_model_weights_create(model, device, n_shards, &w));
    BL_TRY_GOTO(st, done, create_pages(w, shard, placement));
    BL_TRY_GOTO(st, done, fill_pages(w));
    BL_TRY_GOTO(st, done, fill(staging, w->scales, w->n_scales, WEIGHT_STD / CODE_STD));
    BL_TRY_GOTO(st, done, fill(staging, w->vectors, bl_arch_vector_floats(c), 1.0f));
    *out = w;
    w = NULL;
done:
    bl_staging_destroy(staging);
    bl_model_weights_free(w);
    return st;
}
