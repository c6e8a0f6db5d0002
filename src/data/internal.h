/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- rows as bytes (rows.c), one row to a sample (sample.c), all samples of a file
 * (scan.c, samples.c), rows packed of them (pack.c); dataset.c is the interface over both. */
#ifndef BALLAST_DATA_INTERNAL_H
#define BALLAST_DATA_INTERNAL_H

#include <xxhash.h>

#include "base/json.h"
#include "base/present.h"
#include "chat/template.h"
#include "data/dataset.h"
#include "data/source_internal.h"
#include "tokenizer/text.h" /* bl_bytes */

enum {
    BL_MAX_ROW_BYTES = 1 << 28, /* the tokenizer's limit */
    BL_PLACE_BYTES = 512        /* "path:line" of errors */
};

/* ---- rows.c ---- */

typedef struct bl_row {
    const char *text; /* borrowed from the reader until its next call */
    size_t n_bytes;
    int64_t offset_bytes;
    int64_t line, column; /* of the first byte, from 1; column in characters */
    int64_t element;      /* of an array, from 1; 0: the file is none */
} bl_row;

/* Reads rows in file order through one buffer that grows to the longest row. */
typedef struct bl_row_reader {
    const char *path;
    bl_source *source;
    char *buffer;
    size_t n, capacity, at; /* bytes held, room for them, the next to look at */
    int64_t base_bytes;     /* offset of buffer[0] in the decompressed file */
    int64_t line, column;   /* of buffer[at] */
    bool at_end, is_array, array_ended;
    int64_t n_elements; /* of the array, that have begun */
    XXH3_state_t *hash; /* of all bytes read, decompressed */
    char separator;     /* of CSV; '\0': JSON */
    char **column_name; /* CSV: [n_columns], the inside of JSON strings */
    size_t n_columns;
    bl_bytes record; /* CSV: the row in use */
} bl_row_reader;

bl_status bl_row_reader_open(const char *path, bl_row_reader *reader);
bl_status bl_row_reader_next(bl_row_reader *reader, bl_row *row); /* row->text NULL: the end */
void bl_row_reader_close(bl_row_reader *reader);                  /* also after a failed open */
/* Whether rows can be read again at their offsets in the file. */
bool bl_row_reader_is_direct(const bl_row_reader *reader);
/* The byte at reader->at, or -1 at the end; keeps the bytes from *keep on, which moves with the
 * buffer. */
bl_status bl_row_reader_peek(bl_row_reader *reader, size_t *keep, int *byte);
void bl_row_reader_advance(bl_row_reader *reader, int byte);

/* ---- csv.c ---- */

bl_status bl_csv_begin(bl_row_reader *reader); /* reads the header */
bl_status bl_csv_next(bl_row_reader *reader, bl_row *row);

/* XXH3-64 of the row's bytes. */
uint64_t bl_row_hash(const bl_row *row);

/* The line that a byte of the file is in; reads all before it. */
bl_status bl_row_find_line(const char *path, int fd, int64_t offset_bytes, int64_t *line);

/* ---- shape.c ---- */

/* Keys of rows, and the formats that use them. */
typedef struct bl_row_shape {
    const char *first, *second; /* keys that a row has; second NULL: one key */
    const char *input;          /* an optional key: the instruction's input */
    bl_data_format format;      /* of data_format auto */
    unsigned formats;           /* all that can use it, one bit each */
} bl_row_shape;

/* The first shape that the row has and the format can use; NULL: none. */
const bl_row_shape *bl_row_shape_find(const json_t *row, bl_data_format format,
                                      const char *text_key);
/* The format that auto gives: the shape's, or messages where prompt and completion are lists. */
bl_data_format bl_row_shape_format(const bl_row_shape *shape, const json_t *row);
/* A shape of that format: its own one. */
const bl_row_shape *bl_row_shape_of(bl_data_format format);
/* For other processes; -1 is NULL. */
int64_t bl_row_shape_index(const bl_row_shape *shape);
const bl_row_shape *bl_row_shape_at(int64_t index);
enum { BL_SHAPE_KEYS_MAX = 64 };
/* Fills names with the keys of the format's shapes, of auto those of all, and `text` with their
 * list, for an error. Returns the number of names. */
size_t bl_row_shape_keys(bl_data_format format, const char *text_key,
                         const char *names[BL_SHAPE_KEYS_MAX], char *text, size_t n_bytes);
/* BL_EINPUT: a row of another shape. NULL, and a row without any shape, pass. */
bl_status bl_row_shape_check(const char *place, const bl_row_shape *shape, const json_t *row,
                             const char *text_key);

