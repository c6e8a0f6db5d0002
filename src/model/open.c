/* SPDX-License-Identifier: Apache-2.0 */
/* open.c -- what a host holds once: configuration, open files, embedding, and the format of each projection. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "base/xxh3.h"
#include "model/weights.h"
#include "model/rows.h"

enum { FLOAT_DTYPES = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_F16) | BL_DTYPE_BIT(BL_BF16) };

void bl_model_tensor_name(int64_t layer, const char *module, char name[BL_TENSOR_NAME_BYTES])
{
    snprintf(name, BL_TENSOR_NAME_BYTES, "model.layers.%lld.%s.weight", (long long)layer, module);
}

bl_status bl_model_check_tensors(const bl_model_config *c, const bl_hf_model *model)
{
    enum { PER_LAYER = BL_PROJECTIONS + 2, AROUND = 3 };
    size_t n = (size_t)c->n_layers * PER_LAYER + AROUND, i = 0;
    char(*names)[BL_TENSOR_NAME_BYTES] = calloc(n, sizeof *names);
    bl_hf_expected *expected = calloc(n, sizeof *expected);
    bl_status st = BL_OK;

    if (!names || !expected) {
        st = BL_FAIL(BL_ENOMEM, "the list of tensors of %lld layers", (long long)c->n_layers);
        goto done;
    }
    for (int64_t l = 0; l < c->n_layers; l++) {
        static const char *const norms[] = {"input_layernorm", "post_attention_layernorm"};
        for (int p = 0; p < BL_PROJECTIONS; p++, i++) {
            int64_t rows, cols;
            bl_projection_shape(c, (bl_projection)p, &rows, &cols);
            bl_model_tensor_name(l, bl_projection_get((bl_projection)p)->module, names[i]);
            expected[i] = (bl_hf_expected){
                names[i], 2, {rows, cols}, FLOAT_DTYPES | BL_DTYPE_BIT(BL_F8_E4M3), false};
        }
        for (int k = 0; k < 2; k++, i++) {
            bl_model_tensor_name(l, norms[k], names[i]);
            expected[i] = (bl_hf_expected){names[i], 1, {c->hidden_size}, FLOAT_DTYPES, false};
        }
    }
    bool tied = c->tie_word_embeddings;
    expected[i++] = (bl_hf_expected){"model.norm.weight", 1, {c->hidden_size}, FLOAT_DTYPES, false};
    expected[i++] = (bl_hf_expected){"model.embed_tokens.weight",
                                     2,
                                     {c->vocab_size, c->hidden_size},
                                     FLOAT_DTYPES,
                                     tied && bl_hf_find(model, "lm_head.weight")};
    expected[i++] =
        (bl_hf_expected){"lm_head.weight", 2, {c->vocab_size, c->hidden_size}, FLOAT_DTYPES, tied};
    st = bl_hf_check(model, expected, n);
done:
    free(expected);
    free(names);
    return st;
}

bl_status bl_model_check(bl_model_config *config, const bl_hf_model *model)
{
    BL_TRY(bl_model_config_fit_kv_heads(config, model));
    BL_TRY(bl_model_check_tensors(config, model));
    for (int64_t i = 0; i < config->n_layers * BL_PROJECTIONS; i++) {
        char name[BL_TENSOR_NAME_BYTES];
        bl_hf_weight w;
        bl_model_tensor_name(i / BL_PROJECTIONS,
                             bl_projection_get((bl_projection)(i % BL_PROJECTIONS))->module, name);
        BL_TRY(bl_hf_get_weight(model, name, &w));
    }
    return BL_OK;
}

bl_status bl_base_format_choose(bl_base_format choice, bl_scale_kind stored, bl_dtype stored_dtype,
                                const char *what, bl_format *out)
{
    if (stored != BL_SCALE_NONE) {
        *out = stored == BL_SCALE_BLOCK ? BL_FORMAT_FP8_BLOCK : BL_FORMAT_FP8_ROW;
        if ((choice == BL_BASE_FP8_ROW && *out != BL_FORMAT_FP8_ROW) ||
            (choice == BL_BASE_FP8_BLOCK && *out != BL_FORMAT_FP8_BLOCK))
            return BL_FAIL(BL_EUSAGE,
                           "base_format %s: %s is FP8 with %s scales already and would lose by "
                           "being quantised again; use auto",
                           bl_base_format_name(choice), what,
                           *out == BL_FORMAT_FP8_BLOCK ? "128 x 128 block" : "row");
        return BL_OK;
    }
    if (choice == BL_BASE_STORED) {
        bl_format_from_dtype(stored_dtype, out);
        return BL_OK;
    }
    *out = choice == BL_BASE_FP8_BLOCK ? BL_FORMAT_FP8_BLOCK : BL_FORMAT_FP8_ROW;
    return BL_OK;
}

const char *bl_base_format_name(bl_base_format format)
{
    static const char *const names[] = {"auto", "fp8_row", "fp8_block", "stored"};
    return names[format];
}

bl_status bl_model_set_format(bl_model *model, bl_base_format choice)
{
    size_t n = (size_t)model->config.n_layers * BL_PROJECTIONS;
    if (!model->formats) model->formats = calloc(n, sizeof *model->formats);
    if (!model->formats) return BL_FAIL(BL_ENOMEM, "formats of %zu weights", n);
    model->base_formats = (bl_base_formats){0};
    for (size_t i = 0; i < n; i++) {
        char name[BL_TENSOR_NAME_BYTES];
        bl_hf_weight w;
        bl_model_tensor_name((int64_t)(i / BL_PROJECTIONS),
                             bl_projection_get(i % BL_PROJECTIONS)->module, name);
        BL_TRY(bl_hf_get_weight(model->files, name, &w));
        BL_TRY(bl_base_format_choose(choice, w.scale_kind, w.codes->dtype, w.codes->name,
                                     &model->formats[i]));
        bl_base_formats_count(&model->base_formats, w.scale_kind, w.codes->dtype,
                              model->formats[i]);
    }
    return BL_OK;
}

/* A tied one may be stored under the head's name. */
static const bl_stored_tensor *find_embedding(const bl_model *model)
{
    const bl_stored_tensor *t = bl_hf_find(model->files, "model.embed_tokens.weight");
    return t ? t : bl_hf_find(model->files, "lm_head.weight");
}

