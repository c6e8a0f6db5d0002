/* SPDX-License-Identifier: Apache-2.0 */
/* block_internal.h -- the norms of q and k in block_norm.c, for block.c. norm: BL_Q_NORM or
 * BL_K_NORM. */
#ifndef BALLAST_ARCH_BLOCK_INTERNAL_H
#define BALLAST_ARCH_BLOCK_INTERNAL_H

#include "arch/block.h"

/* ws->qk = norm of q's or k's rows in qkv, of T tokens. */
bl_status arch_norm_heads(bl_stream *stream, const bl_block *block, int64_t T, bl_layer_vector norm,
                          bl_tensor qkv, const bl_block_workspace *ws);

/* d = gradient of q's or k's rows in qkv, d being that of their norm. */
bl_status arch_norm_heads_backward(bl_stream *stream, const bl_block *block, int64_t T,
                                   bl_layer_vector norm, bl_tensor qkv,
                                   const bl_block_workspace *ws, bl_tensor d);

#endif
