/* SPDX-License-Identifier: Apache-2.0 */
/* dataset_case.c -- the file, the folder and the tokenizer of dataset_case.h. */
#include "dataset_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"

char folder[64], path[128];
bl_tokenizer *tokenizer;

int set_up(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-dataset-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/rows.jsonl", folder);
    return bl_tokenizer_load("tests/tokenizer/fixtures/fallback.json", &tokenizer) == BL_OK ? 0
                                                                                            : -1;
}

int tear_down(void **state)
{
    (void)state;
    bl_tokenizer_destroy(tokenizer);
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

void write_bytes(const char *bytes, size_t n)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

bl_dataset_options default_options(void)
{
    bl_dataset_options options = bl_dataset_default_options(path);
    options.eos_id = EOS;
    options.vocab_size = 1000;
    return options;
}

bl_dataset *open_with(const bl_dataset_options *options, const char *text)
{
    bl_dataset *dataset;
    write_bytes(text, strlen(text));
    if (bl_dataset_open(options, tokenizer, &dataset) != BL_OK) fail_msg("%s", bl_error_text());
    return dataset;
}

bl_dataset *open_text(const char *text)
{
    bl_dataset_options options = default_options();
    return open_with(&options, text);
}

void check_sample(const bl_dataset *dataset, int64_t index, size_t n, const int32_t *ids,
                  const int32_t *labels)
{
    bl_sample sample;
    if (bl_dataset_get(dataset, index, &sample) != BL_OK) fail_msg("%s", bl_error_text());
    assert_int_equal(sample.n_tokens, n);
    assert_int_equal(bl_dataset_n_tokens(dataset, index), n);
    assert_memory_equal(sample.ids, ids, n * sizeof *ids);
    assert_memory_equal(sample.labels, labels, n * sizeof *labels);
    bl_sample_free(&sample);
}

void check_refused(const bl_dataset_options *options, const char *bytes, size_t n,
                   const char *reason)
{
    bl_dataset *dataset;
    write_bytes(bytes, n);
    bl_status st = bl_dataset_open(options, tokenizer, &dataset);
    if (st != BL_EINPUT) fail_msg("status %d for %s", (int)st, bytes);
    assert_null(dataset);
    if (!strstr(bl_error_text(), reason) || strncmp(bl_error_text(), path, strlen(path)))
        fail_msg("\"%s\" does not say \"%s\"", bl_error_text(), reason);
}
