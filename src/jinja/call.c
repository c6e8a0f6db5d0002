/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of the environment's functions and of methods of dictionaries, lists and loops. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"

enum { MAX_RANGE = 100000 }; /* jinja2's sandbox has the same */

const jinja_value *jinja_argument(const jinja_arguments *args, size_t index, const char *name)
{
    if (index < args->n) return &args->item[index];
    for (size_t i = 0; name && i < args->n_keywords; i++)
        if (!strcmp(args->keyword[i], name)) return &args->value[i];
    return NULL;
}

/* ---- functions ---- */

typedef bl_status function(jinja_run *run, const jinja_arguments *args, jinja_value *out);

static bl_status call_range(jinja_run *run, const jinja_arguments *args, jinja_value *out)
{
    int64_t bound[3] = {0, 0, 1};

    if (args->n < 1 || args->n > 3 || args->n_keywords)
        return jinja_fail(run, "range: expected one to three integers");
    for (size_t i = 0; i < args->n; i++) {
        if (args->item[i].kind != JINJA_INT && args->item[i].kind != JINJA_BOOL)
            return jinja_fail(run, "range: expected an integer, got a %s",
                              jinja_type_name(&args->item[i]));
        bound[args->n == 1 ? 1 : i] = jinja_as_int(&args->item[i]);
    }
    if (!bound[2]) return jinja_fail(run, "range: in steps of 0");
    BL_TRY(jinja_list_new(run, JINJA_RANGE, 0, out));
    for (int64_t i = bound[0]; bound[2] > 0 ? i < bound[1] : i > bound[1];) {
        BL_TRY(jinja_list_add(run, out->list, jinja_int(i)));
        if (out->list->n > MAX_RANGE)
            return jinja_fail(run, "range: more than %d items", MAX_RANGE);
        if (__builtin_add_overflow(i, bound[2], &i)) break;
    }
    return BL_OK;
}

static bl_status call_dict(jinja_run *run, const jinja_arguments *args, jinja_value *out)
{
    jinja_list *pairs = NULL;

    BL_TRY(jinja_dict_new(run, out));
    if (args->n > 1) return jinja_fail(run, "dict: expected one argument at most");
    if (args->n && (args->item[0].kind == JINJA_DICT)) {
        const jinja_dict *from = args->item[0].dict;
        for (size_t i = 0; i < from->n; i++)
            BL_TRY(jinja_dict_set(run, out->dict, from->entry[i].key, from->entry[i].value));
    } else if (args->n) {
        BL_TRY(jinja_iterate(run, &args->item[0], &pairs));
    }
    for (size_t i = 0; pairs && i < pairs->n; i++) {
        const jinja_value *pair = &pairs->item[i];
        if (!jinja_is_sequence(pair) || pair->list->n != 2)
            return jinja_fail(run, "dict: expected pairs of key and value");
        BL_TRY(jinja_dict_set(run, out->dict, pair->list->item[0], pair->list->item[1]));
    }
    for (size_t i = 0; i < args->n_keywords; i++)
        BL_TRY(jinja_dict_set(run, out->dict, jinja_literal(args->keyword[i]), args->value[i]));
    return BL_OK;
}

static bl_status call_namespace(jinja_run *run, const jinja_arguments *args, jinja_value *out)
{
    BL_TRY(call_dict(run, args, out));
    out->kind = JINJA_NAMESPACE;
    return BL_OK;
}

static bl_status call_raise(jinja_run *run, const jinja_arguments *args, jinja_value *out)
{
    jinja_buffer text = {0};

    (void)out;
    if (args->n != 1) return jinja_fail(run, "raise_exception: expected one argument");
    BL_TRY(jinja_write(run, &args->item[0], &text));
    run->raised = true;
    return jinja_fail(run, "%.*s", (int)bl_min_i64((int64_t)text.n, BL_ERROR_TEXT_BYTES),
                      text.n ? text.text : "");
}

static bl_status call_strftime(jinja_run *run, const jinja_arguments *args, jinja_value *out)
{
    enum { MAX_DATE_BYTES = 256 };
    char format[MAX_DATE_BYTES], *text;

    if (args->n != 1 || args->item[0].kind != JINJA_STRING ||
        args->item[0].n_bytes >= sizeof format)
        return jinja_fail(run, "strftime_now: expected a format");
    memcpy(format, args->item[0].text, args->item[0].n_bytes);
    format[args->item[0].n_bytes] = '\0';
    BL_TRY(jinja_new(&run->arena, MAX_DATE_BYTES, &text));
    *out = jinja_text(text, strftime(text, MAX_DATE_BYTES, format, run->now));
    return BL_OK;
}

static bl_status call_unsupported(jinja_run *run, const jinja_arguments *args, jinja_value *out)
{
    (void)args;
    (void)out;
    return jinja_fail(run, "functions lipsum, cycler and joiner are not supported");
}

static const struct {
    const char *name;
    function *call;
} functions[] = {{"range", call_range},           {"dict", call_dict},
                 {"namespace", call_namespace},   {"raise_exception", call_raise},
                 {"strftime_now", call_strftime}, {"lipsum", call_unsupported},
                 {"cycler", call_unsupported},    {"joiner", call_unsupported}};

