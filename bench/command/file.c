/* SPDX-License-Identifier: Apache-2.0 */
/* file.c -- the file that bench io reads: random bytes of a seed, and a digest that does not depend
 * on how reads are cut. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "bench/command/file.h"
#include "train/metrics.h"

/* Depends on the order of the bytes and not on how they are cut, as long as every piece but the
 * last is a multiple of 8 bytes. */
static uint64_t digest_bytes(uint64_t digest, const void *bytes, size_t n_bytes)
{
    const unsigned char *at = bytes;
    uint64_t word;

    for (; n_bytes >= sizeof word; at += sizeof word, n_bytes -= sizeof word) {
        memcpy(&word, at, sizeof word);
        digest = (digest ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    }
    for (; n_bytes > 0; n_bytes--) digest = (digest ^ *at++) * UINT64_C(0x100000001b3);
    return digest;
}

static bool has_direct(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/* digest and is_direct. */
static bl_status look_at(bl_bench_file *file)
{
    bl_status st = BL_OK;
    void *piece = malloc(BL_IO_CHUNK_BYTES);

    if (!piece) return BL_FAIL(BL_ENOMEM, "a piece of %s", file->path);
    file->digest = 0;
    for (int64_t at = 0; at < file->n_bytes; at += BL_IO_CHUNK_BYTES) {
        size_t n = (size_t)bl_min_i64(BL_IO_CHUNK_BYTES, file->n_bytes - at);
        BL_TRY_GOTO(st, done, bl_file_read_full(file->fd, file->path, piece, n, at));
        file->digest = digest_bytes(file->digest, piece, n);
    }
    file->is_direct = has_direct(file->path);
done:
    free(piece);
    return st;
}

/* Random bytes: Marsaglia 2003, xorshift64. *x: its state, not 0. */
static void fill_random(uint64_t *words, size_t n_bytes, uint64_t *x)
{
    for (size_t i = 0; i < n_bytes / sizeof *words; i++) {
        *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
        words[i] = *x;
    }
}

static bl_status write_random(const bl_bench_file *file)
{
    uint64_t *piece = malloc(BL_IO_CHUNK_BYTES), x = 88172645463325252u;
    bl_status st = BL_OK;

    if (!piece) return BL_FAIL(BL_ENOMEM, "a piece of %s", file->path);
    for (int64_t at = 0; at < file->n_bytes; at += BL_IO_CHUNK_BYTES) {
        fill_random(piece, BL_IO_CHUNK_BYTES, &x);
        BL_TRY_GOTO(st, done,
                    bl_file_write_full(file->fd, file->path, piece, BL_IO_CHUNK_BYTES, at));
    }
    st = bl_file_sync(file->fd, file->path);
done:
    free(piece);
    return st;
}

bl_status bl_bench_file_make(const char *dir, int64_t n_bytes, bl_bench_file *out)
{
    char *name;
    int64_t free_bytes;

    *out = (bl_bench_file){.fd = -1, .n_bytes = n_bytes};
    BL_TRY(bl_dir_free_bytes(dir, &free_bytes));
    if (free_bytes < n_bytes)
        return BL_FAIL(BL_ELIMIT, "%s: a file of %lld bytes to read, %lld are free", dir,
                       (long long)n_bytes, (long long)free_bytes);
    BL_TRY(bl_path_join(dir, "ballast-io-XXXXXX", &name));
    out->fd = mkostemp(name, O_CLOEXEC);
    bl_status st = out->fd < 0 ? bl_fail_errno(BL_EIO, "%s: making a file there", dir) : BL_OK;
    if (out->fd >= 0) unlink(name);
    free(name);
    BL_TRY(st);
    BL_TRY(bl_text_format(&out->path, "/proc/%d/fd/%d", (int)getpid(), out->fd));
    BL_TRY(write_random(out));
    return look_at(out);
}

bl_status bl_bench_file_open(const char *path, bl_bench_file *out)
{
    *out = (bl_bench_file){.fd = -1};
    BL_TRY(bl_file_open(path, &out->fd, &out->n_bytes));
    if (out->n_bytes == 0) return BL_FAIL(BL_EINPUT, "%s: the file is empty", path);
    if (!(out->path = strdup(path))) return BL_FAIL(BL_ENOMEM, "%s: opening it", path);
    return look_at(out);
}

void bl_bench_file_close(bl_bench_file *file)
{
    if (file->fd >= 0) close(file->fd);
    free(file->path);
    *file = (bl_bench_file){.fd = -1};
}

void bl_bench_file_drop_cache(const bl_bench_file *file)
{
    posix_fadvise(file->fd, 0, 0, POSIX_FADV_DONTNEED);
}

bl_status bl_bench_file_read(const bl_bench_file *file, const bl_reader_options *options,
                             bool verify, double *seconds, const char **engine)
{
    const char *const path = file->path;
    const bl_io_range range = {0, 0, file->n_bytes};
    bl_io_files *files = NULL;
    bl_reader *reader = NULL;
    bl_io_chunk chunk;
    uint64_t digest = 0;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_io_files_open(&path, 1, true, &files));
    bl_bench_file_drop_cache(file);
    double start = bl_now_s();
    BL_TRY_GOTO(st, done, bl_reader_create(options, files, &reader));
    BL_TRY_GOTO(st, done, bl_reader_stream(reader, &range, 1));
    do {
        BL_TRY_GOTO(st, done, bl_reader_next(reader, &chunk));
        if (verify && chunk.bytes) digest = digest_bytes(digest, chunk.bytes, chunk.n_bytes);
    } while (chunk.bytes);
    *seconds = bl_now_s() - start;
    *engine = bl_reader_engine_name(reader);
    if (verify && digest != file->digest)
        st = BL_FAIL(BL_EINTERNAL, "%s: the %s engine delivered other bytes than pread", path,
                     *engine);
done:
    bl_reader_destroy(reader);
    bl_io_files_close(files);
    return st;
}

static bl_status open_to_write(const bl_bench_file *file, bl_io_files **out)
{
    int fd = open(file->path, O_RDWR | O_CLOEXEC);

    *out = NULL;
    if (fd < 0) return bl_fail_errno(BL_EIO, "%s: opening it to write", file->path);
    return bl_io_files_adopt(file->path, fd, true, out);
}

/* pieces: queue_depth chunks, one per request in flight. */
static bl_status write_pieces(const bl_bench_file *file, bl_reader *reader,
                              const bl_reader_options *options, char *pieces, bl_io_read *writes)
{
    int64_t chunk = (int64_t)options->chunk_bytes, n = bl_ceil_div(file->n_bytes, chunk);
    int depth = options->queue_depth;

    for (int64_t i = 0; i < n; i++) {
        bl_io_read *w = &writes[i % depth];
        if (i >= depth) BL_TRY(bl_reader_wait(reader, w));
        *w = (bl_io_read){.offset_bytes = i * chunk,
                          .n_bytes = (size_t)bl_min_i64(chunk, file->n_bytes - i * chunk),
                          .dst = pieces + i % depth * chunk};
        BL_TRY(bl_reader_submit_write(reader, w));
    }
    for (int64_t i = bl_max_i64(0, n - depth); i < n; i++)
        BL_TRY(bl_reader_wait(reader, &writes[i % depth]));
    return BL_OK;
}

bl_status bl_bench_file_write(const bl_bench_file *file, const bl_reader_options *options,
                              double *seconds, const char **engine)
{
    size_t n_bytes = (size_t)options->queue_depth * options->chunk_bytes;
    char *pieces = aligned_alloc(BL_IO_ALIGN_BYTES, n_bytes);
    bl_io_read *writes = calloc((size_t)options->queue_depth, sizeof *writes);
    uint64_t x = 0x2545f4914f6cdd1du;
    bl_io_files *files = NULL;
    bl_reader *reader = NULL;
    bl_status st = BL_OK;

    if (!pieces || !writes) {
        st = BL_FAIL(BL_ENOMEM, "%d pieces of %s", options->queue_depth, file->path);
        goto done;
    }
    fill_random((uint64_t *)pieces, n_bytes, &x);
    BL_TRY_GOTO(st, done, open_to_write(file, &files));
    BL_TRY_GOTO(st, done, bl_reader_create(options, files, &reader));
    double start = bl_now_s();
    BL_TRY_GOTO(st, done, write_pieces(file, reader, options, pieces, writes));
    if (fdatasync(file->fd) != 0) {
        st = bl_fail_errno(BL_EIO, "%s: fdatasync", file->path);
        goto done;
    }
    *seconds = bl_now_s() - start;
    *engine = bl_reader_engine_name(reader);
done:
    bl_reader_destroy(reader); /* waits for writes in flight */
    bl_io_files_close(files);
    free(writes);
    free(pieces);
    return st;
}
