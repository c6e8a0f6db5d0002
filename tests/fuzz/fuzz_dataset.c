/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of training data, then a chat template file. First byte: the format, and from 128 on that
 * the rows are CSV; second: how overlong rows, bad rows and the loss are treated. gzip and
 * Zstandard go by the rows' first bytes. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "data/dataset.h"

enum { VOCAB = 1000, MAX_TOKENS = 48, EOS = 2 };

static bl_dataset_options choose(const char *path, uint8_t format, uint8_t flags)
{
    bl_dataset_options options = bl_dataset_default_options(path);

    options.format = (bl_data_format)((format & 127) % (BL_DATA_UNPAIRED_PREFERENCE + 1));
    options.overlong = (bl_overlong)(flags % 3);
    options.max_seq_length = flags & 4 ? MAX_TOKENS : 0;
    options.train_on_inputs = flags & 8;
    options.add_eos = !(flags & 16);
    options.skip_bad = (flags & 96) == 96;
    options.vocab_size = VOCAB;
    options.eos_id = EOS;
    return options;
}

static void check_samples(const bl_dataset *dataset, int64_t max_tokens)
{
    bl_dataset_stats stats;
    int64_t n_tokens = 0;

    for (int64_t i = 0; i < bl_dataset_count(dataset); i++) {
        bl_sample sample;
        if (bl_dataset_get(dataset, i, &sample) != BL_OK) abort(); /* opening has built it once */
        if (sample.n_tokens != bl_dataset_n_tokens(dataset, i) ||
            (max_tokens > 0 && sample.n_tokens > max_tokens))
            abort();
        for (int64_t t = 0; t < sample.n_tokens; t++) {
            if (sample.ids[t] < 0 || sample.ids[t] >= VOCAB) abort();
            if (sample.labels[t] != sample.ids[t] &&
                (sample.labels[t] < BL_LABEL_MASKED || sample.labels[t] >= VOCAB))
                abort();
        }
        n_tokens += sample.n_tokens;
        bl_sample_free(&sample);
    }
    bl_dataset_get_stats(dataset, &stats);
    if (stats.n_tokens != n_tokens || bl_dataset_count(dataset) == 0) abort();
}

static void check_packing(bl_dataset *dataset, bl_packing packing)
{
    bl_dataset *rows = NULL;

    fuzz_check(bl_dataset_pack(dataset, packing, MAX_TOKENS, 0, bl_dataset_count(dataset), &rows));
    for (int64_t i = 0; rows && i < bl_dataset_count(rows); i++) {
        bl_sample sample;
        if (bl_dataset_get(rows, i, &sample) != BL_OK || sample.n_tokens > MAX_TOKENS ||
            sample.n_tokens < 1)
            abort();
        bl_sample_free(&sample);
    }
    bl_dataset_close(rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static bl_tokenizer *tokenizer;
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    bl_dataset *dataset = NULL;

    if (!tokenizer &&
        bl_tokenizer_load("tests/tokenizer/fixtures/fallback.json", &tokenizer) != BL_OK)
        abort();
    uint8_t format = fuzz_byte(&input), flags = fuzz_byte(&input);
    fuzz_part rows = fuzz_next(&input), template = fuzz_next(&input);
    const char *name = format & 128 ? "rows.csv" : "rows.jsonl";
    fuzz_write(name, rows);
    fuzz_write("chat.yaml", template);
    char *rows_path = strdup(fuzz_path(name)), *template_path = strdup(fuzz_path("chat.yaml"));
    bl_dataset_options options = choose(rows_path, format, flags);
    options.chat_template = template.bytes ? template_path : NULL;
    bl_status st = bl_dataset_open(&options, tokenizer, &dataset);
    fuzz_check(st);
    if ((st == BL_OK) != (dataset != NULL)) abort();
    if (dataset) check_samples(dataset, options.max_seq_length);
    if (dataset && flags & 128)
        check_packing(dataset, flags & 64 ? BL_PACKING_PACK : BL_PACKING_CONCATENATE);
    bl_dataset_close(dataset);
    free(rows_path);
    free(template_path);
    return 0;
}
