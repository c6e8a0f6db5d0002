/* SPDX-License-Identifier: Apache-2.0 */
/* peer.c -- frames over a non-blocking socket or a mailbox: outgoing frames are queued, early ones
 * are kept by kind and tag. */
#include "comm/wire/peer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/sizes.h"
#include "base/xxh3.h"

enum {
    CHUNK_BYTES = 256 << 10,
    READS = 8,           /* at most so many at a time: others wait, too */
    MAX_EARLY = 1 << 12, /* a channel has at most three; more is a fault of the peer's */
    OUT_BYTES = 4 << 10,
    MAIL_BYTES =
        64
        << 10 /* pieces below this are faster through the socket, whose bytes wake by themselves */
};

_Static_assert(sizeof(comm_frame) + sizeof(comm_word) <= COMM_INBOX_BYTES, "a frame fits in");
_Static_assert(sizeof(comm_frame) + COMM_SMALL_BYTES <= COMM_INBOX_BYTES, "a frame fits in");

struct comm_early {
    comm_early *next;
    comm_frame frame;
    unsigned char bytes[COMM_SMALL_BYTES];
};

/* ---- sums ---- */

static uint64_t sum_head(const comm_frame *frame)
{
    return XXH3_64bits(frame, offsetof(comm_frame, head_sum));
}

static comm_frame make_frame(comm_frame_kind kind, int tag, const void *bytes, size_t n_bytes)
{
    comm_frame frame = {.kind = (uint32_t)kind, .tag = tag, .n_bytes = n_bytes};

    if (n_bytes > 0) frame.bytes_sum = XXH3_64bits(bytes, n_bytes);
    frame.head_sum = sum_head(&frame);
    return frame;
}

static bl_status fail_damaged(const comm_peer *peer, size_t n_bytes)
{
    return BL_FAIL(BL_ERANK,
                   "what rank %d sent was damaged on its way: the checksum of %zu bytes differs; "
                   "check the network and the memory of both hosts",
                   peer->rank, n_bytes);
}

static bl_status check_bytes(const comm_peer *peer, const comm_frame *frame, const void *bytes)
{
    if (frame->n_bytes == 0 || XXH3_64bits(bytes, frame->n_bytes) == frame->bytes_sum) return BL_OK;
    return fail_damaged(peer, frame->n_bytes);
}

/* ---- lists ---- */

static void append(comm_piece **list, comm_piece *piece)
{
    while (*list) list = &(*list)->next;
    piece->next = NULL;
    *list = piece;
}

static void take_out(comm_piece **list, comm_piece *piece)
{
    while (*list != piece) list = &(*list)->next;
    *list = piece->next;
}

static void move_to_end(comm_piece **list, comm_piece *piece) /* the others have their turn */
{
    take_out(list, piece);
    append(list, piece);
}

static bool is_small(const comm_piece *piece)
{
    return piece->n_bytes <= COMM_SMALL_BYTES;
}

static comm_piece *find(comm_piece *list, int tag, bool small)
{
    while (list && (list->tag != tag || is_small(list) != small)) list = list->next;
    return list;
}

/* Takes the first frame of its kind and tag out of those that came early; NULL: none. */
static comm_early *take_early(comm_peer *peer, comm_frame_kind kind, int tag)
{
    for (comm_early **link = &peer->early; *link; link = &(*link)->next) {
        comm_early *early = *link;
        if (early->frame.kind != kind || early->frame.tag != tag) continue;
        *link = early->next;
        early->next = peer->spare;
        peer->spare = early;
        peer->n_early--;
        return early;
    }
    return NULL;
}

