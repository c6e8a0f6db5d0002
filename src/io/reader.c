/* SPDX-License-Identifier: Apache-2.0 */
/* reader.c -- chooses the next request, interprets results and wakes waiting threads. */
#include "io/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "io/reader_internal.h"

/* Attempts in a row that bring nothing before a piece fails, and the pause before the next one. */
enum { MAX_STALLS = 1000, STALL_NS = 1000 * 1000 };

static int64_t align_down(int64_t offset)
{
    return offset - offset % BL_IO_ALIGN_BYTES;
}

/* ---- next requests ---- */

/* Where the bytes of a piece go: to `dst` itself where the file takes such a request, else through
 * the buffer. */
static void place_piece(const bl_reader *reader, bl_io_piece *piece, char *dst)
{
    bool is_direct = atomic_load(&reader->files->file[piece->file].is_direct);
    bool is_aligned = ((uintptr_t)dst | (uint64_t)piece->need_begin | (uint64_t)piece->need_end) %
                          BL_IO_ALIGN_BYTES ==
                      0;

    piece->begin = piece->need_begin;
    piece->end = piece->need_end;
    piece->memory = dst ? dst : piece->buffer;
    if (is_direct && !(dst && is_aligned)) {
        piece->begin = align_down(piece->begin);
        piece->end = bl_round_up(piece->end, BL_IO_ALIGN_BYTES);
        piece->memory = piece->buffer;
    }
    piece->at = piece->begin;
    piece->n_stalls = 0;
    piece->is_ready = false;
    piece->error.status = BL_OK;
}

static bl_io_piece *take_slot(bl_reader *reader)
{
    reader->n_flying++;
    return &reader->pieces[reader->free_slots[--reader->n_free]];
}

static bl_io_piece *take_of_read(bl_reader *reader)
{
    bl_io_read *read = reader->first_read;
    bl_io_piece *piece = take_slot(reader);
    int64_t left = (int64_t)(read->n_bytes - read->internal.issued_bytes);

    piece->read = read;
    piece->is_write = read->internal.is_write;
    piece->file = read->file;
    piece->need_begin = read->offset_bytes + (int64_t)read->internal.issued_bytes;
    piece->need_end = piece->need_begin + bl_min_i64(left, (int64_t)reader->options.chunk_bytes);
    place_piece(reader, piece, (char *)read->dst + read->internal.issued_bytes);
    read->internal.n_flying++;
    read->internal.issued_bytes += (size_t)(piece->need_end - piece->need_begin);
    if (read->internal.issued_bytes == read->n_bytes) reader->first_read = read->internal.next;
    return piece;
}

static bl_io_piece *take_of_stream(bl_reader *reader)
{
    const bl_io_range *range = &reader->stream.ranges[reader->stream.range];
    bl_io_piece *piece = take_slot(reader);

    piece->read = NULL;
    piece->is_write = false;
    piece->range = reader->stream.range;
    piece->range_offset = reader->stream.offset;
    piece->file = range->file;
    piece->need_begin = range->offset_bytes + reader->stream.offset;
    int64_t left = range->n_bytes - reader->stream.offset;
    piece->need_end = piece->need_begin + bl_min_i64(left, (int64_t)reader->options.chunk_bytes);
    place_piece(reader, piece, NULL);
    reader->stream.offset += piece->need_end - piece->need_begin;
    reader->stream.order[reader->stream.n_issued++ % (uint64_t)reader->options.queue_depth] =
        piece->slot;
    return piece;
}

/* Moves the stream's cursor to a byte that is to be read. False: there is none. */
static bool seek_stream(bl_reader *reader)
{
    if (!reader->stream.is_open || reader->stream.has_failed) return false;
    while (reader->stream.range < reader->stream.n_ranges &&
           reader->stream.offset == reader->stream.ranges[reader->stream.range].n_bytes) {
        reader->stream.range++;
        reader->stream.offset = 0;
    }
    return reader->stream.range < reader->stream.n_ranges;
}

bl_io_piece *bl_reader_take(bl_reader *reader)
{
    if (reader->quit || reader->n_free == 0) return NULL;
    if (reader->first_read) return take_of_read(reader);
    return seek_stream(reader) ? take_of_stream(reader) : NULL;
}

/* ---- results ---- */

/* A file whose direct requests are refused, or end where no direct request can go on, is read
 * through the page cache from now on. False: it was already. Requests of other threads may be under
 * way; they are right either way. */
static bool leave_direct(bl_io_file *file)
{
    return atomic_exchange(&file->is_direct, false) && fcntl(file->fd, F_SETFL, 0) == 0;
}

