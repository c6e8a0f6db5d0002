/* SPDX-License-Identifier: Apache-2.0 */
/* Strings and their methods, by code points as Python has them. */
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"
#include "tokenizer/text.h"

bool jinja_is_blank(uint32_t code)
{
    return bl_unicode_is_space(code) || (code >= 0x1c && code <= 0x1f);
}

size_t jinja_count_codes(const char *text, size_t n_bytes)
{
    size_t n = 0;

    for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

size_t jinja_code_offset(const char *text, size_t n_bytes, size_t index)
{
    size_t at = 0;

    for (; index > 0 && at < n_bytes; index--) do
            at++;
        while (at < n_bytes && ((unsigned char)text[at] & 0xc0) == 0x80);
    return at;
}

/* ---- strip ---- */

/* Whether white space, or a code of `chars`, is stripped; run is NULL without them. No part of one
 * code is found in another. */
static bl_status is_stripped(jinja_run *run, const char *code, size_t n, const jinja_value *chars,
                             bool *out)
{
    if (chars) {
        *out = memmem(chars->text, chars->n_bytes, code, n) != NULL;
        return jinja_scan(run, chars->n_bytes);
    }
    *out = jinja_is_blank(bl_utf8_decode(code, n, &n));
    return BL_OK;
}

static bl_status strip(jinja_run *run, jinja_value *text, const jinja_value *chars, bool left,
                       bool right)
{
    bool stripped;

    while (left && text->n_bytes) {
        size_t n = jinja_code_offset(text->text, text->n_bytes, 1);
        BL_TRY(is_stripped(run, text->text, n, chars, &stripped));
        if (!stripped) break;
        text->text += n;
        text->n_bytes -= n;
    }
    while (right && text->n_bytes) {
        size_t start = text->n_bytes - 1;
        while (start > 0 && ((unsigned char)text->text[start] & 0xc0) == 0x80) start--;
        BL_TRY(is_stripped(run, text->text + start, text->n_bytes - start, chars, &stripped));
        if (!stripped) break;
        text->n_bytes = start;
    }
    return BL_OK;
}

void jinja_strip(jinja_value *text, bool left, bool right)
{
    strip(NULL, text, NULL, left, right);
}

bl_status jinja_strip_chars(jinja_run *run, jinja_value *text, const jinja_value *chars, bool left,
                            bool right)
{
    BL_TRY(jinja_scan(run, text->n_bytes));
    return strip(run, text, chars && chars->kind == JINJA_STRING ? chars : NULL, left, right);
}

/* ---- search ---- */

/* *out: the last `part`, or NULL. Counts each comparison. */
static bl_status find_last(jinja_run *run, const jinja_value *text, const jinja_value *part,
                           const char **out)
{
    size_t n = text->n_bytes - part->n_bytes + 1; /* places, where the part is not longer */

    *out = part->n_bytes ? NULL : text->text + text->n_bytes;
    if (!part->n_bytes || part->n_bytes > text->n_bytes) return BL_OK;
    for (const char *at; (at = memrchr(text->text, part->text[0], n));
         n = (size_t)(at - text->text)) {
        BL_TRY(jinja_step(run, part->n_bytes));
        if (memcmp(at, part->text, part->n_bytes)) continue;
        *out = at;
        return BL_OK;
    }
    return BL_OK;
}

static const char *find_first(const jinja_value *text, size_t from, const jinja_value *part)
{
    if (!part->n_bytes) return text->text + from;
    return memmem(text->text + from, text->n_bytes - from, part->text, part->n_bytes);
}

static bl_status add_part(jinja_run *run, jinja_list *list, const char *begin, const char *end)
{
    return jinja_list_add(run, list, jinja_text(begin, (size_t)(end - begin)));
}

static bl_status split_blanks(jinja_run *run, const jinja_value *self, int64_t max,
                              jinja_list *list)
{
    jinja_value rest = *self;

    for (jinja_strip(&rest, true, false); rest.n_bytes; jinja_strip(&rest, true, false)) {
        size_t at = 0, n = 0;
        if (max >= 0 && (int64_t)list->n == max) return jinja_list_add(run, list, rest);
        while (at < rest.n_bytes &&
               !jinja_is_blank(bl_utf8_decode(rest.text + at, rest.n_bytes - at, &n)))
            at += n;
        BL_TRY(add_part(run, list, rest.text, rest.text + at));
        rest.text += at;
        rest.n_bytes -= at;
    }
    return BL_OK;
}

/* str.split, or rsplit with `last`, which splits at the last places. */
static bl_status split(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                       bool last, jinja_value *out)
{
    const jinja_value *by = jinja_argument(args, 0, "sep");
    const jinja_value *limit = jinja_argument(args, 1, "maxsplit");
    int64_t max = limit && jinja_is_number(limit) ? jinja_as_int(limit) : -1;
    size_t skip = 0;

    BL_TRY(jinja_list_new(run, JINJA_LIST, 0, out));
    if (!by || by->kind == JINJA_NONE) {
        if (last && max >= 0) return jinja_fail(run, "rsplit by white space is not supported");
        return split_blanks(run, self, max, out->list);
    }
    if (by->kind != JINJA_STRING || !by->n_bytes)
        return jinja_fail(run, "split: a separator that is empty or a %s", jinja_type_name(by));
    const char *at = self->text, *end = self->text + self->n_bytes, *found;
    for (const char *c = at; last && (found = memmem(c, (size_t)(end - c), by->text, by->n_bytes));
         c = found + by->n_bytes)
        skip++;
    skip = max >= 0 && (int64_t)skip > max ? skip - (size_t)max : 0;
    if (last) max = -1;
    for (const char *from = at;
         max != 0 && (found = memmem(from, (size_t)(end - from), by->text, by->n_bytes));) {
        from = found + by->n_bytes;
        if (skip && skip--) continue;
        BL_TRY(add_part(run, out->list, at, found));
        at = from;
        max -= max > 0;
    }
    return add_part(run, out->list, at, end);
}

static bl_status split_lines(jinja_run *run, const jinja_value *self, bool keep, jinja_value *out)
{
    const char *at = self->text, *end = at + self->n_bytes;

    BL_TRY(jinja_list_new(run, JINJA_LIST, 0, out));
    for (const char *c = at; c < end;) {
        size_t n;
        uint32_t code = bl_utf8_decode(c, (size_t)(end - c), &n);
        bool breaks = (code >= '\n' && code <= '\r') || (code >= 0x1c && code <= 0x1e) ||
                      code == 0x85 || code == 0x2028 || code == 0x2029;
        const char *line_end = c;
        c += n;
        if (!breaks) continue;
        if (code == '\r' && c < end && *c == '\n') c++;
        BL_TRY(add_part(run, out->list, at, keep ? c : line_end));
        at = c;
    }
    return at < end ? add_part(run, out->list, at, end) : BL_OK;
}

bl_status jinja_replace(jinja_run *run, const jinja_value *text, const jinja_value *from,
                        const jinja_value *to, int64_t max, jinja_value *out)
{
    jinja_buffer result = {0};
    size_t at = 0;
    const char *found;

    BL_TRY(jinja_scan(run, text->n_bytes));
    while (max != 0 && (found = find_first(text, at, from))) {
        size_t next = (size_t)(found - text->text);
        BL_TRY(jinja_append(&run->arena, &result, text->text + at, next - at));
        BL_TRY(jinja_append(&run->arena, &result, to->text, to->n_bytes));
        BL_TRY(jinja_step(run, to->n_bytes));
        at = next + from->n_bytes;
        max -= max > 0;
        if (from->n_bytes) continue;
        if (at == text->n_bytes) break; /* an empty text is found before each code */
        size_t n = jinja_code_offset(text->text + at, text->n_bytes - at, 1);
        BL_TRY(jinja_append(&run->arena, &result, text->text + at, n));
        at += n;
    }
    BL_TRY(jinja_append(&run->arena, &result, text->text + at, text->n_bytes - at));
    *out = jinja_text(result.n ? result.text : "", result.n);
    return BL_OK;
}

bl_status jinja_escape(jinja_run *run, const jinja_value *text, jinja_value *out)
{
    static const char *const codes[][2] = {
        {"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"'", "&#39;"}, {"\"", "&#34;"}};

    *out = *text;
    for (size_t i = 0; i < BL_COUNT(codes); i++) {
        jinja_value from = jinja_literal(codes[i][0]), to = jinja_literal(codes[i][1]);
        BL_TRY(jinja_replace(run, out, &from, &to, -1, out));
    }
    out->is_markup = true;
    return BL_OK;
}

/* ---- methods ---- */

/* The differences of methods that share a function. */
enum { LEFT = 1, RIGHT = 2, MUST_FIND = 4 };

typedef bl_status text_method(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                              unsigned how, jinja_value *out);

static bl_status need_text(jinja_run *run, const jinja_value *value)
{
    if (value && value->kind == JINJA_STRING) return BL_OK;
    return jinja_fail(run, "expected a string as argument, got %s",
                      value ? jinja_type_name(value) : "nothing");
}

static bl_status do_strip(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                          unsigned how, jinja_value *out)
{
    const jinja_value *chars = jinja_argument(args, 0, "chars");

    if (chars && chars->kind != JINJA_NONE) BL_TRY(need_text(run, chars));
    *out = *self;
    return jinja_strip_chars(run, out, chars, how & LEFT, how & RIGHT);
}

static bl_status do_split(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                          unsigned how, jinja_value *out)
{
    BL_TRY(jinja_scan(run, self->n_bytes));
    return split(run, self, args, how & RIGHT, out);
}

static bl_status do_splitlines(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                               unsigned how, jinja_value *out)
{
    const jinja_value *keep = jinja_argument(args, 0, "keepends");

    (void)how;
    BL_TRY(jinja_scan(run, self->n_bytes));
    return split_lines(run, self, keep && jinja_is_true(keep), out);
}

static bl_status has_affix(jinja_run *run, const jinja_value *self, const jinja_value *part,
                           bool at_end, bool *out)
{
    *out = false;
    if (part->kind != JINJA_STRING || part->n_bytes > self->n_bytes) return jinja_step(run, 0);
    size_t at = at_end ? self->n_bytes - part->n_bytes : 0;
    *out = !memcmp(self->text + at, part->text, part->n_bytes);
    return jinja_step(run, part->n_bytes);
}

static bl_status do_affix(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                          unsigned how, jinja_value *out)
{
    const jinja_value *part = jinja_argument(args, 0, NULL);

    *out = jinja_bool(false);
    if (args->n != 1) return jinja_fail(run, "startswith, endswith: expected one argument");
    if (part->kind != JINJA_TUPLE) BL_TRY(need_text(run, part));
    if (part->kind != JINJA_TUPLE) return has_affix(run, self, part, how & RIGHT, &out->truth);
    for (size_t i = 0; i < part->list->n && !out->truth; i++)
        BL_TRY(has_affix(run, self, &part->list->item[i], how & RIGHT, &out->truth));
    return BL_OK;
}

static bl_status do_remove_affix(jinja_run *run, const jinja_value *self,
                                 const jinja_arguments *args, unsigned how, jinja_value *out)
{
    const jinja_value *part = jinja_argument(args, 0, NULL);
    bool has;

    BL_TRY(need_text(run, part));
    *out = *self;
    BL_TRY(has_affix(run, self, part, how & RIGHT, &has));
    if (!has) return BL_OK;
    if (how & LEFT) out->text += part->n_bytes;
    out->n_bytes -= part->n_bytes;
    return BL_OK;
}

static bl_status do_replace(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                            unsigned how, jinja_value *out)
{
    const jinja_value *from = jinja_argument(args, 0, NULL), *to = jinja_argument(args, 1, NULL);
    const jinja_value *max = jinja_argument(args, 2, "count");

    (void)how;
    BL_TRY(need_text(run, from));
    BL_TRY(need_text(run, to));
    return jinja_replace(run, self, from, to, max && jinja_is_number(max) ? jinja_as_int(max) : -1,
                         out);
}

static bl_status do_find(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                         unsigned how, jinja_value *out)
{
    bool last = how & RIGHT;
    const jinja_value *part = jinja_argument(args, 0, NULL);

    BL_TRY(need_text(run, part));
    if (args->n > 1) return jinja_fail(run, "find: a range is not supported");
    const char *found = last ? NULL : find_first(self, 0, part);
    BL_TRY(jinja_scan(run, self->n_bytes));
    if (last) BL_TRY(find_last(run, self, part, &found));
    if (!found && how & MUST_FIND) return jinja_fail(run, "index: no such text");
    *out = jinja_int(found ? (int64_t)jinja_count_codes(self->text, (size_t)(found - self->text))
                           : -1);
    return BL_OK;
}

static bl_status do_count(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                          unsigned how, jinja_value *out)
{
    const jinja_value *part = jinja_argument(args, 0, NULL);
    int64_t n = 0;

    (void)how;
    BL_TRY(need_text(run, part));
    BL_TRY(jinja_scan(run, self->n_bytes));
    const char *found = self->text;
    for (size_t at = 0; part->n_bytes && (found = find_first(self, at, part)); n++)
        at = (size_t)(found - self->text) + part->n_bytes;
    *out = jinja_int(part->n_bytes ? n : (int64_t)jinja_count_codes(self->text, self->n_bytes) + 1);
    return BL_OK;
}

static bl_status do_join(jinja_run *run, const jinja_value *self, const jinja_arguments *args,
                         unsigned how, jinja_value *out)
{
    jinja_buffer whole = {0};
    jinja_list *list;

    (void)how;
    if (args->n != 1) return jinja_fail(run, "join: expected one argument");
    BL_TRY(jinja_iterate(run, &args->item[0], &list));
    for (size_t i = 0; i < list->n; i++) {
        BL_TRY(need_text(run, &list->item[i]));
        if (i) BL_TRY(jinja_write(run, self, &whole));
        BL_TRY(jinja_write(run, &list->item[i], &whole));
    }
    *out = jinja_text(whole.n ? whole.text : "", whole.n);
    return BL_OK;
}

static const struct {
    const char *name;
    text_method *call;
    unsigned how;
} methods[] = {{"strip", do_strip, LEFT | RIGHT},
               {"lstrip", do_strip, LEFT},
               {"rstrip", do_strip, RIGHT},
               {"split", do_split, LEFT},
               {"rsplit", do_split, RIGHT},
               {"splitlines", do_splitlines, 0},
               {"startswith", do_affix, LEFT},
               {"endswith", do_affix, RIGHT},
               {"removeprefix", do_remove_affix, LEFT},
               {"removesuffix", do_remove_affix, RIGHT},
               {"replace", do_replace, 0},
               {"find", do_find, LEFT},
               {"rfind", do_find, RIGHT},
               {"index", do_find, LEFT | MUST_FIND},
               {"count", do_count, 0},
               {"join", do_join, 0}};

/* Python's others. They exist (x.center is defined); those that case.c lacks are refused in a call.
 */
static const char *const other_methods[] = {
    "upper",      "lower",        "title",   "capitalize",  "swapcase",  "casefold",  "isdigit",
    "isalpha",    "isalnum",      "isspace", "isupper",     "islower",   "isdecimal", "isnumeric",
    "isascii",    "isidentifier", "istitle", "isprintable", "center",    "encode",    "expandtabs",
    "format",     "format_map",   "ljust",   "maketrans",   "partition", "rindex",    "rjust",
    "rpartition", "translate",    "zfill"};

bool jinja_text_has_method(const char *name)
{
    for (size_t i = 0; i < BL_COUNT(methods); i++)
        if (!strcmp(methods[i].name, name)) return true;
    for (size_t i = 0; i < BL_COUNT(other_methods); i++)
        if (!strcmp(other_methods[i], name)) return true;
    return false;
}

bl_status jinja_text_call(jinja_run *run, const jinja_value *self, const char *name,
                          const jinja_arguments *args, jinja_value *out)
{
    bool known, is;

    for (size_t i = 0; i < BL_COUNT(methods); i++)
        if (!strcmp(methods[i].name, name)) {
            BL_TRY(methods[i].call(run, self, args, methods[i].how, out));
            if (self->is_markup && out->kind == JINJA_STRING) out->is_markup = true;
            return BL_OK;
        }
    BL_TRY(jinja_text_is(run, self, name, &known, &is));
    *out = jinja_bool(is);
    return known ? BL_OK : jinja_change_case(run, self, name, out);
}
