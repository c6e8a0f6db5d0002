/* SPDX-License-Identifier: Apache-2.0 */
/* bench_gpu_kernels [--plan] [TOKENS [RUNS]]: the memory-bound CUDA kernels at Llama 3.1 405B's
 * shapes, as a fraction of the rate of a device-to-device copy in the same run.
 *
 * A line per kernel, JSON: the bytes a call must move at least, the time they take at 4.8 TB/s (an
 * H200's data sheet), and measured: the fastest and the median run, a run being LAUNCHES calls
 * between two stamps, and the rate as a percentage of the copy's. --plan prints bytes and floors
 * only and needs no GPU. Ends with 77 where there is none. TOKENS: 4096. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/sizes.h"
#include "fp8/cuda/fp8_cuda.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

enum { SKIPPED = 77, LAUNCHES = 8, RUNS_MAX = 99, PATTERN_BYTES = 4 << 20 };
enum { H = 16384, I = 53248, HEADS = 136, D = 128, QKV = 18432, VOCABULARY = 100000 };

static const double H200_BYTES_PER_S = 4.8e12;
enum {
    LORA_SHARE = 45 << 20
}; /* a rank's LoRA weights: r = 16, all seven projections, eight ranks */

typedef struct bench {
    int64_t T;
    bl_device *device;
    bl_stream *stream;
    bl_stamp *begin, *end;
    char *a, *b, *c; /* as large as the largest matrix in bf16 */
    float *floats;   /* LORA_SHARE of each, four times */
    int32_t *ids, *cu_seqlens, *position;
    int64_t *sample;
    double *sums;
} bench;

/* ---- a launch each ---- */

static bl_tensor bf16(const char *data)
{
    return bl_tensor_of(data, BL_BF16);
}

