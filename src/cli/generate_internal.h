/* SPDX-License-Identifier: Apache-2.0 */
/* generate_internal.h -- the parts of `ballast generate`: its options, an open model that continues
 * ids, the text of an answer while it grows, and a conversation. */
#ifndef BALLAST_CLI_GENERATE_INTERNAL_H
#define BALLAST_CLI_GENERATE_INTERNAL_H

#include "trained/peft.h"
#include "trained/terms.h"
#include "cli/generate_prompt_internal.h"
#include "config/config.h"
#include "model/generate.h"
#include "model/sample.h"
#include "options/options.h"

typedef struct bl_generate_options {
    char *model, *prompt, *prompt_file, *messages, *input_ids, *chat_template, *template_date,
        *stop;
    bl_string_list adapter; /* DIR or NAME=DIR */
    int64_t max_new_tokens, context, threads, seed, top_k;
    double temperature, top_p, min_p, repetition_penalty;
    bl_base_format base_format;
    bl_base_scales base_format_scales;
    bl_config_device device;
    bl_compute_dtype compute_dtype;
    bool chat, parse_special_tokens, json;
} bl_generate_options;

/* ---- generate_text.c ---- */

/* The texts that end an answer. */
typedef struct bl_stop_texts {
    char **text; /* [n], none is empty */
    size_t n;
} bl_stop_texts;

/* `value`: a text, or a list of them, ["a", "b"]; NULL: none. bl_stop_texts_free frees them.
 * BL_EUSAGE, BL_ENOMEM. */
bl_status bl_stop_texts_read(const char *value, bl_stop_texts *out);
void bl_stop_texts_free(bl_stop_texts *stops);

/* An answer as text, piece by piece: never a part of a character, nor the beginning of a stop text
 * that may yet be completed. All members but `stop` are the caller's to set once; `shown` is where
 * the first piece begins. */
typedef struct bl_answer_text {
    const bl_tokenizer *tokenizer;
    const bl_stop_texts *stops;
    size_t begin;     /* bytes of the decoded ids before the answer, where no stop text counts */
    size_t shown;     /* bytes of the decoded ids that pieces had */
    const char *stop; /* the text that ended it, whose bytes are in no piece; NULL: none so far */
} bl_answer_text;

/* The next piece of the text of ids[0..n): *piece is malloc'd, *n_bytes may be 0. is_last: nothing
 * is held back. After a stop text there are no pieces. BL_ENOMEM. */
bl_status bl_answer_text_next(bl_answer_text *answer, const int32_t *ids, size_t n, bool is_last,
                              char **piece, size_t *n_bytes);

/* ---- generate_session.c ---- */

typedef struct bl_named_adapter {
    char *name, *dir;
    bl_lora_layout lora;
    bl_tensor weights;
    bl_adapter_terms *terms; /* of the embedding and the head; NULL: none */
} bl_named_adapter;

/* The open objects while ids are continued. */
typedef struct bl_generate_session {
    const bl_generate_options *options;
    bl_stop_texts stops;
    bl_tokenizer *tokenizer; /* NULL: ids in and out */
    bl_model *model;
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    bl_model_weights *weights;
    bl_base *base;
    bl_named_adapter *adapters; /* [1 + n_adapters]: the first is the base alone */
    size_t n_adapters, adapter; /* the one in use */
    bl_generator *generator;    /* of that adapter */
    bl_token_sampler *sampler;
    int64_t capacity; /* tokens of prompt and answer */
    /* Prompt and answer: decoded together, so that spaces are those of one text. */
    bl_ids ids;
    size_t n_prompt; /* of them */
    bl_ids cached;   /* ids in the generator's cache */
    int32_t end;     /* token that ends an answer to messages; -1: none */
} bl_generate_session;

/* How an answer ended. */
typedef struct bl_generate_outcome {
    int32_t stop_id;  /* the end token that was chosen; -1: none */
    const char *stop; /* the stop text, borrowed from the session; NULL: none */
    double prompt_s, answer_s;
} bl_generate_outcome;

/* Opens the tokenizer and the stop texts; then, with session->ids or without, the model, for
 * `capacity` tokens; BL_OPTION_AUTO: 4096, or the model's positions where they are fewer.
 * bl_generate_session_close after either, failed or not. */
bl_status bl_generate_session_begin(const bl_generate_options *options, bl_generate_session *out);
bl_status bl_generate_session_open(bl_generate_session *session, int64_t capacity);
void bl_generate_session_close(bl_generate_session *session);

/* max_new_tokens, BL_OPTION_AUTO resolved. */
int64_t bl_generate_max_new_tokens(const bl_generate_options *options);

/* Uses an adapter from the next answer on. BL_EUSAGE: no adapter has that name. */
bl_status bl_generate_session_use(bl_generate_session *session, const char *name);

/* Continues session->ids, whose first n_prompt are a prompt, by at most `most` tokens, and prints
 * the text as it grows (of messages the answer, else the prompt first), or at the end, with --json,
 * an object. BL_EINPUT: an id that the model does not have. */
bl_status bl_generate_session_answer(bl_generate_session *session, int64_t most,
                                     bl_generate_outcome *outcome);

/* ---- generate_chat.c ---- */

/* Reads messages from stdin, a line each, until its end, and answers them. */
bl_status bl_generate_chat(bl_generate_session *session);

#endif
