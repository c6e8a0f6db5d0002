/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench linear: the quantised LoRA linear layer against a plain GEMM of the same shape, in one run. The
 * CPU's is here; linear_cuda.c has a GPU's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/linear_cuda.h"
#include "device/staging.h"
#include "linear/lora_linear.h"
#include "llama/projection.h"
#include "ops/matmul.h"
#include "train/metrics.h"

typedef struct bench_options {
    char *model;
    int64_t tokens, lora_r, threads, runs;
    bl_string_list formats, matrices;
    bl_device_kind device;
} bench_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench linear", .type = BL_OPTION_##kind,                              \
    .offset = offsetof(bench_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(device, ENUM), .default_text = "cpu", .names = "cpu|cuda",
     .help = "cpu, or cuda for the first GPU"},
    {OPTION(model, STRING), .default_text = "llama3.2-1b",
     .help = "whose shapes: a name as in llama3.1-8b"},
    {OPTION(matrices, LIST), .default_text = "qkv,o,gate_up,down",
     .help = "the fused matrices to measure"},
    {OPTION(formats, LIST), .default_text = "fp8_row,fp8_block,bf16,f32",
     .help = "how the frozen weight is held"},
    {OPTION(tokens, INT), .default_text = "512", .min = 1, .max = 1 << 20,
     .help = "tokens of the micro-batch"},
    {OPTION(lora_r, INT), .default_text = "16", .min = 1, .max = 4096,
     .help = "rank of the adapter on every projection"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "CPU threads"},
    {OPTION(runs, INT), .default_text = "5", .min = 1, .max = 1000,
     .help = "timed runs, each beside a run of the plain GEMM"},
};

static const char *const matrix_names[BL_LAYER_MATRICES] = {"qkv", "o", "gate_up", "down"};

/* One case and its memory. */
typedef struct bench_case {
    const bench_options *options;
    bl_device *device;
    bl_stream *stream;
    int matrix;
    bl_format format;
    int64_t T, N, K;
    float *block, *x, *y, *dx, *dense;
    unsigned char *codes;
    float *scales;
    bl_lora_linear linear;
} bench_case;

/* Deterministic values in [-0.5, 0.5) for n floats of device memory: the speed of a GEMM depends on them
 * little, that of an FP8 encoder not at all. */
static bl_status fill(bl_device *device, float *to, int64_t n)
{
    uint32_t state = 12345;
    bl_staging *staging;

    BL_TRY(bl_staging_create(device, BL_STAGING_BYTES, "staging of bench matrices", &staging));
    float *x = staging->bytes;
    int64_t most = (int64_t)(staging->n_bytes / sizeof *x);
    bl_status st = BL_OK;
    for (int64_t first = 0, n_piece; st == BL_OK && first < n; first += n_piece) {
        n_piece = bl_min_i64(most, n - first);
        for (int64_t i = 0; i < n_piece; i++) {
            state = state * 1664525u + 1013904223u;
            x[i] = (float)(state >> 8) * 0x1p-24f - 0.5f;
        }
        st = bl_staging_upload(staging, to + first, x, (size_t)n_piece * sizeof *x);
    }
    bl_staging_destroy(staging);
    return st;
}

/* A task of the stream: the weight in its format is made where it lies. */
static bl_status encode_weight(bl_stream *stream, const void *args)
{
    const bench_case *c = *(bench_case *const *)args;
    bl_pool *pool = bl_device_pool(bl_stream_device(stream));
    switch (c->format) {
    case BL_FORMAT_FP8_ROW:
        return bl_fp8_row_quantise(pool, BL_F32, c->dense, 0, c->N, c->K, c->codes, c->scales);
    case BL_FORMAT_FP8_BLOCK:
        return bl_fp8_block_quantise(pool, BL_F32, c->dense, c->N, c->K, c->codes, c->scales);
    case BL_FORMAT_BF16:
        for (int64_t i = 0; i < c->N * c->K; i++)
            ((uint16_t *)(void *)c->codes)[i] = bl_f32_to_bf16(c->dense[i]);
        return BL_OK;
    case BL_FORMAT_F16:
        for (int64_t i = 0; i < c->N * c->K; i++)
            ((uint16_t *)(void *)c->codes)[i] = bl_f32_to_f16(c->dense[i]);
        return BL_OK;
    default:
        memcpy(c->codes, c->dense, (size_t)(c->N * c->K) * sizeof(float));
        return BL_OK;
    }
}

