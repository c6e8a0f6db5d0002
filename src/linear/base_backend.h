/* SPDX-License-Identifier: Apache-2.0 */
/* base_backend.h -- what a source of frozen weights implements. */
#ifndef BALLAST_LINEAR_BASE_BACKEND_H
#define BALLAST_LINEAR_BASE_BACKEND_H

#include "linear/base.h"

typedef struct bl_base_ops {
    bl_status (*prefetch)(bl_base *base, int64_t unit);
    bl_status (*acquire)(bl_base *base, int64_t unit, int matrix, bl_stream *stream,
                         bl_weight *out);
    bl_status (*release)(bl_base *base, int64_t unit, bl_stream *stream);
    bl_status (*verify)(bl_base *base); /* NULL: nothing to check */
    void (*destroy)(bl_base *base);
} bl_base_ops;

struct bl_base {
    const bl_base_ops *ops;
    const bl_base_layout *layout;
};

/* *out = the matrix's weight with the codes of part p starting at codes[p]. */
void bl_base_fill_weight(const bl_base_matrix *matrix, const void *const codes[BL_BASE_SEGMENTS],
                         bl_weight *out);

#endif
