/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the chat templates next to tokenizer.json, as transformers 5 does: files, or, where there
 * is none, those of tokenizer_config.json. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "tokenizer/internal.h"

enum { MAX_JINJA_BYTES = 1 << 20 };

static const char JINJA[] = ".jinja";

/* Takes `text` over, also when it fails. The last one of a name counts. */
static bl_status add_template(bl_tokenizer *tokenizer, const char *name, size_t n_bytes, char *text)
{
    bl_named_template *list = tokenizer->templates;
    char *own = text ? strndup(name, n_bytes) : NULL;

    for (size_t i = 0; own && i < tokenizer->n_templates; i++)
        if (!strcmp(list[i].name, own)) {
            free(own);
            free(list[i].text);
            list[i].text = text;
            return BL_OK;
        }
    list = own ? realloc(list, (tokenizer->n_templates + 1) * sizeof *list) : NULL;
    if (!list) {
        free(own);
        free(text);
        return BL_FAIL(BL_ENOMEM, "chat template %s", name);
    }
    list[tokenizer->n_templates++] = (bl_named_template){own, text};
    tokenizer->templates = list;
    return BL_OK;
}

/* ---- files ---- */

/* `file`, "NAME.jinja" of the directory; `name` of n_bytes bytes. */
static bl_status read_file(const char *folder, const char *file, const char *name, size_t n_bytes,
                           bl_tokenizer *tokenizer)
{
    char *path;
    void *bytes = NULL;
    size_t n;

    BL_TRY(bl_path_join(folder, file, &path));
    bl_status st = bl_file_read_all(path, MAX_JINJA_BYTES, &bytes, &n);
    free(path);
    return st == BL_OK ? add_template(tokenizer, name, n_bytes, bytes) : st;
}

static bl_status read_default(const char *folder, bl_tokenizer *tokenizer)
{
    char *path;
    bool exists;

    BL_TRY(bl_path_join(folder, BL_TOKENIZER_TEMPLATE_FILE, &path));
    bl_status st = bl_path_exists(path, &exists);
    free(path);
    if (st != BL_OK || !exists) return st;
    return read_file(folder, BL_TOKENIZER_TEMPLATE_FILE, BL_TOKENIZER_DEFAULT_TEMPLATE,
                     strlen(BL_TOKENIZER_DEFAULT_TEMPLATE), tokenizer);
}

static bl_status read_additional(const char *folder, bl_tokenizer *tokenizer)
{
    char *path, **names = NULL;
    size_t n_names = 0;
    bool exists;
    bl_status st;

    BL_TRY(bl_path_join(folder, BL_TOKENIZER_TEMPLATE_FOLDER, &path));
    BL_TRY_GOTO(st, done, bl_path_exists(path, &exists));
    if (!exists) goto done;
    BL_TRY_GOTO(st, done, bl_dir_list(path, &names, &n_names));
    for (size_t i = 0; i < n_names; i++) {
        size_t n = strlen(names[i]), n_ending = sizeof JINJA - 1;
        if (n > n_ending && !strcmp(names[i] + n - n_ending, JINJA))
            BL_TRY_GOTO(st, done, read_file(path, names[i], names[i], n - n_ending, tokenizer));
    }
done:
    bl_names_free(names, n_names);
    free(path);
    return st;
}

/* ---- tokenizer_config.json ---- */

static bl_status read_text(const char *file, const char *name, const json_t *value,
                           bl_tokenizer *tokenizer)
{
    const char *text = bl_json_text(value);

    if (!text) return bl_json_fail(file, "chat_template", "a text without NUL", value);
    return add_template(tokenizer, name, strlen(name), strdup(text));
}

bl_status bl_tokenizer_read_templates(const char *file, const json_t *config,
                                      bl_tokenizer *tokenizer)
{
    const json_t *value = json_object_get(config, "chat_template"), *entry;
    size_t i;

    if (tokenizer->n_templates || !value || json_is_null(value)) return BL_OK;
    if (!json_is_array(value))
        return read_text(file, BL_TOKENIZER_DEFAULT_TEMPLATE, value, tokenizer);
    json_array_foreach((json_t *)value, i, entry)
    {
        const char *name = bl_json_text(json_object_get(entry, "name"));
        if (!name)
            return bl_json_fail(file, "chat_template", "a text, or a list of name and template",
                                entry);
        BL_TRY(read_text(file, name, json_object_get(entry, "template"), tokenizer));
    }
    return BL_OK;
}

bl_status bl_tokenizer_read_template_files(const char *folder, bl_tokenizer *tokenizer)
{
    BL_TRY(read_default(folder, tokenizer));
    return read_additional(folder, tokenizer);
}

void bl_tokenizer_free_templates(bl_tokenizer *tokenizer)
{
    for (size_t i = 0; i < tokenizer->n_templates; i++) {
        free(tokenizer->templates[i].name);
        free(tokenizer->templates[i].text);
    }
    free(tokenizer->templates);
}

const bl_named_template *bl_tokenizer_chat_templates(const bl_tokenizer *tokenizer, size_t *n)
{
    *n = tokenizer->n_templates;
    return tokenizer->templates;
}

const char *bl_tokenizer_chat_template(const bl_tokenizer *tokenizer, const char *name)
{
    for (size_t i = 0; i < tokenizer->n_templates; i++)
        if (!strcmp(tokenizer->templates[i].name, name)) return tokenizer->templates[i].text;
    return NULL;
}
