/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.h -- the communicator of GPUs in processes: one rank and one GPU per process. Its
 * collectives are for device memory and are queued on CUDA streams; large ones are NCCL's, small
 * ones go over the host's communicator. Reductions are exchanges and sums in the order of comm.h,
 * so results have the same bits as with any other communicator.
 *
 *   collective                  goes
 *   all_gather, broadcast       through NCCL; all_gather also by hosts (gathers_by_hosts)
 *   reduce_scatter_f32          through NCCL: in pieces into a scratch, summed by a kernel; within
 *                               blocks of ranks, then between them
 *   all_reduce, more than       the same, then the sums on the same paths in reverse
 *     BL_NCCL_SMALL_BYTES
 *   all_reduce, smaller         over the host: staged in pinned memory; the device's stream waits,
 *                               no thread does
 *   barrier                     over the host
 *
 * Order: a rank calls the collectives of all its communicators from one thread, in an order that is
 * the same on all ranks (comm/README.md); they are launched as they are called. */
#ifndef BALLAST_COMM_NCCL_NCCL_H
#define BALLAST_COMM_NCCL_NCCL_H

#include <stdbool.h>

#include "comm/comm.h"
#include "comm/host_memory.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /* Up to here an all_reduce goes over the host: counts, norms, losses. By estimate, a meeting of
     * processes takes about 0.1 ms, and so do 64 KiB at the 1 GB/s that a socket moves; from here
     * on the bytes would decide. */
    BL_NCCL_SMALL_BYTES = 64 << 10,
    /* The least device memory that a communicator of several ranks takes for the parts of a sum. */
    BL_NCCL_SCRATCH_BYTES = 4 << 20
};

typedef struct bl_nccl_options {
    const char *name;  /* in errors and NCCL's logs; NULL: "nccl". Copied */
    double deadline_s; /* for making a communicator, and for one collective; 0: none */
    /* Asks NCCL to gather by copy engines instead of multiprocessors, and for memory that allows it
     * (bl_comm_alloc). Rank 0's log says what was asked for, and why not where the library has no
     * such way. */
    bool copy_engines;
    /* For debugging: until bl_comm_trust_order each call is compared with the other ranks' before
     * it is launched, which costs a round trip over the host. Otherwise a wrong order hangs until
     * the deadline. */
    bool compares_calls;
    /* All-gathers over hosts of several ranks each: a rank sends its part to one rank of each other
     * host, which sends it to the other ranks of that host (docs/design/0029). False, or if ranks
     * are not numbered host by host: NCCL's algorithm, usually a ring. Results are the same. */
    bool gathers_by_hosts;
    /* Bytes of the largest sum of the first communicator that takes one exchange. Of LoRA that is a
     * layer's gradients: each exchange waits for multiprocessors twice, for NCCL's kernel and for
     * the sum's. Larger sums, and those of splits beyond BL_NCCL_SCRATCH_BYTES, are made in
     * pieces. */
    size_t sum_bytes;
    /* Of the ranks of this host, for their progress: so that a deadline names the one that did not
     * come. Borrowed for the call; NULL: it names the one that waited. */
    bl_host_memory *host_memory;
    /* Ends the process when NCCL's own abort hangs, or what watches the communicators does in CUDA
     * or NCCL; called on a thread of theirs, does not return. NULL: then it hangs. */
    void (*leave)(void *user);
    void *leave_user;
} bl_nccl_options;

/* A communicator of the ranks of host_world, which is borrowed: a communicator for host memory
 * (bl_launch_create_comm) that carries the unique id, the agreement of splits and all that is
 * small, and whose errors are this one's. Collective among its ranks; make others from the result
 * by bl_comm_split, so that they share one order of launches. `device`: this rank's GPU, which no
 * other rank uses; borrowed. Call it before the device has work that waits for other ranks.
 * BL_ELIMIT: the build or the machine has no NCCL, or one that is too old; on all ranks: two of
 * them have the same GPU. */
BL_API bl_status bl_comm_create_nccl(bl_comm *host_world, bl_device *device,
                                     const bl_nccl_options *options, bl_comm **out);

/* Multiprocessors that the communicator's gathers take from the products beside them; 0: one rank,
 * another kind of communicator, or copy engines gather. Known when its memory has been allocated
 * (bl_comm_alloc). */
int bl_nccl_multiprocessors(const bl_comm *comm);

/* Until bl_comm_trust_order the deadline of this rank's communicators is most_s where it would be
 * more. For the first step, once the ranks have met after loading: what hangs on a machine where
 * nothing has run yet shows early. Nothing on other kinds of communicator. From the rank's
 * thread. */
void bl_nccl_limit_deadline(bl_comm *comm, double most_s);

/* Device memory for the sums of a communicator of n_ranks in blocks of sum_block. sum_bytes: as in
 * the options; 0 for a split communicator. Returns 0 for one rank. */
size_t bl_nccl_scratch_bytes(int n_ranks, int sum_block, size_t sum_bytes);

/* Sets what NCCL and CUDA should read from the environment where ranks are processes, unless the
 * user has set it. Before CUDA starts, and while there is one thread. */
BL_API void bl_nccl_prepare_environment(void);

BL_API bool bl_comm_has_nccl(void); /* this build; the machine may have no library */

/* What NCCL reports by itself, long after the call: BL_ERANK "rank 2 on b: NCCL lost a rank in
 * WHERE: WHY", by the rank that heard it; "failed" where NCCL says nothing of another rank (is_loss
 * false), whose end may be the cause all the same. */
bl_status bl_nccl_report(int rank, const char *host, bool is_loss, const char *where,
                         const char *why);
/* Whether the error is of bl_nccl_report: the process that started the lost rank has a better
 * one. */
bool bl_nccl_is_report(const bl_error *error);

#ifdef __cplusplus
}
#endif

#endif