static bl_status run_copy(bench *b)
{
    return bl_stream_copy(b->stream, b->b, b->a, (size_t)1 << 30);
}
static bl_status run_rmsnorm_forward(bench *b)
{
    bl_rmsnorm_forward_args a = {.T = b->T,
                                 .H = H,
                                 .eps = 1e-5,
                                 .x = bf16(b->a),
                                 .w = b->floats,
                                 .y = bf16(b->b),
                                 .rstd = (float *)(void *)b->c};
    return bl_rmsnorm_forward(b->stream, &a);
}
static bl_quantized codes(bench *b)
{
    return (bl_quantized){(uint8_t *)b->c, (float *)(void *)(b->c + b->T * (int64_t)I)};
}
static bl_status run_rmsnorm_quantized(bench *b)
{
    bl_rmsnorm_forward_args a = {.T = b->T,
                                 .H = H,
                                 .eps = 1e-5,
                                 .x = bf16(b->a),
                                 .w = b->floats,
                                 .y = bf16(b->b),
                                 .quantized = codes(b)};
    return bl_rmsnorm_forward(b->stream, &a);
}
static bl_status run_rmsnorm_backward(bench *b)
{
    bl_rmsnorm_backward_args a = {.T = b->T,
                                  .H = H,
                                  .accumulate = 1,
                                  .x = bf16(b->a),
                                  .w = b->floats,
                                  .rstd = b->floats,
                                  .dy = bf16(b->b),
                                  .dx = bf16(b->c)};
    return bl_rmsnorm_backward(b->stream, &a);
}
static bl_status run_rope(bench *b)
{
    bl_rope_args a = {.T = b->T,
                      .n_heads = HEADS,
                      .d = D,
                      .row_stride = QKV,
                      .n_documents = 1,
                      .direction = 1,
                      .cu_seqlens = b->cu_seqlens,
                      .cos_table = b->floats,
                      .sin_table = b->floats + b->T * D / 2,
                      .x = bf16(b->a)};
    return bl_rope(b->stream, &a);
}
static bl_status run_swiglu_forward(bench *b)
{
    bl_swiglu_forward_args a = {.T = b->T, .I = I, .gate_up = bf16(b->a), .h = bf16(b->b)};
    return bl_swiglu_forward(b->stream, &a);
}
static bl_status run_swiglu_quantized(bench *b)
{
    bl_swiglu_forward_args a = {
        .T = b->T, .I = I, .gate_up = bf16(b->a), .h = bf16(b->b), .quantized = codes(b)};
    return bl_swiglu_forward(b->stream, &a);
}
static bl_status run_swiglu_backward(bench *b)
{
    bl_swiglu_backward_args a = {
        .T = b->T, .I = I, .gate_up = bf16(b->a), .dh = bf16(b->b), .d_gate_up = bf16(b->c)};
    return bl_swiglu_backward(b->stream, &a);
}
static bl_status run_add(bench *b)
{
    bl_add_args a = {.n = b->T * H, .a = bf16(b->a), .b = bf16(b->b), .y = bf16(b->c)};
    return bl_add(b->stream, &a);
}
static bl_status run_dropout(bench *b)
{
    bl_dropout_args a = {.T = b->T,
                         .C = H,
                         .p = 0.1f,
                         .seed = 1,
                         .step = 1,
                         .sample = b->sample,
                         .position = b->position,
                         .x = bf16(b->a),
                         .y = bf16(b->b)};
    return bl_dropout(b->stream, &a);
}
static bl_status run_embedding(bench *b)
{
    bl_embedding_args a = {.T = b->T, .H = H, .ids = b->ids, .table = bf16(b->a), .y = bf16(b->b)};
    return bl_embedding(b->stream, &a);
}
static bl_status run_cast(bench *b)
{
    bl_cast_args a = {.n = LORA_SHARE, .x = bl_tensor_f32(b->floats), .y = bf16(b->b)};
    return bl_cast(b->stream, &a);
}
static bl_status quantize_rows(bench *b, int64_t cols, const float *column_factor)
{
    return fp8_cuda_quantize_rows(b->stream, b->a, cols, column_factor, b->T, cols, (uint8_t *)b->b,
                                  (float *)(void *)b->c);
}
static bl_status run_quantize_rows_h(bench *b)
{
    return quantize_rows(b, H, NULL);
}
static bl_status run_quantize_rows_i(bench *b)
{
    return quantize_rows(b, I, NULL);
}
static bl_status run_quantize_rows_2i(bench *b)
{
    return quantize_rows(b, 2 * I, b->floats);
}
static bl_status run_quantize_groups_h(bench *b)
{
    return fp8_cuda_quantize_groups(b->stream, b->a, H, b->T, H, (uint8_t *)b->b,
                                    (float *)(void *)b->c);
}
static bl_status run_dequantize_row(bench *b)
{
    return fp8_cuda_dequantize(b->stream, BL_FORMAT_FP8_ROW, b->a, b->floats, 2 * I, H, b->b);
}
static bl_status run_dequantize_block(bench *b)
{
    return fp8_cuda_dequantize(b->stream, BL_FORMAT_FP8_BLOCK, b->a, b->floats, 2 * I, H, b->b);
}
static bl_status run_transpose(bench *b)
{
    return fp8_cuda_transpose(b->stream, (const uint8_t *)b->a, 2 * I, H, (uint8_t *)b->b);
}
static bl_status run_adamw(bench *b)
{
    bl_adamw_args a = {.n = LORA_SHARE,
                       .step = 1,
                       .lr = 1e-4,
                       .beta1 = 0.9,
                       .beta2 = 0.999,
                       .eps = 1e-8,
                       .grad = b->floats,
                       .w = b->floats + LORA_SHARE,
                       .m = bl_tensor_f32(b->floats + 2 * (int64_t)LORA_SHARE),
                       .v = bl_tensor_f32(b->floats + 3 * (int64_t)LORA_SHARE)};
    return bl_adamw(b->stream, &a);
}
static bl_status run_sum_squares(bench *b)
{
    bl_sum_squares_args a = {.n = LORA_SHARE, .x = b->floats, .sum = b->sums};
    return bl_sum_squares(b->stream, &a);
}

