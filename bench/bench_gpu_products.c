/* SPDX-License-Identifier: Apache-2.0 */
/* bench_gpu_products: what this GPU and its cuBLASLt have of the products that Ballast asks for: a
 * line per kind, number of tokens, and with or without addition, JSON: whether the heuristic offers
 * it, whether a call is accepted, the first call's time, which may load a kernel, and that of a
 * later one.
 *
 * Each accepted product is compared with its value. All codes are 1 and all scales are powers of
 * two that differ between rows, tokens and blocks, chosen so that every result is a bf16: a scale
 * that is read at another place makes another result, and rounding makes none. k has five blocks,
 * so that the rows of block scales are padded (to eight).
 *
 * Ends with 77 without a GPU, and with 1 where a product is wrong. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/sizes.h"
#include "ops/cuda/gemm_cuda.h"

enum {
    SKIPPED = 77,
    M = 384,
    K = 640,
    T_MAX = 512,
    BLOCK = 128,
    N_BLOCKS = K / BLOCK,
    A_STRIDE = 8, /* N_BLOCKS rounded up to a multiple of 4 */
    ONE_E4M3 = 0x38,
    D_BEFORE = 128,
    SCALES = M * A_STRIDE + N_BLOCKS * T_MAX
};

typedef struct bench {
    bl_device *device;
    bl_stream *stream;
    uint8_t *codes; /* host and device: ones, as E4M3 and as bf16 */
    uint16_t *ones, *d;
    float *scales;
    char *on_device;
} bench;

/* Offsets of the device's memory, one after the other. */
enum {
    AT_A = 0,
    AT_B = AT_A + M * K * 2,
    AT_D = AT_B + T_MAX * K * 2,
    AT_A_SCALE = AT_D + M * T_MAX * 2,
    AT_B_SCALE = AT_A_SCALE + M * A_STRIDE * 4,
    AT_WORKSPACE = AT_B_SCALE + N_BLOCKS * T_MAX * 4,
    DEVICE_BYTES = AT_WORKSPACE + BL_MATMUL_SCRATCH_BYTES
};

static const char *const names[OPS_N_GEMM_KINDS] = {"bf16", "fp8_row", "fp8_block", "fp8_tensor"};

/* Of row i of A and of token j of B, in block c of k. */
static double a_scale(ops_gemm_kind kind, int i, int c)
{
    return kind == OPS_GEMM_FP8_ROW     ? ldexp(1, i % 3)
           : kind == OPS_GEMM_FP8_BLOCK ? ldexp(1, (i / BLOCK + 2 * c) % 3)
                                        : 1;
}

static double b_scale(ops_gemm_kind kind, int j, int c)
{
    return kind == OPS_GEMM_FP8_ROW     ? ldexp(1, -(j % 5))
           : kind == OPS_GEMM_FP8_BLOCK ? ldexp(1, -((2 * c + j) % 3))
                                        : 1;
}

/* In the layouts of gemm_cuda.h: A's, then B's for T tokens. */
static void write_scales(bench *b, ops_gemm_kind kind, int T)
{
    float *of_b = b->scales + M * A_STRIDE;

    if (kind == OPS_GEMM_FP8_BLOCK) {
        for (int r = 0; r < M / BLOCK; r++)
            for (int c = 0; c < A_STRIDE; c++) /* padding has what no result may have */
                b->scales[r * A_STRIDE + c] =
                    c < N_BLOCKS ? (float)a_scale(kind, r * BLOCK, c) : 0.3f;
        for (int c = 0; c < N_BLOCKS; c++)
            for (int j = 0; j < T; j++) of_b[c * T + j] = (float)b_scale(kind, j, c);
        return;
    }
    for (int i = 0; i < M; i++) b->scales[i] = (float)a_scale(kind, i, 0);
    for (int j = 0; j < T; j++) of_b[j] = (float)b_scale(kind, j, 0);
}

static bool is_right(const bench *b, ops_gemm_kind kind, int T, bool adds)
{
    for (int j = 0; j < T; j++)
        for (int i = 0; i < M; i++) {
            double want = adds ? D_BEFORE : 0;
            for (int c = 0; c < N_BLOCKS; c++)
                want += BLOCK * a_scale(kind, i, c) * b_scale(kind, j, c);
            if ((double)bl_bf16_to_f32(b->d[j * M + i]) != want) return false;
        }
    return true;
}

static bl_status upload(bench *b, ops_gemm_kind kind, int T)
{
    const void *ones = kind == OPS_GEMM_BF16 ? (const void *)b->ones : b->codes;
    size_t each = kind == OPS_GEMM_BF16 ? 2 : 1;

    write_scales(b, kind, T);
    for (int i = 0; i < M * T; i++) b->d[i] = bl_f32_to_bf16(D_BEFORE);
    BL_TRY(bl_stream_copy(b->stream, b->on_device + AT_A, ones, (size_t)M * K * each));
    BL_TRY(bl_stream_copy(b->stream, b->on_device + AT_B, ones, (size_t)T * K * each));
    BL_TRY(bl_stream_copy(b->stream, b->on_device + AT_D, b->d, (size_t)M * (size_t)T * 2));
    BL_TRY(bl_stream_copy(b->stream, b->on_device + AT_A_SCALE, b->scales, M * A_STRIDE * 4));
    BL_TRY(bl_stream_copy(b->stream, b->on_device + AT_B_SCALE, b->scales + M * A_STRIDE,
                          (size_t)N_BLOCKS * (size_t)T * 4));
    return bl_stream_synchronize(b->stream);
}

