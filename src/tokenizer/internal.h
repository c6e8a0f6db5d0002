/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- the parts of a tokenizer, lowest first. Each section is one file, named in its
 * title.
 *
 * A text goes through them in this order (encode):
 *   added tokens that match the raw text -> normalizer on each gap -> added tokens that match
 *   normalized text -> pre-tokenizer on each gap -> the model on each piece -> the post-processor's
 *   ids around it all. */
#ifndef BALLAST_TOKENIZER_INTERNAL_H
#define BALLAST_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <pthread.h>

#include "base/json.h"
#include "base/present.h"
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

/* ---- unicode_classes.c: classes of the reference's components, other than its regexes ---- */

typedef struct bl_unicode_class {
    const bl_unicode_range *range;
    size_t n;
} bl_unicode_class;

extern const bl_unicode_class bl_unicode_numeric, bl_unicode_punctuation, bl_unicode_accents;

/* Lower case that utf8proc does not have: code + offset of each in first..last. */
typedef struct bl_unicode_lowering {
    uint32_t first, last;
    int32_t offset;
} bl_unicode_lowering;

extern const bl_unicode_lowering bl_unicode_lowerings[];
extern const size_t bl_n_unicode_lowerings;

/* ---- regex.c ---- */

/* Translates a tokenizer.json regex (Oniguruma syntax) to PCRE2 and compiles it. BL_EINPUT: syntax
 * the two read differently. */
bl_status bl_regex_compile(const char *pattern, pcre2_code **out);

/* ---- vocab.c: strings by id, ids by string; merges by pair ---- */

enum {
    BL_VOCAB_MAX_IDS = 1 << 24, /* bounds the allocation for an id in a file; the largest known is
                                 * 2^18 */
    BL_TRIE_MAX_BYTES = 1024    /* of a token that is looked for at every place of a text */
};

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

/* ---- added.c: a trie of tokens; tokens that are found in the text before the model ---- */

typedef struct bl_trie_node {
    int32_t child, sibling; /* 0 = none: node 0 is the root and never a child */
    int32_t token;          /* index into added tokens, or an id; -1: no token ends here */
    unsigned char byte;
} bl_trie_node;

typedef struct bl_trie {
    bl_trie_node *node;
    size_t n, capacity;
    int32_t first[256]; /* the root's children by byte; 0: none */
} bl_trie;

bl_status
bl_trie_add(bl_trie *trie, const char *text, size_t n_bytes,
            int32_t token); /* the first of equal texts stays; n_bytes > 0; BL_EINPUT: over
                                       * BL_TRIE_MAX_BYTES */
/* The child of `node` (0: the root) for `byte`, or 0. */
int32_t bl_trie_child(const bl_trie *trie, int32_t node, unsigned char byte);
void bl_trie_free(bl_trie *trie);

/* ---- model.c, bpe.c, unigram.c: one piece of text to ids ---- */

typedef enum bl_model_kind { BL_MODEL_BPE, BL_MODEL_UNIGRAM } bl_model_kind;

typedef struct bl_model {
    bl_model_kind kind;
    bl_strings text;  /* the vocabulary as written, added tokens included */
    bool *is_special; /* by id, text.n_ids of them */
    int32_t unk;      /* -1: none */
    bool byte_fallback;
    int32_t byte_token[256]; /* <0xXX>; -1: none */

    /* BPE. Its own vocabulary, as encoding uses it: as written, or, byte_level, as raw bytes. */
    bl_strings piece;
    bl_merges merges;
    /* byte_level: the id of each single byte; else of each ASCII character; -1: none. */
    int32_t byte_symbol[256];
    char *prefix, *suffix; /* of a word's symbols after the first; of its last; NULL: none */
    bool byte_level, fuse_unk, ignore_merges;

    /* Unigram. */
    double *score; /* by id, n_scores of them */
    size_t n_scores;
    double unk_score;
    bl_trie trie; /* of all tokens; each node's token is its id */
} bl_model;

typedef struct bl_symbol {
    int32_t id, prev, next; /* id -1: merged into its left neighbor */
} bl_symbol;

typedef struct bl_candidate {
    uint32_t rank;
    int32_t position, id;
} bl_candidate;

/* The best path to a byte of the piece: its last token's id and first byte. next: set on the best
 * path of all, where the token that begins here ends. */
typedef struct bl_path_node {
    double score;
    int32_t start, id, next;
} bl_path_node;

