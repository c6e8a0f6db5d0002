/* SPDX-License-Identifier: Apache-2.0 */
/* rope.h -- a model's rotary embedding: its frequencies and its tables of cosines and sines.
 *
 * Su et al. 2021, arXiv:2104.09864. The types are those of transformers' modeling_rope_utils.py. */
#ifndef BALLAST_ARCH_ROPE_H
#define BALLAST_ARCH_ROPE_H

#include "arch/arch.h"

/* d: channels of a head that are rotated, the first ones: rotary_dim, or head_dim. */
int64_t bl_model_rotary_dim(const bl_model_config *config);

/* inverse[i], i < d/2: the angle of pair (i, i + d/2) is position * inverse[i].
 *
 *   default   inv = theta^(-2i / d), theta = rope_theta
 *   dynamic   the same: sequences are at most max_position_embeddings (bl_model_rope_max_tokens)
 *   linear    inv / factor
 *   llama3    wavelength w = 2 pi / inv, L = rope_original_max_positions:
 *               w > L / low    inv / factor
 *               w < L / high   inv
 *               between        (1 - s) inv / factor + s inv, s = (L / w - low) / (high - low)
 *   yarn      (1 - r) inv + r inv / factor, r = (i - first) / (last - first) within [0, 1];
 *             first, last: the pairs that turn beta_fast and beta_slow times in L tokens
 *             (Peng et al. 2023, arXiv:2309.00071, eq. 23)
 *   longrope  inv / rope_long[i] in documents of more than L tokens (is_long), else
 *             inv / rope_short[i] (Ding et al. 2024, arXiv:2402.13753) */
void bl_model_rope_inv_freq(const bl_model_config *config, bool is_long, double *inverse);

/* Documents of more tokens take the tables of long ones; 0: there are none. */
int64_t bl_model_rope_long_after(const bl_model_config *config);
/* The most tokens that a sequence may have; 0: any number. */
int64_t bl_model_rope_max_tokens(const bl_model_config *config);

/* Whether queries have separate tables: attention_multiplier and query_beta scale q. */
bool bl_model_rope_has_queries(const bl_model_config *config);

/* Tables of positions [first, first + n), each (n, d/2): cosines and sines, in double before
 * they are rounded, times rope_attention_factor; those of queries moreover times
 *   attention_multiplier sqrt(head_dim), as attention divides by the root (no family that has it
 *   leaves channels unrotated), and
 *   1 + query_beta log(1 + floor(position / rope_original_max_positions)). */
void bl_model_rope_fill(const bl_model_config *config, const double *inverse, bool is_query,
                        int64_t first, int64_t n, float *cosines, float *sines);

#endif
