/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a fuzz target over files and folders of inputs, without libFuzzer: the corpora as a
 * regression test of any build. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "fuzz.h"

static int run_file(const char *path)
{
    void *bytes = NULL;
    size_t n_bytes = 0;

    if (bl_file_read_all(path, (size_t)1 << 30, &bytes, &n_bytes) != BL_OK) {
        fprintf(stderr, "%s\n", bl_error_text());
        return 1;
    }
    /* A block of exactly the input's size, so that a read past its end is seen. */
    uint8_t *exact = malloc(n_bytes ? n_bytes : 1);
    if (!exact) return 1;
    memcpy(exact, bytes, n_bytes);
    free(bytes);
    printf("%s\n", path);
    fflush(stdout);
    LLVMFuzzerTestOneInput(exact, n_bytes);
    free(exact);
    return 0;
}

static int run_folder(const char *folder)
{
    char **names = NULL, *path = NULL;
    size_t n_names = 0;
    int failed = bl_dir_list(folder, &names, &n_names) != BL_OK || n_names == 0;

    for (size_t i = 0; i < n_names && !failed; i++) {
        failed = bl_path_join(folder, names[i], &path) != BL_OK || run_file(path);
        free(path);
    }
    bl_names_free(names, n_names);
    if (failed) fprintf(stderr, "%s: cannot be read, or is empty\n", folder);
    return failed;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        struct stat info;
        bool is_folder = stat(argv[i], &info) == 0 && S_ISDIR(info.st_mode);
        if (is_folder ? run_folder(argv[i]) : run_file(argv[i])) return 1;
    }
    return argc < 2;
}
