/* SPDX-License-Identifier: Apache-2.0 */
/* linear.c -- one quantised LoRA linear layer, forward and backward, with libballast alone.
 *
 *   cc -std=c17 linear.c $(pkg-config --cflags --libs ballast) -o linear && ./linear
 *
 * A random weight (N,K) becomes FP8 with one scale a row; an adapter of rank r is laid over it; y, dx, dA and dB are computed on two
 * threads, and y is compared with a plain double loop over the dequantised weight. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "fp8/fp8.h"
#include "linear/lora_linear.h"

enum { T = 24, K = 320, N = 192, R = 8 };

static const float SCALE = 2.0f; /* alpha / r */

/* Uniform in [-1, 1). */
static float uniform(unsigned long long *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(*state >> 40) * 0x1p-23f - 1.0f;
}

static float *random_matrix(int rows, int cols, float size, unsigned long long *state)
{
    float *x = malloc(sizeof *x * (size_t)rows * (size_t)cols);
    for (int i = 0; x && i < rows * cols; i++) x[i] = size * uniform(state);
    return x;
}

/* The largest |y - (x W^T + s (x A^T) B^T)|, W dequantised. */
static double largest_error(const bl_weight *w, const float *x, const float *A, const float *B,
                            const float *y)
{
    static float dense[N * K];
    double worst = 0.0;
    bl_fp8_dequantise_tile(BL_FORMAT_FP8_ROW, w->segment[0].codes, w->segment[0].scales, K, 0, N, 0,
                           K, dense, K);
    for (int t = 0; t < T; t++)
        for (int n = 0; n < N; n++) {
            double sum = 0.0;
            for (int k = 0; k < K; k++) sum += (double)x[t * K + k] * dense[n * K + k];
            for (int r = 0; r < R; r++) {
                double u = 0.0;
                for (int k = 0; k < K; k++) u += (double)x[t * K + k] * A[r * K + k];
                sum += SCALE * u * B[n * R + r];
            }
            worst = fmax(worst, fabs(sum - y[t * N + n]));
        }
    return worst;
}

static bl_status run(bl_stream *stream, const bl_lora_linear *linear, const float *x,
                     const float *dy, float *y, float *dx)
{
    BL_TRY(bl_lora_linear_forward(stream, linear, T, x, y));
    BL_TRY(bl_lora_linear_backward(stream, linear, T, x, dy, dx));
    return bl_stream_synchronize(stream);
}

int main(void)
{
    unsigned long long state = 7;
    bl_device *device = NULL;
    bl_stream *stream = NULL;
    static unsigned char codes[N * K];
    static float scales[N], y[T * N], dx[T * K], dA[R * K], dB[N * R];
    float *w = random_matrix(N, K, 0.1f, &state), *x = random_matrix(T, K, 1.0f, &state),
          *dy = random_matrix(T, N, 1.0f, &state);
    float *A = random_matrix(R, K, 0.05f, &state), *B = random_matrix(N, R, 0.05f, &state);
    float *workspace =
        malloc(sizeof(float) * (size_t)bl_lora_linear_workspace_floats(T, K, R, false));
    bl_status st =
        w && x && dy && A && B && workspace ? BL_OK : BL_FAIL(BL_ENOMEM, "a few matrices");

    if (st == BL_OK) st = bl_device_create_cpu(2, &device);
    if (st == BL_OK) st = bl_stream_create(device, "compute", &stream);
    if (st == BL_OK)
        st = bl_fp8_row_quantise(bl_device_pool(device), BL_F32, w, 0, N, K, codes, scales);
    bl_lora_linear linear = {
        .weight = {.rows = N,
                   .cols = K,
                   .n_segments = 1,
                   .segment = {{BL_FORMAT_FP8_ROW, codes, scales, N}}},
        .n_parts = 1,
        .part = {{.r = R, .rows = N, .scale = SCALE, .A = A, .B = B, .dA = dA, .dB = dB}},
        .workspace = workspace,
    };
    if (st == BL_OK) st = run(stream, &linear, x, dy, y, dx);

    double error = st == BL_OK ? largest_error(&linear.weight, x, A, B, y) : INFINITY;
    if (st != BL_OK)
        fprintf(stderr, "linear: %s\n", bl_error_text());
    else
        printf("y (%d,%d) = x W^T + s (x A^T) B^T, W in FP8: %d bytes for %d weights; largest "
               "error %.1e\n",
               T, N, (int)(sizeof codes + sizeof scales), N * K, error);

    free(workspace);
    float *const blocks[] = {w, x, dy, A, B};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) free(blocks[i]);
    bl_stream_destroy(stream);
    bl_device_destroy(device);
    return error < 1e-4 ? 0 : 1; /* 320 products of size up to 0.1, in fp32: far below */
}