static void fail_piece(bl_io_piece *piece, const bl_io_file *file, int64_t result)
{
    bool is_full = piece->is_write && (result == -ENOSPC || result == -EDQUOT);
    bl_status st;

    if (result == 0 && !piece->is_write) {
        st = BL_FAIL(BL_EIO,
                     "%s: ends at offset %" PRId64 ", where %" PRId64 " more bytes are expected",
                     file->path, piece->at, piece->need_end - piece->at);
    } else {
        errno = result == 0 ? EIO : (int)-result;
        st = bl_fail_errno(
            is_full ? BL_ELIMIT : BL_EIO, "%s: %s %" PRId64 " bytes at offset %" PRId64, file->path,
            piece->is_write ? "writing" : "reading", piece->end - piece->at, piece->at);
    }
    bl_error_save(&piece->error, st);
}

static bool may_stall(bl_io_piece *piece)
{
    const struct timespec pause = {0, STALL_NS};
    if (++piece->n_stalls > MAX_STALLS) return false;
    if (piece->n_stalls > 1) nanosleep(&pause, NULL);
    return true;
}

/* True: the piece has more to read; false: it is whole, or it failed. */
static bool take_result(bl_io_piece *piece, bl_io_file *file, int64_t result)
{
    if (result == -EINTR || result == -EAGAIN) {
        if (may_stall(piece)) return true;
    } else if (result == -EINVAL) {
        if (leave_direct(file) || may_stall(piece)) return true;
    } else if (result > 0) {
        int64_t before = piece->at;
        piece->at += result;
        piece->n_stalls = 0;
        if (piece->at >= piece->need_end) return false;
        if (!atomic_load(&file->is_direct)) return true;
        piece->at = align_down(piece->at);
        if (piece->at <= before) leave_direct(file);
        return true;
    }
    fail_piece(piece, file, result);
    return false;
}

/* The piece of a read leaves its slot at once, that of a stream when its chunk has been consumed.
 * The lock is held. */
static void land_piece(bl_reader *reader, bl_io_piece *piece)
{
    bl_io_read *read = piece->read;
    bool failed = piece->error.status != BL_OK;

    reader->n_flying--;
    reader->stats.n_bytes += failed ? 0 : piece->need_end - piece->need_begin;
    if (!read) {
        piece->is_ready = true;
        if (failed) reader->stream.has_failed = true;
    } else {
        read->internal.n_flying--;
        reader->free_slots[reader->n_free++] = piece->slot;
        if (failed && read->internal.error.status == BL_OK) {
            read->internal.error = piece->error;
            if (reader->first_read == read)
                reader->first_read = read->internal.next; /* the rest is not wanted */
            read->internal.issued_bytes = read->n_bytes;
        }
    }
    pthread_cond_broadcast(&reader->done);
}

bool bl_reader_finish(bl_reader *reader, bl_io_piece *piece, int64_t result)
{
    bl_io_file *file = &reader->files->file[piece->file];
    size_t n_asked = (size_t)(piece->end - piece->at);

    if (reader->options.hook) {
        const bl_io_completion completion = {file->path, piece->at, n_asked, result,
                                             piece->is_write};
        result = reader->options.hook(reader->options.hook_arg, &completion);
    }
    bool again = take_result(piece, file, result);
    if (!again && piece->read && piece->error.status == BL_OK && piece->memory == piece->buffer)
        memcpy((char *)piece->read->dst + (piece->need_begin - piece->read->offset_bytes),
               piece->memory + (piece->need_begin - piece->begin),
               (size_t)(piece->need_end - piece->need_begin));
    pthread_mutex_lock(&reader->lock);
    reader->stats.n_requests++;
    if (!again) land_piece(reader, piece);
    pthread_mutex_unlock(&reader->lock);
    return again;
}

/* ---- the reader ---- */

static bl_status start_engine(bl_reader *reader)
{
    bl_io_engine wanted = reader->options.engine;

    if (wanted != BL_IO_PREAD) {
        reader->engine = &bl_io_engine_uring;
        if (reader->engine->start(reader) == BL_OK) return BL_OK;
        if (!atomic_exchange(reader->files->warned, true))
            bl_log_warning("io_uring is not used, files are read with pread: %s", bl_error_text());
    }
    reader->engine = &bl_io_engine_pread;
    return reader->engine->start(reader);
}

