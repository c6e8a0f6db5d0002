/* SPDX-License-Identifier: Apache-2.0 */
/* config.c -- a configuration is bound to the table of keys, read, resolved (auto, adapter,
 * machine), validated; all problems are reported together. */
#include "config/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/nearest.h"
#include "base/sizes.h"
#include "arch/table.h"
#include "config/internal.h"
#include "config/table_internal.h"

/* Options write enums as int. */
_Static_assert(sizeof(bl_data_format) == sizeof(int) && sizeof(bl_adapter_dtype) == sizeof(int),
               "enums are ints");

bl_options config_bind(bl_config_command command, const bl_train_config *config)
{
    return (bl_options){.table = bl_train_options,
                        .n_options = bl_train_n_options,
                        .aliases = bl_train_aliases,
                        .n_aliases = bl_train_n_aliases,
                        .command = command,
                        .values = (bl_train_config *)config,
                        .origins = ((bl_train_config *)config)->source.origins};
}

void config_resolve_saving(bl_train_config *config)
{
    if (config->save_total_limit != 1) return;
    bl_log_warning(
        "save_total_limit 1: two checkpoints are kept, so that one is whole at any moment");
    config->save_total_limit = 2;
}

bl_status config_resolve(bl_config_command command, bl_train_config *config)
{
    bl_gpu_info gpu;

    BL_TRY(bl_config_choose_device(&config->device, &config->compute_dtype, &gpu));
    BL_TRY(config_place_ranks(config, gpu.n_gpus));
    if (config->shard_size == BL_OPTION_AUTO) config->shard_size = config->ranks;
    config_resolve_full(config);
    if (command == BL_CONFIG_TRAIN) config_resolve_saving(config);
    return BL_OK;
}

/* For a machine that is described, not at hand. */
static bl_status resolve_for(const bl_config_machine *machine, bl_train_config *c)
{
    if (c->device == BL_CONFIG_DEVICE_AUTO)
        c->device = machine->has_gpus ? BL_CONFIG_DEVICE_CUDA : BL_CONFIG_DEVICE_CPU;
    if ((c->device == BL_CONFIG_DEVICE_CUDA) != machine->has_gpus)
        return BL_FAIL(BL_EUSAGE, "device %s: the machine of the plan has %s",
                       machine->has_gpus ? "cpu" : "cuda", machine->has_gpus ? "GPUs" : "no GPU");
    config_arithmetic has = {machine->gpu, machine->capability, machine->cpu_bf16};
    BL_TRY(config_choose_dtype(c->device, &has, &c->compute_dtype));
    if (c->ranks == BL_OPTION_AUTO) c->ranks = machine->n_ranks;
    if (c->threads == BL_OPTION_AUTO)
        c->threads = bl_max_i64(
            1, machine->n_cores / bl_max_i64(1, bl_min_i64(c->ranks, machine->n_ranks_on_host)));
    if (c->shard_size == BL_OPTION_AUTO) c->shard_size = c->ranks;
    config_resolve_full(c);
    return BL_OK;
}

/* All problems of a file: a line each, and the failure counts them. One problem is the failure. */
static bl_status report_rejected(const bl_options *options, const char *path, bl_status st)
{
    bl_string_list *rejected = &options->report->rejected;

    if (rejected->n_items == 0 || (st != BL_OK && st != BL_EUSAGE)) return st;
    if (st == BL_EUSAGE) BL_TRY(bl_string_list_add(rejected, bl_error_text()));
    if (rejected->n_items == 1) return BL_FAIL(BL_EUSAGE, "%s", rejected->items[0]);
    for (int64_t i = 0; i < rejected->n_items; i++) bl_log_problem(rejected->items[i]);
    return BL_FAIL(BL_EUSAGE, "%s: %lld problems, listed above", path,
                   (long long)rejected->n_items);
}

