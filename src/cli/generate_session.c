/* SPDX-License-Identifier: Apache-2.0 */
/* generate_session.c -- an open model that continues ids: loading it with its adapters, choosing
 * tokens, printing the answer. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cores.h"
#include "base/files.h"
#include "base/hub.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "trained/modules.h"
#include "cli/generate_internal.h"

static const char BASE_NAME[] = "none"; /* the base without an adapter */

int64_t bl_generate_max_new_tokens(const bl_generate_options *o)
{
    enum { OF_A_PROMPT = 128, OF_A_CHAT = 1024 };
    if (o->max_new_tokens != BL_OPTION_AUTO) return o->max_new_tokens;
    return o->chat ? OF_A_CHAT : OF_A_PROMPT;
}

/* ---- adapters ---- */

/* DIR or NAME=DIR; a name has no "/". Without one, the last part of the path. */
static bl_status name_adapter(const char *item, bl_named_adapter *out)
{
    const char *sign = strchr(item, '='), *slash = strchr(item, '/');
    bool is_named = sign && sign > item && (!slash || slash > sign);
    const char *dir = is_named ? sign + 1 : item;

    BL_TRY(bl_hub_find_cached(dir, &out->dir));
    if (!out->dir) BL_TRY(bl_text_format(&out->dir, "%s", dir));
    if (is_named) return bl_text_format(&out->name, "%.*s", (int)(sign - item), item);
    size_t end = strlen(dir);
    while (end > 1 && dir[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && dir[begin - 1] != '/') begin--;
    return bl_text_format(&out->name, "%.*s", (int)(end - begin), dir + begin);
}

static bl_status name_adapters(bl_generate_session *s)
{
    const bl_string_list *given = &s->options->adapter;
    size_t n = (size_t)given->n_items;

    if (n > 1 && !s->options->chat)
        return BL_FAIL(BL_EUSAGE, "--adapter: several adapters: only with --chat");
    if (!(s->adapters = calloc(n + 1, sizeof *s->adapters)))
        return BL_FAIL(BL_ENOMEM, "%zu adapters", n);
    BL_TRY(bl_text_format(&s->adapters[0].name, "%s", BASE_NAME));
    for (size_t i = 1; i <= n; i++) {
        bl_named_adapter *one = &s->adapters[i];
        s->n_adapters = i;
        BL_TRY(name_adapter(given->items[i - 1], one));
        for (size_t k = 0; k < i; k++)
            if (strcmp(s->adapters[k].name, one->name) == 0)
                return BL_FAIL(BL_EUSAGE, "--adapter: two adapters are named %s: give NAME=DIR%s",
                               one->name, k == 0 ? "; none is the base alone" : "");
    }
    s->adapter = n > 0 ? 1 : 0;
    return BL_OK;
}

/* LoRA terms of the embedding and the head. */
static bl_status load_terms(bl_generate_session *s, bl_named_adapter *adapter)
{
    bl_staging *staging;

    if (bl_device_get_kind(s->device) != BL_DEVICE_CPU)
        return BL_FAIL(
            BL_EUSAGE,
            "--adapter %s: device cuda is not supported with LoRA terms of the embedding "
            "or the head; use --device cpu",
            adapter->dir);
    BL_TRY(bl_adapter_terms_check_base(s->model->files, &s->model->config, adapter->dir));
    BL_TRY(bl_adapter_terms_create(s->device, &adapter->lora, &adapter->terms));
    BL_TRY(bl_staging_create(s->device, BL_STAGING_BYTES, "staging of LoRA weights", &staging));
    bl_status st =
        bl_adapter_terms_read(adapter->terms, &s->model->config, adapter->dir, staging, s->stream);
    bl_staging_destroy(staging);
    return st;
}

static bl_status load_adapters(bl_generate_session *s)
{
    bl_lora_layout_init(&s->model->config, NULL, &s->adapters[0].lora);
    for (size_t i = 1; i <= s->n_adapters; i++) {
        bool has_modules;
        BL_TRY(bl_adapter_modules_use(s->weights, s->adapters[i].dir, s->stream, &has_modules));
        if (has_modules && s->options->chat)
            return BL_FAIL(BL_EUSAGE,
                           "--adapter %s: its modules_to_save replace modules of the model, so "
                           "--chat cannot change the adapter; merge it first (ballast merge)",
                           s->adapters[i].dir);
        BL_TRY(bl_lora_read_all(s->adapters[i].dir, &s->model->config, s->device,
                                &s->adapters[i].lora, &s->adapters[i].weights));
        if (s->adapters[i].lora.n_table_floats > 0) BL_TRY(load_terms(s, &s->adapters[i]));
    }
    return BL_OK;
}

/* The keys and values in a cache are those of one adapter. */
static bl_status create_generator(bl_generate_session *s)
{
    const bl_named_adapter *one = &s->adapters[s->adapter];

    bl_generator_destroy(s->generator);
    s->generator = NULL;
    s->cached.n = 0;
    BL_TRY(bl_generator_create(s->device, s->stream, s->weights, s->base, &one->lora, one->weights,
                               s->capacity, &s->generator));
    return one->terms ? bl_generator_use_terms(s->generator, bl_adapter_terms_list(one->terms))
                      : BL_OK;
}

bl_status bl_generate_session_use(bl_generate_session *s, const char *name)
{
    for (size_t i = 0; i <= s->n_adapters; i++) {
        if (strcmp(s->adapters[i].name, name) != 0) continue;
        if (i == s->adapter) return BL_OK;
        s->adapter = i;
        return create_generator(s);
    }
    return BL_FAIL(BL_EUSAGE, "no adapter is named %s", name);
}

/* ---- opening ---- */

/* Ids need no tokenizer where the model has none and JSON is asked for. */
static bl_status load_tokenizer(bl_generate_session *s)
{
    const bl_generate_options *o = s->options;
    bool exists = true;
    char *path;

    if (o->input_ids && o->json) {
        BL_TRY(bl_path_join(o->model, "tokenizer.json", &path));
        bl_status st = bl_path_exists(path, &exists);
        free(path);
        BL_TRY(st);
    }
    if (!exists && s->stops.n > 0)
        return BL_FAIL(BL_EUSAGE, "--stop: %s has no tokenizer", o->model);
    return exists ? bl_tokenizer_load(o->model, &s->tokenizer) : BL_OK;
}

/* generation_config.json's defaults, except those for which an option is given. */
static bl_status name_defaults(const bl_generate_options *o)
{
    const char *chosen[10] = {NULL};
    size_t n = 0;
    bl_key_names names = {0};

    if (o->temperature > 0) chosen[n++] = "do_sample";
    if (o->temperature > 0) chosen[n++] = "temperature";
    if (o->top_k > 0) chosen[n++] = "top_k";
    if (o->top_p < 1) chosen[n++] = "top_p";
    if (o->min_p > 0) chosen[n++] = "min_p";
    if (o->repetition_penalty != 1) chosen[n++] = "repetition_penalty";
    if (o->stop) chosen[n++] = "stop_strings";
    if (o->max_new_tokens != BL_OPTION_AUTO) chosen[n++] = "max_length";
    if (o->max_new_tokens != BL_OPTION_AUTO) chosen[n++] = "max_new_tokens";
    BL_TRY(bl_generation_config_name(o->model, chosen, &names));
    if (names.n > 0)
        bl_log_warning("%s/generation_config.json: not used: %s; --temperature, --top_k, --top_p, "
                       "--min_p, --repetition_penalty, --stop and --max_new_tokens choose",
                       o->model, names.text);
    return BL_OK;
}

bl_status bl_generate_session_begin(const bl_generate_options *options, bl_generate_session *s)
{
    *s = (bl_generate_session){.options = options, .end = -1};
    BL_TRY(bl_stop_texts_read(options->stop, &s->stops));
    BL_TRY(name_adapters(s));
    BL_TRY(name_defaults(options));
    return load_tokenizer(s);
}

static void print_base_formats(const bl_generate_session *s)
{
    char text[BL_BASE_FORMATS_TEXT_BYTES];
    bl_base_formats_describe(&s->model->base_formats, "memory", text);
    bl_log_info("base_format %s: %s", bl_base_format_name(s->options->base_format), text);
}

static bl_status create_device(bl_generate_session *s)
{
    const bl_generate_options *o = s->options;
    int n_threads = (int)(o->threads == BL_OPTION_AUTO ? bl_cores_usable() : o->threads);
    bl_config_device device = o->device;
    bl_compute_dtype dtype = o->compute_dtype;
    bl_gpu_info gpu;

    BL_TRY(bl_config_choose_device(&device, &dtype, &gpu));
    if (device == BL_CONFIG_DEVICE_CPU) {
        BL_TRY(bl_device_create_cpu(n_threads, &s->device));
        return bl_device_set_act(s->device, dtype == BL_COMPUTE_BF16 ? BL_BF16 : BL_F32);
    }
    BL_TRY(bl_device_create_cuda(0, &s->device));
    return bl_device_start_workers(s->device, n_threads);
}

static bl_status create_sampler(bl_generate_session *s)
{
    const bl_generate_options *o = s->options;
    const bl_sampling sampling = {.repetition_penalty = o->repetition_penalty,
                                  .temperature = o->temperature,
                                  .top_k = o->top_k,
                                  .top_p = o->top_p,
                                  .min_p = o->min_p,
                                  .seed = (uint64_t)o->seed};
    return bl_token_sampler_create(&sampling, s->model->config.vocab_size, &s->sampler);
}

static void warn_of_positions(const bl_generate_session *s)
{
    int64_t most = s->model->config.max_position_embeddings;

    if (s->capacity <= most) return;
    if (s->options->chat)
        bl_log_warning("context is %lld tokens, beyond the model's max_position_embeddings %lld",
                       (long long)s->capacity, (long long)most);
    else
        bl_log_warning("the prompt and max_new_tokens are %lld tokens, beyond the model's "
                       "max_position_embeddings %lld",
                       (long long)s->capacity, (long long)most);
}

static bl_status check_ids(const bl_generate_session *s)
{
    for (size_t i = 0; i < s->ids.n; i++)
        if (s->ids.id[i] >= s->model->config.vocab_size)
            return BL_FAIL(BL_EINPUT, "%s: the prompt has token %d, the model has %lld",
                           s->options->model, s->ids.id[i], (long long)s->model->config.vocab_size);
    return BL_OK;
}

bl_status bl_generate_session_open(bl_generate_session *s, int64_t capacity)
{
    enum { MOST_OF_AUTO = 4096 };
    const bl_generate_options *o = s->options;
    bool is_auto = capacity == BL_OPTION_AUTO;

    s->capacity = is_auto ? MOST_OF_AUTO : capacity;
    BL_TRY(bl_model_open(o->model, o->base_format, s->capacity, &s->model));
    s->model->largest_scales = o->base_format_scales == BL_SCALES_LARGEST;
    if (is_auto) s->capacity = bl_min_i64(s->capacity, s->model->config.max_position_embeddings);
    warn_of_positions(s);
    BL_TRY(check_ids(s));
    BL_TRY(bl_comm_create_local(1, 0.0, &s->comm));
    BL_TRY(create_device(s));
    BL_TRY(bl_base_formats_check_device(&s->model->base_formats, bl_device_get_kind(s->device)));
    BL_TRY(bl_stream_create(s->device, "compute", &s->stream));
    BL_TRY(bl_model_weights_load(s->model, s->device, s->comm, s->stream, NULL, &s->weights));
    BL_TRY(bl_base_create_resident(&s->weights->layout, s->weights->shards, &s->base));
    BL_TRY(load_adapters(s));
    BL_TRY(create_generator(s));
    print_base_formats(s);
    return create_sampler(s);
}

void bl_generate_session_close(bl_generate_session *s)
{
    bl_token_sampler_destroy(s->sampler);
    bl_generator_destroy(s->generator);
    for (size_t i = 0; s->adapters && i <= s->n_adapters; i++) {
        if (s->device) bl_device_free(s->device, BL_SPACE_DEVICE, s->adapters[i].weights.data);
        bl_adapter_terms_destroy(s->adapters[i].terms);
        free(s->adapters[i].name);
        free(s->adapters[i].dir);
    }
    free(s->adapters);
    bl_base_destroy(s->base);
    bl_model_weights_free(s->weights);
    bl_stream_destroy(s->stream);
    bl_comm_destroy(s->comm); /* on a GPU it has some of its memory */
    bl_device_destroy(s->device);
    bl_model_close(s->model);
    bl_ids_free(&s->ids);
    bl_ids_free(&s->cached);
    bl_tokenizer_destroy(s->tokenizer);
    bl_stop_texts_free(&s->stops);
}

/* ---- an answer ---- */

static bool is_end(const bl_generate_session *s, int32_t id)
{
    if (id == s->end) return true;
    for (int i = 0; i < s->model->config.n_eos_token_ids; i++)
        if (s->model->config.eos_token_ids[i] == id) return true;
    if (!s->tokenizer) return false;
    size_t n;
    const int32_t *ends = bl_tokenizer_eos(s->tokenizer, &n);
    for (size_t i = 0; i < n; i++)
        if (ends[i] == id) return true;
    return false;
}

/* The ids of the session that the cache lacks, at least one: the logits are those after it. */
static bl_status extend(bl_generate_session *s, const float **logits)
{
    size_t n = 0;

    while (n < s->cached.n && n + 1 < s->ids.n && s->cached.id[n] == s->ids.id[n]) n++;
    bl_generator_shorten(s->generator, (int64_t)n);
    s->cached.n = n;
    BL_TRY(bl_ids_reserve(&s->cached, s->ids.n - n));
    BL_TRY(bl_generator_extend(s->generator, s->ids.id + n, (int64_t)(s->ids.n - n), logits));
    memcpy(s->cached.id + n, s->ids.id + n, (s->ids.n - n) * sizeof *s->ids.id);
    s->cached.n = s->ids.n;
    return BL_OK;
}

/* Messages are no part of an answer; another prompt is printed before it. */
static bl_status begin_text(const bl_generate_session *s, bl_answer_text *text)
{
    const bl_generate_options *o = s->options;
    char *prompt;

    *text = (bl_answer_text){.tokenizer = s->tokenizer, .stops = &s->stops};
    if (!s->tokenizer) return BL_OK;
    BL_TRY(bl_tokenizer_decode(s->tokenizer, s->ids.id, s->n_prompt, true, &prompt, &text->begin));
    free(prompt);
    if (o->messages || o->chat || o->json) text->shown = text->begin;
    return BL_OK;
}

/* Prints what is new of it; with --json, appends it to `whole`. */
static bl_status show(const bl_generate_session *s, bl_answer_text *text, bool is_last, FILE *whole)
{
    char *piece;
    size_t n_bytes;

    if (!s->tokenizer) return BL_OK;
    BL_TRY(bl_answer_text_next(text, s->ids.id, s->ids.n, is_last, &piece, &n_bytes));
    fwrite(piece, 1, n_bytes, whole);
    free(piece);
    if (whole == stdout) fflush(stdout);
    return BL_OK;
}

static bl_status choose_tokens(bl_generate_session *s, int64_t most, bl_answer_text *text,
                               FILE *whole, bl_generate_outcome *out)
{
    const float *logits;
    double begun_s = bl_now_s();

    *out = (bl_generate_outcome){.stop_id = -1};
    BL_TRY(show(s, text, false, whole));
    BL_TRY(extend(s, &logits));
    double answer_s = bl_now_s();
    out->prompt_s = answer_s - begun_s;
    for (int64_t i = 0; i < most && !text->stop; i++) {
        int32_t id = bl_token_sampler_choose(s->sampler, logits, s->ids.id, (int64_t)s->ids.n);
        if (is_end(s, id)) {
            out->stop_id = id;
            break;
        }
        BL_TRY(bl_ids_push(&s->ids, id));
        BL_TRY(show(s, text, false, whole));
        if (i + 1 < most && !text->stop) BL_TRY(extend(s, &logits));
    }
    BL_TRY(show(s, text, true, whole));
    out->stop = text->stop;
    out->answer_s = bl_now_s() - answer_s;
    return BL_OK;
}

static json_t *list_ids(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

/* text: the answer's; null without a tokenizer. */
static bl_status print_json(const bl_generate_session *s, const bl_generate_outcome *o,
                            const char *text, size_t n_bytes)
{
    size_t n_new = s->ids.n - s->n_prompt;
    json_t *stop_id = o->stop_id < 0 ? json_null() : json_integer(o->stop_id);
    json_t *stop = o->stop ? json_string(o->stop) : json_null();

    json_t *root =
        json_pack("{s:o, s:o, s:o, s:s, s:o, s:o, s:f, s:f, s:f}", "prompt_ids",
                  list_ids(s->ids.id, s->n_prompt), "ids", list_ids(s->ids.id + s->n_prompt, n_new),
                  "text", s->tokenizer ? json_stringn_nocheck(text, n_bytes) : json_null(),
                  "finish_reason", o->stop_id < 0 && !o->stop ? "length" : "stop", "stop_id",
                  stop_id, "stop", stop, "prompt_s", o->prompt_s, "answer_s", o->answer_s,
                  "tokens_per_s", o->answer_s > 0 ? (double)n_new / o->answer_s : 0.0);
    if (!root || bl_json_ran_out()) {
        json_decref(root);
        return BL_FAIL(BL_ENOMEM, "the answer");
    }
    json_dumpf(root, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
    putchar('\n');
    fflush(stdout);
    json_decref(root);
    return BL_OK;
}

static bl_status answer_in_json(bl_generate_session *s, int64_t most, bl_answer_text *text,
                                bl_generate_outcome *out)
{
    char *whole = NULL;
    size_t n_bytes = 0;
    FILE *file = open_memstream(&whole, &n_bytes);

    if (!file) return BL_FAIL(BL_ENOMEM, "the answer");
    bl_status st = choose_tokens(s, most, text, file, out);
    if (fclose(file) != 0 && st == BL_OK) st = BL_FAIL(BL_ENOMEM, "the answer");
    if (st == BL_OK) st = print_json(s, out, whole, n_bytes);
    free(whole);
    return st;
}

bl_status bl_generate_session_answer(bl_generate_session *s, int64_t most, bl_generate_outcome *out)
{
    bl_answer_text text;

    BL_TRY(check_ids(s));
    BL_TRY(begin_text(s, &text));
    if (s->options->json) return answer_in_json(s, most, &text, out);
    BL_TRY(choose_tokens(s, most, &text, stdout, out));
    putchar('\n');
    fflush(stdout);
    return BL_OK;
}
