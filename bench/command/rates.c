/* SPDX-License-Identifier: Apache-2.0 */
/* rates.c -- one measurement per resource: copies, all-gathers, GEMM, FP8; each verifies its result
 * before it is timed. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/rates.h"
#include "comm/comm.h"
#include "device/staging.h"
#include "ops/matmul.h"
#include "train/metrics.h"

enum { PIECE_BYTES = 4 << 20, GEMM_SAMPLES = 61 };

static bl_rate rate_of(double *seconds, int64_t runs, double work)
{
    bl_bench_times times = bl_bench_summarize(seconds, runs);
    return (bl_rate){work / times.best_s, work / times.median_s};
}

/* `work`: of one call of `once`. */
static bl_status time_runs(bl_status (*once)(void *arg), void *arg, int64_t runs, double work,
                           bl_rate *out)
{
    double seconds[BL_BENCH_MAX_RUNS];

    for (int64_t run = 0; run < runs; run++) {
        double start = bl_now_s();
        BL_TRY(once(arg));
        seconds[run] = bl_now_s() - start;
    }
    *out = rate_of(seconds, runs, work);
    return BL_OK;
}

/* Values in [-0.5, 0.5), the same on every machine. */
static void fill(float *x, int64_t n)
{
    uint32_t state = 12345;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-24f - 0.5f;
    }
}

/* ---- memory ---- */

typedef struct memory_copy {
    bl_pool *pool;
    unsigned char *from, *to;
    size_t n_bytes;
} memory_copy;

static size_t piece_bytes(const memory_copy *m, int64_t index)
{
    return (size_t)bl_min_i64(PIECE_BYTES, (int64_t)m->n_bytes - index * PIECE_BYTES);
}

/* The first thread to touch a page decides its NUMA node. */
static void touch_piece(void *arg, int64_t index, void *scratch)
{
    const memory_copy *m = arg;
    (void)scratch;
    memset(m->from + index * PIECE_BYTES, (int)(index % 251) + 1, piece_bytes(m, index));
    memset(m->to + index * PIECE_BYTES, 0, piece_bytes(m, index));
}

static void copy_piece(void *arg, int64_t index, void *scratch)
{
    const memory_copy *m = arg;
    (void)scratch;
    memcpy(m->to + index * PIECE_BYTES, m->from + index * PIECE_BYTES, piece_bytes(m, index));
}

static bool is_copied(const memory_copy *m)
{
    for (size_t i = 0; i < m->n_bytes; i++)
        if (m->to[i] != (unsigned char)(i / PIECE_BYTES % 251 + 1)) return false;
    return true;
}

static bl_status copy_memory(void *arg)
{
    memory_copy *m = arg;
    bl_pool_run(m->pool, bl_ceil_div((int64_t)m->n_bytes, PIECE_BYTES), copy_piece, m);
    return BL_OK;
}

bl_status bl_rate_memory_copy(int n_threads, size_t n_bytes, int64_t runs, bl_rate *out)
{
    memory_copy m = {.n_bytes = n_bytes};
    bl_status st;

    BL_TRY_GOTO(st, done, bl_pool_create(n_threads, &m.pool));
    m.from = malloc(n_bytes);
    m.to = malloc(n_bytes);
    if (!m.from || !m.to) {
        st = BL_FAIL(BL_ENOMEM, "twice %zu bytes to copy", n_bytes);
        goto done;
    }
    bl_pool_run(m.pool, bl_ceil_div((int64_t)n_bytes, PIECE_BYTES), touch_piece, &m);
    BL_TRY_GOTO(st, done, copy_memory(&m));
    if (!is_copied(&m)) {
        st = BL_FAIL(BL_EINTERNAL, "a copy in memory differs");
        goto done;
    }
    st = time_runs(copy_memory, &m, runs, (double)n_bytes, out);
done:
    free(m.from);
    free(m.to);
    bl_pool_destroy(m.pool);
    return st;
}

/* ---- host and device ---- */

