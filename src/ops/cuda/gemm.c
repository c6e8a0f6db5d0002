/* SPDX-License-Identifier: Apache-2.0 */
/* The one caller of cuBLASLt. A device keeps a handle and a table of plans: descriptors and the
 * algorithms that cuBLASLt's heuristic gave for a shape, best guess first, found again by
 * everything the heuristic looks at. The first is used, so that every process computes the same
 * bits (docs/design/0013-algorithms-of-products.md). A plan without an algorithm records a refusal.
 * A full table evicts the least recently used plan (plan_cache.h).
 *
 * Setting a descriptor's attribute validates nothing: the number of results that the heuristic
 * returns shows whether a scale mode exists on this GPU. The heuristic does not get beta; cuBLASLt
 * rejects an algorithm that does not support it at the call, before anything is queued. The next
 * one is then used permanently.
 *
 * The scale pointers live in the descriptor, so the table's lock is held until cublasLtMatmul has
 * returned, which is when it has queued its kernels. */
#include "ops/cuda/gemm_cuda.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/sizes.h"
#include "device/cuda/stream.h"
#include "ops/cuda/ops_cuda.h"
#include "ops/cuda/plan_cache.h"

enum { N_CANDIDATES = 8, TIMED_ROUNDS = 3, VERSION_MIN = 120900, ALIGNMENT_MAX = 16 };

/* A product whose tiles of results leave half of a GPU without work, and whose sums are long enough
 * to be split: those of LoRA's A with x, whose results are r wide. */
enum { TILE = 128, FEW_TILES = 66 /* of an H100's 132 multiprocessors */, LONG_SUM = 2048 };

typedef struct plan {
    ops_plan_entry entry; /* the first member */
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t candidates[N_CANDIDATES];
    int n_candidates; /* 0: refused */
    int first;        /* of those that have not been refused when called */
    bool has_run;     /* a call has succeeded */
    bool is_timed;
    int fastest; /* once is_timed */
} plan;

typedef struct gemm_state {
    pthread_mutex_t lock;
    cublasLtHandle_t handle;
    int capability;
    bool by_time;
    bool is_warm, has_warned; /* bl_matmul_end_warm_up */
    int n_multiprocessors;    /* for products; 0: all, bl_matmul_spare_multiprocessors */
    int64_t n_fallbacks[BL_FALLBACK_COUNT];
    ops_plan_cache plans;
} gemm_state;

static const char *const kind_names[OPS_N_GEMM_KINDS] = {
    "bf16", "FP8 with a scale a row", "FP8 with a scale a block", "FP8 with a scale a matrix"};

static bl_status check(cublasStatus_t status, const char *call)
{
    if (status == CUBLAS_STATUS_SUCCESS) return BL_OK;
    bl_status st = status == CUBLAS_STATUS_ALLOC_FAILED    ? BL_ENOMEM
                   : status == CUBLAS_STATUS_NOT_SUPPORTED ? BL_ELIMIT
                                                           : BL_EINTERNAL;
    return BL_FAIL(st, "%s: %s", call, cublasLtGetStatusString(status));
}
#define CHECK(call) check((call), #call)

static void destroy_plan(plan *p)
{
    if (!p) return;
    if (p->operation) cublasLtMatmulDescDestroy(p->operation);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->d) cublasLtMatrixLayoutDestroy(p->d);
    free(p);
}

/* ---- a plan ---- */

/* No kernel asks for more than its widest access. What memory happens to give beyond that must not
 * choose an algorithm: bits would depend on where a matrix is stored. */
static int64_t alignment_of(const void *pointer)
{
    int64_t alignment = ALIGNMENT_MAX;
    while ((uintptr_t)pointer % (uintptr_t)alignment != 0) alignment /= 2;
    return alignment;
}

static const void *c_of(const ops_gemm *g)
{
    return g->c ? g->c : g->d;
}

static bool splits_sums(const ops_gemm *g)
{
    int64_t n_tiles = bl_ceil_div(g->m, TILE) * bl_ceil_div(g->n, TILE);
    return g->may_split_sums && g->workspace && n_tiles <= FEW_TILES && g->k >= LONG_SUM;
}

