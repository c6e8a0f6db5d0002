/* SPDX-License-Identifier: Apache-2.0 */
/* ballast convert-adapter: an adapter with its routed experts in another layout. */
#include <stdio.h>

#include "cli/cli.h"
#include "convert/adapter.h"

typedef enum layout_name { LAYOUT_PEFT, LAYOUT_PER_EXPERT } layout_name;

typedef struct convert_options {
    layout_name adapter_layout;
    char *model;
} convert_options;

static const bl_option table[] = {
    {.key = "adapter_layout",
     .group = "Options",
     .type = BL_OPTION_ENUM,
     .offset = offsetof(convert_options, adapter_layout),
     .commands = BL_CLI_ANY,
     .names = "peft|per_expert",
     .default_text = "peft",
     .help = "routed experts: stacked, as PEFT from 0.19.1 on has them, or a pair per expert"},
    {.key = "model",
     .group = "Options",
     .type = BL_OPTION_PATH,
     .offset = offsetof(convert_options, model),
     .commands = BL_CLI_ANY,
     .is_model = true,
     .help = "directory of the base, of which config.json is read; without it the one that the "
             "adapter names"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, sizeof table / sizeof table[0], out, style);
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    convert_options values;
    uint8_t origins[sizeof table / sizeof table[0]];
    const char *words[2];
    int n_words;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 2, words, &n_words));
    if (n_words < 2) {
        st = BL_FAIL(BL_EUSAGE, "convert-adapter: missing directory; usage: ballast "
                                "convert-adapter IN OUT [--adapter_layout peft|per_expert]");
        goto done;
    }
    st = bl_adapter_convert(words[0], words[1], values.model,
                            values.adapter_layout == LAYOUT_PEFT ? BL_PEFT_STACKED
                                                                 : BL_PEFT_PER_EXPERT);
    if (st == BL_OK) printf("%s: written\n", words[1]);
done:
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_convert_adapter = {
    .name = "convert-adapter",
    .arguments = "IN OUT [--adapter_layout peft|per_expert]",
    .summary = "write an adapter with its routed experts in another layout",
    .details = "Reads adapters of PEFT 0.17 and later, and those with a pair per expert. vLLM and\n"
               "SGLang read a pair per expert of Mixtral and Qwen3-MoE.\n"
               "docs/models.md\n",
    .print_options = print_options,
    .run = run,
};
