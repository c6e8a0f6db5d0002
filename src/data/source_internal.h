/* SPDX-License-Identifier: Apache-2.0 */
/* source_internal.h -- the bytes of a data file, decompressed: a regular file, or stdin for "-";
 * gzip and Zstandard by their first bytes, any number of members or frames. */
#ifndef BALLAST_DATA_SOURCE_INTERNAL_H
#define BALLAST_DATA_SOURCE_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct bl_source bl_source;

/* `path` is borrowed until close. Errors: as bl_file_open; BL_ENOMEM. */
bl_status bl_source_open(const char *path, bl_source **out);
void bl_source_close(bl_source *source); /* NULL is fine */

/* Whether its bytes are those of the file: rows can be read again at their offsets. */
bool bl_source_is_plain(const bl_source *source);

/* At most n_bytes (> 0) into dst; *n_read 0: the end. BL_EINPUT: damaged or incomplete compressed
 * data; BL_EIO; BL_ENOMEM. */
bl_status bl_source_read(bl_source *source, char *dst, size_t n_bytes, size_t *n_read);

#endif
