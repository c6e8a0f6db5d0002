/* SPDX-License-Identifier: Apache-2.0 */
/* runs.c -- several runs from one command line: a file each, and the combinations of keys that have
 * several values in a file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "config/internal.h"
#include "config/table_internal.h"

enum { MAX_RUNS = 256 };

/* ---- names ---- */

/* A value as a part of a file name: anything but letters, digits and ".-+_" becomes "_". */
static void print_value(const char *text, FILE *out)
{
    for (const char *c = text; *c; c++) {
        bool is_plain = (*c >= '0' && *c <= '9') || (*c >= 'a' && *c <= 'z') ||
                        (*c >= 'A' && *c <= 'Z') || strchr(".-+_", *c);
        fputc(is_plain ? *c : '_', out);
    }
}

/* "learning_rate-1e-4_lora_r-8" */
static bl_status name_choice(const bl_options_sweep *sweep, char **name)
{
    size_t n_bytes;
    FILE *out = open_memstream(name, &n_bytes);

    if (!out) return BL_FAIL(BL_ENOMEM, "the name of a run");
    for (int k = 0; k < sweep->n_keys; k++) {
        fprintf(out, "%s%s-", k ? "_" : "", sweep->key[k]->key);
        print_value(sweep->chosen.items[k], out);
    }
    return fclose(out) ? BL_FAIL(BL_ENOMEM, "the name of a run") : BL_OK;
}

/* output_dir becomes its subdirectory of that name. */
static bl_status place_run(bl_train_config *config, const bl_options_sweep *sweep)
{
    char *name = NULL, *dir = NULL;

    if (sweep->n_keys == 0) return BL_OK;
    if (!config->output_dir) return config_check_required(config);
    BL_TRY(name_choice(sweep, &name));
    bl_status st = bl_path_join(config->output_dir, name, &dir);
    free(name);
    if (st != BL_OK) return st;
    free(config->output_dir);
    config->output_dir = dir;
    return BL_OK;
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

const char *bl_train_config_name(const bl_train_config *const *runs, int n, int i)
{
    for (int one = 1; one < n; one++)
        for (int two = 0; two < one; two++)
            if (strcmp(last_part(runs[one]->output_dir), last_part(runs[two]->output_dir)) == 0)
                return runs[i]->output_dir;
    return last_part(runs[i]->output_dir);
}

/* ---- whether they fit together ---- */

bool config_is_common(const bl_option *option)
{
    static const char *const others[] = {"model_name_or_path", "max_seq_length", "trace",
                                         "reduction_factor", "grace_period"};

    if (strcmp(option->group, "Execution") == 0) return true;
    for (size_t i = 0; i < BL_COUNT(others); i++)
        if (strcmp(option->key, others[i]) == 0) return true;
    return false;
}

static bl_status compare_key(const bl_option *option, const bl_train_config *first,
                             const bl_train_config *other)
{
    char *one = NULL, *two = NULL;

    bl_status st = bl_option_format(option, first, &one);
    if (st == BL_OK) st = bl_option_format(option, other, &two);
    if (st == BL_OK && strcmp(one, two) != 0)
        st = BL_FAIL(BL_EUSAGE,
                     "%s: %s for %s, %s for %s: runs over one base need the same value; start them "
                     "one after the other, or give --%s",
                     option->key, one, first->output_dir, two, other->output_dir, option->key);
    free(one);
    free(two);
    return st;
}

static bool is_same(const char *one, const char *two)
{
    return one && two && strcmp(one, two) == 0;
}

bl_status bl_train_config_check_apart(const bl_train_config *one, const bl_train_config *two)
{
    const char *key = is_same(one->output_dir, two->output_dir)           ? "output_dir"
                      : is_same(one->logging_dir, two->logging_dir)       ? "logging_dir"
                      : is_same(one->dump_gradients, two->dump_gradients) ? "dump_gradients"
                                                                          : NULL;

    if (key)
        return BL_FAIL(BL_EUSAGE, "%s: two runs write to the same place (output_dir %s and %s)",
                       key, one->output_dir, two->output_dir);
    if (is_same(one->init_adapter, two->output_dir) || is_same(two->init_adapter, one->output_dir))
        return BL_FAIL(BL_EUSAGE,
                       "init_adapter: one run begins with the adapter that another one writes "
                       "(output_dir %s and %s): start them one after the other",
                       one->output_dir, two->output_dir);
    return BL_OK;
}

static bl_status check_alone(const bl_train_config *config)
{
    if (config->modules_to_save.n_items > 0)
        return BL_FAIL(BL_EUSAGE,
                       "modules_to_save: a run that replaces modules of the base cannot share it "
                       "with other runs (output_dir %s): start them one after the other",
                       config->output_dir);
    if (!bl_train_config_is_full(config)) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "finetuning_type full: a run that trains every weight cannot share its base "
                   "with other runs (output_dir %s): start them one after the other",
                   config->output_dir);
}

