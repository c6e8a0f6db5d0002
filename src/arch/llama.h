/* SPDX-License-Identifier: Apache-2.0 */
/* llama.h -- Llama's entry, and the list of projections that its kin have, too. For the files of
 * arch/ and for tests: other modules take the entry from a configuration. */
#ifndef BALLAST_ARCH_LLAMA_H
#define BALLAST_ARCH_LLAMA_H

#include "arch/arch.h"

/* Indices of bl_llama_projections. */
enum { BL_Q, BL_K, BL_V, BL_O, BL_GATE, BL_UP, BL_DOWN, BL_PROJECTIONS };

/* Entries of such a list: those of attention. */
#define BL_LLAMA_ATTENTION                                                                         \
    {"self_attn.q_proj", BL_QKV, BL_EXTENT_Q, BL_EXTENT_HIDDEN},                                   \
        {"self_attn.k_proj", BL_QKV, BL_EXTENT_KV, BL_EXTENT_HIDDEN},                              \
        {"self_attn.v_proj", BL_QKV, BL_EXTENT_KV, BL_EXTENT_HIDDEN},                              \
    {                                                                                              \
        "self_attn.o_proj", BL_OUT, BL_EXTENT_HIDDEN, BL_EXTENT_Q                                  \
    }

extern const bl_projection bl_llama_projections[BL_PROJECTIONS];
extern const bl_arch bl_arch_llama;

#endif
