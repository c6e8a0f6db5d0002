/* SPDX-License-Identifier: Apache-2.0 */
/* The wire over MPI. One thread makes every MPI call, from the first to the last: exchanges are started in
 * the order in which they were given, nonblocking, and asked about until they are done. Between two questions
 * the thread sleeps, longer where it waits for a rank that may compute for minutes; a new exchange wakes it.
 *
 * | from      | to        | when |
 * | running   | spreading | a rank here has aborted, a deadline is over, or a word of error came in |
 * | spreading | down      | every other process has sent its word, or SPREAD_S is over |
 * | running   | finished  | closed, and all processes have come to the closing barrier |
 *
 * Invariants
 * - A process sends every other at most one word of error, which is what it knows then; whoever gets one
 *   spreads it. So a word from a process says that it knows and will leave.
 * - Exchanges that are cut off end when the wire is down, not before: their buffers may be written until
 * then.
 * - Once it is down no MPI call is made, MPI_Finalize neither: the process has to exit.
 *
 * Sources: MPI 3.1, 3.5 (order of messages), 3.7 (nonblocking), 8.7 (finalising). */
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "comm/wire/internal.h"

static const size_t PIECE_BYTES = (size_t)1 << 30; /* MPI counts in int */

static const double SPREAD_S = 2.0; /* how long the others' words are waited for */

struct bl_mpi {
    MPI_Request incoming, *sends; /* [n_processes] */
    bl_word heard, told;
};

struct bl_mpi_requests {
    int *finished; /* which ones, when asked; [n_most] */
    MPI_Request all[];
};

static bl_status check_mpi(int code, const char *call)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (code == MPI_SUCCESS) return BL_OK;
    MPI_Error_string(code, text, &length);
    return BL_FAIL(BL_ERANK, "%s: %s", call, text);
}

static bool is_aborted(bl_wire *w)
{
    pthread_mutex_lock(&w->lock);
    bool aborted = w->first.error.status != BL_OK;
    pthread_mutex_unlock(&w->lock);
    return aborted;
}

static void abort_with(bl_wire *w, bl_status st)
{
    bl_error error;
    bl_error_save(&error, st);
    bl_wire_abort(w, &error);
}

/* ---- exchanges, on the wire's thread ---- */

/* Begins the next piece of transfer i. */
static bl_status begin_piece(bl_wire_channel *channel, int i)
{
    const bl_transfer *t = &channel->transfers[i];
    bl_wire_channel_transfer *s = &channel->state[i];
    unsigned char *at = (unsigned char *)t->bytes + s->n_done;
    int peer = channel->job_ranks[t->peer];

    s->n_under_way = t->n_bytes - s->n_done < PIECE_BYTES ? t->n_bytes - s->n_done : PIECE_BYTES;
    if (t->is_send)
        return check_mpi(MPI_Isend(at, (int)s->n_under_way, MPI_BYTE, peer, channel->tag,
                                   MPI_COMM_WORLD, &channel->requests->all[i]),
                         "MPI_Isend");
    return check_mpi(MPI_Irecv(at, (int)s->n_under_way, MPI_BYTE, peer, channel->tag,
                               MPI_COMM_WORLD, &channel->requests->all[i]),
                     "MPI_Irecv");
}

static bl_status begin_exchange(bl_wire_channel *channel)
{
    channel->is_begun = true;
    channel->last_event_s = bl_now_s();
    for (int i = 0; i < channel->n_transfers; i++) channel->requests->all[i] = MPI_REQUEST_NULL;
    for (int pass = 0; pass < 2;
         pass++) /* receives first: what finds one waiting is not copied twice */
        for (int i = 0; i < channel->n_transfers; i++) {
            if (channel->transfers[i].is_send != (pass == 1)) continue;
            channel->state[i] = (bl_wire_channel_transfer){0};
            BL_TRY(begin_piece(channel, i));
        }
    return BL_OK;
}

