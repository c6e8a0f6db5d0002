/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/matmul.h"

#include "ops/gemm.h"
#include "ops/cpu/ops_cpu.h"

_Static_assert(sizeof(bl_matmul_weight_args) <= BL_STREAM_ARGS_BYTES,
               "a weight travels inside a task's arguments");

static bl_status matmul_cpu(bl_stream *stream, const void *arguments)
{
    const bl_matmul_args *a = arguments;
    return bl_cpu_gemm_f32(ops_pool(stream), a->transpose_a, a->transpose_b, a->M, a->N, a->K,
                           a->alpha, a->a, a->lda, a->b, a->ldb, a->beta, a->c, a->ldc);
}

static bl_status matmul_weight_cpu(bl_stream *stream, const void *arguments)
{
    const bl_matmul_weight_args *a = arguments;
    bl_pool *pool = ops_pool(stream);
    const bl_weight *w = &a->weight;
    return a->forward
               ? bl_cpu_gemm_weight_nt(pool, a->T, a->in, w->cols, w, a->beta, a->out, w->rows)
               : bl_cpu_gemm_weight_nn(pool, a->T, a->in, w->rows, w, a->beta, a->out, w->cols);
}

bl_status bl_matmul(bl_stream *stream, const bl_matmul_args *args)
{
    return ops_launch(stream, matmul_cpu, ops_cuda_matmul, args->act, args, sizeof *args);
}

bl_status bl_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *args)
{
    return ops_launch(stream, matmul_weight_cpu, ops_cuda_matmul_weight, args->act, args,
                      sizeof *args);
}

size_t bl_matmul_weight_scratch_bytes(const bl_device *device, const bl_matmul_weight_args *args)
{
    return bl_device_get_kind(device) == BL_DEVICE_CUDA ? ops_cuda_matmul_weight_scratch_bytes(args)
                                                        : 0;
}
