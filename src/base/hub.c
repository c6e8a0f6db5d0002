/* SPDX-License-Identifier: Apache-2.0 */
/* hub.c -- tells missing files from a Hugging Face name such as owner/model, to suggest
 * a download. */
#include "base/hub.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "base/sizes.h"

enum { OWNER_MAX_BYTES = 96 }; /* the Hub's limit for owner and name together */

static bool is_absent(const char *path)
{
    struct stat info;
    return stat(path, &info) != 0 && errno == ENOENT;
}

/* Whether `path` is "owner/name" as the Hub allows it; owner[OWNER_MAX_BYTES + 1]. */
static bool is_hub_name(const char *path, char *owner)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    size_t n_owner = strspn(path, letters);
    const char *name = path + n_owner + 1;

    if (n_owner == 0 || n_owner > OWNER_MAX_BYTES || path[n_owner] != '/') return false;
    if (path[0] == '.' || name[0] == '.' || name[0] == '\0') return false;
    snprintf(owner, OWNER_MAX_BYTES + 1, "%.*s", (int)n_owner, path);
    return name[strspn(name, letters)] == '\0';
}

/* ---- the cache ---- */

/* As huggingface_hub's constants.py. *out NULL: no HOME. */
static bl_status find_cache(char **out)
{
    static const struct {
        const char *variable, *rest;
    } places[] = {{"HF_HUB_CACHE", ""},
                  {"HF_HOME", "/hub"},
                  {"XDG_CACHE_HOME", "/huggingface/hub"},
                  {"HOME", "/.cache/huggingface/hub"}};

    *out = NULL;
    for (size_t i = 0; i < BL_COUNT(places); i++) {
        const char *value = getenv(places[i].variable);
        if (value && *value) return bl_text_format(out, "%s%s", value, places[i].rest);
    }
    return BL_OK;
}

/* The commit that DIR/refs/main names; "": none. */
static bl_status read_commit(const char *dir, char commit[OWNER_MAX_BYTES + 1])
{
    char *path;
    BL_TRY(bl_text_format(&path, "%s/refs/main", dir));
    FILE *file = fopen(path, "re");
    size_t n = file ? fread(commit, 1, OWNER_MAX_BYTES, file) : 0;
    commit[n] = '\0';
    commit[strspn(commit, "0123456789abcdef")] = '\0';
    if (file) fclose(file);
    free(path);
    return BL_OK;
}

bl_status bl_hub_find_cached(const char *path, char **out)
{
    char owner[OWNER_MAX_BYTES + 1], commit[OWNER_MAX_BYTES + 1];
    char *cache = NULL, *dir = NULL;
    bool is_dir = false;
    bl_status st;

    *out = NULL;
    if (!is_hub_name(path, owner) || !is_absent(path)) return BL_OK;
    BL_TRY(find_cache(&cache));
    if (!cache) return BL_OK;
    BL_TRY_GOTO(st, done,
                bl_text_format(&dir, "%s/models--%s--%s", cache, owner, strchr(path, '/') + 1));
    BL_TRY_GOTO(st, done, read_commit(dir, commit));
    if (!*commit) goto done;
    BL_TRY_GOTO(st, done, bl_text_format(out, "%s/snapshots/%s", dir, commit));
    struct stat info;
    is_dir = stat(*out, &info) == 0 && S_ISDIR(info.st_mode);
done:
    if (!is_dir) {
        free(*out);
        *out = NULL;
    }
    free(cache);
    free(dir);
    return st;
}

/* ---- paths ---- */

bl_status bl_hub_check_path(const char *path)
{
    char owner[OWNER_MAX_BYTES + 1];

    if (!is_hub_name(path, owner) || !is_absent(path) || !is_absent(owner)) return BL_OK;
    const char *name = strrchr(path, '/') + 1;
    return BL_FAIL(BL_EINPUT,
                   "%s: no such directory; to download it from the Hugging Face Hub: hf download "
                   "%s --local-dir %s, then give %s",
                   path, path, name, name);
}

/* A data set's "owner/name" behind the addresses that browsers and fsspec use; NULL: none. */
static const char *find_dataset(const char *path)
{
    static const char *const prefixes[] = {"https://huggingface.co/datasets/",
                                           "https://hf.co/datasets/", "hf://datasets/"};

    for (size_t i = 0; i < BL_COUNT(prefixes); i++)
        if (!strncmp(path, prefixes[i], strlen(prefixes[i]))) return path + strlen(prefixes[i]);
    return NULL;
}

bl_status bl_hub_check_dataset(const char *path)
{
    char owner[OWNER_MAX_BYTES + 1];
    const char *id = find_dataset(path);
    bool is_missing = !id && is_hub_name(path, owner) && is_absent(path) && is_absent(owner);

    if (id || is_missing) {
        if (!id) id = path;
        size_t n_owner = strcspn(id, "/@"),
               n_name = id[n_owner] == '/' ? strcspn(id + n_owner + 1, "/@?#") : 0;
        const char *name = n_name ? id + n_owner + 1 : id;
        int n_id = (int)(n_owner + (n_name ? n_name + 1 : 0)),
            n_local = (int)(n_name ? n_name : n_owner);
        return BL_FAIL(
            BL_EINPUT,
            "%s: %s; to download a data set from the Hugging Face Hub: hf download %.*s "
            "--repo-type dataset --local-dir %.*s, then give a file or directory in %.*s",
            path, is_missing ? "no such file or directory" : "is not a local file", n_id, id,
            n_local, name, n_local, name);
    }
    if (!strstr(path, "://")) return BL_OK;
    return BL_FAIL(BL_EINPUT, "%s: is not a local file: download it, then give the file", path);
}

bl_status bl_hub_check_dir(const char *path)
{
    struct stat info;

    BL_TRY(bl_hub_check_path(path));
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return BL_OK;
    return BL_FAIL(BL_EINPUT, "%s: is a file; give the directory it is in", path);
}

bl_status bl_hub_check_json(const char *path, const char *name, bool *is_dir)
{
    static const char suffix[] = ".json";
    size_t n_bytes = strlen(path), n_suffix = sizeof suffix - 1;

    *is_dir = false;
    BL_TRY(bl_hub_check_path(path));
    BL_TRY(bl_path_is_dir(path, is_dir));
    bool is_json = n_bytes > n_suffix && strcmp(path + n_bytes - n_suffix, suffix) == 0;
    if (*is_dir || is_json) return BL_OK;
    return BL_FAIL(BL_EINPUT, "%s: is a file; give a model's directory or its %s", path, name);
}
