/* SPDX-License-Identifier: Apache-2.0 */
/* load_base.c -- a rank's rows of the frozen base, from the model's files into pages.
 *
 * Pages are filled one after the other, each by the jobs of its segments. A page in memory that the host can write is written by the
 * jobs themselves; all others pass through one staging buffer, whose size does not depend on the model: their jobs are cut to fit it.
 * Scales are always made in host memory, a projection's at a time, and those that a job set go to the device behind it. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/log.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "model/rows.h"
#include "offload/arena.h"
#include "offload/page_folder.h"

/* What a job's codes are: the next n_bytes of a page. */
typedef struct job_target {
    int64_t page;
    size_t n_bytes;
    float *scales; /* of the job's projection, device memory */
} job_target;

typedef struct load_plan {
    bl_model_weights *weights;
    const bl_placement *placement;
    int shard;
    bl_row_job *jobs;
    job_target *targets;
    size_t n_jobs, max_jobs;
    size_t max_staging_bytes,
        staging_bytes; /* where jobs are cut, and what the largest of those needs */
    void *codes;       /* [staging_bytes], BL_SPACE_HOST */
    size_t max_scales; /* of a projection */
    float *scales;     /* [max_scales], host memory: of the job under way */
    bl_staging *staging;
} load_plan;

static bl_status reserve_job(load_plan *plan)
{
    if (plan->n_jobs < plan->max_jobs) return BL_OK;
    size_t max_jobs = plan->max_jobs ? 2 * plan->max_jobs : 256;
    bl_row_job *jobs = realloc(plan->jobs, max_jobs * sizeof *jobs);
    if (jobs) plan->jobs = jobs;
    job_target *targets = realloc(plan->targets, max_jobs * sizeof *targets);
    if (targets) plan->targets = targets;
    if (!jobs || !targets) return BL_FAIL(BL_ENOMEM, "a plan of %zu pieces", max_jobs);
    plan->max_jobs = max_jobs;
    return BL_OK;
}

/* Where the host writes a page's codes itself; NULL: they go through the staging buffer. */
static char *writable_memory(const load_plan *plan, int64_t page)
{
    bl_tier tier = bl_pages_spec(plan->weights->pages, page)->tier;
    bool is_writable = tier == BL_TIER_HOST ||
                       (tier == BL_TIER_DEVICE && bl_device_host_writes(plan->weights->device));
    return is_writable ? bl_pages_memory(plan->weights->pages, page) : NULL;
}

/* The rows [begin, end) of one segment that lie in this rank's shard of a part. `first` is the first of the segment's rows there,
 * `offset` its place in the page. Cuts are at multiples of 128 rows: no row of blocks is read twice. */
static bl_status plan_segment(load_plan *plan, const bl_hf_weight *source,
                              const bl_weight_segment *segment, int64_t row_bytes, int64_t begin,
                              int64_t end, int64_t page, size_t offset)
{
    char *memory = writable_memory(plan, page);
    int64_t most =
        memory ? end
               : bl_max_i64(1, (int64_t)plan->max_staging_bytes / row_bytes / BL_FP8_BLOCK) *
                     BL_FP8_BLOCK;

    for (int64_t row = begin; row < end;) {
        int64_t stop = memory ? end : bl_min_i64(end, (row / BL_FP8_BLOCK) * BL_FP8_BLOCK + most);
        size_t n_bytes = (size_t)((stop - row) * row_bytes);
        BL_TRY(reserve_job(plan));
        plan->targets[plan->n_jobs] =
            (job_target){page, n_bytes, (float *)segment->scales}; /* ours: weights->scales */
        plan->jobs[plan->n_jobs++] = (bl_row_job){.weight = *source,
                                                  .format = segment->format,
                                                  .begin = row,
                                                  .end = stop,
                                                  .codes = memory ? memory + offset : NULL};
        if (!memory && n_bytes > plan->staging_bytes) plan->staging_bytes = n_bytes;
        offset += n_bytes;
        row = stop;
    }
    return BL_OK;
}

