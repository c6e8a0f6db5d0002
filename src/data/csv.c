/* SPDX-License-Identifier: Apache-2.0 */
/* csv.c -- records of a CSV file (RFC 4180 with a header; TSV the same with tabs) as rows: JSON
 * objects of strings, by the names in the header. A quote inside an unquoted field is text, as
 * Python's csv module reads it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "data/internal.h"

enum { MAX_COLUMNS = 1024 };

static bl_status fail_at(const bl_row_reader *reader, int64_t line, const char *reason)
{
    return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ": %s", reader->path, line, reason);
}

/* The byte at reader->at, or -1 at the end; nothing before it is kept. */
static bl_status peek(bl_row_reader *reader, int *byte)
{
    size_t keep = reader->at;
    return bl_row_reader_peek(reader, &keep, byte);
}

static bl_status add_escaped(bl_bytes *out, int byte)
{
    char text[8] = {(char)byte};
    size_t n = 1;

    if (byte == '"' || byte == '\\')
        n = (size_t)snprintf(text, sizeof text, "\\%c", byte);
    else if (byte < 0x20)
        n = (size_t)snprintf(text, sizeof text, "\\u%04x", (unsigned)byte);
    return bl_bytes_append(out, text, n);
}

static bl_status add_byte(bl_row_reader *reader, int byte, bl_bytes *out)
{
    bl_row_reader_advance(reader, byte);
    if (out->n > BL_MAX_ROW_BYTES)
        return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ": a row of more than %d bytes", reader->path,
                       reader->line, BL_MAX_ROW_BYTES);
    return add_escaped(out, byte);
}

static bl_status read_quoted(bl_row_reader *reader, bl_bytes *out)
{
    int64_t line = reader->line;
    int byte;

    bl_row_reader_advance(reader, '"');
    for (;;) {
        BL_TRY(peek(reader, &byte));
        if (byte < 0) return fail_at(reader, line, "the file ends inside this quoted field");
        if (byte == '"') {
            bl_row_reader_advance(reader, byte);
            BL_TRY(peek(reader, &byte));
            if (byte != '"') return BL_OK;
        }
        BL_TRY(add_byte(reader, byte, out));
    }
}

/* Whether the bytes at reader->at end a record, which are then taken: "\n", "\r\n" or the file's
 * end. A "\r" before anything else is text. */
static bl_status end_record(bl_row_reader *reader, int byte, bool *is_end, bool *took_return)
{
    *took_return = false;
    *is_end = byte < 0 || byte == '\n';
    if (byte == '\r') {
        bl_row_reader_advance(reader, byte);
        *took_return = true;
        BL_TRY(peek(reader, &byte));
        *is_end = byte < 0 || byte == '\n';
    }
    if (*is_end && byte == '\n') bl_row_reader_advance(reader, byte);
    return BL_OK;
}

/* Appends a field as the inside of a JSON string; *is_last: of its record. */
static bl_status read_field(bl_row_reader *reader, bl_bytes *out, bool *is_last)
{
    bool is_quoted, took_return;
    int byte;

    BL_TRY(peek(reader, &byte));
    if ((is_quoted = byte == '"')) BL_TRY(read_quoted(reader, out));
    for (;;) {
        BL_TRY(peek(reader, &byte));
        *is_last = false;
        if (byte == reader->separator) {
            bl_row_reader_advance(reader, byte);
            return BL_OK;
        }
        int64_t line = reader->line;
        BL_TRY(end_record(reader, byte, is_last, &took_return));
        if (*is_last) return BL_OK;
        if (is_quoted) return fail_at(reader, line, "text behind the end of a quoted field");
        BL_TRY(took_return ? add_escaped(out, '\r') : add_byte(reader, byte, out));
    }
}

static bl_status skip_empty_lines(bl_row_reader *reader, int *byte)
{
    for (;;) {
        BL_TRY(peek(reader, byte));
        if (*byte != '\n' && *byte != '\r') return BL_OK;
        bl_row_reader_advance(reader, *byte);
    }
}

static bl_status add_name(bl_row_reader *reader, bool *is_last)
{
    bl_bytes name = {0};
    char **grown = realloc(reader->column_name, (reader->n_columns + 1) * sizeof *grown);

    if (!grown) return BL_FAIL(BL_ENOMEM, "%s: header", reader->path);
    reader->column_name = grown;
    bl_status st = read_field(reader, &name, is_last);
    if (st == BL_OK) st = bl_bytes_append(&name, "", 1);
    if (st == BL_OK)
        reader->column_name[reader->n_columns++] = name.data;
    else
        bl_bytes_free(&name);
    return st;
}

/* Another separator, or the line in which Excel names it. Names have a tab as \u0009. */
static bl_status check_header(const bl_row_reader *reader, int64_t line)
{
    static const char *const others[][2] = {
        {";", "semicolons"}, {"|", "bars"}, {",", "commas"}, {"\\u0009", "tabs"}};
    const char *name = reader->n_columns ? reader->column_name[0] : "";

    if (!strncmp(name, "sep=", 4))
        return fail_at(reader, line,
                       "sep= is a line for Excel, not a header: remove it, and separate fields by "
                       "commas in .csv, by tabs in .tsv");
    for (size_t i = 0; reader->n_columns == 1 && i < BL_COUNT(others); i++)
        if (strstr(name, others[i][0]))
            return BL_FAIL(BL_EINPUT,
                           "%s:%" PRId64 ": the header has one column, %.80s: fields are separated "
                           "by commas in .csv, by tabs in .tsv, not by %s",
                           reader->path, line, name, others[i][1]);
    return BL_OK;
}

bl_status bl_csv_begin(bl_row_reader *reader)
{
    bool is_last = false;
    int byte;

    BL_TRY(skip_empty_lines(reader, &byte));
    int64_t line = reader->line;
    while (byte >= 0 && !is_last) {
        if (reader->n_columns == MAX_COLUMNS)
            return fail_at(reader, reader->line, "a header of more than 1024 columns");
        BL_TRY(add_name(reader, &is_last));
    }
    return check_header(reader, line);
}

static bl_status add_text(bl_bytes *out, const char *text)
{
    return bl_bytes_append(out, text, strlen(text));
}

static bl_status read_record(bl_row_reader *reader)
{
    bl_bytes *out = &reader->record;
    int64_t line = reader->line;
    bool is_last = false;
    size_t n = 0;

    for (; !is_last; n++) {
        if (n == reader->n_columns) break;
        BL_TRY(add_text(out, n ? ",\"" : "{\""));
        BL_TRY(add_text(out, reader->column_name[n]));
        BL_TRY(add_text(out, "\":\""));
        BL_TRY(read_field(reader, out, &is_last));
        BL_TRY(add_text(out, "\""));
    }
    if (!is_last || n != reader->n_columns)
        return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ": %s fields than the header, which has %zu",
                       reader->path, line, is_last ? "fewer" : "more", reader->n_columns);
    return add_text(out, "}");
}

bl_status bl_csv_next(bl_row_reader *reader, bl_row *row)
{
    int byte;

    BL_TRY(skip_empty_lines(reader, &byte));
    if (byte < 0) return BL_OK;
    *row = (bl_row){.line = reader->line, .column = 1};
    reader->record.n = 0;
    BL_TRY(read_record(reader));
    row->text = reader->record.data;
    row->n_bytes = reader->record.n;
    return BL_OK;
}
