/* SPDX-License-Identifier: Apache-2.0 */
/* peer.h -- one connection of a process to another, over a stream socket that is never waited for. What goes
 * over it are frames:
 *
 *   frame    task
 *   MESSAGE  a piece of at most BL_SMALL_BYTES, whole
 *   READY    the receiver of a larger piece has begun to receive it
 *   DATA     a chunk of a larger piece
 *   WORD     a word of error
 *   CLOSED   the sender has come to its end in good order
 *   BELL     there is something in the mailbox, or room in it
 *
 * Why nothing waits behind anything else for ever: a reader never stops reading. A MESSAGE that no receive
 * waits for yet is kept; there are few, since after a meeting a rank is at most a collective ahead of another,
 * and MAX_EARLY bounds them. DATA are sent only after READY, so their place is known. A long piece goes in
 * chunks, between which other frames, and the pieces of other channels, have their turn. Between processes of a
 * host those of pieces of 64 KiB and more go through the mailbox (mailbox.h) instead, by the same rules: a slot
 * has its place when it is filled, so the ring is always emptied.
 *
 * All of it belongs to the wire's thread. */
#ifndef BALLAST_COMM_WIRE_PEER_H
#define BALLAST_COMM_WIRE_PEER_H

#include "comm/wire/internal.h"
#include "comm/wire/mailbox.h"

enum { BL_SMALL_BYTES = 1024, BL_INBOX_BYTES = 16 << 10 };

typedef enum bl_frame_kind {
    BL_FRAME_MESSAGE = 1,
    BL_FRAME_READY,
    BL_FRAME_DATA,
    BL_FRAME_WORD,
    BL_FRAME_CLOSED,
    BL_FRAME_BELL
} bl_frame_kind;

/* TCP's own sum of 16 bits misses some damage: XXH3 finds what is left of it, with a chance of 2^-64 to miss. It is no proof against a stranger. */
typedef struct bl_frame {
    uint32_t kind; /* bl_frame_kind */
    int32_t tag;
    uint64_t n_bytes;   /* that follow */
    uint64_t bytes_sum; /* of these */
    uint64_t head_sum;  /* of all before */
} bl_frame;

typedef struct bl_early bl_early;

typedef struct bl_peer {
    int rank, fd; /* fd -1: gone, or this process itself */
    bool has_closed, has_word, is_word_heard;
    bool is_deaf; /* it sent what makes no sense: nothing more is read */
    bl_word word;
    bl_piece *receives, *sends;
    bl_early *early, *spare; /* frames that came before their piece was begun; and empty ones */
    int n_early;

    bl_mail_ring *mail_out, *mail_in; /* NULL: bulk data go through the socket */

    bool is_full; /* the socket takes no more at present */
    unsigned char *out;
    size_t out_begin, out_end, out_room;
    bl_piece *sending; /* whose chunk is going out */
    bl_frame header;   /* of that chunk */
    size_t header_left, chunk_left;

    unsigned char *inbox; /* [BL_INBOX_BYTES] */
    size_t in_begin, in_end;
    bl_piece *filling; /* whose chunk is coming in */
    size_t filling_left;
    bl_frame filling_frame;
} bl_peer;

/* Takes the socket over. */
bl_status bl_peer_open(bl_peer *peer, int rank, int fd);
void bl_peer_close(bl_peer *peer); /* a zeroed one is fine, with fd -1 */

/* The piece stays valid until it is finished, or the peer is closed. */
bl_status bl_peer_begin_send(bl_peer *peer, bl_piece *piece);
bl_status bl_peer_begin_receive(bl_peer *peer, bl_piece *piece);
bl_status bl_peer_send_frame(bl_peer *peer, bl_frame_kind kind, int tag, const void *bytes,
                             size_t n_bytes);

bool bl_peer_has_output(const bl_peer *peer); /* for the socket, but for is_full */
void bl_peer_write(bl_peer *peer); /* what the socket takes; that it is broken is read's to say */

/* Moves what the mailbox has and takes; *has_moved: something. Whether to ring is the caller's to find out. */
bl_status bl_peer_move_mail(bl_peer *peer, bool *has_moved);
bool bl_peer_has_mail(const bl_peer *peer); /* whether that would move something */

/* Reads what has come. BL_ERANK "rank 3 has died": the connection has ended, and neither a word nor CLOSED
 * came before; a peer that is gone has fd -1; or what came is not what was sent. BL_EINTERNAL: it sent what makes no sense. */
bl_status bl_peer_read(bl_peer *peer);

bl_status bl_peer_died(const bl_peer *peer); /* the BL_ERANK of that */

#endif
