/* SPDX-License-Identifier: Apache-2.0 */
/* engine_pread.c -- the reader's engine without io_uring: threads that attempt one piece at a time,
 * with pread or pwrite. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/sizes.h"
#include "io/reader_internal.h"

enum { MAX_THREADS = 8 };

typedef struct pread_state {
    pthread_cond_t work;
    int n_threads;
    pthread_t threads[MAX_THREADS];
} pread_state;

static int64_t attempt(const bl_reader *reader, const bl_io_piece *piece)
{
    int fd = reader->files->file[piece->file].fd;
    char *memory = piece->memory + (piece->at - piece->begin);
    size_t n_bytes = (size_t)(piece->end - piece->at);
    ssize_t n = piece->is_write ? pwrite(fd, memory, n_bytes, piece->at)
                                : pread(fd, memory, n_bytes, piece->at);
    return n >= 0 ? n : -errno;
}

static void *thread_main(void *argument)
{
    bl_reader *reader = argument;
    pread_state *state = reader->engine_state;

    pthread_mutex_lock(&reader->lock);
    while (!reader->quit) {
        bl_io_piece *piece = bl_reader_take(reader);
        if (!piece) {
            pthread_cond_wait(&state->work, &reader->lock);
            continue;
        }
        pthread_mutex_unlock(&reader->lock);
        while (bl_reader_finish(reader, piece, attempt(reader, piece))) {
        }
        pthread_mutex_lock(&reader->lock);
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}

static void stop(bl_reader *reader)
{
    pread_state *state = reader->engine_state;

    pthread_cond_broadcast(&state->work);
    for (int i = 0; i < state->n_threads; i++) pthread_join(state->threads[i], NULL);
    pthread_cond_destroy(&state->work);
    free(state);
}

static bl_status start(bl_reader *reader)
{
    pread_state *state = calloc(1, sizeof *state);
    int n_threads = (int)bl_min_i64(reader->options.queue_depth, MAX_THREADS);

    if (!state) return BL_FAIL(BL_ENOMEM, "threads for reading");
    pthread_cond_init(&state->work, NULL);
    reader->engine_state = state;
    for (; state->n_threads < n_threads; state->n_threads++) {
        errno = pthread_create(&state->threads[state->n_threads], NULL, thread_main, reader);
        if (errno == 0) continue;
        if (state->n_threads > 0) break; /* fewer will do */
        bl_status st = bl_fail_errno(BL_ELIMIT, "a thread for reading");
        stop(reader);
        return st;
    }
    return BL_OK;
}

static void wake(bl_reader *reader)
{
    pthread_cond_broadcast(&((pread_state *)reader->engine_state)->work);
}

const bl_io_engine_api bl_io_engine_pread = {"pread", start, wake, stop};
