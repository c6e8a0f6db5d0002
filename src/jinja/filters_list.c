/* SPDX-License-Identifier: Apache-2.0 */
/* Filters of lists. Those that are lazy in jinja2 (map, select, unique, items, ...) give an
 * iterator here, too: it is true, has no length, and is read once. */
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"

/* object.a.b.0 for the attribute "a.b.0"; an integer is an index. */
static bl_status get_path(jinja_run *run, const jinja_value *object, const jinja_value *path,
                          jinja_value *out)
{
    jinja_value rest = *path, key;

    if (path->kind != JINJA_STRING) return jinja_subscript(run, object, path, out);
    *out = *object;
    for (bool more = true; more;) {
        const char *dot = rest.n_bytes ? memchr(rest.text, '.', rest.n_bytes) : NULL;
        bool digits = true;
        int64_t index = 0;
        key = jinja_text(rest.text, dot ? (size_t)(dot - rest.text) : rest.n_bytes);
        for (size_t i = 0; i < key.n_bytes && digits; i++) {
            digits = key.text[i] >= '0' && key.text[i] <= '9' && index < 1000000;
            index = index * 10 + (key.text[i] - '0');
        }
        if (digits && key.n_bytes) key = jinja_int(index);
        jinja_value from = *out;
        BL_TRY(jinja_subscript(run, &from, &key, out));
        more = dot != NULL;
        if (!more) break;
        rest = jinja_text(dot + 1, rest.n_bytes - (size_t)(dot + 1 - rest.text));
    }
    return BL_OK;
}

/* What a value is compared by: an attribute of it, if given; strings without regard to case. */
static bl_status get_key(jinja_run *run, const jinja_value *value, const jinja_value *attribute,
                         const jinja_value *case_sensitive, jinja_value *out)
{
    *out = *value;
    if (attribute && attribute->kind != JINJA_NONE) BL_TRY(get_path(run, value, attribute, out));
    if (out->kind != JINJA_STRING || (case_sensitive && jinja_is_true(case_sensitive)))
        return BL_OK;
    return jinja_change_case(run, out, "lower", out);
}

static jinja_arguments rest_of(const jinja_arguments *args, size_t n)
{
    jinja_arguments rest = *args;

    rest.item = args->n > n ? args->item + n : NULL;
    rest.n = args->n > n ? args->n - n : 0;
    return rest;
}

/* ---- ends, texts ---- */

static bl_status filter_list(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                             jinja_value *out)
{
    (void)args;
    *out = (jinja_value){.kind = JINJA_LIST};
    return jinja_iterate(run, value, &out->list);
}

static bl_status filter_first(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                              jinja_value *out)
{
    jinja_list *list;

    (void)args;
    *out = jinja_undefined("the first item of nothing");
    if (value->kind == JINJA_ITERATOR) {
        if (value->list->at < value->list->n) *out = value->list->item[value->list->at++];
        return BL_OK;
    }
    BL_TRY(jinja_iterate(run, value, &list));
    if (list->n) *out = list->item[0];
    return BL_OK;
}

static bl_status filter_last(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                             jinja_value *out)
{
    jinja_list *list;

    (void)args;
    if (value->kind == JINJA_ITERATOR || value->kind == JINJA_UNDEFINED)
        return jinja_fail(run, "last of a %s", jinja_type_name(value));
    BL_TRY(jinja_iterate(run, value, &list));
    *out = list->n ? list->item[list->n - 1] : jinja_undefined("the last item of nothing");
    return BL_OK;
}

static bl_status filter_join(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                             jinja_value *out)
{
    const jinja_value *between = jinja_argument(args, 0, "d");
    const jinja_value *attribute = jinja_argument(args, 1, "attribute");
    jinja_buffer whole = {0};
    jinja_list *list;
    jinja_value item;

    BL_TRY(jinja_iterate(run, value, &list));
    for (size_t i = 0; i < list->n; i++) {
        item = list->item[i];
        if (attribute && attribute->kind != JINJA_NONE)
            BL_TRY(get_path(run, &list->item[i], attribute, &item));
        if (i && between) BL_TRY(jinja_write(run, between, &whole));
        BL_TRY(jinja_write(run, &item, &whole));
    }
    *out = jinja_text(whole.n ? whole.text : "", whole.n);
    return BL_OK;
}

static bl_status filter_reverse(jinja_run *run, const jinja_value *value,
                                const jinja_arguments *args, jinja_value *out)
{
    const jinja_value bound[3] = {jinja_none(), jinja_none(), jinja_int(-1)};
    jinja_value list = {.kind = JINJA_LIST};

    (void)args;
    if (value->kind == JINJA_STRING) return jinja_slice(run, value, bound, out);
    BL_TRY(jinja_iterate(run, value, &list.list));
    BL_TRY(jinja_slice(run, &list, bound, out));
    out->kind = JINJA_ITERATOR;
    return BL_OK;
}

