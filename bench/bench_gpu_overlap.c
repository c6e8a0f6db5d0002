/* SPDX-License-Identifier: Apache-2.0 */
/* bench_gpu_overlap [M K TOKENS BYTES]: how long a copy within the GPU takes alone, and beside a
 * product that fills the GPU: a gather's copy of a rank's own shard, on an urgent stream. By
 * cudaMemcpyAsync, and by cudaMemcpyBatchAsync with the hint to leave multiprocessors alone, where
 * the toolkit has it. A JSON line for each; times are medians. By default 100 MB during gate|up of
 * Llama 3.1 405B with 4096 tokens in FP8: about 13 ms on an H100.
 *
 * Ends with 77 without a GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "device/cuda/stream.h"
#include "ops/cuda/gemm_cuda.h"

enum { SKIPPED = 77, RUNS = 5, PIECE_BYTES = 1 << 22, N_STAMPS = 4, N_BUFFERS = 5 };

typedef struct bench {
    bl_device *device;
    bl_stream *compute, *urgent;
    bl_stamp *stamp[N_STAMPS]; /* of the product: begin, end; of the copy: begin, end */
    void *buffer[N_BUFFERS];   /* a, b, d, source, destination */
    void *scale, *workspace;
    unsigned char *piece; /* host */
    ops_gemm product;
    size_t copy_bytes;
    double product_s; /* alone */
} bench;

/* Median seconds of the product and of the copy, alone or together. */
typedef struct times {
    double product_s[RUNS], copy_s[RUNS];
    bool is_inside; /* each copy ended before its product */
} times;

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *seconds)
{
    qsort(seconds, RUNS, sizeof *seconds, compare);
    return seconds[RUNS / 2];
}

static bl_status copy(bench *b)
{
    return bl_stream_copy(b->urgent, b->buffer[4], b->buffer[3], b->copy_bytes);
}

#if CUDART_VERSION >= 13000 && !defined BALLAST_CUDA_EMULATED
static bl_status copy_in_batch(bench *b)
{
    void *dst = b->buffer[4];
    const void *src = b->buffer[3];
    struct cudaMemcpyAttributes attributes = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream,
                                              .flags = cudaMemcpyFlagPreferOverlapWithCompute};
    size_t first = 0;
    cudaError_t error = cudaMemcpyBatchAsync(&dst, &src, &b->copy_bytes, 1, &attributes, &first, 1,
                                             bl_cuda_stream_handle(b->urgent));
    return error == cudaSuccess ? BL_OK : bl_cuda_fail("cudaMemcpyBatchAsync", (int)error);
}
#endif

typedef struct way {
    const char *name;
    bl_status (*copy)(bench *b);
} way;

static const way ways[] = {
    {"cudaMemcpyAsync", copy},
#if CUDART_VERSION >= 13000 && !defined BALLAST_CUDA_EMULATED
    {"cudaMemcpyBatchAsync", copy_in_batch},
#endif
};

/* The copy begins a quarter into the product. `by` NULL: no copy. */
static bl_status run_once(bench *b, const way *by, bool has_product)
{
    if (has_product) {
        BL_TRY(bl_stamp_record(b->stamp[0], b->compute));
        BL_TRY(ops_cuda_gemm(b->compute, &b->product));
        BL_TRY(bl_stamp_record(b->stamp[1], b->compute));
    }
    if (has_product && by)
        nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * b->product_s / 4) % 1000000000}, NULL);
    if (by) {
        BL_TRY(bl_stamp_record(b->stamp[2], b->urgent));
        BL_TRY(by->copy(b));
        BL_TRY(bl_stamp_record(b->stamp[3], b->urgent));
    }
    BL_TRY(bl_stream_synchronize(b->urgent));
    return bl_stream_synchronize(b->compute);
}

static bl_status measure(bench *b, const way *by, bool has_product, times *out)
{
    out->is_inside = true;
    for (int run = -1; run < RUNS; run++) { /* the first loads kernels */
        BL_TRY(run_once(b, by, has_product));
        if (run < 0) continue;
        out->product_s[run] = bl_stamp_elapsed_s(b->stamp[0], b->stamp[1]);
        out->copy_s[run] = bl_stamp_elapsed_s(b->stamp[2], b->stamp[3]);
        if (bl_stamp_elapsed_s(b->stamp[3], b->stamp[1]) < 0) out->is_inside = false;
    }
    return BL_OK;
}

static bl_status compare_way(bench *b, const way *by)
{
    times alone, both;

    BL_TRY(measure(b, by, false, &alone));
    BL_TRY(measure(b, by, true, &both));
    double copy_s = median(alone.copy_s), beside_s = median(both.copy_s);
    printf("{\"bench\":\"gpu_overlap\",\"copy\":\"%s\",\"bytes\":%zu,\"product\":\"%s\",\"product_"
           "ms\":%.3f,\"copy_ms\":%.3f,\"copy_beside_ms\":%.3f,\"product_beside_ms\":%.3f,"
           "\"times_alone\":%.1f,\"ends_before_product\":%s}\n",
           by->name, b->copy_bytes, b->product.kind == OPS_GEMM_BF16 ? "bf16" : "fp8",
           1e3 * b->product_s, 1e3 * copy_s, 1e3 * beside_s, 1e3 * median(both.product_s),
           copy_s > 0 ? beside_s / copy_s : 0, both.is_inside ? "true" : "false");
    fflush(stdout);
    return BL_OK;
}

