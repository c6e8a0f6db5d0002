/* SPDX-License-Identifier: Apache-2.0 */
/* page_file_internal.h -- the page file of a rank, NAME.pages with its list NAME.json: found whole,
 * or written anew.
 *
 *   state     entered by                  on disk                               after a crash
 *   WRITING   open, when none was whole   NAME.pages.tmp-PID-N, under a flock   removed by the next
 *                                                                               open
 *   READING   open; publish               NAME.pages and NAME.json, renamed     used if list and
 *                                                                               seal agree
 *
 * Between the two renames a new NAME.pages has an old list or none: its seal does not fit, so it
 * is incomplete. Processes that write the same name at once write separate files; the last rename
 * wins, and the seal shows each that it reads its own file. Writes bypass the page cache (O_DIRECT)
 * where the file system allows it. */
#ifndef BALLAST_OFFLOAD_PAGE_FILE_INTERNAL_H
#define BALLAST_OFFLOAD_PAGE_FILE_INTERNAL_H

#include <stdbool.h>

#include "io/reader.h"
#include "offload/page_list_internal.h"

typedef struct bl_page_file bl_page_file;

/* Names and sizes of `places` are given; offsets are filled in, and checksums when *is_whole: the
 * file and all pages were found. Otherwise the file is to be written, as one of n_writers of this
 * host (offload/page_writer_internal.h), and its space is taken. BL_EIO: dir is not a directory, or
 * cannot be read. BL_ELIMIT: dir, the bytes needed and those free. */
bl_status bl_page_file_open(const char *dir, const bl_page_owner *owner, int n_writers,
                            size_t n_places, bl_page_place *places, bool *is_whole,
                            bl_page_file **out);
/* A file that only this process reads and rewrites: no complete file is looked for, and take
 * replaces publish. Until then it is incomplete, like other files. Errors as of open. */
bl_status bl_page_file_create(const char *dir, const bl_page_owner *owner, int n_writers,
                              size_t n_places, bl_page_place *places, bl_page_file **out);
/* Waits for all writes, opens the file for readers and writers, and removes its name. */
bl_status bl_page_file_take(bl_page_file *file);
void bl_page_file_close(bl_page_file *file); /* removes what was not published; NULL is fine */

/* Writes one page after the other, in any order: begin, all its bytes, end; `name` is borrowed
 * until the file is published or closed. The bytes are on their way when these return
 * (page_writer_internal.h), and a failure, which names its page, may be that of an earlier one. It
 * removes the file. */
bl_status bl_page_file_begin(bl_page_file *file, const char *name, int64_t offset_bytes);
bl_status bl_page_file_append(bl_page_file *file, const void *bytes, size_t n_bytes);
bl_status bl_page_file_end(bl_page_file *file);
/* Waits for all writes, makes file and list durable, gives them their names and opens the file for
 * readers. */
bl_status bl_page_file_publish(bl_page_file *file, size_t n_places, const bl_page_place *places);

bl_io_files *bl_page_file_files(const bl_page_file *file); /* of one; NULL until it is complete */
const char *bl_page_file_path(const bl_page_file *file);
bl_status bl_page_file_read(const bl_page_file *file, int64_t offset_bytes, void *dst,
                            size_t n_bytes);
void bl_page_file_distrust(bl_page_file *file); /* removes the list */

#endif
