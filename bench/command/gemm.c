/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench gemm: products of fp32, of bf16 and of FP8 codes with bf16 on the CPU, as a
 * percentage of what a loop of the multiply-add does on the same cores. The loops and the products
 * take turns, run by run, since shared machines change their speed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/cores.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/peak.h"
#include "fp8/packed.h"
#include "ops/gemm.h"

typedef struct gemm_options {
    bl_string_list shapes, products, directions;
    int64_t threads, runs;
} gemm_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench gemm", .type = BL_OPTION_##kind,                                \
    .offset = offsetof(gemm_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(shapes, LIST), .default_text = "4096x4096x512,14336x4096x512",
     .help = "rows and columns of W, and tokens: 4096x4096x512, ..."},
    {OPTION(products, LIST), .default_text = "f32,bf16,fp8_row,fp8_block",
     .help = "f32; bf16; bf16 times a frozen " BL_FORMATS_MADE},
    {OPTION(directions, LIST), .default_text = "y,dx",
     .help = "y = x W^T, dx = dy W, dw = dy^T x (f32 and bf16 only)"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "CPU threads"},
    {OPTION(runs, INT), .default_text = "9", .min = 1, .max = BL_BENCH_MAX_RUNS,
     .help = "timed runs of each product"},
};

enum { F32, BF16, FP8_ROW, FP8_BLOCK, MXFP4, INT4_G32, INT4_G128, NF4, N_PRODUCTS };
enum { Y, DX, DW, N_DIRECTIONS };
static const char *const product_names[N_PRODUCTS] = {"f32",   "bf16",     "fp8_row",   "fp8_block",
                                                      "mxfp4", "int4_g32", "int4_g128", "nf4"};
static const char *const direction_names[N_DIRECTIONS] = {"y", "dx", "dw"};

typedef struct gemm_bench {
    const gemm_options *options;
    bl_pool *pool;
    bool wanted[N_PRODUCTS], directions[N_DIRECTIONS];
    int64_t rows, cols, tokens;
    /* x (tokens, cols), dy (tokens, rows), W (rows, cols): the bf16 values, in both types */
    float *x, *dy, *W, *out;
    uint16_t *x_bf16, *dy_bf16, *W_bf16;
    bl_weight weight[N_PRODUCTS];
    double *seconds[N_PRODUCTS], *peaks[N_PRODUCTS];
} gemm_bench;

static bl_peak_kind peak_of(int product)
{
    return product == F32 ? BL_PEAK_F32 : BL_PEAK_BF16;
}

/* ---- operands ---- */

/* In huge pages, as a CPU device's memory is; NULL: no memory. */
static void *allocate(size_t n_bytes)
{
    enum { HUGE_PAGE_BYTES = 2 << 20 };
    size_t size_bytes = (n_bytes / HUGE_PAGE_BYTES + 1) * HUGE_PAGE_BYTES;
    void *memory = aligned_alloc(HUGE_PAGE_BYTES, size_bytes);
    if (memory) madvise(memory, size_bytes, MADV_HUGEPAGE); /* a hint: may fail */
    return memory;
}

/* n values in [-1, 1) that bf16 holds. */
static bl_status make_values(int64_t n, uint64_t seed, float **wide, uint16_t **narrow)
{
    *wide = allocate((size_t)n * sizeof **wide);
    *narrow = allocate((size_t)n * sizeof **narrow);
    if (!*wide || !*narrow) return BL_FAIL(BL_ENOMEM, "out of memory: bench gemm's matrices");
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        (*narrow)[i] = bl_f32_to_bf16((float)(seed >> 40) * 0x1p-23f - 1.0f);
        (*wide)[i] = bl_bf16_to_f32((*narrow)[i]);
    }
    return BL_OK;
}

