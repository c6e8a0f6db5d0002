/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/command/plan_rates.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/cores.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/rates.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/loss_head.h"
#include "ops/norm.h"
#include "ops/optimizer.h"

enum { MAX_RANKS = 16, N_BLOCKS = 8, QUEUED = 8 };
static const double MEASURED_S = 0.15;

/* One rank's measurement, on a thread of its own. */
typedef struct rank_rates {
    const bl_llama_config *model;
    bl_block_dims dims;
    int64_t r, T, runs;
    int n_ranks, threads;
    bool in_cpu_time;
    int32_t cu_seqlens[2]; /* one document */
    bl_device *device;
    bl_stream *stream;
    float *block[N_BLOCKS]; /* each as large as any operand */
    uint8_t *codes;
    float *scales;
    bl_time_rates rates;
    bl_error error;
} rank_rates;

typedef bl_status (*queue_fn)(rank_rates *m);

double bl_bench_cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Of all ranks' threads, each has used its part of the processor's seconds. */
static double clock_s(const rank_rates *m)
{
    return m->in_cpu_time ? bl_bench_cpu_s() / (m->n_ranks * m->threads) : bl_now_s();
}

/* Work a second, by the mean over MEASURED_S: a step, too, has its part of what disturbs the machine. As
 * in a step, the stream is not waited for after each operation. */
static bl_status measure(rank_rates *m, queue_fn queue, double work, double *rate)
{
    double start = 0, now;
    int64_t n = -1; /* the first one warms up */

    do {
        if (n == 0) start = clock_s(m);
        for (int i = 0; i < QUEUED; i++) BL_TRY(queue(m));
        BL_TRY(bl_stream_synchronize(m->stream));
        now = clock_s(m);
        n++;
    } while (n < m->runs || now - start < MEASURED_S);
    *rate = work * (double)(n * QUEUED) / (now - start);
    return BL_OK;
}

static bl_tensor at(const rank_rates *m, int block)
{
    return bl_tensor_f32(m->block[block]);
}

/* ---- the operations of a layer ---- */

/* Rows and columns of the four matrices. */
static void shapes(const rank_rates *m, int64_t rows[4], int64_t cols[4])
{
    const bl_block_dims *d = &m->dims;
    rows[0] = d->qkv_width, cols[0] = d->hidden;
    rows[1] = d->hidden, cols[1] = d->q_width;
    rows[2] = 2 * d->inter, cols[2] = d->hidden;
    rows[3] = d->hidden, cols[3] = d->inter;
}

static bl_status queue_products(rank_rates *m)
{
    int64_t rows[4], cols[4];

    shapes(m, rows, cols);
    for (int i = 0; i < 4; i++)
        for (int forward = 0; forward < 2; forward++)
            BL_TRY(bl_matmul_weight(
                m->stream,
                &(bl_matmul_weight_args){.forward = forward,
                                         .beta = 1,
                                         .T = m->T,
                                         .in = at(m, 0),
                                         .out = at(m, 1),
                                         .weight = {.rows = rows[i],
                                                    .cols = cols[i],
                                                    .n_segments = 1,
                                                    .segment = {{.format = BL_FORMAT_FP8_ROW,
                                                                 .codes = m->codes,
                                                                 .scales = m->scales,
                                                                 .rows = rows[i]}}}}));
    return BL_OK;
}

static bl_status queue_small(rank_rates *m, bool transpose_a, bool transpose_b, int64_t M,
                             int64_t N, int64_t K)
{
    return bl_matmul(m->stream, &(bl_matmul_args){.transpose_a = transpose_a,
                                                  .transpose_b = transpose_b,
                                                  .M = M,
                                                  .N = N,
                                                  .K = K,
                                                  .lda = transpose_a ? M : K,
                                                  .ldb = transpose_b ? K : N,
                                                  .ldc = N,
                                                  .alpha = 1,
                                                  .a = at(m, 0),
                                                  .b = at(m, 1),
                                                  .c = at(m, 2)});
}

/* The six of linear/lora_linear.c. */
static bl_status queue_lora(rank_rates *m)
{
    int64_t rows[4], cols[4], r = m->r, T = m->T;

    shapes(m, rows, cols);
    for (int i = 0; i < 4; i++) {
        BL_TRY(queue_small(m, false, true, T, r, cols[i]));  /* u = x A^T */
        BL_TRY(queue_small(m, false, true, T, rows[i], r));  /* y = u B^T */
        BL_TRY(queue_small(m, true, false, rows[i], r, T));  /* dB = dy^T u */
        BL_TRY(queue_small(m, false, false, T, r, rows[i])); /* du = dy B */
        BL_TRY(queue_small(m, true, false, r, cols[i], T));  /* dA = du^T x */
        BL_TRY(queue_small(m, false, false, T, cols[i], r)); /* dx = du A */
    }
    return BL_OK;
}

