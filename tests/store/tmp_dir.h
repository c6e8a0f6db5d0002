/* SPDX-License-Identifier: Apache-2.0 */
/* tmp_dir.h -- a scratch folder for one test program, and hand-made files in it. Errors end the
 * test. */
#ifndef BALLAST_TESTS_STORE_TMP_DIR_H
#define BALLAST_TESTS_STORE_TMP_DIR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>

/* cmocka group fixtures: make and remove the folder. */
int tmp_dir_create(void **state);
int tmp_dir_remove(void **state);

/* "FOLDER/name"; valid until 64 further calls. */
const char *tmp_path(const char *name);
/* An empty folder of that name (what was there is removed). */
const char *tmp_subdir(const char *name);

/* Writes FOLDER/name. */
void put_bytes(const char *name, const void *bytes, size_t n_bytes);
void put_text(const char *name, const char *text);

/* A safetensors file: u64 length, the JSON header as given, n_data bytes 0, 1, 2, ... */
void put_safetensors(const char *name, const char *header, size_t n_data);

/* Fails the test unless bl_error_text() contains `part` and is one line. */
void assert_error_has(const char *part);

#endif
