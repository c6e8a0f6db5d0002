/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench optimizer: AdamW's update on the CPU as bytes per second, with moments in fp32 and
 * in bf16, against memcpy on the same threads. The three alternate, run by run, since the
 * speed of shared machines varies. Bytes: an update reads weight, gradient and both moments and
 * writes weight and moments (28 bytes per weight in fp32, 20 in bf16); memcpy reads and writes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "device/device.h"
#include "ops/optimizer.h"

typedef struct optimizer_options {
    int64_t weights, stagger, threads, runs;
} optimizer_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench optimizer", .type = BL_OPTION_##kind,                           \
    .offset = offsetof(optimizer_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(weights, INT), .default_text = "67108864", .min = 1024, .max = INT64_C(1) << 36,
     .help = "weights to update; takes 28 bytes of memory per weight"},
    {OPTION(stagger, INT), .default_text = "0", .max = 1 << 20,
     .help = "bytes, a multiple of 64, by which each array begins later behind a multiple of 2 MiB "
             "than the one before it"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "CPU threads"},
    {OPTION(runs, INT), .default_text = "9", .min = 1, .max = BL_BENCH_MAX_RUNS,
     .help = "timed runs of each"},
};

enum { COPY, FP32, BF16, N_CONTENDERS, MAX_BLOCKS = 8, LARGE_BYTES = 2 << 20 };
static const char *const contender_names[N_CONTENDERS] = {"memcpy", "fp32", "bf16"};
static const double LR = 1e-3, GRADIENT = 0.25;

typedef struct optimizer_bench {
    const optimizer_options *options;
    bl_device *device;
    bl_stream *stream;
    int64_t n_threads;
    float *w, *grad, *from, *to;
    void *m[N_CONTENDERS], *v[N_CONTENDERS];
    int64_t step[N_CONTENDERS];
    double *seconds[N_CONTENDERS], *quotients; /* of each run */
    void *blocks[MAX_BLOCKS];
    int n_blocks;
} optimizer_bench;

/* Of a thread: one call, so that memcpy uses its code for sizes beyond the caches. */
static void copy_item(void *arg, int64_t index, void *scratch)
{
    const optimizer_bench *b = arg;
    int64_t n = b->options->weights, begin = n * index / b->n_threads,
            end = n * (index + 1) / b->n_threads;
    (void)scratch;
    memcpy(b->to + begin, b->from + begin, (size_t)(end - begin) * sizeof *b->to);
}

static void fill_item(void *arg, int64_t index, void *scratch)
{
    const optimizer_bench *b = arg;
    int64_t n = b->options->weights, begin = n * index / b->n_threads,
            end = n * (index + 1) / b->n_threads;
    (void)scratch;
    for (int64_t i = begin; i < end; i++) {
        b->w[i] = 1;
        b->grad[i] = (float)(i % 2 ? GRADIENT : -GRADIENT);
        b->from[i] = (float)i;
    }
}

static bl_status run_once(optimizer_bench *b, int contender, double *seconds)
{
    double begin = bl_now_s();

    if (contender == COPY) {
        bl_pool_run(bl_device_pool(b->device), b->n_threads, copy_item, b);
    } else {
        bl_dtype dtype = contender == FP32 ? BL_F32 : BL_BF16;
        bl_adamw_args args = {.n = b->options->weights,
                              .step = ++b->step[contender],
                              .lr = LR,
                              .beta1 = 0.9,
                              .beta2 = 0.999,
                              .eps = 1e-8,
                              .grad = b->grad,
                              .w = b->w,
                              .m = bl_tensor_of(b->m[contender], dtype),
                              .v = bl_tensor_of(b->v[contender], dtype),
                              .seed = 42};
        BL_TRY(bl_adamw(b->stream, &args));
        BL_TRY(bl_stream_synchronize(b->stream));
    }
    *seconds = bl_now_s() - begin;
    return BL_OK;
}

/* The first step moves each weight by the rate, against the gradient's sign; and the copy is
 * whole. */
static bl_status verify(optimizer_bench *b)
{
    double seconds;

    for (int k = 0; k < N_CONTENDERS; k++) {
        bl_pool_run(bl_device_pool(b->device), b->n_threads, fill_item, b);
        BL_TRY(run_once(b, k, &seconds));
        for (int64_t i = 0; k != COPY && i < b->options->weights; i++)
            if (fabs((double)b->w[i] - (i % 2 ? 1 - LR : 1 + LR)) > 1e-6)
                return BL_FAIL(BL_EINTERNAL, "bench optimizer: %s: weight %lld is %.9g",
                               contender_names[k], (long long)i, (double)b->w[i]);
    }
    if (memcmp(b->from, b->to, (size_t)b->options->weights * sizeof *b->to) != 0)
        return BL_FAIL(BL_EINTERNAL, "bench optimizer: the copy differs");
    return BL_OK;
}

static double bytes_of(const optimizer_bench *b, int contender)
{
    double n = (double)b->options->weights, moment = contender == FP32 ? 4 : 2;
    return contender == COPY ? 8 * n : (12 + 4 * moment) * n;
}

