/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz.c -- cuts one fuzz input into the files of a directory, and checks that readers fail with a
 * text. */
#include "fuzz.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"

enum { PATH_BYTES = 256 };

static const char SEPARATOR[] = "\n%%\n";

static char folder[PATH_BYTES];

static _Noreturn void give_up(const char *what)
{
    fprintf(stderr, "fuzz: %s: %s\n", what, strerror(errno));
    abort();
}

static void remove_folder(void)
{
    bl_tree_remove(folder);
}

const char *fuzz_folder(void)
{
    if (folder[0]) return folder;
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/ballast-fuzz-XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(folder)) give_up(folder);
    atexit(remove_folder);
    return folder;
}

fuzz_part fuzz_next(fuzz_input *input)
{
    const size_t width = sizeof SEPARATOR - 1;
    fuzz_part part = {input->is_over ? NULL : input->bytes, input->n_bytes};

    if (!part.bytes) return (fuzz_part){0};
    const uint8_t *border = memmem(part.bytes, part.n_bytes, SEPARATOR, width);
    if (border) {
        part.n_bytes = (size_t)(border - part.bytes);
        input->bytes = border + width;
        input->n_bytes -= part.n_bytes + width;
    } else {
        input->is_over = true;
    }
    return part;
}

uint8_t fuzz_byte(fuzz_input *input)
{
    if (input->n_bytes == 0) return 0;
    input->n_bytes--;
    return *input->bytes++;
}

const char *fuzz_path(const char *name)
{
    static char path[PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    return path;
}

static FILE *create(const char *name)
{
    FILE *file = fopen(fuzz_path(name), "wb");
    if (!file) give_up(name);
    return file;
}

static void append(FILE *file, const void *bytes, size_t n_bytes)
{
    if (n_bytes > 0 && fwrite(bytes, 1, n_bytes, file) != n_bytes) give_up("writing");
}

void fuzz_write(const char *name, fuzz_part part)
{
    FILE *file = create(name);

    append(file, part.bytes, part.n_bytes);
    if (fclose(file) != 0) give_up(name);
    if (!part.bytes && unlink(fuzz_path(name)) != 0) give_up(name);
}

/* The largest end of data_offsets, that is digits between a comma and a bracket, within reason. */
static size_t promised_bytes(fuzz_part header)
{
    enum { MAX_DATA_BYTES = 1 << 20 };
    size_t most = 0;

    for (size_t i = 0; i < header.n_bytes; i++) {
        size_t value = 0, at = i + 1;
        if (header.bytes[i] != ',') continue;
        for (; at < header.n_bytes && header.bytes[at] >= '0' && header.bytes[at] <= '9' &&
               value < MAX_DATA_BYTES;
             at++)
            value = 10 * value + (size_t)(header.bytes[at] - '0');
        if (at < header.n_bytes && header.bytes[at] == ']' && value > most &&
            value <= MAX_DATA_BYTES)
            most = value;
    }
    return most;
}

void fuzz_write_safetensors(const char *name, fuzz_part header, fuzz_part data)
{
    size_t n_bytes = promised_bytes(header);
    uint8_t length[8];
    FILE *file = create(name);

    for (size_t i = 0; i < sizeof length; i++)
        length[i] = (uint8_t)((uint64_t)header.n_bytes >> 8 * i);
    append(file, length, sizeof length);
    append(file, header.bytes, header.n_bytes);
    if (data.n_bytes == 0) data = (fuzz_part){(const uint8_t *)"\0", 1};
    while (n_bytes > 0) {
        size_t n = n_bytes < data.n_bytes ? n_bytes : data.n_bytes;
        append(file, data.bytes, n);
        n_bytes -= n;
    }
    if (fclose(file) != 0) give_up(name);
}

void fuzz_check(bl_status st)
{
    if (st == BL_OK) return;
    if (getenv("FUZZ_SHOW")) fprintf(stderr, "%s: %s\n", bl_status_name(st), bl_error_text());
    bool is_known = st == BL_EUSAGE || st == BL_EINPUT || st == BL_ECHECKPOINT || st == BL_ELIMIT ||
                    st == BL_ENOMEM;
    if (is_known && bl_error_text()[0]) return;
    fprintf(stderr, "fuzz: status %s: %s\n", bl_status_name(st), bl_error_text());
    abort();
}
