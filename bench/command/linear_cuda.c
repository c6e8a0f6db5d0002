/* SPDX-License-Identifier: Apache-2.0 */
/* The linear layer of one matrix on a GPU. In each run, one after the other and each between two
 * stamps of the stream: the plain GEMM of the same shape in bf16 and, for an FP8 layer, in FP8; the
 * layer, the frozen product alone, and the parts of that besides its GEMM (dequantizing W,
 * quantizing the input, transposing W). The rest of the layer's time is the adapter's.
 *
 * The plain GEMMs are the yardstick: each is the fastest of the algorithms that cuBLASLt offers,
 * found in the first run. The layer is measured as it is (the first algorithm offered), with the
 * fastest, and as a visit of several micro-batches that share the prepared weight.
 *
 * The frozen product in FP8 is compared with the one in bf16, at shapes that tests against the CPU
 * are too slow for: rounding to E4M3 is good for 2 to 3 %, a wrong scale, row or block for far
 * more. */
#include "bench/command/linear_cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/sizes.h"
#include "bench/command/bench.h"
#include "fp8/cuda/fp8_cuda.h"
#include "ops/cuda/gemm_cuda.h"

enum { PATTERN_BYTES = 1 << 22, N_BUFFERS = 24 };

typedef enum step {
    STEP_GEMM,       /* bf16 */
    STEP_GEMM_FIRST, /* the algorithm that the layer would take */
    STEP_FP8_GEMM_FULL,
    STEP_FP8_GEMM_FAST, /* with sums of fewer bits */
    STEP_LAYER,
    STEP_LAYER_TIMED, /* with the fastest algorithms */
    STEP_VISIT,       /* the layer for each micro-batch of a visit */
    STEP_FROZEN,
    STEP_DECODE,
    STEP_QUANTIZE,
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
    int64_t taken_bytes; /* of these */
    int64_t T, N, K;
    void *pattern; /* host: random bf16 values, then random codes */
    bl_tensor x, dy, out, dense;
    void *turned, *input_codes;
    float *input_scales, *one_scale;
    uint8_t *codes;
    bl_lora_linear linear;
    bl_matmul_prepared prepared;
    bool forward;
    double *seconds[N_STEPS];                  /* of each run */
    bool is_fp8_gemm_served[2];                /* with full and with fast sums */
    XXH64_hash_t bits, timed_bits, visit_bits; /* of the layer's output */
    double bf16_s[2];                          /* the layer in bf16: forward, backward */
    uint16_t *sample[2];                       /* of the frozen product then */
    double difference;                         /* of FP8 from that, as a share of its size */
} linear_bench;

static bl_status take(linear_bench *b, size_t bytes, void **out)
{
    BL_TRY(bl_device_alloc(b->device, BL_SPACE_DEVICE, bytes, "bench linear", out));
    b->taken_bytes += (int64_t)bytes;
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
        if (i < PATTERN_BYTES / 2)
            values[i] = bl_f32_to_bf16((float)(state >> 8) * 0x1p-24f - 0.5f);
        codes[i] = (uint8_t)(state >> 13);
        if ((codes[i] & 0x7f) == 0x7f) codes[i] ^= 1;
    }
}

/* Scales between 2^-11 and 2^-9, no two neighbors alike. */
static bl_status fill_scales(linear_bench *b, float *scales, size_t n)
{
    float *values;
    bl_status st;

    BL_TRY(bl_device_alloc(b->device, BL_SPACE_HOST, n * sizeof *values, "bench linear",
                           (void **)&values));
    for (size_t i = 0; i < n; i++) values[i] = (float)(2 + i % 7) * 0x1p-12f;
    st = bl_stream_copy(b->stream, scales, values, n * sizeof *values);
    bl_status waited = bl_stream_synchronize(b->stream);
    bl_device_free(b->device, BL_SPACE_HOST, values);
    return st != BL_OK ? st : waited;
}

