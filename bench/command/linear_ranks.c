/* SPDX-License-Identifier: Apache-2.0 */
/* linear_ranks.c -- the stack of linear/layer.h on several ranks, timed against the plain GEMM of
 * the same shape; the ranks' bits are compared. */
#include "bench/command/linear_ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "ops/matmul.h"

typedef enum contender { GEMM, RESIDENT, SHARDED, N_CONTENDERS } contender;

typedef enum pass { FORWARD, BACKWARD, N_PASSES } pass;

/* Shared by the ranks: rank 0 writes it. */
typedef struct linear_bench {
    const bl_linear_ranks_case *c;
    double *seconds[N_CONTENDERS][N_PASSES]; /* [runs] */
} linear_bench;

typedef struct linear_rank {
    linear_bench *bench;
    const bl_linear_ranks_case *c;
    bl_comm *world, *shards;
    bl_device *device;
    bl_stream *stream;
    bl_linear_stack *stack[N_CONTENDERS]; /* GEMM: none */
    float *dense, *x, *y, *outputs[N_CONTENDERS][N_PASSES];
} linear_rank;

static bool is_sharded(const bl_linear_ranks_case *c)
{
    return c->shard_size > 1 || c->ratio > 0;
}

/* Deterministic values in [-0.5, 0.5): the speed of a product depends on them little, that of an
 * FP8 encoder not at all. */
static void fill(float *x, int64_t n, uint32_t state)
{
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-24f - 0.5f;
    }
}

static bl_status read_rows(void *user, int64_t begin, int64_t end, void *out)
{
    const bl_linear_spec *spec = user;
    for (int64_t row = begin; row < end; row++)
        fill((float *)out + (row - begin) * spec->cols, spec->cols, (uint32_t)row);
    return BL_OK;
}

static bl_status create_stack(linear_rank *r, contender which)
{
    const bl_linear_ranks_case *c = r->c;
    bl_linear_options options = {.device = r->device, .max_tokens = c->T};
    bl_linear_spec *specs = calloc((size_t)c->layers, sizeof *specs);

    if (!specs) return BL_FAIL(BL_ENOMEM, "bench linear: %lld layers", (long long)c->layers);
    for (int64_t i = 0; i < c->layers; i++) {
        specs[i] = c->spec;
        specs[i].dtype = BL_F32;
        specs[i].read_rows = read_rows;
        specs[i].user = (void *)&c->spec;
    }
    if (which == SHARDED) {
        options.comm = r->shards;
        options.tier = c->tier;
        options.ratio = c->ratio;
        options.dir = c->dir;
        options.key = c->key;
        options.ring_depth = c->ring_depth;
    }
    bl_status st = bl_linear_stack_create(&options, c->layers, specs, &r->stack[which]);
    free(specs);
    return st;
}

static bl_status set_up(linear_rank *r)
{
    const bl_linear_ranks_case *c = r->c;
    size_t T = (size_t)c->T, N = (size_t)c->spec.rows, K = (size_t)c->spec.cols;

    BL_TRY(bl_device_create_cpu(c->threads, &r->device));
    BL_TRY(bl_stream_create(r->device, "bench", &r->stream));
    BL_TRY(bl_comm_split(r->world, bl_comm_rank(r->world) / c->shard_size, &r->shards));
    r->dense = malloc(N * K * sizeof(float));
    r->x = malloc(T * K * sizeof(float));
    r->y = malloc(T * N * sizeof(float));
    bool is_there = r->dense && r->x && r->y;
    for (int k = 0; k < N_CONTENDERS; k++) {
        r->outputs[k][FORWARD] = malloc(T * N * sizeof(float));
        r->outputs[k][BACKWARD] = malloc(T * K * sizeof(float));
        is_there = is_there && r->outputs[k][FORWARD] && r->outputs[k][BACKWARD];
    }
    if (!is_there) return BL_FAIL(BL_ENOMEM, "bench linear: its matrices");
    BL_TRY(read_rows((void *)&c->spec, 0, c->spec.rows, r->dense));
    fill(r->x, c->T * c->spec.cols, 1);
    fill(r->y, c->T * c->spec.rows, 2);
    BL_TRY(create_stack(r, RESIDENT));
    return is_sharded(c) ? create_stack(r, SHARDED) : BL_OK;
}

