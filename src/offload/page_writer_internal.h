/* SPDX-License-Identifier: Apache-2.0 */
/* page_writer_internal.h -- writes the bytes of a page file in blocks, several of them in flight at
 * a time, by threads of the writer, while the caller makes the bytes of the next.
 *
 *   block     entered by                                left by
 *   FREE      create; a thread that has written it      append
 *   FILLING   append: one at a time                     append, when it is full; end
 *   QUEUED    the same                                  a thread, in the order of the blocks
 *   WRITING   a thread                                  that thread
 *
 * Invariants, under the lock: n_taken <= n_queued <= n_taken + n_blocks; blocks [n_taken, n_queued)
 * are QUEUED, and those of them and of the ones before that are not written yet are busy. After a
 * failure nothing is written that was QUEUED; the error is that of the first block, in their order,
 * that failed. */
#ifndef BALLAST_OFFLOAD_PAGE_WRITER_INTERNAL_H
#define BALLAST_OFFLOAD_PAGE_WRITER_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bl_page_writer bl_page_writer;

/* What the buffers of one of the n_writers of a host take at most: 32 MiB in all while they are
 * few, two blocks of 4 MiB each when they are many. */
size_t bl_page_writer_bytes(int n_writers);

/* fd and path are borrowed. Writes bypass the page cache (O_DIRECT), unless the file system does
 * not support it. Blocks are not larger than the largest page, of largest_bytes: a page begins a
 * block, and the memory of each block that is touched is cleared, a huge page at a time. Takes at
 * most bl_page_writer_bytes, as they are used. BL_ENOMEM, BL_ELIMIT. */
bl_status bl_page_writer_create(int fd, const char *path, int n_writers, size_t largest_bytes,
                                bl_page_writer **out);
/* Waits for writes in flight and drops the others; NULL is fine. */
void bl_page_writer_destroy(bl_page_writer *writer);

/* The bytes of one page at `offset_bytes`, a multiple of BL_IO_ALIGN_BYTES: begin, all of them,
 * end, which fills the last block of BL_IO_ALIGN_BYTES with zeros. They are copied. `name` is
 * borrowed until destroy, for messages; NULL: no page's. append and end may return the failure of
 * an earlier page; from then on all do: BL_EIO, BL_ELIMIT (the disk is full). */
void bl_page_writer_begin(bl_page_writer *writer, const char *name, int64_t offset_bytes);
bl_status bl_page_writer_append(bl_page_writer *writer, const void *bytes, size_t n_bytes);
bl_status bl_page_writer_end(bl_page_writer *writer);
/* Returns when all is written, if not yet on stable storage. */
bl_status bl_page_writer_wait(bl_page_writer *writer);

#endif
