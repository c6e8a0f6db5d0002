/* SPDX-License-Identifier: Apache-2.0 */
/* ballast generate: continue a prompt. */
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "config/config.h"
#include "model/generate.h"
#include "model/lora_io.h"
#include "tokenizer/tokenizer.h"

typedef struct generate_options {
    char *model, *adapter, *prompt;
    int64_t max_new_tokens, threads, seed;
    double temperature, top_p;
    bl_base_format base_format;
    bl_config_device device;
    bool parse_special_tokens;
} generate_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "Options", .type = BL_OPTION_##kind,                                   \
    .offset = offsetof(generate_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(model, PATH), .required_by = BL_CLI_ANY, .help = "a Hugging Face model directory"},
    {OPTION(adapter, PATH), .help = "a PEFT adapter directory"},
    {OPTION(prompt, STRING), .required_by = BL_CLI_ANY, .help = "the text to continue"},
    {OPTION(max_new_tokens, INT), .default_text = "128", .min = 0, .max = 1 << 20,
     .help = "tokens to add at most"},
    {OPTION(temperature, REAL), .default_text = "0", .min = 0, .max = 100,
     .help = "0 takes the most likely token each time"},
    {OPTION(top_p, REAL), .default_text = "1", .min = 0, .max = 1,
     .help = "draw from the likeliest tokens of this total probability"},
    {OPTION(seed, INT), .default_text = "42", .min = 0, .max = 9007199254740992.0,
     .help = "sampling seed"},
    {OPTION(base_format, ENUM), .default_text = "auto", .names = "auto|fp8_row|fp8_block|stored",
     .help = "how the frozen weights are held"},
    {OPTION(device, ENUM), .default_text = "auto", .names = "auto|cpu|cuda",
     .help = "auto: the GPU, if this build and machine have one"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "CPU threads"},
    {OPTION(parse_special_tokens, BOOL), .default_text = "false",
     .help = "a special token spelled out in the prompt becomes that token"},
};

/* What is open while a prompt is continued. */
typedef struct session {
    const generate_options *options;
    bl_tokenizer *tokenizer;
    bl_llama_model *model;
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    bl_llama_weights *weights;
    bl_base *base;
    bl_lora_layout lora;
    bl_tensor lora_weights;
    bl_generator *generator;
    /* The prompt and what was added: decoded together, so that spaces come out as in one text. */
    bl_ids ids;
} session;

static void print_options(FILE *out, bool as_markdown)
{
    bl_cli_print_table(table, BL_COUNT(table), out, as_markdown);
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
    bl_llama_base_formats_describe(&s->model->base_formats, "memory", text);
    bl_log_info("base_format %s: %s", bl_base_format_name(s->options->base_format), text);
}

/* On a GPU the products are in bf16. */
static bl_status create_device(session *s)
{
    const generate_options *o = s->options;
    int n_threads = (int)(o->threads == BL_OPTION_AUTO ? bl_cores_usable() : o->threads);
    bl_config_device device = o->device;
    bl_compute_dtype dtype = BL_COMPUTE_AUTO;
    bl_gpu_info gpu;

    BL_TRY(bl_config_choose_device(&device, &dtype, &gpu));
    if (device == BL_CONFIG_DEVICE_CPU) return bl_device_create_cpu(n_threads, &s->device);
    BL_TRY(bl_device_create_cuda(0, &s->device));
    return bl_device_start_workers(s->device, n_threads);
}