static bl_status filter_items(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                              jinja_value *out)
{
    const jinja_arguments none = {0};
    jinja_value method;

    (void)args;
    if (value->kind == JINJA_UNDEFINED) return jinja_list_new(run, JINJA_ITERATOR, 0, out);
    if (value->kind != JINJA_DICT) return jinja_fail(run, "items of a %s", jinja_type_name(value));
    BL_TRY(jinja_attribute(run, value, "items", &method));
    BL_TRY(jinja_call(run, &method, &none, out));
    out->kind = JINJA_ITERATOR;
    return BL_OK;
}

/* ---- choice ---- */

static bl_status is_chosen(jinja_run *run, const jinja_value *value, const jinja_arguments *test,
                           bool *out)
{
    jinja_arguments args = rest_of(test, 1);
    char name[40];

    *out = jinja_is_true(value);
    if (!test->n) return BL_OK;
    if (test->item[0].kind != JINJA_STRING || test->item[0].n_bytes >= sizeof name)
        return jinja_fail(run, "select: expected the name of a test");
    memcpy(name, test->item[0].text, test->item[0].n_bytes);
    name[test->item[0].n_bytes] = '\0';
    return jinja_apply_test(run, name, value, &args, out);
}

static bl_status choose(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                        bool by_attribute, bool wanted, jinja_value *out)
{
    jinja_arguments test = rest_of(args, by_attribute);
    jinja_value tested;
    jinja_list *list;
    bool chosen;

    if (by_attribute && !args->n) return jinja_fail(run, "selectattr: expected an attribute");
    BL_TRY(jinja_iterate(run, value, &list));
    BL_TRY(jinja_list_new(run, JINJA_ITERATOR, 0, out));
    for (size_t i = 0; i < list->n; i++) {
        tested = list->item[i];
        if (by_attribute) BL_TRY(get_path(run, &list->item[i], &args->item[0], &tested));
        BL_TRY(is_chosen(run, &tested, &test, &chosen));
        if (chosen == wanted) BL_TRY(jinja_list_add(run, out->list, list->item[i]));
    }
    return BL_OK;
}

static bl_status filter_select(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    return choose(run, value, args, false, true, out);
}

static bl_status filter_reject(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    return choose(run, value, args, false, false, out);
}

static bl_status filter_selectattr(jinja_run *run, const jinja_value *value,
                                   const jinja_arguments *args, jinja_value *out)
{
    return choose(run, value, args, true, true, out);
}

static bl_status filter_rejectattr(jinja_run *run, const jinja_value *value,
                                   const jinja_arguments *args, jinja_value *out)
{
    return choose(run, value, args, true, false, out);
}

static bl_status filter_map(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                            jinja_value *out)
{
    const jinja_value *attribute = jinja_argument(args, SIZE_MAX, "attribute");
    const jinja_value *other = jinja_argument(args, SIZE_MAX, "default");
    jinja_arguments rest = rest_of(args, 1);
    jinja_list *list;
    jinja_value item;
    char name[40] = "";

    if (!attribute &&
        (!args->n || args->item[0].kind != JINJA_STRING || args->item[0].n_bytes >= sizeof name))
        return jinja_fail(run, "map: expected the name of a filter, or attribute=");
    if (!attribute) memcpy(name, args->item[0].text, args->item[0].n_bytes);
    BL_TRY(jinja_iterate(run, value, &list));
    BL_TRY(jinja_list_new(run, JINJA_ITERATOR, list->n, out));
    for (size_t i = 0; i < list->n; i++) {
        if (attribute)
            BL_TRY(get_path(run, &list->item[i], attribute, &item));
        else
            BL_TRY(jinja_apply_filter(run, name, &list->item[i], &rest, &item));
        if (other && item.kind == JINJA_UNDEFINED) item = *other;
        BL_TRY(jinja_list_add(run, out->list, item));
    }
    return BL_OK;
}

static bl_status filter_unique(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    const jinja_value *case_sensitive = jinja_argument(args, 0, "case_sensitive");
    const jinja_value *attribute = jinja_argument(args, 1, "attribute"), *found;
    jinja_value seen, key;
    jinja_list *list;

    BL_TRY(jinja_dict_new(run, &seen));
    BL_TRY(jinja_iterate(run, value, &list));
    BL_TRY(jinja_list_new(run, JINJA_ITERATOR, 0, out));
    for (size_t i = 0; i < list->n; i++) {
        BL_TRY(get_key(run, &list->item[i], attribute, case_sensitive, &key));
        BL_TRY(jinja_dict_get(run, seen.dict, &key, &found));
        if (found) continue;
        BL_TRY(jinja_dict_set(run, seen.dict, key, jinja_none()));
        BL_TRY(jinja_list_add(run, out->list, list->item[i]));
    }
    return BL_OK;
}

/* ---- order ---- */

typedef struct sorted {
    jinja_value key, value;
} sorted;