/* ---- sample.c ---- */

typedef struct bl_sample_rules {
    bl_dataset_options options; /* format and vocab_size resolved; path not used */
    const bl_tokenizer *tokenizer;
    bl_chat_template *chat;    /* messages and sharegpt; owned by the data set */
    const bl_row_shape *shape; /* of the first row that has one; NULL: none seen yet */
    char *text_key;            /* owned by the data set */
    /* Format of a row, of preferences that of its sides: tokens, prompt_completion or messages. */
    bl_data_format side;
    bl_key_names
        *unused; /* gets the row's keys that are not read; NULL: they were checked before */
} bl_sample_rules;

/* The rows' shape, or the format's own one. */
const bl_row_shape *bl_sample_rules_shape(const bl_sample_rules *rules);

/* BL_ROW_TOO_LONG: left out by the policy skip. BL_ROW_CUT_AWAY: left out, since no trainable label
 * is within max_seq_length. */
typedef enum bl_row_verdict { BL_ROW_USED, BL_ROW_TOO_LONG, BL_ROW_CUT_AWAY } bl_row_verdict;

/* Sets the rules' shape, and a format that is auto, by a row. BL_EINPUT: the row cannot be read, or
 * has no shape that the format can use. */
bl_status bl_row_settle(const char *path, const bl_row *row, bl_sample_rules *rules);

/* Builds the row's sample. unused: NULL, or gets the names of keys that are not read. *n_lost gets
 * the tokens beyond max_seq_length, of a row that is left out all of them; *out is empty then. */
bl_status bl_sample_build(const bl_sample_rules *rules, const char *path, const bl_row *row,
                          bl_key_names *unused, bl_sample *out, bl_row_verdict *verdict,
                          int64_t *n_lost);
/* A sample of one document by rules->options.format, before max_seq_length. */
bl_status bl_sample_build_object(const bl_sample_rules *rules, const char *place, const json_t *row,
                                 bl_sample *out);
/* Labels that carry loss after the shift. */
int64_t bl_sample_count_labels(const bl_sample *sample);

/* ---- preference.c ---- */

bool bl_data_format_is_preference(bl_data_format format);
/* The format of the sides of a preference row. BL_EINPUT: it has none. */
bl_status bl_preference_settle(const char *place, const json_t *row, bl_data_format format,
                               bl_data_format *side);
/* As bl_sample_build, of preference and unpaired_preference. BL_ROW_CUT_AWAY: a prompt alone fills
 * max_seq_length. */
bl_status bl_preference_build(const bl_sample_rules *rules, const char *place, const json_t *row,
                              bl_sample *out, bl_row_verdict *verdict, int64_t *n_lost);

/* The key that has the prompt of a row of preferences, and an optional one for its second line. */
typedef struct bl_prompt_keys {
    const char *key, *input;
} bl_prompt_keys;
const bl_prompt_keys *bl_preference_prompt_keys(const json_t *row); /* NULL: there is none */

/* ---- keys.c ---- */

/* Rejects a row with a key that changes what is learned and that its format does not read:
 * BL_EINPUT "place: key K: ...". Adds other keys that are not read to rules->unused. Null, false
 * and empty values are fine. */
bl_status bl_row_check_keys(const bl_sample_rules *rules, const char *place, const json_t *row);
/* As above for a message. has_loss: its role carries loss; *is_masked (may be NULL) becomes true
 * where a key masks it. */
bl_status bl_message_check_keys(const char *place, const bl_chat_template *chat,
                                const json_t *message, bool has_loss, bool *is_masked,
                                bl_key_names *unused);

/* ---- layout.c ---- */

/* BL_EINPUT: the object is a whole table. */
bl_status bl_row_check_layout(const char *place, const json_t *row);
/* BL_EINPUT, with the row's keys and the nearest known one: no shape of the format fits. */
bl_status bl_row_fail_unknown(const char *place, bl_data_format format, const char *text_key,
                              const json_t *row);
/* BL_EINPUT: the row lacks `key`. */
bl_status bl_row_fail_missing(const char *place, const char *key, const json_t *row);
/* BL_EINPUT: the text is a list of messages in the notation of JSON or Python. */
bl_status bl_row_check_text(const char *place, const char *what, const char *text);

/* ---- chat.c ---- */

/* Appends the ids and labels of a row of messages or sharegpt; `place` goes before errors. */
bl_status bl_chat_row_encode(const bl_sample_rules *rules, const char *place, const json_t *row,
                             bl_ids *ids, bl_ids *labels);

