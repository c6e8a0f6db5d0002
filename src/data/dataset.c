/* SPDX-License-Identifier: Apache-2.0 */
/* A data set in use: an index of where each usable row lies and how long its sample is, made by
 * scan.c. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include "data/internal.h"

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"

static const char *const format_names[] = {
    "auto", "tokens", "text", "alpaca", "prompt_completion", "messages", "sharegpt"};

static const char *const packing_names[] = {"none", "pack", "concatenate"};

const char *bl_data_format_name(bl_data_format format)
{
    return format_names[format];
}

const char *bl_packing_name(bl_packing packing)
{
    return packing_names[packing];
}

bl_dataset_options bl_dataset_default_options(const char *path)
{
    return (bl_dataset_options){.path = path, .add_eos = true, .eos_id = -1};
}

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
    int64_t format, vocab_size, eos_id;
} scanned;

/* The others build samples by the same rules, from the same index. */
static bl_status take_over(bl_dataset *dataset, const scanned *s)
{
    bl_dataset_options *options = &dataset->rules.options;

    dataset->stats = s->stats;
    dataset->n = dataset->capacity = (size_t)s->n;
    dataset->fingerprint = s->fingerprint;
    options->format = (bl_data_format)s->format;
    options->vocab_size = (int32_t)s->vocab_size;
    options->eos_id = (int32_t)s->eos_id;
    bool is_chat = options->format == BL_DATA_MESSAGES || options->format == BL_DATA_SHAREGPT;
    return is_chat ? bl_sample_rules_load_chat(dataset->path, &dataset->rules) : BL_OK;
}

static bl_status share(bl_dataset *dataset)
{
    const bl_dataset_options *options = &dataset->rules.options;
    bool is_first = bl_host_memory_rank(dataset->host) == 0;
    scanned s;

    memset(&s, 0, sizeof s); /* all its bytes are sent */
    if (is_first)
        s = (scanned){.stats = dataset->stats,
                      .n = dataset->n,
                      .fingerprint = dataset->fingerprint,
                      .format = options->format,
                      .vocab_size = options->vocab_size,
                      .eos_id = options->eos_id};
    BL_TRY(bl_host_memory_await(dataset->host));
    BL_TRY(bl_host_memory_tell(dataset->host, &s, sizeof s));
    if (!is_first) BL_TRY(take_over(dataset, &s));
    if (is_first) dataset->index.n_bytes = dataset->n * sizeof *dataset->entry;
    BL_TRY(bl_index_share(dataset->host, "index of a data set", &dataset->index));
    dataset->entry = dataset->index.bytes;
    return BL_OK;
}

/* The first rank of a host reads the file. */
static bl_status read_index(bl_dataset *dataset)
{
    if (bl_host_memory_rank(dataset->host) == 0) BL_TRY(bl_dataset_scan(dataset));
    return bl_host_memory_size(dataset->host) > 1 ? share(dataset) : BL_OK;
}

bl_status bl_dataset_open(const bl_dataset_options *options, const bl_tokenizer *tokenizer,
                          bl_dataset **out)
{
    bl_status st;

    *out = NULL;
    bl_dataset *dataset = calloc(1, sizeof *dataset);
    if (!dataset) return BL_FAIL(BL_ENOMEM, "data set");
    dataset->fd = -1;
    dataset->n_references = 1;
    dataset->host = options->host;
    dataset->rules = (bl_sample_rules){.options = *options, .tokenizer = tokenizer};
    if (!(dataset->path = strdup(options->path))) {
        st = BL_FAIL(BL_ENOMEM, "data set");
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_file_open(dataset->path, &dataset->fd, NULL));
    BL_TRY_GOTO(st, done, read_index(dataset));
    dataset->rules.options.path = NULL; /* the caller's texts, borrowed until here */
    dataset->rules.options.chat_template = dataset->rules.options.template_date = NULL;
    dataset->rules.options.no_tokenizer = NULL;
    *out = dataset;
    dataset = NULL;
done:
    bl_dataset_close(dataset);
    return st;
}

void bl_dataset_close(bl_dataset *dataset)
{
    if (!dataset || --dataset->n_references > 0) return;
    bl_pack_free(dataset->pack);
    if (dataset->fd >= 0) close(dataset->fd);
    bl_chat_template_destroy(dataset->rules.chat);
    free(dataset->path);
    bl_index_free(&dataset->index);
    free(dataset);
}

/* ---- use ---- */

/* Sample `index` is no longer what opening saw. */
static bl_status fail_changed(const bl_dataset *dataset, int64_t index)
{
    int64_t line = 0;

    BL_TRY(bl_row_find_line(dataset->path, dataset->fd, dataset->entry[index].offset_bytes, &line));
    return BL_FAIL(BL_EINPUT,
                   "%s:%" PRId64 ": sample %" PRId64
                   " (from 0) has changed since the file was scanned; "
                   "a file that is trained on must stay as it is",
                   dataset->path, line, index);
}

static const bl_dataset *samples_of(const bl_dataset *dataset)
{
    return dataset->pack ? bl_pack_samples(dataset->pack) : dataset;
}

bl_data_format bl_dataset_format(const bl_dataset *dataset)
{
    return samples_of(dataset)->rules.options.format;
}

int64_t bl_dataset_count(const bl_dataset *dataset)
{
    return dataset->pack ? bl_pack_count(dataset->pack) : (int64_t)dataset->n;
}

int64_t bl_dataset_n_tokens(const bl_dataset *dataset, int64_t index)
{
    return dataset->pack ? bl_pack_n_tokens(dataset->pack, index) : dataset->entry[index].n_tokens;
}

void bl_dataset_get_stats(const bl_dataset *dataset, bl_dataset_stats *out)
{
    *out = samples_of(dataset)->stats;
}

int64_t bl_dataset_index_bytes(const bl_dataset *dataset)
{
    return dataset->pack ? bl_pack_index_bytes(dataset->pack) : (int64_t)dataset->index.n_bytes;
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
    if (index < 0 || index >= bl_dataset_count(dataset))
        return BL_FAIL(BL_EINTERNAL, "%s: row %" PRId64 " of %" PRId64, samples_of(dataset)->path,
                       index, bl_dataset_count(dataset));
    if (dataset->pack) return bl_pack_get(dataset->pack, index, out);
    const bl_row_entry *entry = &dataset->entry[index];
    bl_row row = {
        .n_bytes = entry->n_bytes, .offset_bytes = entry->offset_bytes, .line = 1, .column = 1};
    char *text = malloc(row.n_bytes + 1);
    if (!text) return BL_FAIL(BL_ENOMEM, "%s: a row of %zu bytes", dataset->path, row.n_bytes);
    row.text = text;
    bl_status st =
        bl_file_read_full(dataset->fd, dataset->path, text, row.n_bytes, row.offset_bytes);
    bool same = st == BL_OK && bl_row_hash(&row) == entry->hash;
    if (same) st = bl_sample_build(&dataset->rules, dataset->path, &row, out, &verdict, &n_lost);
    /* The row was good when the file was scanned. The count bounds what packing copies: no hash vouches for
     * that. */
    same = same && verdict == BL_ROW_USED && out->n_tokens == entry->n_tokens;
    if (st == BL_EINPUT || (st == BL_OK && !same)) {
        bl_sample_free(out);
        st = fail_changed(dataset, index);
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
        return BL_FAIL(BL_EUSAGE,
                       "validation_split_percentage %g of %" PRId64 " rows leaves one part empty",
                       percentage, n_rows);
    return BL_OK;
}
