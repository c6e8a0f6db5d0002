/* SPDX-License-Identifier: Apache-2.0 */
/* sampling.c -- an adapter continues ids: a visit of all layers per token. */
#include "base/sizes.h"
#include "model/generate.h"
#include "model/sample.h"
#include "train/session/session_internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct sampling {
    const bl_session_sampling *options;
    int32_t *ids; /* the prompt, then what is chosen */
    int64_t n_prompt, n_most, n;
    bl_generator *generator;
    bl_token_sampler *sampler;
} sampling;

/* As `ballast generate`. */
static bool is_end(const bl_model_config *c, const bl_tokenizer *tokenizer, int32_t id)
{
    size_t n = 0;

    for (int i = 0; i < c->n_eos_token_ids; i++)
        if (c->eos_token_ids[i] == id) return true;
    const int32_t *ends = tokenizer ? bl_tokenizer_eos(tokenizer, &n) : NULL;
    for (size_t i = 0; i < n; i++)
        if (ends[i] == id) return true;
    return false;
}

static bl_status open_sampling(bl_session_adapter *a, sampling *g)
{
    const bl_session_sampling *o = g->options;
    const bl_sampling options = {.repetition_penalty = 1,
                                 .temperature = o->temperature,
                                 .top_k = o->top_k,
                                 .top_p = o->top_p,
                                 .seed = o->seed};
    bl_rank *r = &a->rank;

    BL_TRY(bl_token_sampler_create(&options, a->job.model->config.vocab_size, &g->sampler));
    BL_TRY(bl_generator_create(r->device, r->compute, r->weights, r->base, &a->job.lora,
                               bl_trained_state_weights(r->state), g->n_prompt + g->n_most,
                               &g->generator));
    return r->adapter.terms ? bl_generator_use_terms(g->generator, r->adapter.terms) : BL_OK;
}

static bl_status choose_tokens(bl_session_adapter *a, sampling *g)
{
    const bl_tokenizer *tokenizer;
    const float *logits;

    BL_TRY(train_session_tokenizer(a->session, &tokenizer));
    BL_TRY(open_sampling(a, g));
    BL_TRY(bl_generator_extend(g->generator, g->ids, g->n_prompt, &logits));
    for (;;) {
        int64_t n = g->n_prompt + g->n;
        int32_t id = bl_token_sampler_choose(g->sampler, logits, g->ids, n);
        if (is_end(&a->job.model->config, tokenizer, id)) return BL_OK;
        g->ids[n] = id;
        if (++g->n == g->n_most) return BL_OK;
        BL_TRY(bl_generator_extend(g->generator, &id, 1, &logits));
    }
}

static bl_status run_sample(session_request *r)
{
    sampling *g = r->user;

    bl_status st = choose_tokens(r->adapter, g);
    bl_rank_drain(&r->adapter->rank);
    bl_generator_destroy(g->generator);
    bl_token_sampler_destroy(g->sampler);
    return st;
}

static bl_status check_sampling(const bl_session *s, const sampling *g, const int32_t *prompt)
{
    int64_t vocab = s->job.model->config.vocab_size, most = s->config->max_seq_length;

    if (!prompt || g->n_prompt < 1) return BL_FAIL(BL_EUSAGE, "prompt has no tokens");
    if (g->n_most < 1) return BL_FAIL(BL_EUSAGE, "max_tokens: %lld", (long long)g->n_most);
    if (g->n_prompt > most || g->n_most > most - g->n_prompt)
        return BL_FAIL(BL_EUSAGE,
                       "prompt of %lld and max_tokens of %lld tokens: together more than "
                       "max_seq_length %lld",
                       (long long)g->n_prompt, (long long)g->n_most, (long long)most);
    for (int64_t i = 0; i < g->n_prompt; i++)
        if (prompt[i] < 0 || prompt[i] >= vocab)
            return BL_FAIL(BL_EUSAGE, "prompt[%lld]: %d is not in [0, %lld)", (long long)i,
                           prompt[i], (long long)vocab);
    if (!(g->options->temperature >= 0 && g->options->temperature <= 1e6))
        return BL_FAIL(BL_EUSAGE, "temperature: %g is not in [0, 1e6]", g->options->temperature);
    if (g->options->top_k < 0)
        return BL_FAIL(BL_EUSAGE, "top_k: %lld", (long long)g->options->top_k);
    if (g->options->top_p >= 0 && g->options->top_p <= 1) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "top_p: %g is not in [0, 1]", g->options->top_p);
}

bl_status bl_session_sample(bl_session_adapter *a, const int32_t *prompt, int64_t n_prompt,
                            const bl_session_sampling *options, int64_t n_most, int32_t *ids,
                            int64_t *n)
{
    sampling g = {.options = options, .n_prompt = n_prompt, .n_most = n_most};
    session_request r = {.adapter = a, .run = run_sample, .user = &g};

    *n = 0;
    BL_TRY(check_sampling(a->session, &g, prompt));
    g.ids = calloc((size_t)(n_prompt + n_most), sizeof *g.ids);
    if (!g.ids) return BL_FAIL(BL_ENOMEM, "%lld ids", (long long)(n_prompt + n_most));
    memcpy(g.ids, prompt, (size_t)n_prompt * sizeof *prompt);
    bl_status st = train_session_submit(a->session, &r);
    if (st == BL_OK) {
        memcpy(ids, g.ids + n_prompt, (size_t)g.n * sizeof *ids);
        *n = g.n;
    }
    free(g.ids);
    return st;
}
