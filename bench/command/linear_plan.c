/* SPDX-License-Identifier: Apache-2.0 */
/* linear_plan.c -- the memory that one case of `ballast bench linear --device cuda` allocates, and
 * its time, for any build. */
#include "base/sizes.h"
#include "bench/command/linear_cuda.h"
#include "ops/gemm.h"

/* Products of the case's size in one run: the plain ones, the layer twice, its frozen product, and
 * a visit. And those by which the fastest of 8 algorithms is found, 4 rounds for each of 4 plain
 * and frozen products. */
enum { PRODUCTS_A_RUN = 7, TIMED_PRODUCTS = 4 * 4 * 8, WARM_RUNS = 2 };

bl_status bl_bench_linear_sizes(const bl_linear_case *c, bl_linear_sizes *out)
{
    const bl_lora_linear *l = &c->linear;
    int64_t T = c->T, N = l->weight.rows, K = l->weight.cols, larger = bl_max_i64(N, K), r = 0,
            b = 0;
    size_t codes, n_scales;
    bl_lora_linear layer = *l;

    if (!bl_format_sizes(c->format, N, K, &codes, &n_scales))
        return BL_FAIL(BL_EUSAGE, "the matrix is too large");
    for (int p = 0; p < l->n_parts; p++) {
        r += l->part[p].r;
        b += l->part[p].rows * l->part[p].r;
    }
    layer.mode = BL_MATMUL_FP8; /* whose workspace serves both */
    layer.is_stacked = true;
    layer.weight.n_segments = 1;
    layer.weight.segment[0] = (bl_weight_segment){.format = c->format, .rows = N};
    bl_matmul_weight_args dense = {.mode = BL_MATMUL_BF16, .weight = layer.weight};
    *out = (bl_linear_sizes){
        .input_scales =
            larger * T * (int64_t)sizeof(float) / BL_FP8_BLOCK + T * (int64_t)sizeof(float),
        .workspace = (int64_t)bl_lora_linear_workspace_bytes(BL_DEVICE_CUDA, BL_BF16, &layer, T),
        .prepared = (int64_t)bl_matmul_prepared_bytes(BL_DEVICE_CUDA, &dense)};
    int64_t weight = (int64_t)codes + (int64_t)n_scales * (int64_t)sizeof(float),
            plain = N * K * (2 + 1), rows = T * (2 * K + 2 * N + (2 + 1) * larger),
            factors = (r * K + b) * (int64_t)(2 + sizeof(float)), one_scale = sizeof(float);
    out->all = weight + plain + rows + factors + one_scale + out->input_scales + out->workspace +
               out->prepared + 1;
    return BL_OK;
}

double bl_bench_linear_seconds(const bl_linear_case *c, const bl_hardware *gpu)
{
    double flops =
        2.0 * (double)c->T * (double)c->linear.weight.rows * (double)c->linear.weight.cols;
    int64_t n_modes = bl_format_has_scales(c->format) ? 2 : 1,
            n = (c->runs + WARM_RUNS) * (PRODUCTS_A_RUN + c->micro_batches) +
                (c->time_algorithms ? TIMED_PRODUCTS : 0);

    return (double)(2 * n_modes * n) * flops / gpu->bf16_gemm_flops_per_s.value;
}
