/* SPDX-License-Identifier: Apache-2.0 */
/* base.h -- where frozen weights come from: the one small interface that the linear layer's callers
 * see.
 *
 * A base is a sequence of units (decoder layers, then the head), each of up to BL_BASE_MATRICES
 * matrices. A unit may have sub-units, units behind all others, between which some of its matrices
 * are cut (groups of a layer's experts): they are gathered one after the other while it stays.
 * acquire gives a matrix in the GEMM's form; release reports that the unit is no longer needed. A
 * resident base is whole in device memory. A paged one (base_paged.h) has a row shard per rank, in
 * device memory, host memory or on disk; a ring (offload/gather_ring.h) gathers its units, and the
 * calls here are the ring's. */
#ifndef BALLAST_LINEAR_BASE_H
#define BALLAST_LINEAR_BASE_H

#include <stdbool.h>

#include "comm/comm.h"
#include "device/device.h"
#include "ops/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most matrices of a unit, segments of a matrix, and parts: codes and scales of each segment. */
enum { BL_BASE_MATRICES = 6, BL_BASE_SEGMENTS = 3, BL_BASE_PARTS = 2 * BL_BASE_SEGMENTS };

/* Rows that are gathered together: the codes of neighboring segments whose rows have the same
 * number of bytes; or the scales of the part before, where the format has BL_SCALES_PAGED. Both are
 * cut between groups, so that a rank has the scales of its rows. */
typedef struct bl_base_part {
    int first_segment, n_segments;
    bool is_scales;
    int64_t group_rows;      /* rows of the matrix per row of the part: 1 of codes */
    int64_t rows, row_bytes; /* of the part */
    /* Ceil(rows / n_shards), rounded up to groups: shard i holds rows [i * shard_rows, (i + 1) *
     * shard_rows), zero-padded. */
    int64_t shard_rows;
    size_t shard_bytes;  /* shard_rows * row_bytes */
    size_t shard_offset; /* in the unit's shard */
    size_t slot_offset;  /* in the unit's slot, where n_shards * shard_bytes are */
} bl_base_part;

typedef struct bl_base_matrix {
    bl_weight weight; /* shapes, formats and whole scales (borrowed); codes, paged scales NULL */
    int n_parts;
    bl_base_part part[BL_BASE_PARTS];
} bl_base_matrix;

typedef struct bl_base_unit {
    int n_matrices;
    /* The head: may use the whole ring (ring bytes = max(depth x slot, head)). */
    bool whole_ring;
    int64_t first_group, n_groups; /* its sub-units */
    bool is_group;                 /* a sub-unit: number `group` of unit `of` */
    int64_t of, group;
    bl_base_matrix matrix[BL_BASE_MATRICES]; /* those of the unit's sub-units have no segments */
    size_t shard_bytes, slot_bytes;
    size_t offset; /* of the unit's shard in the rank's shard memory */
} bl_base_unit;

typedef struct bl_base_layout {
    int n_shards;
    int64_t n_units;
    bl_base_unit *units; /* owned by the maker of the layout */
    size_t shard_bytes;  /* of the whole base, one rank */
} bl_base_layout;

/* Fills parts, offsets and sizes from n_shards, n_units, n_matrices and each weight's rows, cols
 * and segments. BL_EINPUT when a size overflows. */
bl_status bl_base_layout_finish(bl_base_layout *layout);

/* The parts of a layout one after the other: of a matrix, of the matrices of a unit, of unit after
 * unit.
 *   for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) use(w.part); */
typedef struct bl_base_walk {
    const bl_base_layout *layout;
    /* Of the current part of bl_base_next: */
    int64_t index, idx_unit; /* index counts over the whole layout */
    int idx_matrix, idx_part;
    const bl_base_matrix *matrix;
    const bl_base_part *part; /* NULL before the first and after the last */
} bl_base_walk;

/* Advances to the next part, at first to the first; false at the end. */
bool bl_base_next(bl_base_walk *walk);
int64_t bl_base_part_count(const bl_base_layout *layout);

/* The rows [*begin, *end) of the part that shard `shard` really holds (may be none). */
void bl_base_part_rows(const bl_base_part *part, int shard, int64_t *begin, int64_t *end);

typedef struct bl_base bl_base;

/* layout and shards (layout->shard_bytes, device memory) are borrowed until the base is destroyed.
 * Resident: n_shards must be 1. */
bl_status bl_base_create_resident(const bl_base_layout *layout, const void *shards, bl_base **out);

/* Of a base whose weights have checksums (base_paged.h): BL_EINPUT names the first page that has
 * changed since it was loaded. With the streams idle. Other bases: BL_OK. */
bl_status bl_base_verify(bl_base *base);

void bl_base_destroy(bl_base *base); /* NULL is fine */

/* For benchmarks of models that are larger than memory: in the calls that follow, unit u < n_layers
 * is this base's unit u % n_distinct, and unit n_layers, the head, is its unit n_distinct.
 * n_distinct: at least two more than the ring has slots. */
void bl_base_repeat_layers(bl_base *base, int64_t n_layers, int64_t n_distinct);

/* Sub-unit `group` of a unit, for the calls that follow. */
int64_t bl_base_group(const bl_base *base, int64_t unit, int64_t group);

/* The three return at once; the work is on streams. Errors: BL_EINTERNAL for an unknown unit or
 * matrix, or an order against the rules; a failed stream's error; of a reader or
 * communicator, as offload/pager.h and comm/comm.h say. */

/* A hint that `unit` is used soon, given in the order of use and never for a unit that follows a
 * whole_ring one which is still to be acquired: that one needs every slot. All ranks of a shard
 * group make the same calls in the same order. */
bl_status bl_base_prefetch(bl_base *base, int64_t unit);

/* Shape, formats and whole scales of a matrix, which need not be acquired; codes and paged scales
 * are NULL. Borrowed from the layout. */
const bl_weight *bl_base_describe(const bl_base *base, int64_t unit, int matrix);

/* *out: the matrix, codes and scales in device memory, valid for tasks queued on `stream` until the
 * unit's release. */
bl_status bl_base_acquire(bl_base *base, int64_t unit, int matrix, bl_stream *stream,
                          bl_weight *out);
bl_status bl_base_release(bl_base *base, int64_t unit, bl_stream *stream);

/* For a base whose shards are trained: later loads and gathers wait for the tasks queued on
 * `stream` so far. None of the changed units may be prefetched or acquired. */
bl_status bl_base_shards_changed(bl_base *base, bl_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
