/* SPDX-License-Identifier: Apache-2.0 */
/* Upper and lower case, and classes of characters. Case is mapped code point by code point
 * (utf8proc's simple mappings), and ß, which has two letters in upper case. */
#include <string.h>

#include <utf8proc.h>

#include "jinja/internal.h"
#include "tokenizer/text.h"

enum { LOOKUPS = 4 }; /* of a character in tables, in the time of so many bytes scanned */

static bool is_cased(uint32_t code)
{
    switch (utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
        return true;
    default:
        return false;
    }
}

static uint32_t change(uint32_t code, char to)
{
    utf8proc_int32_t from = (utf8proc_int32_t)code;

    return (uint32_t)(to == 'u'   ? utf8proc_toupper(from)
                      : to == 't' ? utf8proc_totitle(from)
                                  : utf8proc_tolower(from));
}

bl_status jinja_change_case(jinja_run *run, const jinja_value *text, const char *how,
                            jinja_value *out)
{
    bool upper = !strcmp(how, "upper"), lower = !strcmp(how, "lower");
    bool title = !strcmp(how, "title"), capitalize = !strcmp(how, "capitalize");
    jinja_buffer result = {0};
    bool starts = true;

    if (!upper && !lower && !title && !capitalize)
        return jinja_fail(run, "string method %.40s is not supported", how);
    BL_TRY(jinja_scan(run, LOOKUPS * text->n_bytes));
    for (size_t at = 0, n; at < text->n_bytes; at += n) {
        uint32_t code = bl_utf8_decode(text->text + at, text->n_bytes - at, &n);
        char to = upper ? 'u' : lower || !starts ? 'l' : 't';
        if (code == 0xdf && to != 'l') {
            BL_TRY(jinja_append(&run->arena, &result, to == 'u' ? "SS" : "Ss", 2));
        } else if (code == 0x130 && to == 'l') { /* i with a dot above, as two codes */
            BL_TRY(jinja_append(&run->arena, &result, "i\xcc\x87", 3));
        } else {
            BL_TRY(jinja_append_code(&run->arena, &result, change(code, to)));
        }
        starts = title && !is_cased(code);
    }
    *out = jinja_text(result.n ? result.text : "", result.n);
    out->is_markup = text->is_markup;
    return BL_OK;
}

static bool is_letter(uint32_t code)
{
    return is_cased(code) || utf8proc_category((utf8proc_int32_t)code) == UTF8PROC_CATEGORY_LO ||
           utf8proc_category((utf8proc_int32_t)code) == UTF8PROC_CATEGORY_LM;
}

static bool is_decimal(uint32_t code)
{
    return utf8proc_category((utf8proc_int32_t)code) == UTF8PROC_CATEGORY_ND;
}

bl_status jinja_text_is(jinja_run *run, const jinja_value *text, const char *method, bool *known,
                        bool *out)
{
    static const char *const names[] = {"isdecimal", "isalpha", "isspace", "isascii",
                                        "isupper",   "islower", NULL};
    bool any_cased = false, all = true;
    int which = 0;

    while (names[which] && strcmp(names[which], method)) which++;
    *known = names[which] != NULL;
    *out = false;
    if (!*known) return BL_OK;
    BL_TRY(jinja_scan(run, LOOKUPS * text->n_bytes));
    for (size_t at = 0, n; at < text->n_bytes; at += n) {
        uint32_t code = bl_utf8_decode(text->text + at, text->n_bytes - at, &n);
        utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)code);
        any_cased = any_cased || is_cased(code);
        all = all && (which == 0   ? is_decimal(code)
                      : which == 1 ? is_letter(code)
                      : which == 2 ? jinja_is_blank(code)
                      : which == 3 ? code < 0x80
                      : which == 4 ? category != UTF8PROC_CATEGORY_LL
                                   : category != UTF8PROC_CATEGORY_LU);
    }
    *out = all && (which == 3 || (which >= 4 ? any_cased : text->n_bytes > 0));
    return BL_OK;
}
