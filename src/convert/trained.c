/* SPDX-License-Identifier: Apache-2.0 */
/* trained.c -- writes a model from a checkpoint of full fine-tuning: file by file as the source has
 * them, each tensor read from the ranks' shards, rounded and written piece by piece. */
#include "convert/trained.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trained/full.h"
#include "base/sizes.h"
#include "convert/internal.h"

enum { PIECE_ELEMENTS = 1 << 20 };

typedef struct trained {
    const bl_trained_options *options;
    bl_conversion conversion;
    bl_trained_full_reader *reader;
    float *values; /* [PIECE_ELEMENTS], or of a longer row */
    void *rounded;
    int64_t n_values;
} trained;

static bool find_tensor(const trained *t, const char *name, bl_arch_tensor *out)
{
    return bl_trained_find(&t->conversion.config, t->options->trained, name, out);
}

static bl_status plan_shard(void *user, const bl_safetensors *source, bl_shard_plan *out)
{
    const trained *t = user;
    bl_arch_tensor unused;

    BL_TRY(bl_shard_plan_begin(source, out));
    for (size_t i = 0; i < bl_safetensors_count(source); i++) {
        const bl_stored_tensor *tensor = bl_safetensors_at(source, i);
        bl_stored_tensor_spec *spec = bl_shard_plan_copy(out, tensor);
        if (!t->options->is_f32 || !find_tensor(t, tensor->name, &unused)) continue;
        out->n_bytes +=
            tensor->n_bytes / (int64_t)bl_dtype_bytes(tensor->dtype) * (int64_t)sizeof(float) -
            tensor->n_bytes;
        spec->dtype = BL_F32;
    }
    return BL_OK;
}

static bl_status round_values(const trained *t, const bl_stored_tensor_spec *spec, int64_t n)
{
    uint16_t *halves = t->rounded;

    if (spec->dtype == BL_F32) memcpy(t->rounded, t->values, (size_t)n * sizeof *t->values);
    for (int64_t i = 0; i < n && spec->dtype != BL_F32; i++) {
        halves[i] =
            spec->dtype == BL_BF16 ? bl_f32_to_bf16(t->values[i]) : bl_f32_to_f16(t->values[i]);
        float back = spec->dtype == BL_BF16 ? bl_bf16_to_f32(halves[i]) : bl_f16_to_f32(halves[i]);
        if (!isfinite(back))
            return BL_FAIL(BL_ENUMERIC, "tensor %s: %g is too large for %s", spec->name,
                           (double)t->values[i], bl_dtype_name(spec->dtype));
    }
    return BL_OK;
}

static bl_status write_tensor(const trained *t, const bl_arch_tensor *tensor,
                              const bl_stored_tensor_spec *spec, size_t index,
                              bl_safetensors_writer *writer)
{
    int64_t rows = tensor->shape[0], cols = tensor->n_dims > 1 ? tensor->shape[1] : 1,
            row_bytes = cols * (int64_t)bl_dtype_bytes(spec->dtype), step = t->n_values / cols;

    for (int64_t row = 0, n; row < rows; row += n) {
        n = bl_min_i64(step, rows - row);
        BL_TRY(bl_trained_full_read(t->reader, tensor, row, row + n, t->values));
        BL_TRY(round_values(t, spec, n * cols));
        BL_TRY(bl_safetensors_writer_put(writer, index, row * row_bytes, t->rounded,
                                         (size_t)(n * row_bytes)));
    }
    return BL_OK;
}

static bl_status write_shard(void *user, size_t index, const char *path, json_t *entry)
{
    static const char *const metadata[] = {"format", "pt"};
    const trained *t = user;
    const bl_shard_plan *plan = &t->conversion.plans[index];
    bl_safetensors_writer *writer = NULL;
    bl_status st = BL_OK;

    (void)entry;
    BL_TRY(bl_safetensors_create(path, plan->specs, plan->n_specs, metadata, 1, &writer));
    for (size_t i = 0; i < plan->n_specs && st == BL_OK; i++) {
        bl_arch_tensor tensor;
        const char *name = plan->specs[i].name;
        if (find_tensor(t, name, &tensor))
            st = write_tensor(t, &tensor, &plan->specs[i], i, writer);
        else /* frozen, or of a larger model that this one is part of */
            st = bl_shard_copy_tensor(bl_safetensors_find(plan->source, name), i, writer);
    }
    if (st == BL_OK) return bl_safetensors_writer_commit(writer);
    bl_safetensors_writer_abort(writer);
    return st;
}

static bl_status change_config(void *user, const char *path, json_t *config)
{
    const trained *t = user;
    const char *key = json_object_get(config, "dtype") ? "dtype" : "torch_dtype";

    if (!t->options->is_f32) return BL_OK;
    return json_object_set_new(config, key, json_string("float32")) == 0
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "%s", path);
}

static bl_status write_readme(void *user, const json_t *manifest, char **text)
{
    const trained *t = user;
    (void)manifest;
    return bl_text_format(text, "%s", t->options->readme);
}

static bl_status write_all(trained *t)
{
    const bl_trained_options *o = t->options;

    BL_TRY(bl_conversion_open(&t->conversion, plan_shard));
    const bl_model_config *config = &t->conversion.config;
    BL_TRY(bl_trained_full_open(config, o->trained, o->checkpoint, o->n_ranks, &t->reader));
    t->n_values = bl_max_i64(PIECE_ELEMENTS, config->hidden_size);
    for (int p = 0; p < config->arch->n_projections; p++) {
        int64_t rows, cols;
        bl_projection_shape(config, p, &rows, &cols);
        t->n_values = bl_max_i64(t->n_values, cols);
    }
    t->values = malloc((size_t)t->n_values * sizeof *t->values);
    t->rounded = malloc((size_t)t->n_values * sizeof *t->values);
    if (!t->values || !t->rounded)
        return BL_FAIL(BL_ENOMEM, "%lld weights to write", (long long)t->n_values);
    json_object_set_new(t->conversion.settings, "checkpoint", json_string(o->checkpoint));
    json_object_set_new(t->conversion.settings, "model_dtype",
                        json_string(o->is_f32 ? "f32" : "stored"));
    return bl_conversion_run(&t->conversion);
}

bl_status bl_model_write_trained(const bl_trained_options *options)
{
    trained t = {.options = options};

    t.conversion = (bl_conversion){.source = options->source,
                                   .target = options->target,
                                   .manifest_name = BL_TRAIN_MANIFEST,
                                   .done = "trained",
                                   .settings = json_object(),
                                   .user = &t,
                                   .write_shard = write_shard,
                                   .change_config = change_config,
                                   .write_readme = write_readme};
    bl_status st = write_all(&t);
    free(t.values);
    free(t.rounded);
    bl_trained_full_close(t.reader);
    bl_conversion_close(&t.conversion);
    return st;
}
