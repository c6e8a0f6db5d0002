/* SPDX-License-Identifier: Apache-2.0 */
/* Filters of single values; filters_list.c has those of lists. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"
#include "tokenizer/text.h"

static bl_status filter_length(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    size_t n;

    (void)args;
    BL_TRY(jinja_length(run, value, &n));
    *out = jinja_int((int64_t)n);
    return BL_OK;
}

static bl_status filter_default(jinja_run *run, const jinja_value *value,
                                const jinja_arguments *args, jinja_value *out)
{
    const jinja_value *other = jinja_argument(args, 0, "default_value");
    const jinja_value *all = jinja_argument(args, 1, "boolean");
    bool replaced =
        value->kind == JINJA_UNDEFINED || (all && jinja_is_true(all) && !jinja_is_true(value));

    (void)run;
    *out = !replaced ? *value : other ? *other : jinja_literal("");
    return BL_OK;
}

/* ---- tojson ---- */

static bl_status read_indent(jinja_run *run, const jinja_value *indent, const char **out)
{
    enum { MAX_INDENT = 64 };
    char *text;
    size_t n;

    *out = NULL;
    if (!indent || indent->kind == JINJA_NONE) return BL_OK;
    if (indent->kind == JINJA_STRING)
        n = indent->n_bytes;
    else if (indent->kind == JINJA_INT || indent->kind == JINJA_BOOL)
        n = (size_t)bl_max_i64(jinja_as_int(indent), 0);
    else
        return jinja_fail(run, "tojson: indent is a %s", jinja_type_name(indent));
    if (n > MAX_INDENT) return jinja_fail(run, "tojson: an indent of more than %d", MAX_INDENT);
    BL_TRY(jinja_new(&run->arena, n + 1, &text));
    if (indent->kind == JINJA_STRING)
        memcpy(text, indent->text, n);
    else
        memset(text, ' ', n);
    *out = text;
    return BL_OK;
}

static bl_status filter_tojson(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    const jinja_value *ascii = jinja_argument(args, 0, "ensure_ascii");
    const jinja_value *separators = jinja_argument(args, 2, "separators");
    const jinja_value *sorted = jinja_argument(args, 3, "sort_keys");
    jinja_json_style style = {.ascii = ascii && jinja_is_true(ascii),
                              .sort_keys = sorted && jinja_is_true(sorted),
                              .key_separator = jinja_literal(": ")};
    jinja_buffer text = {0};

    BL_TRY(read_indent(run, jinja_argument(args, 1, "indent"), &style.indent));
    style.item_separator = jinja_literal(style.indent ? "," : ", ");
    if (separators && separators->kind != JINJA_NONE) {
        const jinja_list *pair = jinja_is_sequence(separators) ? separators->list : NULL;
        if (!pair || pair->n != 2 || pair->item[0].kind != JINJA_STRING ||
            pair->item[1].kind != JINJA_STRING)
            return jinja_fail(run, "tojson: separators are not two strings");
        style.item_separator = pair->item[0];
        style.key_separator = pair->item[1];
    }
    BL_TRY(jinja_write_json(run, value, &style, 0, &text));
    *out = jinja_text(text.text, text.n);
    return BL_OK;
}

/* ---- texts ---- */

static bl_status filter_string(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    (void)args;
    return jinja_to_text(run, value, out);
}

static bl_status filter_trim(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                             jinja_value *out)
{
    const jinja_value *chars = jinja_argument(args, 0, "chars");

    if (chars && chars->kind != JINJA_STRING && chars->kind != JINJA_NONE)
        return jinja_fail(run, "trim: chars is a %s", jinja_type_name(chars));
    BL_TRY(jinja_to_text(run, value, out));
    return jinja_strip_chars(run, out, chars, true, true);
}

static bl_status change_text(jinja_run *run, const jinja_value *value, const char *how,
                             jinja_value *out)
{
    BL_TRY(jinja_to_text(run, value, out));
    return jinja_change_case(run, out, how, out);
}

static bl_status filter_lower(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                              jinja_value *out)
{
    (void)args;
    return change_text(run, value, "lower", out);
}

static bl_status filter_upper(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                              jinja_value *out)
{
    (void)args;
    return change_text(run, value, "upper", out);
}

static bl_status filter_capitalize(jinja_run *run, const jinja_value *value,
                                   const jinja_arguments *args, jinja_value *out)
{
    (void)args;
    return change_text(run, value, "capitalize", out);
}