/* Writes "rank 3" or "ranks 1, 3": the peers with a transfer that is not done (a receive, for a meeting). */
static void name_missing(const bl_wire_channel *channel, char *text, size_t text_bytes)
{
    int n_missing = 0;
    size_t length = 0;
    char list[192] = "";

    for (int rank = 0; rank < channel->size; rank++) {
        bool is_missing = false;
        for (int i = 0; i < channel->n_transfers; i++)
            is_missing |= channel->transfers[i].peer == rank &&
                          channel->state[i].n_done < channel->transfers[i].n_bytes &&
                          !(channel->is_meeting && channel->transfers[i].is_send);
        if (!is_missing || length >= sizeof list) continue;
        length += (size_t)snprintf(list + length, sizeof list - length, "%s%d",
                                   n_missing ? ", " : "", channel->job_ranks[rank]);
        n_missing++;
    }
    snprintf(text, text_bytes, "%s %s", n_missing == 1 ? "rank" : "ranks", list);
}

/* By the time at which this round began: a process that is stopped in the middle of one does not yet know how
 * long (notice_absence). */
static bl_status check_deadline(const bl_wire_channel *channel)
{
    double deadline_s = channel->wire->deadline_s;
    char missing[256];

    if (deadline_s <= 0 || channel->wire->round_s - channel->last_event_s < deadline_s)
        return BL_OK;
    name_missing(channel, missing, sizeof missing);
    if (channel->is_meeting)
        return BL_FAIL(BL_ERANK, "%s did not reach %s within %.1f s", missing,
                       bl_comm_kind_name(channel->kind), deadline_s);
    return BL_FAIL(BL_ERANK, "%s moved no byte in the middle of %s for %.1f s", missing,
                   bl_comm_kind_name(channel->kind), deadline_s);
}

