/* SPDX-License-Identifier: Apache-2.0 */
/* base_load.h -- one rank's shard of a base, from rows of its weights into pages. The caller that
 * has the rows gives them job by job: model/load_base.c from a checkpoint's files, layer_load.c
 * from a caller's memory.
 *
 *   bl_base_create_pages    the pages of a layout, and one for scales where any page is on disk
 *   bl_base_load_create     jobs: the rows of each segment in this rank's shard, in the order of
 *                           pages
 *   bl_base_load_run        each job's codes into its page, its scales to the device */
#ifndef BALLAST_LINEAR_BASE_LOAD_H
#define BALLAST_LINEAR_BASE_LOAD_H

#include "fp8/fp8.h"
#include "linear/base.h"
#include "offload/pages.h"

enum { BL_PAGE_NAME_BYTES = 96 };

/* The name of the page of the current part of `at`. */
typedef void (*bl_page_name_fn)(void *user, const bl_base_walk *at, char name[BL_PAGE_NAME_BYTES]);

bool bl_base_has_disk(const bl_base_layout *layout, const bl_tier *tiers);

/* The parts of the layout are the first pages, tiers[bl_base_part_count(layout)] theirs, of scales
 * their codes'; " scales" is added to the names of theirs. A page file also has the rank's n_scales
 * scales of formats with BL_SCALES_WHOLE, which stay in device memory, for the next run. Errors:
 * those of bl_pages_create. */
bl_status bl_base_create_pages(const bl_base_layout *layout, const bl_tier *tiers, int64_t n_scales,
                               const bl_pages_options *options, bl_page_name_fn name, void *user,
                               bl_pages **out);

/* Rows [begin, end) of a segment, whole groups of it, to be kept in its format. */
typedef struct bl_base_job {
    int64_t unit;
    int matrix, segment;
    bl_format format;
    int64_t cols, begin, end;
    void *codes;         /* host memory */
    void *scales;        /* of the whole segment, host memory; those of the rows are set */
    bool largest_scales; /* of packed formats: not least_squares (fp8/packed.h) */
} bl_base_job;

typedef struct bl_base_load_options {
    bl_device *device;
    /* Segments' whole scales are device memory, which the load fills. */
    const bl_base_layout *layout;
    bl_pages *pages; /* of bl_base_create_pages */
    int shard;
    /* Jobs for memory that the host cannot write, and for disks, go through a buffer of this size
     * at most, but at least 128 rows. */
    size_t staging_bytes;
    bl_staging *staging; /* for scales */
} bl_base_load_options;

typedef struct bl_base_load bl_base_load;

/* All is borrowed until destroy. Pages that were found on disk have no jobs. BL_ENOMEM. */
bl_status bl_base_load_create(const bl_base_load_options *options, bl_base_load **out);
void bl_base_load_destroy(bl_base_load *load); /* NULL is fine */

/* In the order in which run asks for them. */
const bl_base_job *bl_base_load_jobs(const bl_base_load *load, size_t *n_jobs);

/* Sets a job's codes and scales. *checksum, 0 at first: of its rows; the sum over a page's jobs is
 * its tag. */
typedef bl_status (*bl_base_rows_fn)(void *user, size_t idx_job, uint64_t *checksum);

/* Fills all pages except those found on disk, rows beyond the last with zeros, and n_scales whole
 * scales at `scales` (device memory, zero before). Seals the pages. */
bl_status bl_base_load_run(bl_base_load *load, bl_base_rows_fn rows, void *user, float *scales,
                           int64_t n_scales);

/* Rows [row, stop) of a weight in `dtype`, whole groups of the job's format. */
typedef struct bl_base_rows {
    bl_dtype dtype;
    const void *bytes;
    int64_t row, stop;
} bl_base_rows;

/* The next rows of a job, which ends at `end`: at most `most`, rounded down to groups, at least
 * one. */
bl_base_rows bl_base_rows_at(bl_format format, int64_t row, int64_t end, int64_t most);

/* Codes and scales of rows, into those of a job whose format has scales. BL_EINPUT names the first
 * row and column that is not finite. */
bl_status bl_base_quantize(bl_pool *pool, const bl_base_job *job, const bl_base_rows *rows);

#endif
