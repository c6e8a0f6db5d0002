/* SPDX-License-Identifier: Apache-2.0 */
/* spans_internal.h -- the trained rows of one rank in full fine-tuning: of each page the spans that
 * have moments and gradients and are updated, and their places in the arrays of these.
 *
 * A part (linear/base.h) is a fused matrix, of which some projections may be frozen; a rank holds
 * some of its rows. A span is the intersection of a bl_trained_span with the rank's rows. Of a part
 * that is trained whole it is the page, padding included. */
#ifndef BALLAST_TRAINED_SPANS_INTERNAL_H
#define BALLAST_TRAINED_SPANS_INTERNAL_H

#include "arch/trained.h"
#include "linear/base.h"

typedef enum trained_element { TRAINED_F32, TRAINED_BF16, TRAINED_ELEMENTS } trained_element;

typedef struct trained_span {
    bl_base_walk at;
    int idx;             /* which of the trained spans of its matrix */
    int64_t row, n_rows; /* of the part */
    int64_t first;       /* elements from the start of the page */
    int64_t n;           /* elements of the rows, with padding that belongs to the page */
    /* Bytes in an array of the unit, multiples of the device's alignment: of fp32, of bf16. */
    int64_t offset[TRAINED_ELEMENTS];
    int64_t file_first, file_n; /* elements in an array of a rank's file of a checkpoint */
} trained_span;

typedef struct trained_spans {
    const bl_base_layout *layout;
    const bl_trained_set *set;
    int64_t n;
    trained_span *span; /* [n], in the layout's order */
    int64_t *first;     /* [n_units + 1]: those of unit u are [first[u], first[u + 1]) */
    int64_t (*unit_bytes)[TRAINED_ELEMENTS]; /* [n_units]: of an array of the unit */
    int64_t file_n;                          /* elements of an array of this rank in its file */
} trained_spans;

/* layout: of bl_model_layout_trained; both are borrowed. BL_ENOMEM. */
bl_status trained_spans_create(const bl_base_layout *layout, const bl_trained_set *set, int rank,
                               trained_spans *out);
/* unit_bytes become those of the rank that has most: placement and memory are alike on all. */
void trained_spans_level(trained_spans *spans);
void trained_spans_free(trained_spans *spans); /* zeros are fine */

/* Whether some rank has a span of the part. */
bool trained_spans_have(const trained_spans *spans, const bl_base_walk *at);
/* The span of a matrix that has this row of its part; NULL: another rank's, or frozen. */
const trained_span *trained_span_at(const trained_spans *spans, int64_t unit, int matrix,
                                    int64_t row);

#endif