static bl_status make_weight(gemm_bench *b, int product)
{
    bl_format format;
    bl_format_bytes n;

    if (!bl_format_parse(product_names[product], &format))
        return BL_FAIL(BL_EINTERNAL, "bench gemm: no format %s", product_names[product]);
    if (!bl_format_measure(bl_format_describe(format), b->rows, b->cols, &n))
        return BL_FAIL(BL_ELIMIT, "bench gemm: a matrix of %lld x %lld", (long long)b->rows,
                       (long long)b->cols);
    void *codes = allocate(n.codes), *scales = malloc(n.scales);
    b->weight[product] = (bl_weight){b->rows, b->cols, 1, {{format, codes, scales, b->rows}}};
    if (!codes || !scales) return BL_FAIL(BL_ENOMEM, "out of memory: bench gemm's codes");
    if (bl_format_is_packed(format))
        return bl_packed_quantize(b->pool, format, false, BL_F32, b->W, 0, b->rows, b->cols, codes,
                                  scales);
    return product == FP8_ROW
               ? bl_fp8_row_quantize(b->pool, BL_F32, b->W, 0, b->rows, b->cols, codes, scales)
               : bl_fp8_block_quantize(b->pool, BL_F32, b->W, 0, b->rows, b->cols, codes, scales);
}

static bl_status make_operands(gemm_bench *b)
{
    int64_t largest = bl_max_i64(b->rows * b->cols, b->tokens * bl_max_i64(b->rows, b->cols));

    BL_TRY(make_values(b->tokens * b->cols, 1, &b->x, &b->x_bf16));
    BL_TRY(make_values(b->tokens * b->rows, 2, &b->dy, &b->dy_bf16));
    BL_TRY(make_values(b->rows * b->cols, 3, &b->W, &b->W_bf16));
    b->out = allocate((size_t)largest * sizeof *b->out);
    if (!b->out) return BL_FAIL(BL_ENOMEM, "out of memory: bench gemm's output");
    for (int product = FP8_ROW; product < N_PRODUCTS; product++)
        if (b->wanted[product]) BL_TRY(make_weight(b, product));
    return BL_OK;
}

static void free_operands(gemm_bench *b)
{
    float **wide[] = {&b->x, &b->dy, &b->W, &b->out};
    uint16_t **narrow[] = {&b->x_bf16, &b->dy_bf16, &b->W_bf16};
    for (size_t i = 0; i < BL_COUNT(wide); i++) {
        free(*wide[i]);
        *wide[i] = NULL;
    }
    for (size_t i = 0; i < BL_COUNT(narrow); i++) {
        free(*narrow[i]);
        *narrow[i] = NULL;
    }
    for (int product = FP8_ROW; product < N_PRODUCTS; product++) {
        free((void *)b->weight[product].segment[0].codes);
        free((void *)b->weight[product].segment[0].scales);
        b->weight[product] = (bl_weight){0};
    }
}

/* ---- products ---- */

static bl_status multiply_f32(const gemm_bench *b, int direction)
{
    int64_t R = b->rows, C = b->cols, T = b->tokens;
    if (direction == Y)
        return bl_cpu_gemm_f32(b->pool, false, true, T, R, C, 1, b->x, C, b->W, C, 0, b->out, R);
    if (direction == DX)
        return bl_cpu_gemm_f32(b->pool, false, false, T, C, R, 1, b->dy, R, b->W, C, 0, b->out, C);
    return bl_cpu_gemm_f32(b->pool, true, false, R, C, T, 1, b->dy, R, b->x, C, 0, b->out, C);
}

/* y and dx are bf16, as activations are; dw is fp32, as gradients are. */
static bl_status multiply_bf16(const gemm_bench *b, int direction)
{
    int64_t R = b->rows, C = b->cols, T = b->tokens;
    if (direction == Y)
        return bl_cpu_gemm_bf16(b->pool, false, true, T, R, C, 1, b->x_bf16, C, b->W_bf16, C, 0,
                                BL_BF16, b->out, R);
    if (direction == DX)
        return bl_cpu_gemm_bf16(b->pool, false, false, T, C, R, 1, b->dy_bf16, R, b->W_bf16, C, 0,
                                BL_BF16, b->out, C);
    return bl_cpu_gemm_bf16(b->pool, true, false, R, C, T, 1, b->dy_bf16, R, b->x_bf16, C, 0,
                            BL_F32, b->out, C);
}

static bl_status multiply(const gemm_bench *b, int product, int direction)
{
    const bl_weight *w = &b->weight[product];
    if (product == F32) return multiply_f32(b, direction);
    if (product == BF16) return multiply_bf16(b, direction);
    return direction == Y ? bl_cpu_gemm_bf16_weight_nt(b->pool, b->tokens, b->x_bf16, b->cols, w, 0,
                                                       BL_BF16, b->out, b->rows)
                          : bl_cpu_gemm_bf16_weight_nn(b->pool, b->tokens, b->dy_bf16, b->rows, w,
                                                       0, BL_BF16, b->out, b->cols);
}

