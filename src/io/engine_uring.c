/* SPDX-License-Identifier: Apache-2.0 */
/* engine_uring.c -- one thread with one ring. The ring is created, fed and emptied by that thread
 * alone, as IORING_SETUP_SINGLE_ISSUER demands. A thread that has work for it writes to an eventfd
 * that the ring always reads. */
#include <errno.h>
#include <inttypes.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/sizes.h"
#include "io/reader_internal.h"

/* The kernel refuses to register a block of more than 1 GiB. */
enum { REGION_BYTES = 512 << 20, RETRY_NS = 1000 * 1000 };

typedef struct uring_state {
    struct io_uring ring;
    pthread_t thread;
    int event_fd;
    uint64_t event_count;
    bool has_buffers, has_files; /* registered */
    /* Under the reader's lock. */
    pthread_cond_t started;
    bool is_started, is_asleep;
    bl_error start_error;
    bl_io_piece **batch; /* [queue_depth] */
} uring_state;

/* liburing maps and unmaps a ring by system calls that ThreadSanitizer does not see: a ring at
 * addresses that another thread used before would look like a race. What liburing's inline
 * functions touch is shared with the kernel only, never between threads.
 *
 * ThreadSanitizer has one such function per program, so hwloc's exception is here too: hwloc loads
 * its plugins each time it loads a topology, and the loader's mappings are not seen either. Their
 * strings look written by the thread that used the addresses before. */
#if defined(__SANITIZE_THREAD__)
BL_API const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "race:liburing.h\nrace:ring_result\nrace:ring_fixed_file\n"
           "called_from_lib:libhwloc.so\n";
}
#endif

/* The two places where this file touches a ring itself. */
static __attribute__((noinline)) int ring_result(const struct io_uring_cqe *cqe)
{
    return cqe->res;
}

static __attribute__((noinline)) void ring_fixed_file(struct io_uring_sqe *sqe)
{
    sqe->flags |= IOSQE_FIXED_FILE;
}

/* ---- setting up, on the engine's thread ---- */

static bl_status create_ring(bl_reader *reader, struct io_uring *ring)
{
    unsigned entries = (unsigned)reader->options.queue_depth + 2; /* and the eventfd */
    struct io_uring_params params = {0};

#ifdef IORING_SETUP_SINGLE_ISSUER
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN;
#endif
    int rc = io_uring_queue_init_params(entries, ring, &params);
    if (rc == -EINVAL) {
        params = (struct io_uring_params){0}; /* a kernel before 6.0 */
        rc = io_uring_queue_init_params(entries, ring, &params);
    }
    if (rc == 0) return BL_OK;
    errno = -rc;
    return bl_fail_errno(BL_ELIMIT, "io_uring_setup");
}

