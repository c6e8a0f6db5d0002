/* SPDX-License-Identifier: Apache-2.0 */
/* dataset.h -- training rows from files of JSON lines, one JSON array of objects, or CSV, also
 * compressed.
 *
 * A file that ends in .csv or .tsv is a table with a header (RFC 4180). gzip and Zstandard are
 * recognized by their first bytes. Rows of such files, and of stdin, are copied into a temporary
 * file in TMPDIR, from which samples are built again. Of a file with share s, row i (from 0) of
 * those that can be used is a sample floor((i + 1) s) - floor(i s) times, in place.
 *
 * Formats, by the keys of a row (B, E: the ids the tokenizer's post-processor puts before a text,
 * and EOS; [.]: no loss); docs/data.md has an example of each:
 * - tokens: input_ids; labels (default: the ids), document_ids and weights are optional; no other
 *   key
 * - text: text, or the key of text_key; B text E
 * - prompt_completion: prompt, completion (or prompt and response, question and answer, query and
 *   response); [B prompt] completion E
 * - alpaca: instruction, input, output (or instruction, context, response); [B Stanford Alpaca's
 *   prompt] output E
 * - messages: messages of role and content; as chat/template.h says; or prompt and completion as
 *   lists of messages, or the keys of alpaca and prompt_completion with system and history
 * - sharegpt: conversations of from (human, gpt, system) and value; the same
 * - preference: prompt, chosen, rejected: texts, as prompt_completion; lists of messages, or token
 *   rows without prompt. Two documents, chosen and rejected, which begin with the same prompt.
 *   Without prompt it is the longest common beginning of chosen and rejected
 * - unpaired_preference: prompt, completion and label, or input_ids, labels and label
 *
 * Prompt and completion are tokenized apart and joined as ids, so that no token straddles the
 * border and the mask is exact by construction; the border is the same in generation (prompt
 * encoded, completion generated). The completion is encoded as a continuation: decoding the whole
 * gives prompt and completion, without an added space between them. Text in a row never becomes a
 * special token.
 *
 * Opening reads the file once and builds each sample once, so that every error and every count is
 * known before training starts; this keeps 24 bytes per row, including a checksum of its bytes.
 * Samples are rebuilt on request. Peak memory is that of 1 MiB of rows, or of the longest one. */
#ifndef BALLAST_DATA_DATASET_H
#define BALLAST_DATA_DATASET_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/present.h"
#include "base/status.h"
#include "chat/template.h"
#include "comm/host_memory.h"
#include "tokenizer/tokenizer.h"

typedef enum bl_data_format {
    BL_DATA_AUTO, /* by the keys of the first row */
    BL_DATA_TOKENS,
    BL_DATA_TEXT,
    BL_DATA_ALPACA,
    BL_DATA_PROMPT_COMPLETION,
    BL_DATA_MESSAGES,
    BL_DATA_SHAREGPT,
    BL_DATA_PREFERENCE,
    BL_DATA_UNPAIRED_PREFERENCE
} bl_data_format;

const char *bl_data_format_name(bl_data_format format); /* "auto", "tokens", ... */

/* What is done with a sample of more than max_seq_length tokens. */
typedef enum bl_overlong { BL_OVERLONG_TRUNCATE, BL_OVERLONG_SKIP, BL_OVERLONG_ERROR } bl_overlong;

typedef struct bl_dataset_options {
    const char *path;              /* a file, a directory of files, or "-": stdin */
    const char *const *more_paths; /* [n_more_paths], whose samples follow */
    size_t n_more_paths;
    const double *shares; /* [1 + n_more_paths], >= 0; NULL: 1 each */
    bl_data_format format;
    int64_t max_seq_length; /* tokens; 0: no limit */
    bl_overlong overlong;
    bool train_on_inputs; /* prompts carry loss too */
    /* Leave out rows that cannot be used, and list them on the log; else the first is an
     * error. */
    bool skip_bad;
    const char *text_key; /* of rows of format text; NULL: "text" */
    bool add_eos;         /* texts and completions end with EOS */
    int32_t eos_id;       /* -1: the tokenizer's first */
    int32_t vocab_size;   /* bound of ids, the model's; 0: the tokenizer's */
    const char *chat_template,
        *template_date; /* chat/template.h; NULL: the model's own, its date */
    /* Error of a missing tokenizer, for formats that need one; NULL: it was not requested. */
    const bl_error *no_tokenizer;
    int n_threads; /* that build samples while opening; 0: as many as there are usable cores */
    /* Ranks of a host that open the same data set together: the first one reads the file, and all
     * have one index (comm/host_memory.h; borrowed until bl_dataset_close and the last
     * bl_dataset_pack). What fails for the first one, it alone reports: it must abort the job.
     * NULL: this process reads for itself. */
    bl_host_memory *host;
} bl_dataset_options;

/* format auto, no length limit, truncate, loss on completions only, bad rows are errors, EOS added
 * and the tokenizer's, the model's own chat template. */
bl_dataset_options bl_dataset_default_options(const char *path);

/* One row as token ids. labels[t] belongs to ids[t], as in Hugging Face's code: the trainer shifts.
 * document_ids and weights are NULL unless a `tokens` row brought them; of `preference`,
 * document_ids are 0 (chosen) and 1 (rejected). All four have n_tokens elements and are freed by
 * bl_sample_free. */
typedef struct bl_sample {
    int64_t n_tokens;
    int32_t *ids, *labels, *document_ids;
    float *weights;
    bool is_desirable; /* of unpaired_preference: label */
    /* Of preferences: whether document d begins with a token of the answer. labels do not say it:
     * no token of the document predicts that one. */
    bool begins_learned[2];
} bl_sample;

