/* SPDX-License-Identifier: Apache-2.0 */
/* pattern.c -- compiles an expression, first as it is given: its errors then have the positions of
 * the user's text, and parentheses that do not belong together are found before more are put
 * around. */
#include "store/pattern.h"

#include <stdlib.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/files.h"

struct bl_name_pattern {
    char *where;
    bl_status refusal;
    pcre2_code *code;
    pcre2_match_data *match;
};

static bl_status compile(const bl_name_pattern *p, const char *text, uint32_t options,
                         pcre2_code **out)
{
    int error;
    PCRE2_SIZE offset;
    PCRE2_UCHAR reason[128];

    *out = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, options | PCRE2_UTF, &error,
                         &offset, NULL);
    if (*out) return BL_OK;
    pcre2_get_error_message(error, reason, sizeof reason);
    return BL_FAIL(p->refusal, "%s: \"%.100s\" is not a regular expression: %s at character %zu",
                   p->where, text, (const char *)reason, offset);
}

/* Behind the start or a dot, before a dot or the end. */
static bl_status compile_components(bl_name_pattern *p, const char *text)
{
    char *around = NULL;

    BL_TRY(compile(p, text, 0, &p->code));
    pcre2_code_free(p->code);
    p->code = NULL;
    BL_TRY(bl_text_format(&around, "(?<![^.])(?:%s)(?![^.])", text));
    bl_status st = compile(p, around, 0, &p->code);
    free(around);
    return st;
}

bl_status bl_name_pattern_create(const char *text, bl_name_pattern_extent extent, bl_status refusal,
                                 const char *where, bl_name_pattern **out)
{
    bl_name_pattern *p = calloc(1, sizeof *p);
    bl_status st = BL_OK;

    *out = NULL;
    if (!p) return BL_FAIL(BL_ENOMEM, "%s: a pattern", where);
    p->refusal = refusal;
    BL_TRY_GOTO(st, done, bl_text_format(&p->where, "%s", where));
    BL_TRY_GOTO(st, done,
                extent == BL_PATTERN_WHOLE
                    ? compile(p, text, PCRE2_ANCHORED | PCRE2_ENDANCHORED, &p->code)
                    : compile_components(p, text));
    p->match = pcre2_match_data_create_from_pattern(p->code, NULL);
    if (!p->match) st = BL_FAIL(BL_ENOMEM, "%s: a pattern", where);
done:
    if (st == BL_OK)
        *out = p;
    else
        bl_name_pattern_destroy(p);
    return st;
}

void bl_name_pattern_destroy(bl_name_pattern *p)
{
    if (!p) return;
    pcre2_match_data_free(p->match);
    pcre2_code_free(p->code);
    free(p->where);
    free(p);
}

bl_status bl_name_pattern_match(const bl_name_pattern *p, const char *name, bool *matches)
{
    int found = pcre2_match(p->code, (PCRE2_SPTR)name, PCRE2_ZERO_TERMINATED, 0, 0, p->match, NULL);

    *matches = found >= 0;
    if (found >= 0 || found == PCRE2_ERROR_NOMATCH) return BL_OK;
    return BL_FAIL(p->refusal, "%s: matching \"%s\" fails (PCRE2 error %d)", p->where, name, found);
}
