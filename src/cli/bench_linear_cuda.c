/* SPDX-License-Identifier: Apache-2.0 */
/* The linear layer of one matrix on a GPU. In each run, one after the other and each between two stamps of
 * the stream: the plain bf16 GEMM of the same shape, the layer, the frozen product alone, and what that is
 * made of besides its GEMM (decoding W, quantising the input, turning W over). What the layer takes beyond
 * the frozen product is the adapter's. */
#include "cli/bench_linear_cuda.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "cli/bench.h"
#include "fp8/fp8_cuda.h"

enum { PATTERN_BYTES = 1 << 22, N_BUFFERS = 24 };

typedef enum step {
    STEP_GEMM,
    STEP_LAYER,
    STEP_FROZEN,
    STEP_DECODE,
    STEP_QUANTISE,
    STEP_TRANSPOSE,
    N_STEPS
} step;

typedef struct linear_bench {
    const bl_linear_case *shape;
    bl_device *device;
    bl_stream *stream;
    bl_stamp *begin, *end;
    void *buffers[N_BUFFERS];
    int n_buffers;
    int64_t T, N, K;
    void *pattern; /* host: random bf16 values, then random codes */
    void *x, *dy, *out, *dense, *turned, *input_codes;
    float *input_scales;
    uint8_t *codes;
    bl_lora_linear linear;
    bool forward;
    double *seconds[N_STEPS]; /* of each run */
} linear_bench;

static bl_status take(linear_bench *b, size_t bytes, void **out)
{
    BL_TRY(bl_device_alloc(b->device, BL_SPACE_DEVICE, bytes, "bench linear", out));
    b->buffers[b->n_buffers++] = *out;
    return BL_OK;
}

/* New memory, filled with the pattern's half at `from` over and over. */
static bl_status take_filled(linear_bench *b, size_t bytes, const void *from, void **out)
{
    BL_TRY(take(b, bytes, out));
    for (size_t done = 0; done < bytes; done += PATTERN_BYTES) {
        size_t n = bytes - done < PATTERN_BYTES ? bytes - done : PATTERN_BYTES;
        BL_TRY(bl_stream_copy(b->stream, (char *)*out + done, from, n));
    }
    return BL_OK;
}

/* Values in [-0.5, 0.5) as bf16, and codes that are no NaN. */
static void fill_pattern(uint16_t *values, uint8_t *codes)
{
    uint32_t state = 12345;
    for (int64_t i = 0; i < PATTERN_BYTES; i++) {
        state = state * 1664525u + 1013904223u;
        if (i < PATTERN_BYTES / 2) values[i] = bl_f32_to_bf16((float)(state >> 8) * 0x1p-24f - 0.5f);
        codes[i] = (uint8_t)(state >> 13);
        if ((codes[i] & 0x7f) == 0x7f) codes[i] ^= 1;
    }
}

static bl_status make_weight(linear_bench *b, const uint8_t *codes)
{
    bl_format format = b->shape->format;
    size_t bytes, n_scales;
    float *scales = NULL;

    if (!bl_format_sizes(format, b->N, b->K, &bytes, &n_scales))
        return BL_FAIL(BL_EUSAGE, "the matrix is too large");
    BL_TRY(take_filled(b, bytes, bl_format_is_fp8(format) ? (const void *)codes : b->pattern,
                       (void **)&b->codes));
    if (n_scales > 0) {
        BL_TRY(take(b, n_scales * sizeof *scales, (void **)&scales));
        BL_TRY(fp8_cuda_fill(b->stream, scales, (int64_t)n_scales, 0x1p-10f));
    }
    b->linear.weight.n_segments = 1;
    b->linear.weight.segment[0] = (bl_weight_segment){format, b->codes, scales, b->N};
    return BL_OK;
}

