/* SPDX-License-Identifier: Apache-2.0 */
/* hello.c -- both sides of the handshake: a guest proves the job's key, a host admits those who do
 * and drops the oldest when full. */
#include "job/tcp/hello.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"

static const char MAGIC[8] = "ballast4";
static const char HOST_PROOF[] = "host", GUEST_PROOF[] = "guest", ANSWER_PROOF[] = "answer",
                  REFUSAL_PROOF[] = "refusal";

static void prove(const job_hello *h, const char *purpose, const void *bytes, size_t n_bytes,
                  job_mac *out)
{
    const job_bytes parts[] = {{&h->greeting, sizeof h->greeting},
                               {h->host_nonce, sizeof h->host_nonce},
                               {bytes, n_bytes}};
    job_mac_make(h->key, purpose, parts, (int)BL_COUNT(parts), out);
}

static bool is_proved(const job_hello *h, const char *purpose, const void *bytes, size_t n_bytes,
                      const job_mac *proof)
{
    job_mac own;
    prove(h, purpose, bytes, n_bytes, &own);
    if (job_mac_equal(&own, proof)) return true;
    errno = EKEYREJECTED;
    return false;
}

static double earlier(double a_s, double b_s)
{
    return a_s < b_s ? a_s : b_s;
}

/* ---- the guest ---- */

static bool hear_challenge(int fd, job_hello *h, double deadline)
{
    job_challenge c;

    if (!job_tcp_receive(fd, &c, sizeof c, deadline)) return false;
    memcpy(h->host_nonce, c.nonce, sizeof c.nonce);
    errno = EPROTO;
    if (memcmp(c.magic, MAGIC, sizeof MAGIC) != 0 ||
        !is_proved(h, HOST_PROOF, &c.n_ranks, sizeof c.n_ranks, &c.proof))
        return false;
    if (c.n_ranks == h->greeting.n_ranks) return true;
    h->refusal = JOB_OTHER_SIZE;
    h->host_ranks = c.n_ranks;
    errno = EPROTO;
    return false;
}

bool job_hello_claim(int fd, job_hello *h, const void *claim, size_t n_bytes, double deadline)
{
    struct {
        job_mac proof;
        uint8_t bytes[JOB_CLAIM_BYTES];
    } words;
    double hello_until = earlier(deadline, bl_now_s() + JOB_HELLO_S);

    memcpy(h->greeting.magic, MAGIC, sizeof MAGIC);
    h->greeting.claim_bytes = (int32_t)n_bytes;
    if (job_random(h->greeting.nonce, sizeof h->greeting.nonce) != BL_OK) return false;
    if (!job_tcp_send(fd, &h->greeting, sizeof h->greeting, hello_until) ||
        !hear_challenge(fd, h, hello_until))
        return false;
    prove(h, GUEST_PROOF, claim, n_bytes, &words.proof);
    if (n_bytes > 0) memcpy(words.bytes, claim, n_bytes);
    return job_tcp_send(fd, &words, sizeof words.proof + n_bytes, deadline);
}

bool job_hello_hear(int fd, job_hello *h, void *answer, size_t n_bytes, double deadline)
{
    job_mac proof, refusal;

    if (!job_tcp_receive(fd, &proof, sizeof proof, deadline)) return false;
    prove(h, REFUSAL_PROOF, NULL, 0, &refusal);
    if (job_mac_equal(&proof, &refusal)) {
        h->refusal = JOB_RANK_TAKEN;
        errno = EEXIST;
        return false;
    }
    return job_tcp_receive(fd, answer, n_bytes, deadline) &&
           is_proved(h, ANSWER_PROOF, answer, n_bytes, &proof);
}

void job_hello_refuse(int fd, const job_hello *h, double deadline)
{
    job_mac proof;

    prove(h, REFUSAL_PROOF, NULL, 0, &proof);
    (void)job_tcp_send(fd, &proof, sizeof proof, deadline);
}

bool job_hello_answer(int fd, const job_hello *h, const void *answer, size_t n_bytes,
                      double deadline)
{
    job_mac proof;

    prove(h, ANSWER_PROOF, answer, n_bytes, &proof);
    return job_tcp_send(fd, &proof, sizeof proof, deadline) &&
           job_tcp_send(fd, answer, n_bytes, deadline);
}

/* ---- the host's guests ---- */

struct job_guest {
    int fd;
    double since_s;
    bool is_challenged;
    job_hello hello;
    size_t n_have;
    uint8_t bytes[sizeof(job_mac) + JOB_CLAIM_BYTES]; /* of its current message */
};

_Static_assert(sizeof(job_greeting) <= sizeof(job_mac) + JOB_CLAIM_BYTES, "it fits in");

