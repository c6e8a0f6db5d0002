/* SPDX-License-Identifier: Apache-2.0 */
/* page_list.c -- the list of a page file as JSON: its own checksum, owner, and of each page offset,
 * size, checksum and tag. */
#include "offload/page_list_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "io/reader.h"

enum { MAX_LIST_BYTES = 64 << 20, HASH_TEXT_BYTES = 17 };

static const char LIST_FORMAT[] = "ballast-pages-2";

/* ---- checksums as text: 16 hexadecimal digits ---- */

static void hash_text(uint64_t hash, char text[HASH_TEXT_BYTES])
{
    snprintf(text, HASH_TEXT_BYTES, "%016" PRIx64, hash);
}

static bl_status get_hash(const char *file, const json_t *object, const char *key, uint64_t *out)
{
    const char *text = NULL;
    char canonical[HASH_TEXT_BYTES];

    BL_TRY(bl_json_get_string(file, object, key, BL_JSON_REQUIRED, &text));
    *out = strtoull(text, NULL, 16);
    hash_text(*out, canonical);
    if (strcmp(text, canonical) != 0)
        return bl_json_fail(file, key, "16 hexadecimal digits", json_object_get(object, key));
    return BL_OK;
}

/* The same for all texts of the same list: key order and spacing do not matter. */
static bl_status hash_list(const json_t *root, uint64_t *out)
{
    char *dump = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS);

    if (!dump) return BL_FAIL(BL_ENOMEM, "a list of pages");
    *out = XXH3_64bits(dump, strlen(dump));
    free(dump);
    return BL_OK;
}

/* ---- names ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const bl_page_place *)a)->name, ((const bl_page_place *)b)->name);
}

static int compare_offsets(const void *a, const void *b)
{
    int64_t x = ((const bl_page_place *)a)->offset_bytes,
            y = ((const bl_page_place *)b)->offset_bytes;
    return (x > y) - (x < y);
}

/* Sorts by name; a name that two share, or NULL. */
static const char *find_double(size_t n_places, bl_page_place *places)
{
    if (n_places > 0) qsort(places, n_places, sizeof *places, compare_names);
    for (size_t i = 1; i < n_places; i++)
        if (!strcmp(places[i - 1].name, places[i].name)) return places[i].name;
    return NULL;
}

bl_status bl_page_names_check(size_t n_places, const bl_page_place *places)
{
    bl_page_place *sorted = calloc(n_places ? n_places : 1, sizeof *sorted);

    if (!sorted) return BL_FAIL(BL_ENOMEM, "%zu pages", n_places);
    if (n_places > 0) memcpy(sorted, places, n_places * sizeof *sorted);
    const char *name = find_double(n_places, sorted);
    free(sorted);
    return name ? BL_FAIL(BL_EINTERNAL, "two pages of the name %s", name) : BL_OK;
}

/* ---- writing ---- */

bl_status bl_page_list_write(const bl_page_owner *owner, int64_t file_bytes, size_t n_places,
                             const bl_page_place *places, char **text, uint64_t *xxh3_64)
{
    bl_status st = BL_OK;
    char hash[HASH_TEXT_BYTES], tag[HASH_TEXT_BYTES];
    json_t *root = NULL;

    *text = NULL;
    bl_json_watch_memory();
    json_t *list = json_array();
    for (size_t i = 0; list && i < n_places; i++) {
        const bl_page_place *place = &places[i];
        hash_text(place->xxh3_64, hash);
        hash_text(place->tag, tag);
        json_t *entry = json_pack("{s:s, s:I, s:I, s:s, s:s}", "name", place->name, "offset",
                                  (json_int_t)place->offset_bytes, "bytes",
                                  (json_int_t)place->n_bytes, "xxh3_64", hash, "tag", tag);
        if (json_array_append_new(list, entry) == 0) continue;
        st = bl_json_ran_out() ? BL_FAIL(BL_ENOMEM, "a list of pages")
                               : BL_FAIL(BL_EINTERNAL, "page %zu: a name that is no UTF-8", i);
        goto done;
    }
    hash_text(owner->key, hash);
    root = json_pack("{s:s, s:s, s:i, s:i, s:I, s:O}", "format", LIST_FORMAT, "key", hash, "shard",
                     owner->shard, "n_shards", owner->n_shards, "file_bytes",
                     (json_int_t)file_bytes, "pages", list);
    if (root) BL_TRY_GOTO(st, done, hash_list(root, xxh3_64));
    *text = root ? json_dumps(root, JSON_INDENT(1)) : NULL;
    if (!*text || bl_json_ran_out()) {
        free(*text);
        *text = NULL;
        st = BL_FAIL(BL_ENOMEM, "a list of pages");
    }
done:
    json_decref(root);
    json_decref(list);
    return st;
}

/* ---- reading ---- */

