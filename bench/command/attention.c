/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench attention: both passes of attention, on the CPU or a GPU, as floating-point
 * operations per second. Counted are 4 d operations per query head and pair of a query and a key it
 * sees for forward (two products), 10 d for backward (five; a kernel that makes some of them again
 * gets nothing for it). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/dtype.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/plan_for.h"
#include "ops/attention.h"

typedef struct attention_options {
    int64_t tokens, documents, heads, kv_heads, head_dim, window, threads, runs;
    bl_device_kind device;
    char *plan_for;
} attention_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench attention", .type = BL_OPTION_##kind,                           \
    .offset = offsetof(attention_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(device, ENUM), .default_text = "cpu", .names = "cpu|cuda",
     .help = "cpu, or cuda for the first GPU"},
    {OPTION(tokens, INT), .default_text = "2048", .min = 1, .max = 1 << 20,
     .help = "tokens of the micro-batch"},
    {OPTION(documents, INT), .default_text = "1", .min = 1, .max = 1 << 20,
     .help = "documents of equal length, at most one per token; the last one gets the rest"},
    {OPTION(heads, INT), .default_text = "32", .min = 1, .max = 1024, .help = "query heads"},
    {OPTION(kv_heads, INT), .default_text = "8", .min = 1, .max = 1024,
     .help = "key heads, must divide heads"},
    {OPTION(head_dim, INT), .default_text = "128", .min = 1, .max = 256, .help = "width of a head"},
    {OPTION(window, INT), .default_text = "0", .max = 1 << 20,
     .help = "keys that a query sees, its own included; 0: all up to its own"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "CPU threads"},
    {OPTION(runs, INT), .default_text = "5", .min = 1, .max = BL_BENCH_MAX_RUNS,
     .help = "timed runs of each pass"},
    {OPTION(plan_for, STRING), .help = "print the memory and time needed on this GPU (h100, h200, "
                                       "...; here: this machine's), run nothing"},
};

enum { PATTERN_ELEMENTS = 1 << 20, N_BUFFERS = 7 };

typedef struct attention_bench {
    const attention_options *options;
    bl_device *device;
    bl_stream *stream;
    bl_stamp *begin, *end;
    bl_dtype act;
    int64_t width; /* of a row of q, k and v */
    void *buffers[N_BUFFERS], *pattern;
    int n_buffers;
    int64_t taken_bytes; /* of these */
    int32_t *cu_seqlens; /* on the device */
    double n_pairs;      /* of a query and a key that it sees, of all documents */
    bl_tensor qkv, o, do_, d_qkv;
    float *lse, *delta;
    double *seconds;
} attention_bench;

/* A CPU could compute in bf16, too: the benchmark is of the default. */
static bl_dtype act_of(const attention_options *o)
{
    return o->device == BL_DEVICE_CUDA ? BL_BF16 : BL_F32;
}

/* A row of q, k and v; and elements of o. */
static int64_t row_width(const attention_options *o)
{
    return (o->heads + 2 * o->kv_heads) * o->head_dim;
}

/* The boundary of document i. */
static int32_t boundary(const attention_options *o, int64_t i)
{
    return (int32_t)(i < o->documents ? o->tokens / o->documents * i : o->tokens);
}

/* Pairs of a query and a key that it sees. */
static double count_pairs(const attention_options *o)
{
    double n_pairs = 0;

    for (int64_t i = 0; i < o->documents; i++) {
        double n = boundary(o, i + 1) - boundary(o, i),
               unseen = o->window > 0 ? fmax(0, n - (double)o->window) : 0;
        n_pairs += n * (n + 1) / 2 - unseen * (unseen + 1) / 2;
    }
    return n_pairs;
}

/* Of the device, as make_tensors allocates it: q, k, v and o and their gradients, statistics. */
static int64_t needed_bytes(const attention_options *o)
{
    int64_t element = (int64_t)bl_dtype_bytes(act_of(o));

    return 2 * o->tokens * (row_width(o) + o->heads * o->head_dim) * element +
           2 * o->tokens * o->heads * (int64_t)sizeof(float) +
           (o->documents + 1) * (int64_t)sizeof(int32_t);
}

