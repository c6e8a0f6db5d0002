/* SPDX-License-Identifier: Apache-2.0 */
/* A communicator's watch: a thread that checks, twenty times per second, whether
 *   - the job has failed elsewhere (the host's first error),
 *   - NCCL reports an error,
 *   - the rank's thread has been in an NCCL call for longer than the deadline,
 *   - the oldest collective that has not ended has been running for longer than the deadline. Then
 *     it reports that to the other ranks, makes all streams of the device fail and aborts the
 *     communicator, in this order: nothing that waits for the GPU is called before the abort, and
 *     no wait that the abort ends returns BL_OK. The other communicators' watches hear of it
 *     through the host, and abort theirs, each on its own thread.
 *
 * NCCL's abort frees the communicator, and the rank's thread may be in a call that uses it: the
 * abort waits until it has come out. A thread that does not come out (of making or destroying a
 * communicator, of a window, of a launch into a full queue), or an abort that hangs, is for the
 * rank's guard, one more thread, which ends the process; so is a watch that hangs itself (guard.c).
 *
 * Resumed processes reset their deadlines: a watch that slept for much longer than it meant to
 * starts its clocks again, as the wire does. So does one that was stopped while it looked; but a
 * look may be slow by itself, each time, and is pardoned once in a row. */
#include <assert.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/host_name.h"
#include "base/thread.h"
#include "comm/nccl/internal.h"
#include "device/cuda/stream.h"

enum { HOST_BYTES = 64 };

static const double POLL_S = 0.05;

static void nap(double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

bl_status comm_nccl_start_thread(pthread_t *thread, void *(*main)(void *), void *argument)
{
    int code = bl_thread_create(thread, main, argument);
    return code == 0 ? BL_OK : BL_FAIL(BL_ELIMIT, "the watch of a communicator: no more threads");
}

/* ---- the rank's thread ---- */

bool comm_nccl_begin(comm_nccl *c, const char *what)
{
    atomic_store(&c->watch.busy_since_s, bl_now_s());
    atomic_store(&c->watch.busy, what);
    if (!atomic_load(&c->watch.is_over)) return true;
    atomic_store(&c->watch.busy, NULL);
    return false;
}

bl_status comm_nccl_end(comm_nccl *c, bl_status st)
{
    atomic_store(&c->watch.busy, NULL);
    return atomic_load(&c->watch.is_over) ? BL_OK : st;
}

/* Under the lock. */
static comm_nccl_launch *launch_at(const comm_nccl_watch *w, uint64_t i)
{
    return &w->launched[i % w->room];
}

bl_status comm_nccl_watch_validate(const comm_nccl_watch *w)
{
    uint64_t n_launched = atomic_load(&w->n_launched), last = 0;

    if (w->n_ended > w->n_watched || w->n_watched > n_launched)
        return BL_FAIL(BL_EINTERNAL, "watch: %llu launches ended of %llu watched of %llu",
                       (unsigned long long)w->n_ended, (unsigned long long)w->n_watched,
                       (unsigned long long)n_launched);
    if (w->n_watched - w->n_ended > w->room)
        return BL_FAIL(BL_EINTERNAL, "watch: room for %llu launches", (unsigned long long)w->room);
    for (uint64_t i = w->n_ended; i < w->n_watched; i++) {
        const comm_nccl_launch *launch = launch_at(w, i);
        if (!launch->end || launch->number <= last || launch->number > n_launched)
            return BL_FAIL(BL_EINTERNAL, "watch: launch %llu after %llu",
                           (unsigned long long)launch->number, (unsigned long long)last);
        last = launch->number;
    }
    return BL_OK;
}

/* After each transition, under the lock; in debug builds. */
static void check_state(const comm_nccl_watch *w)
{
    assert(comm_nccl_watch_validate(w) == BL_OK);
    (void)w;
}

/* Takes those off that have ended. Under the lock. */
static void reap(comm_nccl_watch *w)
{
    while (w->n_ended < w->n_watched) {
        cudaError_t error = cudaEventQuery(launch_at(w, w->n_ended)->end);
        if (error != cudaSuccess) {
            (void)cudaGetLastError(); /* "not ready" is an answer */
            return;
        }
        w->n_ended++;
        w->since_s = bl_now_s();
        check_state(w);
    }
}

/* Events for the n launches that come next; those that were made stay also on failure. */
static bl_status make_events(const comm_nccl_watch *w, comm_nccl_launch *launched, uint64_t room,
                             uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        cudaEvent_t *end = (cudaEvent_t *)&launched[(w->n_watched + i) % room].end;
        cudaError_t error = cudaEventCreateWithFlags(end, cudaEventDisableTiming);
        if (error != cudaSuccess) return bl_cuda_fail("cudaEventCreateWithFlags", (int)error);
    }
    return BL_OK;
}

