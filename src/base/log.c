/* SPDX-License-Identifier: Apache-2.0 */
/* log.c -- one write per line on stderr; a progress line at the bottom of a terminal is removed
 * before a line and drawn again after it. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"

/* Of the process, as stderr is. */
static atomic_bool is_silent;
/* A line of progress is on the terminal; changed under stderr's lock. */
static atomic_bool own_line;
static atomic_bool *is_line_open = &own_line;

static _Thread_local const char *own_label;

_Static_assert(sizeof(atomic_bool) == 1 && ATOMIC_BOOL_LOCK_FREE == 2, "processes share it");

/* Text that erases the progress line, if it is shown; the line is drawn again below the message.
 * Under stderr's lock. */
static const char *end_of_line(void)
{
    return atomic_exchange(is_line_open, false) ? "\r\033[K" : "";
}

/* Breaks lines of the log between words where the terminal would break them inside one. */
static void break_line(char *line, int columns)
{
    char *begin = line, *space = NULL;

    if (strncmp(line, BL_LOG_VERBATIM, strlen(BL_LOG_VERBATIM)) == 0) return;
    for (char *c = line; *c; c++) {
        if (*c == ' ') space = c;
        if (*c == '\n') {
            begin = c + 1;
            space = NULL;
        }
        if (c - begin < columns || !space) continue;
        *space = '\n';
        begin = space + 1;
        space = NULL;
    }
}

static void write_line(const char *kind, const char *format, va_list args)
{
    char line[2048];
    bool has_label = own_label && strncmp(format, BL_LOG_VERBATIM, strlen(BL_LOG_VERBATIM)) != 0;
    int used = snprintf(line, sizeof line, "%s%.200s%s", kind, has_label ? own_label : "",
                        has_label ? ": " : ""),
        columns = bl_log_columns();
    if (atomic_load_explicit(&is_silent, memory_order_relaxed)) return;
    vsnprintf(line + used, sizeof line - (size_t)used, format, args);
    if (columns > 0) break_line(line, columns);
    flockfile(stderr);
    fprintf(stderr, "%s%s\n", end_of_line(), line); /* one call, one write */
    funlockfile(stderr);
}

void bl_log_set_label(const char *label)
{
    own_label = label;
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

int bl_log_columns(void)
{
    enum { DEFAULT_COLUMNS = 80 };
    const char *term = getenv("TERM");
    struct winsize size;

    /* mpirun gives every process a terminal, whatever its output goes to. */
    if (atomic_load_explicit(&is_silent, memory_order_relaxed) || !isatty(STDERR_FILENO) || !term ||
        strcmp(term, "dumb") == 0 || getenv("OMPI_COMM_WORLD_RANK"))
        return 0;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col
                                                                           : DEFAULT_COLUMNS;
}

void bl_log_progress(const char *format, ...)
{
    char line[512];
    va_list args;
    int columns = bl_log_columns();

    if (columns == 0 || own_label) return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    /* The last column stays free: a line that fills it may wrap. */
    flockfile(stderr);
    atomic_store(is_line_open, line[0] != '\0');
    fprintf(stderr, "\r%.*s\033[K", columns - 1, line);
    funlockfile(stderr);
}

bool bl_log_advance(double *told_s, const char *format, ...)
{
    const double TERMINAL_S = 0.2, LOG_S = 5.0;
    bool is_terminal = bl_log_columns() > 0;
    double now = bl_now_s();
    char line[512];
    va_list args;

    if (now - *told_s < (is_terminal ? TERMINAL_S : LOG_S)) return false;
    *told_s = now;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (is_terminal)
        bl_log_progress("%s", line);
    else
        bl_log_info("%s", line);
    return true;
}

void bl_log_note_echo(void)
{
    if (isatty(STDERR_FILENO)) atomic_store(is_line_open, true);
}

void bl_log_finish_progress(void)
{
    flockfile(stderr);
    fputs(end_of_line(), stderr);
    funlockfile(stderr);
}

static void write_last_line(const char *kind, const char *text)
{
    char line[BL_ERROR_TEXT_BYTES];
    snprintf(line, sizeof line, "%s", text);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    flockfile(stderr);
    fprintf(stderr, "%s%s%s\n", end_of_line(), kind, line);
    funlockfile(stderr);
}

void bl_log_error(const char *text)
{
    write_last_line("ballast: error: ", text);
}

void bl_log_stopped(const char *text)
{
    write_last_line("ballast: ", text);
}

void bl_log_problem(const char *text)
{
    if (!atomic_load_explicit(&is_silent, memory_order_relaxed)) bl_log_error(text);
}

void bl_log_stopped_at_exit(const char *text)
{
    char line[BL_ERROR_TEXT_BYTES + 32] = "";
    const char *const parts[] = {end_of_line(), "ballast: ", text, "\n"};
    size_t used = 0;

    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        for (const char *c = parts[i]; *c && used < sizeof line; c++) line[used++] = *c;
    ssize_t ignored = write(STDERR_FILENO, line, used);
    (void)ignored;
}

void bl_log_set_silent(bool silent)
{
    atomic_store_explicit(&is_silent, silent, memory_order_relaxed);
}

void bl_log_share_line(void *shared)
{
    is_line_open = shared;
}