bool jinja_is_global(const char *name)
{
    for (size_t i = 0; i < BL_COUNT(functions); i++)
        if (!strcmp(functions[i].name, name)) return true;
    return false;
}

/* ---- methods ---- */

static bl_status dict_get(jinja_run *run, const jinja_dict *dict, const jinja_arguments *args,
                          jinja_value *out)
{
    const jinja_value *value;

    if (args->n < 1 || args->n > 2 || args->n_keywords)
        return jinja_fail(run, "get: expected a key and maybe a default");
    BL_TRY(jinja_dict_get(run, dict, &args->item[0], &value));
    *out = value ? *value : args->n == 2 ? args->item[1] : jinja_none();
    return BL_OK;
}

/* keys, values or items: the first letter says which. */
static bl_status dict_view(jinja_run *run, const jinja_dict *dict, char which, jinja_value *out)
{
    BL_TRY(jinja_list_new(run, JINJA_VIEW, dict->n, out));
    out->list->view_name = which == 'k' ? "dict_keys" : which == 'v' ? "dict_values" : "dict_items";
    for (size_t i = 0; i < dict->n; i++) {
        jinja_value item = which == 'k' ? dict->entry[i].key : dict->entry[i].value;
        if (which == 'i') {
            BL_TRY(jinja_list_new(run, JINJA_TUPLE, 2, &item));
            BL_TRY(jinja_list_add(run, item.list, dict->entry[i].key));
            BL_TRY(jinja_list_add(run, item.list, dict->entry[i].value));
        }
        BL_TRY(jinja_list_add(run, out->list, item));
    }
    return BL_OK;
}

static bl_status call_dict_method(jinja_run *run, const jinja_method *method,
                                  const jinja_arguments *args, jinja_value *out)
{
    if (!strcmp(method->name, "get")) return dict_get(run, method->self.dict, args, out);
    if (args->n || args->n_keywords)
        return jinja_fail(run, "%s: expected no argument", method->name);
    *out = method->self; /* copy: nothing changes it */
    if (!strcmp(method->name, "copy")) return BL_OK;
    return dict_view(run, method->self.dict, method->name[0], out);
}

static bl_status call_list_method(jinja_run *run, const jinja_method *method,
                                  const jinja_arguments *args, jinja_value *out)
{
    const jinja_list *list = method->self.list;
    bool counts = !strcmp(method->name, "count"), same;
    int64_t n = 0;

    *out = method->self;
    if (!strcmp(method->name, "copy")) return BL_OK;
    if (args->n != 1) return jinja_fail(run, "%s: expected one argument", method->name);
    for (size_t i = 0; i < list->n; i++) {
        BL_TRY(jinja_equals(run, &list->item[i], &args->item[0], &same));
        *out = jinja_int((int64_t)i);
        if (same && !counts) return BL_OK;
        n += same;
    }
    *out = jinja_int(n);
    return counts ? BL_OK : jinja_fail(run, "index: no such item");
}

static bl_status call_loop_method(jinja_run *run, const jinja_method *method,
                                  const jinja_arguments *args, jinja_value *out)
{
    jinja_loop *loop = method->self.loop;
    bool same = true;

    if (!strcmp(method->name, "cycle")) {
        if (!args->n) return jinja_fail(run, "cycle: expected an argument");
        *out = args->item[loop->index % args->n];
        return BL_OK;
    }
    same = loop->changed && loop->n_changed == args->n;
    for (size_t i = 0; same && i < args->n; i++)
        BL_TRY(jinja_equals(run, &loop->changed[i], &args->item[i], &same));
    loop->changed = args->item;
    loop->n_changed = args->n;
    *out = jinja_bool(!same);
    return BL_OK;
}

static bl_status call_method(jinja_run *run, const jinja_method *method,
                             const jinja_arguments *args, jinja_value *out)
{
    switch (method->self.kind) {
    case JINJA_STRING:
        return jinja_text_call(run, &method->self, method->name, args, out);
    case JINJA_DICT:
        return call_dict_method(run, method, args, out);
    case JINJA_LOOP:
        return call_loop_method(run, method, args, out);
    default:
        return call_list_method(run, method, args, out);
    }
}

bl_status jinja_call(jinja_run *run, const jinja_value *callee, const jinja_arguments *args,
                     jinja_value *out)
{
    switch (callee->kind) {
    case JINJA_MACRO:
        return jinja_call_macro(run, callee->macro, args, out);
    case JINJA_METHOD:
        return call_method(run, callee->method, args, out);
    case JINJA_GLOBAL:
        for (size_t i = 0; i < BL_COUNT(functions); i++)
            if (!strcmp(functions[i].name, callee->text)) return functions[i].call(run, args, out);
        break;
    case JINJA_UNDEFINED:
        return jinja_fail(run, "%.60s is undefined or changes its object; it cannot be called",
                          callee->text);
    default:
        break;
    }
    return jinja_fail(run, "a %s cannot be called", jinja_type_name(callee));
}
