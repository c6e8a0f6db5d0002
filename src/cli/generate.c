/* SPDX-License-Identifier: Apache-2.0 */
/* ballast generate: continue a prompt, or answer messages. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cores.h"
#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "cli/generate_prompt_internal.h"
#include "config/config.h"
#include "model/generate.h"
#include "model/sample.h"
#include "adapter/lora_io.h"
#include "tokenizer/tokenizer.h"

typedef struct generate_options {
    char *model, *adapter, *prompt, *prompt_file, *messages, *input_ids, *chat_template,
        *template_date;
    int64_t max_new_tokens, threads, seed, top_k;
    double temperature, top_p, min_p, repetition_penalty;
    bl_base_format base_format;
    bl_config_device device;
    bl_compute_dtype compute_dtype;
    bool parse_special_tokens, json;
} generate_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "Options", .type = BL_OPTION_##kind,                                   \
    .offset = offsetof(generate_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(model, PATH), .is_model = true, .required_by = BL_CLI_ANY,
     .help = "a Hugging Face model directory"},
    {OPTION(adapter, PATH), .is_model = true, .help = "a PEFT adapter directory"},
    {OPTION(prompt, STRING), .help = "the text to continue"},
    {OPTION(prompt_file, PATH),
     .help = "a file of it, UTF-8; a newline at its end does not belong to it"},
    {OPTION(messages, STRING),
     .help = "messages to answer: a JSON list of role and content, or a file of it"},
    {OPTION(input_ids, STRING), .help = "token ids to continue: 1,2,3"},
    {OPTION(chat_template, STRING),
     .help = "of messages: llama2, llama3, llama3.1, llama3.2, or a file; null: the model's own"},
    {OPTION(template_date, STRING), .help = "the date that the template writes, if it writes one"},
    {OPTION(max_new_tokens, INT), .default_text = "128", .min = 0, .max = 1 << 20,
     .help = "tokens to add at most"},
    {OPTION(temperature, REAL), .default_text = "0", .min = 0, .max = 100,
     .help = "0 takes the most likely token each time"},
    {OPTION(top_k, INT), .default_text = "0", .min = 0, .max = 1 << 30,
     .help = "draw from so many of the likeliest tokens; 0: from all"},
    {OPTION(top_p, REAL), .default_text = "1", .min = 0, .max = 1,
     .help = "draw from the likeliest tokens of this total probability"},
    {OPTION(min_p, REAL), .default_text = "0", .min = 0, .max = 1,
     .help = "draw from tokens of at least this share of the likeliest one's probability"},
    {OPTION(repetition_penalty, REAL), .default_text = "1", .min = 0.01, .max = 100,
     .help = "above 1 makes tokens less likely that the prompt or the answer has"},
    {OPTION(seed, INT), .default_text = "42", .min = 0, .max = 9007199254740992.0,
     .help = "sampling seed"},
    {OPTION(base_format, ENUM), .default_text = "auto", .names = "auto|fp8_row|fp8_block|stored",
     .help = "how the frozen weights are held"},
    {OPTION(device, ENUM), .default_text = "auto", .names = "auto|cpu|cuda",
     .help = "auto: the GPU, if this build and machine have one"},
    {OPTION(compute_dtype, ENUM), .default_text = "auto", .names = "auto|fp32|bf16",
     .help = "arithmetic: fp32 or, with AVX512-BF16, bf16 on the CPU; bf16 on a GPU; auto: fp32 or "
             "bf16"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "CPU threads"},
    {OPTION(parse_special_tokens, BOOL), .default_text = "false",
     .help = "a special token spelled out in the prompt becomes that token"},
    {OPTION(json, BOOL), .default_text = "false",
     .help = "one JSON object: prompt_ids, ids, text, finish_reason, stop_id, seconds"},
};

/* The open objects while a prompt is continued. */
typedef struct session {
    const generate_options *options;
    bl_tokenizer *tokenizer; /* NULL: ids in and out */
    bl_model *model;
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    bl_model_weights *weights;
    bl_base *base;
    bl_lora_layout lora;
    bl_tensor lora_weights;
    bl_generator *generator;
    bl_token_sampler *sampler;
    /* The prompt and the new ids: decoded together, so that spaces are those of one text. */
    bl_ids ids;
    size_t n_prompt; /* of them */
    int32_t end;     /* of an answer to messages; -1: none */
} session;

/* How it ended. */
typedef struct outcome {
    int32_t stop_id; /* the end token that was chosen; -1: max_new_tokens were */
    double prompt_s, answer_s;
} outcome;

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

static bl_status load_adapter(session *s)
{
    if (!s->options->adapter) {
        bl_lora_layout_init(&s->model->config, NULL, &s->lora);
        return BL_OK;
    }
    return bl_lora_read_all(s->options->adapter, &s->model->config, s->device, &s->lora,
                            &s->lora_weights);
}

