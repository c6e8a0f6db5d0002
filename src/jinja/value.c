/* SPDX-License-Identifier: Apache-2.0 */
/* Values as Python has them: truth, equality, order, membership; lists and dictionaries. */
#include <math.h>
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"

jinja_value jinja_undefined(const char *name)
{
    return (jinja_value){.kind = JINJA_UNDEFINED, .text = name};
}

jinja_value jinja_none(void)
{
    return (jinja_value){.kind = JINJA_NONE};
}

jinja_value jinja_bool(bool truth)
{
    return (jinja_value){.kind = JINJA_BOOL, .truth = truth};
}

jinja_value jinja_int(int64_t integer)
{
    return (jinja_value){.kind = JINJA_INT, .integer = integer};
}

jinja_value jinja_real(double real)
{
    return (jinja_value){.kind = JINJA_REAL, .real = real};
}

jinja_value jinja_text(const char *text, size_t n_bytes)
{
    return (jinja_value){.kind = JINJA_STRING, .n_bytes = n_bytes, .text = text};
}

jinja_value jinja_literal(const char *text)
{
    return jinja_text(text, strlen(text));
}

bool jinja_is_sequence(const jinja_value *value)
{
    return value->kind >= JINJA_LIST && value->kind <= JINJA_ITERATOR;
}

bool jinja_is_literal(const jinja_value *value, const char *text)
{
    return value->kind == JINJA_STRING && value->n_bytes == strlen(text) &&
           !memcmp(value->text, text, value->n_bytes);
}

bool jinja_is_number(const jinja_value *value)
{
    return value->kind == JINJA_INT || value->kind == JINJA_REAL || value->kind == JINJA_BOOL;
}

double jinja_as_real(const jinja_value *number)
{
    return number->kind == JINJA_REAL ? number->real : (double)jinja_as_int(number);
}

int64_t jinja_as_int(const jinja_value *number)
{
    return number->kind == JINJA_BOOL ? number->truth : number->integer;
}

const char *jinja_type_name(const jinja_value *value)
{
    static const char *const names[JINJA_N_KINDS] = {
        "undefined", "none",  "bool",  "int",    "float",    "string",
        "list",      "tuple", "range", "view",   "iterator", "dictionary",
        "namespace", "loop",  "macro", "method", "function"};
    return names[value->kind];
}

bool jinja_is_true(const jinja_value *value)
{
    switch (value->kind) {
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return false;
    case JINJA_BOOL:
        return value->truth;
    case JINJA_INT:
        return value->integer != 0;
    case JINJA_REAL:
        return value->real != 0;
    case JINJA_STRING:
        return value->n_bytes > 0;
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_RANGE:
    case JINJA_VIEW:
        return value->list->n > 0;
    case JINJA_DICT:
        return value->dict->n > 0;
    default:
        return true;
    }
}

/* ---- lists ---- */

static int depth_of(const jinja_value *value)
{
    if (value->kind == JINJA_METHOD) value = &value->method->self;
    return value->kind == JINJA_DICT  ? value->dict->depth
           : jinja_is_sequence(value) ? value->list->depth
                                      : 0;
}

/* *depth: of what `inner` becomes a part of. */
static bl_status nest(jinja_run *run, int *depth, const jinja_value *inner)
{
    int n = 1 + depth_of(inner);

    if (n > *depth) *depth = n;
    if (n <= BL_JINJA_MAX_DATA_DEPTH) return BL_OK;
    return jinja_fail(run, "data nested more than %d deep", BL_JINJA_MAX_DATA_DEPTH);
}

bl_status jinja_list_new(jinja_run *run, jinja_kind kind, size_t capacity, jinja_value *out)
{
    jinja_list *list;

    BL_TRY(jinja_new(&run->arena, sizeof *list, &list));
    if (capacity) BL_TRY(jinja_new(&run->arena, capacity * sizeof *list->item, &list->item));
    list->capacity = capacity;
    *out = (jinja_value){.kind = kind, .list = list};
    return BL_OK;
}

