/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens that are declared outside tokenizer.json, as transformers 5.24 adds them
 * (TokenizersBackend and _from_pretrained): added_tokens_decoder of tokenizer_config.json, or,
 * without it, special_tokens_map.json, whose keys replace those of tokenizer_config.json, and
 * added_tokens.json; then the named special tokens and the extra ones. Those that the tokenizer
 * lacks get the next id, those of added_tokens_decoder replace the flags of tokenizer.json. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

static const char *const named[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                    "pad_token", "cls_token", "mask_token"};

typedef struct declaration {
    const bl_side_files *side;
    const bl_model *model;
    json_t *list;  /* objects as in added_tokens; owned */
    json_t *place; /* object: content to index in the list */
    json_t *named; /* the tokenizer's */
    int32_t next_id;
} declaration;

static bool is_named(const char *key)
{
    for (size_t i = 0; i < BL_COUNT(named); i++)
        if (!strcmp(named[i], key)) return true;
    return false;
}

const char *bl_tokenizer_content(const json_t *value)
{
    return bl_json_text(json_is_object(value) ? json_object_get(value, "content") : value);
}

/* The value of "eos_token" or another name; NULL: none. *where: its file. */
static const json_t *named_token(const bl_side_files *side, const char *key, const char **where)
{
    const json_t *value = side->legacy ? json_object_get(side->map, key) : NULL;

    *where = value ? side->map_path : side->config_path;
    if (!value) value = json_object_get(side->config, key);
    return !value && !strcmp(key, "pad_token") ? side->pad_token : value;
}

static bool is_named_content(const bl_side_files *side, const char *content)
{
    const char *where;

    for (size_t i = 0; i < BL_COUNT(named); i++) {
        const char *text = bl_tokenizer_content(named_token(side, named[i], &where));
        if (text && !strcmp(text, content)) return true;
    }
    return false;
}

static bl_status remember(declaration *d, const char *content, size_t index)
{
    return json_object_set_new_nocheck(d->place, content, json_integer((json_int_t)index))
               ? BL_FAIL(BL_ENOMEM, "added tokens")
               : BL_OK;
}

/* The flags of a declared token: AddedToken's defaults where `value` is silent. */
static bl_status copy_flags(const char *where, const json_t *value, bool special, json_t *out)
{
    static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    bool set = false, normalized;
    int failed = 0;

    for (size_t i = 0; i < BL_COUNT(flags); i++) {
        set = false;
        if (json_is_object(value))
            BL_TRY(bl_json_get_bool(where, value, flags[i], BL_JSON_OPTIONAL, &set));
        failed |= json_object_set_new(out, flags[i], json_boolean(set));
    }
    normalized = !special;
    if (json_is_object(value))
        BL_TRY(bl_json_get_bool(where, value, "normalized", BL_JSON_OPTIONAL, &normalized));
    failed |= json_object_set_new(out, "normalized", json_boolean(normalized));
    failed |= json_object_set_new(out, "special", json_boolean(special));
    return failed ? BL_FAIL(BL_ENOMEM, "added tokens") : BL_OK;
}

/* Adds or, `replaces`, changes the token of this content. id -1: whichever it gets. */
static bl_status declare(declaration *d, const char *where, const char *content,
                         const json_t *value, bool special, bool replaces, int64_t id)
{
    const json_t *index = json_object_get(d->place, content);
    int32_t known = bl_strings_find(&d->model->text, content, strlen(content));
    json_t *token = index ? json_array_get(d->list, (size_t)json_integer_value(index)) : NULL;
    int64_t its_id = token        ? json_integer_value(json_object_get(token, "id"))
                     : known >= 0 ? known
                                  : d->next_id;

    if (!*content) return BL_OK; /* the library ignores it, too */
    if (id >= 0 && id != its_id)
        return BL_FAIL(BL_EINPUT,
                       "%s: %.80s has id %" PRId64 ", but tokenizer.json makes it %" PRId64, where,
                       content, id, its_id);
    if (token && !replaces) return BL_OK;
    if (!token) {
        token = json_pack("{s:I, s:s}", "id", (json_int_t)its_id, "content", content);
        if (!token || json_array_append_new(d->list, token))
            return BL_FAIL(BL_ENOMEM, "added tokens");
        BL_TRY(remember(d, content, json_array_size(d->list) - 1));
        if (its_id >= d->next_id) d->next_id = (int32_t)its_id + 1;
    }
    return copy_flags(where, value, special, token);
}

typedef struct entry {
    int64_t id;
    const char *content;
    const json_t *value;
} entry;

