/* SPDX-License-Identifier: Apache-2.0 */
/* convert.c -- other programs' configurations as Ballast's. The rows of aliases.c give the meaning
 * of a name; here are the defaults of a program for keys that its file does not give, where they
 * are not Ballast's.
 *
 * Sources: axolotl's schemas (sequence_len, num_epochs, ...) and its trainer builder
 * (eval_strategy); LLaMA-Factory's data_args.py and finetuning_args.py; SFTConfig and ModelConfig
 * of TRL 1.16.0 and PEFT's target modules of Llama; torchtune's LoRA builders and alpaca_dataset,
 * and torch.optim.AdamW. */
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/sizes.h"
#include "config/internal.h"
#include "config/table_internal.h"

/* A name that only files of this program have, or mostly. */
typedef struct marker {
    const char *tool, *pattern;
} marker;

static const marker markers[] = {
    {"axolotl", "base_model"},
    {"axolotl", "sequence_len"},
    {"axolotl", "micro_batch_size"},
    {"axolotl", "num_epochs"},
    {"axolotl", "val_set_size"},
    {"axolotl", "adapter"},
    {"axolotl", "datasets.path"},
    {"axolotl", "lora_target_linear"},
    {"llamafactory", "stage"},
    {"llamafactory", "finetuning_type"},
    {"llamafactory", "template"},
    {"llamafactory", "cutoff_len"},
    {"llamafactory", "lora_target"},
    {"llamafactory", "lora_rank"},
    {"llamafactory", "val_size"},
    {"trl", "dataset_name"},
    {"trl", "use_peft"},
    {"trl", "max_length"},
    {"trl", "completion_only_loss"},
    {"trl", "assistant_only_loss"},
    {"trl", "packing_strategy"},
    {"trl", "attn_implementation"},
    {"torchtune", "model._component_"},
    {"torchtune", "tokenizer._component_"},
    {"torchtune", "checkpointer.*"},
    {"torchtune", "optimizer._component_"},
    {"torchtune", "dataset._component_"},
};

static const char *const tools[] = {"axolotl", "llamafactory", "trl", "torchtune"};

/* The program's value for a key that is not given. `when`: only with that key, "key" (not 0) or
 * "key=value"; "!key=value": only if it is not given so; "~name": unless the file has a value
 * of that name that was rejected. */
typedef struct tool_default {
    const char *tool, *key, *value, *when;
} tool_default;

static const char TWICE_LORA_R[] = "2 x lora_r";

static const tool_default defaults[] = {
    {"axolotl", "finetuning_type", "full", "~adapter"},
    {"axolotl", "max_seq_length", "512", NULL},
    {"axolotl", "lr_scheduler_type", "cosine", NULL},
    {"axolotl", "num_train_epochs", "1", NULL},
    {"axolotl", "per_device_train_batch_size", "1", NULL},
    {"axolotl", "eval_strategy", "steps", "eval_steps"},
    {"axolotl", "eval_strategy", "epoch", "validation_split_percentage"},
    {"axolotl", "eval_strategy", "epoch", "validation_file"},
    {"axolotl", "save_strategy", "steps", "save_steps"},
    {"axolotl", "save_strategy", "epoch", NULL},
    {"llamafactory", "lora_alpha", TWICE_LORA_R, "!finetuning_type=full"},
    {"llamafactory", "learning_rate", "5.0e-5", NULL},
    {"trl", "finetuning_type", "full", NULL},
    {"trl", "lora_r", "16", "finetuning_type=lora"},
    {"trl", "lora_alpha", "32", "finetuning_type=lora"},
    {"trl", "lora_dropout", "0.05", "finetuning_type=lora"},
    {"trl", "lora_target_modules", "[q_proj, v_proj]", "finetuning_type=lora"},
    {"trl", "learning_rate", "2.0e-5", NULL},
    {"trl", "max_seq_length", "1024", NULL},
    {"torchtune", "lora_alpha", "16", "finetuning_type=lora"},
    {"torchtune", "weight_decay", "0.01", NULL},
    {"torchtune", "max_grad_norm", "0", NULL},
    {"torchtune", "lr_scheduler_type", "constant", NULL},
    {"torchtune", "train_on_inputs", "true", "data_format=alpaca"},
};

/* Differences that no key removes. */
static const struct {
    const char *tool, *text;
} notes[] = {
    {"axolotl", "axolotl holds out random rows, Ballast the first rows"},
    {"llamafactory", "LLaMA-Factory writes alpaca rows with its template, Ballast with the Alpaca "
                     "prompt: write them as messages (docs/data.md)"},
    {"llamafactory",
     "LLaMA-Factory's packed samples attend to each other unless neat_packing is true, "
     "Ballast's never do"},
    {"trl", "TRL's loss covers all of a conversation unless assistant_only_loss is true, Ballast's "
            "the answers: train_on_inputs: true for all"},
    {"torchtune", "torchtune fills each micro-batch from its own seed; the order of rows differs"},
};