static bl_status make_weight(linear_bench *b, const uint8_t *codes)
{
    bl_format format = b->shape->format;
    size_t bytes, n_scales;
    float *scales = NULL;

    if (!bl_format_sizes(format, b->N, b->K, &bytes, &n_scales))
        return BL_FAIL(BL_EUSAGE, "the matrix is too large");
    BL_TRY(take_filled(b, bytes, bl_format_has_scales(format) ? (const void *)codes : b->pattern,
                       (void **)&b->codes));
    if (n_scales > 0) {
        BL_TRY(take(b, n_scales * sizeof *scales, (void **)&scales));
        BL_TRY(fill_scales(b, scales, n_scales));
    }
    b->linear.weight.n_segments = 1;
    b->linear.weight.segment[0] = (bl_weight_segment){format, b->codes, scales, b->N};
    return BL_OK;
}

/* The A's of the parts, one after the other, and their dA's. */
static bl_status make_parts(linear_bench *b)
{
    int64_t r = 0;
    bl_tensor A = {NULL, BL_BF16};
    float *dA;

    for (int p = 0; p < b->linear.n_parts; p++) r += b->linear.part[p].r;
    BL_TRY(take_filled(b, (size_t)(r * b->K) * 2, b->pattern, &A.data));
    BL_TRY(take(b, (size_t)(r * b->K) * sizeof *dA, (void **)&dA));
    b->linear.is_stacked = true;
    for (int p = 0; p < b->linear.n_parts; p++) {
        bl_lora_part *part = &b->linear.part[p];
        size_t n = (size_t)(part->rows * part->r);
        bl_tensor B = {NULL, BL_BF16};
        BL_TRY(take_filled(b, n * 2, b->pattern, &B.data));
        BL_TRY(take(b, n * sizeof(float), (void **)&part->dB));
        part->A = A, part->B = B, part->dA = dA;
        A = bl_tensor_at(A, part->r * b->K);
        dA += part->r * b->K;
    }
    return BL_OK;
}

static bl_status make_memory(linear_bench *b)
{
    size_t larger = (size_t)bl_max_i64(b->N, b->K);
    bl_linear_sizes sizes;

    BL_TRY(bl_bench_linear_sizes(b->shape, &sizes));
    BL_TRY(
        bl_device_alloc(b->device, BL_SPACE_HOST, 2 * PATTERN_BYTES, "bench linear", &b->pattern));
    fill_pattern(b->pattern, (uint8_t *)b->pattern + PATTERN_BYTES);
    BL_TRY(make_weight(b, (const uint8_t *)b->pattern + PATTERN_BYTES));
    b->x.dtype = b->dy.dtype = b->out.dtype = b->dense.dtype = BL_BF16;
    BL_TRY(take_filled(b, (size_t)(b->T * b->K) * 2, b->pattern, &b->x.data));
    BL_TRY(take_filled(b, (size_t)(b->T * b->N) * 2, b->pattern, &b->dy.data));
    BL_TRY(take(b, (size_t)b->T * larger * 2, &b->out.data));
    BL_TRY(take_filled(b, (size_t)(b->N * b->K) * 2, b->pattern, &b->dense.data));
    BL_TRY(take(b, (size_t)(b->N * b->K), &b->turned));
    BL_TRY(take_filled(b, (size_t)b->T * larger, (const uint8_t *)b->pattern + PATTERN_BYTES,
                       &b->input_codes));
    BL_TRY(take(b, sizeof *b->one_scale, (void **)&b->one_scale));
    BL_TRY(fp8_cuda_fill(b->stream, b->one_scale, 1, 0x1p-10f));
    BL_TRY(take(b, (size_t)sizes.input_scales, (void **)&b->input_scales));
    BL_TRY(make_parts(b));
    b->linear.mode = BL_MATMUL_FP8; /* whose workspace serves both */
    b->linear.workspace_bytes = (size_t)sizes.workspace;
    BL_TRY(take(b, b->linear.workspace_bytes, &b->linear.workspace));
    /* Of the larger mode, bf16; with its own products in scratch, FP8's workspace is enough for
     * both. */
    b->prepared.memory_bytes = (size_t)sizes.prepared;
    BL_TRY(take(b, b->prepared.memory_bytes + 1, &b->prepared.memory));
    BL_TRY(bl_stream_synchronize(b->stream));
    if (b->taken_bytes == sizes.all) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "bench linear: %lld bytes of the GPU are taken, %lld were planned",
                   (long long)b->taken_bytes, (long long)sizes.all);
}