static void warn_buffers(const bl_reader *reader, size_t n_bytes, int rc)
{
    struct rlimit limit;

    if (atomic_exchange(reader->files->warned, true)) return;
    if (rc == -ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        bl_log_warning(
            "RLIMIT_MEMLOCK is %llu bytes and registering the read buffers needs %zu (ulimit -l "
            "%zu): they stay "
            "unregistered",
            (unsigned long long)limit.rlim_cur, n_bytes, n_bytes / 1024 + 1);
    else
        bl_log_warning("registering %zu bytes of read buffers: %s: they stay unregistered", n_bytes,
                       strerror(-rc));
}

/* One block a slot, then the caller's memory in regions. */
static void register_buffers(bl_reader *reader, uring_state *state)
{
    size_t depth = (size_t)reader->options.queue_depth, n_bytes = 0;
    size_t n_regions = (reader->options.memory_bytes + REGION_BYTES - 1) / REGION_BYTES;
    struct iovec *blocks = calloc(depth + n_regions, sizeof *blocks);

    if (!blocks) return;
    for (size_t i = 0; i < depth; i++)
        blocks[i] = (struct iovec){reader->pieces[i].buffer, reader->buffer_bytes};
    for (size_t i = 0; i < n_regions; i++) {
        size_t begin = i * REGION_BYTES;
        blocks[depth + i].iov_base = (char *)reader->options.memory + begin;
        blocks[depth + i].iov_len =
            (size_t)bl_min_i64(REGION_BYTES, (int64_t)(reader->options.memory_bytes - begin));
    }
    for (size_t i = 0; i < depth + n_regions; i++) n_bytes += blocks[i].iov_len;
    int rc = io_uring_register_buffers(&state->ring, blocks, (unsigned)(depth + n_regions));
    state->has_buffers = rc == 0;
    if (rc != 0) warn_buffers(reader, n_bytes, rc);
    free(blocks);
}

static void register_files(bl_reader *reader, uring_state *state)
{
    int n = reader->files->n_files;
    int *fds = calloc((size_t)n + 1, sizeof *fds);

    if (!fds) return;
    for (int i = 0; i < n; i++) fds[i] = reader->files->file[i].fd;
    state->has_files = n > 0 && io_uring_register_files(&state->ring, fds, (unsigned)n) == 0;
    free(fds);
}

/* ---- requests ---- */

/* The index of the registered block that holds the request's memory, or -1. */
static int registered_block(const bl_reader *reader, const bl_io_piece *piece)
{
    const uring_state *state = reader->engine_state;
    uintptr_t begin = (uintptr_t)piece->memory, base = (uintptr_t)reader->options.memory;
    size_t n_bytes = (size_t)(piece->end - piece->begin);

    if (!state->has_buffers) return -1;
    if (piece->memory == piece->buffer) return piece->slot;
    if (begin < base || begin - base >= reader->options.memory_bytes ||
        n_bytes > reader->options.memory_bytes - (begin - base))
        return -1;
    size_t first = (begin - base) / REGION_BYTES,
           last = (begin - base + n_bytes - 1) / REGION_BYTES;
    return first == last ? reader->options.queue_depth + (int)first : -1;
}

static void request(bl_reader *reader, bl_io_piece *piece)
{
    uring_state *state = reader->engine_state;
    struct io_uring_sqe *sqe =
        io_uring_get_sqe(&state->ring); /* never NULL: the ring has an entry for each piece */
    int fd = state->has_files ? piece->file : reader->files->file[piece->file].fd;
    char *memory = piece->memory + (piece->at - piece->begin);
    unsigned n_bytes = (unsigned)(piece->end - piece->at);
    int block = registered_block(reader, piece);

    if (piece->is_write && block >= 0)
        io_uring_prep_write_fixed(sqe, fd, memory, n_bytes, (uint64_t)piece->at, block);
    else if (piece->is_write)
        io_uring_prep_write(sqe, fd, memory, n_bytes, (uint64_t)piece->at);
    else if (block >= 0)
        io_uring_prep_read_fixed(sqe, fd, memory, n_bytes, (uint64_t)piece->at, block);
    else
        io_uring_prep_read(sqe, fd, memory, n_bytes, (uint64_t)piece->at);
    if (state->has_files) ring_fixed_file(sqe);
    io_uring_sqe_set_data(sqe, piece);
}

/* NULL marks the eventfd's completion. */
static void request_event(uring_state *state)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&state->ring);
    io_uring_prep_read(sqe, state->event_fd, &state->event_count, sizeof state->event_count, 0);
    io_uring_sqe_set_data(sqe, NULL);
}

/* A first read, of the eventfd: a kernel before 5.6 cannot, and a filter of system calls may let a
 * ring be made that nothing can be asked of. */
static bl_status try_ring(uring_state *state)
{
    struct io_uring_cqe *cqe;

    request_event(state);
    int rc = io_uring_submit(&state->ring);
    if (rc >= 0)
        while ((rc = io_uring_wait_cqe(&state->ring, &cqe)) == -EINTR) continue;
    if (rc >= 0) {
        rc = ring_result(cqe);
        io_uring_cqe_seen(&state->ring, cqe);
    }
    if (rc >= 0) return BL_OK;
    errno = -rc;
    return bl_fail_errno(BL_ELIMIT, "io_uring_enter");
}

static void take_completions(bl_reader *reader, uring_state *state)
{
    struct io_uring_cqe *cqe;

    while (io_uring_peek_cqe(&state->ring, &cqe) == 0) {
        bl_io_piece *piece = io_uring_cqe_get_data(cqe);
        int result = ring_result(cqe);
        io_uring_cqe_seen(&state->ring, cqe);
        if (!piece)
            request_event(state);
        else if (bl_reader_finish(reader, piece, result))
            request(reader, piece);
    }
}

