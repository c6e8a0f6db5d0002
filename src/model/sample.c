/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c -- the next token: logits to probabilities, some removed, one drawn. */
#include "model/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ops/philox.h"

struct bl_token_sampler {
    bl_sampling options;
    int64_t vocab;
    double *p;      /* (vocab): scores, then probabilities */
    double *sorted; /* (vocab): those of top_k; NULL without it */
};

bl_status bl_token_sampler_create(const bl_sampling *sampling, int64_t vocab,
                                  bl_token_sampler **out)
{
    bl_token_sampler *s = calloc(1, sizeof *s);

    *out = NULL;
    if (!s) return BL_FAIL(BL_ENOMEM, "a sampler");
    *s = (bl_token_sampler){.options = *sampling, .vocab = vocab};
    s->p = calloc((size_t)vocab, sizeof *s->p);
    if (sampling->top_k > 0) s->sorted = calloc((size_t)vocab, sizeof *s->sorted);
    if (!s->p || (sampling->top_k > 0 && !s->sorted)) {
        bl_token_sampler_destroy(s);
        return BL_FAIL(BL_ENOMEM, "probabilities of %lld tokens", (long long)vocab);
    }
    *out = s;
    return BL_OK;
}

void bl_token_sampler_destroy(bl_token_sampler *s)
{
    if (!s) return;
    free(s->p);
    free(s->sorted);
    free(s);
}

/* The first of the largest values. */
static int64_t find_largest(const double *values, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

/* A token's logit is read from `logits`: one that the sequence has twice is changed once. */
static void penalize(bl_token_sampler *s, const float *logits, const int32_t *ids, int64_t n)
{
    double penalty = s->options.repetition_penalty;

    for (int64_t i = 0; i < s->vocab; i++) s->p[i] = logits[i];
    if (penalty == 1.0) return;
    for (int64_t i = 0; i < n; i++) {
        double logit = logits[ids[i]];
        s->p[ids[i]] = logit > 0 ? logit / penalty : logit * penalty;
    }
}

static double sum_of(const double *p, int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += p[i];
    return sum;
}

static void remove_below(bl_token_sampler *s, double threshold)
{
    for (int64_t i = 0; i < s->vocab; i++)
        if (s->p[i] < threshold) s->p[i] = 0.0;
}

static int compare_descending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

static void keep_top_k(bl_token_sampler *s)
{
    size_t n = (size_t)s->vocab;

    memcpy(s->sorted, s->p, n * sizeof *s->p);
    qsort(s->sorted, n, sizeof *s->sorted, compare_descending);
    remove_below(s, s->sorted[s->options.top_k - 1]);
}

/* The largest threshold such that tokens at least as likely reach `mass`, found by bisection: no
 * sorting, no memory. */
static double find_nucleus(const bl_token_sampler *s, double mass, double largest)
{
    double low = 0.0, high = largest;

    for (int round = 0; round < 60; round++) {
        double middle = 0.5 * (low + high), reached = 0.0;
        for (int64_t i = 0; i < s->vocab; i++)
            if (s->p[i] >= middle) reached += s->p[i];
        if (reached >= mass)
            low = middle;
        else
            high = middle;
    }
    return low;
}

const double *bl_token_sampler_probabilities(bl_token_sampler *s, const float *logits,
                                             const int32_t *ids, int64_t n, double *sum)
{
    const bl_sampling *o = &s->options;

    penalize(s, logits, ids, n);
    int64_t best = find_largest(s->p, s->vocab);
    if (o->temperature <= 0.0) {
        memset(s->p, 0, (size_t)s->vocab * sizeof *s->p);
        *sum = s->p[best] = 1.0;
        return s->p;
    }
    double max = s->p[best], total = 1.0;
    for (int64_t i = 0; i < s->vocab; i++) s->p[i] = exp((s->p[i] - max) / o->temperature);
    double whole = sum_of(s->p, s->vocab);
    for (int64_t i = 0; i < s->vocab; i++) s->p[i] /= whole;
    if (o->top_k > 0 && o->top_k < s->vocab) {
        keep_top_k(s);
        total = sum_of(s->p, s->vocab);
    }
    if (o->top_p < 1.0) remove_below(s, find_nucleus(s, o->top_p * total, s->p[best]));
    remove_below(s, o->min_p * s->p[best]);
    *sum = sum_of(s->p, s->vocab);
    return s->p;
}

int32_t bl_token_sampler_choose(bl_token_sampler *s, const float *logits, const int32_t *ids,
                                int64_t n)
{
    uint64_t seed = s->options.seed;
    double sum;
    const double *p = bl_token_sampler_probabilities(s, logits, ids, n, &sum);
    uint32_t words[4] = {(uint32_t)n, (uint32_t)((uint64_t)n >> 32), 0, 0};

    bl_philox_4x32_10(words, (bl_philox_key){{(uint32_t)seed,
                                              (uint32_t)(seed >> 32) ^ 0x47656e65u}}); /* "Gene" */
    double target = ((double)words[0] + 0.5) * 0x1p-32 * sum;
    for (int64_t i = 0; i < s->vocab; i++) {
        if (p[i] == 0.0) continue;
        target -= p[i];
        if (target < 0.0) return (int32_t)i;
    }
    return (int32_t)find_largest(p, s->vocab); /* rounding left a rest */
}
