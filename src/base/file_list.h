/* SPDX-License-Identifier: Apache-2.0 */
/* file_list.h -- which files of a directory a program wrote: it replaces and deletes only those.
 *
 *   DIR/.ballast-files   a line that describes the file, then one name per line, relative to DIR
 *
 * A name is listed durably before its file appears. A crash therefore leaves listed names without
 * files, and never an unlisted file. A name NAME covers NAME.tmp and NAME.old.tmp, the names of
 * incomplete files. Names without files, except a reserved one, are dropped when the list is
 * written again.
 *
 * Paths are those of bl_path_join with DIR as given to bl_file_list_open; other paths are never
 * listed. The caller holds DIR's lock (files.h); one thread per list. */
#ifndef BALLAST_BASE_FILE_LIST_H
#define BALLAST_BASE_FILE_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct bl_file_list bl_file_list;

/* BL_EUSAGE: DIR/.ballast-files is something else, and stays as it is. */
bl_status bl_file_list_open(const char *dir, bl_file_list **out);
void bl_file_list_close(bl_file_list *list); /* NULL is fine; writes nothing */

/* Whether DIR had a list when it was opened. */
bool bl_file_list_was_there(const bl_file_list *list);
bool bl_file_list_has(const bl_file_list *list, const char *path);

/* BL_EUSAGE when the path is not listed, and it, or a name that it covers, is there, be it a
 * dangling link. */
bl_status bl_file_list_check(const bl_file_list *list, const char *path);
/* Checks the paths, lists them and writes the list; it is on stable storage when this returns. */
bl_status bl_file_list_add(bl_file_list *list, const char *const *paths, size_t n_paths);
/* Of a file that another thread may write at any time: from the next add on, which has this path,
 * the name stays listed until the list is closed, whether the file is there or not. One path per
 * list. */
bl_status bl_file_list_reserve(bl_file_list *list, const char *path);
/* Lists a file that is there, unchecked: the caller knows that this program wrote it. Written by
 * the next add. */
bl_status bl_file_list_adopt(bl_file_list *list, const char *path);

#endif
