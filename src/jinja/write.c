/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of values: str(), repr() and json.dumps() of Python. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "base/sizes.h"
#include "jinja/internal.h"
#include "tokenizer/text.h"

static bl_status add(jinja_run *run, jinja_buffer *out, const char *text)
{
    return jinja_append(&run->arena, out, text, strlen(text));
}

/* float.__repr__: the shortest digits that give the number back; an exponent below 1e-4 and from
 * 1e16 on. */
static bl_status write_real(jinja_run *run, const jinja_value *value, bool json, jinja_buffer *out)
{
    enum { TRIES_BYTES = 1024 }; /* scanned in the time that 17 precisions take */
    double real = value->real;
    char digits[40], text[64];
    int precision = 0, exponent;

    if (value->is_doubtful)
        return jinja_fail(run, "a number of 2^63 or more: integer and float are not told apart; "
                               "write it as a string");
    BL_TRY(jinja_scan(run, TRIES_BYTES));
    if (isnan(real)) return add(run, out, json ? "NaN" : "nan");
    if (isinf(real))
        return add(run, out,
                   json       ? real < 0 ? "-Infinity" : "Infinity"
                   : real < 0 ? "-inf"
                              : "inf");
    do snprintf(digits, sizeof digits, "%.*e", precision, real);
    while (strtod(digits, NULL) != real && precision++ < 17);
    exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        int decimals = (int)bl_max_i64(precision - exponent, 1);
        snprintf(text, sizeof text, "%.*f", decimals, real);
        return add(run, out, text);
    }
    *strchr(digits, 'e') = '\0';
    snprintf(text, sizeof text, "%se%c%02d", digits, exponent < 0 ? '-' : '+', abs(exponent));
    return add(run, out, text);
}

/* ---- repr ---- */

static bl_status write_repr(jinja_run *run, const jinja_value *value, int depth, jinja_buffer *out);

/* str.isprintable of one code point. */
static bool is_printable(uint32_t code)
{
    if (code == ' ' || code == BL_JINJA_MARK_CODE) return true;
    switch (utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return false;
    default:
        return true;
    }
}

