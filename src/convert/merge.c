/* SPDX-License-Identifier: Apache-2.0 */
/* merge.c -- a merge: its adapters, the settings that a resumed run must share, config.json, the
 * README and the figures of all matrices. */
#include "convert/merge.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trained/peft.h"
#include "trained/terms.h"
#include "base/json.h"
#include "base/sizes.h"
#include "convert/merge_internal.h"
#include "store/checkpoint.h"

/* ---- the adapters ---- */

/* Whole modules of an adapter replace the model's: they cannot be weighted or summed. */
static bl_status choose_modules(bl_merge *m, size_t i)
{
    const bl_merge_adapter *adapter = &m->options->adapters[i];
    const bl_model_config *config = &m->conversion.config;
    const bl_peft_config *peft = bl_peft_get_config(m->terms[i].adapter);
    bl_saved_modules *modules = &m->terms[i].modules;

    BL_TRY(bl_saved_modules_of_peft(peft, config, adapter->dir, modules));
    if (modules->names.n == 0) return BL_OK;
    if (m->options->n_adapters > 1 || adapter->weight != 1)
        return BL_FAIL(BL_EUSAGE,
                       "%s: modules_to_save are whole modules: merge this adapter alone, with "
                       "weight 1",
                       adapter->dir);
    if (config->tie_word_embeddings && bl_saved_modules_have_table(modules))
        return BL_FAIL(BL_EUSAGE,
                       "%s: it has a separate embedding or head, and this model's are one weight "
                       "(tie_word_embeddings): use it as an adapter",
                       adapter->dir);
    return BL_OK;
}

/* PEFT would add the terms of the embedding and the head to one tied weight, which is not what the
 * adapter computes. */
static bl_status check_tables(const bl_merge *m, const char *dir, const bl_lora_layout *layout)
{
    if (layout->n_table_floats == 0) return BL_OK;
    if (m->conversion.config.tie_word_embeddings)
        return BL_FAIL(BL_EUSAGE,
                       "%s: a LoRA term of the embedding or the head cannot be merged into a model "
                       "that ties them (tie_word_embeddings); use the adapter itself",
                       dir);
    return bl_adapter_terms_check_base(m->conversion.model, &m->conversion.config, dir);
}

static bl_status open_adapters(bl_merge *m)
{
    const bl_merge_options *o = m->options;
    bl_peft_base base = bl_lora_peft_base(&m->conversion.config);
    bl_lora_options lora;
    bl_lora_layout layout;

    for (size_t i = 0; i < o->n_adapters; i++) {
        BL_TRY(bl_peft_open(o->adapters[i].dir, &base, &m->terms[i].adapter));
        bl_lora_options_of_peft(bl_peft_get_config(m->terms[i].adapter), &lora);
        bl_lora_layout_init(&m->conversion.config, &lora, &layout);
        m->terms[i].scale = o->adapters[i].weight * (double)layout.scale;
        for (int p = 0; p < BL_MAX_PROJECTIONS; p++)
            m->terms[i].scale_of[p] = o->adapters[i].weight * (double)layout.scale_of[p];
        BL_TRY(check_tables(m, o->adapters[i].dir, &layout));
        BL_TRY(choose_modules(m, i));
    }
    return BL_OK;
}

static bl_status describe_adapter(const bl_merge_adapter *adapter, json_t *list)
{
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors"};
    json_t *entry = json_pack("{s:s, s:f}", "dir", adapter->dir, "weight", adapter->weight);
    bl_checkpoint_file file;
    char *path = NULL, hash[17];
    bl_status st = BL_OK;

    if (!entry) return BL_FAIL(BL_EUSAGE, "%s: the name is not UTF-8", adapter->dir);
    json_array_append_new(list, entry);
    for (size_t i = 0; st == BL_OK && i < BL_COUNT(names); i++) {
        BL_TRY(bl_path_join(adapter->dir, names[i], &path));
        st = bl_checkpoint_describe_file(path, &file);
        snprintf(hash, sizeof hash, "%016" PRIx64, st == BL_OK ? file.xxh3_64 : 0);
        json_object_set_new(entry, names[i], json_string(hash));
        free(path);
    }
    return st;
}

