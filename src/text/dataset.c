/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a data set: one pass over its rows that leaves where each lies and how long its sample is. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include "text/dataset_internal.h"

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"

enum { MAX_LISTED_BAD_ROWS = 20 };

/* A usable row. 16 bytes: 10 million rows are 160 MB. */
typedef struct row_entry {
    int64_t offset_bytes;
    uint32_t n_bytes;
    int32_t n_tokens;
} row_entry;

struct bl_dataset {
    char *path;
    int fd; /* read with pread only: any number of threads */
    bl_sample_rules rules;
    row_entry *entry;
    size_t n, capacity;
    bl_dataset_stats stats;
    uint64_t fingerprint;
};

static const char *const format_names[] = {"auto",     "tokens",  "text", "alpaca", "prompt_completion",
                                           "messages", "sharegpt"};

bool bl_data_format_parse(const char *name, bl_data_format *out)
{
    for (size_t i = 0; i < BL_COUNT(format_names); i++) {
        if (strcmp(name, format_names[i])) continue;
        *out = (bl_data_format)i;
        return true;
    }
    return false;
}

const char *bl_data_format_name(bl_data_format format)
{
    return format_names[format];
}

bool bl_overlong_parse(const char *name, bl_overlong *out)
{
    static const char *const names[] = {"truncate", "skip", "error"};

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        if (strcmp(name, names[i])) continue;
        *out = (bl_overlong)i;
        return true;
    }
    return false;
}

bl_dataset_options bl_dataset_default_options(const char *path)
{
    return (bl_dataset_options){.path = path, .add_eos = true, .eos_id = -1};
}

/* ---- opening ---- */

static bl_status check_numbers(const bl_dataset_options *options)
{
    if (options->max_seq_length < 0 || options->max_seq_length == 1)
        return BL_FAIL(BL_EUSAGE, "max_seq_length %" PRId64 ": expected at least 2, or 0 for no limit",
                       options->max_seq_length);
    if (options->vocab_size < 0)
        return BL_FAIL(BL_EUSAGE, "vocab_size %" PRId32 ": expected at least 0", options->vocab_size);
    return BL_OK;
}

static bl_status resolve_chat(const char *path, bl_sample_rules *rules)
{
    const bl_dataset_options *options = &rules->options;

    BL_TRY(bl_chat_template_load(options->chat_template, options->template_date, rules->tokenizer,
                                 &rules->chat));
    if (bl_chat_template_was_recognised(rules->chat))
        bl_log_info("%s: chat template %s, recognised as the model's own", path,
                    bl_chat_template_name(rules->chat));
    return BL_OK;
}

/* Fills in what the options leave to the tokenizer, now that the format is known. */
static bl_status resolve_rules(const char *path, bl_sample_rules *rules)
{
    bl_dataset_options *options = &rules->options;
    size_t n_eos = 0;

    bool chat = options->format == BL_DATA_MESSAGES || options->format == BL_DATA_SHAREGPT;

    if (!chat && (options->chat_template || options->template_date))
        return BL_FAIL(
            BL_EUSAGE,
            "%s: chat_template and template_date are for messages and sharegpt; the data format is %s", path,
            bl_data_format_name(options->format));
    if (options->format == BL_DATA_TOKENS) {
        if (options->vocab_size == 0 && rules->tokenizer)
            options->vocab_size = bl_tokenizer_vocab_size(rules->tokenizer);
        return options->vocab_size
                   ? BL_OK
                   : BL_FAIL(BL_EUSAGE, "%s: rows of tokens need a tokenizer or vocab_size", path);
    }
    if (!rules->tokenizer)
        return BL_FAIL(BL_EUSAGE, "%s: data format %s needs a tokenizer", path,
                       bl_data_format_name(options->format));
    if (chat) return resolve_chat(path, rules);
    if (!options->add_eos || options->eos_id >= 0) return BL_OK;
    const int32_t *eos = bl_tokenizer_eos(rules->tokenizer, &n_eos);
    if (!n_eos)
        return BL_FAIL(BL_EUSAGE, "%s: the tokenizer names no EOS token to end samples with; give eos_id",
                       path);
    options->eos_id = eos[0];
    return BL_OK;
}

static bl_status add_entry(bl_dataset *dataset, const bl_row *row, int64_t n_tokens)
{
    if (dataset->n == dataset->capacity) {
        size_t capacity = dataset->capacity + dataset->capacity / 2 + 256, n_bytes;
        row_entry *grown =
            bl_mul_overflows(capacity, sizeof *grown, &n_bytes) ? NULL : realloc(dataset->entry, n_bytes);
        if (!grown) return BL_FAIL(BL_ENOMEM, "%s: index of %zu rows", dataset->path, capacity);
        dataset->entry = grown;
        dataset->capacity = capacity;
    }
    dataset->entry[dataset->n++] = (row_entry){
        .offset_bytes = row->offset_bytes, .n_bytes = (uint32_t)row->n_bytes, .n_tokens = (int32_t)n_tokens};
    return BL_OK;
}

