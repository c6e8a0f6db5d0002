/* SPDX-License-Identifier: Apache-2.0 */
/* bench_experts [THREADS [RUNS]]: the grouped product of experts of Qwen3-30B-A3B's shape (gate_up
 * 1536 x 2048, down 2048 x 768), 64 and 512 tokens per expert, compared with one product of as many
 * FLOPs, all tokens with one expert's matrix. Both take turns, run by run; the fastest run of each
 * counts. percent_of_dense is the dense product's time over the grouped one's. One JSON line per
 * case. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "ops/gemm.h"

enum { EXPERTS = 8, MOST_TOKENS = 512 };

static const struct {
    const char *name;
    int64_t N, K;
} matrices[] = {{"gate_up", 1536, 2048}, {"down", 2048, 768}};

typedef struct bench {
    bl_pool *pool;
    bl_weight all, one; /* of all experts; of the first */
    bool forward;
    int32_t first[EXPERTS + 1];
    float *in, *out;
} bench;

static bl_status run_once(const bench *b, bool is_grouped)
{
    int64_t T = b->first[EXPERTS], N = b->one.rows, K = b->one.cols;

    if (is_grouped)
        return bl_cpu_gemm_grouped(b->pool, b->forward, false, EXPERTS, b->first, b->in, &b->all,
                                   b->out);
    return b->forward ? bl_cpu_gemm_weight_nt(b->pool, T, b->in, K, &b->one, 0, b->out, N)
                      : bl_cpu_gemm_weight_nn(b->pool, T, b->in, N, &b->one, 0, b->out, K);
}

static void run_case(const bench *b, const char *name, int n_runs)
{
    double best[2] = {INFINITY, INFINITY};

    for (int run = -1; run < n_runs; run++) /* the first warms up */
        for (int way = 0; way < 2; way++) {
            double start = bl_now_s();
            if (run_once(b, way == 1) != BL_OK) {
                fprintf(stderr, "%s\n", bl_error_text());
                exit(1);
            }
            if (run >= 0) best[way] = fmin(best[way], bl_now_s() - start);
        }
    printf("{\"bench\":\"experts\",\"matrix\":\"%s\",\"direction\":\"%s\",\"format\":\"%s\","
           "\"threads\":%d,\"experts\":%d,\"tokens_per_expert\":%d,\"dense_s\":%.6f,"
           "\"grouped_s\":%.6f,\"percent_of_dense\":%.1f}\n",
           name, b->forward ? "nt" : "nn", bl_format_name(b->all.segment[0].format),
           bl_pool_threads(b->pool), EXPERTS, (int)b->first[1], best[0], best[1],
           100 * best[0] / best[1]);
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

static void run_matrix(bench *b, size_t m, const float *w, void *codes, float *scales, int n_runs)
{
    int64_t N = matrices[m].N, K = matrices[m].K;

    for (int is_coded = 0; is_coded < 2; is_coded++) {
        bl_format format = is_coded ? BL_FORMAT_FP8_ROW : BL_FORMAT_F32;
        if (is_coded) bl_fp8_row_quantize(b->pool, BL_F32, w, 0, EXPERTS * N, K, codes, scales);
        bl_weight_segment all = {format, is_coded ? codes : w, is_coded ? scales : NULL,
                                 EXPERTS * N};
        b->all = (bl_weight){EXPERTS * N, K, 1, {all}};
        b->one = (bl_weight){N, K, 1, {all}};
        b->one.segment[0].rows = N;
        for (int tokens = 64; tokens <= MOST_TOKENS; tokens *= 8)
            for (int direction = 1; direction >= 0; direction--) {
                b->forward = direction == 1;
                for (int e = 0; e <= EXPERTS; e++) b->first[e] = e * tokens;
                run_case(b, matrices[m].name, n_runs);
            }
    }
}

int main(int argc, char **argv)
{
    enum { MOST_WEIGHTS = EXPERTS * 1536 * 2048, MOST_ROWS = EXPERTS * 2048 };
    bench b = {0};
    int n_threads = argc > 1 ? atoi(argv[1]) : 2, n_runs = argc > 2 ? atoi(argv[2]) : 20;

    if (n_runs < 1 || bl_pool_create(n_threads, &b.pool) != BL_OK) {
        fprintf(stderr, "usage: %s [THREADS [RUNS]]\n", argv[0]);
        return 2;
    }
    float *w = random_floats(MOST_WEIGHTS), *scales = random_floats(MOST_ROWS);
    void *codes = malloc(MOST_WEIGHTS);
    b.in = random_floats(EXPERTS * MOST_TOKENS * 2048);
    b.out = random_floats(EXPERTS * MOST_TOKENS * 2048);
    if (!w || !scales || !codes || !b.in || !b.out) {
        fprintf(stderr, "no memory\n");
        return 4;
    }
    for (size_t m = 0; m < BL_COUNT(matrices); m++) run_matrix(&b, m, w, codes, scales, n_runs);
    free(w), free(scales), free(codes), free(b.in), free(b.out);
    bl_pool_destroy(b.pool);
    return 0;
}
