/* SPDX-License-Identifier: Apache-2.0 */
/* base_formats.c -- in which formats a checkpoint stores the projections and in which they are
 * held, counted and put into words; the sizes of what is stored. */
#include <stdio.h>

#include "base/sizes.h"
#include "model/rows.h"
#include "model/weights.h"

static const char *stored_name(int kind)
{
    static const char *const coded[] = {[BL_SCALE_TENSOR] = "fp8_tensor",
                                        [BL_SCALE_ROW] = "fp8_row",
                                        [BL_SCALE_BLOCK] = "fp8_block",
                                        [BL_SCALE_GRID] = "fp8_grid",
                                        [BL_SCALE_MX] = "mxfp8",
                                        [BL_SCALE_INT4] = "int4",
                                        [BL_SCALE_MXFP4] = "mxfp4",
                                        [BL_SCALE_NVFP4] = "nvfp4",
                                        [BL_SCALE_NF4] = "nf4"};
    return kind < BL_FORMAT_COUNT ? bl_format_name((bl_format)kind) : coded[kind - BL_FORMAT_COUNT];
}

void bl_base_formats_count(bl_base_formats *f, bl_scale_kind stored, bl_dtype stored_dtype,
                           bl_format held)
{
    bl_format format = BL_FORMAT_F32;
    if (stored == BL_SCALE_NONE) bl_format_from_dtype(stored_dtype, &format);
    f->n[stored == BL_SCALE_NONE ? (int)format : BL_FORMAT_COUNT + (int)stored][held]++;
    f->n_matrices++;
    f->n_requantized += bl_scale_is_decoded(stored) && bl_format_has_scales(held) &&
                        !bl_model_format_is_of(held, stored);
}

bool bl_model_base_is_quantized(const bl_base_formats *f)
{
    for (int held = 0; held < BL_FORMAT_COUNT; held++)
        for (int kind = 0; kind < BL_FORMAT_COUNT;
             kind++) /* quantized in the checkpoint, it stays as it is */
            if (f->n[kind][held] > 0 && bl_format_has_scales((bl_format)held)) return true;
    return f->n_requantized > 0;
}

bl_status bl_base_formats_check_device(const bl_base_formats *f, bl_device_kind kind)
{
    for (int kind_stored = 0; kind_stored < BL_STORED_FORMAT_COUNT; kind_stored++)
        for (int held = 0; held < BL_FORMAT_COUNT; held++)
            if (kind == BL_DEVICE_CUDA && f->n[kind_stored][held] > 0 &&
                bl_format_is_packed((bl_format)held))
                return BL_FAIL(BL_EUSAGE,
                               "base_format: GPUs have no products of %s yet; use base_format "
                               "fp8_row, or device cpu",
                               bl_format_name((bl_format)held));
    return BL_OK;
}

typedef struct text {
    char *at;
    size_t n_free;
} text;

static void put(text *t, int written)
{
    size_t n = written < 0 ? 0 : (size_t)written < t->n_free ? (size_t)written : t->n_free - 1;
    t->at += n;
    t->n_free -= n;
}

/* "bf16", or of a mixture "12 bf16, 2 fp8_row". */
static void list(const bl_base_formats *f, bool is_stored, char *out)
{
    text t = {out, BL_BASE_FORMATS_TEXT_BYTES};
    bool is_first = true;

    out[0] = '\0';
    for (int i = 0; i < (is_stored ? BL_STORED_FORMAT_COUNT : BL_FORMAT_COUNT); i++) {
        int64_t n = 0;
        for (int j = 0; j < (is_stored ? BL_FORMAT_COUNT : BL_STORED_FORMAT_COUNT); j++)
            n += is_stored ? f->n[i][j] : f->n[j][i];
        if (n == 0) continue;
        const char *name = is_stored ? stored_name(i) : bl_format_name((bl_format)i);
        if (n == f->n_matrices)
            put(&t, snprintf(t.at, t.n_free, "%s", name));
        else
            put(&t,
                snprintf(t.at, t.n_free, "%s%lld %s", is_first ? "" : ", ", (long long)n, name));
        is_first = false;
    }
}

void bl_base_formats_list_held(const bl_base_formats *f, char out[BL_BASE_FORMATS_TEXT_BYTES])
{
    list(f, false, out);
}

void bl_base_formats_list_stored(const bl_base_formats *f, char out[BL_BASE_FORMATS_TEXT_BYTES])
{
    list(f, true, out);
}

void bl_base_formats_describe(const bl_base_formats *f, const char *where,
                              char out[BL_BASE_FORMATS_TEXT_BYTES])
{
    text t = {out, BL_BASE_FORMATS_TEXT_BYTES};
    bool is_first = true;

    out[0] = '\0';
    for (int kind = 0; kind < BL_STORED_FORMAT_COUNT; kind++)
        for (int held = 0; held < BL_FORMAT_COUNT; held++) {
            int64_t n = f->n[kind][held];
            if (n == 0) continue;
            if (!is_first) put(&t, snprintf(t.at, t.n_free, "; "));
            if (n != f->n_matrices)
                put(&t, snprintf(t.at, t.n_free, "%lld of %lld matrices ", (long long)n,
                                 (long long)f->n_matrices));
            put(&t, snprintf(t.at, t.n_free, "%s in the checkpoint, %s in %s", stored_name(kind),
                             bl_format_name((bl_format)held), where));
            is_first = false;
        }
}

bool bl_model_has_format(const bl_model_config *config, size_t i)
{
    size_t n = (size_t)config->arch->n_projections;
    return bl_model_has(config, (int64_t)(i / n), (int)(i % n));
}

size_t bl_model_format_count(const bl_model_config *config)
{
    return (size_t)(config->n_layers * config->arch->n_projections);
}

bool bl_model_base_is_bf16(const bl_model_config *config, const bl_format *formats)
{
    for (size_t i = 0; i < bl_model_format_count(config); i++)
        if (bl_model_has_format(config, i) && formats[i] != BL_FORMAT_BF16) return false;
    return true;
}

bl_model_stored_size bl_model_measure_stored(const bl_model *model)
{
    bl_model_stored_size size = {.is_in_blocks =
                                     bl_format_describe(model->formats[0])->group_rows > 1};

    bool is_decoded = model->base_formats.n_requantized > 0;

    for (size_t i = 0; model->files && i < bl_hf_count(model->files); i++) {
        const bl_stored_tensor *tensor = bl_hf_at(model->files, i),
                               *coded = bl_hf_quantized_at(model->files, i);
        if (is_decoded && coded)
            size.decoded_row_bytes = bl_max_i64(
                size.decoded_row_bytes, coded->shape[coded->n_dims - 1] * (int64_t)sizeof(float));
        size.n_bytes += tensor->n_bytes;
        bl_hf_weight w;
        if (coded && bl_hf_get_weight(model->files, coded->name, &w) == BL_OK)
            size.scale_bytes = bl_max_i64(size.scale_bytes, w.scale_rows * w.scale_cols *
                                                                (w.packed && w.zero_point ? 2 : 1) *
                                                                (int64_t)sizeof(float));
        if (coded) tensor = coded;
        if (model->config.arch->is_transposed && !coded && tensor->n_dims == 3)
            size.matrix_bytes = bl_max_i64(size.matrix_bytes, tensor->n_bytes / tensor->shape[0]);
        int64_t n_rows = tensor->n_dims >= 2 ? tensor->shape[0] : 0;
        if (tensor->n_dims == 3) n_rows *= tensor->shape[1];
        if (n_rows > 0) size.row_bytes = bl_max_i64(size.row_bytes, tensor->n_bytes / n_rows);
    }
    return size;
}