/* Numbers in [-1, 1), followed by room for cu_seqlens and for two rows. */
static bl_status make_pattern(attention_bench *b)
{
    size_t bytes =
        (PATTERN_ELEMENTS + (size_t)b->options->documents + 1 + 2 * (size_t)b->width) * 4;
    uint32_t state = 12345;

    BL_TRY(bl_device_alloc(b->device, BL_SPACE_HOST, bytes, "bench attention", &b->pattern));
    for (int64_t i = 0; i < PATTERN_ELEMENTS; i++) {
        state = state * 1664525u + 1013904223u;
        float value = (float)(state >> 8) * 0x1p-23f - 1.0f;
        if (b->act == BL_F32)
            ((float *)b->pattern)[i] = value;
        else
            ((uint16_t *)b->pattern)[i] = bl_f32_to_bf16(value);
    }
    return BL_OK;
}

static bl_status take(attention_bench *b, size_t bytes, void *out)
{
    void *memory;
    BL_TRY(bl_device_alloc(b->device, BL_SPACE_DEVICE, bytes, "bench attention", &memory));
    b->taken_bytes += (int64_t)bytes;
    b->buffers[b->n_buffers++] = memory;
    memcpy(out, &memory, sizeof memory);
    return BL_OK;
}

/* A matrix of activations, the pattern over and over. */
static bl_status take_filled(attention_bench *b, int64_t rows, int64_t cols, bl_tensor *out)
{
    *out = bl_tensor_of(NULL, b->act);
    size_t bytes = bl_tensor_bytes(*out, rows * cols),
           piece = bl_tensor_bytes(*out, PATTERN_ELEMENTS);
    BL_TRY(take(b, bytes, &out->data));
    for (size_t done = 0; done < bytes; done += piece)
        BL_TRY(bl_stream_copy(b->stream, (char *)out->data + done, b->pattern,
                              bytes - done < piece ? bytes - done : piece));
    return BL_OK;
}

static bl_status make_documents(attention_bench *b)
{
    const attention_options *o = b->options;
    int32_t *host = (int32_t *)b->pattern + PATTERN_ELEMENTS;
    size_t bytes = ((size_t)o->documents + 1) * sizeof *host;

    for (int64_t i = 0; i <= o->documents; i++) host[i] = boundary(o, i);
    b->n_pairs = count_pairs(o);
    BL_TRY(take(b, bytes, &b->cu_seqlens));
    return bl_stream_copy(b->stream, b->cu_seqlens, host, bytes);
}

static bl_status make_tensors(attention_bench *b)
{
    const attention_options *o = b->options;
    int64_t T = o->tokens;
    size_t statistics = (size_t)(T * o->heads) * sizeof(float);

    BL_TRY(make_pattern(b));
    BL_TRY(make_documents(b));
    BL_TRY(take_filled(b, T, b->width, &b->qkv));
    BL_TRY(take_filled(b, T, b->width, &b->d_qkv));
    BL_TRY(take_filled(b, T, o->heads * o->head_dim, &b->o));
    BL_TRY(take_filled(b, T, o->heads * o->head_dim, &b->do_));
    BL_TRY(take(b, 2 * statistics, &b->lse));
    b->delta = b->lse + T * o->heads;
    BL_TRY(bl_stream_synchronize(b->stream));
    if (b->taken_bytes == needed_bytes(o) || o->device == BL_DEVICE_CPU) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "bench attention: %lld bytes are taken, %lld were planned",
                   (long long)b->taken_bytes, (long long)needed_bytes(o));
}

static bl_status run_forward(const attention_bench *b)
{
    const attention_options *o = b->options;
    int64_t q_width = o->heads * o->head_dim, kv_width = o->kv_heads * o->head_dim;
    bl_attention_forward_args args = {.T = o->tokens,
                                      .n_heads = o->heads,
                                      .n_kv_heads = o->kv_heads,
                                      .d = o->head_dim,
                                      .n_documents = o->documents,
                                      .window = o->window,
                                      .q_stride = b->width,
                                      .kv_stride = b->width,
                                      .o_stride = q_width,
                                      .cu_seqlens = b->cu_seqlens,
                                      .q = b->qkv,
                                      .k = bl_tensor_at(b->qkv, q_width),
                                      .v = bl_tensor_at(b->qkv, q_width + kv_width),
                                      .o = b->o,
                                      .lse = b->lse};
    return bl_attention_forward(b->stream, &args);
}

