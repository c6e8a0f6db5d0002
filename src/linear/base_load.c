/* SPDX-License-Identifier: Apache-2.0 */
/* base_load.c -- a rank's rows of a base into its pages.
 *
 * Pages are filled one after the other, each by the jobs of its segments. A page in memory that the
 * host can write is written by whoever makes the rows; all others pass through one staging buffer,
 * whose size does not depend on the base: their jobs are cut to fit it. Scales are made in host
 * memory, a segment's at a time, and those that a job set are copied to the device after it. */
#include "linear/base_load.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"

/* What a job's codes are: the next n_bytes of a page. */
typedef struct job_target {
    int64_t page;
    size_t n_bytes;
    float *scales; /* of the job's segment, device memory */
} job_target;

struct bl_base_load {
    bl_base_load_options options;
    bl_base_job *jobs;
    job_target *targets;
    size_t n_jobs, max_jobs;
    size_t staging_bytes; /* needed by the largest job */
    void *codes;          /* [staging_bytes], BL_SPACE_HOST */
    float *scales;        /* host memory: of the segment under way */
};

/* ---- pages ---- */

bool bl_base_has_disk(const bl_base_layout *layout, const bl_tier *tiers)
{
    int64_t n_pages = bl_base_part_count(layout);

    for (int64_t page = 0; page < n_pages; page++)
        if (tiers[page] == BL_TIER_DISK) return true;
    return false;
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
 * page. Cuts are at multiples of 128 rows: no row of blocks is read twice. */
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
        load->targets[load->n_jobs] = (job_target){at->index, n_bytes, (float *)segment->scales};
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

    if (is_found(load->options.pages, at->index)) return BL_OK;
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

/* The most scales that a segment has. */
static size_t most_scales(const bl_base_layout *layout)
{
    size_t most = 0, code_bytes, n_scales;

    for (int64_t u = 0; u < layout->n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            const bl_weight *w = &layout->units[u].matrix[m].weight;
            for (int s = 0; s < w->n_segments; s++) {
                bl_format_sizes(w->segment[s].format, w->segment[s].rows, w->cols, &code_bytes,
                                &n_scales);
                if (n_scales > most) most = n_scales;
            }
        }
    return most;
}

static bl_status plan_jobs(bl_base_load *load)
{
    const bl_base_layout *layout = load->options.layout;
    size_t max_scales = most_scales(layout);

    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) BL_TRY(plan_part(load, &w));
    load->scales = malloc((max_scales + 1) * sizeof *load->scales);
    if (!load->scales) return BL_FAIL(BL_ENOMEM, "%zu scales of weights", max_scales);
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

/* Those that the job set: of its rows, or of the rows of blocks that begin among them. */
static bl_status upload_scales(const bl_base_load *load, size_t j)
{
    const bl_base_job *job = &load->jobs[j];
    int64_t first = job->begin, last = job->end;

    if (!bl_format_is_fp8(job->format)) return BL_OK;
    if (job->format == BL_FORMAT_FP8_BLOCK) {
        int64_t grid_cols = bl_ceil_div(job->cols, BL_FP8_BLOCK);
        first = bl_ceil_div(first, BL_FP8_BLOCK) * grid_cols;
        last = bl_ceil_div(last, BL_FP8_BLOCK) * grid_cols;
    }
    return bl_staging_upload(load->options.staging, load->targets[j].scales + first,
                             load->scales + first, (size_t)(last - first) * sizeof *load->scales);
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

static bl_status run_jobs(const bl_base_load *load, bl_base_rows_fn rows, void *user)
{
    bl_pages *pages = load->options.pages;
    int64_t n_pages = bl_base_part_count(load->options.layout);
    size_t j = 0;

    for (int64_t page = 0; page < n_pages; page++) {
        size_t written = 0;
        uint64_t checksum = 0;
        if (is_found(pages, page)) continue;
        for (; j < load->n_jobs && load->targets[j].page == page; j++) {
            uint64_t of_rows = 0;
            BL_TRY(rows(user, j, &of_rows));
            checksum += of_rows;
            BL_TRY(upload_scales(load, j));
            BL_TRY(bl_pages_write(pages, page, written, load->jobs[j].codes,
                                  load->targets[j].n_bytes));
            written += load->targets[j].n_bytes;
        }
        BL_TRY(pad_page(load, page, written));
        bl_pages_set_tag(pages, page, checksum);
    }
    return BL_OK;
}

/* This rank's scales are stored in the page file after the codes, or read from it. */
static bl_status keep_scales(const bl_base_load *load, float *scales, int64_t n_scales)
{
    bl_pages *pages = load->options.pages;
    bl_staging *staging = load->options.staging;
    int64_t page = bl_base_part_count(load->options.layout);
    size_t n_bytes = (size_t)n_scales * sizeof *scales;

    if (page == bl_pages_count(pages) || n_scales == 0) return BL_OK;
    if (bl_pages_has_disk(pages)) {
        bl_status st = bl_pages_read(pages, page, staging, scales);
        if (st == BL_EINPUT)
            bl_pages_distrust_disk(pages); /* damaged: the next run writes the file anew */
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

    /* First: rows that are quantized again bring the same ones. */
    if (was_written) BL_TRY(keep_scales(load, scales, n_scales));
    BL_TRY(run_jobs(load, rows, user));
    if (!was_written) BL_TRY(keep_scales(load, scales, n_scales));
    return bl_pages_seal(load->options.pages);
}

/* ---- rows ---- */

bl_base_rows bl_base_rows_at(bl_format format, int64_t n_rows, int64_t row, int64_t end,
                             int64_t most)
{
    bl_base_rows r = {.first = row, .row = row};

    if (format != BL_FORMAT_FP8_BLOCK) {
        r.stop = r.last = bl_min_i64(row + bl_max_i64(1, most), end);
        return r;
    }
    r.first = row / BL_FP8_BLOCK * BL_FP8_BLOCK; /* rows of blocks, whole, for their absmax */
    r.stop = bl_min_i64(end, r.first + bl_max_i64(1, most / BL_FP8_BLOCK) * BL_FP8_BLOCK);
    r.last = bl_min_i64(bl_round_up(r.stop, BL_FP8_BLOCK), n_rows);
    return r;
}

static bl_status quantize_blocks(bl_pool *pool, const bl_base_job *job, const bl_base_rows *r,
                                 void *codes, float *grid)
{
    int64_t width = bl_ceil_div(job->cols, BL_FP8_BLOCK), first = r->first / BL_FP8_BLOCK,
            n_rows = bl_ceil_div(r->last, BL_FP8_BLOCK) - first;
    const char *own = (const char *)r->bytes +
                      (r->row - r->first) * job->cols * (int64_t)bl_dtype_bytes(r->dtype);

    memset(grid, 0, (size_t)(n_rows * width) * sizeof *grid);
    BL_TRY(bl_fp8_block_absmax(pool, r->dtype, r->bytes, r->first, r->last, job->cols, grid));
    for (int64_t i = 0; i < n_rows * width; i++) grid[i] = bl_fp8_scale(grid[i]);
    for (int64_t b = 0; b < n_rows; b++)
        if ((first + b) * BL_FP8_BLOCK >= job->begin)
            memcpy(job->scales + (first + b) * width, grid + b * width,
                   (size_t)width * sizeof *grid);
    return bl_fp8_block_encode(pool, r->dtype, own, r->row, r->stop, job->cols, grid, codes);
}

bl_status bl_base_quantize(bl_pool *pool, const bl_base_job *job, const bl_base_rows *r,
                           float *grid)
{
    uint8_t *codes = (uint8_t *)job->codes + (r->row - job->begin) * job->cols;

    if (job->format == BL_FORMAT_FP8_BLOCK) return quantize_blocks(pool, job, r, codes, grid);
    return bl_fp8_row_quantize(pool, r->dtype, r->bytes, r->row, r->stop, job->cols, codes,
                               job->scales + r->row);
}
