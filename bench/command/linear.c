/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench linear: quantized LoRA linear layers against a plain GEMM of the same shape, in one
 * run. Options and shapes are here; linear_ranks.c measures on the CPU, linear_cuda.c on a GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/linear_cuda.h"
#include "bench/command/linear_ranks.h"
#include "bench/command/plan_for.h"
#include "linear/lora_linear.h"
#include "arch/config.h"

typedef struct bench_options {
    char *model;
    int64_t tokens, micro_batches, lora_r, threads, runs, layers, ranks, shard_size, ring_depth;
    double offload_ratio;
    bl_tier offload_tier; /* BL_TIER_HOST, BL_TIER_DISK */
    char *offload_dir, *plan_for;
    bl_string_list formats, matrices;
    bl_device_kind device;
    bool time_algorithms;
} bench_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench linear", .type = BL_OPTION_##kind,                              \
    .offset = offsetof(bench_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(device, ENUM), .default_text = "cpu", .names = "cpu|cuda",
     .help = "cpu, or cuda for the first GPU"},
    {OPTION(model, STRING), .default_text = "llama-3.2-1b",
     .help = "model with the shapes: llama-3.1-8b, ..."},
    {OPTION(matrices, LIST), .default_text = "qkv,o,gate_up,down",
     .help = "the fused matrices to measure"},
    {OPTION(formats, LIST), .default_text = "fp8_row,fp8_block,bf16,f32",
     .help = "how the frozen weight is held: " BL_FORMATS_MADE "|f32|bf16; 4 bits on CPUs only"},
    {OPTION(tokens, INT), .default_text = "512", .min = 1, .max = 1 << 20,
     .help = "tokens of the micro-batch"},
    {OPTION(micro_batches, INT), .default_text = "1", .min = 1, .max = 1024,
     .help = "micro-batches of a visit that share prepared weights, on a GPU"},
    {OPTION(lora_r, INT), .default_text = "16", .min = 1, .max = 4096,
     .help = "rank of the adapter on every projection"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "CPU threads per rank"},
    {OPTION(runs, INT), .default_text = "5", .min = 1, .max = 1000,
     .help = "timed runs, each next to a run of the plain GEMM"},
    {OPTION(time_algorithms, BOOL), .default_text = "true",
     .help = "on a GPU, also with the fastest of cuBLASLt's algorithms: about 3 times as long"},
    {OPTION(ranks, INT), .default_text = "1", .min = 1, .max = 64,
     .help = "ranks of this process, each with its own tokens"},
    {OPTION(shard_size, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 64,
     .help = "ranks that share a weight's rows, must divide ranks; auto: all"},
    {OPTION(offload_ratio, REAL), .default_text = "0", .min = 0, .max = 1,
     .help = "fraction of the frozen weights in offload_tier"},
    {OPTION(offload_tier, ENUM), .names = "device|host|disk", .default_text = "host",
     .help = "tier of offloaded weights: host or disk"},
    {OPTION(offload_dir, PATH), .default_text = "/tmp",
     .help = "where a scratch directory for page files is made, and removed"},
    {OPTION(ring_depth, INT), .default_text = "2", .min = 1, .max = 64,
     .help = "layers gathered at a time, the current one included"},
    {OPTION(layers, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "layers of each shape; auto: 1, and 4 times ring_depth when sharded or offloaded"},
    {OPTION(plan_for, STRING), .help = "print the memory and time needed on this GPU (h100, h200, "
                                       "...; here: this machine's), run nothing"},
};

static const char *const matrix_names[] = {"qkv", "o", "gate_up", "down"};

/* One case and its memory. */
typedef struct bench_case {
    const bench_options *options;
    bl_device *device;
    bl_stream *stream;
    int matrix;
    bl_format format;
    int64_t T, N, K;
    bl_lora_linear linear;
} bench_case;

static void describe(bench_case *c, const bl_model_config *config)
{
    bl_weight *w = &c->linear.weight;
    int64_t rows, cols;
    for (int p = 0; p < config->arch->n_projections; p++) {
        if ((int)config->arch->projections[p].matrix != c->matrix) continue;
        bl_projection_shape(config, p, &rows, &cols);
        c->linear.part[c->linear.n_parts++] = (bl_lora_part){
            .r = c->options->lora_r, .row_begin = w->rows, .rows = rows, .scale = 2.0f};
        w->rows += rows;
        w->cols = cols;
    }
    c->N = w->rows;
    c->K = w->cols;
    c->T = c->options->tokens;
}

static bl_status parse_matrix(const char *name, int *out)
{
    for (*out = 0; *out < (int)BL_COUNT(matrix_names); ++*out)
        if (strcmp(matrix_names[*out], name) == 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "matrices: %s is none of qkv, o, gate_up, down", name);
}

static bl_linear_case cuda_case(const bench_case *c)
{
    return (bl_linear_case){.model = c->options->model,
                            .matrix = matrix_names[c->matrix],
                            .format = c->format,
                            .T = c->T,
                            .runs = c->options->runs,
                            .micro_batches = c->options->micro_batches,
                            .time_algorithms = c->options->time_algorithms,
                            .linear = c->linear};
}

static bl_status run_cuda_case(const bench_case *c)
{
    bl_linear_case on_gpu = cuda_case(c);
    return bl_bench_linear_cuda(c->device, c->stream, &on_gpu);
}

/* Cases run one after the other: the largest decides the memory. */
static bl_status plan_case(const bench_case *c, const bl_hardware *gpu, bl_bench_needs *needs)
{
    bl_linear_case on_gpu = cuda_case(c);
    bl_linear_sizes sizes;

    BL_TRY(bl_bench_linear_sizes(&on_gpu, &sizes));
    needs->gpu = bl_max_i64(needs->gpu, sizes.all);
    needs->seconds += bl_bench_linear_seconds(&on_gpu, gpu);
    return BL_OK;
}

static int threads_of(const bench_options *o)
{
    if (o->threads != BL_OPTION_AUTO) return (int)o->threads;
    return (int)bl_max_i64(1, sysconf(_SC_NPROCESSORS_ONLN) / o->ranks);
}

static bl_status run_cpu_case(const bench_case *c, const char *dir, uint64_t key)
{
    const bench_options *o = c->options;
    int shard_size = (int)(o->shard_size == BL_OPTION_AUTO ? o->ranks : o->shard_size);
    int64_t layers = o->layers;

    if (layers == BL_OPTION_AUTO)
        layers = shard_size > 1 || o->offload_ratio > 0 ? 4 * o->ring_depth : 1;
    return bl_bench_linear_ranks(&(bl_linear_ranks_case){
        .matrix = matrix_names[c->matrix],
        .spec = {.rows = c->N,
                 .cols = c->K,
                 .format = c->format,
                 .lora = {.r = o->lora_r, .alpha = 2.0 * (double)o->lora_r}},
        .T = c->T,
        .layers = layers,
        .runs = o->runs,
        .ranks = (int)o->ranks,
        .shard_size = shard_size,
        .threads = threads_of(o),
        .ring_depth = (int)o->ring_depth,
        .ratio = o->offload_ratio,
        .tier = o->offload_tier,
        .dir = dir,
        .key = key});
}

static bl_status check_options(const bench_options *o)
{
    bool is_plain = o->ranks == 1 && o->offload_ratio == 0;

    if (o->shard_size != BL_OPTION_AUTO && o->ranks % o->shard_size != 0)
        return BL_FAIL(BL_EUSAGE, "shard_size %lld does not divide ranks %lld",
                       (long long)o->shard_size, (long long)o->ranks);
    if (o->offload_tier == BL_TIER_DEVICE)
        return BL_FAIL(BL_EUSAGE, "--offload_tier: host or disk");
    if (o->device == BL_DEVICE_CUDA && !is_plain)
        return BL_FAIL(BL_EUSAGE, "--device cuda: one rank, nothing offloaded");
    if (o->plan_for && o->device != BL_DEVICE_CUDA)
        return BL_FAIL(BL_EUSAGE, "--plan_for: of --device cuda only");
    if (o->device == BL_DEVICE_CPU && o->micro_batches != 1)
        return BL_FAIL(BL_EUSAGE, "--micro_batches: the CPU prepares nothing; use --device cuda");
    return BL_OK;
}

/* Where the cases run: on a GPU, on the CPU, or nowhere (gpu: they are planned). */
typedef struct place {
    bl_device *cuda;
    bl_stream *stream;
    const char *dir;
    const bl_hardware *gpu;
    bl_bench_needs *needs;
} place;

static bl_status run_cases(const bench_options *o, const place *at)
{
    bl_model_config config;
    uint64_t key = 0;
    bl_status st;

    BL_TRY(bl_model_config_preset(o->model, &config));
    for (int64_t m = 0; m < o->matrices.n_items; m++)
        for (int64_t f = 0; f < o->formats.n_items; f++) {
            bench_case c = {.options = o, .device = at->cuda, .stream = at->stream};
            BL_TRY(parse_matrix(o->matrices.items[m], &c.matrix));
            if (!bl_format_parse(o->formats.items[f], &c.format))
                return BL_FAIL(BL_EUSAGE, "formats: %s is no format", o->formats.items[f]);
            if (o->device == BL_DEVICE_CUDA && bl_format_is_packed(c.format))
                return BL_FAIL(BL_EUSAGE, "formats: GPUs have no products of %s yet; use fp8_row",
                               o->formats.items[f]);
            describe(&c, &config);
            if (at->gpu)
                st = plan_case(&c, at->gpu, at->needs);
            else
                st = at->cuda ? run_cuda_case(&c) : run_cpu_case(&c, at->dir, ++key);
            BL_TRY(st);
        }
    return BL_OK;
}

static bl_status run_on_cuda(const bench_options *o)
{
    bl_device *device = NULL;
    bl_stream *stream = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_device_create_cuda(0, &device));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "bench", &stream));
    st = run_cases(o, &(place){.cuda = device, .stream = stream});
