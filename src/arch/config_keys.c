/* SPDX-License-Identifier: Apache-2.0 */
/* config_keys.c -- the keys of config.json. One that changes the forward pass of some model, and
 * that the architecture's reader does not read, must have the value that changes nothing: a file
 * that sets it was written for another architecture, and its model_type was edited, or needs what
 * Ballast lacks. An unknown key is an error where its name says so, else it is named in one
 * warning. */
#include <ctype.h>
#include <string.h>

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/present.h"
#include "base/sizes.h"
#include "arch/config_internal.h"

#define NOTHING "[]"
#define EMPTY   "[[], {}]"
#define MUST_BE(name, values)                                                                      \
    {                                                                                              \
        name, BL_KEY_REJECTED, values, NULL                                                        \
    }

static const bl_known_key known_keys[] = {
    /* attention: which positions, scales, norms */
    MUST_BE("sliding_window", NOTHING),
    MUST_BE("use_sliding_window", "[false]"),
    MUST_BE("attention_chunk_size", NOTHING),
    MUST_BE("layer_types", "[\"full_attention\", []]"),
    MUST_BE("per_layer_config", EMPTY),
    MUST_BE("block_configs", EMPTY),
    MUST_BE("attention_multiplier", NOTHING),
    MUST_BE("query_pre_attn_scalar", NOTHING),
    MUST_BE("attn_logit_softcapping", NOTHING),
    MUST_BE("attention_dropout", "[0]"),
    MUST_BE("qk_norm", "[false]"),
    MUST_BE("use_qk_norm", "[false]"),
    MUST_BE("qk_layernorm", "[false]"),
    MUST_BE("clip_qkv", NOTHING),
    MUST_BE("attention_sink", "[false]"),
    MUST_BE("add_cross_attention", "[false]"),
    MUST_BE("is_encoder_decoder", "[false]"),
    MUST_BE("pruned_heads", EMPTY),
    /* positions */
    MUST_BE("partial_rotary_factor", "[1]"),
    MUST_BE("rotary_pct", "[1]"),
    MUST_BE("rope_interleaved", "[false]"),
    MUST_BE("no_rope_layers", "[1, []]"),
    MUST_BE("no_rope_layer_interval", NOTHING),
    MUST_BE("alibi", "[false]"),
    MUST_BE("llama_4_scaling_beta", "[0]"),
    /* biases, activation, order of the blocks */
    MUST_BE("hidden_act", "[\"silu\"]"),
    MUST_BE("hidden_activation", "[\"silu\"]"),
    MUST_BE("attention_bias", "[false]"),
    MUST_BE("attention_out_bias", "[false]"),
    MUST_BE("mlp_bias", "[false]"),
    MUST_BE("bias", "[false]"),
    MUST_BE("use_bias", "[false]"),
    MUST_BE("qkv_bias", "[false]"),
    MUST_BE("parallel_attn", "[false]"),
    MUST_BE("use_parallel_residual", "[false]"),
    MUST_BE("new_decoder_architecture", "[false]"),
    /* multipliers */
    MUST_BE("embedding_multiplier", "[1]"),
    MUST_BE("residual_multiplier", "[1]"),
    MUST_BE("logits_scaling", "[1]"),
    MUST_BE("logit_scale", "[1]"),
    MUST_BE("scale_emb", "[1]"),
    MUST_BE("scale_depth", NOTHING),
    MUST_BE("dim_model_base", NOTHING),
    MUST_BE("final_logit_softcapping", NOTHING),
    /* experts */
    MUST_BE("num_local_experts", NOTHING),
    MUST_BE("num_experts", NOTHING),
    MUST_BE("n_routed_experts", NOTHING),
    /* whose false is a value */
    {"is_causal", BL_KEY_REJECTED, "[true]", "attention is causal here"},
    {"use_bidirectional_attention", BL_KEY_REJECTED, "[false]", "attention is causal here"},
    MUST_BE("scale_attn_weights", "[true]"),
    MUST_BE("use_rope", "[true]"),
    MUST_BE("use_rms_norm", "[true]"),
    MUST_BE("gated_mlp", "[true]"),
    MUST_BE("position_embedding_type", "[\"rope\", \"rotary\"]"),
    /* of Phi-4-mini's own code; of Falcon's; of Granite's and OLMo's published files */
    MUST_BE("full_attn_mod", "[1]"),
    MUST_BE("interpolate_factor", "[1]"),
    {"lm_head_bias", BL_KEY_REJECTED, "[false]", "heads have no bias here"},
    MUST_BE("apply_residual_connection_post_layernorm", "[false]"),
    MUST_BE("normalization_function", "[\"rmsnorm\"]"),
    {"rotary_base", BL_KEY_REJECTED, NOTHING, "the key is rope_theta"},
    {"compression_config", BL_KEY_REJECTED, NULL, "the key is quantization_config"},
    /* Read for every model by config.c, store/ and tokenizer/. */
    {"model_type", BL_KEY_USED, NULL, NULL},
    {"architectures", BL_KEY_USED, NULL, NULL},
    {"quantization_config", BL_KEY_USED, NULL, NULL},
};

