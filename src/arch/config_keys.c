/* SPDX-License-Identifier: Apache-2.0 */
/* config_keys.c -- keys of config.json that change the forward pass of some model. One that the
 * architecture's reader does not read must have the value that changes nothing: a file that sets it
 * was written for another architecture, and its model_type was edited, or needs what Ballast
 * lacks. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "arch/config_internal.h"

/* The value, beside null, that changes nothing. */
typedef enum neutral {
    ONLY_NULL,
    IS_FALSE,
    IS_ZERO,
    IS_ONE,
    IS_SILU,
    IS_EMPTY,          /* {} or [] */
    IS_FULL_ATTENTION, /* a list of "full_attention" */
    ALL_ONES,          /* a list of 1 */
} neutral;

static const char *const expectations[] = {
    [ONLY_NULL] = "null",
    [IS_FALSE] = "false",
    [IS_ZERO] = "0",
    [IS_ONE] = "1",
    [IS_SILU] = "\"silu\"",
    [IS_EMPTY] = "nothing in it",
    [IS_FULL_ATTENTION] = "\"full_attention\" for every layer",
    [ALL_ONES] = "1 for every layer",
};

static const struct {
    const char *name;
    neutral neutral;
} changing[] = {
    /* attention: which positions, scales, norms */
    {"sliding_window", ONLY_NULL},
    {"use_sliding_window", IS_FALSE},
    {"attention_chunk_size", ONLY_NULL},
    {"layer_types", IS_FULL_ATTENTION},
    {"per_layer_config", IS_EMPTY},
    {"block_configs", IS_EMPTY},
    {"attention_multiplier", ONLY_NULL},
    {"query_pre_attn_scalar", ONLY_NULL},
    {"attn_logit_softcapping", ONLY_NULL},
    {"attention_dropout", IS_ZERO},
    {"qk_norm", IS_FALSE},
    {"use_qk_norm", IS_FALSE},
    {"qk_layernorm", IS_FALSE},
    {"clip_qkv", ONLY_NULL},
    {"attention_sink", IS_FALSE},
    {"add_cross_attention", IS_FALSE},
    {"is_encoder_decoder", IS_FALSE},
    {"pruned_heads", IS_EMPTY},
    /* positions */
    {"partial_rotary_factor", IS_ONE},
    {"rotary_pct", IS_ONE},
    {"rope_interleaved", IS_FALSE},
    {"no_rope_layers", ALL_ONES},
    {"no_rope_layer_interval", ONLY_NULL},
    {"alibi", IS_FALSE},
    {"llama_4_scaling_beta", IS_ZERO},
    /* biases, activation, order of the blocks */
    {"hidden_act", IS_SILU},
    {"hidden_activation", IS_SILU},
    {"attention_bias", IS_FALSE},
    {"attention_out_bias", IS_FALSE},
    {"mlp_bias", IS_FALSE},
    {"bias", IS_FALSE},
    {"use_bias", IS_FALSE},
    {"qkv_bias", IS_FALSE},
    {"parallel_attn", IS_FALSE},
    {"use_parallel_residual", IS_FALSE},
    {"new_decoder_architecture", IS_FALSE},
    /* multipliers */
    {"embedding_multiplier", IS_ONE},
    {"residual_multiplier", IS_ONE},
    {"logits_scaling", IS_ONE},
    {"logit_scale", IS_ONE},
    {"scale_emb", IS_ONE},
    {"scale_depth", ONLY_NULL},
    {"dim_model_base", ONLY_NULL},
    {"final_logit_softcapping", ONLY_NULL},
    /* experts */
    {"num_local_experts", ONLY_NULL},
    {"num_experts", ONLY_NULL},
    {"n_routed_experts", ONLY_NULL},
};

/* Read for every model by config.c and store/; written by transformers 4 and 5 for every model; or
 * read by other programs. */