static bl_status keep_early(comm_peer *peer, const comm_frame *frame, const void *bytes)
{
    comm_early *early = peer->spare, **end = &peer->early;

    if (peer->n_early >= MAX_EARLY)
        return BL_FAIL(BL_EINTERNAL, "rank %d sent %d messages that nobody asked for", peer->rank,
                       peer->n_early);
    if (early)
        peer->spare = early->next;
    else if (!(early = malloc(sizeof *early)))
        return BL_FAIL(BL_ENOMEM, "a message of rank %d", peer->rank);
    early->next = NULL;
    early->frame = *frame;
    memcpy(early->bytes, bytes, frame->n_bytes);
    while (*end) end = &(*end)->next;
    *end = early;
    peer->n_early++;
    return BL_OK;
}

static void free_all(comm_early *early)
{
    while (early) {
        comm_early *next = early->next;
        free(early);
        early = next;
    }
}

/* Some bytes of the piece have been moved. */
static void note_moved(comm_piece **list, comm_piece *piece, size_t n_bytes)
{
    piece->n_moved += n_bytes;
    *piece->has_moved = true;
    if (piece->n_moved < piece->n_bytes) return;
    take_out(list, piece);
    piece->is_finished = true;
}

/* ---- out ---- */

static bool is_ready(const comm_piece *piece)
{
    return piece->is_ready && piece->n_moved < piece->n_bytes;
}

/* The way of a piece is the sender's choice alone: who receives it takes its chunks from wherever
 * they come. */
static bool goes_by_mail(const comm_peer *peer, const comm_piece *piece)
{
    return peer->mail_out && piece->n_bytes >= MAIL_BYTES;
}

static comm_piece *next_send(const comm_peer *peer, bool by_mail)
{
    comm_piece *piece = peer->sends;
    while (piece && (!is_ready(piece) || goes_by_mail(peer, piece) != by_mail)) piece = piece->next;
    return piece;
}

bool comm_peer_has_output(const comm_peer *peer)
{
    return peer->fd >= 0 &&
           (peer->sending || peer->out_begin < peer->out_end || next_send(peer, false));
}

/* Returns how many bytes the socket took. */
static size_t send_bytes(comm_peer *peer, struct iovec *parts, size_t n_parts)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = n_parts};
    ssize_t n;

    do {
        n = sendmsg(peer->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n >= 0) return (size_t)n;
    peer->is_full = true; /* or broken */
    return 0;
}

static void write_out(comm_peer *peer)
{
    struct iovec part = {peer->out + peer->out_begin, peer->out_end - peer->out_begin};
    peer->out_begin += send_bytes(peer, &part, 1);
    if (peer->out_begin == peer->out_end) peer->out_begin = peer->out_end = 0;
}

static void begin_chunk(comm_peer *peer, comm_piece *piece)
{
    size_t n = piece->n_bytes - piece->n_moved;

    peer->sending = piece;
    peer->chunk_left = n < CHUNK_BYTES ? n : CHUNK_BYTES;
    peer->header =
        make_frame(COMM_FRAME_DATA, piece->tag, piece->bytes + piece->n_moved, peer->chunk_left);
    peer->header_left = sizeof peer->header;
}

static void write_chunk(comm_peer *peer)
{
    comm_piece *piece = peer->sending;
    struct iovec parts[2] = {
        {(unsigned char *)(&peer->header + 1) - peer->header_left, peer->header_left},
        {piece->bytes + piece->n_moved, peer->chunk_left}};
    size_t n = send_bytes(peer, parts, 2);
    size_t n_header = n < peer->header_left ? n : peer->header_left;

    peer->header_left -= n_header;
    n -= n_header;
    peer->chunk_left -= n;
    if (peer->header_left == 0 && peer->chunk_left == 0) {
        peer->sending = NULL;
        move_to_end(&peer->sends, piece);
    }
    if (n > 0) note_moved(&peer->sends, piece, n);
}

void comm_peer_write(comm_peer *peer)
{
    while (peer->fd >= 0 && !peer->is_full) {
        comm_piece *piece;
        if (peer->sending)
            write_chunk(peer);
        else if (peer->out_begin < peer->out_end)
            write_out(peer);
        else if ((piece = next_send(peer, false)))
            begin_chunk(peer, piece);
        else
            return;
    }
}

