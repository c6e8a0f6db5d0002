/* SPDX-License-Identifier: Apache-2.0 */
/* units_paged_internal.h -- the members of trained_units, for the files units*.c. */
#ifndef BALLAST_TRAINED_UNITS_PAGED_INTERNAL_H
#define BALLAST_TRAINED_UNITS_PAGED_INTERNAL_H

#include <stdatomic.h>

#include "trained/units_internal.h"
#include "offload/transfer.h"

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

typedef enum unit_state { UNIT_CLEAN, UNIT_SUMMED, UNIT_WAITING, UNIT_QUEUED } unit_state;

/* One per unit; a tied embedding's gradients have the last. */
typedef struct held_unit {
    int64_t n_bytes[TRAINED_N_ARRAYS]; /* of each array that it has; not of the weights */
    bl_tier tier;                      /* of moments and gradients */
    bool is_paged;                     /* the host updates it (trained_units_is_apart) */
    bl_event *updated;                 /* is_paged: on `disk`, by its last update */
    int64_t offset[TRAINED_N_ARRAYS];  /* bytes, in the array's memory or in the file */
    int64_t first_piece;               /* index into `piece` */
    int64_t n_pieces;
    unit_state state;
} held_unit;

/* Memory of a unit's gradients during a visit: two frames for layers, one for tables, and one for a
 * tied embedding, which takes the memory of both layer frames. */
typedef enum unit_frame { FRAME_LAYER, FRAME_TABLE = 2, FRAME_TIED, N_FRAMES } unit_frame;
typedef struct held_frame {
    char *memory; /* in which gradients are summed */
    char *host;   /* for moves of the disk; on a CPU `memory`; NULL: no unit is on disk */
    bl_event *ready, *written;
    int64_t unit; /* the unit whose gradients are being read into it; -1: none */
} held_frame;

typedef struct unit_piece {
    const trained_span *span;
    int64_t first, n; /* elements of the span */
} unit_piece;

typedef struct piece_slot {
    char *memory[TRAINED_N_ARRAYS];
    char *rounded; /* weights for the bf16 copy, if the copy is not in host memory */
    bl_transfer_batch batch;
} piece_slot;

/* The files of movers: moments and gradients; weights; their bf16 copy. */
enum { FILE_STATE, FILE_WEIGHTS, FILE_COPY };
_Static_assert((int)FILE_COPY < (int)BL_MOVER_FILES, "files of a mover");

/* Writes a checkpoint file: units_behind.c. */
typedef struct units_behind {
    bl_stream *stream; /* of the host */
    bl_staging *staging;
    bl_mover mover;     /* has readers of FILE_STATE and FILE_WEIGHTS, where arrays are on disk */
    char *piece;        /* host memory, for these */
    bl_event **written; /* [n_units + 1]: the last one for `first` */
    bool *is_queued;    /* [n_units]: its task is queued */
    bool is_active;
    int64_t n_left; /* units without a queued task */
    trained_units_file file;
    atomic_bool is_dropped, is_done;
    double began_s;
    _Atomic double moved_s; /* of the newest write */
    int64_t n_bytes;        /* of all units */
    _Atomic int64_t n_bytes_written;
    bl_error error; /* of the tasks; read it after is_done, or with the stream idle */
} units_behind;

struct trained_units {
    trained_units_options options;
    const bl_base_layout *layout;
    const trained_spans *spans;
    int64_t n_units, n_held; /* of the layout; with a tied embedding one more */
    bool is_gpu;
    held_unit *unit;
    char *memory[BL_TIER_DISK][TRAINED_N_ARRAYS]; /* arrays of units in memory, by tier */
    bl_arena *arena;                              /* of BL_TIER_HOST */
    double *squares;                              /* [n_units]: of gradients; device memory */
    bl_event *updated;
    units_behind behind;

    /* Unused if no unit is PAGED. */
    bl_stream *disk;    /* of the host: waits for disks and updates */
    bl_io_files *files; /* moments and gradients on disk; NULL: none are */
    char *device_frames, *host_frames, *slots, *rounded; /* memory */
    held_frame frame[N_FRAMES];
    /* Of gradients, used by the rank's thread, and of pieces, used by tasks on `disk`. They share
     * the readers of `pieces`; each has its own streams of a GPU for copies. */
    bl_mover visit, pieces;
    double *grad_scale; /* of `update`; host memory */
    piece_slot slot[UNITS_SLOTS];
    int64_t n_pieces;
    unit_piece *piece;         /* in the order of updates */
    int64_t n_read, n_updated; /* pieces with submitted reads; updated pieces */
    bl_adamw_args update;
};

