/* SPDX-License-Identifier: Apache-2.0 */
/* A launch on its stream: it waits for its turn within its communicator, for the other ranks' same
 * launch, and moves bytes through the shared memory. In the strict mode the launching
 * thread does the waiting and every copy is a task: device memory is open during tasks only.
 *
 * A launch whose counterpart never comes, or is another one, waits until its communicator is
 * aborted; then it ends and leaves its memory as it is at that moment. With copy engines it waits
 * forever (BALLAST_EMULATED_NCCL_ABORT). */
#include <stdlib.h>
#include <string.h>

#include "nccl_fake.h"
#include "runtime.h"

typedef struct piece {
    char *to;
    const char *from;
    size_t bytes;
} piece;

static bl_status move_piece(bl_stream *stream, const void *args)
{
    const piece *p = args;
    (void)stream;
    emulated_begin_work();
    memcpy(p->to, p->from, p->bytes);
    emulated_end_work();
    return BL_OK;
}

static void move(const nccl_work *work, char *to, const char *from, size_t bytes)
{
    piece p = {to, from, bytes};
    if (emulated_settings_get()->is_strict)
        emulated_give(work->stream, false, move_piece, &p, sizeof p);
    else
        (void)move_piece(NULL, &p);
}

static bool is_canceled(const nccl_work *work)
{
    if (work->has_copy_engines && emulated_settings_get()->nccl_abort == EMULATED_ABORT_KERNELS)
        return false;
    return atomic_load(&work->comm->member.is_canceled);
}

/* ---- rings ---- */

/* Who reads a ring: one rank, or all but its own. */
static uint64_t read_by_all(const nccl_membership *m, const nccl_ring *ring, int only)
{
    uint64_t least = UINT64_MAX;
    if (only >= 0) return atomic_load_explicit(&ring->read[only], memory_order_acquire);
    for (int rank = 0; rank < m->n_ranks; rank++) {
        if (rank == m->rank) continue;
        uint64_t read = atomic_load_explicit(&ring->read[rank], memory_order_acquire);
        if (read < least) least = read;
    }
    return least;
}

static size_t least_of(size_t a, size_t b, size_t c)
{
    size_t least = a < b ? a : b;
    return least < c ? least : c;
}

/* Puts what has room into the ring; whether anything had. */
static bool put(const nccl_work *work, nccl_transfer *t, nccl_ring *ring, int only)
{
    const nccl_membership *m = &work->comm->member;
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_relaxed);
    size_t at = written % NCCL_RING_BYTES,
           room = NCCL_RING_BYTES - (size_t)(written - read_by_all(m, ring, only)),
           bytes = least_of(t->bytes - t->n_moved, room, NCCL_RING_BYTES - at);
    if (bytes == 0) return false;
    move(work, ring->data + at, t->at + t->n_moved, bytes);
    t->n_moved += bytes;
    atomic_store_explicit(&ring->written, written + bytes, memory_order_release);
    if (only >= 0)
        emulated_nccl_ring_bell(m, only);
    else
        emulated_nccl_ring_all(m);
    return true;
}

static bool take(const nccl_work *work, nccl_transfer *t, nccl_ring *ring)
{
    const nccl_membership *m = &work->comm->member;
    uint64_t read = atomic_load_explicit(&ring->read[m->rank], memory_order_relaxed);
    size_t at = read % NCCL_RING_BYTES,
           there = (size_t)(atomic_load_explicit(&ring->written, memory_order_acquire) - read),
           bytes = least_of(t->bytes - t->n_moved, there, NCCL_RING_BYTES - at);
    if (bytes == 0) return false;
    move(work, t->at + t->n_moved, ring->data + at, bytes);
    t->n_moved += bytes;
    atomic_store_explicit(&ring->read[m->rank], read + bytes, memory_order_release);
    emulated_nccl_ring_bell(m, t->peer);
    return true;
}

/* ---- pairs ---- */

/* Whether the peer's side of the transfer has come. One of another size is never matched. */
static bool match(const nccl_work *work, nccl_transfer *t, nccl_ring *ring)
{
    int64_t own[NCCL_WORDS] = {(int64_t)t->bytes}, other[NCCL_WORDS];
    if (t->is_matched) return true;
    if (!t->is_posted) {
        emulated_nccl_announce(t->is_send ? ring->sends : ring->receives, t->number, own);
        emulated_nccl_ring_bell(&work->comm->member, t->peer);
        t->is_posted = true;
    }
    t->is_matched =
        emulated_nccl_read(t->is_send ? ring->receives : ring->sends, t->number, other) &&
        other[0] == own[0];
    return t->is_matched;
}

static bool advance_pair(const nccl_work *work, nccl_transfer *t)
{
    ncclComm_t comm = work->comm;
    uint64_t *done = t->is_send ? &comm->n_sent[t->peer] : &comm->n_received[t->peer];
    nccl_ring *ring = t->is_send ? emulated_nccl_pair(&comm->member, comm->rank, t->peer)
                                 : emulated_nccl_pair(&comm->member, t->peer, comm->rank);
    bool moved = false;
    if (*done != t->number) return false; /* an earlier one of the same group is first */
    if (!match(work, t, ring)) return false;
    if (t->n_moved < t->bytes)
        moved = t->is_send ? put(work, t, ring, t->peer) : take(work, t, ring);
    if (t->n_moved < t->bytes) return moved;
    t->is_done = true;
    ++*done;
    return true;
}

