/* SPDX-License-Identifier: Apache-2.0 */
/* units.c -- moments and gradients of a rank's rows, each one array over all units. */
#include "adapter/units_internal.h"

#include <stdlib.h>

enum { FLOAT = sizeof(float) };

struct adapter_units {
    bl_device *device;
    const bl_base_layout *layout;
    float *array[ADAPTER_N_ARRAYS]; /* [layout->shard_bytes]; that of the weights is the base's */
    int64_t embedding_bytes;
    float *embedding; /* gradients; NULL: not tied */
};

static bl_status allocate(adapter_units *units)
{
    static const char *const names[ADAPTER_N_ARRAYS] = {"AdamW first moments",
                                                        "AdamW second moments", NULL, "gradients"};

    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        if (names[i])
            BL_TRY(bl_device_alloc(units->device, BL_SPACE_DEVICE, units->layout->shard_bytes,
                                   names[i], (void **)&units->array[i]));
    if (units->embedding_bytes == 0) return BL_OK;
    return bl_device_alloc(units->device, BL_SPACE_DEVICE, (size_t)units->embedding_bytes,
                           "the embedding's gradients", (void **)&units->embedding);
}

bl_status adapter_units_create(bl_device *device, const bl_base_layout *layout, float *weights,
                               int64_t embedding_bytes, adapter_units **out)
{
    adapter_units *units = calloc(1, sizeof *units);

    *out = NULL;
    if (!units) return BL_FAIL(BL_ENOMEM, "the optimizer's state");
    *units =
        (adapter_units){.device = device, .layout = layout, .embedding_bytes = embedding_bytes};
    units->array[ADAPTER_W] = weights;
    bl_status st = allocate(units);
    if (st != BL_OK) {
        adapter_units_destroy(units);
        return st;
    }
    *out = units;
    return BL_OK;
}

void adapter_units_destroy(adapter_units *units)
{
    if (!units) return;
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        if (i != ADAPTER_W) bl_device_free(units->device, BL_SPACE_DEVICE, units->array[i]);
    bl_device_free(units->device, BL_SPACE_DEVICE, units->embedding);
    free(units);
}

bl_status adapter_units_open(adapter_units *units, int64_t unit, bl_stream *stream,
                             adapter_unit *out)
{
    (void)stream;
    *out = (adapter_unit){.n_floats = units->embedding_bytes / FLOAT};
    if (unit == units->layout->n_units) {
        out->array[ADAPTER_GRAD] = units->embedding;
        return BL_OK;
    }
    const bl_base_unit *u = &units->layout->units[unit];
    out->n_floats = (int64_t)u->shard_bytes / FLOAT;
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++) out->array[i] = units->array[i] + u->offset / FLOAT;
    return BL_OK;
}

bl_status adapter_units_close(adapter_units *units, int64_t unit, bl_stream *stream)
{
    (void)units, (void)unit, (void)stream;
    return BL_OK;
}