static bl_status check_together(const bl_train_configs *configs)
{
    for (int i = 0; i < configs->n && configs->n > 1; i++) {
        BL_TRY(check_alone(configs->run[i]));
        if (configs->run[i]->queue)
            return BL_FAIL(BL_EUSAGE,
                           "queue %s: give one file, without lists of values: other "
                           "runs are jobs of the queue",
                           configs->run[i]->queue);
    }
    for (int i = 1; i < configs->n; i++) {
        for (size_t k = 0; k < bl_train_n_options; k++)
            if (config_is_common(&bl_train_options[k]))
                BL_TRY(compare_key(&bl_train_options[k], configs->run[0], configs->run[i]));
        for (int before = 0; before < i; before++)
            BL_TRY(bl_train_config_check_apart(configs->run[before], configs->run[i]));
    }
    return BL_OK;
}

/* ---- reading ---- */

/* The next combination; false: this was the last. */
static bool advance(bl_options_sweep *sweep)
{
    for (int k = sweep->n_keys - 1; k >= 0; k--) {
        if (++sweep->choice[k] < sweep->n_values[k]) return true;
        sweep->choice[k] = 0;
    }
    return false;
}

static bl_status add_run(bl_train_configs *configs, bl_train_config *config)
{
    if (configs->n == MAX_RUNS)
        return BL_FAIL(BL_ELIMIT, "more than %d runs in one command", MAX_RUNS);
    configs->run[configs->n++] = config;
    return BL_OK;
}

static bl_status load_run(const bl_config_machine *machine, int argc, char *const *argv,
                          config_choice *choice, bl_train_configs *configs)
{
    bl_train_config *config;

    bl_string_list_clear(&choice->sweep.chosen);
    choice->sweep.n_keys = 0;
    BL_TRY(config_load_choice(machine, argc, argv, choice, &config));
    bl_status st = place_run(config, &choice->sweep);
    if (st == BL_OK) st = add_run(configs, config);
    if (st != BL_OK) bl_train_config_free(config);
    return st;
}

static bl_status load_file(const bl_config_machine *machine, int argc, char *const *argv,
                           config_choice *choice, bl_train_configs *configs)
{
    bl_status st;

    do {
        st = load_run(machine, argc, argv, choice, configs);
    } while (st == BL_OK && advance(&choice->sweep));
    bl_string_list_clear(&choice->sweep.chosen);
    choice->sweep = (bl_options_sweep){.n_keys = 0};
    return st;
}

bl_status bl_train_configs_load_for(const bl_config_machine *machine, int argc, char *const *argv,
                                    bl_train_configs *out)
{
    config_choice choice = {.n_files = 1};
    bl_status st = BL_OK;

    *out = (bl_train_configs){.run = calloc(MAX_RUNS, sizeof *out->run)};
    if (!out->run) return BL_FAIL(BL_ENOMEM, "%d configurations", MAX_RUNS);
    for (int i = 0; st == BL_OK && (i == 0 || i < choice.n_files); i++) {
        choice.file = i;
        st = load_file(machine, argc, argv, &choice, out);
    }
    for (int i = 0; st == BL_OK && out->n > 1 && i < out->n; i++)
        st = config_check_required(out->run[i]);
    if (st == BL_OK) st = check_together(out);
    if (st != BL_OK) bl_train_configs_free(out);
    return st;
}

bl_status bl_train_configs_load(int argc, char *const *argv, bl_train_configs *out)
{
    return bl_train_configs_load_for(NULL, argc, argv, out);
}

void bl_train_configs_free(bl_train_configs *configs)
{
    for (int i = 0; i < configs->n; i++) bl_train_config_free(configs->run[i]);
    free(configs->run);
    *configs = (bl_train_configs){.run = NULL};
}
