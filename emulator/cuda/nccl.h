/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.h -- replaces NCCL's header, version 2.28.9: the part that Ballast uses and the fake NCCL
 * offers. For C. */
#ifndef BALLAST_TESTS_EMULATE_CUDA_NCCL_H
#define BALLAST_TESTS_EMULATE_CUDA_NCCL_H

#include <limits.h>

#include "cuda_runtime_api.h"
#include "nccl_values.h"

#define NCCL_MAJOR        2
#define NCCL_MINOR        28
#define NCCL_PATCH        9
#define NCCL_VERSION_CODE 22809
/* Of 2.9 and later. */
#define NCCL_VERSION(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL

typedef enum { EMULATED_NCCL_RESULTS(EMULATED_DEFINE) } ncclResult_t;
typedef enum { EMULATED_NCCL_DATA_TYPES(EMULATED_DEFINE) } ncclDataType_t;
enum { EMULATED_NCCL_MACROS(EMULATED_DEFINE) };

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;

typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef struct ncclConfig_v22800 {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass;
    const char *commName;
    int collnetEnable;
    int CTAPolicy;
    int shrinkShare;
    int nvlsCTAs;
    int nChannelsPerNetPeer;
    int nvlinkCentricSched;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER                                                                    \
    {                                                                                              \
        .size = sizeof(ncclConfig_t), .magic = 0xcafebeef, .version = NCCL_VERSION_CODE,           \
        .blocking = NCCL_CONFIG_UNDEF_INT, .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,                \
        .minCTAs = NCCL_CONFIG_UNDEF_INT, .maxCTAs = NCCL_CONFIG_UNDEF_INT,                        \
        .netName = NCCL_CONFIG_UNDEF_PTR, .splitShare = NCCL_CONFIG_UNDEF_INT,                     \
        .trafficClass = NCCL_CONFIG_UNDEF_INT, .commName = NCCL_CONFIG_UNDEF_PTR,                  \
        .collnetEnable = NCCL_CONFIG_UNDEF_INT, .CTAPolicy = NCCL_CONFIG_UNDEF_INT,                \
        .shrinkShare = NCCL_CONFIG_UNDEF_INT, .nvlsCTAs = NCCL_CONFIG_UNDEF_INT,                   \
        .nChannelsPerNetPeer = NCCL_CONFIG_UNDEF_INT, .nvlinkCentricSched = NCCL_CONFIG_UNDEF_INT, \
    }

#include "nccl_functions.h"

#endif