/* With numbers below 1 in magnitude, as E4M3 and as bf16: zeros would be faster than real data. */
static bl_status fill(bench *b, char *memory, size_t bytes)
{
    uint32_t random = 1;

    for (size_t i = 0; i < PIECE_BYTES; i++) {
        random = random * 1664525u + 1013904223u;
        b->piece[i] = (unsigned char)(random >> 24 & 0xb7);
    }
    for (size_t done = 0; done < bytes; done += PIECE_BYTES) {
        size_t n = bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES;
        BL_TRY(bl_stream_copy(b->compute, memory + done, b->piece, n));
    }
    return bl_stream_synchronize(b->compute);
}

static bl_status make_memory(bench *b, const int64_t *size)
{
    int64_t m = size[0], k = size[1], n = size[2];
    size_t bytes[N_BUFFERS] = {(size_t)(2 * m * k), (size_t)(2 * n * k), (size_t)(2 * m * n),
                               (size_t)size[3], (size_t)size[3]};
    float one = 1;

    BL_TRY(bl_stream_create(b->device, "compute", &b->compute));
    BL_TRY(bl_stream_create_urgent(b->device, "urgent", &b->urgent));
    for (int i = 0; i < N_STAMPS; i++) BL_TRY(bl_stamp_create(b->device, &b->stamp[i]));
    BL_TRY(bl_device_alloc(b->device, BL_SPACE_HOST, PIECE_BYTES, "numbers", (void **)&b->piece));
    for (int i = 0; i < N_BUFFERS; i++) {
        BL_TRY(bl_device_alloc(b->device, BL_SPACE_DEVICE, bytes[i], "a matrix", &b->buffer[i]));
        BL_TRY(fill(b, b->buffer[i], bytes[i]));
    }
    BL_TRY(bl_device_alloc(b->device, BL_SPACE_DEVICE, sizeof one, "a scale", &b->scale));
    BL_TRY(bl_device_alloc(b->device, BL_SPACE_DEVICE, BL_MATMUL_SCRATCH_BYTES, "a product",
                           &b->workspace));
    memcpy(b->piece, &one, sizeof one);
    BL_TRY(bl_stream_copy(b->compute, b->scale, b->piece, sizeof one));
    b->copy_bytes = bytes[3];
    b->product = (ops_gemm){.kind = OPS_GEMM_FP8_TENSOR,
                            .transpose_a = true,
                            .d_type = BL_BF16,
                            .alpha = 1,
                            .m = m,
                            .n = n,
                            .k = k,
                            .lda = k,
                            .ldb = k,
                            .ldd = m,
                            .a = b->buffer[0],
                            .b = b->buffer[1],
                            .a_scale = b->scale,
                            .b_scale = b->scale,
                            .d = b->buffer[2],
                            .workspace = b->workspace,
                            .workspace_bytes = BL_MATMUL_SCRATCH_BYTES};
    return bl_stream_synchronize(b->compute);
}

static bl_status run(bench *b, const int64_t *size)
{
    times alone;
    bool is_fp8;

    BL_TRY(make_memory(b, size));
    BL_TRY(ops_cuda_gemm_is_served(b->compute, &b->product, &is_fp8));
    if (!is_fp8) b->product.kind = OPS_GEMM_BF16; /* of the same memory */
    BL_TRY(measure(b, NULL, true, &alone));
    b->product_s = median(alone.product_s);
    for (size_t i = 0; i < BL_COUNT(ways); i++) BL_TRY(compare_way(b, &ways[i]));
    return BL_OK;
}

int main(int argc, char **argv)
{
    int64_t size[4] = {106496, 16384, 4096, 100000000};
    bench b = {0};

    for (int i = 0; i < 4 && i + 1 < argc; i++) size[i] = strtoll(argv[i + 1], NULL, 10);
    for (int i = 0; i < 4; i++)
        if (size[i] < 1 || size[i] > 1 << 30 || (i < 2 && size[i] % 16 != 0)) {
            fprintf(stderr, "usage: bench_gpu_overlap [M K TOKENS BYTES]; M, K: multiples of 16\n");
            return 2;
        }
    if (bl_device_create_cuda(0, &b.device) != BL_OK) {
        fprintf(stderr, "skip: no GPU: %s\n", bl_error_text());
        return SKIPPED;
    }
    bl_status st = run(&b, size);
    if (st != BL_OK) fprintf(stderr, "bench_gpu_overlap: %s\n", bl_error_text());
    bl_stream_destroy(b.urgent);
    bl_stream_destroy(b.compute);
    for (int i = 0; i < N_STAMPS; i++) bl_stamp_destroy(b.stamp[i]);
    for (int i = 0; i < N_BUFFERS; i++) bl_device_free(b.device, BL_SPACE_DEVICE, b.buffer[i]);
    bl_device_free(b.device, BL_SPACE_HOST, b.piece);
    bl_device_free(b.device, BL_SPACE_DEVICE, b.scale);
    bl_device_free(b.device, BL_SPACE_DEVICE, b.workspace);
    bl_device_destroy(b.device);
    return st != BL_OK;
}
