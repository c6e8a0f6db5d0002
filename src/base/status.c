/* SPDX-License-Identifier: Apache-2.0 */
/* status.c -- the error text of each thread, a thread-local buffer; errno and out of memory refine
 * a status. */
#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char error_text[BL_ERROR_TEXT_BYTES];

/* A failed allocation's text names the object: "a stream" becomes "out of memory: stream". */
static void name_memory(void)
{
    static const char *const articles[] = {"a ", "an ", "the "};
    char object[BL_ERROR_TEXT_BYTES];
    const char *from = object;

    if (strstr(error_text, "memory")) return;
    memcpy(object, error_text, sizeof object);
    for (size_t i = 0; i < sizeof articles / sizeof articles[0]; i++)
        if (!strncmp(object, articles[i], strlen(articles[i]))) from = object + strlen(articles[i]);
    snprintf(error_text, sizeof error_text, "out of memory: %.*s",
             (int)(sizeof error_text - sizeof "out of memory: "), from);
}

BL_PRINTF(2, 0)
static bl_status record(bl_status status, const char *format, va_list args)
{
    int saved_errno = errno;
    vsnprintf(error_text, sizeof error_text, format, args);
    if (status == BL_ENOMEM) name_memory();
    errno = saved_errno;
    return status;
}

bl_status bl_fail(bl_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    record(status, format, args);
    va_end(args);
    return status;
}

bl_status bl_fail_errno(bl_status status, const char *format, ...)
{
    int code = errno;
    char reason[128];
    va_list args;

    va_start(args, format);
    record(status, format, args);
    va_end(args);

    const char *text =
        strerror_r(code, reason, sizeof reason); /* the GNU variant: returns the text */
    size_t length = strlen(error_text);
    snprintf(error_text + length, sizeof error_text - length, ": %s", text);
    errno = code;
    if (status != BL_EIO) return status;
    if (code == ENOMEM) return BL_ENOMEM;
    if (code == ENOSPC || code == EDQUOT || code == EMFILE || code == ENFILE || code == EFBIG)
        return BL_ELIMIT;
    return status;
}

bl_status bl_error_prefix(bl_status status, const char *format, ...)
{
    char old[BL_ERROR_TEXT_BYTES];
    va_list args;

    memcpy(old, error_text, sizeof old);
    va_start(args, format);
    vsnprintf(error_text, sizeof error_text, format, args);
    va_end(args);
    size_t length = strlen(error_text);
    /* What does not fit is cut; the precision says so to gcc's -Wformat-truncation. */
    snprintf(error_text + length, sizeof error_text - length, ": %.*s",
             (int)(sizeof error_text - length), old);
    return status;
}

const char *bl_error_text(void)
{
    return error_text;
}

void bl_error_save(bl_error *out, bl_status status)
{
    out->status = status;
    memcpy(out->text, error_text, sizeof out->text);
}

bl_status bl_error_restore(const bl_error *error)
{
    memcpy(error_text, error->text, sizeof error_text);
    return error->status;
}

int bl_status_exit_code(bl_status status)
{
    switch (status) {
    case BL_OK:
        return 0;
    case BL_EUSAGE:
        return 2;
    case BL_EINPUT:
        return 3;
    case BL_EIO:
    case BL_ENOMEM:
    case BL_ELIMIT:
        return 4;
    case BL_ECHECKPOINT:
        return 5;
    case BL_ENUMERIC:
        return 6;
    case BL_ERANK:
    case BL_ECANCELED:
        return 7;
    case BL_ESTOPPED:
        return 75;
    case BL_EINTERNAL:
        break;
    }
    return 1;
}

const char *bl_status_name(bl_status status)
{
    static const char *const names[] = {"ok",     "usage",    "input",      "io",
                                        "memory", "limit",    "checkpoint", "numeric",
                                        "rank",   "canceled", "stopped",    "internal"};
    size_t index = (size_t)status;
    return index < sizeof names / sizeof names[0] ? names[index] : "unknown";
}
