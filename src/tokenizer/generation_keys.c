/* SPDX-License-Identifier: Apache-2.0 */
/* generation_keys.c -- the keys of generation_config.json: GenerationConfig of transformers 5.24,
 * and of 4. The ids of BOS and EOS are read (load_ids.c). Those that change the text which
 * transformers' generate writes act neither in training nor in `ballast generate`, whose options
 * choose: it names them. */
#include <stdlib.h>

#include "base/sizes.h"
#include "tokenizer/internal.h"

#define TEXT(name, neutral)                                                                        \
    {                                                                                              \
        name, BL_KEY_NAMED, neutral, NULL                                                          \
    }

/* Of the text; with the values that change nothing. */
static const bl_known_key text_keys[] = {
    TEXT("max_length", "[20]"),
    TEXT("max_new_tokens", NULL),
    TEXT("min_length", "[0]"),
    TEXT("min_new_tokens", "[0]"),
    TEXT("max_time", NULL),
    TEXT("stop_strings", NULL),
    TEXT("do_sample", NULL),
    TEXT("num_beams", "[1]"),
    TEXT("temperature", "[1]"),
    TEXT("top_k", "[0, 50]"),
    TEXT("top_p", "[1]"),
    TEXT("min_p", "[0]"),
    TEXT("top_h", NULL),
    TEXT("typical_p", "[1]"),
    TEXT("epsilon_cutoff", "[0]"),
    TEXT("eta_cutoff", "[0]"),
    TEXT("repetition_penalty", "[1]"),
    TEXT("encoder_repetition_penalty", "[1]"),
    TEXT("no_repeat_ngram_size", "[0]"),
    TEXT("encoder_no_repeat_ngram_size", "[0]"),
    TEXT("bad_words_ids", NULL),
    TEXT("force_words_ids", NULL),
    TEXT("constraints", NULL),
    TEXT("forced_bos_token_id", NULL),
    TEXT("forced_eos_token_id", NULL),
    TEXT("exponential_decay_length_penalty", NULL),
    TEXT("suppress_tokens", NULL),
    TEXT("begin_suppress_tokens", NULL),
    TEXT("sequence_bias", NULL),
    TEXT("token_healing", NULL),
    TEXT("guidance_scale", "[1]"),
    TEXT("watermarking_config", NULL),
    TEXT("num_return_sequences", "[1]"),
    TEXT("penalty_alpha", "[0]"),
    TEXT("dola_layers", NULL),
};

static const char no_effect[] =
    "transformers_version "
    /* of batches, and of models with an encoder */
    "pad_token_id decoder_start_token_id "
    /* of beams, without which they act on nothing: num_beams is above */
    "early_stopping length_penalty diversity_penalty num_beam_groups low_memory "
    /* of probabilities that are normalized and finite here */
    "renormalize_logits remove_invalid_values "
    /* values returned besides the text */
    "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate "
    /* of speed: the text is the same */
    "use_cache cache_implementation cache_config max_cache_len prefill_chunk_size "
    "compile_config disable_compile continuous_batching_config use_mtp speculation_type "
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold assistant_early_exit assistant_lookbehind "
    "assistant_ensemble_weight target_lookbehind prompt_lookup_num_tokens "
    "max_matching_ngram_size";

static const char FILE_NAME[] = "generation_config.json";

bl_status bl_generation_config_check(const char *path, const json_t *config)
{
    const char *used[BL_COUNT(text_keys) + 3] = {"bos_token_id", "eos_token_id"};
    bl_key_names unknown = {0};

    for (size_t i = 0; i < BL_COUNT(text_keys); i++) used[i + 2] = text_keys[i].name;
    const bl_key_table table = {.used = used, .accepted = no_effect};
    BL_TRY(bl_keys_check(&table, path, config, &unknown));
    bl_tokenizer_warn_unknown(path, &unknown);
    return BL_OK;
}

bl_status bl_generation_config_name(const char *folder, const char *const *chosen,
                                    bl_key_names *names)
{
    const bl_key_table table = {text_keys, BL_COUNT(text_keys), chosen, NULL};
    char *path = NULL;
    json_t *config = NULL;
    bl_status st = bl_tokenizer_load_beside(folder, FILE_NAME, &path, &config);

    for (size_t i = 0; i < BL_COUNT(text_keys) && st == BL_OK; i++) {
        const json_t *value = json_object_get(config, text_keys[i].name);
        if (value) st = bl_key_check(&table, path, text_keys[i].name, value, names);
    }
    json_decref(config);
    free(path);
    return st;
}
