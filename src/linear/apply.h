/* SPDX-License-Identifier: Apache-2.0 */
/* apply.h -- a matrix of a base with its LoRA terms: acquired for a stream and multiplied there.
 *
 * What every user of a base does, the trainer's decoder layer (arch/block.c) and the layers of
 * linear/layer.h alike. */
#ifndef BALLAST_LINEAR_APPLY_H
#define BALLAST_LINEAR_APPLY_H

#include "linear/base.h"
#include "linear/lora_linear.h"
#include "linear/prepared.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The frozen matrix, by its place in a base, and the LoRA terms over it. */
typedef struct bl_linear_use {
    bl_base *base; /* borrowed */
    int64_t unit;
    int matrix;
    bl_linear_prepared *prepared; /* borrowed; NULL: nothing is kept between calls */
    /* As for bl_lora_linear_forward and _backward. The calls below use their own weight and
     * prepared, and unit and matrix as layer and matrix of the dropout: these members are not
     * read. */
    bl_lora_linear lora;
} bl_linear_use;

/* bl_lora_linear_operand for a later bl_linear_apply; does not acquire the matrix. */
bl_quantized bl_linear_operand(bl_stream *stream, const bl_linear_use *use, int64_t T,
                               bl_dtype act);

/* bl_lora_linear_forward and bl_lora_linear_backward with the matrix acquired for `stream`. The
 * unit stays acquired: releasing it is the caller's (bl_base_release, and
 * bl_linear_prepared_forget). Errors: those of bl_base_acquire and of the products. */
bl_status bl_linear_apply(bl_stream *stream, const bl_linear_use *use, int64_t T, bl_tensor x,
                          bl_tensor y);
bl_status bl_linear_pull_back(bl_stream *stream, const bl_linear_use *use, int64_t T, bl_tensor x,
                              bl_tensor dy, bl_tensor dx);

#ifdef __cplusplus
}
#endif

#endif
