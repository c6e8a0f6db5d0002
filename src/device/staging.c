/* SPDX-License-Identifier: Apache-2.0 */
/* staging.c -- twins (a pinned copy of a piece of device memory) and staging (pieces through a
 * pinned buffer), with bounds checked. */
#include "device/staging.h"

#include <stdlib.h>
#include <string.h>

/* ---- twins ---- */

bl_status bl_twin_create(bl_device *device, size_t n_bytes, const char *what, bl_twin **out)
{
    *out = NULL;
    bl_twin *twin = calloc(1, sizeof *twin);
    if (!twin) return BL_FAIL(BL_ENOMEM, "%s", what);
    *twin = (bl_twin){.device = device, .n_bytes = n_bytes};
    bl_status st = bl_device_alloc(device, BL_SPACE_DEVICE, n_bytes, what, &twin->memory);
    if (st == BL_OK) st = bl_device_alloc(device, BL_SPACE_HOST, n_bytes, what, &twin->host);
    if (st == BL_OK)
        *out = twin;
    else
        bl_twin_destroy(twin);
    return st;
}

void bl_twin_destroy(bl_twin *twin)
{
    if (!twin) return;
    bl_device_free(twin->device, BL_SPACE_DEVICE, twin->memory);
    bl_device_free(twin->device, BL_SPACE_HOST, twin->host);
    free(twin);
}

static bl_status check_range(const bl_twin *twin, size_t offset, size_t n_bytes)
{
    if (offset <= twin->n_bytes && n_bytes <= twin->n_bytes - offset) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "a copy of %zu bytes at %zu of %zu", n_bytes, offset,
                   twin->n_bytes);
}

bl_status bl_twin_upload(bl_twin *twin, bl_stream *stream, size_t offset, size_t n_bytes)
{
    BL_TRY(check_range(twin, offset, n_bytes));
    return bl_stream_copy(stream, (char *)twin->memory + offset, (char *)twin->host + offset,
                          n_bytes);
}

bl_status bl_twin_download(bl_twin *twin, bl_stream *stream, size_t offset, size_t n_bytes)
{
    BL_TRY(check_range(twin, offset, n_bytes));
    return bl_stream_copy(stream, (char *)twin->host + offset, (char *)twin->memory + offset,
                          n_bytes);
}

/* ---- staging ---- */

bl_status bl_staging_create(bl_device *device, size_t n_bytes, const char *what, bl_staging **out)
{
    *out = NULL;
    if (n_bytes == 0) return BL_FAIL(BL_EINTERNAL, "%s: an empty staging buffer", what);
    bl_staging *s = calloc(1, sizeof *s);
    if (!s) return BL_FAIL(BL_ENOMEM, "%s", what);
    *s = (bl_staging){.device = device, .n_bytes = n_bytes};
    bl_status st = bl_device_alloc(device, BL_SPACE_HOST, n_bytes, what, &s->bytes);
    if (st == BL_OK) st = bl_stream_create(device, "staging", &s->stream);
    if (st == BL_OK)
        *out = s;
    else
        bl_staging_destroy(s);
    return st;
}

void bl_staging_destroy(bl_staging *s)
{
    if (!s) return;
    bl_stream_destroy(s->stream);
    bl_device_free(s->device, BL_SPACE_HOST, s->bytes);
    free(s);
}

/* The next piece of `left` bytes. */
static size_t piece_bytes(const bl_staging *s, size_t left)
{
    return left < s->n_bytes ? left : s->n_bytes;
}

/* In any case the buffer is the caller's again. */
static bl_status copy_now(bl_staging *s, void *to, const void *from, size_t n_bytes)
{
    bl_status st = bl_stream_copy(s->stream, to, from, n_bytes);
    bl_status synced = bl_stream_synchronize(s->stream);
    return st != BL_OK ? st : synced;
}

/* Whether `host` is part of the buffer: BL_EINTERNAL if not all of the n_bytes are. */
static bl_status find_own(const bl_staging *s, const void *host, size_t n_bytes, bool *is_own)
{
    uintptr_t begin = (uintptr_t)s->bytes, at = (uintptr_t)host;

    *is_own = at >= begin && at < begin + s->n_bytes;
    if (!*is_own || n_bytes <= begin + s->n_bytes - at) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "%zu bytes at %zu of a staging buffer of %zu", n_bytes,
                   (size_t)(at - begin), s->n_bytes);
}

bl_status bl_staging_upload(bl_staging *s, void *memory, const void *host, size_t n_bytes)
{
    bool is_own;

    BL_TRY(find_own(s, host, n_bytes, &is_own));
    if (is_own) return copy_now(s, memory, host, n_bytes);
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = piece_bytes(s, n_bytes - at);
        memcpy(s->bytes, (const char *)host + at, n);
        BL_TRY(copy_now(s, (char *)memory + at, s->bytes, n));
    }
    return BL_OK;
}

bl_status bl_staging_download(bl_staging *s, void *host, const void *memory, size_t n_bytes)
{
    bool is_own;

    BL_TRY(find_own(s, host, n_bytes, &is_own));
    if (is_own) return copy_now(s, host, memory, n_bytes);
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = piece_bytes(s, n_bytes - at);
        BL_TRY(copy_now(s, s->bytes, (const char *)memory + at, n));
        memcpy((char *)host + at, s->bytes, n);
    }
    return BL_OK;
}