/* What a guest sends in its state. */
static size_t count_wanted(const job_reception *r, const job_guest *g)
{
    return g->is_challenged ? sizeof(job_mac) + r->claim_bytes : sizeof(job_greeting);
}

bl_status job_reception_validate(const job_reception *r)
{
    if (r->n_guests < 0 || r->n_guests > JOB_GUESTS)
        return BL_FAIL(BL_EINTERNAL, "reception: %d guests", r->n_guests);
    for (int i = 0; i < r->n_guests; i++) {
        const job_guest *g = &r->guests[i];
        if (g->fd < 0) return BL_FAIL(BL_EINTERNAL, "reception: guest %d has no connection", i);
        for (int k = 0; k < i; k++)
            if (r->guests[k].fd == g->fd)
                return BL_FAIL(BL_EINTERNAL, "reception: guests %d and %d have one connection", k,
                               i);
        if (g->n_have >= count_wanted(r, g))
            return BL_FAIL(BL_EINTERNAL, "reception: guest %d has sent %zu bytes, unjudged", i,
                           g->n_have);
        if (g->is_challenged && (g->hello.key != r->key || g->hello.greeting.job != r->job))
            return BL_FAIL(BL_EINTERNAL, "reception: guest %d was challenged by another job", i);
    }
    return BL_OK;
}

/* After each transition of a guest; in debug builds. */
static void check_state(const job_reception *r)
{
    assert(job_reception_validate(r) == BL_OK);
    (void)r;
}

bl_status job_reception_open(job_reception *r)
{
    r->n_guests = 0;
    r->guests = calloc(JOB_GUESTS, sizeof *r->guests);
    return r->guests ? BL_OK : BL_FAIL(BL_ENOMEM, "connections of %d ranks", r->n_ranks);
}

static void dismiss(job_reception *r, int i)
{
    if (r->guests[i].fd >= 0) close(r->guests[i].fd);
    r->guests[i] = r->guests[--r->n_guests];
}

void job_reception_close(job_reception *r)
{
    while (r->n_guests > 0) dismiss(r, r->n_guests - 1);
    free(r->guests);
    r->guests = NULL;
}

/* JOB_NO_REFUSAL also for bytes that are no greeting. */
static job_refusal judge_greeting(const job_reception *r, const job_greeting *greeting)
{
    enum { NAME_BYTES = 7 }; /* of the magic, before its version */

    if (memcmp(greeting->magic, MAGIC, NAME_BYTES) != 0) return JOB_NO_REFUSAL;
    if (greeting->magic[NAME_BYTES] != MAGIC[NAME_BYTES]) return JOB_OTHER_VERSION;
    if (greeting->job != r->job) return JOB_OTHER_JOB;
    return greeting->n_ranks != r->n_ranks ? JOB_OTHER_SIZE : JOB_NO_REFUSAL;
}

static void turn_away(const job_reception *r, const job_guest *g, job_refusal why)
{
    if (r->turns_away && why != JOB_NO_REFUSAL)
        r->turns_away(r->user, &g->hello.greeting, g->fd, why);
}

