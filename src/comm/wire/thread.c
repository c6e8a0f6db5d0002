/* SPDX-License-Identifier: Apache-2.0 */
/* thread.c -- the wire's thread. Exchanges are begun in the order in which they were given, and
 * asked about until they are done. Between two looks the thread rests; a new exchange wakes it, and
 * so do the other processes.
 *
 * | from            | to        | when |
 * | RUNNING         | ENDING    | closed, and no exchange is under way |
 * | RUNNING, ENDING | SPREADING | a rank here has aborted, a deadline is over, a process died, or a
 *   word of error came in |
 * | SPREADING       | DOWN      | every other process has sent its word or died, or SPREAD_S is
 *                               over |
 * | ENDING          | OVER      | all processes have said that they are at their end |
 *
 * Invariants (enter asserts those of the stages)
 * - A process sends every other at most one word of error, with its knowledge at that time; a
 *   process that gets one spreads it. So a word from a process shows that it knows and will leave.
 * - When a deadline is over, the earliest wait of all ranks is the error, whichever rank noticed
 *   first: ranks that others wait for may wait themselves.
 * - Exchanges that are cut off end when the wire is down, not before: their buffers may be written
 *   until then.
 * - Once it is down no socket is used again: the process has to exit. */
#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "comm/wire/internal.h"

static const size_t PIECE_BYTES = (size_t)1 << 30;

static const double SPREAD_S = 2.0; /* how long the others' words are waited for */

static bool is_aborted(bl_wire *w)
{
    pthread_mutex_lock(&w->lock);
    bool aborted = w->first.error.status != BL_OK;
    pthread_mutex_unlock(&w->lock);
    return aborted;
}

static void abort_with(bl_wire *w, bl_status st)
{
    comm_word own = {.origin = w->rank, .is_overdue = w->is_overdue};
    bl_error_save(&own.error, st);
    comm_wire_note_word(w, &own);
}

/* ---- exchanges, on the wire's thread ---- */

/* Begins the next piece of transfer i. */
static bl_status begin_piece(bl_wire_channel *channel, int i)
{
    const bl_transfer *t = &channel->transfers[i];
    comm_wire_channel_transfer *s = &channel->state[i];
    size_t n_left = t->n_bytes - s->n_done;

    s->is_under_way = true;
    s->piece = (comm_piece){.tag = channel->tag,
                            .has_moved = &channel->has_moved,
                            .bytes = (unsigned char *)t->bytes + s->n_done,
                            .n_bytes = n_left < PIECE_BYTES ? n_left : PIECE_BYTES};
    return comm_sockets_begin(channel->wire->sockets, channel->job_ranks[t->peer], t->is_send,
                              &s->piece);
}

static bl_status begin_exchange(bl_wire_channel *channel)
{
    channel->is_begun = true;
    channel->last_event_s = bl_now_s();
    for (int pass = 0; pass < 2;
         pass++) /* receives first: what finds one waiting is not copied twice */
        for (int i = 0; i < channel->n_transfers; i++) {
            if (channel->transfers[i].is_send != (pass == 1)) continue;
            channel->state[i] = (comm_wire_channel_transfer){0};
            BL_TRY(begin_piece(channel, i));
        }
    return BL_OK;
}

/* "rank 3" or "ranks 1, 3"; without room for all, the first ones. */
typedef struct rank_list {
    char numbers[192];
    size_t length;
    int n;
} rank_list;

static void add_rank(rank_list *list, int rank)
{
    if (list->length >= sizeof list->numbers) return;
    list->length +=
        (size_t)snprintf(list->numbers + list->length, sizeof list->numbers - list->length, "%s%d",
                         list->n ? ", " : "", rank);
    list->n++;
}

static const char *noun_of(const rank_list *list)
{
    return list->n == 1 ? "rank" : "ranks";
}

/* The peers with a transfer that is not done (a receive, for a meeting). */
static void list_missing(const bl_wire_channel *channel, rank_list *list)
{

    for (int rank = 0; rank < channel->size; rank++) {
        bool is_missing = false;
        for (int i = 0; i < channel->n_transfers; i++)
            is_missing |= channel->transfers[i].peer == rank &&
                          channel->state[i].n_done < channel->transfers[i].n_bytes &&
                          !(channel->is_meeting && channel->transfers[i].is_send);
        if (is_missing) add_rank(list, channel->job_ranks[rank]);
    }
}

