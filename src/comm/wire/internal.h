/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- what wire.c, thread.c and the transports share.
 *
 *   wire.c       where the other threads of a process hand their exchanges over
 *   thread.c     the wire's thread: exchanges, deadlines, words of error, the end; the same over any transport
 *   a transport  moves bytes between processes, on the wire's thread: sockets.c; tests have others */
#ifndef BALLAST_COMM_WIRE_INTERNAL_H
#define BALLAST_COMM_WIRE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "comm/wire/wire.h"

enum { BL_WIRE_TAG_CONTROL = 0, BL_WIRE_CHANNELS = 2 }; /* channels a group */

/* What a process waits for. Of all ranks' waits the earliest one, in the order of calls and then of a call's steps, is the one whose missing ranks are to
 * blame: where it has not ended, nobody it waits for is kept by an earlier one. */
typedef struct bl_wait {
    uint64_t call; /* bl_comm_call.number; the end of the job comes after all of them */
    int step;
    char text[512]; /* as an error */
} bl_wait;

enum { BL_WAIT_NONE = -1, BL_WAIT_END = -2 }; /* as uint64_t */

typedef struct bl_word {
    int origin;      /* the rank that failed */
    bool is_overdue; /* a deadline is over: the earliest wait says why */
    bl_wait wait;    /* the sender's */
    bool speaks;     /* whether the sender tells the user, where no lower rank does */
    bl_error error;
} bl_word;

typedef enum bl_hearing { BL_HEARD_NOTHING, BL_HEARD_SILENT, BL_HEARD_SPEAKING } bl_hearing;

/* What a transport has under way for a channel: each its own. */
typedef struct bl_wire_requests bl_wire_requests;

/* Called on the wire's thread, except where it says otherwise. A failure of begin, advance or list_finished
 * aborts the job. Messages of a tag from one process to another arrive in the order of their begin. */
typedef struct bl_wire_transport {
    bl_status (*start)(bl_wire *wire); /* sets wire->max_tag */

    /* Begins to send or receive a piece of transfer `i`; at most one of a transfer is under way. */
    bl_status (*begin)(bl_wire_channel *channel, int i, void *bytes, size_t n_bytes);
    /* Moves what can be moved without waiting. BL_ERANK: a process died, after what it had said; it is marked
     * in wire->heard, and not reported again. */
    bl_status (*advance)(bl_wire *wire);
    /* Writes to `finished` (room for all transfers of the channel) which pieces are done and have not been
     * listed yet. *has_moved: bytes of the exchange have been moved since the last call. */
    bl_status (*list_finished)(bl_wire_channel *channel, int *finished, int *n_finished,
                               bool *has_moved);

    void (*send_words)(bl_wire *wire,
                       const bl_word *word); /* to all others; `word` stays until the end */
    bool (*are_words_sent)(bl_wire *wire);   /* all are out of the caller's hands */
    bool (*hear_word)(bl_wire *wire, bl_word *out, int *from); /* one that has come; false: none */

    bl_status (*begin_closing)(bl_wire *wire); /* says that this process has come to its end */
    bool (*have_all_closed)(bl_wire *wire);    /* all the others have said so */
    /* That one has. */
    bool (*has_closed)(const bl_wire *wire, int rank);
    void (*end)(bl_wire *wire); /* after that, in good order */

    /* Returns after `most_ns`, when another process has sent something, or when wake has been called since the last rest. */
    void (*rest)(bl_wire *wire, int64_t most_ns);
    void (*wake)(bl_wire *wire); /* any thread, under wire->lock */

    /* Any thread. NULL: no memory. */
    bl_wire_requests *(*requests_create)(int n_most);
    void (*requests_free)(bl_wire_requests *requests); /* NULL is fine */
    void (*free)(void *state);                         /* after the thread's end; NULL is fine */
} bl_wire_transport;

struct bl_wire {
    int rank, size, max_tag;
    double deadline_s;
    bl_wire_report report;
    void (*leave)(bl_status st); /* NULL: none */
    pthread_t thread;
    atomic_uint_fast64_t n_rounds; /* of the thread: whoever waits for it sees that it goes on */
    const bl_wire_transport *transport;
    void *state; /* the transport's */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t
        ready; /* the transport has started, or has not; the thread has come to its end */
    bool is_ready, is_closing, is_down, is_over;
    bl_wire_channel *given; /* channels with a new exchange, in order */
    int next_group;
    bl_error start_error;
    uint64_t n_calls;
    bl_word first; /* first.error.status BL_OK: all is well */

    /* of the wire's thread alone */
    bl_wire_channel *active; /* the channels with an exchange under way */
    bl_hearing *heard;       /* [size]: whose word has come; SILENT: none will */
    bl_word verdict, told;
    bl_wait earliest; /* of those heard */
    bool is_overdue, is_at_end;
    unsigned quiet_rounds; /* since a transfer was completed or begun */
    double round_s;        /* when it last looked around */
    double late_until_s;   /* it was absent not long ago */

    bool is_joined; /* of the thread that ends the wire */
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

    const bl_comm_call *call;
    bool is_meeting;
    bool is_begun;
    int step; /* of a call; its meeting is 0 */
    const bl_transfer *transfers;
    int n_transfers, n_left;
    double last_event_s;
    bl_wire_requests *requests;      /* for 2 size transfers */
    int *finished;                   /* [2 size] */
    bl_wire_channel_transfer *state; /* [2 size] */
};

/* Opens a wire over `transport`, whose state it takes over, also when it fails. */
bl_status bl_wire_open(const bl_wire_transport *transport, void *state, int rank, int n_processes,
                       bl_wire_report report, bl_wire **out);

/* Takes down the job's first failure, and wakes the wire's thread. */
void bl_wire_note_word(bl_wire *wire, const bl_word *word);

/* thread.c: from the transport's start, after which it sets is_ready, to its end: is_over. */
void *bl_wire_main(void *wire);

#endif
