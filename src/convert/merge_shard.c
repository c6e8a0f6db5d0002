/* SPDX-License-Identifier: Apache-2.0 */
/* merge_shard.c -- one file of a merged model: projections piece by piece while the next rows are
 * read, everything else as it is. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "convert/merge_internal.h"
#include "model/rows.h"
#include "ops/gemm.h"

enum { PIECE_ELEMENTS = 4 << 20 };

/* ---- the plan ---- */

/* "X.weight_scale", "X.input_scale" and the like of a projection X: they describe stored codes.
 * Scales of the KV cache go with the quantization_config that declares them. */
static bool describes_codes(const bl_arch *arch, const char *name)
{
    static const char *const cache[] = {".q_scale", ".k_scale", ".v_scale"};
    char weight[BL_TENSOR_NAME_BYTES];
    const char *point = strrchr(name, '.');

    for (size_t i = 0; i < BL_COUNT(cache); i++)
        if (point && !strcmp(point, cache[i])) return true;
    if (!point || !strcmp(point, ".weight") || !strcmp(point, ".bias")) return false;
    int n = snprintf(weight, sizeof weight, "%.*s.weight", (int)(point - name), name);
    int64_t layer;
    return n > 0 && n < (int)sizeof weight && bl_arch_find_projection(arch, weight, &layer) >= 0;
}

/* The target's format of a projection. */
static bl_format target_format(const bl_merge *m, bl_dtype stored)
{
    bl_format format = BL_FORMAT_BF16; /* of stored codes */

    if (m->format != BL_FORMAT_COUNT) return m->format;
    bl_format_from_dtype(stored, &format);
    return format;
}

bool bl_merge_keeps_experts(const bl_merge *m)
{
    const bl_arch *arch = m->conversion.config.arch;
    int64_t layer;

    for (size_t i = 0; i < bl_hf_count(m->conversion.model); i++) {
        const bl_stored_tensor *t = bl_hf_quantized_at(m->conversion.model, i);
        int p = t ? bl_arch_find_projection(arch, t->name, &layer) : -1;
        if (t && (p < 0 || !bl_arch_is_routed(arch, p) || t->dtype != BL_U8)) return false;
    }
    return m->format == BL_FORMAT_COUNT;
}

/* A stack of matrices in 4 bits, which another format has as one tensor, too. */
static bl_status plan_stack(bl_shard_plan *plan, const bl_arch *arch,
                            const bl_stored_tensor *tensor, bl_format format)
{
    if (bl_format_has_scales(format)) BL_TRY(bl_shard_check_matrix(tensor));
    bl_stored_tensor_spec *spec = bl_shard_plan_copy(plan, tensor);
    spec->dtype = bl_format_describe(format)->dtype;
    if (arch->is_transposed) {
        spec->shape[1] = tensor->shape[2];
        spec->shape[2] = tensor->shape[1];
    }
    plan->n_bytes += tensor->shape[0] * tensor->shape[1] * tensor->shape[2] *
                         (int64_t)bl_dtype_bytes(spec->dtype) -
                     tensor->n_bytes;
    return BL_OK;
}

bl_status bl_merge_plan_shard(void *merge, const bl_safetensors *source, bl_shard_plan *out)
{
    const bl_merge *m = merge;
    const bl_arch *arch = m->conversion.config.arch;
    bool keeps_experts = bl_merge_keeps_experts(m);

    BL_TRY(bl_shard_plan_begin(source, out));
    for (size_t i = 0; i < bl_safetensors_count(source); i++) {
        const bl_stored_tensor *stored = bl_safetensors_at(source, i),
                               *tensor = bl_hf_resolve(m->conversion.model, stored);
        if (keeps_experts && bl_hf_weight_of_part(m->conversion.model, stored)) {
            bl_shard_plan_copy(out, stored);
            continue;
        }
        if (!tensor || describes_codes(arch, tensor->name)) continue;
        int64_t layer;
        bool is_projection = bl_arch_find_projection(arch, tensor->name, &layer) >= 0;
        bool is_packed = tensor != stored;
        if ((tensor->dtype == BL_F8_E4M3 || is_packed) && !is_projection)
            return BL_FAIL(BL_EINPUT,
                           "tensor %s is %s, but not a projection of a decoder layer: "
                           "use a checkpoint that has it in bf16",
                           tensor->name, is_packed ? "in 4 bits" : "FP8");
        bl_format format = target_format(m, tensor->dtype);
        if (is_packed && tensor->n_dims == 3) {
            BL_TRY(plan_stack(out, arch, tensor, format));
            continue;
        }
        if (is_projection && bl_format_describe(format)->dtype != tensor->dtype)
            BL_TRY(bl_shard_check_matrix(tensor));
        if (is_projection && bl_format_has_scales(format)) {
            BL_TRY(bl_shard_plan_format(out, tensor, format));
            continue;
        }
        bl_stored_tensor_spec *spec = bl_shard_plan_copy(out, tensor);
        if (!is_projection) continue;
        spec->dtype = bl_format_describe(format)->dtype;
        if (tensor->n_dims != 2) continue; /* in its dtype */
        out->n_bytes += tensor->shape[0] * tensor->shape[1] * (int64_t)bl_dtype_bytes(spec->dtype) -
                        tensor->n_bytes;
    }
    return BL_OK;
}