static const char *format_name(const bl_merge *m)
{
    return m->format == BL_FORMAT_COUNT ? "auto" : bl_format_name(m->format);
}

/* Whether a format was chosen, and has scales. */
static bool writes_scales(const bl_merge *m)
{
    return m->format != BL_FORMAT_COUNT && bl_format_has_scales(m->format);
}

static bl_status describe_settings(bl_merge *m)
{
    const bl_merge_options *o = m->options;
    json_t *adapters = json_array();
    bool has_scales = writes_scales(m);
    bl_status st = BL_OK;

    json_object_set_new(m->conversion.settings, "base_format", json_string(format_name(m)));
    if (has_scales) {
        json_object_set_new(m->conversion.settings, "rounding",
                            json_string(m->is_stochastic ? "stochastic" : "nearest"));
        json_object_set_new(m->conversion.settings, "fp8_scales",
                            json_string(o->scales == BL_MERGE_SCALES_BASE ? "base" : "new"));
    }
    if (has_scales && m->is_stochastic)
        json_object_set_new(m->conversion.settings, "seed", json_integer((json_int_t)o->seed));
    json_object_set_new(m->conversion.settings, "adapters", adapters);
    for (size_t i = 0; st == BL_OK && i < o->n_adapters; i++)
        st = describe_adapter(&o->adapters[i], adapters);
    return st;
}

static void close_term(bl_merge_term *term)
{
    bl_peft_close(term->adapter);
    bl_saved_modules_free(&term->modules);
}

/* ---- what is written besides the shards ---- */

static bl_status change_config(void *merge, const char *path, json_t *config)
{
    const bl_merge *m = merge;
    bool has_scales = writes_scales(m);

    if (!has_scales && m->is_quantized_source) json_object_del(config, "quantization_config");
    if (!has_scales && m->format != BL_FORMAT_COUNT) {
        const char *key = json_object_get(config, "dtype") ? "dtype" : "torch_dtype";
        json_object_set_new(config, key,
                            json_string(bl_torch_dtype_name(bl_format_describe(m->format)->dtype)));
    }
    if (!has_scales) return BL_OK;
    json_t *added = bl_quantization_config(m->format, m->conversion.config.arch);
    return added && json_object_set_new(config, "quantization_config", added) == 0
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "%s", path);
}

