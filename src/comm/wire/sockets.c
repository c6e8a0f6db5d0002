/* SPDX-License-Identifier: Apache-2.0 */
/* sockets.c -- the sockets of a wire: a stream socket to every other process (peer.h says what goes
 * over it). The wire's thread sleeps in poll, until bytes come, a socket that was full takes more,
 * or another thread of the process has something for it (an eventfd). Bulk data inside a host go
 * through shared memory (mailbox.h).
 *
 * The end of a connection is the death of its process, unless a word of error or CLOSED came
 * before. Over TCP the host may be gone without a word: set_tcp_options. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/sizes.h"
#include "comm/wire/peer.h"

struct comm_sockets {
    int n_processes, rank;
    comm_peer *peers;     /* [n_processes]; the own has no socket */
    struct pollfd *asked; /* [n_processes], and the own place is the eventfd's */
    int alarm;            /* eventfd */
    bool is_closing;
    comm_mail *mail; /* NULL: none */
    int first_on_host;
};

bl_status comm_sockets_begin(comm_sockets *s, int rank, bool is_send, comm_piece *piece)
{
    comm_peer *peer = &s->peers[rank];
    return is_send ? comm_peer_begin_send(peer, piece) : comm_peer_begin_receive(peer, piece);
}

/* ---- all connections ---- */

/* The other process may be asleep and not have seen this change. */
static bl_status move_mail(comm_sockets *s, comm_peer *peer)
{
    bool has_moved = false;

    BL_TRY(comm_peer_move_mail(peer, &has_moved));
    if (has_moved && comm_mail_must_wake(s->mail, peer->rank - s->first_on_host))
        return comm_peer_send_frame(peer, COMM_FRAME_BELL, COMM_WIRE_TAG_CONTROL, NULL, 0);
    return BL_OK;
}

/* Reads from a process and writes to it. */
static bl_status move(bl_wire *w, comm_peer *peer, int what)
{
    comm_sockets *s = w->sockets;
    bl_status st = BL_OK;

    if (what & POLLOUT) peer->is_full = false;
    if ((what & ~POLLOUT) && !peer->is_deaf) st = comm_peer_read(peer);
    if (st == BL_OK && peer->fd >= 0 && !peer->is_deaf && peer->mail_in) st = move_mail(s, peer);
    if (st != BL_OK) peer->is_deaf = true; /* but it is sent the reason */
    comm_peer_write(peer);                 /* reading may have made something ready */
    if ((peer->fd >= 0 && !peer->is_deaf) || peer->has_word) return st;
    w->heard[peer->rank] = COMM_HEARD_SILENT; /* and says no more */
    bool is_death =
        st == BL_OK && peer->fd < 0 && !s->is_closing; /* no process leaves before all close */
    return is_death ? comm_peer_died(peer) : st;
}

static void ask(comm_sockets *s, const struct timespec *most)
{
    for (int i = 0; i < s->n_processes; i++) {
        comm_peer *peer = &s->peers[i];
        bool is_stuck = peer->is_full && comm_peer_has_output(peer);
        if (i == s->rank) continue;
        s->asked[i] = (struct pollfd){.fd = peer->fd,
                                      .events = (short)(is_stuck ? POLLIN | POLLOUT : POLLIN)};
    }
    if (ppoll(s->asked, (nfds_t)s->n_processes, most, NULL) < 0)
        for (int i = 0; i < s->n_processes; i++) s->asked[i].revents = 0;
}

bl_status comm_sockets_advance(bl_wire *w)
{
    static const struct timespec at_once = {0, 0};
    comm_sockets *s = w->sockets;
    bl_error first = {.status = BL_OK};

    ask(s, &at_once);
    for (int i = 0; i < s->n_processes; i++) {
        if (s->peers[i].fd < 0) continue;
        bl_status st = move(w, &s->peers[i], s->asked[i].revents);
        if (st != BL_OK && first.status == BL_OK) bl_error_save(&first, st);
    }
    return bl_error_restore(&first);
}

/* ---- words of error, and the end ---- */

void comm_sockets_send_words(comm_sockets *s, const comm_word *word)
{
    for (int i = 0; i < s->n_processes; i++)
        (void)comm_peer_send_frame(&s->peers[i], COMM_FRAME_WORD, COMM_WIRE_TAG_CONTROL, word,
                                   sizeof *word); /* dropped if out of memory */
}

bool comm_sockets_are_words_sent(const comm_sockets *s)
{
    for (int i = 0; i < s->n_processes; i++)
        if (s->peers[i].fd >= 0 && s->peers[i].out_begin < s->peers[i].out_end) return false;
    return true;
}

bool comm_sockets_hear_word(comm_sockets *s, comm_word *out, int *from)
{
    for (int i = 0; i < s->n_processes; i++) {
        if (!s->peers[i].has_word || s->peers[i].is_word_heard) continue;
        *out = s->peers[i].word;
        *from = i;
        return s->peers[i].is_word_heard = true;
    }
    return false;
}

bl_status comm_sockets_begin_closing(comm_sockets *s)
{
    s->is_closing = true;
    for (int i = 0; i < s->n_processes; i++)
        BL_TRY(
            comm_peer_send_frame(&s->peers[i], COMM_FRAME_CLOSED, COMM_WIRE_TAG_CONTROL, NULL, 0));
    return BL_OK;
}

