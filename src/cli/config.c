/* SPDX-License-Identifier: Apache-2.0 */
/* ballast config: another program's configuration as Ballast's. */
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "config/config.h"

typedef struct config_options {
    char *from;
    int tool;
} config_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "Options", .type = BL_OPTION_##kind,                                   \
    .offset = offsetof(config_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(from, PATH), .required_by = BL_CLI_ANY, .help = "configuration of another program"},
    {OPTION(tool, ENUM), .default_text = "auto",
     .names = "auto|axolotl|llamafactory|trl|torchtune|trl-sft|trl-dpo|trl-kto|trl-orpo|trl-cpo",
     .help = "the program, or a trainer of TRL; auto detects it by its keys"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

static bl_status run(int argc, char *const *argv)
{
    static const char *const names[] = {NULL,        "axolotl", "llamafactory", "trl",
                                        "torchtune", "trl-sft", "trl-dpo",      "trl-kto",
                                        "trl-orpo",  "trl-cpo"};
    bl_status st;
    config_options values;
    uint8_t origins[BL_COUNT(table)];
    int n_words;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 0, NULL, &n_words));
    st = bl_train_config_convert(values.from, names[values.tool], stdout);
done:
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_config = {
    .name = "config",
    .arguments = "--from FILE.yaml [--tool NAME]",
    .summary = "print another program's configuration as Ballast's",
    .details = "Reads a YAML configuration of axolotl, LLaMA-Factory, TRL or torchtune and prints "
               "one for\n"
               "`ballast train`: its keys, that program's defaults where they differ, and, as "
               "comments, what has no\n"
               "counterpart, with the reason. Keys that would change training are also warnings.\n",
    .print_options = print_options,
    .run = run,
};
