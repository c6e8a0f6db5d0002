/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.c -- products on CUDA. With a frozen matrix W (N,K) there are three ways, of which
 * matmul_plan.h chooses one:
 *
 *   BF16       W is dequantized to bf16 in scratch, each value rounded once from the fp32 value
 *              that the CPU uses; one bf16 GEMM.
 *   FP8_ROW    W_nk = s_n C_nk. y: x is quantized with a scale per token; cuBLASLt multiplies codes
 *              and applies both scales to the sum. dx_tk = sum_n (dy_tn s_n) C_nk: the scales are
 *              along the sum, so dy is multiplied by them before it is quantized, exactly; C is
 *              transposed, because FP8 products need both operands along the sum, and has scales of
 *              one.
 *   FP8_BLOCK  W_nk = s_[n/128][k/128] C_nk: blocks are transposed with their scales, so y and dx
 *              are alike: W's blocks against a scale per token and 128 channels of the sum.
 *
 * What is made of W (bf16 copy, transposed codes, stacked scales) is made by the first product that
 * needs it, in the caller's prepared memory or, for this product alone, in scratch.
 *
 * Row-major y (T,N) is column-major (N,T), and so on: W is the first operand of the column-major
 * product, tokens are its columns. */
#include <cuda_runtime_api.h>

#include "base/sizes.h"
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

static bl_status multiply_piece(bl_stream *stream, const bl_matmul_args *a)
{
    return ops_cuda_gemm(stream, &(ops_gemm){.kind = OPS_GEMM_BF16,
                                             .may_split_sums = true,
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
                                             .c = a->addend.data,
                                             .d = a->c.data,
                                             .workspace = a->scratch,
                                             .workspace_bytes = a->scratch ? a->scratch_bytes : 0});
}

/* Tokens are rows of C or terms of the sum. Many of them are multiplied in pieces; a sum in pieces
 * is added up in C and rounded there, once per piece, to C's dtype. */
bl_status ops_cuda_matmul(bl_stream *stream, const bl_matmul_args *a)
{
    int64_t rows = ops_matmul_plan_piece(a->M, bl_max_i64(a->ldc, a->transpose_a ? 1 : a->lda)),
            terms = ops_matmul_plan_piece(
                a->K, bl_max_i64(a->transpose_a ? a->lda : 1, a->transpose_b ? 1 : a->ldb));

    if (a->M == 0 || a->N == 0) return BL_OK;
    if (a->K == 0 && a->beta == 0) return zero_rows(stream, a);
    if (a->K == 0 && a->beta == 1 && !bl_tensor_is_there(a->addend)) return BL_OK;
    if (a->K == 0)
        return BL_FAIL(BL_EINTERNAL, "matmul: an empty sum and beta %g", (double)a->beta);
    for (int64_t m = 0; m < a->M; m += rows)
        for (int64_t k = 0; k < a->K; k += terms) {
            bl_matmul_args piece = *a;
            piece.M = bl_min_i64(rows, a->M - m);
            piece.K = bl_min_i64(terms, a->K - k);
            piece.a = bl_tensor_at(a->a, a->transpose_a ? k * a->lda + m : m * a->lda + k);
            piece.b = bl_tensor_at(a->b, a->transpose_b ? k : k * a->ldb);
            piece.c = bl_tensor_at(a->c, m * a->ldc);
            piece.addend = bl_tensor_at(a->addend, m * a->ldc);
            if (k > 0) piece.beta = 1, piece.addend = piece.c;
            BL_TRY(multiply_piece(stream, &piece));
        }
    return BL_OK;
}

/* ---- with a frozen matrix ---- */

typedef struct weight_product {
    bl_stream *stream;
    const bl_matmul_weight_args *args;
    ops_matmul_layout at;
    ops_prepared_layout in_memory;
    char *scratch, *memory; /* memory: of copies made of the matrix */
    unsigned *made;
    int64_t N, K, inner, outer;
    ops_gemm gemm;
} weight_product;

static float *floats_at(char *memory, size_t offset)
{
    return (float *)(void *)(memory + offset);
}

