/* SPDX-License-Identifier: Apache-2.0 */
/* ballast merge: a model and LoRA adapters in, one model out, with the share of the adapters that
 * rounding kept. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "convert/merge.h"
#include "train/train.h"

typedef struct merge_options {
    char *model, *output_dir;
    bl_string_list adapter, adapter_weights;
    bl_merge_format base_format; /* the names in the table are in the enums' order */
    bl_merge_rounding rounding;
    bl_merge_scales fp8_scales;
    bl_io_engine io_engine;
    int64_t seed, threads, max_seq_length;
    char *validation_file, *data_format;
} merge_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "Options", .type = BL_OPTION_##kind,                                   \
    .offset = offsetof(merge_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(model, PATH), .is_model = true, .required_by = BL_CLI_ANY,
     .help = "the base: a Hugging Face model directory"},
    {OPTION(adapter, LIST), .required_by = BL_CLI_ANY,
     .help = "PEFT adapter directories, separated by commas"},
    {OPTION(adapter_weights, LIST),
     .help = "a factor for each adapter, separated by commas; default 1"},
    {OPTION(output_dir, PATH), .required_by = BL_CLI_ANY,
     .help = "the merged model: a new or empty directory, or that of an interrupted merge"},
    {OPTION(base_format, ENUM), .names = "auto|bf16|f16|f32|" BL_FORMATS_MADE,
     .default_text = "auto",
     .help =
         "format of the merged projections; auto: the checkpoint's, bf16 for one in FP8 or 4 bits"},
    {OPTION(rounding, ENUM), .names = "auto|nearest|stochastic", .default_text = "auto",
     .help = "rounding to FP8 and 4 bits; auto: stochastic for a checkpoint in that format, else "
             "nearest"},
    {OPTION(fp8_scales, ENUM), .names = "new|base", .default_text = "new",
     .help = "scales of FP8 and 4 bits: of the merged weights, or those of the base"},
    {OPTION(seed, INT), .default_text = "42", .min = 0, .max = 9007199254740992.0,
     .help = "random seed: stochastic rounding"},
    {OPTION(validation_file, PATH),
     .help = "prints the loss of base, base with adapter, and merged model on this file"},
    {OPTION(data_format, STRING), .default_text = "auto",
     .help = "format of validation_file, as for `ballast eval`"},
    {OPTION(max_seq_length, INT), .default_text = "2048", .min = 1, .max = 16777216,
     .help = "tokens of a validation sequence at most"},
    {OPTION(io_engine, ENUM), .names = "auto|uring|pread", .default_text = "auto",
     .help = "engine for reading the base"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 4096,
     .help = "CPU threads"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

static bl_status read_adapters(const merge_options *values, bl_merge_adapter **out)
{
    size_t n = (size_t)values->adapter.n_items;
    bool has_weights = values->adapter_weights.n_items > 0;

    if (has_weights && values->adapter_weights.n_items != values->adapter.n_items)
        return BL_FAIL(BL_EUSAGE, "--adapter_weights: %lld factors for %zu adapters",
                       (long long)values->adapter_weights.n_items, n);
    *out = calloc(n + 1, sizeof **out);
    if (!*out) return BL_FAIL(BL_ENOMEM, "%zu adapters", n);
    for (size_t i = 0; i < n; i++) {
        (*out)[i] = (bl_merge_adapter){values->adapter.items[i], 1.0};
        if (!has_weights) continue;
        const char *text = values->adapter_weights.items[i];
        char *end;
        (*out)[i].weight = strtod(text, &end);
        if (end == text || *end || !isfinite((*out)[i].weight))
            return BL_FAIL(BL_EUSAGE, "--adapter_weights: %s: expected a number", text);
    }
    return BL_OK;
}

/* ---- losses ---- */

/* The loss of a model directory, with or without an adapter, as `ballast eval` measures it. */
static bl_status measure_loss(const merge_options *values, const char *model, const char *adapter,
                              const char *base_format, double *loss)
{
    char threads[24], length[24];
    const char *words[20];
    int n = 0;
    bl_train_config *config;
    bl_eval_result result;
    const char *pairs[][2] = {{"--model_name_or_path", model},
                              {"--validation_file", values->validation_file},
                              {"--data_format", values->data_format},
                              {"--max_seq_length", length},
                              {"--base_format", base_format},
                              {"--threads", threads},
                              {"--ranks", "1"},
                              {"--init_adapter", adapter}};

    snprintf(threads, sizeof threads, "%lld", (long long)values->threads);
    snprintf(length, sizeof length, "%lld", (long long)values->max_seq_length);
    for (size_t i = 0; i < BL_COUNT(pairs); i++) {
        if (!pairs[i][1]) continue;
        words[n++] = pairs[i][0];
        words[n++] = pairs[i][1];
    }
    BL_TRY(bl_train_config_load(BL_CONFIG_EVAL, NULL, n, (char *const *)words, &config));
    bl_status st = bl_eval_run(config, NULL, &result);
    *loss = result.loss;
    bl_train_config_free(config);
    return st;
}

/* On the base as it is stored, and the merged model in its format. An adapter alone, with weight 1,
 * can be measured on the base; a mixture has no such loss. */
static bl_status print_losses(const merge_options *values, const bl_merge_adapter *adapters)
{
    double base, adapted = NAN, merged;
    bool has_adapted = values->adapter.n_items == 1 && adapters[0].weight == 1.0;

    BL_TRY(measure_loss(values, values->model, NULL, "stored", &base));
    if (has_adapted)
        BL_TRY(measure_loss(values, values->model, adapters[0].dir, "stored", &adapted));
    BL_TRY(measure_loss(values, values->output_dir, NULL, "stored", &merged));
    printf("{\"loss_base\":%.12g,", base);
    if (has_adapted) printf("\"loss_base_and_adapter\":%.12g,", adapted);
    printf("\"loss_merged\":%.12g}\n", merged);
    fflush(stdout);
    return BL_OK;
}

/* ---- the command ---- */

static void report(const merge_options *values, const bl_merge_result *r)
{
    bl_log_info("%s: %lld files, %lld of them finished before; %.1f MB became %.1f MB",
                values->output_dir, (long long)r->n_files, (long long)r->n_kept,
                (double)r->n_bytes_read * 1e-6, (double)r->n_bytes_written * 1e-6);
    if (isnan(r->kept))
        bl_log_warning("the adapter changes nothing: its delta is zero");
    else
        bl_log_info(
            "%lld matrices, delta %.3f %% of the weights: %.2f %% of it kept, error %.2f %%",
            (long long)r->n_matrices, 100 * r->delta, 100 * r->kept, 100 * r->error);
}

static bl_status merge(merge_options *values)
{
    bl_merge_adapter *adapters = NULL;
    bl_merge_result result;
    bl_merge_options options = {.source = values->model,
                                .target = values->output_dir,
                                .n_adapters = (size_t)values->adapter.n_items,
                                .format = values->base_format,
                                .rounding = values->rounding,
                                .scales = values->fp8_scales,
                                .seed = (uint64_t)values->seed,
                                .io_engine = values->io_engine};
    bl_status st;

    if (values->threads == BL_OPTION_AUTO) values->threads = bl_cores_usable();
    BL_TRY_GOTO(st, done, read_adapters(values, &adapters));
    options.adapters = adapters;
    BL_TRY_GOTO(st, done, bl_pool_create((int)values->threads, &options.pool));
    BL_TRY_GOTO(st, done, bl_model_merge(&options, &result));
    report(values, &result);
    if (values->validation_file) BL_TRY_GOTO(st, done, print_losses(values, adapters));
    if (result.kept < BL_MERGE_MIN_KEPT)
        bl_log_warning("only %.1f %% of the adapter was kept, %.1f %% was lost in rounding%s",
                       100 * result.kept, 100 * (1 - result.kept),
                       options.format < BL_MERGE_FP8_ROW
                           ? ": compare the losses (--validation_file) before serving it"
                           : ": use --rounding stochastic or --base_format bf16");
done:
    bl_pool_destroy(options.pool);
    free(adapters);
    return st;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    merge_options values;
    uint8_t origins[BL_COUNT(table)];
    const char *words[1];
    int n_words;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 0, words, &n_words));
    st = merge(&values);
done:
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_merge = {
    .name = "merge",
    .arguments = "--model DIR --adapter DIR[,DIR...] --output_dir DIR [--key value ...]",
    .summary = "add adapters to a model: write a model directory",
    .details =
        "Writes W + sum of weight alpha/r B A for every projection, rounded once, as a Hugging\n"
        "Face directory with the base's tokenizer and other files. Prints the share of the\n"
        "adapters that rounding kept; ballast_merge.json in the output has it for each matrix.\n"
        "An interrupted merge is resumed: finished files are verified and kept. docs/formats.md\n",
    .print_options = print_options,
    .is_job = true,
    .run = run,
};
