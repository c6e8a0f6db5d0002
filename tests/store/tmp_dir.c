/* SPDX-License-Identifier: Apache-2.0 */
/* tmp_dir.c -- a scratch directory, and hand-made safetensors files in it. */
#include "tmp_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"

static char folder[] = "/tmp/ballast-test-XXXXXX";

int tmp_dir_create(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

int tmp_dir_remove(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

const char *tmp_path(const char *name)
{
    static char paths[64][512];
    static unsigned next;
    char *path = paths[next++ % 64];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

const char *tmp_subdir(const char *name)
{
    const char *path = tmp_path(name);
    assert_int_equal(bl_tree_remove(path), BL_OK);
    assert_int_equal(bl_dir_create(path), BL_OK);
    return path;
}

void put_bytes(const char *name, const void *bytes, size_t n_bytes)
{
    FILE *file = fopen(tmp_path(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

void put_text(const char *name, const char *text)
{
    put_bytes(name, text, strlen(text));
}

void put_safetensors(const char *name, const char *header, size_t n_data)
{
    size_t n_header = strlen(header);
    unsigned char *bytes = malloc(8 + n_header + n_data);

    assert_non_null(bytes);
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(n_header >> (8 * i));
    memcpy(bytes + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++) bytes[8 + n_header + i] = (unsigned char)i;
    put_bytes(name, bytes, 8 + n_header + n_data);
    free(bytes);
}

void assert_error_has(const char *part)
{
    const char *text = bl_error_text();
    if (!strstr(text, part)) fail_msg("error \"%s\" lacks \"%s\"", text, part);
    if (strchr(text, '\n')) fail_msg("error of several lines: \"%s\"", text);
}
