/* SPDX-License-Identifier: Apache-2.0 */
/* weights_internal.h -- between host.c, weights.c and load_rows.c. */
#ifndef BALLAST_LLAMA_WEIGHTS_INTERNAL_H
#define BALLAST_LLAMA_WEIGHTS_INTERNAL_H

#include "llama/weights.h"

enum { BL_TENSOR_NAME_BYTES = 96 };

/* "model.layers.3.self_attn.q_proj.weight" */
void bl_llama_tensor_name(int64_t layer, const char *module, char name[BL_TENSOR_NAME_BYTES]);

/* A bounce buffer for reading: grown to the largest piece a load needs, at most the rows of one block. */
typedef struct bl_bounce {
    void *memory;
    size_t bytes;
} bl_bounce;

/* Reads rows [begin, end) of `weight` and stores their codes in `format` at `codes`. `scales` is the projection's whole scale
 * array; only those are written whose row, or whose block's first row, lies in [begin, end). */
bl_status bl_llama_load_rows(bl_pool *pool, bl_bounce *bounce, const bl_hf_weight *weight, bl_format format, int64_t begin,
                             int64_t end, void *codes, float *scales);

/* Rows [begin, end) of a stored tensor, `bytes`: BL_EINPUT names the first place that is NaN or infinite. */
bl_status bl_llama_check_finite(const bl_tensor *tensor, int64_t begin, int64_t end, const void *bytes);

#endif