static void destroy_events(comm_nccl_launch *launched, uint64_t room)
{
    for (uint64_t i = 0; i < room; i++)
        if (launched[i].end) cudaEventDestroy(launched[i].end);
}

/* Room for twice as many launches, the full room's among them. By the rank's thread, which alone
 * changes `room` and n_watched; CUDA is not called under the lock, as the watch has to go on. */
static bl_status grow(comm_nccl_watch *w)
{
    uint64_t before = w->room, room = before ? 2 * before : COMM_NCCL_WATCHED;
    comm_nccl_launch *full = w->launched, *launched = calloc(room, sizeof *launched);

    if (!launched) return BL_FAIL(BL_ENOMEM, "the watch of %d launches", (int)room);
    bl_status st = make_events(w, launched, room, room - before);
    if (st != BL_OK) {
        destroy_events(launched, room);
        free(launched);
        return st;
    }
    pthread_mutex_lock(&w->lock);
    for (uint64_t i = w->n_watched - before; i < w->n_watched; i++)
        launched[i % room] = *launch_at(w, i);
    w->launched = launched;
    w->room = room;
    check_state(w);
    pthread_mutex_unlock(&w->lock);
    free(full);
    return BL_OK;
}

static bool has_room(comm_nccl_watch *w)
{
    pthread_mutex_lock(&w->lock);
    reap(w);
    bool has = w->n_watched - w->n_ended < w->room;
    pthread_mutex_unlock(&w->lock);
    return has;
}

/* Every launch has a separate event, however many are under way: the last one may hang, and each
 * has a deadline to itself. */
bl_status comm_nccl_watch_launch(comm_nccl *c, bl_stream *stream, const bl_comm_call *call)
{
    comm_nccl_watch *w = &c->watch;
    uint64_t number = atomic_fetch_add(&w->n_launched, 1) + 1;

    comm_nccl_progress_note(c, 1 + number);
    if (!has_room(w)) BL_TRY(grow(w));
    comm_nccl_launch *launch = launch_at(w, w->n_watched); /* the watch does not touch it yet */
    /* Not under the lock: a full queue blocks here, and the watch has to go on. */
    cudaError_t error = cudaEventRecord(launch->end, bl_cuda_stream_handle(stream));
    if (error != cudaSuccess) return bl_cuda_fail("cudaEventRecord", (int)error);
    pthread_mutex_lock(&w->lock);
    launch->call = *call;
    launch->number = number;
    if (w->n_ended == w->n_watched) w->since_s = bl_now_s();
    w->n_watched++;
    check_state(w);
    pthread_mutex_unlock(&w->lock);
    return BL_OK;
}

/* ---- trouble ---- */

/* Names the oldest collective that has not ended, if any. Under the lock. */
static void describe_oldest(const comm_nccl *c, char *text, size_t text_bytes)
{
    const comm_nccl_watch *w = &c->watch;
    char what[COMM_NCCL_TEXT_BYTES];

    if (w->n_ended == w->n_watched) {
        snprintf(text, text_bytes, "no collective on %s", c->name);
        return;
    }
    const comm_nccl_launch *oldest = launch_at(w, w->n_ended);
    comm_nccl_describe(what, &oldest->call, c->name);
    snprintf(text, text_bytes, "%s, number %llu", what, (unsigned long long)oldest->number);
}

static bl_status look_at_job(const comm_nccl *c)
{
    bl_error first;
    bl_comm_first_error(c->host, &first);
    return first.status == BL_OK ? BL_OK : BL_FAIL(BL_ECANCELED, "canceled: %s", first.text);
}

