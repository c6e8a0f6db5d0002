/* SPDX-License-Identifier: Apache-2.0 */
/* cli.h -- the struct of a subcommand. Each has a separate file with one constant; main.c lists
 * them. */
#ifndef BALLAST_CLI_CLI_H
#define BALLAST_CLI_CLI_H

#include <stdbool.h>
#include <stdio.h>

#include "job/launch.h"
#include "options/options.h"
#include "base/status.h"

typedef struct bl_command {
    const char *name;
    const char *arguments; /* as in "CONFIG.yaml [--key value ...]" */
    const char *summary;   /* one line */
    const char *details;   /* paragraphs for --help; lines end in \n */
    /* Its options; NULL: it has none. */
    void (*print_options)(FILE *out, bl_options_style style);
    /* Its product is files: it continues when its log has no reader (SIGPIPE is ignored). */
    bool is_job;
    /* argv without the program and the command; --help has been dealt with. Output goes to stdout;
     * the caller reports a failure. */
    bl_status (*run)(int argc, char *const *argv);
} bl_command;

/* The command of that name; NULL, with a failure recorded, if there is none. */
const bl_command *bl_cli_find_command(const char *name);

/* `ballast COMMAND --help`. */
void bl_cli_print_command(const bl_command *command);

extern const bl_command bl_command_train, bl_command_eval;
extern const bl_command bl_command_generate;
extern const bl_command bl_command_tokenize;
extern const bl_command bl_command_inspect;
extern const bl_command bl_command_quantize, bl_command_dequantize;
extern const bl_command bl_command_merge, bl_command_verify, bl_command_convert_adapter;
extern const bl_command bl_command_plan;
extern const bl_command bl_command_bench;
extern const bl_command bl_command_config;

/* The options of a command with a separate small table, whose rows have .commands = BL_CLI_ANY. */
enum { BL_CLI_ANY = 1 };
#define BL_CLI_OPTIONS(rows, struct_pointer, origin_array)                                         \
    {                                                                                              \
        .table = (rows), .n_options = sizeof(rows) / sizeof((rows)[0]), .command = BL_CLI_ANY,     \
        .values = (struct_pointer), .origins = (origin_array)                                      \
    }
/* Defaults, then argv, then the check for required options; other words go to words[max_words]. The
 * caller clears `options`, also after a failure. */
bl_status bl_cli_read(const bl_options *options, int argc, char *const *argv, int max_words,
                      const char **words, int *n_words);
void bl_cli_print_table(const bl_option *table, size_t n_options, FILE *out,
                        bl_options_style style);

/* This process as the parent of its host's ranks (bl_launch_run_ranks), which are given the same
 * command and words. deadline_s: of their communicator; 0: none. */
bl_status bl_cli_start_ranks(bl_launch *launch, int n_here, const char *command, int argc,
                             char *const *argv, bool takes_requests, double deadline_s);

#endif
