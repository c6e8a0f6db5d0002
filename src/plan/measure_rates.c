/* SPDX-License-Identifier: Apache-2.0 */
/* measure_rates.c -- rates of the operations of a layer, each on operands made for it. */
#include "plan/measure.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cores.h"
#include "base/sizes.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/loss_head.h"
#include "ops/norm.h"
#include "ops/optimizer.h"

enum {
    MAX_RANKS = 16,
    N_BLOCKS = 8,
    ROWS_MIN = 1024, /* of a matrix's part: products sum over several steps, as over all of it */
    ROWS_UNIT = 128,
    F16_QUARTER = 0x3400
};

/* One rank's measurement, on a separate thread. */
typedef struct rank_rates {
    bl_block_dims dims;
    const bl_plan_measure_options *options;
    int64_t r, T, runs;
    int64_t rows[BL_LAYER_MATRICES], head_rows; /* of each matrix that products are measured with */
    int n_ranks, threads;
    bool in_cpu_time;
    int64_t n_documents;
    int32_t *cu_seqlens;
    bl_device *device;
    bl_stream *stream;
    float *block[N_BLOCKS]; /* each as large as any operand */
    /* Of all matrices: a step, too, finds none of them in the caches. */
    uint8_t *codes;
    float *gradients; /* NULL: not measured */
    float *scales, *logits;
    uint16_t *head; /* NULL: not measured */
    bl_rates rates;
    bl_error error;
} rank_rates;

typedef bl_status (*queue_fn)(rank_rates *m);

/* Of all ranks' threads, each has used its part of the processor's seconds. */
static double clock_s(const rank_rates *m)
{
    return m->in_cpu_time ? bl_processor_s() / (m->n_ranks * m->threads) : bl_now_s();
}

/* Work a second, by the mean over m->options->seconds: a step, too, has its part of what disturbs
 * the machine. As in a step, the stream is not waited for after each operation. */
static bl_status measure(rank_rates *m, queue_fn queue, double work, double *rate)
{
    double start = 0, now;
    int64_t n = -1; /* the first one warms up */

    do {
        if (n == 0) start = clock_s(m);
        for (int i = 0; i < m->options->queued; i++) BL_TRY(queue(m));
        BL_TRY(bl_stream_synchronize(m->stream));
        now = clock_s(m);
        n++;
    } while (n < m->runs || now - start < m->options->seconds);
    *rate = work * (double)(n * m->options->queued) / (now - start);
    return BL_OK;
}

static bl_tensor at(const rank_rates *m, int block)
{
    return bl_tensor_of(m->block[block], m->dims.act);
}

/* ---- the operations of a layer ---- */

static bl_status queue_product(rank_rates *m, int i, bool forward, const uint8_t *codes)
{
    bl_format format = m->options->format;

    return bl_matmul_weight(
        m->stream,
        &(bl_matmul_weight_args){
            .forward = forward,
            .beta = m->options->is_trained ? 0 : 1, /* else added to the LoRA term */
            .T = m->T,
            .in = at(m, 0),
            .out = at(m, 1),
            .weight = {.rows = m->rows[i],
                       .cols = m->dims.matrix[i].cols,
                       .n_segments = 1,
                       .segment = {{.format = format,
                                    .codes = codes,
                                    .scales = bl_format_has_scales(format) ? m->scales : NULL,
                                    .rows = m->rows[i]}}}});
}

/* dW += dy^T x */
static bl_status queue_gradient(rank_rates *m, int i, float *gradient)
{
    int64_t rows = m->rows[i], cols = m->dims.matrix[i].cols;

    return bl_matmul(m->stream, &(bl_matmul_args){.transpose_a = true,
                                                  .M = rows,
                                                  .N = cols,
                                                  .K = m->T,
                                                  .lda = rows,
                                                  .ldb = cols,
                                                  .ldc = cols,
                                                  .alpha = 1,
                                                  .beta = 1,
                                                  .a = at(m, 1),
                                                  .b = at(m, 0),
                                                  .c = bl_tensor_f32(gradient)});
}

