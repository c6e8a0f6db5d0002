/* SPDX-License-Identifier: Apache-2.0 */
/* comm.h -- a group of ranks and their collectives. Every collective is a task on a stream of the
 * calling rank; all ranks of a group call the same collectives in the same order with the same
 * sizes. A communicator is used by one stream at a time. Reductions are sums in the element type,
 * in rank order within blocks of ranks, then over the blocks (docs/design/0029):
 *
 *   (S_0 + S_1) + ...    S_0 = ((0 + x_0) + x_1) + ... + x_7, S_1 = ((0 + x_8) + x_9) + ...
 *
 * so the bits depend on the number of ranks and on the ranks per block (bl_comm_set_sum_block), not
 * on timing or on the hosts of the ranks. Buffers are memory that the stream's device reads and
 * writes (BL_SPACE_DEVICE; on the CPU any), and stay valid until the stream has passed the
 * collective; other ranks read them, too.
 *
 * Errors: when a rank fails or leaves, it calls bl_comm_abort; every collective that still waits
 * for a rank, and every later one, on any rank of the job then ends with BL_ECANCELED (sticky on
 * its stream). A rank that does not arrive within the deadline makes its group fail with BL_ERANK,
 * naming it by its rank in the job, and aborts the job. Ranks whose calls differ in kind, size or
 * label all get BL_EINTERNAL, which aborts the job as well. */
#ifndef BALLAST_COMM_COMM_H
#define BALLAST_COMM_COMM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_comm bl_comm;

/* This rank, from 0 on, and how many there are. */
BL_API int bl_comm_rank(const bl_comm *comm);
BL_API int bl_comm_size(const bl_comm *comm);

/* Ranks per block of the sums, at least 1; default BL_COMM_SUM_BLOCK. Must be equal on all ranks.
 * Communicators that are split from this one, and the one for GPUs made over it, inherit the value:
 * set it before they are made, and before the first collective. BL_EUSAGE: less than 1;
 * BL_ENOMEM. */
enum { BL_COMM_SUM_BLOCK = 8 };
bl_status bl_comm_set_sum_block(bl_comm *comm, int n_ranks);
/* Bytes that this rank receives in a reduce-scatter with `bytes` per rank in the result. Ranks that
 * are threads read each other's memory: for them the bytes that processes would receive. */
int64_t bl_comm_sum_received(const bl_comm *comm, int64_t bytes);

/* What later collectives of this rank are of: with ("layer", 17) a deadline says "rank 3 did not
 * reach all_gather of layer 17". The text (at most 47 characters) is copied; index < 0: no number;
 * what NULL: of nothing in particular. For the thread that calls the collectives; it costs some
 * hundred nanoseconds. Labels are compared like kinds and sizes: ranks that gather two layers of
 * equal size in different orders get BL_EINTERNAL, which names both. */
void bl_comm_set_label(bl_comm *comm, const char *what, int64_t index);

/* recv[r * bytes ...] = rank r's send, `bytes` from each rank. In place when send == recv + rank *
 * bytes. */
BL_API bl_status bl_comm_all_gather(bl_comm *comm, bl_stream *stream, const void *send, void *recv,
                                    size_t bytes);

/* recv[i] = sum over ranks r, by blocks, of send_r[rank * n + i]; send has size * n floats, recv n
 * floats. send is not changed. recv must not overlap send. */
BL_API bl_status bl_comm_reduce_scatter_f32(bl_comm *comm, bl_stream *stream, const float *send,
                                            float *recv, int64_t n);

/* values[i] = sum over ranks, by blocks, in place on every rank. */
BL_API bl_status bl_comm_all_reduce_f32(bl_comm *comm, bl_stream *stream, float *values, int64_t n);
BL_API bl_status bl_comm_all_reduce_f64(bl_comm *comm, bl_stream *stream, double *values,
                                        int64_t n);
BL_API bl_status bl_comm_all_reduce_i64(bl_comm *comm, bl_stream *stream, int64_t *values,
                                        int64_t n);

/* buffer = that of rank `root`, on every rank. */
BL_API bl_status bl_comm_broadcast(bl_comm *comm, bl_stream *stream, void *buffer, size_t bytes,
                                   int root);
/* Ends when all ranks' barriers have begun. */
BL_API bl_status bl_comm_barrier(bl_comm *comm, bl_stream *stream);

/* Device memory, zero-filled, for repeated gathers (the gather ring): the kind that the
 * communicator moves fastest, with NCCL registered with all ranks where its options ask for that;
 * otherwise plain. It counts in bl_device_bytes. All ranks of the group call these in the same
 * order with the same sizes, from their own threads. Freed before the communicator is destroyed,
 * when no stream uses it any more; comm NULL: a group of one. BL_ENOMEM names `what`; where ranks
 * register memory together, all have it when one of them lacks memory. */
BL_API bl_status bl_comm_alloc(bl_comm *comm, bl_device *device, size_t size_bytes,
                               const char *what, void **out);
BL_API void bl_comm_free(bl_comm *comm, bl_device *device, void *memory); /* memory NULL is fine */
/* Before bl_comm_alloc, after steps that can fail on one rank: `own` is their status. Where ranks
 * register memory together it is collective, and every rank returns the first failure in rank
 * order; elsewhere `own`. So a rank that fails leaves none waiting in bl_comm_alloc. */
bl_status bl_comm_begin_alloc(bl_comm *comm, bl_status own);

/* Collective, from the rank's own thread: the ranks have shown that they call the same collectives
 * in one order, for example by a whole step. Where NCCL's calls are compared at all
 * (bl_nccl_options), they are until then, before each, across all communicators split from the same
 * first one; other kinds compare every call, and this does nothing. BL_EINTERNAL: the ranks do not
 * call it at the same place. */
bl_status bl_comm_trust_order(bl_comm *comm);

/* Called by a rank that gives up, from any thread: the other ranks report `error` (not BL_OK) as
 * the reason. Idempotent; the first error of the job is kept. It reaches every communicator of the
 * same job (split ones too). */
BL_API void bl_comm_abort(bl_comm *comm, const bl_error *error);

/* The first error given to bl_comm_abort in this job, or status BL_OK. */
BL_API void bl_comm_first_error(bl_comm *comm, bl_error *out);

/* Collective among all ranks of `comm` (call from the rank's own thread, not as a task): ranks of
 * equal `color` form a new group, ordered by rank in `comm`. Owned by the caller. */
BL_API bl_status bl_comm_split(bl_comm *comm, int color, bl_comm **out);
BL_API void bl_comm_destroy(bl_comm *comm); /* NULL is fine */

/* The local communicator: n_ranks threads of one process. out[n_ranks] receives one communicator
 * per rank; each is destroyed by its owner when its streams no longer use it, the shared state with
 * the last. deadline_s: how long a rank waits for another inside one collective (0: no limit). */
BL_API bl_status bl_comm_create_local(int n_ranks, double deadline_s, bl_comm **out);

/* Runs fn as each of n_ranks ranks, on separate threads, with a communicator that it borrows, and
 * waits for all. A rank whose fn fails aborts the others. Returns the first such error, or BL_OK.
 * BL_ELIMIT: a thread could not be started. */
typedef bl_status (*bl_rank_fn)(bl_comm *comm, void *user);
BL_API bl_status bl_comm_run_local(int n_ranks, double deadline_s, bl_rank_fn fn, void *user);

#ifdef __cplusplus
}
#endif

#endif
