/* SPDX-License-Identifier: Apache-2.0 */
/* reader.h -- reading byte ranges of files with a deep queue: many requests in the kernel at a
 * time, bypassing the page cache (O_DIRECT), through io_uring or, where that is denied, a pool of
 * threads that call pread. Whole blocks of files that are open for writing are written through the
 * same queue.
 *
 * Two forms, one at a time on a reader:
 *   reads   bl_reader_submit or bl_reader_submit_write ... bl_reader_wait: any number of ranges,
 *           each into or from memory of the caller
 *   stream  bl_reader_stream ... bl_reader_next: ranges in order, chunk by chunk, through the
 *           reader's buffers; the queue stays full while the caller uses one chunk
 *
 * The engine never changes the bytes read. Ranges may begin and end anywhere: where
 * O_DIRECT needs aligned requests, the aligned superset is read. A file system without O_DIRECT is
 * read through the page cache. Short reads and EINTR are retried. Errors name file, offset and
 * errno; a file that ends early is BL_EIO.
 *
 * All memory is the host's. One thread at a time uses a reader; the completion hook runs on the
 * reader's threads. */
#ifndef BALLAST_IO_READER_H
#define BALLAST_IO_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* AUTO is io_uring where the kernel grants it, pread elsewhere. URING where it is refused is pread,
 * too. */
typedef enum bl_io_engine { BL_IO_AUTO, BL_IO_URING, BL_IO_PREAD } bl_io_engine;

enum {
    BL_IO_QUEUE_DEPTH = 32,
    BL_IO_CHUNK_BYTES = 4 << 20,
    BL_IO_ALIGN_BYTES = 4096, /* of offsets, lengths and memory of an O_DIRECT request */
};

/* ---- files ---- */

/* Open files, named by their index; read-only unless adopted. Any number of readers on any threads
 * may share them. */
typedef struct bl_io_files bl_io_files;

/* Opens regular files (errors of bl_file_open). `direct`: with O_DIRECT where the file system has
 * it. */
bl_status bl_io_files_open(const char *const *paths, int n_files, bool direct, bl_io_files **out);
/* One file that is open for reading and writing. Takes fd: it is closed with the files, and after a
 * failure. The file may have no name; messages call it `path`. BL_ENOMEM, BL_EIO. */
bl_status bl_io_files_adopt(const char *path, int fd, bool direct, bl_io_files **out);
/* How files are read is warned of once; with this, once for both. `other` must outlive `files`;
 * before readers of `files` are made. */
void bl_io_files_warn_with(bl_io_files *files, bl_io_files *other);
/* Descriptor of file `index`, to check its identity: borrowed. */
int bl_io_files_descriptor(const bl_io_files *files, int index);
void bl_io_files_close(bl_io_files *files); /* NULL is fine; after the readers that borrow them */

/* ---- the reader ---- */

/* One completed attempt to read or write: n_bytes were requested at offset_bytes; `result` is
 * bytes, or -errno. */
typedef struct bl_io_completion {
    const char *path;
    int64_t offset_bytes;
    size_t n_bytes;
    int64_t result;
    bool is_write;
} bl_io_completion;

/* Returns the result that the reader uses instead of completion->result: the same, fewer bytes, or
 * -errno. It may sleep, which slows the reader: the io_uring engine calls it from one thread, the
 * pread engine from several. */
typedef int64_t (*bl_io_hook)(void *arg, const bl_io_completion *completion);

typedef struct bl_reader_options {
    bl_io_engine engine;
    int queue_depth;    /* requests in the kernel; 0: BL_IO_QUEUE_DEPTH */
    size_t chunk_bytes; /* of a request, a multiple of BL_IO_ALIGN_BYTES; 0: BL_IO_CHUNK_BYTES */
    /* Memory that reads will go to, registered with the kernel beside the reader's own
     * buffers. */
    void *memory;
    size_t memory_bytes; /* NULL, 0: none. Borrowed as long as the reader lives */
    bl_io_hook hook;     /* NULL: none */
    void *hook_arg;
} bl_reader_options;

typedef struct bl_reader bl_reader;

/* `files` is borrowed as long as the reader lives. Owns queue_depth buffers of chunk_bytes and a
 * little. The first of the readers of `files` warns when io_uring or the registration of memory is
 * refused. BL_ENOMEM, BL_ELIMIT. */
bl_status bl_reader_create(const bl_reader_options *options, bl_io_files *files, bl_reader **out);
/* Waits for the requests that are in the kernel and drops those that are not; NULL is fine. */
void bl_reader_destroy(bl_reader *reader);

/* The engine in use: "uring" or "pread". */
const char *bl_reader_engine_name(const bl_reader *reader);

typedef struct bl_reader_stats {
    int64_t n_bytes; /* delivered */
    int64_t n_requests;
    double wait_s; /* that bl_reader_wait and bl_reader_next slept */
} bl_reader_stats;
/* Since creation. */
void bl_reader_get_stats(bl_reader *reader, bl_reader_stats *out);

/* ---- reads into memory of the caller's ---- */

/* The first four fields are the caller's; the struct and dst are borrowed until bl_reader_wait
 * returns. */
typedef struct bl_io_read {
    int file;
    int64_t offset_bytes;
    size_t n_bytes;
    void *dst;
    struct {
        size_t issued_bytes;
        int n_flying;
        bool is_write;
        bl_error error;
        struct bl_io_read *next;
    } internal;
} bl_io_read;

/* Queues a read and returns. BL_EINTERNAL while a stream is open. */
bl_status bl_reader_submit(bl_reader *reader, bl_io_read *read);
/* Queues a write of dst's bytes to an adopted file and returns. BL_EINTERNAL: offset, size or
 * memory is not a multiple of BL_IO_ALIGN_BYTES. Concurrent reads and writes of the same bytes have
 * no order. */
bl_status bl_reader_submit_write(bl_reader *reader, bl_io_read *write);
/* Waits for a read or write and returns its status. A read fills dst; after a failure its contents
 * are undefined. After a write the bytes are in the file, but may not be on stable storage. A full
 * disk is BL_ELIMIT. */
bl_status bl_reader_wait(bl_reader *reader, bl_io_read *read);

/* ---- ranges in order ---- */

/* Bytes [offset, offset + size) of a file. */
typedef struct bl_io_range {
    int file;
    int64_t offset_bytes;
    int64_t n_bytes;
} bl_io_range;

typedef struct bl_io_chunk {
    const void *bytes; /* NULL: the stream has ended; any alignment */
    size_t n_bytes;
    size_t range;         /* index of the range it belongs to */
    int64_t offset_bytes; /* inside the range */
} bl_io_chunk;

/* Begins to read the ranges, which are borrowed until bl_reader_stream_end. A range of at most
 * chunk_bytes arrives as one chunk; an empty one does not arrive. BL_EINTERNAL while another stream
 * or a read is under way. */
bl_status bl_reader_stream(bl_reader *reader, const bl_io_range *ranges, size_t n_ranges);
/* The next chunk; the one before is handed back. A failure ends the stream. */
bl_status bl_reader_next(bl_reader *reader, bl_io_chunk *out);
/* Ends the stream wherever it is. Without an open stream it does nothing. */
void bl_reader_stream_end(bl_reader *reader);

#ifdef __cplusplus
}
#endif

#endif
