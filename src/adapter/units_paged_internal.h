/* SPDX-License-Identifier: Apache-2.0 */
/* units_paged_internal.h -- the members of adapter_units, for the files units*.c. */
#ifndef BALLAST_ADAPTER_UNITS_PAGED_INTERNAL_H
#define BALLAST_ADAPTER_UNITS_PAGED_INTERNAL_H

#include <stdatomic.h>

#include "adapter/units_internal.h"

enum {
    UNITS_FLOAT = sizeof(float),
    UNITS_PIECE_ELEMENTS = 1 << 19,                 /* of each array of a part */
    UNITS_ROUNDED_BYTES = 2 * UNITS_PIECE_ELEMENTS, /* weights in bf16 */
    UNITS_SLOTS = 8, /* pieces in memory: read ahead, updated or written back */
    UNITS_AHEAD = 4, /* pieces whose reads are submitted */
    UNITS_REQUEST_BYTES = 1 << 20,
    UNITS_QUEUE_DEPTH = 16,
    UNITS_BEHIND_DEPTH = 2, /* requests of a checkpoint, for a piece of 2 MiB */
};

typedef enum unit_state { UNIT_CLEAN, UNIT_SUMMED, UNIT_WAITING } unit_state;

/* One per unit; a tied embedding's gradients have the last. */
typedef struct held_unit {
    int64_t n_bytes[ADAPTER_N_ARRAYS]; /* of each array that it has; not of the weights */
    bl_tier tier;                      /* of moments and gradients */
    bool is_paged;                     /* the host updates it (adapter_units_is_apart) */
    int64_t offset[ADAPTER_N_ARRAYS];  /* bytes, in the array's memory or in the file */
    int64_t first_piece;               /* index into `piece` */
    int64_t n_pieces;
    unit_state state;
} held_unit;

/* Memory of a unit's gradients during a visit: two frames for layers, one for tables, and one for a
 * tied embedding, which takes the memory of both layer frames. */
typedef enum unit_frame { FRAME_LAYER, FRAME_TABLE = 2, FRAME_TIED, N_FRAMES } unit_frame;
typedef struct held_frame {
    char *memory; /* that gradients are added in */
    char *host;   /* for the disk: the same on a CPU; NULL: no unit is on disk */
    bl_event *complete, *ready, *written;
    int64_t unit; /* the unit whose gradients are being read into it; -1: none */
} held_frame;

typedef struct unit_piece {
    const adapter_span *span;
    int64_t first, n; /* elements of the span */
} unit_piece;

typedef struct piece_slot {
    char *memory[ADAPTER_N_ARRAYS];
    bl_io_read io[ADAPTER_N_ARRAYS];
    bool flies[ADAPTER_N_ARRAYS]; /* io is in flight */
    /* Weights rounded for the bf16 copy, if the copy is not in host memory, and their write to the
     * copy's file. On a GPU, is_copying: copies between host and device are queued, and `copied` is
     * recorded after them. */
    char *rounded;
    bl_io_read rounded_io;
    bool rounded_flies, is_copying;
    bl_event *copied;
} piece_slot;

/* Writes a checkpoint file: units_behind.c. */
typedef struct units_behind {
    bl_stream *stream; /* of the host */
    bl_staging *staging;
    /* For arrays on disk; NULL: none are. Separate from the readers of updates, which another
     * thread uses. */
    bl_reader *reader, *weights_reader;
    char *piece;        /* host memory */
    bl_event **written; /* [n_units + 1]: the last one for `first` */
    bool *is_queued;    /* [n_units]: its task is queued */
    bool is_active;
    int64_t n_left; /* units without a queued task */
    adapter_units_file file;
    atomic_bool is_dropped, is_done;
    double began_s;
    _Atomic double moved_s; /* of the newest write */
    int64_t n_bytes;        /* of all units */
    _Atomic int64_t n_bytes_written;
    bl_error error; /* of the tasks; read it after is_done, or with the stream idle */
} units_behind;

struct adapter_units {
    adapter_units_options options;
    const bl_base_layout *layout;
    const adapter_spans *spans;
    int64_t n_units, n_held; /* of the layout; with a tied embedding one more */
    bool is_gpu;
    held_unit *unit;
    char *memory[BL_TIER_DISK][ADAPTER_N_ARRAYS]; /* arrays of units in memory, by tier */
    bl_arena *arena;                              /* of BL_TIER_HOST */
    double *squares;                              /* [n_units]: of gradients; device memory */
    bl_event *updated;
    units_behind behind;