/* ---- the matrices of a shard ---- */

typedef struct matrix {
    size_t spec; /* of its values or codes */
    bl_hf_weight weight;
    bl_format stored, format;
    int64_t layer;
    int module;
    int64_t row; /* of the projection: the first one */
    int64_t r;   /* of all adapters that target it; 0: none */
    bool is_routed;
} matrix;

typedef struct shard {
    const bl_merge *m;
    const bl_shard_plan *plan;
    bl_safetensors_writer *writer;
    matrix *matrices;
    size_t n_matrices;
    bl_row_job *jobs;
    size_t *of; /* [n_jobs] their matrices */
    size_t n_jobs;
    /* Of one piece, as large as the largest. */
    void *codes, *out;
    float *base, *delta;
    bl_merge_sums *strips;
    /* Of one matrix. */
    char *scales, *out_scales;
    float *a, *b, *scratch;
    bl_merge_experts experts[BL_PEFT_MAX_ROUTED];
} shard;

/* The projection, of which *row is the first that the tensor has, or the embedding or head. */
static bool find_module(const bl_merge *m, const char *name, int64_t *layer, int *module,
                        int64_t *row)
{
    const bl_arch *arch = m->conversion.config.arch;
    const char *const tables[] = {arch->embedding, arch->head};
    char text[BL_TENSOR_NAME_BYTES];

    *layer = 0;
    for (int t = 0; t < BL_MODEL_TABLES; t++) {
        *module = BL_PEFT_EMBEDDING + t;
        bl_arch_module_tensor(tables[t], text);
        if (strcmp(text, name) == 0) return true;
    }
    *module = bl_arch_find_rows(&m->conversion.config, name, layer, row);
    return *module >= 0 && *layer < m->conversion.config.n_layers;
}

static int64_t rank_of(const bl_merge *m, int module)
{
    int64_t r = 0;

    for (size_t i = 0; i < m->options->n_adapters; i++) {
        const bl_peft_config *config = bl_peft_get_config(m->terms[i].adapter);
        if (config->targets >> module & 1) r += bl_peft_rank(config, module);
    }
    return r;
}

bl_format bl_merge_loaded_format(const bl_hf_weight *w)
{
    bl_format format = BL_FORMAT_F32;

    if (bl_model_packed_format(w, &format)) return format;
    if (w->scale_kind == BL_SCALE_NONE)
        bl_format_from_dtype(w->codes->dtype, &format);
    else if (w->scale_kind == BL_SCALE_TENSOR || w->scale_kind == BL_SCALE_ROW)
        format = BL_FORMAT_FP8_ROW;
    else if (w->scale_kind == BL_SCALE_BLOCK)
        format = BL_FORMAT_FP8_BLOCK;
    return format;
}

/* BL_EUSAGE: the tensor is a part of experts that are copied, and an adapter targets them. */
static bl_status check_copied(const bl_merge *m, const bl_stored_tensor *tensor)
{
    const bl_stored_tensor *weight = bl_hf_weight_of_part(m->conversion.model, tensor);
    int64_t layer, row;
    int module;

    if (!weight || !find_module(m, weight->name, &layer, &module, &row) ||
        rank_of(m, module) == 0 || !bl_merge_keeps_experts(m))
        return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "base_format auto: an adapter changes %s, which is in 4 bits; use bf16",
                   weight->name);
}

