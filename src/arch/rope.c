/* SPDX-License-Identifier: Apache-2.0 */
/* rope.c -- rotary embedding: its keys in config.json, its frequencies, its tables. */
#include "arch/rope.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arch/config_internal.h"
#include "arch/rope_internal.h"
#include "base/files.h"
#include "base/json.h"
#include "base/present.h"
#include "base/sizes.h"
#include "ops/rope.h"

enum { MAX_POSITIONS = 1 << 30 };

int64_t bl_model_rotary_dim(const bl_model_config *c)
{
    return c->rotary_dim > 0 ? c->rotary_dim : c->head_dim;
}

static const char *const names[] = {
    [BL_ROPE_DEFAULT] = "default", [BL_ROPE_LINEAR] = "linear", [BL_ROPE_LLAMA3] = "llama3",
    [BL_ROPE_DYNAMIC] = "dynamic", [BL_ROPE_YARN] = "yarn",     [BL_ROPE_LONGROPE] = "longrope",
};

/* ---- reading ---- */

/* Of rope_scaling or rope_parameters, by any type. */
static const char *const known[] = {"rope_type",
                                    "type",
                                    "rope_theta",
                                    "factor",
                                    "original_max_position_embeddings",
                                    "max_position_embeddings",
                                    "low_freq_factor",
                                    "high_freq_factor",
                                    "attention_factor",
                                    "beta_fast",
                                    "beta_slow",
                                    "mscale",
                                    "mscale_all_dim",
                                    "truncate",
                                    "short_factor",
                                    "long_factor",
                                    "partial_rotary_factor",
                                    "llama_4_scaling_beta",
                                    "finetuned",
                                    NULL};

/* A key is `where: key`. `root` may have the original length outside, which goes first. */
typedef struct rope_keys {
    const char *where, *file;
    const json_t *rope, *root;
} rope_keys;

static bl_status read_real(const rope_keys *k, const char *key, double min, double max, double *out)
{
    return bl_json_get_real(k->where, k->rope, key, BL_JSON_OPTIONAL, min, max, out);
}

static bl_status read_original_length(const rope_keys *k, bl_model_config *c)
{
    static const char key[] = "original_max_position_embeddings";

    c->rope_original_max_positions = c->max_position_embeddings;
    BL_TRY(bl_json_get_int(k->where, k->rope, key, BL_JSON_OPTIONAL, 1, MAX_POSITIONS,
                           &c->rope_original_max_positions));
    return bl_json_get_int(k->file, k->root, key, BL_JSON_OPTIONAL, 1, MAX_POSITIONS,
                           &c->rope_original_max_positions);
}

static bl_status read_llama3(const rope_keys *k, bl_model_config *c)
{
    BL_TRY(bl_json_get_real(k->where, k->rope, "low_freq_factor", BL_JSON_REQUIRED, 1e-6, 1e6,
                            &c->rope_low_freq_factor));
    BL_TRY(bl_json_get_real(k->where, k->rope, "high_freq_factor", BL_JSON_REQUIRED, 1e-6, 1e6,
                            &c->rope_high_freq_factor));
    if (c->rope_high_freq_factor <= c->rope_low_freq_factor)
        return bl_json_fail(k->where, "high_freq_factor", "more than low_freq_factor",
                            json_object_get(k->rope, "high_freq_factor"));
    return bl_json_get_int(k->where, k->rope, "original_max_position_embeddings", BL_JSON_REQUIRED,
                           1, MAX_POSITIONS, &c->rope_original_max_positions);
}

/* 0.1 m log(s) + 1, arXiv:2309.00071, eq. 22 */
static double yarn_scale(double factor, double m)
{
    return factor <= 1 ? 1.0 : 0.1 * m * log(factor) + 1.0;
}

static bl_status read_yarn(const rope_keys *k, bl_model_config *c)
{
    bool truncate = true;
    double mscale = 0, mscale_all_dim = 0;

    c->rope_beta_fast = 32, c->rope_beta_slow = 1;
    BL_TRY(read_original_length(k, c));
    BL_TRY(read_real(k, "beta_fast", 1e-6, 1e6, &c->rope_beta_fast));
    BL_TRY(read_real(k, "beta_slow", 1e-6, 1e6, &c->rope_beta_slow));
    if (c->rope_beta_fast < c->rope_beta_slow)
        return bl_json_fail(k->where, "beta_fast", "at least beta_slow",
                            json_object_get(k->rope, "beta_fast"));
    BL_TRY(bl_json_get_bool(k->where, k->rope, "truncate", BL_JSON_OPTIONAL, &truncate));
    c->rope_is_exact = !truncate;
    BL_TRY(read_real(k, "mscale", 0, 1e6, &mscale));
    BL_TRY(read_real(k, "mscale_all_dim", 0, 1e6, &mscale_all_dim));
    c->rope_attention_factor =
        mscale > 0 && mscale_all_dim > 0
            ? yarn_scale(c->rope_factor, mscale) / yarn_scale(c->rope_factor, mscale_all_dim)
            : yarn_scale(c->rope_factor, 1);
    return read_real(k, "attention_factor", 1e-6, 1e6, &c->rope_attention_factor);
}

