/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- between wire.c, where the other threads of a process hand their exchanges over, and
 * mpi.c, the thread that makes the MPI calls. */
#ifndef BALLAST_COMM_WIRE_INTERNAL_H
#define BALLAST_COMM_WIRE_INTERNAL_H

#include <pthread.h>

#include "comm/wire/wire.h"

enum { BL_WIRE_TAG_CONTROL = 0, BL_WIRE_CHANNELS = 2 }; /* channels a group */

/* What MPI has under way: types of mpi.c. */
typedef struct bl_mpi bl_mpi;
typedef struct bl_mpi_requests bl_mpi_requests;

typedef struct bl_word {
    int origin;  /* the rank that failed */
    bool speaks; /* whether the sender tells the user, where no lower rank does */
    bl_error error;
} bl_word;

typedef enum bl_hearing { BL_HEARD_NOTHING, BL_HEARD_SILENT, BL_HEARD_SPEAKING } bl_hearing;

struct bl_wire {
    int rank, size, max_tag;
    double deadline_s;
    bl_wire_report report;
    pthread_t thread;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake;  /* the wire's thread: something to do */
    pthread_cond_t ready; /* MPI has started, or has not */
    bool is_ready, is_closing, is_down;
    bl_wire_channel *given; /* channels with a new exchange, in order */
    int next_group;
    bl_error start_error;
    bl_word first; /* first.error.status BL_OK: all is well */

    /* of the wire's thread alone */
    bl_wire_channel *active; /* the channels with an exchange under way */
    bl_mpi *mpi;
    bl_hearing *heard; /* [size]: whose word has come */
    bl_word verdict;
    unsigned quiet_rounds; /* since a transfer was completed or begun */
    double round_s;        /* when it last looked around */
    double late_until_s;   /* it was absent not long ago */
};

/* One transfer: its pieces go one after the other. */
typedef struct bl_wire_channel_transfer {
    size_t n_done, n_under_way;
} bl_wire_channel_transfer;

struct bl_wire_channel {
    bl_wire *wire;
    bl_wire_channel *next;
    int size, tag, *job_ranks;
    bool is_under_way; /* under the lock */
    bool is_done;      /* ended well */
    pthread_cond_t ended;
    bl_error error; /* why it ended, when it is this exchange's own */

    bl_comm_kind kind;
    bool is_meeting;
    bool is_begun;
    const bl_transfer *transfers;
    int n_transfers, n_left;
    double last_event_s;
    bl_mpi_requests *requests;       /* [2 size] */
    bl_wire_channel_transfer *state; /* [2 size] */
};

/* Takes down the job's first failure, and wakes the wire's thread. */
void bl_wire_note_word(bl_wire *wire, const bl_word *word);

/* mpi.c. The thread: from MPI's start, after which it sets is_ready, to its end. */
void *bl_mpi_main(void *wire);
bl_mpi *bl_mpi_create(int n_processes);              /* NULL: no memory */
bl_mpi_requests *bl_mpi_requests_create(int n_most); /* NULL: no memory */
void bl_mpi_free(bl_mpi *mpi);
void bl_mpi_requests_free(bl_mpi_requests *requests);

#endif
