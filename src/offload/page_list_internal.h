/* SPDX-License-Identifier: Apache-2.0 */
/* page_list_internal.h -- the list of a page file: a JSON document with the place and checksum of
 * each page.
 *
 *   {"format": "ballast-pages-2", "key": "0123456789abcdef", "shard": 0, "n_shards": 8,
 *   "file_bytes": 12288,
 *    "pages": [{"name": "layer 3 qkv", "offset": 0, "bytes": 5000, "xxh3_64": "0123456789abcdef",
 *    "tag": "0123456789abcdef"}]}
 *
 * Offsets are multiples of BL_IO_ALIGN_BYTES, pages do not overlap, names are unique. The last
 * BL_IO_ALIGN_BYTES of the page file are its seal: the XXH3-64 of the list. A list that was
 * damaged, or that belongs to another file of the same name, does not fit it. */
#ifndef BALLAST_OFFLOAD_PAGE_LIST_INTERNAL_H
#define BALLAST_OFFLOAD_PAGE_LIST_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bl_page_owner {
    uint64_t key; /* of the contents */
    int shard, n_shards;
} bl_page_owner;

typedef struct bl_page_place {
    const char *name; /* borrowed */
    size_t n_bytes;
    int64_t offset_bytes;
    uint64_t xxh3_64; /* of the page's bytes */
    uint64_t tag;     /* the writer's: offload/pages.h */
} bl_page_place;

/* The text of a list (the caller frees it) and its checksum. BL_ENOMEM; BL_EINTERNAL for a name
 * that is not UTF-8. */
bl_status bl_page_list_write(const bl_page_owner *owner, int64_t file_bytes, size_t n_places,
                             const bl_page_place *places, char **text, uint64_t *xxh3_64);

/* Reads a list that may hold anything. Of `places`, name and n_bytes are the request; the others
 * are filled in. BL_EINPUT says why the list cannot be used: damaged, of another owner, or without
 * one of the pages. */
bl_status bl_page_list_read(const char *path, const bl_page_owner *owner, size_t n_places,
                            bl_page_place *places, int64_t *file_bytes, uint64_t *xxh3_64);

/* BL_EINTERNAL names the first that two places share. */
bl_status bl_page_names_check(size_t n_places, const bl_page_place *places);

#endif
