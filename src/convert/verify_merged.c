/* SPDX-License-Identifier: Apache-2.0 */
/* verify_merged.c -- a merged model against base and adapter, matrix by matrix. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/sizes.h"
#include "convert/verify_internal.h"

/* A deviation along the delta that is more than this, and than four standard errors, is a fault;
 * of M from W + d rounded, this share of what the delta changes is explained by another order of
 * rounding. Faults that are explained by other deltas; more are named alone. */
static const double ALONG = 0.02, OTHER_ROUNDING = 0.05;
enum { MAX_EXPLAINED = 16 };

typedef enum state {
    SAME,      /* not targeted: the base's values */
    PRESENT,   /* W + d, rounded */
    LOST,      /* W + d rounded is W rounded */
    UNCERTAIN, /* within rounding, of which d is too small a part */
    MISSING,
    SCALED,
    OTHER,
    CHANGED, /* not targeted: other values */
    BAD,     /* NaN, infinity */
    N_STATES
} state;
static const char *const state_keys[N_STATES] = {
    "same", "present", "lost", "uncertain", "missing", "scaled", "other", "changed", "nan"};

typedef struct result {
    const bl_verify_block *block;
    state state;
    bool is_target;
    double kept, residual, scale; /* scale: found */
    char *what;                   /* of OTHER and CHANGED; NULL: nothing more is known */
} result;

typedef struct target {
    const bl_verify_block *block;
    bl_factors factors;
    const bl_stored_tensor *saved; /* replaces the block; NULL: factors count */
    bool is_unusable;              /* its pair has a fault */
    bool is_tied_head;             /* of the head, stored as the embedding */
} target;

typedef struct walk {
    bl_verify *v;
    bl_delta *delta;
    target *targets; /* by block */
    size_t n_targets, capacity;
    result *results;
    size_t n_results, n_of_state[N_STATES], n_explained;
    bl_merge_sums sums;
    double along, along_noise, along_delta; /* of matrices where d is small beside rounding */
} walk;

/* ---- targets ---- */

static bl_status add_target(walk *w, target t)
{
    if (!t.block) return BL_OK;
    if (w->n_targets == w->capacity) {
        w->capacity = w->capacity ? 2 * w->capacity : 256;
        target *list = realloc(w->targets, w->capacity * sizeof *list);
        if (!list) return BL_FAIL(BL_ENOMEM, "a list of %zu targets", w->capacity);
        w->targets = list;
    }
    w->targets[w->n_targets++] = t;
    return BL_OK;
}

static bl_status add_expert(walk *w, const bl_pair *p, int64_t e, const char *end, int64_t row)
{
    char key[BL_VERIFY_NAME_BYTES + 64];

    snprintf(key, sizeof key, "%s%s%" PRId64 "%s", p->key,
             strcmp(p->parameter, "weight") == 0 ? ".weight[" : ".", e, end);
    return add_target(
        w, (target){.block = bl_verify_find(&w->v->base, key),
                    .factors = {.a = p, .b = p, .expert_a = e, .expert_b = e, .row = row},
                    .is_unusable = !p->fits || p->has_nan});
}

/* The names of a stacked parameter's blocks; those that the base does not have are left out. */
static bl_status add_pair(walk *w, const bl_pair *p)
{
    bool is_tied;

    if (!p->parameter) {
        const bl_verify_block *block = bl_verify_find_weight(w->v, p->key, &is_tied);
        return add_target(w, (target){.block = block,
                                      .factors = {.a = p, .b = p},
                                      .is_unusable = !p->fits || p->has_nan,
                                      .is_tied_head = is_tied});
    }
    for (int64_t e = 0; e < p->n_experts; e++) {
        if (strcmp(p->parameter, "weight") == 0) {
            BL_TRY(add_expert(w, p, e, "]", 0));
        } else if (strcmp(p->parameter, "down_proj") == 0) {
            BL_TRY(add_expert(w, p, e, ".down_proj.weight", 0));
            BL_TRY(add_expert(w, p, e, ".down_proj", 0));
        } else {
            BL_TRY(add_expert(w, p, e, ".gate_proj.weight", 0));
            BL_TRY(add_expert(w, p, e, ".up_proj.weight", p->rows / 2));
            BL_TRY(add_expert(w, p, e, ".gate_up_proj", 0));
        }
    }
    return BL_OK;
}

