/* SPDX-License-Identifier: Apache-2.0 */
/* pages_case.h -- pages in three tiers in a new directory, for the tests of pages and page
 * files. */
#ifndef BALLAST_TESTS_PAGES_CASE_H
#define BALLAST_TESTS_PAGES_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cmocka.h>

#include "offload/pages.h"

enum { N_PAGES = 7, PAGES_KEY = 0x1234, PAGES_MAX_BYTES = 9 << 20 };

extern const bl_page_spec pages_specs[N_PAGES];
extern bl_device *pages_device;
extern bl_staging *pages_staging; /* of that device */

/* Of a group of tests: the scratch folder and the device. */
int pages_set_up(void **state);
int pages_tear_down(void **state);

/* A path in the scratch folder; of 16 in turn. */
const char *pages_path_of(const char *name);
/* The folder of page files, "d", empty. */
const char *pages_new_dir(void);
/* The page file of PAGES_KEY in it, or its list: ".pages", ".json". */
const char *pages_in_dir(const char *ending);
size_t pages_count_files(const char *dir);
void pages_flip(const char *path, int64_t offset);
void pages_assert_error_has(const char *part);

/* A page's bytes: of its name, so that they are the same whatever the other pages are. The caller
 * frees them. */
uint8_t *pages_content(const bl_page_spec *spec);
/* As shard 1 of 4. */
bl_status pages_create_some(const char *dir, uint64_t key, int64_t n_pages,
                            const bl_page_spec *some, bl_pages **out);
/* Writes all pages that are wanted, in pieces, and (pages_fill) seals them. */
bl_status pages_fill_only(bl_pages *pages);
bl_status pages_fill(bl_pages *pages);
/* pages_specs, sealed; fails the test unless the disk had them as expected. */
bl_pages *pages_made_with(const char *dir, uint64_t key, bool expect_disk);
bl_pages *pages_made(const char *dir, bool expect_disk);
/* All bytes of all pages, through a reader and through bl_pages_read. */
void pages_assert_contents(const bl_pages *pages);
/* The same of pages that are made for it; nothing but their file and its list is in the folder
 * then. */
void pages_assert_made(const char *dir, bool expect_disk);
/* A child that makes the pages, after a call of `first` (NULL: none); its exit code is 0 if it
 * could. */
pid_t pages_fork_writer(const char *dir, void (*first)(void));

#endif
