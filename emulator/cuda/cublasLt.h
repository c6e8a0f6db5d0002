/* SPDX-License-Identifier: Apache-2.0 */
/* cublasLt.h -- replaces the toolkit's header: the part that Ballast uses. Handles point to objects
 * of cublaslt.c. For C. */
#ifndef BALLAST_TESTS_EMULATE_CUDA_CUBLASLT_H
#define BALLAST_TESTS_EMULATE_CUDA_CUBLASLT_H

#include <stdint.h>

#include "cuda_runtime_api.h"

typedef enum cudaDataType_t { EMULATED_DATA_TYPES(EMULATED_DEFINE) } cudaDataType;
typedef cudaDataType cudaDataType_t;
typedef enum { EMULATED_LT_STATUSES(EMULATED_DEFINE) } cublasStatus_t;
typedef enum { EMULATED_LT_OPERATIONS(EMULATED_DEFINE) } cublasOperation_t;
typedef enum { EMULATED_LT_COMPUTES(EMULATED_DEFINE) } cublasComputeType_t;
typedef enum { EMULATED_LT_SCALES(EMULATED_DEFINE) } cublasLtMatmulMatrixScale_t;
typedef enum { EMULATED_LT_ATTRIBUTES(EMULATED_DEFINE) } cublasLtMatmulDescAttributes_t;
typedef enum { EMULATED_LT_REDUCTIONS(EMULATED_DEFINE) } cublasLtReductionScheme_t;
typedef enum { EMULATED_LT_PREFERENCES(EMULATED_DEFINE) } cublasLtMatmulPreferenceAttributes_t;

typedef struct cublasLtContext *cublasLtHandle_t;
typedef struct lt_operation *cublasLtMatmulDesc_t;
typedef struct lt_matrix *cublasLtMatrixLayout_t;
typedef struct lt_preference *cublasLtMatmulPreference_t;

typedef struct cublasLtMatmulAlgo_t {
    uint64_t data[8];
} cublasLtMatmulAlgo_t;

typedef struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
} cublasLtMatmulHeuristicResult_t;

#include "cublaslt_functions.h"

#endif