bl_status jinja_list_add(jinja_run *run, jinja_list *list, jinja_value value)
{
    if (list->n == list->capacity) {
        size_t capacity = 2 * list->capacity + 8;
        jinja_value *grown;
        BL_TRY(jinja_new(&run->arena, capacity * sizeof *grown, &grown));
        if (list->n) memcpy(grown, list->item, list->n * sizeof *grown);
        list->item = grown;
        list->capacity = capacity;
    }
    list->item[list->n++] = value;
    BL_TRY(nest(run, &list->depth, &value));
    return jinja_step(run, 0);
}

/* ---- dictionaries ---- */

static uint32_t hash_of(const jinja_value *key)
{
    uint32_t hash = 2166136261u;

    if (key->kind != JINJA_STRING) return jinja_is_number(key) ? 1 : 0;
    for (size_t i = 0; i < key->n_bytes; i++)
        hash = (hash ^ (unsigned char)key->text[i]) * 16777619u;
    return hash;
}

static bl_status find_entry(jinja_run *run, const jinja_dict *dict, const jinja_value *key,
                            jinja_entry **out)
{
    uint32_t hash = hash_of(key);
    bool same = false;

    *out = NULL;
    if (key->kind == JINJA_LIST || key->kind == JINJA_DICT)
        return jinja_fail(run, "a %s cannot be a key", jinja_type_name(key));
    BL_TRY(jinja_step(run, dict->n * 8));
    if (key->kind == JINJA_STRING) BL_TRY(jinja_scan(run, key->n_bytes));
    for (size_t i = 0; i < dict->n; i++) {
        if (dict->entry[i].hash != hash) continue;
        BL_TRY(jinja_equals(run, &dict->entry[i].key, key, &same));
        if (same) *out = &dict->entry[i];
        if (same) return BL_OK;
    }
    return BL_OK;
}

bl_status jinja_dict_new(jinja_run *run, jinja_value *out)
{
    *out = (jinja_value){.kind = JINJA_DICT};
    return jinja_new(&run->arena, sizeof *out->dict, &out->dict);
}

/* A key that is not there yet. */
static bl_status add_entry(jinja_run *run, jinja_dict *dict, jinja_value key, jinja_value value)
{
    if (dict->n == dict->capacity) {
        size_t capacity = 2 * dict->capacity + 8;
        jinja_entry *grown;
        BL_TRY(jinja_new(&run->arena, capacity * sizeof *grown, &grown));
        if (dict->n) memcpy(grown, dict->entry, dict->n * sizeof *grown);
        dict->entry = grown;
        dict->capacity = capacity;
    }
    dict->entry[dict->n++] = (jinja_entry){.hash = hash_of(&key), .key = key, .value = value};
    BL_TRY(nest(run, &dict->depth, &key));
    return nest(run, &dict->depth, &value);
}

bl_status jinja_dict_set(jinja_run *run, jinja_dict *dict, jinja_value key, jinja_value value)
{
    jinja_entry *entry;

    BL_TRY(find_entry(run, dict, &key, &entry));
    if (!entry) return add_entry(run, dict, key, value);
    entry->value = value;
    return nest(run, &dict->depth, &value);
}

bl_status jinja_dict_get(jinja_run *run, const jinja_dict *dict, const jinja_value *key,
                         const jinja_value **out)
{
    jinja_entry *entry;

    BL_TRY(find_entry(run, dict, key, &entry));
    *out = entry ? &entry->value : NULL;
    return BL_OK;
}

/* ---- comparisons ---- */

static bl_status equal_lists(jinja_run *run, const jinja_list *a, const jinja_list *b, bool *out)
{
    *out = a->n == b->n;
    for (size_t i = 0; i < a->n && *out; i++)
        BL_TRY(jinja_equals(run, &a->item[i], &b->item[i], out));
    return BL_OK;
}

