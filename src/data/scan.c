/* SPDX-License-Identifier: Apache-2.0 */
/* The pass over the files when a data set is opened: several threads build each row once, a batch
 * of rows at a time; the samples are then indexed in file order, so that nothing depends on the
 * threads. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include "data/internal.h"

#include "base/cores.h"
#include "base/files.h"
#include "base/log.h"
#include "base/pool.h"
#include "base/sizes.h"
#include "tokenizer/text.h" /* bl_bytes */

enum { MAX_LISTED_BAD_ROWS = 20, BATCH_ROWS = 256, BATCH_BYTES = 1 << 20 };

/* ---- options ---- */

static bl_status check_numbers(const bl_dataset_options *options)
{
    if (options->max_seq_length < 0 || options->max_seq_length == 1)
        return BL_FAIL(BL_EUSAGE,
                       "max_seq_length %" PRId64 ": expected at least 2, or 0 for no limit",
                       options->max_seq_length);
    if (options->vocab_size < 0)
        return BL_FAIL(BL_EUSAGE, "vocab_size %" PRId32 ": expected at least 0",
                       options->vocab_size);
    return BL_OK;
}

bl_status bl_sample_rules_load_chat(const char *path, bl_sample_rules *rules)
{
    const bl_dataset_options *options = &rules->options;

    BL_TRY(bl_chat_template_load(options->chat_template, options->template_date, rules->tokenizer,
                                 &rules->chat));
    if (bl_chat_template_was_recognized(rules->chat))
        bl_log_info("%s: chat template: %s (chat_template is not given)", path,
                    bl_chat_template_name(rules->chat));
    return BL_OK;
}

/* Takes options that were not given from the tokenizer, now that the format is known. */
static bl_status resolve_rules(const char *path, bl_sample_rules *rules)
{
    bl_dataset_options *options = &rules->options;
    size_t n_eos = 0;

    bool chat = rules->side == BL_DATA_MESSAGES || rules->side == BL_DATA_SHAREGPT;

    if (!chat && (options->chat_template || options->template_date))
        return BL_FAIL(BL_EUSAGE,
                       "%s: chat_template and template_date are for messages and sharegpt; the "
                       "data format is %s, without conversations",
                       path, bl_data_format_name(options->format));
    if (rules->side == BL_DATA_TOKENS) {
        if (options->vocab_size == 0 && rules->tokenizer)
            options->vocab_size = bl_tokenizer_vocab_size(rules->tokenizer);
        return options->vocab_size
                   ? BL_OK
                   : BL_FAIL(BL_EUSAGE, "%s: rows of tokens need a tokenizer or vocab_size", path);
    }
    if (!rules->tokenizer && options->no_tokenizer) return bl_error_restore(options->no_tokenizer);
    if (!rules->tokenizer)
        return BL_FAIL(BL_EUSAGE, "%s: data format %s needs a tokenizer", path,
                       bl_data_format_name(options->format));
    if (chat) return bl_sample_rules_load_chat(path, rules);
    if (!options->add_eos || options->eos_id >= 0) return BL_OK;
    const int32_t *eos = bl_tokenizer_eos(rules->tokenizer, &n_eos);
    if (!n_eos)
        return BL_FAIL(BL_EUSAGE,
                       "%s: the tokenizer names no EOS token to end samples with; give eos_id",
                       path);
    options->eos_id = eos[0];
    return BL_OK;
}

/* ---- one row ---- */

