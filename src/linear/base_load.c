/* SPDX-License-Identifier: Apache-2.0 */
/* base_load.c -- a rank's rows of a base into its pages.
 *
 * Pages are filled one after the other, each by the jobs of its segments. A page in memory that the
 * host can write is written by the thread that makes the rows; all others pass through one staging
 * buffer, whose size does not depend on the base: their jobs are cut to fit it. Scales are made in
 * host memory, a segment's at a time; after a job, those that it set are copied to the device, or
 * are collected for the page of scales that follows its page. */
#include "linear/base_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "fp8/packed.h"

/* What a job's codes are: the next n_bytes of a page. */
typedef struct job_target {
    int64_t page;
    size_t offset, n_bytes;
    void *scales; /* of the job's segment, device memory; NULL: paged, or none */
} job_target;

struct bl_base_load {
    bl_base_load_options options;
    bl_base_job *jobs;
    job_target *targets;
    size_t n_jobs, max_jobs;
    size_t staging_bytes; /* needed by the largest job */
    void *codes;          /* [staging_bytes], BL_SPACE_HOST */
    void *scales;         /* host memory: of the current segment */
    char *scales_page;    /* BL_SPACE_HOST: the next page of scales; NULL: there are none */
};

/* ---- pages ---- */

bool bl_base_has_disk(const bl_base_layout *layout, const bl_tier *tiers)
{
    int64_t n_pages = bl_base_part_count(layout);

    for (int64_t page = 0; page < n_pages; page++)
        if (tiers[page] == BL_TIER_DISK) return true;
    return false;
}

/* One tier: rows of codes that are found on disk are not read, so their scales are not made. */
static bl_status name_scales(const bl_base_walk *at, const bl_tier *tiers,
                             char name[BL_PAGE_NAME_BYTES])
{
    size_t length = strlen(name);

    snprintf(name + length, BL_PAGE_NAME_BYTES - length, " scales");
    return tiers[at->index] == tiers[at->index - 1]
               ? BL_OK
               : BL_FAIL(BL_EINTERNAL, "page %s: not in the tier of its codes", name);
}

bl_status bl_base_create_pages(const bl_base_layout *layout, const bl_tier *tiers, int64_t n_scales,
                               const bl_pages_options *options, bl_page_name_fn name, void *user,
                               bl_pages **out)
{
    int64_t n_pages = bl_base_part_count(layout);
    bool has_disk = bl_base_has_disk(layout, tiers);
    bl_page_spec *specs = calloc((size_t)n_pages + 1, sizeof *specs);
    char(*names)[BL_PAGE_NAME_BYTES] = calloc((size_t)n_pages + 1, sizeof *names);
    bl_status st = specs && names ? BL_OK : BL_FAIL(BL_ENOMEM, "%lld pages", (long long)n_pages);

    for (bl_base_walk at = {.layout = layout}; st == BL_OK && bl_base_next(&at);) {
        name(user, &at, names[at.index]);
        if (at.part->is_scales) st = name_scales(&at, tiers, names[at.index]);
        specs[at.index] = (bl_page_spec){names[at.index], at.part->shard_bytes, tiers[at.index]};
    }
    if (has_disk && st == BL_OK)
        specs[n_pages] = (bl_page_spec){"scales", (size_t)n_scales * sizeof(float), BL_TIER_DISK};
    if (st == BL_OK) st = bl_pages_create(options, n_pages + (has_disk ? 1 : 0), specs, out);
    free(names);
    free(specs);
    return st;
}

/* Whether a page was found on disk, whole. */
static bool is_found(const bl_pages *pages, int64_t page)
{
    return bl_pages_spec(pages, page)->tier == BL_TIER_DISK && bl_pages_has_disk(pages);
}

/* Where the host writes a page's codes itself; NULL: they go through the staging buffer. */
static char *writable_memory(const bl_base_load *load, int64_t page)
{
    bl_tier tier = bl_pages_spec(load->options.pages, page)->tier;
    bool is_writable = tier == BL_TIER_HOST ||
                       (tier == BL_TIER_DEVICE && bl_device_host_writes(load->options.device));
    return is_writable ? bl_pages_memory(load->options.pages, page) : NULL;
}

/* ---- jobs ---- */