/* One line, however many there are. */
static bl_status warn_of_ignored(const bl_string_list *ignored)
{
    char *text;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);

    if (!out) return BL_FAIL(BL_ENOMEM, "list of keys");
    for (int64_t i = 0; i < ignored->n_items; i++)
        fprintf(out, "%s%s", i ? ", " : "", ignored->items[i]);
    bl_status st = fclose(out) ? BL_FAIL(BL_ENOMEM, "list of keys") : BL_OK;
    if (st == BL_OK && ignored->n_items > 0)
        bl_log_warning("keys of other programs, no effect here: %s", text);
    free(text);
    return st;
}

static bl_status read_file(const bl_options *options, const char *yaml_path,
                           bl_train_config *config)
{
    bl_status st = bl_options_read_yaml(options, yaml_path);
    BL_TRY(report_rejected(options, yaml_path, st));
    config->source.file = strdup(yaml_path);
    return config->source.file ? BL_OK : BL_FAIL(BL_ENOMEM, "path %s", yaml_path);
}

static bl_status read_words(bl_options *options, const char *yaml_path, int argc, char *const *argv,
                            config_choice *choice, bl_train_config *config)
{
    const char *words[CONFIG_MAX_FILES] = {NULL};
    int n_words = 0, most = yaml_path ? 0 : choice ? CONFIG_MAX_FILES : 1;

    BL_TRY(bl_options_read_line(options, argc, argv, most, words, &n_words));
    if (choice) choice->n_files = n_words;
    if (n_words > 0) yaml_path = words[choice ? choice->file : 0];
    if (yaml_path) BL_TRY(read_file(options, yaml_path, config));
    return warn_of_ignored(&options->report->ignored);
}

bl_status config_read_file(const char *yaml_path, bl_train_config *config)
{
    bl_options options = config_bind(BL_CONFIG_TRAIN, config);
    bl_options_report report = {.given = {0}};

    options.report = &report;
    bl_status st = read_file(&options, yaml_path, config);
    if (st == BL_OK) st = warn_of_ignored(&report.ignored);
    bl_options_report_clear(&report);
    return st;
}

/* Reads the file and the command line. needs_all: with all keys that the command requires. */
static bl_status read_given(bl_config_command command, bool needs_all, const char *yaml_path,
                            int argc, char *const *argv, config_choice *choice,
                            bl_train_config *config)
{
    bl_options options = config_bind(command, config);
    bl_options_report report = {.given = {0}};

    options.report = &report;
    options.sweep = choice ? &choice->sweep : NULL;
    bl_status st = bl_options_init(&options);
    if (st == BL_OK) st = read_words(&options, yaml_path, argc, argv, choice, config);
    bl_options_report_clear(&report);
    if (st != BL_OK || !needs_all) return st;
    if (argc == 0 && !config->source.file)
        return BL_FAIL(BL_EUSAGE,
                       "missing configuration; usage: ballast %s; `ballast %s --help` lists the "
                       "keys, `ballast config` converts other programs' files",
                       command == BL_CONFIG_TRAIN ? "train CONFIG.yaml [--key value ...]"
                                                  : "eval --model DIR --validation_file FILE",
                       command == BL_CONFIG_TRAIN ? "train" : "eval");
    return config->queue ? config_check_base(config) : bl_options_check_required(&options);
}

enum { MAX_TARGET_NAMES = 64 };

static bl_status refuse_target(const char *name, const char *const *known, size_t n_known)
{
    const char *nearest = bl_text_nearest(name, known, n_known);
    char list[512] = "";
    size_t used = 0;

    for (size_t i = 0; i < n_known && used < sizeof list; i++)
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", known[i]);
    return BL_FAIL(BL_EUSAGE, "lora_target_modules: '%s' is not one of %s%s%s%s", name, list,
                   nearest ? "; did you mean " : "", nearest ? nearest : "", nearest ? "?" : "");
}