enum { BL_CACHE_KEY_BYTES = 30, BL_CACHE_IDS = 7, BL_CACHE_SLOTS = 1 << 14 };

/* A piece met before and its ids; key_bytes 0 = empty. 64 bytes: one cache line a look-up. */
typedef struct bl_cached_piece {
    unsigned char n_key_bytes, n_ids;
    char key[BL_CACHE_KEY_BYTES];
    int32_t id[BL_CACHE_IDS + 1];
} bl_cached_piece;

typedef struct bl_model_scratch {
    bl_symbol *symbol;
    size_t symbol_capacity;
    bl_candidate *heap;
    size_t n_heap, heap_capacity;
    bl_path_node *path;
    size_t path_capacity;
    bl_bytes key;           /* a symbol with its prefix and suffix */
    bl_cached_piece *cache; /* BL_CACHE_SLOTS of them */
} bl_model_scratch;

/* flags: with BL_PARSE_SPECIAL, a Unigram model may find special tokens in the piece, as HF's. */
bl_status bl_model_encode_piece(const bl_model *model, bl_model_scratch *scratch, const char *text,
                                size_t n_bytes, unsigned flags, bl_ids *out);
void bl_model_scratch_free(bl_model_scratch *scratch);
void bl_model_free(bl_model *model);

bl_status bl_bpe_encode(const bl_model *model, bl_model_scratch *scratch, const char *text,
                        size_t n_bytes, bl_ids *out);
/* *met_special: the ids depend on whether special tokens are parsed. */
bl_status bl_unigram_encode(const bl_model *model, bl_model_scratch *scratch, const char *text,
                            size_t n_bytes, bool parse_special, bool *met_special, bl_ids *out);

typedef struct bl_added_token {
    int32_t id;
    bool special, single_word, lstrip, rstrip, normalized;
} bl_added_token;

typedef struct bl_added_match {
    size_t start, end; /* bytes, stripped whitespace included */
    const bl_added_token *token;
} bl_added_match;

/* The next token at or after *cursor that the rules let through; whitespace before `floor`, the end
 * of the last, is not its. False: no more, or the thread's deadline is over. */
bool bl_added_next(const bl_trie *trie, const bl_added_token *tokens, bool parse_special,
                   const char *text, size_t n_bytes, size_t *cursor, size_t floor,
                   bl_added_match *out);

/* ---- pattern.c: the pattern of a step ---- */

typedef enum bl_pattern_kind {
    BL_PATTERN_NONE, /* no match */
    BL_PATTERN_REGEX,
    BL_PATTERN_STRING,
    BL_PATTERN_CLASS, /* each character of a class */
    BL_PATTERN_WORDS  /* \w+|[^\w\s]+ */
} bl_pattern_kind;

typedef struct bl_pattern {
    bl_pattern_kind kind;
    pcre2_code *regex;
    char *string; /* malloc'd, NUL-terminated, not empty */
    bool (*is_member)(uint32_t code);
} bl_pattern;

typedef struct bl_match {
    size_t start, end;
} bl_match;

/* What the matching of regexes works with. Zero-initialize it; bl_matcher_free releases it. */
typedef struct bl_matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
    unsigned n_calls;
} bl_matcher;

void bl_matcher_free(bl_matcher *matcher);

/* The next match in text[from..n_bytes), never empty; start n_bytes: there is none. NULL where the
 * pattern is not a regex. Errors: BL_EINPUT (a regex that takes too many steps, the deadline),
 * BL_ENOMEM. */
bl_status bl_pattern_next(const bl_pattern *pattern, bl_matcher *matcher, const char *text,
                          size_t n_bytes, size_t from, bl_match *out);
/* Appends the text with each match replaced by `content`. */
bl_status bl_pattern_replace(const bl_pattern *pattern, bl_matcher *matcher, const char *content,
                             const char *text, size_t n_bytes, bl_bytes *out);
/* Whether it matches at the beginning of a text only: a regex with \A in front. */
bool bl_pattern_is_at_start(const bl_pattern *pattern);
void bl_pattern_free(bl_pattern *pattern);

/* ---- normalize.c ---- */

typedef enum bl_normalizer_kind {
    BL_NORM_PREPEND,
    BL_NORM_REPLACE,
    BL_NORM_UNICODE,
    BL_NORM_LOWERCASE,
    BL_NORM_STRIP,
    BL_NORM_STRIP_ACCENTS,
    BL_NORM_BYTE_LEVEL
} bl_normalizer_kind;

