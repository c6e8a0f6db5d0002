/* SPDX-License-Identifier: Apache-2.0 */
/* samples.c -- the samples of a data set: an index of the place of each usable row and the length
 * of its sample, made by scan.c; processes of a host may share it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include "data/internal.h"

#include "base/files.h"
#include "base/sizes.h"

/* ---- memory of an index ---- */

bl_status bl_index_share(bl_host_memory *host, const char *what, bl_index_memory *index)
{
    if (bl_host_memory_size(host) == 1) return BL_OK;
    BL_TRY(bl_host_memory_publish(host, what, &index->bytes, &index->n_bytes));
    index->is_piece = true;
    return BL_OK;
}

void bl_index_free(bl_index_memory *index)
{
    if (index->is_piece)
        bl_host_memory_return(index->bytes, index->n_bytes);
    else
        free(index->bytes);
    *index = (bl_index_memory){0};
}

/* ---- opening ---- */

/* What the first rank of a host knows when it has read the file. */
typedef struct scanned {
    bl_dataset_stats stats;
    uint64_t n, fingerprint;
    int64_t format, side, shape, vocab_size, eos_id;
} scanned;

/* The others build samples by the same rules, from the same index. */
static bl_status take_over(bl_samples *samples, const scanned *s)
{
    bl_dataset_options *options = &samples->rules.options;

    samples->stats = s->stats;
    samples->n = samples->capacity = (size_t)s->n;
    samples->fingerprint = s->fingerprint;
    options->format = (bl_data_format)s->format;
    samples->rules.shape = bl_row_shape_at(s->shape);
    options->vocab_size = (int32_t)s->vocab_size;
    options->eos_id = (int32_t)s->eos_id;
    samples->rules.side = (bl_data_format)s->side;
    bool is_chat =
        samples->rules.side == BL_DATA_MESSAGES || samples->rules.side == BL_DATA_SHAREGPT;
    return is_chat ? bl_sample_rules_load_chat(samples->path, &samples->rules) : BL_OK;
}

static bl_status share(bl_samples *samples)
{
    const bl_dataset_options *options = &samples->rules.options;
    bool is_first = bl_host_memory_rank(samples->host) == 0;
    scanned s;

    memset(&s, 0, sizeof s); /* all its bytes are sent */
    if (is_first)
        s = (scanned){.stats = samples->stats,
                      .n = samples->n,
                      .fingerprint = samples->fingerprint,
                      .format = options->format,
                      .side = samples->rules.side,
                      .shape = bl_row_shape_index(samples->rules.shape),
                      .vocab_size = options->vocab_size,
                      .eos_id = options->eos_id};
    BL_TRY(bl_host_memory_await(samples->host));
    BL_TRY(bl_host_memory_tell(samples->host, &s, sizeof s));
    BL_TRY(bl_data_files_share(samples));
    if (!is_first) BL_TRY(take_over(samples, &s));
    if (is_first) samples->index.n_bytes = samples->n * sizeof *samples->entry;
    BL_TRY(bl_index_share(samples->host, "index of a data set", &samples->index));
    samples->entry = samples->index.bytes;
    return BL_OK;
}

/* The first rank of a host reads the files. */
static bl_status read_index(bl_samples *samples)
{
    if (bl_host_memory_rank(samples->host) == 0) {
        BL_TRY(bl_data_files_list(samples, &samples->rules.options));
        BL_TRY(bl_samples_scan(samples));
    }
    return bl_host_memory_size(samples->host) > 1 ? share(samples) : BL_OK;
}

bl_status bl_samples_open(const bl_dataset_options *options, const bl_tokenizer *tokenizer,
                          bl_samples **out)
{
    bl_status st;

    *out = NULL;
    bl_samples *samples = calloc(1, sizeof *samples);
    if (!samples) return BL_FAIL(BL_ENOMEM, "data set");
    samples->n_references = 1;
    samples->host = options->host;
    samples->rules =
        (bl_sample_rules){.options = *options, .tokenizer = tokenizer, .side = options->format};
    samples->rules.text_key = strdup(options->text_key ? options->text_key : "text");
    if (!(samples->path = strdup(options->path)) || !samples->rules.text_key) {
        st = BL_FAIL(BL_ENOMEM, "data set");
        goto done;
    }
    BL_TRY_GOTO(st, done, read_index(samples));
    samples->rules.options.path = NULL; /* the caller's texts, borrowed until here */
    samples->rules.options.chat_template = samples->rules.options.template_date = NULL;
    samples->rules.options.text_key = NULL;
    samples->rules.options.more_paths = NULL;
    samples->rules.options.shares = NULL;
    samples->rules.options.no_tokenizer = NULL;
    *out = samples;
    samples = NULL;
done:
    bl_samples_release(samples);
    return st;
}

void bl_samples_release(bl_samples *samples)
{
    if (!samples || --samples->n_references > 0) return;
    bl_data_files_free(samples);
    bl_chat_template_destroy(samples->rules.chat);
    free(samples->rules.text_key);
    free(samples->path);
    bl_index_free(&samples->index);
    free(samples);
}

/* ---- use ---- */

/* Sample `index` has changed since opening. */
static bl_status fail_changed(const bl_samples *samples, int64_t index)
{
    const bl_data_file *file = bl_data_file_of(samples, (size_t)index);
    int64_t line = 0;

    if (file->is_copy)
        return BL_FAIL(BL_EIO, "%s: the copy of sample %" PRId64 " (from 0) in TMPDIR is damaged",
                       file->path, index);
    BL_TRY(bl_row_find_line(file->path, file->fd, samples->entry[index].offset_bytes, &line));
    return BL_FAIL(BL_EINPUT,
                   "%s:%" PRId64 ": sample %" PRId64
                   " (from 0) has changed since the file was scanned; "
                   "a file that is trained on must stay as it is",
                   file->path, line, index);
}

bl_status bl_samples_get(const bl_samples *samples, int64_t index, bl_sample *out)
{
    bl_row_verdict verdict = BL_ROW_USED;
    int64_t n_lost;

    *out = (bl_sample){0};
    const bl_row_entry *entry = &samples->entry[index];
    const bl_data_file *file = bl_data_file_of(samples, (size_t)index);
    bl_row row = {
        .n_bytes = entry->n_bytes, .offset_bytes = entry->offset_bytes, .line = 1, .column = 1};
    char *text = malloc(row.n_bytes + 1);
    if (!text) return BL_FAIL(BL_ENOMEM, "%s: a row of %zu bytes", file->path, row.n_bytes);
    row.text = text;
    bl_status st = bl_file_read_full(file->fd, file->path, text, row.n_bytes, row.offset_bytes);
    bool same = st == BL_OK && bl_row_hash(&row) == entry->hash;
    if (same) st = bl_sample_build(&samples->rules, file->path, &row, NULL, out, &verdict, &n_lost);
    /* The row was good when the file was scanned. The count bounds the copies of packing: no hash
     * checks it. */
    same = same && verdict == BL_ROW_USED && out->n_tokens == entry->n_tokens;
    if (st == BL_EINPUT || (st == BL_OK && !same)) {
        bl_sample_free(out);
        st = fail_changed(samples, index);
    }
    free(text);
    return st;
}

int64_t bl_samples_n_tokens(const bl_samples *samples, int64_t index)
{
    return samples->entry[index].n_tokens;
}