/* Whether the model has the layers that a path names is not known yet. */
static bl_status validate_targets(const bl_string_list *targets)
{
    const char *known[MAX_TARGET_NAMES];
    size_t n_known = bl_arch_target_names(known, MAX_TARGET_NAMES - 1);

    known[n_known++] = "all-linear";
    for (int64_t i = 0; i < targets->n_items; i++) {
        const char *name = targets->items[i];
        int64_t layer;
        if (!bl_arch_find_target(name, &layer) && !bl_arch_is_table(name) &&
            strcmp(name, "all-linear") != 0)
            return refuse_target(name, known, n_known);
        if (strcmp(name, "all-linear") == 0 && targets->n_items > 1) {
            return BL_FAIL(BL_EUSAGE,
                           "lora_target_modules: all-linear cannot be combined with other names");
        }
        for (int64_t k = 0; k < i; k++) {
            if (strcmp(name, targets->items[k]) == 0) {
                return BL_FAIL(BL_EUSAGE, "lora_target_modules: '%s' is named twice", name);
            }
        }
    }
    return BL_OK;
}

double bl_train_config_share(const bl_train_config *config, int64_t file)
{
    const bl_string_list *shares = &config->train_file_shares;
    return shares->n_items ? strtod(shares->items[file], NULL) : 1;
}

static bl_status validate_shares(const bl_train_config *config)
{
    static const double MOST = 1000; /* a typing error beyond it */
    const bl_string_list *shares = &config->train_file_shares;

    if (!shares->n_items) return BL_OK;
    if (shares->n_items != 1 + config->more_train_files.n_items)
        return BL_FAIL(BL_EUSAGE,
                       "train_file_shares: %lld numbers for %lld files: one for train_file and one "
                       "for each of more_train_files",
                       (long long)shares->n_items,
                       (long long)(1 + config->more_train_files.n_items));
    for (int64_t i = 0; i < shares->n_items; i++) {
        char *end;
        double share = strtod(shares->items[i], &end);
        if (*end || !(share >= 0 && share <= MOST))
            return BL_FAIL(BL_EUSAGE, "train_file_shares: expected numbers from 0 to %g, got '%s'",
                           MOST, shares->items[i]);
    }
    if (config->validation_split_percentage > 0)
        return BL_FAIL(BL_EUSAGE,
                       "train_file_shares and validation_split_percentage %g: a row that is used "
                       "twice could be in both parts; give validation_file",
                       config->validation_split_percentage);
    return BL_OK;
}

/* Each is a key that a resume can miss, or true, or false. */
static bl_status check_allowed(const bl_string_list *list)
{
    for (int64_t i = 0; i < list->n_items; i++) {
        const char *name = list->items[i];
        bool truth, is_one = bl_text_parse_bool(name, &truth) || strcmp(name, "train_file") == 0 ||
                             strcmp(name, "model_name_or_path") == 0;
        for (size_t k = 0; k < bl_train_n_options && !is_one; k++)
            is_one = bl_train_options[k].effect == BL_EFFECT_RESULT &&
                     strcmp(bl_train_options[k].key, name) == 0;
        if (!is_one)
            return BL_FAIL(BL_EUSAGE,
                           "allow_resume_mismatch: %s is not a key that changes results: the error "
                           "of the resume lists the names",
                           name);
    }
    return BL_OK;
}

/* The keys that compare evaluations. */
static bl_status validate_best(const bl_train_config *config)
{
    const char *needing = config->load_best_model_at_end          ? "load_best_model_at_end"
                          : config->early_stopping_patience > 0   ? "early_stopping_patience"
                          : config->save_strategy == BL_SAVE_BEST ? "save_strategy best"
                                                                  : NULL;

    if (config->greater_is_better)
        return BL_FAIL(BL_EUSAGE, "greater_is_better true: metric_for_best_model is a loss, which "
                                  "is better when lower; leave the key out");
    if (needing && config->eval_strategy == BL_EVAL_NO)
        return BL_FAIL(BL_EUSAGE, "%s compares evaluations: needs eval_strategy steps or epoch",
                       needing);
    if (config->early_stopping_threshold > 0 && config->early_stopping_patience == 0)
        return BL_FAIL(BL_EUSAGE, "early_stopping_threshold %g needs early_stopping_patience",
                       config->early_stopping_threshold);
    return BL_OK;
}