static bl_status queue_products(rank_rates *m)
{
    int64_t n = 0;

    for (int i = 0; i < BL_LAYER_MATRICES; i++) {
        if (m->rows[i] == 0) continue;
        for (int forward = 0; forward < 2; forward++)
            BL_TRY(queue_product(m, i, forward,
                                 m->codes + bl_format_row_bytes(m->options->format, n)));
        if (m->options->is_trained) BL_TRY(queue_gradient(m, i, m->gradients + n));
        n += m->rows[i] * m->dims.matrix[i].cols;
    }
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
    int64_t r = m->r, T = m->T;

    for (int i = 0; i < BL_LAYER_MATRICES; i++) {
        int64_t rows = m->dims.matrix[i].rows, cols = m->dims.matrix[i].cols;
        if (rows == 0) continue;
        BL_TRY(queue_small(m, false, true, T, r, cols));  /* u = x A^T */
        BL_TRY(queue_small(m, false, true, T, rows, r));  /* y = u B^T */
        BL_TRY(queue_small(m, true, false, rows, r, T));  /* dB = dy^T u */
        BL_TRY(queue_small(m, false, false, T, r, rows)); /* du = dy B */
        BL_TRY(queue_small(m, true, false, r, cols, T));  /* dA = du^T x */
        BL_TRY(queue_small(m, false, false, T, cols, r)); /* dx = du A */
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
                                                .n_documents = m->n_documents,
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
                                      .n_documents = m->n_documents,
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

/* Two norms, two sums, SwiGLU: 10 H + 3 I elements per token. */
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
                                                .m = bl_tensor_f32(m->block[3]),
                                                .v = bl_tensor_f32(m->block[6])});
}

/* Logits, here of the activations' dtype; and their gradient in backward. */
static bl_status queue_head(rank_rates *m)
{
    for (int forward = 0; forward < 2; forward++)
        BL_TRY(bl_matmul_weight(
            m->stream, &(bl_matmul_weight_args){
                           .forward = forward,
                           .T = m->T,
                           .in = forward ? at(m, 1) : bl_tensor_of(m->logits, m->dims.act),
                           .out = forward ? bl_tensor_of(m->logits, m->dims.act) : at(m, 1),
                           .weight = {.rows = m->head_rows,
                                      .cols = m->dims.hidden,
                                      .n_segments = 1,
                                      .segment = {{.format = BL_FORMAT_BF16,
                                                   .codes = m->head,
                                                   .rows = m->head_rows}}}}));
    return BL_OK;
}

static bl_status measure_all(rank_rates *m)
{
    const bl_block_dims *d = &m->dims;
    bl_rates *r = &m->rates;
    double weights = 0, small = 0, T = (double)m->T,
           pairs = T * (double)m->options->document_tokens * (double)d->q_width;
    double products = m->options->is_trained ? 6 : 4; /* FLOPs per token and weight */
    double elements = (double)(10 * d->hidden + 3 * d->inter),
           element_bytes = (double)bl_dtype_bytes(d->act);

    for (int i = 0; i < BL_LAYER_MATRICES; i++) {
        weights += (double)(m->rows[i] * m->dims.matrix[i].cols);
        small += (double)(3 * m->r * (m->dims.matrix[i].rows + m->dims.matrix[i].cols));
    }
    BL_TRY(measure(m, queue_products, products * T * weights, &r->gemm_flops_per_s));
    BL_TRY(measure(m, queue_lora, 2 * T * small, &r->lora_flops_per_s));
    BL_TRY(measure(m, queue_attention_forward, 2 * pairs, &r->attention_forward_flops_per_s));
    BL_TRY(measure(m, queue_attention_backward, 5 * pairs, &r->attention_backward_flops_per_s));
    BL_TRY(measure(m, queue_rows, T * elements * element_bytes, &r->memory_bytes_per_s));
    BL_TRY(measure(m, queue_adamw, 7 * 4 * T * (double)d->hidden, &r->optimizer_bytes_per_s));
    if (!m->head) return BL_OK;
    double head = (double)(m->head_rows * d->hidden);
    return measure(m, queue_head, 4 * T * head, &r->head_flops_per_s);
}

/* ---- ranks ---- */

/* Of `rows`, as many as a product of T tokens with them takes `part` of its time for. */
static int64_t part_of_rows(int64_t rows, double part)
{
    int64_t fewer = bl_round_up((int64_t)(part * (double)rows), ROWS_UNIT);
    return bl_min_i64(rows, bl_max_i64(fewer, ROWS_MIN));
}

