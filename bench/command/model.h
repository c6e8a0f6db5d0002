/* SPDX-License-Identifier: Apache-2.0 */
/* model.h -- a model and data made for a measurement: random, of any shape, in a scratch
 * directory. */
#ifndef BALLAST_BENCH_COMMAND_MODEL_H
#define BALLAST_BENCH_COMMAND_MODEL_H

#include <stdint.h>

#include "base/status.h"

/* A Llama with tied embeddings, bf16, two key/value heads and heads of 32. */
typedef struct bl_bench_model {
    int64_t layers, hidden, inter, vocab; /* hidden: a multiple of 64 */
    int64_t rows, row_tokens;             /* of the data: `tokens` rows of random ids */
} bl_bench_model;

/* Writes DIR/model/ (a Hugging Face directory) and DIR/train.jsonl. DIR must exist. */
bl_status bl_bench_model_write(const bl_bench_model *model, const char *dir);
/* DIR/train.jsonl alone: needs vocab, rows and row_tokens. */
bl_status bl_bench_model_write_rows(const bl_bench_model *model, const char *dir);

/* Weights of one layer's seven projections. */
int64_t bl_bench_model_layer_weights(const bl_bench_model *model);

#endif
