/* SPDX-License-Identifier: Apache-2.0 */
/* paged_case.h -- a rank with pages in tiers, a pager over them, and what each page must hold. */
#ifndef BALLAST_TESTS_OFFLOAD_PAGED_CASE_H
#define BALLAST_TESTS_OFFLOAD_PAGED_CASE_H

#include <stdatomic.h>

#include "offload/pager.h"
#include "test_ranks.h"

enum { CASE_UNITS = 5, CASE_WHOLE = CASE_UNITS - 1, CASE_PAGES = 17, CASE_RANKS = 4 };

typedef enum case_tiers { CASE_ALL_DEVICE, CASE_ALL_HOST, CASE_ALL_DISK, CASE_MIXED } case_tiers;

typedef struct case_options {
    case_tiers tiers;
    bl_io_engine engine;
    int ring_depth;
    bool verify_always;
    bl_pager_hooks hooks;
    const char *dir;
} case_options;

typedef struct paged_case {
    test_rank *self;
    case_options options;
    bl_stream *copies, *gathers;
    bl_timeline *timeline;
    bl_pages *pages;
    bl_pager *pager;
    bl_page_spec specs[CASE_PAGES];
    bl_pager_unit units[CASE_UNITS];
    /* Host memory that device memory is copied to when the host cannot read it; else NULL. */
    unsigned char *seen;
    /* Of all bytes that were looked at; of the rank's stream until that is synchronized. */
    uint64_t sum;
} paged_case;

/* Before any rank runs. */
void case_make_contents(void);
void case_free_contents(void);
const unsigned char *case_contents(int rank, int page); /* the contents of a rank's page */
size_t case_page_bytes(int page);

/* Pages filled and sealed, and a pager over them; the group is self's ranks. */
bl_status case_open(test_rank *self, const case_options *options, paged_case *c);
/* Also after a failure: ends with all streams at rest and everything freed. */
void case_close(paged_case *c);
bl_status case_create_pager(paged_case *c); /* a part of case_open */

/* Acquires an item and queues a look at each byte of it, after a pause. */
bl_status case_use(paged_case *c, int64_t unit, int item, unsigned pause_us);
/* All of a unit: prefetched, acquired, looked at, released. */
bl_status case_visit(paged_case *c, int64_t unit);

void case_make_dir(char dir[32]);
void case_remove_dir(const char *dir);
/* The first file of dir whose name ends in `suffix`. False: there is none. */
bool case_find_file(const char *dir, const char *suffix, char path[512]);
/* Turns the bits of one byte of a file around. */
void case_flip_byte(const char *path, int64_t offset);

#endif