static bl_status add_entry(bl_samples *samples, const bl_row *row, uint64_t hash,
                           const bl_sample *sample)
{
    if (samples->n == samples->capacity) {
        size_t capacity = samples->capacity + samples->capacity / 2 + 256, n_bytes;
        bl_row_entry *grown = bl_mul_overflows(capacity, sizeof *grown, &n_bytes)
                                  ? NULL
                                  : realloc(samples->entry, n_bytes);
        if (!grown) return BL_FAIL(BL_ENOMEM, "%s: index of %zu rows", samples->path, capacity);
        samples->entry = samples->index.bytes = grown;
        samples->index.n_bytes = n_bytes;
        samples->capacity = capacity;
    }
    samples->entry[samples->n++] = (bl_row_entry){.offset_bytes = row->offset_bytes,
                                                  .hash = hash,
                                                  .n_bytes = (uint32_t)row->n_bytes,
                                                  .n_tokens = (int32_t)sample->n_tokens};
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
static bool skip_bad_row(bl_samples *samples, bl_status st)
{
    if (st != BL_EINPUT || !samples->rules.options.skip_bad) return false;
    if (samples->stats.n_bad++ < MAX_LISTED_BAD_ROWS)
        bl_log_warning("skipped: %s", bl_error_text());
    return true;
}

/* A row of a batch, and the sample built from it. */
typedef struct scanned_row {
    bl_row row; /* text: set when the batch is whole */
    size_t at;  /* of the text in the batch */
    uint64_t hash;
    bl_sample sample;
    bl_row_verdict verdict;
    int64_t n_lost;
    bl_key_names unused;
    bl_error error; /* status BL_OK: none */
} scanned_row;

typedef struct row_batch {
    bl_samples *samples;
    bl_pool *pool;
    XXH3_state_t *hash;  /* of all samples */
    bl_data_file *file;  /* in which the rows are */
    size_t n_used;       /* of its rows that could be used */
    bl_key_names unused; /* keys of its rows that are not read */
    bl_row_spool copy;
    bl_bytes text;
    size_t n;
    scanned_row *row; /* [BATCH_ROWS] */
} row_batch;

static void build_row(void *arg, int64_t index, void *scratch)
{
    const row_batch *batch = arg;
    scanned_row *r = &batch->row[index];

    (void)scratch;
    r->hash = bl_row_hash(&r->row);
    bl_status st = bl_sample_build(&batch->samples->rules, batch->file->path, &r->row, &r->unused,
                                   &r->sample, &r->verdict, &r->n_lost);
    r->error.status = BL_OK;
    if (st != BL_OK) bl_error_save(&r->error, st);
}

/* Each name once, in the order of the file. */
static bl_status add_unused(row_batch *batch, bl_key_names *names)
{
    static const bl_key_table none = {0};
    json_t *value = json_true();
    char *rest = names->text, *name;

    while (names->n && (name = strsep(&rest, ",")))
        BL_TRY(bl_key_check(&none, batch->file->path, name + strspn(name, " "), value,
                            &batch->unused));
    return BL_OK;
}

static bl_status take_down(row_batch *batch, scanned_row *r)
{
    bl_samples *samples = batch->samples;
    bl_dataset_stats *stats = &samples->stats;

    if (r->error.status != BL_OK) {
        bl_error_restore(&r->error);
        return skip_bad_row(samples, r->error.status) ? BL_OK : r->error.status;
    }
    BL_TRY(add_unused(batch, &r->unused));
    stats->n_overlong += r->n_lost > 0;
    stats->n_cut_away += r->verdict == BL_ROW_CUT_AWAY;
    stats->n_tokens_lost += r->n_lost;
    if (r->verdict != BL_ROW_USED) return BL_OK;
    samples->has_documents |= r->sample.document_ids != NULL;
    size_t n_times = bl_data_file_times(batch->file, batch->n_used++);
    for (size_t i = 0; i < n_times; i++) {
        stats->n_tokens += r->sample.n_tokens;
        stats->n_label_tokens += bl_sample_count_labels(&r->sample);
        add_to_hash(batch->hash, &r->sample);
        BL_TRY(add_entry(samples, &r->row, r->hash, &r->sample));
    }
    return BL_OK;
}

static bl_status run_batch(row_batch *batch)
{
    bl_status st = BL_OK;

    for (size_t i = 0; i < batch->n; i++)
        batch->row[i].row.text = batch->text.data + batch->row[i].at;
    bl_pool_run(batch->pool, (int64_t)batch->n, build_row, batch);
    for (size_t i = 0; i < batch->n; i++) {
        if (st == BL_OK) st = take_down(batch, &batch->row[i]);
        bl_sample_free(&batch->row[i].sample);
    }
    batch->n = batch->text.n = 0;
    return st == BL_OK ? bl_host_memory_beat(batch->samples->host) : st;
}

static bl_status add_to_batch(row_batch *batch, const bl_row *row)
{
    scanned_row *r = &batch->row[batch->n++];

    r->row = *row;
    r->at = batch->text.n;
    r->unused.n = 0;
    r->unused.text[0] = '\0';
    BL_TRY(bl_bytes_append(&batch->text, row->text, row->n_bytes));
    if (batch->copy.file) BL_TRY(bl_row_spool_add(&batch->copy, &r->row));
    return batch->n == BATCH_ROWS || batch->text.n >= BATCH_BYTES ? run_batch(batch) : BL_OK;
}

/* ---- the file ---- */

/* The format must be known before the first row is built; a bad first row is then the format's
 * problem only if it cannot be read at all and may not be skipped. The shape may come later, but
 * not that of preferences: their first row says what is needed to read the others. */
static bl_status settle_format(bl_samples *samples, const char *path, const bl_row *row,
                               bool *settled)
{
    bl_data_format format = samples->rules.options.format;
    bool is_open = format == BL_DATA_AUTO || bl_data_format_is_preference(format);
    bl_status st = bl_row_settle(path, row, &samples->rules);
    if (st != BL_OK && is_open) return skip_bad_row(samples, st) ? BL_OK : st;
    if (st != BL_OK && st != BL_EINPUT) return st; /* building the row reports the problem */
    if (*settled) return BL_OK;
    *settled = true;
    return resolve_rules(samples->path, &samples->rules);
}

static void report(const bl_samples *samples)
{
    const bl_dataset_stats *stats = &samples->stats;

    if (stats->n_bad)
        bl_log_warning("%s: %" PRId64 " of %" PRId64 " rows skipped as bad", samples->path,
                       stats->n_bad, stats->n_rows);
    if (stats->n_overlong)
        bl_log_warning(
            "%s: %" PRId64 " of %" PRId64 " samples are longer than max_seq_length %" PRId64
            " and were %s: %" PRId64 " tokens lost",
            samples->path, stats->n_overlong, stats->n_rows, samples->rules.options.max_seq_length,
            samples->rules.options.overlong == BL_OVERLONG_SKIP ? "skipped" : "truncated",
            stats->n_tokens_lost);
    if (stats->n_cut_away)
        bl_log_warning("%s: %" PRId64 " of %" PRId64
                       " rows are left out: no token that is learned is within max_seq_length "
                       "%" PRId64 "; raise it, or shorten their prompts",
                       samples->path, stats->n_cut_away, stats->n_rows,
                       samples->rules.options.max_seq_length);
}

static bl_status fail_empty(const bl_samples *samples)
{
    const bl_dataset_stats *stats = &samples->stats;
    char cut[96] = "";

    if (stats->n_cut_away)
        snprintf(cut, sizeof cut,
                 "; %" PRId64 " learn nothing within max_seq_length %" PRId64 ": raise it",
                 stats->n_cut_away, samples->rules.options.max_seq_length);
    return BL_FAIL(BL_EINPUT, "%s: no usable rows (%" PRId64 " rows, %" PRId64 " of them bad)%s",
                   samples->path, stats->n_rows, stats->n_bad, cut);
}

static void set_fingerprint(bl_samples *samples, uint64_t file_hash, uint64_t sample_hash)
{
    const bl_dataset_options *o = &samples->rules.options;
    char text[320];
    int n = snprintf(
        text, sizeof text,
        "file %016" PRIx64 " samples %016" PRIx64 " count %zu format %s max_seq_length %" PRId64
        " overlong %d train_on_inputs %d skip_bad %d add_eos %d eos %" PRId32 " vocab %" PRId32,
        file_hash, sample_hash, samples->n, bl_data_format_name(o->format), o->max_seq_length,
        (int)o->overlong, o->train_on_inputs, o->skip_bad, o->add_eos, o->eos_id, o->vocab_size);
    if (samples->rules.chat)
        n += snprintf(text + n, sizeof text - (size_t)n, " chat %016" PRIx64,
                      bl_chat_template_hash(samples->rules.chat));
    samples->fingerprint = XXH3_64bits(text, (size_t)n);
}

static bl_status scan_rows(bl_row_reader *reader, row_batch *batch, bool *settled)
{
    bl_samples *samples = batch->samples;
    bl_row row;
    bl_error error;

    for (;;) {
        bl_status st = bl_row_reader_next(reader, &row);
        if (st == BL_OK && row.text) {
            samples->stats.n_rows++;
            if (!*settled || !samples->rules.shape)
                BL_TRY(settle_format(samples, reader->path, &row, settled));
            if (*settled) BL_TRY(add_to_batch(batch, &row));
            continue;
        }
        bl_error_save(&error, st); /* an error in an earlier row comes first */
        BL_TRY(run_batch(batch));
        return st == BL_OK ? BL_OK : bl_error_restore(&error);
    }
}

/* The rows of one file; *hash gets that of its bytes. */
static bl_status scan_file(row_batch *batch, bl_data_file *file, bool *settled, uint64_t *hash)
{
    bl_row_reader reader = {0};
    bl_status st;

    file->first = batch->samples->n;
    batch->file = file;
    batch->n_used = 0;
    batch->unused = (bl_key_names){0};
    batch->copy.file = NULL;
    batch->copy.n_written = 0;
    BL_TRY_GOTO(st, done, bl_row_reader_open(file->path, &reader));
    if (bl_row_reader_is_direct(&reader)) {
        BL_TRY_GOTO(st, done, bl_file_open(file->path, &file->fd, NULL));
    } else {
        BL_TRY_GOTO(st, done, bl_row_spool_create(file));
        batch->copy.file = file;
    }
    BL_TRY_GOTO(st, done, scan_rows(&reader, batch, settled));
    if (batch->copy.file) st = bl_row_spool_flush(&batch->copy);
    *hash = XXH3_64bits_digest(reader.hash);
    if (batch->unused.n)
        bl_log_warning("%s: keys that are not used: %s", file->path, batch->unused.text);
done:
    bl_row_reader_close(&reader);
    return st;
}

static bl_status scan_files(row_batch *batch, uint64_t *hash)
{
    bl_samples *samples = batch->samples;
    bool settled = false;

    for (size_t i = 0; i < samples->n_files; i++) {
        uint64_t of_file;
        BL_TRY(scan_file(batch, &samples->file[i], &settled, &of_file));
        *hash = i ? XXH3_64bits_withSeed(&of_file, sizeof of_file, *hash) : of_file;
    }
    return BL_OK;
}

bl_status bl_samples_scan(bl_samples *samples)
{
    int n_threads = samples->rules.options.n_threads;
    row_batch batch = {.samples = samples,
                       .hash = XXH3_createState(),
                       .row = calloc(BATCH_ROWS, sizeof *batch.row)};
    uint64_t hash = 0;
    bl_status st;

    BL_TRY_GOTO(st, done, check_numbers(&samples->rules.options));
    if (!batch.hash || !batch.row) {
        st = BL_FAIL(BL_ENOMEM, "reading %s", samples->path);
        goto done;
    }
    XXH3_64bits_reset(batch.hash);
    BL_TRY_GOTO(st, done,
                bl_pool_create(n_threads > 0 ? n_threads : (int)bl_cores_usable(), &batch.pool));
    BL_TRY_GOTO(st, done, scan_files(&batch, &hash));
    report(samples);
    if (samples->n == 0)
        st = fail_empty(samples);
    else
        set_fingerprint(samples, hash, XXH3_64bits_digest(batch.hash));
done:
    for (size_t i = 0; batch.row && i < batch.n; i++) bl_sample_free(&batch.row[i].sample);
    bl_pool_destroy(batch.pool);
    bl_bytes_free(&batch.copy.text);
    bl_bytes_free(&batch.text);
    XXH3_freeState(batch.hash);
    free(batch.row);
    return st;
}