static int compare_targets(const void *a, const void *b)
{
    const target *x = a, *y = b;
    return (x->block > y->block) - (x->block < y->block);
}

static bl_status list_targets(walk *w)
{
    const bl_verify_adapter *a = &w->v->adapter;
    char name[BL_VERIFY_NAME_BYTES];
    bool is_tied;

    for (size_t i = 0; i < a->n_pairs; i++)
        if (a->pairs[i].n_experts > 0) BL_TRY(add_pair(w, &a->pairs[i]));
    for (size_t i = 0; i < a->n_others; i++) {
        if (strstr(a->others[i]->name, ".base_layer.")) continue;
        bl_verify_other_name(a->others[i], name);
        const bl_verify_block *block = bl_verify_find_other(w->v, name, &is_tied);
        BL_TRY(add_target(
            w, (target){.block = block, .saved = a->others[i], .is_tied_head = is_tied}));
    }
    if (w->n_targets > 0) qsort(w->targets, w->n_targets, sizeof *w->targets, compare_targets);
    return BL_OK;
}

/* The block's target: a module of modules_to_save before a delta; NULL: none. */
static const target *find_target(const walk *w, const bl_verify_block *block, bool is_tied_head)
{
    const target wanted = {.block = block}, *best = NULL,
                 *t = w->n_targets ? bsearch(&wanted, w->targets, w->n_targets, sizeof *w->targets,
                                             compare_targets)
                                   : NULL;

    while (t && t > w->targets && t[-1].block == block) t--;
    for (; t && t < w->targets + w->n_targets && t->block == block; t++)
        if (t->is_tied_head == is_tied_head && (!best || t->saved)) best = t;
    return best;
}

/* ---- one matrix ---- */

static state judge(const bl_delta_sums *s, double *scale)
{
    double delta = s->direct.delta, kept = delta > 0 ? s->change_along / delta : 0,
           noise = sqrt(s->direct_noise), direct = s->direct.dot - delta;
    bool is_nearest = s->off <= OTHER_ROUNDING * s->effect &&
                      fabs(s->off_along) <= ALONG * delta + 4 * sqrt(s->off_noise);

    *scale = kept;
    if (s->n_bad_merged > 0 || s->n_bad_base > 0) return BAD;
    if (is_nearest) return s->effect > 0 || delta == 0 ? PRESENT : LOST;
    if (s->effect > 0 && s->change <= OTHER_ROUNDING * s->effect) return MISSING;
    if (s->n_outside == 0 && fabs(direct) <= ALONG * delta + 4 * noise)
        return s->direct.dot >= 5 * noise ? PRESENT : UNCERTAIN;
    double rest = s->change - kept * s->change_along;
    if (fabs(s->change_along) > 5 * noise * fmin(1, fabs(kept)) && fabs(kept) > ALONG &&
        rest <= 0.1 * s->change + 2 * s->gaps)
        return SCALED;
    return OTHER;
}

static bl_status keep(walk *w, result r, const char *what)
{
    if (what && !(r.what = strdup(what))) return BL_FAIL(BL_ENOMEM, "the text %s", what);
    w->results[w->n_results++] = r;
    w->n_of_state[r.state]++;
    return BL_OK;
}

