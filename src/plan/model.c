/* SPDX-License-Identifier: Apache-2.0 */
/* model.c -- the model of a plan from a preset's name or from headers, with the formats that
 * training would choose. */
#include "plan/model.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "arch/table.h"
#include "base/nearest.h"
#include "base/sizes.h"

/* How a checkpoint has its projections. */
typedef enum storage {
    ALL_BF16,
    FP8_MLP, /* gate, up and down in FP8 with row scales, except the first and the last layer */
    FP8_ALL, /* all projections in FP8, a scale each */
    MXFP4_EXPERTS
} storage;

/* shape: a name of bl_model_config_preset. */
static const struct {
    const char *name, *shape;
    storage storage;
} presets[] = {
    {.name = "llama-2-7b", .shape = "llama2-7b"},
    {.name = "llama-2-13b", .shape = "llama2-13b"},
    {.name = "llama-2-70b", .shape = "llama2-70b"},
    {.name = "llama-3-8b", .shape = "llama3-8b"},
    {.name = "llama-3-70b", .shape = "llama3-70b"},
    {.name = "llama-3.1-8b", .shape = "llama3.1-8b"},
    {.name = "llama-3.1-70b", .shape = "llama3.1-70b"},
    {.name = "llama-3.1-405b", .shape = "llama3.1-405b"},
    {.name = "llama-3.1-405b-fp8", .shape = "llama3.1-405b", .storage = FP8_MLP},
    {.name = "llama-3.2-1b", .shape = "llama3.2-1b"},
    {.name = "llama-3.2-3b", .shape = "llama3.2-3b"},
    {.name = "llama-3.3-70b", .shape = "llama3.3-70b"},
    {.name = "hermes-3-405b", .shape = "llama3.1-405b"},
    {.name = "mistral-7b-v0.3", .shape = "mistral-7b-v0.3"},
    {.name = "mistral-large-123b", .shape = "mistral-large-123b"},
    {.name = "devstral-2-123b", .shape = "devstral-2-123b", .storage = FP8_ALL},
    {.name = "mistral-medium-3.5-128b", .shape = "mistral-medium-3.5-128b", .storage = FP8_ALL},
    {.name = "qwen2.5-7b", .shape = "qwen2.5-7b"},
    {.name = "qwen2.5-32b", .shape = "qwen2.5-32b"},
    {.name = "qwen2.5-72b", .shape = "qwen2.5-72b"},
    {.name = "qwen3-8b", .shape = "qwen3-8b"},
    {.name = "qwen3-14b", .shape = "qwen3-14b"},
    {.name = "qwen3-32b", .shape = "qwen3-32b"},
    {.name = "qwen3-30b-a3b", .shape = "qwen3-30b-a3b"},
    {.name = "qwen3-235b-a22b", .shape = "qwen3-235b-a22b"},
    {.name = "mixtral-8x7b", .shape = "mixtral-8x7b"},
    {.name = "mixtral-8x22b", .shape = "mixtral-8x22b"},
    {.name = "gpt-oss-20b", .shape = "gpt-oss-20b", .storage = MXFP4_EXPERTS},
    {.name = "gpt-oss-120b", .shape = "gpt-oss-120b", .storage = MXFP4_EXPERTS},
    {.name = "seed-oss-36b", .shape = "seed-oss-36b"},
    {.name = "granite-3.1-2b", .shape = "granite-3.1-2b"},
    {.name = "granite-3.1-8b", .shape = "granite-3.1-8b"},
    {.name = "phi-3-mini", .shape = "phi3-mini"},
    {.name = "phi-3-medium", .shape = "phi3-medium"},
    {.name = "phi-4-14b", .shape = "phi4"},
    {.name = "olmo-2-7b", .shape = "olmo2-7b"},
    {.name = "olmo-2-13b", .shape = "olmo2-13b"},
    {.name = "olmo-2-32b", .shape = "olmo2-32b"},
    {.name = "falcon-7b", .shape = "falcon-7b"},
    {.name = "falcon-40b", .shape = "falcon-40b"},
    {.name = "falcon-180b", .shape = "falcon-180b"},
};

const char *bl_plan_model_name(size_t i)
{
    return i < BL_COUNT(presets) ? presets[i].name : NULL;
}

/* "Llama-3.1-405B" and "llama3.1-405b" are the same. */
static bool is_same_name(const char *a, const char *b)
{
    for (;; a++, b++) {
        while (*a == '-' || *a == '_') a++;
        while (*b == '-' || *b == '_') b++;
        if (tolower((unsigned char)*a) != tolower((unsigned char)*b)) return false;
        if (!*a) return true;
    }
}

static bl_status unknown(const char *name)
{
    const char *names[BL_COUNT(presets)];
    char list[1024] = "";

    for (size_t i = 0; i < BL_COUNT(presets); i++) {
        names[i] = presets[i].name;
        size_t at = strlen(list);
        snprintf(list + at, sizeof list - at, "%s%s", i > 0 ? ", " : "", names[i]);
    }
    const char *nearest = bl_text_nearest(name, names, BL_COUNT(names));
    if (nearest)
        return BL_FAIL(BL_EUSAGE, "model %s: no such model or folder; did you mean %s?", name,
                       nearest);
    return BL_FAIL(BL_EUSAGE, "model %s: no such model or folder; known are %s", name, list);
}

