/* SPDX-License-Identifier: Apache-2.0 */
/* page_writer.c -- a queue of aligned blocks and a few threads that write them with O_DIRECT; the
 * first error is kept for the caller. */
#include "offload/page_writer_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/files.h"
#include "base/sizes.h"
#include "io/reader.h"

/* The disk also has a reader's whole queue: a single write would wait most of the time. */
enum { MAX_BLOCKS = 8, MIN_BLOCKS = 2, MAX_THREADS = 4, BLOCK_BYTES = 4 << 20 };

_Static_assert(BLOCK_BYTES % BL_IO_ALIGN_BYTES == 0, "what is written is whole blocks of the disk");

typedef struct block {
    char *bytes;
    size_t n_bytes;
    int64_t offset_bytes;
    const char *page; /* NULL: none */
    bool is_busy;     /* QUEUED or WRITING */
} block;

struct bl_page_writer {
    int fd;
    const char *path;
    atomic_bool is_direct;
    char *memory; /* of all blocks */
    size_t block_bytes;
    const char *page; /* of the caller: the page, and the place of the FILLING block */
    int64_t at;
    size_t n_filled;
    /* Guards what follows; bytes of a block that is not busy are the caller's. */
    pthread_mutex_t lock;
    pthread_cond_t queued, written;
    int n_blocks;
    block blocks[MAX_BLOCKS]; /* block n is blocks[n % n_blocks] */
    uint64_t n_queued, n_taken;
    int n_writing;
    bool quit;
    bl_error error;
    uint64_t failed; /* if there is an error: the block */
    int n_threads;
    pthread_t threads[MAX_THREADS];
};

static block *block_of(bl_page_writer *writer, uint64_t number)
{
    return &writer->blocks[number % (uint64_t)writer->n_blocks];
}

/* ---- the threads ---- */

/* A refusal, also of what follows a short write, ends O_DIRECT: the same bytes go through the page
 * cache then. */
static bl_status write_block(bl_page_writer *writer, const block *b)
{
    bool was_direct = atomic_load(&writer->is_direct);
    bl_status st =
        bl_file_write_full(writer->fd, writer->path, b->bytes, b->n_bytes, b->offset_bytes);

    if (st == BL_EIO && errno == EINVAL && was_direct && fcntl(writer->fd, F_SETFL, 0) == 0) {
        atomic_store(&writer->is_direct, false);
        st = bl_file_write_full(writer->fd, writer->path, b->bytes, b->n_bytes, b->offset_bytes);
    }
    return st == BL_OK || !b->page ? st : bl_error_prefix(st, "page %s", b->page);
}

/* Takes the next block; writes it unless that is of no use any more. The lock is held, and let go
 * of meanwhile. */
static void take_block(bl_page_writer *writer)
{
    uint64_t number = writer->n_taken++;
    block *b = block_of(writer, number);

    if (!writer->quit && writer->error.status == BL_OK) {
        writer->n_writing++;
        pthread_mutex_unlock(&writer->lock);
        bl_status st = write_block(writer, b);
        pthread_mutex_lock(&writer->lock);
        writer->n_writing--;
        if (st != BL_OK && (writer->error.status == BL_OK || number < writer->failed)) {
            bl_error_save(&writer->error, st);
            writer->failed = number;
        }
    }
    b->is_busy = false;
    pthread_cond_broadcast(&writer->written);
}

static void *thread_main(void *argument)
{
    bl_page_writer *writer = argument;

    pthread_mutex_lock(&writer->lock);
    for (;;) {
        while (!writer->quit && writer->n_taken == writer->n_queued)
            pthread_cond_wait(&writer->queued, &writer->lock);
        if (writer->n_taken == writer->n_queued) break;
        take_block(writer);
    }
    pthread_mutex_unlock(&writer->lock);
    return NULL;
}

/* ---- the caller ---- */

/* Once something has failed: when no earlier block can fail any more, the error. The lock is
 * held. */
static bl_status report(bl_page_writer *writer)
{
    if (writer->error.status == BL_OK) return BL_OK;
    while (writer->n_writing > 0) pthread_cond_wait(&writer->written, &writer->lock);
    return bl_error_restore(&writer->error);
}

/* The block that is FILLING has room. */
static bl_status wait_for_block(bl_page_writer *writer)
{
    pthread_mutex_lock(&writer->lock);
    while (block_of(writer, writer->n_queued)->is_busy)
        pthread_cond_wait(&writer->written, &writer->lock);
    bl_status st = report(writer);
    pthread_mutex_unlock(&writer->lock);
    return st;
}

static void queue_block(bl_page_writer *writer)
{
    pthread_mutex_lock(&writer->lock);
    block *b = block_of(writer, writer->n_queued++);
    b->n_bytes = writer->n_filled;
    b->offset_bytes = writer->at;
    b->page = writer->page;
    b->is_busy = true;
    pthread_cond_signal(&writer->queued);
    pthread_mutex_unlock(&writer->lock);
    writer->at += (int64_t)writer->n_filled;
    writer->n_filled = 0;
}

