/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Of the process, as stderr is. */
static atomic_bool is_silent;

static void write_line(const char *kind, const char *format, va_list args)
{
    char line[2048];
    if (atomic_load_explicit(&is_silent, memory_order_relaxed)) return;
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

void bl_log_progress(const char *format, ...)
{
    char line[256];
    va_list args;

    /* mpirun gives every process a terminal, whatever its output goes to. */
    if (atomic_load_explicit(&is_silent, memory_order_relaxed) || !isatty(STDERR_FILENO) ||
        getenv("OMPI_COMM_WORLD_RANK"))
        return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fprintf(stderr, "\r%s\033[K", line);
}

void bl_log_error(const char *text)
{
    char line[BL_ERROR_TEXT_BYTES];
    snprintf(line, sizeof line, "%s", text);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    fprintf(stderr, "ballast: error: %s\n", line);
}

void bl_log_set_silent(void)
{
    atomic_store_explicit(&is_silent, true, memory_order_relaxed);
}