typedef struct bl_dataset_stats {
    int64_t n_rows;         /* in the file, blank lines apart */
    int64_t n_bad;          /* left out by skip_bad */
    int64_t n_overlong;     /* truncated or left out, as `overlong` says */
    int64_t n_cut_away;     /* of these, left out: no label is within max_seq_length */
    int64_t n_tokens_lost;  /* of overlong samples */
    int64_t n_tokens;       /* of all samples that bl_dataset_get gives */
    int64_t n_label_tokens; /* of these, those that carry loss once labels are shifted */
} bl_dataset_stats;

typedef struct bl_dataset bl_dataset;

/* Opens and checks options->path. `tokenizer` is borrowed until bl_dataset_close and may be NULL
 * for `tokens`, which then need vocab_size. Errors: BL_EINPUT "file:line:column: reason" or
 * "file:line: reason" for malformed JSON, bytes that are not UTF-8, NUL, a missing key, a wrong
 * type, an id out of range, an empty text or answer, a sample without any label that carries loss,
 * an overlong sample under BL_OVERLONG_ERROR, and for a file without usable rows; BL_EUSAGE for
 * options that do not fit; damaged compressed data; BL_EIO, BL_ENOMEM. */
bl_status bl_dataset_open(const bl_dataset_options *options, const bl_tokenizer *tokenizer,
                          bl_dataset **out);
void bl_dataset_close(bl_dataset *dataset); /* NULL is fine */

bl_data_format bl_dataset_format(const bl_dataset *dataset); /* never BL_DATA_AUTO */
/* Rows: samples, in file order, unless packed. */
int64_t bl_dataset_count(const bl_dataset *dataset);
int64_t bl_dataset_n_tokens(const bl_dataset *dataset,
                            int64_t index); /* of one row, without building it */
void bl_dataset_get_stats(const bl_dataset *dataset, bl_dataset_stats *out);

/* How samples become the rows that a step takes. */
typedef enum bl_packing {
    BL_PACKING_NONE,
    BL_PACKING_PACK,       /* several samples a row, kept apart by document_ids; none is cut */
    BL_PACKING_CONCATENATE /* one stream of all samples, cut into rows; attention across samples */
} bl_packing;

const char *bl_packing_name(bl_packing packing); /* "none", "pack", "concatenate" */

/* A data set whose rows are made of samples [first, first + n) of `samples`, which lives on as long
 * as *out: both are closed by themselves, in any order, by one thread. Deterministic. Ranks that
 * opened `samples` together pack together: the first one makes the index.
 * - pack: rows of at most row_tokens tokens, filled by first-fit decreasing (Johnson 1973) within
 *   windows of 8192 samples; rows are in the order of their first samples, samples of a row in file
 *   order. Each sample is a document, the label of its first token is -100: the loss of a row is
 *   the sum of its samples' losses. Documents inside a sample stay documents. Memory: 4 bytes per
 *   sample and 8 per row.
 * - concatenate: rows of row_tokens tokens, labels unchanged; an incomplete last row is dropped.
 *   As concatenate_data of optimum-habana's run_lora_clm.py, and group_texts of transformers'
 *   run_clm.py over all samples as one batch. Memory: 8 bytes per sample.
 *
 * bl_dataset_get_stats still reports all of `samples`. Errors: BL_EUSAGE for a sample longer
 * than row_tokens (pack) or samples with document_ids (concatenate); BL_EINPUT for less than one
 * row (concatenate); BL_ENOMEM. */
bl_status bl_dataset_pack(bl_dataset *samples, bl_packing packing, int64_t row_tokens,
                          int64_t first, int64_t n, bl_dataset **out);

/* Builds row `index`, 0 <= index < count. Any number of threads may ask at once. Errors: BL_EINPUT
 * if the row's bytes are not those that were scanned, BL_EIO if the file ends before it, BL_ENOMEM;
 * *out is then empty. */
bl_status bl_dataset_get(const bl_dataset *dataset, int64_t index, bl_sample *out);
void bl_sample_free(bl_sample *sample); /* an empty one is fine */

/* XXH3-64 of the file's bytes, of the options except the path, and of all ids and labels: equal
 * when a resumed run would see the same samples, even if the file was moved. */
uint64_t bl_dataset_fingerprint(const bl_dataset *dataset);

/* What the index takes, of packed rows with that of their samples, bytes: of this process, or of
 * the host. */
int64_t bl_dataset_index_bytes(const bl_dataset *dataset);

/* The first *n_validation of n_rows are for validation: percentage * n_rows / 100, half to even, as
 * optimum-habana's validation_split_percentage takes them, before shuffling. BL_EUSAGE: not in [0,
 * 100), or one of the two parts is empty though the percentage is not 0. */
bl_status bl_dataset_split(int64_t n_rows, double percentage, int64_t *n_validation);

/* What a chat template writes. */
typedef struct bl_conversation {
    bl_chat_message *message; /* texts are those of the row, or in `kept` */
    size_t n;
    json_t *kept;    /* texts and objects that the row does not have */
    json_t *context; /* as of bl_chat_template_encode */
} bl_conversation;

/* {"messages": [{"role", "content"}]}, a row or not, which *out borrows; freed by
 * bl_conversation_free. `place` goes before errors. Adds keys that are not used to *unused.
 * BL_EINPUT as for a row; BL_ENOMEM. */
bl_status bl_conversation_read(const char *place, const json_t *object,
                               const bl_chat_template *chat, bl_key_names *unused,
                               bl_conversation *out);
void bl_conversation_free(bl_conversation *conversation); /* an empty one is fine */

#endif
