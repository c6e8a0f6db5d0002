/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- shared by the files of the wire.
 *
 * The wire (comm/wire.h) exchanges bytes between the processes of a job:
 *
 *   wire.c       where the other threads of a process hand their exchanges over
 *   thread.c     the wire's thread: exchanges, deadlines, error messages, the end
 *   sockets.c    moves bytes between processes, on the wire's thread */
#ifndef BALLAST_COMM_WIRE_INTERNAL_H
#define BALLAST_COMM_WIRE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "comm/round_internal.h"
#include "comm/wire.h"

enum { COMM_WIRE_TAG_CONTROL = 0, COMM_WIRE_CHANNELS = 2 }; /* channels per group */

/* What a process waits for. Of all ranks' waits the earliest one, in the order of calls and then of
 * a call's steps, is the one whose missing ranks are to blame: where it has not ended, no rank it
 * waits for is kept by an earlier one. */
typedef struct comm_wait {
    uint64_t call; /* bl_comm_call.number; the end of the job comes after all of them */
    int step;
    char text[512]; /* as an error */
} comm_wait;

enum { COMM_WAIT_NONE = -1, COMM_WAIT_END = -2 }; /* as uint64_t */

/* What a process sends the others: a failure, or the wait that a deadline ended. */
typedef struct comm_word {
    int origin;      /* the rank that failed */
    bool is_overdue; /* a deadline is over: the earliest wait says why */
    comm_wait wait;  /* the sender's */
    bool speaks;     /* whether the sender tells the user, where no lower rank does */
    bl_error error;
} comm_word;

/* Whether a process's message about a failure has arrived, and whether it prints the error. */
typedef enum comm_hearing {
    COMM_HEARD_NOTHING,
    COMM_HEARD_SILENT,
    COMM_HEARD_SPEAKING
} comm_hearing;

/* A piece of a transfer that is under way. */
typedef struct comm_piece {
    struct comm_piece *next; /* in the peer's list */
    int tag;
    bool is_ready; /* a send: the receiver is */
    bool is_finished;
    bool *has_moved; /* set with every move */
    unsigned char *bytes;
    size_t n_bytes, n_moved;
} comm_piece;

/* thread.c has the transitions. DOWN and OVER are the thread's end: nothing is sent or received any
 * more. */
typedef enum comm_wire_stage {
    COMM_WIRE_RUNNING,
    /* this process has announced its end, and waits for the others */
    COMM_WIRE_ENDING,
    COMM_WIRE_SPREADING, /* an error is sent to all */
    COMM_WIRE_DOWN,
    COMM_WIRE_OVER /* in good order */
} comm_wire_stage;

typedef struct comm_sockets comm_sockets; /* sockets.c */

struct bl_wire {
    int rank, size;
    double deadline_s;
    bl_wire_report report;
    void (*leave)(bl_status st); /* NULL: none */
    pthread_t thread;
    atomic_uint_fast64_t n_rounds; /* of the thread: threads that wait for it see that it goes on */
    comm_sockets *sockets;

    pthread_mutex_t lock;  /* guards what follows */
    pthread_cond_t ended;  /* the thread has ended */
    comm_wire_stage stage; /* changed by the thread alone, which reads it without the lock */
    bool is_closing;
    bl_wire_channel *given; /* channels with a new exchange, in order */
    int next_group;
    uint64_t n_calls;
    comm_word first; /* first.error.status BL_OK: all is well */

    /* of the wire's thread alone */
    bl_wire_channel *active; /* the channels with an exchange under way */
    comm_hearing *heard;     /* [size]: whose announcement has arrived; SILENT: none will */
    comm_word verdict, told;
    comm_wait earliest; /* of those heard */
    bool is_overdue;
    unsigned quiet_rounds; /* since a transfer was completed or begun */
    comm_round round;
    double late_until_s; /* it was absent not long ago */
};

/* One transfer: its pieces go one after the other. */
typedef struct comm_wire_channel_transfer {
    size_t n_done;
    bool is_under_way;
    comm_piece piece;
} comm_wire_channel_transfer;

struct bl_wire_channel {
    bl_wire *wire;
    bl_wire_channel *next;
    int size, tag, *job_ranks;
    bool is_under_way; /* under the lock */
    bool is_done;      /* ended well */
    pthread_cond_t ended;
    bl_error error; /* why it ended, when it is this exchange's own */

    const bl_comm_call *call;
    bool is_meeting;
    bool is_begun, has_moved; /* bytes, since the last look */
    int step;                 /* of a call; its meeting is 0 */
    const bl_transfer *transfers;
    int n_transfers, n_left;
    double last_event_s;
    comm_wire_channel_transfer *state; /* [2 size] */
};

/* Opens a wire over the sockets, which it takes over, also when it fails. */
bl_status bl_wire_open(comm_sockets *sockets, int rank, int n_processes, bl_wire_report report,
                       bl_wire **out);

/* Takes down the job's first failure, and wakes the wire's thread. */
void comm_wire_note_word(bl_wire *wire, const comm_word *word);

/* thread.c: until the stage is DOWN or OVER. */
void *comm_wire_main(void *wire);

/* ---- sockets.c: on the wire's thread, except where it says otherwise. A failure of begin or
 * advance aborts the job. ---- */

/* Begins to send to a rank or to receive from it. Pieces of a tag from one process to another
 * arrive in the order of their begin. */
bl_status comm_sockets_begin(comm_sockets *sockets, int rank, bool is_send, comm_piece *piece);
/* Moves what can be moved without waiting. BL_ERANK: a process died, after its last message; it is
 * marked in wire->heard, and not reported again. */
bl_status comm_sockets_advance(bl_wire *wire);

void comm_sockets_send_words(comm_sockets *sockets, const comm_word *word); /* to all others */
bool comm_sockets_are_words_sent(const comm_sockets *sockets);
bool comm_sockets_hear_word(comm_sockets *sockets, comm_word *out,
                            int *from); /* false: none has arrived */

bl_status
comm_sockets_begin_closing(comm_sockets *sockets); /* says that this process is at its end */
bool comm_sockets_has_closed(const comm_sockets *sockets, int rank); /* that one has said so */
bool comm_sockets_have_all_closed(const comm_sockets *sockets);

/* Returns after `most_ns`, when another process has sent something, or when wake has been called
 * since the last rest. */
void comm_sockets_rest(comm_sockets *sockets, int64_t most_ns);
void comm_sockets_wake(const comm_sockets *sockets); /* any thread */
void comm_sockets_close(comm_sockets *sockets);      /* after the thread's end; NULL is fine */

#endif
