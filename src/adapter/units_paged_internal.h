/* SPDX-License-Identifier: Apache-2.0 */
/* units_paged_internal.h -- the members of adapter_units, for units.c, units_flow.c and
 * units_files.c. */
#ifndef BALLAST_ADAPTER_UNITS_PAGED_INTERNAL_H
#define BALLAST_ADAPTER_UNITS_PAGED_INTERNAL_H

#include "adapter/units_internal.h"

enum {
    UNITS_FLOAT = sizeof(float),
    UNITS_PIECE_ELEMENTS = 1 << 19, /* of each array of a part */
    UNITS_SLOTS = 8,                /* pieces in memory: read ahead, updated or written back */
    UNITS_AHEAD = 4,                /* pieces whose reads are submitted */
    UNITS_REQUEST_BYTES = 1 << 20,
    UNITS_QUEUE_DEPTH = 16,
};

typedef enum unit_state { UNIT_CLEAN, UNIT_SUMMED, UNIT_WAITING } unit_state;

/* One per unit; a tied embedding's gradients have the last. */
typedef struct held_unit {
    int64_t n_bytes[ADAPTER_N_ARRAYS]; /* of each array that it has; not of the weights */
    bl_tier tier;                      /* of moments and gradients */
    bool is_paged;                     /* they, or some of the weights, are on disk */
    int64_t offset[ADAPTER_N_ARRAYS];  /* bytes, in the array's memory or in the file */
    int64_t first_piece;               /* index into `piece` */
    int64_t n_pieces;
    unit_state state;
} held_unit;

/* Memory of a unit's gradients during a visit: two frames for layers, one for tables, and one for a
 * tied embedding, which takes the memory of both layer frames. */
typedef enum unit_frame { FRAME_LAYER, FRAME_TABLE = 2, FRAME_TIED, N_FRAMES } unit_frame;
typedef struct held_frame {
    char *memory;
    bl_event *complete, *ready, *written;
    int64_t unit; /* the unit whose gradients are being read into it; -1: none */
} held_frame;

typedef struct unit_piece {
    bl_base_walk at;
    int64_t first, n; /* elements of the part */
} unit_piece;

typedef struct piece_slot {
    char *memory[ADAPTER_N_ARRAYS];
    bl_io_read io[ADAPTER_N_ARRAYS];
    bool flies[ADAPTER_N_ARRAYS]; /* io is in flight */
} piece_slot;

struct adapter_units {
    adapter_units_options options;
    const bl_base_layout *layout;
    int64_t n_units, n_held; /* of the layout; with a tied embedding one more */
    held_unit *unit;
    char *memory[ADAPTER_N_ARRAYS]; /* arrays of units in memory */
    double *squares;                /* [n_units]: of gradients on disk; device memory */
    bl_event *updated;

    /* Unused if no unit is PAGED. */
    bl_stream *disk;
    bl_stream *inline_stream; /* for tasks on `disk`: runs AdamW in the calling thread */
    bl_io_files *files;       /* moments and gradients; NULL: all in memory */
    bl_reader *reader, *weights_reader;
    char *frames, *slots; /* memory */
    int64_t frames_bytes;
    held_frame frame[N_FRAMES];
    piece_slot slot[UNITS_SLOTS];
    int64_t n_pieces;
    unit_piece *piece;         /* in the order of updates */
    int64_t n_read, n_updated; /* pieces with submitted reads; updated pieces */
    bl_adamw_args update;
};

/* units_parts.c: bytes of a part's array, whose elements have `element`; bytes of an element; where
 * a part begins in its unit's array; an array's part in memory, NULL: it is on disk. */
int64_t adapter_units_array_bytes(const bl_base_part *part, int64_t element);
int64_t adapter_units_element(const adapter_units *units, adapter_array array);
int64_t adapter_units_part_offset(const adapter_units *units, const bl_base_walk *at,
                                  adapter_array array);
char *adapter_units_part_memory(const adapter_units *units, const bl_base_walk *at,
                                adapter_array array);
/* `update` of elements [first, first + n) of a part. */
bl_adamw_args adapter_units_adamw(const adapter_units *units, const bl_base_walk *at, int64_t first,
                                  int64_t n, char *const memory[ADAPTER_N_ARRAYS]);
/* units_flow.c */
bl_status adapter_units_list_pieces(adapter_units *units);
/* Queued on `disk`. */
bl_status adapter_units_queue_update(adapter_units *units, int64_t unit);
/* A request for the whole blocks that hold elements [first, first + n) of a part's array. *reader
 * NULL: the array is in memory. */
bl_io_read adapter_units_transfer(const adapter_units *units, const bl_base_walk *at,
                                  adapter_array array, int64_t first, int64_t n, void *memory,
                                  bl_reader **reader);
/* units_files.c: adapter_units_round for a part on disk; returns when the rows are rounded. */
bl_status adapter_units_round_part(adapter_units *units, const bl_base_walk *at);
bl_status adapter_units_wait(adapter_units *units, bl_reader *reader, bl_io_read *io, int64_t unit);

#endif
