/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_values.h -- the constants of NCCL that Ballast names, with NVIDIA's numbers; as values.h. */
#ifndef BALLAST_TESTS_EMULATE_CUDA_NCCL_VALUES_H
#define BALLAST_TESTS_EMULATE_CUDA_NCCL_VALUES_H

#define EMULATED_NCCL_RESULTS(V)                                                                   \
    V(ncclSuccess, 0)                                                                              \
    V(ncclUnhandledCudaError, 1)                                                                   \
    V(ncclSystemError, 2)                                                                          \
    V(ncclInternalError, 3)                                                                        \
    V(ncclInvalidArgument, 4)                                                                      \
    V(ncclInvalidUsage, 5)                                                                         \
    V(ncclRemoteError, 6)                                                                          \
    V(ncclInProgress, 7)                                                                           \
    V(ncclNumResults, 8)

#define EMULATED_NCCL_DATA_TYPES(V)                                                                \
    V(ncclInt8, 0)                                                                                 \
    V(ncclChar, 0)                                                                                 \
    V(ncclUint8, 1)                                                                                \
    V(ncclInt32, 2)                                                                                \
    V(ncclUint32, 3)                                                                               \
    V(ncclInt64, 4)                                                                                \
    V(ncclUint64, 5)                                                                               \
    V(ncclFloat16, 6)                                                                              \
    V(ncclFloat32, 7)                                                                              \
    V(ncclFloat64, 8)                                                                              \
    V(ncclBfloat16, 9)                                                                             \
    V(ncclFloat8e4m3, 10)                                                                          \
    V(ncclFloat8e5m2, 11)                                                                          \
    V(ncclNumTypes, 12)

/* Macros in NVIDIA's header. */
#define EMULATED_NCCL_MACROS(V)                                                                    \
    V(NCCL_UNIQUE_ID_BYTES, 128)                                                                   \
    V(NCCL_SPLIT_NOCOLOR, -1)                                                                      \
    V(NCCL_WIN_DEFAULT, 0)                                                                         \
    V(NCCL_WIN_COLL_SYMMETRIC, 1)                                                                  \
    V(NCCL_WIN_REQUIRED_ALIGNMENT, 4096)                                                           \
    V(NCCL_CTA_POLICY_DEFAULT, 0)                                                                  \
    V(NCCL_CTA_POLICY_EFFICIENCY, 1)                                                               \
    V(NCCL_CTA_POLICY_ZERO, 2)

#endif
