/* SPDX-License-Identifier: Apache-2.0 */
/* bench_ops [THREADS] [RUNS]: the loss head and attention against the time the GEMM takes for the
 * same floating-point operations, and the row ops against a copy of the bytes they move; all in one
 * run, interleaved, on THREADS (2) threads. Each case checks a row of its result, warms up, and
 * prints the best and the median of RUNS (9) as one JSON line; `ratio` is best over best. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/loss_head.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/optimizer.h"

enum { MAX_RUNS = 1000 };

typedef struct bench {
    bl_device *device;
    bl_stream *stream;
    int n_threads, n_runs;
    uint64_t random;
} bench;

typedef struct timing {
    double best_s, median_s;
} timing;

/* A job queues its work on the stream. */
typedef bl_status (*job_fn)(bl_stream *stream, const void *job);

static void check(bl_status status)
{
    if (status == BL_OK) return;
    fprintf(stderr, "bench_ops: %s\n", bl_error_text());
    exit(bl_status_exit_code(status));
}

static void expect(int holds, const char *what)
{
    if (!holds) check(BL_FAIL(BL_EINTERNAL, "%s: the result is wrong", what));
}

/* Uniform in [-1, 1) / 4. */
static float *numbers(bench *b, int64_t count)
{
    void *memory;
    check(bl_device_alloc(b->device, BL_SPACE_DEVICE, (size_t)count * sizeof(float), "numbers",
                          &memory));
    float *x = memory;
    for (int64_t i = 0; i < count; i++) {
        b->random = b->random * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(int32_t)(b->random >> 32) / 8589934592.0f;
    }
    return x;
}