/* bytes = per_token * T + fixed: every input read once, every output written once. */
static const struct {
    const char *name;
    bl_status (*run)(bench *);
    int64_t per_token, fixed;
} cases[] = {
    {"copy of 1 GiB", run_copy, 0, (int64_t)2 << 30},
    {"rmsnorm_forward, 16384", run_rmsnorm_forward, 4 * H + 4, 4 * H},
    {"rmsnorm_forward, 16384, quantized", run_rmsnorm_quantized, 5 * H + 4, 4 * H},
    {"rmsnorm_backward, 16384, added to dx", run_rmsnorm_backward, 8 * H + 4, 4 * H},
    {"rope, 136 heads of 128", run_rope, 4 * HEADS *D + 4 * D, 0},
    {"swiglu_forward, 53248", run_swiglu_forward, 6 * I, 0},
    {"swiglu_forward, 53248, quantized", run_swiglu_quantized, 7 * I + 4, 0},
    {"swiglu_backward, 53248", run_swiglu_backward, 10 * I, 0},
    {"add, 16384", run_add, 6 * H, 0},
    {"dropout, 16384", run_dropout, 4 * H + 12, 0},
    {"embedding, 16384", run_embedding, 4 * H + 4, 0},
    {"quantize_rows, 16384", run_quantize_rows_h, 3 * H + 4, 0},
    {"quantize_rows, 53248", run_quantize_rows_i, 3 * I + 4, 0},
    {"quantize_rows, 106496, column factors", run_quantize_rows_2i, 6 * I + 4, 8 * I},
    {"quantize_groups, 16384", run_quantize_groups_h, 3 * H + 4 * H / 128, 0},
    {"dequantize fp8_row, 106496 x 16384", run_dequantize_row, 0, (int64_t)6 * I *H + 8 * I},
    {"dequantize fp8_block, 106496 x 16384", run_dequantize_block, 0,
     (int64_t)6 * I *H + (int64_t)8 * I *H / 16384},
    {"transpose, 106496 x 16384", run_transpose, 0, (int64_t)4 * I *H},
    {"cast to bf16, 47 M", run_cast, 0, (int64_t)6 * LORA_SHARE},
    {"adamw, 47 M", run_adamw, 0, (int64_t)28 * LORA_SHARE},
    {"sum_squares, 47 M", run_sum_squares, 0, (int64_t)4 * LORA_SHARE},
};

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bl_status measure(bench *b, bl_status (*run)(bench *), int n_runs, double *seconds)
{
    for (int i = -1; i < n_runs; i++) { /* the first warms up */
        BL_TRY(bl_stamp_record(b->begin, b->stream));
        for (int k = 0; k < LAUNCHES; k++) BL_TRY(run(b));
        BL_TRY(bl_stamp_record(b->end, b->stream));
        BL_TRY(bl_stream_synchronize(b->stream));
        if (i >= 0) seconds[i] = bl_stamp_elapsed_s(b->begin, b->end) / LAUNCHES;
    }
    qsort(seconds, (size_t)n_runs, sizeof *seconds, compare);
    return BL_OK;
}

static bl_status allocate(bench *b, size_t size_bytes, void *out)
{
    return bl_device_alloc(b->device, BL_SPACE_DEVICE, size_bytes, "a matrix", out);
}

/* With values of (-1, 1) in bf16, or of [0.5, 1) in fp32, which the optimizer's roots want: zeros
 * take other ways through divisions, and memory is faster with them. */
static bl_status fill(bench *b, void *dst, size_t size_bytes, bool is_f32)
{
    uint32_t state = 12345;
    unsigned char *pattern = malloc(PATTERN_BYTES);

    if (!pattern) return BL_FAIL(BL_ENOMEM, "a pattern");
    for (size_t i = 0; i < PATTERN_BYTES; i += 4) {
        state = state * 1664525u + 1013904223u;
        float value = (float)(state >> 8) * 0x1p-25f + 0.5f, other = 4.0f * (value - 0.75f);
        uint16_t pair[2] = {bl_f32_to_bf16(other), bl_f32_to_bf16(-other * value)};
        memcpy(pattern + i, is_f32 ? (const void *)&value : pair, 4);
    }
    bl_status st = BL_OK;
    for (size_t done = 0, n; done < size_bytes && st == BL_OK; done += n) {
        n = size_bytes - done < PATTERN_BYTES ? size_bytes - done : PATTERN_BYTES;
        st = bl_stream_copy(b->stream, (char *)dst + done, done == 0 ? pattern : dst, n);
    }
    bl_status ended = bl_stream_synchronize(b->stream);
    free(pattern);
    return st == BL_OK ? ended : st;
}