/* Takes all available pieces into the batch. False: the thread must end. */
static bool take_batch(bl_reader *reader, uring_state *state, int *n)
{
    *n = 0;
    pthread_mutex_lock(&reader->lock);
    while ((state->batch[*n] = bl_reader_take(reader)) != NULL) ++*n;
    bool go_on = !reader->quit || reader->n_flying > 0;
    state->is_asleep = true;
    pthread_mutex_unlock(&reader->lock);
    return go_on;
}

static void serve(bl_reader *reader, uring_state *state)
{
    const struct timespec pause = {0, RETRY_NS};
    int n;

    request_event(state);
    while (take_batch(reader, state, &n)) {
        for (int i = 0; i < n; i++) request(reader, state->batch[i]);
        int rc = io_uring_submit_and_wait(&state->ring, 1);
        if (rc < 0 && rc != -EINTR)
            nanosleep(&pause, NULL); /* EAGAIN, EBUSY: the kernel is short of memory */
        take_completions(reader, state);
    }
}

static void *thread_main(void *argument)
{
    bl_reader *reader = argument;
    uring_state *state = reader->engine_state;

    bl_status st = create_ring(reader, &state->ring);
    if (st == BL_OK && (st = try_ring(state)) != BL_OK) io_uring_queue_exit(&state->ring);
    if (st == BL_OK) {
        register_buffers(reader, state);
        register_files(reader, state);
    }
    pthread_mutex_lock(&reader->lock);
    bl_error_save(&state->start_error, st);
    state->is_started = true;
    pthread_cond_signal(&state->started);
    pthread_mutex_unlock(&reader->lock);
    if (st == BL_OK) {
        serve(reader, state);
        if (state->has_buffers) /* queue_exit alone gives memory back later. */
            io_uring_unregister_buffers(&state->ring);
        io_uring_queue_exit(&state->ring);
    }
    return NULL;
}

/* ---- the engine ---- */

static void wake(bl_reader *reader)
{
    uring_state *state = reader->engine_state;
    const uint64_t one = 1;

    if (!state->is_asleep) return;
    state->is_asleep = false;
    while (write(state->event_fd, &one, sizeof one) < 0 && errno == EINTR)
        continue; /* else: 2^64 - 1 wake-ups are pending */
}

static void free_state(bl_reader *reader)
{
    uring_state *state = reader->engine_state;

    if (state->event_fd >= 0) close(state->event_fd);
    pthread_cond_destroy(&state->started);
    free(state->batch);
    free(state);
    reader->engine_state = NULL;
}

static void stop(bl_reader *reader)
{
    pthread_join(((uring_state *)reader->engine_state)->thread, NULL);
    free_state(reader);
}

static bl_status start(bl_reader *reader)
{
    bl_status st = BL_OK;
    uring_state *state = calloc(1, sizeof *state);

    if (!state) return BL_FAIL(BL_ENOMEM, "a ring");
    reader->engine_state = state;
    pthread_cond_init(&state->started, NULL);
    state->batch = calloc((size_t)reader->options.queue_depth + 1, sizeof(bl_io_piece *));
    state->event_fd = eventfd(1, EFD_CLOEXEC); /* for try_ring to find */
    if (!state->batch || state->event_fd < 0) {
        st = bl_fail_errno(BL_ELIMIT, "eventfd");
        goto failed;
    }
    errno = pthread_create(&state->thread, NULL, thread_main, reader);
    if (errno != 0) {
        st = bl_fail_errno(BL_ELIMIT, "a thread for reading");
        goto failed;
    }
    pthread_mutex_lock(&reader->lock);
    while (!state->is_started) pthread_cond_wait(&state->started, &reader->lock);
    pthread_mutex_unlock(&reader->lock);
    if (state->start_error.status == BL_OK) return BL_OK;
    pthread_join(state->thread, NULL);
    st = bl_error_restore(&state->start_error);
failed:
    free_state(reader);
    return st;
}

const bl_io_engine_api bl_io_engine_uring = {"uring", start, wake, stop};