static bl_status plain_gemm(const linear_rank *r, pass p)
{
    const bl_linear_spec *s = &r->c->spec;
    bool forward = p == FORWARD;
    return bl_matmul(r->stream, &(bl_matmul_args){.transpose_b = forward,
                                                  .M = r->c->T,
                                                  .N = forward ? s->rows : s->cols,
                                                  .K = forward ? s->cols : s->rows,
                                                  .lda = forward ? s->cols : s->rows,
                                                  .ldb = s->cols,
                                                  .ldc = forward ? s->rows : s->cols,
                                                  .alpha = 1.0f,
                                                  .a = bl_tensor_f32(forward ? r->x : r->y),
                                                  .b = bl_tensor_f32(r->dense),
                                                  .c = bl_tensor_f32(r->outputs[GEMM][p])});
}

/* One pass over all layers. */
static bl_status run_pass(const linear_rank *r, contender which, pass p)
{
    for (int64_t i = 0; i < r->c->layers; i++) {
        bl_tensor x = bl_tensor_f32(r->x), out = bl_tensor_f32(r->outputs[which][p]);
        if (which == GEMM)
            BL_TRY(plain_gemm(r, p));
        else if (p == FORWARD)
            BL_TRY(bl_linear_layer_forward(bl_linear_stack_layer(r->stack[which], i), r->stream,
                                           r->c->T, x, out));
        else
            BL_TRY(bl_linear_layer_backward(
                bl_linear_stack_layer(r->stack[which], r->c->layers - 1 - i), r->stream, r->c->T, x,
                bl_tensor_f32(r->y), out));
    }
    return bl_stream_synchronize(r->stream);
}

static bl_status meet(const linear_rank *r)
{
    BL_TRY(bl_comm_barrier(r->world, r->stream));
    return bl_stream_synchronize(r->stream);
}

/* Seconds from when all ranks begin to when all have ended. */
static bl_status time_pass(const linear_rank *r, contender which, pass p, double *seconds)
{
    BL_TRY(meet(r));
    double start = bl_now_s();
    BL_TRY(run_pass(r, which, p));
    BL_TRY(meet(r));
    *seconds = bl_now_s() - start;
    return BL_OK;
}

static bl_status check_bits(const linear_rank *r)
{
    size_t T = (size_t)r->c->T;

    if (!r->stack[SHARDED]) return BL_OK;
    if (memcmp(r->outputs[SHARDED][FORWARD], r->outputs[RESIDENT][FORWARD],
               T * (size_t)r->c->spec.rows * sizeof(float)) != 0 ||
        memcmp(r->outputs[SHARDED][BACKWARD], r->outputs[RESIDENT][BACKWARD],
               T * (size_t)r->c->spec.cols * sizeof(float)) != 0)
        return BL_FAIL(BL_EINTERNAL,
                       "bench linear: sharded layers have other bits than resident ones");
    return BL_OK;
}

static bl_status run_rank(bl_comm *comm, void *user)
{
    linear_bench *bench = user;
    linear_rank r = {.bench = bench, .c = bench->c, .world = comm};
    int n = is_sharded(r.c) ? N_CONTENDERS : SHARDED;
    bl_status st;

    BL_TRY_GOTO(st, done, set_up(&r));
    for (int64_t run = -1; run < r.c->runs; run++) { /* run -1 warms up */
        for (int k = 0; k < n; k++)
            for (int p = 0; p < N_PASSES; p++) {
                double seconds;
                BL_TRY_GOTO(st, done, time_pass(&r, (contender)k, (pass)p, &seconds));
                if (run >= 0 && bl_comm_rank(comm) == 0) bench->seconds[k][p][run] = seconds;
            }
        if (run < 0) BL_TRY_GOTO(st, done, check_bits(&r));
    }
done:
    if (r.stream) (void)bl_stream_synchronize(r.stream);
    for (int k = 0; k < N_CONTENDERS; k++) {
        bl_linear_stack_destroy(r.stack[k]);
        free(r.outputs[k][FORWARD]);
        free(r.outputs[k][BACKWARD]);
    }
    free(r.y);
    free(r.x);
    free(r.dense);
    bl_comm_destroy(r.shards);
    bl_stream_destroy(r.stream);
    bl_device_destroy(r.device);
    return st;
}

