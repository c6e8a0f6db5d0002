/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.c -- the CPU's entries for products: bl_cpu_gemm_* does them, without scratch, preparation
 * or fallback. */
#include "ops/matmul.h"

#include <string.h>

#include "ops/gemm.h"
#include "ops/cpu/ops_cpu.h"

/* The products add to their output: an addend is copied there first. */
static void place_addend(bl_tensor addend, float beta, int64_t rows, int64_t cols, int64_t ld,
                         bl_tensor out)
{
    if (!bl_tensor_is_there(addend) || addend.data == out.data || beta == 0) return;
    for (int64_t row = 0; row < rows; row++)
        memcpy(bl_tensor_at(out, row * ld).data, bl_tensor_at(addend, row * ld).data,
               bl_tensor_bytes(out, cols));
}

bl_status ops_cpu_matmul(bl_stream *stream, const bl_matmul_args *a)
{
    place_addend(a->addend, a->beta, a->M, a->N, a->ldc, a->c);
    if (a->a.dtype == BL_BF16)
        return bl_cpu_gemm_bf16(ops_pool(stream), a->transpose_a, a->transpose_b, a->M, a->N, a->K,
                                a->alpha, a->a.data, a->lda, a->b.data, a->ldb, a->beta, a->c.dtype,
                                a->c.data, a->ldc);
    return bl_cpu_gemm_f32(ops_pool(stream), a->transpose_a, a->transpose_b, a->M, a->N, a->K,
                           a->alpha, ops_f32(a->a), a->lda, ops_f32(a->b), a->ldb, a->beta,
                           ops_f32(a->c), a->ldc);
}

bl_status ops_cpu_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *a)
{
    bl_pool *pool = ops_pool(stream);
    const bl_weight *w = &a->weight;
    int64_t width = a->forward ? w->rows : w->cols;
    place_addend(a->addend, a->beta, a->T, width, width, a->out);
    if (a->in.dtype == BL_BF16)
        return (a->forward ? bl_cpu_gemm_bf16_weight_nt : bl_cpu_gemm_bf16_weight_nn)(
            pool, a->T, a->in.data, a->forward ? w->cols : w->rows, w, a->beta, a->out.dtype,
            a->out.data, a->forward ? w->rows : w->cols);
    return a->forward ? bl_cpu_gemm_weight_nt(pool, a->T, ops_f32(a->in), w->cols, w, a->beta,
                                              ops_f32(a->out), w->rows)
                      : bl_cpu_gemm_weight_nn(pool, a->T, ops_f32(a->in), w->rows, w, a->beta,
                                              ops_f32(a->out), w->cols);
}

/* Matrices are dequantized into the workers' scratch; nothing is prepared. */
size_t ops_cpu_matmul_weight_scratch_bytes(const bl_matmul_weight_args *args)
{
    (void)args;
    return 0;
}

bl_status ops_cpu_matmul_weight_is_refused(bl_stream *stream, const bl_matmul_weight_args *args,
                                           bool *out)
{
    (void)stream, (void)args;
    *out = false;
    return BL_OK;
}

bl_status ops_cpu_matmul_end_warm_up(bl_device *device)
{
    (void)device;
    return BL_OK;
}

bl_status ops_cpu_matmul_spare_multiprocessors(bl_device *device, int n)
{
    (void)device, (void)n;
    return BL_OK;
}

bl_status ops_cpu_matmul_count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT])
{
    (void)device;
    for (int i = 0; i < BL_FALLBACK_COUNT; i++) counts[i] = 0;
    return BL_OK;
}