/* Upper case behind white space and -({[<, lower case elsewhere. */
static bl_status filter_title(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                              jinja_value *out)
{
    jinja_buffer result = {0};
    jinja_value text, part;
    bool starts = true;

    (void)args;
    BL_TRY(jinja_to_text(run, value, &text));
    for (size_t at = 0, n; at < text.n_bytes; at += n) {
        uint32_t code = bl_utf8_decode(text.text + at, text.n_bytes - at, &n);
        part = jinja_text(text.text + at, n);
        BL_TRY(jinja_change_case(run, &part, starts ? "upper" : "lower", &part));
        BL_TRY(jinja_write(run, &part, &result));
        starts = jinja_is_blank(code) || (code < 0x80 && strchr("-({[<", (int)code));
    }
    *out = jinja_text(result.n ? result.text : "", result.n);
    return BL_OK;
}

static bl_status filter_replace(jinja_run *run, const jinja_value *value,
                                const jinja_arguments *args, jinja_value *out)
{
    const jinja_value *from = jinja_argument(args, 0, "old"), *to = jinja_argument(args, 1, "new");
    const jinja_value *count = jinja_argument(args, 2, "count");
    jinja_value text, old, new;

    if (!from || !to) return jinja_fail(run, "replace: expected two arguments");
    BL_TRY(jinja_to_text(run, value, &text));
    BL_TRY(jinja_to_text(run, from, &old));
    BL_TRY(jinja_to_text(run, to, &new));
    return jinja_replace(run, &text, &old, &new,
                         count && jinja_is_number(count) ? jinja_as_int(count) : -1, out);
}

static bl_status filter_safe(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                             jinja_value *out)
{
    (void)args;
    BL_TRY(jinja_to_text(run, value, out));
    out->is_markup = true;
    return BL_OK;
}

static bl_status filter_escape(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    (void)args;
    BL_TRY(jinja_to_text(run, value, out));
    return out->is_markup ? BL_OK : jinja_escape(run, out, out);
}

/* Lines behind the first get white space before them. */
static bl_status filter_indent(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out)
{
    const jinja_value *width = jinja_argument(args, 0, "width");
    const jinja_value *first = jinja_argument(args, 1, "first");
    const jinja_value *blank = jinja_argument(args, 2, "blank");
    jinja_value four = jinja_int(4), text;
    jinja_buffer result = {0};
    const char *indent;

    BL_TRY(read_indent(run, width ? width : &four, &indent));
    BL_TRY(jinja_to_text(run, value, &text));
    BL_TRY(jinja_step(run, text.n_bytes));
    if (!indent) return jinja_fail(run, "indent: expected a width");
    for (size_t at = 0; at <= text.n_bytes;) {
        const char *newline = memchr(text.text + at, '\n', text.n_bytes - at);
        size_t n = newline ? (size_t)(newline - text.text) - at : text.n_bytes - at;
        bool indents = at ? n || (blank && jinja_is_true(blank)) : first && jinja_is_true(first);
        if (indents) BL_TRY(jinja_append(&run->arena, &result, indent, strlen(indent)));
        BL_TRY(jinja_append(&run->arena, &result, text.text + at, n + !!newline));
        at += n + 1;
    }
    *out = jinja_text(result.n ? result.text : "", result.n);
    return BL_OK;
}

/* ---- numbers ---- */

/* The number that the whole text is, white space apart. */
static bool parse_number(const jinja_value *text, bool integer, jinja_value *out)
{
    char digits[400], *end;
    jinja_value inner = *text;

    jinja_strip(&inner, true, true);
    if (!inner.n_bytes || inner.n_bytes >= sizeof digits) return false;
    for (size_t i = 0; i < inner.n_bytes; i++)
        if (!strchr(integer ? "+-0123456789" : "+-0123456789.eEinfatyINFATY", inner.text[i]) ||
            !inner.text[i])
            return false;
    memcpy(digits, inner.text, inner.n_bytes);
    digits[inner.n_bytes] = '\0';
    errno = 0;
    *out = integer ? jinja_int(strtoll(digits, &end, 10)) : jinja_real(strtod(digits, &end));
    return !*end && end > digits && (!integer || !errno);
}

/* float(value); false: Python raises TypeError or ValueError. */
static bool to_real(const jinja_value *value, double *out)
{
    jinja_value parsed;

    if (jinja_is_number(value)) {
        *out = jinja_as_real(value);
        return true;
    }
    if (value->kind != JINJA_STRING || !parse_number(value, false, &parsed)) return false;
    *out = parsed.real;
    return true;
}