static bl_status read_factors(const rope_keys *k, const char *key, int64_t n, double *out)
{
    const json_t *list = json_object_get(k->rope, key);

    if (!list) return BL_FAIL(BL_EINPUT, "%s: key %s: missing", k->where, key);
    if (n > BL_MODEL_ROPE_FACTORS || json_array_size(list) != (size_t)n)
        return bl_json_fail(k->where, key,
                            "a factor for each pair of rotated channels of a head, at most 128",
                            list);
    for (int64_t i = 0; i < n; i++) {
        const json_t *value = json_array_get(list, (size_t)i);
        out[i] = json_number_value(value);
        if (!json_is_number(value) || !(out[i] >= 1e-6 && out[i] <= 1e6))
            return bl_json_fail(k->where, key, "numbers in [1e-06, 1e+06]", value);
    }
    return BL_OK;
}

static bl_status read_longrope(const rope_keys *k, bl_model_config *c)
{
    BL_TRY(read_factors(k, "short_factor", bl_model_rotary_dim(c) / 2, c->rope_short));
    BL_TRY(read_factors(k, "long_factor", bl_model_rotary_dim(c) / 2, c->rope_long));
    BL_TRY(read_original_length(k, c));
    double length = (double)c->rope_original_max_positions,
           factor = (double)c->max_position_embeddings / length;
    BL_TRY(read_real(k, "factor", 1e-6, 1e6, &factor));
    if (factor > 1 && length > 1) c->rope_attention_factor = sqrt(1 + log(factor) / log(length));
    return read_real(k, "attention_factor", 1e-6, 1e6, &c->rope_attention_factor);
}

/* null is the ratio of the lengths, which yarn alone has. */
static bl_status read_factor(const rope_keys *k, bl_model_config *c)
{
    if (c->rope_kind == BL_ROPE_YARN && json_is_null(json_object_get(k->rope, "factor"))) {
        BL_TRY(read_original_length(k, c));
        c->rope_factor =
            (double)c->max_position_embeddings / (double)c->rope_original_max_positions;
        return BL_OK;
    }
    return bl_json_get_real(k->where, k->rope, "factor", BL_JSON_REQUIRED, 1, 1e6, &c->rope_factor);
}

static bl_status read_kind(const rope_keys *k, bl_model_config *c)
{
    const char *key = json_object_get(k->rope, "rope_type") ? "rope_type" : "type",
               *type = "default";
    size_t kind = 0;

    BL_TRY(bl_keys_check(&(bl_key_table){.used = known}, k->where, k->rope, NULL));
    BL_TRY(bl_json_get_string(k->where, k->rope, key, BL_JSON_OPTIONAL, &type));
    while (kind < BL_COUNT(names) && strcmp(type, names[kind]) != 0) kind++;
    if (kind == BL_COUNT(names))
        return bl_json_fail(
            k->where, key,
            "\"default\", \"linear\", \"llama3\", \"dynamic\", \"yarn\" or \"longrope\"",
            json_object_get(k->rope, key));
    c->rope_kind = (bl_rope_kind)kind;
    if (kind != BL_ROPE_DEFAULT && kind != BL_ROPE_LONGROPE) BL_TRY(read_factor(k, c));
    if (kind == BL_ROPE_LLAMA3) BL_TRY(read_llama3(k, c));
    if (kind == BL_ROPE_YARN) BL_TRY(read_yarn(k, c));
    if (kind == BL_ROPE_LONGROPE) BL_TRY(read_longrope(k, c));
    return BL_OK;
}

/* The rotated part of each head: of the families that have it, and 1 in the files of the others.
 * Inside RoPE's keys or, with them or without, outside, where transformers 4 has it. */
static bl_status read_rotary_part(const char *where, const json_t *keys, bl_model_config *c)
{
    static const char key[] = "partial_rotary_factor";
    double part = 1;

    BL_TRY(bl_json_get_real(where, keys, key, BL_JSON_OPTIONAL, arch_reads(c->arch, key) ? 0 : 1, 1,
                            &part));
    int64_t d = (int64_t)((double)c->head_dim * part); /* transformers rounds down, too */
    if (d < 2 || d % 2 || c->rotary_dim % 2)
        return bl_json_fail(where, key, "an even number of head_dim channels",
                            json_object_get(keys, key));
    if (json_object_get(keys, key)) c->rotary_dim = d < c->head_dim ? d : 0;
    return BL_OK;
}

