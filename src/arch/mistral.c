/* SPDX-License-Identifier: Apache-2.0 */
/* mistral.c -- Mistral: Llama's layer with a window in every layer, or in none. Ministral 3: the
 * same, with YaRN, and queries that may be scaled by their position. Mistral 3: one of the two
 * beside a vision tower, which is not read. */
#include <stdlib.h>
#include <string.h>

#include "arch/config_internal.h"
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"

/* ---- Mistral ---- */

static const bl_preset presets[] = {
    {"mistral-7b-v0.3",
     {.vocab_size = 32768,
      .hidden_size = 4096,
      .intermediate_size = 14336,
      .n_layers = 32,
      .n_heads = 32,
      .n_kv_heads = 8,
      .head_dim = 128,
      .max_position_embeddings = 32768,
      .rms_norm_eps = 1e-5,
      .rope_theta = 1e6,
      .bos_token_id = 1,
      .eos_token_ids = {2},
      .n_eos_token_ids = 1}},
    {"mistral-large-123b",
     {.vocab_size = 32768,
      .hidden_size = 12288,
      .intermediate_size = 28672,
      .n_layers = 88,
      .n_heads = 96,
      .n_kv_heads = 8,
      .head_dim = 128,
      .max_position_embeddings = 131072,
      .rms_norm_eps = 1e-5,
      .rope_theta = 1e6,
      .bos_token_id = 1,
      .eos_token_ids = {2},
      .n_eos_token_ids = 1}},
};

static const char *const keys[] = {BL_DECODER_KEYS, "sliding_window", NULL};

#define MISTRAL                                                                                    \
    .title = "Mistral", .keys = keys,                                                              \
    .defaults = {.n_kv_heads = 8,                                                                  \
                 .max_position_embeddings = 131072,                                                \
                 .rms_norm_eps = 1e-6,                                                             \
                 .rope_theta = 1e4,                                                                \
                 .windows = {.tokens = 4096}},                                                     \
    .vectors = {BL_DECODER_NORMS}, BL_DECODER_LAYER

const bl_arch bl_arch_mistral = {
    .model_type = "mistral",
    .class_name = "MistralForCausalLM",
    MISTRAL,
    BL_DECODER_NAMES,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
};

/* ---- Ministral 3 ---- */

/* rope_attention_factor: 0.1 log(64) + 1 */
#define DEVSTRAL2                                                                                  \
    .vocab_size = 131072, .hidden_size = 12288, .intermediate_size = 28672, .n_layers = 88,        \
    .n_heads = 96, .n_kv_heads = 8, .head_dim = 128, .max_position_embeddings = 262144,            \
    .rms_norm_eps = 1e-5, .rope_theta = 1e6, .rope_kind = BL_ROPE_YARN, .rope_factor = 64,         \
    .rope_original_max_positions = 4096, .rope_beta_fast = 4, .rope_beta_slow = 1,                 \
    .rope_attention_factor = 1.4158883083359672, .bos_token_id = 1, .eos_token_ids = {2},          \
    .n_eos_token_ids = 1

static const bl_preset ministral3_presets[] = {{"devstral-2-123b", {DEVSTRAL2}}};

#define MINISTRAL3                                                                                 \
    .title = "Ministral 3", .keys = keys,                                                          \
    .defaults = {.n_kv_heads = 8,                                                                  \
                 .head_dim = 128,                                                                  \
                 .max_position_embeddings = 262144,                                                \
                 .rms_norm_eps = 1e-5, /* from here on: of a file without RoPE's keys */           \
                 .rope_theta = 1e6,                                                                \
                 .rope_kind = BL_ROPE_YARN,                                                        \
                 .rope_factor = 16,                                                                \
                 .rope_original_max_positions = 16384,                                             \
                 .rope_beta_fast = 32,                                                             \
                 .rope_beta_slow = 1,                                                              \
                 .rope_attention_factor = 1,                                                       \
                 .query_beta = 0.1},                                                               \
    .has_query_scaling = true, .vectors = {BL_DECODER_NORMS}, BL_DECODER_LAYER