static bl_status queue_attention_forward(rank_rates *m)
{
    const bl_block_dims *d = &m->dims;
    return bl_attention_forward(
        m->stream, &(bl_attention_forward_args){.T = m->T,
                                                .n_heads = d->n_heads,
                                                .n_kv_heads = d->n_kv_heads,
                                                .d = d->head_dim,
                                                .n_documents = 1,
                                                .q_stride = d->qkv_width,
                                                .kv_stride = d->qkv_width,
                                                .o_stride = d->q_width,
                                                .cu_seqlens = m->cu_seqlens,
                                                .q = at(m, 0),
                                                .k = bl_tensor_at(at(m, 0), d->q_width),
                                                .v = bl_tensor_at(at(m, 0), d->q_width),
                                                .o = at(m, 1),
                                                .lse = m->block[2]});
}

static bl_status queue_attention_backward(rank_rates *m)
{
    const bl_block_dims *d = &m->dims;
    return bl_attention_backward(
        m->stream,
        &(bl_attention_backward_args){.T = m->T,
                                      .n_heads = d->n_heads,
                                      .n_kv_heads = d->n_kv_heads,
                                      .d = d->head_dim,
                                      .n_documents = 1,
                                      .q_stride = d->qkv_width,
                                      .kv_stride = d->qkv_width,
                                      .o_stride = d->q_width,
                                      .cu_seqlens = m->cu_seqlens,
                                      .q = at(m, 0),
                                      .k = bl_tensor_at(at(m, 0), d->q_width),
                                      .v = bl_tensor_at(at(m, 0), d->q_width + d->kv_width),
                                      .o = at(m, 1),
                                      .lse = m->block[2],
                                      .do_ = at(m, 3),
                                      .dq = at(m, 4),
                                      .dk = bl_tensor_at(at(m, 4), d->q_width),
                                      .dv = bl_tensor_at(at(m, 4), d->q_width + d->kv_width),
                                      .delta = m->block[5]});
}

/* Two norms, two sums, SwiGLU: 10 H + 3 I elements a token. */
static bl_status queue_rows(rank_rates *m)
{
    int64_t H = m->dims.hidden;

    for (int i = 0; i < 2; i++) {
        BL_TRY(bl_rmsnorm_forward(m->stream, &(bl_rmsnorm_forward_args){.T = m->T,
                                                                        .H = H,
                                                                        .eps = 1e-5,
                                                                        .x = at(m, 0),
                                                                        .w = m->block[6],
                                                                        .y = at(m, 1),
                                                                        .rstd = m->block[2]}));
        BL_TRY(bl_add(m->stream,
                      &(bl_add_args){.n = m->T * H, .a = at(m, 0), .b = at(m, 1), .y = at(m, 3)}));
    }
    return bl_swiglu_forward(
        m->stream, &(bl_swiglu_forward_args){
                       .T = m->T, .I = m->dims.inter, .gate_up = at(m, 0), .h = at(m, 1)});
}

static bl_status queue_adamw(rank_rates *m)
{
    return bl_adamw(m->stream, &(bl_adamw_args){.n = m->T * m->dims.hidden,
                                                .step = 1,
                                                .lr = 1e-4,
                                                .beta1 = 0.9,
                                                .beta2 = 0.999,
                                                .eps = 1e-8,
                                                .grad = m->block[0],
                                                .w = m->block[1],
                                                .m = m->block[3],
                                                .v = m->block[6]});
}

static bl_status measure_all(rank_rates *m)
{
    const bl_block_dims *d = &m->dims;
    bl_time_rates *r = &m->rates;
    int64_t rows[4], cols[4];
    double weights = 0, small = 0, T = (double)m->T, pairs = T * T * (double)d->q_width;
    double elements = (double)(10 * d->hidden + 3 * d->inter);

    shapes(m, rows, cols);
    for (int i = 0; i < 4; i++) {
        weights += (double)(rows[i] * cols[i]);
        small += (double)(3 * m->r * (rows[i] + cols[i]));
    }
    BL_TRY(measure(m, queue_products, 4 * T * weights, &r->gemm_flops_per_s));
    BL_TRY(measure(m, queue_lora, 2 * T * small, &r->lora_flops_per_s));
    BL_TRY(measure(m, queue_attention_forward, 2 * pairs, &r->attention_forward_flops_per_s));
    BL_TRY(measure(m, queue_attention_backward, 5 * pairs, &r->attention_backward_flops_per_s));
    BL_TRY(measure(m, queue_rows, T * elements * 4, &r->memory_bytes_per_s));
    return measure(m, queue_adamw, 7 * 4 * T * (double)d->hidden, &r->optimizer_bytes_per_s);
}

/* ---- ranks ---- */

