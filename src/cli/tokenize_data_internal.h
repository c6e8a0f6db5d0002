/* SPDX-License-Identifier: Apache-2.0 */
/* tokenize_data_internal.h -- `ballast tokenize --data`: a data set as a training run sees it. */
#ifndef BALLAST_CLI_TOKENIZE_DATA_INTERNAL_H
#define BALLAST_CLI_TOKENIZE_DATA_INTERNAL_H

#include "data/dataset.h"

/* Prints the first n_rows rows (negative: all) of the data set, packed as asked, to stdout: with
 * as_json a line of data_format tokens each, else a table of tokens and labels with the trained
 * ones marked. The errors of bl_dataset_open and bl_dataset_pack. */
bl_status bl_cli_show_data(const bl_tokenizer *tokenizer, const bl_dataset_options *options,
                           bl_packing packing, int64_t n_rows, bool as_json);

#endif