typedef struct bl_normalizer_step {
    bl_normalizer_kind kind;
    bl_pattern pattern;    /* replace */
    char *content;         /* replace, prepend; malloc'd, NUL-terminated */
    int utf8proc_options;  /* unicode form */
    bool at_start, at_end; /* strip */
} bl_normalizer_step;

/* ---- pretokenize.c ---- */

/* Before which pieces Metaspace puts its replacement: all, the one at the beginning of the text,
 * none. */
typedef enum bl_prepend_scheme {
    BL_PREPEND_ALWAYS,
    BL_PREPEND_FIRST,
    BL_PREPEND_NEVER
} bl_prepend_scheme;

/* What happens to matches, in HF's terms. */
typedef enum bl_split_behavior {
    BL_SPLIT_REMOVED,
    BL_SPLIT_ISOLATED,
    BL_SPLIT_MERGED_WITH_PREVIOUS,
    BL_SPLIT_MERGED_WITH_NEXT,
    BL_SPLIT_CONTIGUOUS
} bl_split_behavior;

typedef struct bl_split {
    bool add_prefix_space; /* " " before a piece that does not start with one, before the split */
    bl_pattern pattern;
    bl_split_behavior behavior;
    bool invert; /* text between the pattern's matches counts as the matches */
    /* ByteLevel; maps: its pieces become text in the byte alphabet (else the model takes bytes). */
    bool is_byte_level, maps;
    /* The character that replaces a space, malloc'd; NULL: this step is not Metaspace. */
    char *metaspace;
    bl_prepend_scheme scheme;
    bool at_metaspace; /* cut before each of them */
} bl_split;

enum { BL_MAX_STEPS = 16 };

typedef struct bl_steps {
    bl_normalizer_step normalizer[BL_MAX_STEPS];
    size_t n_normalizers;
    bl_split split[BL_MAX_STEPS];
    size_t n_splits;
} bl_steps;

/* What one call of encode works with; kept by the tokenizer between calls. */
typedef struct bl_encode_context {
    struct bl_encode_context *next;
    bl_model_scratch model;
    bl_bytes normalized[2];
    bl_bytes prefixed[BL_MAX_STEPS], mapped[BL_MAX_STEPS];
    bl_matcher match;
} bl_encode_context;

/* *text and *n_bytes become the normalized text's, in one of the buffers or as they were. */
bl_status bl_normalize(const bl_steps *steps, bool continuation, bl_bytes buffers[2],
                       bl_matcher *matcher, const char **text, size_t *n_bytes);
/* From `step` on; n_bytes > 0. flags: BL_CONTINUATION | BL_AFTER_TOKEN, of this piece, and
 * BL_PARSE_SPECIAL. */
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
    BL_DECODE_METASPACE,
    BL_DECODE_BPE
} bl_decoder_kind;

typedef struct bl_decoder_step {
    bl_decoder_kind kind;
    bl_pattern pattern;      /* replace; BPE: the suffix */
    char *content;           /* replace, strip, metaspace; malloc'd, NUL-terminated */
    int64_t n_start, n_stop; /* strip */
    bool drops_first;        /* metaspace: those of the first token become nothing */
} bl_decoder_step;

/* ---- the whole: load.c, encode.c ---- */

/* The idle contexts. Apart from bl_tokenizer, which stays const in use. */
typedef struct bl_context_pool {
    pthread_mutex_t mutex;
    bl_encode_context *idle;
} bl_context_pool;

struct bl_tokenizer {
    bl_model model;
    bl_steps steps;
    /* Set where a piece may be cut before each run of this string without changing any id; NULL:
     * never. See bl_tokenizer_find_cut. */
    const char *cut;
    bl_added_token *added;
    size_t n_added;
    /* By id: the normalized text of an added token that matches normalized text, which decoding
     * begins with; NULL: as written. The array is NULL where no token has one. */
    char **decoded;
    bl_trie raw_trie, normalized_trie;
    bl_ids prefix, suffix, eos;
    int32_t bos;
    json_t *named;                /* "eos_token" and other names to their texts */
    bl_named_template *templates; /* [n_templates] of chats */
    size_t n_templates;
    bool has_decoder;
    bl_decoder_step decoder[BL_MAX_STEPS];
    size_t n_decoders;
    bl_context_pool *pool;
};

/* ---- load_steps.c ---- */