static bl_status validate_rungs(const bl_train_config *config, bool has_validation)
{
    if (config->reduction_factor == 0) return BL_OK;
    if (config->reduction_factor == 1)
        return BL_FAIL(BL_EUSAGE, "reduction_factor 1 stops no run: give 2 or more, or 0 for off");
    if (config->queue)
        return BL_FAIL(BL_EUSAGE,
                       "reduction_factor with queue %s: jobs come at different times; "
                       "halving needs runs of one command",
                       config->queue);
    if (!has_validation)
        return BL_FAIL(BL_EUSAGE, "reduction_factor compares validation losses: needs "
                                  "validation_file or validation_split_percentage");
    return BL_OK;
}

static bl_status validate_lora(const bl_train_config *config)
{
    if (bl_train_config_targets_by_pattern(config)) return BL_OK;
    return validate_targets(&config->lora_target_modules);
}

static bl_status validate_training(const bl_train_config *config)
{
    BL_TRY(validate_lora(config));
    if (config->warmup_steps > 0 && config->warmup_ratio > 0) {
        return BL_FAIL(BL_EUSAGE, "warmup_ratio %g and warmup_steps %lld: give one of them",
                       config->warmup_ratio, (long long)config->warmup_steps);
    }
    if (config->lr_scheduler_type == BL_LR_CONSTANT &&
        (config->warmup_steps > 0 || config->warmup_ratio > 0)) {
        return BL_FAIL(BL_EUSAGE,
                       "lr_scheduler_type constant has no warm-up: use constant_with_warmup");
    }
    if (config->max_steps <= 0 && config->num_train_epochs <= 0) {
        return BL_FAIL(BL_EUSAGE, "num_train_epochs 0 and no max_steps: nothing to train");
    }
    bool has_validation = config->validation_file || config->validation_split_percentage > 0;
    if (config->validation_file && config->validation_split_percentage > 0) {
        return BL_FAIL(BL_EUSAGE,
                       "validation_file and validation_split_percentage %g: give one of them",
                       config->validation_split_percentage);
    }
    if (config->eval_strategy != BL_EVAL_NO && !has_validation) {
        return BL_FAIL(BL_EUSAGE,
                       "eval_strategy %s needs validation_file or validation_split_percentage",
                       config->eval_strategy == BL_EVAL_STEPS ? "steps" : "epoch");
    }
    BL_TRY(validate_best(config));
    BL_TRY(validate_rungs(config, has_validation));
    BL_TRY(validate_shares(config));
    BL_TRY(config_check_reports(config));
    BL_TRY(check_allowed(&config->allow_resume_mismatch));
    if (config->overwrite_output_dir && bl_train_config_resume(config) != BL_RESUME_NO) {
        return BL_FAIL(BL_EUSAGE,
                       "overwrite_output_dir and resume_from_checkpoint: give one of them "
                       "(to resume, overwrite_output_dir: false)");
    }
    return BL_OK;
}

/* Written paths are listed in files, one per line, and logged. */
static bl_status check_written_paths(const bl_train_config *config)
{
    const struct {
        const char *key, *path;
    } paths[] = {{"output_dir", config->output_dir},
                 {"logging_dir", config->logging_dir},
                 {"offload_dir", config->offload_dir},
                 {"trace", config->trace},
                 {"queue", config->queue},
                 {"dump_gradients", config->dump_gradients}};

    for (size_t i = 0; i < BL_COUNT(paths); i++)
        for (const char *at = paths[i].path; at && *at; at++)
            if ((unsigned char)*at < ' ' || *at == 0x7f)
                return BL_FAIL(BL_EUSAGE,
                               "%s: the path has a control character (0x%02x) at byte %d: use "
                               "another name",
                               paths[i].key, (unsigned char)*at, (int)(at - paths[i].path));
    return BL_OK;
}

