/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled where there is a toolkit: compares the emulated GPU's headers (cuda/) with the
 * toolkit's. A constant of another value, or a function of another type, does not compile. */
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/values.h"

#define SAME(name, number) _Static_assert((int)(name) == (number), #name);
EMULATED_ERRORS(SAME)
EMULATED_COPY_KINDS(SAME)
EMULATED_MEMORY_TYPES(SAME)
EMULATED_ATTRIBUTES(SAME)
EMULATED_ENTRY_POINTS(SAME)
EMULATED_FLAGS(SAME)
EMULATED_DRIVER_RESULTS(SAME)
EMULATED_WAITS(SAME)
EMULATED_DATA_TYPES(SAME)
EMULATED_LT_STATUSES(SAME)
EMULATED_LT_OPERATIONS(SAME)
EMULATED_LT_COMPUTES(SAME)
EMULATED_LT_SCALES(SAME)
EMULATED_LT_ATTRIBUTES(SAME)
EMULATED_LT_REDUCTIONS(SAME)
EMULATED_LT_PREFERENCES(SAME)

#include "cuda/cublaslt_functions.h" // NOLINT: declared again, on purpose
#include "cuda/runtime_functions.h"

#define IS(expression, type)                                                                       \
    _Static_assert(_Generic((expression), type : 1, default : 0), #expression)
IS(((struct cudaPointerAttributes *)0)->type, enum cudaMemoryType);
IS(&((struct cudaDeviceProp *)0)->name, char (*)[256]);
IS((cudaStream_t)0, struct CUstream_st *);
IS((CUstream)0, struct CUstream_st *);
IS((cudaEvent_t)0, struct CUevent_st *);
IS((cudaHostFn_t)0, void (*)(void *));
IS((CUdeviceptr)0, unsigned long long);
IS((CUdevice)0, int);
IS((cuuint32_t)0, uint32_t);
IS(&((cublasLtMatmulAlgo_t *)0)->data, uint64_t (*)[8]);
IS(((cublasLtMatmulHeuristicResult_t *)0)->algo, cublasLtMatmulAlgo_t);
IS(((cublasLtMatmulHeuristicResult_t *)0)->workspaceSize, size_t);
IS(((cublasLtMatmulHeuristicResult_t *)0)->state, cublasStatus_t);
_Static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == 96, "of the stand-in");
_Static_assert(CUDART_VERSION >= 12090, "the oldest toolkit that serves");

#if __has_include(<nccl.h>)
#include <nccl.h>

#include "cuda/nccl_functions.h"
#include "cuda/nccl_values.h"

EMULATED_NCCL_RESULTS(SAME)
EMULATED_NCCL_DATA_TYPES(SAME)
EMULATED_NCCL_MACROS(SAME)

/* The emulated configuration, field by field: types and offsets must be the real header's. */
#define NCCL_FIELD(name, type, offset)                                                             \
    IS(((ncclConfig_t *)0)->name, type);                                                           \
    _Static_assert(offsetof(ncclConfig_t, name) == (offset), #name)
NCCL_FIELD(size, size_t, 0);
NCCL_FIELD(magic, unsigned, 8);
NCCL_FIELD(version, unsigned, 12);
NCCL_FIELD(blocking, int, 16);
NCCL_FIELD(cgaClusterSize, int, 20);
NCCL_FIELD(minCTAs, int, 24);
NCCL_FIELD(maxCTAs, int, 28);
NCCL_FIELD(netName, const char *, 32);
NCCL_FIELD(splitShare, int, 40);
NCCL_FIELD(trafficClass, int, 44);
NCCL_FIELD(commName, const char *, 48);
NCCL_FIELD(collnetEnable, int, 56);
NCCL_FIELD(CTAPolicy, int, 60);
NCCL_FIELD(shrinkShare, int, 64);
NCCL_FIELD(nvlsCTAs, int, 68);
NCCL_FIELD(nChannelsPerNetPeer, int, 72);
NCCL_FIELD(nvlinkCentricSched, int, 76);
_Static_assert(sizeof(ncclConfig_t) == 80, "of the stand-in");
_Static_assert(sizeof(ncclUniqueId) == 128, "of the stand-in");
_Static_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN, "of the stand-in");
_Static_assert(NCCL_VERSION_CODE == 22809 && NCCL_VERSION(2, 28, 9) == 22809, "the stand-in's");
IS((ncclComm_t)0, struct ncclComm *);
IS((ncclWindow_t)0, struct ncclWindow_vidmem *);
#endif
