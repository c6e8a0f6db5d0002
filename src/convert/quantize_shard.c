/* SPDX-License-Identifier: Apache-2.0 */
/* quantize_shard.c -- one file of a model. Codes are written as they are made, piece by piece; a
 * projection's scales, which come first in the file, when its last piece is done. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "arch/arch.h"
#include "convert/internal.h"
#include "model/rows.h"

enum { PIECE_BYTES = 16 << 20, COPY_BYTES = 4 << 20 };

/* ---- the plan ---- */

bl_status bl_shard_plan_begin(const bl_safetensors *source, bl_shard_plan *out)
{
    size_t n_tensors = bl_safetensors_count(source);

    *out = (bl_shard_plan){.source = source};
    out->specs = calloc(2 * n_tensors + 1, sizeof *out->specs);
    out->scale_names = calloc(2 * n_tensors + 1, sizeof *out->scale_names);
    return out->specs && out->scale_names ? BL_OK
                                          : BL_FAIL(BL_ENOMEM, "a plan of %zu tensors", n_tensors);
}

bl_stored_tensor_spec *bl_shard_plan_copy(bl_shard_plan *plan, const bl_stored_tensor *tensor)
{
    bl_stored_tensor_spec *spec = &plan->specs[plan->n_specs++];

    *spec = (bl_stored_tensor_spec){
        .name = tensor->name, .dtype = tensor->dtype, .n_dims = tensor->n_dims};
    memcpy(spec->shape, tensor->shape, sizeof spec->shape);
    plan->n_bytes += tensor->n_bytes;
    return spec;
}

bl_status bl_shard_plan_fp8(bl_shard_plan *plan, const bl_stored_tensor *tensor, bl_format format)
{
    bl_stored_tensor_spec *codes = bl_shard_plan_copy(plan, tensor), *scales = codes + 1;
    char **name = &plan->scale_names[plan->n_specs];
    bl_format_bytes n;

    if (!bl_format_measure(bl_format_describe(format), tensor->shape[0], tensor->shape[1], &n))
        return BL_FAIL(BL_EINPUT, "tensor %s is too large", tensor->name);
    codes->dtype = bl_format_describe(format)->dtype;
    plan->n_bytes -= tensor->n_bytes - (int64_t)n.codes;
    BL_TRY(bl_text_format(name, "%s_scale", tensor->name));
    *scales = (bl_stored_tensor_spec){.name = *name, .dtype = BL_F32, .n_dims = 2};
    scales->shape[0] = n.scale_rows;
    scales->shape[1] = n.scale_cols;
    plan->n_bytes += (int64_t)n.scales;
    plan->n_specs++;
    return BL_OK;
}

bl_status bl_shard_check_matrix(const bl_stored_tensor *tensor)
{
    if (tensor->n_dims == 2) return BL_OK;
    return BL_FAIL(
        BL_EINPUT,
        "tensor %s has the stacked experts of a layer, which are not converted: save the "
        "model with a tensor per expert (transformers: save_original_format=True)",
        tensor->name);
}

bl_status bl_shard_plan_make(const bl_arch *arch, const bl_safetensors *source, bl_format format,
                             bl_shard_plan *out)
{
    BL_TRY(bl_shard_plan_begin(source, out));
    for (size_t i = 0; i < bl_safetensors_count(source); i++) {
        const bl_stored_tensor *tensor = bl_safetensors_at(source, i);
        int64_t layer;
        bool is_projection = bl_arch_find_projection(arch, tensor->name, &layer) >= 0;
        if (is_projection) BL_TRY(bl_shard_check_matrix(tensor));
        if (is_projection)
            BL_TRY(bl_shard_plan_fp8(out, tensor, format));
        else
            bl_shard_plan_copy(out, tensor);
    }
    return BL_OK;
}

void bl_shard_plan_free(bl_shard_plan *plan)
{
    for (size_t i = 0; plan->scale_names && i < plan->n_specs + 1; i++) free(plan->scale_names[i]);
    free(plan->scale_names);
    free(plan->specs);
    *plan = (bl_shard_plan){0};
}

/* ---- projections ---- */

/* The jobs of a shard, and where each one's result goes. */
typedef struct shard_jobs {
    bl_row_job *jobs;
    size_t *spec; /* [n_jobs] of the codes; the scales are the next */
    size_t n_jobs;
    float *scales;  /* of all projections, one after the other */
    uint8_t *codes; /* of one job */
} shard_jobs;

int64_t bl_shard_piece_rows(int64_t cols, int64_t piece_elements)
{
    int64_t rows = piece_elements / bl_max_i64(cols, 1);
    return bl_max_i64(rows - rows % BL_FP8_BLOCK, BL_FP8_BLOCK);
}

static void free_jobs(shard_jobs *list)
{
    free(list->jobs);
    free(list->spec);
    free(list->scales);
    free(list->codes);
}

static bl_status allocate_jobs(const bl_shard_plan *plan, shard_jobs *out)
{
    size_t n_jobs = 0;
    int64_t n_scales = 0, n_codes = 0;

    for (size_t i = 0; i < plan->n_specs; i++) {
        const bl_stored_tensor_spec *spec = &plan->specs[i];
        if (plan->scale_names[i]) n_scales += spec->shape[0] * spec->shape[1];
        if (spec->dtype != BL_F8_E4M3) continue;
        int64_t rows = bl_min_i64(bl_shard_piece_rows(spec->shape[1], PIECE_BYTES), spec->shape[0]);
        n_jobs += (size_t)bl_ceil_div(spec->shape[0], rows);
        n_codes = bl_max_i64(n_codes, rows * spec->shape[1]);
    }
    out->jobs = calloc(n_jobs + 1, sizeof *out->jobs);
    out->spec = calloc(n_jobs + 1, sizeof *out->spec);
    out->scales = calloc((size_t)n_scales + 1, sizeof *out->scales);
    out->codes = malloc((size_t)n_codes + 1);
    return out->jobs && out->spec && out->scales && out->codes
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "a list of %zu pieces", n_jobs);
}

