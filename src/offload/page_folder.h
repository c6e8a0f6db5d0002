/* SPDX-License-Identifier: Apache-2.0 */
/* page_folder.h -- the page files in a directory that belong to other keys. Nothing removes them:
 * another run may be about to use them. */
#ifndef BALLAST_OFFLOAD_PAGE_FOLDER_H
#define BALLAST_OFFLOAD_PAGE_FOLDER_H

#include <stdint.h>

#include "base/status.h"

/* The page files of other keys, complete or not, and the disk space that they use. Fails as
 * bl_dir_list does. */
bl_status bl_page_folder_others(const char *dir, uint64_t key, int64_t *n_files, int64_t *n_bytes);

#endif