/* Some elements against double arithmetic with the unquantized W: 448 is 2^8.8 and E4M3 has four
 * significant bits, so a code is within 2^-4 of its weight or 2^-10 of the scale times 448. */
static bl_status verify(const gemm_bench *b, int product, int direction)
{
    int64_t height = direction == DW ? b->rows : b->tokens,
            width = direction == Y ? b->rows : b->cols,
            depth = direction == Y    ? b->cols
                    : direction == DX ? b->rows
                                      : b->tokens;
    for (int64_t sample = 0; sample < 61; sample++) {
        int64_t i = sample * 7919 % height, j = sample * 104729 % width, at = i * width + j;
        double sum = 0, magnitude = 0;
        for (int64_t k = 0; k < depth; k++) {
            float left = direction == Y    ? b->x[i * depth + k]
                         : direction == DX ? b->dy[i * depth + k]
                                           : b->dy[k * height + i];
            float right = direction == Y    ? b->W[j * depth + k]
                          : direction == DX ? b->W[k * width + j]
                                            : b->x[k * width + j];
            sum += (double)left * (double)right;
            magnitude += fabs((double)left * (double)right);
        }
        bool is_f32 = product == F32 || direction == DW;
        double value =
            is_f32 ? (double)b->out[at] : (double)bl_bf16_to_f32(((const uint16_t *)b->out)[at]);
        double bound = magnitude * (product < FP8_ROW ? 0x1p-8 : 0x1p-4);
        if (!(fabs(value - sum) <= bound))
            return BL_FAIL(BL_EINTERNAL, "bench gemm: %s, %s: element %lld, %lld is %g, not %g",
                           product_names[product], direction_names[direction], (long long)i,
                           (long long)j, value, sum);
    }
    return BL_OK;
}

/* ---- measurement ---- */

static bool takes_part(const gemm_bench *b, int product, int direction)
{
    return b->wanted[product] && (direction != DW || product < FP8_ROW);
}

static void print(const gemm_bench *b, int product, int direction)
{
    int64_t runs = b->options->runs;
    double flops = 2.0 * (double)b->rows * (double)b->cols * (double)b->tokens;
    double *seconds = b->seconds[product], *percent = b->peaks[product];
    const char *peak = bl_peak_name(peak_of(product));

    printf("{\"bench\":\"gemm\",\"product\":\"%s\",\"direction\":\"%s\",\"rows\":%lld,"
           "\"cols\":%lld,\"tokens\":%lld,\"threads\":%d,\"runs\":%lld",
           product_names[product], direction_names[direction], (long long)b->rows,
           (long long)b->cols, (long long)b->tokens, bl_pool_threads(b->pool), (long long)runs);
    for (int64_t run = 0; peak && run < runs; run++)
        percent[run] = 100 * flops / seconds[run] / percent[run];
    bl_bench_times times = bl_bench_summarize(seconds, runs);
    printf(",\"seconds\":%.6g,\"median_seconds\":%.6g,\"gflop_per_s\":%.1f,"
           "\"median_gflop_per_s\":%.1f",
           times.best_s, times.median_s, flops / times.best_s * 1e-9,
           flops / times.median_s * 1e-9);
    if (peak) {
        bl_bench_times p = bl_bench_summarize(percent, runs);
        printf(",\"peak\":\"%s\",\"percent_of_peak\":%.1f,\"percent_least\":%.1f,"
               "\"percent_most\":%.1f",
               peak, p.median_s, percent[0], percent[runs - 1]);
    }
    printf("}\n");
    fflush(stdout);
}

static bl_status measure(gemm_bench *b, int direction)
{
    for (int64_t run = -1; run < b->options->runs; run++) /* the first is not counted */
        for (int product = 0; product < N_PRODUCTS; product++) {
            if (!takes_part(b, product, direction)) continue;
            double peak = bl_peak_name(peak_of(product))
                              ? bl_peak_measure(b->pool, peak_of(product))
                              : 0,
                   start = bl_now_s();
            BL_TRY(multiply(b, product, direction));
            double seconds = bl_now_s() - start;
            if (run < 0) {
                BL_TRY(verify(b, product, direction));
                continue;
            }
            b->seconds[product][run] = seconds;
            b->peaks[product][run] = peak;
        }
    for (int product = 0; product < N_PRODUCTS; product++)
        if (takes_part(b, product, direction)) print(b, product, direction);
    return BL_OK;
}

