/* SPDX-License-Identifier: Apache-2.0 */
/* reader_internal.h -- the interface between reader.c, which chooses the requests, and the engines,
 * which read.
 *
 * A piece is one request: a slot of the reader with its buffer. Its life:
 *
 *   state    | by                    | next
 *   FREE     | bl_reader_take        | FLYING: an engine owns it and attempts bytes [at, end)
 *   FLYING   | bl_reader_finish      | FLYING again (true: attempt the rest), READY (of a stream),
 *                                    FREE (of a read)
 *   READY    | bl_reader_next, _end  | FREE, once its chunk has been handed back
 *
 * Invariants, under the lock: n_free + n_flying + READY pieces = queue_depth; a piece of a stream
 * is READY or FLYING from its place in `order` on; a read is done when all its bytes were issued
 * (or it failed) and none of its pieces flies. */
#ifndef BALLAST_IO_READER_INTERNAL_H
#define BALLAST_IO_READER_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "io/reader.h"

typedef struct bl_io_file {
    char *path;
    int fd;
    atomic_bool is_direct;
} bl_io_file;

struct bl_io_files {
    atomic_bool has_warned; /* of how these files are read */
    atomic_bool *warned;    /* that one, or other files' */
    int n_files;
    bl_io_file file[];
};

typedef struct bl_io_piece {
    int slot; /* its index, and that of its buffer */
    char *buffer;
    bool is_ready, is_write;
    bl_io_read *read; /* NULL: of the stream */
    size_t range;     /* of the stream */
    int64_t range_offset;
    int file;
    int64_t begin, end;           /* requested bytes of the file; they include the needed ones */
    int64_t need_begin, need_end; /* of the file */
    int64_t at;                   /* [begin, at) have been read */
    char *memory;                 /* where byte `begin` goes */
    int n_stalls;                 /* attempts in a row that moved nothing */
    bl_error error;
} bl_io_piece;

typedef struct bl_io_engine_api {
    const char *name;
    /* Starts the engine's threads; a failure leaves nothing behind and its text says why. */
    bl_status (*start)(bl_reader *reader);
    void (*wake)(bl_reader *reader); /* there may be something to take; the lock is held */
    /* `quit` has been set; returns when no piece flies and no thread is left. */
    void (*stop)(bl_reader *reader);
} bl_io_engine_api;

extern const bl_io_engine_api bl_io_engine_uring, bl_io_engine_pread;

struct bl_reader {
    bl_reader_options options; /* defaults filled in */
    bl_io_files *files;
    const bl_io_engine_api *engine;
    void *engine_state;
    char *buffers; /* queue_depth x buffer_bytes, page-aligned */
    size_t buffer_bytes;
    bl_io_piece *pieces; /* [queue_depth] */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t done;  /* a piece has left FLYING */
    bool quit;
    int *free_slots, n_free, n_flying;
    bl_io_read *first_read, *last_read; /* not issued whole */
    int n_reads;                        /* submitted and not waited for */
    bl_reader_stats stats;
    struct {
        bool is_open, has_failed;
        const bl_io_range *ranges;
        size_t n_ranges, range; /* the next piece begins at `offset` of `range` */
        int64_t offset;
        int *order; /* slots in the order of issue, a ring of queue_depth */
        uint64_t n_issued,
            n_delivered; /* the chunk in the caller's hands is not counted as delivered */
        bool is_held;    /* the caller has the chunk of order[n_delivered] */
    } stream;
};

/* The next piece to attempt, or NULL. The lock is held. */
bl_io_piece *bl_reader_take(bl_reader *reader);
/* Takes an attempt's result in: bytes, or -errno. True: attempt bytes [at, end) of the piece again.
 * No lock is held. */
bool bl_reader_finish(bl_reader *reader, bl_io_piece *piece, int64_t result);

#endif