static bl_scale_kind stored_scale(storage how, int64_t layer, int64_t n_layers,
                                  const bl_projection *projection)
{
    bool is_mlp = projection->matrix >= BL_GATE_UP;
    if (how == FP8_ALL) return BL_SCALE_TENSOR;
    if (how == MXFP4_EXPERTS) return is_mlp ? BL_SCALE_MXFP4 : BL_SCALE_NONE;
    return how == FP8_MLP && is_mlp && layer > 0 && layer < n_layers - 1 ? BL_SCALE_ROW
                                                                         : BL_SCALE_NONE;
}

/* 4 bits stay as they are, unless another format is asked for. */
static bl_status choose_format(bl_base_format choice, bl_scale_kind scale, const char *what,
                               bl_format *out)
{
    bl_format made;

    *out = BL_FORMAT_MXFP4;
    if (scale == BL_SCALE_MXFP4 && !bl_format_parse(bl_base_format_name(choice), &made))
        return BL_OK;
    return bl_base_format_choose(choice, scale, BL_BF16, what, out);
}

/* Bytes of 32 stored weights. */
static int64_t stored_bytes(bl_scale_kind scale)
{
    return scale == BL_SCALE_MXFP4 ? 17 : scale == BL_SCALE_NONE ? 64 : 32;
}

static bl_status choose_formats(size_t idx, bl_base_format choice, bl_plan_model *out)
{
    const bl_model_config *c = &out->config;
    int64_t tables = (c->tie_word_embeddings ? 1 : 2) * c->vocab_size * c->hidden_size;
    int n = c->arch->n_projections; /* per layer */

    out->formats = calloc(bl_model_format_count(c), sizeof *out->formats);
    if (!out->formats) return BL_FAIL(BL_ENOMEM, "formats of %s", out->name);
    out->stored.n_bytes = tables * 2;
    for (int64_t i = 0; i < c->n_layers * n; i++) {
        int64_t rows, cols;
        const bl_projection *projection = &c->arch->projections[i % n];
        if (!bl_model_has_format(c, (size_t)i)) continue;
        bl_scale_kind scale = stored_scale(presets[idx].storage, i / n, c->n_layers, projection);
        bl_projection_shape(c, (int)(i % n), &rows, &cols);
        BL_TRY(choose_format(choice, scale, bl_projection_name(projection), &out->formats[i]));
        bl_base_formats_count(&out->base_formats, scale, BL_BF16, out->formats[i]);
        int64_t row_bytes = cols * stored_bytes(scale) / 32;
        out->stored.n_bytes += rows * row_bytes;
        out->stored.row_bytes = bl_max_i64(out->stored.row_bytes, row_bytes);
    }
    out->stored.is_in_blocks = bl_format_describe(out->formats[0])->group_rows > 1;
    return BL_OK;
}

static bl_status open_preset(size_t idx, bl_base_format choice, bl_plan_model *out)
{
    out->embedding_dtype = out->head_dtype = BL_BF16;
    snprintf(out->name, sizeof out->name, "%s", presets[idx].name);
    BL_TRY(bl_model_config_preset(presets[idx].shape, &out->config));
    return choose_formats(idx, choice, out);
}

static bl_status open_folder(const char *dir, bl_base_format choice, bl_plan_model *out)
{
    bl_model *model;

    BL_TRY(bl_model_open_headers(dir, choice, 1, &model));
    snprintf(out->name, sizeof out->name, "%s", dir);
    out->config = model->config;
    out->stored = bl_model_measure_stored(model);
    out->formats = model->formats;
    model->formats = NULL; /* it is ours now */
    out->base_formats = model->base_formats;
    out->embedding_dtype = model->embedding_dtype;
    out->head_dtype = model->head_dtype;
    bl_model_close(model);
    return BL_OK;
}

/* Whether `name` has all letters of the preset's in a row, except for hyphens and case:
 * "Meta-Llama-3.1-8B-Instruct". */
static bool names_preset(const char *name, const char *preset)
{
    for (; *name; name++) {
        const char *a = name, *b = preset;
        while (*b) {
            if (*a == '-' || *a == '_')
                a++;
            else if (*b == '-')
                b++;
            else if (tolower((unsigned char)*a) == *b)
                a++, b++;
            else
                break;
        }
        if (!*b) return true;
    }
    return false;
}

/* After a path at which nothing is: the preset that its last part names, the longest. */
static bl_status suggest(bl_status st, const char *path)
{
    const char *base = strrchr(path, '/'), *best = NULL;
    bl_error error;

    base = base ? base + 1 : path;
    for (size_t i = 0; i < BL_COUNT(presets); i++)
        if (names_preset(base, presets[i].name) &&
            (!best || strlen(presets[i].name) > strlen(best)))
            best = presets[i].name;
    if (!best || access(path, F_OK) == 0) return st;
    bl_error_save(&error, st);
    return BL_FAIL(st, "%s; to plan without the files: --model %s", error.text, best);
}

bl_status bl_plan_model_open(const char *name, bl_base_format choice, bl_plan_model *out)
{
    size_t i = 0;

    *out = (bl_plan_model){0};
    bool is_path = strchr(name, '/') || access(name, F_OK) == 0;
    while (i < BL_COUNT(presets) && !is_same_name(presets[i].name, name)) i++;
    if (!is_path && i == BL_COUNT(presets)) return unknown(name);
    bl_status st = is_path ? open_folder(name, choice, out) : open_preset(i, choice, out);
    if (st != BL_OK && is_path) st = suggest(st, name);
    if (st != BL_OK) bl_plan_model_close(out);
    return st;
}

void bl_plan_model_close(bl_plan_model *model)
{
    free(model->formats);
    model->formats = NULL;
}