bl_status config_validate(bl_config_command command, const bl_train_config *config)
{
    BL_TRY(check_written_paths(config));
    if (config->ranks % config->shard_size != 0) {
        return BL_FAIL(BL_EUSAGE, "shard_size %lld does not divide ranks %lld",
                       (long long)config->shard_size, (long long)config->ranks);
    }
    if (config->offload_tier == BL_OFFLOAD_DISK && !config->offload_dir)
        return BL_FAIL(BL_EUSAGE,
                       "offload_tier disk needs offload_dir, a directory on a fast local disk");
    if (config->optimizer_tier == BL_OPTIMIZER_DISK && !config->offload_dir)
        return BL_FAIL(BL_EUSAGE,
                       "optimizer_tier disk needs offload_dir, a directory on a fast local disk");
    if (config->offload_tier == BL_OFFLOAD_HOST && config->offload_host_part > 0)
        return BL_FAIL(BL_EUSAGE,
                       "offload_host_part %g: offload_tier host has all of it in host "
                       "memory; give offload_tier disk, or leave the key out",
                       config->offload_host_part);
    BL_TRY(config_check_modules(&config->compute_bf16_modules));
    bl_losses losses;
    BL_TRY(bl_train_config_losses(config, &losses));
    if (command == BL_CONFIG_TRAIN) BL_TRY(config_check_full(config));
    if (command == BL_CONFIG_TRAIN) return validate_training(config);
    return command == BL_CONFIG_ADAPTER ? validate_lora(config) : BL_OK;
}

bl_status config_accepts(bl_train_config *config, bool has_gpus)
{
    const bl_config_machine machine = {.has_gpus = has_gpus,
                                       .n_ranks = 1,
                                       .n_cores = 1,
                                       .n_ranks_on_host = 1,
                                       .gpu = "a GPU",
                                       .capability = 90,
                                       .cpu_bf16 = true};

    BL_TRY(resolve_for(&machine, config));
    return config_validate(BL_CONFIG_TRAIN, config);
}

static bl_status load(bl_config_command command, const bl_config_machine *machine,
                      const char *yaml_path, int argc, char *const *argv, config_choice *choice,
                      bl_train_config *config)
{
    BL_TRY(read_given(command, machine == NULL, yaml_path, argc, argv, choice, config));
    BL_TRY(machine ? resolve_for(machine, config) : config_resolve(command, config));
    return config_validate(command, config);
}

static bl_status create(bl_config_command command, const bl_config_machine *machine,
                        const char *yaml_path, int argc, char *const *argv, config_choice *choice,
                        bl_train_config **out)
{
    bl_train_config *config = calloc(1, sizeof *config);

    *out = NULL;
    if (!config) return BL_FAIL(BL_ENOMEM, "configuration: %zu bytes", sizeof *config);
    bl_status st = load(command, machine, yaml_path, argc, argv, choice, config);
    if (st == BL_OK)
        *out = config;
    else
        bl_train_config_free(config);
    return st;
}

bl_status bl_train_config_load(bl_config_command command, const char *yaml_path, int argc,
                               char *const *argv, bl_train_config **out)
{
    return create(command, NULL, yaml_path, argc, argv, NULL, out);
}

bl_status config_load_choice(const bl_config_machine *machine, int argc, char *const *argv,
                             config_choice *choice, bl_train_config **out)
{
    return create(BL_CONFIG_TRAIN, machine, NULL, argc, argv, choice, out);
}

bl_status config_check_required(const bl_train_config *config)
{
    const bl_options options = config_bind(BL_CONFIG_TRAIN, config);
    return bl_options_check_required(&options);
}

bl_status bl_train_config_read_back(const char *yaml_path, bl_train_config **out)
{
    bl_train_config *config = calloc(1, sizeof *config);

    *out = NULL;
    if (!config) return BL_FAIL(BL_ENOMEM, "configuration: %zu bytes", sizeof *config);
    bl_status st = read_given(BL_CONFIG_TRAIN, false, yaml_path, 0, NULL, NULL, config);
    if (st == BL_OK)
        *out = config;
    else
        bl_train_config_free(config);
    return st;
}

void bl_train_config_free(bl_train_config *config)
{
    if (!config) return;
    bl_options options = config_bind(BL_CONFIG_TRAIN, config);
    bl_options_clear(&options);
    free(config->source.file);
    free(config);
}

bool bl_train_config_targets_by_pattern(const bl_train_config *config)
{
    const bl_string_list *list = &config->lora_target_modules;
    return list->n_items == 1 && strpbrk(list->items[0], "*+?|()[]{}^$\\") != NULL;
}

