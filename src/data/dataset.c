/* SPDX-License-Identifier: Apache-2.0 */
/* dataset.c -- the interface: rows that are the samples of a file (samples.c) or are packed of them
 * (pack.c). */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#define XXH_INLINE_ALL
#include "data/internal.h"

struct bl_dataset {
    bl_samples *samples; /* holds one reference */
    bl_pack *pack;       /* NULL: rows are samples */
};

static const char *const format_names[] = {"auto",
                                           "tokens",
                                           "text",
                                           "alpaca",
                                           "prompt_completion",
                                           "messages",
                                           "sharegpt",
                                           "preference",
                                           "unpaired_preference"};

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

/* ---- opening ---- */

bl_status bl_dataset_open(const bl_dataset_options *options, const bl_tokenizer *tokenizer,
                          bl_dataset **out)
{
    *out = NULL;
    bl_dataset *dataset = calloc(1, sizeof *dataset);
    if (!dataset) return BL_FAIL(BL_ENOMEM, "data set");
    bl_status st = bl_samples_open(options, tokenizer, &dataset->samples);
    if (st != BL_OK) {
        free(dataset);
        return st;
    }
    *out = dataset;
    return BL_OK;
}

bl_status bl_dataset_pack(bl_dataset *samples, bl_packing packing, int64_t row_tokens,
                          int64_t first, int64_t n, bl_dataset **out)
{
    *out = NULL;
    if (packing == BL_PACKING_NONE || samples->pack || first < 0 || n < 1 ||
        n > bl_dataset_count(samples) - first || n > UINT32_MAX)
        return BL_FAIL(BL_EINTERNAL, "packing %s of samples [%" PRId64 ", %" PRId64 " more)",
                       bl_packing_name(packing), first, n);
    if (row_tokens < 2 || row_tokens > INT32_MAX)
        return BL_FAIL(BL_EUSAGE, "packing %s needs a max_seq_length, of at least 2",
                       bl_packing_name(packing));
    bl_dataset *dataset = calloc(1, sizeof *dataset);
    if (!dataset) return BL_FAIL(BL_ENOMEM, "%s: packed rows", samples->samples->path);
    bl_status st = bl_pack_create(samples->samples, packing, row_tokens, first, n, &dataset->pack);
    if (st != BL_OK) {
        free(dataset);
        return st;
    }
    dataset->samples = samples->samples;
    dataset->samples->n_references++;
    *out = dataset;
    return BL_OK;
}

void bl_dataset_close(bl_dataset *dataset)
{
    if (!dataset) return;
    bl_pack_free(dataset->pack);
    bl_samples_release(dataset->samples);
    free(dataset);
}

/* ---- use ---- */

bl_data_format bl_dataset_format(const bl_dataset *dataset)
{
    return dataset->samples->rules.options.format;
}

int64_t bl_dataset_count(const bl_dataset *dataset)
{
    return dataset->pack ? bl_pack_count(dataset->pack) : (int64_t)dataset->samples->n;
}

int64_t bl_dataset_n_tokens(const bl_dataset *dataset, int64_t index)
{
    return dataset->pack ? bl_pack_n_tokens(dataset->pack, index)
                         : bl_samples_n_tokens(dataset->samples, index);
}

void bl_dataset_get_stats(const bl_dataset *dataset, bl_dataset_stats *out)
{
    *out = dataset->samples->stats;
}

int64_t bl_dataset_index_bytes(const bl_dataset *dataset)
{
    return (int64_t)dataset->samples->index.n_bytes +
           (dataset->pack ? bl_pack_index_bytes(dataset->pack) : 0);
}

uint64_t bl_dataset_fingerprint(const bl_dataset *dataset)
{
    return dataset->pack ? bl_pack_fingerprint(dataset->pack) : dataset->samples->fingerprint;
}

bl_status bl_dataset_get(const bl_dataset *dataset, int64_t index, bl_sample *out)
{
    *out = (bl_sample){0};
    if (index < 0 || index >= bl_dataset_count(dataset))
        return BL_FAIL(BL_EINTERNAL, "%s: row %" PRId64 " of %" PRId64, dataset->samples->path,
                       index, bl_dataset_count(dataset));
    return dataset->pack ? bl_pack_get(dataset->pack, index, out)
                         : bl_samples_get(dataset->samples, index, out);
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