static ops_gemm product(const bench *b, ops_gemm_kind kind, int T, bool adds)
{
    return (ops_gemm){.kind = kind,
                      .transpose_a = true,
                      .d_type = BL_BF16,
                      .alpha = 1,
                      .beta = adds ? 1 : 0,
                      .m = M,
                      .n = T,
                      .k = K,
                      .lda = K,
                      .ldb = K,
                      .ldd = M,
                      .a = b->on_device + AT_A,
                      .b = b->on_device + AT_B,
                      .a_scale = (const float *)(const void *)(b->on_device + AT_A_SCALE),
                      .b_scale = (const float *)(const void *)(b->on_device + AT_B_SCALE),
                      .d = b->on_device + AT_D,
                      .workspace = b->on_device + AT_WORKSPACE,
                      .workspace_bytes = BL_MATMUL_SCRATCH_BYTES};
}

static bl_status timed(bench *b, const ops_gemm *g, bool *is_served, double *seconds)
{
    double start_s = bl_now_s();

    BL_TRY(ops_cuda_gemm_try(b->stream, g, is_served));
    BL_TRY(bl_stream_synchronize(b->stream));
    *seconds = bl_now_s() - start_s;
    return BL_OK;
}

static bl_status ask(bench *b, ops_gemm_kind kind, int T, bool adds, bool *is_wrong)
{
    ops_gemm g = product(b, kind, T, adds);
    bool is_offered, is_served, is_exact = false;
    double first_s, later_s;

    BL_TRY(upload(b, kind, T));
    BL_TRY(ops_cuda_gemm_is_served(b->stream, &g, &is_offered));
    BL_TRY(timed(b, &g, &is_served, &first_s));
    if (is_served) {
        BL_TRY(bl_stream_copy(b->stream, b->d, g.d, (size_t)M * (size_t)T * 2));
        BL_TRY(bl_stream_synchronize(b->stream));
        is_exact = is_right(b, kind, T, adds);
        *is_wrong |= !is_exact;
    }
    BL_TRY(timed(b, &g, &is_served, &later_s));
    printf("{\"bench\":\"gpu_products\",\"kind\":\"%s\",\"tokens\":%d,\"adds\":%s,\"offered\":%s,"
           "\"served\":%s,\"exact\":%s,\"first_us\":%.1f,\"later_us\":%.1f}\n",
           names[kind], T, adds ? "true" : "false", is_offered ? "true" : "false",
           is_served ? "true" : "false", is_exact ? "true" : "false", 1e6 * first_s, 1e6 * later_s);
    fflush(stdout);
    return BL_OK;
}

/* Numbers of tokens by what they are multiples of: 128, 16, 8, 4, 1. Block scales need 4. */
static bl_status ask_all(bench *b, bool *is_wrong)
{
    static const int tokens[] = {T_MAX, 400, 392, 388, 387};

    for (int kind = 0; kind < OPS_N_GEMM_KINDS; kind++)
        for (size_t t = 0; t < BL_COUNT(tokens); t++)
            for (int adds = 0; adds < 2; adds++) {
                if (kind == OPS_GEMM_FP8_BLOCK && tokens[t] % 4 != 0) continue;
                BL_TRY(ask(b, (ops_gemm_kind)kind, tokens[t], adds == 1, is_wrong));
            }
    return BL_OK;
}

static bl_status run(bench *b, bool *is_wrong)
{
    const struct {
        size_t bytes;
        void **out;
    } memory[] = {{(size_t)T_MAX * K, (void **)&b->codes},
                  {(size_t)T_MAX * K * 2, (void **)&b->ones},
                  {(size_t)M * T_MAX * 2, (void **)&b->d},
                  {SCALES * sizeof(float), (void **)&b->scales}};
    bl_status st = bl_stream_create(b->device, "bench", &b->stream);

    _Static_assert(T_MAX >= M, "B's ones are A's, too");
    for (size_t i = 0; i < BL_COUNT(memory) && st == BL_OK; i++)
        st = bl_device_alloc(b->device, BL_SPACE_HOST, memory[i].bytes, "a product", memory[i].out);
    if (st == BL_OK)
        st = bl_device_alloc(b->device, BL_SPACE_DEVICE, DEVICE_BYTES, "a product",
                             (void **)&b->on_device);
    if (st == BL_OK) {
        for (int i = 0; i < T_MAX * K; i++) {
            b->codes[i] = ONE_E4M3;
            b->ones[i] = bl_f32_to_bf16(1);
        }
        st = ask_all(b, is_wrong);
    }
    for (size_t i = 0; i < BL_COUNT(memory); i++)
        bl_device_free(b->device, BL_SPACE_HOST, *memory[i].out);
    bl_device_free(b->device, BL_SPACE_DEVICE, b->on_device);
    bl_stream_destroy(b->stream);
    return st;
}

int main(void)
{
    bench b = {0};
    bool is_wrong = false;

    if (bl_device_create_cuda(0, &b.device) != BL_OK) {
        fprintf(stderr, "skip: no GPU: %s\n", bl_error_text());
        return SKIPPED;
    }
    bl_status st = run(&b, &is_wrong);
    if (st != BL_OK) fprintf(stderr, "bench_gpu_products: %s\n", bl_error_text());
    bl_device_destroy(b.device);
    return st != BL_OK || is_wrong;
}