static int by_id(const void *a, const void *b)
{
    int64_t x = ((const entry *)a)->id, y = ((const entry *)b)->id;
    return (x > y) - (x < y);
}

/* "ID": token of added_tokens_decoder. */
static bl_status read_entry(const char *where, const char *key, const json_t *value, entry *out)
{
    char *end;

    *out = (entry){strtoll(key, &end, 10), bl_tokenizer_content(value), value};
    if (*end || end == key || out->id < 0 || out->id >= BL_VOCAB_MAX_IDS)
        return BL_FAIL(BL_EINPUT, "%s: key %.40s is not a token id", where, key);
    BL_TRY(bl_tokenizer_check_keys(value, where,
                                   "__type content lstrip rstrip normalized special single_word"));
    return out->content ? BL_OK : bl_json_fail(where, "content", "a text without NUL", value);
}

static bl_status declare_decoder(declaration *d, const json_t *decoder)
{
    entry *list = calloc(json_object_size(decoder) + 1, sizeof *list);
    size_t n = 0;
    char where[512];
    const char *key;
    json_t *value;
    bl_status st = list ? BL_OK : BL_FAIL(BL_ENOMEM, "added tokens");

    snprintf(where, sizeof where, "%.460s: added_tokens_decoder", d->side->config_path);
    if (st == BL_OK)
        json_object_foreach((json_t *)decoder, key, value)
            BL_TRY_GOTO(st, done, read_entry(where, key, value, &list[n++]));
    if (n) qsort(list, n, sizeof *list, by_id);
    for (size_t i = 0; i < n; i++) {
        bool special = false;
        BL_TRY_GOTO(st, done,
                    bl_json_get_bool(where, list[i].value, "special", BL_JSON_OPTIONAL, &special));
        special = special || is_named_content(d->side, list[i].content);
        BL_TRY_GOTO(st, done,
                    declare(d, where, list[i].content, list[i].value, special, true, list[i].id));
    }
done:
    free(list);
    return st;
}

/* ---- extra special tokens: lists, and objects of named ones ---- */

typedef struct extra_tokens {
    const char *where, *key; /* the file and key, for errors */
    const json_t *value;     /* NULL: absent */
} extra_tokens;

enum { N_EXTRAS = 3 };

static bool is_falsy(const json_t *value)
{
    return !value || json_is_null(value) || json_is_false(value) ||
           ((json_is_array(value) || json_is_object(value)) &&
            json_array_size(value) + json_object_size(value) == 0);
}

/* As transformers merges them: those of tokenizer_config.json, under either of its two keys; the
 * map's; and, where neither is a list, those of the older key. */
static void find_extra(const bl_side_files *side, extra_tokens out[N_EXTRAS])
{
    static const char key[] = "extra_special_tokens", older[] = "additional_special_tokens";
    const json_t *map = side->legacy ? side->map : NULL;
    extra_tokens extra = {side->config_path, key, json_object_get(side->config, key)},
                 of_map = {side->map_path, key, json_object_get(map, key)},
                 last = {side->config_path, older, json_object_get(side->config, older)};

    if (last.value && is_falsy(extra.value)) {
        extra = last;
        last.value = NULL;
    }
    if (json_is_object(of_map.value) && !json_is_object(extra.value)) extra.value = NULL;
    const json_t *left = of_map.value ? of_map.value : extra.value;
    if (json_object_get(map, older))
        last = (extra_tokens){side->map_path, older, json_object_get(map, older)};
    if (left && !json_is_object(left)) last.value = NULL;
    out[0] = extra;
    out[1] = of_map;
    out[2] = last;
}

/* Whether one of the lists that transformers merges before it reads added_tokens.json has the
 * token. */
static bool is_extra(const extra_tokens extra[N_EXTRAS], const char *content)
{
    const json_t *value;
    size_t i;

    for (int e = 0; e < N_EXTRAS - 1; e++) json_array_foreach((json_t *)extra[e].value, i, value)
        {
            const char *text = bl_tokenizer_content(value);
            if (text && !strcmp(text, content)) return true;
        }
    return false;
}

/* {"token": id, ...} of added_tokens.json, in the order of the ids. */
static bl_status declare_added(declaration *d, const extra_tokens extra[N_EXTRAS])
{
    const char *where = d->side->added_path, *content;
    entry *list = calloc(json_object_size(d->side->added) + 1, sizeof *list);
    size_t n = 0;
    json_t *id;
    bl_status st = list ? BL_OK : BL_FAIL(BL_ENOMEM, "added tokens");

    if (st == BL_OK) json_object_foreach(d->side->added, content, id)
        {
            if (!json_is_integer(id) || json_integer_value(id) < 0) {
                st = bl_json_fail(where, content, "a token id", id);
                goto done;
            }
            list[n++] = (entry){json_integer_value(id), content, NULL};
        }
    if (n) qsort(list, n, sizeof *list, by_id);
    for (size_t i = 0; i < n && st == BL_OK; i++) {
        bool special =
            is_named_content(d->side, list[i].content) || is_extra(extra, list[i].content);
        st = declare(d, where, list[i].content, NULL, special, false, list[i].id);
    }
done:
    free(list);
    return st;
}