/* Of q by position: of the families that have it, and 0 in the files of the others. */
static bl_status read_query_beta(const rope_keys *k, bl_model_config *c)
{
    static const char key[] = "llama_4_scaling_beta";
    bool has = c->arch->has_query_scaling;

    BL_TRY(bl_json_get_real(k->where, k->rope, key, BL_JSON_OPTIONAL, 0, has ? 1e3 : 0,
                            &c->query_beta));
    return c->query_beta > 0 ? read_original_length(k, c) : BL_OK;
}

/* Without RoPE's keys: the family's own. transformers takes no rope_theta then, where the family's
 * type is not "default". */
static bl_status keep_defaults(const char *file, const json_t *root, const bl_model_config *c)
{
    if (c->rope_kind == BL_ROPE_DEFAULT || c->rope_theta == c->arch->defaults.rope_theta)
        return BL_OK;
    return bl_json_fail(file, "rope_theta", "rope_parameters beside it",
                        json_object_get(root, "rope_theta"));
}

/* With them: nothing of the family's own but theta, which is 10000 where its type is not
 * "default". */
static void clear_defaults(const json_t *root, bl_model_config *c)
{
    if (c->rope_kind == BL_ROPE_DEFAULT) return;
    if (!json_object_get(root, "rope_theta")) c->rope_theta = 1e4;
    c->rope_factor = c->rope_beta_fast = c->rope_beta_slow = 0;
    c->rope_attention_factor = c->query_beta = 0;
    c->rope_original_max_positions = 0;
}

bl_status arch_read_rope(const char *file, const json_t *root, bl_model_config *c)
{
    static const double min_theta = 1, max_theta = 1e12;
    bl_status st = BL_OK;
    const json_t *scaling = NULL, *parameters = NULL;
    char *where = NULL;

    BL_TRY(bl_json_get_real(file, root, "rope_theta", BL_JSON_OPTIONAL, min_theta, max_theta,
                            &c->rope_theta));
    BL_TRY(bl_json_get_object(file, root, "rope_scaling", BL_JSON_OPTIONAL, &scaling));
    BL_TRY(bl_json_get_object(file, root, "rope_parameters", BL_JSON_OPTIONAL, &parameters));
    if (scaling && parameters && !json_equal(scaling, parameters))
        return bl_json_fail(file, "rope_scaling", "nothing beside rope_parameters", scaling);
    const json_t *rope = parameters ? parameters : scaling;
    if (c->rotary_part > 0) c->rotary_dim = (int64_t)((double)c->head_dim * c->rotary_part);
    if (arch_reads(c->arch, "partial_rotary_factor")) BL_TRY(read_rotary_part(file, root, c));
    if (!rope) return keep_defaults(file, root, c);
    clear_defaults(root, c);
    BL_TRY(bl_text_format(&where, "%s: %s", file, parameters ? "rope_parameters" : "rope_scaling"));
    rope_keys keys = {where, file, rope, root};
    double theta = c->rope_theta;
    BL_TRY_GOTO(st, done,
                bl_json_get_real(where, rope, "rope_theta", BL_JSON_OPTIONAL, min_theta, max_theta,
                                 &theta));
    if (theta != c->rope_theta && json_is_number(json_object_get(root, "rope_theta"))) {
        st = bl_json_fail(where, "rope_theta", "the same as rope_theta outside",
                          json_object_get(rope, "rope_theta"));
        goto done;
    }
    c->rope_theta = theta;
    BL_TRY_GOTO(st, done, read_rotary_part(where, rope, c));
    BL_TRY_GOTO(st, done, read_kind(&keys, c));
    BL_TRY_GOTO(st, done, read_query_beta(&keys, c));
done:
    free(where);
    return st;
}

/* ---- the description ---- */

static json_t *describe_factors(const double *factors, int64_t n)
{
    json_t *list = json_array();

    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_real(factors[i]));
    return list;
}