static bl_status allocate(bench_case *c)
{
    int64_t r = c->options->lora_r, T = c->T, N = c->N, K = c->K;
    c->linear.workspace_bytes = bl_lora_linear_workspace_bytes(BL_DEVICE_CPU, &c->linear, T);
    int64_t workspace = (int64_t)(c->linear.workspace_bytes / sizeof(float));
    int64_t floats = 2 * T * K + T * N + N * K + 2 * (r * K * BL_LORA_PARTS + N * r) + workspace;
    size_t code_bytes, n_scales;

    if (!bl_format_sizes(c->format, N, K, &code_bytes, &n_scales))
        return BL_FAIL(BL_EUSAGE, "the matrix is too large");
    BL_TRY(bl_device_alloc(c->device, BL_SPACE_DEVICE, (size_t)floats * sizeof(float),
                           "bench matrices", (void **)&c->block));
    BL_TRY(bl_device_alloc(c->device, BL_SPACE_DEVICE, code_bytes, "bench weight",
                           (void **)&c->codes));
    BL_TRY(bl_device_alloc(c->device, BL_SPACE_DEVICE, n_scales * sizeof(float), "bench scales",
                           (void **)&c->scales));
    BL_TRY(fill(c->device, c->block, floats));
    float *at = c->block;
    c->x = at, at += T * K;
    c->dx = at, at += T * K;
    c->y = at, at += T * N;
    c->dense = at, at += N * K;
    c->linear.workspace = at, at += workspace;
    for (int p = 0; p < c->linear.n_parts; p++) {
        bl_lora_part *part = &c->linear.part[p];
        part->A = bl_tensor_f32(at), at += r * K;
        part->dA = at, at += r * K;
        part->B = bl_tensor_f32(at), at += part->rows * r;
        part->dB = at, at += part->rows * r;
    }
    BL_TRY(bl_stream_call(c->stream, encode_weight, &c, sizeof c));
    return bl_stream_synchronize(c->stream);
}

static void describe(bench_case *c, const bl_llama_config *config)
{
    bl_weight *w = &c->linear.weight;
    int64_t rows, cols;
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        if ((int)bl_projection_get((bl_projection)p)->matrix != c->matrix) continue;
        bl_projection_shape(config, (bl_projection)p, &rows, &cols);
        c->linear.part[c->linear.n_parts++] = (bl_lora_part){
            .r = c->options->lora_r, .row_begin = w->rows, .rows = rows, .scale = 2.0f};
        w->rows += rows;
        w->cols = cols;
    }
    c->N = w->rows;
    c->K = w->cols;
    c->T = c->options->tokens;
}

static bl_status plain_gemm(bench_case *c, bool forward)
{
    bl_matmul_args args = {.transpose_b = forward,
                           .M = c->T,
                           .N = forward ? c->N : c->K,
                           .K = forward ? c->K : c->N,
                           .lda = forward ? c->K : c->N,
                           .ldb = c->K,
                           .ldc = forward ? c->N : c->K,
                           .alpha = 1.0f,
                           .a = bl_tensor_f32(forward ? c->x : c->y),
                           .b = bl_tensor_f32(c->dense),
                           .c = bl_tensor_f32(forward ? c->y : c->dx)};
    BL_TRY(bl_matmul(c->stream, &args));
    return bl_stream_synchronize(c->stream);
}

static bl_status layer(bench_case *c, bool forward)
{
    bl_tensor x = bl_tensor_f32(c->x), y = bl_tensor_f32(c->y), dx = bl_tensor_f32(c->dx);
    BL_TRY(forward ? bl_lora_linear_forward(c->stream, &c->linear, c->T, x, y)
                   : bl_lora_linear_backward(c->stream, &c->linear, c->T, x, y, dx));
    return bl_stream_synchronize(c->stream);
}