static bl_status reserve_job(bl_base_load *load)
{
    if (load->n_jobs < load->max_jobs) return BL_OK;
    size_t max_jobs = load->max_jobs ? 2 * load->max_jobs : 256;
    bl_base_job *jobs = realloc(load->jobs, max_jobs * sizeof *jobs);
    if (jobs) load->jobs = jobs;
    job_target *targets = realloc(load->targets, max_jobs * sizeof *targets);
    if (targets) load->targets = targets;
    if (!jobs || !targets) return BL_FAIL(BL_ENOMEM, "a plan of %zu pieces", max_jobs);
    load->max_jobs = max_jobs;
    return BL_OK;
}

/* The rows of one segment in this rank's shard of a part, job->begin to end, from `offset` of the
 * page. Cuts are at multiples of 128 rows: between groups. */
static bl_status plan_segment(bl_base_load *load, const bl_base_walk *at, const bl_base_job *whole,
                              size_t offset)
{
    const bl_weight_segment *segment = &at->matrix->weight.segment[whole->segment];
    int64_t row_bytes = at->part->row_bytes;
    char *memory = writable_memory(load, at->index);
    int64_t most = bl_max_i64(1, (int64_t)load->options.staging_bytes / row_bytes / BL_FP8_BLOCK) *
                   BL_FP8_BLOCK;

    for (int64_t row = whole->begin; row < whole->end;) {
        int64_t stop =
            memory ? whole->end : bl_min_i64(whole->end, row / BL_FP8_BLOCK * BL_FP8_BLOCK + most);
        size_t n_bytes = (size_t)((stop - row) * row_bytes);
        BL_TRY(reserve_job(load));
        /* The layout's owner gave the load the scales to fill. */
        load->targets[load->n_jobs] =
            (job_target){at->index, offset, n_bytes, (void *)segment->scales};
        bl_base_job *job = &load->jobs[load->n_jobs++];
        *job = *whole;
        job->begin = row;
        job->end = stop;
        job->codes = memory ? memory + offset : NULL;
        if (!memory && n_bytes > load->staging_bytes) load->staging_bytes = n_bytes;
        offset += n_bytes;
        row = stop;
    }
    return BL_OK;
}

static bl_status plan_part(bl_base_load *load, const bl_base_walk *at)
{
    const bl_base_part *part = at->part;
    const bl_weight *weight = &at->matrix->weight;
    int64_t part_row = 0, begin, end;

    if (part->is_scales || is_found(load->options.pages, at->index)) return BL_OK;
    bl_base_part_rows(part, load->options.shard, &begin, &end);
    for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++) {
        const bl_weight_segment *segment = &weight->segment[s];
        int64_t first = bl_max_i64(begin, part_row),
                last = bl_min_i64(end, part_row + segment->rows);
        bl_base_job job = {.unit = at->idx_unit,
                           .matrix = at->idx_matrix,
                           .segment = s,
                           .format = segment->format,
                           .cols = weight->cols,
                           .begin = first - part_row,
                           .end = last - part_row};
        if (first < last)
            BL_TRY(plan_segment(load, at, &job, (size_t)((first - begin) * part->row_bytes)));
        part_row += segment->rows;
    }
    return BL_OK;
}

/* Memory for the scales of the segment, and for the page of scales, that have most. */
static bl_status take_scales(bl_base_load *load)
{
    const bl_base_layout *layout = load->options.layout;
    size_t most = 1, most_paged = 0;
    bl_format_bytes n;

    for (bl_base_walk at = {.layout = layout}; bl_base_next(&at);) {
        const bl_weight *w = &at.matrix->weight;
        const bl_base_part *part = at.part;
        if (part->is_scales && part->shard_bytes > most_paged) most_paged = part->shard_bytes;
        for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++)
            if (bl_format_measure(bl_format_describe(w->segment[s].format), w->segment[s].rows,
                                  w->cols, &n) &&
                n.scales > most)
                most = n.scales;
    }
    load->scales = malloc(most);
    if (!load->scales) return BL_FAIL(BL_ENOMEM, "%zu bytes of scales of weights", most);
    if (most_paged == 0) return BL_OK;
    BL_TRY(bl_device_alloc(load->options.device, BL_SPACE_HOST, most_paged, "scales of a page",
                           (void **)&load->scales_page));
    memset(load->scales_page, 0, most_paged);
    return BL_OK;
}

