/* SPDX-License-Identifier: Apache-2.0 */
/* ballast quantize: a Hugging Face directory in, an FP8 one out. */
#include "base/cores.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "convert/quantize.h"

typedef struct quantize_options {
    bl_format base_format; /* the names below begin as the enum does */
    bl_io_engine io_engine;
    int64_t threads;
} quantize_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "Options", .type = BL_OPTION_##kind,                                   \
    .offset = offsetof(quantize_options, field), .commands = BL_CLI_ANY

_Static_assert(BL_FORMAT_FP8_ROW == 0 && BL_FORMAT_FP8_BLOCK == 1,
               "the order of base_format's names");

static const bl_option table[] = {
    {OPTION(base_format, ENUM), .names = "fp8_row|fp8_block", .default_text = "fp8_row",
     .help = "scales: one per row, or one per block of 128 x 128"},
    {OPTION(io_engine, ENUM), .names = "auto|uring|pread", .default_text = "auto",
     .help = "engine for reading the source"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 4096,
     .help = "CPU threads"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

static bl_status quantize(const char *source, const char *target, const quantize_options *values)
{
    bl_quantize_options options = {.source = source,
                                   .target = target,
                                   .format = values->base_format,
                                   .io_engine = values->io_engine};
    bl_quantize_result result;
    int64_t threads = values->threads == BL_OPTION_AUTO ? bl_cores_usable() : values->threads;

    BL_TRY(bl_pool_create((int)threads, &options.pool));
    bl_status st = bl_model_quantize(&options, &result);
    bl_pool_destroy(options.pool);
    if (st == BL_OK)
        bl_log_info("%s: %lld files, %lld of them finished before; %.1f MB became %.1f MB", target,
                    (long long)result.n_files, (long long)result.n_kept,
                    (double)result.n_bytes_read * 1e-6, (double)result.n_bytes_written * 1e-6);
    return st;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    quantize_options values;
    uint8_t origins[BL_COUNT(table)];
    const char *folders[2];
    int n_words;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 2, folders, &n_words));
    st = n_words == 2
             ? quantize(folders[0], folders[1], &values)
             : BL_FAIL(BL_EUSAGE, "quantize: missing directory; usage: ballast quantize SRC DST");
done:
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_quantize = {
    .name = "quantize",
    .arguments = "SRC DST [--base_format fp8_row|fp8_block]",
    .summary = "write a model with FP8 projections",
    .details =
        "Reads the Hugging Face directory SRC and writes DST, in the format of compressed-tensors "
        "with "
        "F32 scales,\n"
        "which vLLM serves and `ballast train` takes as it is. Training from DST gives the same "
        "bits "
        "as training\n"
        "from SRC with that base_format. An interrupted run is resumed: finished files are "
        "verified and\n"
        "kept. DST must be new, empty, or begun from the same SRC.\n",
    .print_options = print_options,
    .is_job = true,
    .run = run,
};