static bl_status compare_target(walk *w, const target *t, const bl_delta_sides *sides)
{
    bl_delta_sums s;
    result r = {.block = t->block, .is_target = true};
    char text[BL_VERIFY_NAME_BYTES];
    bool found = false;

    BL_TRY(bl_delta_compare(w->delta, sides, &t->factors, INT64_MAX, &s));
    r.state = judge(&s, &r.scale);
    r.scale *= t->factors.a->scale;
    if (s.direct.delta > 0) {
        r.kept = s.direct.dot / s.direct.delta;
        r.residual = sqrt(s.direct.error / s.direct.delta);
    }
    if (r.state == BAD) {
        snprintf(text, sizeof text, "%" PRId64 " values of %" PRId64 " in %s",
                 s.n_bad_merged ? s.n_bad_merged : s.n_bad_base, s.n,
                 s.n_bad_merged ? "the merged model" : "the base");
        return keep(w, r, text);
    }
    bl_merge_sums_add(&w->sums, &s.direct);
    if (r.state == UNCERTAIN) {
        w->along += s.direct.dot - s.direct.delta;
        w->along_noise += s.direct_noise;
        w->along_delta += s.direct.delta;
    }
    if (r.state == OTHER && w->n_explained++ < MAX_EXPLAINED)
        BL_TRY(bl_verify_explain(w->v, w->delta, sides, &t->factors, text, &found));
    return keep(w, r, found ? text : NULL);
}

/* Of the same dtype without scales: bits. Else the values, rounded. */
static bl_status compare_same(walk *w, const bl_verify_block *block, const bl_delta_sides *sides)
{
    const bl_stored_tensor *a = sides->base.tensor, *b = sides->merged.tensor;
    result r = {.block = block, .state = SAME};
    bl_delta_sums s;
    char text[BL_VERIFY_NAME_BYTES];
    bool is_same = false;

    bool is_exact = a->dtype == b->dtype && a->dtype != BL_F8_E4M3 &&
                    !bl_verify_is_packed(sides->merged_model, b);
    if (is_exact) BL_TRY(bl_delta_same_bytes(w->delta, &sides->base, &sides->merged, &is_same));
    if (is_same) return keep(w, r, NULL);
    BL_TRY(bl_delta_compare(w->delta, sides, NULL, INT64_MAX, &s));
    if (s.n_bad_merged > s.n_bad_base) {
        r.state = BAD;
        snprintf(text, sizeof text, "%" PRId64 " values of %" PRId64, s.n_bad_merged, s.n);
        return keep(w, r, text);
    }
    if (is_exact || s.n_outside > 0) r.state = CHANGED;
    snprintf(text, sizeof text, "%" PRId64 " of %" PRId64 " elements differ", s.n_differ, s.n);
    return keep(w, r, r.state == CHANGED ? text : NULL);
}

static const char *name_of(const bl_verify_block *block)
{
    const bl_stored_tensor *t = block->slice.tensor;
    return t->n_dims == 3 ? block->key : t->name;
}

/* ---- 4 bits ---- */

/* Experts in 4 bits: their matrices are stored with output channels first, and their blocks with
 * input channels first. */
static bool is_stack(const bl_stored_tensor *t)
{
    return t->dtype == BL_U8 && t->n_dims == 3;
}

static bl_status reject_stack(const bl_stored_tensor *t)
{
    return BL_FAIL(BL_EINPUT,
                   "%s: tensor %s: values of 4 bits are not compared; use the output of "
                   "ballast dequantize",
                   bl_safetensors_path(t->file), t->name);
}

/* BL_EINPUT: an adapter targets one, or one of the models has other experts. */
static bl_status check_stacks(const walk *w)
{
    const bl_verify *v = w->v;

    for (size_t i = 0; i < w->n_targets; i++)
        if (is_stack(w->targets[i].block->slice.tensor))
            return reject_stack(w->targets[i].block->slice.tensor);
    for (size_t i = 0; i < v->merged.n; i++) {
        const bl_verify_block *merged = &v->merged.blocks[i],
                              *base = bl_verify_find(&v->base, merged->key);
        if (is_stack(merged->slice.tensor) && !(base && is_stack(base->slice.tensor)))
            return reject_stack(merged->slice.tensor);
    }
    return BL_OK;
}

static bl_slice bytes_of(const bl_stored_tensor *t)
{
    int64_t rows = t->n_dims > 1 ? t->shape[0] * t->shape[1] : 1;
    return (bl_slice){t, 0, rows, t->n_bytes / rows / (int64_t)bl_dtype_bytes(t->dtype)};
}

