/* SPDX-License-Identifier: Apache-2.0 */
/* Products on CUDA. With a frozen matrix W (N,K) there are three ways, which matmul_plan.h chooses from:
 *
 *   BF16       W is dequantized to bf16 in scratch, each value rounded once from the fp32 value that the
 *              CPU uses; one bf16 GEMM.
 *   FP8_ROW    W_nk = s_n C_nk. y: x is quantized with a scale per token; cuBLASLt multiplies codes and
 *              applies both scales to the sum. dx_tk = sum_n (dy_tn s_n) C_nk: the scales are along the sum,
 *              so dy is multiplied by them before it is quantized, exactly; C is transposed, because FP8
 *              products want both operands along the sum, and has scales of one.
 *   FP8_BLOCK  W_nk = s_[n/128][k/128] C_nk: blocks are transposed with their scales, so y and dx are alike:
 *              W's blocks against a scale per token and 128 channels of the sum.
 *
 * Row-major y (T,N) is column-major (N,T), and so on: W is the first operand of the column-major product,
 * tokens are its columns. */
#include <cuda_runtime_api.h>

#include "device/cuda/stream.h"
#include "fp8/cuda/fp8_cuda.h"
#include "ops/cuda/matmul_plan.h"
#include "ops/cuda/ops_cuda.h"

static bl_status zero_rows(bl_stream *stream, const bl_matmul_args *a)
{
    size_t bytes = bl_dtype_bytes(a->c.dtype);
    cudaStream_t handle = bl_cuda_stream_handle(stream);
    cudaError_t error = cudaMemset2DAsync(a->c.data, (size_t)a->ldc * bytes, 0,
                                          (size_t)a->N * bytes, (size_t)a->M, handle);
    return error == cudaSuccess ? BL_OK : bl_cuda_fail("cudaMemset2DAsync", (int)error);
}

bl_status ops_cuda_matmul(bl_stream *stream, const bl_matmul_args *a)
{
    if (a->M == 0 || a->N == 0) return BL_OK;
    if (a->K == 0 && a->beta == 0) return zero_rows(stream, a);
    if (a->K == 0 && a->beta == 1) return BL_OK;
    if (a->K == 0)
        return BL_FAIL(BL_EINTERNAL, "matmul: an empty sum and beta %g", (double)a->beta);
    return ops_cuda_gemm(stream, &(ops_gemm){.kind = OPS_GEMM_BF16,
                                             .transpose_a = a->transpose_b,
                                             .transpose_b = a->transpose_a,
                                             .d_type = a->c.dtype,
                                             .alpha = a->alpha,
                                             .beta = a->beta,
                                             .m = a->N,
                                             .n = a->M,
                                             .k = a->K,
                                             .lda = a->ldb,
                                             .ldb = a->lda,
                                             .ldd = a->ldc,
                                             .a = a->b.data,
                                             .b = a->a.data,
                                             .d = a->c.data,
                                             .workspace = a->scratch,
                                             .workspace_bytes = a->scratch ? a->scratch_bytes : 0});
}

/* ---- with a frozen matrix ---- */

typedef struct weight_product {
    bl_stream *stream;
    const bl_matmul_weight_args *args;
    ops_matmul_layout at;
    char *scratch;
    int64_t N, K, inner, outer;
    ops_gemm gemm;
} weight_product;

static weight_product describe(bl_stream *stream, const bl_matmul_weight_args *a,
                               ops_gemm_kind kind)
{
    int64_t N = a->weight.rows, K = a->weight.cols, inner = a->forward ? K : N,
            outer = a->forward ? N : K;
    weight_product p = {.stream = stream,
                        .args = a,
                        .at = ops_matmul_plan_layout(a, kind),
                        .scratch = a->scratch,
                        .N = N,
                        .K = K,
                        .inner = inner,
                        .outer = outer};
    bool is_fp8 = kind != OPS_GEMM_BF16;
    p.gemm = (ops_gemm){.kind = kind,
                        .transpose_a = is_fp8 || a->forward,
                        .d_type = BL_BF16,
                        .alpha = 1,
                        .beta = a->beta,
                        .m = outer,
                        .n = a->T,
                        .k = inner,
                        .lda = is_fp8 ? inner : K,
                        .ldb = inner,
                        .ldd = outer,
                        .a = is_fp8 && a->forward                   ? a->weight.segment[0].codes
                             : is_fp8                               ? p.scratch + p.at.turned
                             : ops_matmul_plan_is_dense(&a->weight) ? a->weight.segment[0].codes
                                                                    : p.scratch + p.at.dense,
                        .b = is_fp8 ? (const void *)(p.scratch + p.at.codes) : a->in.data,
                        .b_scale = (const float *)(const void *)(p.scratch + p.at.scales),
                        .d = a->out.data,
                        .workspace = p.scratch + p.at.workspace,
                        .workspace_bytes = BL_MATMUL_SCRATCH_BYTES};
    p.gemm.a_scale =
        (const float *)(const void *)(p.scratch + (kind == OPS_GEMM_FP8_ROW && !a->forward
                                                       ? p.at.ones
                                                       : p.at.weight_scales));
    return p;
}

