/* SPDX-License-Identifier: Apache-2.0 */
/* host_device.h -- the mark of a static inline function that C compiles for the host, and nvcc for
 * the GPU as well: one source for arithmetic that must not differ between them. Such functions call
 * only each other. */
#ifndef BALLAST_BASE_HOST_DEVICE_H
#define BALLAST_BASE_HOST_DEVICE_H

#ifdef __CUDACC__
#define BL_HOST_DEVICE static __host__ __device__ inline
#else
#define BL_HOST_DEVICE static inline
#endif

#endif
