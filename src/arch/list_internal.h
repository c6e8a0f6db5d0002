/* SPDX-License-Identifier: Apache-2.0 */
/* list_internal.h -- the entries of the table of architectures; each is in a file of its family. */
#ifndef BALLAST_ARCH_LIST_INTERNAL_H
#define BALLAST_ARCH_LIST_INTERNAL_H

#include "arch/arch.h"

/* The first is that of a config.json without model_type. */
#define ARCH_LIST(ENTRY)                                                                           \
    ENTRY(bl_arch_llama)                                                                           \
    ENTRY(bl_arch_mistral)                                                                         \
    ENTRY(bl_arch_ministral3)                                                                      \
    ENTRY(bl_arch_mistral3)                                                                        \
    ENTRY(bl_arch_qwen2)                                                                           \
    ENTRY(bl_arch_qwen3)                                                                           \
    ENTRY(bl_arch_seed_oss)                                                                        \
    ENTRY(bl_arch_granite)                                                                         \
    ENTRY(bl_arch_falcon)                                                                          \
    ENTRY(bl_arch_phi3)                                                                            \
    ENTRY(bl_arch_olmo2)                                                                           \
    ENTRY(bl_arch_qwen3_moe)                                                                       \
    ENTRY(bl_arch_mixtral)                                                                         \
    ENTRY(bl_arch_gpt_oss)                                                                         \
    ENTRY(bl_arch_glm4_moe)

#define ARCH_DECLARE(name) extern const bl_arch name;
ARCH_LIST(ARCH_DECLARE)
#undef ARCH_DECLARE

#endif