static bl_status run_bf16(bl_stream *stream, const bl_matmul_weight_args *a)
{
    weight_product p = describe(stream, a, OPS_GEMM_BF16);
    char *dst = p.scratch + p.at.dense;

    for (int s = 0; s < a->weight.n_segments && !ops_matmul_plan_is_dense(&a->weight); s++) {
        const bl_weight_segment *segment = &a->weight.segment[s];
        BL_TRY(fp8_cuda_dequantise(stream, segment->format, segment->codes, segment->scales,
                                   segment->rows, p.K, dst));
        dst += (size_t)segment->rows * (size_t)p.K * 2;
    }
    return ops_cuda_gemm(stream, &p.gemm);
}

/* The row scales of all segments, one behind the other. */
static bl_status stack_row_scales(const weight_product *p, float *dst)
{
    const bl_weight *w = &p->args->weight;
    for (int s = 0; s < w->n_segments; s++) {
        BL_TRY(bl_stream_copy(p->stream, dst, w->segment[s].scales,
                              (size_t)w->segment[s].rows * sizeof *dst));
        dst += w->segment[s].rows;
    }
    return BL_OK;
}

/* The block scales of all segments as one grid in the GEMM's layout; for dx transposed. */
static bl_status stack_block_scales(const weight_product *p, float *dst)
{
    const bl_weight *w = &p->args->weight;
    int64_t across = ops_matmul_blocks(p->K), stride = ops_matmul_grid_stride(p->inner), row = 0;
    cudaStream_t handle = bl_cuda_stream_handle(p->stream);

    for (int s = 0; s < w->n_segments; s++) {
        int64_t rows = ops_matmul_blocks(w->segment[s].rows);
        const float *src = w->segment[s].scales;
        if (p->args->forward) {
            cudaError_t error = cudaMemcpy2DAsync(
                dst + row * stride, (size_t)stride * sizeof *dst, src, (size_t)across * sizeof *src,
                (size_t)across * sizeof *src, (size_t)rows, cudaMemcpyDefault, handle);
            if (error != cudaSuccess) return bl_cuda_fail("cudaMemcpy2DAsync", (int)error);
        } else {
            BL_TRY(fp8_cuda_transpose_scales(p->stream, src, rows, across, dst + row, stride));
        }
        row += rows;
    }
    return BL_OK;
}

static bl_status run_fp8(const weight_product *p)
{
    const bl_matmul_weight_args *a = p->args;
    uint8_t *codes = (uint8_t *)p->scratch + p->at.codes;
    float *scales = (float *)(void *)(p->scratch + p->at.scales),
          *weight_scales = (float *)(void *)(p->scratch + p->at.weight_scales);

    if (p->gemm.kind == OPS_GEMM_FP8_ROW) {
        BL_TRY(stack_row_scales(p, weight_scales));
        BL_TRY(fp8_cuda_quantise_rows(p->stream, a->in.data, p->inner,
                                      a->forward ? NULL : weight_scales, a->T, p->inner, codes,
                                      scales));
        if (!a->forward)
            BL_TRY(
                fp8_cuda_fill(p->stream, (float *)(void *)(p->scratch + p->at.ones), p->K, 1.0f));
    } else {
        BL_TRY(stack_block_scales(p, weight_scales));
        BL_TRY(fp8_cuda_quantise_groups(p->stream, a->in.data, p->inner, a->T, p->inner, codes,
                                        scales));
    }
    if (!a->forward)
        BL_TRY(fp8_cuda_transpose(p->stream, a->weight.segment[0].codes, p->N, p->K,
                                  (uint8_t *)p->scratch + p->at.turned));
    return ops_cuda_gemm(p->stream, &p->gemm);
}

bl_status ops_cuda_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *a)
{
    ops_gemm_kind kind = ops_matmul_plan_kind(a);
    size_t needed = ops_cuda_matmul_weight_scratch_bytes(a);
    bool is_served = false;

    if (a->T == 0 || a->weight.rows == 0 || a->weight.cols == 0) return BL_OK;
    if (!a->scratch || a->scratch_bytes < needed)
        return BL_FAIL(BL_EINTERNAL, "matmul: %zu bytes of scratch, %zu are needed",
                       a->scratch_bytes, needed);
    if (kind != OPS_GEMM_BF16) {
        weight_product p = describe(stream, a, kind);
        BL_TRY(ops_cuda_gemm_is_served(stream, &p.gemm, &is_served));
        if (is_served) return run_fp8(&p);
    }
    return run_bf16(stream, a);
}