/* ---- the steps ---- */

static bl_status plain_gemm(linear_bench *b)
{
    bool forward = b->forward;
    return bl_matmul(b->stream, &(bl_matmul_args){.transpose_b = forward,
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

/* FP8 as fast as the GPU has it: a scale a matrix, codes along the sum on both sides. */
static bl_status plain_fp8_gemm(linear_bench *b, bool fast_sums)
{
    int64_t inner = b->forward ? b->K : b->N, outer = b->forward ? b->N : b->K;
    bool *is_served = &b->is_fp8_gemm_served[fast_sums];
    ops_gemm gemm = {.kind = OPS_GEMM_FP8_TENSOR,
                     .transpose_a = true,
                     .fast_sums = fast_sums,
                     .d_type = BL_BF16,
                     .alpha = 1,
                     .m = outer,
                     .n = b->T,
                     .k = inner,
                     .lda = inner,
                     .ldb = inner,
                     .ldd = outer,
                     .a = b->codes,
                     .b = b->input_codes,
                     .a_scale = b->one_scale,
                     .b_scale = b->one_scale,
                     .d = b->out.data,
                     .workspace = b->linear.workspace,
                     .workspace_bytes = BL_MATMUL_SCRATCH_BYTES};
    BL_TRY(ops_cuda_gemm_is_served(b->stream, &gemm, is_served));
    return *is_served ? ops_cuda_gemm(b->stream, &gemm) : BL_OK;
}

static bl_status frozen_product(linear_bench *b)
{
    return bl_matmul_weight(b->stream,
                            &(bl_matmul_weight_args){.forward = b->forward,
                                                     .mode = b->linear.mode,
                                                     .T = b->T,
                                                     .in = b->forward ? b->x : b->dy,
                                                     .out = b->out,
                                                     .weight = b->linear.weight,
                                                     .scratch = b->linear.workspace,
                                                     .scratch_bytes = b->linear.workspace_bytes});
}

static bl_status quantize(linear_bench *b)
{
    int64_t inner = b->forward ? b->K : b->N;
    const void *in = b->forward ? b->x.data : b->dy.data;
    const float *factor = b->forward ? NULL : b->linear.weight.segment[0].scales;
    return b->shape->format == BL_FORMAT_FP8_ROW
               ? fp8_cuda_quantize_rows(b->stream, in, inner, factor, b->T, inner, b->input_codes,
                                        b->input_scales)
               : fp8_cuda_quantize_groups(b->stream, in, inner, b->T, inner, b->input_codes,
                                          b->input_scales);
}

static bl_status layer(linear_bench *b)
{
    return b->forward ? bl_lora_linear_forward(b->stream, &b->linear, b->T, b->x, b->out)
                      : bl_lora_linear_backward(b->stream, &b->linear, b->T, b->x, b->dy, b->out);
}

/* With one micro-batch it is the layer: not measured again. */
static bl_status visit(linear_bench *b)
{
    bl_status st = BL_OK;

    if (b->shape->micro_batches < 2) return BL_OK;
    b->prepared.made = 0;
    b->linear.prepared = &b->prepared;
    for (int64_t m = 0; st == BL_OK && m < b->shape->micro_batches; m++) st = layer(b);
    b->linear.prepared = NULL;
    return st;
}

/* Steps that a mode does not take are not measured: nothing is queued. */
static bl_status run_step(linear_bench *b, step what)
{
    const bl_weight_segment *w = &b->linear.weight.segment[0];
    bool is_fp8 = b->linear.mode == BL_MATMUL_FP8;

    switch (what) {
    case STEP_GEMM:
    case STEP_GEMM_FIRST:
        return plain_gemm(b);
    case STEP_FP8_GEMM_FULL:
    case STEP_FP8_GEMM_FAST:
        return is_fp8 ? plain_fp8_gemm(b, what == STEP_FP8_GEMM_FAST) : BL_OK;
    case STEP_LAYER:
    case STEP_LAYER_TIMED:
        return layer(b);
    case STEP_VISIT:
        return visit(b);
    case STEP_FROZEN:
        return frozen_product(b);
    case STEP_DECODE:
        return is_fp8 || w->format == BL_FORMAT_BF16
                   ? BL_OK
                   : fp8_cuda_dequantize(b->stream, w->format, w->codes, w->scales, b->N, b->K,
                                         b->dense.data);
    case STEP_QUANTIZE:
        return is_fp8 ? quantize(b) : BL_OK;
    default:
        return is_fp8 && !b->forward
                   ? fp8_cuda_transpose(b->stream, b->codes, b->N, b->K, b->turned)
                   : BL_OK;
    }
}

static bl_status time_step(linear_bench *b, step what, double *seconds)
{
    BL_TRY(ops_cuda_gemm_choose_by_time(
        b->stream,
        b->shape->time_algorithms && (what == STEP_GEMM || what == STEP_FP8_GEMM_FULL ||
                                      what == STEP_FP8_GEMM_FAST || what == STEP_LAYER_TIMED)));
    BL_TRY(bl_stamp_record(b->begin, b->stream));
    BL_TRY(run_step(b, what));
    BL_TRY(bl_stamp_record(b->end, b->stream));
    BL_TRY(bl_stream_synchronize(b->stream));
    *seconds = bl_stamp_elapsed_s(b->begin, b->end);
    return BL_OK;
}

static bl_status hash(linear_bench *b, XXH3_state_t *state, const void *memory, size_t bytes)
{
    for (size_t done = 0, n; done < bytes; done += n) {
        n = bl_min_i64((int64_t)(bytes - done), 2 * PATTERN_BYTES);
        BL_TRY(bl_stream_copy(b->stream, b->pattern, (const char *)memory + done, n));
        BL_TRY(bl_stream_synchronize(b->stream));
        XXH3_64bits_update(state, b->pattern, n);
    }
    return BL_OK;
}

/* Of y, or of dx and all dA and dB. */
static bl_status hash_results(linear_bench *b, XXH64_hash_t *out)
{
    XXH3_state_t *state = XXH3_createState();
    bl_status st;

    if (!state) return BL_FAIL(BL_ENOMEM, "bench linear: a hash");
    XXH3_64bits_reset(state);
    BL_TRY_GOTO(st, done,
                hash(b, state, b->out.data, (size_t)(b->T * (b->forward ? b->N : b->K)) * 2));
    for (int p = 0; p < b->linear.n_parts && !b->forward; p++) {
        const bl_lora_part *part = &b->linear.part[p];
        BL_TRY_GOTO(st, done, hash(b, state, part->dA, (size_t)(part->r * b->K) * sizeof(float)));
        BL_TRY_GOTO(st, done,
                    hash(b, state, part->dB, (size_t)(part->rows * part->r) * sizeof(float)));
    }
    *out = XXH3_64bits_digest(state);
done:
    XXH3_freeState(state);
    return st;
}

/* Copies the first and the last PATTERN_BYTES of the result, or all of it twice, to b->pattern. */
static bl_status fetch_sample(linear_bench *b)
{
    size_t bytes = (size_t)(b->T * (b->forward ? b->N : b->K)) * 2,
           n = bytes < PATTERN_BYTES ? bytes : PATTERN_BYTES;

    memset(b->pattern, 0, 2 * PATTERN_BYTES);
    BL_TRY(bl_stream_copy(b->stream, b->pattern, b->out.data, n));
    BL_TRY(bl_stream_copy(b->stream, (char *)b->pattern + PATTERN_BYTES,
                          (const char *)b->out.data + bytes - n, n));
    return bl_stream_synchronize(b->stream);
}

/* In bf16 the sample is kept, in FP8 compared with the kept one. */
static bl_status compare_sample(linear_bench *b)
{
    uint16_t *kept = b->sample[!b->forward], *now = b->pattern;
    double error = 0, size = 0;

    BL_TRY(fetch_sample(b));
    if (b->linear.mode == BL_MATMUL_BF16) {
        memcpy(kept, now, 2 * PATTERN_BYTES);
        return BL_OK;
    }
    for (int64_t i = 0; i < PATTERN_BYTES; i++) {
        double want = (double)bl_bf16_to_f32(kept[i]), off = (double)bl_bf16_to_f32(now[i]) - want;
        error += off * off;
        size += want * want;
    }
    b->difference = sqrt(error / size);
    return BL_OK;
}

static void print_fp8(const linear_bench *b, const double *best, double flops)
{
    bool has_fast = b->is_fp8_gemm_served[true], has_full = b->is_fp8_gemm_served[false];
    double full_s = has_full ? best[STEP_FP8_GEMM_FULL] : 0,
           fast_s = has_fast ? best[STEP_FP8_GEMM_FAST] : 0;
    bool is_fast = has_fast && (!has_full || fast_s < full_s);
    double gemm_s = is_fast ? fast_s : full_s;

    printf("\"fp8_gemm_seconds\":%.7f,\"fp8_gemm_tflops\":%.1f,\"fp8_gemm_sums\":\"%s\","
           "\"fp8_gemm_full_sums_seconds\":%.7f,\"percent_of_fp8_gemm\":%.1f,\"timed_percent_of_"
           "fp8_gemm\":%.1f,"
           "\"times_bf16\":%.2f,\"difference_from_bf16\":%.4f,",
           gemm_s, gemm_s > 0 ? flops / gemm_s * 1e-12 : 0,
           is_fast    ? "fast"
           : has_full ? "full"
                      : "none",
           full_s, 100.0 * gemm_s / best[STEP_LAYER], 100.0 * gemm_s / best[STEP_LAYER_TIMED],
           b->bf16_s[!b->forward] / best[STEP_LAYER], b->difference);
}

static void print_visit(const linear_bench *b, const double *best)
{
    double seconds = best[STEP_VISIT] / (double)b->shape->micro_batches;

    printf("\"micro_batches\":%lld,\"visit_seconds\":%.7f,\"visit_percent_of_gemm\":%.1f,"
           "\"visit_bits\":\"%016llx\",",
           (long long)b->shape->micro_batches, seconds, 100.0 * best[STEP_GEMM] / seconds,
           (unsigned long long)b->visit_bits);
}

static void print_line(linear_bench *b)
{
    double flops = 2.0 * (double)b->T * (double)b->N * (double)b->K;
    double best[N_STEPS], median[N_STEPS];
    bool is_fp8 = b->linear.mode == BL_MATMUL_FP8;

    for (int s = 0; s < N_STEPS; s++) {
        bl_bench_times times = bl_bench_summarize(b->seconds[s], b->shape->runs);
        best[s] = times.best_s;
        median[s] = times.median_s;
    }
    if (!is_fp8) b->bf16_s[!b->forward] = best[STEP_LAYER];
    printf("{\"bench\":\"linear\",\"device\":\"cuda\",\"model\":\"%s\",\"matrix\":\"%s\",\"rows\":%"
           "lld,\"cols\":"
           "%lld,"
           "\"tokens\":%lld,\"format\":\"%s\",\"mode\":\"%s\",\"lora_r\":%lld,\"pass\":\"%s\","
           "\"seconds\":%.7f,\"median_seconds\":%.7f,\"tflops\":%.1f,\"gemm_seconds\":%.7f,\"gemm_"
           "tflops\":%.1f,"
           "\"percent_of_gemm\":%.1f,\"gemm_first_seconds\":%.7f,\"timed_seconds\":%.7f,\"timed_"
           "percent_of_"
           "gemm\":%.1f,",
           b->shape->model, b->shape->matrix, (long long)b->N, (long long)b->K, (long long)b->T,
           bl_format_name(b->shape->format), is_fp8 ? "fp8" : "bf16",
           (long long)b->linear.part[0].r, b->forward ? "forward" : "backward", best[STEP_LAYER],
           median[STEP_LAYER], flops / best[STEP_LAYER] * 1e-12, best[STEP_GEMM],
           flops / best[STEP_GEMM] * 1e-12, 100.0 * best[STEP_GEMM] / best[STEP_LAYER],
           best[STEP_GEMM_FIRST], best[STEP_LAYER_TIMED],
           100.0 * best[STEP_GEMM] / best[STEP_LAYER_TIMED]);
    if (is_fp8) print_fp8(b, best, flops);
    if (b->shape->micro_batches > 1) print_visit(b, best);
    printf("\"frozen_seconds\":%.7f,\"adapter_seconds\":%.7f,\"decode_seconds\":%.7f,"
           "\"quantize_seconds\":%.7f,\"transpose_seconds\":%.7f,\"bits\":\"%016llx\",\"timed_"
           "bits\":\"%016llx\",\"algorithms_timed\":%s}\n",
           best[STEP_FROZEN], median[STEP_LAYER] - median[STEP_FROZEN], best[STEP_DECODE],
           best[STEP_QUANTIZE], best[STEP_TRANSPOSE], (unsigned long long)b->bits,
           (unsigned long long)b->timed_bits, b->shape->time_algorithms ? "true" : "false");
    fflush(stdout);
}

static bl_status measure(linear_bench *b)
{
    for (int64_t run = -2; run < b->shape->runs;
         run++) /* two to warm up: the first chooses algorithms */
        for (int s = 0; s < N_STEPS; s++) {
            double seconds;
            BL_TRY(time_step(b, (step)s, &seconds));
            if (run >= 0) b->seconds[s][run] = seconds;
            if (run == -1 && s == STEP_LAYER) BL_TRY(hash_results(b, &b->bits));
            if (run == -1 && s == STEP_VISIT) BL_TRY(hash_results(b, &b->visit_bits));
            if (run == -1 && s == STEP_FROZEN) BL_TRY(compare_sample(b));
            if (run == -1 && s == STEP_LAYER_TIMED) BL_TRY(hash_results(b, &b->timed_bits));
        }
    print_line(b);
    return BL_OK;
}

static bl_status measure_all(linear_bench *b)
{
    bl_matmul_mode last = bl_format_has_scales(b->shape->format) ? BL_MATMUL_FP8 : BL_MATMUL_BF16;

    BL_TRY(bl_stamp_create(b->device, &b->begin));
    BL_TRY(bl_stamp_create(b->device, &b->end));
    for (int s = 0; s < N_STEPS; s++)
        if (!(b->seconds[s] = calloc((size_t)b->shape->runs, sizeof(double))))
            return BL_FAIL(BL_ENOMEM, "bench linear: its times");
    for (int pass = 0; pass < 2; pass++)
        if (!(b->sample[pass] = malloc(2 * PATTERN_BYTES)))
            return BL_FAIL(BL_ENOMEM, "bench linear: its samples");
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
    bl_status st = measure_all(&b);
    bl_stamp_destroy(b.begin);
    bl_stamp_destroy(b.end);
    for (int s = 0; s < N_STEPS; s++) free(b.seconds[s]);
    for (int pass = 0; pass < 2; pass++) free(b.sample[pass]);
    for (int i = 0; i < b.n_buffers; i++) bl_device_free(device, BL_SPACE_DEVICE, b.buffers[i]);
    bl_device_free(device, BL_SPACE_HOST, b.pattern);
    return st;
}
