/* SPDX-License-Identifier: Apache-2.0 */
/* prepared.h -- what products make of a unit's frozen matrices (bl_matmul_prepared, ops/matmul.h),
 * kept from the first use of a visit to its end, in forward as in backward.
 *
 * The micro-batches of a visit go through all matrices of the unit one after the other, so a single
 * place for all of them would be made anew by every call, as without this object. Each matrix has
 * its own place here, or none: nothing on the CPU, for matrices that are stored in bf16, and for
 * those that are in bf16 by exception from FP8 (`bf16_matrices`). Bits do not depend on it.
 *
 * Per rank for 405B's layers, stored in FP8: 6.4 GB for products in bf16, which then need no
 * scratch for the largest matrix (3.5 GB); 3.2 GB for products in FP8. */
#ifndef BALLAST_LINEAR_PREPARED_H
#define BALLAST_LINEAR_PREPARED_H

#include "linear/base.h"
#include "ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_linear_prepared {
    int64_t unit; /* whose matrices are there */
    bl_matmul_prepared matrix[BL_BASE_MATRICES];
} bl_linear_prepared;

/* Fills in memory_bytes of each matrix: enough for the units [0, n_units) of `layout` with products
 * in `mode`, each a multiple of 256. bf16_matrices[u], bit m: matrix m of unit u is in bf16 all the
 * same; NULL: none. */
void bl_linear_prepared_measure(bl_device_kind kind, const bl_base_layout *layout, int64_t n_units,
                                bl_matmul_mode mode, const uint8_t *bf16_matrices,
                                bl_linear_prepared *out);

/* Of all matrices. */
size_t bl_linear_prepared_bytes(const bl_linear_prepared *prepared);

/* Gives what bl_linear_prepared_measure filled in its memory: bl_linear_prepared_bytes of device
 * memory, 256-byte aligned, borrowed. */
void bl_linear_prepared_place(bl_linear_prepared *prepared, void *memory);

/* For a product with the unit's matrix on the stream that all of them use; another unit than that
 * of the call before forgets what was made of it. NULL when the matrix has no place. */
bl_matmul_prepared *bl_linear_prepared_at(bl_linear_prepared *prepared, int64_t unit, int matrix);

/* When the unit is released: nothing is there any more. */
void bl_linear_prepared_forget(bl_linear_prepared *prepared);

#ifdef __cplusplus
}
#endif

#endif