static ops_plan_key key_of(const ops_gemm *g)
{
    return (ops_plan_key){.kind = g->kind,
                          .transpose_a = g->transpose_a,
                          .transpose_b = g->transpose_b,
                          .fast_sums = g->fast_sums,
                          .splits_sums = splits_sums(g),
                          .d_type = g->d_type,
                          .accumulates = g->beta != 0,
                          .m = g->m,
                          .n = g->n,
                          .k = g->k,
                          .lda = g->lda,
                          .ldb = g->ldb,
                          .ldd = g->ldd,
                          .align_a = alignment_of(g->a),
                          .align_b = alignment_of(g->b),
                          .align_c = alignment_of(c_of(g)),
                          .align_d = alignment_of(g->d),
                          .workspace_bytes = g->workspace ? (int64_t)g->workspace_bytes : 0};
}

static bl_status set_operation(cublasLtMatmulDesc_t operation,
                               cublasLtMatmulDescAttributes_t attribute, const void *value,
                               size_t bytes)
{
    return CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes));
}

static bl_status describe_operation(const gemm_state *state, const ops_plan_key *key,
                                    cublasLtMatmulDesc_t operation)
{
    int32_t n_multiprocessors = state->n_multiprocessors;
    int32_t transpose_a = key->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
            transpose_b = key->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    int8_t fast_sums = (int8_t)key->fast_sums;
    static const int32_t scale_modes[OPS_N_GEMM_KINDS][2] = {
        [OPS_GEMM_FP8_ROW] = {CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
                              CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F},
        [OPS_GEMM_FP8_BLOCK] = {CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                                CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F},
        [OPS_GEMM_FP8_TENSOR] = {CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
                                 CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F},
    };
    const int32_t *modes = scale_modes[key->kind];

    BL_TRY(set_operation(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a, sizeof transpose_a));
    BL_TRY(set_operation(operation, CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b, sizeof transpose_b));
    if (n_multiprocessors > 0)
        BL_TRY(set_operation(operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &n_multiprocessors,
                             sizeof n_multiprocessors));
    if (key->kind == OPS_GEMM_BF16) return BL_OK;
    BL_TRY(set_operation(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &modes[0], sizeof modes[0]));
    BL_TRY(set_operation(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &modes[1], sizeof modes[1]));
    return set_operation(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast_sums, sizeof fast_sums);
}

static bl_status set_scales(cublasLtMatmulDesc_t operation, const float *a_scale,
                            const float *b_scale)
{
    BL_TRY(
        set_operation(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a_scale, sizeof a_scale));
    return set_operation(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b_scale, sizeof b_scale);
}

static bl_status describe_matrix(cudaDataType_t type, bool transpose, int64_t rows, int64_t cols,
                                 int64_t ld, cublasLtMatrixLayout_t *out)
{
    return CHECK(cublasLtMatrixLayoutCreate(out, type, (uint64_t)(transpose ? cols : rows),
                                            (uint64_t)(transpose ? rows : cols), ld));
}

static bl_status prefer(const ops_plan_key *key, cublasLtMatmulPreference_t preference)
{
    uint64_t workspace_bytes = (uint64_t)key->workspace_bytes;
    uint32_t reductions =
        key->splits_sums ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    uint32_t align_a = (uint32_t)key->align_a, align_b = (uint32_t)key->align_b,
             align_c = (uint32_t)key->align_c, align_d = (uint32_t)key->align_d;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t bytes;
    } wishes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_a, sizeof align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_b, sizeof align_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_c, sizeof align_c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_d, sizeof align_d},
    };
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++)
        BL_TRY(CHECK(cublasLtMatmulPreferenceSetAttribute(preference, wishes[i].attribute,
                                                          wishes[i].value, wishes[i].bytes)));
    return BL_OK;
}

/* The manual does not list the status of an FP8 product that the GPU cannot compute. Until the plan
 * has succeeded once, every status is taken for that, except those of memory and of execution,
 * which say that something else is wrong. */
static bool is_refusal(const plan *p, cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return true;
    case CUBLAS_STATUS_SUCCESS:
    case CUBLAS_STATUS_ALLOC_FAILED:
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return false;
    case CUBLAS_STATUS_INVALID_VALUE:
        return p->entry.key.kind != OPS_GEMM_BF16;
    default:
        return p->entry.key.kind != OPS_GEMM_BF16 && !p->has_run;
    }
}

