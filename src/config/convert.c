/* SPDX-License-Identifier: Apache-2.0 */
/* convert.c -- other programs' configurations as Ballast's. The rows of aliases.c give the meaning
 * of a name, those of programs.c the defaults of a program for keys that its file does not give,
 * where they are not Ballast's. What `train` would reject is no part of the result. */
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "config/internal.h"
#include "config/programs_internal.h"
#include "config/table_internal.h"

enum { NAME_BYTES = 128 };

typedef struct conversion {
    const char *path;
    const char *tool; /* as the user gave it: a program, or a trainer; NULL: to be found */
    char program[16]; /* its part of tool */
    const config_trainer *trainer;
    bl_train_config *config; /* the file's keys, and the program's defaults */
    bl_options options;
    bl_options_report report;
    const config_default *preset[BL_TRAIN_CONFIG_MAX_KEYS]; /* of a default that was set; NULL */
    bl_string_list to_add;                                  /* "To add" lines */
} conversion;

static bl_status read_file(conversion *c)
{
    bl_options_report_clear(&c->report);
    bl_options_clear(&c->options);
    c->options.tool = c->tool;
    BL_TRY(bl_options_init(&c->options));
    return bl_options_read_yaml(&c->options, c->path);
}

/* ---- whose file it is ---- */

static int count_markers(const bl_string_list *given, const char *tool)
{
    char name[NAME_BYTES];
    int n = 0;

    for (size_t m = 0; m < config_n_markers; m++) {
        bool is_there = false;
        if (strcmp(config_markers[m].tool, tool) != 0) continue;
        for (int64_t i = 0; i < given->n_items && !is_there; i++) {
            snprintf(name, sizeof name, "%.*s", (int)strcspn(given->items[i], "="),
                     given->items[i]);
            is_there = fnmatch(config_markers[m].name, name, 0) == 0;
        }
        n += is_there;
    }
    return n;
}

static bl_status detect_tool(conversion *c)
{
    int most = 0;
    bool is_tie = true;

    for (size_t i = 0; i < config_n_programs; i++) {
        int n = count_markers(&c->report.given, config_programs[i]);
        if (n < most) continue;
        is_tie = n == most;
        most = n;
        c->tool = config_programs[i];
    }
    if (!is_tie) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s: cannot tell whose file it is; give --tool axolotl, llamafactory, trl or "
                   "torchtune",
                   c->path);
}

/* Whether one of the file's "name=value" fits the pattern. */
static bool is_given(const conversion *c, const char *pattern)
{
    for (int64_t i = 0; i < c->report.given.n_items; i++)
        if (fnmatch(pattern, c->report.given.items[i], FNM_CASEFOLD) == 0) return true;
    return false;
}

static bool fits_markers(const conversion *c, const char *markers)
{
    char pattern[NAME_BYTES];

    for (size_t n; *markers; markers += n + (markers[n] == ' ')) {
        n = strcspn(markers, " ");
        snprintf(pattern, sizeof pattern, "%.*s", (int)n, markers);
        if (is_given(c, pattern)) return true;
    }
    return false;
}

/* Of a program the trainer by the file's keys; of a trainer that one. */
static void find_trainer(conversion *c)
{
    snprintf(c->program, sizeof c->program, "%.*s", (int)strcspn(c->tool, "-"), c->tool);
    bool is_named = strlen(c->program) < strlen(c->tool);
    size_t n_bytes = strlen(c->program);

    for (size_t i = 0; i < config_n_trainers; i++) {
        const config_trainer *trainer = &config_trainers[i];
        bool is_one = is_named ? strcmp(trainer->name, c->tool) == 0
                               : strncmp(trainer->name, c->program, n_bytes) == 0 &&
                                     trainer->name[n_bytes] == '-' &&
                                     (!trainer->markers || fits_markers(c, trainer->markers));
        if (!is_one) continue;
        c->trainer = trainer;
        return;
    }
}

/* ---- the program's defaults ---- */