/* `value`: a token, or null. `name`: NULL for one of a list, whose key is `key`. */
static bl_status declare_special(declaration *d, const char *where, const char *key,
                                 const char *name, const json_t *value)
{
    const char *content = bl_tokenizer_content(value);

    if (!value || json_is_null(value)) return BL_OK;
    if (!content) return bl_json_fail(where, name ? name : key, "a token", value);
    if (name && json_object_set_new(d->named, name, json_string(content)))
        return BL_FAIL(BL_ENOMEM, "out of memory: special tokens");
    return declare(d, where, content, value, true, false, -1);
}

/* Keys that end with _token, except the usual ones: tokens of images and the like. `hidden`: an
 * object whose keys are left out; NULL: none. */
static bl_status declare_model_tokens(declaration *d, const char *where, const json_t *object,
                                      const json_t *hidden)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)object, key, value)
    {
        if (bl_text_ends_with(key, "_token") && !is_named(key) && bl_tokenizer_content(value) &&
            !json_object_get(hidden, key))
            BL_TRY(declare_special(d, where, key, key, value));
    }
    return BL_OK;
}

static bl_status declare_extra(declaration *d, const extra_tokens extra[N_EXTRAS])
{
    const char *name;
    json_t *value;
    size_t i;

    for (const extra_tokens *e = extra; e < extra + N_EXTRAS; e++) {
        if (!is_falsy(e->value) && !json_is_array(e->value) && !json_is_object(e->value))
            return bl_json_fail(e->where, e->key, "a list of tokens", e->value);
        json_object_foreach((json_t *)e->value, name, value)
            BL_TRY(declare_special(d, e->where, e->key, name, value));
    }
    for (const extra_tokens *e = extra; e < extra + N_EXTRAS; e++)
        json_array_foreach((json_t *)e->value, i, value)
            BL_TRY(declare_special(d, e->where, e->key, NULL, value));
    return BL_OK;
}

static bl_status declare_all(declaration *d)
{
    const bl_side_files *side = d->side;
    const char *where;
    extra_tokens extra[N_EXTRAS];

    find_extra(side, extra);
    if (!side->legacy)
        BL_TRY(declare_decoder(d, json_object_get(side->config, "added_tokens_decoder")));
    else
        BL_TRY(declare_added(d, extra));
    for (size_t i = 0; i < BL_COUNT(named); i++) {
        const json_t *value = named_token(side, named[i], &where);
        BL_TRY(declare_special(d, where, named[i], named[i], value));
    }
    if (side->legacy) BL_TRY(declare_model_tokens(d, side->map_path, side->map, side->config));
    BL_TRY(declare_model_tokens(d, side->config_path, side->config, NULL));
    BL_TRY(declare_model_tokens(d, side->config_path,
                                json_object_get(side->config, "model_specific_special_tokens"),
                                NULL));
    return declare_extra(d, extra);
}

bl_status bl_tokenizer_declare(const bl_side_files *side, const json_t *list,
                               bl_tokenizer *tokenizer, json_t **out)
{
    const bl_model *model = &tokenizer->model;
    declaration d = {.side = side,
                     .model = model,
                     .list = list ? json_deep_copy(list) : json_array(),
                     .place = json_object(),
                     .named = tokenizer->named = json_object(),
                     .next_id = (int32_t)model->text.n_used};
    const json_t *token;
    size_t i;
    bl_status st = d.list && d.place && d.named ? BL_OK : BL_FAIL(BL_ENOMEM, "added tokens");

    if (st == BL_OK) json_array_foreach((json_t *)list, i, token)
        {
            const char *content = bl_tokenizer_content(token);
            json_int_t id = json_integer_value(json_object_get(token, "id"));
            if (content) BL_TRY_GOTO(st, done, remember(&d, content, i));
            if (id >= d.next_id && id < BL_VOCAB_MAX_IDS) d.next_id = (int32_t)id + 1;
        }
    if (st == BL_OK) st = declare_all(&d);
done:
    json_decref(d.place);
    *out = st == BL_OK ? d.list : NULL;
    if (st != BL_OK) json_decref(d.list);
    return st;
}