static bl_status make_memory(linear_bench *b)
{
    size_t larger = (size_t)bl_max_i64(b->N, b->K);

    BL_TRY(bl_device_alloc(b->device, BL_SPACE_HOST, 2 * PATTERN_BYTES, "bench linear", &b->pattern));
    fill_pattern(b->pattern, (uint8_t *)b->pattern + PATTERN_BYTES);
    BL_TRY(make_weight(b, (const uint8_t *)b->pattern + PATTERN_BYTES));
    BL_TRY(take_filled(b, (size_t)(b->T * b->K) * 2, b->pattern, &b->x));
    BL_TRY(take_filled(b, (size_t)(b->T * b->N) * 2, b->pattern, &b->dy));
    BL_TRY(take(b, (size_t)b->T * larger * 2, &b->out));
    BL_TRY(take_filled(b, (size_t)(b->N * b->K) * 2, b->pattern, &b->dense));
    BL_TRY(take(b, (size_t)(b->N * b->K), &b->turned));
    BL_TRY(take(b, (size_t)b->T * larger, &b->input_codes));
    BL_TRY(take(b, (size_t)b->T * larger * sizeof(float) / BL_FP8_BLOCK + (size_t)b->T * sizeof(float),
                (void **)&b->input_scales));
    for (int p = 0; p < b->linear.n_parts; p++) {
        bl_lora_part *part = &b->linear.part[p];
        size_t a = (size_t)(part->r * b->K), n = (size_t)(part->rows * part->r);
        void *A, *B;
        BL_TRY(take_filled(b, a * 2, b->pattern, &A));
        BL_TRY(take_filled(b, n * 2, b->pattern, &B));
        part->A = A, part->B = B;
        BL_TRY(take(b, a * sizeof(float), (void **)&part->dA));
        BL_TRY(take(b, n * sizeof(float), (void **)&part->dB));
    }
    b->linear.mode = BL_MATMUL_FP8; /* whose workspace serves both */
    b->linear.workspace_bytes = bl_lora_linear_workspace_bytes(b->device, &b->linear, b->T);
    BL_TRY(take(b, b->linear.workspace_bytes, &b->linear.workspace));
    return bl_stream_synchronize(b->stream);
}

/* ---- the steps ---- */

static bl_status plain_gemm(linear_bench *b)
{
    bool forward = b->forward;
    return bl_matmul(b->stream, &(bl_matmul_args){.transpose_b = forward,
                                                  .act = BL_ACT_BF16,
                                                  .c_act = BL_ACT_BF16,
                                                  .M = b->T,
                                                  .N = forward ? b->N : b->K,
                                                  .K = forward ? b->K : b->N,
                                                  .lda = forward ? b->K : b->N,
                                                  .ldb = b->K,
                                                  .ldc = forward ? b->N : b->K,
                                                  .alpha = 1.0f,
                                                  .a = forward ? b->x : b->dy,
                                                  .b = b->dense,
                                                  .c = b->out,
                                                  .scratch = b->linear.workspace,
                                                  .scratch_bytes = BL_MATMUL_SCRATCH_BYTES});
}

static bl_status frozen_product(linear_bench *b)
{
    return bl_matmul_weight(b->stream, &(bl_matmul_weight_args){.forward = b->forward,
                                                                .act = BL_ACT_BF16,
                                                                .mode = b->linear.mode,
                                                                .T = b->T,
                                                                .in = b->forward ? b->x : b->dy,
                                                                .out = b->out,
                                                                .weight = b->linear.weight,
                                                                .scratch = b->linear.workspace,
                                                                .scratch_bytes = b->linear.workspace_bytes});
}

static bl_status quantise(linear_bench *b)
{
    int64_t inner = b->forward ? b->K : b->N;
    const void *in = b->forward ? b->x : b->dy;
    const float *factor = b->forward ? NULL : b->linear.weight.segment[0].scales;
    return b->shape->format == BL_FORMAT_FP8_ROW
               ? fp8_cuda_quantise_rows(b->stream, in, inner, factor, b->T, inner, b->input_codes,
                                        b->input_scales)
               : fp8_cuda_quantise_groups(b->stream, in, inner, b->T, inner, b->input_codes, b->input_scales);
}

/* Steps that a mode does not take are not measured: nothing is queued. */
static bl_status run_step(linear_bench *b, step what)
{
    const bl_weight_segment *w = &b->linear.weight.segment[0];
    bool is_fp8 = b->linear.mode == BL_MATMUL_FP8;

    switch (what) {
    case STEP_GEMM:
        return plain_gemm(b);
    case STEP_LAYER:
        return b->forward ? bl_lora_linear_forward(b->stream, &b->linear, b->T, b->x, b->out)
                          : bl_lora_linear_backward(b->stream, &b->linear, b->T, b->x, b->dy, b->out);
    case STEP_FROZEN:
        return frozen_product(b);
    case STEP_DECODE:
        return is_fp8 || w->format == BL_FORMAT_BF16
                   ? BL_OK
                   : fp8_cuda_dequantise(b->stream, w->format, w->codes, w->scales, b->N, b->K, b->dense);
    case STEP_QUANTISE:
        return is_fp8 ? quantise(b) : BL_OK;
    default:
        return is_fp8 && !b->forward ? fp8_cuda_transpose(b->stream, b->codes, b->N, b->K, b->turned) : BL_OK;
    }
}