static bl_status allocate(bl_reader *reader)
{
    int depth = reader->options.queue_depth;
    size_t n_bytes;

    /* An unaligned range needs up to one more unit on either side. */
    reader->buffer_bytes = reader->options.chunk_bytes + 2 * (size_t)BL_IO_ALIGN_BYTES;
    if (bl_mul_overflows((size_t)depth, reader->buffer_bytes, &n_bytes))
        return BL_FAIL(BL_ENOMEM, "buffers for reading");
    reader->pieces = calloc((size_t)depth, sizeof *reader->pieces);
    reader->free_slots = calloc((size_t)depth, sizeof *reader->free_slots);
    reader->stream.order = calloc((size_t)depth, sizeof *reader->stream.order);
    reader->buffers =
        mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reader->buffers == MAP_FAILED) reader->buffers = NULL;
    if (reader->buffers)
        madvise(reader->buffers, n_bytes,
                MADV_HUGEPAGE); /* a hint: a request is in fewer pieces then */
    if (!reader->pieces || !reader->free_slots || !reader->stream.order || !reader->buffers)
        return BL_FAIL(BL_ENOMEM, "%zu bytes of buffers for reading", n_bytes);
    for (int slot = 0; slot < depth; slot++) {
        reader->pieces[slot].slot = slot;
        reader->pieces[slot].buffer = reader->buffers + (size_t)slot * reader->buffer_bytes;
        reader->free_slots[slot] = depth - 1 - slot;
    }
    reader->n_free = depth;
    return BL_OK;
}

static void free_reader(bl_reader *reader)
{
    pthread_mutex_destroy(&reader->lock);
    pthread_cond_destroy(&reader->done);
    if (reader->buffers)
        munmap(reader->buffers, (size_t)reader->options.queue_depth * reader->buffer_bytes);
    free(reader->stream.order);
    free(reader->free_slots);
    free(reader->pieces);
    free(reader);
}

bl_status bl_reader_create(const bl_reader_options *options, bl_io_files *files, bl_reader **out)
{
    *out = NULL;
    bl_reader *reader = calloc(1, sizeof *reader);
    if (!reader) return BL_FAIL(BL_ENOMEM, "a reader");
    reader->options = *options;
    reader->files = files;
    if (options->queue_depth <= 0) reader->options.queue_depth = BL_IO_QUEUE_DEPTH;
    if (options->chunk_bytes == 0) reader->options.chunk_bytes = BL_IO_CHUNK_BYTES;
    pthread_mutex_init(&reader->lock, NULL);
    pthread_cond_init(&reader->done, NULL);
    bl_status st =
        reader->options.chunk_bytes % BL_IO_ALIGN_BYTES == 0 &&
                reader->options.chunk_bytes <= (1u << 29)
            ? allocate(reader)
            : BL_FAIL(BL_EINTERNAL, "requests of %zu bytes", reader->options.chunk_bytes);
    if (st == BL_OK) st = start_engine(reader);
    if (st != BL_OK) {
        free_reader(reader);
        return st;
    }
    *out = reader;
    return BL_OK;
}

void bl_reader_destroy(bl_reader *reader)
{
    if (!reader) return;
    pthread_mutex_lock(&reader->lock);
    reader->quit = true;
    reader->engine->wake(reader);
    pthread_mutex_unlock(&reader->lock);
    reader->engine->stop(reader);
    free_reader(reader);
}

const char *bl_reader_engine_name(const bl_reader *reader)
{
    return reader->engine->name;
}

void bl_reader_get_stats(bl_reader *reader, bl_reader_stats *out)
{
    pthread_mutex_lock(&reader->lock);
    *out = reader->stats;
    pthread_mutex_unlock(&reader->lock);
}

/* Sleeps until a piece lands. The lock is held. */
static void wait_done(bl_reader *reader)
{
    double start = bl_now_s();
    pthread_cond_wait(&reader->done, &reader->lock);
    reader->stats.wait_s += bl_now_s() - start;
}

/* ---- reads ---- */

static bl_status submit(bl_reader *reader, bl_io_read *read, bool is_write)
{
    bl_status st = BL_OK;

    memset(&read->internal, 0, sizeof read->internal);
    read->internal.is_write = is_write;
    if (read->file < 0 || read->file >= reader->files->n_files || read->offset_bytes < 0)
        return BL_FAIL(BL_EINTERNAL, "a read of file %d at offset %" PRId64, read->file,
                       read->offset_bytes);
    pthread_mutex_lock(&reader->lock);
    if (reader->stream.is_open) {
        st = BL_FAIL(BL_EINTERNAL, "a read while a stream is open");
    } else {
        reader->n_reads++;
        if (read->n_bytes > 0) {
            if (reader->first_read)
                reader->last_read->internal.next = read;
            else
                reader->first_read = read;
            reader->last_read = read;
            reader->engine->wake(reader);
        }
    }
    pthread_mutex_unlock(&reader->lock);
    return st;
}