static void describe_wait(const bl_wire_channel *channel, comm_wait *out)
{
    rank_list missing = {0};
    char name[BL_COMM_CALL_TEXT_BYTES];

    *out = (comm_wait){.call = channel->call->number, .step = channel->step};
    list_missing(channel, &missing);
    bl_comm_call_name(channel->call, name);
    if (channel->is_meeting)
        snprintf(out->text, sizeof out->text, "%s %s did not reach %s within %.1f s",
                 noun_of(&missing), missing.numbers, name, channel->wire->deadline_s);
    else
        snprintf(out->text, sizeof out->text, "%s %s moved no byte in the middle of %s for %.1f s",
                 noun_of(&missing), missing.numbers, name, channel->wire->deadline_s);
}

/* By the time at which this round began: a process that is stopped in the middle of one does not
 * yet know how long (notice_absence). */
static bl_status check_deadline(const bl_wire_channel *channel)
{
    bl_wire *w = channel->wire;
    comm_wait wait;

    if (w->deadline_s <= 0 || w->round.at_s - channel->last_event_s < w->deadline_s) return BL_OK;
    describe_wait(channel, &wait);
    w->is_overdue = true;
    return BL_FAIL(BL_ERANK, "%s", wait.text);
}

/* Looks at an exchange once. */
static bl_status advance(bl_wire_channel *channel)
{
    if (!channel->is_begun) {
        channel->wire->quiet_rounds = 0;
        BL_TRY(begin_exchange(channel));
    }
    if (!channel->has_moved) return check_deadline(channel);
    channel->has_moved = false;
    channel->wire->quiet_rounds = 0;
    if (!channel->is_meeting) channel->last_event_s = bl_now_s();
    for (int i = 0; i < channel->n_transfers; i++) {
        comm_wire_channel_transfer *s = &channel->state[i];
        if (!s->is_under_way || !s->piece.is_finished) continue;
        s->is_under_way = false;
        s->n_done += s->piece.n_bytes;
        if (s->n_done < channel->transfers[i].n_bytes)
            BL_TRY(begin_piece(channel, i));
        else
            channel->n_left--;
    }
    return BL_OK;
}

static void end_exchange(bl_wire_channel *channel, bool is_done)
{
    pthread_mutex_lock(&channel->wire->lock);
    channel->is_done = is_done;
    channel->is_under_way = false;
    pthread_cond_signal(&channel->ended);
    pthread_mutex_unlock(&channel->wire->lock);
}

static void advance_all(bl_wire *w)
{
    for (bl_wire_channel **link = &w->active; *link;) {
        bl_wire_channel *channel = *link;
        bl_status st = advance(channel);
        if (st != BL_OK) {
            bl_error_save(&channel->error, st);
            abort_with(w, st);
            return;
        }
        if (channel->n_left > 0) {
            link = &channel->next;
            continue;
        }
        *link = channel->next;
        end_exchange(channel, true);
    }
}

/* Takes the queued work; returns whether the wire is closing. */
static bool take_given(bl_wire *w)
{
    bl_wire_channel **end = &w->active;
    while (*end) end = &(*end)->next;
    pthread_mutex_lock(&w->lock);
    *end = w->given;
    w->given = NULL;
    bool is_closing = w->is_closing;
    pthread_mutex_unlock(&w->lock);
    return is_closing;
}

/* ---- waits, on the wire's thread ---- */

static bool is_earlier(const comm_wait *a, const comm_wait *b)
{
    return a->call < b->call || (a->call == b->call && a->step < b->step);
}

static void describe_end(const bl_wire *w, comm_wait *out)
{
    rank_list open = {0};

    *out = (comm_wait){.call = (uint64_t)COMM_WAIT_END};
    for (int i = 0; i < w->size; i++)
        if (!comm_sockets_has_closed(w->sockets, i)) add_rank(&open, i);
    if (open.n == 0)
        snprintf(out->text, sizeof out->text,
                 "not all ranks came to the end of the job within %.1f s", w->deadline_s);
    else
        snprintf(out->text, sizeof out->text,
                 "%s %s did not come to the end of the job within %.1f s", noun_of(&open),
                 open.numbers, w->deadline_s);
}