/* Fills in the plan's candidates, or leaves it without any. */
static bl_status find_candidates(const gemm_state *state, plan *p)
{
    cublasLtMatmulHeuristicResult_t results[N_CANDIDATES];
    cublasLtMatmulPreference_t preference = NULL;
    int n_results = 0;

    bl_status st = CHECK(cublasLtMatmulPreferenceCreate(&preference));
    if (st == BL_OK) st = prefer(&p->entry.key, preference);
    if (st == BL_OK) {
        cublasStatus_t status =
            cublasLtMatmulAlgoGetHeuristic(state->handle, p->operation, p->a, p->b, p->d, p->d,
                                           preference, N_CANDIDATES, results, &n_results);
        if (is_refusal(p, status) || status == CUBLAS_STATUS_INVALID_VALUE)
            n_results = 0;
        else
            st = check(status, "cublasLtMatmulAlgoGetHeuristic");
    }
    for (int i = 0; st == BL_OK && i < n_results; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS &&
            results[i].workspaceSize <= (size_t)p->entry.key.workspace_bytes)
            p->candidates[p->n_candidates++] = results[i].algo;
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    return st;
}

static bl_status make_plan(const gemm_state *state, const ops_plan_key *key, plan **out)
{
    plan *p = calloc(1, sizeof *p);
    cudaDataType_t in_type = key->kind == OPS_GEMM_BF16 ? CUDA_R_16BF : CUDA_R_8F_E4M3;
    cudaDataType_t out_type = key->d_type == BL_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    static const float *const somewhere =
        (const float *)(uintptr_t)ALIGNMENT_MAX; /* the heuristic asks whether there are scales */
    bl_status st;

    *out = NULL;
    if (!p) return BL_FAIL(BL_ENOMEM, "a plan of a matrix product");
    p->entry.key = *key;
    BL_TRY_GOTO(st, failed,
                CHECK(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F)));
    BL_TRY_GOTO(st, failed, describe_operation(state, key, p->operation));
    BL_TRY_GOTO(st, failed,
                describe_matrix(in_type, key->transpose_a, key->m, key->k, key->lda, &p->a));
    BL_TRY_GOTO(st, failed,
                describe_matrix(in_type, key->transpose_b, key->k, key->n, key->ldb, &p->b));
    BL_TRY_GOTO(st, failed, describe_matrix(out_type, false, key->m, key->n, key->ldd, &p->d));
    if (key->kind != OPS_GEMM_BF16) {
        BL_TRY_GOTO(st, failed, set_scales(p->operation, somewhere, somewhere));
    }
    if (key->kind == OPS_GEMM_BF16 || bl_matmul_has_fp8(state->capability))
        BL_TRY_GOTO(st, failed, find_candidates(state, p));
    *out = p;
    return BL_OK;
failed:
    destroy_plan(p);
    return st;
}

/* ---- the device's table ---- */

static void warn_of_new(gemm_state *state, const ops_plan_key *key)
{
    if (!state->is_warm || state->has_warned) return;
    state->has_warned = true;
    bl_log_warning("a product is new after the warm-up, %s, %lld x %lld x %lld: its kernel may be "
                   "loaded while other ranks wait",
                   kind_names[key->kind], (long long)key->m, (long long)key->n, (long long)key->k);
}

/* Under the lock. A plan that could not be made leaves the table as it was. */
static bl_status find_plan(gemm_state *state, const ops_gemm *gemm, plan **out)
{
    ops_plan_key key = key_of(gemm);

    *out = (plan *)ops_plan_cache_find(&state->plans, &key);
    if (*out) return BL_OK;
    warn_of_new(state, &key);
    BL_TRY(make_plan(state, &key, out));
    destroy_plan((plan *)ops_plan_cache_add(&state->plans, &(*out)->entry));
    return BL_OK;
}

static void destroy_state(void *extension)
{
    gemm_state *state = extension;
    ops_plan_entry *entry;
    while ((entry = ops_plan_cache_take(&state->plans))) destroy_plan((plan *)entry);
    if (state->handle) cublasLtDestroy(state->handle);
    pthread_mutex_destroy(&state->lock);
    free(state);
}

