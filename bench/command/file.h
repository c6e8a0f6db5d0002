/* SPDX-License-Identifier: Apache-2.0 */
/* file.h -- a file whose reading is measured. */
#ifndef BALLAST_BENCH_COMMAND_FILE_H
#define BALLAST_BENCH_COMMAND_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "io/reader.h"

typedef struct bl_bench_file {
    int fd;
    char *path; /* that any process of this user may open */
    int64_t n_bytes;
    uint64_t digest; /* of its bytes as pread delivers them */
    bool is_direct;  /* its file system has O_DIRECT */
} bl_bench_file;

/* Makes a file in the directory; its bytes are random, so that no file system or disk compresses
 * them. It has no name and disappears when it is closed, or the process ends. n_bytes: a multiple
 * of BL_IO_CHUNK_BYTES. BL_ELIMIT: not enough room. */
bl_status bl_bench_file_make(const char *dir, int64_t n_bytes, bl_bench_file *out);
/* Opens a file that is there. The caller closes `out`, also after a failure of either. */
bl_status bl_bench_file_open(const char *path, bl_bench_file *out);
void bl_bench_file_close(bl_bench_file *file);

/* Reads all of it in order, past the page cache, through a new reader. *seconds: from before the
 * reader is made to the last chunk; *engine: the one in use, "uring" or "pread". With `verify`, the
 * bytes are compared with the digest (BL_EINTERNAL), and the time means nothing. */
bl_status bl_bench_file_read(const bl_bench_file *file, const bl_reader_options *options,
                             bool verify, double *seconds, const char **engine);

/* Overwrites the whole file in order with other bytes, bypassing the page cache, through a new
 * reader, like pages that are written back: existing blocks, options->queue_depth requests of
 * chunk_bytes in flight (both must be set). *seconds: up to the end of fdatasync. Afterwards
 * file->digest does not match. */
bl_status bl_bench_file_write(const bl_bench_file *file, const bl_reader_options *options,
                              double *seconds, const char **engine);

/* Drops its pages from the page cache, for readers that would use them. */
void bl_bench_file_drop_cache(const bl_bench_file *file);

#endif