/* "PATH:LINE: name: reason" */
static bool was_rejected(const conversion *c, const char *name)
{
    for (int64_t i = 0; i < c->report.rejected.n_items; i++) {
        const char *at = strstr(c->report.rejected.items[i], ": ");
        if (at && strncmp(at + 2, name, strlen(name)) == 0 && at[2 + strlen(name)] == ':')
            return true;
    }
    return false;
}

/* config_default.when: one condition. */
static bl_status holds_one(const conversion *c, const char *when, bool *result)
{
    char key[NAME_BYTES], *text;
    bool is_negated = when[0] == '!';

    *result = when[0] == '~' ? !was_rejected(c, when + 1) : is_given(c, when + 1) == (*when == '+');
    if (strchr("~-+", when[0])) return BL_OK;
    when += is_negated;
    size_t n_key = strcspn(when, "=");
    snprintf(key, sizeof key, "%.*s", (int)n_key, when);
    BL_TRY(bl_option_format(bl_options_find(&c->options, key), c->config, &text));
    bool is_value = when[n_key] ? strcmp(text, when + n_key + 1) == 0 : strcmp(text, "0") != 0;
    *result = bl_options_origin(&c->options, key) != BL_FROM_DEFAULT && is_value;
    *result = *result != is_negated;
    free(text);
    return BL_OK;
}

static bl_status holds(const conversion *c, const char *when, bool *result)
{
    char one[NAME_BYTES];

    *result = true;
    for (size_t n; *result && when && *when; when += n + (when[n] == ',')) {
        n = strcspn(when, ",");
        snprintf(one, sizeof one, "%.*s", (int)n, when);
        BL_TRY(holds_one(c, one, result));
    }
    return BL_OK;
}

static bool is_of(const conversion *c, const char *of)
{
    return strcmp(of, c->program) == 0 || strcmp(of, c->trainer->name) == 0;
}

/* "2*key" as its number. */
static bl_status set_preset(conversion *c, size_t index, const config_default *preset)
{
    char number[32], *text;
    const char *star = strchr(preset->value, '*');

    c->preset[index] = preset;
    if (!star) return bl_options_set(&c->options, index, preset->value);
    BL_TRY(bl_option_format(bl_options_find(&c->options, star + 1), c->config, &text));
    snprintf(number, sizeof number, "%.12g", strtod(preset->value, NULL) * strtod(text, NULL));
    free(text);
    return bl_options_set(&c->options, index, number);
}

static bl_status add_defaults(conversion *c)
{
    for (size_t i = 0; i < config_n_defaults; i++) {
        const config_default *preset = &config_defaults[i];
        size_t index = (size_t)(bl_options_find(&c->options, preset->key) - bl_train_options);
        bool is_on = bl_options_origin(&c->options, preset->key) == BL_FROM_DEFAULT;
        if (!is_of(c, preset->of) || !(is_on || preset->replaces) || c->preset[index]) continue;
        BL_TRY(holds(c, preset->when, &is_on));
        if (is_on) BL_TRY(set_preset(c, index, preset));
    }
    return BL_OK;
}

/* ---- what `train` accepts of it ---- */

enum { NONE = -1 };

/* What `train` says of the keys without row `without` (NONE: of all) once the keys to add are
 * there, with validation data or without, on a machine with GPUs or without. */
static bl_status check_on(const conversion *c, int64_t without, bool has_validation, bool has_gpus)
{
    static const char *const needed[] = {"model_name_or_path", "output_dir", "train_file",
                                         "validation_file"};
    bl_train_config *trial = calloc(1, sizeof *trial);
    bl_status st;

    if (!trial) return BL_FAIL(BL_ENOMEM, "configuration: %zu bytes", sizeof *trial);
    const bl_options options = config_bind(BL_CONFIG_TRAIN, trial);
    BL_TRY_GOTO(st, done, bl_options_init(&options));
    for (size_t i = 0; i < bl_train_n_options; i++)
        if (c->options.origins[i] != BL_FROM_DEFAULT && (int64_t)i != without)
            BL_TRY_GOTO(st, done, bl_options_copy(&options, c->config, i));
    for (size_t i = 0; i < BL_COUNT(needed) - !has_validation; i++) {
        size_t index = (size_t)(bl_options_find(&options, needed[i]) - bl_train_options);
        if (options.origins[index] == BL_FROM_DEFAULT)
            BL_TRY_GOTO(st, done, bl_options_set(&options, index, "file"));
    }
    st = config_accepts(trial, has_gpus);
done:
    bl_train_config_free(trial);
    return st;
}

