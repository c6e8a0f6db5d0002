/* SPDX-License-Identifier: Apache-2.0 */
/* pages.h -- the frozen bytes of one rank, in tiers: a page is one shard of one part of a matrix
 * and is in device memory, in the arena, or in a page file. Pages are written once, while the model
 * is loaded, each with its XXH3-64; after that they are only read.
 *
 *   state     entered by                              allowed
 *   FILLING   create                                  write, memory
 *   SEALED    seal                                    memory, check, verify, file
 *
 * The page file of a rank is in `dir`: NAME.pages holds the disk pages one after the other, each
 * aligned to BL_IO_ALIGN_BYTES, and a last block with the checksum of the list; NAME.json, written
 * last and renamed into place, lists them with offset, size, checksum and tag. NAME comes from
 * `key`, shard and n_shards. A file that fits its list and has all pages that are needed is used
 * again: its pages are not written. Any that are missing: all are written anew. Without its .json a
 * .pages file means nothing, so a crash while writing costs only the work. */
#ifndef BALLAST_OFFLOAD_PAGES_H
#define BALLAST_OFFLOAD_PAGES_H

#include "device/staging.h"
#include "io/reader.h"
#include "offload/tier.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_page_spec {
    const char *name; /* unique; copied: "layer 3 qkv", "scales" */
    size_t n_bytes;
    bl_tier tier;
} bl_page_spec;

typedef struct bl_pages_options {
    bl_device *device;
    bool pin;        /* the arena of the host tier */
    int node;        /* NUMA node of the arena, -1: the calling thread's */
    const char *dir; /* of page files; must exist. NULL when no page is on disk */
    uint64_t key;    /* of the contents: another model, format or layout has another key */
    int shard, n_shards;
    /* how many of them this host writes at a time: they share memory for that. 0: one */
    int n_on_host;
    /* The owner rewrites the disk pages after seal (bl_pages_files). Their file is not shared with
     * other runs and has no name once it is sealed; no checksums are compared. */
    bool is_rewritten;
    bool is_blank; /* with is_rewritten: no page is written before seal */
} bl_pages_options;

/* Memory for writing a page file, besides the pages, until they are sealed: of one of n_on_host. */
size_t bl_pages_writing_bytes(int n_on_host);

typedef struct bl_pages bl_pages;

/* Takes all memory and opens or begins the page file. BL_ENOMEM; BL_ELIMIT names dir, the bytes
 * needed and those free; BL_EIO, also when dir is not there or not a directory. */
BL_API bl_status bl_pages_create(const bl_pages_options *options, int64_t n_pages,
                                 const bl_page_spec *specs, bl_pages **out);
BL_API void bl_pages_destroy(bl_pages *pages); /* removes an unsealed page file; NULL is fine */

/* The option. */
bool bl_pages_is_rewritten(const bl_pages *pages);
/* Whether the disk pages were found complete: write of a disk page is then an error. */
BL_API bool bl_pages_has_disk(const bl_pages *pages);

/* Bytes [offset, offset + n_bytes) of a page, given in order from 0 on, no other page's in between;
 * the memory of `bytes` is the host's. For a page in memory that the host can write itself (host
 * tier, bl_device_host_writes), bytes may be bl_pages_memory + offset: nothing is copied then.
 * Another order is BL_EINTERNAL. After a failure the page file is gone. */
BL_API bl_status bl_pages_write(bl_pages *pages, int64_t page, size_t offset, const void *bytes,
                                size_t n_bytes);
/* A number that the caller stores with each page, 0 at first: of the page's source, for example. It
 * is set before seal, and kept in the list of the page file, where a later run finds it with the
 * page. */
void bl_pages_set_tag(bl_pages *pages, int64_t page, uint64_t tag);
uint64_t bl_pages_tag(const bl_pages *pages, int64_t page);
/* All pages are written: makes the page file durable, opens it for readers. BL_EUSAGE: meanwhile a
 * run with other tiers wrote the same file. */
BL_API bl_status bl_pages_seal(bl_pages *pages);

/* Of creation; borrowed until destroy. And how many there are. */
BL_API const bl_page_spec *bl_pages_spec(const bl_pages *pages, int64_t page);
BL_API int64_t bl_pages_count(const bl_pages *pages);
/* NULL: on disk. Device memory for BL_TIER_DEVICE, else host memory. */
BL_API void *bl_pages_memory(const bl_pages *pages, int64_t page);
/* What the pages of a tier take, each rounded up to BL_DEVICE_ALIGNMENT_BYTES, which is
 * BL_IO_ALIGN_BYTES. */
size_t bl_pages_tier_bytes(const bl_pages *pages, bl_tier tier);

/* For readers: the files (one, or none: NULL) and a disk page's place in file 0; a page's stored
 * bytes are n_bytes. */
bl_io_files *bl_pages_files(const bl_pages *pages);
int64_t bl_pages_offset(const bl_pages *pages, int64_t page);

/* Compares bytes (host memory, the page's n_bytes) with the page's checksum. BL_EINPUT: "FILE: page
 * NAME at OFFSET: checksum ...", or "memory of page NAME: ...". */
bl_status bl_pages_check(const bl_pages *pages, int64_t page, const void *bytes);
/* The same for a page in memory, that of the device through `staging`, with nothing queued that
 * writes it; BL_OK for others. */
bl_status bl_pages_verify_memory(const bl_pages *pages, int64_t page, bl_staging *staging);
/* After a disk page was found damaged twice: removes the list, so that the next run rewrites the
 * file. */
void bl_pages_distrust_disk(bl_pages *pages);
/* Reads a whole disk page through `staging` into memory of either space and checks it; also before
 * seal when has_disk. For small pages (scales). After a failure dst holds anything. */
bl_status bl_pages_read(const bl_pages *pages, int64_t page, bl_staging *staging, void *dst);

#ifdef __cplusplus
}
#endif

#endif
