/* SPDX-License-Identifier: Apache-2.0 */
/* chat_case.c -- the folder, the tokenizers and the templates of chat_case.h. */
#include "chat_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"

char folder[64];
bl_tokenizer *chat_tokenizer, *spm_tokenizer;

int set_up(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-chat-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    if (bl_tokenizer_load(FIXTURE, &chat_tokenizer) != BL_OK) return -1;
    if (bl_tokenizer_load(SPM_FIXTURE, &spm_tokenizer) != BL_OK) return -1;
    return 0;
}

int tear_down(void **state)
{
    (void)state;
    bl_tokenizer_destroy(chat_tokenizer);
    bl_tokenizer_destroy(spm_tokenizer);
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

const char *in_folder(const char *name)
{
    static char path[4][160];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

const char *write_file(const char *name, const char *text)
{
    const char *path = in_folder(name);
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
    return path;
}

bl_chat_template *load(const char *name, const char *date, const bl_tokenizer *tokenizer)
{
    bl_chat_template *chat;
    if (bl_chat_template_load(name, date, tokenizer, &chat) != BL_OK)
        fail_msg("%s", bl_error_text());
    return chat;
}