static const char *const harmless[] = {
    "model_type", "architectures", "quantization_config",
    /* PretrainedConfig: names, types, outputs */
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "_experts_implementation", "_flash_attn_2_enabled", "use_cache", "return_dict",
    "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "pretraining_tp", "chunk_size_feed_forward",
    "initializer_range", "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size",
    "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class",
    "prefix", "problem_type", "task_specific_params", "finetuning_task", "id2label", "label2id",
    "num_labels", "max_window_layers", "model_max_length", "max_sequence_length",
    "original_max_position_embeddings", "num_experts_per_tok", "unsloth_version", "unsloth_fixed",
    "transformers.js_config",
    /* PretrainedConfig: defaults of generation */
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"};

static bool is_number(const json_t *value, double number)
{
    return json_is_number(value) && json_number_value(value) == number;
}

static bool is_text(const json_t *value, const char *text)
{
    const char *found = bl_json_text(value);
    return found && !strcmp(found, text);
}

static bool is_neutral(const json_t *value, neutral kind)
{
    size_t n_neutral = 0;

    switch (kind) {
    case ONLY_NULL:
        return json_is_null(value);
    case IS_FALSE:
        return json_is_null(value) || json_is_false(value);
    case IS_ZERO:
        return json_is_null(value) || is_number(value, 0);
    case IS_ONE:
        return json_is_null(value) || is_number(value, 1);
    case IS_SILU:
        return json_is_null(value) || is_text(value, "silu");
    case IS_EMPTY:
        return json_is_null(value) || ((json_is_array(value) || json_is_object(value)) &&
                                       json_array_size(value) + json_object_size(value) == 0);
    case IS_FULL_ATTENTION:
    case ALL_ONES:
        break;
    }
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *item = json_array_get(value, i);
        n_neutral += kind == ALL_ONES ? is_number(item, 1) : is_text(item, "full_attention");
    }
    return json_is_null(value) || (json_is_array(value) && n_neutral == json_array_size(value));
}

bool arch_reads(const bl_arch *arch, const char *key)
{
    const char *const *k = arch->keys;

    while (*k && strcmp(*k, key) != 0) k++;
    return *k != NULL;
}

static bl_status check_changing(const bl_arch *arch, const char *file, const json_t *root)
{
    /* A width of windows that is not used. */
    bool has_no_window = json_is_false(json_object_get(root, "use_sliding_window"));

    for (size_t i = 0; i < BL_COUNT(changing); i++) {
        const json_t *value = json_object_get(root, changing[i].name);
        if (!value || arch_reads(arch, changing[i].name) ||
            (has_no_window && !strcmp(changing[i].name, "sliding_window")))
            continue;
        if (!is_neutral(value, changing[i].neutral))
            return bl_json_fail(file, changing[i].name, expectations[changing[i].neutral], value);
    }
    return BL_OK;
}

static bool is_known(const bl_arch *arch, const char *key)
{
    if (arch_reads(arch, key)) return true;
    for (size_t i = 0; i < BL_COUNT(changing); i++)
        if (!strcmp(key, changing[i].name)) return true;
    for (size_t i = 0; i < BL_COUNT(harmless); i++)
        if (!strcmp(key, harmless[i])) return true;
    return false;
}

static void warn_of_unknown(const bl_arch *arch, const char *file, const json_t *root)
{
    char names[512] = "";
    const char *key;
    json_t *value;
    size_t used = 0;

    json_object_foreach((json_t *)root, key, value)
    {
        if (json_is_null(value) || is_known(arch, key) || used >= sizeof names) continue;
        used +=
            (size_t)snprintf(names + used, sizeof names - used, "%s%.64s", used ? ", " : "", key);
    }
    for (char *c = names; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    if (used > 0)
        bl_log_warning("%s: ignored, as %s has no such keys: %s; if one of them changes the "
                       "model, results are wrong",
                       file, arch->title, names);
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
    BL_TRY(check_changing(arch, file, root));
    warn_of_dropouts(arch, file, root);
    warn_of_unknown(arch, file, root);
    return BL_OK;
}