static bl_status prepare(bench *b)
{
    size_t matrix_bytes = bl_max_i64((int64_t)4 * I * H, b->T * 4 * I);
    BL_TRY(bl_stream_create(b->device, "bench", &b->stream));
    BL_TRY(bl_stamp_create(b->device, &b->begin));
    BL_TRY(bl_stamp_create(b->device, &b->end));
    BL_TRY(allocate(b, matrix_bytes, &b->a));
    BL_TRY(allocate(b, matrix_bytes, &b->b));
    BL_TRY(allocate(b, (size_t)b->T * 4 * I, &b->c));
    BL_TRY(allocate(b, (size_t)LORA_SHARE * 16 + (size_t)b->T * D * 4, &b->floats));
    BL_TRY(allocate(b, (size_t)b->T * 4, &b->ids));
    BL_TRY(allocate(b, (size_t)b->T * 4, &b->position));
    BL_TRY(allocate(b, (size_t)b->T * 8, &b->sample));
    BL_TRY(allocate(b, 8, &b->cu_seqlens));
    BL_TRY(allocate(b, 8, &b->sums));
    BL_TRY(fill(b, b->a, matrix_bytes, false));
    BL_TRY(fill(b, b->b, matrix_bytes, false));
    BL_TRY(fill(b, b->c, (size_t)b->T * 4 * I, false));
    BL_TRY(fill(b, b->floats, (size_t)LORA_SHARE * 16 + (size_t)b->T * D * 4, true));
    int32_t *ids, ends[2] = {0, (int32_t)b->T};
    if (!(ids = malloc((size_t)b->T * 4))) return BL_FAIL(BL_ENOMEM, "%lld ids", (long long)b->T);
    for (int64_t t = 0; t < b->T; t++) ids[t] = (int32_t)(t * 7919 % VOCABULARY);
    bl_status st = BL_OK;
    BL_TRY_GOTO(st, done, bl_stream_copy(b->stream, b->ids, ids, (size_t)b->T * 4));
    BL_TRY_GOTO(st, done, bl_stream_copy(b->stream, b->cu_seqlens, ends, sizeof ends));
    st = bl_stream_synchronize(b->stream);
done:
    free(ids);
    return st;
}

static bl_status run_cases(bench *b, int n_runs)
{
    double copy_rate = 0, seconds[RUNS_MAX];
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        double bytes = (double)(cases[i].per_token * b->T + cases[i].fixed),
               floor_s = bytes / H200_BYTES_PER_S;
        printf("{\"bench\":\"gpu_kernels\",\"kernel\":\"%s\",\"tokens\":%lld,\"bytes\":%.0f,"
               "\"floor_us\":%.1f",
               cases[i].name, (long long)b->T, bytes, 1e6 * floor_s);
        if (b->device) {
            bl_status status = measure(b, cases[i].run, n_runs, seconds);
            if (status != BL_OK) {
                printf("}\n");
                return bl_error_prefix(status, "%s", cases[i].name);
            }
            double rate = bytes / seconds[0];
            if (i == 0) copy_rate = rate;
            printf(",\"min_us\":%.1f,\"median_us\":%.1f,\"gb_per_s\":%.0f,\"percent_of_copy\":%.1f",
                   1e6 * seconds[0], 1e6 * seconds[n_runs / 2], 1e-9 * rate,
                   100 * rate / copy_rate);
        }
        printf("}\n");
        fflush(stdout);
    }
    return BL_OK;
}

static void destroy(bench *b)
{
    void *memory[] = {b->a,        b->b,      b->c,          b->floats, b->ids,
                      b->position, b->sample, b->cu_seqlens, b->sums};
    bl_stamp_destroy(b->begin);
    bl_stamp_destroy(b->end);
    bl_stream_destroy(b->stream);
    for (size_t i = 0; i < BL_COUNT(memory); i++)
        if (memory[i]) bl_device_free(b->device, BL_SPACE_DEVICE, memory[i]);
    bl_device_destroy(b->device);
}

int main(int argc, char **argv)
{
    bool is_plan = argc > 1 && strcmp(argv[1], "--plan") == 0;
    const char *tokens = argc > 1 + is_plan ? argv[1 + is_plan] : "4096",
               *runs = argc > 2 + is_plan ? argv[2 + is_plan] : "9";
    int n_runs = atoi(runs);
    bench b = {.T = atoll(tokens)};
    if (b.T < 1 || b.T > 65536 || n_runs < 1 || n_runs > RUNS_MAX) {
        fprintf(
            stderr,
            "usage: bench_gpu_kernels [--plan] [TOKENS [RUNS]]; at most 65536 tokens and %d runs\n",
            RUNS_MAX);
        return 2;
    }
    if (!is_plan && bl_device_create_cuda(0, &b.device) != BL_OK) {
        fprintf(stderr, "skip: no GPU: %s\n", bl_error_text());
        return SKIPPED;
    }
    bl_status status = is_plan ? BL_OK : prepare(&b);
    if (status == BL_OK) status = run_cases(&b, n_runs);
    if (status != BL_OK) fprintf(stderr, "bench_gpu_kernels: %s\n", bl_error_text());
    if (b.device) destroy(&b);
    return bl_status_exit_code(status);
}
