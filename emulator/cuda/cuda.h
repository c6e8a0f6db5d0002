/* SPDX-License-Identifier: Apache-2.0 */
/* cuda.h -- replaces the driver's header: the part that Ballast uses. For C. */
#ifndef BALLAST_TESTS_EMULATE_CUDA_CUDA_H
#define BALLAST_TESTS_EMULATE_CUDA_CUDA_H

#include <stdint.h>

#include "values.h"

typedef enum cudaError_enum { EMULATED_DRIVER_RESULTS(EMULATED_DEFINE) } CUresult;
enum { EMULATED_WAITS(EMULATED_DEFINE) };

typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;
typedef int CUdevice;
typedef uint32_t cuuint32_t;

#endif