typedef struct device_copy {
    bl_stream *stream;
    unsigned char *host, *back;
    void *on_device;
    size_t n_bytes;
} device_copy;

typedef struct device_copies {
    device_copy of[BL_RATE_MAX_DEVICES];
    int n;
    bool to_device;
} device_copies;

/* One copy by each device, side by side. */
static bl_status copy_on_streams(void *arg)
{
    const device_copies *c = arg;

    for (int i = 0; i < c->n; i++) {
        const device_copy *d = &c->of[i];
        BL_TRY(bl_stream_copy(d->stream, c->to_device ? d->on_device : (void *)d->back,
                              c->to_device ? (void *)d->host : d->on_device, d->n_bytes));
    }
    for (int i = 0; i < c->n; i++) BL_TRY(bl_stream_synchronize(c->of[i].stream));
    return BL_OK;
}

static bl_status open_copy(bl_device *device, size_t n_bytes, device_copy *d)
{
    d->n_bytes = n_bytes;
    BL_TRY(bl_stream_create(device, "copy", &d->stream));
    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, n_bytes, "bench host memory", (void **)&d->host));
    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, n_bytes, "bench host memory", (void **)&d->back));
    BL_TRY(bl_device_alloc(device, BL_SPACE_DEVICE, n_bytes, "bench device memory", &d->on_device));
    for (size_t i = 0; i < n_bytes; i++) d->host[i] = (unsigned char)(i * 131u >> 7);
    return BL_OK;
}

static void close_copy(bl_device *device, const device_copy *d)
{
    bl_stream_destroy(d->stream);
    bl_device_free(device, BL_SPACE_HOST, d->host);
    bl_device_free(device, BL_SPACE_HOST, d->back);
    bl_device_free(device, BL_SPACE_DEVICE, d->on_device);
}

bl_status bl_rate_device_copy(bl_device *const *devices, int n_devices, bool to_device,
                              size_t n_bytes, int64_t runs, bl_rate *out)
{
    device_copies c = {.n = n_devices};
    bl_status st = BL_OK;

    for (int i = 0; i < n_devices; i++)
        BL_TRY_GOTO(st, done, open_copy(devices[i], n_bytes, &c.of[i]));
    for (int back = 0; back < 2; back++) {
        c.to_device = !back;
        BL_TRY_GOTO(st, done, copy_on_streams(&c));
    }
    for (int i = 0; i < n_devices; i++)
        if (memcmp(c.of[i].host, c.of[i].back, n_bytes) != 0) {
            st = BL_FAIL(BL_EINTERNAL, "a copy to the device and back differs");
            goto done;
        }
    c.to_device = to_device;
    st = time_runs(copy_on_streams, &c, runs, (double)n_bytes, out);
done:
    for (int i = 0; i < n_devices; i++) close_copy(devices[i], &c.of[i]);
    return st;
}

/* ---- ranks ---- */

typedef struct gather_rank {
    bl_comm *comm;
    size_t bytes_per_rank;
    int64_t runs;
    pthread_t thread;
    bool is_started;
    double *seconds; /* [runs] */
    bl_error error;
} gather_rank;

static bool is_gathered(const gather_rank *r, const unsigned char *all)
{
    for (int from = 0; from < bl_comm_size(r->comm); from++)
        for (size_t i = 0; i < r->bytes_per_rank; i++)
            if (all[(size_t)from * r->bytes_per_rank + i] != (unsigned char)(from + 1))
                return false;
    return true;
}

