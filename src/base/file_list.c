/* SPDX-License-Identifier: Apache-2.0 */
/* file_list.c -- reads and rewrites .ballast-files; a damaged list names nothing, so that nothing
 * is deleted by mistake. */
#include "base/file_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "base/sizes.h"

static const char LIST_NAME[] = ".ballast-files";
static const char HEADER[] =
    "# Files that Ballast wrote here. It replaces and deletes only these.\n";

enum { MAX_LIST_BYTES = 16 << 20 };

struct bl_file_list {
    char *prefix; /* of the paths: the directory and "/" */
    char *path;   /* of the list */
    char **paths;
    char *reserved; /* a path that is kept without its file; NULL: none */
    size_t n, capacity;
    bool was_there;
};

static int compare_paths(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool is_there(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

bool bl_file_list_has(const bl_file_list *list, const char *path)
{
    return list->n > 0 &&
           bsearch(&path, list->paths, list->n, sizeof *list->paths, compare_paths) != NULL;
}

bool bl_file_list_was_there(const bl_file_list *list)
{
    return list->was_there;
}

bl_status bl_file_list_adopt(bl_file_list *list, const char *path)
{
    char *copy;

    if (strncmp(path, list->prefix, strlen(list->prefix)) != 0 || strchr(path, '\n'))
        return BL_FAIL(BL_EINTERNAL, "%s: is not listed in %s", path, list->path);
    if (bl_file_list_has(list, path)) return BL_OK;
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 16;
        char **grown = reallocarray(list->paths, capacity, sizeof *grown);
        if (!grown) return BL_FAIL(BL_ENOMEM, "%s: a list of %zu names", list->path, capacity);
        list->paths = grown;
        list->capacity = capacity;
    }
    BL_TRY(bl_text_format(&copy, "%s", path));
    list->paths[list->n++] = copy;
    qsort(list->paths, list->n, sizeof *list->paths, compare_paths);
    return BL_OK;
}

/* ---- reading ---- */

/* Names that leave the directory are not a program's own: they end the reading of a damaged
 * list. */
static bool is_name(const char *name)
{
    return name[0] != '\0' && name[0] != '/' && !strstr(name, "..");
}

static bl_status parse(bl_file_list *list, char *text, size_t n_bytes)
{
    size_t header = sizeof HEADER - 1;

    if (n_bytes < header || memcmp(text, HEADER, header) != 0 || strlen(text) != n_bytes)
        return BL_FAIL(BL_EUSAGE, "%s: is not a list of files that Ballast wrote: move it away",
                       list->path);
    for (char *line = text + header, *end; *line; line = end) {
        char *path;
        end = line + strcspn(line, "\n");
        if (*end) *end++ = '\0';
        if (!is_name(line))
            return BL_FAIL(BL_EUSAGE, "%s: \"%.64s\" is not a file name: move the list away",
                           list->path, line);
        BL_TRY(bl_path_join(list->prefix, line, &path));
        bl_status st = bl_file_list_adopt(list, path);
        free(path);
        BL_TRY(st);
    }
    return BL_OK;
}

static bl_status read_list(bl_file_list *list)
{
    void *text;
    size_t n_bytes;

    list->was_there = is_there(list->path);
    if (!list->was_there) return BL_OK;
    bl_status st = bl_file_read_all(list->path, MAX_LIST_BYTES, &text, &n_bytes);
    if (st != BL_OK) return st == BL_EINPUT ? bl_error_prefix(BL_EUSAGE, "output_dir") : st;
    st = parse(list, text, n_bytes);
    free(text);
    return st;
}

bl_status bl_file_list_open(const char *dir, bl_file_list **out)
{
    bl_file_list *list = calloc(1, sizeof *list);

    *out = NULL;
    if (!list) return BL_FAIL(BL_ENOMEM, "%s: the list of its files", dir);
    bl_status st = bl_path_join(dir, "", &list->prefix);
    if (st == BL_OK) st = bl_path_join(dir, LIST_NAME, &list->path);
    if (st == BL_OK) st = read_list(list);
    if (st == BL_OK)
        *out = list;
    else
        bl_file_list_close(list);
    return st;
}

void bl_file_list_close(bl_file_list *list)
{
    if (!list) return;
    bl_names_free(list->paths, list->n);
    free(list->prefix);
    free(list->path);
    free(list->reserved);
    free(list);
}

/* ---- writing ---- */

/* The path, or a name that it covers, that is there; *found is the caller's, NULL: none. */
static bl_status find_covered(const char *path, char **found)
{
    static const char *const endings[] = {"", ".tmp", ".old.tmp"};

    *found = NULL;
    for (size_t i = 0; i < BL_COUNT(endings); i++) {
        BL_TRY(bl_text_format(found, "%s%s", path, endings[i]));
        if (is_there(*found)) return BL_OK;
        free(*found);
        *found = NULL;
    }
    return BL_OK;
}

bl_status bl_file_list_check(const bl_file_list *list, const char *path)
{
    char *found;

    if (bl_file_list_has(list, path)) return BL_OK;
    BL_TRY(find_covered(path, &found));
    if (!found) return BL_OK;
    bl_status st = BL_FAIL(BL_EUSAGE,
                           "%s: exists, and no run in this directory wrote it (%s): move it away "
                           "or use another directory",
                           found, list->was_there ? "not in .ballast-files" : "no .ballast-files");
    free(found);
    return st;
}

static bool is_reserved(const bl_file_list *list, const char *path)
{
    return list->reserved && strcmp(list->reserved, path) == 0;
}

/* Drops names without files. */
static bl_status drop_absent(bl_file_list *list)
{
    size_t n = 0;

    for (size_t i = 0; i < list->n; i++) {
        char *found;
        BL_TRY(find_covered(list->paths[i], &found));
        char *path = list->paths[i];
        list->paths[i] = NULL;
        if (found || is_reserved(list, path))
            list->paths[n++] = path;
        else
            free(path);
        free(found);
    }
    list->n = n;
    return BL_OK;
}

static bl_status write_list(const bl_file_list *list)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);

    if (!out) return BL_FAIL(BL_ENOMEM, "%s: writing it", list->path);
    fputs(HEADER, out);
    size_t prefix = strlen(list->prefix);
    for (size_t i = 0; i < list->n; i++) fprintf(out, "%s\n", list->paths[i] + prefix);
    bl_status st = fclose(out) == 0 ? bl_file_write_atomic(list->path, text, n_bytes)
                                    : BL_FAIL(BL_ENOMEM, "%s: writing it", list->path);
    free(text);
    return st;
}

bl_status bl_file_list_add(bl_file_list *list, const char *const *paths, size_t n_paths)
{
    for (size_t i = 0; i < n_paths; i++) BL_TRY(bl_file_list_check(list, paths[i]));
    BL_TRY(drop_absent(list));
    for (size_t i = 0; i < n_paths; i++) BL_TRY(bl_file_list_adopt(list, paths[i]));
    return write_list(list);
}

bl_status bl_file_list_reserve(bl_file_list *list, const char *path)
{
    free(list->reserved);
    list->reserved = NULL;
    return bl_text_format(&list->reserved, "%s", path);
}
