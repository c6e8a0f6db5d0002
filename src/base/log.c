/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <stdio.h>

static void write_line(const char *kind, const char *format, va_list args)
{
    char line[2048];
    vsnprintf(line, sizeof line, format, args);
    fprintf(stderr, "%s%s\n", kind, line); /* stdio locks the stream: one call, one line */
}

void bl_log_info(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    write_line("", format, args);
    va_end(args);
}

void bl_log_warning(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    write_line("warning: ", format, args);
    va_end(args);
}