static void print_peaks(const gemm_bench *b)
{
    for (int kind = BL_PEAK_F32; kind <= BL_PEAK_BF16; kind++) {
        double best = 0;
        if (!bl_peak_name((bl_peak_kind)kind)) continue;
        for (int64_t run = 0; run < b->options->runs; run++)
            best = fmax(best, bl_peak_measure(b->pool, (bl_peak_kind)kind));
        printf("{\"bench\":\"gemm\",\"peak\":\"%s\",\"threads\":%d,\"gflop_per_s\":%.1f}\n",
               bl_peak_name((bl_peak_kind)kind), bl_pool_threads(b->pool), best * 1e-9);
    }
}

static bl_status parse_shape(gemm_bench *b, const char *text)
{
    long long size[3];
    char rest;
    if (sscanf(text, "%lldx%lldx%lld%c", &size[0], &size[1], &size[2], &rest) != 3 || size[0] < 1 ||
        size[1] < 1 || size[2] < 1 || size[0] > 1 << 20 || size[1] > 1 << 20 || size[2] > 1 << 20)
        return BL_FAIL(BL_EUSAGE, "--shapes: expected ROWSxCOLSxTOKENS as in 4096x4096x512, got %s",
                       text);
    b->rows = size[0];
    b->cols = size[1];
    b->tokens = size[2];
    return BL_OK;
}

static bl_status parse_names(const char *key, const bl_string_list *list, const char *const *names,
                             int n_names, bool *out)
{
    for (int64_t i = 0; i < list->n_items; i++) {
        char all[64] = "";
        int found = -1;
        for (int n = 0; n < n_names; n++) {
            snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", n ? ", " : "", names[n]);
            if (strcmp(names[n], list->items[i]) == 0) found = n;
        }
        if (found < 0)
            return BL_FAIL(BL_EUSAGE, "--%s: expected %s, got %s", key, all, list->items[i]);
        out[found] = true;
    }
    return BL_OK;
}

static bl_status parse(gemm_bench *b)
{
    const gemm_options *o = b->options;
    BL_TRY(parse_names("products", &o->products, product_names, N_PRODUCTS, b->wanted));
    BL_TRY(parse_names("directions", &o->directions, direction_names, N_DIRECTIONS, b->directions));
    for (int64_t i = 0; i < o->shapes.n_items; i++) BL_TRY(parse_shape(b, o->shapes.items[i]));
    return BL_OK;
}

static bl_status measure_shape(gemm_bench *b, const char *shape)
{
    BL_TRY(parse_shape(b, shape));
    BL_TRY(make_operands(b));
    for (int direction = 0; direction < N_DIRECTIONS; direction++)
        if (b->directions[direction]) BL_TRY(measure(b, direction));
    free_operands(b);
    return BL_OK;
}

static bl_status run(const void *values)
{
    const gemm_options *o = values;
    gemm_bench b = {.options = o};
    bl_status st = BL_OK;
    int threads = (int)(o->threads == BL_OPTION_AUTO ? bl_cores_usable() : o->threads);
    double *times = calloc((size_t)o->runs * N_PRODUCTS * 2, sizeof *times);

    if (!times) return BL_FAIL(BL_ENOMEM, "out of memory: bench gemm's times");
    for (int product = 0; product < N_PRODUCTS; product++) {
        b.seconds[product] = times + o->runs * 2 * product;
        b.peaks[product] = b.seconds[product] + o->runs;
    }
    BL_TRY_GOTO(st, done, parse(&b));
    BL_TRY_GOTO(st, done, bl_pool_create(threads, &b.pool));
    print_peaks(&b);
    for (int64_t i = 0; i < o->shapes.n_items; i++)
        BL_TRY_GOTO(st, done, measure_shape(&b, o->shapes.items[i]));
done:
    free_operands(&b);
    bl_pool_destroy(b.pool);
    free(times);
    return st;
}

const bl_bench bl_bench_gemm = {
    .name = "gemm",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(gemm_options),
    .details =
        "A JSON line for each product: seconds of the fastest and the median run, operations "
        "per second, and\nthe percentage of the peak, median, least and most of the runs. "
        "The peak is a loop of the\nmultiply-add on registers, measured before each run.\n",
    .run = run,
};