static bl_status make_room(comm_peer *peer, size_t n_bytes)
{
    if (peer->out_end + n_bytes <= peer->out_room) return BL_OK;
    memmove(peer->out, peer->out + peer->out_begin, peer->out_end - peer->out_begin);
    peer->out_end -= peer->out_begin;
    peer->out_begin = 0;
    if (peer->out_end + n_bytes <= peer->out_room) return BL_OK;
    size_t room = 2 * (peer->out_end + n_bytes);
    unsigned char *out = realloc(peer->out, room);
    if (!out) return BL_FAIL(BL_ENOMEM, "messages to rank %d", peer->rank);
    peer->out = out;
    peer->out_room = room;
    return BL_OK;
}

bl_status comm_peer_send_frame(comm_peer *peer, comm_frame_kind kind, int tag, const void *bytes,
                               size_t n_bytes)
{
    if (peer->fd < 0) return BL_OK;
    comm_frame frame = make_frame(kind, tag, bytes, n_bytes);
    BL_TRY(make_room(peer, sizeof frame + n_bytes));
    memcpy(peer->out + peer->out_end, &frame, sizeof frame);
    peer->out_end += sizeof frame;
    if (n_bytes > 0) memcpy(peer->out + peer->out_end, bytes, n_bytes);
    peer->out_end += n_bytes;
    comm_peer_write(peer);
    return BL_OK;
}

bl_status comm_peer_begin_send(comm_peer *peer, comm_piece *piece)
{
    if (is_small(piece)) {
        piece->is_finished = *piece->has_moved = true;
        return comm_peer_send_frame(peer, COMM_FRAME_MESSAGE, piece->tag, piece->bytes,
                                    piece->n_bytes);
    }
    piece->is_ready = take_early(peer, COMM_FRAME_READY, piece->tag) != NULL;
    append(&peer->sends, piece);
    comm_peer_write(peer);
    return BL_OK;
}

/* ---- in ---- */

static bl_status take_message(comm_peer *peer, comm_piece *piece, size_t n_bytes, const void *bytes)
{
    if (n_bytes != piece->n_bytes)
        return BL_FAIL(BL_EINTERNAL, "rank %d sent %zu bytes, not %zu", peer->rank, n_bytes,
                       piece->n_bytes);
    memcpy(piece->bytes, bytes, n_bytes);
    note_moved(&peer->receives, piece, n_bytes);
    return BL_OK;
}

bl_status comm_peer_begin_receive(comm_peer *peer, comm_piece *piece)
{
    append(&peer->receives, piece);
    if (!is_small(piece)) return comm_peer_send_frame(peer, COMM_FRAME_READY, piece->tag, NULL, 0);
    const comm_early *early = take_early(peer, COMM_FRAME_MESSAGE, piece->tag);
    return early ? take_message(peer, piece, early->frame.n_bytes, early->bytes) : BL_OK;
}

static bl_status refuse(const comm_peer *peer, const comm_frame *frame)
{
    return BL_FAIL(BL_EINTERNAL, "rank %d sent a frame of kind %u, %llu bytes, on channel %d",
                   peer->rank, frame->kind, (unsigned long long)frame->n_bytes, frame->tag);
}