static bl_status check_owner(const char *path, const json_t *root, const bl_page_owner *owner)
{
    const char *format = NULL;
    uint64_t key = 0;
    int64_t number;

    BL_TRY(bl_json_check_object(path, root));
    BL_TRY(bl_json_get_string(path, root, "format", BL_JSON_REQUIRED, &format));
    if (strcmp(format, LIST_FORMAT) != 0)
        return bl_json_fail(path, "format", LIST_FORMAT, json_object_get(root, "format"));
    BL_TRY(get_hash(path, root, "key", &key));
    if (key != owner->key)
        return BL_FAIL(BL_EINPUT, "%s: key key: of another model, format or layout", path);
    BL_TRY(bl_json_get_int(path, root, "shard", BL_JSON_REQUIRED, owner->shard, owner->shard,
                           &number));
    return bl_json_get_int(path, root, "n_shards", BL_JSON_REQUIRED, owner->n_shards,
                           owner->n_shards, &number);
}

/* A page must end before the seal. */
static bl_status read_entry(const char *path, const json_t *entry, int64_t file_bytes,
                            bl_page_place *out)
{
    int64_t offset = 0, n_bytes = 0;
    const int64_t end = file_bytes - BL_IO_ALIGN_BYTES;

    BL_TRY(bl_json_check_object(path, entry));
    BL_TRY(bl_json_get_string(path, entry, "name", BL_JSON_REQUIRED, &out->name));
    BL_TRY(bl_json_get_int(path, entry, "offset", BL_JSON_REQUIRED, 0, end, &offset));
    BL_TRY(bl_json_get_int(path, entry, "bytes", BL_JSON_REQUIRED, 0, end - offset, &n_bytes));
    BL_TRY(get_hash(path, entry, "xxh3_64", &out->xxh3_64));
    BL_TRY(get_hash(path, entry, "tag", &out->tag));
    if (offset % BL_IO_ALIGN_BYTES != 0)
        return bl_json_fail(path, "offset", "a multiple of 4096", json_object_get(entry, "offset"));
    out->offset_bytes = offset;
    out->n_bytes = (size_t)n_bytes;
    return BL_OK;
}

/* Afterwards they are sorted by name. */
static bl_status check_together(const char *path, size_t n_found, bl_page_place *found)
{
    if (n_found > 0) qsort(found, n_found, sizeof *found, compare_offsets);
    for (size_t i = 1; i < n_found; i++)
        if (found[i].offset_bytes - found[i - 1].offset_bytes < (int64_t)found[i - 1].n_bytes)
            return BL_FAIL(BL_EINPUT, "%s: page %.200s overlaps page %.200s", path, found[i].name,
                           found[i - 1].name);
    const char *name = find_double(n_found, found);
    return name ? BL_FAIL(BL_EINPUT, "%s: two pages of the name %.200s", path, name) : BL_OK;
}

static bl_status pick_places(const char *path, size_t n_found, const bl_page_place *found,
                             size_t n_places, bl_page_place *places)
{
    for (size_t i = 0; i < n_places; i++) {
        const bl_page_place *at =
            n_found ? bsearch(&places[i], found, n_found, sizeof *found, compare_names) : NULL;
        if (!at) return BL_FAIL(BL_EINPUT, "%s: has no page %s", path, places[i].name);
        if (at->n_bytes != places[i].n_bytes)
            return BL_FAIL(BL_EINPUT, "%s: page %s has %zu bytes, %zu are needed", path, at->name,
                           at->n_bytes, places[i].n_bytes);
        places[i].offset_bytes = at->offset_bytes;
        places[i].xxh3_64 = at->xxh3_64;
        places[i].tag = at->tag;
    }
    return BL_OK;
}

bl_status bl_page_list_read(const char *path, const bl_page_owner *owner, size_t n_places,
                            bl_page_place *places, int64_t *file_bytes, uint64_t *xxh3_64)
{
    bl_status st = BL_OK;
    bl_page_place *found = NULL;
    const json_t *list = NULL;
    json_t *root = NULL;

    BL_TRY_GOTO(st, done, bl_json_load(path, MAX_LIST_BYTES, &root));
    BL_TRY_GOTO(st, done, check_owner(path, root, owner));
    BL_TRY_GOTO(st, done,
                bl_json_get_int(path, root, "file_bytes", BL_JSON_REQUIRED, BL_IO_ALIGN_BYTES,
                                INT64_MAX, file_bytes));
    BL_TRY_GOTO(st, done, bl_json_get_array(path, root, "pages", BL_JSON_REQUIRED, &list));
    size_t n_found = json_array_size(list);
    if (!(found = calloc(n_found ? n_found : 1, sizeof *found))) {
        st = BL_FAIL(BL_ENOMEM, "%s: %zu pages", path, n_found);
        goto done;
    }
    for (size_t i = 0; i < n_found; i++)
        BL_TRY_GOTO(st, done, read_entry(path, json_array_get(list, i), *file_bytes, &found[i]));
    BL_TRY_GOTO(st, done, check_together(path, n_found, found));
    BL_TRY_GOTO(st, done, pick_places(path, n_found, found, n_places, places));
    BL_TRY_GOTO(st, done, hash_list(root, xxh3_64));
done:
    free(found);
    json_decref(root);
    return st;
}