/* BL_OK: on one of the two machines. */
static bl_status check(const conversion *c, int64_t without, bool has_validation)
{
    bl_config_device device = c->config->device;
    bl_status st = BL_EUSAGE;

    bl_log_set_silent(true);
    if (device != BL_CONFIG_DEVICE_CUDA) st = check_on(c, without, has_validation, false);
    if (st == BL_EUSAGE && device != BL_CONFIG_DEVICE_CPU)
        st = check_on(c, without, has_validation, true);
    bl_log_set_silent(false);
    return st;
}

/* The order in which a key is taken out that is one of several at odds: others first, by their
 * place in the error. */
static int64_t rank_of(const char *key, const char *error)
{
    static const char *const last[] = {"eval_strategy", "lr_scheduler_type", "validation_file",
                                       "finetuning_type", "loss_type"};
    const char *at = strstr(error, key);
    int64_t rank = at ? at - error : (int64_t)strlen(error);

    for (size_t i = 0; i < BL_COUNT(last); i++)
        if (strcmp(last[i], key) == 0) rank += (int64_t)(i + 1) << 32;
    return rank;
}

/* The key without which that error is gone; NONE: no single one. */
static bl_status find_culprit(const conversion *c, const char *error, bool has_validation,
                              int64_t *culprit)
{
    *culprit = NONE;
    for (int64_t i = 0; i < (int64_t)bl_train_n_options; i++) {
        if (c->options.origins[i] == BL_FROM_DEFAULT) continue;
        bl_status st = check(c, i, has_validation);
        if (st != BL_OK && st != BL_EUSAGE) return st;
        if (st == BL_EUSAGE && strcmp(bl_error_text(), error) == 0) continue;
        if (*culprit == NONE || rank_of(bl_train_options[i].key, error) <
                                    rank_of(bl_train_options[*culprit].key, error))
            *culprit = i;
    }
    return BL_OK;
}

/* Takes the key out; names it and its reason among those that were rejected. */
static bl_status take_out(conversion *c, size_t index, const char *error)
{
    const bl_option *option = &bl_train_options[index];
    char *value, *text;
    bool is_preset = c->preset[index] != NULL;

    BL_TRY(bl_option_format(option, c->config, &value));
    bl_status st =
        bl_text_format(&text, "%s: %s: %s%s%s: %s", c->path, option->key, value,
                       is_preset ? ", default of " : "", is_preset ? c->program : "", error);
    free(value);
    if (st == BL_OK) st = bl_string_list_add(&c->report.rejected, text);
    free(text);
    BL_TRY(st);
    c->options.origins[index] = BL_FROM_DEFAULT;
    return BL_OK;
}

/* Takes out what `train` would reject, key by key. An evaluation without data is one to add. */
static bl_status check_values(conversion *c)
{
    bool has_validation = false;
    int64_t culprit;

    for (;;) {
        bl_status st = check(c, NONE, has_validation);
        if (st != BL_EUSAGE) return st;
        char *error = strdup(bl_error_text());
        if (!error) return BL_FAIL(BL_ENOMEM, "%s: text of an error", c->path);
        st = find_culprit(c, error, has_validation, &culprit);
        bool needs_data = st == BL_OK && !has_validation && strstr(error, "validation_file") &&
                          check(c, NONE, true) == BL_OK;
        if (st == BL_OK && needs_data)
            st = bl_string_list_add(&c->to_add, error);
        else if (st == BL_OK && culprit != NONE)
            st = take_out(c, (size_t)culprit, error);
        else if (st == BL_OK)
            st = BL_FAIL(BL_EUSAGE, "%s: %s", c->path, error);
        has_validation |= needs_data;
        free(error);
        BL_TRY(st);
    }
}