static bl_status plan_jobs(bl_base_load *load)
{
    for (bl_base_walk w = {.layout = load->options.layout}; bl_base_next(&w);)
        BL_TRY(plan_part(load, &w));
    BL_TRY(take_scales(load));
    if (load->staging_bytes > 0)
        BL_TRY(bl_device_alloc(load->options.device, BL_SPACE_HOST, load->staging_bytes,
                               "staging of frozen weights", &load->codes));
    for (size_t j = 0; j < load->n_jobs; j++) {
        if (!load->jobs[j].codes) load->jobs[j].codes = load->codes;
        load->jobs[j].scales = load->scales;
    }
    return BL_OK;
}

bl_status bl_base_load_create(const bl_base_load_options *options, bl_base_load **out)
{
    bl_base_load *load = calloc(1, sizeof *load);

    *out = NULL;
    if (!load) return BL_FAIL(BL_ENOMEM, "the load of a base");
    load->options = *options;
    bl_status st = plan_jobs(load);
    if (st != BL_OK) {
        bl_base_load_destroy(load);
        return st;
    }
    *out = load;
    return BL_OK;
}

void bl_base_load_destroy(bl_base_load *load)
{
    if (!load) return;
    bl_device_free(load->options.device, BL_SPACE_HOST, load->codes);
    bl_device_free(load->options.device, BL_SPACE_HOST, load->scales_page);
    free(load->scales);
    free(load->targets);
    free(load->jobs);
    free(load);
}

const bl_base_job *bl_base_load_jobs(const bl_base_load *load, size_t *n_jobs)
{
    *n_jobs = load->n_jobs;
    return load->jobs;
}

/* ---- running them ---- */

/* The scales of a job's rows, whose codes are in `part`. */
static bl_status keep_job_scales(const bl_base_load *load, size_t j, const bl_base_part *part)
{
    const bl_base_job *job = &load->jobs[j];
    const job_target *target = &load->targets[j];
    const bl_format_descriptor *format = bl_format_describe(job->format);
    bl_format_bytes first, n;

    if (format->home == BL_SCALES_NONE) return BL_OK;
    if (!bl_format_measure(format, job->begin, job->cols, &first) ||
        !bl_format_measure(format, job->end - job->begin, job->cols, &n))
        return BL_FAIL(BL_EINTERNAL, "the size of scales overflows");
    const char *scales = (const char *)load->scales + first.scales;
    if (format->home == BL_SCALES_WHOLE)
        return bl_staging_upload(load->options.staging, (char *)target->scales + first.scales,
                                 scales, n.scales);
    int64_t row = (int64_t)target->offset / part->row_bytes; /* in the page */
    memcpy(load->scales_page + row / format->group_rows * n.scale_row, scales, n.scales);
    return BL_OK;
}

/* The rest of a page, rows that only trailing ranks lack, is zero. */
static bl_status pad_page(const bl_base_load *load, int64_t page, size_t written)
{
    bl_pages *pages = load->options.pages;
    const bl_staging *staging = load->options.staging;
    size_t n_bytes = bl_pages_spec(pages, page)->n_bytes;
    char *memory = writable_memory(load, page), *zeros = staging->bytes; /* it is pinned */

    if (!memory && written < n_bytes) memset(zeros, 0, staging->n_bytes);
    while (written < n_bytes) {
        size_t n = n_bytes - written;
        if (!memory && n > staging->n_bytes) n = staging->n_bytes;
        BL_TRY(bl_pages_write(pages, page, written, memory ? memory + written : zeros, n));
        written += n;
    }
    return BL_OK;
}

/* A page of codes by its jobs, from *j on. */
static bl_status write_codes(const bl_base_load *load, const bl_base_walk *at, bl_base_rows_fn rows,
                             void *user, size_t *j)
{
    bl_pages *pages = load->options.pages;
    size_t written = 0;
    uint64_t checksum = 0;

    for (; *j < load->n_jobs && load->targets[*j].page == at->index; ++*j) {
        uint64_t of_rows = 0;
        BL_TRY(rows(user, *j, &of_rows));
        checksum += of_rows;
        BL_TRY(keep_job_scales(load, *j, at->part));
        BL_TRY(bl_pages_write(pages, at->index, written, load->jobs[*j].codes,
                              load->targets[*j].n_bytes));
        written += load->targets[*j].n_bytes;
    }
    BL_TRY(pad_page(load, at->index, written));
    bl_pages_set_tag(pages, at->index, checksum);
    return BL_OK;
}

