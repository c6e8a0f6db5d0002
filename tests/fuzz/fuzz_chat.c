/* SPDX-License-Identifier: Apache-2.0 */
/* A conversation written by a jinja template: the template, then a user's text, an answer, a second
 * user's text and a second answer. */
#include <stdlib.h>
#include <string.h>

#include "chat/template.h"
#include "fuzz.h"

enum { N_MESSAGES = 4 };

static void check_labels(const bl_tokenizer *tokenizer, const bl_ids *ids, const bl_ids *labels)
{
    if (ids->n != labels->n) abort();
    for (size_t i = 0; i < ids->n; i++) {
        if (ids->id[i] < 0 || ids->id[i] >= bl_tokenizer_vocab_size(tokenizer)) abort();
        if (labels->id[i] != ids->id[i] && labels->id[i] != BL_LABEL_MASKED) abort();
    }
}

static void encode(const bl_chat_template *chat, const bl_tokenizer *tokenizer,
                   const bl_chat_message *messages)
{
    bl_ids ids = {0}, labels = {0}, prompt = {0};
    bl_status st = bl_chat_template_encode(chat, messages, N_MESSAGES, NULL, false, &ids, &labels);

    fuzz_check(st);
    if (st == BL_OK) check_labels(tokenizer, &ids, &labels);
    fuzz_check(bl_chat_template_encode_prompt(chat, messages, 1, NULL, &prompt));
    bl_ids_free(&ids);
    bl_ids_free(&labels);
    bl_ids_free(&prompt);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static bl_tokenizer *tokenizer;
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    bl_chat_message messages[N_MESSAGES];
    char *text[N_MESSAGES];
    bl_chat_template *chat = NULL;

    if (!tokenizer && bl_tokenizer_load("tests/tokenizer/fixtures/chat.json", &tokenizer) != BL_OK)
        abort();
    fuzz_write("chat.jinja", fuzz_next(&input));
    for (int i = 0; i < N_MESSAGES; i++) {
        fuzz_part part = fuzz_next(&input);
        text[i] = part.n_bytes ? strndup((const char *)part.bytes, part.n_bytes) : strdup("text");
        messages[i] = (bl_chat_message){.role = i % 2 ? BL_CHAT_ASSISTANT : BL_CHAT_USER,
                                        .content = text[i],
                                        .is_masked = n_bytes % 5 == 0 && i == 1};
    }
    fuzz_check(bl_chat_template_load(fuzz_path("chat.jinja"), NULL, tokenizer, &chat));
    if (chat) encode(chat, tokenizer, messages);
    bl_chat_template_destroy(chat);
    for (int i = 0; i < N_MESSAGES; i++) free(text[i]);
    return 0;
}