static bl_status take_memory(rank_rates *m)
{
    const bl_block_dims *d = &m->dims;
    int64_t widest = bl_max_i64(2 * d->inter, d->qkv_width) + d->hidden;
    int64_t n = widest * bl_max_i64(m->T, bl_max_i64(m->r, 1));
    int64_t n_codes = bl_max_i64(2 * d->inter, d->qkv_width) * bl_max_i64(d->hidden, d->inter);

    BL_TRY(bl_device_create_cpu(m->threads, &m->device));
    BL_TRY(bl_stream_create(m->device, "bench", &m->stream));
    for (int b = 0; b < N_BLOCKS; b++) {
        BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE, (size_t)n * sizeof(float), "operands",
                               (void **)&m->block[b]));
        for (int64_t i = 0; i < n; i++) m->block[b][i] = (float)(i % 37) / 64.0f;
    }
    BL_TRY(
        bl_device_alloc(m->device, BL_SPACE_DEVICE, (size_t)n_codes, "codes", (void **)&m->codes));
    BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE, (size_t)widest * sizeof(float), "scales",
                           (void **)&m->scales));
    for (int64_t i = 0; i < n_codes; i++) m->codes[i] = (uint8_t)(i % 113);
    for (int64_t i = 0; i < widest; i++) m->scales[i] = 1e-3f;
    return BL_OK;
}

static void *run_rank(void *argument)
{
    rank_rates *m = argument;
    bl_status st = take_memory(m);

    if (st == BL_OK) st = measure_all(m);
    bl_error_save(&m->error, st);
    if (m->stream) (void)bl_stream_synchronize(m->stream);
    bl_stream_destroy(m->stream);
    for (int b = 0; b < N_BLOCKS; b++) bl_device_free(m->device, BL_SPACE_DEVICE, m->block[b]);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->codes);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->scales);
    bl_device_destroy(m->device);
    return NULL;
}

/* The mean of the ranks' rates. */
static void add_rates(const bl_time_rates *one, double part, bl_time_rates *sum)
{
    sum->gemm_flops_per_s += part * one->gemm_flops_per_s;
    sum->lora_flops_per_s += part * one->lora_flops_per_s;
    sum->attention_forward_flops_per_s += part * one->attention_forward_flops_per_s;
    sum->attention_backward_flops_per_s += part * one->attention_backward_flops_per_s;
    sum->memory_bytes_per_s += part * one->memory_bytes_per_s;
    sum->optimizer_bytes_per_s += part * one->optimizer_bytes_per_s;
}

static bl_status measure_links(const bl_llama_config *model, int n_ranks, int64_t runs,
                               bl_time_rates *out)
{
    size_t bytes =
        (size_t)bl_round_up(2 * model->intermediate_size * model->hidden_size / n_ranks, 4096);
    bl_device *device = NULL;
    bl_rate rate;

    BL_TRY(bl_device_create_cpu(1, &device));
    bl_status st = bl_rate_device_copy(device, true, bytes, runs, &rate);
    bl_device_destroy(device);
    BL_TRY(st);
    out->copy_in_bytes_per_s = out->copy_out_bytes_per_s = rate.median;
    if (n_ranks == 1) return BL_OK;
    BL_TRY(bl_rate_all_gather(n_ranks, bytes, runs, &rate));
    out->gather_bytes_per_s = rate.median;
    return BL_OK;
}

bl_status bl_bench_plan_rates(const bl_llama_config *model, int64_t lora_r, int64_t tokens,
                              int n_ranks, int threads, int64_t runs, bool in_cpu_time,
                              bl_time_rates *out)
{
    rank_rates *ranks = calloc((size_t)n_ranks, sizeof *ranks);
    pthread_t thread[MAX_RANKS];
    bl_status st = BL_OK;
    int n_started = 0;

    if (!ranks) return BL_FAIL(BL_ENOMEM, "rates of %d ranks", n_ranks);
    *out = (bl_time_rates){
        .cores = (double)bl_cores_usable() / n_ranks, .compute_cores = threads, .copy_cores = 1};
    for (int i = 0; i < n_ranks; i++) {
        ranks[i] = (rank_rates){.model = model,
                                .dims = bl_block_dims_of(model, BL_DEVICE_CPU),
                                .r = lora_r,
                                .T = tokens,
                                .runs = runs,
                                .n_ranks = n_ranks,
                                .threads = threads,
                                .in_cpu_time = in_cpu_time,
                                .cu_seqlens = {0, (int32_t)tokens}};
        if (pthread_create(&thread[i], NULL, run_rank, &ranks[i]) != 0) break;
        n_started++;
    }
    for (int i = 0; i < n_started; i++) {
        pthread_join(thread[i], NULL);
        if (st == BL_OK && ranks[i].error.status != BL_OK) st = bl_error_restore(&ranks[i].error);
        add_rates(&ranks[i].rates, 1.0 / n_ranks, out);
    }
    if (st == BL_OK && n_started < n_ranks) st = BL_FAIL(BL_ELIMIT, "no more threads");
    free(ranks);
    return st == BL_OK ? measure_links(model, n_ranks, runs, out) : st;
}