static bool advance_collective(const nccl_work *work, nccl_transfer *t)
{
    nccl_ring *ring = emulated_nccl_own_ring(&work->comm->member, t->peer);
    bool moved = t->is_send ? put(work, t, ring, -1) : take(work, t, ring);
    t->is_done = t->n_moved == t->bytes;
    return moved;
}

/* ---- a launch ---- */

/* Whether this is the communicator's next; false: it will not be, it was aborted. */
static void wait_for_turn(nccl_work *work)
{
    ncclComm_t comm = work->comm;
    pthread_mutex_lock(&comm->lock);
    while (comm->n_ended != work->ticket) pthread_cond_wait(&comm->turned, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

static void end_turn(nccl_work *work)
{
    ncclComm_t comm = work->comm;
    pthread_mutex_lock(&comm->lock);
    comm->n_ended++;
    pthread_cond_broadcast(&comm->turned);
    pthread_mutex_unlock(&comm->lock);
}

static void tell_difference(const nccl_work *work, int rank, const int64_t said[NCCL_WORDS])
{
    emulated_nccl_log("hang %s collective %llu: kind %lld, %lld bytes, type %lld, root %lld; rank "
                      "%d has kind %lld, %lld bytes, type %lld, root %lld",
                      work->comm->name, (unsigned long long)work->number, (long long)work->words[0],
                      (long long)work->words[1], (long long)work->words[2],
                      (long long)work->words[3], rank, (long long)said[0], (long long)said[1],
                      (long long)said[2], (long long)said[3]);
}

/* Windows are symmetric: a buffer in one is at the same offset on every rank. */
static void check_windows(const nccl_work *work, int rank, const int64_t said[NCCL_WORDS])
{
    const int64_t *own = work->words;
    if (memcmp(own + 4, said + 4, 4 * sizeof *said) == 0) return;
    int i = own[4] == said[4] && own[5] == said[5] ? 6 : 4;
    emulated_fatal("NCCL: a buffer of %s is at window %lld + %lld on rank %d, and at %lld + %lld "
                   "on rank %d: symmetric windows want the same place",
                   work->comm->name, (long long)own[i], (long long)own[i + 1], work->comm->rank,
                   (long long)said[i], (long long)said[i + 1], rank);
}

/* Whether every rank is about to do the same; *differs once one is not, and permanently. */
static bool have_all_arrived(const nccl_work *work, bool *differs)
{
    const nccl_membership *m = &work->comm->member;
    int64_t said[NCCL_WORDS];
    if (*differs) return false;
    for (int rank = 0; rank < m->n_ranks; rank++) {
        if (!emulated_nccl_read(m->segment->places[rank].collectives, work->number, said))
            return false;
        *differs = memcmp(work->words, said, 4 * sizeof *said) != 0;
        if (*differs) {
            tell_difference(work, rank, said);
            return false;
        }
        check_windows(work, rank, said);
    }
    return true;
}

/* false: aborted. */
static bool arrive(const nccl_work *work)
{
    const nccl_membership *m = &work->comm->member;
    bool differs = false;
    emulated_nccl_announce(m->segment->places[m->rank].collectives, work->number, work->words);
    emulated_nccl_ring_all(m);
    for (;;) {
        uint32_t seen = emulated_nccl_bell(m);
        if (is_canceled(work)) return false;
        if (have_all_arrived(work, &differs)) return true;
        emulated_nccl_wait_bell(m, seen);
    }
}

/* Whether all transfers are done; *moved: something has changed since. */
static bool advance(const nccl_work *work, bool *moved)
{
    bool all = true;
    for (int i = 0; i < work->n_transfers; i++) {
        nccl_transfer *t = &work->transfers[i];
        if (t->is_done) continue;
        *moved |= work->kind == NCCL_PAIRS ? advance_pair(work, t) : advance_collective(work, t);
        all = all && t->is_done;
    }
    return all;
}

static void perform(nccl_work *work)
{
    const nccl_membership *m = &work->comm->member;
    if (is_canceled(work) || (work->kind != NCCL_PAIRS && !arrive(work))) return;
    if (work->copy_from) move(work, work->copy_to, work->copy_from, work->copy_bytes);
    while (!is_canceled(work)) {
        uint32_t seen = emulated_nccl_bell(m);
        bool moved = false;
        if (advance(work, &moved)) return;
        if (!moved) emulated_nccl_wait_bell(m, seen);
    }
}

static void run_and_free(nccl_work *work)
{
    bool pairs = work->kind == NCCL_PAIRS, is_kernel = !work->has_copy_engines;
    int device = work->comm->device;
    wait_for_turn(work);
    if (is_kernel) emulated_hold_gpu_for_nccl(device, work->comm->rank, pairs);
    perform(work);
    if (is_kernel) emulated_release_gpu_of_nccl(device, pairs);
    end_turn(work);
    free(work->transfers);
    free(work);
}

static bl_status run_work(bl_stream *stream, const void *args)
{
    (void)stream;
    run_and_free(*(nccl_work *const *)args);
    return BL_OK;
}

ncclResult_t emulated_nccl_give(nccl_work *work)
{
    if (emulated_settings_get()->is_strict)
        run_and_free(work);
    else
        emulated_give(work->stream, false, run_work, &work, sizeof work);
    return ncclSuccess;
}