static bl_status open_session(session *s)
{
    const generate_options *o = s->options;
    unsigned flags = BL_ADD_SPECIAL | (o->parse_special_tokens ? BL_PARSE_SPECIAL : 0u);

    BL_TRY(bl_tokenizer_load(o->model, &s->tokenizer));
    BL_TRY(bl_tokenizer_encode(s->tokenizer, o->prompt, strlen(o->prompt), flags, &s->ids));
    if (s->ids.n == 0) return BL_FAIL(BL_EUSAGE, "the prompt has no tokens");
    int64_t capacity = (int64_t)s->ids.n + o->max_new_tokens;
    BL_TRY(bl_llama_model_open(o->model, o->base_format, capacity, &s->model));
    for (size_t i = 0; i < s->ids.n; i++)
        if (s->ids.id[i] >= s->model->config.vocab_size)
            return BL_FAIL(BL_EINPUT, "%s: the tokenizer gives token %d, the model has %lld",
                           o->model, s->ids.id[i], (long long)s->model->config.vocab_size);
    BL_TRY(bl_comm_create_local(1, 0.0, &s->comm));
    BL_TRY(create_device(s));
    BL_TRY(bl_stream_create(s->device, "compute", &s->stream));
    BL_TRY(bl_llama_weights_load(s->model, s->device, s->comm, s->stream, NULL, &s->weights));
    BL_TRY(bl_base_create_resident(&s->weights->layout, s->weights->shards, &s->base));
    BL_TRY(load_adapter(s));
    BL_TRY(bl_generator_create(s->device, s->stream, s->weights, s->base, &s->lora, s->lora_weights,
                               capacity, &s->generator));
    print_base_formats(s);
    return BL_OK;
}

static void close_session(session *s)
{
    bl_generator_destroy(s->generator);
    if (s->device) bl_device_free(s->device, BL_SPACE_DEVICE, s->lora_weights.data);
    bl_base_destroy(s->base);
    bl_llama_weights_free(s->weights);
    bl_stream_destroy(s->stream);
    bl_comm_destroy(s->comm); /* on a GPU it has some of its memory */
    bl_device_destroy(s->device);
    bl_llama_model_close(s->model);
    bl_ids_free(&s->ids);
    bl_tokenizer_destroy(s->tokenizer);
}

static bool is_end(const session *s, int32_t id)
{
    for (int i = 0; i < s->model->config.n_eos_token_ids; i++)
        if (s->model->config.eos_token_ids[i] == id) return true;
    size_t n;
    const int32_t *ends = bl_tokenizer_eos(s->tokenizer, &n);
    for (size_t i = 0; i < n; i++)
        if (ends[i] == id) return true;
    return false;
}

/* Prints what the decoded text has grown by; a character whose bytes are not all there yet is held back. */
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

static bl_status generate(session *s)
{
    const generate_options *o = s->options;
    const float *logits;
    size_t printed = 0;
    int64_t n_prompt = (int64_t)s->ids.n;

    BL_TRY(print_growth(s, &printed, false));
    BL_TRY(bl_generator_extend(s->generator, s->ids.id, n_prompt, &logits));
    for (int64_t i = 0; i < o->max_new_tokens; i++) {
        int32_t id = bl_generator_choose(logits, s->model->config.vocab_size, o->temperature,
                                         o->top_p, (uint64_t)o->seed, n_prompt + i);
        if (is_end(s, id)) break;
        BL_TRY(bl_ids_push(&s->ids, id));
        BL_TRY(print_growth(s, &printed, false));
        if (i + 1 < o->max_new_tokens) BL_TRY(bl_generator_extend(s->generator, &id, 1, &logits));
    }
    BL_TRY(print_growth(s, &printed, true));
    putchar('\n');
    return BL_OK;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    generate_options values;
    uint8_t origins[BL_COUNT(table)];
    int n_words;
    session s = {.options = &values};
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 0, NULL, &n_words));
    BL_TRY_GOTO(st, done, open_session(&s));
    st = generate(&s);
done:
    close_session(&s);
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_generate = {
    .name = "generate",
    .arguments = "--model DIR [--adapter DIR] --prompt TEXT [--max_new_tokens N]",
    .summary = "continue a prompt",
    .details =
        "Prints the prompt and its continuation, up to an end-of-text token. Greedy unless a "
        "temperature is given.\n",
    .print_options = print_options,
    .run = run,
};
