/* SPDX-License-Identifier: Apache-2.0 */
/* ops_cuda.h -- the ops on CUDA: one launcher per op, the entries of ops_cuda_table. Internal to
 * ops/.
 *
 * ops_cuda_<op>(stream, args) gets arguments that passed the checks of ops.c and queues kernels on
 * bl_cuda_stream_handle(stream) (device/cuda/stream.h). It allocates nothing, waits for nothing and
 * returns bl_cuda_launched("<op>") or BL_EINTERNAL for arguments that it has no kernel for. T = 0
 * and n = 0 queue nothing.
 *
 * Types. Activations and their gradients are bf16; arithmetic is fp32, sums that decide a result as
 * wide as the op's header says. Weights of norms, tables of angles, log-sum-exps, gradients of LoRA
 * weights and all of the optimizer stay fp32. cast, add and dropout take fp32, too.
 *
 * loss_head: a target outside [0, V) of a token that counts makes logp and the loss NaN: a kernel
 * has no status to return. */
#ifndef BALLAST_OPS_CUDA_OPS_CUDA_H
#define BALLAST_OPS_CUDA_OPS_CUDA_H

#include "ops/cuda/loss_head_plan.h"
#include "ops/ops_internal.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OPS_CUDA_DECLARE(op, ...)                                                                  \
    bl_status ops_cuda_##op(bl_stream *stream, const bl_##op##_args *args);
BL_OPS_LIST(OPS_CUDA_DECLARE)
#undef OPS_CUDA_DECLARE

size_t ops_cuda_matmul_weight_scratch_bytes(const bl_matmul_weight_args *args);
bl_quantized ops_cuda_matmul_weight_operand(const bl_matmul_weight_args *args);
size_t ops_cuda_matmul_prepared_bytes(const bl_matmul_weight_args *args);
bl_status ops_cuda_matmul_weight_is_refused(bl_stream *stream, const bl_matmul_weight_args *args,
                                            bool *out);
bl_status ops_cuda_matmul_end_warm_up(bl_device *device);
bl_status ops_cuda_matmul_spare_multiprocessors(bl_device *device, int n);
bl_status ops_cuda_matmul_count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT]);
/* ops_cuda_matmul_weight with `tokens` (a multiple of 4, or T) at a time. */
bl_status ops_cuda_matmul_weight_in_pieces(bl_stream *stream, const bl_matmul_weight_args *args,
                                           int64_t tokens);

/* Where args->quantized is there. */
bl_status ops_cuda_swiglu_forward_quantized(bl_stream *stream, const bl_swiglu_forward_args *args);

#ifdef __cplusplus
}
#endif

#endif
