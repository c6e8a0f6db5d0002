/* SPDX-License-Identifier: Apache-2.0 */
/* blas_onednn.c -- oneDNN under the CPU's GEMMs.
 *
 * oneDNN 2.6 writes its code into mappings that it may not have got, and libgomp ends the process
 * when a few hundred bytes are missing. So both allocate their permanent memory where it is free:
 * the code in ops_blas_prepare, which has probed for more, and libgomp's thread record in a block
 * that the thread has just freed. A product requests its temporary memory. */
#include "ops/cpu/blas.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <oneapi/dnnl/dnnl.h>
#include <omp.h>

#include "base/sizes.h"

/* Code and tables of all kernels: 17 MiB of addresses, measured, most of it never touched; here
 * with what their making takes. */
static const size_t CODE_BYTES = (size_t)48 << 20;

static dnnl_status_t sgemm(bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K, float alpha,
                           const float *A, int64_t lda, const float *B, int64_t ldb, float beta,
                           float *C, int64_t ldc)
{
    return dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', M, N, K, alpha, A, lda, B, ldb,
                      beta, C, ldc);
}

/* The first omp_set_num_threads of a thread allocates libgomp's record of it, 216 bytes in gcc
 * 12's. malloc gives a thread a block that it has just freed, so freeing one block of each size
 * that the record could have ensures it, whatever other threads allocate meanwhile. */
static bool make_room_for_thread(void)
{
    enum { STEP_BYTES = 16, MAX_BYTES = 1024 };
    static _Thread_local bool has_room;
    void *blocks[MAX_BYTES / STEP_BYTES];
    int n = 0;

    if (has_room) return true;
    while (n < (int)BL_COUNT(blocks) && (blocks[n] = malloc((size_t)(n + 1) * STEP_BYTES))) n++;
    has_room = n == (int)BL_COUNT(blocks);
    while (n > 0) free(blocks[--n]);
    return has_room;
}

/* oneDNN takes as many threads as OpenMP offers the caller: one. That number belongs to the calling
 * thread, which may be another library's: *before is restored there. */
static bool enter(int *before)
{
    *before = omp_get_max_threads();
    if (*before == 1) return true;
    if (!make_room_for_thread()) return false;
    omp_set_num_threads(1);
    return true;
}

static void leave(int before)
{
    if (before != 1) omp_set_num_threads(before);
}

/* ---- code ---- */

static bl_status probe_memory(void)
{
    void *memory =
        mmap(NULL, CODE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return BL_FAIL(BL_ENOMEM, "%zu MiB of addresses for the code of oneDNN", CODE_BYTES >> 20);
    int refused = mprotect(memory, CODE_BYTES, PROT_READ | PROT_WRITE | PROT_EXEC);
    bl_status st =
        refused ? bl_fail_errno(BL_ELIMIT, "memory that can be executed, for the code of oneDNN")
                : BL_OK;
    munmap(memory, CODE_BYTES);
    return st;
}

/* A product of each kind: a vector, a matrix, few columns; each generator makes the code of all its
 * kernels at its first product. */
static bl_status make_code(void)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {2, 2, 1}, {2, 1, 1}, {1, 2, 1}, {64, 64, 64}};
    enum { SIDE = 64 };
    float *block = calloc(3 * SIDE * SIDE, sizeof *block);
    int before;

    if (!block || !enter(&before)) {
        free(block);
        return BL_FAIL(BL_ENOMEM, "the first products of oneDNN");
    }
    dnnl_status_t status = dnnl_success;
    for (int kind = 0; kind < 4; kind++)
        for (size_t i = 0; i < BL_COUNT(shapes) && status == dnnl_success; i++)
            status = sgemm(kind & 1, kind & 2, shapes[i][0], shapes[i][1], shapes[i][2], 1, block,
                           SIDE, block + SIDE * SIDE, SIDE, 0, block + 2 * SIDE * SIDE, SIDE);
    leave(before);
    free(block);
    return status == dnnl_success ? BL_OK : BL_FAIL(BL_ENOMEM, "the first products of oneDNN");
}

bl_status ops_blas_prepare(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static atomic_bool is_ready;
    bl_status st = BL_OK;

    if (atomic_load_explicit(&is_ready, memory_order_acquire)) return BL_OK;
    pthread_mutex_lock(&lock);
    if (!atomic_load_explicit(&is_ready, memory_order_relaxed)) {
        st = probe_memory();
        if (st == BL_OK) st = make_code();
        atomic_store_explicit(&is_ready, st == BL_OK, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    return st;
}

/* ---- products ---- */

bool ops_blas_sgemm(bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K, float alpha,
                    const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                    int64_t ldc)
{
    int before;

    if (ops_blas_prepare() != BL_OK || !enter(&before)) return false;
    dnnl_status_t status = sgemm(trans_a, trans_b, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
    leave(before);
    return status == dnnl_success;
}

const char *ops_blas_name(void)
{
    return "onednn";
}

void ops_blas_describe(char *text, size_t n_bytes)
{
    static const struct {
        dnnl_cpu_isa_t isa;
        const char *name;
    } names[] = {{dnnl_cpu_isa_sse41, "sse41"},
                 {dnnl_cpu_isa_avx, "avx"},
                 {dnnl_cpu_isa_avx2, "avx2"},
                 {dnnl_cpu_isa_avx2_vnni, "avx2_vnni"},
                 {dnnl_cpu_isa_avx512_core, "avx512_core"},
                 {dnnl_cpu_isa_avx512_core_vnni, "avx512_core_vnni"},
                 {dnnl_cpu_isa_avx512_core_bf16, "avx512_core_bf16"},
                 {dnnl_cpu_isa_avx512_core_amx, "avx512_core_amx"}};
    const dnnl_version_t *version = dnnl_version();
    dnnl_cpu_isa_t isa = dnnl_get_effective_cpu_isa();
    int n =
        snprintf(text, n_bytes, "onednn %d.%d.%d ", version->major, version->minor, version->patch);

    for (size_t i = 0; i < BL_COUNT(names); i++)
        if (names[i].isa == isa) {
            snprintf(text + n, n_bytes - (size_t)n, "%s", names[i].name);
            return;
        }
    snprintf(text + n, n_bytes - (size_t)n, "isa %#x", (unsigned)isa);
}
