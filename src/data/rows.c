/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts a file into rows: lines of JSONL, the elements of one JSON array, or records of CSV. Finds
 * the borders only; the parser checks the JSON of a row. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/file_kind.h"
#include "base/files.h"
#include "data/internal.h"

enum { READ_BYTES = 1 << 20 };

static bl_status fail_at(const bl_row_reader *reader, const char *reason)
{
    char behind[48] = "";

    if (reader->n_elements)
        snprintf(behind, sizeof behind, " (row %" PRId64 " is the last before it)",
                 reader->n_elements);
    return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ":%" PRId64 ": %s%s", reader->path, reader->line,
                   reader->column, reason, behind);
}

/* Reads on behind the bytes held; those before `keep` are given up, and positions move down by
 * it. */
static bl_status fill(bl_row_reader *reader, size_t *keep)
{
    memmove(reader->buffer, reader->buffer + *keep, reader->n - *keep);
    reader->base_bytes += (int64_t)*keep;
    reader->n -= *keep;
    reader->at -= *keep;
    *keep = 0;
    if (reader->n > BL_MAX_ROW_BYTES)
        return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ": a row of more than %d bytes", reader->path,
                       reader->line, BL_MAX_ROW_BYTES);
    if (reader->capacity - reader->n < READ_BYTES) {
        size_t capacity = 2 * reader->capacity + 2 * READ_BYTES;
        char *grown = realloc(reader->buffer, capacity);
        if (!grown)
            return BL_FAIL(BL_ENOMEM, "%s: a row of more than %zu bytes", reader->path, reader->n);
        reader->buffer = grown;
        reader->capacity = capacity;
    }
    size_t n_read;
    BL_TRY(bl_source_read(reader->source, reader->buffer + reader->n, READ_BYTES, &n_read));
    XXH3_64bits_update(reader->hash, reader->buffer + reader->n, n_read);
    reader->n += n_read;
    reader->at_end = n_read == 0;
    return BL_OK;
}

/* The byte at reader->at, or -1 at the end; keeps the bytes from *keep on. */
bl_status bl_row_reader_peek(bl_row_reader *reader, size_t *keep, int *byte)
{
    while (reader->at == reader->n && !reader->at_end) BL_TRY(fill(reader, keep));
    *byte = reader->at < reader->n ? (unsigned char)reader->buffer[reader->at] : -1;
    return BL_OK;
}

void bl_row_reader_advance(bl_row_reader *reader, int byte)
{
    reader->at++;
    if (byte == '\n') {
        reader->line++;
        reader->column = 1;
    } else if ((byte & 0xc0) != 0x80) {
        reader->column++;
    }
}

static bl_status skip_blanks(bl_row_reader *reader, int *byte)
{
    for (;;) {
        size_t keep = reader->at;
        BL_TRY(bl_row_reader_peek(reader, &keep, byte));
        if (*byte != ' ' && *byte != '\t' && *byte != '\r' && *byte != '\n') return BL_OK;
        bl_row_reader_advance(reader, *byte);
    }
}

/* Behind a byte order mark, if the file is not of another kind. */
static bl_status begin_text(bl_row_reader *reader)
{
    size_t keep = 0, n;
    const char *text;

    while (reader->n < BL_FILE_KIND_BYTES && !reader->at_end) BL_TRY(fill(reader, &keep));
    text = reader->buffer;
    n = reader->n;
    BL_TRY(bl_text_skip_mark(reader->path, &text, &n));
    BL_TRY(bl_file_kind_refuse(reader->path, text, n, "JSON or JSON lines"));
    reader->at = (size_t)(text - reader->buffer);
    return BL_OK;
}

bl_status bl_row_reader_open(const char *path, bl_row_reader *reader)
{
    int byte;

    *reader = (bl_row_reader){.path = path, .line = 1, .column = 1};
    BL_TRY(bl_source_open(path, &reader->source));
    reader->capacity = 2 * READ_BYTES;
    reader->buffer = malloc(reader->capacity);
    reader->hash = XXH3_createState();
    if (!reader->buffer || !reader->hash) return BL_FAIL(BL_ENOMEM, "reading %s", path);
    XXH3_64bits_reset(reader->hash);
    BL_TRY(begin_text(reader));
    if ((reader->separator = bl_data_separator(path))) return bl_csv_begin(reader);
    BL_TRY(skip_blanks(reader, &byte));
    if (byte != '[') return BL_OK;
    reader->is_array = true;
    bl_row_reader_advance(reader, byte);
    BL_TRY(skip_blanks(reader, &byte));
    if (byte == ']') { /* only here: after a comma an element must follow */
        reader->array_ended = true;
        bl_row_reader_advance(reader, byte);
    }
    return BL_OK;
}