static bl_status time_gathers(gather_rank *r, bl_stream *stream, bl_twin *twin)
{
    size_t offset = (size_t)bl_comm_rank(r->comm) * r->bytes_per_rank;
    unsigned char *all = twin->memory, *mine = all + offset;

    memset((char *)twin->host + offset, bl_comm_rank(r->comm) + 1, r->bytes_per_rank);
    BL_TRY(bl_twin_upload(twin, stream, offset, r->bytes_per_rank));
    for (int64_t run = -1; run < r->runs; run++) {
        BL_TRY(bl_comm_barrier(r->comm, stream));
        BL_TRY(bl_stream_synchronize(stream));
        double start = bl_now_s();
        BL_TRY(bl_comm_all_gather(r->comm, stream, mine, all, r->bytes_per_rank));
        BL_TRY(bl_stream_synchronize(stream));
        if (run >= 0) r->seconds[run] = bl_now_s() - start;
        if (run >= 0) continue;
        BL_TRY(bl_twin_download(twin, stream, 0, twin->n_bytes));
        BL_TRY(bl_stream_synchronize(stream));
        if (!is_gathered(r, twin->host))
            return BL_FAIL(BL_EINTERNAL, "an all-gather of the local ranks differs");
    }
    return BL_OK;
}

static void *run_gather_rank(void *arg)
{
    gather_rank *r = arg;
    bl_device *device = NULL;
    bl_stream *stream = NULL;
    bl_twin *twin = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_device_create_cpu(1, &device));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "gather", &stream));
    size_t n_bytes = (size_t)bl_comm_size(r->comm) * r->bytes_per_rank;
    BL_TRY_GOTO(st, done, bl_twin_create(device, n_bytes, "bench gather", &twin));
    st = time_gathers(r, stream, twin);
done:
    bl_error_save(&r->error, st);
    if (st != BL_OK) bl_comm_abort(r->comm, &r->error);
    bl_stream_destroy(stream);
    bl_twin_destroy(twin);
    bl_device_destroy(device);
    return NULL;
}

/* Starts the threads and waits for them; the first error of the job. */
static bl_status run_gather_ranks(gather_rank *ranks, int n_ranks)
{
    bl_error error = {BL_OK, ""};

    for (int i = 0; i < n_ranks; i++) {
        ranks[i].is_started =
            pthread_create(&ranks[i].thread, NULL, run_gather_rank, &ranks[i]) == 0;
        if (ranks[i].is_started) continue;
        bl_error_save(&error, BL_FAIL(BL_ELIMIT, "a thread for rank %d of %d", i, n_ranks));
        bl_comm_abort(ranks[i].comm, &error);
        break;
    }
    for (int i = 0; i < n_ranks; i++)
        if (ranks[i].is_started) pthread_join(ranks[i].thread, NULL);
    bl_comm_first_error(ranks[0].comm, &error);
    return error.status == BL_OK ? BL_OK : bl_error_restore(&error);
}

bl_status bl_rate_all_gather(int n_ranks, size_t bytes_per_rank, int64_t runs, bl_rate *out)
{
    gather_rank *ranks = calloc((size_t)n_ranks, sizeof *ranks);
    bl_comm **comms = calloc((size_t)n_ranks, sizeof(bl_comm *));
    double *seconds = calloc((size_t)n_ranks * (size_t)runs, sizeof *seconds);
    bl_status st;

    if (!ranks || !comms || !seconds) {
        st = BL_FAIL(BL_ENOMEM, "%d ranks", n_ranks);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_comm_create_local(n_ranks, 60.0, comms));
    for (int i = 0; i < n_ranks; i++)
        ranks[i] = (gather_rank){.comm = comms[i],
                                 .bytes_per_rank = bytes_per_rank,
                                 .runs = runs,
                                 .seconds = seconds + i * runs};
    BL_TRY_GOTO(st, done, run_gather_ranks(ranks, n_ranks));
    for (int i = 1; i < n_ranks; i++)
        for (int64_t run = 0; run < runs; run++)
            seconds[run] = fmax(seconds[run], ranks[i].seconds[run]);
    *out = rate_of(seconds, runs, (double)(n_ranks - 1) * (double)bytes_per_rank);
done:
    for (int i = 0; comms && i < n_ranks; i++) bl_comm_destroy(comms[i]);
    free(seconds);
    free(comms);
    free(ranks);
    return st;
}

/* ---- products ---- */

typedef struct gemm {
    bl_stream *stream;
    bl_matmul_args args;
} gemm;

static bl_status multiply(void *arg)
{
    const gemm *g = arg;
    BL_TRY(bl_matmul(g->stream, &g->args));
    return bl_stream_synchronize(g->stream);
}