/* Whether compute cannot reach memory of the tier, and the host updates it. */
static inline bool trained_units_is_apart(bool is_gpu, bl_tier tier)
{
    return tier == BL_TIER_DISK || (is_gpu && tier == BL_TIER_HOST);
}

/* ---- units_places.c ---- */

int64_t trained_units_element(const trained_units *units, trained_array array); /* bytes */
/* Element `first` of a span's array, as the host reaches it: in a CPU's memory BL_TIER_HOST. */
bl_place trained_units_place(const trained_units *units, const trained_span *span,
                             trained_array array, int64_t first);
/* The same of a part in the bf16 copy, which must exist. */
bl_place trained_units_copy_place(const trained_units *units, const bl_base_walk *at,
                                  int64_t first);
/* All gradients of a unit. */
bl_place trained_units_gradient_place(const trained_units *units, int64_t unit);
/* Bytes that a move of n_bytes from or to the place takes: whole blocks on a disk. */
size_t trained_units_place_bytes(const bl_place *place, int64_t n_bytes);
/* units: receives sizes and placement; [n_units + is_tied]. */
bl_status trained_units_assign(const trained_spans *spans, bool is_tied,
                               const bl_optimizer_placement *placement, const bl_tier *weight_tiers,
                               held_unit *units, bl_trained_units_bytes *out);
/* Of an array in a slot of pieces. */
int64_t trained_units_piece_bytes(bl_dtype moments, trained_array array);

/* ---- units_frames.c ---- */

/* Bytes of all frames, and of the first one, the tables'. */
int64_t trained_units_frames_bytes(const bl_base_layout *layout, int64_t n_held,
                                   const held_unit *units, int64_t *table_bytes);
/* Takes their memory, of these sizes. */
bl_status trained_units_create_frames(trained_units *units, const bl_trained_units_bytes *bytes);
void trained_units_destroy_frames(trained_units *units);
/* open_gradient and close_gradient of a unit whose gradients are not in device memory. */
bl_status trained_units_open_frame(trained_units *units, int64_t unit, bl_stream *stream,
                                   float **rows);
float *trained_units_frame_rows(const trained_units *units, int64_t unit); /* after open_frame */
bl_status trained_units_close_frame(trained_units *units, int64_t unit, bl_stream *stream);
/* Reads the gradients that the next visit adds to during this visit, into the other layer frame. */
bl_status trained_units_prefetch_next(trained_units *units, int64_t unit);

/* ---- units_behind.c ---- */

bl_status trained_units_create_behind(trained_units *units, const bl_trained_units_bytes *bytes);
void trained_units_destroy_behind(trained_units *units); /* partly created is fine */
/* Call it after the update of a unit is queued on `disk` and `updated` is recorded after it. */
bl_status trained_units_continue_file(trained_units *units, int64_t unit);

/* ---- units_create.c ---- */

/* Of placement->io_engine and hooks. */
bl_status trained_units_create_reader(const trained_units *units, bl_io_files *files,
                                      int queue_depth, bl_reader **out);

/* ---- units.c ---- */

/* Prefixes a failure with the unit: of a read or write of its state. */
bl_status trained_units_explain(const trained_units *units, int64_t unit, bl_status st);
/* `update` of elements [first, first + n) of a span, which are in `memory`, by `adamw`: a call per
 * learning rate. */
bl_status trained_units_adamw(const trained_units *units, const trained_span *span, int64_t first,
                              int64_t n, char *const memory[TRAINED_N_ARRAYS], bl_stream *stream,
                              bl_status (*adamw)(bl_stream *stream, const bl_adamw_args *args));

/* ---- units_pieces.c ---- */

bl_status trained_units_list_pieces(trained_units *units);
/* Queued on `disk`. */
bl_status trained_units_queue_update(trained_units *units, int64_t unit);
/* units_model.c: the same on a simulated device, where it takes time alone. */
bl_status trained_units_model_update(trained_units *units, int64_t unit);
/* trained_units_round for a part that is apart; queued on `disk`. */
bl_status trained_units_queue_round(trained_units *units, const bl_base_walk *at);

#endif
