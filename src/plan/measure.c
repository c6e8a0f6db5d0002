/* SPDX-License-Identifier: Apache-2.0 */
/* measure.c -- measures rates once per host and shape, and keeps them in a cache file. */
#include "plan/measure.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

#include "base/build_id.h"
#include "base/cores.h"
#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "ops/gemm.h"

enum {
    ROUNDS = 3,
    MAX_RANKS = 16,
    TOKENS_MIN = 32,
    TOKENS_MAX = 512,
    KEY_BYTES = 512,
    CACHE_BYTES_MAX = 1 << 16
};
/* Of all products of a layer that are measured at once; of the weights of one. */
static const double PRODUCTS_FLOPS_MAX = 60e9, LAYER_WEIGHTS_MAX = 1e9;
/* A rate beyond these is not one. */
static const double RATE_MIN = 1e6, RATE_MAX = 1e16;

/* The rates that are measured, by their keys in the cache. */
static const struct {
    const char *key;
    size_t offset;
} rates[] = {{"gemm_flops_per_s", offsetof(bl_rates, gemm_flops_per_s)},
             {"lora_flops_per_s", offsetof(bl_rates, lora_flops_per_s)},
             {"head_flops_per_s", offsetof(bl_rates, head_flops_per_s)},
             {"attention_forward_flops_per_s", offsetof(bl_rates, attention_forward_flops_per_s)},
             {"attention_backward_flops_per_s", offsetof(bl_rates, attention_backward_flops_per_s)},
             {"memory_bytes_per_s", offsetof(bl_rates, memory_bytes_per_s)},
             {"optimizer_bytes_per_s", offsetof(bl_rates, optimizer_bytes_per_s)}};

static double *rate_at(bl_rates *r, size_t i)
{
    return (double *)(void *)((char *)r + rates[i].offset);
}

/* ---- measurements ---- */

bool bl_plan_can_measure(const bl_plan_input *in)
{
    return in->topology.n_ranks <= MAX_RANKS &&
           bl_arch_active_weights(in->model, bl_plan_measured_kind(in->model)) <= LAYER_WEIGHTS_MAX;
}

/* Trained weights are multiplied in the activations' dtype. */
static bl_format format_of(const bl_plan_input *in)
{
    bl_format format = in->formats[0];

    if (bl_train_config_is_full(in->config))
        bl_format_from_dtype(bl_train_config_act(in->config), &format);
    return bl_format_has_scales(format) ? BL_FORMAT_FP8_ROW : format;
}

/* Rates change little with the number of tokens from TOKENS_MAX on: fewer are measured as they are,
 * because a matrix is decoded for them all the same. The number is rounded, so that similar data
 * share a measurement. A large matrix is measured by a part of its rows. */
static bl_plan_measure_options options_of(const bl_plan_input *in)
{
    const bl_train_config *c = in->config;
    bool knows = in->rows.n_micro > 0;
    double micro = knows ? in->rows.mean
                         : (double)(c->per_device_train_batch_size * in->longest_train_row),
           document = knows ? in->rows.document_tokens : (double)in->longest_train_row;
    int64_t tokens = bl_round_up((int64_t)fmax(TOKENS_MIN, fmin(micro, TOKENS_MAX)), TOKENS_MIN);

    return (bl_plan_measure_options){
        .model = in->model,
        .act = bl_train_config_act(c),
        .lora_r = bl_max_i64(in->lora->options.r, 1),
        .tokens = tokens,
        .document_tokens = bl_min_i64(tokens, bl_round_up((int64_t)fmax(1, document), TOKENS_MIN)),
        .format = format_of(in),
        .is_trained = bl_train_config_is_full(c),
        .n_ranks = in->topology.n_ranks,
        .threads = (int)c->threads,
        .flops_max = PRODUCTS_FLOPS_MAX,
        .runs = 1,
        .queued = 1,
        .seconds = 0.05,
        .in_cpu_time = true,
        .measures_head = true};
}

static void describe(const bl_plan_measure_options *o, char key[KEY_BYTES])
{
    const bl_model_config *m = o->model;
    char processor[BL_PROCESSOR_NAME_BYTES], library[BL_CPU_GEMM_TEXT_BYTES];

    bl_processor_name(processor);
    if (o->act == BL_BF16)
        bl_cpu_gemm_describe_bf16(library);
    else
        bl_cpu_gemm_describe(library);
    snprintf(
        key, KEY_BYTES,
        "%s; build %s; %s; %d ranks x %d threads; hidden %lld, inter %lld, heads %lld, kv %lld "
        "x %lld, vocab %lld, r %lld; %s%s; %lld tokens in documents of %lld",
        processor, bl_build_id(), library, o->n_ranks, o->threads, (long long)m->hidden_size,
        (long long)(m->n_experts > 0 ? m->expert_size : m->intermediate_size),
        (long long)m->n_heads, (long long)m->n_kv_heads, (long long)m->head_dim,
        (long long)m->vocab_size, (long long)o->lora_r, bl_format_name(o->format),
        o->is_trained ? ", trained" : "", (long long)o->tokens, (long long)o->document_tokens);
}

