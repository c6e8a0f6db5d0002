/* SPDX-License-Identifier: Apache-2.0 */
/* base_resident.c -- the whole base in this rank's device memory: nothing moves. */
#include "linear/base_backend.h"

#include <stdlib.h>

typedef struct base_resident {
    bl_base base;
    const char *shards;
} base_resident;

static bl_status resident_prefetch(bl_base *base, int64_t unit)
{
    (void)base, (void)unit;
    return BL_OK;
}

static bl_status resident_acquire(bl_base *base, int64_t unit, int matrix, bl_stream *stream,
                                  bl_weight *out)
{
    const base_resident *self = (const base_resident *)base;
    const bl_base_unit *u = &base->layout->units[unit];
    const bl_base_matrix *m = &u->matrix[matrix];
    const void *codes[BL_BASE_SEGMENTS];

    (void)stream;
    for (int p = 0; p < m->n_parts; p++)
        codes[p] = self->shards + u->offset + m->part[p].shard_offset;
    bl_base_fill_weight(m, codes, out);
    return BL_OK;
}

static bl_status resident_release(bl_base *base, int64_t unit, bl_stream *stream)
{
    (void)base, (void)unit, (void)stream;
    return BL_OK;
}

static void resident_destroy(bl_base *base)
{
    free(base);
}

bl_status bl_base_create_resident(const bl_base_layout *layout, const void *shards, bl_base **out)
{
    static const bl_base_ops ops = {.prefetch = resident_prefetch,
                                    .acquire = resident_acquire,
                                    .release = resident_release,
                                    .destroy = resident_destroy};

    *out = NULL;
    if (layout->n_shards != 1)
        return BL_FAIL(BL_EINTERNAL, "a resident base has one shard, not %d", layout->n_shards);
    base_resident *self = calloc(1, sizeof *self);
    if (!self) return BL_FAIL(BL_ENOMEM, "resident base");
    self->base = (bl_base){&ops, layout};
    self->shards = shards;
    *out = &self->base;
    return BL_OK;
}
