/* SPDX-License-Identifier: Apache-2.0 */
/* finite_internal.h -- whether tensors are finite. For pass.c alone. */
#ifndef BALLAST_MODEL_FINITE_INTERNAL_H
#define BALLAST_MODEL_FINITE_INTERNAL_H

#include "device/staging.h"
#include "device/tensor.h"

/* Of n elements in device memory, whose work has ended; as far as they can be read. */
bool model_all_finite(bl_staging *staging, bl_tensor x, int64_t n);

#endif
