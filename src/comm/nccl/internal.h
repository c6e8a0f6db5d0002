/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- shared by the files of comm/nccl, for them only.
 *
 *   job    state shared by a rank's communicators: the library, the GPU, the host's stream, the
 *          order of launches
 *   comm   one communicator; in a group of one its collectives have no work
 *   watch  a communicator's thread, which finds out that it is in trouble and aborts it
 *   guard  a rank's thread, which ends the process where a watch or its abort hangs
 *
 * The rank's own thread makes all calls, except those of watch.c and guard.c. */
#ifndef BALLAST_COMM_NCCL_INTERNAL_H
#define BALLAST_COMM_NCCL_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm/backend.h"
#include "comm/blocks_internal.h"
#include "comm/nccl/deadlines.h"
#include "comm/nccl/library.h"
#include "comm/nccl/nccl.h"

enum { COMM_NCCL_NAME_BYTES = 32, COMM_NCCL_WATCHED = 64, COMM_NCCL_TEXT_BYTES = 224 };

typedef struct comm_nccl_place comm_nccl_place; /* places.c */

typedef struct comm_nccl_job {
    comm_nccl_library library;
    bl_device *device;
    bl_stream
        *host_stream; /* what goes over the host, of all communicators, in the order of the calls */
    bl_nccl_options options;
    _Atomic double deadline_s; /* now; 0: none */
    char name[COMM_NCCL_NAME_BYTES];
    int n_made;  /* communicators so far: the same on all ranks */
    int n_users; /* communicators alive */
    bool has_told_path;
    comm_nccl_place *places; /* by rank in the first communicator, where the GPUs are */

    /* progress.c */
    void *progress; /* a piece of the host's memory; NULL: none */
    size_t progress_bytes;
    int progress_row;

    /* order.c */
    bl_comm *order; /* a host communicator of all ranks; NULL: nothing is compared, as usual */

    /* guard.c */
    pthread_t guard;
    bool has_guard;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake;
    bool is_ending;
    struct comm_nccl *watched; /* communicators whose watches are looked after */
    comm_nccl_guard_clock clock;
} comm_nccl_job;

/* A collective that was launched. */
typedef struct comm_nccl_launch {
    bl_comm_call call;
    uint64_t number; /* on its communicator, from 1 */
    void *end;       /* an event */
} comm_nccl_launch;

/* A launch is counted by n_launched when it begins, by n_watched when its event is recorded, by
 * n_ended when that has happened.
 *
 * Invariants (comm_nccl_watch_validate): (1) n_ended <= n_watched <= n_launched; (2) those between
 * the first two have room in the ring, and an event each; (3) their numbers ascend. */
typedef struct comm_nccl_watch {
    pthread_t thread;
    bool is_open, has_thread;
    pthread_mutex_t lock; /* guards what follows, to the next blank line */
    pthread_cond_t wake;
    bool is_ending; /* the thread's work is done */
    bool is_ready;  /* the communicator may be asked and aborted */
    /* A ring, that of n_ended % room is the oldest that has not ended. It grows with the launches
     * under way: as many as the streams' queues hold, about a thousand each on CUDA. */
    comm_nccl_launch *launched;
    uint64_t room, n_watched, n_ended;
    double since_s; /* when the oldest one became that, or the thread came back from an absence */

    _Atomic uint64_t n_launched; /* by the rank's thread */
    _Atomic(const char *) busy;  /* the NCCL call that the rank's thread is in; NULL: none */
    _Atomic double busy_since_s; /* written before `busy` */
    _Atomic bool is_over;        /* set before the abort; after that no call is made */
    _Atomic double round_s; /* when the thread's latest round began; BL_NEVER_S: it makes none */
    struct comm_nccl *next; /* of the job's watched ones; under the job's lock */
} comm_nccl_watch;

typedef struct comm_nccl_block {
    struct comm_nccl_block *next;
    void *memory;
    size_t size_bytes;
    struct ncclWindow_vidmem *window; /* NULL: none */
} comm_nccl_block;

typedef struct comm_nccl {
    bl_comm base;
    comm_nccl_job *job;
    bl_comm *host;                       /* of the same ranks; its own */
    struct ncclComm *nccl;               /* NULL: a group of one that was split off */
    int number;                          /* on all ranks the same */
    char name[2 * COMM_NCCL_NAME_BYTES]; /* "nccl", "nccl#2" */
    int *job_ranks;                      /* [size]: ranks in the first communicator */
    comm_blocks sum_blocks;
    comm_blocks hosts;      /* of gathers by hosts; one block: NCCL gathers */
    unsigned char *scratch; /* parts of part_bytes, in device memory */
    size_t part_bytes;
    void *staging; /* BL_NCCL_SMALL_BYTES, pinned */
    bl_event *down, *up;
    comm_nccl_block *blocks;
    bool lacks_windows; /* asked for, and not served */
    comm_nccl_watch watch;
} comm_nccl;