static double real_of(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

/* Of the matrices of all shards that are a projection of the architecture; -1: of all. */
static int64_t add_matrices(const bl_arch *arch, const json_t *manifest, int projection,
                            bl_merge_sums *sums)
{
    const char *shard, *name;
    json_t *entry, *note;
    int64_t n = 0, layer;

    json_object_foreach(json_object_get(manifest, "finished"), shard, entry)
    {
        json_object_foreach(json_object_get(entry, "matrices"), name, note)
        {
            if (projection >= 0 && bl_arch_find_projection(arch, name, &layer) != projection)
                continue;
            bl_merge_sums_add(sums,
                              &(bl_merge_sums){real_of(note, "dot"), real_of(note, "delta"),
                                               real_of(note, "error"), real_of(note, "base")});
            n++;
        }
    }
    return n;
}

static void print_row(FILE *out, const char *title, int64_t n, const bl_merge_sums *sums)
{
    if (n == 0 || sums->delta == 0) return;
    fprintf(out, "| %s | %" PRId64 " | %.3f %% | %.2f %% | %.2f %% |\n", title, n,
            100 * sqrt(sums->delta / sums->base), 100 * sums->dot / sums->delta,
            100 * sqrt(sums->error / sums->delta));
}

static void print_readme(FILE *out, const bl_merge *m, const json_t *manifest)
{
    const bl_merge_options *o = m->options;
    const bl_arch *arch = m->conversion.config.arch;
    const char *rounding = bl_json_text(json_object_get(manifest, "rounding"));

    fprintf(out,
            "---\nbase_model: %s\nbase_model_relation: merge\n"
            "pipeline_tag: text-generation\n---\n# %s, merged with %zu adapter%s\n\n"
            "Made by `ballast merge` (format: %s%s%s).\n\n| adapter | weight |\n|---|---|\n",
            o->source, o->source, o->n_adapters, o->n_adapters == 1 ? "" : "s", format_name(m),
            rounding ? ", rounding: " : "", rounding ? rounding : "");
    for (size_t i = 0; i < o->n_adapters; i++)
        fprintf(out, "| %s | %g |\n", o->adapters[i].dir, o->adapters[i].weight);
    fprintf(out, "\nShare of the delta d that rounding kept, <merged - W, d> / <d, d>, and its "
                 "error, |merged - W - d| / |d|:\n\n"
                 "| matrices | number | size of d, of W | kept | error |\n|---|---|---|---|---|\n");
    for (int p = 0; p < arch->n_projections; p++) {
        bl_merge_sums sums = {0};
        int64_t n = add_matrices(arch, manifest, p, &sums);
        print_row(out, bl_projection_name(&arch->projections[p]), n, &sums);
    }
    bl_merge_sums all = {0};
    int64_t n = add_matrices(arch, manifest, -1, &all);
    print_row(out, "all", n, &all);
    fprintf(out, "\n`%s` has the figures of each matrix.\n", BL_MERGE_MANIFEST);
}

static bl_status write_readme(void *user, const json_t *manifest, char **text)
{
    size_t n_bytes;
    FILE *out = open_memstream(text, &n_bytes);

    if (!out) return BL_FAIL(BL_ENOMEM, "the README");
    print_readme(out, user, manifest);
    bool failed = ferror(out) != 0;
    return fclose(out) != 0 || failed ? BL_FAIL(BL_ENOMEM, "the README") : BL_OK;
}

/* ---- the whole ---- */

static void fill_result(const bl_merge *m, bl_merge_result *out)
{
    const bl_quantize_result *r = &m->conversion.result;
    bl_merge_sums sums = {0};

    *out = (bl_merge_result){
        .n_files = r->n_files,
        .n_kept = r->n_kept,
        .n_bytes_read = r->n_bytes_read,
        .n_bytes_written = r->n_bytes_written,
        .n_matrices = add_matrices(m->conversion.config.arch, m->conversion.manifest, -1, &sums)};
    out->kept = sums.dot / sums.delta;
    out->error = sqrt(sums.error / sums.delta);
    out->delta = sqrt(sums.delta / sums.base);
}

/* Rounded to nearest, most weights on the target's own grid return to where they were (12 % of a
 * delta of 0.22 % of the weights is kept); on another grid nearest rounding keeps it. */
static bl_status choose_rounding(bl_merge *m)
{
    const bl_hf_model *model = m->conversion.model;
    bl_merge_rounding rounding = m->options->rounding;
    bl_hf_weight weight;
    bool is_on_grid = false, keeps_experts = bl_merge_keeps_experts(m);

    for (size_t i = 0; i < bl_hf_count(model); i++) {
        const bl_stored_tensor *tensor = bl_hf_quantized_at(model, i);
        if (!tensor || keeps_experts) continue;
        m->is_quantized_source = true;
        BL_TRY(bl_hf_get_weight(model, tensor->name, &weight));
        is_on_grid = is_on_grid || bl_merge_loaded_format(&weight) == m->format;
    }
    m->is_stochastic =
        rounding == BL_MERGE_STOCHASTIC || (rounding == BL_MERGE_ROUNDING_AUTO && is_on_grid);
    return BL_OK;
}

static bl_status merge(bl_merge *m)
{
    BL_TRY(bl_conversion_open(&m->conversion, bl_merge_plan_shard));
    BL_TRY(open_adapters(m));
    BL_TRY(choose_rounding(m));
    BL_TRY(describe_settings(m));
    return bl_conversion_run(&m->conversion);
}

bl_status bl_model_merge(const bl_merge_options *options, bl_merge_result *out)
{
    static const bl_format formats[] = {
        [BL_MERGE_AUTO] = BL_FORMAT_COUNT,
        [BL_MERGE_BF16] = BL_FORMAT_BF16,
        [BL_MERGE_F16] = BL_FORMAT_F16,
        [BL_MERGE_F32] = BL_FORMAT_F32,
    };
    bl_merge m = {.options = options,
                  .format =
                      options->format < BL_MERGE_FP8_ROW
                          ? formats[options->format]
                          : bl_format_in(BL_FORMATS_MADE, (int)options->format - BL_MERGE_FP8_ROW)};

    *out = (bl_merge_result){0};
    m.conversion = (bl_conversion){
        .source = options->source,
        .target = options->target,
        .manifest_name = BL_MERGE_MANIFEST,
        .done = "merged",
        .settings = json_object(),
        .user = &m,
        .write_shard = bl_merge_write_shard,
        .change_config = change_config,
        .write_readme = write_readme,
    };
    m.terms = calloc(options->n_adapters + 1, sizeof *m.terms);
    bl_status st = m.terms ? merge(&m) : BL_FAIL(BL_ENOMEM, "%zu adapters", options->n_adapters);
    if (st == BL_OK) fill_result(&m, out);
    for (size_t i = 0; m.terms && i < options->n_adapters; i++) close_term(&m.terms[i]);
    free(m.terms);
    bl_conversion_close(&m.conversion);
    return st;
}

/* ---- without adapters ---- */

static void add_kind(const bl_merge *m, int projection, const char *name, bl_quantize_result *out)
{
    bl_merge_sums sums = {0};
    int64_t n = add_matrices(m->conversion.config.arch, m->conversion.manifest, projection, &sums);

    if (n == 0 || out->n_kinds == BL_QUANTIZE_KINDS) return;
    snprintf(out->kinds[out->n_kinds].name, BL_QUANTIZE_KIND_BYTES, "%s", name);
    out->kinds[out->n_kinds].n_matrices = n;
    out->kinds[out->n_kinds++].error = sqrt(sums.error / sums.base);
}

static bl_status convert(bl_merge *m, bl_status (*check)(bl_merge *), bl_quantize_result *out)
{
    BL_TRY(bl_conversion_open(&m->conversion, bl_merge_plan_shard));
    BL_TRY(check(m));
    BL_TRY(bl_conversion_run(&m->conversion));
    *out = m->conversion.result;
    const bl_arch *arch = m->conversion.config.arch;
    for (int p = 0; p < arch->n_projections; p++)
        add_kind(m, p, bl_projection_name(&arch->projections[p]), out);
    add_kind(m, -1, "", out);
    return BL_OK;
}

bl_status bl_merge_without_adapters(const bl_quantize_options *options, const char *manifest,
                                    const char *done, bl_status (*check)(bl_merge *),
                                    bl_quantize_result *out)
{
    const bl_merge_options merge = {.source = options->source,
                                    .target = options->target,
                                    .io_engine = options->io_engine,
                                    .pool = options->pool};
    bl_merge m = {
        .options = &merge, .format = options->format, .largest_scales = options->largest_scales};

    m.conversion = (bl_conversion){
        .source = options->source,
        .target = options->target,
        .manifest_name = manifest,
        .done = done,
        .settings = json_pack("{s:s}", "base_format", bl_format_name(options->format)),
        .hashes_source = true,
        .user = &m,
        .write_shard = bl_merge_write_shard,
        .change_config = change_config,
    };
    if (bl_format_is_packed(options->format))
        json_object_set_new(m.conversion.settings, "base_format_scales",
                            json_string(options->largest_scales ? "largest" : "least_squares"));
    *out = (bl_quantize_result){0};
    bl_status st = convert(&m, check, out);
    bl_conversion_close(&m.conversion);
    return st;
}
