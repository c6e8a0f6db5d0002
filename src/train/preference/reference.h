/* SPDX-License-Identifier: Apache-2.0 */
/* reference.h -- the reference's sums of log-probabilities of a run's answers, known before its
 * first step (precompute_ref_log_probs), and the file that stores them for the next run.
 *
 * The file, in the byte order of the machine:
 *
 *   bytes 0..15    BL_REFERENCE_MARK, with zeros after it
 *   16..31         the key: XXH3-128 of the text that describes the inputs of the sums
 *   32..39         n, the number of sums
 *   40..47         XXH3-64 of the sums
 *   48..           n doubles */
#ifndef BALLAST_TRAIN_PREFERENCE_REFERENCE_H
#define BALLAST_TRAIN_PREFERENCE_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define BL_REFERENCE_MARK "ballast ref 1\n"

/* Rows and answers that the sums are of; all 0: none. */
typedef struct bl_reference_size {
    int64_t n_rows, n_validation; /* of the data sets */
    int64_t n_positions;          /* places of rows in all steps: kto's mismatched answers */
    bool is_unpaired;             /* a row has one answer, else two */
} bl_reference_size;

/* s_ref(y) of losses.h. A pair has two sums in a row: of the chosen and of the rejected answer. */
typedef struct bl_reference_sums {
    bl_reference_size size;
    int64_t n;                  /* of all sums, contiguous in memory from `train` on */
    double *train, *validation; /* of row i, from i or 2 i on */
    /* Of kto: of the mismatched answer at a position of the run; of a validation row. */
    double *mismatched, *validation_mismatched;
} bl_reference_sums;

/* Bytes of the sums. */
int64_t bl_reference_sums_bytes(const bl_reference_size *size);
/* Zeros. BL_ENOMEM. */
bl_status bl_reference_sums_create(const bl_reference_size *size, bl_reference_sums **out);
void bl_reference_sums_destroy(bl_reference_sums *sums); /* NULL is fine */

typedef enum bl_reference_found {
    BL_REFERENCE_READ,   /* the sums are those of the file */
    BL_REFERENCE_ABSENT, /* no file */
    BL_REFERENCE_STALE,  /* it has another key */
    BL_REFERENCE_DAMAGED /* it is not such a file, or its checksum differs */
} bl_reference_found;

/* key: that text. Sums that are not read are as before. BL_EIO, BL_ENOMEM. */
bl_status bl_reference_sums_read(const char *path, const char *key, bl_reference_sums *sums,
                                 bl_reference_found *found);
/* Replaces the file atomically. Errors: those of bl_file_write_atomic. */
bl_status bl_reference_sums_write(const char *path, const char *key, const bl_reference_sums *sums);

#endif