/* The scales of the page before, which were collected; cleared for the next. */
static bl_status write_scales(const bl_base_load *load, const bl_base_walk *at)
{
    size_t n_bytes = at->part->shard_bytes;

    BL_TRY(bl_pages_write(load->options.pages, at->index, 0, load->scales_page, n_bytes));
    memset(load->scales_page, 0, n_bytes);
    return BL_OK;
}

static bl_status run_jobs(const bl_base_load *load, bl_base_rows_fn rows, void *user)
{
    size_t j = 0;

    for (bl_base_walk at = {.layout = load->options.layout}; bl_base_next(&at);) {
        if (is_found(load->options.pages, at.index)) continue;
        BL_TRY(at.part->is_scales ? write_scales(load, &at)
                                  : write_codes(load, &at, rows, user, &j));
    }
    return BL_OK;
}

/* This rank's whole scales are stored in the page file after the codes, or read from it. */
static bl_status keep_whole_scales(const bl_base_load *load, float *scales, int64_t n_scales)
{
    bl_pages *pages = load->options.pages;
    bl_staging *staging = load->options.staging;
    int64_t page = bl_base_part_count(load->options.layout);
    size_t n_bytes = (size_t)n_scales * sizeof *scales;

    if (page == bl_pages_count(pages) || n_scales == 0) return BL_OK;
    if (bl_pages_has_disk(pages)) {
        bl_status st = bl_pages_read(pages, page, staging, scales);
        if (st == BL_EINPUT)
            bl_pages_distrust_disk(pages); /* damaged: the next run rewrites the file */
        return st;
    }
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_bytes - at));
        BL_TRY(bl_staging_download(staging, staging->bytes, (char *)scales + at, n));
        BL_TRY(bl_pages_write(pages, page, at, staging->bytes, n));
    }
    return BL_OK;
}

bl_status bl_base_load_run(bl_base_load *load, bl_base_rows_fn rows, void *user, float *scales,
                           int64_t n_scales)
{
    bool was_written = bl_pages_has_disk(load->options.pages);

    /* First: rows that are quantized again give the same scales. */
    if (was_written) BL_TRY(keep_whole_scales(load, scales, n_scales));
    BL_TRY(run_jobs(load, rows, user));
    if (!was_written) BL_TRY(keep_whole_scales(load, scales, n_scales));
    return bl_pages_seal(load->options.pages);
}

/* ---- rows ---- */

bl_base_rows bl_base_rows_at(bl_format format, int64_t row, int64_t end, int64_t most)
{
    int64_t height = bl_format_describe(format)->group_rows,
            n_rows = bl_max_i64(1, most / height) * height;

    return (bl_base_rows){.row = row, .stop = bl_min_i64(row + n_rows, end)};
}

bl_status bl_base_quantize(bl_pool *pool, const bl_base_job *job, const bl_base_rows *r)
{
    uint8_t *codes =
        (uint8_t *)job->codes + (r->row - job->begin) * bl_format_row_bytes(job->format, job->cols);
    bl_format_bytes before;

    if (!bl_format_measure(bl_format_describe(job->format), r->row, job->cols, &before))
        return BL_FAIL(BL_EINTERNAL, "the size of scales overflows");
    void *scales = (char *)job->scales + before.scales;
    if (bl_format_is_packed(job->format))
        return bl_packed_quantize(pool, job->format, !job->largest_scales, r->dtype, r->bytes,
                                  r->row, r->stop, job->cols, codes, scales);
    if (job->format == BL_FORMAT_FP8_BLOCK)
        return bl_fp8_block_quantize(pool, r->dtype, r->bytes, r->row, r->stop, job->cols, codes,
                                     scales);
    return bl_fp8_row_quantize(pool, r->dtype, r->bytes, r->row, r->stop, job->cols, codes, scales);
}
