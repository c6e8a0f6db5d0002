/* SPDX-License-Identifier: Apache-2.0 */
/* remedies.c -- changes to keys or hardware with which something would fit, after a search that
 * found nothing. */
#include <stdarg.h>
#include <stdio.h>

#include "base/sizes.h"
#include "plan/choice_internal.h"
#include "plan/report_internal.h"

typedef struct remedies {
    char *text;
    size_t n_used;
} remedies;

static void add(remedies *r, const char *format, ...) BL_PRINTF(2, 3);
static void add(remedies *r, const char *format, ...)
{
    va_list arguments;

    char one[128];

    va_start(arguments, format);
    vsnprintf(one, sizeof one, format, arguments);
    va_end(arguments);
    int n = snprintf(r->text + r->n_used, BL_PLAN_REMEDY_BYTES - r->n_used, "%s%s",
                     r->n_used > 0 ? ", or " : "", one);
    r->n_used = (size_t)bl_min_i64((int64_t)r->n_used + n, BL_PLAN_REMEDY_BYTES - 1);
}

/* Searches with one more free key; adds its value if something fits. */
static bl_status free_one(const bl_plan_input *in, unsigned free_keys, unsigned freedom,
                          remedies *r)
{
    bl_plan_choice choice;
    const bl_train_config *c = &choice.best.config;

    if ((free_keys | plan_fixed_keys(in->config)) & freedom) return BL_OK;
    if ((freedom & (BL_FREE_OPTIMIZER | BL_FREE_COPY)) && !bl_train_config_is_full(in->config))
        return BL_OK;
    BL_TRY(plan_search_memory(in, free_keys | freedom, &choice));
    if (choice.n_fit == 0) return BL_OK;
    if (freedom == BL_FREE_RATIO) add(r, "offload_ratio %.2f", c->offload_ratio);
    if (freedom == BL_FREE_SAVE)
        add(r, "activation_checkpointing %s",
            bl_plan_save_name(bl_plan_save_of(c->activation_checkpointing)));
    if (freedom == BL_FREE_ACTIVATION_OFFLOAD)
        add(r, "activation_offload %s", c->activation_offload ? "true" : "false");
    if (freedom == BL_FREE_VISIT) add(r, "visit_tokens %lld", (long long)c->visit_tokens);
    if (freedom == BL_FREE_MICRO_BATCH)
        add(r, "per_device_train_batch_size %lld, gradient_accumulation_steps %lld",
            (long long)c->per_device_train_batch_size, (long long)c->gradient_accumulation_steps);
    if (freedom == BL_FREE_TIER) add(r, "offload_tier disk");
    if (freedom == BL_FREE_OPTIMIZER)
        add(r, "optimizer_tier %s", plan_optimizer_tier_name(choice.best.plan.optimizer.tier));
    if (freedom == BL_FREE_COPY)
        add(r, "offload_compute_copy %s",
            choice.best.plan.placement.places_copy ? "true" : "false");
    return BL_OK;
}

/* Adds the longest rows that fit, a multiple of 128 tokens. */
static bl_status shorten_rows(const bl_plan_input *in, unsigned free_keys, remedies *r)
{
    enum { STEP = 128 };
    bl_plan_choice choice;
    int64_t low = 0, high = in->longest_train_row / STEP;

    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        bl_plan_input shorter = *in;
        shorter.longest_train_row = middle * STEP;
        shorter.longest_validation_row = bl_min_i64(in->longest_validation_row, middle * STEP);
        BL_TRY(plan_search_memory(&shorter, free_keys, &choice));
        if (choice.n_fit > 0)
            low = middle;
        else
            high = middle - 1;
    }
    if (low > 0 && low * STEP < in->longest_train_row)
        add(r, "max_seq_length %lld", (long long)(low * STEP));
    return BL_OK;
}

/* Doubles the hosts, up to 64 times as many, until something fits. */
static bl_status add_hosts(const bl_plan_input *in, unsigned free_keys, remedies *r)
{
    enum { MOST = 64 };
    bl_plan_choice choice;
    int n_hosts = (int)bl_ceil_div(in->topology.n_ranks, in->topology.n_on_host);

    for (int n = 2 * n_hosts; n <= MOST * n_hosts; n *= 2) {
        bl_train_config c = *in->config;
        bl_plan_input more = *in;
        more.config = &c;
        more.topology.n_ranks = n * in->topology.n_on_host;
        c.ranks = c.shard_size = more.topology.n_ranks;
        BL_TRY(plan_search_memory(&more, free_keys & ~(unsigned)BL_FREE_SHARDS, &choice));
        if (choice.n_fit == 0) continue;
        add(r, "%d hosts of this kind, %d ranks", n, more.topology.n_ranks);
        return BL_OK;
    }
    return BL_OK;
}

bl_status bl_plan_find_remedies(const bl_plan_input *in, unsigned free_keys,
                                char out[BL_PLAN_REMEDY_BYTES])
{
    static const unsigned freedoms[] = {BL_FREE_RATIO, BL_FREE_OPTIMIZER,          BL_FREE_COPY,
                                        BL_FREE_SAVE,  BL_FREE_ACTIVATION_OFFLOAD, BL_FREE_VISIT,
                                        BL_FREE_TIER,  BL_FREE_MICRO_BATCH};
    remedies r = {.text = out};

    out[0] = '\0';
    for (size_t i = 0; i < BL_COUNT(freedoms); i++)
        BL_TRY(free_one(in, free_keys, freedoms[i], &r));
    BL_TRY(shorten_rows(in, free_keys, &r));
    return add_hosts(in, free_keys, &r);
}