bool bl_train_config_given(const bl_train_config *config, const char *key)
{
    const bl_options options = config_bind(BL_CONFIG_TRAIN, config);
    return bl_options_origin(&options, key) != BL_FROM_DEFAULT;
}

bool config_differs(const bl_train_config *config, const char *key)
{
    const bl_options options = config_bind(BL_CONFIG_TRAIN, config);
    const bl_option *option = bl_options_find(&options, key);
    char *text = NULL;

    if (bl_options_origin(&options, key) == BL_FROM_DEFAULT ||
        bl_option_format(option, config, &text) != BL_OK)
        return false;
    bool differs = strcmp(text, option->default_text ? option->default_text : "null") != 0;
    free(text);
    return differs;
}

bool bl_train_config_allows(const bl_train_config *config, const char *name)
{
    const bl_string_list *list = &config->allow_resume_mismatch;
    bool truth, allows = false;

    for (int64_t i = 0; i < list->n_items; i++)
        allows = allows || strcmp(list->items[i], name) == 0 ||
                 (bl_text_parse_bool(list->items[i], &truth) && truth);
    return allows;
}

bl_resume bl_train_config_resume(const bl_train_config *config)
{
    bool truth;
    if (!bl_text_parse_bool(config->resume_from_checkpoint, &truth)) return BL_RESUME_PATH;
    return truth ? BL_RESUME_NEWEST : BL_RESUME_NO;
}

bl_status bl_train_config_write_resolved(const bl_train_config *config, const char *path)
{
    const bl_options options = config_bind(BL_CONFIG_TRAIN, config);
    return bl_options_write_yaml(&options, path, BL_RESOLVED_COMMENT);
}

bl_status bl_train_config_hash(const bl_train_config *config, bl_option_effect effect,
                               uint64_t *hash)
{
    const uint64_t fnv_offset = 0xcbf29ce484222325u,
                   fnv_prime = 0x100000001b3u; /* FNV-1a, 64 bits */

    *hash = fnv_offset;
    for (size_t i = 0; i < bl_train_n_options; i++) {
        const bl_option *option = &bl_train_options[i];
        const char *parts[3] = {option->key, "=", NULL};
        char *text;
        if (option->effect != effect) continue;
        BL_TRY(bl_option_format(option, config, &text));
        parts[2] = text;
        for (size_t part = 0; part < BL_COUNT(parts); part++) {
            for (const char *c = parts[part]; *c; c++)
                *hash = (*hash ^ (unsigned char)*c) * fnv_prime;
        }
        *hash = (*hash ^ '\n') * fnv_prime;
        free(text);
    }
    return BL_OK;
}

bl_status bl_train_config_diff(const bl_train_config *before, const bl_train_config *now,
                               bl_option_effect effect, char **text)
{
    bl_status st = BL_OK;
    size_t n_bytes;
    FILE *out = open_memstream(text, &n_bytes);

    if (!out) return BL_FAIL(BL_ENOMEM, "differences of two configurations");
    for (size_t i = 0; i < bl_train_n_options && st == BL_OK; i++) {
        const bl_option *option = &bl_train_options[i];
        char *old_text = NULL, *new_text = NULL;
        if (option->effect != effect) continue;
        st = bl_option_format(option, before, &old_text);
        if (st == BL_OK) st = bl_option_format(option, now, &new_text);
        if (st == BL_OK && strcmp(old_text, new_text) != 0) {
            fprintf(out, "%s: %s -> %s\n", option->key, old_text, new_text);
        }
        free(old_text);
        free(new_text);
    }
    if (fclose(out) && st == BL_OK) st = BL_FAIL(BL_ENOMEM, "differences of two configurations");
    if (st == BL_OK) return BL_OK;
    free(*text);
    *text = NULL;
    return st;
}

void bl_train_config_print(bl_config_command command, bl_options_style style, FILE *out)
{
    static const bl_train_config none;
    const bl_options options = config_bind(command, &none);
    bl_options_print(&options, style, out);
}