/* Asks about an exchange once. */
static bl_status advance(bl_wire_channel *channel)
{
    int n_finished = 0;

    if (!channel->is_begun) {
        channel->wire->quiet_rounds = 0;
        BL_TRY(begin_exchange(channel));
    }
    BL_TRY(check_mpi(MPI_Testsome(channel->n_transfers, channel->requests->all, &n_finished,
                                  channel->requests->finished, MPI_STATUSES_IGNORE),
                     "MPI_Testsome"));
    if (n_finished == MPI_UNDEFINED || n_finished == 0) return check_deadline(channel);
    channel->wire->quiet_rounds = 0;
    if (!channel->is_meeting) channel->last_event_s = bl_now_s();
    for (int k = 0; k < n_finished; k++) {
        int i = channel->requests->finished[k];
        channel->state[i].n_done += channel->state[i].n_under_way;
        if (channel->state[i].n_done < channel->transfers[i].n_bytes)
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

/* Takes what has been given; returns whether the wire is closing. */
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

/* ---- words of error, on the wire's thread ---- */

static bl_status listen_for_word(bl_wire *w)
{
    return check_mpi(MPI_Irecv(&w->mpi->heard, sizeof w->mpi->heard, MPI_BYTE, MPI_ANY_SOURCE,
                               BL_WIRE_TAG_CONTROL, MPI_COMM_WORLD, &w->mpi->incoming),
                     "MPI_Irecv");
}

/* True when a word has come in; it is in `out`. */
static bool hear_word(bl_wire *w, bl_word *out)
{
    int has_come = 0;
    MPI_Status status;
    if (MPI_Test(&w->mpi->incoming, &has_come, &status) != MPI_SUCCESS || !has_come) return false;
    *out = w->mpi->heard;
    out->error.text[sizeof out->error.text - 1] = '\0';
    w->heard[status.MPI_SOURCE] = out->speaks ? BL_HEARD_SPEAKING : BL_HEARD_SILENT;
    return listen_for_word(w) == BL_OK;
}

static bool all_heard(const bl_wire *w)
{
    int n = 0;
    for (int i = 0; i < w->size; i++) n += w->heard[i] != BL_HEARD_NOTHING;
    return n == w->size;
}

/* A process that was stopped, and goes on (mpirun sends SIGCONT before it kills), has been given up by the
 * others: it does not blame them for its own absence, and listens first. */
static bool notice_absence(bl_wire *w)
{
    double now = bl_now_s();
    bool was_absent = now - w->round_s > SPREAD_S;
    if (was_absent) {
        w->late_until_s = now + SPREAD_S;
        for (bl_wire_channel *channel = w->active; channel; channel = channel->next)
            channel->last_event_s = now;
    }
    w->round_s = now;
    return was_absent;
}

/* Tells everybody and hears everybody. If several ranks have failed, the lowest one's error is the job's. One
 * that was absent cannot know whether the others have told the user already, without it: they do. */
static void spread(bl_wire *w)
{
    double deadline = bl_now_s() + SPREAD_S;
    const struct timespec pause = {0, 200 * 1000};
    int all_sent = 0;
    bl_word other;

    pthread_mutex_lock(&w->lock);
    w->verdict = w->mpi->told = w->first;
    pthread_mutex_unlock(&w->lock);
    notice_absence(w);
    w->mpi->told.speaks = w->first.origin == w->rank || w->round_s >= w->late_until_s + SPREAD_S;
    w->heard[w->rank] = w->mpi->told.speaks ? BL_HEARD_SPEAKING : BL_HEARD_SILENT;
    for (int i = 0; i < w->size; i++) {
        w->mpi->sends[i] = MPI_REQUEST_NULL;
        if (i != w->rank)
            MPI_Isend(&w->mpi->told, sizeof w->mpi->told, MPI_BYTE, i, BL_WIRE_TAG_CONTROL,
                      MPI_COMM_WORLD, &w->mpi->sends[i]);
    }
    while ((!all_sent || !all_heard(w)) && bl_now_s() < deadline) {
        if (!all_sent) MPI_Testall(w->size, w->mpi->sends, &all_sent, MPI_STATUSES_IGNORE);
        if (!hear_word(w, &other))
            nanosleep(&pause, NULL);
        else if (other.origin < w->verdict.origin)
            w->verdict = other;
    }
}

/* A wrong option, a request to stop and a missing rank are not one rank's own. */
static bool is_of_one_rank(const bl_word *what)
{
    bl_status st = what->error.status;
    return what->origin > 0 && st != BL_EUSAGE && st != BL_ESTOPPED && st != BL_ERANK;
}

/* The lowest of the ranks that speak, and are known to answer, tells the user. */
static void report(bl_wire *w)
{
    bl_error *error = &w->verdict.error;
    for (int i = 0; i < w->rank; i++)
        if (w->heard[i] == BL_HEARD_SPEAKING) return;
    if (w->heard[w->rank] == BL_HEARD_SILENT) return;
    if (is_of_one_rank(&w->verdict)) {
        bl_error_restore(error);
        bl_error_save(error, bl_error_prefix(error->status, "rank %d", w->verdict.origin));
    }
    w->report(error);
}

static void go_down(bl_wire *w)
{
    spread(w);
    report(w);
    take_given(w);
    pthread_mutex_lock(&w->lock);
    w->is_down = true;
    for (bl_wire_channel *channel = w->active; channel; channel = channel->next) {
        channel->is_under_way = false;
        pthread_cond_signal(&channel->ended);
    }
    w->active = NULL;
    pthread_mutex_unlock(&w->lock);
}

/* ---- the wire's thread ---- */

/* While bytes are flowing it sleeps hardly at all; while it waits for a rank to arrive longer and longer; and
 * with nothing to do but listen, two milliseconds. */
static void rest(bl_wire *w)
{
    enum { SPINS = 20, SHORT_NS = 5 * 1000, LONG_NS = 500 * 1000, IDLE_NS = 2 * 1000 * 1000 };
    bool moves = false;
    long ns = IDLE_NS;
    struct timespec until;

    if (++w->quiet_rounds < SPINS && w->active) {
        sched_yield();
        return;
    }
    for (const bl_wire_channel *channel = w->active; channel; channel = channel->next)
        moves |= !channel->is_meeting;
    if (w->active)
        ns = bl_min_i64(moves ? 4 * SHORT_NS : LONG_NS,
                        (int64_t)SHORT_NS * (1 + w->quiet_rounds / SPINS));
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += ns;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&w->lock);
    if (!w->given && !(w->is_closing && !w->active) && w->first.error.status == BL_OK)
        pthread_cond_timedwait(&w->wake, &w->lock, &until);
    pthread_mutex_unlock(&w->lock);
}

/* Exchanges until the wire is closed and idle, or the job is aborted: false. */
static bool run(bl_wire *w)
{
    bl_word other;
    w->round_s = bl_now_s();
    for (;;) {
        bool is_closing = take_given(w);
        notice_absence(w);
        if (hear_word(w, &other)) bl_wire_note_word(w, &other);
        advance_all(w);
        if (is_aborted(w)) return false;
        if (is_closing && !w->active) return true;
        rest(w);
    }
}

/* All processes have come to their end in good order; false when one has not. A rank that waits for another
 * in a collective knows more than one that waits here: it has the first word. */
static bool finish(bl_wire *w)
{
    const struct timespec pause = {0, 500 * 1000};
    MPI_Request barrier;
    int all_here = 0;
    double start = bl_now_s();
    bl_word other;

    w->round_s = start;
    if (check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &barrier), "MPI_Ibarrier") != BL_OK)
        abort_with(w, BL_ERANK);
    while (!is_aborted(w)) {
        if (MPI_Test(&barrier, &all_here, MPI_STATUS_IGNORE) == MPI_SUCCESS && all_here) break;
        if (notice_absence(w)) start = w->round_s;
        if (hear_word(w, &other)) bl_wire_note_word(w, &other);
        if (w->deadline_s > 0 && w->round_s - start > w->deadline_s + SPREAD_S)
            abort_with(w,
                       BL_FAIL(BL_ERANK, "not all ranks came to the end of the job within %.1f s",
                               w->deadline_s));
        nanosleep(&pause, NULL);
    }
    if (!all_here) return false;
    MPI_Cancel(&w->mpi->incoming);
    MPI_Wait(&w->mpi->incoming, MPI_STATUS_IGNORE);
    MPI_Finalize();
    return true;
}