/* Under the lock. */
static bl_status look_at_nccl(const comm_nccl *c)
{
    const comm_nccl_library *library = &c->job->library;
    ncclResult_t result = ncclSuccess;
    char where[320], why[512], host[HOST_BYTES];

    if (!c->watch.is_ready) return BL_OK;
    ncclResult_t asked = library->ncclCommGetAsyncError(c->nccl, &result);
    if (asked != ncclSuccess) result = asked;
    if (result == ncclSuccess || result == ncclInProgress) return BL_OK;
    describe_oldest(c, where, sizeof where);
    const char *last = library->ncclGetLastError(c->nccl);
    snprintf(why, sizeof why, "%s%s%s", library->ncclGetErrorString(result),
             last && last[0] ? ": " : "", last ? last : "");
    bl_host_name(host, sizeof host);
    return bl_nccl_report(c->job_ranks[c->base.rank], host, result == ncclRemoteError, where, why);
}

/* A rank of this host did not arrive or, where that is not known, this rank has waited. n_steps: as
 * progress.c counts them. */
static bl_status blame(const comm_nccl *c, const char *what, uint64_t n_steps)
{
    double deadline_s = atomic_load(&c->job->deadline_s);
    char host[HOST_BYTES];
    uint64_t reached;

    bl_host_name(host, sizeof host);
    int culprit = comm_nccl_progress_find(c, n_steps, &reached);
    if (culprit >= 0)
        return BL_FAIL(
            BL_ERANK, "rank %d on %s did not come within %.1f s to %s (it had come to %llu)",
            culprit, host, deadline_s, what, (unsigned long long)(reached ? reached - 1 : 0));
    culprit = comm_nccl_progress_find_silent(c, bl_now_s() - COMM_ABSENCE_S);
    if (culprit >= 0)
        return BL_FAIL(BL_ERANK,
                       "rank %d on %s is stopped or hangs; rank %d waited for %.1f s in %s",
                       culprit, host, c->job_ranks[c->base.rank], deadline_s, what);
    return BL_FAIL(BL_ERANK, "rank %d on %s waited for %.1f s in %s: a rank did not come",
                   c->job_ranks[c->base.rank], host, deadline_s, what);
}

static bl_status look_at_call(const comm_nccl *c, double now_s)
{
    double deadline_s = atomic_load(&c->job->deadline_s);
    const char *busy = atomic_load(&c->watch.busy);
    char what[COMM_NCCL_TEXT_BYTES];

    if (!busy || !comm_nccl_is_overdue(atomic_load(&c->watch.busy_since_s), deadline_s, now_s))
        return BL_OK;
    snprintf(what, sizeof what, "%s of %s", busy, c->name);
    return blame(c, what, 1 + atomic_load(&c->watch.n_launched));
}

/* Under the lock. */
static bl_status look_at_launches(comm_nccl *c, double now_s)
{
    comm_nccl_watch *w = &c->watch;
    double deadline_s = atomic_load(&c->job->deadline_s);
    char where[320];

    if (deadline_s <= 0) return BL_OK;
    reap(w);
    if (w->n_ended == w->n_watched || !comm_nccl_is_overdue(w->since_s, deadline_s, now_s))
        return BL_OK;
    describe_oldest(c, where, sizeof where);
    return blame(c, where, 1 + launch_at(w, w->n_ended)->number);
}

static bl_status look(comm_nccl *c, double now_s)
{
    BL_TRY(look_at_job(c));
    BL_TRY(look_at_call(c, now_s));
    pthread_mutex_lock(&c->watch.lock);
    bl_status st = look_at_nccl(c);
    if (st == BL_OK) st = look_at_launches(c, now_s);
    pthread_mutex_unlock(&c->watch.lock);
    return st;
}

static bool wait_for_rank(comm_nccl *c, double seconds)
{
    double end_s = bl_now_s() + seconds;
    while (atomic_load(&c->watch.busy) && bl_now_s() < end_s) nap(1e-3);
    return !atomic_load(&c->watch.busy);
}

/* On the watch's thread, once. The job knows of the error before anything here may hang. */
static void end_in_trouble(comm_nccl *c, const bl_error *error)
{
    if (error->status != BL_ECANCELED) bl_comm_abort(c->host, error);
    bl_cuda_device_fail(c->job->device, error);
    atomic_store(&c->watch.is_over, true);
    bool is_out = wait_for_rank(c, 2 * COMM_NCCL_HARD_S); /* until then the guard leaves */
    pthread_mutex_lock(&c->watch.lock);
    bool is_ready = c->watch.is_ready;
    c->watch.is_ready = false;
    pthread_mutex_unlock(&c->watch.lock);
    if (is_ready && is_out) (void)c->job->library.ncclCommAbort(c->nccl);
}

/* ---- the thread ---- */