/* Those that are not copied. */
static bl_status list_matrices(shard *s)
{
    const bl_merge *m = s->m;
    bl_peft_modules modules = bl_arch_peft_modules(m->conversion.config.arch);

    s->matrices = calloc(s->plan->n_specs + 1, sizeof *s->matrices);
    if (!s->matrices) return BL_FAIL(BL_ENOMEM, "a list of %zu tensors", s->plan->n_specs);
    for (size_t i = 0; i < s->plan->n_specs; i++) {
        const bl_stored_tensor_spec *spec = &s->plan->specs[i];
        const bl_shard_part *part = &s->plan->parts[i];
        matrix x = {.spec = i};
        if (part->role == BL_SHARD_SCALES || part->role == BL_SHARD_CONSTANT) continue;
        BL_TRY(check_copied(m, part->tensor));
        if (!find_module(m, part->tensor->name, &x.layer, &x.module, &x.row)) continue;
        BL_TRY(bl_hf_get_weight(m->conversion.model, part->tensor->name, &x.weight));
        x.stored = bl_merge_loaded_format(&x.weight);
        x.format = target_format(m, x.weight.codes->dtype);
        x.r = rank_of(m, x.module);
        x.is_routed = bl_peft_is_routed(&modules, x.module);
        if (x.module >= BL_PEFT_EMBEDDING) x.format = x.stored; /* a table keeps its dtype */
        if (x.r == 0 && spec->dtype == x.weight.codes->dtype &&
            x.weight.scale_kind == BL_SCALE_NONE)
            continue;
        s->matrices[s->n_matrices++] = x;
    }
    return BL_OK;
}

/* Of a stack, a matrix. */
static int64_t rows_of_piece(const matrix *x)
{
    if (x->weight.codes->n_dims == 3) return x->weight.rows / x->weight.codes->shape[0];
    return bl_min_i64(bl_shard_piece_rows(x->weight.cols, PIECE_ELEMENTS), x->weight.rows);
}

/* Of the scales before row `row`, a whole group's. */
static int64_t scale_bytes(const matrix *x, bl_format format, int64_t row)
{
    bl_format_bytes n;

    return bl_format_measure(bl_format_describe(format), row, x->weight.cols, &n)
               ? (int64_t)n.scales
               : INT64_MAX;
}

static bl_status allocate(shard *s)
{
    int64_t n_piece = 1, n_delta = 1, n_scales = 1, n_a = 1, n_b = 1, n_strips = 1;

    for (size_t i = 0; i < s->n_matrices; i++) {
        const matrix *x = &s->matrices[i];
        int64_t rows = rows_of_piece(x);
        s->n_jobs += (size_t)bl_ceil_div(x->weight.rows, bl_max_i64(rows, 1));
        n_piece = bl_max_i64(n_piece, rows * x->weight.cols);
        if (x->r > 0) n_delta = bl_max_i64(n_delta, rows * x->weight.cols);
        n_strips = bl_max_i64(n_strips, bl_merge_strips(x->format, rows));
        n_scales = bl_max_i64(n_scales, scale_bytes(x, x->stored, x->weight.rows));
        n_scales = bl_max_i64(n_scales, scale_bytes(x, x->format, x->weight.rows));
        if (x->is_routed) continue;
        n_a = bl_max_i64(n_a, x->r * x->weight.cols);
        n_b = bl_max_i64(n_b, x->r * bl_max_i64(x->weight.rows, x->weight.cols));
    }
    s->jobs = calloc(s->n_jobs + 1, sizeof *s->jobs);
    s->of = calloc(s->n_jobs + 1, sizeof *s->of);
    s->codes = malloc((size_t)n_piece * sizeof(float));
    s->out = malloc((size_t)n_piece * sizeof(float));
    s->base = malloc((size_t)n_piece * sizeof(float));
    s->delta = malloc((size_t)n_delta * sizeof(float));
    s->strips = malloc((size_t)n_strips * sizeof *s->strips);
    s->scales = malloc((size_t)n_scales);
    s->out_scales = malloc((size_t)n_scales);
    s->a = malloc((size_t)n_a * sizeof(float));
    s->b = malloc((size_t)n_b * 2 * sizeof(float));
    s->scratch = malloc((size_t)n_b * sizeof(float));
    return s->jobs && s->of && s->codes && s->out && s->base && s->delta && s->strips &&
                   s->scales && s->out_scales && s->a && s->b && s->scratch
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "a list of %zu pieces", s->n_jobs);
}

