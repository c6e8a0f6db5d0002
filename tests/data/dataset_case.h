/* SPDX-License-Identifier: Apache-2.0 */
/* dataset_case.h -- a file of rows in a folder, opened as a data set with a small tokenizer. */
#ifndef BALLAST_TESTS_DATA_DATASET_CASE_H
#define BALLAST_TESTS_DATA_DATASET_CASE_H

#include "data/dataset.h"

enum { EOS = 900, M = BL_LABEL_MASKED };

extern char folder[64], path[128];
extern bl_tokenizer *tokenizer; /* fixtures/fallback.json: BOS <s> = 1, a byte <0xXX> = 2 + XX */

/* Of each test: makes and removes the folder. */
int set_up(void **state);
int tear_down(void **state);

void write_bytes(const char *bytes, size_t n); /* into `path` */
bl_dataset_options default_options(void);      /* of `path`, with EOS and 1,000 tokens */

/* Writes the text into `path` and opens it. */
bl_dataset *open_with(const bl_dataset_options *options, const char *text);
bl_dataset *open_text(const char *text);

/* The sample has these n ids and labels. */
void check_sample(const bl_dataset *dataset, int64_t index, size_t n, const int32_t *ids,
                  const int32_t *labels);
/* Opening fails with BL_EINPUT, and the text says `reason`. */
void check_refused(const bl_dataset_options *options, const char *bytes, size_t n,
                   const char *reason);

#endif
