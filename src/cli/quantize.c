/* SPDX-License-Identifier: Apache-2.0 */
/* ballast quantize: a Hugging Face directory in, one in FP8 or 4 bits out. ballast dequantize: a
 * quantized one in, one that is not out. */
#include "base/cores.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "convert/dequantize.h"
#include "convert/quantize.h"

typedef struct convert_options {
    int base_format;        /* an index of the names below */
    int base_format_scales; /* 1: largest; of quantize */
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
    {OPTION(base_format, ENUM), .names = BL_FORMATS_MADE, .default_text = "fp8_row",
     .help = "format of the projections"},
    {OPTION(base_format_scales, ENUM), .names = "least_squares|largest",
     .default_text = "least_squares", .help = "as of `ballast train`"},
    IO_ENGINE_AND_THREADS};

#define DEQUANTIZED "bf16|f16|f32"
static const bl_option dequantize_table[] = {
    {OPTION(base_format, ENUM), .names = DEQUANTIZED, .default_text = "bf16",
     .help = "format of the projections; f32 is exact, the others are rounded once"},
    IO_ENGINE_AND_THREADS};

/* One of the two commands. */
typedef struct conversion {
    const char *name;
    const bl_option *table;
    size_t n_options;
    const char *formats;
    bl_status (*run)(const bl_quantize_options *, bl_quantize_result *);
} conversion;

/* {"q_proj":{"matrices":30,"error":0.0267},...,"all":{...}} on stdout. error: root mean square,
 * relative to the weights'. */
static void print_errors(const bl_quantize_result *r)
{
    for (int i = 0; i < r->n_kinds; i++)
        printf("%s\"%s\":{\"matrices\":%lld,\"error\":%.6g}", i == 0 ? "{" : ",",
               r->kinds[i].name[0] ? r->kinds[i].name : "all", (long long)r->kinds[i].n_matrices,
               r->kinds[i].error);
    if (r->n_kinds > 0) printf("}\n");
    fflush(stdout);
}

static bl_status convert(const conversion *c, const char *source, const char *target,
                         const convert_options *values)
{
    bl_quantize_options options = {.source = source,
                                   .target = target,
                                   .format = bl_format_in(c->formats, values->base_format),
                                   .largest_scales = values->base_format_scales == 1,
                                   .io_engine = values->io_engine};
    bl_quantize_result result;
    int64_t threads = values->threads == BL_OPTION_AUTO ? bl_cores_usable() : values->threads;

    BL_TRY(bl_pool_create((int)threads, &options.pool));
    bl_status st = c->run(&options, &result);
    bl_pool_destroy(options.pool);
    if (st == BL_OK) print_errors(&result);
    if (st == BL_OK)
        bl_log_info("%s: %lld files, %lld of them finished before; %.1f MB became %.1f MB", target,
                    (long long)result.n_files, (long long)result.n_kept,
                    (double)result.n_bytes_read * 1e-6, (double)result.n_bytes_written * 1e-6);
    return st;
}

static bl_status run_command(const conversion *c, int argc, char *const *argv)
{
    bl_status st;
    convert_options values = {0};
    uint8_t origins[BL_COUNT(quantize_table)];
    const char *folders[2];
    int n_words;
    const bl_options options = {.table = c->table,
                                .n_options = c->n_options,
                                .command = BL_CLI_ANY,
                                .values = &values,
                                .origins = origins};

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 2, folders, &n_words));
    st = n_words == 2 ? convert(c, folders[0], folders[1], &values)
                      : BL_FAIL(BL_EUSAGE, "%s: missing directory; usage: ballast %s SRC DST",
                                c->name, c->name);
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
    return run_command(&(conversion){"quantize", quantize_table, BL_COUNT(quantize_table),
                                     BL_FORMATS_MADE, bl_model_quantize},
                       argc, argv);
}

const bl_command bl_command_quantize = {
    .name = "quantize",
    .arguments = "SRC DST [--base_format " BL_FORMATS_MADE "]",
    .summary = "write a model with FP8 or 4-bit projections",
    .details =
        "Reads the Hugging Face directory SRC and writes DST in the format of compressed-tensors\n"
        "(nf4: of bitsandbytes), which `ballast train` takes as it is. Training from DST gives "
        "the\n"
        "same bits as training from SRC with that base_format. Prints the error of each kind of\n"
        "projection as JSON: root mean square, relative to the weights'. An interrupted run is\n"
        "resumed: finished files are verified and kept. DST must be new, empty, or begun from the\n"
        "same SRC.\n",
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
    return run_command(&(conversion){"dequantize", dequantize_table, BL_COUNT(dequantize_table),
                                     DEQUANTIZED, bl_model_dequantize},
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