static void free_shard(shard *s)
{
    free(s->matrices);
    free(s->jobs);
    free(s->of);
    free(s->codes);
    free(s->out);
    free(s->base);
    free(s->delta);
    free(s->strips);
    free(s->scales);
    free(s->out_scales);
    free(s->a);
    free(s->b);
    free(s->scratch);
    for (size_t i = 0; i < BL_COUNT(s->experts); i++) bl_merge_experts_free(&s->experts[i]);
}

static void list_jobs(shard *s)
{
    size_t n = 0;

    for (size_t i = 0; i < s->n_matrices; i++) {
        const matrix *x = &s->matrices[i];
        bl_row_job job = {
            .weight = x->weight, .format = x->stored, .codes = s->codes, .scales = s->scales};
        for (; job.begin < job.weight.rows; job.begin = job.end) {
            job.end = bl_min_i64(job.begin + rows_of_piece(x), job.weight.rows);
            s->of[n] = i;
            s->jobs[n++] = job;
        }
    }
}

/* ---- deltas ---- */

bl_status bl_merge_check_factor(const bl_merge *m, size_t adapter, int64_t layer,
                                const float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            return BL_FAIL(BL_ENUMERIC, "%s: factors of layer %lld are not finite",
                           m->options->adapters[adapter].dir, (long long)layer);
    return BL_OK;
}

/* a (r, cols) and b (rows, r) of one adapter, with W + b a. Of the embedding W (vocab, hidden) is
 * the transpose of what PEFT's B A is added to: b = A^T, a = B^T. scratch: b's size. */
static bl_status read_pair(const bl_merge_term *term, const matrix *x, float *a, float *b,
                           float *scratch)
{
    int64_t r = bl_peft_get_config(term->adapter)->r, rows = x->weight.rows, cols = x->weight.cols;

    if (x->module != BL_PEFT_EMBEDDING) {
        BL_TRY(bl_peft_read(term->adapter, x->layer, x->module, BL_PEFT_A, a));
        return bl_peft_read(term->adapter, x->layer, x->module, BL_PEFT_B, b);
    }
    BL_TRY(bl_peft_read(term->adapter, x->layer, x->module, BL_PEFT_B, scratch));
    for (int64_t c = 0; c < cols; c++)
        for (int64_t k = 0; k < r; k++) a[k * cols + c] = scratch[c * r + k];
    BL_TRY(bl_peft_read(term->adapter, x->layer, x->module, BL_PEFT_A, scratch));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < r; k++) b[row * r + k] = scratch[k * rows + row];
    return BL_OK;
}

/* The factors of all adapters as one: A (r, cols), below one another; B (rows, r), beside one
 * another and scaled. */
static bl_status read_factors(shard *s, const matrix *x)
{
    const bl_merge *m = s->m;
    int64_t rows = x->weight.rows, cols = x->weight.cols, at = 0;

    for (size_t i = 0; i < m->options->n_adapters; i++) {
        const bl_merge_term *term = &m->terms[i];
        const bl_peft_config *config = bl_peft_get_config(term->adapter);
        if (!(config->targets >> x->module & 1)) continue;
        float *a = s->a + at * cols, *b = s->b + x->r * rows;
        BL_TRY(read_pair(term, x, a, b, s->scratch));
        BL_TRY(bl_merge_check_factor(m, i, x->layer, a, config->r * cols));
        BL_TRY(bl_merge_check_factor(m, i, x->layer, b, config->r * rows));
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < config->r; k++)
                s->b[row * x->r + at + k] = (float)(term->scale * b[row * config->r + k]);
        at += config->r;
    }
    return BL_OK;
}

/* ---- pieces ---- */

static bl_status put_piece(shard *s, const matrix *x, const bl_row_job *job)
{
    int64_t cols = x->weight.cols, rows = job->end - job->begin,
            row_bytes = bl_format_row_bytes(x->format, cols);
    const void *bytes = s->out;

    if (x->weight.codes->n_dims == 3 && s->m->conversion.config.arch->is_transposed) {
        bl_rows_transpose(s->m->options->pool, (size_t)(row_bytes / cols), cols, rows, cols, s->out,
                          s->codes);
        bytes = s->codes;
    }
    BL_TRY(bl_safetensors_writer_put(s->writer, x->spec, job->begin * row_bytes, bytes,
                                     (size_t)(rows * row_bytes)));
    if (job->end < x->weight.rows || !bl_format_has_scales(x->format)) return BL_OK;
    BL_TRY(bl_safetensors_writer_put(s->writer, x->spec + 1, 0, s->out_scales,
                                     (size_t)scale_bytes(x, x->format, x->weight.rows)));
    return bl_shard_write_constants(s->plan, x->spec, x->format, s->writer);
}