/* In any order of additions, rounded or cut off, |sum of fp32 products - exact| <= gamma_n sum |a
 *   b|, gamma_n
 * = n u / (1 - n u) with u = 2^-23 (Higham 2002, section 3.1); a product of bf16 values is exact.
 * host[3][n][n]: A, B, C. */
static bool is_product(const float *host, int64_t n)
{
    const float *A = host, *B = host + n * n, *C = host + 2 * n * n;
    double gamma = (double)n * 0x1p-23 / (1.0 - (double)n * 0x1p-23);

    for (int64_t sample = 0; sample < GEMM_SAMPLES; sample++) {
        int64_t at = sample * (n * n - 1) / (GEMM_SAMPLES - 1), i = at / n, j = at % n;
        double sum = 0.0, magnitude = 0.0;
        for (int64_t k = 0; k < n; k++) {
            double product = (double)A[i * n + k] * (double)B[k * n + j];
            sum += product;
            magnitude += fabs(product);
        }
        if (!(fabs((double)C[at] - sum) <= gamma * magnitude)) return false;
    }
    return true;
}

/* Fills A and B of host[3][n][n], and copies them to the device: as they are, or rounded to bf16.
 * `packed`: room for 2 n^2 bf16 values. */
static bl_status bring_operands(gemm *g, float *host, uint16_t *packed, void *operands)
{
    size_t n_values = (size_t)(2 * g->args.M * g->args.K);

    fill(host, (int64_t)n_values);
    for (size_t i = 0; g->args.a.dtype == BL_BF16 && i < n_values; i++) {
        packed[i] = bl_f32_to_bf16(host[i]);
        host[i] = bl_bf16_to_f32(packed[i]);
    }
    const void *from = g->args.a.dtype == BL_BF16 ? (const void *)packed : host;
    BL_TRY(
        bl_stream_copy(g->stream, operands, from, bl_tensor_bytes(g->args.a, (int64_t)n_values)));
    return bl_stream_synchronize(g->stream);
}

bl_status bl_rate_gemm(bl_device *device, bl_dtype dtype, int64_t n, int64_t runs, bl_rate *out)
{
    size_t n_values = (size_t)(n * n), operand_bytes = n_values * bl_dtype_bytes(dtype);
    gemm g = {.args = {.M = n, .N = n, .K = n, .lda = n, .ldb = n, .ldc = n, .alpha = 1.0f}};
    float *host = NULL;
    uint16_t *packed = NULL;
    unsigned char *operands = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_stream_create(device, "bench", &g.stream));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(device, BL_SPACE_HOST, 3 * n_values * sizeof *host,
                                "bench matrices", (void **)&host));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(device, BL_SPACE_HOST, 2 * n_values * sizeof *packed,
                                "bench matrices", (void **)&packed));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(device, BL_SPACE_DEVICE, 2 * operand_bytes, "bench matrices",
                                (void **)&operands));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(device, BL_SPACE_DEVICE, n_values * sizeof *host, "bench product",
                                &g.args.c.data));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(device, BL_SPACE_DEVICE, BL_MATMUL_SCRATCH_BYTES, "bench scratch",
                                &g.args.scratch));
    g.args.scratch_bytes = BL_MATMUL_SCRATCH_BYTES;
    g.args.a = bl_tensor_of(operands, dtype);
    g.args.b = bl_tensor_of(operands + operand_bytes, dtype);
    g.args.c.dtype = BL_F32;
    BL_TRY_GOTO(st, done, bring_operands(&g, host, packed, operands));
    BL_TRY_GOTO(st, done, bl_matmul(g.stream, &g.args));
    BL_TRY_GOTO(
        st, done,
        bl_stream_copy(g.stream, host + 2 * n_values, g.args.c.data, n_values * sizeof *host));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(g.stream));
    if (!is_product(host, n)) {
        st = BL_FAIL(BL_EINTERNAL, "a product of matrices is wrong");
        goto done;
    }
    st = time_runs(multiply, &g, runs, 2.0 * (double)n * (double)n * (double)n, out);