/* ---- writing ---- */

static bl_status write_key(const conversion *c, size_t index, FILE *out)
{
    const bl_option *option = &bl_train_options[index];
    const config_default *preset = c->preset[index];
    char *text;

    if (c->options.origins[index] == BL_FROM_DEFAULT) return BL_OK;
    BL_TRY(bl_option_format(option, c->config, &text));
    fprintf(out, "%s: %s", option->key, text);
    free(text);
    if (preset && preset->why)
        fprintf(out, "  # %s in %s", preset->why, c->program);
    else if (preset)
        fprintf(out, "  # default of %s", c->program);
    fputc('\n', out);
    return BL_OK;
}

/* A comment; a line end in the text cannot end it. */
static void write_comment(const char *text, FILE *out)
{
    fputs("#   ", out);
    for (const char *c = text; *c; c++)
        fputc((unsigned char)*c < 0x20 || *c == 0x7f ? '?' : *c, out);
    fputc('\n', out);
}

static void write_comments(const char *title, const bl_string_list *list, FILE *out)
{
    if (list->n_items > 0) fprintf(out, "\n# %s\n", title);
    for (int64_t i = 0; i < list->n_items; i++) write_comment(list->items[i], out);
}

static bl_status write_notes(const conversion *c, FILE *out)
{
    int n = 0;

    for (size_t i = 0; i < config_n_notes; i++) {
        bool is_on = is_of(c, config_notes[i].of);
        if (is_on) BL_TRY(holds(c, config_notes[i].when, &is_on));
        if (is_on && n++ == 0) fputs("\n# Differences that no key removes:\n", out);
        if (is_on) write_comment(config_notes[i].text, out);
    }
    return BL_OK;
}

static bl_status write(conversion *c, FILE *out)
{
    fprintf(out, "# A configuration of %s (%s; defaults of %s), for `ballast train`; it was:\n",
            c->program, c->trainer->title, c->trainer->version);
    write_comment(c->path, out);
    for (size_t i = 0; i < bl_train_n_options; i++) BL_TRY(write_key(c, i, out));
    if (bl_options_check_required(&c->options) != BL_OK)
        BL_TRY(bl_string_list_add(&c->to_add, bl_error_text()));
    for (int64_t i = 0; i < c->to_add.n_items; i++) {
        fprintf(out, "%s# To add: %s\n", i ? "" : "\n", c->to_add.items[i]);
        bl_log_warning("%s: %s", c->path, c->to_add.items[i]);
    }
    write_comments("No counterpart:", &c->report.rejected, out);
    write_comments("No effect here:", &c->report.ignored, out);
    write_comments("The same without a key:", &c->report.same, out);
    BL_TRY(write_notes(c, out));
    for (int64_t i = 0; i < c->report.rejected.n_items; i++)
        bl_log_warning("%s", c->report.rejected.items[i]);
    return BL_OK;
}

static bl_status convert(conversion *c, FILE *out)
{
    BL_TRY(read_file(c));
    if (!c->tool) {
        BL_TRY(detect_tool(c));
        BL_TRY(read_file(c));
    }
    find_trainer(c);
    c->tool = c->trainer->name;
    BL_TRY(read_file(c));
    BL_TRY(add_defaults(c));
    BL_TRY(check_values(c));
    return write(c, out);
}

bl_status bl_train_config_convert(const char *path, const char *tool, FILE *out)
{
    conversion c = {.path = path, .tool = tool, .config = calloc(1, sizeof *c.config)};

    if (!c.config) return BL_FAIL(BL_ENOMEM, "configuration: %zu bytes", sizeof *c.config);
    c.options = config_bind(BL_CONFIG_TRAIN, c.config);
    c.options.report = &c.report;
    bl_status st = convert(&c, out);
    bl_options_report_clear(&c.report);
    bl_string_list_clear(&c.to_add);
    bl_train_config_free(c.config);
    return st;
}