static bl_status create_state(bl_device *device, void **out)
{
    gemm_state *state = calloc(1, sizeof *state);
    bl_status st;

    *out = NULL;
    if (!state) return BL_FAIL(BL_ENOMEM, "the table of GEMMs");
    pthread_mutex_init(&state->lock, NULL);
    state->capability = bl_cuda_device_properties(device)->capability;
    if (cublasLtGetVersion() < VERSION_MIN) {
        st = BL_FAIL(BL_ELIMIT, "cuBLASLt %zu is too old: %d or newer is needed",
                     cublasLtGetVersion(), VERSION_MIN);
        goto failed;
    }
    BL_TRY_GOTO(st, failed, CHECK(cublasLtCreate(&state->handle)));
    *out = state;
    return BL_OK;
failed:
    destroy_state(state);
    return st;
}

static bl_status get_state(bl_stream *stream, gemm_state **out)
{
    void *extension;
    BL_TRY(bl_cuda_device_extension(bl_stream_device(stream), create_state, destroy_state,
                                    &extension));
    *out = extension;
    return BL_OK;
}

static bool is_offered(const plan *p)
{
    return p->first < p->n_candidates;
}

bl_status ops_cuda_gemm_is_served(bl_stream *stream, const ops_gemm *gemm, bool *out)
{
    gemm_state *state;
    plan *p;

    *out = false;
    (void)bl_cuda_stream_handle(stream);
    BL_TRY(get_state(stream, &state));
    pthread_mutex_lock(&state->lock);
    bl_status st = find_plan(state, gemm, &p);
    if (st == BL_OK) *out = is_offered(p);
    pthread_mutex_unlock(&state->lock);
    return st;
}

bl_status ops_cuda_gemm_choose_by_time(bl_stream *stream, bool by_time)
{
    gemm_state *state;

    BL_TRY(get_state(stream, &state));
    pthread_mutex_lock(&state->lock);
    state->by_time = by_time;
    pthread_mutex_unlock(&state->lock);
    return BL_OK;
}

static cublasStatus_t multiply(const gemm_state *state, const plan *p, int candidate, void *handle,
                               const ops_gemm *g)
{
    return cublasLtMatmul(state->handle, p->operation, &g->alpha, g->a, p->a, g->b, p->b, &g->beta,
                          c_of(g), p->d, g->d, p->d, &p->candidates[candidate], g->workspace,
                          (size_t)p->entry.key.workspace_bytes, handle);
}

/* Rounds of all candidates rather than all rounds of a candidate: the clock of the GPU is none's
 * advantage. */
static bl_status time_candidates(const gemm_state *state, plan *p, bl_stream *stream, void *handle,
                                 const ops_gemm *g)
{
    double best_s = INFINITY;
    bl_stamp *begin = NULL, *end = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_stamp_create(bl_stream_device(stream), &begin));
    BL_TRY_GOTO(st, done, bl_stamp_create(bl_stream_device(stream), &end));
    for (int round = -1; round < TIMED_ROUNDS; round++) /* the first warms up */
        for (int i = 0; i < p->n_candidates; i++) {
            BL_TRY_GOTO(st, done, bl_stamp_record(begin, stream));
            cublasStatus_t status = multiply(state, p, i, handle, g);
            BL_TRY_GOTO(st, done, bl_stamp_record(end, stream));
            BL_TRY_GOTO(st, done, bl_stream_synchronize(stream));
            double seconds = bl_stamp_elapsed_s(begin, end);
            if (status != CUBLAS_STATUS_SUCCESS || round < 0 || seconds >= best_s) continue;
            best_s = seconds;
            p->fastest = i;
        }
    p->is_timed = true;
done:
    bl_stamp_destroy(begin);
    bl_stamp_destroy(end);
    return st;
}

static void log_refusal(const plan *p, cublasStatus_t status)
{
    const ops_plan_key *key = &p->entry.key;

    bl_log_info("cuBLASLt refused the algorithms that it had offered, %s, %lld x %lld x %lld%s: %s",
                kind_names[key->kind], (long long)key->m, (long long)key->n, (long long)key->k,
                key->accumulates ? ", added to the result" : "", cublasLtGetStatusString(status));
}