static void print_base_formats(const session *s)
{
    char text[BL_BASE_FORMATS_TEXT_BYTES];
    bl_base_formats_describe(&s->model->base_formats, "memory", text);
    bl_log_info("base_format %s: %s", bl_base_format_name(s->options->base_format), text);
}

static bl_status create_device(session *s)
{
    const generate_options *o = s->options;
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

/* Ids need no tokenizer where the model has none and JSON is asked for. */
static bl_status load_tokenizer(session *s)
{
    const generate_options *o = s->options;
    bool exists = true;
    char *path;

    if (o->input_ids && o->json) {
        BL_TRY(bl_path_join(o->model, "tokenizer.json", &path));
        bl_status st = bl_path_exists(path, &exists);
        free(path);
        BL_TRY(st);
    }
    return exists ? bl_tokenizer_load(o->model, &s->tokenizer) : BL_OK;
}

static bl_status read_prompt(session *s)
{
    const generate_options *o = s->options;
    const bl_generate_prompt prompt = {.prompt = o->prompt,
                                       .prompt_file = o->prompt_file,
                                       .messages = o->messages,
                                       .input_ids = o->input_ids,
                                       .chat_template = o->chat_template,
                                       .template_date = o->template_date,
                                       .parse_special_tokens = o->parse_special_tokens};

    BL_TRY(bl_generate_prompt_check(&prompt));
    BL_TRY(load_tokenizer(s));
    BL_TRY(bl_generate_prompt_read(&prompt, s->tokenizer, &s->ids, &s->end));
    if (s->ids.n == 0) return BL_FAIL(BL_EUSAGE, "the prompt has no tokens");
    s->n_prompt = s->ids.n;
    return BL_OK;
}

static bl_status create_sampler(session *s)
{
    const generate_options *o = s->options;
    const bl_sampling sampling = {.repetition_penalty = o->repetition_penalty,
                                  .temperature = o->temperature,
                                  .top_k = o->top_k,
                                  .top_p = o->top_p,
                                  .min_p = o->min_p,
                                  .seed = (uint64_t)o->seed};
    return bl_token_sampler_create(&sampling, s->model->config.vocab_size, &s->sampler);
}

static void warn_of_positions(const session *s, int64_t capacity)
{
    int64_t most = s->model->config.max_position_embeddings;

    if (capacity > most)
        bl_log_warning("the prompt and max_new_tokens are %lld tokens, beyond the model's "
                       "max_position_embeddings %lld",
                       (long long)capacity, (long long)most);
}

static bl_status open_session(session *s)
{
    const generate_options *o = s->options;

    BL_TRY(read_prompt(s));
    int64_t capacity = (int64_t)s->ids.n + o->max_new_tokens;
    BL_TRY(bl_model_open(o->model, o->base_format, capacity, &s->model));
    warn_of_positions(s, capacity);
    for (size_t i = 0; i < s->ids.n; i++)
        if (s->ids.id[i] >= s->model->config.vocab_size)
            return BL_FAIL(BL_EINPUT, "%s: the prompt has token %d, the model has %lld", o->model,
                           s->ids.id[i], (long long)s->model->config.vocab_size);
    BL_TRY(bl_comm_create_local(1, 0.0, &s->comm));
    BL_TRY(create_device(s));
    BL_TRY(bl_stream_create(s->device, "compute", &s->stream));
    BL_TRY(bl_model_weights_load(s->model, s->device, s->comm, s->stream, NULL, &s->weights));
    BL_TRY(bl_base_create_resident(&s->weights->layout, s->weights->shards, &s->base));
    BL_TRY(load_adapter(s));
    BL_TRY(bl_generator_create(s->device, s->stream, s->weights, s->base, &s->lora, s->lora_weights,
                               capacity, &s->generator));
    print_base_formats(s);
    return create_sampler(s);
}

static void close_session(session *s)
{
    bl_token_sampler_destroy(s->sampler);
    bl_generator_destroy(s->generator);
    if (s->device) bl_device_free(s->device, BL_SPACE_DEVICE, s->lora_weights.data);
    bl_base_destroy(s->base);
    bl_model_weights_free(s->weights);
    bl_stream_destroy(s->stream);
    bl_comm_destroy(s->comm); /* on a GPU it has some of its memory */
    bl_device_destroy(s->device);
    bl_model_close(s->model);
    bl_ids_free(&s->ids);
    bl_tokenizer_destroy(s->tokenizer);
}

static bool is_end(const session *s, int32_t id)
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

/* Prints the new part of the decoded text; holds back a character whose bytes are not all there
 * yet. */
static bl_status print_growth(session *s, size_t *printed, bool last)
{
    char *text;
    size_t n;
    BL_TRY(bl_tokenizer_decode(s->tokenizer, s->ids.id, s->ids.n, true, &text, &n));
    size_t stop = n;
    static const char replacement[] = "\xEF\xBF\xBD";
    while (!last && stop >= *printed + 3 && memcmp(text + stop - 3, replacement, 3) == 0) stop -= 3;
    if (stop > *printed) fwrite(text + *printed, 1, stop - *printed, stdout);
    *printed = stop > *printed ? stop : *printed;
    fflush(stdout);
    free(text);
    return BL_OK;
}

/* The bytes of the text before which nothing is printed: messages are no part of an answer. */
static bl_status begin_text(session *s, size_t *printed)
{
    char *text;

    *printed = 0;
    if (s->options->messages) {
        BL_TRY(bl_tokenizer_decode(s->tokenizer, s->ids.id, s->n_prompt, true, &text, printed));
        free(text);
        return BL_OK;
    }
    return s->options->json ? BL_OK : print_growth(s, printed, false);
}

static bl_status generate(session *s, outcome *out)
{
    const generate_options *o = s->options;
    const float *logits;
    size_t printed;
    double begun_s = bl_now_s();

    *out = (outcome){.stop_id = -1};
    BL_TRY(begin_text(s, &printed));
    BL_TRY(bl_generator_extend(s->generator, s->ids.id, (int64_t)s->n_prompt, &logits));
    double answer_s = bl_now_s();
    out->prompt_s = answer_s - begun_s;
    for (int64_t i = 0; i < o->max_new_tokens; i++) {
        int32_t id = bl_token_sampler_choose(s->sampler, logits, s->ids.id, (int64_t)s->ids.n);
        if (is_end(s, id)) {
            out->stop_id = id;
            break;
        }
        BL_TRY(bl_ids_push(&s->ids, id));
        if (!o->json) BL_TRY(print_growth(s, &printed, false));
        if (i + 1 < o->max_new_tokens) BL_TRY(bl_generator_extend(s->generator, &id, 1, &logits));
    }
    out->answer_s = bl_now_s() - answer_s;
    if (o->json) return BL_OK;
    BL_TRY(print_growth(s, &printed, true));
    putchar('\n');
    return BL_OK;
}

static json_t *list_ids(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

/* The text after the prompt's in the decoding of all ids; null without a tokenizer. */
static bl_status decode_answer(const session *s, json_t **out)
{
    char *whole, *prompt;
    size_t n_whole, n_prompt;

    *out = json_null();
    if (!s->tokenizer) return BL_OK;
    BL_TRY(bl_tokenizer_decode(s->tokenizer, s->ids.id, s->n_prompt, true, &prompt, &n_prompt));
    free(prompt);
    BL_TRY(bl_tokenizer_decode(s->tokenizer, s->ids.id, s->ids.n, true, &whole, &n_whole));
    /* A prompt that ends inside a character has a replacement there, which may be shorter. */
    n_prompt = n_prompt < n_whole ? n_prompt : n_whole;
    *out = json_stringn(whole + n_prompt, n_whole - n_prompt);
    if (!*out) *out = json_stringn_nocheck(whole + n_prompt, 0);
    free(whole);
    return BL_OK;
}

static bl_status print_json(const session *s, const outcome *o)
{
    size_t n_new = s->ids.n - s->n_prompt;
    json_t *text, *stop = o->stop_id < 0 ? json_null() : json_integer(o->stop_id);

    BL_TRY(decode_answer(s, &text));
    json_t *root = json_pack(
        "{s:o, s:o, s:o, s:s, s:o, s:f, s:f, s:f}", "prompt_ids", list_ids(s->ids.id, s->n_prompt),
        "ids", list_ids(s->ids.id + s->n_prompt, n_new), "text", text, "finish_reason",
        o->stop_id < 0 ? "length" : "stop", "stop_id", stop, "prompt_s", o->prompt_s, "answer_s",
        o->answer_s, "tokens_per_s", o->answer_s > 0 ? (double)n_new / o->answer_s : 0.0);
    if (!root || bl_json_ran_out()) {
        json_decref(root);
        return BL_FAIL(BL_ENOMEM, "the answer");
    }
    json_dumpf(root, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
    putchar('\n');
    json_decref(root);
    return BL_OK;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    generate_options values;
    uint8_t origins[BL_COUNT(table)];
    int n_words;
    session s = {.options = &values};
    outcome out;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 0, NULL, &n_words));
    BL_TRY_GOTO(st, done, open_session(&s));
    BL_TRY_GOTO(st, done, generate(&s, &out));
    if (values.json) st = print_json(&s, &out);
done:
    close_session(&s);
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_generate = {
    .name = "generate",
    .arguments = "--model DIR [--adapter DIR] --prompt TEXT | --prompt_file FILE | --messages "
                 "JSON|FILE | --input_ids IDS [--key value ...]",
    .summary = "continue a prompt, or answer messages",
    .details =
        "Prints the prompt and its continuation, up to an end-of-text token; of messages the "
        "answer "
        "only, with the model's chat\n"
        "template around them, up to the token that ends a turn. Greedy unless a temperature is "
        "given. With --json prints one\n"
        "object: prompt_ids, ids and text of what was added, finish_reason (stop, length), stop_id "
        "(the end token or null),\n"
        "prompt_s, answer_s, tokens_per_s. With --json, --input_ids needs no tokenizer.\n",
    .print_options = print_options,
    .run = run,
};