static void release(bench *b, float *x)
{
    bl_device_free(b->device, BL_SPACE_DEVICE, x);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs the jobs in turn, so that a disturbance of the machine meets both. */
static void measure(bench *b, job_fn first, const void *first_job, timing *first_time,
                    job_fn second, const void *second_job, timing *second_time)
{
    double times[2][MAX_RUNS];
    for (int run = -1; run < b->n_runs; run++) {
        for (int which = 0; which < 2; which++) {
            double start = bl_now_s();
            check(which ? second(b->stream, second_job) : first(b->stream, first_job));
            check(bl_stream_synchronize(b->stream));
            if (run >= 0) times[which][run] = bl_now_s() - start;
        }
    }
    for (int which = 0; which < 2; which++) {
        qsort(times[which], (size_t)b->n_runs, sizeof(double), compare);
        *(which ? second_time : first_time) =
            (timing){times[which][0], times[which][b->n_runs / 2]};
    }
}

static void report(const bench *b, const char *name, const char *shape, timing op,
                   const char *yardstick, double scale, timing other)
{
    printf("{\"bench\":\"%s\",%s,\"threads\":%d,\"runs\":%d,\"best_s\":%.6f,\"median_s\":%.6f,\"%s_"
           "best_s\":%"
           ".6f,"
           "\"%s_median_s\":%.6f,\"ratio\":%.3f}\n",
           name, shape, b->n_threads, b->n_runs, op.best_s, op.median_s, yardstick,
           other.best_s * scale, yardstick, other.median_s * scale,
           op.best_s / (other.best_s * scale));
    fflush(stdout);
}

static bl_status run_matmul(bl_stream *s, const void *job)
{
    return bl_matmul(s, job);
}
static bl_status run_forward(bl_stream *s, const void *job)
{
    return bl_attention_forward(s, job);
}
static bl_status run_backward(bl_stream *s, const void *job)
{
    return bl_attention_backward(s, job);
}
static bl_status run_loss_head(bl_stream *s, const void *job)
{
    return bl_loss_head(s, job);
}
static bl_status run_norm(bl_stream *s, const void *job)
{
    return bl_rmsnorm_forward(s, job);
}
static bl_status run_swiglu(bl_stream *s, const void *job)
{
    return bl_swiglu_forward(s, job);
}
static bl_status run_dropout(bl_stream *s, const void *job)
{
    return bl_dropout(s, job);
}
static bl_status run_adamw(bl_stream *s, const void *job)
{
    return bl_adamw(s, job);
}
static bl_status run_add(bl_stream *s, const void *job)
{
    return bl_add(s, job);
}

typedef struct head_products {
    bl_matmul_weight_args logits, dx;
} head_products;

static bl_status run_head_products(bl_stream *stream, const void *job)
{
    const head_products *p = job;
    BL_TRY(bl_matmul_weight(stream, &p->logits));
    return bl_matmul_weight(stream, &p->dx);
}

static void bench_loss_head(bench *b, int64_t T, int64_t H, int64_t V)
{
    float *x = numbers(b, T * H), *head = numbers(b, V * H), *dx = numbers(b, T * H),
          *logp = numbers(b, T), *weights = numbers(b, T);
    float *scratch = numbers(
              b, (int64_t)(bl_loss_head_scratch_bytes(BL_DEVICE_CPU, T, H, V) / sizeof(float))),
          *logits = numbers(b, T * V);
    int32_t *targets = (int32_t *)numbers(b, T);
    double loss = 0, sum = 0;
    for (int64_t t = 0; t < T; t++) {
        targets[t] = (int32_t)(t * 97 % V);
        weights[t] = 1.0f;
    }
    bl_weight w = {.rows = V,
                   .cols = H,
                   .n_segments = 1,
                   .segment = {{.format = BL_FORMAT_F32, .codes = head, .rows = V}}};
    bl_loss_head_args op = {.T = T,
                            .H = H,
                            .V = V,
                            .head = w,
                            .x = bl_tensor_f32(x),
                            .targets = targets,
                            .weights = weights,
                            .scale = 1.0 / (double)T,
                            .logits = scratch,
                            .dx = bl_tensor_f32(dx),
                            .logp = logp,
                            .loss_sum = &loss};
    head_products products = {.logits = {.forward = true,
                                         .T = T,
                                         .in = bl_tensor_f32(x),
                                         .out = bl_tensor_f32(logits),
                                         .weight = w},
                              .dx = {.forward = false,
                                     .T = T,
                                     .in = bl_tensor_f32(logits),
                                     .out = bl_tensor_f32(dx),
                                     .weight = w}};
    timing op_time, gemm_time;
    char shape[128];
    measure(b, run_loss_head, &op, &op_time, run_head_products, &products, &gemm_time);

    double target_logit = 0;
    for (int64_t v = 0; v < V; v++) {
        double logit = 0;
        for (int64_t h = 0; h < H; h++)
            logit += (double)x[(T - 1) * H + h] * (double)head[v * H + h];
        sum += exp(logit);
        if (v == targets[T - 1]) target_logit = logit;
    }
    expect(fabs((double)logp[T - 1] - (target_logit - log(sum))) < 1e-5, "loss head");
    snprintf(shape, sizeof shape, "\"T\":%lld,\"H\":%lld,\"V\":%lld", (long long)T, (long long)H,
             (long long)V);
    report(b, "loss_head", shape, op_time, "gemm", 1.0, gemm_time);
    float *all[] = {x, head, dx, logp, weights, scratch, logits, (float *)targets};
    for (size_t i = 0; i < BL_COUNT(all); i++) release(b, all[i]);
}

/* The yardstick's product is (T, n_heads d) by its square, about the size of an output
 * projection. */
static void bench_attention(bench *b, int64_t T, int64_t n_heads, int64_t n_kv_heads, int64_t d)
{
    int64_t H = n_heads * d, stride = (n_heads + 2 * n_kv_heads) * d, at_k = H,
            at_v = H + n_kv_heads * d;
    int32_t cu_seqlens[2] = {0, (int32_t)T};
    float *qkv = numbers(b, T * stride), *o = numbers(b, T * H), *lse = numbers(b, T * n_heads),
          *d_o = numbers(b, T * H);
    float *d_qkv = numbers(b, T * stride), *delta = numbers(b, T * n_heads),
          *square = numbers(b, H * H), *product = numbers(b, T * H);
    bl_attention_forward_args forward = {.T = T,
                                         .n_heads = n_heads,
                                         .n_kv_heads = n_kv_heads,
                                         .d = d,
                                         .n_documents = 1,
                                         .q_stride = stride,
                                         .kv_stride = stride,
                                         .o_stride = H,
                                         .cu_seqlens = cu_seqlens,
                                         .q = bl_tensor_f32(qkv),
                                         .k = bl_tensor_f32(qkv + at_k),
                                         .v = bl_tensor_f32(qkv + at_v),
                                         .o = bl_tensor_f32(o),
                                         .lse = lse};
    bl_attention_backward_args backward = {.T = T,
                                           .n_heads = n_heads,
                                           .n_kv_heads = n_kv_heads,
                                           .d = d,
                                           .n_documents = 1,
                                           .q_stride = stride,
                                           .kv_stride = stride,
                                           .o_stride = H,
                                           .cu_seqlens = cu_seqlens,
                                           .q = bl_tensor_f32(qkv),
                                           .k = bl_tensor_f32(qkv + at_k),
                                           .v = bl_tensor_f32(qkv + at_v),
                                           .o = bl_tensor_f32(o),
                                           .lse = lse,
                                           .do_ = bl_tensor_f32(d_o),
                                           .dq = bl_tensor_f32(d_qkv),
                                           .dk = bl_tensor_f32(d_qkv + at_k),
                                           .dv = bl_tensor_f32(d_qkv + at_v),
                                           .delta = delta};
    bl_matmul_args gemm = {.M = T,
                           .N = H,
                           .K = H,
                           .lda = H,
                           .ldb = H,
                           .ldc = H,
                           .alpha = 1,
                           .a = bl_tensor_f32(d_o),
                           .b = bl_tensor_f32(square),
                           .c = bl_tensor_f32(product)};
    timing op_time, gemm_time;
    char shape[128];
    /* Two products of T^2 / 2 pairs by d forward, five backward, 2 operations each; the yardstick
     * has 2 T H H. */
    double pairs = (double)T * (double)T / 2 * (double)n_heads,
           unit = 2.0 * pairs * (double)d / (2.0 * (double)T * (double)H * (double)H);
    snprintf(shape, sizeof shape, "\"T\":%lld,\"n_heads\":%lld,\"n_kv_heads\":%lld,\"d\":%lld",
             (long long)T, (long long)n_heads, (long long)n_kv_heads, (long long)d);
    measure(b, run_forward, &forward, &op_time, run_matmul, &gemm, &gemm_time);
    for (int64_t i = 0; i < d; i++)
        expect(fabsf(o[i] - qkv[at_v + i]) < 1e-6f, "attention"); /* token 0 sees itself alone */
    report(b, "attention_forward", shape, op_time, "gemm", 2.0 * unit, gemm_time);
    measure(b, run_backward, &backward, &op_time, run_matmul, &gemm, &gemm_time);
    for (int64_t i = 0; i < d; i++) expect(isfinite(d_qkv[i]), "attention");
    report(b, "attention_backward", shape, op_time, "gemm", 5.0 * unit, gemm_time);
    float *all[] = {qkv, o, lse, d_o, d_qkv, delta, square, product};
    for (size_t i = 0; i < BL_COUNT(all); i++) release(b, all[i]);
}

/* Against bl_add (2 reads, 1 write an element), scaled by the floats the op moves. */
static void bench_rows(bench *b, int64_t T, int64_t H)
{
    int64_t n = T * H;
    float *x = numbers(b, n), *y = numbers(b, n), *z = numbers(b, n), *gate_up = numbers(b, 2 * n),
          *w = numbers(b, H);
    int64_t *sample = calloc((size_t)T, sizeof *sample);
    int32_t *position = calloc((size_t)T, sizeof *position);
    if (!sample || !position) check(BL_FAIL(BL_ENOMEM, "%lld positions", (long long)T));
    for (int64_t t = 0; t < T; t++) position[t] = (int32_t)t;
    for (int64_t i = 0; i < n; i++) z[i] = fabsf(z[i]);
    bl_add_args add = {
        .n = n, .a = bl_tensor_f32(x), .b = bl_tensor_f32(y), .y = bl_tensor_f32(gate_up)};
    bl_rmsnorm_forward_args norm = {
        .T = T, .H = H, .eps = 1e-5, .x = bl_tensor_f32(x), .w = w, .y = bl_tensor_f32(y)};
    bl_swiglu_forward_args swiglu = {
        .T = T, .I = H, .gate_up = bl_tensor_f32(gate_up), .h = bl_tensor_f32(y)};
    bl_dropout_args dropout = {.T = T,
                               .C = H,
                               .p = 0.1f,
                               .sample = sample,
                               .position = position,
                               .x = bl_tensor_f32(x),
                               .y = bl_tensor_f32(y)};
    bl_adamw_args adamw = {.n = n,
                           .step = 1,
                           .lr = 1e-4,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .grad = x,
                           .w = y,
                           .m = bl_tensor_f32(gate_up),
                           .v = bl_tensor_f32(z)};
    const struct {
        const char *name;
        job_fn fn;
        const void *job;
        double floats; /* moved an element */
    } cases[] = {{"rmsnorm", run_norm, &norm, 2},
                 {"swiglu", run_swiglu, &swiglu, 3},
                 {"dropout", run_dropout, &dropout, 2},
                 {"adamw", run_adamw, &adamw, 7}};
    char shape[128];
    snprintf(shape, sizeof shape, "\"T\":%lld,\"H\":%lld", (long long)T, (long long)H);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        timing op_time, add_time;
        measure(b, cases[i].fn, cases[i].job, &op_time, run_add, &add, &add_time);
        report(b, cases[i].name, shape, op_time, "add", cases[i].floats / 3, add_time);
    }
    float *all[] = {x, y, z, gate_up, w};
    for (size_t i = 0; i < BL_COUNT(all); i++) release(b, all[i]);
    free(sample);
    free(position);
}

int main(int argc, char **argv)
{
    bench b = {.n_threads = argc > 1 ? atoi(argv[1]) : 2,
               .n_runs = argc > 2 ? atoi(argv[2]) : 9,
               .random = 1};
    if (argc > 3 || b.n_threads < 1 || b.n_runs < 1 || b.n_runs > MAX_RUNS) {
        fprintf(stderr, "usage: bench_ops [THREADS] [RUNS]\n");
        return 2;
    }
    check(bl_device_create_cpu(b.n_threads, &b.device));
    check(bl_stream_create(b.device, "bench", &b.stream));
    bench_loss_head(&b, 512, 768, 32000);
    bench_attention(&b, 2048, 12, 12, 64);
    bench_attention(&b, 2048, 8, 2, 128);
    bench_rows(&b, 2048, 4096);
    bl_stream_destroy(b.stream);
    bl_device_destroy(b.device);
    return 0;
}