done:
    bl_stream_destroy(stream);
    bl_device_destroy(device);
    return st;
}

static bl_status plan(const bench_options *o)
{
    bl_hardware gpu;
    bl_bench_needs needs = {.seconds = bl_bench_start_s};

    BL_TRY(bl_bench_plan_gpu(o->plan_for, &gpu, &needs.gpu_available));
    BL_TRY(run_cases(o, &(place){.gpu = &gpu, .needs = &needs}));
    printf("{\"bench\":\"linear\",\"model\":\"%s\",\"tokens\":%lld,\"lora_r\":%lld,", o->model,
           (long long)o->tokens, (long long)o->lora_r);
    return bl_bench_plan_end("linear", o->plan_for, &needs);
}

static bl_status run(const void *values)
{
    const bench_options *o = values;
    char scratch[512];
    bl_error error;

    BL_TRY(check_options(o));
    if (o->plan_for) return plan(o);
    if (o->device == BL_DEVICE_CUDA) return run_on_cuda(o);
    if (o->offload_tier != BL_TIER_DISK || o->offload_ratio == 0) return run_cases(o, &(place){0});
    snprintf(scratch, sizeof scratch, "%s/ballast-bench-XXXXXX", o->offload_dir);
    if (!mkdtemp(scratch)) return bl_fail_errno(BL_EIO, "make a directory in %s", o->offload_dir);
    bl_error_save(&error, run_cases(o, &(place){.dir = scratch}));
    (void)bl_tree_remove(scratch);
    return bl_error_restore(&error);
}

const bl_bench bl_bench_linear = {
    .name = "linear",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(bench_options),
    .details =
        "A JSON line for each matrix, format and pass: a pass over `layers` layers with "
        "LoRA, against\n"
        "fp32 GEMMs of their shape and, when sharded or offloaded, against the same layers "
        "resident,\n"
        "taking turns in one run. seconds is the median of --runs; percentages are medians "
        "of those of each run.\n"
        "Backward is dx, dA and dB; its GEMM is dx's alone. Sharded and resident outputs "
        "are compared.\n"
        "On a GPU FP8 formats are measured dequantized and as FP8, against the fastest bf16 and "
        "FP8 GEMMs that\n"
        "cuBLASLt offers; bench/results/README.md explains the fields.\n",
    .run = run,
};