static bl_status list_jobs(const bl_shard_plan *plan, const bl_hf_model *model, bl_format format,
                           shard_jobs *out)
{
    BL_TRY(allocate_jobs(plan, out));
    float *scales = out->scales;
    for (size_t i = 0; i < plan->n_specs; i++) {
        const bl_stored_tensor_spec *spec = &plan->specs[i];
        if (spec->dtype != BL_F8_E4M3) continue;
        bl_row_job job = {.format = format, .codes = out->codes, .scales = scales};
        BL_TRY(bl_hf_get_weight(model, spec->name, &job.weight));
        for (job.begin = 0; job.begin < job.weight.rows; job.begin = job.end) {
            job.end = bl_min_i64(job.begin + bl_shard_piece_rows(job.weight.cols, PIECE_BYTES),
                                 job.weight.rows);
            out->spec[out->n_jobs] = i;
            out->jobs[out->n_jobs++] = job;
        }
        scales += spec[1].shape[0] * spec[1].shape[1];
    }
    return BL_OK;
}

static bl_status write_job(const shard_jobs *list, size_t j, const bl_shard_plan *plan,
                           bl_safetensors_writer *writer)
{
    const bl_row_job *job = &list->jobs[j];
    size_t spec = list->spec[j];
    const int64_t *grid = plan->specs[spec + 1].shape;
    int64_t cols = job->weight.cols;

    BL_TRY(bl_safetensors_writer_put(writer, spec, job->begin * cols, job->codes,
                                     (size_t)((job->end - job->begin) * cols)));
    if (job->end < job->weight.rows) return BL_OK;
    return bl_safetensors_writer_put(writer, spec + 1, 0, job->scales,
                                     (size_t)(grid[0] * grid[1]) * sizeof(float));
}

static bl_status write_projections(const bl_quantize_options *options, const bl_conversion *c,
                                   const bl_shard_plan *plan, bl_safetensors_writer *writer)
{
    shard_jobs list = {0};
    bl_row_loader *loader = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, list_jobs(plan, c->model, options->format, &list));
    if (list.n_jobs == 0) goto done;
    BL_TRY_GOTO(st, done,
                bl_row_loader_create(c->model, c->files, options->io_engine, 1, options->pool,
                                     list.jobs, list.n_jobs, true, &loader));
    for (size_t j = 0; j < list.n_jobs; j++) {
        BL_TRY_GOTO(st, done, bl_row_loader_next(loader, NULL));
        BL_TRY_GOTO(st, done, write_job(&list, j, plan, writer));
    }
done:
    bl_row_loader_destroy(loader);
    free_jobs(&list);
    return st;
}

/* ---- everything else ---- */

/* Rows as they are along the last dimension, whatever the tensor's shape; a scalar is one. */
static bl_stored_tensor as_matrix(const bl_stored_tensor *tensor)
{
    bl_stored_tensor matrix = *tensor;
    int64_t width = (int64_t)bl_dtype_bytes(tensor->dtype);

    matrix.n_dims = 2;
    matrix.shape[1] = tensor->n_dims > 0 ? bl_max_i64(tensor->shape[tensor->n_dims - 1], 1) : 1;
    matrix.shape[0] = tensor->n_bytes / (matrix.shape[1] * width);
    return matrix;
}

bl_status bl_shard_copy_tensor(const bl_stored_tensor *tensor, size_t spec,
                               bl_safetensors_writer *writer)
{
    bl_status st = BL_OK;
    const bl_stored_tensor matrix = as_matrix(tensor);
    int64_t n_rows = matrix.shape[0],
            row_bytes = matrix.shape[1] * (int64_t)bl_dtype_bytes(matrix.dtype),
            step = bl_max_i64(COPY_BYTES / row_bytes, 1);
    bool is_float = tensor->dtype == BL_F32 || tensor->dtype == BL_F16 || tensor->dtype == BL_BF16;
    void *piece = malloc((size_t)(step * row_bytes));

    if (!piece) return BL_FAIL(BL_ENOMEM, "copying %s", tensor->name);
    for (int64_t row = 0, n; st == BL_OK && row < n_rows; row += n) {
        n = bl_min_i64(step, n_rows - row);
        size_t n_bytes = (size_t)(n * row_bytes);
        st = bl_stored_tensor_read(tensor, row * row_bytes, n_bytes, piece);
        if (st == BL_OK && is_float) st = bl_model_check_finite(&matrix, row, row + n, piece);
        if (st == BL_OK)
            st = bl_safetensors_writer_put(writer, spec, row * row_bytes, piece, n_bytes);
    }
    free(piece);
    return st;
}

bl_status bl_shard_quantize(const bl_quantize_options *options, const bl_conversion *c,
                            const bl_shard_plan *plan, const char *path)
{
    static const char *const metadata[] = {"format", "pt"};
    bl_safetensors_writer *writer = NULL;
    bl_status st;

    BL_TRY(bl_safetensors_create(path, plan->specs, plan->n_specs, metadata, 1, &writer));
    BL_TRY_GOTO(st, done, write_projections(options, c, plan, writer));
    for (size_t i = 0; i < plan->n_specs; i++)
        if (plan->specs[i].dtype != BL_F8_E4M3 && !plan->scale_names[i])
            BL_TRY_GOTO(st, done,
                        bl_shard_copy_tensor(bl_safetensors_find(plan->source, plan->specs[i].name),
                                             i, writer));
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    return st;
}
