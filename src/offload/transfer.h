/* SPDX-License-Identifier: Apache-2.0 */
/* transfer.h -- moves bytes between device memory, host memory and files. Pager, stack, frames,
 * pieces and checkpoint files decide which bytes move and when; this file decides how:
 *
 *   from     to       legs
 *   host     device   a copy on `in`
 *   device   host     a copy on `out`
 *   disk     memory   a read on `disk`; with `through`, into it, then a copy on `in`
 *   memory   disk     with `through`, a copy to it on `out`, then a write on `disk`
 *
 * A leg of the disk blocks until the read or write is complete, so with a GPU it runs on a host
 * stream (bl_stream_create_host). An event orders the legs of a move.
 *
 *   a move in slot s       entered by                        left by
 *   IDLE                   open; finish                      begin
 *   BEGUN                  begin: a read is submitted when   finish: its last leg is queued
 *                          `disk` reaches it
 *
 * Invariants. (1) Slot s has one move at a time. (2) The reader owns io[s] from the task of
 * begin to that of finish; both run on `disk`, in this order. (3) A copy out of `through` follows
 * the read into it, and `arrived`; a write from `through` follows the copy into it. (4) A reader is
 * used by one host stream at a time: where two of them move bytes, each has a mover and readers.
 *
 * Two ways to move: queue, begin and finish are for the thread that gives streams their work; they
 * return at once. now, add and wait are for a task on a host stream, which may block.
 *
 * On a simulated device (device/model.h) moves take time and no bytes are moved: no file is opened,
 * and memory is an address. */
#ifndef BALLAST_OFFLOAD_TRANSFER_H
#define BALLAST_OFFLOAD_TRANSFER_H

#include "device/device.h"
#include "device/timeline.h"
#include "io/reader.h"
#include "offload/tier.h"

/* Bytes at an address of device or host memory; on disk, at offset_bytes of one of a mover's
 * files. */
typedef struct bl_place {
    bl_tier tier;
    int file;
    int64_t offset_bytes;
    void *memory;
} bl_place;

typedef struct bl_move {
    bl_place from, to;
    size_t n_bytes; /* of a write: a multiple of BL_IO_ALIGN_BYTES */
    /* Host memory of n_bytes, where one end is on disk and the host cannot access the other.
     * NULL: not needed. */
    void *through;
    bool is_checked; /* calls `arrived` also before a copy from host memory */
    /* Of its spans on the timeline: `lane` is the copy's; the disk's is BL_LANE_DISK. name NULL: no
     * spans. */
    bl_lane lane;
    const char *name;
    int64_t unit; /* for `arrived`, too */
    int item;
} bl_move;

enum { BL_MOVER_FILES = 3 };

/* Streams and readers of moves; the owner sets all but `internal`, then opens it. Everything is
 * borrowed until close. */
typedef struct bl_mover {
    bl_device *device;
    bl_stream *in, *out; /* copies; may be one stream; NULL: there are none in this direction */
    bl_stream *disk;     /* NULL: `in` does its work */
    bl_timeline *timeline;
    bl_reader *reader[BL_MOVER_FILES]; /* of each file; NULL on a simulated device */
    /* Called after a leg of the disk, on its stream, with the status of the read or write; returns
     * that of the move. NULL: the move has the same status. */
    bl_status (*arrived)(void *user, const bl_move *move, bl_status st);
    void *user;
    struct {
        bl_event *between; /* the legs of a move */
        bl_io_read io[BL_STREAM_READS];
        bl_reader *reader[BL_STREAM_READS];
    } internal;
} bl_mover;

/* BL_ENOMEM. */
bl_status bl_mover_open(bl_mover *mover);
void bl_mover_close(bl_mover *mover); /* with its streams idle; one not opened is fine */

/* Whether moves take time and no bytes are moved: on a simulated device. */
bool bl_transfer_is_simulated(const bl_device *device);
/* As bl_reader_create; *out is NULL on a simulated device, whose reads need none. */
bl_status bl_transfer_open_reader(const bl_device *device, const bl_reader_options *options,
                                  bl_io_files *files, bl_reader **out);
/* The tier as tasks of the host see it: they access device memory of a CPU as host memory. */
bl_tier bl_transfer_reach(bl_device_kind kind, bl_tier tier);

/* ---- queued ---- */

/* Later work of `stream` runs after the work that `before` has now; records `event` there. */
bl_status bl_transfer_order(bl_stream *stream, bl_stream *before, bl_event *event);

/* Begins a move after the work that `before` has now (NULL: after that of the mover's streams),
 * and records `event` at its end. Uses slot 0. */
bl_status bl_transfer_queue(bl_mover *mover, const bl_move *move, bl_stream *before,
                            bl_event *event);
/* The same in two calls with the same arguments, so that reads of several slots (< BL_STREAM_READS)
 * are in flight at once. After finish, the move ends with the work that the stream of its last leg
 * has then: `in` for a copy to the device, `out` for one to the host, else `disk`. */
bl_status bl_transfer_begin(bl_mover *mover, int slot, const bl_move *move);
bl_status bl_transfer_finish(bl_mover *mover, int slot, const bl_move *move);
/* The host memory that has the bytes of a move from or to the disk, or from host memory. */
void *bl_transfer_host_memory(const bl_move *move);

/* ---- in a task of a host stream ---- */

/* Moves n_bytes and waits for them: between a disk and memory that the host accesses, or by a copy,
 * for whose stream it waits. */
bl_status bl_transfer_now(bl_mover *mover, const bl_place *from, const bl_place *to,
                          size_t n_bytes);

enum { BL_BATCH_MOVES = 4 };

/* Moves in flight together, with one wait for all of them. Zero-initialize it. */
typedef struct bl_transfer_batch {
    bl_event *copied;   /* the owner's, recorded after copies; NULL: wait for the whole stream */
    bl_stream *copying; /* NULL: no copies */
    int n;              /* reads and writes */
    bl_reader *reader[BL_BATCH_MOVES];
    bl_io_read io[BL_BATCH_MOVES];
} bl_transfer_batch;

/* Begins a move, as bl_transfer_now does. Copies of a batch have one direction. BL_EINTERNAL: more
 * than BL_BATCH_MOVES with the disk. */
bl_status bl_transfer_add(bl_mover *mover, bl_transfer_batch *batch, const bl_place *from,
                          const bl_place *to, size_t n_bytes);
/* Waits for all; the first failure. The batch is empty again, whatever it returns. */
bl_status bl_transfer_wait(bl_transfer_batch *batch);

#endif
