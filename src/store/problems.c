/* SPDX-License-Identifier: Apache-2.0 */
/* problems.c -- a growing text of problems, one per line, that becomes one error. */
#include "store/problems_internal.h"

#include <stdarg.h>
#include <stdio.h>

void bl_problems_add(bl_problems *problems, const char *format, ...)
{
    va_list args;
    size_t room = sizeof problems->text - problems->length;

    problems->n++;
    /* After the first that did not fit, later and shorter ones would read as if nothing were
     * missing between. */
    if (problems->n_in_text + 1 < problems->n) return;
    int prefix =
        snprintf(problems->text + problems->length, room, "%s", problems->length ? "; " : "");
    if ((size_t)prefix >= room) goto full;
    va_start(args, format);
    int body =
        vsnprintf(problems->text + problems->length + prefix, room - (size_t)prefix, format, args);
    va_end(args);
    if (body < 0 || (size_t)(prefix + body) >= room) {
        if (problems->n_in_text == 0) { /* a single long one is better cut than dropped */
            problems->length = sizeof problems->text - 1;
            problems->n_in_text = 1;
            return;
        }
        goto full;
    }
    problems->length += (size_t)(prefix + body);
    problems->n_in_text++;
    return;
full:
    problems->text[problems->length] = '\0';
}

bl_status bl_problems_report(const bl_problems *problems, const char *subject)
{
    if (problems->n == 0) return BL_OK;
    size_t n_hidden = problems->n - problems->n_in_text;
    if (n_hidden)
        return BL_FAIL(BL_EINPUT, "%s: %s (and %zu more)", subject, problems->text, n_hidden);
    return BL_FAIL(BL_EINPUT, "%s: %s", subject, problems->text);
}

bool bl_has_controls(const char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f) return true;
    return false;
}
