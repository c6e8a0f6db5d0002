/* SPDX-License-Identifier: Apache-2.0 */
/* load_base.c -- a rank's rows of the frozen base, from the model's files into pages: what the
 * pages are called, which page files are this model's, and where each row is read.
 * linear/base_load.h has the rest. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/log.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "linear/base_load.h"
#include "model/rows.h"
#include "offload/page_folder.h"

typedef struct load_plan {
    const bl_model_weights *weights;
    const bl_placement *placement;
    const bl_base_job *base_jobs;
    size_t n_jobs;
    bl_row_job *pieces; /* of the jobs, in their order */
    size_t *end;        /* [n_jobs]: behind the last piece of each */
    size_t n_pieces;
    bl_row_loader *loader;
} load_plan;

/* Rows of a segment's projection before it: of the groups of experts before its own. */
static int64_t rows_before(const bl_base_layout *layout, const bl_base_job *job)
{
    const bl_base_unit *unit = &layout->units[job->unit];

    if (unit->group == 0) return 0;
    unit -= unit->group; /* all before it have as many */
    return layout->units[job->unit].group * unit->matrix[job->matrix].weight.rows;
}

/* *out has row `row` of a job's segment, *first its first row there, negative where it begins
 * before: each of routed experts has its tensors, or all have one. */
static bl_status find_source(const bl_model *model, const bl_base_layout *layout,
                             const bl_base_job *job, int64_t row, bl_hf_weight *out, int64_t *first)
{
    const bl_arch *arch = model->config.arch;
    const bl_base_unit *unit = &layout->units[job->unit];
    char name[BL_TENSOR_NAME_BYTES];

    *first = 0;
    if (job->unit < model->config.n_layers || unit->is_group) {
        const bl_projection *p = bl_arch_segment(
            arch, bl_model_kind(&model->config, unit->is_group ? unit->of : job->unit), job->matrix,
            job->segment);
        int64_t before = rows_before(layout, job);
        bl_arch_tensor t = bl_arch_stored_at(&model->config, unit->is_group ? unit->of : job->unit,
                                             (int)(p - arch->projections), before + row);
        *first = t.row - before;
        return bl_model_stored_weight(&model->config, model->files, &t, out);
    }
    if (job->unit > model->config.n_layers) {
        bl_arch_module_tensor(arch->embedding, name);
        return bl_hf_get_weight(model->files, name, out);
    }
    /* Tied, it is the embedding's tensor, under whichever name there is (bl_model). */
    bl_arch_module_tensor(arch->embedding, name);
    if (!model->config.tie_word_embeddings || !bl_hf_find(model->files, name))
        bl_arch_module_tensor(arch->head, name);
    return bl_hf_get_weight(model->files, name, out);
}

/* The pieces of all base jobs, one per tensor; without memory for them they are only counted. */
static bl_status list_pieces(load_plan *plan)
{
    plan->n_pieces = 0;
    for (size_t j = 0; j < plan->n_jobs; j++) {
        const bl_base_job *job = &plan->base_jobs[j];
        int64_t row_bytes = bl_format_row_bytes(job->format, job->cols), first;
        for (int64_t row = job->begin; row < job->end;) {
            bl_row_job piece = {.format = job->format,
                                .largest_scales = plan->weights->model->largest_scales};
            BL_TRY(find_source(plan->weights->model, &plan->weights->layout, job, row,
                               &piece.weight, &first));
            piece.begin = row - first;
            piece.end = bl_min_i64(job->end - first, piece.weight.rows);
            piece.codes = (char *)job->codes + (row - job->begin) * row_bytes;
            bl_format_bytes before;
            (void)bl_format_measure(bl_format_describe(job->format), llabs(first), job->cols,
                                    &before);
            if (job->scales)
                piece.scales = first < 0 ? (char *)job->scales - before.scales
                                         : (char *)job->scales + before.scales;
            if (plan->pieces) plan->pieces[plan->n_pieces] = piece;
            plan->n_pieces++;
            row = first + piece.end;
        }
        if (plan->end) plan->end[j] = plan->n_pieces;
    }
    return BL_OK;
}