bool comm_sockets_has_closed(const comm_sockets *s, int rank)
{
    return rank == s->rank || s->peers[rank].has_closed;
}

bool comm_sockets_have_all_closed(const comm_sockets *s)
{
    for (int i = 0; i < s->n_processes; i++)
        if (!comm_sockets_has_closed(s, i)) return false;
    return comm_sockets_are_words_sent(s);
}

/* ---- rest ---- */

static bool has_mail(const comm_sockets *s)
{
    for (int i = 0; s->mail && i < s->n_processes; i++)
        if (s->peers[i].fd >= 0 && comm_peer_has_mail(&s->peers[i])) return true;
    return false;
}

/* The alarm is put off after the sleep only, so that a ring between two looks is not lost. */
void comm_sockets_rest(comm_sockets *s, int64_t most_ns)
{
    const struct timespec most = {.tv_sec = most_ns / 1000000000, .tv_nsec = most_ns % 1000000000};
    eventfd_t count;

    s->asked[s->rank] = (struct pollfd){.fd = s->alarm, .events = POLLIN};
    if (s->mail) comm_mail_set_asleep(s->mail, true);
    if (!has_mail(s)) ask(s, &most);
    if (s->mail) comm_mail_set_asleep(s->mail, false);
    s->asked[s->rank].fd = -1;
    (void)eventfd_read(s->alarm, &count);
}

void comm_sockets_wake(const comm_sockets *s)
{
    (void)eventfd_write(s->alarm, 1);
}

/* ---- opening and closing ---- */

void comm_sockets_close(comm_sockets *s)
{
    if (!s) return;
    for (int i = 0; s->peers && i < s->n_processes; i++) comm_peer_close(&s->peers[i]);
    if (s->alarm >= 0) close(s->alarm);
    comm_mail_close(s->mail);
    free(s->peers);
    free(s->asked);
    free(s);
}

static bool is_tcp(int fd)
{
    int domain = AF_UNIX;
    socklen_t length = sizeof domain;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain != AF_UNIX;
}

/* A host that is lost silently, by its power or its cable, is noticed after 40 s where nothing is
 * under way to it, otherwise when the kernel gives up sending again (tcp_retries2: about 15
 * minutes), or by the deadline. TCP_USER_TIMEOUT would do that sooner, but it takes the place of
 * these 40 s and also counts while the other host answers and its process is stopped, which a
 * deadline decides on. */
static void set_tcp_options(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},   {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, 10}, /* s */
        {IPPROTO_TCP, TCP_KEEPINTVL, 5}, /* s */
        {IPPROTO_TCP, TCP_KEEPCNT, 6},
    };
    for (size_t i = 0; i < BL_COUNT(options); i++)
        setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

static void close_links(const bl_wire_links *links)
{
    for (int i = 0; i < links->n_processes; i++)
        if (links->sockets[i] >= 0) close(links->sockets[i]);
    if (links->shared_fd >= 0) close(links->shared_fd);
}

static comm_sockets *sockets_create(const bl_wire_links *links)
{
    comm_sockets *s = calloc(1, sizeof *s);
    size_t n = (size_t)links->n_processes;

    if (!s) return NULL;
    s->n_processes = links->n_processes;
    s->rank = links->rank;
    s->alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->peers = calloc(n, sizeof *s->peers);
    s->asked = calloc(n, sizeof *s->asked);
    for (size_t i = 0; s->peers && i < n; i++) s->peers[i].fd = -1;
    if (s->alarm >= 0 && s->peers && s->asked) return s;
    comm_sockets_close(s);
    return NULL;
}

static bl_status open_mail(comm_sockets *s, const bl_wire_links *links)
{
    if (links->shared_fd < 0) return BL_OK;
    s->first_on_host = links->first_on_host;
    return comm_mail_open(links->shared_fd, links->rank - links->first_on_host, links->n_on_host,
                          &s->mail);
}

static void open_rings(comm_sockets *s, const bl_wire_links *links)
{
    int own = links->rank - links->first_on_host;
    for (int i = 0; s->mail && i < links->n_on_host; i++) {
        comm_peer *peer = &s->peers[links->first_on_host + i];
        if (i == own) continue;
        peer->mail_out = comm_mail_ring_of(s->mail, own, i);
        peer->mail_in = comm_mail_ring_of(s->mail, i, own);
    }
}

bl_status bl_wire_open_sockets(const bl_wire_links *links, bl_wire_report report, bl_wire **out)
{
    comm_sockets *s = sockets_create(links);

    *out = NULL;
    if (!s) {
        close_links(links);
        return BL_FAIL(BL_ENOMEM, "a job of %d processes", links->n_processes);
    }
    s->asked[s->rank].fd = -1;
    bl_status st = open_mail(s, links);
    for (int i = 0; i < links->n_processes; i++) {
        if (links->sockets[i] < 0) continue;
        if (is_tcp(links->sockets[i])) set_tcp_options(links->sockets[i]);
        bl_status opened = comm_peer_open(&s->peers[i], i, links->sockets[i]);
        if (st == BL_OK) st = opened;
    }
    if (st != BL_OK) {
        comm_sockets_close(s);
        return st;
    }
    open_rings(s, links);
    return bl_wire_open(s, links->rank, links->n_processes, report, out);
}