static void choose_rows(rank_rates *m)
{
    const bl_block_dims *d = &m->dims;
    double most = m->options->flops_max / (4 * (double)m->T), weights = 0,
           head = (double)(m->options->model->vocab_size * d->hidden);
    bool takes_all = m->options->flops_max == 0;

    for (int i = 0; i < BL_LAYER_MATRICES; i++)
        weights += (double)(d->matrix[i].rows * d->matrix[i].cols);
    for (int i = 0; i < BL_LAYER_MATRICES; i++)
        m->rows[i] = part_of_rows(d->matrix[i].rows, takes_all ? 1 : most / weights);
    m->head_rows = part_of_rows(m->options->model->vocab_size, takes_all ? 1 : most / head);
}

static void fill(bl_tensor t, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float value = (float)(i % 37 + 1) / 64.0f;
        if (t.dtype == BL_BF16)
            ((uint16_t *)t.data)[i] = bl_f32_to_bf16(value);
        else
            ((float *)t.data)[i] = value;
    }
}

/* Of ordinary size in each format. */
static void fill_weights(rank_rates *m, int64_t n)
{
    switch (m->options->format) {
    case BL_FORMAT_F32:
        fill(bl_tensor_of(m->codes, BL_F32), n);
        break;
    case BL_FORMAT_BF16:
        fill(bl_tensor_of(m->codes, BL_BF16), n);
        break;
    case BL_FORMAT_F16:
        for (int64_t i = 0; i < n; i++) ((uint16_t *)(void *)m->codes)[i] = F16_QUARTER + i % 64;
        break;
    default:
        for (int64_t i = 0; i < n; i++) m->codes[i] = (uint8_t)(i % 113);
    }
}

static bl_status take_weights(rank_rates *m, int64_t n)
{
    size_t n_bytes = (size_t)bl_format_row_bytes(m->options->format, n);

    BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE, n_bytes, "codes", (void **)&m->codes));
    fill_weights(m, n);
    if (!m->options->is_trained) return BL_OK;
    BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE, (size_t)n * sizeof(float), "gradients",
                           (void **)&m->gradients));
    memset(m->gradients, 0, (size_t)n * sizeof(float));
    return BL_OK;
}

static bl_status take_memory(rank_rates *m)
{
    const bl_block_dims *d = &m->dims;
    int64_t widest = bl_max_i64(2 * d->inter, d->qkv_width) + d->hidden, n_codes = 0;
    /* T x hidden of fp32 fit in bf16, too: 2 hidden are at most as many as the widest. */
    int64_t n = bl_max_i64(widest, 2 * d->hidden) * bl_max_i64(m->T, bl_max_i64(m->r, 1));

    choose_rows(m);
    for (int i = 0; i < BL_LAYER_MATRICES; i++) n_codes += m->rows[i] * d->matrix[i].cols;
    BL_TRY(bl_device_create_cpu(m->threads, &m->device));
    BL_TRY(bl_stream_create(m->device, "bench", &m->stream));
    for (int b = 0; b < N_BLOCKS; b++) {
        BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE,
                               (size_t)bl_tensor_bytes(bl_tensor_of(NULL, d->act), n), "operands",
                               (void **)&m->block[b]));
        fill(at(m, b), n);
    }
    BL_TRY(take_weights(m, n_codes));
    BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE, (size_t)widest * sizeof(float), "scales",
                           (void **)&m->scales));
    for (int64_t i = 0; i < widest; i++) m->scales[i] = 1e-3f;
    return BL_OK;
}

static bl_status take_head(rank_rates *m)
{
    int64_t n = m->head_rows * m->dims.hidden;

    BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE, (size_t)n * sizeof *m->head, "head",
                           (void **)&m->head));
    BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE,
                           (size_t)(m->T * m->head_rows) * sizeof(float), "logits",
                           (void **)&m->logits));
    fill(bl_tensor_of(m->head, BL_BF16), n);
    fill(bl_tensor_f32(m->logits), m->T * m->head_rows);
    return BL_OK;
}

static void *run_rank(void *argument)
{
    rank_rates *m = argument;
    bl_status st = take_memory(m);

    if (st == BL_OK && m->options->measures_head) st = take_head(m);
    if (st == BL_OK) st = measure_all(m);
    bl_error_save(&m->error, st);
    if (m->stream) (void)bl_stream_synchronize(m->stream);
    bl_stream_destroy(m->stream);
    for (int b = 0; b < N_BLOCKS; b++) bl_device_free(m->device, BL_SPACE_DEVICE, m->block[b]);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->codes);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->gradients);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->scales);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->head);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->logits);
    bl_device_destroy(m->device);
    return NULL;
}