typedef struct conversion {
    const char *path, *tool;
    bl_train_config *config;
    bl_options options;
    bl_options_report report;
} conversion;

static bl_status read_file(conversion *c)
{
    bl_options_report_clear(&c->report);
    bl_options_clear(&c->options);
    c->options.tool = c->tool;
    BL_TRY(bl_options_init(&c->options));
    return bl_options_read_yaml(&c->options, c->path);
}

static int count_markers(const bl_string_list *keys, const char *tool)
{
    int n = 0;

    for (size_t m = 0; m < BL_COUNT(markers); m++) {
        bool is_there = false;
        for (int64_t i = 0; i < keys->n_items && strcmp(markers[m].tool, tool) == 0; i++)
            is_there |= fnmatch(markers[m].pattern, keys->items[i], 0) == 0;
        n += is_there;
    }
    return n;
}

static bl_status detect_tool(conversion *c)
{
    int most = 0;
    bool is_tie = true;

    for (size_t i = 0; i < BL_COUNT(tools); i++) {
        int n = count_markers(&c->report.keys, tools[i]);
        if (n < most) continue;
        is_tie = n == most;
        most = n;
        c->tool = tools[i];
    }
    if (!is_tie) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s: cannot tell whose file it is; give --tool axolotl, llamafactory, trl or "
                   "torchtune",
                   c->path);
}

/* "PATH:LINE: name: reason" */
static bool was_rejected(const conversion *c, const char *name)
{
    char text[64];

    snprintf(text, sizeof text, ": %s: ", name);
    for (int64_t i = 0; i < c->report.rejected.n_items; i++)
        if (strstr(c->report.rejected.items[i], text)) return true;
    return false;
}

/* tool_default.when. */
static bl_status holds(const conversion *c, const char *when, bool *result)
{
    char key[64], *text;
    bool is_negated = when && when[0] == '!';

    *result = true;
    if (!when) return BL_OK;
    if (when[0] == '~') {
        *result = !was_rejected(c, when + 1);
        return BL_OK;
    }
    when += is_negated;
    size_t n_key = strcspn(when, "=");
    snprintf(key, sizeof key, "%.*s", (int)n_key, when);
    BL_TRY(bl_option_format(bl_options_find(&c->options, key), c->config, &text));
    bool is_given = bl_options_origin(&c->options, key) != BL_FROM_DEFAULT;
    bool is_value = when[n_key] && strcmp(text, when + n_key + 1) == 0;
    *result = is_given && (when[n_key] ? is_value : strcmp(text, "0") != 0);
    *result = *result != is_negated;
    free(text);
    return BL_OK;
}

/* The program's default for that key; NULL: it is Ballast's. */
static bl_status find_default(const conversion *c, const char *key, const tool_default **found)
{
    *found = NULL;
    for (size_t i = 0; i < BL_COUNT(defaults) && !*found; i++) {
        bool is_on;
        if (strcmp(defaults[i].tool, c->tool) != 0 || strcmp(defaults[i].key, key) != 0) continue;
        BL_TRY(holds(c, defaults[i].when, &is_on));
        if (is_on) *found = &defaults[i];
    }
    return BL_OK;
}

static bl_status write_key(const conversion *c, const bl_option *option, FILE *out)
{
    const tool_default *preset;
    char *text;

    if (bl_options_origin(&c->options, option->key) != BL_FROM_DEFAULT) {
        BL_TRY(bl_option_format(option, c->config, &text));
        fprintf(out, "%s: %s\n", option->key, text);
        free(text);
        return BL_OK;
    }
    BL_TRY(find_default(c, option->key, &preset));
    if (!preset) return BL_OK;
    fprintf(out, "%s: ", option->key);
    if (preset->value == TWICE_LORA_R)
        fprintf(out, "%lld", 2 * (long long)c->config->lora_r);
    else
        fputs(preset->value, out);
    fprintf(out, "  # default of %s\n", c->tool);
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

static bl_status write(const conversion *c, FILE *out)
{
    fprintf(out, "# A configuration of %s, for `ballast train`; it was:\n", c->tool);
    write_comment(c->path, out);
    for (size_t i = 0; i < bl_train_n_options; i++) BL_TRY(write_key(c, &bl_train_options[i], out));
    bl_status st = bl_options_check_required(&c->options);
    if (st != BL_OK) {
        fprintf(out, "\n# To add: %s\n", bl_error_text());
        bl_log_warning("%s: %s", c->path, bl_error_text());
    }
    write_comments("No counterpart:", &c->report.rejected, out);
    write_comments("No effect here:", &c->report.ignored, out);
    fputs("\n# Differences that no key removes:\n", out);
    for (size_t i = 0; i < BL_COUNT(notes); i++)
        if (strcmp(notes[i].tool, c->tool) == 0) write_comment(notes[i].text, out);
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
    bl_train_config_free(c.config);
    return st;
}
