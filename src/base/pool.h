/* SPDX-License-Identifier: Apache-2.0 */
/* pool.h -- a rank's worker threads: a parallel loop over independent items, with a fixed scratch
 * buffer per worker.
 *
 * How items are handed to workers varies from run to run; an item's result must depend on its index
 * alone. Callers split work into items by shape, never by the number of workers, so that results
 * are the same bits for any thread count. */
#ifndef BALLAST_BASE_POOL_H
#define BALLAST_BASE_POOL_H

#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_pool bl_pool;

/* A worker's scratch. */
enum { BL_POOL_SCRATCH_BYTES = 1 << 20 };

/* Runs item `index`; `scratch` is this worker's BL_POOL_SCRATCH_BYTES, 64-byte aligned, of
 * undefined content. */
typedef void (*bl_pool_fn)(void *arg, int64_t index, void *scratch);

/* n_threads >= 1 counts the caller of bl_pool_run: n_threads - 1 threads are started. Owned by the
 * caller. */
BL_API bl_status bl_pool_create(int n_threads, bl_pool **out);
/* A runtime's parallel region: calls fn(data) on n_threads threads, the caller among them, or on
 * fewer, and returns when all calls have. flags: 0. It is the type of GOMP_parallel, which GNU's,
 * LLVM's and Intel's OpenMP export. */
typedef void (*bl_parallel_fn)(void (*fn)(void *data), void *data, unsigned n_threads,
                               unsigned flags);

/* A pool without threads: bl_pool_run takes at most n_threads of the runtime's. For a process whose
 * runtime keeps its threads spinning after a region, as OpenMP's do for milliseconds: on as many
 * cores, others of the pool's own would share the cores with them. `parallel` is callable until the
 * pool is destroyed. */
BL_API bl_status bl_pool_create_over(int n_threads, bl_parallel_fn parallel, bl_pool **out);
BL_API void bl_pool_destroy(bl_pool *pool); /* NULL is fine */
BL_API int bl_pool_threads(const bl_pool *pool);

/* Calls fn(arg, i, scratch) for each i in [0, n_items), on any of the threads, and returns when all
 * are done. Calls from several threads take turns. fn must not call bl_pool_run of the same
 * pool. */
BL_API void bl_pool_run(bl_pool *pool, int64_t n_items, bl_pool_fn fn, void *arg);

#ifdef __cplusplus
}
#endif

#endif