/* A whole frame; its bytes are in the inbox. */
static bl_status take_frame(comm_peer *peer, const comm_frame *frame, const unsigned char *bytes)
{
    comm_piece *piece;

    BL_TRY(check_bytes(peer, frame, bytes));
    switch ((comm_frame_kind)frame->kind) {
    case COMM_FRAME_MESSAGE:
        piece = find(peer->receives, frame->tag, true);
        return piece ? take_message(peer, piece, frame->n_bytes, bytes)
                     : keep_early(peer, frame, bytes);
    case COMM_FRAME_READY:
        for (piece = peer->sends; piece && (piece->tag != frame->tag || piece->is_ready);)
            piece = piece->next;
        if (!piece) return keep_early(peer, frame, bytes);
        piece->is_ready = true;
        return BL_OK;
    case COMM_FRAME_WORD:
        memcpy(&peer->word, bytes, sizeof peer->word);
        peer->has_word = true;
        return BL_OK;
    case COMM_FRAME_CLOSED:
        peer->has_closed = true;
        return BL_OK;
    case COMM_FRAME_BELL: /* it has woken us */
        return BL_OK;
    default:
        return refuse(peer, frame);
    }
}

static bool is_sensible(const comm_frame *frame)
{
    switch ((comm_frame_kind)frame->kind) {
    case COMM_FRAME_MESSAGE:
        return frame->n_bytes <= COMM_SMALL_BYTES;
    case COMM_FRAME_READY:
    case COMM_FRAME_CLOSED:
    case COMM_FRAME_BELL:
        return frame->n_bytes == 0;
    case COMM_FRAME_WORD:
        return frame->n_bytes == sizeof(comm_word);
    case COMM_FRAME_DATA:
        return frame->n_bytes > 0;
    default:
        return false;
    }
}

static bl_status fill(comm_peer *peer, size_t n_bytes)
{
    comm_piece *piece = peer->filling;

    peer->filling_left -= n_bytes;
    if (peer->filling_left == 0) {
        const unsigned char *end = piece->bytes + piece->n_moved + n_bytes;
        peer->filling = NULL;
        BL_TRY(check_bytes(peer, &peer->filling_frame, end - peer->filling_frame.n_bytes));
    }
    note_moved(&peer->receives, piece, n_bytes);
    return BL_OK;
}

static bl_status begin_filling(comm_peer *peer, const comm_frame *frame)
{
    comm_piece *piece = find(peer->receives, frame->tag, false);
    if (!piece || frame->n_bytes > piece->n_bytes - piece->n_moved) return refuse(peer, frame);
    peer->filling = piece;
    peer->filling_left = frame->n_bytes;
    peer->filling_frame = *frame;
    return BL_OK;
}

/* ---- the mailbox ---- */

static bl_status take_mail(comm_peer *peer, bool *has_moved)
{
    const void *bytes;
    comm_frame frame = {.kind = COMM_FRAME_DATA};
    size_t n_bytes;

    while (peer->mail_in && (bytes = comm_mail_look(peer->mail_in, &frame.tag, &n_bytes))) {
        comm_piece *piece = find(peer->receives, frame.tag, false);
        frame.n_bytes = n_bytes;
        if (!piece || n_bytes == 0 || n_bytes > piece->n_bytes - piece->n_moved)
            return refuse(peer, &frame);
        memcpy(piece->bytes + piece->n_moved, bytes, n_bytes);
        comm_mail_drop(peer->mail_in);
        note_moved(&peer->receives, piece, n_bytes);
        *has_moved = true;
    }
    return BL_OK;
}

bl_status comm_peer_move_mail(comm_peer *peer, bool *has_moved)
{
    comm_piece *piece;

    BL_TRY(take_mail(peer, has_moved));
    while ((piece = next_send(peer, true))) {
        size_t n = comm_mail_put(peer->mail_out, piece->tag, piece->bytes + piece->n_moved,
                                 piece->n_bytes - piece->n_moved);
        if (n == 0) break;
        *has_moved = true;
        move_to_end(&peer->sends, piece);
        note_moved(&peer->sends, piece, n);
    }
    return BL_OK;
}

bool comm_peer_has_mail(const comm_peer *peer)
{
    int tag;
    size_t n_bytes;
    if (peer->mail_in && comm_mail_look(peer->mail_in, &tag, &n_bytes)) return true;
    return next_send(peer, true) && comm_mail_has_room(peer->mail_out);
}

