/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_segment.h -- the shared memory of a communicator's ranks; for the fake NCCL only.
 *
 * A memory file without a name. The process that made the unique id has it open, the id holds that
 * process and descriptor, and the others open it through /proc: no file is left behind, whichever
 * process is killed and whenever. (Processes of other network namespaces find it too, those of
 * other process namespaces do not.) Each rank opens a separate file description and locks the byte
 * of its number: the system releases the lock when the process has ended, and not before.
 *
 * A waiting rank sleeps on the bell of its place, a futex; a rank that changes something that
 * another may wait for rings that rank's bell. Shared memory holds no locks: a rank may die
 * anywhere. */
#ifndef BALLAST_TESTS_EMULATE_NCCL_SEGMENT_H
#define BALLAST_TESTS_EMULATE_NCCL_SEGMENT_H

#include <nccl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    NCCL_MAX_RANKS = 32,
    NCCL_RING_BYTES = 1 << 17,
    NCCL_AHEAD = 4, /* a rank is at most one announcement ahead of its slowest reader */
    NCCL_WORDS = 8
};

/* A rank's next operation, number `number` - 1 of its kind; 0: nothing yet. */
typedef struct nccl_notice {
    _Atomic uint64_t number;
    int64_t words[NCCL_WORDS];
} nccl_notice;

/* A rank's. */
typedef struct nccl_place {
    _Atomic uint32_t is_taken, has_left;
    _Atomic uint32_t bell;
    nccl_notice meetings[NCCL_AHEAD];    /* of calls that wait on the host */
    nccl_notice collectives[NCCL_AHEAD]; /* of work on streams */
} nccl_place;

/* Bytes from one rank to one other (a pair's), or to all others (a rank's own). */
typedef struct nccl_ring {
    nccl_notice sends[NCCL_AHEAD], receives[NCCL_AHEAD]; /* a pair's: both sides */
    _Atomic uint64_t written, read[NCCL_MAX_RANKS];
    char data[NCCL_RING_BYTES];
} nccl_ring;

typedef struct nccl_segment {
    _Atomic uint32_t n_ranks; /* 0: no rank has joined yet */
    uint64_t token;           /* as in the id */
    nccl_place places[NCCL_MAX_RANKS];
    nccl_ring rings[]; /* n_ranks * n_ranks of pairs, then n_ranks */
} nccl_segment;

/* How a rank has it. */
typedef struct nccl_membership {
    nccl_segment *segment;
    size_t bytes;
    int fd; /* holds the lock */
    int rank, n_ranks;
    atomic_bool is_canceled;     /* waits end */
    _Atomic uint64_t n_meetings; /* so far */
} nccl_membership;

/* A new segment, and how others find it. ncclSystemError: no memory file. */
ncclResult_t emulated_nccl_make_id(ncclUniqueId *out);
uint64_t emulated_nccl_id_token(const ncclUniqueId *id);

/* Takes the place of `rank`. Errors as NCCL's, with a text (emulated_nccl_fail). `forget_id` once
 * all have joined. */
ncclResult_t emulated_nccl_join(nccl_membership *m, const ncclUniqueId *id, int rank, int n_ranks);
void emulated_nccl_forget_id(const ncclUniqueId *id);

/* With or without telling the others that it has left in good order; its memory stays mapped where
 * `keeps` says so. */
void emulated_nccl_leave(nccl_membership *m, bool in_order, bool keeps);

nccl_ring *emulated_nccl_pair(const nccl_membership *m, int from, int to);
nccl_ring *emulated_nccl_own_ring(const nccl_membership *m, int from);

void emulated_nccl_announce(nccl_notice *notices, uint64_t number, const int64_t words[NCCL_WORDS]);
/* Whether notice `number` is there; *words is it then. */
bool emulated_nccl_read(const nccl_notice *notices, uint64_t number, int64_t words[NCCL_WORDS]);

void emulated_nccl_ring_bell(const nccl_membership *m, int rank);
void emulated_nccl_ring_all(const nccl_membership *m);
uint32_t emulated_nccl_bell(const nccl_membership *m);
/* Returns when the own bell has rung since it was `seen`, and at times without. */
void emulated_nccl_wait_bell(const nccl_membership *m, uint32_t seen);

/* Whether a process that has not left in good order is gone. */
bool emulated_nccl_is_dead(const nccl_membership *m, int rank);
bool emulated_nccl_has_dead(const nccl_membership *m);

/* All ranks of `mask` call this in the same order with the same words[0]; said: each rank's words.
 * Waits without a limit for a missing rank; ncclInternalError when canceled, ncclRemoteError when
 * a rank is dead and the settings ask for this report. */
ncclResult_t emulated_nccl_meet(nccl_membership *m, const int64_t words[NCCL_WORDS], uint64_t mask,
                                int64_t said[][NCCL_WORDS]);

#endif