bl_status bl_tokenizer_load_normalizer(const json_t *json, const char *type,
                                       bl_tokenizer *tokenizer);
bl_status bl_tokenizer_load_split(const json_t *json, const char *type, bl_tokenizer *tokenizer);
/* {"pattern":{"String":S}|{"Regex":R}} of `step`. */
bl_status bl_tokenizer_load_pattern(const json_t *step, const char *where, bl_pattern *out);
/* The string `key` of `step`; *out is malloc'd. */
bl_status bl_tokenizer_load_string(const json_t *step, const char *where, const char *key,
                                   char **out);
bl_status bl_tokenizer_load_character(const json_t *step, const char *where, const char *key,
                                      char **out); /* of one character */
#define BL_METASPACE_KEYS "type replacement str_rep add_prefix_space prepend_scheme split"
/* {"replacement":C,"prepend_scheme":P,"split":S}, for the pre-tokenizer and the decoder of that
 * name. */
bl_status bl_tokenizer_load_metaspace(const json_t *step, const char *where, char **replacement,
                                      bl_prepend_scheme *scheme, bool *split);
/* After all steps: rejects those whose results depend on offsets, which are not computed here. */
bl_status bl_tokenizer_check_steps(const bl_steps *steps);

/* ---- load_model.c, load_added.c, load_ids.c ---- */

/* Whether the model's vocabulary may be kept as raw bytes behind ByteLevel. */
bool bl_tokenizer_model_takes_bytes(const json_t *json);
bl_status bl_tokenizer_load_model(const json_t *json,
                                  bl_model *model); /* byte_level is set before */
bl_status bl_tokenizer_load_added(const json_t *list,
                                  bl_tokenizer *tokenizer); /* after model and normalizer */
void bl_tokenizer_find_cut(bl_tokenizer *tokenizer); /* after all else; sets tokenizer->cut */

/* The files next to tokenizer.json that declare tokens; NULL where there is none. */
typedef struct bl_side_files {
    json_t *config, *map, *added; /* tokenizer_config, special_tokens_map, added_tokens */
    char *config_path, *map_path, *added_path;
    const json_t *pad_token; /* of the root's padding; NULL: none */
    bool legacy;             /* no added_tokens_decoder: the other two files count */
} bl_side_files;

/* `root`: tokenizer.json, which *out refers to. Zero-initialized *out: bl_side_files_free releases
 * it, after a failure too. */
bl_status bl_side_files_load(const char *folder, const json_t *root, bl_side_files *out);
void bl_side_files_free(bl_side_files *side);
bl_status bl_tokenizer_load_special_ids(const char *folder, const bl_side_files *side,
                                        bl_tokenizer *tokenizer);
/* load_declared.c */
/* *out: the caller's, `list` (added_tokens) with the declared tokens that it lacks. Fills in
 * tokenizer->named. */
bl_status bl_tokenizer_declare(const bl_side_files *side, const json_t *list,
                               bl_tokenizer *tokenizer, json_t **out);
/* A token's text, of "text" or {"content": "text", ...}; NULL: neither. */
const char *bl_tokenizer_content(const json_t *value);
/* side_keys.c: after all else. One warning for unknown keys, and one for those that contradict what
 * is used. BL_EINPUT: a key that is not supported. */
bl_status bl_side_files_check(const bl_side_files *side, const bl_tokenizer *tokenizer);

/* The parsed file `name` of `folder`; NULL: there is none. *path is the caller's to free. */
bl_status bl_tokenizer_load_beside(const char *folder, const char *name, char **path, json_t **out);
void bl_tokenizer_warn_unknown(const char *file, const bl_key_names *unknown); /* if any */

/* ---- generation_keys.c ---- */

/* One warning for unknown keys of generation_config.json. */
bl_status bl_generation_config_check(const char *path, const json_t *config);

/* ---- load_templates.c ---- */

bl_status bl_tokenizer_read_template_files(const char *folder, bl_tokenizer *tokenizer);
/* Those of `config`, tokenizer_config.json, where no file had one. BL_EINPUT, BL_ENOMEM. */
bl_status bl_tokenizer_read_templates(const char *file, const json_t *config,
                                      bl_tokenizer *tokenizer);
void bl_tokenizer_free_templates(bl_tokenizer *tokenizer);

/* Rejects a key of `object` with a value that is not among `keys`, words with blanks between
 * them. */
bl_status bl_tokenizer_check_keys(const json_t *object, const char *where, const char *keys);

#endif