/* The earliest of this process's own waits; after a stop its view is stale. */
static void describe_own(bl_wire *w, bool is_at_end, comm_wait *out)
{
    comm_wait wait;

    *out = (comm_wait){.call = (uint64_t)COMM_WAIT_NONE};
    if (w->round.at_s < w->late_until_s + SPREAD_S) return;
    if (is_at_end) describe_end(w, out);
    for (const bl_wire_channel *channel = w->active; channel; channel = channel->next) {
        if (!channel->is_begun || channel->n_left == 0) continue;
        describe_wait(channel, &wait);
        if (is_earlier(&wait, out)) *out = wait;
    }
}

/* ---- words of error, on the wire's thread ---- */

/* Of several ranks that have failed, the lowest one's error is the job's. */
static void take_lowest(bl_wire *w, const comm_word *word)
{
    if (w->verdict.error.status == BL_OK || word->origin < w->verdict.origin) w->verdict = *word;
}

/* True when a message has arrived; it is in `out`. */
static bool hear_word(bl_wire *w, comm_word *out)
{
    int from;
    if (!comm_sockets_hear_word(w->sockets, out, &from)) return false;
    out->error.text[sizeof out->error.text - 1] = '\0';
    out->wait.text[sizeof out->wait.text - 1] = '\0';
    w->heard[from] = out->speaks ? COMM_HEARD_SPEAKING : COMM_HEARD_SILENT;
    if (is_earlier(&out->wait, &w->earliest)) w->earliest = out->wait;
    take_lowest(w, out);
    return true;
}

/* What has come in since the last look: a word before the death of the process that sent it. */
static void listen(bl_wire *w)
{
    comm_word other;
    bl_status st = comm_sockets_advance(w);
    bl_error error;

    bl_error_save(&error, st);
    while (hear_word(w, &other)) comm_wire_note_word(w, &other);
    if (st != BL_OK) bl_wire_abort(w, &error);
}

static bool all_heard(const bl_wire *w)
{
    int n = 0;
    for (int i = 0; i < w->size; i++) n += w->heard[i] != COMM_HEARD_NOTHING;
    return n == w->size;
}

/* A process that was stopped, and goes on (mpirun sends SIGCONT before it kills), has been given up
 * by the others: it does not blame them for its own absence, and listens first. */
static bool notice_absence(bl_wire *w)
{
    double now = bl_now_s();
    bool was_absent = comm_round_begin(&w->round, now);
    atomic_fetch_add(&w->n_rounds, 1);
    if (was_absent) {
        w->late_until_s = now + SPREAD_S;
        for (bl_wire_channel *channel = w->active; channel; channel = channel->next)
            channel->last_event_s = now;
    }
    return was_absent;
}

/* Exchanges words with all others. A process that was absent leaves the report to them: it cannot
 * know whether they have reported to the user already, without it. */
static void spread(bl_wire *w, bool is_at_end)
{
    enum { PAUSE_NS = 200 * 1000 };
    double deadline = bl_now_s() + SPREAD_S;
    comm_word other;

    pthread_mutex_lock(&w->lock);
    w->told = w->first;
    take_lowest(w, &w->first);
    pthread_mutex_unlock(&w->lock);
    notice_absence(w);
    w->told.speaks = w->first.origin == w->rank || w->round.at_s >= w->late_until_s + SPREAD_S;
    describe_own(w, is_at_end, &w->told.wait);
    if (is_earlier(&w->told.wait, &w->earliest)) w->earliest = w->told.wait;
    w->heard[w->rank] = w->told.speaks ? COMM_HEARD_SPEAKING : COMM_HEARD_SILENT;
    comm_sockets_send_words(w->sockets, &w->told);
    while ((!comm_sockets_are_words_sent(w->sockets) || !all_heard(w)) && bl_now_s() < deadline) {
        atomic_fetch_add(&w->n_rounds, 1);
        (void)comm_sockets_advance(w); /* dead peers are marked */
        if (!hear_word(w, &other)) comm_sockets_rest(w->sockets, PAUSE_NS);
    }
}

/* A wrong option, a request to stop and a missing rank are not one rank's own. */
static bool is_of_one_rank(const comm_word *what)
{
    bl_status st = what->error.status;
    return what->origin > 0 && st != BL_EUSAGE && st != BL_ESTOPPED && st != BL_ERANK;
}