static bl_status make_delta(shard *s, const matrix *x, const bl_row_job *job)
{
    bl_pool *pool = s->m->options->pool;
    int64_t cols = x->weight.cols, rows = job->end - job->begin;

    if (x->is_routed) {
        int n = bl_arch_peft_modules(s->m->conversion.config.arch).n;
        bl_merge_experts *experts = &s->experts[x->module - n];
        BL_TRY(bl_merge_read_experts(s->m, x->layer, x->module, experts));
        return bl_merge_experts_delta(pool, experts, x->row + job->begin, rows, s->delta);
    }
    if (job->begin == 0) BL_TRY(read_factors(s, x));
    return bl_cpu_gemm_f32(pool, false, false, rows, cols, x->r, 1.0f, s->b + job->begin * x->r,
                           x->r, s->a, cols, 0.0f, s->delta, cols);
}

static bl_status merge_piece(shard *s, size_t j, bl_merge_sums *sums)
{
    const bl_merge_options *o = s->m->options;
    const matrix *x = &s->matrices[s->of[j]];
    const bl_row_job *job = &s->jobs[j];
    int64_t cols = x->weight.cols, rows = job->end - job->begin;
    bl_merge_piece piece = {
        .stored = x->stored,
        .format = x->format,
        .codes = s->codes,
        .scales = s->scales + scale_bytes(x, x->stored, job->begin),
        .row_begin = job->begin,
        .rows = rows,
        .cols = cols,
        .delta = x->r > 0 ? s->delta : NULL,
        .is_stochastic = s->m->is_stochastic && x->r > 0,
        .keeps_scales = o->scales == BL_MERGE_SCALES_BASE || x->r == 0,
        .largest_scales = s->m->largest_scales,
        .key = {{(uint32_t)o->seed, (uint32_t)(o->seed >> 32)}},
        .tensor_hash = bl_model_tensor_seed(x->weight.codes->name),
        .base = s->base,
        .out = s->out,
        .out_scales = s->out_scales + scale_bytes(x, x->format, job->begin),
        .sums = s->strips,
    };

    if (x->r > 0) BL_TRY(make_delta(s, x, job));
    bl_merge_round(o->pool, &piece, sums);
    if (!isfinite(sums->error))
        return BL_FAIL(BL_ENUMERIC, "tensor %s: %s is not finite in %s", x->weight.codes->name,
                       x->r > 0 ? "W + delta" : "code * scale", bl_format_name(x->format));
    return put_piece(s, x, job);
}

static bl_status note_matrix(const matrix *x, const bl_merge_sums *sums, json_t *matrices)
{
    double norm = sqrt(sums->delta);
    json_t *note = json_pack("{s:f, s:f, s:f, s:f}", "dot", sums->dot, "delta", sums->delta,
                             "error", sums->error, "base", sums->base);

    if (note && x->r == 0)
        json_object_set_new(note, "relative_error",
                            json_real(sums->base > 0 ? sqrt(sums->error / sums->base) : 0));
    if (note && sums->delta > 0) {
        json_object_set_new(note, "kept", json_real(sums->dot / sums->delta));
        json_object_set_new(note, "relative_error", json_real(sqrt(sums->error) / norm));
    }
    return note && json_object_set_new(matrices, x->weight.codes->name, note) == 0
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "%s", x->weight.codes->name);
}