static bl_status write_escaped(jinja_run *run, uint32_t code, jinja_buffer *out)
{
    char escape[12];

    if (code == '\n' || code == '\r' || code == '\t')
        return add(run, out, code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t");
    snprintf(escape, sizeof escape,
             code < 0x100     ? "\\x%02x"
             : code < 0x10000 ? "\\u%04x"
                              : "\\U%08x",
             (unsigned)code);
    return add(run, out, escape);
}

static bl_status write_text_repr(jinja_run *run, const jinja_value *value, jinja_buffer *out)
{
    bool has_single = memchr(value->text, '\'', value->n_bytes) != NULL;
    bool has_double = memchr(value->text, '"', value->n_bytes) != NULL;
    char quote[2] = {has_single && !has_double ? '"' : '\'', '\0'};

    BL_TRY(jinja_scan(run, value->n_bytes));
    if (value->is_markup) BL_TRY(add(run, out, "Markup("));
    BL_TRY(add(run, out, quote));
    for (size_t at = 0, n; at < value->n_bytes; at += n) {
        uint32_t code = bl_utf8_decode(value->text + at, value->n_bytes - at, &n);
        if (code == (uint32_t)quote[0] || code == '\\') BL_TRY(add(run, out, "\\"));
        if (is_printable(code))
            BL_TRY(jinja_append(&run->arena, out, value->text + at, n));
        else
            BL_TRY(write_escaped(run, code, out));
    }
    BL_TRY(add(run, out, quote));
    return value->is_markup ? add(run, out, ")") : BL_OK;
}

static bl_status write_list_repr(jinja_run *run, const jinja_value *value, int depth,
                                 jinja_buffer *out)
{
    const jinja_list *list = value->list;
    bool is_tuple = value->kind == JINJA_TUPLE;

    if (value->kind == JINJA_RANGE)
        return jinja_fail(run, "writing a range is not supported; use |list");
    if (value->kind == JINJA_VIEW) {
        BL_TRY(add(run, out, list->view_name));
        BL_TRY(add(run, out, "("));
    }
    BL_TRY(add(run, out, is_tuple ? "(" : "["));
    for (size_t i = 0; i < list->n; i++) {
        if (i) BL_TRY(add(run, out, ", "));
        BL_TRY(write_repr(run, &list->item[i], depth + 1, out));
    }
    if (is_tuple && list->n == 1) BL_TRY(add(run, out, ","));
    BL_TRY(add(run, out, is_tuple ? ")" : "]"));
    return value->kind == JINJA_VIEW ? add(run, out, ")") : BL_OK;
}

static bl_status write_dict_repr(jinja_run *run, const jinja_dict *dict, int depth,
                                 jinja_buffer *out)
{
    BL_TRY(add(run, out, "{"));
    for (size_t i = 0; i < dict->n; i++) {
        if (i) BL_TRY(add(run, out, ", "));
        BL_TRY(write_repr(run, &dict->entry[i].key, depth + 1, out));
        BL_TRY(add(run, out, ": "));
        BL_TRY(write_repr(run, &dict->entry[i].value, depth + 1, out));
    }
    return add(run, out, "}");
}

static bl_status write_repr(jinja_run *run, const jinja_value *value, int depth, jinja_buffer *out)
{
    char text[32];

    BL_TRY(jinja_step(run, 0));
    if (depth > BL_JINJA_MAX_DATA_DEPTH)
        return jinja_fail(run, "data nested more than %d deep", BL_JINJA_MAX_DATA_DEPTH);
    switch (value->kind) {
    case JINJA_UNDEFINED:
        return add(run, out, "Undefined");
    case JINJA_NONE:
        return add(run, out, "None");
    case JINJA_BOOL:
        return add(run, out, value->truth ? "True" : "False");
    case JINJA_INT:
        snprintf(text, sizeof text, "%lld", (long long)value->integer);
        return add(run, out, text);
    case JINJA_REAL:
        return write_real(run, value, false, out);
    case JINJA_STRING:
        return write_text_repr(run, value, out);
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_RANGE:
    case JINJA_VIEW:
        return write_list_repr(run, value, depth, out);
    case JINJA_DICT:
        return write_dict_repr(run, value->dict, depth, out);
    default: /* Python writes an address */
        return jinja_fail(run, "writing a %s is not supported", jinja_type_name(value));
    }
}

bl_status jinja_write(jinja_run *run, const jinja_value *value, jinja_buffer *out)
{
    BL_TRY(jinja_step(run, value->kind == JINJA_STRING ? value->n_bytes : 0));
    if (value->kind == JINJA_UNDEFINED) return BL_OK;
    if (value->kind == JINJA_STRING)
        return jinja_append(&run->arena, out, value->text, value->n_bytes);
    return write_repr(run, value, 0, out);
}

bl_status jinja_to_text(jinja_run *run, const jinja_value *value, jinja_value *out)
{
    jinja_buffer text = {0};

    if (value->kind == JINJA_STRING) {
        *out = *value;
        return BL_OK;
    }
    BL_TRY(jinja_write(run, value, &text));
    *out = jinja_text(text.n ? text.text : "", text.n);
    return BL_OK;
}

/* ---- JSON ---- */

static bl_status write_json_code(jinja_run *run, uint32_t code, bool ascii, jinja_buffer *out)
{
    static const char letters[] = "\"\"\\\\\nn\rr\tt\bb\ff";
    char escape[16];

    for (size_t i = 0; letters[i]; i += 2)
        if ((unsigned char)letters[i] == code) {
            snprintf(escape, sizeof escape, "\\%c", letters[i + 1]);
            return add(run, out, escape);
        }
    if (code < 0x20 || (ascii && code >= 0x7f && code != BL_JINJA_MARK_CODE)) {
        if (code < 0x10000)
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)code);
        else
            snprintf(escape, sizeof escape, "\\u%04x\\u%04x", (unsigned)(0xd7c0 + (code >> 10)),
                     (unsigned)(0xdc00 | (code & 0x3ff)));
        return add(run, out, escape);
    }
    return jinja_append_code(&run->arena, out, code);
}

static bl_status write_json_text(jinja_run *run, const jinja_value *value, bool ascii,
                                 jinja_buffer *out)
{
    BL_TRY(jinja_scan(run, value->n_bytes));
    BL_TRY(add(run, out, "\""));
    for (size_t at = 0, n; at < value->n_bytes; at += n)
        BL_TRY(write_json_code(run, bl_utf8_decode(value->text + at, value->n_bytes - at, &n),
                               ascii, out));
    return add(run, out, "\"");
}