    /* Unused if no unit is PAGED. */
    bl_stream *disk;    /* of the host: waits for disks and updates */
    bl_io_files *files; /* moments and gradients on disk; NULL: none are */
    bl_reader *reader, *weights_reader, *copy_reader;
    char *device_frames, *host_frames, *slots, *rounded; /* memory */
    held_frame frame[N_FRAMES];
    /* Of a GPU: copies of gradients, queued by the rank's thread, and of pieces, queued by tasks on
     * `disk`. */
    bl_stream *in, *out, *upload, *fetch;
    double *grad_scale; /* of `update`; host memory */
    piece_slot slot[UNITS_SLOTS];
    int64_t n_pieces;
    unit_piece *piece;         /* in the order of updates */
    int64_t n_read, n_updated; /* pieces with submitted reads; updated pieces */
    bl_adamw_args update;
};

/* Whether compute cannot reach memory of the tier, and the host updates it. */
static inline bool adapter_units_is_apart(bool is_gpu, bl_tier tier)
{
    return tier == BL_TIER_DISK || (is_gpu && tier == BL_TIER_HOST);
}

/* units_spans.c: bytes of an element; where a span begins in its unit's array; an array's span in
 * memory, NULL: it is on disk. */
int64_t adapter_units_element(const adapter_units *units, adapter_array array);
int64_t adapter_units_span_offset(const adapter_units *units, const adapter_span *span,
                                  adapter_array array);
char *adapter_units_span_memory(const adapter_units *units, const adapter_span *span,
                                adapter_array array);
/* How the host reaches it. BL_TIER_HOST: itself, also in a CPU's device memory; BL_TIER_DEVICE: by
 * copies. */
bl_tier adapter_units_place(const adapter_units *units, const adapter_span *span,
                            adapter_array array);
/* The same for a part's rows in the bf16 copy, which must exist. */
bl_tier adapter_units_copy_place(const adapter_units *units, const bl_base_walk *at);
/* `update` of elements [first, first + n) of a span. */
bl_adamw_args adapter_units_adamw(const adapter_units *units, const adapter_span *span,
                                  int64_t first, int64_t n, char *const memory[ADAPTER_N_ARRAYS]);
/* units_frames.c: bytes of all frames, and of the first one, the tables'. */
int64_t adapter_units_frames_bytes(const bl_base_layout *layout, int64_t n_held,
                                   const held_unit *units, int64_t *table_bytes);
/* Takes their memory, of these sizes. */
bl_status adapter_units_create_frames(adapter_units *units, const bl_adapter_units_bytes *bytes);
void adapter_units_destroy_frames(adapter_units *units);
/* open_gradient and close_gradient of a unit whose gradients are not in device memory. */
bl_status adapter_units_open_frame(adapter_units *units, int64_t unit, bl_stream *stream,
                                   float **rows);
float *adapter_units_frame_rows(const adapter_units *units, int64_t unit); /* what it has opened */
bl_status adapter_units_close_frame(adapter_units *units, int64_t unit, bl_stream *stream);
/* Reads the gradients that the next visit adds to during this visit, into the other layer frame. */
bl_status adapter_units_prefetch_next(adapter_units *units, int64_t unit);

/* units_behind.c */
bl_status adapter_units_create_behind(adapter_units *units, const bl_adapter_units_bytes *bytes);
void adapter_units_destroy_behind(adapter_units *units); /* partly created is fine */
/* Call it after the update of a unit is queued on `disk` and `updated` is recorded after it. */
bl_status adapter_units_continue_file(adapter_units *units, int64_t unit);

/* units.c: of placement->io_engine and hooks. */
bl_status adapter_units_create_reader(const adapter_units *units, bl_io_files *files,
                                      int queue_depth, bl_reader **out);

/* units_flow.c */
bl_status adapter_units_list_pieces(adapter_units *units);
/* Queued on `disk`. */
bl_status adapter_units_queue_update(adapter_units *units, int64_t unit);
/* adapter_units_round for a part that is apart; queued on `disk`. */
bl_status adapter_units_queue_round(adapter_units *units, const bl_base_walk *at);
/* A request for the whole blocks that hold elements [first, first + n) of a span's array on
 * disk. */
bl_io_read adapter_units_transfer(const adapter_units *units, const adapter_span *span,
                                  adapter_array array, int64_t first, int64_t n, void *memory,
                                  bl_reader **reader);
bl_status adapter_units_wait(adapter_units *units, bl_reader *reader, bl_io_read *io, int64_t unit);

#endif
