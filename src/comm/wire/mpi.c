/* SPDX-License-Identifier: Apache-2.0 */
/* The wire over MPI: processes that mpirun or srun has started. The only file that knows MPI. One thread makes
 * every MPI call, from the first to the last, nonblocking, in the order of the exchanges.
 *
 * Once the job has failed MPI_Finalize is not called: it might wait for a process that hangs.
 *
 * Sources: MPI 3.1, 3.5 (order of messages), 3.7 (nonblocking), 8.7 (finalising). */
#include <mpi.h>
#include <stdlib.h>
#include <time.h>

#include "comm/wire/internal.h"

typedef struct mpi_state {
    pthread_cond_t woken; /* with the wire's lock */
    bool is_woken;
    MPI_Request incoming, closing, *sends; /* [n_processes] */
    bl_word heard;
} mpi_state;

struct bl_wire_requests {
    MPI_Request *all; /* [n_most] */
};

static bl_status check_mpi(int code, const char *call)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (code == MPI_SUCCESS) return BL_OK;
    MPI_Error_string(code, text, &length);
    return BL_FAIL(BL_ERANK, "%s: %s", call, text);
}

/* ---- exchanges ---- */

static bl_status mpi_begin(bl_wire_channel *channel, int i, void *bytes, size_t n_bytes)
{
    const bl_transfer *t = &channel->transfers[i];
    MPI_Request *request = &channel->requests->all[i];
    int peer = channel->job_ranks[t->peer];

    if (t->is_send)
        return check_mpi(
            MPI_Isend(bytes, (int)n_bytes, MPI_BYTE, peer, channel->tag, MPI_COMM_WORLD, request),
            "MPI_Isend");
    return check_mpi(
        MPI_Irecv(bytes, (int)n_bytes, MPI_BYTE, peer, channel->tag, MPI_COMM_WORLD, request),
        "MPI_Irecv");
}

static bl_status mpi_advance(bl_wire *w) /* MPI moves bytes when it is asked about them */
{
    (void)w;
    return BL_OK;
}

static bl_status mpi_list_finished(bl_wire_channel *channel, int *finished, int *n_finished,
                                   bool *has_moved)
{
    BL_TRY(check_mpi(MPI_Testsome(channel->n_transfers, channel->requests->all, n_finished,
                                  finished, MPI_STATUSES_IGNORE),
                     "MPI_Testsome"));
    if (*n_finished == MPI_UNDEFINED) *n_finished = 0;
    *has_moved = *n_finished > 0;
    return BL_OK;
}

/* ---- words of error ---- */

static bl_status listen_for_word(mpi_state *mpi)
{
    return check_mpi(MPI_Irecv(&mpi->heard, sizeof mpi->heard, MPI_BYTE, MPI_ANY_SOURCE,
                               BL_WIRE_TAG_CONTROL, MPI_COMM_WORLD, &mpi->incoming),
                     "MPI_Irecv");
}

static bool mpi_hear_word(bl_wire *w, bl_word *out, int *from)
{
    mpi_state *mpi = w->state;
    int has_come = 0;
    MPI_Status status;
    if (MPI_Test(&mpi->incoming, &has_come, &status) != MPI_SUCCESS || !has_come) return false;
    *out = mpi->heard;
    *from = status.MPI_SOURCE;
    return listen_for_word(mpi) == BL_OK;
}

static void mpi_send_words(bl_wire *w, const bl_word *word)
{
    mpi_state *mpi = w->state;
    for (int i = 0; i < w->size; i++) {
        mpi->sends[i] = MPI_REQUEST_NULL;
        if (i != w->rank)
            MPI_Isend(word, sizeof *word, MPI_BYTE, i, BL_WIRE_TAG_CONTROL, MPI_COMM_WORLD,
                      &mpi->sends[i]);
    }
}

static bool mpi_are_words_sent(bl_wire *w)
{
    mpi_state *mpi = w->state;
    int all_sent = 0;
    MPI_Testall(w->size, mpi->sends, &all_sent, MPI_STATUSES_IGNORE);
    return all_sent;
}

/* ---- the start and the end ---- */

static bl_status mpi_start(bl_wire *w)
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
    return listen_for_word(w->state);
}

static bl_status mpi_begin_closing(bl_wire *w)
{
    mpi_state *mpi = w->state;
    return check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &mpi->closing), "MPI_Ibarrier");
}

static bool mpi_have_all_closed(bl_wire *w)
{
    mpi_state *mpi = w->state;
    int all_here = 0;
    return MPI_Test(&mpi->closing, &all_here, MPI_STATUS_IGNORE) == MPI_SUCCESS && all_here;
}

static void mpi_end(bl_wire *w)
{
    mpi_state *mpi = w->state;
    MPI_Cancel(&mpi->incoming);
    MPI_Wait(&mpi->incoming, MPI_STATUS_IGNORE);
    MPI_Finalize();
}

/* ---- rest ---- */

static void mpi_rest(bl_wire *w, int64_t most_ns)
{
    mpi_state *mpi = w->state;
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += most_ns;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&w->lock);
    if (!mpi->is_woken) pthread_cond_timedwait(&mpi->woken, &w->lock, &until);
    mpi->is_woken = false;
    pthread_mutex_unlock(&w->lock);
}

static void mpi_wake(bl_wire *w)
{
    mpi_state *mpi = w->state;
    mpi->is_woken = true;
    pthread_cond_signal(&mpi->woken);
}

/* ---- what a wire and a channel own of it ---- */

static bl_wire_requests *requests_create(int n_most)
{
    bl_wire_requests *requests = calloc(1, sizeof *requests);
    if (!requests || !(requests->all = calloc((size_t)n_most, sizeof *requests->all))) {
        free(requests);
        return NULL;
    }
    for (int i = 0; i < n_most; i++) requests->all[i] = MPI_REQUEST_NULL;
    return requests;
}

static void requests_free(bl_wire_requests *requests)
{
    if (requests) free(requests->all);
    free(requests);
}

static void state_free(void *state)
{
    mpi_state *mpi = state;
    if (!mpi) return;
    pthread_cond_destroy(&mpi->woken);
    free(mpi->sends);
    free(mpi);
}

static const bl_wire_transport transport = {
    .start = mpi_start,
    .begin = mpi_begin,
    .advance = mpi_advance,
    .list_finished = mpi_list_finished,
    .send_words = mpi_send_words,
    .are_words_sent = mpi_are_words_sent,
    .hear_word = mpi_hear_word,
    .begin_closing = mpi_begin_closing,
    .have_all_closed = mpi_have_all_closed,
    .end = mpi_end,
    .rest = mpi_rest,
    .wake = mpi_wake,
    .requests_create = requests_create,
    .requests_free = requests_free,
    .free = state_free,
};

bl_status bl_wire_open_mpi(int rank, int n_processes, bl_wire_report report, bl_wire **out)
{
    mpi_state *mpi = calloc(1, sizeof *mpi);

    *out = NULL;
    if (!mpi || !(mpi->sends = calloc((size_t)n_processes, sizeof *mpi->sends))) {
        free(mpi);
        return BL_FAIL(BL_ENOMEM, "a job of %d processes", n_processes);
    }
    bl_wire_init_condition(&mpi->woken);
    /* A rank that waits yields its core: a matrix product beside one that does not takes twice as long. */
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    return bl_wire_open(&transport, mpi, rank, n_processes, report, out);
}