/* ---- scan.c ---- */

/* A usable row. 24 bytes: 10 million rows are 240 MB. */
typedef struct bl_row_entry {
    int64_t offset_bytes;
    uint64_t hash; /* bl_row_hash of its bytes when they were scanned */
    uint32_t n_bytes;
    int32_t n_tokens;
} bl_row_entry;

/* Memory of an index: from malloc, or a piece of the host's. */
typedef struct bl_index_memory {
    void *bytes; /* NULL: none */
    size_t n_bytes;
    bool is_piece;
} bl_index_memory;

typedef struct bl_data_file {
    char *path;
    int fd;       /* read with pread only: any number of threads */
    bool is_copy; /* fd is a copy of its rows */
    double share; /* how often each of its rows is used */
    size_t first; /* of its samples */
} bl_data_file;

/* The samples of a data set. */
typedef struct bl_samples {
    int n_references; /* of the data sets that are made of it */
    char *path;       /* the first one given, which names them in logs */
    bl_data_file *file;
    size_t n_files;
    bl_sample_rules rules;
    bl_host_memory *host;  /* borrowed; NULL: not shared */
    bl_index_memory index; /* of `entry` */
    bl_row_entry *entry;
    size_t n, capacity;
    bool has_documents; /* some sample has document_ids; of a rank that has read the file */
    bl_dataset_stats stats;
    uint64_t fingerprint;
} bl_samples;

/* Reads all files once; fills in the rest. */
bl_status bl_samples_scan(bl_samples *samples);
/* The rules' template, of messages and sharegpt. */
bl_status bl_sample_rules_load_chat(const char *path, bl_sample_rules *rules);

/* ---- files.c ---- */

/* The files behind the options' paths; closed and freed by bl_data_files_free. */
bl_status bl_data_files_list(bl_samples *samples, const bl_dataset_options *options);
void bl_data_files_free(bl_samples *samples);
/* Gives the other processes of the host the first one's files. */
bl_status bl_data_files_share(bl_samples *samples);
/* The file of a sample. */
const bl_data_file *bl_data_file_of(const bl_samples *samples, size_t index);
/* How often a row of the file is used: every 1/share-th row, or share times. */
size_t bl_data_file_times(const bl_data_file *file, size_t row);
/* ',' for .csv, a tab for .tsv, also before .gz and .zst; else '\0'. */
char bl_data_separator(const char *path);

/* Rows on their way into a copy. */
typedef struct bl_row_spool {
    const bl_data_file *file; /* NULL: none is made */
    bl_bytes text;
    int64_t n_written;
} bl_row_spool;

bl_status bl_row_spool_create(bl_data_file *file);
/* row->offset_bytes becomes its place in the copy. */
bl_status bl_row_spool_add(bl_row_spool *copy, bl_row *row);
bl_status bl_row_spool_flush(bl_row_spool *copy);

/* ---- samples.c ---- */

/* As bl_dataset_open. With one reference. */
bl_status bl_samples_open(const bl_dataset_options *options, const bl_tokenizer *tokenizer,
                          bl_samples **out);
void bl_samples_release(bl_samples *samples); /* frees them with the last reference; NULL is fine */
int64_t bl_samples_n_tokens(const bl_samples *samples, int64_t index);
/* As bl_dataset_get, of an index that there is. */
bl_status bl_samples_get(const bl_samples *samples, int64_t index, bl_sample *out);

/* Gives all ranks of the host the first one's memory: its index->bytes becomes a piece, which the
 * others get. Does nothing where ranks do not share. */
bl_status bl_index_share(bl_host_memory *host, const char *what, bl_index_memory *index);
void bl_index_free(bl_index_memory *index);

/* ---- pack.c ---- */

typedef struct bl_pack bl_pack;

/* As bl_dataset_pack; samples, of which [first, first + n) are there, are borrowed until it is
 * freed. */
bl_status bl_pack_create(const bl_samples *samples, bl_packing packing, int64_t row_tokens,
                         int64_t first, int64_t n, bl_pack **out);
void bl_pack_free(bl_pack *pack); /* NULL is fine */
int64_t bl_pack_count(const bl_pack *pack);
int64_t bl_pack_index_bytes(const bl_pack *pack);
uint64_t bl_pack_fingerprint(const bl_pack *pack);
int64_t bl_pack_n_tokens(const bl_pack *pack, int64_t index);
bl_status bl_pack_get(const bl_pack *pack, int64_t index, bl_sample *out);

#endif
