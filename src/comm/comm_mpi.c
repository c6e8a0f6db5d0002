/* SPDX-License-Identifier: Apache-2.0 */
/* The wire over MPI. One thread makes every MPI call, from the first to the last: exchanges are started in
 * the order in which they were given, nonblocking, and asked about until they are done. Between two questions
 * the thread sleeps, longer where it waits for a rank that may compute for minutes; a new exchange wakes it.
 *
 *   running   -> spreading   a rank of this process has aborted, a deadline is over, or a word of error came
 * in spreading -> down        every other process has sent its word, or a second is over running   ->
 * finished    closed, and all processes have come to the closing barrier
 *
 * Invariants
 * - Every process sends every other at most one word of error, which is what it knows then; whoever gets one
 *   spreads it. So a word from a process says that it knows and will leave.
 * - Exchanges that are cut off end when the wire is down, not before: until then their buffers may be
 * written. Once it is down no MPI call is made any more, MPI_Finalize neither; the process has to exit.
 *
 * Sources: MPI 3.1, 3.5 (order of messages), 3.7 (nonblocking), 8.7 (finalising). */
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/pause.h"
#include "base/sizes.h"
#include "comm/wire.h"

/* MPI counts in int. */
#ifndef BL_WIRE_PIECE_BYTES
#define BL_WIRE_PIECE_BYTES ((size_t)1 << 30)
#endif

enum { TAG_CONTROL = 0, LANES_PER_GROUP = 2 };
enum { LEAVE_S = 5 }; /* how long a thread that hangs in MPI is waited for after an abort */

static const double SPREAD_S = 1.0; /* how long the others' words are waited for */

typedef struct word {
    int origin; /* the rank that failed */
    bl_error error;
} word;

struct bl_wire {
    int rank, size, max_tag;
    double deadline_s;
    bl_wire_report report;
    pthread_t thread;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake;  /* the wire's thread: something to do */
    pthread_cond_t ready; /* MPI has started, or has not */
    bool is_ready, is_closing, is_down;
    bl_lane *given; /* lanes with a new exchange, in order */
    int next_group;
    bl_error start_error;
    word first; /* first.error.status BL_OK: all is well */

    /* of the wire's thread alone */
    bl_lane *active;
    MPI_Request incoming;
    word heard_word, sent_word;
    MPI_Request *sends; /* [size] */
    bool *heard;        /* [size] */
    word verdict;
    unsigned quiet_rounds; /* since a transfer was completed or begun */
    double round_s;        /* when it last looked around */
    double late_until_s;
};

/* One transfer: its pieces go one after the other. */
typedef struct lane_transfer {
    size_t n_done, n_under_way;
} lane_transfer;

struct bl_lane {
    bl_wire *wire;
    bl_lane *next;
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
    MPI_Request *requests; /* [2 size] */
    lane_transfer *state;  /* [2 size] */
    int *finished;         /* [2 size] */
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bl_status check_mpi(int code, const char *call)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (code == MPI_SUCCESS) return BL_OK;
    MPI_Error_string(code, text, &length);
    return BL_FAIL(BL_ERANK, "%s: %s", call, text);
}

/* ---- errors ---- */

