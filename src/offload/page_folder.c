/* SPDX-License-Identifier: Apache-2.0 */
/* page_folder.c -- sums the page files of other keys in a directory, for a hint about disk
 * space. */
#include "offload/page_folder.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"

/* "base-0123456789abcdef-0-of-8.pages", and the same with ".tmp-PID-N" behind it. */
static bool is_page_file(const char *name, uint64_t *key)
{
    int n_read = 0, shard, n_shards;

    return sscanf(name, "base-%16" SCNx64 "-%d-of-%d.pages%n", key, &shard, &n_shards, &n_read) ==
               3 &&
           n_read > 0 && (name[n_read] == '\0' || strncmp(name + n_read, ".tmp-", 5) == 0);
}

bl_status bl_page_folder_others(const char *dir, uint64_t key, int64_t *n_files, int64_t *n_bytes)
{
    enum { BLOCK_BYTES = 512 }; /* of st_blocks */
    bl_status st = BL_OK;
    char **names = NULL;
    size_t n_names = 0;

    *n_files = *n_bytes = 0;
    BL_TRY(bl_dir_list(dir, &names, &n_names));
    for (size_t i = 0; i < n_names && st == BL_OK; i++) {
        uint64_t found;
        struct stat info;
        char *path = NULL;
        if (!is_page_file(names[i], &found) || found == key) continue;
        st = bl_path_join(dir, names[i], &path);
        if (st == BL_OK && lstat(path, &info) == 0) { /* another process may have removed it */
            ++*n_files;
            *n_bytes += (int64_t)info.st_blocks * BLOCK_BYTES;
        }
        free(path);
    }
    bl_names_free(names, n_names);
    return st;
}
