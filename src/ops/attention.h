/* SPDX-License-Identifier: Apache-2.0 */
/* attention.h -- causal grouped-query attention, tiled, memory linear in the sequence.
 * Dao et al. 2022, arXiv:2205.14135, algorithm 1; Dao 2023, arXiv:2307.08691, algorithms 1 and 2;
 * Ainslie et al. 2023, arXiv:2305.13245. */
#ifndef BALLAST_OPS_ATTENTION_H
#define BALLAST_OPS_ATTENTION_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For each document and each query head h, with key/value head h / (n_heads / n_kv_heads):
 *   s_ij = q_i . k_j / sqrt(d) for i + position_offset - window < j <= i + position_offset
 *   o_i = sum_j softmax_j(s_ij) v_j;  lse_ih = log sum_j exp(s_ij)
 * sinks (n_heads), fp32, or NULL: a score of each head that has no value, in the softmax's
 * denominator; Xiao et al. 2023, arXiv:2309.17453, section 3.3, as gpt-oss has it:
 *   o_i = sum_j exp(s_ij - lse_ih) v_j;  lse_ih = log(exp(sinks_h) + sum_j exp(s_ij))
 * On CPUs alone: on a GPU BL_ELIMIT. The gradients below need no sinks: lse has them.
 *
 * q, o: token t's head h at + t * q_stride (o_stride) + h * d; k, v: + t * kv_stride + h * d. The
 * strides let q, k, v be views into one fused buffer and let a call take any subset of the heads. d
 * is at most 256.
 * window: the keys that a query sees, its own position included; 0: all up to its own. These are
 * transformers' rules (masking_utils.py, sliding_window_overlay and causal_mask_function).
 * position_offset > 0 is for generation: one document, whose keys are position_offset + T rows, the
 * first position_offset of them older.
 * o (T, n_heads d) overwritten; lse (T, n_heads) overwritten, or NULL.
 * Rows from cu_seqlens[n_documents] on, below T, are padding: their o and lse become 0, and what q,
 * k, v hold there, be it NaN, is not used.
 *
 * On CUDA: products of bf16 with fp32 sums, softmax in fp32, p rounded to bf16 for the product with
 * v. Bits depend on the shapes and cu_seqlens alone. BL_EINTERNAL: heads, d, strides, a window or
 * an offset that make no sense. */
typedef struct bl_attention_forward_args {
    int64_t T, n_heads, n_kv_heads, d, n_documents, position_offset, window;
    int64_t q_stride, kv_stride, o_stride;
    const int32_t *cu_seqlens;
    bl_tensor q, k, v, o;
    float *lse;
    const float *sinks;
} bl_attention_forward_args;
BL_API bl_status bl_attention_forward(bl_stream *stream, const bl_attention_forward_args *args);

/* Gradients of the above (position_offset 0). dq, dk, dv have the strides of q, k, v and are
 * overwritten. delta (T, n_heads) is scratch: delta_ih = do_i . o_i. do_ and o have o_stride. In
 * padding dq, dk, dv become 0, whatever the inputs hold there. On CUDA ds is rounded to bf16 for
 * its products with q and k; sums have a fixed order, without atomics. */
typedef struct bl_attention_backward_args {
    int64_t T, n_heads, n_kv_heads, d, n_documents, window;
    int64_t q_stride, kv_stride, o_stride;
    const int32_t *cu_seqlens;
    bl_tensor q, k, v, o, do_, dq, dk, dv;
    const float *lse;
    float *delta;
} bl_attention_backward_args;
BL_API bl_status bl_attention_backward(bl_stream *stream, const bl_attention_backward_args *args);

#ifdef __cplusplus
}
#endif

#endif