static bl_status measure(bench_case *c, bool forward)
{
    double best_gemm = INFINITY, best_layer = INFINITY;
    for (int64_t run = -1; run < c->options->runs; run++) { /* run -1 warms up */
        double start = bl_now_s();
        BL_TRY(plain_gemm(c, forward));
        double middle = bl_now_s();
        BL_TRY(layer(c, forward));
        double end = bl_now_s();
        if (run < 0) continue;
        best_gemm = fmin(best_gemm, middle - start);
        best_layer = fmin(best_layer, end - middle);
    }
    double flops = 2.0 * (double)c->T * (double)c->N * (double)c->K;
    printf("{\"bench\":\"linear\",\"matrix\":\"%s\",\"rows\":%lld,\"cols\":%lld,\"tokens\":%lld,"
           "\"format\":\"%"
           "s\",\"lora_r\":%lld,"
           "\"pass\":\"%s\",\"seconds\":%.6f,\"gflops\":%.2f,\"gemm_gflops\":%.2f,\"percent_of_"
           "gemm\":%.1f}\n",
           matrix_names[c->matrix], (long long)c->N, (long long)c->K, (long long)c->T,
           bl_format_name(c->format), (long long)c->options->lora_r,
           forward ? "forward" : "backward", best_layer, flops / best_layer * 1e-9,
           flops / best_gemm * 1e-9, 100.0 * best_gemm / best_layer);
    fflush(stdout);
    return BL_OK;
}

static bl_status run_case(bench_case *c)
{
    bl_status st;
    BL_TRY_GOTO(st, done, allocate(c));
    c->linear.weight.n_segments = 1;
    c->linear.weight.segment[0] = (bl_weight_segment){c->format, c->codes, c->scales, c->N};
    BL_TRY_GOTO(st, done, measure(c, true));
    st = measure(c, false);
done:
    bl_device_free(c->device, BL_SPACE_DEVICE, c->block);
    bl_device_free(c->device, BL_SPACE_DEVICE, c->codes);
    bl_device_free(c->device, BL_SPACE_DEVICE, c->scales);
    return st;
}

static bl_status parse_matrix(const char *name, int *out)
{
    for (*out = 0; *out < BL_LAYER_MATRICES; ++*out)
        if (strcmp(matrix_names[*out], name) == 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "matrices: %s is none of qkv, o, gate_up, down", name);
}

static bl_status run_cuda_case(const bench_case *c)
{
    return bl_bench_linear_cuda(c->device, c->stream,
                                &(bl_linear_case){.model = c->options->model,
                                                  .matrix = matrix_names[c->matrix],
                                                  .format = c->format,
                                                  .T = c->T,
                                                  .runs = c->options->runs,
                                                  .linear = c->linear});
}

static bl_status create_device(const bench_options *o, bl_device **out)
{
    if (o->device == BL_DEVICE_CUDA) return bl_device_create_cuda(0, out);
    return bl_device_create_cpu(
        (int)(o->threads == BL_OPTION_AUTO ? sysconf(_SC_NPROCESSORS_ONLN) : o->threads), out);
}

static bl_status run(const void *values)
{
    const bench_options *o = values;
    bl_llama_config config;
    bl_device *device = NULL;
    bl_stream *stream = NULL;
    bl_status st;

    BL_TRY(bl_llama_config_preset(o->model, &config));
    BL_TRY_GOTO(st, done, create_device(o, &device));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "bench", &stream));
    for (int64_t m = 0; m < o->matrices.n_items; m++)
        for (int64_t f = 0; f < o->formats.n_items; f++) {
            bench_case c = {.options = o, .device = device, .stream = stream};
            BL_TRY_GOTO(st, done, parse_matrix(o->matrices.items[m], &c.matrix));
            if (!bl_format_parse(o->formats.items[f], &c.format)) {
                st = BL_FAIL(BL_EUSAGE, "formats: %s is no format", o->formats.items[f]);
                goto done;
            }
            describe(&c, &config);
            BL_TRY_GOTO(st, done, o->device == BL_DEVICE_CUDA ? run_cuda_case(&c) : run_case(&c));
        }
done:
    bl_stream_destroy(stream);
    bl_device_destroy(device);
    return st;
}

const bl_bench bl_bench_linear = {
    .name = "linear",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(bench_options),
    .details = "A JSON line for each matrix, format and pass: the layer with its adapter, "
               "everything included, beside "
               "an fp32\n"
               "GEMM of the frozen matrix's shape, alternating in one run; the best of --runs. "
               "Backward is dx, dA and "
               "dB; its GEMM is\n"
               "dx's alone. On a GPU FP8 formats are measured decoded and as FP8, beside the "
               "fastest bf16 and FP8 GEMMs that "
               "cuBLASLt\n"
               "offers; docs/gpu.md explains the fields.\n",
    .run = run,
};
