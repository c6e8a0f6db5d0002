/* SPDX-License-Identifier: Apache-2.0 */
/* open.c -- data held once per host: configuration, open files, embedding, and the format of each
 * projection. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arch/rope.h"
#include "base/log.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "fp8/packed.h"
#include "model/weights.h"
#include "model/rows.h"

enum { FLOAT_DTYPES = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_F16) | BL_DTYPE_BIT(BL_BF16) };

/* Stacks may have 4 bits, with output channels first. */
static void expect_stack(const bl_model_config *c, const bl_hf_model *model, bl_hf_expected *e)
{
    const bl_stored_tensor *stored = bl_hf_find_weight(model, e->name);
    int64_t cols = e->shape[1];

    if (!stored || stored->dtype != BL_U8) return;
    e->dtypes |= BL_DTYPE_BIT(BL_F8_E4M3);
    if (!c->arch->is_transposed) return;
    e->shape[1] = e->shape[2];
    e->shape[2] = cols;
}

/* A tied head may be stored besides the embedding or in its place. */
static bl_hf_expected expect(const bl_model_config *c, const bl_hf_model *model,
                             const bl_arch_tensor *t)
{
    char head[BL_TENSOR_NAME_BYTES];
    bl_hf_expected e = {.name = t->name,
                        .n_dims = t->n_dims,
                        .shape = {t->shape[0], t->shape[1], t->shape[2]},
                        .dtypes = FLOAT_DTYPES};

    if (t->role == BL_ROLE_PROJECTION && t->n_dims == 2) e.dtypes |= BL_DTYPE_BIT(BL_F8_E4M3);
    if (t->role == BL_ROLE_PROJECTION && t->n_dims == 3) expect_stack(c, model, &e);
    if (c->tie_word_embeddings && t->role == BL_ROLE_HEAD) e.optional = true;
    bl_arch_module_tensor(c->arch->head, head);
    if (c->tie_word_embeddings && t->role == BL_ROLE_EMBEDDING)
        e.optional = bl_hf_find(model, head) != NULL;
    return e;
}

/* Beginnings of names of tensors that are not read: the entry's, or those of layers behind the
 * model's that predict further tokens. */
typedef struct skipped_names {
    const char *list[BL_MODEL_MAX_NEXTN + 1]; /* NULL-terminated */
    char text[BL_MODEL_MAX_NEXTN][BL_TENSOR_NAME_BYTES];
} skipped_names;

static const char *const *list_skipped(const bl_model_config *c, skipped_names *names)
{
    if (c->arch->skipped) return c->arch->skipped;
    *names = (skipped_names){.list = {NULL}};
    for (int64_t i = 0; i < c->n_nextn; i++) {
        snprintf(names->text[i], BL_TENSOR_NAME_BYTES, "%s.%lld.", c->arch->layers,
                 (long long)(c->n_layers + i));
        names->list[i] = names->text[i];
    }
    return names->list;
}

bl_status bl_model_check_tensors(const bl_model_config *c, const bl_hf_model *model)
{
    size_t n = (size_t)bl_arch_tensor_count(c);
    skipped_names names;
    bl_arch_tensor *tensors = calloc(n, sizeof *tensors);
    bl_hf_expected *expected = calloc(n, sizeof *expected);
    bl_status st = tensors && expected ? BL_OK
                                       : BL_FAIL(BL_ENOMEM, "the list of tensors of %lld layers",
                                                 (long long)c->n_layers);

    for (size_t i = 0; st == BL_OK && i < n; i++) {
        tensors[i] = bl_arch_tensor_at(c, (int64_t)i);
        expected[i] = expect(c, model, &tensors[i]);
    }
    if (st == BL_OK) st = bl_hf_check(model, expected, n, list_skipped(c, &names));
    free(expected);
    free(tensors);
    return st;
}

bl_status bl_model_stored_weight(const bl_model_config *c, const bl_hf_model *model,
                                 const bl_arch_tensor *t, bl_hf_weight *out)
{
    BL_TRY(bl_hf_get_weight(model, t->name, out));
    if (c->arch->is_transposed && t->n_dims == 3) bl_hf_transpose(out);
    return BL_OK;
}

/* A projection's stored weight, which has format i of bl_model.formats: of routed experts the
 * first, once all are known to be stored alike. */