static bl_status write_line(jinja_run *run, const jinja_json_style *style, int depth,
                            jinja_buffer *out)
{
    if (!style->indent) return BL_OK;
    BL_TRY(add(run, out, "\n"));
    for (int i = 0; i < depth; i++) BL_TRY(add(run, out, style->indent));
    return BL_OK;
}

static bl_status write_separator(jinja_run *run, const jinja_json_style *style, bool first,
                                 int depth, jinja_buffer *out)
{
    if (!first) BL_TRY(jinja_write(run, &style->item_separator, out));
    return write_line(run, style, depth, out);
}

static bl_status write_json_list(jinja_run *run, const jinja_list *list,
                                 const jinja_json_style *style, int depth, jinja_buffer *out)
{
    if (!list->n) return add(run, out, "[]");
    BL_TRY(add(run, out, "["));
    for (size_t i = 0; i < list->n; i++) {
        BL_TRY(write_separator(run, style, !i, depth + 1, out));
        BL_TRY(jinja_write_json(run, &list->item[i], style, depth + 1, out));
    }
    BL_TRY(write_line(run, style, depth, out));
    return add(run, out, "]");
}

/* Entries in the order of their keys: insertion sort of their places. */
static bl_status sort_entries(jinja_run *run, const jinja_dict *dict, const jinja_entry ***out)
{
    const jinja_entry **place;

    BL_TRY(jinja_new(&run->arena, (dict->n + 1) * sizeof *place, &place));
    for (size_t i = 0; i < dict->n; i++) {
        size_t at = i;
        for (int order; at > 0; at--) {
            BL_TRY(jinja_order(run, &place[at - 1]->key, &dict->entry[i].key, &order));
            if (order <= 0) break;
            place[at] = place[at - 1];
        }
        place[at] = &dict->entry[i];
    }
    *out = place;
    return BL_OK;
}

static bl_status write_json_key(jinja_run *run, const jinja_value *key,
                                const jinja_json_style *style, jinja_buffer *out)
{
    if (key->kind == JINJA_STRING) return write_json_text(run, key, style->ascii, out);
    if (key->kind != JINJA_NONE && !jinja_is_number(key))
        return jinja_fail(run, "tojson: a key that is a %s", jinja_type_name(key));
    BL_TRY(add(run, out, "\""));
    BL_TRY(jinja_write_json(run, key, style, 0, out));
    return add(run, out, "\"");
}

static bl_status write_json_dict(jinja_run *run, const jinja_dict *dict,
                                 const jinja_json_style *style, int depth, jinja_buffer *out)
{
    const jinja_entry **sorted = NULL;

    if (!dict->n) return add(run, out, "{}");
    if (style->sort_keys) BL_TRY(sort_entries(run, dict, &sorted));
    BL_TRY(add(run, out, "{"));
    for (size_t i = 0; i < dict->n; i++) {
        const jinja_entry *entry = sorted ? sorted[i] : &dict->entry[i];
        BL_TRY(write_separator(run, style, !i, depth + 1, out));
        BL_TRY(write_json_key(run, &entry->key, style, out));
        BL_TRY(jinja_write(run, &style->key_separator, out));
        BL_TRY(jinja_write_json(run, &entry->value, style, depth + 1, out));
    }
    BL_TRY(write_line(run, style, depth, out));
    return add(run, out, "}");
}

bl_status jinja_write_json(jinja_run *run, const jinja_value *value, const jinja_json_style *style,
                           int depth, jinja_buffer *out)
{
    BL_TRY(jinja_step(run, 0));
    if (depth > BL_JINJA_MAX_DATA_DEPTH)
        return jinja_fail(run, "data nested more than %d deep", BL_JINJA_MAX_DATA_DEPTH);
    switch (value->kind) {
    case JINJA_NONE:
        return add(run, out, "null");
    case JINJA_BOOL:
        return add(run, out, value->truth ? "true" : "false");
    case JINJA_INT:
        return write_repr(run, value, 0, out);
    case JINJA_REAL:
        return write_real(run, value, true, out);
    case JINJA_STRING:
        return write_json_text(run, value, style->ascii, out);
    case JINJA_LIST:
    case JINJA_TUPLE:
        return write_json_list(run, value->list, style, depth, out);
    case JINJA_DICT:
        return write_json_dict(run, value->dict, style, depth, out);
    default:
        return jinja_fail(run, "tojson: a %s has no JSON", jinja_type_name(value));
    }
}
