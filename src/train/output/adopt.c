/* SPDX-License-Identifier: Apache-2.0 */
/* adopt.c -- an output_dir without a list of files (base/file_list.h): of an earlier version, or a
 * copy of parts of one. Decides from their content which files Ballast wrote; files that it does
 * not recognize are not Ballast's.
 *
 *   config.resolved.yaml                 begins with the comment that Ballast writes
 *   metrics.jsonl                        is empty, or begins with a step or an evaluation as
 *                                        Ballast logs them
 *   README.md                            says "Trained with Ballast: " where Ballast writes it
 *   report.svg                           is a picture as Ballast draws them
 *   ref_log_probs.bin                    begins with the mark of preference/reference.h
 *   adapter_model.safetensors,
 *   adapter_config.json                  next to such a README.md
 *   checkpoints/step-N, .tmp, .old.tmp   directories with no other files than a checkpoint has */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/sizes.h"
#include "base/svg.h"
#include "train/preference/reference.h"
#include "train/training_internal.h"

enum { HEAD_BYTES = 4096 };

/* The first bytes of a regular file, with a NUL after them; false: there is none that can be
 * read. */
static bool read_head(const char *path, char head[HEAD_BYTES])
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);

    if (fd < 0) return false;
    bool is_file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    ssize_t n = is_file ? pread(fd, head, HEAD_BYTES - 1, 0) : -1;
    close(fd);
    if (n < 0) return false;
    head[n] = '\0';
    return true;
}

static bool is_config(char *head)
{
    return strncmp(head, "# ", 2) == 0 &&
           strncmp(head + 2, BL_RESOLVED_COMMENT, strlen(BL_RESOLVED_COMMENT)) == 0;
}

static bool is_log(char *head)
{
    if (head[0] == '\0') return true;
    head[strcspn(head, "\n")] = '\0';
    return strncmp(head, "{\"step\":", 8) == 0 &&
           (strstr(head, "\"label_tokens\":") || strstr(head, "\"eval_label_tokens\":"));
}

static bool is_readme(char *head)
{
    return strncmp(head, "---\nbase_model: ", 16) == 0 && strstr(head, "\nTrained with Ballast: ");
}

static bool is_report(char *head)
{
    return strstr(head, BL_SVG_MARK) != NULL;
}

static bool is_reference(char *head)
{
    return strcmp(head, BL_REFERENCE_MARK) == 0;
}

static bool is_of_checkpoint(const char *name)
{
    static const char *const names[] = {"config.yaml", "manifest.json", BL_OUTPUT_ADAPTER,
                                        BL_OUTPUT_ADAPTER_CONFIG};

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        size_t n = strlen(names[i]);
        if (strncmp(name, names[i], n) == 0 && (!name[n] || strcmp(name + n, ".tmp") == 0))
            return true;
    }
    return strncmp(name, "state-", 6) == 0 && strstr(name, ".safetensors");
}

static bool is_checkpoint(const char *path)
{
    char **names;
    size_t n_names;
    struct stat info;
    bool is_one = true;

    if (lstat(path, &info) != 0 || !S_ISDIR(info.st_mode)) return false;
    if (bl_dir_list(path, &names, &n_names) != BL_OK) return false;
    for (size_t i = 0; i < n_names; i++) is_one = is_one && is_of_checkpoint(names[i]);
    bl_names_free(names, n_names);
    return is_one;
}

/* As step-N, when all that its names cover are checkpoints. */
static bl_status adopt_step(const char *dir, const char *name, bl_file_list *files)
{
    static const char *const endings[] = {"", ".tmp", ".old.tmp"};
    char *step;
    bool is_one = true;

    BL_TRY(bl_text_format(&step, "%s/%.*s", dir, (int)strcspn(name, "."), name));
    bl_status st = BL_OK;
    for (size_t i = 0; i < BL_COUNT(endings) && st == BL_OK; i++) {
        struct stat info;
        char *path;
        st = bl_text_format(&path, "%s%s", step, endings[i]);
        if (st == BL_OK && lstat(path, &info) == 0) is_one = is_one && is_checkpoint(path);
        free(path);
    }
    if (st == BL_OK && is_one) st = bl_file_list_adopt(files, step);
    free(step);
    return st;
}

static bl_status adopt_steps(const char *output_dir, bl_file_list *files)
{
    char *dir, **names;
    size_t n_names;
    bool is_dir = false;

    BL_TRY(bl_path_join(output_dir, BL_OUTPUT_CHECKPOINTS, &dir));
    bl_status st = bl_file_exists(dir) ? bl_path_is_dir(dir, &is_dir) : BL_OK;
    if (st == BL_OK && is_dir && (st = bl_dir_list(dir, &names, &n_names)) == BL_OK) {
        for (size_t i = 0; i < n_names && st == BL_OK; i++)
            if (strncmp(names[i], "step-", 5) == 0) st = adopt_step(dir, names[i], files);
        bl_names_free(names, n_names);
    }
    free(dir);
    return st;
}

/* is_one NULL: the content of the file is not checked. */
static bl_status adopt_if(const char *dir, const char *name, bool (*is_one)(char *head),
                          bl_file_list *files, bool *adopted)
{
    char head[HEAD_BYTES], *path;

    BL_TRY(bl_path_join(dir, name, &path));
    *adopted = !is_one || (read_head(path, head) && is_one(head));
    bl_status st = *adopted ? bl_file_list_adopt(files, path) : BL_OK;
    free(path);
    return st;
}

bl_status bl_output_adopt(const char *dir, bl_file_list *files)
{
    bool adopted, has_readme;

    BL_TRY(adopt_if(dir, BL_OUTPUT_CONFIG, is_config, files, &adopted));
    BL_TRY(adopt_if(dir, BL_OUTPUT_METRICS, is_log, files, &adopted));
    BL_TRY(adopt_if(dir, BL_OUTPUT_README, is_readme, files, &has_readme));
    BL_TRY(adopt_if(dir, BL_OUTPUT_REPORT, is_report, files, &adopted));
    BL_TRY(adopt_if(dir, BL_OUTPUT_REFERENCE, is_reference, files, &adopted));
    if (has_readme) {
        BL_TRY(adopt_if(dir, BL_OUTPUT_ADAPTER, NULL, files, &adopted));
        BL_TRY(adopt_if(dir, BL_OUTPUT_ADAPTER_CONFIG, NULL, files, &adopted));
    }
    return adopt_steps(dir, files);
}