/* The median of the runs' own ratios, as a percentage: the speed of b relative to a. */
static double percent(const double *a, const double *b, double *ratios, int64_t n)
{
    for (int64_t i = 0; i < n; i++) ratios[i] = 100 * a[i] / b[i];
    return bl_bench_summarize(ratios, n).median_s;
}

static void print_line(const linear_bench *bench, pass p, double *ratios)
{
    const bl_linear_ranks_case *c = bench->c;
    contender own = is_sharded(c) ? SHARDED : RESIDENT;
    int64_t n = c->runs;
    const double *gemm = bench->seconds[GEMM][p], *resident = bench->seconds[RESIDENT][p];
    double *seconds = bench->seconds[own][p];
    double of_gemm = percent(gemm, seconds, ratios, n),
           of_resident = percent(resident, seconds, ratios, n),
           resident_of_gemm = percent(gemm, resident, ratios, n);
    bl_bench_times times = bl_bench_summarize(seconds, n);
    double flops = 2.0 * (double)c->T * (double)c->spec.rows * (double)c->spec.cols *
                   (double)c->layers * c->ranks;

    printf("{\"bench\":\"linear\",\"matrix\":\"%s\",\"rows\":%lld,\"cols\":%lld,\"tokens\":%lld,"
           "\"format\":\"%s\",\"lora_r\":%lld,\"layers\":%lld,\"ranks\":%d,\"threads\":%d,"
           "\"shard_size\":%d,\"offload_ratio\":%g,\"offload_tier\":\"%s\",\"ring_depth\":%d,"
           "\"pass\":\"%s\",\"runs\":%lld,\"seconds\":%.6f,\"best_seconds\":%.6f,\"gflops\":%.2f,"
           "\"percent_of_gemm\":%.1f",
           c->matrix, (long long)c->spec.rows, (long long)c->spec.cols, (long long)c->T,
           bl_format_name(c->spec.format), (long long)c->spec.lora.r, (long long)c->layers,
           c->ranks, c->threads, c->shard_size, c->ratio, bl_tier_name(c->tier), c->ring_depth,
           p == FORWARD ? "forward" : "backward", (long long)n, times.median_s, times.best_s,
           flops / times.median_s * 1e-9, of_gemm);
    if (own == SHARDED)
        printf(",\"resident_percent_of_gemm\":%.1f,\"percent_of_resident\":%.1f", resident_of_gemm,
               of_resident);
    printf("}\n");
    fflush(stdout);
}

bl_status bl_bench_linear_ranks(const bl_linear_ranks_case *c)
{
    linear_bench bench = {.c = c};
    size_t n = (size_t)c->runs;
    double *memory = calloc((N_CONTENDERS * N_PASSES + 1) * n, sizeof *memory);

    if (!memory) return BL_FAIL(BL_ENOMEM, "bench linear: its times");
    for (int k = 0; k < N_CONTENDERS; k++)
        for (int p = 0; p < N_PASSES; p++)
            bench.seconds[k][p] = memory + (size_t)(k * N_PASSES + p) * n;
    bl_status st = bl_comm_run_local(c->ranks, 0, run_rank, &bench);
    for (int p = 0; st == BL_OK && p < N_PASSES; p++)
        print_line(&bench, (pass)p, memory + N_CONTENDERS * N_PASSES * n);
    free(memory);
    return st;
}
