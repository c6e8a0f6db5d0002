/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.h -- text to token ids and back, with the same ids as Hugging Face's `tokenizers` for
 * the same tokenizer.json.
 *
 * Source: huggingface/tokenizers (models/, tokenizer/, normalizers/, pre_tokenizers/, processors/,
 * decoders/). docs/formats.md lists the components that are read. Others are rejected by name:
 * wrong ids are worse than none. `truncation` and `padding` are call-time settings, which
 * transformers sets again at each call; of them, only padding's pad_token is read.
 *
 * A loaded tokenizer never changes: any number of threads may use it at once. All texts are UTF-8,
 * lengths are in bytes. */
#ifndef BALLAST_TOKENIZER_TOKENIZER_H
#define BALLAST_TOKENIZER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/present.h"
#include "base/status.h"

typedef struct bl_tokenizer bl_tokenizer;

/* A growable list of token ids. Zero-initialize it before first use; bl_ids_free releases it and
 * makes it empty again. */
typedef struct bl_ids {
    int32_t *id;
    size_t n, capacity;
} bl_ids;

enum {
    /* put the post-processor's ids (BOS, for some models EOS) around the text */
    BL_ADD_SPECIAL = 1,
    /* a special token spelled out in the text becomes that token (the default of HF's encode);
     * without it, it is plain text (HF: encode_special_tokens = True), as user data must be */
    BL_PARSE_SPECIAL = 2,
    /* the text goes on where another ended: no leading-space marker is put before it, so that
     * decoding both id lists in a row gives both texts in a row */
    BL_CONTINUATION = 4,
    BL_AFTER_TOKEN = 8 /* a special token precedes: this is not the beginning of a text, for HF's
                            Metaspace with prepend_scheme "first" */
};

/* Reads `path`, a tokenizer.json or a directory that has one; tokenizer_config.json,
 * generation_config.json and config.json next to it, where they exist, name BOS and EOS. *out is
 * the caller's, freed by bl_tokenizer_destroy. Errors: BL_EINPUT (file, component and reason),
 * BL_EIO, BL_ENOMEM. */
bl_status bl_tokenizer_load(const char *path, bl_tokenizer **out);
/* Adds to *names the keys of the directory's generation_config.json that change what transformers'
 * generate writes, with values that are not neutral; chosen: keys that are left out,
 * NULL-terminated. Without the file: none. BL_EINPUT, BL_EIO, BL_ENOMEM. */
bl_status bl_generation_config_name(const char *folder, const char *const *chosen,
                                    bl_key_names *names);
/* NULL is fine; no call on it may be in progress. */
void bl_tokenizer_destroy(bl_tokenizer *tokenizer);

/* Appends the ids of text[0..n_bytes) to *out. flags: BL_ADD_SPECIAL | BL_PARSE_SPECIAL |
 *   BL_CONTINUATION |
 * BL_AFTER_TOKEN. Errors: BL_EINPUT (not UTF-8, over 256 MiB), BL_ENOMEM; *out then holds what it
 * held before. */
bl_status bl_tokenizer_encode(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes,
                              unsigned flags, bl_ids *out);

/* The text of ids[0..n): *out is malloc'd, NUL-terminated UTF-8 of *n_bytes bytes (n_bytes may be
 * NULL), the caller's. Bytes that form no UTF-8 become U+FFFD, ids without a token give nothing,
 * both as in HF. skip_special leaves out special tokens. Errors: BL_ENOMEM. */
bl_status bl_tokenizer_decode(const bl_tokenizer *tokenizer, const int32_t *ids, size_t n,
                              bool skip_special, char **out, size_t *n_bytes);

/* How many of the ids have a text that ids after them do not change: all, except a run of byte
 * tokens at the end, which decode together. Special tokens count as skipped. */
size_t bl_tokenizer_settled(const bl_tokenizer *tokenizer, const int32_t *ids, size_t n);
int32_t bl_tokenizer_token_to_id(const bl_tokenizer *tokenizer,
                                 const char *token); /* -1: no such token */
const char *bl_tokenizer_id_to_token(const bl_tokenizer *tokenizer,
                                     int32_t id); /* NULL: none; borrowed */
bool bl_tokenizer_is_special(const bl_tokenizer *tokenizer, int32_t id);
int32_t bl_tokenizer_vocab_size(const bl_tokenizer *tokenizer); /* the largest id + 1 */

/* BOS: tokenizer_config.json's, else generation_config.json's or config.json's, else a lone id that
 * the post-processor puts first; -1 where none is known. */
int32_t bl_tokenizer_bos(const bl_tokenizer *tokenizer);

/* {"bos_token": text, ...}: the tokens that tokenizer_config.json or special_tokens_map.json name,
 * as chat templates read them. Borrowed from the tokenizer; never NULL. */
const json_t *bl_tokenizer_named_tokens(const bl_tokenizer *tokenizer);

/* All ids that end a text; the tokenizer's own eos_token first (the one to train with), then the
 * further ones of generation_config.json or, without that file, config.json. *n may be 0. Borrowed
 * from the tokenizer. */
const int32_t *bl_tokenizer_eos(const bl_tokenizer *tokenizer, size_t *n);

/* The ids that BL_ADD_SPECIAL puts before and after a text. Borrowed from the tokenizer. */
const int32_t *bl_tokenizer_prefix(const bl_tokenizer *tokenizer, size_t *n);
const int32_t *bl_tokenizer_suffix(const bl_tokenizer *tokenizer, size_t *n);

#define BL_TOKENIZER_TEMPLATE_FILE    "chat_template.jinja"
#define BL_TOKENIZER_TEMPLATE_FOLDER  "additional_chat_templates"
#define BL_TOKENIZER_DEFAULT_TEMPLATE "default"

typedef struct bl_named_template {
    char *name, *text;
} bl_named_template;

/* The model's chat templates, jinja texts. Files next to the tokenizer: chat_template.jinja is
 * "default", additional_chat_templates/NAME.jinja is NAME. Where there is none of them,
 * tokenizer_config.json's chat_template: a text, which is "default", or a list of named ones.
 * Borrowed from the tokenizer; NULL: none of that name. */
const bl_named_template *bl_tokenizer_chat_templates(const bl_tokenizer *tokenizer, size_t *n);
const char *bl_tokenizer_chat_template(const bl_tokenizer *tokenizer, const char *name);

/* A special token in text[0..n_bytes): bytes [start, end), whitespace that it strips included. */
typedef struct bl_special_match {
    size_t start, end;
    int32_t id;
} bl_special_match;

/* The next special token at or after *cursor, which is moved behind it; whitespace before `floor`,
 * the end of the last, is not its. False: there is none. */
bool bl_tokenizer_next_special(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes,
                               size_t *cursor, size_t floor, bl_special_match *out);

bl_status bl_ids_reserve(bl_ids *ids, size_t n_more); /* room for n_more further ids; BL_ENOMEM */
bl_status bl_ids_push(bl_ids *ids, int32_t id);
void bl_ids_free(bl_ids *ids);

#endif
