/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a template and of a rendering: chunks that are freed together. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"

enum { CHUNK_BYTES = 1 << 14, ALIGNMENT = 16 };

typedef struct jinja_chunk {
    struct jinja_chunk *next;
    size_t used, capacity;
    _Alignas(ALIGNMENT) char bytes[];
} jinja_chunk;

static bl_status fail_limit(const jinja_arena *arena)
{
    return BL_FAIL(BL_EINPUT, "%s: more than %zu MiB of values", arena->title, arena->limit >> 20);
}

static bl_status add_chunk(jinja_arena *arena, size_t n_bytes)
{
    size_t capacity = (size_t)bl_max_i64((int64_t)n_bytes, CHUNK_BYTES);

    if (n_bytes > arena->limit || arena->used > arena->limit - n_bytes) return fail_limit(arena);
    /* zeroed by calloc: a large chunk's pages are touched when used */
    jinja_chunk *chunk = calloc(1, sizeof *chunk + capacity);
    if (!chunk) return BL_FAIL(BL_ENOMEM, "chat template: values");
    chunk->capacity = capacity;
    chunk->next = arena->chunk;
    arena->chunk = chunk;
    arena->used += capacity;
    return BL_OK;
}

bl_status jinja_new(jinja_arena *arena, size_t n_bytes, void *out)
{
    if (n_bytes > arena->limit) return fail_limit(arena);
    n_bytes = (n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!arena->chunk || arena->chunk->capacity - arena->chunk->used < n_bytes)
        BL_TRY(add_chunk(arena, n_bytes));
    *(void **)out = arena->chunk->bytes + arena->chunk->used;
    arena->chunk->used += n_bytes;
    return BL_OK;
}

void jinja_arena_free(jinja_arena *arena)
{
    while (arena->chunk) {
        jinja_chunk *next = arena->chunk->next;
        free(arena->chunk);
        arena->chunk = next;
    }
    arena->used = 0;
}

bl_status jinja_append(jinja_arena *arena, jinja_buffer *buffer, const char *text, size_t n_bytes)
{
    if (buffer->capacity - buffer->n < n_bytes) {
        size_t capacity = 2 * (buffer->n + n_bytes) + 64;
        char *grown;
        if (buffer->n > BL_JINJA_MAX_OUTPUT_BYTES - n_bytes || n_bytes > BL_JINJA_MAX_OUTPUT_BYTES)
            return BL_FAIL(BL_EINPUT, "%s: a text of more than %d MiB", arena->title,
                           BL_JINJA_MAX_OUTPUT_BYTES >> 20);
        BL_TRY(jinja_new(arena, capacity, &grown));
        if (buffer->n) memcpy(grown, buffer->text, buffer->n);
        buffer->text = grown;
        buffer->capacity = capacity;
    }
    if (n_bytes) memcpy(buffer->text + buffer->n, text, n_bytes);
    buffer->n += n_bytes;
    return BL_OK;
}

bl_status jinja_append_code(jinja_arena *arena, jinja_buffer *buffer, uint32_t code)
{
    char utf8[4];
    size_t n = 0;

    if (code < 0x80) {
        utf8[n++] = (char)code;
    } else if (code < 0x800) {
        utf8[n++] = (char)(0xc0 | code >> 6);
        utf8[n++] = (char)(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        utf8[n++] = (char)(0xe0 | code >> 12);
        utf8[n++] = (char)(0x80 | (code >> 6 & 0x3f));
        utf8[n++] = (char)(0x80 | (code & 0x3f));
    } else {
        utf8[n++] = (char)(0xf0 | code >> 18);
        utf8[n++] = (char)(0x80 | (code >> 12 & 0x3f));
        utf8[n++] = (char)(0x80 | (code >> 6 & 0x3f));
        utf8[n++] = (char)(0x80 | (code & 0x3f));
    }
    return jinja_append(arena, buffer, utf8, n);
}