/* A guest with another number of ranks learns it, if it knows the key. False: the guest goes. */
static bool challenge(job_reception *r, job_guest *g)
{
    job_challenge c = {.n_ranks = r->n_ranks};
    job_hello *h = &g->hello;

    memcpy(&h->greeting, g->bytes, sizeof h->greeting);
    h->key = r->key;
    job_refusal why = judge_greeting(r, &h->greeting);
    turn_away(r, g, why);
    bool is_ours = memcmp(h->greeting.magic, MAGIC, sizeof MAGIC) == 0 &&
                   h->greeting.job == r->job && h->greeting.claim_bytes == (int32_t)r->claim_bytes;
    if (!is_ours ||
        (why == JOB_NO_REFUSAL && !r->expects(r->user, h->greeting.from, h->greeting.to)))
        return false;
    memcpy(c.magic, MAGIC, sizeof MAGIC);
    if (job_random(c.nonce, sizeof c.nonce) != BL_OK) return false;
    memcpy(h->host_nonce, c.nonce, sizeof c.nonce);
    prove(h, HOST_PROOF, &c.n_ranks, sizeof c.n_ranks, &c.proof);
    g->is_challenged = why == JOB_NO_REFUSAL;
    g->n_have = 0;
    /* A new connection has room for it. */
    return send(g->fd, &c, sizeof c, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof c &&
           g->is_challenged;
}

/* True: it has been admitted, and its connection taken over. */
static bool admit(job_reception *r, job_guest *g)
{
    job_mac proof;
    const uint8_t *claim = g->bytes + sizeof proof;

    memcpy(&proof, g->bytes, sizeof proof);
    if (!is_proved(&g->hello, GUEST_PROOF, claim, r->claim_bytes, &proof)) {
        turn_away(r, g, JOB_OTHER_SECRET);
        return false;
    }
    fcntl(g->fd, F_SETFL, 0);
    if (!r->admits(r->user, &g->hello, claim, g->fd)) return false;
    g->fd = -1;
    return true;
}

/* Reads the guest's messages. False: close the guest; *is_admitted: because it has been
 * admitted. */
static bool read_guest(job_reception *r, job_guest *g, bool *is_admitted)
{
    for (;;) {
        size_t n_wanted = count_wanted(r, g);
        ssize_t n = recv(g->fd, g->bytes + g->n_have, n_wanted - g->n_have, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
        if (n <= 0) {
            if (g->is_challenged) turn_away(r, g, JOB_OTHER_SECRET);
            break;
        }
        g->n_have += (size_t)n;
        if (g->n_have < n_wanted) continue;
        if (g->is_challenged) {
            *is_admitted = admit(r, g);
            break;
        }
        if (!challenge(r, g)) break;
    }
    return false;
}

static int find_oldest(const job_reception *r)
{
    int oldest = 0;
    for (int i = 1; i < r->n_guests; i++)
        if (r->guests[i].since_s < r->guests[oldest].since_s) oldest = i;
    return oldest;
}

/* When all places are taken, the oldest guest is closed, if it had time to send its message. */
static bool has_room(job_reception *r, double now_s)
{
    static const double TIME_TO_SPEAK_S = 0.5;

    if (r->n_guests < JOB_GUESTS) return true;
    int oldest = find_oldest(r);
    if (now_s - r->guests[oldest].since_s < TIME_TO_SPEAK_S) return false;
    dismiss(r, oldest);
    return true;
}

static bl_status accept_guest(job_reception *r, int listen_fd, double now_s)
{
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);

    if (fd >= 0) {
        job_guest *g = &r->guests[r->n_guests++];
        *g = (job_guest){.fd = fd, .since_s = now_s};
        check_state(r);
        return BL_OK;
    }
    if (job_tcp_is_of_peer(errno)) return BL_OK;
    if (job_tcp_is_limit(errno) && r->n_guests > 0) {
        dismiss(r, find_oldest(r));
        return BL_OK;
    }
    return bl_fail_errno(job_tcp_is_limit(errno) ? BL_ELIMIT : BL_EIO,
                         "accepting connections of other ranks");
}

/* Returns at once when a message has arrived, and after 0.2 s at most. */
static bl_status poll_all(const job_reception *r, bool takes_more, double until,
                          struct pollfd *polled)
{
    enum { MOST_MS = 200 };
    const job_listener *l = r->listener;
    double left_ms = 1e3 * (until - bl_now_s());

    for (int i = 0; i < l->n; i++)
        polled[i] = (struct pollfd){.fd = takes_more ? l->fds[i] : -1, .events = POLLIN};
    for (int i = 0; i < r->n_guests; i++)
        polled[l->n + i] = (struct pollfd){.fd = r->guests[i].fd, .events = POLLIN};
    int ms = left_ms < 0 ? 0 : left_ms < MOST_MS ? (int)left_ms + 1 : MOST_MS;
    if (poll(polled, (nfds_t)(l->n + r->n_guests), ms) >= 0) return BL_OK;
    for (int i = 0; i < l->n + r->n_guests; i++) polled[i].revents = 0;
    return errno == EINTR ? BL_OK : bl_fail_errno(BL_EIO, "waiting for connections");
}

bl_status job_reception_wait(job_reception *r, double until)
{
    struct pollfd polled[JOB_PLACE_ADDRESSES + JOB_GUESTS];
    bool is_admitted = false;

    while (!is_admitted) {
        double now_s = bl_now_s();
        BL_TRY(poll_all(r, has_room(r, now_s), until, polled));
        now_s = bl_now_s();
        /* From the last one: its place is taken by one that has been heard. */
        for (int i = r->n_guests - 1; i >= 0 && !is_admitted; i--) {
            bool is_over = now_s - r->guests[i].since_s > JOB_HELLO_S;
            if (polled[r->listener->n + i].revents ? !read_guest(r, &r->guests[i], &is_admitted)
                                                   : is_over)
                dismiss(r, i);
            check_state(r);
        }
        for (int i = 0; i < r->listener->n && r->n_guests < JOB_GUESTS; i++)
            if (polled[i].revents) BL_TRY(accept_guest(r, r->listener->fds[i], now_s));
        if (bl_now_s() >= until) break;
    }
    return BL_OK;
}