json_t *arch_describe_rope(const bl_model_config *c)
{
    bl_rope_kind kind = c->rope_kind;
    json_t *out = json_pack("{s:s, s:f}", "rope_type", names[kind], "rope_theta", c->rope_theta);

    if (!out) return NULL;
    if (kind != BL_ROPE_DEFAULT && kind != BL_ROPE_LONGROPE)
        json_object_set_new(out, "factor", json_real(c->rope_factor));
    if (kind == BL_ROPE_LLAMA3) {
        json_object_set_new(out, "low_freq_factor", json_real(c->rope_low_freq_factor));
        json_object_set_new(out, "high_freq_factor", json_real(c->rope_high_freq_factor));
    }
    if (c->rotary_dim > 0)
        json_object_set_new(out, "rotary_dim", json_integer((json_int_t)c->rotary_dim));
    if (c->rope_original_max_positions > 0)
        json_object_set_new(out, "original_max_position_embeddings",
                            json_integer((json_int_t)c->rope_original_max_positions));
    if (kind == BL_ROPE_YARN) {
        json_object_set_new(out, "beta_fast", json_real(c->rope_beta_fast));
        json_object_set_new(out, "beta_slow", json_real(c->rope_beta_slow));
        json_object_set_new(out, "truncate", json_boolean(!c->rope_is_exact));
    }
    if (kind == BL_ROPE_LONGROPE) {
        json_object_set_new(out, "short_factor",
                            describe_factors(c->rope_short, bl_model_rotary_dim(c) / 2));
        json_object_set_new(out, "long_factor",
                            describe_factors(c->rope_long, bl_model_rotary_dim(c) / 2));
    }
    if (c->rope_attention_factor > 0)
        json_object_set_new(out, "attention_factor", json_real(c->rope_attention_factor));
    if (c->query_beta > 0)
        json_object_set_new(out, "llama_4_scaling_beta", json_real(c->query_beta));
    return out;
}

/* ---- frequencies ---- */

static const double two_pi = 6.283185307179586476925;

static double llama3_frequency(const bl_model_config *c, double inv)
{
    double low = c->rope_low_freq_factor, high = c->rope_high_freq_factor;
    double turns = (double)c->rope_original_max_positions * inv / two_pi; /* L / wavelength */

    if (turns < low) return inv / c->rope_factor;
    if (turns > high) return inv;
    double s = (turns - low) / (high - low);
    return (1 - s) * inv / c->rope_factor + s * inv;
}

/* The pair, as a real number, that turns so many times in the original length. */
static double yarn_pair(const bl_model_config *c, double turns)
{
    return (double)bl_model_rotary_dim(c) *
           log((double)c->rope_original_max_positions / (turns * two_pi)) /
           (2 * log(c->rope_theta));
}

static double yarn_frequency(const bl_model_config *c, int64_t i, double inv)
{
    double first = yarn_pair(c, c->rope_beta_fast), last = yarn_pair(c, c->rope_beta_slow);

    if (!c->rope_is_exact) first = floor(first), last = ceil(last);
    first = fmax(first, 0), last = fmin(last, (double)(bl_model_rotary_dim(c) - 1));
    if (first == last) last += 0.001;
    double r = fmin(fmax(((double)i - first) / (last - first), 0), 1);
    return inv / c->rope_factor * r + inv * (1 - r);
}

void bl_model_rope_inv_freq(const bl_model_config *c, bool is_long, double *inverse)
{
    int64_t d = bl_model_rotary_dim(c);

    for (int64_t i = 0; i < d / 2; i++) {
        double inv = pow(c->rope_theta, -2.0 * (double)i / (double)d);
        if (c->rope_kind == BL_ROPE_LINEAR) inv /= c->rope_factor;
        if (c->rope_kind == BL_ROPE_LLAMA3) inv = llama3_frequency(c, inv);
        if (c->rope_kind == BL_ROPE_YARN) inv = yarn_frequency(c, i, inv);
        if (c->rope_kind == BL_ROPE_LONGROPE) inv /= is_long ? c->rope_long[i] : c->rope_short[i];
        inverse[i] = inv;
    }
}

/* ---- tables ---- */

int64_t bl_model_rope_long_after(const bl_model_config *c)
{
    return c->rope_kind == BL_ROPE_LONGROPE ? c->rope_original_max_positions : 0;
}

int64_t bl_model_rope_max_tokens(const bl_model_config *c)
{
    return c->rope_kind == BL_ROPE_DYNAMIC ? c->max_position_embeddings : 0;
}

bool bl_model_rope_has_queries(const bl_model_config *c)
{
    return c->attention_multiplier > 0 || c->query_beta > 0;
}

static double query_scale(const bl_model_config *c, int64_t position)
{
    double scale =
        c->attention_multiplier > 0 ? c->attention_multiplier * sqrt((double)c->head_dim) : 1.0;

    if (c->query_beta > 0)
        scale *= 1 + c->query_beta *
                         log(1 + floor((double)position / (double)c->rope_original_max_positions));
    return scale;
}

void bl_model_rope_fill(const bl_model_config *c, const double *inverse, bool is_query,
                        int64_t first, int64_t n, float *cosines, float *sines)
{
    int64_t half = bl_model_rotary_dim(c) / 2;
    double factor = c->rope_attention_factor > 0 ? c->rope_attention_factor : 1.0;

    for (int64_t p = 0; p < n; p++)
        bl_rope_fill_tables(first + p, 1, half, inverse,
                            is_query ? factor * query_scale(c, first + p) : factor,
                            cosines + p * half, sines + p * half);
}
