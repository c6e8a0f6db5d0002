/* SPDX-License-Identifier: Apache-2.0 */
/* ballast generate: continue a prompt, answer messages, or hold a conversation. */
#include "base/sizes.h"
#include "cli/cli.h"
#include "cli/generate_internal.h"

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "Options", .type = BL_OPTION_##kind,                                   \
    .offset = offsetof(bl_generate_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(model, PATH), .is_model = true, .required_by = BL_CLI_ANY,
     .help = "a Hugging Face model directory"},
    {OPTION(adapter, LIST),
     .help = "a PEFT adapter directory; of --chat several, separated by commas: NAME=DIR"},
    {OPTION(prompt, STRING), .help = "the text to continue"},
    {OPTION(prompt_file, PATH),
     .help = "a file of it, UTF-8; a newline at its end does not belong to it"},
    {OPTION(messages, STRING),
     .help = "messages to answer: a JSON list of role and content, or a file of it"},
    {OPTION(chat, BOOL), .default_text = "false",
     .help = "a conversation: each line of stdin is a message; begins with --messages, if given"},
    {OPTION(input_ids, STRING), .help = "token ids to continue: 1,2,3"},
    {OPTION(chat_template, STRING),
     .help = "of messages: llama2, llama3, llama3.1, llama3.2, or a file; null: the model's own"},
    {OPTION(template_date, STRING), .help = "the date that the template writes, if it writes one"},
    {OPTION(max_new_tokens, INT), .default_text = "auto", .has_auto = true, .min = 0,
     .max = 1 << 20, .help = "tokens of an answer at most; auto: 128, of --chat 1024"},
    {OPTION(stop, STRING),
     .help =
         "a text that ends an answer and is not printed, or a list of such texts, [\"a\", \"b\"]"},
    {OPTION(context, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1 << 24,
     .help = "of --chat, tokens of the conversation at most; auto: 4096, or the model's positions"},
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
    {OPTION(base_format, ENUM), .default_text = "auto", .names = "auto|" BL_FORMATS_MADE "|stored",
     .help = "how the frozen weights are held"},
    {OPTION(base_format_scales, ENUM), .default_text = "least_squares",
     .names = "least_squares|largest", .help = "as of `ballast train`"},
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
     .help =
         "a JSON object per answer: prompt_ids, ids, text, finish_reason, stop_id, stop, seconds"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

static bl_status answer_prompt(bl_generate_session *s, const bl_generate_prompt *prompt)
{
    int64_t most = bl_generate_max_new_tokens(s->options);
    bl_generate_outcome out;

    BL_TRY(bl_generate_prompt_read(prompt, s->tokenizer, &s->ids, &s->end));
    if (s->ids.n == 0) return BL_FAIL(BL_EUSAGE, "the prompt has no tokens");
    s->n_prompt = s->ids.n;
    BL_TRY(bl_generate_session_open(s, (int64_t)s->ids.n + most));
    return bl_generate_session_answer(s, most, &out);
}

static bl_status generate(const bl_generate_options *o, bl_generate_session *s)
{
    const bl_generate_prompt prompt = {.prompt = o->prompt,
                                       .prompt_file = o->prompt_file,
                                       .messages = o->messages,
                                       .input_ids = o->input_ids,
                                       .chat_template = o->chat_template,
                                       .template_date = o->template_date,
                                       .parse_special_tokens = o->parse_special_tokens,
                                       .chat = o->chat};

    BL_TRY(bl_generate_prompt_check(&prompt));
    if (o->context != BL_OPTION_AUTO && !o->chat)
        return BL_FAIL(BL_EUSAGE, "--context: only with --chat");
    BL_TRY(bl_generate_session_begin(o, s));
    return o->chat ? bl_generate_chat(s) : answer_prompt(s, &prompt);
}

static bl_status run(int argc, char *const *argv)
{
    bl_generate_options values;
    uint8_t origins[BL_COUNT(table)];
    int n_words;
    bl_generate_session s = {.options = &values};
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    bl_status st = bl_cli_read(&options, argc, argv, 0, NULL, &n_words);
    if (st == BL_OK) st = generate(&values, &s);
    bl_generate_session_close(&s);
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_generate = {
    .name = "generate",
    .arguments = "--model DIR [--adapter DIR] --prompt TEXT | --prompt_file FILE | --messages "
                 "JSON|FILE | --input_ids IDS | --chat [--key value ...]",
    .summary = "continue a prompt, answer messages, or chat",
    .details =
        "Prints the prompt and its continuation, up to an end-of-text token; of messages the "
        "answer "
        "only, with the model's chat\n"
        "template around them, up to the token that ends a turn. Greedy unless a temperature is "
        "given. With --json prints one\n"
        "object: prompt_ids, ids and text of what was added, finish_reason (stop, length), stop_id "
        "(the end token or null),\n"
        "stop (the stop text or null), prompt_s, answer_s, tokens_per_s. With --json, --input_ids "
        "needs no tokenizer.\n"
        "With --chat, reads a message per line; lines that begin with / are commands: /help lists "
        "them.\n",
    .print_options = print_options,
    .run = run,
};
