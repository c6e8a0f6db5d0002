/* SPDX-License-Identifier: Apache-2.0 */
/* pager.h -- loads pages into device memory just before they are needed: the source that feeds a
 * gather ring.
 *
 * A unit (a decoder layer, the head) is a list of items, each one page on this rank; with a
 * communicator every rank holds a shard and acquire gives the all-gathered whole (gather_ring.h has
 * the states of slots). Pages of the device tier are lent in a group of one and copied into the
 * slot otherwise; host pages are copied on the copy stream; disk pages are read by a reader with a
 * deep queue straight into the slot where the host can write it (bl_device_host_writes), else into
 * a pinned staging buffer and copied from there.
 *
 *   page state  entered by                     left by
 *   UNSEEN      create; bl_pager_verify        its first arrival from disk: checked against its
 *                                              checksum
 *   TRUSTED     a checksum that agrees         bl_pager_verify; with verify_always every arrival is
 *                                              checked
 *   A mismatch is read once more; a second one is BL_EINPUT, names the page and its file, and has
 *   the file written anew by the next run.
 *
 * Where reads pass through the staging buffer, a separate host stream waits for the disk: callbacks
 * of a GPU's streams never block. Copy, gather and compute are ordered by events only. Nothing is
 * allocated after create. Errors of reads surface at the next acquire, or where the compute stream
 * is synchronized, with tensor, file, offset and errno. destroy may be called at any moment once
 * the streams have been synchronized or have failed: it waits for reads in flight and drops those
 * not yet submitted. */
#ifndef BALLAST_OFFLOAD_PAGER_H
#define BALLAST_OFFLOAD_PAGER_H

#include "offload/gather_ring.h"
#include "offload/pages.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For tests and benches: injected faults, pacing and modes. All may be NULL. */
typedef struct bl_pager_hooks {
    bl_io_hook io; /* of the reader: short reads, errors, delays; runs on its threads */
    void *io_user;
    /* Called on the copy stream after each page has arrived: may sleep, to pace a tier. */
    void (*pace)(void *user, bl_tier tier, int64_t page, size_t n_bytes);
    void *pace_user;
    bool is_synchronous; /* no overlap: gather_ring.h */
    bool bounces;        /* disk pages pass through the staging buffer, as on CUDA */
} bl_pager_hooks;

typedef struct bl_pager_unit {
    int n_items;
    bool whole_ring; /* as in offload/gather_ring.h, as is the next */
    bool is_sub;
    const char *what; /* for errors: {"layer", 17}, as in offload/gather_ring.h */
    int64_t index;
    int64_t page[BL_GATHER_ITEMS]; /* of each item; the pager decides its place in a slot */
} bl_pager_unit;

typedef struct bl_pager_options {
    bl_device *device;
    bl_comm *comm;            /* the shard group; NULL: a group of one */
    bl_stream *copy, *gather; /* borrowed; different streams */
    int ring_depth;           /* slots of units, and of sub-units, >= 1 */
    bl_io_engine io_engine;
    /* requests in flight; 0: BL_IO_QUEUE_DEPTH. Ranks that share a disk divide it among
     * themselves */
    int queue_depth;
    bool verify_always;          /* check disk and host pages at each load */
    bl_timeline *timeline;       /* borrowed; may be NULL */
    const bl_pager_hooks *hooks; /* copied; NULL: none */
} bl_pager_options;

typedef struct bl_pager bl_pager;

/* pages must be sealed and is borrowed until destroy; units are copied. */
BL_API bl_status bl_pager_create(const bl_pager_options *options, bl_pages *pages, int64_t n_units,
                                 const bl_pager_unit *units, bl_pager **out);
BL_API void bl_pager_destroy(bl_pager *pager); /* NULL is fine */

/* The ring that the pager feeds: units are prefetched, acquired and released there. Until
 * destroy. */
BL_API bl_gather_ring *bl_pager_ring(const bl_pager *pager);

/* What create takes, for plans: device memory of the ring; host memory of the staging buffer (not
 * where the host can write device memory itself) and of the reader's buffers, for a queue_depth as
 * in the options. specs[] describes the pages that units name. SIZE_MAX: more than can be
 * counted. */
size_t bl_pager_ring_bytes(const bl_page_spec *specs, int group_size, int ring_depth,
                           int64_t n_units, const bl_pager_unit *units);
size_t bl_pager_host_bytes(const bl_page_spec *specs, bool bounces, int queue_depth,
                           int64_t n_units, const bl_pager_unit *units);

/* Checks all pages against their checksums: host memory in place, device memory through a staging
 * buffer, disk pages by reading them through a buffer of the largest one's size. With the streams
 * idle. BL_EINPUT names the first damaged page. */
BL_API bl_status bl_pager_verify(bl_pager *pager);
/* Checks the invariants of ring and pages; BL_EINTERNAL names the broken one. */
bl_status bl_pager_validate(const bl_pager *pager);

#ifdef __cplusplus
}
#endif

#endif