static void add_to_hash(XXH3_state_t *hash, const bl_sample *sample)
{
    size_t n_bytes = (size_t)sample->n_tokens * sizeof *sample->ids;
    XXH3_64bits_update(hash, &sample->n_tokens, sizeof sample->n_tokens);
    XXH3_64bits_update(hash, sample->ids, n_bytes);
    XXH3_64bits_update(hash, sample->labels, n_bytes);
}

/* Whether the row that just failed may be left out; then it is counted and listed. */
static bool skip_bad_row(bl_dataset *dataset, bl_status st)
{
    if (st != BL_EINPUT || !dataset->rules.options.skip_bad) return false;
    if (dataset->stats.n_bad++ < MAX_LISTED_BAD_ROWS) bl_log_warning("skipped: %s", bl_error_text());
    return true;
}

static bl_status scan_row(bl_dataset *dataset, const bl_row *row, XXH3_state_t *hash)
{
    bl_dataset_stats *stats = &dataset->stats;
    bl_sample sample;
    bl_row_verdict verdict;
    int64_t n_lost;

    bl_status st = bl_sample_build(&dataset->rules, dataset->path, row, &sample, &verdict, &n_lost);
    if (st != BL_OK) return skip_bad_row(dataset, st) ? BL_OK : st;
    stats->n_overlong += n_lost > 0;
    stats->n_tokens_lost += n_lost;
    if (verdict == BL_ROW_USED) {
        stats->n_tokens += sample.n_tokens;
        stats->n_label_tokens += bl_sample_count_labels(&sample);
        add_to_hash(hash, &sample);
        st = add_entry(dataset, row, sample.n_tokens);
    }
    bl_sample_free(&sample);
    return st;
}

/* The format must be known before the first row is built; a bad first row is then the format's problem only
 * if it cannot be read at all and may not be skipped. */
static bl_status settle_format(bl_dataset *dataset, const bl_row *row, bool *settled)
{
    bl_dataset_options *options = &dataset->rules.options;

    if (options->format == BL_DATA_AUTO) {
        bl_status st = bl_row_detect_format(dataset->path, row, &options->format);
        if (st != BL_OK) return skip_bad_row(dataset, st) ? BL_OK : st;
    }
    *settled = true;
    return resolve_rules(dataset->path, &dataset->rules);
}

static void report(const bl_dataset *dataset)
{
    const bl_dataset_stats *stats = &dataset->stats;

    if (stats->n_bad)
        bl_log_warning("%s: %" PRId64 " of %" PRId64 " rows skipped as bad", dataset->path, stats->n_bad,
                       stats->n_rows);
    if (stats->n_overlong)
        bl_log_warning("%s: %" PRId64 " of %" PRId64 " samples are longer than max_seq_length %" PRId64
                       " and were %s: %" PRId64 " tokens lost",
                       dataset->path, stats->n_overlong, stats->n_rows, dataset->rules.options.max_seq_length,
                       dataset->rules.options.overlong == BL_OVERLONG_SKIP ? "skipped" : "truncated",
                       stats->n_tokens_lost);
}

static void set_fingerprint(bl_dataset *dataset, uint64_t file_hash, uint64_t sample_hash)
{
    const bl_dataset_options *o = &dataset->rules.options;
    char text[320];
    int n = snprintf(text, sizeof text,
                     "file %016" PRIx64 " samples %016" PRIx64 " count %zu format %s max_seq_length %" PRId64
                     " overlong %d train_on_inputs %d skip_bad %d add_eos %d eos %" PRId32 " vocab %" PRId32,
                     file_hash, sample_hash, dataset->n, bl_data_format_name(o->format), o->max_seq_length,
                     (int)o->overlong, o->train_on_inputs, o->skip_bad, o->add_eos, o->eos_id, o->vocab_size);
    if (dataset->rules.chat)
        n += snprintf(text + n, sizeof text - (size_t)n, " chat %016" PRIx64,
                      bl_chat_template_hash(dataset->rules.chat));
    dataset->fingerprint = XXH3_64bits(text, (size_t)n);
}

static bl_status scan(bl_dataset *dataset)
{
    bl_row_reader reader;
    XXH3_state_t *hash = XXH3_createState();
    bool settled = false;
    bl_row row;

    bl_status st = bl_row_reader_open(dataset->path, &reader);
    if (st == BL_OK && !hash) st = BL_FAIL(BL_ENOMEM, "reading %s", dataset->path);
    if (st != BL_OK) goto done;
    XXH3_64bits_reset(hash);
    for (;;) {
        BL_TRY_GOTO(st, done, bl_row_reader_next(&reader, &row));
        if (!row.text) break;
        dataset->stats.n_rows++;
        if (!settled) BL_TRY_GOTO(st, done, settle_format(dataset, &row, &settled));
        if (settled) BL_TRY_GOTO(st, done, scan_row(dataset, &row, hash));
    }
    report(dataset);
    if (dataset->n == 0)
        st = BL_FAIL(BL_EINPUT, "%s: no usable rows (%" PRId64 " rows, %" PRId64 " of them bad)",
                     dataset->path, dataset->stats.n_rows, dataset->stats.n_bad);
    else
        set_fingerprint(dataset, XXH3_64bits_digest(reader.hash), XXH3_64bits_digest(hash));
done:
    bl_row_reader_close(&reader);
    XXH3_freeState(hash);
    return st;
}

