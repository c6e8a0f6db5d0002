/* SPDX-License-Identifier: Apache-2.0 */
/* sample.h -- the choice of the next token from its logits: greedy, or drawn.
 *
 * The steps and their order are those of transformers' generate: repetition_penalty changes the
 * logits (Keskar et al. 2019, arXiv:1909.05858), temperature divides them, then tokens are removed
 * by top_k (Fan et al. 2018, arXiv:1805.04833), by top_p (Holtzman et al. 2020, arXiv:1904.09751)
 * and by min_p (Nguyen et al. 2024, arXiv:2407.01082). The likeliest token always remains. Where
 * the last token that top_p keeps has equals, all of them remain; transformers keeps some. */
#ifndef BALLAST_MODEL_SAMPLE_H
#define BALLAST_MODEL_SAMPLE_H

#include <stdint.h>

#include "base/status.h"

typedef struct bl_sampling {
    double repetition_penalty; /* > 0; logits of tokens of the sequence are divided by it where they
                                  are positive, and multiplied where negative; 1: none */
    double temperature;        /* >= 0; 0: the most likely token, the lowest id of equals */
    int64_t top_k;             /* the k likeliest tokens and the equals of the last; 0: all */
    double top_p;              /* the smallest set whose probabilities reach top_p; 1: all */
    double min_p;              /* tokens of at least min_p of the largest probability; 0: all */
    uint64_t seed;
} bl_sampling;

typedef struct bl_token_sampler bl_token_sampler;

/* For vocabularies of `vocab` tokens. BL_ENOMEM. */
bl_status bl_token_sampler_create(const bl_sampling *sampling, int64_t vocab,
                                  bl_token_sampler **out);
void bl_token_sampler_destroy(bl_token_sampler *sampler); /* NULL is fine */

/* The probabilities (vocab, not normalized; 0: removed) from which a token is drawn, and their sum.
 * logits: (vocab), finite, host memory. ids: the n tokens before it. The sampler's memory, until
 * its next call. Without a temperature one token has all. */
const double *bl_token_sampler_probabilities(bl_token_sampler *sampler, const float *logits,
                                             const int32_t *ids, int64_t n, double *sum);

/* The token to append: a function of the arguments, of which (seed, n) give the draw. */
int32_t bl_token_sampler_choose(bl_token_sampler *sampler, const float *logits, const int32_t *ids,
                                int64_t n);

#endif