static bl_status time_step(linear_bench *b, step what, double *seconds)
{
    BL_TRY(bl_stamp_record(b->begin, b->stream));
    BL_TRY(run_step(b, what));
    BL_TRY(bl_stamp_record(b->end, b->stream));
    BL_TRY(bl_stream_synchronize(b->stream));
    *seconds = bl_stamp_elapsed_s(b->begin, b->end);
    return BL_OK;
}

static void print_line(linear_bench *b)
{
    double flops = 2.0 * (double)b->T * (double)b->N * (double)b->K;
    double best[N_STEPS], median[N_STEPS];

    for (int s = 0; s < N_STEPS; s++) {
        bl_bench_times times = bl_bench_summarise(b->seconds[s], b->shape->runs);
        best[s] = times.best_s;
        median[s] = times.median_s;
    }
    printf(
        "{\"bench\":\"linear\",\"device\":\"cuda\",\"model\":\"%s\",\"matrix\":\"%s\",\"rows\":%lld,\"cols\":"
        "%lld,"
        "\"tokens\":%lld,\"format\":\"%s\",\"mode\":\"%s\",\"lora_r\":%lld,\"pass\":\"%s\","
        "\"seconds\":%.6f,\"median_seconds\":%.6f,\"tflops\":%.1f,\"gemm_seconds\":%.6f,\"gemm_tflops\":%.1f,"
        "\"percent_of_gemm\":%.1f,\"frozen_seconds\":%.6f,\"adapter_seconds\":%.6f,\"decode_seconds\":%.6f,"
        "\"quantise_seconds\":%.6f,\"transpose_seconds\":%.6f}\n",
        b->shape->model, b->shape->matrix, (long long)b->N, (long long)b->K, (long long)b->T,
        bl_format_name(b->shape->format), b->linear.mode == BL_MATMUL_FP8 ? "fp8" : "bf16",
        (long long)b->linear.part[0].r, b->forward ? "forward" : "backward", best[STEP_LAYER],
        median[STEP_LAYER], flops / best[STEP_LAYER] * 1e-12, best[STEP_GEMM],
        flops / best[STEP_GEMM] * 1e-12, 100.0 * best[STEP_GEMM] / best[STEP_LAYER], best[STEP_FROZEN],
        median[STEP_LAYER] - median[STEP_FROZEN], best[STEP_DECODE], best[STEP_QUANTISE],
        best[STEP_TRANSPOSE]);
    fflush(stdout);
}

static bl_status measure(linear_bench *b)
{
    for (int64_t run = -2; run < b->shape->runs; run++) /* two to warm up: the first chooses algorithms */
        for (int s = 0; s < N_STEPS; s++) {
            double seconds;
            BL_TRY(time_step(b, (step)s, &seconds));
            if (run >= 0) b->seconds[s][run] = seconds;
        }
    print_line(b);
    return BL_OK;
}

static bl_status measure_all(linear_bench *b)
{
    bl_matmul_mode last = bl_format_is_fp8(b->shape->format) ? BL_MATMUL_FP8 : BL_MATMUL_BF16;

    BL_TRY(bl_stamp_create(b->device, &b->begin));
    BL_TRY(bl_stamp_create(b->device, &b->end));
    for (int s = 0; s < N_STEPS; s++)
        if (!(b->seconds[s] = calloc((size_t)b->shape->runs, sizeof(double))))
            return BL_FAIL(BL_ENOMEM, "bench linear: its times");
    BL_TRY(make_memory(b));
    for (bl_matmul_mode mode = BL_MATMUL_BF16; mode <= last; mode++)
        for (int pass = 0; pass < 2; pass++) {
            b->linear.mode = mode;
            b->forward = pass == 0;
            BL_TRY(measure(b));
        }
    return BL_OK;
}

bl_status bl_bench_linear_cuda(bl_device *device, bl_stream *stream, const bl_linear_case *shape)
{
    linear_bench b = {.shape = shape, .device = device, .stream = stream, .linear = shape->linear};

    b.T = shape->T;
    b.N = shape->linear.weight.rows;
    b.K = shape->linear.weight.cols;
    b.linear.act = BL_ACT_BF16;
    bl_status st = measure_all(&b);
    bl_stamp_destroy(b.begin);
    bl_stamp_destroy(b.end);
    for (int s = 0; s < N_STEPS; s++) free(b.seconds[s]);
    for (int i = 0; i < b.n_buffers; i++) bl_device_free(device, BL_SPACE_DEVICE, b.buffers[i]);
    bl_device_free(device, BL_SPACE_HOST, b.pattern);
    return st;
}
