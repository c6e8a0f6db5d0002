/* SPDX-License-Identifier: Apache-2.0 */
/* units_internal.h -- the optimizer's arrays of a run that trains every weight, of one rank, unit
 * by unit: the one owner of moments and gradients, which alone knows where they are.
 *
 *   unit      is opened for                          and closed when
 *   0..n-1    the base's units: a micro-batch's      the work on it has been queued
 *             gradients, a sum, an update, a file
 *   n         a tied embedding's gradients alone
 *
 * An array of a unit has the layout of the rank's rows (linear/base.h): unit->shard_bytes, parts at
 * their shard_offset. All are fp32, in device memory while the unit is open. */
#ifndef BALLAST_ADAPTER_UNITS_INTERNAL_H
#define BALLAST_ADAPTER_UNITS_INTERNAL_H

#include "device/device.h"
#include "linear/base.h"

/* In the order of a checkpoint's tensors; the weights are the base's. */
typedef enum adapter_array {
    ADAPTER_M,
    ADAPTER_V,
    ADAPTER_W,
    ADAPTER_GRAD,
    ADAPTER_N_ARRAYS
} adapter_array;

typedef struct adapter_units adapter_units;

/* Zero-filled. layout and weights (layout->shard_bytes, device memory) are borrowed.
 * embedding_bytes: of a tied embedding's gradients; 0: none. BL_ENOMEM. */
bl_status adapter_units_create(bl_device *device, const bl_base_layout *layout, float *weights,
                               int64_t embedding_bytes, adapter_units **out);
void adapter_units_destroy(adapter_units *units); /* NULL is fine */

typedef struct adapter_unit {
    int64_t n_floats;               /* of each array */
    float *array[ADAPTER_N_ARRAYS]; /* NULL: a unit without it */
} adapter_unit;
/* *out is valid until close, for work queued on `stream` in between. */
bl_status adapter_units_open(adapter_units *units, int64_t unit, bl_stream *stream,
                             adapter_unit *out);
bl_status adapter_units_close(adapter_units *units, int64_t unit, bl_stream *stream);

#endif