/* ---- */

/* All that the inbox holds; an incomplete frame stays. */
static bl_status take_inbox(comm_peer *peer)
{
    comm_frame frame;

    for (;;) {
        size_t n = peer->in_end - peer->in_begin;
        const unsigned char *at = peer->inbox + peer->in_begin;
        if (peer->filling && n > 0) {
            if (n > peer->filling_left) n = peer->filling_left;
            memcpy(peer->filling->bytes + peer->filling->n_moved, at, n);
            peer->in_begin += n;
            BL_TRY(fill(peer, n));
            continue;
        }
        if (n < sizeof frame) return BL_OK;
        memcpy(&frame, at, sizeof frame);
        if (sum_head(&frame) != frame.head_sum) return fail_damaged(peer, sizeof frame);
        if (!is_sensible(&frame)) return refuse(peer, &frame);
        if (frame.kind == COMM_FRAME_DATA) {
            peer->in_begin += sizeof frame;
            BL_TRY(begin_filling(peer, &frame));
            continue;
        }
        if (n < sizeof frame + frame.n_bytes) return BL_OK;
        peer->in_begin += sizeof frame + frame.n_bytes;
        BL_TRY(take_frame(peer, &frame, at + sizeof frame));
    }
}

static void lose(comm_peer *peer)
{
    if (peer->fd >= 0) close(peer->fd);
    peer->fd = -1;
}

static const char DIED[] = " has died";

bl_status comm_peer_died(const comm_peer *peer)
{
    return BL_FAIL(BL_ERANK, "rank %d%s", peer->rank, DIED);
}

bool bl_wire_is_loss(const bl_error *error)
{
    return error->status == BL_ERANK && strstr(error->text, DIED) != NULL;
}

static bl_status end_of(comm_peer *peer, int error)
{
    lose(peer);
    if (peer->has_word || peer->has_closed) return BL_OK;
    if (error == 0 || error == ECONNRESET || error == EPIPE) return comm_peer_died(peer);
    return BL_FAIL(BL_ERANK, "rank %d is out of reach: %s", peer->rank, strerror(error));
}

bl_status comm_peer_read(comm_peer *peer)
{
    for (int i = 0; i < READS && peer->fd >= 0; i++) {
        bool is_direct = peer->filling != NULL; /* the inbox is empty then */
        if (!is_direct) {
            memmove(peer->inbox, peer->inbox + peer->in_begin, peer->in_end - peer->in_begin);
            peer->in_end -= peer->in_begin;
            peer->in_begin = 0;
        }
        void *to =
            is_direct ? peer->filling->bytes + peer->filling->n_moved : peer->inbox + peer->in_end;
        size_t room = is_direct ? peer->filling_left : COMM_INBOX_BYTES - peer->in_end;
        ssize_t n = recv(peer->fd, to, room, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return BL_OK;
        if (n <= 0) return end_of(peer, n < 0 ? errno : 0);
        if (is_direct) {
            BL_TRY(fill(peer, (size_t)n));
        } else {
            peer->in_end += (size_t)n;
            BL_TRY(take_inbox(peer));
            if ((size_t)n < room && !peer->filling) return BL_OK; /* that was all */
        }
    }
    return BL_OK;
}

/* ---- */

bl_status comm_peer_open(comm_peer *peer, int rank, int fd)
{
    *peer = (comm_peer){.rank = rank, .fd = fd, .out_room = OUT_BYTES};
    peer->out = malloc(OUT_BYTES);
    peer->inbox = malloc(COMM_INBOX_BYTES);
    if (!peer->out || !peer->inbox) return BL_FAIL(BL_ENOMEM, "a connection to rank %d", rank);
    return BL_OK;
}

void comm_peer_close(comm_peer *peer)
{
    lose(peer);
    free_all(peer->early);
    free_all(peer->spare);
    free(peer->out);
    free(peer->inbox);
}
