/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- the parts of a tokenizer, lowest first. Each section is one file, named in its
 * title.
 *
 * A text goes through them in this order (encode):
 *   added tokens that match the raw text -> normalizer on each gap -> added tokens that match
 *   normalized text -> pre-tokenizer on each gap -> BPE on each piece -> the post-processor's ids
 *   around it all. */
#ifndef BALLAST_TOKENIZER_INTERNAL_H
#define BALLAST_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <pthread.h>

#include "base/json.h"
#include "tokenizer/text.h"
#include "tokenizer/tokenizer.h"

/* ---- unicode_additions.c: tables, sorted by code point ---- */

typedef struct bl_unicode_range {
    uint32_t first, last;
} bl_unicode_range;

/* What a general category has in the reference's Unicode version and lacks in PCRE2's and
 * utf8proc's. */
typedef struct bl_unicode_addition {
    const char *category; /* two letters */
    const bl_unicode_range *added;
    size_t n_added;
    const bl_unicode_range *all; /* the whole category where it also lost characters, else NULL */
    size_t n_all;
} bl_unicode_addition;

extern const bl_unicode_addition bl_unicode_additions[];
extern const size_t bl_n_unicode_additions;
extern const bl_unicode_range *const bl_unicode_unnormalized;
extern const size_t bl_n_unicode_unnormalized;

/* ---- regex.c ---- */

/* Translates a tokenizer.json regex (Oniguruma syntax) to PCRE2 and compiles it. BL_EINPUT: syntax
 * the two read differently. */
bl_status bl_regex_compile(const char *pattern, pcre2_code **out);

/* ---- vocab.c: strings by id, ids by string; merges by pair ---- */

enum {
    BL_VOCAB_MAX_IDS = 1 << 24
}; /* bounds what an id in a file can make us allocate; the largest known is 2^18 */

typedef struct bl_strings {
    bl_bytes text;    /* all strings, each with a NUL after it */
    uint32_t *offset; /* by id, into text */
    int32_t *n_bytes; /* by id; -1: no such id */
    size_t n_ids;     /* length of both */
    uint32_t *slot;   /* open addressing: id + 1, 0 = empty */
    size_t n_slots;   /* a power of two, at least twice n_used */
    size_t n_used;
} bl_strings;

bl_status bl_strings_set(bl_strings *strings, int32_t id, const char *text,
                         size_t n_bytes); /* id and text are new */
int32_t bl_strings_find(const bl_strings *strings, const char *text, size_t n_bytes); /* -1: none */
const char *bl_strings_get(const bl_strings *strings, int32_t id, size_t *n_bytes); /* NULL: none */
void bl_strings_free(bl_strings *strings);

typedef struct bl_merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX = empty slot */
    uint32_t rank;
    int32_t id; /* of the merged token */
} bl_merge;

typedef struct bl_merges {
    bl_merge *slot;
    size_t n_slots;
} bl_merges;

bl_status bl_merges_create(bl_merges *merges, size_t n);
void bl_merges_set(bl_merges *merges, int32_t left, int32_t right, uint32_t rank,
                   int32_t id); /* the last one wins, as in HF */
const bl_merge *bl_merges_find(const bl_merges *merges, int32_t left,
                               int32_t right); /* NULL: none */
void bl_merges_free(bl_merges *merges);

/* ---- bpe.c: one piece of text to ids ---- */

typedef struct bl_bpe {
    bl_strings text; /* the vocabulary as written, added tokens included */
    /* The model's own vocabulary, as encoding meets it: as written, or, byte_level, as raw
     * bytes. */
    bl_strings piece;
    bl_merges merges;
    /* byte_level: the id of each single byte; else of each ASCII character; -1: none. */
    int32_t byte_symbol[256];
    int32_t byte_token[256]; /* <0xXX>; -1: none */
    bool *is_special;        /* by id, text.n_ids of them */
    int32_t unk;             /* -1: none */
    bool byte_level, fuse_unk, byte_fallback, ignore_merges;
} bl_bpe;

typedef struct bl_symbol {
    int32_t id, prev, next; /* id -1: merged into its left neighbor */
} bl_symbol;

typedef struct bl_candidate {
    uint32_t rank;
    int32_t position, id;
} bl_candidate;

enum { BL_CACHE_KEY_BYTES = 30, BL_CACHE_IDS = 7, BL_CACHE_SLOTS = 1 << 14 };

/* A piece met before and its ids; key_bytes 0 = empty. 64 bytes: one cache line a look-up. */
typedef struct bl_cached_piece {
    unsigned char n_key_bytes, n_ids;
    char key[BL_CACHE_KEY_BYTES];
    int32_t id[BL_CACHE_IDS + 1];
} bl_cached_piece;

typedef struct bl_bpe_scratch {
    bl_symbol *symbol;
    size_t symbol_capacity;
    bl_candidate *heap;
    size_t n_heap, heap_capacity;
    bl_cached_piece *cache; /* BL_CACHE_SLOTS of them */
} bl_bpe_scratch;

bl_status bl_bpe_encode_piece(const bl_bpe *bpe, bl_bpe_scratch *scratch, const char *text,
                              size_t n_bytes, bl_ids *out);
void bl_bpe_free(bl_bpe *bpe);

/* ---- added.c: tokens that are found in the text before BPE ---- */

typedef struct bl_added_token {
    int32_t id;
    bool special, single_word, lstrip, rstrip, normalized;
} bl_added_token;

typedef struct bl_trie_node {
    int32_t child, sibling; /* 0 = none: node 0 is the root and no one's child */
    int32_t token;          /* index into added tokens; -1: no token ends here */
    unsigned char byte;
} bl_trie_node;

