/* SPDX-License-Identifier: Apache-2.0 */
/* file_kind.h -- files given by mistake: compressed, in another format or encoding, or left by a
 * failed download. Recognized by their first bytes, so that the error names the kind and the
 * remedy. */
#ifndef BALLAST_BASE_FILE_KIND_H
#define BALLAST_BASE_FILE_KIND_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

enum { BL_FILE_KIND_BYTES = 512 }; /* that are looked at; a shorter file has fewer */

/* BL_EINPUT "path: is KIND, not EXPECTED: what to do" when the file that begins with
 * bytes[0..n_bytes) is of a kind that is known here. None of them begins as JSON does. `expected`:
 * "JSON", "a safetensors file". */
bl_status bl_file_kind_refuse(const char *path, const void *bytes, size_t n_bytes,
                              const char *expected);

/* Whether a file that is not JSON is likely a table of text: by the name .csv or .tsv, or by a
 * first line of column names, one of them a name that training data use. line[0..n_bytes) has no
 * newline. */
bool bl_file_kind_is_table(const char *path, const char *line, size_t n_bytes);

/* A file that the program writes in a place of the user's choice, the value of `key`: BL_EUSAGE
 * where another kind of file is, one that is not empty and whose first 4 KiB lack `mark`. What is
 * not there, or not a regular file, passes. */
bl_status bl_file_check_kind(const char *key, const char *path, const char *mark);

#endif