done:
    bl_stream_destroy(g.stream);
    bl_device_free(device, BL_SPACE_HOST, host);
    bl_device_free(device, BL_SPACE_HOST, packed);
    bl_device_free(device, BL_SPACE_DEVICE, operands);
    bl_device_free(device, BL_SPACE_DEVICE, g.args.c.data);
    bl_device_free(device, BL_SPACE_DEVICE, g.args.scratch);
    return st;
}

/* ---- FP8 ---- */

typedef struct fp8_case {
    bl_pool *pool;
    bl_format format;
    int64_t rows, cols;
    float *weights, *decoded, *scales;
    uint8_t *codes;
} fp8_case;

static bl_status quantize(void *arg)
{
    const fp8_case *c = arg;
    if (c->format == BL_FORMAT_FP8_ROW)
        return bl_fp8_row_quantize(c->pool, BL_F32, c->weights, 0, c->rows, c->cols, c->codes,
                                   c->scales);
    return bl_fp8_block_quantize(c->pool, BL_F32, c->weights, 0, c->rows, c->cols, c->codes,
                                 c->scales);
}

static bl_status dequantize(void *arg)
{
    const fp8_case *c = arg;
    bl_fp8_dequantize(c->pool, c->format, c->codes, c->scales, c->rows, c->cols, c->decoded);
    return BL_OK;
}

/* E4M3 has three bits of mantissa: half a unit in the last place is 2^-4 of a normal value and, in
 * units of the scale, 2^-10 of a subnormal one; two fp32 roundings come on top. Values below 0.5
 * give scales of at most 0.5 / 448. */
static bool is_near(const fp8_case *c)
{
    for (int64_t i = 0; i < c->rows * c->cols; i++) {
        double w = (double)c->weights[i];
        double bound = fmax(fabs(w) * 0x1p-4, 0.5 / 448.0 * 0x1p-10) * (1.0 + 0x1p-18);
        if (!(fabs((double)c->decoded[i] - w) <= bound)) return false;
    }
    return true;
}

static bl_status rate_fp8(bl_status (*once)(void *arg), bl_device *device, bl_format format,
                          int64_t rows, int64_t cols, int64_t runs, bl_rate *out)
{
    fp8_case c = {.pool = bl_device_pool(device), .format = format, .rows = rows, .cols = cols};
    size_t n = (size_t)(rows * cols), code_bytes, n_scales;
    bl_status st;

    if (!bl_format_sizes(format, rows, cols, &code_bytes, &n_scales))
        return BL_FAIL(BL_EUSAGE, "the matrix is too large");
    c.weights = malloc(n * sizeof(float));
    c.decoded = malloc(n * sizeof(float));
    c.codes = malloc(code_bytes);
    c.scales = malloc(n_scales * sizeof(float));
    if (!c.weights || !c.decoded || !c.codes || !c.scales) {
        st = BL_FAIL(BL_ENOMEM, "a matrix of %zu weights", n);
        goto done;
    }
    fill(c.weights, (int64_t)n);
    BL_TRY_GOTO(st, done, quantize(&c));
    BL_TRY_GOTO(st, done, dequantize(&c));
    if (!is_near(&c)) {
        st = BL_FAIL(BL_EINTERNAL, "%s: weights are not what they were", bl_format_name(format));
        goto done;
    }
    st = time_runs(once, &c, runs, (double)n, out);
done:
    free(c.weights);
    free(c.decoded);
    free(c.codes);
    free(c.scales);
    return st;
}

bl_status bl_rate_fp8_quantize(bl_device *device, bl_format format, int64_t rows, int64_t cols,
                               int64_t runs, bl_rate *out)
{
    return rate_fp8(quantize, device, format, rows, cols, runs, out);
}

bl_status bl_rate_fp8_dequantize(bl_device *device, bl_format format, int64_t rows, int64_t cols,
                                 int64_t runs, bl_rate *out)
{
    return rate_fp8(dequantize, device, format, rows, cols, runs, out);
}