static bl_status merge_matrices(shard *s, json_t *matrices)
{
    const bl_conversion *c = &s->m->conversion;
    bl_row_loader *loader = NULL;
    bl_merge_sums sums = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, list_matrices(s));
    BL_TRY_GOTO(st, done, allocate(s));
    list_jobs(s);
    if (s->n_jobs == 0) goto done;
    BL_TRY_GOTO(st, done,
                bl_row_loader_create(c->model, c->files, s->m->options->io_engine, 1,
                                     s->m->options->pool, s->jobs, s->n_jobs, true, &loader));
    for (size_t j = 0; j < s->n_jobs; j++) {
        const matrix *x = &s->matrices[s->of[j]];
        if (s->jobs[j].begin == 0) sums = (bl_merge_sums){0};
        BL_TRY_GOTO(st, done, bl_row_loader_next(loader, NULL));
        BL_TRY_GOTO(st, done, merge_piece(s, j, &sums));
        /* of a quantized model all are noted */
        bool is_noted =
            x->r > 0 || (s->m->options->n_adapters == 0 && bl_format_has_scales(x->format));
        if (is_noted && s->jobs[j].end == x->weight.rows)
            BL_TRY_GOTO(st, done, note_matrix(x, &sums, matrices));
    }
done:
    bl_row_loader_destroy(loader);
    return st;
}

static bool is_merged(const shard *s, size_t spec)
{
    for (size_t i = 0; i < s->n_matrices; i++)
        if (s->matrices[i].spec == spec) return true;
    return false;
}

/* Writes a tensor of modules_to_save, rounded to nearest to the model's dtype. */
static bl_status write_values(const shard *s, const bl_peft_adapter *adapter, size_t i)
{
    enum { PIECE = 1 << 12 };
    const bl_stored_tensor_spec *spec = &s->plan->specs[i];
    int64_t n_values = spec->shape[0] * (spec->n_dims > 1 ? spec->shape[1] : 1),
            size = (int64_t)bl_dtype_bytes(spec->dtype);
    float values[PIECE];
    uint16_t halves[PIECE];

    for (int64_t begin = 0, n; begin < n_values; begin += n) {
        n = bl_min_i64(PIECE, n_values - begin);
        BL_TRY(bl_peft_read_saved(adapter, spec->name, begin, n, values));
        for (int64_t k = 0; k < n; k++) {
            bool is_f16 = spec->dtype == BL_F16;
            halves[k] = is_f16 ? bl_f32_to_f16(values[k]) : bl_f32_to_bf16(values[k]);
            float stored = spec->dtype == BL_F32 ? values[k]
                           : is_f16              ? bl_f16_to_f32(halves[k])
                                                 : bl_bf16_to_f32(halves[k]);
            if (!isfinite(stored))
                return BL_FAIL(BL_ENUMERIC, "tensor %s of modules_to_save: %g is not finite in %s",
                               spec->name, (double)values[k], bl_dtype_name(spec->dtype));
        }
        const void *bytes = spec->dtype == BL_F32 ? (const void *)values : halves;
        BL_TRY(bl_safetensors_writer_put(s->writer, i, begin * size, bytes, (size_t)(n * size)));
    }
    return BL_OK;
}

/* Writes a tensor that is not a merged matrix: from an adapter's modules, or copied unchanged. */
static bl_status write_other(const shard *s, size_t i)
{
    const bl_merge *m = s->m;
    const char *name = s->plan->specs[i].name;
    bl_arch_tensor t;

    for (size_t a = 0; a < m->options->n_adapters; a++)
        if (m->terms[a].modules.names.n > 0 &&
            bl_trained_find(&m->conversion.config, &m->terms[a].modules.set, name, &t))
            return write_values(s, m->terms[a].adapter, i);
    return bl_shard_copy_tensor(bl_safetensors_find(s->plan->source, name), i, s->writer);
}

bl_status bl_merge_write_shard(void *merge, size_t index, const char *path, json_t *entry)
{
    static const char *const metadata[] = {"format", "pt"};
    const bl_merge *m = merge;
    shard s = {.m = m, .plan = &m->conversion.plans[index]};
    json_t *matrices = json_object();
    bl_status st;

    json_object_set_new(entry, "matrices", matrices); /* that adapters change */
    BL_TRY(bl_safetensors_create(path, s.plan->specs, s.plan->n_specs, metadata, 1, &s.writer));
    BL_TRY_GOTO(st, done, merge_matrices(&s, matrices));
    for (size_t i = 0; i < s.plan->n_specs; i++)
        if (s.plan->parts[i].role == BL_SHARD_VALUES && !is_merged(&s, i))
            BL_TRY_GOTO(st, done, write_other(&s, i));
    st = bl_safetensors_writer_commit(s.writer);
    s.writer = NULL;
done:
    bl_safetensors_writer_abort(s.writer);
    free_shard(&s);
    return st;
}