static bl_status plan_jobs(load_plan *plan, const bl_base_load *load)
{
    plan->base_jobs = bl_base_load_jobs(load, &plan->n_jobs);
    BL_TRY(list_pieces(plan));
    plan->pieces = calloc(plan->n_pieces + 1, sizeof *plan->pieces);
    plan->end = calloc(plan->n_jobs + 1, sizeof *plan->end);
    if (!plan->pieces || !plan->end)
        return BL_FAIL(BL_ENOMEM, "%zu pieces of weights", plan->n_pieces);
    return list_pieces(plan);
}

static bl_status check_stop(const bl_placement *placement)
{
    if (!placement->stop || !placement->stop(placement->stop_user)) return BL_OK;
    return BL_FAIL(BL_ESTOPPED, "stopped while the base was loaded");
}

static bl_status load_rows(void *user, size_t idx_job, uint64_t *checksum)
{
    const load_plan *plan = user;
    const bl_model_weights *w = plan->weights;
    const bl_model_config *config = &w->model->config;
    /* Of a tied head that is a unit: the embedding's checksum has its rows. */
    bool is_table = !w->model->is_trained && config->tie_word_embeddings &&
                    plan->base_jobs[idx_job].unit == config->n_layers;

    BL_TRY(check_stop(plan->placement));
    for (size_t i = idx_job > 0 ? plan->end[idx_job - 1] : 0; i < plan->end[idx_job]; i++) {
        uint64_t of_piece;
        BL_TRY(bl_row_loader_next(plan->loader, is_table ? NULL : &of_piece));
        if (!is_table) *checksum += of_piece;
    }
    return BL_OK;
}

/* When the model's files were last changed: the fingerprint does not see every byte of them. A
 * change that keeps size and time of writing (cp -p, rsync -t, touch -r) still shows in the time of
 * the inode's change, which no program can set. */
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
    uint64_t parts[5];

    BL_TRY(bl_model_fingerprint(model, 0, &parts[0]));
    BL_TRY(hash_times(model->files, &parts[1]));
    parts[2] = XXH3_64bits(model->formats, n_formats * sizeof *model->formats);
    parts[3] = (uint64_t)w->layout.n_shards | (uint64_t)model->largest_scales << 32;
    parts[4] = (uint64_t)bl_arch_expert_group(&model->config);
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

static void name_page(void *user, const bl_base_walk *at, char name[BL_PAGE_NAME_BYTES])
{
    bl_model_page_name(user, at, name);
}

static bl_pages_options options_of(const bl_model_weights *w, int shard,
                                   const bl_placement *placement)
{
    return (bl_pages_options){
        .device = w->device,
        .pin = placement->pin,
        .node = placement->n > 0
                    ? bl_model_node_of_rank(placement->index, placement->n, placement->gpu_bus_id)
                    : -1,
        .dir = placement->dir,
        .shard = shard,
        .n_shards = w->layout.n_shards,
        .n_on_host = placement->n,
        .is_rewritten = w->model->is_trained};
}

static bl_status create_pages(bl_model_weights *w, int shard, const bl_placement *placement)
{
    const bl_base_layout *layout = &w->layout;
    bl_model_config config = w->model->config;
    bl_pages_options options = options_of(w, shard, placement);
    bl_tier *tiers = calloc((size_t)bl_base_part_count(layout) + 1, sizeof *tiers);
    bl_status st = tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of pages");

    if (st == BL_OK) st = bl_placement_assign(layout, placement, tiers);
    bool has_disk = st == BL_OK && bl_base_has_disk(layout, tiers);
    has_disk = has_disk && w->model->files; /* else nothing is read */
    if (has_disk) st = choose_key(w, &options.key);
    if (st == BL_OK)
        st = bl_base_create_pages(layout, tiers, w->n_scales, &options, name_page, &config,
                                  &w->pages);
    if (st == BL_OK && has_disk && placement->index == 0)
        report_others(placement->dir, options.key);
    free(tiers);
    return st;
}

