/* SPDX-License-Identifier: Apache-2.0 */
/* verify.h -- whether a LoRA adapter fits a base, which programs load all of it, and whether a
 * merged model is base plus adapter. Nothing is computed with the model: names, shapes, config.json
 * and adapter_config.json decide, so that the architecture need not be one that Ballast opens.
 * Matrices are dense, per expert, or stacked (E, out, in) or (E, in, out) as transformers 5 has the
 * experts.
 *
 * For each matrix W with delta d = s B A (convert/merge.h) and its merged M:
 *   kept     = <M - W, d> / <d, d>
 *   residual = |M - W - d| / |d|
 * d is there if M is W + d rounded to M's dtype, to nearest or to either neighbor. Every other
 * tensor must have the base's bits, or in another dtype its rounded values. */
#ifndef BALLAST_CONVERT_VERIFY_H
#define BALLAST_CONVERT_VERIFY_H

#include <jansson.h>

#include "base/pool.h"
#include "base/status.h"

typedef struct bl_verify_options {
    const char *base, *adapter; /* directories */
    const char *merged;         /* NULL: the adapter alone is compared with the base */
    bl_pool *pool;
} bl_verify_options;

/* *report: a JSON object with the keys that docs/formats.md lists, owned by the caller; NULL after
 * an error. *n_faults: of the list "faults". Memory: blocks of 4 Mi elements, the scales of one
 * matrix, and the factors of two modules. BL_EINPUT: a file that cannot be read as a model or an
 * adapter, or a key of adapter_config.json that is not supported (DoRA, ...); BL_EIO, BL_ENOMEM. */
bl_status bl_model_verify(const bl_verify_options *options, json_t **report, size_t *n_faults);

#endif