static void set_row(bl_row_reader *reader, size_t start, int64_t line, int64_t column, bl_row *row)
{
    *row = (bl_row){.text = reader->buffer + start,
                    .n_bytes = reader->at - start,
                    .offset_bytes = reader->base_bytes + (int64_t)start,
                    .line = line,
                    .column = column,
                    .element = reader->n_elements};
}

/* The rest of the line that reader->at, behind leading blanks, is in. */
static bl_status next_line(bl_row_reader *reader, bl_row *row)
{
    size_t start = reader->at;
    int64_t line = reader->line, column = reader->column;
    const char *newline;

    while (!(newline = memchr(reader->buffer + reader->at, '\n', reader->n - reader->at))) {
        reader->at = reader->n;
        if (reader->at_end) break;
        BL_TRY(fill(reader, &start));
    }
    if (newline) reader->at = (size_t)(newline - reader->buffer);
    set_row(reader, start, line, column, row);
    if (newline) bl_row_reader_advance(reader, '\n');
    return BL_OK;
}

/* The element that begins at reader->at: up to the brace that closes its first one. */
static bl_status next_element(bl_row_reader *reader, bl_row *row)
{
    size_t start = reader->at;
    int64_t line = reader->line, column = reader->column, depth = 0;
    bool in_string = false, escaped = false;
    int byte;

    do {
        BL_TRY(bl_row_reader_peek(reader, &start, &byte));
        if (byte < 0) return fail_at(reader, "the file ends inside an element of the array");
        if (escaped) {
            escaped = false;
        } else if (in_string) {
            escaped = byte == '\\';
            in_string = byte != '"';
        } else {
            in_string = byte == '"';
            depth += (byte == '{' || byte == '[') - (byte == '}' || byte == ']');
        }
        bl_row_reader_advance(reader, byte);
    } while (depth > 0);
    reader->n_elements++;
    set_row(reader, start, line, column, row);
    return BL_OK;
}

/* Reads the comma or bracket behind an element, so that the next call finds an element. The row
 * moves with the buffer. */
static bl_status end_element(bl_row_reader *reader, bl_row *row)
{
    int byte;

    for (;;) {
        size_t keep = (size_t)(row->offset_bytes - reader->base_bytes);
        BL_TRY(bl_row_reader_peek(reader, &keep, &byte));
        row->text = reader->buffer + (row->offset_bytes - reader->base_bytes);
        if (byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n') {
            bl_row_reader_advance(reader, byte);
            continue;
        }
        if (byte != ',' && byte != ']')
            return fail_at(reader, "expected ',' or ']' behind an element of the array");
        bl_row_reader_advance(reader, byte);
        reader->array_ended = byte == ']';
        return BL_OK;
    }
}

bl_status bl_row_reader_next(bl_row_reader *reader, bl_row *row)
{
    int byte;

    *row = (bl_row){0};
    if (reader->separator) return bl_csv_next(reader, row);
    BL_TRY(skip_blanks(reader, &byte));
    if (!reader->is_array) return byte < 0 ? BL_OK : next_line(reader, row);
    if (reader->array_ended)
        return byte < 0 ? BL_OK : fail_at(reader, "text behind the end of the array");
    if (byte != '{')
        return fail_at(reader, byte < 0 ? "the file ends inside the array"
                                        : "expected an object, as in [{...}, {...}]");
    BL_TRY(next_element(reader, row));
    return end_element(reader, row);
}

void bl_row_reader_close(bl_row_reader *reader)
{
    bl_source_close(reader->source);
    free(reader->buffer);
    XXH3_freeState(reader->hash);
    for (size_t i = 0; i < reader->n_columns; i++) free(reader->column_name[i]);
    free(reader->column_name);
    bl_bytes_free(&reader->record);
    *reader = (bl_row_reader){0};
}

bool bl_row_reader_is_direct(const bl_row_reader *reader)
{
    return bl_source_is_plain(reader->source) && !reader->separator;
}

uint64_t bl_row_hash(const bl_row *row)
{
    return XXH3_64bits(row->text, row->n_bytes);
}

bl_status bl_row_find_line(const char *path, int fd, int64_t offset_bytes, int64_t *line)
{
    char *block = malloc(READ_BYTES);
    bl_status st = block ? BL_OK : BL_FAIL(BL_ENOMEM, "reading %s", path);

    *line = 1;
    for (int64_t at = 0; at < offset_bytes && st == BL_OK; at += READ_BYTES) {
        int64_t n = offset_bytes - at < READ_BYTES ? offset_bytes - at : READ_BYTES;
        st = bl_file_read_full(fd, path, block, (size_t)n, at);
        for (int64_t i = 0; st == BL_OK && i < n; i++) *line += block[i] == '\n';
    }
    free(block);
    return st;
}