/* Creates the pages of the bf16 copy, if there is one; the trained state rounds the weights into
 * them (trained/full.h). The file of the weights is unlinked already, so the copy's file can have
 * the same name. */
static bl_status create_copy(bl_model_weights *w, int shard, const bl_placement *placement)
{
    if (!w->model->is_trained || w->dims.act == BL_F32) return BL_OK;
    bl_model_config config = w->model->config;
    bl_pages_options options = options_of(w, shard, placement);
    bl_tier *tiers = calloc((size_t)bl_base_part_count(&w->layout) + 1, sizeof *tiers);
    bl_status st = tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of pages");

    options.is_blank = true;
    if (st == BL_OK) st = bl_model_layout_copy(&config, w->layout.n_shards, &w->copy_layout);
    if (st == BL_OK) st = bl_placement_assign_copy(&w->layout, placement, tiers);
    bool has_file = w->model->files && st == BL_OK && bl_base_has_disk(&w->copy_layout, tiers);
    if (has_file) st = choose_key(w, &options.key);
    if (st == BL_OK)
        st =
            bl_base_create_pages(&w->copy_layout, tiers, 0, &options, name_page, &config, &w->copy);
    free(tiers);
    return st == BL_OK ? bl_pages_seal(w->copy) : st;
}

static bl_status load(bl_model_weights *w, bl_comm *shard_group, const bl_placement *placement,
                      bl_staging *staging)
{
    const bl_model *model = w->model;
    int shard = bl_comm_rank(shard_group);
    bl_base_load_options options = {.device = w->device,
                                    .layout = &w->layout,
                                    .pages = w->pages,
                                    .shard = shard,
                                    .staging_bytes = bl_model_staging_bytes(placement),
                                    .staging = staging};
    load_plan plan = {.weights = w, .placement = placement};
    bl_base_load *base = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_base_load_create(&options, &base));
    BL_TRY_GOTO(st, done, plan_jobs(&plan, base));
    BL_TRY_GOTO(st, done,
                bl_row_loader_create(model->files, model->io_files, model->io_engine,
                                     bl_comm_size(shard_group), bl_device_pool(w->device),
                                     plan.pieces, plan.n_pieces, shard == 0, &plan.loader));
    st = bl_base_load_run(base, load_rows, &plan, w->scales, w->n_scales);
done:
    bl_row_loader_destroy(plan.loader);
    bl_base_load_destroy(base);
    free(plan.pieces);
    free(plan.end);
    return st;
}

bl_status bl_model_place_base(bl_model_weights *w, int shard, const bl_placement *placement)
{
    BL_TRY(create_pages(w, shard, placement));
    return create_copy(w, shard, placement);
}

bl_status bl_model_load_base(bl_model_weights *w, bl_comm *shard_group,
                             const bl_placement *placement, bl_staging *staging)
{
    static const bl_placement all_on_device = {.tier = BL_TIER_HOST};

    if (!placement) placement = &all_on_device;
    BL_TRY(create_pages(w, bl_comm_rank(shard_group), placement));
    if (bl_pages_has_disk(w->pages) && bl_comm_rank(shard_group) == 0)
        bl_log_info("%s: page files of this model are there; what they hold is not read again",
                    placement->dir);
    BL_TRY(load(w, shard_group, placement, staging));
    BL_TRY(create_copy(w, bl_comm_rank(shard_group), placement));
    for (int64_t page = 0; page < bl_pages_count(w->pages); page++)
        w->checksum += bl_pages_tag(w->pages, page);
    bool is_all_on_device = bl_pages_tier_bytes(w->pages, BL_TIER_HOST) == 0 &&
                            bl_pages_tier_bytes(w->pages, BL_TIER_DISK) == 0;
    w->shards =
        is_all_on_device && bl_pages_count(w->pages) > 0 ? bl_pages_memory(w->pages, 0) : NULL;
    return BL_OK;
}
