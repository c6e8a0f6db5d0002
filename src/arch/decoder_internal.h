/* SPDX-License-Identifier: Apache-2.0 */
/* decoder_internal.h -- `read` and `describe` of pre-norm decoders, for entries of the table: an
 * entry uses them, or calls them and adds its own keys. */
#ifndef BALLAST_ARCH_DECODER_INTERNAL_H
#define BALLAST_ARCH_DECODER_INTERNAL_H

#include "arch/arch.h"

/* The keys that arch_read_decoder reads. */
#define BL_DECODER_KEYS                                                                            \
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",  \
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",              \
        "tie_word_embeddings", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling",       \
        "rope_parameters"
bl_status arch_read_decoder(const char *file, const json_t *root, bl_model_config *config);
json_t *arch_describe_decoder(const bl_model_config *config);

#endif