/* *is_served false: nothing was queued. */
static bl_status run_plan(const gemm_state *state, plan *p, bl_stream *stream, void *handle,
                          const ops_gemm *g, bool *is_served)
{
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;

    if (g->kind != OPS_GEMM_BF16) BL_TRY(set_scales(p->operation, g->a_scale, g->b_scale));
    if (is_offered(p) && state->by_time && !p->is_timed)
        BL_TRY(time_candidates(state, p, stream, handle, g));
    if (is_offered(p) && state->by_time) {
        status = multiply(state, p, p->fastest, handle, g);
    } else {
        for (; is_offered(p); p->first++) {
            status = multiply(state, p, p->first, handle, g);
            if (!is_refusal(p, status)) break;
            if (p->first + 1 == p->n_candidates) log_refusal(p, status);
        }
    }
    p->has_run |= status == CUBLAS_STATUS_SUCCESS;
    *is_served = !is_refusal(p, status);
    return *is_served ? check(status, "cublasLtMatmul") : BL_OK;
}

bl_status ops_cuda_gemm_try(bl_stream *stream, const ops_gemm *gemm, bool *is_served)
{
    gemm_state *state;
    plan *p;

    *is_served = false;
    void *handle = bl_cuda_stream_handle(stream); /* may wait: not under the lock */
    BL_TRY(get_state(stream, &state));
    pthread_mutex_lock(&state->lock);
    bl_status st = find_plan(state, gemm, &p);
    if (st == BL_OK) st = run_plan(state, p, stream, handle, gemm, is_served);
    pthread_mutex_unlock(&state->lock);
    return st;
}

bl_status ops_cuda_gemm(bl_stream *stream, const ops_gemm *gemm)
{
    bool is_served;

    BL_TRY(ops_cuda_gemm_try(stream, gemm, &is_served));
    return is_served ? BL_OK
                     : BL_FAIL(BL_ELIMIT, "cuBLASLt has no algorithm for %s, %lld x %lld x %lld",
                               kind_names[gemm->kind], (long long)gemm->m, (long long)gemm->n,
                               (long long)gemm->k);
}

/* ---- fallbacks of products with frozen matrices ---- */

bl_status ops_cuda_gemm_count_fallback(bl_stream *stream, bl_matmul_fallback reason,
                                       const bl_matmul_weight_args *a)
{
    gemm_state *state;

    BL_TRY(get_state(stream, &state));
    pthread_mutex_lock(&state->lock);
    bool is_first = state->n_fallbacks[reason]++ == 0;
    pthread_mutex_unlock(&state->lock);
    if (is_first)
        bl_log_info("a matrix of %lld x %lld (%s) is multiplied in bf16 instead of FP8, %lld "
                    "tokens: %s",
                    (long long)a->weight.rows, (long long)a->weight.cols,
                    bl_format_name(a->weight.segment[0].format), (long long)a->T,
                    bl_matmul_fallback_text(reason));
    return BL_OK;
}

bl_status ops_cuda_matmul_end_warm_up(bl_device *device)
{
    void *extension;

    BL_TRY(bl_cuda_device_extension(device, create_state, destroy_state, &extension));
    gemm_state *state = extension;
    pthread_mutex_lock(&state->lock);
    state->is_warm = true;
    pthread_mutex_unlock(&state->lock);
    return BL_OK;
}

bl_status ops_cuda_matmul_spare_multiprocessors(bl_device *device, int n)
{
    int n_all = bl_cuda_device_properties(device)->n_multiprocessors;
    void *extension;

    if (n < 0 || n >= n_all)
        return BL_FAIL(BL_ELIMIT,
                       "%d multiprocessors for collectives leave none of the GPU's %d to products",
                       n, n_all);
    BL_TRY(bl_cuda_device_extension(device, create_state, destroy_state, &extension));
    gemm_state *state = extension;
    pthread_mutex_lock(&state->lock);
    bool is_late = n > 0 && state->plans.n_entries > 0;
    state->n_multiprocessors = n == 0 ? 0 : n_all - n;
    pthread_mutex_unlock(&state->lock);
    return is_late ? BL_FAIL(BL_EINTERNAL, "multiprocessors are spared after the first product")
                   : BL_OK;
}

bl_status ops_cuda_matmul_count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT])
{
    void *extension;

    BL_TRY(bl_cuda_device_extension(device, create_state, destroy_state, &extension));
    gemm_state *state = extension;
    pthread_mutex_lock(&state->lock);
    memcpy(counts, state->n_fallbacks, sizeof state->n_fallbacks);
    pthread_mutex_unlock(&state->lock);
    return BL_OK;
}
