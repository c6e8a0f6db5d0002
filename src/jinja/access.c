/* SPDX-License-Identifier: Apache-2.0 */
/* Attributes, items and slices. x.name is a method before it is an item, x["name"] an item before
 * it is a method: a dictionary's "items" key is found by x["items"] only. Methods that change their
 * object are undefined, as in jinja2's immutable sandbox. */
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"

static bool is_one_of(const char *name, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(name, names[i])) return true;
    return false;
}

/* What the class of `object` has: a method, or a method that is kept away. */
static bool find_method(const jinja_value *object, const char *name, bool *is_safe)
{
    static const char *const dict_methods[] = {"get", "items", "keys", "values", "copy"};
    static const char *const dict_unsafe[] = {"clear",      "pop",    "popitem",
                                              "setdefault", "update", "fromkeys"};
    static const char *const list_methods[] = {"count", "index", "copy"};
    static const char *const list_unsafe[] = {"append", "clear",  "extend",  "insert",
                                              "pop",    "remove", "reverse", "sort"};
    *is_safe = true;
    switch (object->kind) {
    case JINJA_STRING:
        return jinja_text_has_method(name);
    case JINJA_DICT:
        if (is_one_of(name, dict_methods, BL_COUNT(dict_methods))) return true;
        *is_safe = false;
        return is_one_of(name, dict_unsafe, BL_COUNT(dict_unsafe));
    case JINJA_TUPLE:
        return is_one_of(name, list_methods, 2);
    case JINJA_LIST:
        if (is_one_of(name, list_methods, BL_COUNT(list_methods))) return true;
        *is_safe = false;
        return is_one_of(name, list_unsafe, BL_COUNT(list_unsafe));
    default:
        return false;
    }
}

static bl_status loop_attribute(jinja_run *run, const jinja_value *object, const char *name,
                                jinja_value *out)
{
    static const char *const numbers[] = {"index", "index0", "revindex", "revindex0", "length"};
    const jinja_loop *loop = object->loop;
    int64_t n = (int64_t)loop->items->n, at = (int64_t)loop->index;
    const int64_t value[] = {at + 1, at, n - at, n - at - 1, n};

    for (size_t i = 0; i < BL_COUNT(numbers); i++)
        if (!strcmp(name, numbers[i])) {
            *out = jinja_int(value[i]);
            return BL_OK;
        }
    *out = jinja_undefined(name);
    if (!strcmp(name, "first")) *out = jinja_bool(at == 0);
    if (!strcmp(name, "last")) *out = jinja_bool(at + 1 == n);
    if (!strcmp(name, "previtem") && at > 0) *out = loop->items->item[at - 1];
    if (!strcmp(name, "nextitem") && at + 1 < n) *out = loop->items->item[at + 1];
    if (!strcmp(name, "depth") || !strcmp(name, "depth0")) *out = jinja_int(!name[5]);
    if (strcmp(name, "cycle") && strcmp(name, "changed")) return BL_OK;
    *out = (jinja_value){.kind = JINJA_METHOD};
    BL_TRY(jinja_new(&run->arena, sizeof *out->method, &out->method));
    *out->method = (jinja_method){.self = *object, .name = name};
    return BL_OK;
}

/* The method, where the object has one of this name; *found says so. */
static bl_status take_method(jinja_run *run, const jinja_value *object, const char *name,
                             bool *found, jinja_value *out)
{
    bool is_safe;

    *found = find_method(object, name, &is_safe);
    *out = jinja_undefined(name);
    if (!*found || !is_safe) return BL_OK;
    *out = (jinja_value){.kind = JINJA_METHOD};
    BL_TRY(jinja_new(&run->arena, sizeof *out->method, &out->method));
    *out->method = (jinja_method){.self = *object, .name = name};
    return BL_OK;
}

bl_status jinja_attribute(jinja_run *run, const jinja_value *object, const char *name,
                          jinja_value *out)
{
    const jinja_value *value = NULL;
    jinja_value key = jinja_literal(name);
    bool found;

    if (object->kind == JINJA_UNDEFINED)
        return jinja_fail(run, "%.60s is undefined; it has no attribute %.60s", object->text, name);
    if (object->kind == JINJA_LOOP) return loop_attribute(run, object, name, out);
    BL_TRY(take_method(run, object, name, &found, out));
    if (found || (object->kind != JINJA_DICT && object->kind != JINJA_NAMESPACE)) {
        if (object->kind == JINJA_MACRO && !strcmp(name, "name"))
            *out = jinja_literal(run->template->name[object->macro->node->name]);
        return BL_OK;
    }
    BL_TRY(jinja_dict_get(run, object->dict, &key, &value));
    if (value) *out = *value;
    return BL_OK;
}

/* Item `index` of a text or list, from the end where it is negative; false: there is none. */
static bl_status take_item(jinja_run *run, const jinja_value *object, int64_t index, bool *found,
                           jinja_value *out)
{
    size_t n;

    *found = false;
    BL_TRY(jinja_length(run, object, &n));
    if (index < 0) index += (int64_t)n;
    if (index < 0 || index >= (int64_t)n) return BL_OK;
    *found = true;
    if (object->kind != JINJA_STRING) {
        *out = object->list->item[index];
        return BL_OK;
    }
    const char *text =
        object->text + jinja_code_offset(object->text, object->n_bytes, (size_t)index);
    size_t n_left = object->n_bytes - (size_t)(text - object->text);
    *out = jinja_text(text, jinja_code_offset(text, n_left, 1));
    return BL_OK;
}