/* Those that no adapter changes: codes and scales, byte by byte. */
static bl_status compare_stacks(walk *w)
{
    const bl_hf_model *base = w->v->base.model, *merged = w->v->merged.model;

    BL_TRY(check_stacks(w));
    for (size_t i = 0; i < bl_hf_count(base); i++) {
        const bl_stored_tensor *a = bl_hf_at(base, i), *b = bl_hf_find(merged, a->name);
        bool is_same;
        const bl_stored_tensor *x_weight = bl_hf_weight_of_part(base, a),
                               *y_weight = b ? bl_hf_weight_of_part(merged, b) : NULL;
        if (!x_weight || !is_stack(x_weight)) continue;
        if (!y_weight || b->dtype != a->dtype || b->n_bytes != a->n_bytes) return reject_stack(a);
        bl_slice x = bytes_of(a), y = {b, 0, x.rows, x.cols};
        BL_TRY(bl_delta_same_bytes(w->delta, &x, &y, &is_same));
        if (!is_same) bl_verify_fault(w->v, "changed", a->name, "the base's bytes", "other bytes");
    }
    return BL_OK;
}

/* ---- a matrix of both ---- */

static bl_status compare_block(walk *w, const bl_verify_block *base, const bl_verify_block *merged,
                               bool is_tied_head)
{
    const bl_verify *v = w->v;
    const target *t = find_target(w, base, is_tied_head);
    char has[BL_SHAPE_TEXT_BYTES], wants[BL_SHAPE_TEXT_BYTES];
    const bl_slice *x = &base->slice, *y = &merged->slice;
    bl_delta_sides sides = {v->base.model, v->merged.model, *x, *y};

    if (is_stack(x->tensor)) return BL_OK; /* compare_stacks has compared it */
    if (x->rows != y->rows || x->cols != y->cols) {
        bl_verify_fault(w->v, "shape", y->tensor->name,
                        bl_shape_text(x->tensor->n_dims, x->tensor->shape, wants), "%s",
                        bl_shape_text(y->tensor->n_dims, y->tensor->shape, has));
        return BL_OK;
    }
    if (t && t->saved) {
        sides.base = (bl_slice){t->saved, 0, x->rows, x->cols};
        sides.base_model = NULL;
        if (t->saved->n_bytes / (int64_t)bl_dtype_bytes(t->saved->dtype) != x->rows * x->cols)
            return BL_OK; /* verify_targets.c has reported it */
        return compare_same(w, base, &sides);
    }
    if (t && t->is_unusable) return BL_OK; /* verify_adapter.c has reported it */
    return t ? compare_target(w, t, &sides) : compare_same(w, base, &sides);
}

/* ---- all of them ---- */

static bl_status walk_base(walk *w)
{
    const bl_verify *v = w->v;

    for (size_t i = 0; i < v->base.n; i++) {
        const bl_verify_block *block = &v->base.blocks[i],
                              *merged = bl_verify_find(&v->merged, block->key);
        if (!merged && strcmp(block->key, "lm_head.weight") == 0 && v->merged.is_tied) {
            bl_verify_warning(w->v, "the merged model ties its head, and the base does not");
        } else if (!merged) {
            bl_verify_fault(w->v, "missing_tensor", name_of(block),
                            "the tensor in the merged model", "none");
        } else {
            BL_TRY(compare_block(w, block, merged, false));
        }
    }
    return BL_OK;
}

/* What the merged model has alone: the head of a tied base, separated, or a fault. */
static bl_status walk_merged(walk *w)
{
    const bl_verify *v = w->v;

    for (size_t i = 0; i < v->merged.n; i++) {
        const bl_verify_block *merged = &v->merged.blocks[i];
        bool is_tied;
        if (bl_verify_find(&v->base, merged->key)) continue;
        const bl_verify_block *base = bl_verify_find_other(v, merged->key, &is_tied);
        if (base && is_tied)
            BL_TRY(compare_block(w, base, merged, true));
        else
            bl_verify_fault(w->v, "extra_tensor", merged->slice.tensor->name,
                            "the tensors of the base", "a tensor that the base does not have");
    }
    for (size_t i = 0; i < w->n_targets; i++)
        if (w->targets[i].is_tied_head && !bl_verify_find(&v->merged, "lm_head.weight"))
            bl_verify_fault(w->v, "tied", "lm_head.weight", "a separate head in the merged model",
                            "embedding and head are one weight (tie_word_embeddings)");
    return BL_OK;
}

