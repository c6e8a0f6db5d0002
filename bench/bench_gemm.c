/* SPDX-License-Identifier: Apache-2.0 */
/* bench_gemm [THREADS [RUNS]]: products with a frozen matrix in each format, compared with the
 * plain fp32 product of the same shape.
 *
 * The matrices are those of a Llama of 70 M (hidden 768, intermediate 2048, 12 heads, 4 of keys)
 * and of 300 M parameters (1024, 4096, 16, 4), for 512 tokens and for a few. The formats and the
 * plain product take turns, run by run; the fastest run of each counts. percent_of_plain is the
 * plain product's time over this one's. One JSON line per case. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "ops/gemm.h"

enum { PLAIN = BL_FORMAT_COUNT, N_WAYS };

typedef struct bench {
    bl_pool *pool;
    int64_t T, N, K;
    bool forward;
    float *in, *out;
    bl_weight weight[BL_FORMAT_COUNT];
} bench;

static const struct {
    const char *name;
    int64_t N, K;
} matrices[] = {
    {"70m qkv", 1280, 768},       {"70m o", 768, 768},       {"70m gate_up", 4096, 768},
    {"70m down", 768, 2048},      {"300m qkv", 1536, 1024},  {"300m o", 1024, 1024},
    {"300m gate_up", 8192, 1024}, {"300m down", 1024, 4096},
};

static const int64_t tokens[] = {512, 64, 16, 8, 4, 1};

static bl_status run_once(bench *b, int way)
{
    int64_t N = b->N, K = b->K;
    if (way == PLAIN) {
        const float *W = b->weight[BL_FORMAT_F32].segment[0].codes;
        return b->forward ? bl_cpu_gemm_f32(b->pool, false, true, b->T, N, K, 1, b->in, K, W, K, 0,
                                            b->out, N)
                          : bl_cpu_gemm_f32(b->pool, false, false, b->T, K, N, 1, b->in, N, W, K, 0,
                                            b->out, K);
    }
    return b->forward
               ? bl_cpu_gemm_weight_nt(b->pool, b->T, b->in, K, &b->weight[way], 0, b->out, N)
               : bl_cpu_gemm_weight_nn(b->pool, b->T, b->in, N, &b->weight[way], 0, b->out, K);
}

static void run_case(bench *b, const char *name, int n_runs)
{
    double best[N_WAYS], flops = 2.0 * (double)b->T * (double)b->N * (double)b->K;
    for (int way = 0; way < N_WAYS; way++) best[way] = INFINITY;
    for (int run = -1; run < n_runs; run++) /* the first warms up */
        for (int way = 0; way < N_WAYS; way++) {
            double start = bl_now_s();
            if (run_once(b, way) != BL_OK) {
                fprintf(stderr, "%s\n", bl_error_text());
                exit(1);
            }
            double seconds = bl_now_s() - start;
            if (run >= 0 && seconds < best[way]) best[way] = seconds;
        }
    char library[BL_CPU_GEMM_TEXT_BYTES];
    bl_cpu_gemm_describe(library);
    for (int way = 0; way < N_WAYS; way++)
        printf("{\"bench\":\"gemm\",\"matrix\":\"%s\",\"direction\":\"%s\",\"format\":\"%s\","
               "\"library\":\"%"
               "s\",\"threads\":%d,"
               "\"tokens\":%lld,\"rows\":%lld,\"cols\":%lld,\"min_s\":%.6f,\"gflops\":%.1f,"
               "\"percent_of_"
               "plain\":%.1f}\n",
               name, b->forward ? "nt" : "nn",
               way == PLAIN ? "plain" : bl_format_name((bl_format)way), library,
               bl_pool_threads(b->pool), (long long)b->T, (long long)b->N, (long long)b->K,
               best[way], 1e-9 * flops / best[way], 100 * best[PLAIN] / best[way]);
}

static float *random_floats(int64_t n)
{
    float *values = malloc((size_t)n * sizeof *values);
    uint64_t seed = 1;
    for (int64_t i = 0; values && i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        values[i] = (float)(seed >> 40) / (float)(1 << 23) - 1.0f;
    }
    return values;
}

/* The fp32 matrix in every format. False: no memory. */
static bool make_weights(bench *b)
{
    float *W = random_floats(b->N * b->K);
    if (!W) return false;
    for (int format = 0; format < BL_FORMAT_COUNT; format++) {
        size_t codes_bytes, n_scales;
        bl_format_sizes((bl_format)format, b->N, b->K, &codes_bytes, &n_scales);
        void *codes = format == BL_FORMAT_F32 ? W : malloc(codes_bytes);
        float *scales = malloc((n_scales + 1) * sizeof *scales);
        if (!codes || !scales) return false;
        uint16_t *halves = codes;
        if (format == BL_FORMAT_FP8_ROW)
            bl_fp8_row_quantize(b->pool, BL_F32, W, 0, b->N, b->K, codes, scales);
        if (format == BL_FORMAT_FP8_BLOCK)
            bl_fp8_block_quantize(b->pool, BL_F32, W, 0, b->N, b->K, codes, scales);
        if (format == BL_FORMAT_F16)
            for (int64_t i = 0; i < b->N * b->K; i++) halves[i] = bl_f32_to_f16(W[i]);
        if (format == BL_FORMAT_BF16)
            for (int64_t i = 0; i < b->N * b->K; i++) halves[i] = bl_f32_to_bf16(W[i]);
        b->weight[format] = (bl_weight){b->N, b->K, 1, {{(bl_format)format, codes, scales, b->N}}};
    }
    return true;
}

static void free_weights(bench *b)
{
    for (int format = 0; format < BL_FORMAT_COUNT; format++) {
        free((void *)b->weight[format].segment[0].codes);
        free((void *)b->weight[format].segment[0].scales);
    }
}

int main(int argc, char **argv)
{
    bench b = {0};
    int n_threads = argc > 1 ? atoi(argv[1]) : 2, n_runs = argc > 2 ? atoi(argv[2]) : 20;
    if (n_runs < 1 || bl_pool_create(n_threads, &b.pool) != BL_OK) {
        fprintf(stderr, "usage: %s [THREADS [RUNS]]\n", argv[0]);
        return 2;
    }
    b.in = random_floats(512 * 8192);
    b.out = random_floats(512 * 8192);
    for (size_t m = 0; m < BL_COUNT(matrices); m++) {
        b.N = matrices[m].N;
        b.K = matrices[m].K;
        if (!b.in || !b.out || !make_weights(&b)) {
            fprintf(stderr, "no memory\n");
            return 4;
        }
        for (size_t t = 0; t < BL_COUNT(tokens); t++)
            for (int direction = 1; direction >= 0; direction--) {
                b.T = tokens[t];
                b.forward = direction == 1;
                if (b.forward || b.T >= 64) run_case(&b, matrices[m].name, n_runs);
            }
        free_weights(&b);
    }
    free(b.in);
    free(b.out);
    bl_pool_destroy(b.pool);
    return 0;
}