const bl_arch bl_arch_ministral3 = {
    .model_type = "ministral3",
    .class_name = "Ministral3ForCausalLM",
    MINISTRAL3,
    BL_DECODER_NAMES,
    .presets = ministral3_presets,
    .n_presets = BL_COUNT(ministral3_presets),
};

/* ---- Mistral 3 ---- */

static const char *const mistral3_keys[] = {"text_config",
                                            "vision_config",
                                            "image_token_index",
                                            "projector_hidden_act",
                                            "multimodal_projector_bias",
                                            "spatial_merge_size",
                                            "vision_feature_layer",
                                            "tie_word_embeddings",
                                            NULL};

static const char *const towers[] = {"vision_tower.", "multi_modal_projector.", NULL};

/* Tensors have the names of the published files; PEFT sees transformers' modules. */
#define MISTRAL3                                                                                   \
    .model_type = "mistral3", .class_name = "Mistral3ForConditionalGeneration",                    \
    .layers = "language_model.model.layers", .peft_layers = "model.language_model.layers",         \
    .final_norm = "language_model.model.norm", .embedding = "language_model.model.embed_tokens",   \
    .head = "language_model.lm_head", .skipped = towers

static const bl_arch mistral_tower = {MISTRAL, MISTRAL3}, ministral3_tower = {MINISTRAL3, MISTRAL3};

/* text_config is the configuration of one of the two. The file itself says whether the head is
 * tied; where it does not (transformers 4 wrote no such key), a head that is stored is not. */
static bl_status read_mistral3(const char *file, const json_t *root, bl_model_config *c)
{
    const json_t *text;
    const char *type = "mistral";
    char *where = NULL;
    bool is_tied = true;
    bl_status st;

    BL_TRY(bl_json_get_object(file, root, "text_config", BL_JSON_REQUIRED, &text));
    BL_TRY(bl_json_get_bool(file, root, "tie_word_embeddings", BL_JSON_OPTIONAL, &is_tied));
    BL_TRY(bl_text_format(&where, "%s: text_config", file));
    BL_TRY_GOTO(st, done, bl_json_get_string(where, text, "model_type", BL_JSON_OPTIONAL, &type));
    if (strcmp(type, "mistral") != 0 && strcmp(type, "ministral3") != 0) {
        st = bl_json_fail(where, "model_type", "\"mistral\" or \"ministral3\"",
                          json_object_get(text, "model_type"));
        goto done;
    }
    const bl_arch *tower = strcmp(type, "mistral") == 0 ? &mistral_tower : &ministral3_tower;
    *c = tower->defaults;
    c->arch = tower;
    BL_TRY_GOTO(st, done, arch_check_keys(tower, where, text));
    BL_TRY_GOTO(st, done, arch_read_decoder(where, text, c));
    c->tie_word_embeddings = is_tied;
    c->is_untied_by_head = !json_object_get(root, "tie_word_embeddings");
done:
    free(where);
    return st;
}

/* Mistral Medium 3.5: docs.nvidia.com/nemo/automodel, "Mistral Medium 3.5", of 2026-11: the text
 * tower of Devstral 2; its vision tower is not counted. */
static const bl_preset mistral3_presets[] = {
    {"mistral-medium-3.5-128b", {.arch = &ministral3_tower, DEVSTRAL2}},
};

/* That of the table: `read` and presets choose among the towers. */
const bl_arch bl_arch_mistral3 = {
    MISTRAL3,
    .title = "Mistral 3",
    .keys = mistral3_keys,
    .read = read_mistral3,
    .describe = arch_describe_decoder,
    .presets = mistral3_presets,
    .n_presets = BL_COUNT(mistral3_presets),
    .projections = bl_llama_projections,
    .n_projections = BL_PROJECTIONS,
    .vectors = {BL_DECODER_NORMS},
};
