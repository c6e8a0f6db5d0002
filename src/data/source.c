/* SPDX-License-Identifier: Apache-2.0 */
/* source.c -- reads a data file through zlib's or zstd's decoder, or as it is. One buffer of the
 * file's bytes is filled again only when the decoder has used it up, so that memory does not grow
 * with the file; zstd's window is at most 128 MiB, its default. */
#include "data/source_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include "base/files.h"

enum { IN_BYTES = 1 << 17, MAGIC_BYTES = 4 };

typedef enum source_kind { PLAIN, GZIP, ZSTD } source_kind;

struct bl_source {
    const char *path;
    int fd;
    bool is_stream; /* stdin */
    source_kind kind;
    bool at_end;    /* of the file */
    bool is_inside; /* a member or frame has begun and not ended */
    size_t at, n;   /* in[at .. n) is not used yet */
    z_stream gzip;
    ZSTD_DStream *zstd;
    unsigned char in[IN_BYTES];
};

/* Moves the unused bytes to the beginning of the buffer and reads more after them. */
static bl_status fill(bl_source *s)
{
    ssize_t n;

    memmove(s->in, s->in + s->at, s->n - s->at);
    s->n -= s->at;
    s->at = 0;
    do n = read(s->fd, s->in + s->n, IN_BYTES - s->n);
    while (n < 0 && errno == EINTR);
    if (n < 0) return bl_fail_errno(BL_EIO, "read %s", s->path);
    s->n += (size_t)n;
    s->at_end = n == 0;
    return BL_OK;
}

static bl_status begin_decoder(bl_source *s)
{
    static const unsigned char zstd_magic[MAGIC_BYTES] = {0x28, 0xb5, 0x2f, 0xfd};
    enum { GZIP_WINDOW = 15 + 16 }; /* zlib's largest window, gzip's header */

    while (s->n < MAGIC_BYTES && !s->at_end) BL_TRY(fill(s));
    if (s->n >= 2 && s->in[0] == 0x1f && s->in[1] == 0x8b) {
        if (inflateInit2(&s->gzip, GZIP_WINDOW) != Z_OK)
            return BL_FAIL(BL_ENOMEM, "%s: gzip decoder", s->path);
        s->kind = GZIP;
    } else if (s->n >= MAGIC_BYTES && !memcmp(s->in, zstd_magic, MAGIC_BYTES)) {
        if (!(s->zstd = ZSTD_createDStream()))
            return BL_FAIL(BL_ENOMEM, "%s: zstd decoder", s->path);
        s->kind = ZSTD;
    }
    return BL_OK;
}

bl_status bl_source_open(const char *path, bl_source **out)
{
    bl_source *s = calloc(1, sizeof *s);
    bl_status st = BL_OK;

    *out = NULL;
    if (!s) return BL_FAIL(BL_ENOMEM, "reading %s", path);
    s->path = path;
    s->fd = -1;
    s->is_stream = strcmp(path, "-") == 0;
    if (!s->is_stream)
        st = bl_file_open(path, &s->fd, NULL);
    else if ((s->fd = dup(STDIN_FILENO)) < 0)
        st = bl_fail_errno(BL_EIO, "stdin");
    if (st == BL_OK) st = begin_decoder(s);
    if (st == BL_OK)
        *out = s;
    else
        bl_source_close(s);
    return st;
}

void bl_source_close(bl_source *source)
{
    if (!source) return;
    if (source->kind == GZIP) inflateEnd(&source->gzip);
    ZSTD_freeDStream(source->zstd);
    if (source->fd >= 0) close(source->fd);
    free(source);
}

bool bl_source_is_plain(const bl_source *source)
{
    return source->kind == PLAIN && !source->is_stream;
}

static bl_status read_plain(bl_source *s, char *dst, size_t n_bytes, size_t *n_read)
{
    if (s->at == s->n && !s->at_end) { /* past the decoder's buffer */
        ssize_t n;
        do n = read(s->fd, dst, n_bytes);
        while (n < 0 && errno == EINTR);
        if (n < 0) return bl_fail_errno(BL_EIO, "read %s", s->path);
        *n_read = (size_t)n;
        s->at_end = n == 0;
        return BL_OK;
    }
    *n_read = s->n - s->at < n_bytes ? s->n - s->at : n_bytes;
    memcpy(dst, s->in + s->at, *n_read);
    s->at += *n_read;
    return BL_OK;
}

static bl_status fail_damaged(const bl_source *s, const char *why)
{
    return BL_FAIL(BL_EINPUT, "%s: damaged %s data: %s", s->path,
                   s->kind == GZIP ? "gzip" : "Zstandard", why);
}

/* A member's end is the file's, or another member follows. */
static bl_status decode_gzip(bl_source *s, char *dst, size_t n_bytes, size_t *n_made)
{
    if (!s->is_inside && inflateReset(&s->gzip) != Z_OK) return fail_damaged(s, "zlib");
    s->gzip.next_in = s->in + s->at;
    s->gzip.avail_in = (uInt)(s->n - s->at);
    s->gzip.next_out = (unsigned char *)dst;
    s->gzip.avail_out = (uInt)n_bytes;
    int result = inflate(&s->gzip, Z_NO_FLUSH);
    s->at = s->n - s->gzip.avail_in;
    *n_made = n_bytes - s->gzip.avail_out;
    s->is_inside = result != Z_STREAM_END;
    if (result == Z_MEM_ERROR) return BL_FAIL(BL_ENOMEM, "%s: gzip decoder", s->path);
    if (result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR) return BL_OK;
    return fail_damaged(s, s->gzip.msg ? s->gzip.msg : "zlib");
}

static bl_status decode_zstd(bl_source *s, char *dst, size_t n_bytes, size_t *n_made)
{
    ZSTD_inBuffer in = {s->in, s->n, s->at};
    ZSTD_outBuffer out = {dst, n_bytes, 0};
    size_t result = ZSTD_decompressStream(s->zstd, &out, &in);

    s->at = in.pos;
    *n_made = out.pos;
    if (ZSTD_isError(result)) return fail_damaged(s, ZSTD_getErrorName(result));
    s->is_inside = result != 0;
    return BL_OK;
}

bl_status bl_source_read(bl_source *source, char *dst, size_t n_bytes, size_t *n_read)
{
    enum { MOST_BYTES = 1 << 30 }; /* zlib counts in unsigned int */

    *n_read = 0;
    if (source->kind == PLAIN) return read_plain(source, dst, n_bytes, n_read);
    if (n_bytes > MOST_BYTES) n_bytes = MOST_BYTES;
    for (;;) {
        if (source->at == source->n && !source->at_end) BL_TRY(fill(source));
        size_t before = source->at;
        bool is_done = source->at == source->n && !source->is_inside;
        if (is_done && source->at_end) return BL_OK;
        BL_TRY(source->kind == GZIP ? decode_gzip(source, dst, n_bytes, n_read)
                                    : decode_zstd(source, dst, n_bytes, n_read));
        if (*n_read > 0) return BL_OK;
        if (source->at == before && source->at == source->n && source->at_end && source->is_inside)
            return fail_damaged(source, "it ends early");
    }
}