bl_status bl_reader_submit(bl_reader *reader, bl_io_read *read)
{
    return submit(reader, read, false);
}

bl_status bl_reader_submit_write(bl_reader *reader, bl_io_read *write)
{
    if (((uintptr_t)write->dst | (uint64_t)write->offset_bytes | write->n_bytes) %
            BL_IO_ALIGN_BYTES !=
        0)
        return BL_FAIL(BL_EINTERNAL, "a write of %zu bytes at offset %" PRId64 ": not whole blocks",
                       write->n_bytes, write->offset_bytes);
    return submit(reader, write, true);
}

bl_status bl_reader_wait(bl_reader *reader, bl_io_read *read)
{
    pthread_mutex_lock(&reader->lock);
    while (read->internal.issued_bytes < read->n_bytes || read->internal.n_flying > 0)
        wait_done(reader);
    reader->n_reads--;
    pthread_mutex_unlock(&reader->lock);
    return read->internal.error.status == BL_OK ? BL_OK : bl_error_restore(&read->internal.error);
}

/* ---- the stream ---- */

static bl_status check_ranges(const bl_reader *reader, const bl_io_range *ranges, size_t n_ranges)
{
    for (size_t i = 0; i < n_ranges; i++)
        if (ranges[i].file < 0 || ranges[i].file >= reader->files->n_files ||
            ranges[i].offset_bytes < 0 || ranges[i].n_bytes < 0 ||
            ranges[i].n_bytes > INT64_MAX - BL_IO_ALIGN_BYTES - ranges[i].offset_bytes)
            return BL_FAIL(BL_EINTERNAL,
                           "range %zu: %" PRId64 " bytes of file %d at offset %" PRId64, i,
                           ranges[i].n_bytes, ranges[i].file, ranges[i].offset_bytes);
    return BL_OK;
}

bl_status bl_reader_stream(bl_reader *reader, const bl_io_range *ranges, size_t n_ranges)
{
    bl_status st = BL_OK;

    BL_TRY(check_ranges(reader, ranges, n_ranges));
    pthread_mutex_lock(&reader->lock);
    if (reader->stream.is_open || reader->n_reads > 0) {
        st = BL_FAIL(BL_EINTERNAL, "a stream while the reader is in use");
    } else {
        int *order = reader->stream.order;
        memset(&reader->stream, 0, sizeof reader->stream);
        reader->stream.order = order;
        reader->stream.ranges = ranges;
        reader->stream.n_ranges = n_ranges;
        reader->stream.is_open = true;
        reader->engine->wake(reader);
    }
    pthread_mutex_unlock(&reader->lock);
    return st;
}

/* The piece whose chunk is the next to be delivered. */
static bl_io_piece *stream_front(bl_reader *reader)
{
    return &reader->pieces[reader->stream.order[reader->stream.n_delivered %
                                                (uint64_t)reader->options.queue_depth]];
}

static void release_front(bl_reader *reader)
{
    reader->free_slots[reader->n_free++] = stream_front(reader)->slot;
    reader->stream.n_delivered++;
    reader->stream.is_held = false;
}

bl_status bl_reader_next(bl_reader *reader, bl_io_chunk *out)
{
    bl_status st = BL_OK;

    *out = (bl_io_chunk){0};
    pthread_mutex_lock(&reader->lock);
    if (reader->stream.is_held) {
        release_front(reader);
        reader->engine->wake(reader);
    }
    while (reader->stream.n_delivered == reader->stream.n_issued ? seek_stream(reader)
                                                                 : !stream_front(reader)->is_ready)
        wait_done(reader);
    if (reader->stream.n_delivered < reader->stream.n_issued) {
        const bl_io_piece *piece = stream_front(reader);
        st = piece->error.status == BL_OK ? BL_OK : bl_error_restore(&piece->error);
        reader->stream.is_held = st == BL_OK;
        if (st == BL_OK)
            *out = (bl_io_chunk){piece->memory + (piece->need_begin - piece->begin),
                                 (size_t)(piece->need_end - piece->need_begin), piece->range,
                                 piece->range_offset};
    }
    pthread_mutex_unlock(&reader->lock);
    return st;
}

void bl_reader_stream_end(bl_reader *reader)
{
    pthread_mutex_lock(&reader->lock);
    if (reader->stream.is_open) {
        reader->stream.has_failed = true; /* nothing more is issued */
        while (reader->n_flying > 0) wait_done(reader);
        while (reader->stream.n_delivered < reader->stream.n_issued) release_front(reader);
        reader->stream.is_open = false;
    }
    pthread_mutex_unlock(&reader->lock);
}
