/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_fake.h -- declarations shared by the fake NCCL's files; for this directory only. */
#ifndef BALLAST_TESTS_EMULATE_NCCL_FAKE_H
#define BALLAST_TESTS_EMULATE_NCCL_FAKE_H

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_segment.h"

enum { NCCL_NAME_BYTES = 40, NCCL_MAX_WINDOWS = 64 };

/* Records the text for ncclGetLastError and returns the result. */
ncclResult_t emulated_nccl_fail(ncclResult_t result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- communicators: nccl.c ---- */

struct ncclWindow_vidmem {
    uintptr_t begin, end; /* 0, 0: none */
    bool is_symmetric;
};

struct ncclComm {
    ncclComm_t next; /* of all, also those that are over: a use of one of these is reported */
    nccl_membership member;
    int rank, n_ranks, device;
    char name[NCCL_NAME_BYTES]; /* the same on all ranks */
    ncclConfig_t config;
    bool is_one_host;
    uint64_t host_mask; /* ranks of this host */
    atomic_bool is_over;
    _Atomic(void *) caller; /* the thread that is in a call; NULL: none */
    struct ncclWindow_vidmem windows[NCCL_MAX_WINDOWS];

    /* Its work runs in the order of its launches, whatever streams it is on. */
    pthread_mutex_t lock;
    pthread_cond_t turned;
    uint64_t n_launched, n_ended;

    /* By the caller, as it launches. */
    uint64_t n_collectives, n_sends[NCCL_MAX_RANKS], n_receives[NCCL_MAX_RANKS];
    /* By the work, as it ends. */
    uint64_t n_sent[NCCL_MAX_RANKS], n_received[NCCL_MAX_RANKS];
};

/* A call begins and ends: one thread at a time, on a communicator that lives. */
void emulated_nccl_enter(ncclComm_t comm, const char *function);
void emulated_nccl_exit(ncclComm_t comm);

/* Waits until everything that was launched is over. */
void emulated_nccl_drain(ncclComm_t comm);

/* ---- memory: nccl_memory.c ---- */

/* The window that has all of it, -1: none; *offset within. */
int emulated_nccl_find_window(ncclComm_t comm, const void *at, size_t bytes, int64_t *offset);

/* ---- work: nccl_work.c ---- */

typedef enum nccl_kind { NCCL_ALL_GATHER = 1, NCCL_BROADCAST, NCCL_PAIRS } nccl_kind;

/* Bytes that move between this rank and others. */
typedef struct nccl_transfer {
    bool is_send;
    int peer;        /* of a pair; a collective: whose bytes they are */
    uint64_t number; /* of a pair's */
    char *at;
    size_t bytes, n_moved;
    bool is_posted, is_matched, is_done;
} nccl_transfer;

/* A launch. */
typedef struct nccl_work {
    ncclComm_t comm;
    cudaStream_t stream;
    bool has_copy_engines; /* it takes no multiprocessors */
    nccl_kind kind;
    uint64_t ticket, number; /* its launch; which of the collectives it is */
    /* The values of a collective that all ranks must agree on: kind, bytes, type, root; then the
     * windows, and the offsets in them (-1, 0: none), that it writes and reads, without the parts
     * of other ranks. */
    int64_t words[NCCL_WORDS];
    const char *copy_from; /* a part that stays on this rank; NULL: none */
    char *copy_to;
    size_t copy_bytes;
    int n_transfers, room;
    nccl_transfer *transfers;
} nccl_work;

/* Gives it to its stream, which then owns it. In the strict mode it is over when this returns. */
ncclResult_t emulated_nccl_give(nccl_work *work);

/* ---- launches: nccl_launch.c ---- */

bool emulated_nccl_in_group(void);

/* ---- faults and the log: nccl_faults.c ---- */

/* Where a fault may strike; of a launch, n counts this process's from 1. */
typedef enum nccl_moment {
    NCCL_AT_INIT,
    NCCL_AT_LAUNCH,
    NCCL_AT_ABORT,
    NCCL_AT_SPLIT,
    NCCL_AT_WINDOW,
    NCCL_AT_DESTROY,
    NCCL_AT_ASK /* for the asynchronous error */
} nccl_moment;

/* The process's rank is that in its first communicator. ncclSystemError when this call is to
 * fail. */
ncclResult_t emulated_nccl_fault(nccl_moment moment);
void emulated_nccl_set_rank(int rank);

/* A line of this process's log. */
void emulated_nccl_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool emulated_nccl_is_logging(void);
int emulated_nccl_stream_number(cudaStream_t stream);

#endif
