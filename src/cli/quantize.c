/* SPDX-License-Identifier: Apache-2.0 */
/* ballast quantize: a Hugging Face directory in, an FP8 one out. ballast dequantize: an FP8 one in,
 * one without FP8 out. */
#include "base/cores.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "convert/dequantize.h"
#include "convert/quantize.h"

typedef struct convert_options {
    int base_format; /* an index of the names below */
    bl_io_engine io_engine;
    int64_t threads;
} convert_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "Options", .type = BL_OPTION_##kind,                                   \
    .offset = offsetof(convert_options, field), .commands = BL_CLI_ANY
#define IO_ENGINE_AND_THREADS                                                                      \
    {OPTION(io_engine, ENUM), .names = "auto|uring|pread", .default_text = "auto",                 \
     .help = "engine for reading the source"},                                                     \
    {                                                                                              \
        OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 4096,     \
                              .help = "CPU threads"                                                \
    }

static const bl_option quantize_table[] = {
    {OPTION(base_format, ENUM), .names = "fp8_row|fp8_block", .default_text = "fp8_row",
     .help = "scales: one per row, or one per block of 128 x 128"},
    IO_ENGINE_AND_THREADS};
static const bl_format quantize_formats[] = {BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK};

static const bl_option dequantize_table[] = {
    {OPTION(base_format, ENUM), .names = "bf16|f16|f32", .default_text = "bf16",
     .help = "format of the projections; f32 is exact, the others are rounded once"},
    IO_ENGINE_AND_THREADS};
static const bl_format dequantize_formats[] = {BL_FORMAT_BF16, BL_FORMAT_F16, BL_FORMAT_F32};

_Static_assert(BL_COUNT(quantize_table) == BL_COUNT(dequantize_table), "one array of origins");

static bl_status convert(const char *source, const char *target, const convert_options *values,
                         const bl_format *formats,
                         bl_status (*run)(const bl_quantize_options *, bl_quantize_result *))
{
    bl_quantize_options options = {.source = source,
                                   .target = target,
                                   .format = formats[values->base_format],
                                   .io_engine = values->io_engine};
    bl_quantize_result result;
    int64_t threads = values->threads == BL_OPTION_AUTO ? bl_cores_usable() : values->threads;

    BL_TRY(bl_pool_create((int)threads, &options.pool));
    bl_status st = run(&options, &result);
    bl_pool_destroy(options.pool);
    if (st == BL_OK)
        bl_log_info("%s: %lld files, %lld of them finished before; %.1f MB became %.1f MB", target,
                    (long long)result.n_files, (long long)result.n_kept,
                    (double)result.n_bytes_read * 1e-6, (double)result.n_bytes_written * 1e-6);
    return st;
}

static bl_status run_command(const char *name, const bl_option *table, const bl_format *formats,
                             bl_status (*run)(const bl_quantize_options *, bl_quantize_result *),
                             int argc, char *const *argv)
{
    bl_status st;
    convert_options values;
    uint8_t origins[BL_COUNT(quantize_table)];
    const char *folders[2];
    int n_words;
    const bl_options options = {.table = table,
                                .n_options = BL_COUNT(quantize_table),
                                .command = BL_CLI_ANY,
                                .values = &values,
                                .origins = origins};

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 2, folders, &n_words));
    st = n_words == 2
             ? convert(folders[0], folders[1], &values, formats, run)
             : BL_FAIL(BL_EUSAGE, "%s: missing directory; usage: ballast %s SRC DST", name, name);
done:
    bl_options_clear(&options);
    return st;
}

static void print_quantize_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(quantize_table, BL_COUNT(quantize_table), out, style);
}

static bl_status run_quantize(int argc, char *const *argv)
{
    return run_command("quantize", quantize_table, quantize_formats, bl_model_quantize, argc, argv);
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
    .print_options = print_quantize_options,
    .is_job = true,
    .run = run_quantize,
};

static void print_dequantize_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(dequantize_table, BL_COUNT(dequantize_table), out, style);
}

static bl_status run_dequantize(int argc, char *const *argv)
{
    return run_command("dequantize", dequantize_table, dequantize_formats, bl_model_dequantize,
                       argc, argv);
}

const bl_command bl_command_dequantize = {
    .name = "dequantize",
    .arguments = "SRC DST [--base_format bf16|f16|f32]",
    .summary = "write an FP8 or 4-bit model in bf16, f16 or f32",
    .details =
        "Reads the Hugging Face directory SRC, an FP8 checkpoint of any kind that `ballast train`\n"
        "takes, and writes DST with code * scale as weights and without quantization_config: for\n"
        "programs that do not read FP8. With f32 the loss of DST is that of SRC, bit for bit. An\n"
        "interrupted run is resumed: finished files are verified and kept. DST must be new, "
        "empty,\n"
        "or begun from the same SRC.\n",
    .print_options = print_dequantize_options,
    .is_job = true,
    .run = run_dequantize,
};