static bl_status filter_int(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                            jinja_value *out)
{
    const jinja_value *other = jinja_argument(args, 0, "default");
    const jinja_value *base = jinja_argument(args, 1, "base");
    double real;

    if (value->kind == JINJA_UNDEFINED)
        return jinja_fail(run, "int: %.60s is undefined", value->text);
    if (base && (base->kind != JINJA_INT || base->integer != 10))
        return jinja_fail(run, "int: only base 10 is supported");
    *out = jinja_int(0);
    if (value->kind == JINJA_INT || value->kind == JINJA_BOOL) {
        out->integer = jinja_as_int(value);
    } else if (value->kind == JINJA_STRING && parse_number(value, true, out)) {
        return BL_OK;
    } else if (to_real(value, &real) && isfinite(real)) {
        if (fabs(real) >= 0x1p63) return jinja_fail(run, "an integer of more than 64 bits");
        *out = jinja_int((int64_t)real);
    } else {
        *out = other ? *other : jinja_int(0);
    }
    return BL_OK;
}

static bl_status filter_float(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                              jinja_value *out)
{
    const jinja_value *other = jinja_argument(args, 0, "default");
    double real;

    if (value->kind == JINJA_UNDEFINED)
        return jinja_fail(run, "float: %.60s is undefined", value->text);
    if (to_real(value, &real))
        *out = jinja_real(real);
    else
        *out = other ? *other : jinja_real(0);
    return BL_OK;
}

static bl_status filter_abs(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                            jinja_value *out)
{
    jinja_value zero = jinja_int(0);

    (void)args;
    if (!jinja_is_number(value)) return jinja_fail(run, "abs of a %s", jinja_type_name(value));
    *out = *value;
    if (value->kind == JINJA_REAL)
        out->real = fabs(value->real);
    else if (jinja_as_int(value) < 0)
        return jinja_binary(run, OP_SUB, &zero, value, out);
    return BL_OK;
}

static bl_status filter_round(jinja_run *run, const jinja_value *value, const jinja_arguments *args,
                              jinja_value *out)
{
    const jinja_value *digits = jinja_argument(args, 0, "precision");
    const jinja_value *method = jinja_argument(args, 1, "method");
    int64_t precision = digits && digits->kind == JINJA_INT ? digits->integer : 0;
    char text[400];

    BL_TRY(jinja_scan(run, sizeof text));
    if (!jinja_is_number(value) || precision < 0 || precision > 15)
        return jinja_fail(run, "round of a %s to %lld digits", jinja_type_name(value),
                          (long long)precision);
    double x = jinja_as_real(value), scale = pow(10, (double)precision);
    if (!method || jinja_is_literal(method, "common")) {
        if (value->kind != JINJA_REAL) {
            *out = jinja_int(jinja_as_int(value));
            return BL_OK;
        }
        snprintf(text, sizeof text, "%.*f", (int)precision, x);
        *out = jinja_real(strtod(text, NULL));
        return BL_OK;
    }
    if (!jinja_is_literal(method, "ceil") && !jinja_is_literal(method, "floor"))
        return jinja_fail(run, "round: unknown method");
    *out = jinja_real((method->text[0] == 'c' ? ceil(x * scale) : floor(x * scale)) / scale);
    return BL_OK;
}

/* ---- the table ---- */

static const jinja_filter_entry filters[] = {
    {"abs", filter_abs},         {"capitalize", filter_capitalize},
    {"count", filter_length},    {"d", filter_default},
    {"default", filter_default}, {"e", filter_escape},
    {"escape", filter_escape},   {"float", filter_float},
    {"indent", filter_indent},   {"int", filter_int},
    {"length", filter_length},   {"lower", filter_lower},
    {"replace", filter_replace}, {"round", filter_round},
    {"safe", filter_safe},       {"string", filter_string},
    {"title", filter_title},     {"tojson", filter_tojson},
    {"trim", filter_trim},       {"upper", filter_upper}};

bl_status jinja_apply_filter(jinja_run *run, const char *name, const jinja_value *value,
                             const jinja_arguments *args, jinja_value *out)
{
    for (size_t i = 0; i < BL_COUNT(filters); i++)
        if (!strcmp(filters[i].name, name)) return filters[i].apply(run, value, args, out);
    for (const jinja_filter_entry *entry = jinja_list_filters; entry->name; entry++)
        if (!strcmp(entry->name, name)) return entry->apply(run, value, args, out);
    return jinja_fail(run, "filter %.40s is not supported", name);
}
