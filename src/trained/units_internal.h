/* SPDX-License-Identifier: Apache-2.0 */
/* units_internal.h -- the moments and gradients of one rank in full fine-tuning, unit by unit. This
 * object owns them, and it alone knows where they are stored.
 *
 * Units are the base's (linear/base.h). If the embedding is tied to the head, unit n_units holds
 * the embedding's gradients, which are added to the head's at the end of the step. An array of a
 * unit has the rank's spans (spans_internal.h) one after the other, each from a multiple of
 * BL_DEVICE_ALIGNMENT_BYTES on. Units without any have no arrays: for them all calls do nothing.
 * Gradients are fp32, as the weights. Moments are fp32 or bf16; bf16 ones are rounded
 * stochastically (bl_adamw), each element by its place in the whole matrix, so the number of
 * ranks does not change the bits of the rounding.
 *
 * A unit's moments and gradients are in device memory, in a GPU's host memory, or on disk in a file
 * of the rank. Its weights are pages of the base, in any of these tiers. A unit with anything
 * outside of device memory is PAGED; a CPU's host memory is device memory. States:
 *
 *   state      meaning                          entered by                      left by
 *   CLEAN      no gradients: open_gradient      create, forget; update, or of   open_gradient
 *              begins with zeros                PAGED units update_unit, flush
 *   SUMMED     it has gradients of this step;   open_gradient                   update, forget
 *              close_gradient takes them to
 *              their tier, open_gradient
 *              brings them again
 *   WAITING    PAGED, not updated yet           update                          QUEUED
 *   QUEUED     its update is a task             update_unit, of it or, on a     update_unit, flush
 *                                               GPU, of the unit before
 *
 * A checkpoint file is written behind the steps, unit by unit (units_behind.c): each unit after the
 * update of the checkpoint's step and before its next update, which waits for the write.
 *
 * The host updates a PAGED unit, in pieces. It reads weights, moments and gradients, and writes
 * back weights and moments, each once per step.
 *
 * Transfers run on streams of this object, ordered by events. Placement never changes a bit: sums
 * are over whole units, and AdamW works element by element, alike on all devices.
 *
 * Places in a part are counted in elements. */
#ifndef BALLAST_TRAINED_UNITS_INTERNAL_H
#define BALLAST_TRAINED_UNITS_INTERNAL_H

#include "trained/full.h"
#include "trained/spans_internal.h"
#include "device/device.h"
#include "device/staging.h"
#include "linear/base.h"
#include "ops/optimizer.h"
#include "store/safetensors.h"

/* In the order of a checkpoint's tensors. The weights are pages of the base. */
typedef enum trained_array {
    TRAINED_M,
    TRAINED_V,
    TRAINED_W,
    TRAINED_GRAD,
    TRAINED_N_ARRAYS
} trained_array;

typedef struct trained_units trained_units;

typedef struct trained_units_options {
    bl_device *device;
    const bl_model_weights *weights; /* its pages are the weights, in its layout */
    const trained_spans *spans;
    bl_base *base; /* its loads wait for updates */
    bl_stream *compute;
    bl_timeline *timeline;
    bool is_tied;
    int rank;
    bl_optimizer_placement placement;
} trained_units_options;

/* The units' part of bl_trained_full_measure. */
bl_status trained_units_measure(const trained_spans *spans, bool is_tied,
                                const bl_optimizer_placement *placement, const bl_tier *weights,
                                bl_trained_units_bytes *out);

/* Moments and gradients are zero. Borrows everything that options point to. BL_ENOMEM; BL_ELIMIT,
 * BL_EIO: the file (offload/scratch.h). */
bl_status trained_units_create(const trained_units_options *options, trained_units **out);
void trained_units_destroy(trained_units *units); /* with streams idle; NULL is fine */

/* *rows: memory in which work queued on `stream` until close_gradient sums this rank's gradients of
 * the unit, span by span; NULL: it has none. They are zero in the unit's first visit of a step.
 * Call in the order of a pass's backward visits (bl_gradient_sink). */
bl_status trained_units_open_gradient(trained_units *units, int64_t unit, bl_stream *stream,
                                      float **rows);
bl_status trained_units_close_gradient(trained_units *units, int64_t unit, bl_stream *stream);

/* After the last visit of a step, queued on `stream`: adds a tied embedding's gradients to the
 * head's. */
bl_status trained_units_join(trained_units *units, bl_stream *stream);
/* After join: *sum += squares of all gradients, unit by unit. */
bl_status trained_units_sum_squares(trained_units *units, bl_stream *stream, double *sum);

/* AdamW; args as for bl_adamw, without arrays. Updates units in memory on compute; PAGED units
 * become WAITING. */
bl_status trained_units_update(trained_units *units, const bl_adamw_args *args);
/* Before the unit is prefetched or acquired: queues its update if it is WAITING. Later loads of the
 * base, and later work on compute, see the new weights. BL_EINTERNAL: not in the order of forward
 * visits. */
bl_status trained_units_update_unit(trained_units *units, int64_t unit);
/* Updates all WAITING units. Returns when they are updated and gradients are written. */
bl_status trained_units_flush(trained_units *units);

/* Makes all units CLEAN, after sums that were all zero. */
void trained_units_forget(trained_units *units);
/* Rounds all rows into the copy for products, if there is one (bl_model_weights); queued on
 * compute, with no unit WAITING. Updates round the rows that they change. */
bl_status trained_units_round(trained_units *units);

/* ---- units_behind.c: a checkpoint file ---- */

typedef struct trained_units_file {
    bl_safetensors_writer *writer; /* borrowed until `end` runs */
    size_t tensor[TRAINED_GRAD];   /* of TRAINED_M, TRAINED_V, TRAINED_W among the writer's specs */
    /* Both run on the file's stream. first: before the units, with memory to use. end: after the
     * last unit, if nothing has failed. */
    bl_status (*first)(void *user, bl_staging *staging);
    bl_status (*end)(void *user);
    void *user;
} trained_units_file;

/* With compute idle: begins to write moments and weights as after the last update; WAITING units
 * are written after that update. One file at a time. */
bl_status trained_units_begin_file(trained_units *units, const trained_units_file *file);
/* Whether `end` has run, or something has failed. */
bool trained_units_file_is_done(trained_units *units);
/* Of an unfinished file; by the thread of begin_file. */
bl_trained_shard_progress trained_units_file_progress(const trained_units *units);
/* Updates units that are not in the file yet, waits for the file's end and returns its first
 * failure. BL_OK without a file. */
bl_status trained_units_end_file(trained_units *units);
/* In place of end_file: waits for the task that runs, and skips the others. */
void trained_units_drop_file(trained_units *units);
/* Makes `stream` wait until the unit is written, so that work queued later may change its moments
 * and weights; unit -1: the data that `first` reads. `lane`: of the stall in the trace. */
bl_status trained_units_wait_for_file(trained_units *units, int64_t unit, bl_lane lane,
                                      bl_stream *stream);
/* The host stream that writes the file: later calls on the stream run after the file's end. */
bl_stream *trained_units_behind(const trained_units *units);

/* With streams idle and no unit WAITING. load reads elements [first, first + n) from element
 * `source` on of a stored tensor, F32 or BF16: widened, or rounded to nearest, where the array has
 * the other dtype. gradient: *rows are the span's gradients, valid until the next call. */
bl_status trained_units_load(trained_units *units, const trained_span *span, trained_array array,
                             int64_t first, int64_t n, const bl_stored_tensor *tensor,
                             int64_t source, bl_staging *staging);
bl_status trained_units_gradient(trained_units *units, const trained_span *span,
                                 const float **rows);

#endif