/* ---- faults ---- */

static void report_result(walk *w, const result *r)
{
    bl_verify *v = w->v;
    const char *name = name_of(r->block);
    char expected[64];

    switch (r->state) {
    case MISSING:
        bl_verify_fault(v, "delta_missing", name, "base + delta", "the base's values");
        break;
    case SCALED: {
        const target *t = find_target(w, r->block, false);
        snprintf(expected, sizeof expected, "scale %.6g", t ? t->factors.a->scale : NAN);
        bl_verify_fault(v, "scale", name, expected, "scale %.4g", r->scale);
        break;
    }
    case OTHER:
        if (r->what)
            bl_verify_fault(v, "pairing", name, "its own A and B", "%s", r->what);
        else
            bl_verify_fault(v, "delta", name, "base + delta",
                            "other values: %.3g of the delta, residual %.3g", r->kept, r->residual);
        break;
    case CHANGED:
        bl_verify_fault(v, "changed", name, "the base's values", "%s", r->what);
        break;
    case BAD:
        bl_verify_fault(v, "nan", name, "finite values", "%s", r->what);
        break;
    default:
        break;
    }
}

/* Half of the matrices that no adapter changes differ, and so do half of the others. */
static bool is_wrong_base(const walk *w, size_t *n_changed, size_t *n_matrices)
{
    size_t n_other = 0, n_targets = 0;

    *n_changed = *n_matrices = 0;
    for (size_t i = 0; i < w->n_results; i++) {
        const result *r = &w->results[i];
        if (r->is_target) {
            n_targets++;
            n_other += r->state == OTHER && !r->what;
        } else if (r->block->slice.rows > 1) {
            ++*n_matrices;
            *n_changed += r->state == CHANGED;
        }
    }
    return *n_changed > 0 && 2 * *n_changed >= *n_matrices && 2 * n_other >= n_targets;
}

/* One fault for all deltas, or for those of all experts, if there are several and all are
 * missing. */
static bool report_missing(walk *w, bool experts_alone)
{
    size_t n = 0, n_missing = 0;

    for (size_t i = 0; i < w->n_results; i++) {
        const result *r = &w->results[i];
        if (!r->is_target || (experts_alone && r->block->expert < 0)) continue;
        n++;
        n_missing += r->state == MISSING;
    }
    if (n < 2 || n_missing < n) return false;
    bl_verify_fault(w->v, experts_alone ? "experts_missing" : "all_missing", w->v->options->merged,
                    "base + delta", "the base's values in all %zu matrices%s", n,
                    experts_alone ? " of experts" : "");
    return true;
}

static void report_faults(walk *w)
{
    size_t n_changed, n_matrices;
    bool is_other_base = is_wrong_base(w, &n_changed, &n_matrices),
         all_missing = !is_other_base && report_missing(w, false),
         experts_missing = !is_other_base && !all_missing && report_missing(w, true);

    if (is_other_base)
        bl_verify_fault(w->v, "wrong_base", w->v->options->merged, "made from this base",
                        "%zu of %zu matrices that the adapter leaves alone differ", n_changed,
                        n_matrices);
    for (size_t i = 0; i < w->n_results; i++) {
        const result *r = &w->results[i];
        bool is_said =
            r->state == MISSING
                ? all_missing || (experts_missing && r->block->expert >= 0)
                : is_other_base && (r->state == OTHER || r->state == CHANGED || r->state == SCALED);
        if (!is_said) report_result(w, r);
    }
    if (w->n_of_state[LOST] > 0)
        bl_verify_warning(w->v, "%zu matrices: rounding loses the whole delta",
                          w->n_of_state[LOST]);
    if (w->n_of_state[UNCERTAIN] == 0 || is_other_base) return;
    double noise = sqrt(w->along_noise);
    if (fabs(w->along) > ALONG * w->along_delta + 4 * noise)
        bl_verify_fault(w->v, "scale", w->v->options->merged, "1 times the delta",
                        "%.3g times the delta, over %zu matrices whose deltas are small beside "
                        "rounding",
                        1 + w->along / w->along_delta, w->n_of_state[UNCERTAIN]);
    else if (w->along + w->along_delta < 5 * noise)
        bl_verify_warning(w->v, "%zu matrices: the delta is too small beside rounding to be found",
                          w->n_of_state[UNCERTAIN]);
}