void bl_page_writer_begin(bl_page_writer *writer, const char *name, int64_t offset_bytes)
{
    writer->page = name;
    writer->at = offset_bytes;
}

bl_status bl_page_writer_append(bl_page_writer *writer, const void *bytes, size_t n_bytes)
{
    for (const char *from = bytes; n_bytes > 0;) {
        size_t n =
            (size_t)bl_min_i64((int64_t)n_bytes, (int64_t)(writer->block_bytes - writer->n_filled));
        BL_TRY(wait_for_block(writer));
        memcpy(block_of(writer, writer->n_queued)->bytes + writer->n_filled, from, n);
        writer->n_filled += n;
        from += n;
        n_bytes -= n;
        if (writer->n_filled == writer->block_bytes) queue_block(writer);
    }
    return BL_OK;
}

bl_status bl_page_writer_end(bl_page_writer *writer)
{
    if (writer->n_filled == 0) return BL_OK;
    BL_TRY(wait_for_block(writer));
    size_t padded = (size_t)bl_round_up((int64_t)writer->n_filled, BL_IO_ALIGN_BYTES);
    memset(block_of(writer, writer->n_queued)->bytes + writer->n_filled, 0,
           padded - writer->n_filled);
    writer->n_filled = padded;
    queue_block(writer);
    return BL_OK;
}

bl_status bl_page_writer_wait(bl_page_writer *writer)
{
    pthread_mutex_lock(&writer->lock);
    while (writer->n_taken < writer->n_queued || writer->n_writing > 0)
        pthread_cond_wait(&writer->written, &writer->lock);
    bl_status st = report(writer);
    pthread_mutex_unlock(&writer->lock);
    return st;
}

/* ---- create and destroy ---- */

static bl_status start_threads(bl_page_writer *writer)
{
    int n_most = writer->n_blocks < MAX_THREADS ? writer->n_blocks : MAX_THREADS;

    for (; writer->n_threads < n_most; writer->n_threads++) {
        errno = pthread_create(&writer->threads[writer->n_threads], NULL, thread_main, writer);
        if (errno == 0) continue;
        if (writer->n_threads > 0) break; /* fewer will do */
        return bl_fail_errno(BL_ELIMIT, "%s: a thread that writes it", writer->path);
    }
    return BL_OK;
}

static int count_blocks(int n_writers)
{
    int n = MAX_BLOCKS / (n_writers < 1 ? 1 : n_writers);
    return n < MIN_BLOCKS ? MIN_BLOCKS : n;
}

size_t bl_page_writer_bytes(int n_writers)
{
    return (size_t)count_blocks(n_writers) * BLOCK_BYTES;
}

bl_status bl_page_writer_create(int fd, const char *path, int n_writers, size_t largest_bytes,
                                bl_page_writer **out)
{
    const int64_t aligned = bl_round_up((int64_t)largest_bytes, BL_IO_ALIGN_BYTES),
                  block_bytes = bl_min_i64(bl_max_i64(aligned, BL_IO_ALIGN_BYTES), BLOCK_BYTES);
    const size_t n_bytes = (size_t)(count_blocks(n_writers) * block_bytes);
    bl_status st = BL_OK;

    *out = NULL;
    bl_page_writer *writer = calloc(1, sizeof *writer);
    if (!writer) return BL_FAIL(BL_ENOMEM, "%s: a writer", path);
    writer->fd = fd;
    writer->path = path;
    writer->n_blocks = count_blocks(n_writers);
    writer->block_bytes = (size_t)block_bytes;
    pthread_mutex_init(&writer->lock, NULL);
    pthread_cond_init(&writer->queued, NULL);
    pthread_cond_init(&writer->written, NULL);
    writer->memory =
        mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (writer->memory == MAP_FAILED) {
        writer->memory = NULL;
        st = bl_fail_errno(BL_ENOMEM, "%s: %zu bytes to write it through", path, n_bytes);
        goto done;
    }
    madvise(writer->memory, n_bytes, MADV_HUGEPAGE); /* a hint: a request is in fewer pieces then */
    for (int i = 0; i < writer->n_blocks; i++)
        writer->blocks[i].bytes = writer->memory + (size_t)i * writer->block_bytes;
    atomic_init(&writer->is_direct, fcntl(fd, F_SETFL, O_DIRECT) == 0);
    BL_TRY_GOTO(st, done, start_threads(writer));
    *out = writer;
    writer = NULL;
done:
    bl_page_writer_destroy(writer);
    return st;
}

void bl_page_writer_destroy(bl_page_writer *writer)
{
    if (!writer) return;
    pthread_mutex_lock(&writer->lock);
    writer->quit = true;
    pthread_cond_broadcast(&writer->queued);
    pthread_mutex_unlock(&writer->lock);
    for (int i = 0; i < writer->n_threads; i++) pthread_join(writer->threads[i], NULL);
    pthread_cond_destroy(&writer->written);
    pthread_cond_destroy(&writer->queued);
    pthread_mutex_destroy(&writer->lock);
    if (writer->memory) munmap(writer->memory, (size_t)writer->n_blocks * writer->block_bytes);
    free(writer);
}
