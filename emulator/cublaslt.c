/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLASLt on the CPU: products as its manual defines them, so that the code around products
 * (offsets, strides, scales, order, fallbacks) runs without a GPU. Operands become fp32, FP8 codes
 * with their scales; the CPU's BLAS multiplies on one thread, and the sum is rounded once. This
 * does not show that the real library computes the same: the tests labeled gpu do, on a GPU.
 *
 * Descriptors, layouts and preferences need no GPU: where the toolkit's cuBLASLt is installed a
 * test may have it make them too, and check every attribute. */
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "counts.h"
#include "emulated.h"
#include "fast_sums.h"
#include "fp8/fp8.h"
#include "ops/cpu/f32_kernels.h"
#include "queue.h"
#include "runtime.h"

/* ---- the real one ---- */

#ifndef REAL_CUBLASLT
#define REAL_CUBLASLT "libcublasLt.so"
#endif

static void *real_library; /* NULL: not asked */

bool emulated_cublaslt_ask_real(void)
{
    if (!real_library) real_library = dlopen(REAL_CUBLASLT, RTLD_NOW | RTLD_LOCAL);
    return real_library != NULL;
}

static void *find_real(const char *name)
{
    void *function = dlsym(real_library, name);
    if (!function) abort();
    return function;
}

/* The status of the real function of this name; success where the real library is not in use. */
#define REAL(function, ...)                                                                        \
    (real_library ? ((__typeof__(&function))find_real(#function))(__VA_ARGS__)                     \
                  : CUBLAS_STATUS_SUCCESS)

/* ---- control and inspection by tests ---- */

/* Candidate 0 is slow when asked to be, 1 is offered and then refused, 2 is fine. */
enum { N_CANDIDATES = 3, REFUSED_CANDIDATE = 1, SLOW_MS = 100000, N_SPLITS = 4 };

static atomic_bool refuses_fp8, refuses_fp8_sums, is_first_slow;
static atomic_uint refusal_seed;
static atomic_int status_of_fp8_calls; /* 0: they succeed */
static atomic_int n_multiprocessors;   /* of the last product */
static atomic_int n_products, n_fp8_products, n_split, n_fast_sums, last_candidate, n_heuristics,
    n_failing_heuristics, n_refused_candidates;

void emulated_cublaslt_slow_first(bool slow)
{
    atomic_store(&is_first_slow, slow);
}

int emulated_cublaslt_last_candidate(void)
{
    return atomic_load(&last_candidate);
}

void emulated_cublaslt_refuse_fp8(bool refuse)
{
    atomic_store(&refuses_fp8, refuse);
}

void emulated_cublaslt_refuse_fp8_sums(bool refuse)
{
    atomic_store(&refuses_fp8_sums, refuse);
}

void emulated_cublaslt_refuse_fp8_calls(int status)
{
    atomic_store(&status_of_fp8_calls, status);
}

void emulated_cublaslt_refuse_at_random(unsigned seed)
{
    atomic_store(&refusal_seed, seed);
}

void emulated_cublaslt_refuse_candidates(int n)
{
    atomic_store(&n_refused_candidates, n);
}

void emulated_cublaslt_fail_heuristics(int n)
{
    atomic_store(&n_failing_heuristics, n);
}

int emulated_cublaslt_heuristics(void)
{
    return atomic_load(&n_heuristics);
}

int emulated_cublaslt_products(void)
{
    return atomic_load(&n_products);
}

int emulated_cublaslt_fp8_products(void)
{
    return atomic_load(&n_fp8_products);
}

int emulated_cublaslt_split_products(void)
{
    return atomic_load(&n_split);
}

int emulated_cublaslt_multiprocessors(void)
{
    return atomic_load(&n_multiprocessors);
}

int emulated_cublaslt_fast_sums(void)
{
    return atomic_load(&n_fast_sums);
}

/* ---- descriptors; the library's handles point to these ---- */

typedef struct lt_operation {
    cublasLtMatmulDesc_t real;
    int32_t transpose_a, transpose_b, scale_mode_a, scale_mode_b, multiprocessors;
    const float *scale_a, *scale_b;
    int8_t fast_sums;
} lt_operation;

typedef struct lt_matrix {
    cublasLtMatrixLayout_t real;
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
} lt_matrix;

typedef struct lt_preference {
    cublasLtMatmulPreference_t real;
    uint32_t reductions; /* mask; all, as the library has it, until it is set */
    uint64_t workspace_bytes;
} lt_preference;

size_t cublasLtGetVersion(void)
{
    return 130000;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_SUPPORTED ? "not supported by the emulated cuBLASLt"
                                                 : "an error of the emulated cuBLASLt";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out)
{
    *out = malloc(1);
    return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    lt_operation *operation = calloc(1, sizeof *operation);

    *out = operation;
    if (!operation) return CUBLAS_STATUS_ALLOC_FAILED;
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
    return REAL(cublasLtMatmulDescCreate, &operation->real, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle)
{
    cublasLtMatmulDesc_t real = handle->real;
    free(handle);
    return real ? REAL(cublasLtMatmulDescDestroy, real) : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    lt_operation *o = handle;
    const struct {
        cublasLtMatmulDescAttributes_t attribute;
        void *to;
        size_t bytes;
    } known[] = {
        {CUBLASLT_MATMUL_DESC_TRANSA, &o->transpose_a, sizeof o->transpose_a},
        {CUBLASLT_MATMUL_DESC_TRANSB, &o->transpose_b, sizeof o->transpose_b},
        {CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &o->multiprocessors, sizeof o->multiprocessors},
        {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &o->scale_mode_a, sizeof o->scale_mode_a},
        {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &o->scale_mode_b, sizeof o->scale_mode_b},
        {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &o->scale_a, sizeof o->scale_a},
        {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &o->scale_b, sizeof o->scale_b},
        {CUBLASLT_MATMUL_DESC_FAST_ACCUM, &o->fast_sums, sizeof o->fast_sums},
    };

    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute != attribute) continue;
        if (known[i].bytes != bytes) return CUBLAS_STATUS_INVALID_VALUE;
        memcpy(known[i].to, value, bytes);
        return o->real ? REAL(cublasLtMatmulDescSetAttribute, o->real, attribute, value, bytes)
                       : CUBLAS_STATUS_SUCCESS;
    }
    /* it would change the product, and nothing here would know */
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    lt_matrix *matrix = calloc(1, sizeof *matrix);

    *out = matrix;
    if (!matrix) return CUBLAS_STATUS_ALLOC_FAILED;
    *matrix = (lt_matrix){.type = type, .rows = rows, .cols = cols, .ld = ld};
    if (ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    return REAL(cublasLtMatrixLayoutCreate, &matrix->real, type, rows, cols, ld);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle)
{
    cublasLtMatrixLayout_t real = handle->real;
    free(handle);
    return real ? REAL(cublasLtMatrixLayoutDestroy, real) : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out)
{
    lt_preference *preference = calloc(1, sizeof *preference);

    *out = preference;
    if (!preference) return CUBLAS_STATUS_ALLOC_FAILED;
    preference->reductions = UINT32_MAX;
    return REAL(cublasLtMatmulPreferenceCreate, &preference->real);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle)
{
    cublasLtMatmulPreference_t real = handle->real;
    free(handle);
    return real ? REAL(cublasLtMatmulPreferenceDestroy, real) : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes)
{
    cublasLtMatmulPreference_t real = handle->real;
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        memcpy(&handle->reductions, value, sizeof handle->reductions);
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        memcpy(&handle->workspace_bytes, value, sizeof handle->workspace_bytes);
    return real ? REAL(cublasLtMatmulPreferenceSetAttribute, real, attribute, value, bytes)
                : CUBLAS_STATUS_SUCCESS;
}

/* ---- the manual's requirements ---- */

static bool is_fp8(const lt_matrix *m)
{
    return m->type == CUDA_R_8F_E4M3;
}

/* The manual's requirements that the heuristic need not check: cuBLAS 13, "Narrow Precision Data
 * Types Usage" and the requirements of FP8 kernels under cublasLtMatmul. An FP8 product that does
 * not meet them must not even be requested. */
static void demand(bool is_met, const char *what)
{
    if (is_met) return;
    fprintf(stderr, "emulated cuBLASLt: an FP8 product: %s\n", what);
    abort();
}

static void demand_what_the_manual_says(const lt_operation *o, const lt_matrix *A,
                                        const lt_matrix *B, const lt_matrix *D)
{
    int32_t outer = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
            block = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
            vector = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
            scalar = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, a = o->scale_mode_a,
            b = o->scale_mode_b;

    demand(o->transpose_a == CUBLAS_OP_T && o->transpose_b == CUBLAS_OP_N,
           "A is transposed and B is not");
    demand(A->rows % 16 == 0 && A->ld % 16 == 0 && B->ld % 16 == 0,
           "k and the leading dimensions are multiples of 16 bytes");
    demand(D->rows % 8 == 0 && D->ld % 8 == 0 && D->type == CUDA_R_16BF,
           "D is bf16 in columns of 16 bytes");
    demand((a == outer && b == outer) || (a == block && b == vector) ||
               (a == scalar && b == scalar),
           "these modes of scaling go together");
    demand(a != block || (D->rows % 4 == 0 && D->cols % 4 == 0),
           "M and N are multiples of 4 for blocks of 128");
    demand(o->scale_a && (uintptr_t)o->scale_a % 16 == 0 && o->scale_b &&
               (uintptr_t)o->scale_b % 16 == 0,
           "scales begin at 16 bytes");
}

/* By chance: whether such a product is refused at this point, and how. */
static cublasStatus_t refuse_by_chance(const lt_operation *o, bool adds, uint64_t n_cols,
                                       bool is_call)
{
    static const cublasStatus_t statuses[] = {
        CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_ARCH_MISMATCH,
        CUBLAS_STATUS_INTERNAL_ERROR};
    uint64_t seed = atomic_load(&refusal_seed);
    if (seed == 0) return CUBLAS_STATUS_SUCCESS;
    /* The search does not get beta. */
    uint64_t x = seed * 1000003 + (uint64_t)o->scale_mode_a * 257 + (is_call && adds ? 131 : 0) +
                 n_cols % 16 * 17 + (is_call ? 7 : 0);
    x = (x ^ (x >> 31)) * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 29)) * UINT64_C(0xBF58476D1CE4E5B9);
    x ^= x >> 32;
    return x % 5 < 2 ? statuses[x / 5 % 4] : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int n_wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *n_results)
{
    (void)handle;
    atomic_fetch_add(&n_heuristics, 1);
    /* Ballast's bits repeat: no partial sums, or those that a separate kernel adds in order. */
    bool splits = preference->reductions == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    size_t partial_bytes = N_SPLITS * d->rows * d->cols * sizeof(float);
    if ((!splits && preference->reductions != CUBLASLT_REDUCTION_SCHEME_NONE) ||
        (splits && is_fp8(a)) || c != d || n_wanted < N_CANDIDATES)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (atomic_load(&n_failing_heuristics) > 0) {
        atomic_fetch_sub(&n_failing_heuristics, 1);
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    if (is_fp8(a)) demand_what_the_manual_says(operation, a, b, d);
    cublasStatus_t by_chance =
        is_fp8(a) ? refuse_by_chance(operation, false, d->cols, false) : CUBLAS_STATUS_SUCCESS;
    if (by_chance != CUBLAS_STATUS_SUCCESS) return by_chance;
    bool served = !is_fp8(a) || (!atomic_load(&refuses_fp8) && emulated_settings_get()->has_fp8);
    bool fits = splits && partial_bytes <= preference->workspace_bytes;
    *n_results = served ? N_CANDIDATES : 0;
    for (int i = 0; i < *n_results; i++) {
        results[i].state = CUBLAS_STATUS_SUCCESS;
        results[i].algo.data[0] = (uint64_t)i;
        results[i].algo.data[1] = fits ? N_SPLITS : 1;
        results[i].workspaceSize = fits ? partial_bytes : 0;
    }
    return served ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ---- products ---- */

typedef struct lt_product {
    lt_operation operation;
    lt_matrix a, b, d;
    float alpha, beta;
    const void *A, *B, *C;
    void *D;
    int is_slow, n_splits; /* n_splits: of the sum */
} lt_product;

/* Of element (outer, inner) of an operand with `n_outer` rows or columns and n_inner along the
 * sum. */
static float scale_of(int32_t mode, const float *scales, int64_t outer, int64_t n_outer,
                      int64_t inner, int64_t n_inner)
{
    int64_t stride = ((n_inner + 127) / 128 + 3) / 4 * 4;
    switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F:
        return scales ? scales[0] : 1.0f;
    case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
        return scales[outer];
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
        return scales[inner / 128 * n_outer + outer];
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
        return scales[outer / 128 * stride + inner / 128];
    default:
        abort();
    }
}

static void *take(int64_t n, size_t each)
{
    void *memory = malloc((size_t)n * each + 1);
    if (!memory) {
        fprintf(stderr, "emulated cuBLASLt: no memory for a product\n");
        abort();
    }
    return memory;
}

/* Of which the sums, not the terms, are scaled. */
static bool has_fast_sums(const lt_operation *o, const lt_matrix *a)
{
    return is_fp8(a) && o->fast_sums &&
           o->scale_mode_a != CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

/* FP8 operands have the sum's direction along their columns (demand_what_the_manual_says): a column
 * is one outer index. */
static void widen_codes(const lt_matrix *m, const uint8_t *codes, int32_t mode, const float *scales,
                        float *out)
{
    int64_t n_inner = (int64_t)m->rows, n_outer = (int64_t)m->cols;
    for (int64_t outer = 0; outer < n_outer; outer++)
        for (int64_t begin = 0; begin < n_inner; begin += 128) {
            int64_t end = begin + 128 < n_inner ? begin + 128 : n_inner;
            float scale = scale_of(mode, scales, outer, n_outer, begin, n_inner);
            for (int64_t i = begin; i < end; i++)
                out[outer * n_inner + i] = scale * bl_e4m3_to_f32(codes[outer * m->ld + i]);
        }
}

/* The matrix as stored, column after column without gaps, in fp32. The caller frees it. */
static float *widen(const lt_matrix *m, const void *values, int32_t mode, const float *scales)
{
    int64_t rows = (int64_t)m->rows, cols = (int64_t)m->cols;
    float *out = take(rows * cols, sizeof *out);
    if (is_fp8(m)) {
        widen_codes(m, values, mode, scales, out);
        return out;
    }
    for (int64_t col = 0; col < cols; col++)
        for (int64_t row = 0; row < rows; row++)
            out[col * rows + row] = bl_bf16_to_f32(((const uint16_t *)values)[col * m->ld + row]);
    return out;
}

/* D = alpha sums + beta C, each rounded once. C may be D: an element is read before it is
 * written. */
static void write_result(const lt_product *p, const float *sums)
{
    int64_t m = (int64_t)p->d.rows, n = (int64_t)p->d.cols;
    bool is_half = p->d.type == CUDA_R_16BF;
    for (int64_t col = 0; col < n; col++)
        for (int64_t row = 0; row < m; row++) {
            int64_t at = col * p->d.ld + row;
            double value = (double)p->alpha * (double)sums[col * m + row];
            if (p->beta != 0)
                value += (double)p->beta *
                         (double)(is_half ? bl_bf16_to_f32(((const uint16_t *)p->C)[at])
                                          : ((const float *)p->C)[at]);
            if (is_half)
                ((uint16_t *)p->D)[at] = bl_f32_to_bf16((float)value);
            else
                ((float *)p->D)[at] = (float)value;
        }
}

/* A and B: operands without scales, k along each of their columns. */
static void add_fast(const lt_product *p, int64_t k, const float *A, const float *B, float *sums)
{
    const lt_operation *o = &p->operation;
    int64_t m = (int64_t)p->d.rows, n = (int64_t)p->d.cols;

    for (int64_t col = 0; col < n; col++)
        for (int64_t row = 0; row < m; row++)
            sums[col * m + row] = scale_of(o->scale_mode_a, o->scale_a, row, m, 0, k) *
                                  scale_of(o->scale_mode_b, o->scale_b, col, n, 0, k) *
                                  emulated_fast_sum(k, A + row * k, B + col * k);
}

/* A column-major product is a row-major one of the same memory with the operands' places changed:
 * D^T (n,m) = op(B)^T op(A)^T. */
static void multiply(void *argument)
{
    lt_product *p = argument;
    const lt_operation *o = &p->operation;
    int64_t m = (int64_t)p->d.rows, n = (int64_t)p->d.cols;
    bool turn_a = o->transpose_a == CUBLAS_OP_T, turn_b = o->transpose_b == CUBLAS_OP_T;
    int64_t k = (int64_t)(turn_a ? p->a.rows : p->a.cols);
    bool is_fast = has_fast_sums(o, &p->a);
    int32_t plain = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    float *A = widen(&p->a, p->A, is_fast ? plain : o->scale_mode_a, is_fast ? NULL : o->scale_a),
          *B = widen(&p->b, p->B, is_fast ? plain : o->scale_mode_b, is_fast ? NULL : o->scale_b),
          *sums = take(m * n, sizeof *sums);
    ops_f32_scratch *scratch = take(1, sizeof *scratch);

    if (p->is_slow) emulated_cuda_pretend_ms(SLOW_MS);
    if (is_fast) add_fast(p, k, A, B, sums);
    for (int i = 0; i < p->n_splits && !is_fast; i++) {
        int64_t begin = k * i / p->n_splits, end = k * (i + 1) / p->n_splits;
        const float *a = A + (turn_a ? begin : begin * (int64_t)p->a.rows),
                    *b = B + (turn_b ? begin * (int64_t)p->b.rows : begin);
        if (end > begin)
            ops_f32_gemm(turn_b, turn_a, n, m, end - begin, 1.0f, b, (int64_t)p->b.rows, a,
                         (int64_t)p->a.rows, i > 0 ? 1.0f : 0.0f, sums, m, scratch);
    }
    write_result(p, sums);
    free(A), free(B), free(sums), free(scratch), free(p);
}

static bool shapes_agree(const lt_product *p)
{
    bool turn_a = p->operation.transpose_a == CUBLAS_OP_T,
         turn_b = p->operation.transpose_b == CUBLAS_OP_T;
    uint64_t k = turn_a ? p->a.rows : p->a.cols;
    return (turn_a ? p->a.cols : p->a.rows) == p->d.rows &&
           (turn_b ? p->b.rows : p->b.cols) == p->d.cols && (turn_b ? p->b.cols : p->b.rows) == k &&
           p->a.type == p->b.type && (is_fp8(&p->a) || p->a.type == CUDA_R_16BF) &&
           (p->d.type == CUDA_R_16BF || p->d.type == CUDA_R_32F);
}

static void note_product(const lt_product *p)
{
    atomic_fetch_add(&n_products, 1);
    if (p->n_splits > 1) emulated_count("product:split", 0), atomic_fetch_add(&n_split, 1);
    emulated_count(is_fp8(&p->a) ? "product:fp8" : "product:bf16", 0);
    atomic_store(&n_multiprocessors, p->operation.multiprocessors);
    if (p->operation.multiprocessors > 0) {
        char what[32];
        snprintf(what, sizeof what, "product_on:%d", p->operation.multiprocessors);
        emulated_count(what, 0);
    }
    if (!is_fp8(&p->a)) return;
    demand((uintptr_t)p->A % 16 == 0 && (uintptr_t)p->B % 16 == 0 && (uintptr_t)p->D % 16 == 0 &&
               (p->beta == 0 || (uintptr_t)p->C % 16 == 0),
           "matrices begin at 16 bytes");
    demand_what_the_manual_says(&p->operation, &p->a, &p->b, &p->d);
    atomic_fetch_add(&n_fp8_products, 1);
    atomic_fetch_add(&n_fast_sums, p->operation.fast_sums);
}

/* A product that the heuristic offers and the call rejects. */
static bool is_refused(const lt_product *p, int candidate)
{
    if (candidate == REFUSED_CANDIDATE || candidate < atomic_load(&n_refused_candidates))
        return true;
    return is_fp8(&p->a) && p->beta != 0 && atomic_load(&refuses_fp8_sums);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void *alpha, const void *A, cublasLtMatrixLayout_t a,
                              const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D,
                              cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algorithm,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    int candidate = (int)algorithm->data[0];
    lt_product product = {.operation = *operation,
                          .a = *a,
                          .b = *b,
                          .d = *d,
                          .alpha = *(const float *)alpha,
                          .beta = *(const float *)beta,
                          .A = A,
                          .B = B,
                          .C = C,
                          .D = D,
                          .is_slow = candidate == 0 && atomic_load(&is_first_slow),
                          .n_splits = (int)algorithm->data[1]};

    (void)handle;
    if (is_fp8(&product.a) && atomic_load(&status_of_fp8_calls) != CUBLAS_STATUS_SUCCESS)
        return (cublasStatus_t)atomic_load(&status_of_fp8_calls);
    cublasStatus_t by_chance =
        is_fp8(&product.a) ? refuse_by_chance(operation, product.beta != 0, product.d.cols, true)
                           : CUBLAS_STATUS_SUCCESS;
    if (by_chance != CUBLAS_STATUS_SUCCESS) return by_chance;
    /* Of beta the library may say either. */
    if (is_refused(&product, candidate))
        return product.beta != 0 && is_fp8(&product.a) ? CUBLAS_STATUS_INVALID_VALUE
                                                       : CUBLAS_STATUS_NOT_SUPPORTED;
    if (product.n_splits > 1 &&
        (!workspace || workspace_bytes < N_SPLITS * d->rows * d->cols * sizeof(float)))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (c != d || (uintptr_t)workspace % 256 != 0 || !shapes_agree(&product))
        return CUBLAS_STATUS_INVALID_VALUE;
    atomic_store(&last_candidate, candidate);
    note_product(&product);
    lt_product *queued = take(1, sizeof product);
    *queued = product;
    if (emulated_queue(stream, multiply, queued) == cudaSuccess) return CUBLAS_STATUS_SUCCESS;
    free(queued);
    return CUBLAS_STATUS_EXECUTION_FAILED;
}
