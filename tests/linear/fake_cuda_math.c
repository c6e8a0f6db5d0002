/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLASLt and the kernels under the linear layer as plain loops, behind the fake runtime of tests/device:
 * what the headers and NVIDIA's documentation say that they compute, so that everything around them (offsets,
 * strides, scales, order, fallbacks) can be tested without a GPU. Nothing here says that the real ones
 * compute the same: the tests labelled gpu do.
 *
 * Descriptors, layouts and preferences need no GPU: the real cuBLASLt makes them, too, and sees every
 * attribute. */
#include "fake_cuda_math.h"
#include "fake_cudart.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "fp8/cuda/fp8_cuda.h"
#include "ops/cuda/ops_cuda.h"
#include "ops/philox.h"

/* ---- cuBLASLt ---- */

/* The library's own function of the name that stands here. */
static void *find_real(const char *name)
{
    void *function = dlsym(RTLD_NEXT, name);
    if (!function) abort();
    return function;
}
#define REAL(function, ...) ((__typeof__(&function))find_real(#function))(__VA_ARGS__)

typedef struct fake_operation {
    cublasLtMatmulDesc_t real;
    int32_t transpose_a, transpose_b, scale_mode_a, scale_mode_b;
    const float *scale_a, *scale_b;
    int8_t fast_sums;
} fake_operation;

typedef struct fake_matrix {
    cublasLtMatrixLayout_t real;
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
} fake_matrix;

typedef struct fake_product {
    fake_operation operation;
    fake_matrix a, b, d;
    float alpha, beta;
    const void *A, *B;
    void *D;
    bool is_slow;
} fake_product;

/* Candidate 0 is slow when asked to be, 1 is offered and then refused, 2 is fine. */
enum { N_CANDIDATES = 3, REFUSED_CANDIDATE = 1, SLOW_MS = 100000 };

static atomic_bool refuses_fp8, is_first_slow;
static atomic_int n_products, n_fp8_products, n_fast_sums, last_candidate;

void fake_cublaslt_slow_first(bool slow)
{
    atomic_store(&is_first_slow, slow);
}

int fake_cublaslt_last_candidate(void)
{
    return atomic_load(&last_candidate);
}

void fake_cublaslt_refuse_fp8(bool refuse)
{
    atomic_store(&refuses_fp8, refuse);
}

int fake_cublaslt_products(void)
{
    return atomic_load(&n_products);
}

int fake_cublaslt_fp8_products(void)
{
    return atomic_load(&n_fp8_products);
}

int fake_cublaslt_fast_sums(void)
{
    return atomic_load(&n_fast_sums);
}