static bl_status run_backward(const attention_bench *b)
{
    const attention_options *o = b->options;
    int64_t q_width = o->heads * o->head_dim, kv_width = o->kv_heads * o->head_dim;
    bl_attention_backward_args args = {.T = o->tokens,
                                       .n_heads = o->heads,
                                       .n_kv_heads = o->kv_heads,
                                       .d = o->head_dim,
                                       .n_documents = o->documents,
                                       .window = o->window,
                                       .q_stride = b->width,
                                       .kv_stride = b->width,
                                       .o_stride = q_width,
                                       .cu_seqlens = b->cu_seqlens,
                                       .q = b->qkv,
                                       .k = bl_tensor_at(b->qkv, q_width),
                                       .v = bl_tensor_at(b->qkv, q_width + kv_width),
                                       .o = b->o,
                                       .do_ = b->do_,
                                       .dq = b->d_qkv,
                                       .dk = bl_tensor_at(b->d_qkv, q_width),
                                       .dv = bl_tensor_at(b->d_qkv, q_width + kv_width),
                                       .lse = b->lse,
                                       .delta = b->delta};
    return bl_attention_backward(b->stream, &args);
}

/* The first token sees itself alone: its o is v, to the bit. */
static bl_status verify(const attention_bench *b)
{
    const attention_options *o = b->options;
    int64_t q_width = o->heads * o->head_dim, v = q_width + o->kv_heads * o->head_dim;
    char *row = (char *)b->pattern + (PATTERN_ELEMENTS + (size_t)o->documents + 1) * 4,
         *row_o = row + (size_t)b->width * 4;
    size_t head_bytes = bl_tensor_bytes(b->o, o->head_dim);

    BL_TRY(bl_stream_copy(b->stream, row, b->qkv.data, bl_tensor_bytes(b->qkv, b->width)));
    BL_TRY(bl_stream_copy(b->stream, row_o, b->o.data, bl_tensor_bytes(b->o, q_width)));
    BL_TRY(bl_stream_synchronize(b->stream));
    for (int64_t h = 0; h < o->heads; h++)
        if (memcmp(row_o + (size_t)h * head_bytes,
                   row + bl_tensor_bytes(b->qkv, v) +
                       (size_t)(h / (o->heads / o->kv_heads)) * head_bytes,
                   head_bytes) != 0)
            return BL_FAIL(BL_EINTERNAL, "bench attention: head %lld of the first token is not v",
                           (long long)h);
    return BL_OK;
}

static bl_status measure(attention_bench *b, const char *pass, double flops_per_pair,
                         bl_status (*run_pass)(const attention_bench *))
{
    const attention_options *o = b->options;

    for (int64_t run = -1; run < o->runs; run++) { /* the first is not counted */
        BL_TRY(bl_stamp_record(b->begin, b->stream));
        BL_TRY(run_pass(b));
        BL_TRY(bl_stamp_record(b->end, b->stream));
        BL_TRY(bl_stream_synchronize(b->stream));
        if (run >= 0) b->seconds[run] = bl_stamp_elapsed_s(b->begin, b->end);
    }
    bl_bench_times times = bl_bench_summarize(b->seconds, o->runs);
    double flops = flops_per_pair * b->n_pairs * (double)(o->heads * o->head_dim);
    printf("{\"bench\":\"attention\",\"device\":\"%s\",\"pass\":\"%s\",\"tokens\":%lld,"
           "\"documents\":%lld,\"heads\":%lld,\"kv_heads\":%lld,\"head_dim\":%lld,"
           "\"window\":%lld,\"runs\":%lld,"
           "\"seconds\":%.6g,\"median_seconds\":%.6g,\"tflop_per_s\":%.4g}\n",
           o->device == BL_DEVICE_CUDA ? "cuda" : "cpu", pass, (long long)o->tokens,
           (long long)o->documents, (long long)o->heads, (long long)o->kv_heads,
           (long long)o->head_dim, (long long)o->window, (long long)o->runs, times.best_s,
           times.median_s, flops / times.best_s * 1e-12);
    fflush(stdout);
    return BL_OK;
}