static bl_status equal_dicts(jinja_run *run, const jinja_dict *a, const jinja_dict *b, bool *out)
{
    *out = a->n == b->n;
    for (size_t i = 0; i < a->n && *out; i++) {
        const jinja_value *other;
        BL_TRY(jinja_dict_get(run, b, &a->entry[i].key, &other));
        *out = other != NULL;
        if (other) BL_TRY(jinja_equals(run, &a->entry[i].value, other, out));
    }
    return BL_OK;
}

bl_status jinja_equals(jinja_run *run, const jinja_value *a, const jinja_value *b, bool *out)
{
    BL_TRY(jinja_step(run, 0));
    *out = false;
    if (jinja_is_number(a) && jinja_is_number(b)) {
        *out = a->kind == JINJA_REAL || b->kind == JINJA_REAL ? jinja_as_real(a) == jinja_as_real(b)
                                                              : jinja_as_int(a) == jinja_as_int(b);
        return BL_OK;
    }
    if (a->kind != b->kind) return BL_OK;
    switch (a->kind) {
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        *out = true;
        return BL_OK;
    case JINJA_STRING:
        *out = a->n_bytes == b->n_bytes && !memcmp(a->text, b->text, a->n_bytes);
        return jinja_step(run, a->n_bytes);
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_RANGE:
        return equal_lists(run, a->list, b->list, out);
    case JINJA_DICT:
        return equal_dicts(run, a->dict, b->dict, out);
    default:
        *out = a->list == b->list;
        return BL_OK;
    }
}

bl_status jinja_order(jinja_run *run, const jinja_value *a, const jinja_value *b, int *out)
{
    bool same = true;

    BL_TRY(jinja_step(run, 0));
    if (jinja_is_number(a) && jinja_is_number(b)) {
        double x = jinja_as_real(a), y = jinja_as_real(b);
        *out = (x > y) - (x < y);
        if (a->kind != JINJA_REAL && b->kind != JINJA_REAL)
            *out = (jinja_as_int(a) > jinja_as_int(b)) - (jinja_as_int(a) < jinja_as_int(b));
        return isnan(x) || isnan(y) ? jinja_fail(run, "NaN in a comparison") : BL_OK;
    }
    if (a->kind == JINJA_STRING && b->kind == JINJA_STRING) { /* UTF-8 orders as code points do */
        size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
        int order = memcmp(a->text, b->text, n);
        *out = order ? order : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
        return jinja_step(run, n);
    }
    if (a->kind != b->kind || (a->kind != JINJA_LIST && a->kind != JINJA_TUPLE))
        return jinja_fail(run, "a %s and a %s have no order", jinja_type_name(a),
                          jinja_type_name(b));
    for (size_t i = 0; i < a->list->n && i < b->list->n; i++) {
        BL_TRY(jinja_equals(run, &a->list->item[i], &b->list->item[i], &same));
        if (!same) return jinja_order(run, &a->list->item[i], &b->list->item[i], out);
    }
    *out = (a->list->n > b->list->n) - (a->list->n < b->list->n);
    return BL_OK;
}

bl_status jinja_contains(jinja_run *run, const jinja_value *in, const jinja_value *item, bool *out)
{
    const jinja_value *value;
    jinja_list *list;

    *out = false;
    if (in->kind == JINJA_DICT) {
        BL_TRY(jinja_dict_get(run, in->dict, item, &value));
        *out = value != NULL;
        return BL_OK;
    }
    if (in->kind == JINJA_STRING) {
        if (item->kind != JINJA_STRING)
            return jinja_fail(run, "%s in a string", jinja_type_name(item));
        *out = !item->n_bytes || memmem(in->text, in->n_bytes, item->text, item->n_bytes);
        return jinja_scan(run, in->n_bytes);
    }
    BL_TRY(jinja_iterate(run, in, &list));
    for (size_t i = 0; i < list->n && !*out; i++)
        BL_TRY(jinja_equals(run, &list->item[i], item, out));
    return BL_OK;
}

/* ---- iteration ---- */