static bool has_items(const jinja_value *object)
{
    return object->kind == JINJA_STRING || object->kind == JINJA_LIST ||
           object->kind == JINJA_TUPLE || object->kind == JINJA_RANGE;
}

bl_status jinja_subscript(jinja_run *run, const jinja_value *object, const jinja_value *key,
                          jinja_value *out)
{
    const jinja_value *value = NULL;
    bool found = false;
    char *name;

    if (object->kind == JINJA_UNDEFINED)
        return jinja_fail(run, "%.60s is undefined; it has no items", object->text);
    *out = jinja_undefined("an item");
    if (object->kind == JINJA_DICT && key->kind != JINJA_LIST && key->kind != JINJA_DICT) {
        BL_TRY(jinja_dict_get(run, object->dict, key, &value));
        if (value) *out = *value;
        if (value) return BL_OK;
    }
    if (has_items(object) && (key->kind == JINJA_INT || key->kind == JINJA_BOOL)) {
        BL_TRY(take_item(run, object, jinja_as_int(key), &found, out));
        if (found) return BL_OK;
    }
    if (key->kind != JINJA_STRING) return BL_OK;
    BL_TRY(jinja_new(&run->arena, key->n_bytes + 1, &name));
    memcpy(name, key->text, key->n_bytes);
    if (object->kind == JINJA_LOOP || object->kind == JINJA_NAMESPACE)
        return jinja_attribute(run, object, name, out);
    return take_method(run, object, name, &found, out);
}

/* ---- slices ---- */

/* Python's slice.indices: *n items from *start in steps of *step. */
static bl_status slice_places(jinja_run *run, const jinja_value *bound, int64_t length,
                              int64_t *start, int64_t *step, int64_t *n)
{
    int64_t place[2];

    for (int i = 0; i < 3; i++)
        if (bound[i].kind != JINJA_NONE && bound[i].kind != JINJA_INT &&
            bound[i].kind != JINJA_BOOL)
            return jinja_fail(run, "a slice by a %s", jinja_type_name(&bound[i]));
    *step = bound[2].kind == JINJA_NONE ? 1 : jinja_as_int(&bound[2]);
    if (!*step) return jinja_fail(run, "a slice in steps of 0");
    if (*step > length + 1) *step = length + 1;
    if (*step < -length - 1) *step = -length - 1;
    int64_t low = *step < 0 ? -1 : 0, high = *step < 0 ? length - 1 : length;
    for (int i = 0; i < 2; i++) {
        place[i] = (i == 0) == (*step < 0) ? high : low;
        if (bound[i].kind == JINJA_NONE) continue;
        place[i] = jinja_as_int(&bound[i]);
        if (place[i] < 0) place[i] = bl_max_i64(place[i] + length, low);
        place[i] = bl_min_i64(place[i], high);
    }
    *start = place[0];
    *n = *step > 0 ? (place[1] - place[0] + *step - 1) / *step
                   : (place[0] - place[1] - *step - 1) / -*step;
    *n = bl_max_i64(*n, 0);
    return BL_OK;
}

static bl_status slice_text(jinja_run *run, const jinja_value *text, int64_t start, int64_t step,
                            int64_t n, jinja_value *out)
{
    jinja_buffer result = {0};
    size_t at = jinja_code_offset(text->text, text->n_bytes, (size_t)bl_max_i64(start, 0));

    *out = jinja_text(text->text, 0);
    out->is_markup = text->is_markup;
    if (!n) return BL_OK;
    if (step == 1) {
        out->text = text->text + at;
        out->n_bytes = jinja_code_offset(out->text, text->n_bytes - at, (size_t)n);
        return BL_OK;
    }
    for (int64_t i = 0; i < n; i++) {
        size_t length = jinja_code_offset(text->text + at, text->n_bytes - at, 1);
        BL_TRY(jinja_append(&run->arena, &result, text->text + at, length));
        if (i + 1 == n) break;
        if (step > 0) at += jinja_code_offset(text->text + at, text->n_bytes - at, (size_t)step);
        for (int64_t back = 0; back > step; back--) do
                at--;
            while (((unsigned char)text->text[at] & 0xc0) == 0x80);
    }
    out->text = result.text;
    out->n_bytes = result.n;
    return BL_OK;
}

bl_status jinja_slice(jinja_run *run, const jinja_value *object, const jinja_value *bound,
                      jinja_value *out)
{
    int64_t start = 0, step = 1, n = 0;
    size_t length;

    if (!has_items(object)) return jinja_fail(run, "a slice of a %s", jinja_type_name(object));
    BL_TRY(jinja_length(run, object, &length));
    BL_TRY(slice_places(run, bound, (int64_t)length, &start, &step, &n));
    if (object->kind == JINJA_STRING) return slice_text(run, object, start, step, n, out);
    BL_TRY(jinja_list_new(run, object->kind, (size_t)n, out));
    for (int64_t i = 0; i < n; i++)
        BL_TRY(jinja_list_add(run, out->list, object->list->item[start + i * step]));
    return BL_OK;
}