static bl_status find_source(const load_plan *plan, int64_t unit, int matrix, int segment,
                             bl_hf_weight *out)
{
    const bl_model *model = plan->weights->model;
    const bl_arch *arch = model->config.arch;
    char name[BL_TENSOR_NAME_BYTES];

    if (unit < model->config.n_layers) {
        bl_arch_projection_tensor(arch, unit, bl_arch_segment(arch, matrix, segment), name);
        return bl_hf_get_weight(model->files, name, out);
    }
    /* Tied, it is the embedding's tensor, under whichever name there is (bl_model). */
    bl_arch_module_tensor(arch->embedding, name);
    if (!model->config.tie_word_embeddings || !bl_hf_find(model->files, name))
        bl_arch_module_tensor(arch->head, name);
    return bl_hf_get_weight(model->files, name, out);
}

static bl_status plan_part(load_plan *plan, const bl_base_walk *at)
{
    const bl_base_part *part = at->part;
    const bl_weight *weight = &at->matrix->weight;
    int64_t part_row = 0, begin, end;

    if (bl_pages_spec(plan->weights->pages, at->index)->tier == BL_TIER_DISK &&
        bl_pages_has_disk(plan->weights->pages))
        return BL_OK;
    bl_base_part_rows(part, plan->shard, &begin, &end);
    for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++) {
        const bl_weight_segment *segment = &weight->segment[s];
        int64_t first = bl_max_i64(begin, part_row),
                last = bl_min_i64(end, part_row + segment->rows);
        bl_hf_weight source;
        BL_TRY(find_source(plan, at->idx_unit, at->idx_matrix, s, &source));
        if (first < last)
            BL_TRY(plan_segment(plan, &source, segment, part->row_bytes, first - part_row,
                                last - part_row, at->index,
                                (size_t)((first - begin) * part->row_bytes)));
        part_row += segment->rows;
    }
    return BL_OK;
}

/* The most scales that a projection has. */
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

static bl_status plan_jobs(load_plan *plan)
{
    const bl_base_layout *layout = &plan->weights->layout;

    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) BL_TRY(plan_part(plan, &w));
    plan->max_scales = most_scales(layout);
    plan->scales = malloc((plan->max_scales + 1) * sizeof *plan->scales);
    if (!plan->scales) return BL_FAIL(BL_ENOMEM, "%zu scales of weights", plan->max_scales);
    if (plan->staging_bytes > 0)
        BL_TRY(bl_device_alloc(plan->weights->device, BL_SPACE_HOST, plan->staging_bytes,
                               "staging of frozen weights", &plan->codes));
    for (size_t j = 0; j < plan->n_jobs; j++) {
        if (!plan->jobs[j].codes) plan->jobs[j].codes = plan->codes;
        plan->jobs[j].scales = plan->scales;
    }
    return BL_OK;
}

/* Those that the job set: of its rows, or of the rows of blocks that begin among them. */
static bl_status upload_scales(const load_plan *plan, size_t j)
{
    const bl_row_job *job = &plan->jobs[j];
    int64_t first = job->begin, last = job->end;

    if (!bl_format_is_fp8(job->format)) return BL_OK;
    if (job->format == BL_FORMAT_FP8_BLOCK) {
        int64_t grid_cols = bl_ceil_div(job->weight.cols, BL_FP8_BLOCK);
        first = bl_ceil_div(first, BL_FP8_BLOCK) * grid_cols;
        last = bl_ceil_div(last, BL_FP8_BLOCK) * grid_cols;
    }
    return bl_staging_upload(plan->staging, plan->targets[j].scales + first, plan->scales + first,
                             (size_t)(last - first) * sizeof *plan->scales);
}

/* The rest of a page, rows that only trailing ranks lack, is zero. */
static bl_status pad_page(load_plan *plan, int64_t page, size_t written)
{
    bl_pages *pages = plan->weights->pages;
    size_t n_bytes = bl_pages_spec(pages, page)->n_bytes;
    char *memory = writable_memory(plan, page), *zeros = plan->staging->bytes; /* it is pinned */

    if (!memory && written < n_bytes) memset(zeros, 0, plan->staging->n_bytes);
    while (written < n_bytes) {
        size_t n = n_bytes - written;
        if (!memory && n > plan->staging->n_bytes) n = plan->staging->n_bytes;
        BL_TRY(bl_pages_write(pages, page, written, memory ? memory + written : zeros, n));
        written += n;
    }
    return BL_OK;
}

static bl_status check_stop(const bl_placement *placement)
{
    if (!placement->stop || !placement->stop(placement->stop_user)) return BL_OK;
    return BL_FAIL(BL_ESTOPPED, "stopped while the base was loaded");
}

