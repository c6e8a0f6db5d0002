/* SPDX-License-Identifier: Apache-2.0 */
/* units_internal.h -- the optimizer's arrays of a run that trains every weight, of one rank, unit
 * by unit: the one owner of moments and gradients, which alone knows where they are.
 *
 * Units are the base's (linear/base.h); where the embedding is tied to the head, unit n_units is
 * its gradients, which are added to the head's at the step's end. An array of a unit has the layout
 * of the rank's rows: unit->shard_bytes, parts at their shard_offset, fp32.
 *
 * A unit's moments and gradients are in memory, or on disk in a file of the rank's; its weights are
 * pages of the base, some of them on disk. A unit with anything on disk is PAGED:
 *
 *   state      entered by                           left by
 *   CLEAN      create, the update                   open_gradient: the visit begins with zeros
 *   SUMMED     open_gradient: memory of a visit;    open_gradient: what was summed is read again
 *              close_gradient: written to the disk
 *   WAITING    update                               update_unit, flush: pieces of weights, moments
 *                                                   and gradients are read, updated and written
 *                                                   back, each once per step
 *
 * All of it runs on a stream of the owner's (`disk`): what a gradient's write or a unit's update
 * has to wait for, and what waits for it, are events. Where arrays are never changes a bit: sums
 * are over whole units, AdamW is element by element. */
#ifndef BALLAST_ADAPTER_UNITS_INTERNAL_H
#define BALLAST_ADAPTER_UNITS_INTERNAL_H

#include "adapter/full.h"
#include "device/device.h"
#include "device/staging.h"
#include "linear/base.h"
#include "ops/optimizer.h"
#include "store/safetensors.h"

/* In the order of a checkpoint's tensors; the weights are the base's. */
typedef enum adapter_array {
    ADAPTER_M,
    ADAPTER_V,
    ADAPTER_W,
    ADAPTER_GRAD,
    ADAPTER_N_ARRAYS
} adapter_array;

typedef struct adapter_units adapter_units;

typedef struct adapter_units_options {
    bl_device *device;
    const bl_model_weights *weights; /* its pages are the weights, its layout their places */
    bl_base *base;                   /* its loads wait for updates */
    bl_stream *compute;
    bl_timeline *timeline;
    bool is_tied;
    int rank;
    bl_optimizer_placement placement;
} adapter_units_options;

/* bl_adapter_full_measure's part of it. */
bl_status adapter_units_measure(const bl_base_layout *layout, bool is_tied,
                                const bl_optimizer_placement *placement, const bl_tier *weights,
                                bl_adapter_units_bytes *out);

/* Moments and gradients zero. What options point to is borrowed. BL_ENOMEM; BL_ELIMIT, BL_EIO: the
 * file (offload/scratch.h). */
bl_status adapter_units_create(const adapter_units_options *options, adapter_units **out);
void adapter_units_destroy(adapter_units *units); /* with streams idle; NULL is fine */

/* *rows: where this rank's gradients of the unit are summed, for work queued on `stream` until
 * close; zero in the unit's first visit of a step. In the order of a pass's backward visits
 * (bl_weight_sink). */
bl_status adapter_units_open_gradient(adapter_units *units, int64_t unit, bl_stream *stream,
                                      float **rows);
bl_status adapter_units_close_gradient(adapter_units *units, int64_t unit, bl_stream *stream);

/* After the last visit of a step, queued on `stream`: a tied embedding's gradients are the head's,
 * too. */
bl_status adapter_units_join(adapter_units *units, bl_stream *stream);
/* After join: *sum += squares of all gradients, unit by unit. */
bl_status adapter_units_sum_squares(adapter_units *units, bl_stream *stream, double *sum);

/* AdamW; args as of bl_adamw, without its arrays. Units in memory are updated on compute; PAGED
 * ones wait. */
bl_status adapter_units_update(adapter_units *units, const bl_adamw_args *args);
/* Before the unit is prefetched or acquired: queues its update if it waits. Later loads of the base
 * and work on compute see its weights. In the order of forward visits: BL_EINTERNAL. */
bl_status adapter_units_update_unit(adapter_units *units, int64_t unit);
/* All that wait, and returns when they are done. */
bl_status adapter_units_flush(adapter_units *units);

/* After sums that were all zero: no unit has gradients. */
void adapter_units_forget(adapter_units *units);
/* Of weights with a copy for products (bl_model_weights): queued on compute, made anew of all rows;
 * updates make that of their rows. With nothing waiting. */
bl_status adapter_units_round(adapter_units *units);

/* With streams idle and nothing waiting. The arrays of a part (its shard_bytes, rounded up to
 * BL_DEVICE_ALIGNMENT_BYTES) to a file, from bytes of a stored tensor; the sum of its gradients:
 * *rows is valid until the next call. */
bl_status adapter_units_append(adapter_units *units, const bl_base_walk *at, adapter_array array,
                               bl_staging *staging, bl_safetensors_writer *writer);
bl_status adapter_units_load(adapter_units *units, const bl_base_walk *at, adapter_array array,
                             int64_t offset, size_t n_bytes, const bl_stored_tensor *tensor,
                             int64_t source_offset, bl_staging *staging);
bl_status adapter_units_gradient(adapter_units *units, const bl_base_walk *at, const float **rows);

#endif