/* own: copies made in scratch, used where args->prepared is missing or too small. */
static weight_product describe(bl_stream *stream, const bl_matmul_weight_args *a,
                               ops_gemm_kind kind, bl_matmul_prepared *own)
{
    int64_t N = a->weight.rows, K = a->weight.cols, inner = a->forward ? K : N,
            outer = a->forward ? N : K;
    bool is_fp8 = kind != OPS_GEMM_BF16;
    weight_product p = {.stream = stream,
                        .args = a,
                        .at = ops_matmul_plan_layout(a, kind),
                        .in_memory = ops_matmul_plan_prepared(&a->weight, kind),
                        .scratch = a->scratch,
                        .N = N,
                        .K = K,
                        .inner = inner,
                        .outer = outer};
    p.made = p.at.has_own ? &own->made : &a->prepared->made;
    p.memory = p.at.has_own ? p.scratch + p.at.own : a->prepared->memory;
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
                        .b = is_fp8 ? (const void *)(p.scratch + p.at.codes) : a->in.data,
                        .c = a->addend.data,
                        .d = a->out.data,
                        .workspace = p.scratch + p.at.workspace,
                        .workspace_bytes = BL_MATMUL_SCRATCH_BYTES};
    if (is_fp8 ? a->forward : ops_matmul_plan_is_dense(&a->weight))
        p.gemm.a = a->weight.segment[0].codes;
    else
        p.gemm.a = p.memory + (is_fp8 ? p.in_memory.turned : p.in_memory.dense);
    if (!is_fp8) return p;
    p.gemm.a_scale =
        floats_at(p.memory, a->forward ? p.in_memory.scales : p.in_memory.turned_scales);
    p.gemm.b_scale = floats_at(p.scratch, p.at.scales);
    p.gemm.fast_sums = ops_matmul_plan_has_fast_sums(a, kind);
    return p;
}

/* Whether `piece` is still to be made; it is, once the caller has queued it. The two kinds share
 * memory. */
static bool must_make(const weight_product *p, unsigned piece)
{
    unsigned same_kind =
        p->gemm.kind == OPS_GEMM_BF16 ? (unsigned)OPS_MADE_DENSE : ~(unsigned)OPS_MADE_DENSE;

    if (*p->made & ~same_kind) *p->made = 0;
    bool must = !(*p->made & piece);
    *p->made |= piece;
    return must;
}

static bl_status make_dense(const weight_product *p)
{
    const bl_weight *w = &p->args->weight;
    char *dst = p->memory + p->in_memory.dense;

    if (ops_matmul_plan_is_dense(w) || !must_make(p, OPS_MADE_DENSE)) return BL_OK;
    for (int s = 0; s < w->n_segments; s++) {
        const bl_weight_segment *segment = &w->segment[s];
        BL_TRY(fp8_cuda_dequantize(p->stream, segment->format, segment->codes, segment->scales,
                                   segment->rows, p->K, dst));
        dst += (size_t)segment->rows * (size_t)p->K * 2;
    }
    return BL_OK;
}

/* The row scales of all segments, contiguous. */
static bl_status make_row_scales(const weight_product *p)
{
    const bl_weight *w = &p->args->weight;
    float *dst = floats_at(p->memory, p->in_memory.scales);

    if (!must_make(p, OPS_MADE_SCALES)) return BL_OK;
    for (int s = 0; s < w->n_segments; s++) {
        BL_TRY(bl_stream_copy(p->stream, dst, w->segment[s].scales,
                              (size_t)w->segment[s].rows * sizeof *dst));
        dst += w->segment[s].rows;
    }
    return BL_OK;
}