static bl_status run_jobs(load_plan *plan, bl_row_loader *loader)
{
    const bl_model_weights *w = plan->weights;
    const bl_model_config *config = &w->model->config;
    bl_pages *pages = w->pages;
    int64_t n_pages = bl_base_part_count(&w->layout);
    /* Of a tied head that is a unit, the last one: the embedding's checksum has its rows. */
    bool has_table = config->tie_word_embeddings && !bl_model_head_is_table(config, w->dims.kind);
    int64_t table_page = has_table ? n_pages - 1 : -1;
    size_t j = 0;

    for (int64_t page = 0; page < n_pages; page++) {
        size_t written = 0;
        uint64_t checksum = 0, rows;
        if (bl_pages_spec(pages, page)->tier == BL_TIER_DISK && bl_pages_has_disk(pages)) continue;
        for (; j < plan->n_jobs && plan->targets[j].page == page; j++) {
            BL_TRY(check_stop(plan->placement));
            BL_TRY(bl_row_loader_next(loader, &rows));
            checksum += rows;
            BL_TRY(upload_scales(plan, j));
            BL_TRY(bl_pages_write(pages, page, written, plan->jobs[j].codes,
                                  plan->targets[j].n_bytes));
            written += plan->targets[j].n_bytes;
        }
        BL_TRY(pad_page(plan, page, written));
        bl_pages_set_tag(pages, page, page == table_page ? 0 : checksum);
    }
    return BL_OK;
}

/* When the model's files were last changed: the fingerprint does not see every byte of them. A change that keeps size and time of
 * writing (cp -p, rsync -t, touch -r) still shows in the time of the inode's change, which no program can set. */
static bl_status hash_times(const bl_hf_model *files, uint64_t *hash)
{
    *hash = 0;
    for (size_t i = 0; i < bl_hf_file_count(files); i++) {
        const char *path = bl_safetensors_path(bl_hf_file(files, i));
        struct stat info;
        if (stat(path, &info) != 0) return bl_fail_errno(BL_EIO, "stat %s", path);
        int64_t parts[] = {info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec,
                           info.st_ctim.tv_sec, info.st_ctim.tv_nsec};
        *hash = XXH3_64bits_withSeed(parts, sizeof parts, *hash);
    }
    return BL_OK;
}

/* Of the contents of a rank's pages: the model, and how it is cut and coded. */
static bl_status choose_key(const bl_model_weights *w, uint64_t *key)
{
    const bl_model *model = w->model;
    size_t n_formats = bl_model_format_count(&model->config);
    uint64_t parts[4];

    BL_TRY(bl_model_fingerprint(model, 0, &parts[0]));
    BL_TRY(hash_times(model->files, &parts[1]));
    parts[2] = XXH3_64bits(model->formats, n_formats * sizeof *model->formats);
    parts[3] = (uint64_t)w->layout.n_shards;
    *key = XXH3_64bits(parts, sizeof parts);
    return BL_OK;
}

/* Page files are kept for other runs, and how many there are is easily forgotten. */
static void report_others(const char *dir, uint64_t key)
{
    int64_t n_files, n_bytes;

    if (bl_page_folder_others(dir, key, &n_files, &n_bytes) != BL_OK || n_files == 0) return;
    bl_log_info("%s: %lld page files of other models, formats or numbers of ranks lie there, %.1f "
                "MiB; what does not begin with "
                "base-%016llx may be deleted",
                dir, (long long)n_files, (double)n_bytes / (1 << 20), (unsigned long long)key);
}

static bl_status create_pages(bl_model_weights *w, int shard, const bl_placement *placement)
{
    const bl_base_layout *layout = &w->layout;
    int64_t n_pages = bl_base_part_count(layout);
    bl_pages_options options = {
        .device = w->device,
        .pin = placement->pin,
        .node = placement->n > 0
                    ? bl_model_node_of_rank(placement->index, placement->n, placement->gpu_bus_id)
                    : -1,
        .dir = placement->dir,
        .shard = shard,
        .n_shards = layout->n_shards,
        .n_on_host = placement->n};
    bl_page_spec *specs = calloc((size_t)n_pages + 1, sizeof *specs);
    char(*names)[BL_PAGE_NAME_BYTES] = calloc((size_t)n_pages + 1, sizeof *names);
    bl_tier *tiers = calloc((size_t)n_pages + 1, sizeof *tiers);
    bl_status st =
        specs && names && tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "%lld pages", (long long)n_pages);
    bool has_disk = false;

    if (st == BL_OK) st = bl_placement_assign(layout, placement, tiers);
    for (bl_base_walk at = {.layout = layout}; st == BL_OK && bl_base_next(&at);) {
        bl_model_page_name(&w->model->config, &at, names[at.index]);
        specs[at.index] = (bl_page_spec){names[at.index], at.part->shard_bytes, tiers[at.index]};
        has_disk = has_disk || tiers[at.index] == BL_TIER_DISK;
    }
    /* Scales stay in device memory; their page keeps them for the next run. */
    if (has_disk)
        specs[n_pages] =
            (bl_page_spec){"scales", (size_t)w->n_scales * sizeof(float), BL_TIER_DISK};
    if (st == BL_OK && has_disk) st = choose_key(w, &options.key);
    if (st == BL_OK) st = bl_pages_create(&options, n_pages + (has_disk ? 1 : 0), specs, &w->pages);
    if (st == BL_OK && has_disk && placement->index == 0)
        report_others(placement->dir, options.key);
    free(tiers);
    free(names);
    free(specs);
    return st;
}