/* ---- the report ---- */

static bl_status describe(walk *w)
{
    json_t *list = json_array(), *totals = json_object();

    for (size_t i = 0; i < w->n_results; i++) {
        const result *r = &w->results[i];
        if (!r->is_target) continue;
        json_array_append_new(list, json_pack("{s:s, s:s, s:f, s:f}", "tensor", name_of(r->block),
                                              "state", state_keys[r->state], "kept", r->kept,
                                              "residual", r->residual));
    }
    for (int i = 0; i < N_STATES; i++)
        json_object_set_new(totals, state_keys[i], json_integer((json_int_t)w->n_of_state[i]));
    if (w->sums.delta > 0) {
        json_object_set_new(totals, "kept", json_real(w->sums.dot / w->sums.delta));
        json_object_set_new(totals, "residual", json_real(sqrt(w->sums.error / w->sums.delta)));
    }
    json_object_set_new(w->v->report, "merged_tensors", totals);
    json_object_set_new(w->v->report, "deltas", list);
    return bl_json_ran_out() ? BL_FAIL(BL_ENOMEM, "the report") : BL_OK;
}

bl_status bl_verify_merged(bl_verify *v)
{
    walk w = {.v = v};
    bl_status st;

    BL_TRY(bl_verify_index_open(v->options->merged, &v->merged));
    w.results = calloc(v->base.n + v->merged.n + 1, sizeof *w.results);
    if (!w.results) return BL_FAIL(BL_ENOMEM, "a list of %zu tensors", v->base.n + v->merged.n);
    BL_TRY_GOTO(st, done, bl_delta_create(v->options->pool, &w.delta));
    BL_TRY_GOTO(st, done, list_targets(&w));
    BL_TRY_GOTO(st, done, compare_stacks(&w));
    BL_TRY_GOTO(st, done, walk_base(&w));
    BL_TRY_GOTO(st, done, walk_merged(&w));
    report_faults(&w);
    st = describe(&w);
done:
    bl_delta_destroy(w.delta);
    for (size_t i = 0; i < w.n_results; i++) free(w.results[i].what);
    free(w.results);
    free(w.targets);
    return st;
}

bl_status bl_verify_frozen(bl_verify *v)
{
    const bl_verify_adapter *a = &v->adapter;
    char name[BL_VERIFY_NAME_BYTES];
    bl_delta *delta = NULL;
    bl_delta_sums s;
    bl_status st = bl_delta_create(v->options->pool, &delta);

    for (size_t i = 0; i < a->n_others && st == BL_OK; i++) {
        const bl_stored_tensor *t = a->others[i];
        bool is_tied;
        if (!strstr(t->name, ".base_layer.")) continue;
        bl_verify_other_name(t, name);
        const bl_verify_block *block = bl_verify_find_other(v, name, &is_tied);
        if (!block || t->n_dims != 2 || t->shape[0] != block->slice.rows ||
            t->shape[1] != block->slice.cols)
            continue; /* verify_targets.c has reported it */
        bl_delta_sides sides = {
            v->base.model, NULL, block->slice, {t, 0, t->shape[0], t->shape[1]}};
        st = bl_delta_compare(delta, &sides, NULL, INT64_MAX, &s);
        if (st == BL_OK && s.n_outside > 0)
            bl_verify_fault(v, "wrong_base", t->name, "the base's values",
                            "%" PRId64 " of %" PRId64 " elements differ", s.n_outside, s.n);
    }
    bl_delta_destroy(delta);
    return st;
}