/* Merge sort of item[0, n): stable, as Python's; `spare` has room for as many. */
static bl_status merge_sort(jinja_run *run, sorted *item, size_t n, bool reverse, sorted *spare)
{
    size_t half = n / 2, a = 0, b = half;
    int order;

    if (n < 2) return BL_OK;
    BL_TRY(merge_sort(run, item, half, reverse, spare));
    BL_TRY(merge_sort(run, item + half, n - half, reverse, spare));
    for (size_t i = 0; i < n; i++) {
        bool take_b = a == half;
        if (a < half && b < n) {
            BL_TRY(jinja_order(run, &item[a].key, &item[b].key, &order));
            take_b = reverse ? order < 0 : order > 0;
        }
        spare[i] = take_b ? item[b++] : item[a++];
    }
    memcpy(item, spare, n * sizeof *item);
    return BL_OK;
}

static bl_status sort_list(jinja_run *run, const jinja_list *list, const jinja_value *attribute,
                           const jinja_value *case_sensitive, const jinja_value *reverse,
                           jinja_value *out)
{
    sorted *item, *spare;

    BL_TRY(jinja_new(&run->arena, (list->n + 1) * sizeof *item, &item));
    BL_TRY(jinja_new(&run->arena, (list->n + 1) * sizeof *item, &spare));
    for (size_t i = 0; i < list->n; i++) {
        item[i].value = list->item[i];
        BL_TRY(get_key(run, &list->item[i], attribute, case_sensitive, &item[i].key));
    }
    BL_TRY(merge_sort(run, item, list->n, reverse && jinja_is_true(reverse), spare));
    BL_TRY(jinja_list_new(run, JINJA_LIST, list->n, out));
    for (size_t i = 0; i < list->n; i++) BL_TRY(jinja_list_add(run, out->list, item[i].value));
    return BL_OK;
}

static bl_status filter_sort(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                             jinja_value *out)
{
    jinja_list *list;

    BL_TRY(jinja_iterate(run, value, &list));
    return sort_list(run, list, jinja_argument(args, 2, "attribute"),
                     jinja_argument(args, 1, "case_sensitive"), jinja_argument(args, 0, "reverse"),
                     out);
}

static bl_status filter_dictsort(jinja_run *run, const jinja_value *value,
                                 const jinja_arguments *args, jinja_value *out)
{
    const jinja_value *by = jinja_argument(args, 1, "by");
    jinja_value items, place = jinja_int(by && jinja_is_literal(by, "value"));

    if (value->kind == JINJA_UNDEFINED)
        return jinja_fail(run, "dictsort: %.60s is undefined", value->text);
    BL_TRY(filter_items(run, value, args, &items));
    return sort_list(run, items.list, &place, jinja_argument(args, 0, "case_sensitive"),
                     jinja_argument(args, 2, "reverse"), out);
}

static bl_status pick(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                      bool largest, jinja_value *out)
{
    const jinja_value reverse = jinja_bool(largest);
    jinja_list *list;
    jinja_value result;

    BL_TRY(jinja_iterate(run, value, &list));
    BL_TRY(sort_list(run, list, jinja_argument(args, 1, "attribute"),
                     jinja_argument(args, 0, "case_sensitive"), &reverse, &result));
    *out = list->n ? result.list->item[0] : jinja_undefined("an item of nothing");
    return BL_OK;
}

static bl_status filter_min(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                            jinja_value *out)
{
    return pick(run, value, args, false, out);
}

static bl_status filter_max(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                            jinja_value *out)
{
    return pick(run, value, args, true, out);
}

static bl_status filter_sum(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                            jinja_value *out)
{
    const jinja_value *attribute = jinja_argument(args, 0, "attribute");
    const jinja_value *start = jinja_argument(args, 1, "start");
    jinja_list *list;
    jinja_value item, sum = start ? *start : jinja_int(0);

    BL_TRY(jinja_iterate(run, value, &list));
    for (size_t i = 0; i < list->n; i++, sum = *out) {
        item = list->item[i];
        if (attribute && attribute->kind != JINJA_NONE)
            BL_TRY(get_path(run, &list->item[i], attribute, &item));
        BL_TRY(jinja_binary(run, OP_ADD, &sum, &item, out));
    }
    *out = sum;
    return BL_OK;
}

const jinja_filter_entry jinja_list_filters[] = {{"dictsort", filter_dictsort},
                                                 {"first", filter_first},
                                                 {"items", filter_items},
                                                 {"join", filter_join},
                                                 {"last", filter_last},
                                                 {"list", filter_list},
                                                 {"map", filter_map},
                                                 {"max", filter_max},
                                                 {"min", filter_min},
                                                 {"reject", filter_reject},
                                                 {"rejectattr", filter_rejectattr},
                                                 {"reverse", filter_reverse},
                                                 {"select", filter_select},
                                                 {"selectattr", filter_selectattr},
                                                 {"sort", filter_sort},
                                                 {"sum", filter_sum},
                                                 {"unique", filter_unique},
                                                 {NULL, NULL}};