static bl_status projection_weight(const bl_model_config *c, const bl_hf_model *files, int64_t i,
                                   bl_hf_weight *out)
{
    int64_t layer = i / c->arch->n_projections, rows, cols;
    int p = (int)(i % c->arch->n_projections);
    bl_arch_tensor t = bl_arch_stored_at(c, layer, p, 0);

    BL_TRY(bl_model_stored_weight(c, files, &t, out));
    bl_projection_shape(c, p, &rows, &cols);
    for (int64_t row = out->rows; row < rows; row += out->rows) {
        bl_hf_weight other;
        t = bl_arch_stored_at(c, layer, p, row);
        BL_TRY(bl_model_stored_weight(c, files, &t, &other));
        if (other.codes->dtype != out->codes->dtype || other.scale_kind != out->scale_kind)
            return BL_FAIL(BL_EINPUT,
                           "tensor %s is not stored as %s is: the experts of a layer need one "
                           "format",
                           t.name, out->codes->name);
    }
    return BL_OK;
}

/* Blocks of experts' rows must not be shared by two of them. */
static bl_status check_blocks(const bl_arch *arch, size_t i, const bl_hf_weight *w,
                              bl_format format)
{
    int64_t group_rows = bl_format_describe(format)->group_rows,
            rows = w->codes->n_dims == 3 ? w->rows / w->codes->shape[0] : w->rows;
    int p = (int)(i % (size_t)arch->n_projections);

    if (!bl_arch_is_routed(arch, p) || rows % group_rows == 0) return BL_OK;
    return BL_FAIL(
        BL_EUSAGE,
        "base_format fp8_block: an expert of tensor %s has %lld rows, which are not whole "
        "blocks of %lld: %s",
        w->codes->name, (long long)rows, (long long)group_rows,
        w->scale_kind == BL_SCALE_BLOCK ? "convert it with ballast dequantize first"
                                        : "use fp8_row");
}

bl_status bl_model_check(bl_model_config *config, const bl_hf_model *model)
{
    BL_TRY(bl_model_config_fit(config, model));
    BL_TRY(bl_model_check_tensors(config, model));
    for (size_t i = 0; i < bl_model_format_count(config); i++) {
        bl_hf_weight w;
        if (bl_model_has_format(config, i))
            BL_TRY(projection_weight(config, model, (int64_t)i, &w));
    }
    return BL_OK;
}

bl_status bl_base_format_choose(bl_base_format choice, bl_scale_kind stored, bl_dtype stored_dtype,
                                const char *what, bl_format *out)
{
    bl_format made;
    bool is_decoded = bl_scale_is_decoded(stored),
         is_made = bl_format_parse(bl_base_format_name(choice), &made);

    if (choice == BL_BASE_TRAINED) {
        if (stored != BL_SCALE_NONE)
            return BL_FAIL(
                BL_EUSAGE,
                "finetuning_type full: %s is stored in FP8 or 4 bits: use the model's bf16 or fp32 "
                "checkpoint, or finetuning_type lora",
                what);
        *out = BL_FORMAT_F32;
        return BL_OK;
    }
    if (is_decoded && !is_made) {
        *out = bl_scale_fits_bf16(stored) ? BL_FORMAT_BF16 : BL_FORMAT_F32;
        return BL_OK;
    }
    if (stored != BL_SCALE_NONE && !is_decoded) {
        *out = stored == BL_SCALE_BLOCK ? BL_FORMAT_FP8_BLOCK : BL_FORMAT_FP8_ROW;
        if (is_made && *out != made)
            return BL_FAIL(BL_EUSAGE,
                           "base_format %s: %s is FP8 with %s scales already and would lose by "
                           "being quantized again; use auto",
                           bl_base_format_name(choice), what,
                           *out == BL_FORMAT_FP8_BLOCK ? "128 x 128 block" : "row");
        return BL_OK;
    }
    if (choice == BL_BASE_STORED) {
        bl_format_from_dtype(stored_dtype, out);
        return BL_OK;
    }
    *out = is_made ? made : BL_FORMAT_FP8_ROW;
    return BL_OK;
}

const char *bl_base_format_name(bl_base_format format)
{
    static const char *const names[] = {"auto",      "fp8_row", "fp8_block", "mxfp4",  "int4_g32",
                                        "int4_g128", "nf4",     "stored",    "trained"};
    return names[format];
}

/* 4 bits stay as they are, unless another format is asked for. */
static bool is_kept(bl_base_format choice, const bl_hf_weight *w, bl_format *out)
{
    bl_format made;

    if (choice == BL_BASE_TRAINED || !bl_model_packed_format(w, out)) return false;
    return !bl_format_parse(bl_base_format_name(choice), &made) || made == *out;
}