/* The block scales of all segments as one grid in the GEMM's layout; for dx transposed. */
static bl_status make_block_scales(const weight_product *p)
{
    const bl_weight *w = &p->args->weight;
    bool forward = p->args->forward;
    float *dst = floats_at(p->memory, forward ? p->in_memory.scales : p->in_memory.turned_scales);
    int64_t across = ops_matmul_blocks(p->K), stride = ops_matmul_grid_stride(p->inner), row = 0;
    cudaStream_t handle = bl_cuda_stream_handle(p->stream);

    if (!must_make(p, forward ? OPS_MADE_SCALES : OPS_MADE_TURNED_SCALES)) return BL_OK;
    for (int s = 0; s < w->n_segments; s++) {
        int64_t rows = ops_matmul_blocks(w->segment[s].rows);
        const float *src = w->segment[s].scales;
        if (forward) {
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

static bl_status make_codes(const weight_product *p)
{
    bool forward = p->args->forward, is_row = p->gemm.kind == OPS_GEMM_FP8_ROW;

    BL_TRY(is_row ? make_row_scales(p) : make_block_scales(p));
    if (forward) return BL_OK;
    if (is_row && must_make(p, OPS_MADE_TURNED_SCALES))
        BL_TRY(
            fp8_cuda_fill(p->stream, floats_at(p->memory, p->in_memory.turned_scales), p->K, 1.0f));
    if (!must_make(p, OPS_MADE_TURNED)) return BL_OK;
    return fp8_cuda_transpose(p->stream, p->args->weight.segment[0].codes, p->N, p->K,
                              (uint8_t *)p->memory + p->in_memory.turned);
}

static bl_status quantize_in(const weight_product *p)
{
    const bl_matmul_weight_args *a = p->args;
    uint8_t *codes = (uint8_t *)p->scratch + p->at.codes;
    float *scales = floats_at(p->scratch, p->at.scales);

    if (p->gemm.kind == OPS_GEMM_FP8_BLOCK)
        return fp8_cuda_quantize_groups(p->stream, a->in.data, p->inner, a->T, p->inner, codes,
                                        scales);
    return fp8_cuda_quantize_rows(p->stream, a->in.data, p->inner,
                                  a->forward ? NULL : floats_at(p->memory, p->in_memory.scales),
                                  a->T, p->inner, codes, scales);
}

/* *is_served false: nothing of `out` was written. */
static bl_status run_fp8(const weight_product *p, bool *is_served)
{
    BL_TRY(ops_cuda_gemm_is_served(p->stream, &p->gemm, is_served));
    if (!*is_served) return BL_OK;
    BL_TRY(make_codes(p));
    if (!p->args->is_quantized) BL_TRY(quantize_in(p));
    return ops_cuda_gemm_try(p->stream, &p->gemm, is_served);
}

static bl_matmul_fallback refusal_of(bl_stream *stream)
{
    const bl_cuda_properties *gpu = bl_cuda_device_properties(bl_stream_device(stream));
    return bl_matmul_has_fp8(gpu->capability) ? BL_FALLBACK_REFUSED : BL_FALLBACK_CAPABILITY;
}

static bl_status run_piece(bl_stream *stream, const bl_matmul_weight_args *a,
                           bl_matmul_prepared *own)
{
    bl_matmul_fallback reason = BL_FALLBACK_COUNT;
    ops_gemm_kind kind = ops_matmul_plan_kind(a, &reason);

    if (kind != OPS_GEMM_BF16) {
        weight_product p = describe(stream, a, kind, own);
        bool is_served;
        bl_status st = run_fp8(&p, &is_served);
        if (st != BL_OK || is_served) return st;
        if (a->is_refused) {
            *a->is_refused = true;
            return BL_OK;
        }
        reason = refusal_of(stream);
    }
    if (a->mode == BL_MATMUL_FP8) BL_TRY(ops_cuda_gemm_count_fallback(stream, reason, a));
    weight_product p = describe(stream, a, OPS_GEMM_BF16, own);
    BL_TRY(make_dense(&p));
    return ops_cuda_gemm(stream, &p.gemm);
}

bl_status ops_cuda_matmul_weight_in_pieces(bl_stream *stream, const bl_matmul_weight_args *a,
                                           int64_t tokens)
{
    int64_t N = a->weight.rows, K = a->weight.cols;
    bl_matmul_prepared own = {.made = 0};
    bool is_refused = false;

    for (int64_t t = 0; t < a->T && !is_refused; t += tokens) {
        bl_matmul_weight_args piece = *a;
        piece.T = bl_min_i64(tokens, a->T - t);
        piece.in = bl_tensor_at(a->in, t * (a->forward ? K : N));
        piece.out = bl_tensor_at(a->out, t * (a->forward ? N : K));
        piece.addend = bl_tensor_at(a->addend, t * (a->forward ? N : K));
        /* A last piece of another shape must not undo the others. */
        piece.is_refused = a->is_refused && t == 0 ? &is_refused : NULL;
        BL_TRY(run_piece(stream, &piece, &own));
    }
    if (is_refused) *a->is_refused = true;
    return BL_OK;
}

bl_status ops_cuda_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *a)
{
    size_t needed = ops_cuda_matmul_weight_scratch_bytes(a);

    if (a->T == 0 || a->weight.rows == 0 || a->weight.cols == 0) return BL_OK;
    if (!a->scratch || a->scratch_bytes < needed)
        return BL_FAIL(BL_EINTERNAL, "matmul: %zu bytes of scratch, %zu are needed",
                       a->scratch_bytes, needed);
    return ops_cuda_matmul_weight_in_pieces(stream, a, ops_matmul_plan_tokens(a));
}

bl_status ops_cuda_matmul_weight_is_refused(bl_stream *stream, const bl_matmul_weight_args *a,
                                            bool *out)
{
    bl_matmul_weight_args piece = *a;
    bl_matmul_prepared own = {.made = 0};
    bool is_served = true;

    piece.T = ops_matmul_plan_tokens(a);
    ops_gemm_kind kind = ops_matmul_plan_kind(&piece, NULL);
    if (a->T > 0 && kind != OPS_GEMM_BF16) {
        weight_product p = describe(stream, &piece, kind, &own);
        BL_TRY(ops_cuda_gemm_is_served(stream, &p.gemm, &is_served));
    }
    *out = !is_served;
    return BL_OK;
}