static bool is_plausible(bl_plan_measured *m)
{
    for (size_t i = 0; i < BL_COUNT(rates); i++) {
        double rate = *rate_at(&m->rates, i);
        if (!(rate >= RATE_MIN && rate <= RATE_MAX)) return false;
    }
    return m->scatter >= 0 && m->scatter <= 1e3;
}

static bl_status measure(const bl_plan_measure_options *o, bl_plan_measured *out)
{
    bl_rates sum = {0};
    double lowest = INFINITY, highest = 0;
    time_t now = time(NULL);
    struct tm utc;

    for (int round = 0; round < ROUNDS; round++) {
        BL_TRY(bl_plan_measure_rates(o, &out->rates));
        lowest = fmin(lowest, out->rates.gemm_flops_per_s);
        highest = fmax(highest, out->rates.gemm_flops_per_s);
        for (size_t i = 0; i < BL_COUNT(rates); i++)
            *rate_at(&sum, i) += *rate_at(&out->rates, i) / ROUNDS;
    }
    for (size_t i = 0; i < BL_COUNT(rates); i++) *rate_at(&out->rates, i) = *rate_at(&sum, i);
    out->scatter = (highest - lowest) / sum.gemm_flops_per_s;
    if (gmtime_r(&now, &utc)) strftime(out->date, sizeof out->date, "%Y-%m-%d %H:%M UTC", &utc);
    if (is_plausible(out)) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "plan: a measured rate of this processor is not plausible");
}

/* ---- the cache ---- */

/* *path NULL: no place for a cache. */
static bl_status cache_path(const char *key, char **dir, char **path)
{
    const char *root = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char name[32];

    *dir = *path = NULL;
    if (root && root[0] == '/')
        BL_TRY(bl_path_join(root, "ballast", dir));
    else if (home && home[0] == '/')
        BL_TRY(bl_path_join(home, ".cache/ballast", dir));
    else
        return BL_OK;
    snprintf(name, sizeof name, "rates-%016llx.json",
             (unsigned long long)XXH3_64bits(key, strlen(key)));
    return bl_path_join(*dir, name, path);
}

/* Whether all of the cache's text is as it must be. */
static bool read_cache(const json_t *root, const char *key, bl_plan_measured *out)
{
    const char *kept = json_string_value(json_object_get(root, "key")),
               *date = json_string_value(json_object_get(root, "date"));

    if (!kept || strcmp(kept, key) != 0 || !date || strlen(date) >= sizeof out->date) return false;
    for (const char *at = date; *at; at++)
        if (*at < ' ' || *at > '~') return false;
    snprintf(out->date, sizeof out->date, "%s", date);
    for (size_t i = 0; i < BL_COUNT(rates); i++)
        *rate_at(&out->rates, i) = json_number_value(json_object_get(root, rates[i].key));
    out->scatter = json_number_value(json_object_get(root, "scatter"));
    return is_plausible(out);
}

static bool load_cache(const char *path, const char *key, bl_plan_measured *out)
{
    json_t *root = NULL;
    bool present = false;

    if (bl_path_exists(path, &present) != BL_OK || !present) return false;
    bool good = bl_json_load(path, CACHE_BYTES_MAX, &root) == BL_OK && read_cache(root, key, out);
    json_decref(root);
    if (!good) bl_log_warning("%s: not usable; the rates are measured again", path);
    return good;
}

static bl_status write_cache(const char *dir, const char *path, const char *key,
                             bl_plan_measured *m)
{
    bl_json_watch_memory();
    json_t *root = json_pack("{s:s, s:s, s:f}", "key", key, "date", m->date, "scatter", m->scatter);
    for (size_t i = 0; root && i < BL_COUNT(rates); i++)
        json_object_set_new(root, rates[i].key, json_real(*rate_at(&m->rates, i)));
    char *text = root ? json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(6)) : NULL;
    bl_status st = text && !bl_json_ran_out() ? bl_dir_create(dir)
                                              : BL_FAIL(BL_ENOMEM, "out of memory: cache of rates");
    if (st == BL_OK) st = bl_file_write_atomic(path, text, strlen(text));
    free(text);
    json_decref(root);
    return st;
}

bl_status bl_plan_measure(const bl_plan_input *in, bool again, bl_plan_measured *out)
{
    bl_plan_measure_options options = options_of(in);
    char key[KEY_BYTES], *dir = NULL, *path = NULL;
    bl_status st;

    *out = (bl_plan_measured){0};
    describe(&options, key);
    BL_TRY_GOTO(st, done, cache_path(key, &dir, &path));
    if (path && !again && load_cache(path, key, out)) {
        out->is_cached = true;
        goto done;
    }
    bl_log_info("measuring this processor for a few seconds (%s)",
                path ? "kept for later plans" : "no HOME: not kept");
    BL_TRY_GOTO(st, done, measure(&options, out));
    if (path && write_cache(dir, path, key, out) != BL_OK)
        bl_log_warning("%s; the measured rates are not kept", bl_error_text());
done:
    free(dir);
    free(path);
    return st;
}
