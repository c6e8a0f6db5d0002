/* SPDX-License-Identifier: Apache-2.0 */
/* chat_case.h -- a folder for files, two small tokenizers, and templates for them. */
#ifndef BALLAST_TESTS_CHAT_CHAT_CASE_H
#define BALLAST_TESTS_CHAT_CHAT_CASE_H

#include "chat/template.h"

#define FIXTURE     "tests/tokenizer/fixtures/chat.json"
#define SPM_FIXTURE "tests/tokenizer/fixtures/chat_spm.json"

/* The required keys of a template file, except one. */
#define ROLES "roles: {user: {prefix: 'U '}, assistant: {prefix: 'A', suffix: '<|eot_id|>!'}}\n"

extern char folder[64];
extern bl_tokenizer *chat_tokenizer, *spm_tokenizer; /* of FIXTURE and SPM_FIXTURE */

/* Of a program's tests together. */
int set_up(void **state);
int tear_down(void **state);

const char *in_folder(const char *name); /* one of the last four paths */
const char *write_file(const char *name, const char *text);
bl_chat_template *load(const char *name, const char *date, const bl_tokenizer *tokenizer);

#endif