typedef struct bl_trie {
    bl_trie_node *node;
    size_t n, capacity;
    bool starts[256]; /* bytes that some token begins with */
} bl_trie;

typedef struct bl_added_match {
    size_t start, end; /* bytes, stripped whitespace included */
    const bl_added_token *token;
} bl_added_match;

bl_status bl_trie_add(bl_trie *trie, const char *text, size_t n_bytes,
                      int32_t token); /* the first of equal texts stays */
/* The next token at or after *cursor that the rules let through; whitespace before `floor`, the end
 * of the last, is not its. False: no more. */
bool bl_trie_next(const bl_trie *trie, const bl_added_token *tokens, bool parse_special,
                  const char *text, size_t n_bytes, size_t *cursor, size_t floor,
                  bl_added_match *out);
void bl_trie_free(bl_trie *trie);

/* ---- pretokenize.c: normalizer steps and pre-tokenizer steps ---- */

typedef enum bl_normalizer_kind {
    BL_NORM_PREPEND,
    BL_NORM_REPLACE,
    BL_NORM_UNICODE
} bl_normalizer_kind;

typedef struct bl_normalizer_step {
    bl_normalizer_kind kind;
    char *pattern, *content; /* replace: both; prepend: content; malloc'd, NUL-terminated */
    int utf8proc_options;    /* unicode form */
} bl_normalizer_step;

/* Before which pieces Metaspace puts its replacement: all, the one at the beginning of the text,
 * none. */
typedef enum bl_prepend_scheme {
    BL_PREPEND_ALWAYS,
    BL_PREPEND_FIRST,
    BL_PREPEND_NEVER
} bl_prepend_scheme;

typedef struct bl_split {
    bool add_prefix_space; /* " " before a piece that does not start with one, before the split */
    pcre2_code *regex;     /* NULL: no split */
    /* What stands for a space, one character, malloc'd; NULL: this step is no Metaspace. */
    char *metaspace;
    bl_prepend_scheme scheme;
    bool at_metaspace; /* cut before each of them */
} bl_split;

enum { BL_MAX_STEPS = 8 };

typedef struct bl_steps {
    bl_normalizer_step normalizer[BL_MAX_STEPS];
    size_t n_normalizers;
    bl_split split[BL_MAX_STEPS];
    size_t n_splits;
} bl_steps;

/* What one call of encode works with; kept by the tokenizer between calls. */
typedef struct bl_encode_context {
    struct bl_encode_context *next;
    bl_bpe_scratch bpe;
    bl_bytes normalized[2];
    bl_bytes prefixed[BL_MAX_STEPS];
    pcre2_match_data *match[BL_MAX_STEPS];
} bl_encode_context;

bl_status bl_normalize(const bl_steps *steps, bool continuation, bl_bytes buffers[2],
                       const char **text, size_t *n_bytes);
/* From `step` on. flags: BL_CONTINUATION | BL_AFTER_TOKEN, of this piece. */
bl_status bl_pretokenize(const bl_tokenizer *tokenizer, bl_encode_context *context, size_t step,
                         unsigned flags, const char *text, size_t n_bytes, bl_ids *out);
void bl_steps_free(bl_steps *steps);

/* ---- decode.c ---- */

typedef enum bl_decoder_kind {
    BL_DECODE_BYTE_LEVEL,
    BL_DECODE_REPLACE,
    BL_DECODE_BYTE_FALLBACK,
    BL_DECODE_FUSE,
    BL_DECODE_STRIP,
    BL_DECODE_METASPACE
} bl_decoder_kind;

typedef struct bl_decoder_step {
    bl_decoder_kind kind;
    char *pattern,
        *content; /* replace: both; strip, metaspace: content; malloc'd, NUL-terminated */
    int64_t n_start, n_stop; /* strip */
    bool drops_first;        /* metaspace: those of the first token stand for nothing */
} bl_decoder_step;

/* ---- the whole: load.c, load_model.c, encode.c ---- */

/* The idle contexts. Apart from bl_tokenizer, which stays const in use. */
typedef struct bl_context_pool {
    pthread_mutex_t mutex;
    bl_encode_context *idle;
} bl_context_pool;

struct bl_tokenizer {
    bl_bpe bpe;
    bl_steps steps;
    /* Set where a piece may be cut before each run of this string without changing any id; NULL:
     * never. See bl_tokenizer_find_cut. */
    const char *cut;
    bl_added_token *added;
    size_t n_added;
    bl_trie raw_trie, normalized_trie;
    bl_ids prefix, suffix, eos;
    int32_t bos;
    char *chat_template; /* NULL: none */
    bool has_decoder;
    bl_decoder_step decoder[BL_MAX_STEPS];
    size_t n_decoders;
    bl_context_pool *pool;
};

bl_status bl_tokenizer_load_model(const json_t *model, bl_bpe *bpe); /* byte_level is set before */
bl_status bl_tokenizer_load_added(const json_t *list,
                                  bl_tokenizer *tokenizer); /* after model and normalizer */
void bl_tokenizer_find_cut(bl_tokenizer *tokenizer); /* after all else; sets tokenizer->cut */
bl_status bl_tokenizer_load_special_ids(const char *folder, bl_tokenizer *tokenizer);

/* Refuses a key of `object` that is not in the NULL-terminated list: what is not understood must
 * not be ignored. */
bl_status bl_tokenizer_check_keys(const json_t *object, const char *where,
                                  const char *const *known);

#endif