/* The mean of the ranks' rates. */
static void add_rates(const bl_rates *one, double part, bl_rates *sum)
{
    sum->gemm_flops_per_s += part * one->gemm_flops_per_s;
    sum->lora_flops_per_s += part * one->lora_flops_per_s;
    sum->attention_forward_flops_per_s += part * one->attention_forward_flops_per_s;
    sum->attention_backward_flops_per_s += part * one->attention_backward_flops_per_s;
    sum->memory_bytes_per_s += part * one->memory_bytes_per_s;
    sum->optimizer_bytes_per_s += part * one->optimizer_bytes_per_s;
    sum->head_flops_per_s += part * one->head_flops_per_s;
}

/* Documents of options->document_tokens, the last one of the rest. */
static bl_status make_documents(const bl_plan_measure_options *o, int32_t **ends, int64_t *n)
{
    *n = bl_ceil_div(o->tokens, o->document_tokens);
    *ends = calloc((size_t)*n + 1, sizeof **ends);
    if (!*ends) return BL_FAIL(BL_ENOMEM, "out of memory: documents to measure with");
    for (int64_t i = 1; i <= *n; i++)
        (*ends)[i] = (int32_t)bl_min_i64(i * o->document_tokens, o->tokens);
    return BL_OK;
}

bl_layer_kind bl_plan_measured_kind(const bl_model_config *config)
{
    return config->n_experts > 0 ? BL_LAYER_EXPERTS : BL_LAYER_DENSE;
}

/* Of routed experts, the matrices of one: each has its own product. */
static bl_block_dims measured_dims(const bl_plan_measure_options *o)
{
    bl_layer_kind kind = bl_plan_measured_kind(o->model);
    bl_block_dims dims = bl_block_dims_of(o->model, kind, BL_DEVICE_CPU, o->act);

    for (int m = 0; m < BL_LAYER_MATRICES; m++)
        if (bl_block_is_routed((bl_layer_matrix)m) && dims.n_experts > 0)
            dims.matrix[m].rows /= dims.n_experts;
    dims.inter = bl_max_i64(dims.inter, dims.expert_inter);
    return dims;
}

bl_status bl_plan_measure_rates(const bl_plan_measure_options *o, bl_rates *out)
{
    pthread_t thread[MAX_RANKS];
    int32_t *ends = NULL;
    int64_t n_documents = 0;
    bl_status st = BL_OK;
    int n_started = 0;

    if (o->n_ranks < 1 || o->n_ranks > MAX_RANKS)
        return BL_FAIL(BL_EUSAGE, "rates of %d ranks: 1 to %d are measured", o->n_ranks, MAX_RANKS);
    BL_TRY(make_documents(o, &ends, &n_documents));
    rank_rates *ranks = calloc((size_t)o->n_ranks, sizeof *ranks);
    if (!ranks) {
        free(ends);
        return BL_FAIL(BL_ENOMEM, "out of memory: rates of %d ranks", o->n_ranks);
    }
    *out = (bl_rates){.cores = (double)bl_cores_usable() / o->n_ranks,
                      .compute_cores = o->threads,
                      .copy_cores = 1};
    for (int i = 0; i < o->n_ranks; i++) {
        ranks[i] = (rank_rates){.dims = measured_dims(o),
                                .options = o,
                                .r = o->lora_r,
                                .T = o->tokens,
                                .runs = o->runs,
                                .n_ranks = o->n_ranks,
                                .threads = o->threads,
                                .in_cpu_time = o->in_cpu_time,
                                .n_documents = n_documents,
                                .cu_seqlens = ends};
        if (pthread_create(&thread[i], NULL, run_rank, &ranks[i]) != 0) break;
        n_started++;
    }
    for (int i = 0; i < n_started; i++) {
        pthread_join(thread[i], NULL);
        if (st == BL_OK && ranks[i].error.status != BL_OK) st = bl_error_restore(&ranks[i].error);
        add_rates(&ranks[i].rates, 1.0 / o->n_ranks, out);
    }
    if (st == BL_OK && n_started < o->n_ranks) st = BL_FAIL(BL_ELIMIT, "no more threads");
    free(ranks);
    free(ends);
    return st;
}