static bl_status start_mpi(bl_wire *w)
{
    int provided, size, rank, has_tag;
    int *max_tag;

    BL_TRY(
        check_mpi(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread"));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (size != w->size || rank != w->rank) {
        MPI_Finalize();
        return BL_FAIL(BL_EUSAGE,
                       "the launcher started %d processes but MPI sees %d: start them with the MPI "
                       "that this build "
                       "uses (its mpirun, or srun --mpi=pmix)",
                       w->size, size);
    }
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &max_tag, &has_tag);
    w->max_tag = has_tag ? *max_tag : 32767;
    return listen_for_word(w);
}

void *bl_mpi_main(void *argument)
{
    bl_wire *w = argument;

    prctl(PR_SET_NAME, "mpi");
    prctl(PR_SET_TIMERSLACK, 1000L); /* ns; sleeps here are shorter than the usual 50 us */
    bl_status st = start_mpi(w);
    pthread_mutex_lock(&w->lock);
    bl_error_save(&w->start_error, st);
    w->is_ready = true;
    pthread_cond_signal(&w->ready);
    pthread_mutex_unlock(&w->lock);
    if (st == BL_OK && !(run(w) && finish(w))) go_down(w);
    return NULL;
}

/* ---- what a wire and a channel own of it ---- */

bl_mpi *bl_mpi_create(int n_processes)
{
    bl_mpi *mpi = calloc(1, sizeof *mpi);
    if (!mpi || !(mpi->sends = calloc((size_t)n_processes, sizeof *mpi->sends))) {
        free(mpi);
        return NULL;
    }
    return mpi;
}

void bl_mpi_free(bl_mpi *mpi)
{
    if (mpi) free(mpi->sends);
    free(mpi);
}

bl_mpi_requests *bl_mpi_requests_create(int n_most)
{
    bl_mpi_requests *requests =
        calloc(1, sizeof *requests + (size_t)n_most * sizeof requests->all[0]);
    if (!requests || !(requests->finished = calloc((size_t)n_most, sizeof *requests->finished))) {
        free(requests);
        return NULL;
    }
    return requests;
}

void bl_mpi_requests_free(bl_mpi_requests *requests)
{
    if (requests) free(requests->finished);
    free(requests);
}
