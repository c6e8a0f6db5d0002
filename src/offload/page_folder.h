/* SPDX-License-Identifier: Apache-2.0 */
/* page_folder.h -- what lies in a folder of page files beside those of one key. Nothing removes
 * them: another run may be about to use them. */
#ifndef BALLAST_OFFLOAD_PAGE_FOLDER_H
#define BALLAST_OFFLOAD_PAGE_FOLDER_H

#include <stdint.h>

#include "base/status.h"

/* The page files of other keys, finished or not, and what they take on the disk. Fails as
 * bl_dir_list does. */
bl_status bl_page_folder_others(const char *dir, uint64_t key, int64_t *n_files, int64_t *n_bytes);

#endif
