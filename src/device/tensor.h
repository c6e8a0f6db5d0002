/* SPDX-License-Identifier: Apache-2.0 */
/* tensor.h -- device data whose element type depends on the device: activations, their gradients,
 * compute copies of LoRA weights. It borrows the data; shape and strides are its user's. Zero is no
 * tensor: no data, and a dtype that no op takes. */
#ifndef BALLAST_DEVICE_TENSOR_H
#define BALLAST_DEVICE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_tensor {
    void *data; /* NULL: none */
    bl_dtype dtype;
} bl_tensor;

/* `data` is only read where the user of the tensor says so. */
static inline bl_tensor bl_tensor_of(const void *data, bl_dtype dtype)
{
    bl_tensor t;
    t.data = (void *)data;
    t.dtype = dtype;
    return t;
}

/* `data` as a tensor of fp32; NULL: none. */
static inline bl_tensor bl_tensor_f32(const float *data)
{
    return bl_tensor_of(data, BL_F32);
}

/* False: an optional tensor that was left out. */
static inline bool bl_tensor_is_there(bl_tensor t)
{
    return t.data != NULL;
}

/* The bytes of n elements. */
static inline size_t bl_tensor_bytes(bl_tensor t, int64_t n_elements)
{
    return bl_dtype_bytes(t.dtype) * (size_t)n_elements;
}

/* What begins n elements further on (n may be negative). None stays none. */
static inline bl_tensor bl_tensor_at(bl_tensor t, int64_t n_elements)
{
    if (t.data) t.data = (char *)t.data + (int64_t)bl_dtype_bytes(t.dtype) * n_elements;
    return t;
}

#ifdef __cplusplus
}
#endif

#endif
