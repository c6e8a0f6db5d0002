/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_runtime_api.h -- replaces the toolkit's header: the part that Ballast uses, so that the
 * emulated GPU needs no toolkit. For C. */
#ifndef BALLAST_TESTS_EMULATE_CUDA_RUNTIME_API_H
#define BALLAST_TESTS_EMULATE_CUDA_RUNTIME_API_H

#include <stddef.h>

#include "values.h"

#define CUDART_VERSION 13000

typedef enum cudaError { EMULATED_ERRORS(EMULATED_DEFINE) } cudaError_t;
enum cudaMemcpyKind { EMULATED_COPY_KINDS(EMULATED_DEFINE) };
enum cudaMemoryType { EMULATED_MEMORY_TYPES(EMULATED_DEFINE) };
enum cudaDeviceAttr { EMULATED_ATTRIBUTES(EMULATED_DEFINE) };
enum cudaDriverEntryPointQueryResult { EMULATED_ENTRY_POINTS(EMULATED_DEFINE) };
enum { EMULATED_FLAGS(EMULATED_DEFINE) };

struct cudaPointerAttributes {
    enum cudaMemoryType type;
};

struct cudaDeviceProp {
    char name[256];
};

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *argument);

#include "runtime_functions.h"

#endif