static void note_word(bl_wire *w, const word *what)
{
    pthread_mutex_lock(&w->lock);
    if (w->first.error.status == BL_OK) w->first = *what;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

void bl_wire_abort(bl_wire *w, const bl_error *error)
{
    word own = {.origin = w->rank, .error = *error};
    note_word(w, &own);
}

void bl_wire_first_error(bl_wire *w, bl_error *out)
{
    pthread_mutex_lock(&w->lock);
    *out = w->first.error;
    pthread_mutex_unlock(&w->lock);
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
static bl_status begin_piece(bl_lane *lane, int i)
{
    const bl_transfer *t = &lane->transfers[i];
    lane_transfer *s = &lane->state[i];
    unsigned char *at = (unsigned char *)t->bytes + s->n_done;
    int peer = lane->job_ranks[t->peer];

    s->n_under_way =
        t->n_bytes - s->n_done < BL_WIRE_PIECE_BYTES ? t->n_bytes - s->n_done : BL_WIRE_PIECE_BYTES;
    if (t->is_send)
        return check_mpi(
            MPI_Isend(at, (int)s->n_under_way, MPI_BYTE, peer, lane->tag, MPI_COMM_WORLD, &lane->requests[i]),
            "MPI_Isend");
    return check_mpi(
        MPI_Irecv(at, (int)s->n_under_way, MPI_BYTE, peer, lane->tag, MPI_COMM_WORLD, &lane->requests[i]),
        "MPI_Irecv");
}

static bl_status begin_exchange(bl_lane *lane)
{
    lane->is_begun = true;
    lane->last_event_s = now_s();
    for (int i = 0; i < lane->n_transfers; i++) lane->requests[i] = MPI_REQUEST_NULL;
    for (int pass = 0; pass < 2; pass++) /* receives first: what finds one waiting is not copied twice */
        for (int i = 0; i < lane->n_transfers; i++) {
            if (lane->transfers[i].is_send != (pass == 1)) continue;
            lane->state[i] = (lane_transfer){0};
            BL_TRY(begin_piece(lane, i));
        }
    return BL_OK;
}

/* Writes "rank 3" or "ranks 1, 3": the peers with a transfer that is not done (a receive, for a meeting). */
static void name_missing(const bl_lane *lane, char *text, size_t text_bytes)
{
    int n_missing = 0;
    size_t length = 0;
    char list[192] = "";

    for (int rank = 0; rank < lane->size; rank++) {
        bool is_missing = false;
        for (int i = 0; i < lane->n_transfers; i++)
            is_missing |= lane->transfers[i].peer == rank &&
                          lane->state[i].n_done < lane->transfers[i].n_bytes &&
                          !(lane->is_meeting && lane->transfers[i].is_send);
        if (!is_missing || length >= sizeof list) continue;
        length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", n_missing ? ", " : "",
                                   lane->job_ranks[rank]);
        n_missing++;
    }
    snprintf(text, text_bytes, "%s %s", n_missing == 1 ? "rank" : "ranks", list);
}

static bl_status check_deadline(const bl_lane *lane)
{
    double deadline_s = lane->wire->deadline_s;
    char missing[256];

    if (deadline_s <= 0 || now_s() - lane->last_event_s < deadline_s) return BL_OK;
    name_missing(lane, missing, sizeof missing);
    if (lane->is_meeting)
        return BL_FAIL(BL_ERANK, "%s did not reach %s within %.1f s", missing, bl_comm_kind_name(lane->kind),
                       deadline_s);
    return BL_FAIL(BL_ERANK, "%s moved no byte in the middle of %s for %.1f s", missing,
                   bl_comm_kind_name(lane->kind), deadline_s);
}

/* Asks about an exchange once. */
static bl_status advance(bl_lane *lane)
{
    int n_finished = 0;

    if (!lane->is_begun) {
        lane->wire->quiet_rounds = 0;
        BL_TRY(begin_exchange(lane));
    }
    BL_TRY(check_mpi(
        MPI_Testsome(lane->n_transfers, lane->requests, &n_finished, lane->finished, MPI_STATUSES_IGNORE),
        "MPI_Testsome"));
    if (n_finished == MPI_UNDEFINED || n_finished == 0) return check_deadline(lane);
    lane->wire->quiet_rounds = 0;
    if (!lane->is_meeting) lane->last_event_s = now_s();
    for (int k = 0; k < n_finished; k++) {
        int i = lane->finished[k];
        lane->state[i].n_done += lane->state[i].n_under_way;
        if (lane->state[i].n_done < lane->transfers[i].n_bytes)
            BL_TRY(begin_piece(lane, i));
        else
            lane->n_left--;
    }
    return BL_OK;
}

static void end_exchange(bl_lane *lane, bool is_done)
{
    pthread_mutex_lock(&lane->wire->lock);
    lane->is_done = is_done;
    lane->is_under_way = false;
    pthread_cond_signal(&lane->ended);
    pthread_mutex_unlock(&lane->wire->lock);
}

static void advance_all(bl_wire *w)
{
    for (bl_lane **link = &w->active; *link;) {
        bl_lane *lane = *link;
        bl_status st = advance(lane);
        if (st != BL_OK) {
            bl_error_save(&lane->error, st);
            abort_with(w, st);
            return;
        }
        if (lane->n_left > 0) {
            link = &lane->next;
            continue;
        }
        *link = lane->next;
        end_exchange(lane, true);
    }
}

/* Takes what has been given; returns whether the wire is closing. */
static bool take_given(bl_wire *w)
{
    bl_lane **end = &w->active;
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
    return check_mpi(MPI_Irecv(&w->heard_word, sizeof w->heard_word, MPI_BYTE, MPI_ANY_SOURCE, TAG_CONTROL,
                               MPI_COMM_WORLD, &w->incoming),
                     "MPI_Irecv");
}

/* True when a word has come in; it is in `out`. */
static bool hear_word(bl_wire *w, word *out)
{
    int has_come = 0;
    MPI_Status status;
    if (MPI_Test(&w->incoming, &has_come, &status) != MPI_SUCCESS || !has_come) return false;
    *out = w->heard_word;
    out->error.text[sizeof out->error.text - 1] = '\0';
    w->heard[status.MPI_SOURCE] = true;
    return listen_for_word(w) == BL_OK;
}

static bool all_heard(const bl_wire *w)
{
    int n = 0;
    for (int i = 0; i < w->size; i++) n += w->heard[i];
    return n == w->size;
}

/* Tells everybody and hears everybody. If several ranks have failed, the lowest one's error is the job's. */
static void spread(bl_wire *w)
{
    double deadline = now_s() + SPREAD_S;
    const struct timespec pause = {0, 200 * 1000};
    int all_sent = 0;
    word other;

    pthread_mutex_lock(&w->lock);
    w->verdict = w->sent_word = w->first;
    pthread_mutex_unlock(&w->lock);
    w->heard[w->rank] = true;
    for (int i = 0; i < w->size; i++) {
        w->sends[i] = MPI_REQUEST_NULL;
        if (i != w->rank)
            MPI_Isend(&w->sent_word, sizeof w->sent_word, MPI_BYTE, i, TAG_CONTROL, MPI_COMM_WORLD,
                      &w->sends[i]);
    }
    while ((!all_sent || !all_heard(w)) && now_s() < deadline) {
        if (!all_sent) MPI_Testall(w->size, w->sends, &all_sent, MPI_STATUSES_IGNORE);
        if (!hear_word(w, &other))
            nanosleep(&pause, NULL);
        else if (other.origin < w->verdict.origin)
            w->verdict = other;
    }
}

/* A wrong option, a request to stop and a missing rank are not one rank's own. */
static bool is_of_one_rank(const word *what)
{
    bl_status st = what->error.status;
    return what->origin > 0 && st != BL_EUSAGE && st != BL_ESTOPPED && st != BL_ERANK;
}

/* The lowest rank that is known to answer tells the user. */
static void report(bl_wire *w)
{
    bl_error *error = &w->verdict.error;
    for (int i = 0; i < w->rank; i++)
        if (w->heard[i]) return;
    if (w->first.origin != w->rank && now_s() < w->late_until_s + SPREAD_S)
        return; /* another one has, without us */
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
    for (bl_lane *lane = w->active; lane; lane = lane->next) {
        lane->is_under_way = false;
        pthread_cond_signal(&lane->ended);
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
    for (const bl_lane *lane = w->active; lane; lane = lane->next) moves |= !lane->is_meeting;
    if (w->active)
        ns = bl_min_i64(moves ? 4 * SHORT_NS : LONG_NS, (int64_t)SHORT_NS * (1 + w->quiet_rounds / SPINS));
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

/* A process that was stopped, and goes on (mpirun sends SIGCONT before it kills), has been given up by the
 * others: it does not blame them for its own absence, and listens first. */
static void notice_absence(bl_wire *w)
{
    double now = now_s();
    if (now - w->round_s > SPREAD_S) {
        w->late_until_s = now + SPREAD_S;
        for (bl_lane *lane = w->active; lane; lane = lane->next) lane->last_event_s = now;
    }
    w->round_s = now;
}

/* Exchanges until the wire is closed and idle, or the job is aborted: false. */
static bool run(bl_wire *w)
{
    word other;
    w->round_s = now_s();
    for (;;) {
        bool is_closing = take_given(w);
        notice_absence(w);
        if (hear_word(w, &other)) note_word(w, &other);
        advance_all(w);
        if (is_aborted(w)) return false;
        if (is_closing && !w->active) return true;
        rest(w);
    }
}

/* All processes have come to their end in good order; false when one has not. */
static bool finish(bl_wire *w)
{
    const struct timespec pause = {0, 500 * 1000};
    MPI_Request barrier;
    int all_here = 0;
    double start = now_s();
    word other;

    if (check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &barrier), "MPI_Ibarrier") != BL_OK) abort_with(w, BL_ERANK);
    while (!is_aborted(w)) {
        if (MPI_Test(&barrier, &all_here, MPI_STATUS_IGNORE) == MPI_SUCCESS && all_here) break;
        if (hear_word(w, &other)) note_word(w, &other);
        if (w->deadline_s > 0 && now_s() - start > w->deadline_s)
            abort_with(w, BL_FAIL(BL_ERANK, "not all ranks came to the end of the job within %.1f s",
                                  w->deadline_s));
        nanosleep(&pause, NULL);
    }
    if (!all_here) return false;
    MPI_Cancel(&w->incoming);
    MPI_Wait(&w->incoming, MPI_STATUS_IGNORE);
    MPI_Finalize();
    return true;
}

static bl_status start_mpi(bl_wire *w)
{
    int provided, size, rank, has_tag;
    int *max_tag;

    BL_TRY(check_mpi(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread"));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (size != w->size || rank != w->rank) {
        MPI_Finalize();
        return BL_FAIL(
            BL_EUSAGE,
            "the launcher started %d processes but MPI sees %d: start them with the MPI that this build "
            "uses (its mpirun, or srun --mpi=pmix)",
            w->size, size);
    }
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &max_tag, &has_tag);
    w->max_tag = has_tag ? *max_tag : 32767;
    return listen_for_word(w);
}

static void *wire_main(void *argument)
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

/* ---- the wire ---- */

static void init_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void wire_free(bl_wire *w)
{
    pthread_cond_destroy(&w->wake);
    pthread_cond_destroy(&w->ready);
    pthread_mutex_destroy(&w->lock);
    free(w->sends);
    free(w->heard);
    free(w);
}

/* Signals are for the threads that expect them. */
static int start_thread(bl_wire *w)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int code = pthread_create(&w->thread, NULL, wire_main, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return code;
}

bl_status bl_wire_open(int rank, int n_processes, bl_wire_report report_error, bl_wire **out)
{
    bl_wire *w = calloc(1, sizeof *w);

    *out = NULL;
    if (!w) return BL_FAIL(BL_ENOMEM, "a job of %d processes", n_processes);
    w->rank = rank;
    w->size = n_processes;
    w->report = report_error;
    w->next_group = 1;
    pthread_mutex_init(&w->lock, NULL);
    init_condition(&w->wake);
    init_condition(&w->ready);
    w->sends = calloc((size_t)n_processes, sizeof *w->sends);
    w->heard = calloc((size_t)n_processes, sizeof *w->heard);
    /* A rank that waits yields its core: a matrix product beside one that does not takes twice as long. */
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    if (!w->sends || !w->heard || start_thread(w) != 0) {
        wire_free(w);
        return BL_FAIL(BL_ENOMEM, "a job of %d processes", n_processes);
    }
    pthread_mutex_lock(&w->lock);
    while (!w->is_ready) pthread_cond_wait(&w->ready, &w->lock);
    pthread_mutex_unlock(&w->lock);
    if (w->start_error.status != BL_OK) {
        bl_error error = w->start_error;
        pthread_join(w->thread, NULL);
        wire_free(w);
        return bl_error_restore(&error);
    }
    *out = w;
    return BL_OK;
}

bl_status bl_wire_close(bl_wire *w)
{
    struct timespec limit;

    pthread_mutex_lock(&w->lock);
    w->is_closing = true;
    pthread_cond_signal(&w->wake);
    bl_status first = w->first.error.status;
    pthread_mutex_unlock(&w->lock);
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += LEAVE_S;
    if (first == BL_OK)
        pthread_join(w->thread, NULL);
    else if (pthread_timedjoin_np(w->thread, NULL, &limit) != 0)
        return first; /* it hangs in MPI and still uses the wire; the process is about to exit */
    bl_status st = w->is_down ? w->verdict.error.status : BL_OK;
    wire_free(w);
    return st;
}

int bl_wire_rank(const bl_wire *w)
{
    return w->rank;
}

int bl_wire_size(const bl_wire *w)
{
    return w->size;
}

void bl_wire_set_deadline(bl_wire *w, double deadline_s)
{
    pthread_mutex_lock(&w->lock);
    w->deadline_s = deadline_s;
    pthread_mutex_unlock(&w->lock);
}

int bl_wire_propose_group(bl_wire *w)
{
    pthread_mutex_lock(&w->lock);
    int group = w->next_group;
    pthread_mutex_unlock(&w->lock);
    return group;
}

void bl_wire_take_group(bl_wire *w, int group)
{
    pthread_mutex_lock(&w->lock);
    w->next_group = group + 1;
    pthread_mutex_unlock(&w->lock);
}

/* ---- lanes ---- */

bl_status bl_lane_create(bl_wire *w, int group, int lane_idx, int size, const int *job_ranks, bl_lane **out)
{
    bl_lane *lane = calloc(1, sizeof *lane);
    size_t n = 2 * (size_t)size;

    *out = NULL;
    if (!lane) return BL_FAIL(BL_ENOMEM, "a lane of %d ranks", size);
    init_condition(&lane->ended);
    lane->wire = w;
    lane->size = size;
    lane->requests = calloc(n, sizeof *lane->requests);
    lane->state = calloc(n, sizeof *lane->state);
    lane->finished = calloc(n, sizeof *lane->finished);
    lane->job_ranks = calloc((size_t)size, sizeof *lane->job_ranks);
    if (!lane->requests || !lane->state || !lane->finished || !lane->job_ranks) {
        bl_lane_destroy(lane);
        return BL_FAIL(BL_ENOMEM, "a lane of %d ranks", size);
    }
    memcpy(lane->job_ranks, job_ranks, (size_t)size * sizeof *job_ranks);
    if (group > w->max_tag / LANES_PER_GROUP - 1) {
        bl_lane_destroy(lane);
        return BL_FAIL(BL_ELIMIT, "more than %d communicators", w->max_tag / LANES_PER_GROUP - 1);
    }
    lane->tag = TAG_CONTROL + group * LANES_PER_GROUP + lane_idx;
    *out = lane;
    return BL_OK;
}

void bl_lane_destroy(bl_lane *lane)
{
    if (!lane) return;
    pthread_cond_destroy(&lane->ended);
    free(lane->requests);
    free(lane->state);
    free(lane->finished);
    free(lane->job_ranks);
    free(lane);
}

/* Under the lock. */
static void give_exchange(bl_lane *lane)
{
    bl_lane **end = &lane->wire->given;
    while (*end) end = &(*end)->next;
    *end = lane;
    lane->next = NULL;
    lane->n_left = lane->n_transfers;
    lane->is_begun = lane->is_done = false;
    lane->is_under_way = true;
    lane->error.status = BL_OK;
    pthread_cond_signal(&lane->wire->wake);
}

bl_status bl_lane_exchange(bl_lane *lane, bl_comm_kind kind, bool is_meeting, const bl_transfer *transfers,
                           int n_transfers)
{
    bl_wire *w = lane->wire;

    pthread_mutex_lock(&w->lock);
    bool is_well = w->first.error.status == BL_OK;
    if (is_well && n_transfers > 0) {
        lane->kind = kind;
        lane->is_meeting = is_meeting;
        lane->transfers = transfers;
        lane->n_transfers = n_transfers;
        give_exchange(lane);
        while (lane->is_under_way) pthread_cond_wait(&lane->ended, &w->lock);
        is_well = lane->is_done;
    }
    bl_error first = w->first.error;
    pthread_mutex_unlock(&w->lock);
    if (is_well) return BL_OK;
    if (n_transfers > 0 && lane->error.status != BL_OK) return bl_error_restore(&lane->error);
    return BL_FAIL(BL_ECANCELLED, "cancelled: %s", first.text);
}
