/* SPDX-License-Identifier: Apache-2.0 */
/* peer.h -- one connection of a process to another, over a stream socket that is never waited for.
 * It carries frames:
 *
 *   frame    task
 *   MESSAGE  a piece of at most COMM_SMALL_BYTES, whole
 *   READY    the receiver of a larger piece has begun to receive it
 *   DATA     a chunk of a larger piece
 *   WORD     a word of error
 *   CLOSED   the sender has ended in good order
 *   BELL     there is something in the mailbox, or room in it
 *
 * Deadlock freedom: a reader never stops reading. A MESSAGE that no receive waits for yet is kept;
 * there are few, since after a meeting a rank is at most a collective ahead of another, and
 * MAX_EARLY bounds them. DATA are sent only after READY, so their place is known. A long piece goes
 * in chunks, between which other frames, and the pieces of other channels, have their turn. Between
 * processes of a host those of pieces of 64 KiB and more go through the mailbox (mailbox.h)
 * instead, by the same rules: a slot has its place when it is filled, so the ring is always
 * emptied.
 *
 * All of it belongs to the wire's thread. */
#ifndef BALLAST_COMM_WIRE_PEER_H
#define BALLAST_COMM_WIRE_PEER_H

#include "comm/wire/internal.h"
#include "comm/wire/mailbox.h"

enum { COMM_SMALL_BYTES = 1024, COMM_INBOX_BYTES = 16 << 10 };

typedef enum comm_frame_kind {
    COMM_FRAME_MESSAGE = 1,
    COMM_FRAME_READY,
    COMM_FRAME_DATA,
    COMM_FRAME_WORD,
    COMM_FRAME_CLOSED,
    COMM_FRAME_BELL
} comm_frame_kind;

/* TCP's 16-bit checksum misses some damage: XXH3 finds the rest, with a chance of 2^-64 to miss. It
 * does not protect against an attacker. */
typedef struct comm_frame {
    uint32_t kind; /* comm_frame_kind */
    int32_t tag;
    uint64_t n_bytes;   /* that follow */
    uint64_t bytes_sum; /* of these */
    uint64_t head_sum;  /* of all before */
} comm_frame;

typedef struct comm_early comm_early;

typedef struct comm_peer {
    int rank, fd; /* fd -1: gone, or this process itself */
    bool has_closed, has_word, is_word_heard;
    bool is_deaf; /* it sent what makes no sense: nothing more is read */
    comm_word word;
    comm_piece *receives, *sends;
    comm_early *early, *spare; /* frames that came before their piece was begun; and empty ones */
    int n_early;

    comm_mail_ring *mail_out, *mail_in; /* NULL: bulk data go through the socket */

    bool is_full; /* the socket takes no more at present */
    unsigned char *out;
    size_t out_begin, out_end, out_room;
    comm_piece *sending; /* whose chunk is going out */
    comm_frame header;   /* of that chunk */
    size_t header_left, chunk_left;

    unsigned char *inbox; /* [COMM_INBOX_BYTES] */
    size_t in_begin, in_end;
    comm_piece *filling; /* whose chunk is coming in */
    size_t filling_left;
    comm_frame filling_frame;
} comm_peer;

/* Takes the socket over. */
bl_status comm_peer_open(comm_peer *peer, int rank, int fd);
void comm_peer_close(comm_peer *peer); /* a zeroed one is fine, with fd -1 */

/* The piece stays valid until it is finished, or the peer is closed. */
bl_status comm_peer_begin_send(comm_peer *peer, comm_piece *piece);
bl_status comm_peer_begin_receive(comm_peer *peer, comm_piece *piece);
bl_status comm_peer_send_frame(comm_peer *peer, comm_frame_kind kind, int tag, const void *bytes,
                               size_t n_bytes);

bool comm_peer_has_output(const comm_peer *peer); /* for the socket, full or not */
void comm_peer_write(comm_peer *peer); /* until the socket is full; read reports errors */

/* Moves data out of and into the mailbox; *has_moved: something moved. The caller finds out whether
 * to ring. */
bl_status comm_peer_move_mail(comm_peer *peer, bool *has_moved);
bool comm_peer_has_mail(const comm_peer *peer); /* whether that would move something */

/* Reads what has arrived. BL_ERANK "rank 3 has died": the connection has ended, and neither a word
 * nor CLOSED came before; a peer that is gone has fd -1; or the data differ from the data sent.
 * BL_EINTERNAL: it sent an invalid frame. */
bl_status comm_peer_read(comm_peer *peer);

bl_status comm_peer_died(const comm_peer *peer); /* the BL_ERANK of that */

#endif