bl_status bl_dataset_open(const bl_dataset_options *options, const bl_tokenizer *tokenizer, bl_dataset **out)
{
    bl_status st;

    *out = NULL;
    BL_TRY(check_numbers(options));
    bl_dataset *dataset = calloc(1, sizeof *dataset);
    if (!dataset) return BL_FAIL(BL_ENOMEM, "data set");
    dataset->fd = -1;
    dataset->rules = (bl_sample_rules){.options = *options, .tokenizer = tokenizer};
    if (!(dataset->path = strdup(options->path))) {
        st = BL_FAIL(BL_ENOMEM, "data set");
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_file_open(dataset->path, &dataset->fd, NULL));
    BL_TRY_GOTO(st, done, scan(dataset));
    dataset->rules.options.path = NULL; /* the caller's texts, borrowed until here */
    dataset->rules.options.chat_template = dataset->rules.options.template_date = NULL;
    *out = dataset;
    dataset = NULL;
done:
    bl_dataset_close(dataset);
    return st;
}

void bl_dataset_close(bl_dataset *dataset)
{
    if (!dataset) return;
    if (dataset->fd >= 0) close(dataset->fd);
    bl_chat_template_destroy(dataset->rules.chat);
    free(dataset->path);
    free(dataset->entry);
    free(dataset);
}

/* ---- use ---- */

bl_data_format bl_dataset_format(const bl_dataset *dataset)
{
    return dataset->rules.options.format;
}

int64_t bl_dataset_count(const bl_dataset *dataset)
{
    return (int64_t)dataset->n;
}

int64_t bl_dataset_n_tokens(const bl_dataset *dataset, int64_t index)
{
    return dataset->entry[index].n_tokens;
}

void bl_dataset_get_stats(const bl_dataset *dataset, bl_dataset_stats *out)
{
    *out = dataset->stats;
}

uint64_t bl_dataset_fingerprint(const bl_dataset *dataset)
{
    return dataset->fingerprint;
}

bl_status bl_dataset_get(const bl_dataset *dataset, int64_t index, bl_sample *out)
{
    bl_row_verdict verdict = BL_ROW_USED;
    int64_t n_lost;

    *out = (bl_sample){0};
    if (index < 0 || index >= (int64_t)dataset->n)
        return BL_FAIL(BL_EINTERNAL, "%s: sample %" PRId64 " of %zu", dataset->path, index, dataset->n);
    const row_entry *entry = &dataset->entry[index];
    bl_row row = {.n_bytes = entry->n_bytes, .offset_bytes = entry->offset_bytes, .line = 1, .column = 1};
    char *text = malloc(row.n_bytes + 1);
    if (!text) return BL_FAIL(BL_ENOMEM, "%s: a row of %zu bytes", dataset->path, row.n_bytes);
    row.text = text;
    bl_status st = bl_file_read_full(dataset->fd, dataset->path, text, row.n_bytes, row.offset_bytes);
    if (st == BL_OK) st = bl_sample_build(&dataset->rules, dataset->path, &row, out, &verdict, &n_lost);
    /* The row was good when the file was opened: whatever is wrong with it now, the file is another. */
    if (st == BL_EINPUT || (st == BL_OK && (verdict != BL_ROW_USED || out->n_tokens != entry->n_tokens))) {
        int64_t line = 0;
        bl_sample_free(out);
        st = bl_row_find_line(dataset->path, dataset->fd, row.offset_bytes, &line);
        if (st == BL_OK)
            st = BL_FAIL(BL_EINPUT, "%s:%" PRId64 ": the file has changed since it was opened", dataset->path,
                         line);
    }
    free(text);
    return st;
}

bl_status bl_dataset_split(int64_t n_rows, double percentage, int64_t *n_validation)
{
    if (!(percentage >= 0 && percentage < 100))
        return BL_FAIL(BL_EUSAGE, "validation_split_percentage %g: expected a number in [0, 100)",
                       percentage);
    *n_validation = (int64_t)rint(percentage * (double)n_rows /
                                  100); /* the default rounding: half to even, as Python's round */
    if (percentage > 0 && (*n_validation == 0 || *n_validation >= n_rows))
        return BL_FAIL(BL_EUSAGE, "validation_split_percentage %g of %" PRId64 " rows leaves one part empty",
                       percentage, n_rows);
    return BL_OK;
}