/* The lowest rank that reports and is known to answer prints the error. */
static void report(bl_wire *w)
{
    bl_error *error = &w->verdict.error;
    for (int i = 0; i < w->rank; i++)
        if (w->heard[i] == COMM_HEARD_SPEAKING) return;
    if (w->heard[w->rank] == COMM_HEARD_SILENT) return;
    if (w->verdict.is_overdue && w->earliest.call != (uint64_t)COMM_WAIT_NONE)
        memcpy(error->text, w->earliest.text, sizeof w->earliest.text);
    if (is_of_one_rank(&w->verdict)) {
        bl_error_restore(error);
        bl_error_save(error, bl_error_prefix(error->status, "rank %d", w->verdict.origin));
    }
    w->report(error);
}

/* Under the lock. */
static void enter(bl_wire *w, comm_wire_stage stage)
{
    assert(stage == COMM_WIRE_ENDING ? w->stage == COMM_WIRE_RUNNING && w->is_closing && !w->active
           : stage == COMM_WIRE_SPREADING
               ? w->stage <= COMM_WIRE_ENDING && w->first.error.status != BL_OK
           : stage == COMM_WIRE_DOWN
               ? w->stage == COMM_WIRE_SPREADING && w->verdict.error.status != BL_OK
               : stage == COMM_WIRE_OVER && w->stage == COMM_WIRE_ENDING);
    w->stage = stage;
    if (stage >= COMM_WIRE_DOWN) pthread_cond_signal(&w->ended);
}

static void change_stage(bl_wire *w, comm_wire_stage stage)
{
    pthread_mutex_lock(&w->lock);
    enter(w, stage);
    pthread_mutex_unlock(&w->lock);
}

static void go_down(bl_wire *w)
{
    bool is_at_end = w->stage == COMM_WIRE_ENDING;

    change_stage(w, COMM_WIRE_SPREADING);
    spread(w, is_at_end);
    report(w);
    take_given(w);
    pthread_mutex_lock(&w->lock);
    for (bl_wire_channel *channel = w->active; channel; channel = channel->next) {
        channel->is_under_way = false;
        pthread_cond_signal(&channel->ended);
    }
    w->active = NULL;
    enter(w, COMM_WIRE_DOWN);
    pthread_mutex_unlock(&w->lock);
}

/* ---- the wire's thread ---- */

/* After some looks at what moves it sleeps: the others wake it. It looks after the deadlines
 * only. */
static void rest(bl_wire *w)
{
    enum { SPINS = 20, LOOK_NS = 50 * 1000 * 1000 };

    if (++w->quiet_rounds < SPINS && w->active)
        sched_yield();
    else
        comm_sockets_rest(w->sockets, LOOK_NS);
}

/* Exchanges until the wire is closed and idle, or the job is aborted: false. */
static bool run(bl_wire *w)
{
    w->round.at_s = bl_now_s();
    for (;;) {
        bool is_closing = take_given(w);
        notice_absence(w);
        listen(w);
        advance_all(w);
        if (is_aborted(w)) return false;
        if (is_closing && !w->active) return true;
        rest(w);
    }
}

/* All processes have ended in good order; false when one has not. */
static bool finish(bl_wire *w)
{
    enum { PAUSE_NS = 500 * 1000 };
    double start = bl_now_s();
    bool all_here = false;
    comm_wait wait;

    w->round.at_s = start;
    change_stage(w, COMM_WIRE_ENDING);
    bl_status st = comm_sockets_begin_closing(w->sockets);
    if (st != BL_OK) abort_with(w, st);
    while (!is_aborted(w) && !(all_here = comm_sockets_have_all_closed(w->sockets))) {
        if (notice_absence(w)) start = w->round.at_s;
        listen(w);
        if (w->deadline_s > 0 && w->round.at_s - start > w->deadline_s) {
            describe_end(w, &wait);
            w->is_overdue = true;
            abort_with(w, BL_FAIL(BL_ERANK, "%s", wait.text));
        }
        comm_sockets_rest(w->sockets, PAUSE_NS);
    }
    return all_here;
}

void *comm_wire_main(void *argument)
{
    bl_wire *w = argument;

    prctl(PR_SET_NAME, "wire");
    prctl(PR_SET_TIMERSLACK, 1000L); /* ns; sleeps here are shorter than the usual 50 us */
    w->earliest.call = (uint64_t)COMM_WAIT_NONE;
    if (run(w) && finish(w))
        change_stage(w, COMM_WIRE_OVER);
    else
        go_down(w);
    return NULL;
}