static void pardon(comm_nccl *c, double now_s)
{
    pthread_mutex_lock(&c->watch.lock);
    c->watch.since_s = now_s;
    pthread_mutex_unlock(&c->watch.lock);
    atomic_store(&c->watch.busy_since_s, now_s);
}

/* Returns whether the watch continues. */
static bool rest(comm_nccl *c)
{
    comm_nccl_watch *w = &c->watch;

    pthread_mutex_lock(&w->lock);
    if (!w->is_ending) (void)bl_condition_wait(&w->wake, &w->lock, POLL_S);
    bool goes_on = !w->is_ending;
    pthread_mutex_unlock(&w->lock);
    return goes_on;
}

static void *watch_main(void *argument)
{
    comm_nccl *c = argument;
    bl_error error = {.status = BL_OK};
    bool goes_on = true, was_slow = false;

    prctl(PR_SET_NAME, "nccl watch");
    (void)comm_nccl_enter(c);
    while (goes_on && error.status == BL_OK) {
        double looked_s = bl_now_s();
        goes_on = rest(c);
        double now_s = bl_now_s();
        double round_s = atomic_load(&c->watch.round_s);
        if (comm_nccl_watch_pardons(round_s, looked_s, now_s, &was_slow)) pardon(c, now_s);
        atomic_store(&c->watch.round_s, now_s);
        comm_nccl_progress_beat(c->job, now_s);
        bl_error_save(&error, look(c, now_s));
    }
    if (error.status != BL_OK) {
        atomic_store(&c->watch.round_s, bl_now_s()); /* the last one, which may hang */
        end_in_trouble(c, &error);
    }
    atomic_store(&c->watch.round_s, BL_NEVER_S);
    return NULL;
}

bl_status comm_nccl_watch_open(comm_nccl *c)
{
    pthread_mutex_init(&c->watch.lock, NULL);
    bl_condition_init(&c->watch.wake);
    c->watch.is_open = true;
    atomic_init(&c->watch.round_s, BL_NEVER_S);
    comm_nccl_guard_add(c);
    BL_TRY(comm_nccl_enter(c));
    bl_status st = grow(&c->watch);
    if (st != BL_OK) return st;
    atomic_store(&c->watch.round_s, bl_now_s());
    st = comm_nccl_start_thread(&c->watch.thread, watch_main, c);
    c->watch.has_thread = st == BL_OK;
    if (st != BL_OK) atomic_store(&c->watch.round_s, BL_NEVER_S);
    return st;
}

void comm_nccl_watch_ready(comm_nccl *c)
{
    pthread_mutex_lock(&c->watch.lock);
    c->watch.is_ready = true;
    pthread_mutex_unlock(&c->watch.lock);
}

void comm_nccl_watch_wake(comm_nccl *c)
{
    if (!c->watch.has_thread) return;
    pthread_mutex_lock(&c->watch.lock);
    pthread_cond_signal(&c->watch.wake);
    pthread_mutex_unlock(&c->watch.lock);
}

/* From is_ready false on the watch does not touch it any more. */
static void end_in_order(comm_nccl *c)
{
    const comm_nccl_library *library = &c->job->library;

    if (!comm_nccl_begin(c, "ncclCommFinalize")) return;
    (void)library->ncclCommFinalize(c->nccl);
    (void)comm_nccl_end(c, BL_OK);
    if (!comm_nccl_begin(c, "ncclCommDestroy")) return;
    pthread_mutex_lock(&c->watch.lock);
    bool is_ready = c->watch.is_ready;
    c->watch.is_ready = false;
    pthread_mutex_unlock(&c->watch.lock);
    if (is_ready) (void)library->ncclCommDestroy(c->nccl);
    (void)comm_nccl_end(c, BL_OK);
}

void comm_nccl_watch_close(comm_nccl *c)
{
    comm_nccl_watch *w = &c->watch;

    if (w->has_thread) {
        pthread_mutex_lock(&w->lock);
        bool is_ready = w->is_ready;
        pthread_mutex_unlock(&w->lock);
        if (is_ready && look_at_job(c) == BL_OK) end_in_order(c);
        pthread_mutex_lock(&w->lock);
        w->is_ending = true;
        pthread_cond_signal(&w->wake);
        pthread_mutex_unlock(&w->lock);
        pthread_join(w->thread, NULL);
    }
    comm_nccl_guard_remove(c);
    destroy_events(w->launched, w->room);
    free(w->launched);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
}