bl_status bl_model_set_format(bl_model *model, bl_base_format choice)
{
    size_t n = bl_model_format_count(&model->config);

    if (!model->formats) model->formats = calloc(n, sizeof *model->formats);
    if (!model->formats) return BL_FAIL(BL_ENOMEM, "formats of %zu weights", n);
    model->base_formats = (bl_base_formats){0};
    for (size_t i = 0; i < n; i++) {
        bl_hf_weight w;
        if (!bl_model_has_format(&model->config, i)) continue;
        BL_TRY(projection_weight(&model->config, model->files, (int64_t)i, &w));
        bool keeps = is_kept(choice, &w, &model->formats[i]);
        if (!keeps)
            BL_TRY(bl_base_format_choose(choice, w.scale_kind, w.codes->dtype, w.codes->name,
                                         &model->formats[i]));
        BL_TRY(bl_model_check_groups(model->formats[i], w.codes->name, w.cols));
        BL_TRY(check_blocks(model->config.arch, i, &w, model->formats[i]));
        bl_base_formats_count(&model->base_formats, w.scale_kind, w.codes->dtype,
                              model->formats[i]);
        /* as INT4 with zero points in int4_g128 */
        model->base_formats.n_requantized +=
            !keeps && bl_model_format_is_of(model->formats[i], w.scale_kind);
    }
    return BL_OK;
}

bl_status bl_model_open_io_files(const bl_hf_model *model, bool direct, bl_io_files **out)
{
    size_t n_files = bl_hf_file_count(model);
    const char **paths = calloc(n_files + 1, sizeof *paths);

    *out = NULL;
    if (!paths) return BL_FAIL(BL_ENOMEM, "the names of %zu files", n_files);
    for (size_t i = 0; i < n_files; i++) paths[i] = bl_safetensors_path(bl_hf_file(model, i));
    bl_status st = bl_io_files_open(paths, (int)n_files, direct, out);
    for (size_t i = 0; i < n_files && st == BL_OK; i++)
        st = bl_safetensors_check_same(bl_hf_file(model, i), bl_io_files_descriptor(*out, (int)i));
    if (st != BL_OK) {
        bl_io_files_close(*out);
        *out = NULL;
    }
    free(paths);
    return st;
}

static const bl_stored_tensor *find_module(const bl_model *model, const char *module)
{
    char name[BL_TENSOR_NAME_BYTES];

    bl_arch_module_tensor(module, name);
    return bl_hf_find(model->files, name);
}

/* A tied one may be stored under the head's name. */
static const bl_stored_tensor *find_embedding(const bl_model *model)
{
    const bl_stored_tensor *t = find_module(model, model->config.arch->embedding);
    return t ? t : find_module(model, model->config.arch->head);
}

/* Each rank of the host reads and checks its part of the rows; the first one makes the checksum, of
 * all. */
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

/* What RoPE can do. */
static bl_status check_sequences(const char *dir, const bl_model *model)
{
    int64_t most = bl_model_rope_max_tokens(&model->config);

    if (most > 0 && model->n_positions > most)
        return BL_FAIL(BL_EUSAGE,
                       "%s: rope_type dynamic changes all frequencies with each length beyond "
                       "max_position_embeddings %lld, which is not supported; use sequences of at "
                       "most %lld tokens, not %lld",
                       dir, (long long)most, (long long)most, (long long)model->n_positions);
    return BL_OK;
}

static void report_skipped(const char *dir, const bl_model *model)
{
    skipped_names names;
    int64_t n_bytes;
    size_t n = bl_hf_count_skipped(model->files, list_skipped(&model->config, &names), &n_bytes);

    if (n == 0) return;
    if (model->config.arch->skipped)
        bl_log_info("%s: text only: %zu tensors (%.1f MB) of vision are not read", dir, n,
                    (double)n_bytes / 1e6);
    else
        bl_log_info("%s: %zu tensors (%.1f MB) of next-token-prediction layers are not read", dir,
                    n, (double)n_bytes / 1e6);
}

static bl_status open_headers(const char *dir, bl_base_format format, bl_model *model)
{
    BL_TRY(bl_model_config_load(dir, &model->config));
    BL_TRY(check_sequences(dir, model));
    BL_TRY(bl_hf_open(dir, &model->files));
    BL_TRY(bl_model_check(&model->config, model->files));
    BL_TRY(bl_model_set_format(model, format));
    if (model->is_trained) BL_TRY(bl_trained_all(&model->config, &model->trained));
    report_skipped(dir, model);
    const bl_stored_tensor *head = find_module(model, model->config.arch->head);
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
    model->is_trained = format == BL_BASE_TRAINED;
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
    bl_status st = model->is_trained ? BL_OK : read_embedding(model, host);
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

void bl_model_set_trained(bl_model *model, bl_trained_set *set)
{
    bl_trained_free(&model->trained);
    model->trained = *set;
    *set = (bl_trained_set){.unit = NULL};
}

void bl_model_close(bl_model *model)
{
    if (!model) return;
    bl_trained_free(&model->trained);
    bl_io_files_close(model->io_files);
    bl_hf_close(model->files);
    bl_host_memory_return(model->embedding, model->embedding_bytes);
    free(model->formats);
    free(model);
}