static const char no_effect[] =
    /* The tensors of next-token-prediction layers, where stored, are errors. */
    "multimodal_projector_bias num_nextn_predict_layers "
    /* PretrainedConfig of transformers 4 and 5: names, types, outputs. */
    "name_or_path transformers_version dtype torch_dtype attn_implementation use_cache "
    "return_dict return_dict_in_generate output_attentions output_hidden_states output_scores "
    "torchscript use_bfloat16 tf_legacy_loss pretraining_tp chunk_size_feed_forward "
    "initializer_range is_decoder tie_encoder_decoder cross_attention_hidden_size pad_token_id "
    "sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix problem_type "
    "task_specific_params finetuning_task id2label label2id num_labels max_window_layers "
    "model_max_length max_sequence_length original_max_position_embeddings num_experts_per_tok "
    "unsloth_version unsloth_fixed transformers.js_config "
    /* PretrainedConfig of transformers 4: defaults of generation. */
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id suppress_tokens "
    "begin_suppress_tokens "
    /* Of programs and their speed: the results are the same; is_llama_config of SmolLM2's files;
     * auto_map names code that model_type's replaces. */
    "auto_map use_flash_attn use_flash_attention use_flash_attention_2 attn_impl "
    "reorder_and_upcast_attn gradient_checkpointing is_llama_config "
    /* vLLM's, for texts beyond the trained length; transformers has none of it. */
    "dual_chunk_attention_config sparse_attention_config "
    /* Of experts, without which they act on nothing: the counts of experts are above. */
    "router_aux_loss_coef output_router_logits norm_topk_prob moe_intermediate_size "
    "decoder_sparse_step mlp_only_layers";

bool arch_reads(const bl_arch *arch, const char *key)
{
    const char *const *k = arch->keys;

    while (*k && strcmp(*k, key) != 0) k++;
    return *k != NULL;
}

/* ---- names that tell of the forward pass ---- */

/* "attn" is in "use_attn_x", whatever is around it; "cap" is a word: not in "capacity". */
static bool has_word(const char *key, const char *word)
{
    size_t n = strlen(word);

    for (const char *at = key; (at = strstr(at, word)); at++)
        if ((at == key || !isalpha((unsigned char)at[-1])) && !isalpha((unsigned char)at[n]))
            return true;
    return false;
}

/* Whether an unknown key's name says that it changes the forward pass. */
static bool is_of_forward_pass(const char *key)
{
    static const char *const parts[] = {
        "attn",   "attention",  "rotary",  "scale",  "scaling",    "multiplier", "bias",
        "norm",   "clip",       "softcap", "window", "expert",     "activation", "residual",
        "causal", "layer_type", "softmax", "logit",  "block_type", "interleave", "alibi",
        "sink",   "sliding",    "mamba",   "mixer",  "per_layer"};
    static const char *const words[] = {"rope", "nope", "moe",  "act",  "cap",    "qk",
                                        "kv",   "gate", "gelu", "relu", "swiglu", "router",
                                        "lora", "mlp",  "ssm",  "conv", "mup",    "mult"};
    static const char *const harmless_ends[] = {"_implementation", "dropout",    "pdrop",
                                                "_token_id",       "_token_ids", "_loss_coef"};

    if (strstr(key, "cache")) return false;
    for (size_t i = 0; i < BL_COUNT(harmless_ends); i++)
        if (bl_text_ends_with(key, harmless_ends[i])) return false;
    for (size_t i = 0; i < BL_COUNT(parts); i++)
        if (strstr(key, parts[i])) return true;
    for (size_t i = 0; i < BL_COUNT(words); i++)
        if (has_word(key, words[i])) return true;
    return false;
}

static bl_status check_keys(const bl_arch *arch, const char *file, const json_t *root)
{
    const bl_key_table table = {known_keys, BL_COUNT(known_keys), arch->keys, no_effect};
    /* A width of windows that is not used. */
    bool has_no_window = json_is_false(json_object_get(root, "use_sliding_window"));
    bl_key_names unknown = {0};
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)root, key, value)
    {
        if (has_no_window && !strcmp(key, "sliding_window")) continue;
        BL_TRY(bl_key_check(&table, file, key, value, is_of_forward_pass(key) ? NULL : &unknown));
    }
    if (unknown.n > 0)
        bl_log_warning("%s: ignored, as %s has no such keys: %s; if one of them changes the "
                       "model, results are wrong",
                       file, arch->title, unknown.text);
    return BL_OK;
}

/* Keys that the architecture lists and no reader reads: they act in other programs' training. */
static void warn_of_dropouts(const bl_arch *arch, const char *file, const json_t *root)
{
    static const char *const names[] = {"attention_dropout", "residual_dropout", "hidden_dropout",
                                        "resid_pdrop", "embd_pdrop"};

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        double value = json_number_value(json_object_get(root, names[i]));
        if (value > 0 && arch_reads(arch, names[i]))
            bl_log_warning("%s: %s %g is ignored: transformers applies it in training; Ballast "
                           "has lora_dropout only",
                           file, names[i], value);
    }
}

bl_status arch_check_keys(const bl_arch *arch, const char *file, const json_t *root)
{
    BL_TRY(check_keys(arch, file, root));
    warn_of_dropouts(arch, file, root);
    return BL_OK;
}
