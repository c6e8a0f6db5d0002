/* SPDX-License-Identifier: Apache-2.0 */
/* verify_explain.c -- a matrix that has another delta than its own: of another expert, layer or
 * half, or with B packed otherwise. Tried on its first rows. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "convert/verify_internal.h"

enum { SAMPLE_ROWS = 64, MAX_OTHERS = 1024 };

typedef struct search {
    const bl_verify *v;
    bl_delta *delta;
    const bl_delta_sides *sides;
    double least; /* share of the change that a delta must explain */
    bool found;
    char *text;
} search;

/* The share of the change that lies along the delta, if about one delta is in it; else 0. */
static double share_of(const bl_delta_sums *s)
{
    double delta = s->direct.delta, kept = delta > 0 ? s->change_along / delta : 0;

    if (s->change <= 0 || kept < 0.5 || kept > 1.5) return 0;
    return s->change_along * s->change_along / (delta * s->change);
}

static bl_status try(search *s, const bl_factors *f, const char *format, const char *name,
                     int64_t number)
{
    bl_delta_sums sums;

    if (s->found) return BL_OK;
    BL_TRY(bl_delta_compare(s->delta, s->sides, f, SAMPLE_ROWS, &sums));
    if (share_of(&sums) <= s->least) return BL_OK;
    s->found = true;
    if (name)
        snprintf(s->text, BL_VERIFY_NAME_BYTES, "%s %.400s", format, name);
    else
        snprintf(s->text, BL_VERIFY_NAME_BYTES, "%s %" PRId64, format, number);
    return BL_OK;
}

/* Stacked: other experts of the same tensors, B with the expert as the slow index, and the other
 * half of gate_up_proj. */
static bl_status try_experts(search *s, const bl_factors *own)
{
    bl_factors f = *own;
    int64_t half = own->a->rows / 2;
    bool is_half = own->a->parameter && strcmp(own->a->parameter, "gate_up_proj") == 0 &&
                   s->sides->base.rows == half;

    if (own->b->n_experts > 1) {
        f.is_expert_slow = true;
        BL_TRY(try(s, &f, "B packed with", "the expert as the slow index", 0));
        f = *own;
    }
    for (int64_t e = 0; e < own->b->n_experts; e++) {
        if (e == own->expert_b) continue;
        f.expert_b = e;
        f.expert_a = own->expert_a;
        BL_TRY(try(s, &f, "B of expert", NULL, e));
        f.expert_a = e;
        BL_TRY(try(s, &f, "the delta of expert", NULL, e));
    }
    f = *own;
    f.row = own->row == 0 ? half : 0;
    return is_half ? try(s, &f, "the delta of", own->row == 0 ? "up_proj" : "gate_proj", 0) : BL_OK;
}

/* Other modules of the same shapes: in other layers, other experts one by one, gate and up. */
static bl_status try_modules(search *s, const bl_factors *own)
{
    const bl_verify_adapter *a = &s->v->adapter;
    int n_tried = 0;

    for (size_t i = 0; i < a->n_pairs && n_tried < MAX_OTHERS && !s->found; i++) {
        const bl_pair *p = &a->pairs[i];
        bl_factors f = *own;
        if (p == own->a || !p->fits || p->has_nan || p->n_experts != own->a->n_experts ||
            p->rows != own->a->rows || p->cols != own->a->cols || p->r != own->a->r ||
            p->is_transposed != own->a->is_transposed)
            continue;
        n_tried++;
        f.b = p;
        BL_TRY(try(s, &f, "B of", p->module, 0));
        f.a = p;
        BL_TRY(try(s, &f, "the delta of", p->module, 0));
    }
    return BL_OK;
}

bl_status bl_verify_explain(const bl_verify *v, bl_delta *delta, const bl_delta_sides *sides,
                            const bl_factors *own, char text[BL_VERIFY_NAME_BYTES], bool *found)
{
    search s = {.v = v, .delta = delta, .sides = sides, .text = text};
    bl_delta_sums sums;
    bl_factors flipped = *own;

    BL_TRY(bl_delta_compare(delta, sides, own, SAMPLE_ROWS, &sums));
    s.least = 2 * share_of(&sums) + 0.02;
    BL_TRY(try_experts(&s, own));
    flipped.is_flipped = true;
    if (own->a->rows == own->a->cols && sides->base.rows == own->a->rows)
        BL_TRY(try(&s, &flipped, "the delta", "transposed", 0));
    BL_TRY(try_modules(&s, own));
    *found = s.found;
    return BL_OK;
}
