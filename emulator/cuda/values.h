/* SPDX-License-Identifier: Apache-2.0 */
/* values.h -- the constants of CUDA that Ballast names, with NVIDIA's numbers: lists of V(name,
 * number). The headers of this directory define them; where there is a toolkit, check_headers.c
 * compares them with its own. */
#ifndef BALLAST_TESTS_EMULATE_CUDA_VALUES_H
#define BALLAST_TESTS_EMULATE_CUDA_VALUES_H

#define EMULATED_DEFINE(name, number) name = number,

#define EMULATED_ERRORS(V)                                                                         \
    V(cudaSuccess, 0)                                                                              \
    V(cudaErrorInvalidValue, 1)                                                                    \
    V(cudaErrorMemoryAllocation, 2)                                                                \
    V(cudaErrorInitializationError, 3)                                                             \
    V(cudaErrorInvalidConfiguration, 9)                                                            \
    V(cudaErrorStubLibrary, 34)                                                                    \
    V(cudaErrorInsufficientDriver, 35)                                                             \
    V(cudaErrorDevicesUnavailable, 46)                                                             \
    V(cudaErrorNoDevice, 100)                                                                      \
    V(cudaErrorInvalidDevice, 101)                                                                 \
    V(cudaErrorNoKernelImageForDevice, 209)                                                        \
    V(cudaErrorECCUncorrectable, 214)                                                              \
    V(cudaErrorNvlinkUncorrectable, 220)                                                           \
    V(cudaErrorUnsupportedPtxVersion, 222)                                                         \
    V(cudaErrorOperatingSystem, 304)                                                               \
    V(cudaErrorInvalidResourceHandle, 400)                                                         \
    V(cudaErrorNotReady, 600)                                                                      \
    V(cudaErrorIllegalAddress, 700)                                                                \
    V(cudaErrorSystemNotReady, 802)                                                                \
    V(cudaErrorSystemDriverMismatch, 803)                                                          \
    V(cudaErrorCompatNotSupportedOnDevice, 804)                                                    \
    V(cudaErrorUnknown, 999)

#define EMULATED_COPY_KINDS(V)                                                                     \
    V(cudaMemcpyHostToHost, 0)                                                                     \
    V(cudaMemcpyHostToDevice, 1)                                                                   \
    V(cudaMemcpyDeviceToHost, 2)                                                                   \
    V(cudaMemcpyDeviceToDevice, 3)                                                                 \
    V(cudaMemcpyDefault, 4)

#define EMULATED_MEMORY_TYPES(V)                                                                   \
    V(cudaMemoryTypeUnregistered, 0)                                                               \
    V(cudaMemoryTypeHost, 1)                                                                       \
    V(cudaMemoryTypeDevice, 2)                                                                     \
    V(cudaMemoryTypeManaged, 3)

#define EMULATED_ATTRIBUTES(V)                                                                     \
    V(cudaDevAttrMultiProcessorCount, 16)                                                          \
    V(cudaDevAttrComputeCapabilityMajor, 75)                                                       \
    V(cudaDevAttrComputeCapabilityMinor, 76)

#define EMULATED_ENTRY_POINTS(V) V(cudaDriverEntryPointSuccess, 0)

#define EMULATED_FLAGS(V)                                                                          \
    V(cudaStreamNonBlocking, 1)                                                                    \
    V(cudaEventDefault, 0)                                                                         \
    V(cudaEventBlockingSync, 1)                                                                    \
    V(cudaEventDisableTiming, 2)                                                                   \
    V(cudaHostRegisterPortable, 1)                                                                 \
    V(cudaHostRegisterMapped, 2)                                                                   \
    V(cudaEnableDefault, 0)

#define EMULATED_DRIVER_RESULTS(V)                                                                 \
    V(CUDA_SUCCESS, 0)                                                                             \
    V(CUDA_ERROR_INVALID_VALUE, 1)                                                                 \
    V(CUDA_ERROR_INVALID_HANDLE, 400)

#define EMULATED_WAITS(V) V(CU_STREAM_WAIT_VALUE_GEQ, 0)

#define EMULATED_DATA_TYPES(V)                                                                     \
    V(CUDA_R_32F, 0)                                                                               \
    V(CUDA_R_16BF, 14)                                                                             \
    V(CUDA_R_8F_E4M3, 28)

#define EMULATED_LT_STATUSES(V)                                                                    \
    V(CUBLAS_STATUS_SUCCESS, 0)                                                                    \
    V(CUBLAS_STATUS_ALLOC_FAILED, 3)                                                               \
    V(CUBLAS_STATUS_INVALID_VALUE, 7)                                                              \
    V(CUBLAS_STATUS_ARCH_MISMATCH, 8)                                                              \
    V(CUBLAS_STATUS_EXECUTION_FAILED, 13)                                                          \
    V(CUBLAS_STATUS_INTERNAL_ERROR, 14)                                                            \
    V(CUBLAS_STATUS_NOT_SUPPORTED, 15)

#define EMULATED_LT_OPERATIONS(V)                                                                  \
    V(CUBLAS_OP_N, 0)                                                                              \
    V(CUBLAS_OP_T, 1)

#define EMULATED_LT_COMPUTES(V) V(CUBLAS_COMPUTE_32F, 68)

#define EMULATED_LT_SCALES(V)                                                                      \
    V(CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, 0)                                                  \
    V(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, 3)                                               \
    V(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, 4)                                                  \
    V(CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, 5)

#define EMULATED_LT_ATTRIBUTES(V)                                                                  \
    V(CUBLASLT_MATMUL_DESC_TRANSA, 3)                                                              \
    V(CUBLASLT_MATMUL_DESC_TRANSB, 4)                                                              \
    V(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, 15)                                                    \
    V(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, 17)                                                    \
    V(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, 18)                                                    \
    V(CUBLASLT_MATMUL_DESC_FAST_ACCUM, 25)                                                         \
    V(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, 31)                                                       \
    V(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, 32)

#define EMULATED_LT_REDUCTIONS(V)                                                                  \
    V(CUBLASLT_REDUCTION_SCHEME_NONE, 0)                                                           \
    V(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 2)

#define EMULATED_LT_PREFERENCES(V)                                                                 \
    V(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 1)                                                 \
    V(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 3)                                               \
    V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 5)                                               \
    V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 6)                                               \
    V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 7)                                               \
    V(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 8)

#endif
