/* SPDX-License-Identifier: Apache-2.0 */
/* trained.h -- a checkpoint of a training of all weights in, a Hugging Face model out.
 *
 * The model that the training began with gives the files, the tensors' names and their dtypes, and
 * the frozen tensors, whose bytes are copied; the checkpoint (trained/full.h) gives the values of
 * trained tensors, rounded once to nearest, or in fp32. One piece of a tensor is in memory at a
 * time. The directory is written as convert/quantize.h says; ballast_train.json is its manifest. */
#ifndef BALLAST_CONVERT_TRAINED_H
#define BALLAST_CONVERT_TRAINED_H

#include <stdbool.h>

#include "arch/trained.h"
#include "base/status.h"

typedef struct bl_trained_options {
    const char *source, *target;   /* directories; the target is made */
    const char *checkpoint;        /* directory; its files' checksums were verified */
    int n_ranks;                   /* that wrote it */
    const bl_trained_set *trained; /* of the training */
    bool is_f32;                   /* the trained tensors are F32, whatever the source has */
    const char *readme;            /* the text of the target's README.md */
} bl_trained_options;

/* BL_ECHECKPOINT: the checkpoint is not one of this model. BL_ENUMERIC: a weight is too large for
 * its dtype. BL_EUSAGE, BL_ELIMIT: as bl_model_quantize. */
bl_status bl_model_write_trained(const bl_trained_options *options);

#endif