/* This rank's own scales go into the page file beside the codes, or come from there. */
static bl_status keep_scales(bl_model_weights *w, bl_staging *staging)
{
    int64_t page = bl_base_part_count(&w->layout);
    size_t n_bytes = (size_t)w->n_scales * sizeof(float);

    if (page == bl_pages_count(w->pages)) return BL_OK;
    if (bl_pages_has_disk(w->pages)) {
        bl_status st = bl_pages_read(w->pages, page, staging, w->scales);
        if (st == BL_EINPUT)
            bl_pages_distrust_disk(w->pages); /* damaged: the next run writes the file anew */
        return st;
    }
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_bytes - at));
        BL_TRY(bl_staging_download(staging, staging->bytes, (char *)w->scales + at, n));
        BL_TRY(bl_pages_write(w->pages, page, at, staging->bytes, n));
    }
    return BL_OK;
}

static bl_status load_jobs(bl_model_weights *w, bl_comm *shard_group, const bl_placement *placement,
                           bl_staging *staging)
{
    const bl_model *model = w->model;
    load_plan plan = {.weights = w,
                      .placement = placement,
                      .shard = bl_comm_rank(shard_group),
                      .max_staging_bytes = bl_model_staging_bytes(placement),
                      .staging = staging};
    bl_row_loader *loader = NULL;
    bl_status st = BL_OK;

    BL_TRY_GOTO(st, done, plan_jobs(&plan));
    BL_TRY_GOTO(st, done,
                bl_row_loader_create(model->files, model->io_files, model->io_engine,
                                     bl_comm_size(shard_group), bl_device_pool(w->device),
                                     plan.jobs, plan.n_jobs, plan.shard == 0, &loader));
    st = run_jobs(&plan, loader);
done:
    bl_row_loader_destroy(loader);
    bl_device_free(w->device, BL_SPACE_HOST, plan.codes);
    free(plan.scales);
    free(plan.targets);
    free(plan.jobs);
    return st;
}

bl_status bl_model_load_base(bl_model_weights *w, bl_comm *shard_group,
                             const bl_placement *placement, bl_staging *staging)
{
    static const bl_placement all_on_device = {.tier = BL_TIER_HOST};

    if (!placement) placement = &all_on_device;
    BL_TRY(create_pages(w, bl_comm_rank(shard_group), placement));
    if (bl_pages_has_disk(w->pages)) {
        BL_TRY(
            keep_scales(w, staging)); /* first: rows that are quantised again bring the same ones */
        if (bl_comm_rank(shard_group) == 0)
            bl_log_info("%s: page files of this model are there; what they hold is not read again",
                        placement->dir);
    }
    BL_TRY(load_jobs(w, shard_group, placement, staging));
    if (!bl_pages_has_disk(w->pages)) BL_TRY(keep_scales(w, staging));
    BL_TRY(bl_pages_seal(w->pages));
    for (int64_t page = 0; page < bl_pages_count(w->pages); page++)
        w->checksum += bl_pages_tag(w->pages, page);
    bool is_all_on_device = bl_pages_tier_bytes(w->pages, BL_TIER_HOST) == 0 &&
                            bl_pages_tier_bytes(w->pages, BL_TIER_DISK) == 0;
    w->shards =
        is_all_on_device && bl_pages_count(w->pages) > 0 ? bl_pages_memory(w->pages, 0) : NULL;
    return BL_OK;
}