size_t cublasLtGetVersion(void)
{
    return 130000;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    (void)status;
    return "a fake status";
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
    fake_operation *operation = calloc(1, sizeof *operation);
    *out = (cublasLtMatmulDesc_t)(void *)operation;
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
    return REAL(cublasLtMatmulDescCreate, &operation->real, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation)
{
    cublasStatus_t status =
        REAL(cublasLtMatmulDescDestroy, ((fake_operation *)(void *)operation)->real);
    free(operation);
    return status;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    fake_operation *o = (fake_operation *)(void *)operation;
    void *to = attribute == CUBLASLT_MATMUL_DESC_TRANSA            ? (void *)&o->transpose_a
               : attribute == CUBLASLT_MATMUL_DESC_TRANSB          ? (void *)&o->transpose_b
               : attribute == CUBLASLT_MATMUL_DESC_A_SCALE_MODE    ? (void *)&o->scale_mode_a
               : attribute == CUBLASLT_MATMUL_DESC_B_SCALE_MODE    ? (void *)&o->scale_mode_b
               : attribute == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER ? (void *)&o->scale_a
               : attribute == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER ? (void *)&o->scale_b
               : attribute == CUBLASLT_MATMUL_DESC_FAST_ACCUM      ? (void *)&o->fast_sums
                                                                   : NULL;
    if (to) memcpy(to, value, bytes);
    return REAL(cublasLtMatmulDescSetAttribute, o->real, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    fake_matrix *matrix = calloc(1, sizeof *matrix);
    *matrix = (fake_matrix){NULL, type, rows, cols, ld};
    *out = (cublasLtMatrixLayout_t)(void *)matrix;
    if (ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    return REAL(cublasLtMatrixLayoutCreate, &matrix->real, type, rows, cols, ld);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t matrix)
{
    cublasStatus_t status =
        REAL(cublasLtMatrixLayoutDestroy, ((fake_matrix *)(void *)matrix)->real);
    free(matrix);
    return status;
}

static bool is_fp8(const fake_matrix *matrix)
{
    return matrix->type == CUDA_R_8F_E4M3;
}

/* What the manual demands and the heuristic need not look at: cuBLAS 13, "Narrow Precision Data Types Usage" and the requirements of FP8
 * kernels under cublasLtMatmul. An FP8 product that does not meet it must not even be asked for. */
static void demand(bool is_met, const char *what)
{
    if (is_met) return;
    fprintf(stderr, "fake cuBLASLt: an FP8 product: %s\n", what);
    abort();
}

static void demand_what_the_manual_says(const fake_operation *o, const fake_matrix *A,
                                        const fake_matrix *B, const fake_matrix *D)
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

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int n_wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *n_results)
{
    const fake_operation *o = (const fake_operation *)(const void *)operation;
    const fake_matrix *A = (const fake_matrix *)(const void *)a,
                      *B = (const fake_matrix *)(const void *)b,
                      *D = (const fake_matrix *)(const void *)d;
    (void)handle, (void)preference;
    if (c != d || n_wanted < N_CANDIDATES) return CUBLAS_STATUS_INVALID_VALUE;
    if (is_fp8(A)) demand_what_the_manual_says(o, A, B, D);
    bool served = !is_fp8(A) || !atomic_load(&refuses_fp8);
    *n_results = served ? N_CANDIDATES : 0;
    for (int i = 0; i < *n_results; i++) {
        results[i].state = CUBLAS_STATUS_SUCCESS;
        results[i].workspaceSize = 0;
        results[i].algo.data[0] = (uint64_t)i;
    }
    return served ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Element (row, col) of op(matrix). */
static float element(const fake_matrix *m, const void *values, int32_t transpose, int64_t row,
                     int64_t col)
{
    int64_t at = transpose == CUBLAS_OP_T ? row * m->ld + col : col * m->ld + row;
    return is_fp8(m) ? bl_e4m3_to_f32(((const uint8_t *)values)[at])
                     : bl_bf16_to_f32(((const uint16_t *)values)[at]);
}

/* Of element (outer, inner) of an operand with `n_outer` rows or columns and n_inner along the sum. */
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

static void multiply(void *argument)
{
    fake_product *p = argument;
    const fake_operation *o = &p->operation;
    int64_t m = (int64_t)p->d.rows, n = (int64_t)p->d.cols;
    int64_t k = (int64_t)(o->transpose_a == CUBLAS_OP_T ? p->a.rows : p->a.cols);
    if (p->is_slow) fake_cuda_pretend_ms(SLOW_MS);
    for (int64_t col = 0; col < n; col++)
        for (int64_t row = 0; row < m; row++) {
            double sum = 0;
            for (int64_t i = 0; i < k; i++) {
                double product = (double)element(&p->a, p->A, o->transpose_a, row, i) *
                                 (double)element(&p->b, p->B, o->transpose_b, i, col);
                sum += product * (double)scale_of(o->scale_mode_a, o->scale_a, row, m, i, k) *
                       (double)scale_of(o->scale_mode_b, o->scale_b, col, n, i, k);
            }
            int64_t at = col * p->d.ld + row;
            uint16_t *halves = p->D;
            float *floats = p->D;
            bool is_half = p->d.type == CUDA_R_16BF;
            double before =
                p->beta == 0 ? 0 : (double)(is_half ? bl_bf16_to_f32(halves[at]) : floats[at]);
            float value = (float)((double)p->alpha * sum + (double)p->beta * before);
            if (is_half)
                halves[at] = bl_f32_to_bf16(value);
            else
                floats[at] = value;
        }
    free(p);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void *alpha, const void *A, cublasLtMatrixLayout_t a,
                              const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D,
                              cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algorithm,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    int candidate = (int)algorithm->data[0];
    (void)handle, (void)workspace_bytes;
    if (candidate == REFUSED_CANDIDATE) return CUBLAS_STATUS_NOT_SUPPORTED;
    atomic_store(&last_candidate, candidate);
    fake_product *p = malloc(sizeof *p);
    *p = (fake_product){*(const fake_operation *)(const void *)operation,
                        *(const fake_matrix *)(const void *)a,
                        *(const fake_matrix *)(const void *)b,
                        *(const fake_matrix *)(const void *)d,
                        *(const float *)alpha,
                        *(const float *)beta,
                        A,
                        B,
                        D,
                        candidate == 0 && atomic_load(&is_first_slow)};
    if (C != D || c != d || (uintptr_t)workspace % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    atomic_fetch_add(&n_products, 1);
    if (is_fp8(&p->a)) {
        demand((uintptr_t)A % 16 == 0 && (uintptr_t)B % 16 == 0 && (uintptr_t)D % 16 == 0,
               "matrices begin at 16 bytes");
        demand_what_the_manual_says(&p->operation, &p->a, &p->b, &p->d);
        atomic_fetch_add(&n_fp8_products, 1);
        atomic_fetch_add(&n_fast_sums, p->operation.fast_sums);
    }
    return cudaLaunchHostFunc(stream, multiply, p) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                  : CUBLAS_STATUS_EXECUTION_FAILED;
}

/* ---- fp8_cuda.h ---- */

typedef struct move {
    bl_format format;
    const void *src;
    const float *scales, *factor;
    int64_t rows, cols, ld;
    void *dst;
    float *dst_scales;
    float value;
} move;

static bl_status dequantise_task(bl_stream *stream, const void *args)
{
    const move *m = args;
    float *row = malloc((size_t)m->cols * sizeof *row);
    (void)stream;
    for (int64_t r = 0; r < m->rows; r++) {
        bl_fp8_dequantise_tile(m->format, m->src, m->scales, m->cols, r, r + 1, 0, m->cols, row,
                               m->cols);
        for (int64_t c = 0; c < m->cols; c++)
            ((uint16_t *)m->dst)[r * m->cols + c] = bl_f32_to_bf16(row[c]);
    }
    free(row);
    return BL_OK;
}

bl_status fp8_cuda_dequantise(bl_stream *stream, bl_format format, const void *codes,
                              const float *scales, int64_t rows, int64_t cols, void *dst)
{
    move m = {
        .format = format, .src = codes, .scales = scales, .rows = rows, .cols = cols, .dst = dst};
    return bl_stream_call(stream, dequantise_task, &m, sizeof m);
}

/* Columns [begin, end) of row t. */
static float quantise_piece(const move *m, int64_t t, int64_t begin, int64_t end)
{
    const uint16_t *x = (const uint16_t *)m->src + t * m->ld;
    float absmax = 0;
    for (int pass = 0; pass < 2; pass++) {
        float scale = bl_fp8_scale(absmax);
        for (int64_t c = begin; c < end; c++) {
            float value = bl_bf16_to_f32(x[c]) * (m->factor ? m->factor[c] : 1.0f);
            if (pass == 0)
                absmax = fmaxf(absmax, fabsf(value));
            else
                ((uint8_t *)m->dst)[t * m->cols + c] = bl_f32_to_e4m3(value / scale);
        }
    }
    return bl_fp8_scale(absmax);
}

static bl_status quantise_rows_task(bl_stream *stream, const void *args)
{
    const move *m = args;
    (void)stream;
    for (int64_t t = 0; t < m->rows; t++) m->dst_scales[t] = quantise_piece(m, t, 0, m->cols);
    return BL_OK;
}

bl_status fp8_cuda_quantise_rows(bl_stream *stream, const void *x, int64_t ld,
                                 const float *column_factor, int64_t T, int64_t cols,
                                 uint8_t *codes, float *scales)
{
    move m = {.src = x,
              .factor = column_factor,
              .rows = T,
              .cols = cols,
              .ld = ld,
              .dst = codes,
              .dst_scales = scales};
    return bl_stream_call(stream, quantise_rows_task, &m, sizeof m);
}

static bl_status quantise_groups_task(bl_stream *stream, const void *args)
{
    const move *m = args;
    (void)stream;
    for (int64_t t = 0; t < m->rows; t++)
        for (int64_t c = 0; c < m->cols; c += 128)
            m->dst_scales[c / 128 * m->rows + t] =
                quantise_piece(m, t, c, c + 128 < m->cols ? c + 128 : m->cols);
    return BL_OK;
}

bl_status fp8_cuda_quantise_groups(bl_stream *stream, const void *x, int64_t ld, int64_t T,
                                   int64_t cols, uint8_t *codes, float *scales)
{
    move m = {.src = x, .rows = T, .cols = cols, .ld = ld, .dst = codes, .dst_scales = scales};
    return bl_stream_call(stream, quantise_groups_task, &m, sizeof m);
}

static bl_status transpose_task(bl_stream *stream, const void *args)
{
    const move *m = args;
    (void)stream;
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->cols; c++)
            ((uint8_t *)m->dst)[c * m->rows + r] = ((const uint8_t *)m->src)[r * m->cols + c];
    return BL_OK;
}

bl_status fp8_cuda_transpose(bl_stream *stream, const uint8_t *src, int64_t rows, int64_t cols,
                             uint8_t *dst)
{
    return bl_stream_call(stream, transpose_task,
                          &(move){.src = src, .rows = rows, .cols = cols, .dst = dst},
                          sizeof(move));
}

static bl_status transpose_scales_task(bl_stream *stream, const void *args)
{
    const move *m = args;
    (void)stream;
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->cols; c++)
            m->dst_scales[c * m->ld + r] = m->scales[r * m->cols + c];
    return BL_OK;
}

bl_status fp8_cuda_transpose_scales(bl_stream *stream, const float *src, int64_t rows, int64_t cols,
                                    float *dst, int64_t dst_ld)
{
    move m = {.scales = src, .rows = rows, .cols = cols, .ld = dst_ld, .dst_scales = dst};
    return bl_stream_call(stream, transpose_scales_task, &m, sizeof m);
}

static bl_status fill_task(bl_stream *stream, const void *args)
{
    const move *m = args;
    (void)stream;
    for (int64_t i = 0; i < m->rows; i++) m->dst_scales[i] = m->value;
    return BL_OK;
}

bl_status fp8_cuda_fill(bl_stream *stream, float *dst, int64_t n, float value)
{
    return bl_stream_call(stream, fill_task, &(move){.rows = n, .dst_scales = dst, .value = value},
                          sizeof(move));
}

/* ---- the ops that the linear layer uses ---- */

static bl_status dropout_task(bl_stream *stream, const void *args)
{
    const bl_dropout_args *a = args;
    bl_philox_key key = bl_dropout_key(a->seed, a->step, a->layer, a->matrix);
    (void)stream;
    for (int64_t t = 0; t < a->T; t++)
        for (int64_t c = 0; c < a->C; c++) {
            uint32_t words[4];
            bl_dropout_words(key, a->sample[t], a->position[t], (uint32_t)(c / 4), words);
            float x = bl_bf16_to_f32(((const uint16_t *)a->x.data)[t * a->C + c]);
            bool is_kept = words[c % 4] >= bl_dropout_threshold(a->p);
            ((uint16_t *)a->y.data)[t * a->C + c] =
                is_kept ? bl_f32_to_bf16(x * bl_dropout_scale(a->p)) : 0;
        }
    return BL_OK;
}

static bl_status fake_dropout(bl_stream *stream, const bl_dropout_args *args)
{
    return bl_stream_call(stream, dropout_task, args, sizeof *args);
}

/* fp32 to bf16, as the compute copies of LoRA weights are made. */
static bl_status cast_task(bl_stream *stream, const void *args)
{
    const bl_cast_args *a = args;
    (void)stream;
    for (int64_t i = 0; i < a->n; i++)
        ((uint16_t *)a->y.data)[i] = bl_f32_to_bf16(((const float *)a->x.data)[i]);
    return BL_OK;
}

static bl_status fake_cast(bl_stream *stream, const bl_cast_args *args)
{
    return bl_stream_call(stream, cast_task, args, sizeof *args);
}

/* The real table would bring the kernels with it, which only a GPU can run. */
const ops_table ops_cuda_table = {
    .act = BL_BF16,
    .matmul_weight_scratch_bytes = ops_cuda_matmul_weight_scratch_bytes,
    .matmul = ops_cuda_matmul,
    .matmul_weight = ops_cuda_matmul_weight,
    .dropout = fake_dropout,
    .cast = fake_cast,
};