enum { FORWARD_FLOPS = 4, BACKWARD_FLOPS = 10 }; /* per pair and element of the query */

static bl_status plan(const attention_options *o)
{
    bl_hardware gpu;
    bl_bench_needs needs = {.gpu = needed_bytes(o)};

    if (o->device != BL_DEVICE_CUDA) return BL_FAIL(BL_EUSAGE, "--plan_for: of --device cuda only");
    BL_TRY(bl_bench_plan_gpu(o->plan_for, &gpu, &needs.gpu_available));
    double flops = count_pairs(o) * (double)(o->heads * o->head_dim),
           forward = gpu.attention_forward_flops_per_s.value,
           backward = gpu.attention_backward_flops_per_s.value;
    needs.seconds = bl_bench_start_s + (double)(o->runs + 1) * flops *
                                           (FORWARD_FLOPS / forward + BACKWARD_FLOPS / backward);
    printf("{\"bench\":\"attention\",\"tokens\":%lld,\"documents\":%lld,\"heads\":%lld,"
           "\"kv_heads\":%lld,\"head_dim\":%lld,\"forward_tflop_per_s\":%.4g,"
           "\"backward_tflop_per_s\":%.4g,",
           (long long)o->tokens, (long long)o->documents, (long long)o->heads,
           (long long)o->kv_heads, (long long)o->head_dim, forward * 1e-12, backward * 1e-12);
    return bl_bench_plan_end("attention", o->plan_for, &needs);
}

static bl_status create_device(attention_bench *b)
{
    const attention_options *o = b->options;
    int threads = (int)(o->threads == BL_OPTION_AUTO ? sysconf(_SC_NPROCESSORS_ONLN) : o->threads);

    if (o->device == BL_DEVICE_CUDA) return bl_device_create_cuda(0, &b->device);
    return bl_device_create_cpu(threads, &b->device);
}

static bl_status run(const void *values)
{
    const attention_options *o = values;
    attention_bench b = {.options = o, .act = act_of(o), .width = row_width(o)};
    bl_status st = BL_OK;

    if (o->heads % o->kv_heads != 0)
        return BL_FAIL(BL_EUSAGE, "kv_heads %lld does not divide heads %lld",
                       (long long)o->kv_heads, (long long)o->heads);
    if (o->documents > o->tokens)
        return BL_FAIL(BL_EUSAGE, "%lld documents of %lld tokens", (long long)o->documents,
                       (long long)o->tokens);
    if (o->plan_for) return plan(o);
    b.seconds = calloc((size_t)o->runs, sizeof *b.seconds);
    if (!b.seconds) return BL_FAIL(BL_ENOMEM, "out of memory: bench attention's times");
    BL_TRY_GOTO(st, done, create_device(&b));
    BL_TRY_GOTO(st, done, bl_stream_create(b.device, "bench", &b.stream));
    BL_TRY_GOTO(st, done, bl_stamp_create(b.device, &b.begin));
    BL_TRY_GOTO(st, done, bl_stamp_create(b.device, &b.end));
    BL_TRY_GOTO(st, done, make_tensors(&b));
    BL_TRY_GOTO(st, done, measure(&b, "forward", FORWARD_FLOPS, run_forward));
    BL_TRY_GOTO(st, done, verify(&b));
    st = measure(&b, "backward", BACKWARD_FLOPS, run_backward);
done:
    for (int i = 0; i < b.n_buffers; i++) bl_device_free(b.device, BL_SPACE_DEVICE, b.buffers[i]);
    if (b.pattern) bl_device_free(b.device, BL_SPACE_HOST, b.pattern);
    bl_stamp_destroy(b.begin);
    bl_stamp_destroy(b.end);
    bl_stream_destroy(b.stream);
    bl_device_destroy(b.device);
    free(b.seconds);
    return st;
}

const bl_bench bl_bench_attention = {
    .name = "attention",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(attention_options),
    .details = "A JSON line for each pass: seconds of the fastest run, and causal operations per "
               "second (4 head_dim\n"
               "for each query head and visible pair of tokens in forward, 10 head_dim in "
               "backward).\n",
    .run = run,
};