static bl_status list_codes(jinja_run *run, const jinja_value *text, jinja_list *list)
{
    for (size_t at = 0, n; at < text->n_bytes; at += n) {
        n = jinja_code_offset(text->text + at, text->n_bytes - at, 1);
        BL_TRY(jinja_list_add(run, list, jinja_text(text->text + at, n)));
    }
    return BL_OK;
}

bl_status jinja_iterate(jinja_run *run, const jinja_value *value, jinja_list **out)
{
    jinja_value list;

    if (jinja_is_sequence(value) && value->kind != JINJA_ITERATOR) {
        *out = value->list;
        return BL_OK;
    }
    BL_TRY(jinja_list_new(run, JINJA_LIST, 0, &list));
    *out = list.list;
    switch (value->kind) {
    case JINJA_UNDEFINED:
        return BL_OK;
    case JINJA_ITERATOR:
        for (; value->list->at < value->list->n; value->list->at++)
            BL_TRY(jinja_list_add(run, list.list, value->list->item[value->list->at]));
        return BL_OK;
    case JINJA_STRING:
        return list_codes(run, value, list.list);
    case JINJA_DICT:
        for (size_t i = 0; i < value->dict->n; i++)
            BL_TRY(jinja_list_add(run, list.list, value->dict->entry[i].key));
        return BL_OK;
    default:
        return jinja_fail(run, "a %s has no items", jinja_type_name(value));
    }
}

bl_status jinja_length(jinja_run *run, const jinja_value *value, size_t *out)
{
    *out = 0;
    switch (value->kind) {
    case JINJA_UNDEFINED:
        return BL_OK;
    case JINJA_STRING:
        *out = jinja_count_codes(value->text, value->n_bytes);
        return jinja_scan(run, value->n_bytes);
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_RANGE:
    case JINJA_VIEW:
        *out = value->list->n;
        return BL_OK;
    case JINJA_DICT:
        *out = value->dict->n;
        return BL_OK;
    case JINJA_LOOP:
        *out = value->loop->items->n;
        return BL_OK;
    default:
        return jinja_fail(run, "a %s has no length", jinja_type_name(value));
    }
}

/* ---- JSON ---- */

static bl_status from_container(jinja_run *run, const json_t *json, int depth, jinja_value *out)
{
    const char *key;
    json_t *child;
    jinja_value value;
    size_t i;

    if (depth > BL_JINJA_MAX_DATA_DEPTH)
        return jinja_fail(run, "data nested more than %d deep", BL_JINJA_MAX_DATA_DEPTH);
    if (json_is_array(json)) {
        BL_TRY(jinja_list_new(run, JINJA_LIST, json_array_size(json), out));
        json_array_foreach((json_t *)json, i, child)
        {
            BL_TRY(jinja_from_json(run, child, depth + 1, &value));
            BL_TRY(jinja_list_add(run, out->list, value));
        }
        return BL_OK;
    }
    BL_TRY(jinja_dict_new(run, out));
    json_object_foreach((json_t *)json, key, child)
    { /* jansson's keys are unique */
        BL_TRY(jinja_from_json(run, child, depth + 1, &value));
        BL_TRY(add_entry(run, out->dict, jinja_literal(key), value));
    }
    return BL_OK;
}

bl_status jinja_from_json(jinja_run *run, const json_t *json, int depth, jinja_value *out)
{
    BL_TRY(jinja_step(run, 0));
    switch (json_typeof(json)) {
    case JSON_OBJECT:
    case JSON_ARRAY:
        return from_container(run, json, depth, out);
    case JSON_STRING:
        *out = jinja_text(json_string_value(json), json_string_length(json));
        return BL_OK;
    case JSON_INTEGER:
        *out = jinja_int(json_integer_value(json));
        return BL_OK;
    case JSON_REAL:
        *out = jinja_real(json_real_value(json));
        out->is_doubtful = fabs(out->real) >= 0x1p63;
        return BL_OK;
    case JSON_TRUE:
    case JSON_FALSE:
        *out = jinja_bool(json_is_true(json));
        return BL_OK;
    default:
        *out = jinja_none();
        return BL_OK;
    }
}