/* Each rank of the host reads and checks its part of the rows; the first one makes the checksum, of all. */
static bl_status read_embedding(bl_model *model, bl_host_memory *host)
{
    const bl_stored_tensor *t = find_embedding(model);
    int64_t n_rows = t->shape[0], row_bytes = t->n_bytes / n_rows, rank = bl_host_memory_rank(host),
            n_ranks = bl_host_memory_size(host), begin = n_rows * rank / n_ranks,
            end = n_rows * (rank + 1) / n_ranks;

    BL_TRY(bl_host_memory_take(host, (size_t)t->n_bytes, t->name, &model->embedding));
    model->embedding_bytes = (size_t)t->n_bytes;
    char *rows = (char *)model->embedding + begin * row_bytes;
    BL_TRY(bl_stored_tensor_read(t, begin * row_bytes, (size_t)((end - begin) * row_bytes), rows));
    BL_TRY(bl_model_check_finite(t, begin, end, rows));
    BL_TRY(bl_host_memory_seal(host, model->embedding, model->embedding_bytes));
    if (rank == 0)
        model->embedding_checksum =
            XXH3_64bits_withSeed(model->embedding, model->embedding_bytes, 0);
    return bl_host_memory_tell(host, &model->embedding_checksum, sizeof model->embedding_checksum);
}

static bl_status open_headers(const char *dir, bl_base_format format, bl_model *model)
{
    BL_TRY(bl_model_config_load(dir, &model->config));
    BL_TRY(bl_hf_open(dir, &model->files));
    BL_TRY(bl_model_check(&model->config, model->files));
    BL_TRY(bl_model_set_format(model, format));
    const bl_stored_tensor *head = bl_hf_find(model->files, "lm_head.weight");
    model->embedding_dtype = find_embedding(model)->dtype;
    model->head_dtype =
        head && !model->config.tie_word_embeddings ? head->dtype : model->embedding_dtype;
    return BL_OK;
}

bl_status bl_model_open_headers(const char *dir, bl_base_format format, int64_t max_positions,
                                bl_model **out)
{
    *out = NULL;
    bl_model *model = calloc(1, sizeof *model);
    if (!model) return BL_FAIL(BL_ENOMEM, "model %s", dir);
    model->n_positions = bl_max_i64(max_positions, 1);
    bl_status st = open_headers(dir, format, model);
    if (st == BL_OK)
        *out = model;
    else
        bl_model_close(model);
    return st;
}

bl_status bl_model_open_shared(const char *dir, bl_base_format format, int64_t max_positions,
                               bl_host_memory *host, int n_replicas, bl_model **out)
{
    bl_model *model;

    *out = NULL;
    BL_TRY(bl_model_open_headers(dir, format, max_positions, &model));
    bl_status st = read_embedding(model, host);
    if (st == BL_OK) st = bl_model_open_io_files(model->files, n_replicas == 1, &model->io_files);
    if (st == BL_OK)
        *out = model;
    else
        bl_model_close(model);
    return st;
}

bl_status bl_model_open(const char *dir, bl_base_format format, int64_t max_positions,
                        bl_model **out)
{
    return bl_model_open_shared(dir, format, max_positions, NULL, 1, out);
}

void bl_model_close(bl_model *model)
{
    if (!model) return;
    bl_io_files_close(model->io_files);
    bl_hf_close(model->files);
    bl_host_memory_return(model->embedding, model->embedding_bytes);
    free(model->formats);
    free(model);
}