/* The median of the runs' own quotients: a change of the machine's speed between runs cancels. */
static double median_of_memcpy(optimizer_bench *b, int contender)
{
    int64_t n = b->options->runs;
    double *quotients = b->quotients;

    for (int64_t i = 0; i < n; i++)
        quotients[i] = bytes_of(b, contender) / b->seconds[contender][i] /
                       (bytes_of(b, COPY) / b->seconds[COPY][i]);
    return bl_bench_summarize(quotients, n).median_s;
}

static bl_status measure(optimizer_bench *b)
{
    const optimizer_options *o = b->options;
    double of_memcpy[N_CONTENDERS];

    for (int64_t run = 0; run < o->runs; run++)
        for (int k = 0; k < N_CONTENDERS; k++) BL_TRY(run_once(b, k, &b->seconds[k][run]));
    for (int k = 0; k < N_CONTENDERS; k++) of_memcpy[k] = median_of_memcpy(b, k);
    for (int k = 0; k < N_CONTENDERS; k++) {
        bl_bench_times times = bl_bench_summarize(b->seconds[k], o->runs);
        printf("{\"bench\":\"optimizer\",\"contender\":\"%s\",\"weights\":%lld,\"stagger\":%lld,"
               "\"threads\":%lld,\"runs\":%lld,\"seconds\":%.6g,\"median_seconds\":%.6g,\"gb_per_"
               "s\":%.4g,"
               "\"of_memcpy\":%.3f}\n",
               contender_names[k], (long long)o->weights, (long long)o->stagger,
               (long long)b->n_threads, (long long)o->runs, times.best_s, times.median_s,
               bytes_of(b, k) / times.best_s * 1e-9, of_memcpy[k]);
    }
    return BL_OK;
}

static bl_status take(optimizer_bench *b, int64_t element, void *out)
{
    int64_t n_bytes = b->options->weights * element, stagger = b->options->stagger * b->n_blocks;
    void *block;
    char *memory;

    BL_TRY(bl_device_alloc(b->device, BL_SPACE_DEVICE, (size_t)(n_bytes + stagger + LARGE_BYTES),
                           "bench optimizer", &block));
    b->blocks[b->n_blocks++] = block;
    memory = (char *)block + (LARGE_BYTES - (int64_t)((uintptr_t)block % LARGE_BYTES)) + stagger;
    memcpy(out, &memory, sizeof memory);
    return BL_OK;
}

static bl_status allocate(optimizer_bench *b)
{
    float **const floats[] = {&b->w, &b->grad, &b->from, &b->to};

    for (size_t i = 0; i < BL_COUNT(floats); i++) BL_TRY(take(b, sizeof(float), floats[i]));
    for (int k = FP32; k < N_CONTENDERS; k++) {
        int64_t element = k == FP32 ? 4 : 2;
        BL_TRY(take(b, element, &b->m[k]));
        BL_TRY(take(b, element, &b->v[k]));
    }
    b->quotients = calloc((size_t)b->options->runs, sizeof *b->quotients);
    for (int k = 0; k < N_CONTENDERS; k++) {
        b->seconds[k] = calloc((size_t)b->options->runs, sizeof *b->seconds[k]);
        if (!b->seconds[k] || !b->quotients)
            return BL_FAIL(BL_ENOMEM, "out of memory: bench optimizer's times");
    }
    return BL_OK;
}

static void release(optimizer_bench *b)
{
    for (int i = 0; i < b->n_blocks; i++) bl_device_free(b->device, BL_SPACE_DEVICE, b->blocks[i]);
    for (int k = 0; k < N_CONTENDERS; k++) free(b->seconds[k]);
    free(b->quotients);
    bl_stream_destroy(b->stream);
    bl_device_destroy(b->device);
}

static bl_status run(const void *values)
{
    const optimizer_options *o = values;
    optimizer_bench b = {.options = o};

    b.n_threads = o->threads == BL_OPTION_AUTO ? sysconf(_SC_NPROCESSORS_ONLN) : o->threads;
    if (o->stagger % 64 != 0)
        return BL_FAIL(BL_EUSAGE, "--stagger %lld: must be a multiple of 64",
                       (long long)o->stagger);
    BL_TRY(bl_device_create_cpu((int)b.n_threads, &b.device));
    bl_status st = bl_stream_create(b.device, "bench", &b.stream);
    if (st == BL_OK) st = allocate(&b);
    if (st == BL_OK) st = verify(&b);
    if (st == BL_OK) st = measure(&b);
    release(&b);
    return st;
}

const bl_bench bl_bench_optimizer = {
    .name = "optimizer",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(optimizer_options),
    .details = "JSON lines: memcpy, and AdamW with moments in fp32 and in bf16, with seconds of "
               "the fastest run and its\n"
               "bytes per second, reads and writes counted (28 bytes per weight in fp32, 20 in "
               "bf16); of_memcpy is the\n"
               "median over runs of the ratio to memcpy's rate in the same run.\n",
    .run = run,
};