/* nccl.c. Makes the GPU the thread's current one. */
bl_status comm_nccl_enter(const comm_nccl *c);
/* "all_gather of layer 3, 4096 bytes, on nccl" */
void comm_nccl_describe(char text[COMM_NCCL_TEXT_BYTES], const bl_comm_call *call,
                        const char *name);

/* places.c. In the first communicator, before NCCL is asked. BL_ELIMIT on all ranks where two of
 * them have one GPU. */
bl_status comm_nccl_learn_places(comm_nccl *c);
bool comm_nccl_spans_hosts(
    const comm_nccl *c); /* by the hosts' names and boots; the same on all ranks */
/* Ranks per host, if the group's ranks are numbered host by host with equal numbers per host (the
 * last host may have fewer); otherwise 0. The same on all ranks. */
int comm_nccl_ranks_per_host(const comm_nccl *c);

/* order.c: compares a call with those of the communicator's other ranks, where the job asks for it
 * and while its order is not trusted. BL_EINTERNAL names both calls where two differ; it aborts the
 * job. BL_ERANK: a rank did not arrive in time. */
bl_status comm_nccl_compare(comm_nccl *c, const bl_comm_call *call);
/* From now on the whole deadline holds, too. */
bl_status comm_nccl_trust_order(bl_comm *comm);

/* progress.c. A rank has come to step 1 of a communicator when it begins to make it, to step 1 + n
 * when it has launched collective n. find: the rank of the job that is furthest behind, if it has
 * come to fewer than n_steps, and that number; -1: unknown. */
bl_status comm_nccl_progress_open(comm_nccl_job *job, int job_rank);
void comm_nccl_progress_close(comm_nccl_job *job);
void comm_nccl_progress_note(comm_nccl *c, uint64_t n_steps);
int comm_nccl_progress_find(const comm_nccl *c, uint64_t n_steps, uint64_t *reached);
/* A watch of this rank runs; a rank of the communicator whose watches have not run since then, or
 * -1. */
void comm_nccl_progress_beat(const comm_nccl_job *job, double now_s);
int comm_nccl_progress_find_silent(const comm_nccl *c, double since_s);

/* watch.c. Around each use of the communicator by the rank's thread: false when it is over, and
 * must not be used; the streams of the device have failed then. */
bool comm_nccl_begin(comm_nccl *c, const char *what);
/* Returns st, or BL_OK when the communicator was aborted meanwhile: that error is already known. */
bl_status comm_nccl_end(comm_nccl *c, bl_status st);
/* `call` has been launched on `stream`. */
bl_status comm_nccl_watch_launch(comm_nccl *c, bl_stream *stream, const bl_comm_call *call);
/* Under its lock. BL_EINTERNAL names the invariant that does not hold. Debug builds call it after
 * each transition. */
bl_status comm_nccl_watch_validate(const comm_nccl_watch *watch);
bl_status comm_nccl_watch_open(comm_nccl *c);
void comm_nccl_watch_ready(comm_nccl *c);
/* The watch looks now, not at its next round. */
void comm_nccl_watch_wake(comm_nccl *c);
/* Ends the communicator: in good order where all is well, otherwise by an abort. Ends the
 * thread. */
void comm_nccl_watch_close(comm_nccl *c);
/* For the threads of watch.c and guard.c. */
bl_status comm_nccl_start_thread(pthread_t *thread, void *(*main)(void *), void *argument);

/* guard.c: one per rank. Ends the process (options.leave) when a watch that was added does not go
 * round, or its abort, which is its last round, does not return. */
bl_status comm_nccl_guard_open(comm_nccl_job *job);
void comm_nccl_guard_close(comm_nccl_job *job);
void comm_nccl_guard_add(comm_nccl *c); /* from here to its removal c->watch.round_s is read */
void comm_nccl_guard_remove(comm_nccl *c);

/* memory.c */
/* Whether gathers in windows are left to the copy engines; and whether gathers are in windows. */
bool comm_nccl_uses_copy_engines(const comm_nccl *c);
bool comm_nccl_uses_windows(const comm_nccl *c);
bl_status comm_nccl_begin_alloc(bl_comm *comm, bl_status own);
bl_status comm_nccl_alloc(bl_comm *comm, bl_device *device, size_t size_bytes, const char *what,
                          void **out);
void comm_nccl_free(bl_comm *comm, bl_device *device, void *memory);

/* collectives.c */
bl_status comm_nccl_run(bl_stream *stream, const bl_comm_task *task);

#endif
